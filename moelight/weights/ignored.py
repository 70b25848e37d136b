"""Tensors of a checkpoint that nothing here reads, by their names: multi-token prediction, and scales of activations
and of the key-value cache. They are set aside before anything is checked, however they are stored."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable
from dataclasses import replace
from types import MappingProxyType
from typing import Any, NamedTuple

from moelight.profiles.hf_config import QUANTISED_KEYS, HFConfig
from moelight.weights.source import Checkpoint, IgnoredTensor

PREDICTION = "multi-token prediction, which generation does not need"
ACTIVATION_SCALE = "a scale of quantised activations; activations stay exact"
CACHE_SCALE = "a scale of a quantised key-value cache; the cache stays exact"
COMPUTED = "a buffer that is computed"
NOT_READ = "transformers does not read it either"
OTHER_PART = "part of an encoder or another model beside the language model"
_ACTIVATION_SCALES = r"(?:.*\.)?(?:input|output|activation)_(?:scale|scale_inv|zero_point|global_scale)"
_CACHE_SCALES = r"(?:.*\.)?(?:k|v|q|p|kv|prob|kv_cache)_(?:scale|zero_point)"
_PREDICTION_BLOCKS = r"(?:.*\.)?(?:mtp|mtp_layers|nextn)\..*"
_PREDICTION_COUNTS = ("num_nextn_predict_layers", "num_mtp_layers", "mtp_num_hidden_layers", "n_predict_layers")
_PROJECTION = re.compile(r"(?:.*\.)?layers\.(\d+)\.eh_proj\.weight")
_MAX_PREDICTION_LAYERS = 64


class IgnoreRule(NamedTuple):
    """Tensors whose whole names match ``pattern`` are not read, for ``reason``."""

    pattern: re.Pattern[str]
    reason: str


def ignore_rules(config: HFConfig, names: Collection[str]) -> tuple[IgnoreRule, ...]:
    """The rules of a checkpoint with ``config`` and tensors ``names``.

    Layers of multi-token prediction are those behind the last hidden layer, as many as the config announces, and those
    there that hold the projection of such a layer.
    """
    rules = [IgnoreRule(re.compile(_PREDICTION_BLOCKS), PREDICTION)]
    if (layers := _integer(config, "num_hidden_layers")) is not None:
        announced = max((_integer(config, key) or 0 for key in _PREDICTION_COUNTS), default=0)
        extra_layers = set(range(layers, layers + min(announced, _MAX_PREDICTION_LAYERS)))
        extra_layers |= {int(match[1]) for name in names if (match := _PROJECTION.fullmatch(name))}
        behind = "|".join(str(number) for number in sorted(extra_layers) if number >= layers)
        rules += [IgnoreRule(re.compile(rf"(?:.*\.)?layers\.(?:{behind})\..*"), PREDICTION)] if behind else []
    if config.find(*QUANTISED_KEYS) is not None:
        rules.append(IgnoreRule(re.compile(_ACTIVATION_SCALES), ACTIVATION_SCALE))
        rules.append(IgnoreRule(re.compile(_CACHE_SCALES), CACHE_SCALE))
    return tuple(rules)


def set_aside(
    checkpoint: Checkpoint, rules: Iterable[IgnoreRule], is_needed: Callable[[str], bool] | None = None
) -> Checkpoint:
    """``checkpoint`` without the tensors that the first matching of ``rules`` ignores, unless the model has a parameter
    of that name (``is_needed``)."""
    rules = tuple(rules)
    ignored = {
        name: IgnoredTensor(info=info, reason=rule.reason)
        for name, info in checkpoint.tensors.items()
        if (rule := next((rule for rule in rules if rule.pattern.fullmatch(name)), None))
        and not (is_needed and is_needed(name))
    }
    if not ignored:
        return checkpoint
    tensors = {name: info for name, info in checkpoint.tensors.items() if name not in ignored}
    return replace(checkpoint, tensors=MappingProxyType(tensors), ignored=(*checkpoint.ignored, *ignored.values()))


def unused_scales(ignored: Iterable[IgnoredTensor]) -> str:
    """One line about scales of activations or of the cache among ``ignored``; empty without any."""
    names = [tensor.info.name for tensor in ignored if tensor.reason in (ACTIVATION_SCALE, CACHE_SCALE)]
    if not names:
        return ""
    return f"{names[0]!r} and {len(names) - 1} more scales are not used: activations and the key-value cache stay exact"


def _integer(config: HFConfig, key: str) -> int | None:
    """The number under ``key`` of the config, or of that of its language model."""
    text = config.find("text_config")
    values: list[Any] = [config.find(key), text.get(key) if isinstance(text, dict) else None]
    return next((value for value in values if type(value) is int), None)
