"""Which families of the installed transformers run as graphs, and which not, with the reason. Does not compute."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from moelight.core.errors import ConfigError
from moelight.models.graph.families import OUTSIDE, OWN_EXPERTS
from moelight.models.graph.model import GraphModel, MixerKind, language_model, on_meta, transformers_of_graphs

if TYPE_CHECKING:
    from transformers import PretrainedConfig

NATIVE = ("mixtral", "olmoe", "qwen3_moe")  # that models/decoder.py computes
_DECORATED = re.compile(r"^@use_experts_implementation\b", re.MULTILINE)


@dataclass(frozen=True, kw_only=True)
class Support:
    """How the models of a config run.

    Attributes:
        model_type: of the config.
        how: "native" where moelight has a decoder of its own; "graph"; "opaque" if transformers' own cache serves the
            attention of some layers; None: not at all.
        reason: why not, in words; None if they run.
    """

    model_type: str
    how: str | None
    reason: str | None = None


def support(config: PretrainedConfig) -> Support:
    """How models of ``config`` run, found by a dry run of the graph on the meta device, of the config's own sizes."""
    if config.model_type in NATIVE:
        return Support(model_type=config.model_type, how="native")
    try:
        mixers = GraphModel(on_meta(config)).mixers
    except ConfigError as error:
        return Support(model_type=config.model_type, how=None, reason=str(error).removeprefix(f"{config.model_type}: "))
    return Support(model_type=config.model_type, how="opaque" if MixerKind.OPAQUE in mixers else "graph")


def moe_families() -> dict[str, str]:
    """The families of the installed transformers that have experts, by the name of their folder, and of each the
    ``model_type`` of its language model; of a family without one, its first."""
    transformers = transformers_of_graphs()
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING, model_type_to_module_name

    families = {}
    for folder in sorted(_folders(Path(transformers.__file__).parent / "models")):
        types = [each for each in CONFIG_MAPPING if model_type_to_module_name(each) == folder]
        models = [each for each in types if language_model(CONFIG_MAPPING[each]) is not None]
        text = [each for each in models if each != folder]  # of a family that sees too, the text model's
        families[folder] = (folder if folder in models else None) or next(iter(text), types[0])
    return families


def _folders(models: Path) -> Iterator[str]:
    """Folders whose models have experts."""
    classes = re.compile(rf"^class (?:{'|'.join((*OUTSIDE, *OWN_EXPERTS))})\(", re.MULTILINE)
    for path in models.glob("*/modeling_*.py"):
        source = path.read_text(encoding="utf-8")
        if path.stem == f"modeling_{path.parent.name}" and (_DECORATED.search(source) or classes.search(source)):
            yield path.parent.name
