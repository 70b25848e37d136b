"""The table of families: what was measured of each with one version of transformers, and the self-tests that passed on
this machine. Reads and writes files alone: neither torch nor transformers is imported.

``families.json`` is written by ``make families`` (tests/models/graph/measured.py).
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from moelight import __version__
from moelight.core.errors import ConfigError
from moelight.core.paths import cache_directory, write_whole

TABLE = Path(__file__).with_name("families.json")
_NEEDED = ("transformers", "greenlet", "torch")


@dataclass(frozen=True, kw_only=True)
class Family:
    """One family of transformers.

    Attributes:
        name: of its folder.
        types: every ``model_type`` of a language model in it; of a family without one, of the first config.
        model_type: the one of ``types`` that stands for the family.
        how, reason, mixers: as of `support.Support`.
        error: largest error of logits in float32 against transformers' eager forward, relative to the largest of their
            row; None: not measured with this version of transformers.
        same: of ``prompts``, how many have the tokens of transformers' greedy search.
        shapes: drawn shapes and switches, of which ``shapes_equal`` run with the tokens of transformers;
            ``shapes_differ``: what was drawn of each of the others, and the refusal or difference.
        switches: fields of a released config where the defaults of the class have none, or others.
    """

    name: str
    types: tuple[str, ...]
    model_type: str
    how: str | None = None
    reason: str | None = None
    mixers: tuple[str, ...] = ()
    error: float | None = None
    same: int = 0
    prompts: int = 0
    shapes: int = 0
    shapes_equal: int = 0
    shapes_differ: tuple[str, ...] = ()
    switches: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Table:
    """Families as ``transformers``, a version, has them."""

    transformers: str
    families: tuple[Family, ...]

    @classmethod
    def read(cls, path: Path = TABLE) -> Table:
        content = json.loads(path.read_text(encoding="utf-8"))
        families = (
            Family(
                **{
                    **entry,
                    "types": tuple(entry["types"]),
                    "mixers": tuple(entry.get("mixers", ())),
                    "shapes_differ": tuple(entry.get("shapes_differ", ())),
                }
            )
            for entry in content["families"]
        )
        return cls(transformers=content["transformers"], families=tuple(families))

    def write(self, path: Path) -> None:
        """Raises OSError."""
        rows = [{key: value for key, value in asdict(family).items() if value} for family in self.families]
        lines = ",\n".join("  " + json.dumps(row, ensure_ascii=False) for row in rows)
        head = f'{{\n "transformers": {json.dumps(self.transformers)},\n "families": [\n'
        write_whole(path, f"{head}{lines}\n ]\n}}\n")


def versions() -> tuple[str, str, str]:
    """Return the installed versions of transformers, torch and moelight; raises ConfigError if they, or greenlet, are
    missing."""
    installed = {}
    for name in _NEEDED:
        try:
            installed[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            raise ConfigError(
                f"{name} is not installed, of whose families this is the list: pip install 'moelight[graph]'"
            ) from None
    return installed["transformers"], installed["torch"], __version__


def known_table() -> Table | None:
    """The table of the installed version of transformers: the measured one, or what `keep` kept; else None."""
    table, path = Table.read(), _kept()
    if table.transformers == versions()[0]:
        return table
    try:
        return Table.read(path)
    except (OSError, ValueError, TypeError, KeyError):
        return None


def keep(families: Iterable[Family]) -> Table:
    """The table of ``families``, kept for the installed versions."""
    table = Table(transformers=versions()[0], families=tuple(families))
    with contextlib.suppress(OSError):
        table.write(_kept())
    return table


def _kept() -> Path:
    theirs, torch, moelight_version = versions()
    return cache_directory("families", f"{theirs}-{torch}-{moelight_version}.json")


def self_tests() -> dict[str, float]:
    """By ``model_type``, the largest error of self-tests that passed on this machine with the installed versions."""
    wanted, errors = list(versions()), dict[str, float]()
    for path in sorted(cache_directory("self-tests").glob("*.txt")):
        with contextlib.suppress(OSError, ValueError):
            model_type, error, *of = path.read_text(encoding="utf-8").split()
            if of == wanted:
                errors[model_type] = max(errors.get(model_type, 0.0), float(error))
    return errors
