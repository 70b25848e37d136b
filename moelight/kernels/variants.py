"""Forms of native kernels: what there is, what is in force, and what a machine prefers.

Forms of a kernel give the same results, bit for bit, so that a measurement may choose between them. Only tiles of
bfloat16 add in another order than vectors: they serve all rows of a class of weights or none, so that results do not
depend on the rows that are computed together.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from moelight.kernels import native
from moelight.profiles.hardware import FORM_ROWS, INTEGER_PRODUCTS, KERNELS, PRODUCTS, products_named

# By name in a hardware profile: the number of tokens that meet a stream of bfloat16 weights; the class of weights and
# the rows that meet them.
_STREAMS = {f"stream_{tokens}": tokens for tokens in (1, 2, 4)}
_PRODUCTS = {products_named(name, rows): (name, rows) for name in PRODUCTS for rows in FORM_ROWS}


def forms(kernel: str) -> tuple[str, ...]:
    """The forms of ``kernel`` of `KERNELS` that run here; none without the extension."""
    extension: Any = native.extension()
    if extension is None:
        return ()
    listed = extension.stream_forms() if kernel in _STREAMS else extension.product_forms(_PRODUCTS[kernel][0])
    return tuple(map(str, listed))


def chosen() -> dict[str, str]:
    """The form in force of every kernel in `KERNELS` that has several here; empty without the extension."""
    extension: Any = native.extension()
    return {} if extension is None else {name: _in_force(extension, name) for name in KERNELS if len(forms(name)) > 1}


def _in_force(extension: Any, kernel: str) -> str:
    in_force = extension.stream(_STREAMS[kernel]) if kernel in _STREAMS else extension.product_form(*_PRODUCTS[kernel])
    return str(in_force)


def choose(chosen_forms: Mapping[str, str]) -> None:
    """Use the forms ``chosen_forms`` by kernel from now on, in this process. A kernel that is not named, and a form
    that this build does not have, changes nothing."""
    extension: Any = native.extension()
    for name, form in chosen_forms.items():
        if name not in KERNELS or form not in forms(name):
            continue
        if name in _STREAMS:
            extension.set_stream(_STREAMS[name], form)
        else:
            extension.set_product_form(*_PRODUCTS[name], form)


def chosen_with(kernel: str) -> tuple[str, ...]:
    """The kernels of `KERNELS` whose forms have one order of sums with that of ``kernel``, by rising rows."""
    if kernel in _STREAMS:
        return (kernel,)
    return tuple(products_named(_PRODUCTS[kernel][0], rows) for rows in FORM_ROWS)


def order_of_sums(kernel: str, form: str) -> str:
    """Forms of ``kernel`` of one order give the same bits."""
    integers = kernel in _PRODUCTS and _PRODUCTS[kernel][0] in INTEGER_PRODUCTS
    return "tiles" if form in ("tiles", "emulated") and not integers else "any"


def measured_rows(kernel: str) -> int:
    """The number of rows for which ``kernel`` of `KERNELS` is measured."""
    return _STREAMS[kernel] if kernel in _STREAMS else _PRODUCTS[kernel][1]


def measured_weights(kernel: str) -> str:
    """The class of `PRODUCTS` of the weights with which ``kernel`` of `KERNELS` is measured."""
    return "bf16" if kernel in _STREAMS else _PRODUCTS[kernel][0]
