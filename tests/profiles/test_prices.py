"""Price files: what the shipped one says, and where a wrong one is wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from moelight.core.errors import ConfigError
from moelight.profiles.files import profile_names
from moelight.profiles.prices import load_prices

GOOD = "name: mine\ndate: 2026-12-01\ncurrency: EUR\nhourly:\n  t4: 0.5\n"


def written(tmp_path: Path, text: str) -> str:
    path = tmp_path / "mine.yaml"
    path.write_text(text, encoding="utf-8")
    return str(path)


def test_the_shipped_prices_are_examples_with_a_date() -> None:
    assert list(profile_names("price")) == ["examples"]
    prices = load_prices("examples")
    assert prices.date and prices.source and prices.setup_s > 0
    assert {name for name, _ in prices.hourly} == profile_names("hardware").keys() - {"laptop-nvme"}


def test_a_file_of_ones_own(tmp_path: Path) -> None:
    prices = load_prices(written(tmp_path, GOOD + "  box: 2\nsetup: 90s\n"), ["box"])
    assert (prices.name, prices.date, prices.currency, prices.setup_s) == ("mine", "2026-12-01", "EUR", 90.0)
    assert (prices.of("t4"), prices.of("box"), prices.of("l4")) == (0.5, 2.0, None)
    assert load_prices(written(tmp_path, GOOD)).setup_s == 0.0


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        (GOOD + "  h10: 4\n", 6, ("'h10'", "did you mean 'h100'?")),
        (GOOD + "  l4: free\n", 6, ("hourly.l4", "'free'", "0.95")),
        (GOOD + "  l4: -1\n", 6, ("hourly.l4", "out of range")),
        (GOOD + "  l4: 0\n", 6, ("hourly.l4", "out of range")),
        (GOOD + "  l4: true\n", 6, ("hourly.l4", "must be a number")),
        (GOOD + "  l4: .inf\n", 6, ("hourly.l4", "finite")),
        (GOOD + "  t4: 1\n", 6, ("'t4'", "twice")),
        (GOOD + "setup: 5\nprice: 4\n", 7, ("unknown key 'price'",)),
        (GOOD + "setup: soon\n", 6, ("setup", "'soon'")),
        (GOOD.replace("2026-12-01", "yesterday"), 2, ("date", "2026-11-03")),
        (GOOD.replace("currency: EUR\n", ""), 1, ("'currency'",)),
        ("name: mine\ndate: 2026-12-01\ncurrency: EUR\nhourly: {}\n", 4, ("hourly", "no price")),
        ("name: mine\ndate: 2026-12-01\ncurrency: EUR\nhourly: 3\n", 4, ("hourly", "mapping")),
    ],
)
def test_an_error_has_the_line_and_the_key(tmp_path: Path, text: str, line: int, words: tuple[str, ...]) -> None:
    path = written(tmp_path, text)
    with pytest.raises(ConfigError) as error:
        load_prices(path)
    message = str(error.value)
    assert message.startswith(f"{path}:{line}: ") and "\n" not in message
    for word in words:
        assert word in message


def test_an_unknown_name_lists_the_shipped_one() -> None:
    with pytest.raises(ConfigError, match=r"unknown price profile 'example' \(did you mean 'examples'\?\)"):
        load_prices("example")
