"""What a policy takes of a model, and a reference that says what the code does."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from moelight.core.errors import ConfigError
from moelight.experts.cache import ExpertCache
from moelight.experts.policy import EVICTIONS, MODES, STRATEGIES
from moelight.lang.check import read
from moelight.lang.explain import ExpertSizes, cached_experts, meanings, memory_words, spread
from moelight.lang.keys import BLOCKS, KEYS
from tests.lang.test_corpus import BAD, GOOD, expected

ROOT = Path(__file__).resolve().parents[2]
REFERENCE = (ROOT / "docs" / "reference" / "policy-language.md").read_text(encoding="utf-8")
MODEL = ExpertSizes(layers=4, per_layer=16, page_bytes=1 << 20)


def policy(cache: str, rest: str = ""):  # type: ignore[no-untyped-def]
    reading = read(f"policy p {{ cache {{ {cache} }} {rest} }}")
    assert not reading.errors
    return reading.policies[0]


@pytest.mark.parametrize(
    ("cache", "rest", "count"),
    [
        ("capacity = 10", "", 10),
        ("capacity = 500", "", 64),
        ("capacity = 25%", "", 16),
        ("capacity = 5MiB", "", 5),
        ("capacity = 3", "per_layer { min_capacity = 1 }", 12),
        ("capacity = 50%", "per_layer { min_capacity = 1 }", 32),
        ("capacity = 3", "per_layer { total_budget = 20 }", 20),
        ("capacity = 2MiB", "per_layer { min_capacity = 1 }", 8),
        ("capacity = 400", "per_layer { min_capacity = 40 max_capacity = 50 }", 64),
    ],
)
def test_experts_with_room(cache: str, rest: str, count: int) -> None:
    assert cached_experts(policy(cache, rest), MODEL) == count


@pytest.mark.parametrize(
    ("cache", "rest"),
    [("capacity = 1", "per_layer { min_capacity = 2 }"), ("capacity = 64", "per_layer { max_capacity = 4 }")],
)
def test_budgets_that_cannot_be_met(cache: str, rest: str) -> None:
    with pytest.raises(ConfigError, match="cannot be shared out to 4 layers"):
        cached_experts(policy(cache, rest), MODEL)


def test_experts_with_room_are_those_of_the_cache() -> None:
    for rest in ("", "per_layer { min_capacity = 1 }", "per_layer { total_budget = 30 }"):
        for room in ("7", "25%", "6MiB"):
            asked = policy(f"capacity = {room}", rest)
            cache = ExpertCache.of(asked, num_layers=4, num_experts=16, page_bytes=1 << 20)
            assert cache.capacity == cached_experts(asked, MODEL)


def test_a_size_without_room_for_one_expert() -> None:
    with pytest.raises(ConfigError, match="holds no expert"):
        memory_words(policy("capacity = 1KiB"), MODEL, "m")


def test_experts_spread_over_the_memories() -> None:
    some = policy("capacity = 25%")
    tiers = {"device": 1 << 30, "host": 30 << 20, "disk": 1 << 40}
    assert spread(some, MODEL, tiers) == {"device": 16, "host": 30, "disk": 18}
    assert spread(some, MODEL, {"host": 1 << 30, "disk": 1 << 40}) == {"host": 16, "disk": 48}


def test_every_word_is_explained_and_in_the_reference() -> None:
    for key, choices in (("eviction", EVICTIONS), ("strategy", STRATEGIES), ("mode", MODES)):
        for word in choices:
            assert f"`{word}`" in REFERENCE
            told = replace(policy("capacity = 4"), name=key)
            section = {"eviction": "cache", "strategy": "prefetch", "mode": "schedule"}[key]
            value = (word,) if key == "eviction" else word
            told = replace(told, **{section: replace(getattr(told, section), **{key: value})})
            assert any(meaning.line.endswith(word) and meaning.words for meaning in meanings(told)), word


def test_rules_are_told_in_words() -> None:
    told = policy(
        "capacity = 16 : 8 when hit_rate > 0.9",
        "adapt { when eviction_rate > 0.5 for 9 accesses { trigger memory_pressure } }",
    )
    words = {meaning.line: meaning.words for meaning in meanings(told)}
    assert words["capacity = 16 : 8 when hit_rate > 0.9"].endswith("as soon as hit_rate > 0.9, make room for 8")
    assert "for 9 accesses in a row" in words["when eviction_rate > 0.5 for 9 accesses { trigger memory_pressure }"]


def test_examples_of_the_reference_are_sound() -> None:
    result = 0
    for block in re.findall(r"^```\n(.*?)^```", REFERENCE, re.MULTILINE | re.DOTALL):
        cache = "" if block.startswith("cache") else "cache { capacity = 16 }"
        text = block if "policy" in block else f"policy p {{ {cache} {block} }}"
        assert not read(text).errors, block
        result += 1
    assert result == 8


def test_the_reference_names_every_key_and_code() -> None:
    codes = {code for path in (*GOOD, *BAD) for _, code, _, _ in expected(path)}
    names = {*BLOCKS, *(key for keys in KEYS.values() for key in keys), *codes, "too_long", "unreadable"}
    assert not {name for name in names if f"`{name}`" not in REFERENCE and f"## {name}" not in REFERENCE}
