"""A model as the engine opens it: its directory, its profile, and the location of each tensor."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from moelight.profiles.families import profile_from_dir
from moelight.profiles.model import ModelProfile, require_computable
from moelight.weights.source import Checkpoint, resolve_model
from moelight.weights.tensor_map import WeightMap, locate


@dataclass(frozen=True, kw_only=True, slots=True)
class OpenCheckpoint:
    """An audited checkpoint; none of its weights are loaded yet."""

    directory: Path
    profile: ModelProfile
    weight_map: WeightMap


def open_checkpoint(model: str) -> OpenCheckpoint:
    """Find ``model`` and audit it: every tensor present, of the right shape, none left over; else CheckpointError."""
    directory = resolve_model(model)
    profile = profile_from_dir(directory)
    require_computable(profile, where=str(directory / "config.json"))
    return OpenCheckpoint(directory=directory, profile=profile, weight_map=locate(Checkpoint.open(directory), profile))
