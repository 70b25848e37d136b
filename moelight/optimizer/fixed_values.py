"""Values of a policy that the user fixes before planning (``--fix KEY=VALUE``): parsed, typed, checked for
contradictions on any machine. Keys are spelled as in ``policy_as_dict``."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain, combinations, product

from moelight.core.dtypes import BFLOAT16, DTYPES, FLOAT16, FLOAT32
from moelight.core.errors import ConfigError, did_you_mean
from moelight.core.policy import (
    ACTIVATIONS,
    ADMISSIONS,
    FFN_DEVICES,
    HOST_PAGES,
    KV_BLOCK_SIZES,
    MOST_COUNTS,
    PROCESSORS,
    RESIDENTS,
    check_count,
)
from moelight.hrm.costs import kv_token_bytes
from moelight.optimizer.problem import Fixed
from moelight.profiles.model import ModelProfile
from moelight.profiles.workload import Workload
from moelight.scheduler import SCHEDULES
from moelight.scheduler.layout import EXPERT_PLACES
from moelight.scheduler.requirements import misfit

COMPUTED = ("auto", BFLOAT16.name, FLOAT16.name, FLOAT32.name)  # formats of computation that may be asked for
SHORT = {"attention": "attention_device", "ffn": "ffn_device"}
_COUNTS = (
    "batch_size",
    "micro_batch_size",
    "num_micro_batches",
    "micro_batch_tokens",
    "prompt_micro_batches",
    "kv_tokens",
    "kv_block_size",
    "look_ahead",
    "ring_pages",
    "gpus",
)
_SHARES = ("weights.device", "weights.host", "weights.disk", "cpu_experts", "kv.device", "kv.host")
_WORDS = {
    "attention_device": PROCESSORS,
    "ffn_device": FFN_DEVICES,
    "weight_dtype": tuple(DTYPES),
    "kv_dtype": tuple(DTYPES),
    "activations": ACTIVATIONS,
    "schedule": SCHEDULES.names(),
    "host_pages": HOST_PAGES,
    "residents": RESIDENTS,
    "admission": ADMISSIONS,
}
KEYS = (*_COUNTS, *_WORDS, *_SHARES)
SIZES = ("batch_size", "micro_batch_size", "num_micro_batches")
_MOST_CACHE_BYTES = 1 << 62
_OFF_HOST = ("weights.device", "weights.disk")
_SLACK = 1e-9
_MOST_DIGITS = 20  # of a count


def check_activations(activations: str | None, *, option: str = "--activations") -> None:
    """Raise ConfigError for a value of ``option`` that names no activations."""
    if activations is not None and activations not in ACTIVATIONS:
        hint = did_you_mean(activations, ACTIVATIONS)
        raise ConfigError(f"{option} {activations!r} is not one of {', '.join(ACTIVATIONS)}{hint}")


def check_dtype(dtype: str, *, option: str = "--dtype") -> None:
    """Raise ConfigError for a value of ``option`` that names no format of computation."""
    if dtype not in COMPUTED:
        raise ConfigError(f"{option} {dtype!r} is not one of {', '.join(COMPUTED)}{did_you_mean(dtype, COMPUTED)}")


def parse_fixes(texts: Iterable[str]) -> dict[str, Fixed]:
    """The fixed values by full key: whole numbers, shares from 0 to 1, or words."""
    fixes: dict[str, Fixed] = {}
    written: dict[str, str] = {}
    for text in texts:
        name, equals, value = (part.strip() for part in text.partition("="))
        if not equals or not name or not value:
            raise ConfigError(f"--fix {text}: write KEY=VALUE, for example --fix attention=cpu")
        key = SHORT.get(name, name)
        if key not in KEYS:
            keys = (*KEYS, *SHORT)
            raise ConfigError(f"--fix {text}: unknown key {name!r}{did_you_mean(name, keys)}; known: {', '.join(keys)}")
        fixed = _value(key, value, text)
        if fixes.setdefault(key, fixed) != fixed:
            raise ConfigError(f"--fix {written[key]} and --fix {text} contradict each other")
        written.setdefault(key, text)
    return fixes


def check_fixes(fixes: Mapping[str, Fixed], *, has_gpu: bool) -> None:
    """Raise ConfigError if two of ``fixes`` contradict each other (both are named), or a GPU is missing."""
    for keys, reason in chain(_in_shares(fixes), _in_sizes(fixes), _in_devices(fixes)):
        raise _contradiction(fixes, *keys, reason=reason)
    _check_schedule(fixes, has_gpu=has_gpu)
    for key in ("attention_device", "ffn_device", "weights.device", "kv.device", "cpu_experts"):
        if not has_gpu and fixes.get(key, "cpu") not in ("cpu", 0.0):
            raise ConfigError(f"--fix {key}={fixes[key]} needs a GPU, and this machine has none")


def check_extent(model: ModelProfile, workload: Workload, fixes: Mapping[str, Fixed]) -> None:
    """Raise ConfigError for counts out of range, and sequences whose keys and values exceed `_MOST_CACHE_BYTES`."""
    _check_range(fixes)
    parts = int(fixes.get("num_micro_batches", 1)) * int(fixes.get("micro_batch_size", 1))
    sequences = int(fixes.get("batch_size", max(workload.num_requests, parts)))
    tokens = min(workload.max_prompt_len + workload.gen_len, model.max_positions)
    max_sequences = _MOST_CACHE_BYTES // (tokens * max(kv_token_bytes(model, FLOAT32), 1))
    if sequences > max_sequences:
        options = [f"--fix {key}={fixes[key]}" for key in SIZES if key in fixes]
        raise ConfigError(
            f"{', '.join(options) or f'num_requests {workload.num_requests:,}'} with up to {tokens:,} tokens each: "
            f"more than can be planned for, at most {max_sequences:,} sequences; ask for fewer, the speed is the same"
        )


def _value(key: str, value: str, text: str) -> Fixed:
    if key in _WORDS:
        words = _WORDS[key]
        if value not in words:
            listed = ", ".join(words)
            raise ConfigError(f"--fix {text}: {key} is not one of {listed}{did_you_mean(value, words)}")
        return value
    if key in _SHARES:
        with contextlib.suppress(ValueError):
            if 0 <= (share := float(value)) <= 1:
                return share
        raise ConfigError(f"--fix {text}: a share is a number from 0 to 1")
    count = int(value) if value.isascii() and value.isdecimal() and len(value) <= _MOST_DIGITS else 0
    if key == "kv_block_size":
        if count not in KV_BLOCK_SIZES:
            raise ConfigError(f"--fix {text}: {key} is one of {', '.join(map(str, KV_BLOCK_SIZES))}")
    elif key == "ring_pages":
        if count == 1 or not value.isdecimal() or count > MOST_COUNTS[key]:
            raise ConfigError(
                f"--fix {text}: {key} is 0 (two layers), or a whole number from 2 to {MOST_COUNTS[key]:,}"
            )
    elif not 1 <= count <= MOST_COUNTS[key]:
        raise ConfigError(f"--fix {text}: {key} is a whole number from 1 to {MOST_COUNTS[key]:,}")
    return count


def _check_range(fixes: Mapping[str, Fixed]) -> None:
    for key in MOST_COUNTS:
        if key in fixes:
            check_count(key, int(fixes[key]), least=0 if key == "ring_pages" else 1)


_Contradictions = Iterator[tuple[tuple[str, ...], str]]  # keys that contradict each other, and why


def _in_shares(fixes: Mapping[str, Fixed]) -> _Contradictions:
    for keys in (("weights.device", "weights.host", "weights.disk"), ("kv.device", "kv.host")):
        fixed_shares = {key: float(fixes[key]) for key in keys if key in fixes}
        for one, other in combinations(fixed_shares, 2):
            if fixed_shares[one] + fixed_shares[other] > 1 + _SLACK:
                yield (one, other), "shares sum to 1"
        total = sum(fixed_shares.values())
        if total > 1 + _SLACK or (len(fixed_shares) == len(keys) and total < 1 - _SLACK):
            yield tuple(fixed_shares), f"shares sum to 1, and these to {total:g}"


def _in_sizes(fixes: Mapping[str, Fixed]) -> _Contradictions:
    _check_range(fixes)
    mu, batch = int(fixes.get("micro_batch_size", 1)), int(fixes.get("batch_size", 1 << 62))
    for key in ("micro_batch_size", "num_micro_batches"):
        if int(fixes.get(key, 1)) > batch:
            yield (key, "batch_size"), "a micro-batch is a part of the batch"
    if int(fixes.get("micro_batch_tokens", 1 << 62)) < mu:
        yield ("micro_batch_size", "micro_batch_tokens"), "a sequence brings a token"
    if all(key in fixes for key in SIZES) and -(-batch // mu) != int(fixes["num_micro_batches"]):
        yield SIZES, f"{batch} sequences in micro-batches of {mu} are {-(-batch // mu)} micro-batches"


def _in_devices(fixes: Mapping[str, Fixed]) -> _Contradictions:
    def share(key: str, default: float) -> float:
        return float(fixes.get(key, default))

    on_cpu, reason = share("cpu_experts", 0.0), "the CPU computes experts in host memory"
    if on_cpu and fixes.get("ffn_device", "split") != "split":
        yield ("cpu_experts", "ffn_device"), "only split lets CPU and GPU share the experts"
    for key, left in (("weights.host", share("weights.host", 1.0)), *((key, 1 - share(key, 0.0)) for key in _OFF_HOST)):
        if on_cpu and on_cpu > left + _SLACK:
            yield ("cpu_experts", key), reason
    if fixes.get("attention_device") == "cpu":
        for key, used in (("kv.device", share("kv.device", 0.0) > 0), ("kv.host", share("kv.host", 1.0) < 1 - _SLACK)):
            if used:
                yield ("attention_device", key), "the CPU attends over keys and values in host memory"
    if fixes.get("ffn_device") == "cpu" and fixes.get("weights.device"):
        yield ("ffn_device", "weights.device"), reason


def _check_schedule(fixes: Mapping[str, Fixed], *, has_gpu: bool) -> None:
    """Refuse a fixed schedule whose devices are missing or fixed otherwise."""
    if "schedule" not in fixes:
        return
    schedule, allowed = str(fixes["schedule"]), {"attention_device": PROCESSORS, "ffn_device": FFN_DEVICES}
    choices = product(*((str(fixes[key]),) if key in fixes else words for key, words in allowed.items()))
    reasons = [misfit(schedule, discrete=has_gpu, attention=a, experts=EXPERT_PLACES[ffn]) for a, ffn in choices]
    if None in reasons:
        return
    named = [key for key in allowed if key in fixes]
    if not has_gpu or not named:
        raise ConfigError(f"--fix schedule={schedule} cannot be: it {reasons[0]}")
    raise _contradiction(fixes, "schedule", *named, reason=f"{schedule} {reasons[0]}")


def _contradiction(fixes: Mapping[str, Fixed], *keys: str, reason: str) -> ConfigError:
    named = [f"--fix {key}={fixes[key]}" for key in keys]
    return ConfigError(f"{', '.join(named[:-1])} and {named[-1]} contradict each other: {reason}")
