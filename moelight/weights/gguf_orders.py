"""Orders in which llama.cpp's converter stores rows, and parts in which it stores a matrix, undone on the places of the
stored numbers (`weights.boxes`). Nothing is read.

In linear attention, heads of values belong to groups, one for each head of keys. transformers has the heads of a group
together.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from moelight.weights.boxes import Tiled, concatenated


def rounds_of(config: Any) -> tuple[int, int]:
    """Heads of values of each group, and groups."""
    groups, heads = config.linear_num_key_heads, config.linear_num_value_heads
    if heads % groups:
        raise ValueError(f"{heads} heads of values for {groups} of keys")
    return heads // groups, groups


def _values(stored: Tiled, config: Any) -> Tiled:
    """Rows of heads of values, which are stored in rounds: one head of each group, then the next of each."""
    rounds, groups = rounds_of(config)
    rows, heads = stored.shape[0], rounds * groups
    if rows % heads:
        raise ValueError(f"{rows} rows for {heads} heads")
    stored_heads = stored.split(0, [rows // heads] * heads)
    return concatenated([stored_heads[turn * groups + group] for group in range(groups) for turn in range(rounds)], 0)


def _queries_keys_values(stored: Tiled, config: Any) -> Tiled:
    """Rows of queries, of keys, and then of values as `_values` has them."""
    before = 2 * config.linear_num_key_heads * config.linear_key_head_dim
    first, values = stored.split(0, (before, stored.shape[0] - before))
    return concatenated((first, _values(values, config)), 0)


def _by_group(stored: Tiled, config: Any) -> Tiled:
    """Rows of all queries, keys, values and gates, of which transformers has those of a group together."""
    groups, keys = config.linear_num_key_heads, config.linear_key_head_dim
    values = rounds_of(config)[0] * config.linear_value_head_dim
    rows, columns = stored.shape
    widths = (keys, keys, values, values)
    if rows != groups * sum(widths):
        raise ValueError(f"{rows} rows for {groups} groups of {sum(widths)}")
    parts = stored.split(0, [groups * width for width in widths])
    grouped = [part.view((groups, width, columns)) for part, width in zip(parts, widths, strict=True)]
    return concatenated(grouped, 1).view(stored.shape)


def _by_head(stored: Tiled, config: Any) -> Tiled:
    """Rows of all queries, all keys, and all values, of which transformers has those of a head together."""
    heads, (rows, *others) = config.num_attention_heads, stored.shape
    if rows % (3 * heads):
        raise ValueError(f"{rows} rows for {heads} heads of queries, keys and values")
    parts = stored.view((3, heads, rows // heads // 3, *others))
    return parts.permute((1, 0, *range(2, len(parts.shape)))).view(stored.shape)


def keys_and_values(parts: Sequence[Tiled]) -> Tiled:
    """kv_b [heads x (width + width of values), rank] of keys [heads, rank, width] and values [heads, width, rank]."""
    keys, values = parts
    joined = concatenated((keys.permute((0, 2, 1)), values), 1)
    heads, width, rank = joined.shape
    return joined.view((heads * width, rank))


def _rows(parts: Sequence[Tiled]) -> Tiled:
    """The rows of all parts, one after another."""
    return concatenated(parts, 0)


JOINS: Mapping[str, Callable[[Sequence[Tiled]], Tiled]] = {"": _rows, "keys_and_values": keys_and_values}
ORDERS: Mapping[str, Callable[[Tiled, Any], Tiled]] = {
    "values_in_rounds": _values,
    "values_in_rounds_last": _queries_keys_values,
    "by_group": _by_group,
    "by_head": _by_head,
}
