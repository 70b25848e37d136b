"""Text and objects are two spellings of one policy; a text that is laid out anew keeps its keys and comments."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings

from moelight.core.errors import ConfigError
from moelight.experts.policy import DEFAULT_POLICY, Action, AdaptRule, CacheRules, Capacity, ExpertPolicy
from moelight.lang.builder import check_expert_policy
from moelight.lang.check import read
from moelight.lang.files import load_expert_policy, read_file
from moelight.lang.format import format_policy, format_text
from tests.lang.policies import policies

ROOT = Path(__file__).resolve().parents[2]
GOOD = [*sorted((Path(__file__).parent / "corpus" / "good").glob("*.moe"))]
EXAMPLES = sorted((ROOT / "examples" / "policies").glob("*.moe"))
SMALLEST = ExpertPolicy(name="p", cache=CacheRules(capacity=Capacity(value=4)))
RULE = AdaptRule(metric="hit_rate", op="<", threshold=0.5, action=Action(kind="set", name="prefetch_budget", value=2))


@settings(max_examples=40, deadline=None)
@given(policies())
def test_object_to_text_to_object(policy: ExpertPolicy) -> None:
    text = format_policy(policy)
    reading = read(text)
    assert not reading.errors, (text, reading.errors)
    assert reading.policies == (policy,)
    assert format_text(text) == text
    check_expert_policy(policy)


@pytest.mark.parametrize("path", GOOD, ids=lambda path: path.stem)
def test_text_to_object_to_text(path: Path) -> None:
    reading = read_file(path)
    result = tuple(read(format_policy(policy)).policies[0] for policy in reading.policies)
    assert result == reading.policies
    laid_out = format_text(reading.text)
    assert read(laid_out).policies == reading.policies
    assert format_text(laid_out) == laid_out
    assert [line.split("#", 1)[1] for line in laid_out.splitlines() if "#" in line and '"' not in line] == [
        line.split("#", 1)[1].rstrip() for line in reading.text.splitlines() if "#" in line and '"' not in line
    ]


def test_the_default_can_be_read_in_the_examples() -> None:
    (path,) = (item for item in EXAMPLES if item.stem == "default")
    assert load_expert_policy(path) == DEFAULT_POLICY


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_examples_are_sound_and_laid_out(path: Path) -> None:
    reading = read_file(path)
    assert not reading.errors and not reading.warnings
    assert [policy.name for policy in reading.policies] == [path.stem]
    assert format_text(reading.text) == reading.text


def test_the_six_systems_are_there() -> None:
    systems = {"fiddler", "hybrimoe", "moe_infinity", "vllm", "expertflow", "finemoe"}
    assert systems <= {path.stem for path in EXAMPLES}


def test_layout() -> None:
    text = """\
# of the file
version 0.70
policy p { # of the policy
  cache { # of the block
    # of the key
    eviction = fallback capacity = 2048MiB # of the last key
    pin=[1,2]; profile = "# no comment" frequency_decay = 0.95:0.50 when hit_rate<.4
  }
  prefetch { predictor = history budget = 4 }
  # of nothing
}
"""
    assert (
        format_text(text)
        == """\
# of the file
version 0.7

policy p {  # of the policy
    cache {  # of the block
        capacity = 2GiB  # of the last key
        # of the key
        eviction = lfu | lru
        pin = [1, 2]
        frequency_decay = 0.95 : 0.5 when hit_rate < 0.4
        profile = "# no comment"
    }
    prefetch {
        strategy = history
        budget = 4
    }
}
# of nothing
"""
    )


def test_only_what_differs_is_written() -> None:
    assert format_policy(SMALLEST) == "policy p {\n    cache {\n        capacity = 4\n    }\n}\n"


@pytest.mark.parametrize(
    ("capacity", "words"),
    [
        (Capacity(value=16), "16"),
        (Capacity(value=25.0, unit="percent"), "25%"),
        (Capacity(value=1e-7, unit="percent"), "0.0000001%"),
        (Capacity(value=3 << 29, unit="bytes"), "1536MiB"),
        (Capacity(value=500_000_000, unit="bytes"), "500MB"),
        (Capacity(value=1 << 40, unit="bytes"), "1TiB"),
        (Capacity(value=1001, unit="bytes"), "1001B"),
    ],
)
def test_capacities_are_written_exactly(capacity: Capacity, words: str) -> None:
    policy = replace(SMALLEST, cache=replace(SMALLEST.cache, capacity=capacity))
    assert f"capacity = {words}\n" in format_policy(policy)
    assert read(format_policy(policy)).policies == (policy,)


@pytest.mark.parametrize(
    "rules",
    [
        [replace(RULE, cooldown=7)],
        [replace(RULE, conditional=True, accesses=2)],
        [RULE, replace(RULE, conditional=True)],
        [replace(RULE, conditional=True), replace(RULE, conditional=True)],
    ],
)
def test_what_the_language_cannot_say_is_refused(rules: list[AdaptRule]) -> None:
    with pytest.raises(ConfigError, match="policy p: "):
        format_policy(replace(SMALLEST, adapt=tuple(rules)))


def test_a_text_with_errors_is_not_laid_out() -> None:
    with pytest.raises(ConfigError, match=r"line 1, column 31: .*V1"):
        format_text("policy p { cache { capacity = 0 } }")
