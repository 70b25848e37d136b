"""What no editor would write: huge, nested, binary and broken texts are read quickly, or refused in words."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from moelight.core.errors import ConfigError
from moelight.lang.check import read
from moelight.lang.diagnostics import diagnostic_lines
from moelight.lang.files import load_expert_policies, load_expert_policy, read_file

SOUND = "policy p { cache { capacity = 4 } }"
HOSTILE = {
    "nested": "policy p { cache " + "{" * 20_000,
    "closed": "}" * 50_000,
    "soup": "policy p { hierarchy " + "{" * 5_000 + "}" * 5_000 + " }",
    "soup, open": "policy p { hierarchy " + "{" * 20_000,
    "digits": "policy p { cache { capacity = " + "9" * 50_000 + " } }",
    "percent": "policy p { cache { capacity = " + "9" * 5_000 + "% } }",
    "size": "policy p { cache { capacity = " + "9" * 5_000 + "GiB } }",
    "infinite": "policy p { cache { capacity = 4 ttl = 1e999 } }",
    "pipes": "policy p { cache { capacity = 4 eviction = lru" + " | lru" * 5_000 + " } }",
    "quotes": '"' * 50_000,
    "equals": "policy p { cache { " + "= " * 20_000 + "} }",
    "long line": "policy p { cache { capacity = 4 " + "x" * 100_000 + " } }",
    "nul": "policy p {\0 cache { capacity = 4 } }",
    "escape": "policy p { cache { capacity = \x1b[31m4 } }",
    "other digits": "policy p { cache { capacity = ٣ } }",
    "wide": "policy 策略 { cache { capacity = 4 } }",
    "lone brace in text": 'policy p { cache { capacity = 4 profile = "}" } } {',
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_texts_are_refused(name: str) -> None:
    reading = read(HOSTILE[name])
    assert reading.errors and not reading.policies
    for error in reading.errors[:3]:
        words = diagnostic_lines(error, "x\x1b.moe", reading.lines)
        assert len(words) < 1000
        assert all(c.isprintable() or c == "\n" for c in words)


def test_ten_megabytes_are_refused_at_once(tmp_path: Path) -> None:
    path = tmp_path / "big.moe"
    path.write_bytes(SOUND.encode() + b" " * 10_000_000)
    assert [error.code for error in read_file(path).errors] == ["too_long"]


def test_a_thousand_policies() -> None:
    text = "\n".join(SOUND.replace("policy p", f"policy p{number}") for number in range(1000))
    assert len(read(text).policies) == 1000


def test_any_mutation_of_a_policy_is_read() -> None:
    """Cut, doubled and swapped pieces: never a traceback, and a text without errors has policies."""
    text = (Path(__file__).parent / "corpus" / "good" / "every_key.moe").read_text(encoding="utf-8")
    for _ in range(150):
        start, end = sorted(random.sample(range(len(text)), 2))
        end = min(end, start + 40)
        at = random.randrange(len(text))
        piece = random.choice((text[start:end], "", random.choice('{}[]=:|,"#<>;%!\0é')))
        reading = read(text[:at] + piece + text[at + random.choice((0, 1, end - start)) :])
        assert bool(reading.policies) != bool(reading.errors)


def test_several_syntax_errors_and_what_is_between() -> None:
    text = """policy p {
    cache { capacity = = 4 eviction = mru ttl = 0 }
    prefetch { strategy = none, strategy history budget = 0 }
}
policy q { cache { capacity = 0 } }
"""
    expected = "2 syntax, 2 unknown_value, 2 V20, 3 syntax, 3 syntax, 3 V9, 5 V1"
    assert ", ".join(f"{error.line} {error.code}" for error in read(text).errors) == expected


def test_loading(tmp_path: Path) -> None:
    path = tmp_path / "two.moe"
    path.write_text("policy a { cache { capacity = 4 } }\npolicy bee { cache { capacity = 5 } }", encoding="utf-8")
    assert [policy.name for policy in load_expert_policies(path)] == ["a", "bee"]
    assert load_expert_policy(path, "bee").cache.capacity.value == 5
    with pytest.raises(ConfigError, match=r"2 policies \(a, bee\); name one"):
        load_expert_policy(path)
    with pytest.raises(ConfigError, match="did you mean 'bee'"):
        load_expert_policy(path, "be")
    path.write_text(SOUND, encoding="utf-8")
    assert load_expert_policy(path).name == "p"
    path.write_text("policy a { cache { capacity = 0 } }", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"two.moe:1:31: .*\[V1\]"):
        load_expert_policy(path)


@pytest.mark.parametrize("file_name", ["none.moe", ".", "a\0b"])
def test_what_cannot_be_read(tmp_path: Path, file_name: str) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        read_file(tmp_path / file_name)
