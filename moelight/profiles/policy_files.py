"""Policies as YAML files: written by ``optimize -o``, read by ``generate --policy`` and ``load_policy``.

The planner and the engine check whether a policy fits a machine.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import yaml

from moelight.core.errors import ConfigError
from moelight.core.policy import Policy, Shares
from moelight.profiles.files import YamlNode, read_yaml

_COUNTS = (
    "batch_size",
    "micro_batch_size",
    "micro_batch_tokens",
    "prompt_micro_batches",
    "kv_block_size",
    "look_ahead",
    "gpus",
)
_WORDS = (
    "model",
    "attention_device",
    "ffn_device",
    "weight_dtype",
    "kv_dtype",
    "schedule",
    "admission",
    "host_pages",
    "residents",
)
_COMMENT_WIDTH = 100
_NOTE_COLUMN = 32
_NOTES = {
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
    "schedule": "the schedule",
    "look_ahead": "micro-batches that attend ahead of the experts",
    "admission": "refill: places are refilled at once; static: batch by batch",
    "host_pages": "auto, pinned (transferred directly) or staged (copied first)",
    "residents": "auto, static (resident experts stay) or learned (on-demand passes exchange them)",
    "gpus": "GPUs that share each layer; generate uses one",
}


def load_policy(path: str | Path) -> Policy:
    """The policy in the YAML file ``path``.

    Only ``model`` is required; other keys default as in `Policy`. ``num_micro_batches`` is optional and must agree with
    ``batch_size`` and ``micro_batch_size``.

    Raises:
        ConfigError: unreadable, an unknown key (the message names the closest one), a wrong type or an impossible
            value; the message names file and line.
    """
    root = read_yaml(Path(path))
    known = (*_COUNTS, *_WORDS[1:], "kv_tokens", "num_micro_batches", "weights", "cpu_experts", "kv")
    fields = root.fields(*known, required=("model",))
    values: dict[str, Any] = {name: fields[name].text() for name in _WORDS if name in fields}
    values |= {name: fields[name].integer() for name in _COUNTS if name in fields}
    if "kv_tokens" in fields:
        values["kv_tokens"] = fields["kv_tokens"].integer(least=0)
    if "cpu_experts" in fields:
        values["cpu_experts"] = _share(fields["cpu_experts"])
    if "weights" in fields:
        values["weights"] = _shares(fields["weights"], "device", "host", "disk")
    if "kv" in fields:
        values["kv"] = _shares(fields["kv"], "device", "host")
    try:
        policy = Policy(**values)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
    stated = fields.get("num_micro_batches")
    if stated is not None and stated.integer() != policy.num_micro_batches:
        raise stated.error(
            f"is {stated.integer()}, but batch_size {policy.batch_size} in micro-batches of {policy.micro_batch_size} "
            f"gives {policy.num_micro_batches}"
        )
    return policy


def policy_text(policy: Policy, *, comments: Iterable[str] = ()) -> str:
    """``policy`` as YAML text, every value unrounded; ``comments`` precede it, one paragraph each."""
    return "\n".join([*_head(comments), *_lines(policy)]) + "\n"


def _head(comments: Iterable[str]) -> Iterator[str]:
    for comment in comments:
        plain = "".join(c if c.isprintable() else " " for c in comment)
        wrapped = textwrap.wrap(plain, _COMMENT_WIDTH, break_long_words=False, break_on_hyphens=False)
        yield from (f"# {line}" for line in wrapped)
        yield "#"


def _lines(policy: Policy) -> Iterator[str]:
    weights, kv = policy.weights, policy.kv
    values: dict[str, object] = {
        "model": policy.model,
        "batch_size": policy.batch_size,
        "micro_batch_size": policy.micro_batch_size,
        "num_micro_batches": policy.num_micro_batches,
        "micro_batch_tokens": policy.micro_batch_tokens,
        "prompt_micro_batches": policy.prompt_micro_batches,
        "kv_tokens": policy.kv_tokens,
        "kv_block_size": policy.kv_block_size,
        "attention_device": policy.attention_device,
        "ffn_device": policy.ffn_device,
        "weights": {"device": float(weights.device), "host": float(weights.host), "disk": float(weights.disk)},
        "cpu_experts": float(policy.cpu_experts),
        "kv": {"device": float(kv.device), "host": float(kv.host)},
        "weight_dtype": policy.weight_dtype,
        "kv_dtype": policy.kv_dtype,
        "schedule": policy.schedule,
        "look_ahead": policy.look_ahead,
        "admission": policy.admission,
        "host_pages": policy.host_pages,
        "residents": policy.residents,
        "gpus": policy.gpus,
    }
    for name, value in values.items():
        line = f"{name}:" if isinstance(value, dict) else f"{name}: {_scalar(value)}"
        yield f"{line:<{_NOTE_COLUMN}}  # {_NOTES[name]}" if name in _NOTES else line
        if isinstance(value, dict):
            yield from (f"  {tier}: {_scalar(share)}" for tier, share in value.items())


def _scalar(value: object) -> str:
    """``value`` as a YAML scalar on one line."""
    if isinstance(value, float):
        return repr(value)
    plain = not isinstance(value, str) or value.isprintable()
    text = yaml.safe_dump(value, allow_unicode=plain, width=float("inf"))
    return text.removesuffix("\n").removesuffix("\n...")


def _shares(node: YamlNode, *tiers: str) -> Shares:
    fields = node.fields(*tiers)
    try:
        return Shares(**{tier: _share(value) for tier, value in fields.items()})
    except ConfigError as error:
        raise node.error(f"is impossible: {error}") from None


def _share(node: YamlNode) -> float:
    value = node.scalar()
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= 1:
        raise node.error(f"must be a number from 0 to 1, not {value!r}")
    return float(value)
