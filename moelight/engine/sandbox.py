"""Renders chat templates in jinja2's sandbox, as transformers does, within a `ConfinedProcess`: templates are untrusted
code, and jinja2's sandbox limits neither their time nor their memory."""

from __future__ import annotations

import datetime as dt
import json
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import jinja2.ext
import jinja2.parser
import jinja2.sandbox
from jinja2 import nodes

MOST_LETTERS = 1 << 24  # of a rendered conversation
_KEPT = 16  # compiled templates
_LONGEST_COMPLAINT = 300  # characters


class Sandbox(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """The environment that transformers gives a chat template."""

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, jinja2.ext.loopcontrols])
        self.filters["tojson"] = _tojson
        self.globals.update(raise_exception=_raise_exception, strftime_now=_strftime_now)


class _GenerationBlock(jinja2.ext.Extension):
    """``{% generation %}`` marks the assistant's words for training; here its body is simply written."""

    tags = {"generation"}  # noqa: RUF012 (as jinja2 declares it)

    def parse(self, parser: jinja2.parser.Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True)).set_lineno(line)


def renderer(_setup: object) -> Callable[[list[Any]], list[str | None] | None]:
    """The function from a question ``[key, source, values]`` to ``[text, None]``, or to ``[None, why]`` if the template
    fails. With ``source`` None, the answer is None if the template of ``key`` is not known."""
    renderers: OrderedDict[str, Callable[[dict[str, Any]], str] | str] = OrderedDict()

    def answer(question: list[Any]) -> list[str | None] | None:
        key, source, values = question
        if key not in renderers and source is None:
            return None
        try:
            if key not in renderers:
                try:
                    renderers[key] = _compiled(source)
                except Exception as error:  # noqa: BLE001 (kept, so that it is not compiled again for every row)
                    renderers[key] = _one_line(error)
                if len(renderers) > _KEPT:
                    renderers.popitem(last=False)
            renderers.move_to_end(key)
            render = renderers[key]
            return [None, render] if isinstance(render, str) else [render(values), None]
        except Exception as error:  # noqa: BLE001 (a template may raise anything)
            return [None, _one_line(error)]

    return answer


def _compiled(source: str) -> Callable[[dict[str, Any]], str]:
    """The function that renders the template ``source``; raises whatever jinja2 does."""
    environment = Sandbox()
    tree = environment.parse(source)
    wants_parts = _walks_content(tree)
    template = environment.from_string(tree)

    def render(values: dict[str, Any]) -> str:
        if not wants_parts:  # parts are joined by line breaks, as vLLM joins them
            for message in values["messages"]:
                if isinstance(message.get("content"), list):
                    message["content"] = "\n".join(part["text"] for part in message["content"])
        pieces, letters = [], 0
        for piece in template.generate(values):
            letters += len(piece)
            if letters > MOST_LETTERS:
                raise ValueError(f"it writes more than {MOST_LETTERS:,} letters")
            pieces.append(piece)
        return "".join(pieces)

    return render


def _walks_content(tree: nodes.Template) -> bool:
    """True if the template iterates over the parts of a message's content itself, under any variable name."""
    names = {"content"}
    for assignment in tree.find_all(nodes.Assign):
        if isinstance(assignment.target, nodes.Name) and _is_content(assignment.node, names):
            names.add(assignment.target.name)
    return any(_is_content(loop.iter, names) for loop in tree.find_all(nodes.For))


def _is_content(expression: nodes.Node | None, names: set[str]) -> bool:
    while isinstance(expression, nodes.Filter):
        expression = expression.node
    if isinstance(expression, nodes.Name):
        return expression.name in names
    if isinstance(expression, nodes.Getitem):
        return isinstance(expression.arg, nodes.Const) and expression.arg.value == "content"
    return isinstance(expression, nodes.Getattr) and expression.attr == "content"


def _tojson(
    value: object,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as it is, not escaped for HTML as by jinja2's own filter."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return dt.datetime.now().strftime(pattern)


def _one_line(error: BaseException) -> str:
    if isinstance(error, MemoryError):
        return "it takes too much memory"
    line = " ".join(str(error)[: 2 * _LONGEST_COMPLAINT].split()) or type(error).__name__
    return line if len(line) <= _LONGEST_COMPLAINT else f"{line[:_LONGEST_COMPLAINT]}…"
