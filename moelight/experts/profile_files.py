"""Expert profile files: JSON, written atomically, read strictly.

The keys are ``format``, ``fingerprint``, ``model``, ``num_layers``, ``num_experts``, ``half_life``, ``accesses``,
``counts`` [L][E] and, if transitions were learned, ``affinity``: ``times`` [L][E] and ``per_10000`` [L][E][E].
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from moelight.core.errors import ConfigError, did_you_mean
from moelight.core.paths import write_whole
from moelight.core.small_files import parse_json, read_error_text, read_text
from moelight.core.units import MiB
from moelight.experts.predict import Floats, Transitions
from moelight.experts.profile import ActivationProfile, Facts, differing, fingerprint_of

FORMAT = "moelight expert profile 1"
_REQUIRED = ("format", "fingerprint", "num_layers", "num_experts", "counts")
_KNOWN = (*_REQUIRED, "model", "half_life", "accesses", "affinity")
_UNIT = 10_000  # of a probability: finer than the learning error, and a zero takes two characters
_MOST_BYTES = 256 * MiB  # enough for 128 layers of 512 experts with affinities
_ANEW = "make a new one with --save-expert-profile"


def save_profile(profile: ActivationProfile, path: Path) -> None:
    """Write ``profile`` to ``path`` atomically.

    Raises:
        ConfigError: the file cannot be written.
    """
    counts = profile.counts
    whole = profile.half_life is None and bool(np.all(counts == np.rint(counts)))
    found: dict[str, Any] = {
        "format": FORMAT,
        "fingerprint": profile.fingerprint,
        "model": profile.model,
        "num_layers": profile.num_layers,
        "num_experts": profile.num_experts,
        "half_life": profile.half_life,
        "accesses": profile.accesses,
        "counts": counts.astype(np.int64).tolist() if whole else counts.tolist(),
    }
    if (learned := profile.transitions) is not None:
        shares = np.rint(learned.matrix * np.float32(_UNIT)).astype(np.int64)
        found["affinity"] = {"times": learned.times.tolist(), "per_10000": shares.tolist()}
    try:
        write_whole(path, json.dumps(found, separators=(",", ":")) + "\n")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written ({error.strerror or error})") from None


def load_profile(
    path: Path, *, model: Facts, num_layers: int, num_experts: int, half_life: float | None = None
) -> ActivationProfile:
    """Read a profile that was counted on this model; further counts decay with ``half_life``.

    Raises:
        ConfigError: the file is unreadable, not a profile, or of another model; the message names file, key and remedy.
    """
    found = _read(path)
    if found["format"] != FORMAT:
        _refuse(path, "format", f"is {_shown(found['format'])}, not {FORMAT!r}; {_ANEW}")
    if found["fingerprint"] != fingerprint_of(model):
        counted = found.get("model")
        apart = differing(counted, model) if isinstance(counted, dict) else ""
        _refuse(path, "fingerprint", f"is of another model{apart}; give a profile of this one or none")
    for key, wanted in (("num_layers", num_layers), ("num_experts", num_experts)):
        if found[key] != wanted:
            _refuse(path, key, f"is {_shown(found[key])} but the model has {wanted}; {_ANEW}")
    profile = ActivationProfile(model=model, num_layers=num_layers, num_experts=num_experts, half_life=half_life)
    counts = _numbers(path, "counts", found["counts"], (num_layers, num_experts))
    accesses = found.get("accesses", 0)
    if isinstance(accesses, bool) or not isinstance(accesses, int) or accesses < 0:
        _refuse(path, "accesses", f"must be a whole number of at least 0, not {_shown(accesses)}; {_ANEW}")
    profile.add(counts, accesses)
    if (learned := found.get("affinity")) is not None:
        profile.transitions = _transitions(path, learned, num_layers, num_experts)
    return profile


def _transitions(path: Path, found: Any, layers: int, experts: int) -> Transitions:
    if not isinstance(found, dict) or set(found) != {"times", "per_10000"}:
        _refuse(path, "affinity", f"must have the keys 'times' and 'per_10000' and no other; {_ANEW}")
    times = _numbers(path, "affinity.times", found["times"], (layers, experts))
    shares = _numbers(path, "affinity.per_10000", found["per_10000"], (layers, experts, experts))
    if shares.max(initial=0) > _UNIT:
        _refuse(path, "affinity.per_10000", f"holds {shares.max():g}, above {_UNIT}; {_ANEW}")
    return Transitions(matrix=(shares / _UNIT).astype(np.float32), times=times.astype(np.int64))


def _read(path: Path) -> dict[str, Any]:
    """Return the object in ``path``, with all required keys and no unknown ones."""
    try:
        found = parse_json(read_text(path, most=_MOST_BYTES), pairs=lambda pairs: _once(path, pairs))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({read_error_text(error)})") from None
    except json.JSONDecodeError as error:
        raise ConfigError(f"{path}:{error.lineno}: not JSON ({error.msg}); {_ANEW}") from None
    except ValueError as error:
        raise ConfigError(f"{path}: not JSON in UTF-8 ({error}); {_ANEW}") from None
    if not isinstance(found, dict):
        raise ConfigError(f"{path}: must be a JSON object, not {_shown(found)}; {_ANEW}")
    for key in found:
        if key not in _KNOWN:
            _refuse(path, key, f"is unknown{did_you_mean(key, _KNOWN)}; known: {', '.join(_KNOWN)}")
    for key in _REQUIRED:
        if key not in found:
            _refuse(path, key, f"is missing; {_ANEW}")
    return found


def _once(path: Path, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        _refuse(path, next(name for name in names if names.count(name) > 1), "is given twice; keep one")
    return found


def _numbers(path: Path, key: str, value: Any, shape: tuple[int, ...]) -> Floats:
    """Return ``value`` as finite non-negative numbers, float64 of the given ``shape``."""
    wanted = " x ".join(map(str, shape))
    try:
        found = np.array(value)
    except ValueError:  # rows of different lengths
        found = np.array(None)
    if found.dtype.kind not in "iuf" or found.shape != shape:
        _refuse(path, key, f"must be {wanted} numbers; {_ANEW}")
    if not np.all(np.isfinite(found)) or found.min(initial=0) < 0:
        _refuse(path, key, f"must be finite numbers of at least 0; {_ANEW}")
    return found.astype(np.float64)


def _shown(value: Any) -> str:
    return repr(value)[:60]


def _refuse(path: Path, key: str, complaint: str) -> NoReturn:
    raise ConfigError(f"{path}: key {key!r} {complaint}")
