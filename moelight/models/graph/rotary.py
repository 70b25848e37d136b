"""Rotary embeddings whose frequencies depend on the length of a sequence: each sequence of a run has those of its own
length, whatever rides beside it.

transformers takes the length from the largest position of the whole forward. A run says the length of each of its
sequences: of a prompt all of it, in whatever parts it is computed, and of a generated token its position plus one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from moelight.core.errors import ConfigError
from moelight.models.graph.forwards import undecorated
from moelight.profiles.rope import BY_LENGTH, ByLength, by_length

_INIT = "rope_init_fn"


def length_rule(config: Any) -> ByLength | None:
    """Return the rule by which positions depend on the length of a sequence; None if they do not.

    Raises:
        ConfigError: two kinds of its layers change at different lengths.
    """
    rope = getattr(config, "rope_parameters", None) or {}
    several = [value for value in rope.values() if isinstance(value, dict)] or [rope]
    rules = {rule for value in several if (rule := by_length(value, max_positions=config.max_position_embeddings))}
    if len(rules) > 1:
        raise ConfigError(f"{config.model_type}: positions that change at {len(rules)} lengths are not served")
    return next(iter(rules), None)


def is_by_length(module: Any) -> bool:
    """Whether ``module`` is a rotary embedding whose frequencies depend on the length of the sequence."""
    kinds = getattr(module, "rope_type", None)
    return not set(BY_LENGTH).isdisjoint(kinds.values() if isinstance(kinds, dict) else (kinds,))


def follow_length(module: Any) -> None:
    """Let a rotary embedding that computes its frequencies at every call (phimoe's) do so for the length of what it is
    given: transformers 5 leaves the length out there, and has the factors of short sequences at any length."""
    if not is_by_length(module) or _INIT not in undecorated(type(module).forward).__code__.co_names:
        return
    init, forward = module.rope_init_fn, module.forward

    def with_length(x: Tensor, position_ids: Tensor, *args: Any, **kwargs: Any) -> Any:
        module.rope_init_fn = partial(init, seq_len=int(position_ids.max()) + 1)
        return forward(x, position_ids, *args, **kwargs)

    module.forward = with_length


def rotate_per_sequence(module: Any, rule: ByLength, lengths: Callable[[], Sequence[tuple[int, int]]]) -> None:
    """Let ``module`` compute the rows of a run, the number of rows and the length of each of whose sequences are
    ``lengths()``."""
    forward = module.forward

    def of_length(x: Tensor, positions: Tensor, length: int, *args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
        """cos and sin of ``positions`` [1, n], as in a forward whose largest position is ``length`` - 1."""
        _forget(module)
        last = positions.new_full((1, 1), length - 1)
        result = forward(x, torch.cat((positions, last), dim=1), *args, **kwargs)
        return tuple(value[:, :-1] for value in ((result,) if isinstance(result, Tensor) else result))

    def rotate(x: Tensor, position_ids: Tensor, *args: Any, **kwargs: Any) -> Any:
        sequences = lengths()
        if x.is_meta:  # lengths decide what is computed
            total = sum(count for count, _ in sequences)
            like, position_ids = torch.empty((1, total, 1), dtype=x.dtype), torch.arange(total)[None]
        else:
            like = x
        groups, start = dict[int, tuple[int, list[int]]](), 0
        for count, length in sequences:
            longest, rows = groups.get(regime := rule.regime(length), (0, []))
            groups[regime] = max(longest, length), [*rows, *range(start, start + count)]
            start += count
        if len(groups) == 1:
            ((longest, _),) = groups.values()
            out = of_length(like, position_ids, longest, *args, **kwargs)
        else:
            parts = [of_length(like, position_ids[:, rows], n, *args, **kwargs) for n, rows in groups.values()]
            order = torch.tensor([row for _, rows in groups.values() for row in rows], device=like.device).argsort()
            out = tuple(torch.cat(values, dim=1)[:, order] for values in zip(*parts, strict=True))
        out = tuple(value.to(x.device) for value in out)
        return out[0] if len(out) == 1 else tuple(out)

    module.forward = rotate


def _forget(module: Any) -> None:
    """Undo what other lengths left in ``module``: frequencies are those it was made with."""
    for name in [name for name in (*vars(module), *module._buffers) if name.endswith("original_inv_freq")]:
        setattr(module, name.removesuffix("original_inv_freq") + "inv_freq", getattr(module, name).clone())
    for name in [name for name in vars(module) if name.endswith("max_seq_len_cached")]:
        setattr(module, name, module.original_max_seq_len)
