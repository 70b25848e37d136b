"""Opens a checkpoint as a model of our own where we compute its family, else as transformers' module graph."""

from __future__ import annotations

from moelight.profiles.families import FAMILIES, profile_from_dir
from moelight.profiles.hf_config import HFConfig
from moelight.profiles.model import not_computed
from moelight.weights.source import resolve_model
from moelight.weights.tensor_map import OpenCheckpoint, open_checkpoint


def open_model(model: str) -> OpenCheckpoint:
    """Find ``model`` and audit it: every tensor present, of the right shape, none left over.

    Raises:
        CheckpointError: the model is missing, or its files are not as its config asks for them.
        ConfigError: nobody computes its family, or transformers is missing.
    """
    directory = resolve_model(model)
    config = HFConfig.from_file(directory / "config.json")
    model_type = config.find("model_type")
    ours = isinstance(model_type, str) and model_type in FAMILIES
    if ours and not not_computed(profile_from_dir(directory)):
        return open_checkpoint(model)
    from moelight.models.graph.checkpoint import open_graph

    config.refuse_quantised()
    return open_graph(directory)
