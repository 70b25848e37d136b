"""Random weights of every float, and who may serve the faces of `ffn.py`, for the kernel tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from moelight.kernels import native
from tests.kernels.conftest import ISAS

KINDS = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
PRODUCTS = {
    "avx512 without bf16": "wide",
    "avx512 in pairs": "pairs",
    "avx512 in halves": "halves",
    "avx512 with emulated tiles": "emulated",
    "avx512 with tiles": "tiles",
    "neon without bf16": "wide",
}


def _runs(products: str) -> bool:
    """True if the processor multiplies so, but not by itself."""
    if products == native.bf16_products():
        return False
    try:
        native.extension().set_bf16_products(products)
    except ValueError:
        return False
    native.extension().set_bf16_products("auto")
    return True


LANES = [*ISAS, *(name for name, products in PRODUCTS.items() if name.split()[0] in ISAS and _runs(products))]


@contextmanager
def serving(name: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """One of `LANES`, or "torch", serves inside."""
    if name == "torch":
        monkeypatch.setattr(native, "extension", lambda: None)
        yield
        return
    extension = native.extension()
    extension.set_isa(name.split(maxsplit=1)[0])
    extension.set_bf16_products(PRODUCTS.get(name, "auto"))
    yield
    extension.set_bf16_products("auto")
    extension.set_isa("auto")


def generator(seed: int) -> Callable[..., Tensor]:
    source = torch.Generator().manual_seed(seed)
    return lambda *shape: torch.randn(*shape, generator=source)


def stored(kind: str, rows: int, depth: int, *, seed: int = 0) -> Tensor:
    """A weight of numbers of about 1 / sqrt(depth)."""
    return (generator(seed)(rows, depth) * depth**-0.5).to(KINDS[kind])


def refused(call: Callable[..., Any], arguments: dict[str, Any], names: set[str]) -> None:
    with pytest.raises(ValueError, match=r"^\w+: ") as refusal:
        call(**arguments)
    assert str(refusal.value).split(":")[0] in names
