"""The plot of offers: names, the front, and what cannot be drawn."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

pytest.importorskip("matplotlib")

from moelight.core.errors import ConfigError
from moelight.observe.price_plot import write_offers


@dataclass(frozen=True)
class Drawn:
    label: str
    seconds: float
    price: float | None
    on_front: bool = False


def texts_of(path: Path) -> str:
    """The texts of an SVG file, which matplotlib writes as comments beside their outlines."""
    return path.read_text(encoding="utf-8")


def test_names_of_the_front_are_written_whatever_lies_there(tmp_path: Path) -> None:
    offers = [Drawn("cheap", 7200.0, 1.0, on_front=True), Drawn("fast", 600.0, 8.0, on_front=True)]
    offers += [Drawn(f"beaten{number}", 7200.0, 8.0) for number in range(40)]
    path = tmp_path / "prices.svg"
    write_offers(path, offers, title="mixtral: time and price", currency="EUR")
    text = texts_of(path)
    for word in ("cheap", "fast", "mixtral: time and price", "price of the job, EUR", "10 min", "2 h", "beaten0"):
        assert f"<!-- {word} -->" in text, word
    assert sum(f"<!-- beaten{number} -->" in text for number in range(40)) < 20  # as many as there is room for


def test_offers_without_a_price_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / "prices.svg"
    write_offers(path, [Drawn("one", 60.0, 0.01, on_front=True), Drawn("other", 60.0, None)], title="", currency="EUR")
    text = texts_of(path)
    assert "<!-- one -->" in text and "<!-- other -->" not in text
    with pytest.raises(ConfigError, match="no machine that runs the model has a price"):
        write_offers(tmp_path / "none.svg", [Drawn("other", 60.0, None)], title="", currency="EUR")
    assert not (tmp_path / "none.svg").exists()
