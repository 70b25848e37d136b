"""Profiles of checkpoints of any family. Does not import torch unless a module graph is built."""

from __future__ import annotations

from pathlib import Path

from moelight.models.graph.profile import profile_of_directory
from moelight.profiles.gguf_choice import GGUF
from moelight.profiles.model import ModelProfile


def profile_of_checkpoint(path: Path) -> ModelProfile:
    """The profile of a directory or a GGUF file by its module graph: a reader for `load_model_profile`.

    Raises:
        ConfigError: transformers is missing or does not know the family, or the graph is not served.
    """
    if path.suffix != GGUF:
        return profile_of_directory(path)
    from moelight.models.graph.gguf import profile_of_file

    return profile_of_file(path)
