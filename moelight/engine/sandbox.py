"""The sandbox a chat template runs in: jinja2's own, closed further, with a budget of work.

A template comes with a downloaded model, so it is nobody's trusted code. jinja2's sandbox keeps it from Python's
internals; this room adds what that leaves open: only known methods may be called, and everything that can grow or
repeat is paid for beforehand. Knows jinja2's syntax tree. Refuses to know messages and checkpoints.

::

    source ─► jinja2 parser ─► tree ─► _Metered: loops, literals, ~, slices, comparisons go through private filters
                                  └─► code; operators, calls, filters, tests and written values charge the `Meter`
"""

from __future__ import annotations

import json
import re
import types
from collections.abc import Callable, Mapping
from typing import Any, TypeVar, cast

import jinja2
import jinja2.ext
import jinja2.parser
import jinja2.runtime
import jinja2.sandbox
import jinja2.visitor
from jinja2 import nodes
from jinja2.exceptions import SecurityError

from moelight.engine.meter import (
    METHODS,
    PIECE,
    STEP,
    Helper,
    check_bits,
    check_method,
    check_printf,
    check_value,
    check_width,
    counted,
    extent,
    meter,
    metered_filter,
    metered_test,
)

# What a template may raise: its own refusal, the sandbox's, and what wrong types and sizes lead to. SyntaxError: the
# generated Python nests too deep, or a break stands outside a loop.
FAULTS = (
    *(jinja2.TemplateError, ArithmeticError, AssertionError, AttributeError, LookupError, MemoryError, NameError),
    *(RuntimeError, StopIteration, SyntaxError, TypeError, ValueError),
)
LEAST_WORK = 10_000_000  # under a second of the dearest mixture of steps; real templates take some thousands
WORK_PER_SIZE = 64  # a template may look at each character of its conversation this often

_NODE = 4  # of the syntax tree, each time it may be run: 64 bytes at most, an empty list
# No template in the wild uses these, and each takes far longer than its input is long.
_CLOSED_FILTERS = ("pprint", "striptags", "urlize", "wordwrap", "xmlattr")
_SCOPES = ("_loop_vars", "_block_vars")  # what jinja2's own code adds to calls, for itself
_LOOP_NAMES = frozenset({"depth", "depth0", "first", "index", "index0", "last", "length", "revindex", "revindex0"})
_PLAIN = frozenset({bool, int, str, list, type(None)})
_DICT_NAMES = frozenset(dir(dict))
_COMPARING_TESTS = (
    *("!=", "<", "<=", "==", ">", ">=", "eq", "equalto"),
    *("ge", "greaterthan", "gt", "in", "le", "lessthan", "lt", "ne"),
)


_Repeated = TypeVar("_Repeated", nodes.For, nodes.Macro, nodes.CallBlock)


class Sandbox(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """The environment of chat templates: what transformers gives its own, under a `Meter`.

    Every use, compiling included, happens within ``with meter:``.
    """

    intercepted_binops = frozenset({"+", "-", "*", "/", "//", "%", "**"})

    def __init__(self, helpers: Mapping[str, Callable[..., object]]) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            finalize=_written,
            optimized=False,  # a constant worked out by the compiler would be made again for nothing
            extensions=[_GenerationBlock, jinja2.ext.loopcontrols],
        )
        for name in _CLOSED_FILTERS:
            del self.filters[name]
        del self.globals["lipsum"]
        self.globals.update(helpers, dict=_Dict(), namespace=_Namespace)
        self._callable_globals = frozenset(id(value) for value in self.globals.values())
        self.filters = {name: metered_filter(name, function) for name, function in self.filters.items()}
        self.filters["tojson"] = _tojson
        self.filters.update(_tick=_tick, _concat=_concat, _slice=_sliced, _weigh=_weighed, _value=_checked)
        for name in _COMPARING_TESTS:
            self.tests[name] = metered_test(cast("Callable[..., Any]", self.tests[name]))

    def _generate(self, source: nodes.Template, *args: Any, **kwargs: Any) -> str:
        metered = _Metered().visit(source)
        metered.set_environment(self)
        metered.set_lineno(1)
        return super()._generate(metered, *args, **kwargs)

    def call_binop(self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any) -> Any:
        now = meter()
        if operator == "+" and type(left) is str and type(right) is str:
            now.charge(STEP + len(left) + len(right))
            return left + right
        now.charge(STEP)
        check_value(left)
        check_value(right)
        if isinstance(left, int) and isinstance(right, int):
            check_bits(operator, left, right)
        elif operator == "*" and (isinstance(left, int) or isinstance(right, int)):
            sequence, count = (right, left) if isinstance(left, int) else (left, right)
            if hasattr(sequence, "__len__"):
                now.charge(PIECE * len(sequence) * max(count, 1))
        elif operator == "%" and isinstance(left, str):
            check_printf(left, right)
        else:
            now.charge(extent(left) + extent(right))
        return super().call_binop(context, operator, left, right)

    def call(self, context: jinja2.runtime.Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        now = meter()
        now.charge(STEP * (1 + len(args) + len(kwargs)))
        for given in (*args, *kwargs.values()):
            check_value(given)
        method = isinstance(obj, (types.BuiltinMethodType, types.MethodType))
        if method and not isinstance(obj.__self__, _OWNERS):
            args = check_method(obj, args, kwargs)
            if type(obj.__self__) in METHODS:
                return obj(*args, **{name: value for name, value in kwargs.items() if name not in _SCOPES})
        elif method or id(obj) in self._callable_globals:
            now.size(args)
            now.size(kwargs)
        elif not isinstance(obj, _CALLABLE):
            raise SecurityError(f"a value of type {type(obj).__name__} cannot be called")
        return super().call(context, obj, *args, **kwargs)

    def getattr(self, obj: Any, attribute: str) -> Any:
        # What nearly all templates ask for, by jinja2's own rules and without its exceptions and abstract classes: keys
        # of objects, the methods that `check_method` lets be called, where a loop is, plain values of a namespace.
        kind = type(obj)
        if kind is dict and attribute in obj and attribute not in _DICT_NAMES:
            return obj[attribute]
        if kind in METHODS and attribute in METHODS[kind]:
            return getattr(obj, attribute)
        if kind is jinja2.runtime.LoopContext and attribute in _LOOP_NAMES:
            return getattr(obj, attribute)
        if kind is _Namespace and type(value := getattr(obj, attribute, ())) in _PLAIN and attribute[:1] != "_":
            return value
        return super().getattr(obj, attribute)

    def getitem(self, obj: Any, argument: Any) -> Any:
        if not isinstance(argument, (str, int)):
            meter().size(argument)
        return super().getitem(obj, argument)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        if super().wrap_str_format(value) is None:
            return None
        return _BoundedFormat(self, str(value.__self__), mapped=value.__name__ == "format_map")


class _BoundedFormat(Helper):
    """``str.format`` with each field within bounds and every attribute by the sandbox's rules."""

    def __init__(self, environment: Sandbox, text: str, *, mapped: bool) -> None:
        self._formatter = _Formatter(environment)
        self._text = text
        self._mapped = mapped

    def __call__(self, *args: Any, **kwargs: Any) -> str:
        meter().charge(len(self._text))
        if self._mapped:
            (kwargs,), args = args, ()
        return self._formatter.vformat(self._text, args, kwargs)


class _Formatter(jinja2.sandbox.SandboxedFormatter):
    def convert_field(self, value: Any, conversion: Any) -> Any:
        meter().size(value, written=True)
        return super().convert_field(value, conversion)

    def format_field(self, value: Any, format_spec: str) -> str:
        check_width(*re.findall(r"\d+", format_spec))
        meter().size(value, written=True)
        text = str(super().format_field(value, format_spec))
        meter().charge(STEP + len(text))
        return text


class _Dict(Helper):
    """``dict()`` without the class behind it, whose methods would change what is not to be changed."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


class _Namespace(jinja2.utils.Namespace):
    """``namespace()`` without the names by which Python calls an object's internals."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()
        for name, value in dict(*args, **kwargs).items():
            self[name] = value

    def __setitem__(self, name: str, value: object) -> None:
        if str(name).startswith("_"):
            raise SecurityError(f"a namespace may not hold {name!r}")
        super().__setitem__(name, value)


_CALLABLE = (
    *(jinja2.runtime.Macro, jinja2.runtime.LoopContext, jinja2.runtime.BlockReference, jinja2.runtime.Undefined),
    *(jinja2.utils.Joiner, _BoundedFormat),
)
_OWNERS = (jinja2.runtime.LoopContext, jinja2.utils.Cycler, jinja2.runtime.TemplateReference, _Dict)


class _GenerationBlock(jinja2.ext.Extension):
    """``{% generation %}`` marks the assistant's words for training; here its body is simply written."""

    tags = {"generation"}  # noqa: RUF012 (as jinja2 declares it)

    def parse(self, parser: jinja2.parser.Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True)).set_lineno(line)


class _Metered(jinja2.visitor.NodeTransformer):
    """Rewrites a template so that what jinja2 gives no hook for passes through a filter that charges for it."""

    def visit_Output(self, node: nodes.Output) -> list[nodes.Node]:  # noqa: N802
        self.generic_visit(node)
        literal = sum(len(part.data) for part in node.nodes if isinstance(part, nodes.TemplateData))
        return [nodes.ExprStmt(_filter("_tick", nodes.Const(literal))), node] if literal else [node]

    def visit_For(self, node: nodes.For) -> nodes.Node:  # noqa: N802
        node = self._metered_body(node)
        if node.test is not None:
            node.test = nodes.And(_filter("_tick", nodes.Const(0)), node.test)
        return node

    def visit_Macro(self, node: nodes.Macro) -> nodes.Node:  # noqa: N802
        return self._metered_body(node)

    def visit_CallBlock(self, node: nodes.CallBlock) -> nodes.Node:  # noqa: N802
        return self._metered_body(node)

    def _metered_body(self, node: _Repeated) -> _Repeated:
        work = _NODE * sum(1 for _ in node.find_all(nodes.Node))
        self.generic_visit(node)
        node.body.insert(0, nodes.ExprStmt(_filter("_tick", nodes.Const(work))))
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        return _filter("_concat", nodes.List(node.nodes))

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        if not isinstance(node.arg, nodes.Slice):
            return node
        ends = (node.arg.start, node.arg.stop, node.arg.step)
        return _filter("_slice", node.node, [nodes.Const(None) if end is None else end for end in ends])

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        equality = len(node.ops) == 1 and node.ops[0].op in ("eq", "ne")
        if equality and any(isinstance(side, nodes.Const) for side in (node.expr, node.ops[0].expr)):
            node.expr, node.ops[0].expr = _value(node.expr), _value(node.ops[0].expr)
            return node  # nothing longer than the constant is looked at
        node.expr = _weigh(node.expr)
        for operand in node.ops:
            operand.expr = _weigh(operand.expr)
        return node

    def visit_Dict(self, node: nodes.Dict) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        for pair in node.items:
            pair.key = _weigh(pair.key)
        return node


def _filter(name: str, value: nodes.Expr, args: list[nodes.Expr] | None = None) -> nodes.Filter:
    return nodes.Filter(value, name, args or [], [], None, None)


def _weigh(node: nodes.Expr) -> nodes.Expr:
    return node if isinstance(node, nodes.Const) else _filter("_weigh", node)


def _value(node: nodes.Expr) -> nodes.Expr:
    return node if isinstance(node, nodes.Const) else _filter("_value", node)


def _tick(work: int) -> bool:
    meter().charge(STEP + work)
    return True


def _concat(parts: list[Any]) -> str:
    meter().size(parts, written=True)
    return "".join(map(str, parts))


def _sliced(value: Any, start: object, stop: object, step: object) -> Any:
    chunk = value[start:stop:step]
    meter().charge(STEP + extent(chunk))
    return chunk


def _checked(value: Any) -> Any:
    check_value(value)
    return value


def _weighed(value: Any) -> Any:
    meter().size(value)
    return value


@jinja2.pass_context  # else the compiler would write out what is constant
def _written(_context: jinja2.runtime.Context, value: Any) -> Any:
    now = meter()
    if type(value) is str:
        now.charge(STEP + len(value) + 1)
    else:
        now.charge(STEP)
        now.size(value, written=True)
    return value


def _tojson(
    value: object,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as it is, not escaped for HTML as jinja2's own filter does."""
    now = meter()
    check_width(indent if isinstance(indent, int) else len(indent or ""))
    now.charge(now.size(value) * (2 if separators is None else 2 + now.size(separators)))
    encoder = json.JSONEncoder(ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
    if indent is None:
        return encoder.encode(value)
    return "".join(counted(encoder.iterencode(value)))
