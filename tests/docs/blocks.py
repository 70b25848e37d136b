"""Fenced blocks of a Markdown file, and what of them is a command, its output or the content of a file.

Conventions, which readers understand too: a line that begins with ``$ `` is a command, and what follows it is its
output; a block right behind a block of commands (no empty line between) is the output of the last of them, or, as
JSON, the file that it wrote with ``-o``; a block under a line such as "`mine.jsonl`, one object a line:" is that file.
In what is shown ``…`` stands for anything, alone on a line for any number of lines; behind "(Trimmed" any lines may be
missing.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

_FILE = re.compile(r"`([\w./-]+)`(,[^`]*)?:")


@dataclass(frozen=True, kw_only=True)
class Block:
    """``first`` is the index of the first line between the fences. ``above`` and ``below``: the nearest lines of text;
    ``joined``: the block follows another without an empty line."""

    first: int
    language: str
    lines: list[str]
    above: str
    below: str
    joined: bool

    @property
    def file(self) -> str | None:
        """The file whose content this is, by the line above it."""
        match = _FILE.fullmatch(self.above)
        return match[1] if match is not None and not self.joined else None


@dataclass(kw_only=True)
class Shown:
    """What is shown of something: ``lines`` from index ``first`` of the file on; ``trimmed``: not all of it."""

    first: int
    lines: list[str]
    trimmed: bool


@dataclass(kw_only=True)
class Step:
    """One thing to do, in the order of the file: a command, a block of Python, or a file. ``shown``: its output, or
    where ``file`` is set the content of that file."""

    line: int
    command: str = ""
    python: str = ""
    file: str = ""
    shown: Shown | None = field(default=None)


def blocks_of(path: Path) -> list[Block]:
    """The fenced blocks of ``path``."""
    lines, result = path.read_text(encoding="utf-8").splitlines(), list[Block]()
    fences = [at for at, line in enumerate(lines) if line.startswith("```")]
    for start, end in zip(fences[::2], fences[1::2], strict=True):
        above = next((line for line in reversed(lines[:start]) if line.strip()), "")
        below = next((line for line in lines[end + 1 :] if line.strip()), "")
        result.append(
            Block(
                first=start + 1,
                language=lines[start][3:].strip(),
                lines=lines[start + 1 : end],
                above=above.strip(),
                below=below.strip(),
                joined=start > 0 and lines[start - 1].startswith("```"),
            )
        )
    return result


def steps_of(path: Path) -> list[Step]:
    """What ``path`` asks its reader to do, and what it says comes of it."""
    steps = list[Step]()
    for block in blocks_of(path):
        shown = Shown(first=block.first, lines=block.lines, trimmed=block.below.startswith("(Trimmed"))
        if block.language == "python":
            steps.append(Step(line=block.first, python="\n".join(block.lines)))
        elif block.joined and steps and steps[-1].command and steps[-1].shown is None and not _commands(block):
            output = re.search(r" (?:-o|--output) (\S+)", steps[-1].command)
            if block.language == "json" and output is not None:
                steps.append(Step(line=block.first, file=output[1], shown=shown))
            else:
                steps[-1].shown = shown
        elif block.file is not None:
            steps.append(Step(line=block.first, file=block.file, shown=shown))
        elif not block.language:
            steps += _commands(block)
    return steps


def _commands(block: Block) -> list[Step]:
    """The commands of a block, each with the lines behind it up to the next one; none where it begins otherwise."""
    result, lines = list[Step](), block.lines
    dollars = bool(lines) and lines[0].startswith("$ ")
    at = 0
    while at < len(lines):
        line, number = lines[at], block.first + at
        at += 1
        if dollars and not line.startswith("$ "):
            shown = result[-1].shown or Shown(first=number, lines=[], trimmed=block.below.startswith("(Trimmed"))
            shown.lines.append(line)
            result[-1].shown = shown
            continue
        command = line.removeprefix("$ ")
        if not dollars and not result and not re.match(r"(moelight|make|python|pip|git|source|jq) ", f"{command} "):
            return []
        while command.endswith("\\"):
            command = command.removesuffix("\\").rstrip() + " " + lines[at].strip()
            at += 1
        result.append(Step(line=number, command=command))
    return result
