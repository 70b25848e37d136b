"""Helpers for terminal tables: a console, bars, and escaping of control characters.

Imports rich, so commands import this module only when they print.
"""

from __future__ import annotations

from rich.console import Console, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

_KEPT_CONTROLS = "\n\t"
_EIGHTHS = " ▏▎▍▌▋▊▉"


def open_console() -> Console:
    """Return a console on standard output that prints text without markup or highlighting."""
    return Console(highlight=False, markup=False, emoji=False)


def bar(share: float, width: int, *, style: str = "blue", ground: str = "grey30") -> Text:
    """Return a bar that fills ``share`` (clamped to 0 to 1) of ``width`` characters, to an eighth of a character."""
    eighths = round(max(0.0, min(1.0, share)) * width * 8)
    if share > 0 and eighths == 0:
        eighths = 1
    whole, rest = divmod(eighths, 8)
    drawn = "█" * whole + (_EIGHTHS[rest] if rest else "")
    return Text.assemble((drawn, style), ("·" * (width - len(drawn)), ground))


def plain_table(*columns: str, numbers: tuple[str, ...] = ()) -> Table:
    """Return a table without frames: dim header, two blanks between columns, columns in ``numbers`` right-aligned."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim", show_edge=False)
    for column in columns:
        table.add_column(column, justify="right" if column in numbers else "left", no_wrap=True)
    return table


def printable(text: str) -> str:
    """Return ``text`` with control characters escaped, so that it cannot steer a terminal."""
    return "".join(c if c.isprintable() or c in _KEPT_CONTROLS else c.encode("unicode_escape").decode() for c in text)


def title(model: str, machine: str) -> Text:
    """Return the title ``model on machine``."""
    return Text.assemble((printable(model), "bold"), " on ", (machine_words(machine), "bold"))


def machine_words(machine: str) -> str:
    """Return the display name of a machine; ``auto`` is this machine."""
    return "this machine" if machine == "auto" else printable(machine)


def heading(words: str) -> Text:
    """Return a bold heading."""
    return Text(words, style="bold")


def indented(part: RenderableType, *, by: int = 2) -> Padding:
    """Return ``part`` indented by ``by`` characters."""
    return Padding(part, (0, 0, 0, by), expand=False)
