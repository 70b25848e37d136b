"""Policies as YAML files: written by ``optimize -o``, read by ``generate --policy`` and ``load_policy``."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import yaml

from moelight.core.errors import ConfigError
from moelight.core.policy import FROM_ZERO, Policy, Shares
from moelight.profiles.files import YamlNode, read_yaml, yaml_comments

_COMMENT_WIDTH = 100
_NOTE_COLUMN = 32
# The keys in the order of a file, with the comment of each.
_NOTES = {
    "model": "",
    "batch_size": "N, the most sequences running in one pass",
    "micro_batch_size": "μ, the most sequences in one micro-batch",
    "num_micro_batches": "N / μ, rounded up; follows from the two",
    "micro_batch_tokens": "the most tokens in one micro-batch; longer prompts are cut",
    "prompt_micro_batches": "a pass carries at most N + so many x micro_batch_tokens tokens",
    "kv_tokens": "tokens the KV cache can hold; 0: batch_size x 1024, or x the context",
    "kv_block_size": "tokens in one block of the KV cache",
    "attention_device": "where decoding sequences attend: cpu or gpu",
    "ffn_device": "where experts are computed: cpu, gpu or split",
    "weights": "the tiers of expert weights, as shares that sum to 1",
    "cpu_experts": "share of the expert weights that the CPU computes in place (split only)",
    "kv": "the tiers of keys and values, as shares that sum to 1",
    "weight_dtype": "",
    "kv_dtype": "",
    "activations": "auto: as they are; int8: rounded, for experts stored as integers",
    "schedule": "the schedule",
    "look_ahead": "micro-batches that attend ahead of the experts",
    "admission": "refill: places are refilled at once; static: batch by batch",
    "host_pages": "auto, pinned (transferred directly) or staged (copied first)",
    "residents": "auto, static (resident experts stay) or learned (on-demand passes exchange them)",
    "ring_pages": "the most expert pages that the ring holds; 0: those of two layers",
    "gpus": "GPUs that share each layer; generate uses one",
}
_TIERS = {"weights": ("device", "host", "disk"), "kv": ("device", "host")}
_TYPES = {field.name: field.type for field in fields(Policy)}


def load_policy(path: str | Path) -> Policy:
    """Read a policy from a YAML file, such as ``moelight optimize -o`` writes.

    Args:
        path: the file. Only its key ``model`` is required; other keys default as in `Policy`. ``num_micro_batches`` is
            optional and must agree with ``batch_size`` and ``micro_batch_size``.

    Returns:
        The policy. The planner and the engine check whether it fits a machine.

    Raises:
        ConfigError: the file is unreadable, or has an unknown key (the message names the closest one), a wrong type or
            an impossible value; the message names file and line.
    """
    entries = read_yaml(Path(path)).fields(*(key for key in _NOTES if key != "model"), required=("model",))
    stated = entries.pop("num_micro_batches", None)
    values = {key: _read(key, node) for key, node in entries.items()}
    try:
        policy = Policy(**values)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
    if stated is not None and stated.integer() != policy.num_micro_batches:
        raise stated.error(
            f"is {stated.integer()}, but batch_size {policy.batch_size} in micro-batches of {policy.micro_batch_size} "
            f"gives {policy.num_micro_batches}"
        )
    return policy


def policy_text(policy: Policy, *, comments: Iterable[str] = ()) -> str:
    """``policy`` as YAML text, every value unrounded; ``comments`` precede it, one paragraph each."""
    heads = (line for comment in comments for line in (*yaml_comments([comment], _COMMENT_WIDTH), "#"))
    return "\n".join([*heads, *_lines(policy)]) + "\n"


def _lines(policy: Policy) -> Iterator[str]:
    for key, note in _NOTES.items():
        value = getattr(policy, key)
        line = f"{key}:" if key in _TIERS else f"{key}: {_scalar(key, value)}"
        yield f"{line:<{_NOTE_COLUMN}}  # {note}" if note else line
        yield from (f"  {tier}: {float(getattr(value, tier))!r}" for tier in _TIERS.get(key, ()))


def _scalar(key: str, value: Any) -> str:
    """``value`` as a YAML scalar on one line."""
    if _TYPES.get(key) == "float":
        return repr(float(value))
    plain = not isinstance(value, str) or value.isprintable()
    text = yaml.safe_dump(value, allow_unicode=plain, width=float("inf"))
    return text.removesuffix("\n").removesuffix("\n...")


def _read(key: str, node: YamlNode) -> Any:
    """The value of ``key``, by the type of the field of `Policy`."""
    match _TYPES[key]:
        case "int":
            return node.integer(least=0 if key in FROM_ZERO else 1)
        case "float":
            return node.number(maximum=1, wanted="from 0 to 1")
        case "Shares":
            entries = node.fields(*_TIERS[key]).items()
            shares = {tier: value.number(maximum=1, wanted="from 0 to 1") for tier, value in entries}
            try:
                return Shares(**shares)
            except ConfigError as error:
                raise node.error(f"is impossible: {error}") from None
    return node.text()
