"""Number formats beside the checkpoint's own that a plan may use: the names of ``--allow``. Depends only on models."""

from __future__ import annotations

from collections.abc import Iterable

from moelight.core.dtypes import INT4, INT8
from moelight.core.errors import ConfigError, did_you_mean
from moelight.optimizer.runnable import quantises_cache
from moelight.profiles.model import ModelProfile

AUTO, CHOOSE = "auto", "choose"
KV8 = "kv8"
WEIGHTS = (INT8.name, INT4.name)
KNOWN = (*WEIGHTS, KV8)
CACHES = (AUTO, INT8.name)  # formats of keys and values that run, beside those of weights


def parse_allowed(text: str | None) -> tuple[str, ...]:
    """The names in ``text``, separated by commas; raises ConfigError for an unknown one."""
    names = [name.strip() for name in text.split(",")] if text is not None else []
    for name in names:
        if name not in KNOWN:
            raise ConfigError(f"--allow: {name!r} is not one of {', '.join(KNOWN)}{did_you_mean(name, KNOWN)}")
    return tuple(dict.fromkeys(names))


def allowed_weights(allowed: Iterable[str], model: ModelProfile) -> tuple[str, ...]:
    """Formats of the experts: the checkpoint's, and those ``allowed`` if it is not quantised itself and has experts."""
    if model.stored is not None or model.dense:
        return (AUTO,)
    return (AUTO, *(name for name in WEIGHTS if name in allowed))


def allowed_caches(allowed: Iterable[str], model: ModelProfile) -> tuple[str, ...]:
    """Formats of keys and values: the computation's, and int8 if ``kv8`` is ``allowed`` and the model's cache can be
    quantised."""
    return CACHES if KV8 in allowed and quantises_cache(model) else (AUTO,)
