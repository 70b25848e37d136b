"""Number formats beside the checkpoint's own that a plan may use: experts by ``--allow``, keys and values by
``--kv-dtype choose``. Depends only on models."""

from __future__ import annotations

from collections.abc import Iterable

from moelight.core.dtypes import INT4, INT8
from moelight.core.errors import ConfigError, did_you_mean
from moelight.optimizer.runnable import quantises_cache
from moelight.profiles.model import ModelProfile

AUTO, CHOOSE = "auto", "choose"
WEIGHTS = (INT8.name, INT4.name)
CACHES = (AUTO, INT8.name)  # formats of keys and values that run, beside those of weights


def parse_allowed(text: str | None) -> tuple[str, ...]:
    """The names in ``text``, separated by commas; raises ConfigError for an unknown one."""
    names = [name.strip() for name in text.split(",")] if text is not None else []
    for name in names:
        if name == "kv8":
            raise ConfigError("--allow kv8: a plan may use an int8 KV cache with --kv-dtype choose")
        if name not in WEIGHTS:
            raise ConfigError(f"--allow: {name!r} is not one of {', '.join(WEIGHTS)}{did_you_mean(name, WEIGHTS)}")
    return tuple(dict.fromkeys(names))


def allowed_weights(allowed: Iterable[str], model: ModelProfile) -> tuple[str, ...]:
    """Formats of the experts: the checkpoint's, and those ``allowed`` if it is not quantised itself and has experts."""
    if model.stored is not None or model.dense:
        return (AUTO,)
    return (AUTO, *(name for name in WEIGHTS if name in allowed))


def allowed_caches(model: ModelProfile) -> tuple[str, ...]:
    """Formats of keys and values: the computation's, and int8 if the model's cache can be quantised."""
    return CACHES if quantises_cache(model) else (AUTO,)
