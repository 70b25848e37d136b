"""The page of ``moelight inspect --check``: what a checkpoint consists of, and why it runs or does not."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from moelight.cli.tables import open_console, plain_table, print_json, printable, section, show, stacked, text
from moelight.core.units import format_bytes

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

    from moelight.engine.checkpoint_report import CheckpointReport, TensorFamily, TextReport

_ROADS = {"native": "by moelight's own decoder", "graph": "as transformers' module graph"}
_MAX_FAMILIES, _MAX_REFUSALS, _MAX_TOKENS, _MAX_LETTERS = 60, 12, 12, 40
_HEADS, _LEAST_NAME = ("count", "format", "bytes"), 24


def check_and_show(model: str, *, as_json: bool) -> bool:
    """Check ``model`` and print the page, or JSON; returns whether the model runs."""
    from moelight.engine.checkpoint_report import check_checkpoint
    from moelight.engine.model import LazyModel

    report = check_checkpoint(LazyModel(model))
    if as_json:
        print_json(report_as_dict(report))
    else:
        console = open_console()
        show(console, *_parts(report, console.width))
    return not report.refusals


def report_as_dict(report: CheckpointReport) -> dict[str, Any]:
    """Return ``report`` as plain values, sizes in bytes."""
    return {
        "model": report.name,
        "runs": not report.refusals,
        "refusals": list(report.refusals),
        "place": None if report.path is None else str(report.path),
        "model_type": report.model_type or None,
        "road": report.road or None,
        "context": report.context or None,
        "files": report.files,
        "tensors": [asdict(family) for family in report.families],
        "text": None if report.text is None else asdict(report.text),
    }


def _parts(report: CheckpointReport, width: int) -> Iterable[RenderableType | None]:
    if report.refusals:
        # The first line is that of a job, whatever the width of the terminal.
        print(printable(f"moelight: error: {report.refusals[0]}"))
    if report.path is None:
        return
    head = text(("runs", "bold green"), f" {_ROADS[report.road]}") if not report.refusals else None
    yield stacked(*filter(None, (head, text((report.name, "bold"), f"  {_about(report)}".rstrip()))))
    if len(report.refusals) > 1:
        more = report.refusals[1 : _MAX_REFUSALS + 1]
        left = len(report.refusals) - 1 - len(more)
        inside = f"{report.path}/"
        lines = [*(line.removeprefix(inside) for line in more), *([f"{left:,} more"] if left else [])]
        yield section("more that does not fit", text("\n".join(lines)))
    if report.read:
        yield section("tensors", _tensors(report.read, width))
    if report.ignored:
        yield section("not read", _ignored(report.ignored, width))
    if report.text is not None:
        yield section("text", _text(report))


def _about(report: CheckpointReport) -> str:
    size = sum(family.nbytes for family in report.families)
    files = f"{format_bytes(size)} in {report.files:,} file{'' if report.files == 1 else 's'}" if report.files else ""
    return ", ".join(filter(None, (report.model_type, files)))


def _tensors(families: Sequence[TensorFamily], width: int) -> Table:
    table = plain_table("name", ">count", "format", ">bytes")
    families = sorted(families, key=family_name)
    rows = [
        (family_name(family), f"{family.count:,}", printable(family.format), format_bytes(family.nbytes))
        for family in families[:_MAX_FAMILIES]
    ]
    beside = sum(
        max(map(len, (head, *column))) + 2
        for head, column in zip(_HEADS, list(zip(*rows, strict=True))[1:], strict=True)
    )
    for name, *others in rows:
        table.add_row(text("\n".join(broken(printable(name), max(_LEAST_NAME, width - beside - 4)))), *others)
    if len(families) > _MAX_FAMILIES:
        rest = families[_MAX_FAMILIES:]
        count, size = sum(family.count for family in rest), sum(family.nbytes for family in rest)
        table.add_row(f"{len(rest):,} more families", f"{count:,}", "", format_bytes(size))
    return table


def broken(name: str, width: int) -> Iterator[str]:
    """Yield ``name`` in lines of at most ``width``, cut behind a dot, a comma or an underscore where there is one."""
    while len(name) > width:
        cut = max(name.rfind(sign, 0, width) for sign in ".,_") + 1 or width
        yield name[:cut]
        name = f"  {name[cut:]}"
    yield name


def _ignored(families: Sequence[TensorFamily], width: int) -> RenderableType:
    by_reason: dict[str, list[TensorFamily]] = {}
    for family in families:
        by_reason.setdefault(family.reason, []).append(family)
    return stacked(
        *(part for reason, alike in by_reason.items() for part in (text((reason, "dim")), _tensors(alike, width)))
    )


def family_name(family: TensorFamily) -> str:
    """Return the name of ``family`` with its leaves in braces: ``model.layers.*.mlp.{gate,up,down}_proj``."""
    dot, leaves = "." if family.name else "", family.leaves
    if len(leaves) == 1:
        return f"{family.name}{dot}{leaves[0]}"
    end = "_" + leaves[0].rpartition("_")[2] if all("_" in leaf for leaf in leaves) else ""
    return f"{family.name}{dot}{{{','.join(leaf.removesuffix(end) for leaf in leaves)}}}{end}"


def _text(report: CheckpointReport) -> Table:
    text_report = report.text
    assert text_report is not None
    table = plain_table("", "")
    table.show_header = False
    table.columns[1].no_wrap = False
    for name, words in _text_rows(text_report, report.context):
        table.add_row(text((name, "dim")), text(words))
    return table


def _text_rows(report: TextReport, context: int) -> Iterable[tuple[str, str]]:
    yield "tokenizer", f"{report.tokenizer}, {report.tokens:,} tokens, {report.special:,} of them special"
    if context:
        yield "context", f"{context:,} tokens"
    ends = _joined(f"{_short(words)} ({token})" for token, words in report.ends)
    yield "answers end at", ends or "max_tokens alone: no file says which token ends an answer"
    yield (
        "special tokens",
        _joined(f"{role.removesuffix('_token')} {_short(words)}" for role, words in report.roles.items()),
    )
    if not report.template:
        yield "chat template", "none: rows with messages are refused unless --chat-template names a file"
        return
    names = "" if report.templates == ("default",) else f" ({_joined(report.templates)})"
    yield "chat template", f"{report.template}{names}"
    ending = {words for _, words in report.ends}
    marked = (f"{_short(words)}{' (ends an answer)' if words in ending else ''}" for words in report.written)
    yield "  with the tokens", _joined(marked) or "no special token"


def _short(words: str) -> str:
    return words if len(words) <= _MAX_LETTERS else f"{words[:_MAX_LETTERS]}…"


def _joined(words: Iterable[str]) -> str:
    shown = list(words)
    more = len(shown) - _MAX_TOKENS
    return ", ".join([*shown[:_MAX_TOKENS], *([f"{more:,} more"] if more > 0 else [])])
