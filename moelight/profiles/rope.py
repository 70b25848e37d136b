"""Rotary position embeddings beyond the plain one: the constants of stretched positions, as transformers reads them
from a ``config.json``, and how many positions they reach. Does not compute angles."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

# All rope types of transformers. Their constants change no size, so the planner supports them all.
ROPE_TYPES = ("default", "linear", "dynamic", "yarn", "longrope", "llama3")
BY_LENGTH = ("dynamic", "longrope")  # whose frequencies depend on the length of each sequence


class RopeFields(Protocol):
    """Typed look-ups in the object with the rotary parameters."""

    def find(self, *keys: str) -> Any: ...
    def number(self, key: str, *, default: float | None = None) -> float: ...
    def integer(self, *keys: str, default: int | None = None) -> int: ...
    def flag(self, key: str, *, default: bool) -> bool: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class RopeScaling:
    """RoPE scaling that does not depend on the length of a sequence.

    Attributes:
        kind: ``linear``, ``yarn`` or ``llama3``.
        factor: by which positions are divided, with ``yarn`` and ``llama3`` at low frequencies only.
        original_positions: of the model before it was stretched; not of ``linear``.
        attention_factor: of cosines and sines.
        low, high: ``yarn``: rotations within the original positions, up to which frequencies are divided and from which
            they are not (``beta_slow``, ``beta_fast``); ``llama3``: ``low_freq_factor`` and ``high_freq_factor``.
        truncate: ``yarn``: the borders are widened to whole dimensions.
    """

    kind: str
    factor: float
    original_positions: int = 0
    attention_factor: float = 1.0
    low: float = 1.0
    high: float = 1.0
    truncate: bool = True


def read_scaling(kind: str, fields: RopeFields, *, max_positions: int, original: int | None) -> RopeScaling | None:
    """The constants of ``kind`` in ``fields``; None of a kind without, or by the length of each sequence.

    ``max_positions`` and ``original``: the config's ``max_position_embeddings`` and, outside of ``fields``,
    ``original_max_position_embeddings``, which goes before that within.
    """
    if kind not in ("linear", "yarn", "llama3"):
        return None
    if kind == "linear":
        return RopeScaling(kind=kind, factor=fields.number("factor"))
    positions = original or fields.integer("original_max_position_embeddings", default=max_positions)
    if kind == "llama3":
        return RopeScaling(
            kind=kind,
            factor=fields.number("factor"),
            original_positions=positions,
            low=fields.number("low_freq_factor"),
            high=fields.number("high_freq_factor"),
        )
    factor = fields.number("factor", default=max_positions / positions)
    if fields.find("attention_factor") is not None:
        scale = fields.number("attention_factor")
    else:
        above, below = (_number_unless_zero(fields, name, 0.0) for name in ("mscale", "mscale_all_dim"))
        scale = _mscale(factor, above) / _mscale(factor, below) if above and below else _mscale(factor)
    return RopeScaling(
        kind=kind,
        factor=factor,
        original_positions=positions,
        attention_factor=scale,
        low=_number_unless_zero(fields, "beta_slow", 1.0),
        high=_number_unless_zero(fields, "beta_fast", 32.0),
        truncate=fields.flag("truncate", default=True),
    )


def _number_unless_zero(fields: RopeFields, name: str, default: float) -> float:
    """As transformers reads these constants: null and 0 are the default."""
    return fields.number(name) if fields.find(name) else default


def _mscale(factor: float, by: float = 1.0) -> float:
    return 1.0 if factor <= 1 else 0.1 * by * math.log(factor) + 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class ByLength:
    """Positions that are stretched by the length of each sequence, by all of a prompt at once and by the tokens so far
    of an answer.

    Attributes:
        border: sequences up to this length have the positions of short ones.
        anew: a sequence that grows past the border is computed anew (``longrope``, as transformers generates with the
            models that have it); else keys stay as they were cached (``dynamic``).
    """

    border: int
    anew: bool

    def regime(self, length: int) -> int:
        """Return a value shared by lengths with the same RoPE scaling."""
        return 0 if length <= self.border else 1 if self.anew else length

    def repeatable(self, longest: int) -> bool:
        """Whether the tokens of a sequence that may reach ``longest`` have the same positions however many are computed
        at once."""
        return self.anew or longest <= self.border

    def crosses(self, prompt: int, longest: int) -> bool:
        """Whether a sequence of ``prompt`` to ``longest`` tokens may need recomputation."""
        return self.anew and prompt <= self.border < longest


def by_length(rope: Mapping[str, Any], *, max_positions: int) -> ByLength | None:
    """The rule of rotary parameters ``rope``, as transformers completes them; None if the length changes nothing."""
    if rope.get("rope_type") not in BY_LENGTH:
        return None
    anew = rope["rope_type"] == "longrope"
    return ByLength(border=rope["original_max_position_embeddings"] if anew else max_positions, anew=anew)


def stretched_positions(rope: Mapping[str, Any], *, max_positions: int, original: int | None) -> int:
    """The context of a model whose rotary parameters are ``rope``: ``max_position_embeddings`` or, if that is more,
    what its positions are stretched to, as vLLM counts it: with ``yarn`` ``factor`` times the original positions, with
    ``dynamic``, whose frequencies are the plain ones up to ``max_position_embeddings``, ``factor`` times these."""
    kind, factor = rope.get("rope_type", rope.get("type")), rope.get("factor")
    if not isinstance(factor, int | float) or kind not in ("yarn", "dynamic"):
        return max_positions
    start = max_positions
    if kind == "yarn":
        start = original or rope.get("original_max_position_embeddings") or max_positions
    return max(max_positions, int(start * factor))
