"""Which families of the installed transformers run, and which not, with the reason. Does not compute."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moelight.core.errors import ConfigError, did_you_mean, quoted
from moelight.models.graph import family_table
from moelight.models.graph.families import OUTSIDE, OWN_EXPERTS
from moelight.models.graph.family_table import Family, Table
from moelight.models.graph.imports import transformers_of_graphs
from moelight.models.graph.model import (
    GraphModel,
    MixerKind,
    language_model,
    on_meta,
    read_config,
)
from moelight.models.graph.profile import profile_of
from moelight.models.graph.self_test import tiny
from moelight.profiles.families import FAMILIES, profile_from_config
from moelight.profiles.files import profile_names
from moelight.profiles.hf_config import HFConfig
from moelight.profiles.model import ModelProfile, not_computed
from moelight.profiles.model_files import model_config
from moelight.profiles.quantization import read_quantization

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_DECORATED = re.compile(r"^@use_experts_implementation\b", re.MULTILINE)


@dataclass(frozen=True, kw_only=True)
class Support:
    """How models of one config are executed.

    Attributes:
        model_type: of the config.
        how: "native" where moelight has a decoder of its own; "graph"; "opaque" if transformers' own cache serves the
            attention of some layers, one sequence at a time; None: not at all.
        reason: why not, in words; None if they run.
        mixers: the kinds of mixers, as of `MixerKind`, in the order in which they come first.
        profile: what the layers store and keep; None if the models do not run.
    """

    model_type: str
    how: str | None
    reason: str | None = None
    mixers: tuple[str, ...] = ()
    profile: ModelProfile | None = field(default=None, repr=False)

    @property
    def refused(self) -> tuple[str, ...]:
        """Return descriptions of the features that these models do not support."""
        result = []
        if self.profile is not None and self.profile.stateful:
            result.append("shared prefixes of prompts: the state after a prefix belongs to one sequence")
        if self.how != "native":
            result.append("a bfloat16 checkpoint computed in float16, as cards without bfloat16 do: asks for float32")
            result.append("CUDA graphs of small passes")
        return tuple(result)


def support(config: PretrainedConfig) -> Support:
    """Return how models of ``config`` are executed, from a dry run of the graph on the meta device with the config's
    sizes."""
    name = config.model_type
    values = HFConfig(config.to_dict(), where=name)
    try:
        read_quantization(values)
        if name in FAMILIES and not not_computed(profile := profile_from_config(values, name=name)):
            return Support(model_type=name, how="native", mixers=("attention",), profile=profile)
        graph = GraphModel(on_meta(config))
        profile = profile_of(graph, name=name, where=name)
        refuse_unserved(profile, where=name)
    except ConfigError as error:
        return Support(model_type=name, how=None, reason=str(error).removeprefix(f"{name}: "))
    how = "opaque" if MixerKind.OPAQUE in graph.mixers else "graph"
    mixers = tuple(dict.fromkeys(mixer.value for mixer in graph.mixers))
    return Support(model_type=name, how=how, mixers=mixers, profile=profile)


def find_config(model: str) -> PretrainedConfig:
    """The config of a directory, of a ``config.json``, of a family as of the table, of a named model, or of a
    ``model_type`` with the defaults of transformers; raises ConfigError."""
    transformers = transformers_of_graphs()
    path = Path(model)
    if path.name == "config.json" or path.is_dir() or path.name != model:
        return read_config(path.parent if path.name == "config.json" else path)
    rows = {family.name: family for family in Table.read().families}
    types = {kind: family for family in rows.values() for kind in family.types}
    row, named = rows.get(model) or types.get(model), profile_names("model")
    values = model_config(model) if row is None and model in named else None
    if values is not None and values["model_type"] not in transformers.CONFIG_MAPPING:
        raise ConfigError(
            f"{model}: transformers {transformers.__version__} has no family {values['model_type']!r}; plans are made "
            "for it, and it does not run"
        )
    try:
        if row is not None:
            kind = row.model_type if model == row.name else model
            return transformers.AutoConfig.for_model(kind, **(row.switches if kind == row.model_type else {}))
        if values is not None:
            return transformers.AutoConfig.for_model(**values)
        if model in transformers.CONFIG_MAPPING:
            return transformers.AutoConfig.for_model(model)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{model}: transformers {transformers.__version__} has no such config: {error}") from None
    near = did_you_mean(model, [*rows, *types, *named])
    raise ConfigError(f"no model {quoted(model)}: neither a directory nor a family of transformers{near}")


def refuse_unserved(profile: ModelProfile, *, where: str) -> None:
    """Raise ConfigError, naming the file ``where``, if graphs of ``profile`` are planned for and not computed."""
    if profile.experts.input_size is not None:
        raise ConfigError(
            f"{where}: {profile.model_type}: experts of inputs of {profile.experts.input_size} numbers beside hidden "
            f"states of {profile.hidden_size} are not computed"
        )


def judge_families() -> Table:
    """The table of the installed transformers by dry runs of tiny models, which take a minute; kept."""
    measured = {family.name: family for family in Table.read().families}
    families = []
    for name, model_type in moe_families().items():
        switches = measured[name].switches if name in measured else {}
        families.append(judge_family(name, model_type, switches))
    return family_table.keep(families)


def judge_family(name: str, model_type: str, switches: Any) -> Family:
    """The family ``name`` by a dry run of a tiny model of ``model_type``."""
    from transformers import AutoConfig

    try:
        config = AutoConfig.for_model(model_type, **switches)
        result = support(tiny(config))
        result = support(config) if result.how is None else result  # the reason names the true sizes
    except (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError) as error:  # a config of defaults
        reason = f"the defaults of its config make no model: {(str(error).splitlines() or [''])[0]}"
        result = Support(model_type=model_type, how=None, reason=reason)
    return Family(
        name=name,
        types=tuple(_types(name)),
        model_type=model_type,
        how=result.how,
        reason=result.reason,
        mixers=result.mixers,
        switches=switches,
    )


@functools.cache
def moe_families() -> Mapping[str, str]:
    """The families of the installed transformers that have experts, by the name of their folder, and of each the
    ``model_type`` of its language model; of a family without one, its first."""
    transformers = transformers_of_graphs()
    families = {}
    for folder in sorted(_folders(Path(transformers.__file__).parent / "models")):
        types = _types(folder)
        text = [
            model_type for model_type in types if model_type != folder
        ]  # of a family that sees too, the text model's
        families[folder] = folder if folder in types else text[0]
    return families


def _types(folder: str) -> list[str]:
    """Every ``model_type`` of a language model in ``folder``; without one, the first of a config."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING, model_type_to_module_name

    types = [model_type for model_type in CONFIG_MAPPING if model_type_to_module_name(model_type) == folder]
    return [model_type for model_type in types if language_model(CONFIG_MAPPING[model_type]) is not None] or types[:1]


def _folders(models: Path) -> Iterator[str]:
    """Folders whose models have experts."""
    classes = re.compile(rf"^class (?:{'|'.join((*OUTSIDE, *OWN_EXPERTS))})\(", re.MULTILINE)
    for path in models.glob("*/modeling_*.py"):
        source = path.read_text(encoding="utf-8")
        if path.stem == f"modeling_{path.parent.name}" and (_DECORATED.search(source) or classes.search(source)):
            yield path.parent.name
