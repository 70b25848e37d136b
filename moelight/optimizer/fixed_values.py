"""Values of a policy that the user fixes before planning (``--fix KEY=VALUE``): parsed, typed, checked for
contradictions on any machine. Keys are spelled as in ``policy_as_dict``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import combinations

from moelight.core.dtypes import DTYPES, FLOAT32
from moelight.core.errors import ConfigError, did_you_mean
from moelight.core.policy import (
    ADMISSIONS,
    FFN_DEVICES,
    HOST_PAGES,
    KV_BLOCK_SIZES,
    MOST_COUNTS,
    PROCESSORS,
    RESIDENTS,
    check_count,
)
from moelight.profiles.model import ModelProfile
from moelight.profiles.workload import Workload
from moelight.scheduler import SCHEDULES
from moelight.scheduler.layout import EXPERT_PLACES
from moelight.scheduler.requirements import misfit

Fixed = str | int | float

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
    "gpus",
)
_SHARES = ("weights.device", "weights.host", "weights.disk", "cpu_experts", "kv.device", "kv.host")
_WORDS = {
    "attention_device": PROCESSORS,
    "ffn_device": FFN_DEVICES,
    "weight_dtype": tuple(DTYPES),
    "kv_dtype": tuple(DTYPES),
    "schedule": SCHEDULES.names(),
    "host_pages": HOST_PAGES,
    "residents": RESIDENTS,
    "admission": ADMISSIONS,
}
KEYS = (*_COUNTS, *_WORDS, *_SHARES)
SIZES = ("batch_size", "micro_batch_size", "num_micro_batches")
_MOST_CACHE_BYTES = 1 << 62
_SLACK = 1e-9
_MOST_DIGITS = 20  # of a count


def parse_fixes(given: Iterable[str]) -> dict[str, Fixed]:
    """The fixed values by full key: whole numbers, shares from 0 to 1, or words."""
    found: dict[str, Fixed] = {}
    written: dict[str, str] = {}
    for text in given:
        name, equals, value = (part.strip() for part in text.partition("="))
        if not equals or not name or not value:
            raise ConfigError(f"--fix {text}: write KEY=VALUE, for example --fix attention=cpu")
        key = SHORT.get(name, name)
        if key not in KEYS:
            known = (*KEYS, *SHORT)
            raise ConfigError(
                f"--fix {text}: unknown key {name!r}{did_you_mean(name, known)}; known: {', '.join(known)}"
            )
        fixed = _value(key, value, text)
        if found.setdefault(key, fixed) != fixed:
            raise ConfigError(f"--fix {written[key]} and --fix {text} contradict each other")
        written.setdefault(key, text)
    return found


def check_fixes(fixes: Mapping[str, Fixed], *, has_gpu: bool) -> None:
    """Raise ConfigError if two of ``fixes`` contradict each other (both are named), or a GPU is missing."""
    _check_shares(fixes, ("weights.device", "weights.host", "weights.disk"))
    _check_shares(fixes, ("kv.device", "kv.host"))
    _check_counts(fixes)
    _check_cpu_experts(fixes)
    _check_placement(fixes)
    _check_schedule(fixes, has_gpu=has_gpu)
    if not has_gpu:
        _check_without_gpu(fixes)


def check_extent(model: ModelProfile, workload: Workload, fixes: Mapping[str, Fixed]) -> None:
    """Raise ConfigError for counts out of range, and sequences whose keys and values exceed `_MOST_CACHE_BYTES`."""
    _check_range(fixes)
    parts = int(fixes.get("num_micro_batches", 1)) * int(fixes.get("micro_batch_size", 1))
    sequences = int(fixes.get("batch_size", max(workload.num_requests, parts)))
    tokens = min(workload.max_prompt_len + workload.gen_len, model.max_positions)
    most = _MOST_CACHE_BYTES // (tokens * model.num_layers * model.attention.cache_width * FLOAT32.itemsize)
    if sequences > most:
        given = [f"--fix {key}={fixes[key]}" for key in SIZES if key in fixes]
        raise ConfigError(
            f"{', '.join(given) or f'num_requests {workload.num_requests:,}'} with up to {tokens:,} tokens each: "
            f"more than can be planned for, at most {most:,} sequences; ask for fewer, the speed is the same"
        )


def _value(key: str, value: str, text: str) -> Fixed:
    if key in _WORDS:
        words = _WORDS[key]
        if value not in words:
            listed = ", ".join(words)
            raise ConfigError(f"--fix {text}: {key} is not one of {listed}{did_you_mean(value, words)}")
        return value
    if key in _SHARES:
        return _share(value, text)
    count = int(value) if value.isascii() and value.isdecimal() and len(value) <= _MOST_DIGITS else 0
    if key == "kv_block_size":
        if count not in KV_BLOCK_SIZES:
            raise ConfigError(f"--fix {text}: {key} is one of {', '.join(map(str, KV_BLOCK_SIZES))}")
    elif not 1 <= count <= MOST_COUNTS[key]:
        raise ConfigError(f"--fix {text}: {key} is a whole number from 1 to {MOST_COUNTS[key]:,}")
    return count


def _check_range(fixes: Mapping[str, Fixed]) -> None:
    for key in MOST_COUNTS:
        if key in fixes:
            check_count(key, int(fixes[key]), least=1)


def _share(value: str, text: str) -> float:
    try:
        share = float(value)
    except ValueError:
        share = -1.0
    if not 0 <= share <= 1:  # also where it is no number at all
        raise ConfigError(f"--fix {text}: a share is a number from 0 to 1")
    return share


def _check_without_gpu(fixes: Mapping[str, Fixed]) -> None:
    for key in ("attention_device", "ffn_device", "weights.device", "kv.device", "cpu_experts"):
        if fixes.get(key, "cpu") not in ("cpu", 0.0):
            raise ConfigError(f"--fix {key}={fixes[key]} needs a GPU, and this machine has none")


def _check_shares(fixes: Mapping[str, Fixed], keys: tuple[str, ...]) -> None:
    """Refuse shares that exceed 1 in sum, or that are all given and fall short of 1."""
    given = {key: float(fixes[key]) for key in keys if key in fixes}
    for one, other in combinations(given, 2):
        if given[one] + given[other] > 1 + _SLACK:
            raise _contradiction(fixes, one, other, why="shares sum to 1")
    total = sum(given.values())
    if total > 1 + _SLACK or (len(given) == len(keys) and total < 1 - _SLACK):
        raise _contradiction(fixes, *given, why=f"shares sum to 1, and these to {total:g}")


def _check_counts(fixes: Mapping[str, Fixed]) -> None:
    """Refuse contradictory counts: N is cut into micro-batches of at most μ sequences, each with at least one token."""
    _check_range(fixes)
    for smaller, larger in (("micro_batch_size", "batch_size"), ("num_micro_batches", "batch_size")):
        if int(fixes.get(smaller, 1)) > int(fixes.get(larger, 1 << 62)):
            raise _contradiction(fixes, smaller, larger, why="a micro-batch is a part of the batch")
    if int(fixes.get("micro_batch_tokens", 1 << 62)) < int(fixes.get("micro_batch_size", 1)):
        raise _contradiction(fixes, "micro_batch_size", "micro_batch_tokens", why="a sequence brings a token")
    if all(key in fixes for key in SIZES):
        whole, part, number = (int(fixes[key]) for key in SIZES)
        if number * part < whole or (number - 1) * part >= whole:
            why = f"{whole} sequences in micro-batches of {part} are {-(-whole // part)} micro-batches"
            raise _contradiction(fixes, *SIZES, why=why)


def _check_cpu_experts(fixes: Mapping[str, Fixed]) -> None:
    """Refuse ``cpu_experts`` without ``split``, or above the share of experts in host memory."""
    share = fixes.get("cpu_experts")
    if not share:
        return
    if fixes.get("ffn_device", "split") != "split":
        raise _contradiction(fixes, "cpu_experts", "ffn_device", why="only split lets CPU and GPU share the experts")
    if float(share) > float(fixes.get("weights.host", 1.0)) + _SLACK:
        raise _contradiction(fixes, "cpu_experts", "weights.host", why="the CPU computes experts in host memory")
    for key in ("weights.device", "weights.disk"):
        if float(share) + float(fixes.get(key, 0.0)) > 1 + _SLACK:
            raise _contradiction(fixes, "cpu_experts", key, why="the CPU computes experts in host memory")


def _check_placement(fixes: Mapping[str, Fixed]) -> None:
    """Refuse placements in a memory that the fixed processor does not read."""
    if fixes.get("attention_device") == "cpu":
        why = "the CPU attends over keys and values in host memory"
        if fixes.get("kv.device"):
            raise _contradiction(fixes, "attention_device", "kv.device", why=why)
        if float(fixes.get("kv.host", 1.0)) < 1 - _SLACK:
            raise _contradiction(fixes, "attention_device", "kv.host", why=why)
    if fixes.get("ffn_device") == "cpu" and fixes.get("weights.device"):
        raise _contradiction(fixes, "ffn_device", "weights.device", why="the CPU computes experts in host memory")


def _check_schedule(fixes: Mapping[str, Fixed], *, has_gpu: bool) -> None:
    """Refuse a fixed schedule whose devices are missing or fixed otherwise."""
    if "schedule" not in fixes:
        return
    schedule, devices = str(fixes["schedule"]), ("attention_device", "ffn_device")
    attentions, ffns = (
        (str(fixes[key]),) if key in fixes else known
        for key, known in zip(devices, (PROCESSORS, FFN_DEVICES), strict=True)
    )
    reasons = [
        misfit(schedule, discrete=has_gpu, attention=attention, experts=EXPERT_PLACES[ffn])
        for attention in attentions
        for ffn in ffns
    ]
    if None in reasons:
        return
    named = [key for key in devices if key in fixes]
    if not has_gpu or not named:
        raise ConfigError(f"--fix schedule={schedule} cannot be: it {reasons[0]}")
    raise _contradiction(fixes, "schedule", *named, why=f"{schedule} {reasons[0]}")


def _contradiction(fixes: Mapping[str, Fixed], *keys: str, why: str) -> ConfigError:
    named = [f"--fix {key}={fixes[key]}" for key in keys]
    return ConfigError(f"{', '.join(named[:-1])} and {named[-1]} contradict each other: {why}")
