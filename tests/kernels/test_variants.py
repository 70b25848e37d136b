"""Forms of kernels differ in time alone, so a measurement may choose among them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from moelight.core.units import MiB
from moelight.kernels import native, variants
from moelight.kernels.ffn import cpu_linear
from moelight.profiles.hardware import KERNELS
from moelight.runtime.calibration.forms import fastest_forms
from moelight.runtime.calibration.surfaces import Pool

pytestmark = pytest.mark.skipif(not native.available(), reason="the extension alone has forms")


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    before = variants.chosen()
    yield
    variants.choose(before)


@pytest.mark.parametrize("products", ["wide", "pairs", "halves"])
@pytest.mark.parametrize("shape", [(70, 1024), (64, 3584), (33, 96), (3, 2080)])
def test_every_form_gives_the_same_bits(products: str, shape: tuple[int, int]) -> None:
    extension = native.extension()
    try:
        extension.set_bf16_products(products)
    except ValueError as error:
        pytest.skip(str(error))
    torch.manual_seed(0)
    weight = torch.randn(shape).to(torch.bfloat16)
    x = torch.randn(4, shape[1]).to(torch.bfloat16)
    try:
        wanted = cpu_linear(x.repeat(6, 1), weight, threads=1)[:4]
        for form in variants.forms():
            variants.choose(dict.fromkeys(KERNELS, form))
            assert variants.chosen() == dict.fromkeys(KERNELS, form)
            for tokens in range(1, 5):
                for threads in (1, 2):
                    assert torch.equal(cpu_linear(x[:tokens], weight, threads=threads), wanted[:tokens]), form
    finally:
        extension.set_bf16_products("auto")


def test_forms_and_kernels_that_this_build_lacks_change_nothing() -> None:
    before = variants.chosen()
    variants.choose({"stream_1": "17 rows", "stream_17": variants.forms()[0]})
    assert variants.chosen() == before


def test_measuring_finds_a_form_of_every_kernel_and_leaves_those_in_force() -> None:
    variants.choose({"stream_2": variants.forms()[-1]})
    before = variants.chosen()
    result = fastest_forms(Pool(128 * MiB, device=torch.device("cpu"), dtype=torch.bfloat16))
    assert variants.chosen() == before
    assert set(result) == set(KERNELS)
    assert set(result.values()) <= set(variants.forms())


def test_a_small_pool_measures_nothing() -> None:
    assert fastest_forms(Pool(16 * MiB, device=torch.device("cpu"), dtype=torch.bfloat16)) == {}
