"""What tables on a terminal share: a console, bars of a given share, text made harmless.

Knows rich, so it is imported when a command prints.
"""

from __future__ import annotations

from rich.console import Console, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

_KEPT_CONTROLS = "\n\t"
_EIGHTHS = " ▏▎▍▌▋▊▉"


def open_console() -> Console:
    """Standard output, taking text as it is."""
    return Console(highlight=False, markup=False, emoji=False)


def bar(share: float, width: int, *, style: str = "blue", ground: str = "grey30") -> Text:
    """``share`` (0 to 1; more is drawn as 1) of ``width`` characters, to an eighth of a character."""
    eighths = round(max(0.0, min(1.0, share)) * width * 8)
    if share > 0 and eighths == 0:
        eighths = 1
    whole, rest = divmod(eighths, 8)
    drawn = "█" * whole + (_EIGHTHS[rest] if rest else "")
    return Text.assemble((drawn, style), ("·" * (width - len(drawn)), ground))


def plain_table(*columns: str, numbers: tuple[str, ...] = ()) -> Table:
    """A table without frames: a dim head, two blanks between columns; ``numbers`` are the columns set to the right."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim", show_edge=False)
    for column in columns:
        table.add_column(column, justify="right" if column in numbers else "left", no_wrap=True)
    return table


def printable(text: str) -> str:
    """``text`` without what could steer a terminal: control characters are shown, not obeyed."""
    return "".join(c if c.isprintable() or c in _KEPT_CONTROLS else c.encode("unicode_escape").decode() for c in text)


def title(model: str, machine: str) -> Text:
    """What runs on what; a machine that was measured as ``auto`` is this one."""
    return Text.assemble((printable(model), "bold"), " on ", (machine_words(machine), "bold"))


def machine_words(machine: str) -> str:
    """What a person calls the machine of a profile."""
    return "this machine" if machine == "auto" else printable(machine)


def heading(words: str) -> Text:
    """A title between blocks."""
    return Text(words, style="bold")


def indented(part: RenderableType, *, by: int = 2) -> Padding:
    """``part`` a little to the right."""
    return Padding(part, (0, 0, 0, by), expand=False)
