"""Which modules of a checkpoint a format applies to, as a ``quantization_config`` says it: rules, and typed access to
the config. The input is untrusted: names and patterns are bounded, and what is not supported is refused by name.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from moelight.formats.format import Format

MAX_GROUP = 1 << 20
_MAX_PATTERN_LENGTH = 200
_MAX_REPEATS = 4
_REPEATED_GROUP = re.compile(r"\)[*+{]")
_REPEAT = re.compile(r"(?<!\\)(?:[*+]|\{\d*,)")
# Modules that no method quantises unless its config names them.
NEVER = re.compile(r"(?:.*\.)?(?:embed_tokens|embed_positions|word_embeddings|embeddings|wte|lm_head)")
ROUTERS = re.compile(r"(?:.*\.)?(?:gate|router|wg|shared_expert_gate|router\.layer)")
EXPERTS = re.compile(r"(?:.*\.)?experts(?:\..*)?")
# Suffixes of codes, scales and zero points in torchao's tensors.
TORCHAO_NAMES = ("._weight_qdata", "._weight_scale", "._weight_zero_point")


class ModuleRule(NamedTuple):
    """Modules whose whole name ``pattern`` matches are stored as ``stored``; None: in the model's dtype."""

    pattern: re.Pattern[str]
    stored: Format | None


class Settings:
    """Typed look-ups in a ``quantization_config``; ValueErrors name the key. ``stacks_experts``: transformers 5 or
    later saved the model, which keeps the experts of a layer in one parameter."""

    def __init__(self, values: Mapping[str, Any], *, stacks_experts: bool = False) -> None:
        self.values, self.stacks_experts = values, stacks_experts

    def integer(self, key: str, default: int, allowed: Callable[[int], bool], wanted: str) -> int:
        value = self.values.get(key, default)
        if type(value) is not int or not allowed(value):
            raise ValueError(f"{key} there must be {wanted}")
        return value

    def group(self) -> int:
        """Columns that share a scale; 0: all."""
        size = self.integer("group_size", 128, lambda size: size == -1 or 1 <= size <= MAX_GROUP, "-1 or a size")
        return 0 if size == -1 else size

    def only(self, keys: tuple[str, ...], allowed: tuple[object, ...]) -> Any:
        """The value of the first of ``keys`` that is there, which must be one of ``allowed``, the default first."""
        key = next((key for key in keys if self.values.get(key) is not None), None)
        if key is None:
            return allowed[0]
        value = self.values[key]
        value = value.lower() if isinstance(value, str) else value
        if not any(type(value) is type(option) and value == option for option in allowed):
            raise ValueError(f"of {key} only {', '.join(map(str, allowed))} is read")
        return value

    def words(self, *keys: str) -> list[str]:
        """The texts in the list under the first of ``keys`` that is there."""
        result: Any = next((value for key in keys if (value := self.values.get(key)) is not None), [])
        if not isinstance(result, list) or not all(isinstance(word, str) for word in result):
            raise ValueError(f"{keys[0]} there must be a list of names")
        return result


class Scheme(NamedTuple):
    """The weights of an entry of a compressed-tensors config: the name of their format on disk, and their arguments.
    ``scale``: the safetensors dtype of the scales; ``group``, ``group_rows``: as in `Format`."""

    stored_as: str
    floating: bool
    bits: int
    strategy: str
    group: int
    group_rows: int
    symmetric: bool
    scale: str

    @property
    def described(self) -> str:
        """Which values share a scale, for people."""
        fixed = {
            "tensor": "per tensor",
            "channel": "per channel",
            "block": f"in blocks of {self.group_rows}x{self.group}",
        }
        return fixed.get(self.strategy, f"in groups of {self.group}")


MethodReader = Callable[[Settings, str], Iterable[ModuleRule]]
SchemeReader = Callable[[Scheme], Format]


@dataclass(frozen=True, kw_only=True, slots=True)
class FormatRow:
    """A row of `registry.FORMATS`.

    Attributes:
        format: the class of the format, whose ``key`` names the row.
        suffixes: every suffix under which tools store a tensor of it.
        methods: readers of a ``quantization_config`` by its ``quant_method``: the rules, for the safetensors dtype that
            scales have by default. Their ValueErrors say what is wrong.
        recognises: True for a config that names no method, and is of the first of ``methods``.
        schemes: readers of the weights of a compressed-tensors config by the format's name there and whether values
            are floats. Their ValueErrors say what is wrong.
    """

    format: type[Format]
    suffixes: tuple[str, ...]
    methods: Mapping[str, MethodReader] = field(default_factory=dict)
    recognises: Callable[[Mapping[str, Any]], bool] = lambda _: False
    schemes: Mapping[tuple[str, bool], SchemeReader] = field(default_factory=dict)


def pattern_of(text: str) -> re.Pattern[str]:
    """The regular expression ``text``; raises ValueError for one that is wrong, or could take long to match."""
    hard = len(text) > _MAX_PATTERN_LENGTH or _REPEATED_GROUP.search(text) or len(_REPEAT.findall(text)) > _MAX_REPEATS
    try:
        if not hard:
            return re.compile(text)
    except (re.error, OverflowError, RecursionError):
        pass
    raise ValueError("a pattern there is no regular expression, or too long a one")


def within(name: str) -> re.Pattern[str]:
    """Modules whose names contain ``name``, a regular expression, in whole parts."""
    pattern_of(name)
    return re.compile(rf"(?:.*\.)?(?:{name})(?:\..*)?")


def all_but_ignored(settings: Settings, stored: Format) -> Iterable[ModuleRule]:
    """All modules as ``stored``, but those that ``settings`` leave out."""
    yield from (ModuleRule(within(name), None) for name in settings.words("modules_to_not_convert", "ignored_layers"))
    yield from (ModuleRule(NEVER, None), ModuleRule(ROUTERS, None))
    yield ModuleRule(re.compile(r".*"), stored)
