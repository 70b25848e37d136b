"""Building blocks of terminal output: text without control characters, bars and tables.

rich is imported on first use, since help texts and refusals do not need it.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.padding import Padding
    from rich.table import Table
    from rich.text import Text

_KEPT_CONTROLS = "\n\t"
_EIGHTHS = " ▏▎▍▌▋▊▉"


def open_console() -> Console:
    """Return a console on standard output that prints text without markup or highlighting."""
    from rich.console import Console

    return Console(highlight=False, markup=False, emoji=False)


def print_json(value: Any) -> None:
    """Print ``value`` as JSON with indentation."""
    print(json.dumps(value, indent=2, allow_nan=False))


def show(console: Console, *parts: RenderableType | None) -> None:
    """Print ``parts``, without those that are None, with an empty line between two."""
    for number, part in enumerate(part for part in parts if part is not None):
        if number:
            console.print()
        console.print(part)


def text(*parts: str | tuple[str, str]) -> Text:
    """Return one text of ``parts``, each a string or a string with its style, with control characters escaped."""
    from rich.text import Text

    pairs = ((part, "") if isinstance(part, str) else part for part in parts)
    return Text.assemble(*((printable(words), style) for words, style in pairs))


def stacked(*parts: RenderableType) -> RenderableType:
    """Return ``parts`` one below the other."""
    from rich.console import Group

    return Group(*parts)


def bar(share: float, width: int, *, style: str = "blue", ground: str = "grey30") -> Text:
    """Return a bar that fills ``share`` (clamped to 0 to 1) of ``width`` characters, to an eighth of a character."""
    eighths = max(round(max(0.0, min(1.0, share)) * width * 8), share > 0)  # more than nothing is seen
    full, rest = divmod(eighths, 8)
    drawn = "█" * full + (_EIGHTHS[rest] if rest else "")
    return text((drawn, style), ("·" * (width - len(drawn)), ground))


def plain_table(*columns: str, rows: Iterable[Iterable[RenderableType]] = ()) -> Table:
    """Return a table without frames: dim header, two blanks between columns; a column ``>name`` is right-aligned."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim", show_edge=False)
    for column in columns:
        table.add_column(column.removeprefix(">"), justify="right" if column.startswith(">") else "left", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    return table


def printable(text: str) -> str:
    """Return ``text`` with control characters escaped, so that it cannot steer a terminal."""
    return "".join(c if c.isprintable() or c in _KEPT_CONTROLS else c.encode("unicode_escape").decode() for c in text)


def missing_kernels() -> str | None:
    """The line about the absence of native kernels: why, and what to do; None where they serve."""
    from moelight.kernels import native

    if native.available():
        return None
    return f"no native kernels: {native.reason()}; torch's serve, which are slower; {native.remedy()}"


def say_missing_kernels() -> None:
    """Print `missing_kernels` on stderr, the first line of a command that computes."""
    if (line := missing_kernels()) is not None:
        print(printable(f"moelight: {line}"), file=sys.stderr, flush=True)


def title(model: str, machine: str) -> Text:
    """Return the title ``model on machine``."""
    return text((model, "bold"), " on ", (machine_words(machine), "bold"))


def machine_words(machine: str) -> str:
    """Return the display name of a machine; ``auto`` is this machine."""
    return "this machine" if machine == "auto" else printable(machine)


def indented(part: RenderableType, *, by: int = 2) -> Padding:
    """Return ``part`` indented by ``by`` characters."""
    from rich.padding import Padding

    return Padding(part, (0, 0, 0, by), expand=False)


def section(words: str, part: RenderableType) -> RenderableType:
    """Return ``part``, indented, below a bold heading."""
    return stacked(text((words, "bold")), indented(part))
