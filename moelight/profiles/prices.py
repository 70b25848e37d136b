"""Prices of machines by the hour, from a file; nothing is fetched. By name, ``price_profiles/NAME.yaml``."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from moelight.core.errors import ConfigError, did_you_mean
from moelight.profiles.files import YamlNode, find_profile, profile_names, read_yaml
from moelight.profiles.quantities import TIME, Quantity

PRICE = Quantity(
    name="a price of an hour",
    example="a number, for example 0.95",
    least=1e-6,
    maximum=1e9,
    range="0.000001 to 1,000,000,000",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Prices:
    """What machines cost.

    Attributes:
        name: of the file.
        date: the day on which the prices were valid, such as ``2026-11-29``.
        currency: such as ``USD``.
        source: where the prices come from.
        setup_s: seconds that each machine is paid for before the job begins.
        hourly: pairs of a machine's name and its price by the hour, of the whole machine.
    """

    name: str
    date: str
    currency: str
    source: str
    setup_s: float
    hourly: tuple[tuple[str, float], ...]

    def of(self, machine: str) -> float | None:
        """The price of an hour of ``machine``; None if the file has none."""
        return dict(self.hourly).get(machine)


def load_prices(name_or_path: str, machines: Iterable[str] = ()) -> Prices:
    """The prices called ``name_or_path``, or those of a YAML file. A machine there is a shipped one or one of
    ``machines``; another name is a ConfigError with file, line and the nearest name."""
    is_path = name_or_path.endswith((".yaml", ".yml")) or "/" in name_or_path
    root = read_yaml(Path(name_or_path) if is_path else find_profile("price", name_or_path))
    entries = root.fields("source", "setup", required=("name", "date", "currency", "hourly"))
    hourly = entries["hourly"].entries()
    names = sorted({*profile_names("hardware"), *machines})
    for name, node in hourly.items():
        if name not in names:
            raise ConfigError(
                f"{node.where}: hourly names the machine {name!r}, which is none{did_you_mean(name, names)}; "
                f"machines: {', '.join(names)}"
            )
    if not hourly:
        raise entries["hourly"].error("has no price")
    return Prices(
        name=entries["name"].text(),
        date=entries["date"].day(),
        currency=entries["currency"].text(),
        source=entries["source"].text() if "source" in entries else "",
        setup_s=_figure(entries["setup"], TIME) if "setup" in entries else 0.0,
        hourly=tuple((name, _figure(node, PRICE)) for name, node in hourly.items()),
    )


def _figure(node: YamlNode, quantity: Quantity) -> float:
    value = node.scalar()
    if value is None or isinstance(value, bool):
        raise node.error(f"must be {quantity.example}")
    return quantity.parse(value, label=f"{node.where}: {node.key}")
