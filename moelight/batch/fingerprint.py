"""The facts that determine the rows of a job: its input, its model, and its sampling. Two runs with equal facts produce
equal rows, so the second run may resume the first. `journal` stores the facts."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from moelight.core.errors import ConfigError
from moelight.core.policy import Policy
from moelight.core.request import DEFAULT_RESAMPLINGS, PoolingParams, SamplingParams
from moelight.core.small_files import read_bytes, read_error_text
from moelight.engine.tokenizer import MOST_TOKENIZER_BYTES


def sampling_facts(sampling: SamplingParams) -> dict[str, Any]:
    """Every default of the job's sampling, as it comes back from JSON."""
    facts: dict[str, Any] = json.loads(json.dumps(asdict(sampling)))
    facts["return_routed_experts"] = facts["return_routed_experts"] or None
    constraint = facts["structured_outputs"]
    if constraint is not None:
        set_fields = {name: value for name, value in constraint.items() if value not in (None, False)}
        if set_fields.get("resamplings") == DEFAULT_RESAMPLINGS:
            del set_fields["resamplings"]
        facts["structured_outputs"] = set_fields
    return facts


def pooling_facts(pooling: PoolingParams) -> dict[str, Any] | None:
    """The values asked for; None if none is. The files of the model have the others."""
    return {name: value for name, value in asdict(pooling).items() if value is not None} or None


def number_facts(
    policy: Policy | None, kv_dtype: str = "auto", activations: str | None = None, dtype: str = "auto"
) -> dict[str, str]:
    """The number formats of a policy, the only values of it that change tokens; without one, those asked for (of a
    ``kv_dtype`` to ``choose``, `Ledger.chosen` has the choice). Activations that are not rounded go without saying."""
    if policy is None:
        dtypes, rounded = {"weight_dtype": dtype, "kv_dtype": kv_dtype}, activations
    else:
        dtypes, rounded = {"weight_dtype": policy.weight_dtype, "kv_dtype": policy.kv_dtype}, policy.activations
    return dtypes if rounded in (None, "auto") else {**dtypes, "activations": str(rounded)}


def digest_of_file(path: Path | None) -> str | None:
    """The digest of a small file; None if ``path`` is None. Raises ConfigError for a file that cannot be read."""
    if path is None:
        return None
    try:
        content = read_bytes(path, max_bytes=MOST_TOKENIZER_BYTES)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: cannot be read ({read_error_text(error)})") from None
    return hashlib.blake2b(content, digest_size=16).hexdigest()


_SHOWN = 60
_ABSENT = object()


def differences(was: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """A line for each value that differs, ``"sampling.temperature: was 0.0, is 0.7"``, in the order of ``now``; nested
    objects are compared key by key, and an absent value equals null."""
    old, new = dict(_flat(was)), dict(_flat(now))
    return [
        "{}: was {}, is {}".format(key, *_shown(old.get(key, _ABSENT), new.get(key, _ABSENT)))
        for key in dict.fromkeys([*new, *old])
        if old.get(key) != new.get(key)
    ]


def _flat(value: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, inner in value.items():
        if isinstance(inner, Mapping) and inner:
            yield from _flat(inner, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", inner


def _shown(*values: object) -> list[str]:
    """Both values as text; long texts begin shortly before their first difference."""
    texts = ["absent" if value is _ABSENT else json.dumps(value, ensure_ascii=False) for value in values]
    same = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(*texts, strict=False)))
    start = max(0, same - 10) if max(map(len, texts)) > _SHOWN else 0
    return [_cut(text, start) for text in texts]


def _cut(text: str, start: int) -> str:
    end = start + _SHOWN
    return ("…" if start else "") + text[start:end] + ("…" if end < len(text) else "")
