"""Random weights in every stored form, and who may serve the faces of `ffn.py`, for the kernel tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from moelight.kernels import native
from tests.kernels.conftest import ISAS

KINDS = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "int8": torch.int8,
    "int4": torch.uint8,
}
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


@dataclass(frozen=True, kw_only=True)
class Stored:
    """A weight as a checkpoint keeps it."""

    weight: Tensor
    scale: Tensor | None
    group_size: int | None

    def double(self) -> Stored:
        floats = self.scale is None
        return Stored(
            weight=self.weight.double() if floats else self.weight,
            scale=None if self.scale is None else self.scale.double(),
            group_size=self.group_size,
        )


def generator(seed: int) -> Callable[..., Tensor]:
    source = torch.Generator().manual_seed(seed)
    return lambda *shape: torch.randn(*shape, generator=source)


def stored(kind: str, rows: int, depth: int, *, group_size: int | None = None, seed: int = 0) -> Stored:
    """Numbers of about 1 / sqrt(depth)."""
    randn = generator(seed)
    if kind in {"float32", "bfloat16", "float16"}:
        return Stored(weight=(randn(rows, depth) * depth**-0.5).to(KINDS[kind]), scale=None, group_size=None)
    groups = 1 if group_size is None else -(-depth // group_size)
    source = torch.Generator().manual_seed(seed)
    if kind == "int8":
        weight = torch.randint(-128, 128, (rows, depth), generator=source).to(torch.int8)
    else:
        weight = torch.randint(0, 256, (rows, depth // 2), generator=source).to(torch.uint8)
    scale = (1 + torch.rand(rows, groups, generator=source)) * depth**-0.5 / (64 if kind == "int8" else 4)
    return Stored(weight=weight, scale=scale.squeeze(1) if group_size is None else scale, group_size=group_size)


def refused(call: Callable[..., Any], arguments: dict[str, Any], names: set[str]) -> None:
    with pytest.raises(ValueError, match=r"^\w+: ") as refusal:
        call(**arguments)
    assert str(refusal.value).split(":")[0] in names
