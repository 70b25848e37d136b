"""Differences between the facts of two jobs. Works on JSON values of any meaning."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

_SHOWN = 60
_ABSENT = object()
_NOTHING = (_ABSENT, None)


def differences(was: Mapping[str, Any], now: Mapping[str, Any], *, informative: Iterable[str] = ()) -> list[str]:
    """Return a line for each value that differs, ``"sampling.temperature: was 0.0, is 0.7"``, in the order of ``now``.

    Nested objects are compared key by key; an absent value and null are equal. ``informative`` names dotted keys, or
    whole objects, that are not compared.
    """
    silent = tuple(informative)
    old, new = dict(_flat(was)), dict(_flat(now))
    return [
        f"{key}: was {shown[0]}, is {shown[1]}"
        for key in dict.fromkeys([*new, *old])
        if (values := (old.get(key, _ABSENT), new.get(key, _ABSENT)))[0] != values[1]
        and not (values[0] in _NOTHING and values[1] in _NOTHING)
        and not any(key == name or key.startswith(f"{name}.") for name in silent)
        and (shown := _shown(*values))
    ]


def _flat(value: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, inner in value.items():
        if isinstance(inner, Mapping) and inner:
            yield from _flat(inner, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", inner


def _shown(*values: object) -> list[str]:
    """Return both values as text; long texts begin shortly before their first difference."""
    texts = ["absent" if value is _ABSENT else json.dumps(value, ensure_ascii=False) for value in values]
    same = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(*texts, strict=False)))
    start = max(0, same - 10) if max(map(len, texts)) > _SHOWN else 0
    return [_cut(text, start) for text in texts]


def _cut(text: str, start: int) -> str:
    end = start + _SHOWN
    return ("…" if start else "") + text[start:end] + ("…" if end < len(text) else "")
