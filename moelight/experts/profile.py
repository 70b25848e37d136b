"""Activation profiles: how often each expert of each layer was chosen; counted, merged, compared, saved and read. A
fingerprint of plain values, given by the caller, identifies the model."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from moelight.core.errors import ConfigError, did_you_mean
from moelight.core.paths import write_whole
from moelight.core.small_files import parse_json, read_error_text, read_text
from moelight.core.units import MiB
from moelight.experts.eviction import FloatArray, IntArray
from moelight.experts.predict import Transitions, likeliest

Facts = Mapping[str, str | int | float | bool | None]
_LEAST = np.finfo(np.float64).tiny  # avoids 0 / 0


def facts_of_model(
    *, model_type: str, moe_layers: int, num_experts: int, top_k: int | None, expert_numbers: int
) -> Facts:
    """Return the values that identify a model, equal whether read from its configuration or its modules."""
    return {
        "type": model_type,
        "moe_layers": moe_layers,
        "experts": num_experts,
        "top_k": top_k,
        "expert_numbers": expert_numbers,
    }


def fingerprint_of(model: Facts) -> str:
    """Return the fingerprint of a model's plain values, independent of their order."""
    return hashlib.sha256(json.dumps(dict(model), sort_keys=True).encode()).hexdigest()[:32]


@dataclass(frozen=True, kw_only=True, slots=True)
class Distance:
    """Distance of two profiles, per layer.

    Attributes:
        total_variation: [L], half the sum of the differences of shares: 0 for equal, 1 for disjoint profiles.
        overlap: [L], the share of the ``top`` most used experts that both profiles have.
    """

    top: int
    total_variation: FloatArray
    overlap: FloatArray


class ActivationProfile:
    """Tokens that chose each expert of each layer, ``counts`` [L, E] float64, with exponential decay: ``half_life``
    accesses (distinct experts of a batch) halve the weight of earlier counts. None: no decay, and counts are integers.
    """

    def __init__(self, *, model: Facts, num_layers: int, num_experts: int, half_life: float | None = None) -> None:
        if half_life is not None and not half_life > 0:
            raise ConfigError(f"half_life must be above 0 accesses, not {half_life}")
        self.model = dict(model)
        self.num_layers, self.num_experts, self.half_life = num_layers, num_experts, half_life
        self.accesses = 0
        self.counts: FloatArray = np.zeros((num_layers, num_experts))
        self.transitions: Transitions | None = None

    @property
    def fingerprint(self) -> str:
        return fingerprint_of(self.model)

    def record(self, layer: int, ids: IntArray, counts: IntArray) -> None:
        """Count a batch that chose the distinct ``ids`` [n] of ``layer`` for ``counts`` [n] tokens each."""
        self.accesses += len(ids)
        if self.half_life is not None:
            self.counts *= 0.5 ** (len(ids) / self.half_life)
        self.counts[layer, ids] += counts

    def add(self, counts: FloatArray | IntArray, accesses: int) -> None:
        """Add ``counts`` [L, E] of ``accesses`` from another profile, without decay."""
        self.counts += counts
        self.accesses += accesses

    def residents(self, capacity: int | IntArray) -> IntArray:
        """Return the initial residents: ``(layer, expert)`` [<= capacity, 2], highest priority first. ``capacity``:
        slots of each layer, [L]; or slots that all layers share, filled rank by rank (each layer's most used expert
        before any layer's second), within a rank by count."""
        rank = np.argsort(np.argsort(-self.counts, axis=1, kind="stable"), axis=1)
        room = self.num_experts if isinstance(capacity, int) else capacity[:, None]
        ranked = np.argwhere((self.counts > 0) & (rank < room))
        layers, experts = ranked.T
        ranked = ranked[np.lexsort((-self.counts[layers, experts], rank[layers, experts]))]
        return ranked[:capacity] if isinstance(capacity, int) else ranked

    def distance(self, other: ActivationProfile, top: int) -> Distance:
        """Distance to ``other``, of the same shape, by shares and by the ``top`` most used experts of each layer; 1 if
        one of two layers has no counts, 0 if both have none."""
        _same_shape(self, other)
        totals = [profile.counts.sum(axis=1, keepdims=True) for profile in (self, other)]
        shares, others = self.counts / np.maximum(totals[0], _LEAST), other.counts / np.maximum(totals[1], _LEAST)
        apart = np.abs(shares - others).sum(axis=1) / 2.0
        uncounted = ((totals[0] == 0) != (totals[1] == 0))[:, 0]
        overlap = np.ones(self.num_layers)
        for layer in range(self.num_layers):
            a, b = (likeliest(profile.counts[layer], top) for profile in (self, other))
            if len(a) or len(b):
                overlap[layer] = len(np.intersect1d(a, b)) / max(len(a), len(b))
        return Distance(top=top, total_variation=np.where(uncounted, 1.0, apart), overlap=overlap)


def merge(profiles: Sequence[ActivationProfile]) -> ActivationProfile:
    """Return the summed ``profiles`` of one model; transitions are averaged, weighted by their observations."""
    if not profiles:
        raise ConfigError("no expert profile to merge; give at least one")
    first = profiles[0]
    merged = ActivationProfile(
        model=first.model, num_layers=first.num_layers, num_experts=first.num_experts, half_life=first.half_life
    )
    for profile in profiles:
        if profile.fingerprint != first.fingerprint:
            raise ConfigError(f"expert profiles of different models{differing(first.model, profile.model)}")
        _same_shape(first, profile)
        merged.add(profile.counts, profile.accesses)
    learned = [profile.transitions for profile in profiles if profile.transitions is not None]
    if learned:
        times = np.sum([transitions.times for transitions in learned], axis=0)
        weighted = np.sum([transitions.matrix * transitions.times[:, :, None] for transitions in learned], axis=0)
        matrix = (weighted / np.maximum(times, 1)[:, :, None]).astype(np.float32)
        merged.transitions = Transitions(matrix=matrix, times=times)
    return merged


def differing(here: Facts, other: Facts) -> str:
    """Return the first values in which two models differ, such as ``" (hidden_size 64 and 128)"``, or ""."""
    keys = [key for key in sorted({*here, *other}) if here.get(key) != other.get(key)]
    shown = ", ".join(f"{key} {here.get(key)} and {other.get(key)}" for key in keys[:3])
    return f" ({shown})" if shown else ""


def _same_shape(one: ActivationProfile, other: ActivationProfile) -> None:
    if (one.num_layers, one.num_experts) != (other.num_layers, other.num_experts):
        raise ConfigError(
            f"expert profiles of different shape: {one.num_layers} layers x {one.num_experts} experts and "
            f"{other.num_layers} x {other.num_experts}"
        )


FORMAT = "moelight expert profile 1"
_REQUIRED = ("format", "fingerprint", "num_layers", "num_experts", "counts")
_KNOWN = (*_REQUIRED, "model", "half_life", "accesses", "affinity")
_UNIT = 10_000  # of a probability: finer than the learning error, and a zero takes two characters
_MOST_BYTES = 256 * MiB  # enough for 128 layers of 512 experts with affinities
_ANEW = "make a new one with --save-expert-profile"


def save_profile(profile: ActivationProfile, path: Path) -> None:
    """Write ``profile`` to ``path`` atomically."""
    counts = profile.counts
    integral = profile.half_life is None and bool(np.all(counts == np.rint(counts)))
    content: dict[str, Any] = {
        "format": FORMAT,
        "fingerprint": profile.fingerprint,
        "model": profile.model,
        "num_layers": profile.num_layers,
        "num_experts": profile.num_experts,
        "half_life": profile.half_life,
        "accesses": profile.accesses,
        "counts": counts.astype(np.int64).tolist() if integral else counts.tolist(),
    }
    if (learned := profile.transitions) is not None:
        shares = np.rint(learned.matrix * np.float32(_UNIT)).astype(np.int64)
        content["affinity"] = {"times": learned.times.tolist(), "per_10000": shares.tolist()}
    try:
        write_whole(path, json.dumps(content, separators=(",", ":")) + "\n")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written ({error.strerror or error})") from None


def load_profile(
    path: Path, *, model: Facts, num_layers: int, num_experts: int, half_life: float | None = None
) -> ActivationProfile:
    """Read a profile counted on this model, else raise ConfigError; further counts decay with ``half_life``."""
    content = _read(path)
    if content["format"] != FORMAT:
        _refuse(path, "format", f"is {_shown(content['format'])}, not {FORMAT!r}")
    if content["fingerprint"] != fingerprint_of(model):
        counted = content.get("model")
        apart = differing(counted, model) if isinstance(counted, dict) else ""
        _refuse(path, "fingerprint", f"is of another model{apart}", "give a profile of this one or none")
    for key, wanted in (("num_layers", num_layers), ("num_experts", num_experts)):
        if content[key] != wanted:
            _refuse(path, key, f"is {_shown(content[key])} but the model has {wanted}")
    profile = ActivationProfile(model=model, num_layers=num_layers, num_experts=num_experts, half_life=half_life)
    counts = _numbers(path, "counts", content["counts"], (num_layers, num_experts))
    accesses = content.get("accesses", 0)
    if type(accesses) is not int or accesses < 0:
        _refuse(path, "accesses", f"must be a whole number of at least 0, not {_shown(accesses)}")
    profile.add(counts, accesses)
    if (learned := content.get("affinity")) is not None:
        profile.transitions = _transitions(path, learned, num_layers, num_experts)
    return profile


def _transitions(path: Path, content: Any, layers: int, experts: int) -> Transitions:
    if not isinstance(content, dict) or set(content) != {"times", "per_10000"}:
        _refuse(path, "affinity", "must have the keys 'times' and 'per_10000' and no other")
    times = _numbers(path, "affinity.times", content["times"], (layers, experts))
    shares = _numbers(path, "affinity.per_10000", content["per_10000"], (layers, experts, experts))
    if shares.max(initial=0) > _UNIT:
        _refuse(path, "affinity.per_10000", f"holds {shares.max():g}, above {_UNIT}")
    return Transitions(matrix=(shares / _UNIT).astype(np.float32), times=times.astype(np.int64))


def _read(path: Path) -> dict[str, Any]:
    """Return the object in ``path``, with all required keys and no unknown ones."""

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        names = [name for name, _ in pairs]
        if len(set(names)) < len(names):
            _refuse(path, next(name for name in names if names.count(name) > 1), "is given twice", "keep one")
        return dict(pairs)

    try:
        content = parse_json(read_text(path, max_bytes=_MOST_BYTES), pairs=once)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({read_error_text(error)})") from None
    except json.JSONDecodeError as error:
        raise ConfigError(f"{path}:{error.lineno}: not JSON ({error.msg}); {_ANEW}") from None
    except ValueError as error:
        raise ConfigError(f"{path}: not JSON in UTF-8 ({error}); {_ANEW}") from None
    if not isinstance(content, dict):
        raise ConfigError(f"{path}: must be a JSON object, not {_shown(content)}; {_ANEW}")
    for key in content:
        if key not in _KNOWN:
            _refuse(path, key, f"is unknown{did_you_mean(key, _KNOWN)}", f"known: {', '.join(_KNOWN)}")
    for key in _REQUIRED:
        if key not in content:
            _refuse(path, key, "is missing")
    return content


def _numbers(path: Path, key: str, value: Any, shape: tuple[int, ...]) -> FloatArray:
    """Return ``value`` as finite non-negative numbers, float64 of the given ``shape``."""
    try:
        array = np.array(value)
    except ValueError:  # rows of different lengths
        array = np.array(None)
    if array.dtype.kind not in "iuf" or array.shape != shape:
        _refuse(path, key, f"must be {' x '.join(map(str, shape))} numbers")
    if not np.all(np.isfinite(array)) or array.min(initial=0) < 0:
        _refuse(path, key, "must be finite numbers of at least 0")
    return array.astype(np.float64)


def _shown(value: Any) -> str:
    return repr(value)[:60]


def _refuse(path: Path, key: str, complaint: str, remedy: str = _ANEW) -> NoReturn:
    raise ConfigError(f"{path}: key {key!r} {complaint}; {remedy}")
