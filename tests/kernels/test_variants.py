"""Forms of kernels differ in time alone, so a measurement may choose among them; which serve depends on the rows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from moelight.core.units import MiB
from moelight.kernels import native, variants
from moelight.kernels.ffn import cpu_expert_ffn, cpu_linear
from moelight.profiles.hardware import FORM_ROWS, KERNELS, PRODUCTS, products_named
from moelight.runtime.calibration import forms as calibration
from moelight.runtime.calibration.forms import fastest_forms
from moelight.runtime.calibration.surfaces import Pool
from tests.kernels.quantized import matrix, packed

pytestmark = pytest.mark.skipif(not native.available(), reason="the extension alone has forms")

STREAMS = [name for name in KERNELS if name.startswith("stream")]
# Of each class a matrix, and the activations that it meets.
STORED = {
    "low": (packed(bits=4, group=128), "auto"),
    "high": (packed(bits=8, group=64), "auto"),
    "fine": (packed(bits=4, group=32), "int8"),
    "coarse": (packed(bits=4, group=128), "int8"),
}


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    before = variants.chosen()
    yield
    variants.choose(before)
    native.extension().unset_product_forms()


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
        for form in variants.forms(STREAMS[0]):
            variants.choose(dict.fromkeys(STREAMS, form))
            assert variants.chosen().items() >= dict.fromkeys(STREAMS, form).items()
            for tokens in range(1, 5):
                for threads in (1, 2):
                    assert torch.equal(cpu_linear(x[:tokens], weight, threads=threads), wanted[:tokens]), form
    finally:
        extension.set_bf16_products("auto")


def test_forms_and_kernels_that_this_build_lacks_change_nothing() -> None:
    before = variants.chosen()
    variants.choose(
        {"stream_1": "17 rows", "stream_17": "1 row", "low_products_1": "emulated", "low_products_2": "tiles"}
    )
    assert variants.chosen() == before


def test_measuring_finds_a_form_of_every_kernel_and_leaves_those_in_force() -> None:
    variants.choose({"stream_2": variants.forms("stream_2")[-1]})
    before = variants.chosen()
    result = fastest_forms(Pool(128 * MiB, device=torch.device("cpu"), dtype=torch.bfloat16))
    assert variants.chosen() == before
    assert set(STREAMS) <= set(result) == {name for name in KERNELS if len(variants.forms(name)) > 1}
    assert all(form in variants.forms(name) for name, form in result.items())


def test_a_small_pool_measures_nothing() -> None:
    assert fastest_forms(Pool(16 * MiB, device=torch.device("cpu"), dtype=torch.bfloat16)) == {}


class FakeForms:
    """Tiles, halves and pairs that run on no processor: choices are kept, and a product takes the time that is said."""

    def __init__(self, tiles_take: float) -> None:
        self.tiles_take = tiles_take
        self.forms: dict[tuple[str, int], str] = {}
        self.now = 0.0
        self.meeting = "bf16"

    def product_forms(self, products: str) -> list[str]:
        return ["dots", "tiles"] if products in {"fine", "coarse"} else ["pairs", "halves", "tiles"]

    def product_form(self, products: str, rows: int) -> str:
        return self.forms.get((products, rows), "tiles")

    def set_product_form(self, products: str, rows: int, form: str) -> None:
        self.forms[products, rows], self.meeting = form, products

    def stream_forms(self) -> list[str]:
        return ["1 row"]

    def stream(self, tokens: int) -> str:
        return "1 row"

    def linear(self, x: torch.Tensor, weight: object, *, activations: str) -> None:
        """Tiles take as long however many rows there are, vectors 2 ns a row, and pairs a hair less than halves."""
        assert activations == ("int8" if self.meeting in {"fine", "coarse"} else "auto")
        of_a_row = {"tiles": 0.0, "halves": 2.0, "pairs": 1.99, "dots": 0.1}[self.forms[self.meeting, len(x)]]
        self.now += self.tiles_take if of_a_row == 0.0 else of_a_row * len(x)


@pytest.mark.parametrize("tiles_take", [8.0, 14.0, 40.0])
def test_the_fastest_form_of_each_class_and_row_count_is_found(
    tiles_take: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tiles of bfloat16 serve all rows of a class or none, and go where vectors win by more than can be measured."""
    fake = FakeForms(tiles_take)
    monkeypatch.setattr(native, "extension", lambda: fake)
    monkeypatch.setattr(calibration, "cpu_linear", fake.linear)
    fake.forms["low", 1] = "halves"
    pool = Pool(128 * MiB, device=torch.device("cpu"), dtype=torch.bfloat16)
    result = fastest_forms(pool, lambda: fake.now)
    floats = dict.fromkeys(FORM_ROWS, "pairs" if tiles_take == 40.0 else "tiles")
    integers = dict.fromkeys(FORM_ROWS, "dots")
    wanted = dict.fromkeys(("bf16", "low", "high"), floats) | dict.fromkeys(("fine", "coarse"), integers)
    expected = {products_named(name, rows): form for name, by_rows in wanted.items() for rows, form in by_rows.items()}
    if tiles_take == 40.0:  # what is in force stays where another is faster by less than can be measured
        expected["low_products_1"] = "halves"
    assert result == expected
    assert variants.chosen()["low_products_1"] == "halves"
    assert variants.chosen()["fine_products_64"] == "tiles"


@pytest.mark.parametrize("products", PRODUCTS)
def test_what_serves_a_machine_with_tiles_that_was_not_measured(products: str) -> None:
    usual = native.extension().usual_product_form
    integers = products in {"fine", "coarse"}
    assert usual(products, "tiles") == ("dots" if products == "fine" else "tiles")
    for best in ("wide", "dots") if integers else ("wide", "pairs", "halves"):
        assert usual(products, best) == best


@pytest.mark.parametrize("products", STORED)
def test_the_form_that_serves_is_that_of_the_rows(products: str) -> None:
    """By counting; int8 activations meet emulated tiles from eight rows on, where a processor has them."""
    extension: Any = native.extension()
    stored, activations = STORED[products]
    weight, x = matrix(stored, 64, 256), torch.randn(40, 256).bfloat16()
    for rows in (16, 64):
        try:
            extension.set_product_form(products, rows, "emulated")
        except ValueError as error:
            assert "do not run" in str(error)
    wanted = cpu_linear(x, weight, activations=activations)
    for rows in (1, 3, 7, 8, 16, 40):
        result, served = counted(products, lambda rows=rows: cpu_linear(x[:rows], weight, activations=activations))
        assert served == {extension.product_form(products, rows): 1}
        assert torch.equal(result, wanted[:rows])


@pytest.mark.parametrize("products", ["bf16", "low", "high"])
def test_tiles_of_bfloat16_serve_all_rows_or_none(products: str) -> None:
    """They round otherwise than vectors."""
    extension: Any = native.extension()
    if "emulated" not in runs_as(products):
        pytest.skip("this processor has no pairs of bfloat16")
    for few, many in (("halves", "emulated"), ("emulated", "halves")):
        extension.set_product_form(products, 1, few), extension.set_product_form(products, 64, many)
        assert {extension.product_form(products, rows) for rows in (1, 4, 16, 64)} == {many}
    extension.set_product_form(products, 1, "pairs")
    assert [extension.product_form(products, rows) for rows in (1, 64)] == ["pairs", "halves"]


@pytest.mark.parametrize("pairing", ["joined", "apart", "two formats", "wide gate"])
def test_experts_whose_products_have_two_forms(pairing: str) -> None:
    """What leaves tiles meets vectors, and the other way round; gate and up have one form. Rows are alone."""
    extension: Any = native.extension()
    if "emulated" not in runs_as("low"):
        pytest.skip("this processor has no pairs of bfloat16")
    low, high = packed(bits=4, group=64), packed(bits=8, group=64)
    gate, up = matrix(low, 128 if pairing == "joined" else 64, 128), matrix(low, 64, 128, seed=1)
    down, x = matrix(high, 128, 64, seed=2), torch.randn(50, 128).bfloat16()
    if pairing == "two formats":
        up = matrix(high, 64, 128, seed=1)
    ups = None if pairing == "joined" else [up]
    gates = [torch.randn(64, 128)] if pairing == "wide gate" else [gate]

    def experts(rows: int) -> torch.Tensor:
        return cpu_expert_ffn(x[:rows], gates, [down], torch.tensor([0, rows], dtype=torch.int32), up=ups)

    results = {}
    for forms in (("halves", "halves"), ("emulated", "halves"), ("halves", "emulated"), ("emulated", "emulated")):
        for products, form in zip(("low", "high"), forms, strict=True):
            for rows in FORM_ROWS:
                extension.set_product_form(products, rows, form)
        results[forms] = result = experts(50)
        assert torch.equal(experts(3), result[:3])
        assert (result - results["halves", "halves"]).float().norm() < 0.02 * result.float().norm()
    if pairing == "two formats":
        assert torch.equal(results["emulated", "halves"], results["halves", "halves"])


def runs_as(products: str) -> set[str]:
    """The forms of ``products`` that run here, those of tests among them."""
    extension: Any = native.extension()
    result = set()
    for form in FLOAT_FORMS:
        try:
            extension.set_product_form(products, 4, form)
        except ValueError:
            continue
        result.add(form)
    return result


def test_transposed_weights_have_one_form_whatever_the_rows() -> None:
    """Their forms differ in bits."""
    extension: Any = native.extension()
    forms = [form for form in extension.product_forms("bf16") if form != native.bf16_products()]
    for form in forms:
        extension.set_product_form("bf16", 4, form)
    up, down = torch.randn(64, 96).bfloat16().t(), torch.randn(48, 64).bfloat16().t()
    x = torch.randn(40, 64).bfloat16()
    wanted = cpu_expert_ffn(x, [up], [down], torch.tensor([0, 40], dtype=torch.int32))
    for rows in (1, 4, 16, 40):
        offsets = torch.tensor([0, rows], dtype=torch.int32)
        result, served = counted("bf16", lambda x=x[:rows], at=offsets: cpu_expert_ffn(x, [up], [down], at))
        assert served == {native.bf16_products(): 2}
        assert torch.equal(result, wanted[:rows])


def test_experts_have_the_form_of_their_mean_rows() -> None:
    """Two products: gate and up, and down. Experts without rows do not count."""
    extension: Any = native.extension()
    up, down = matrix(packed(bits=4, group=64), 128, 64), matrix(packed(bits=4, group=64), 64, 64)
    offsets = torch.tensor([0, 0, 1, 1, 17], dtype=torch.int32)
    x = torch.randn(17, 64).bfloat16()
    _, served = counted("low", lambda: cpu_expert_ffn(x, [up] * 4, [down] * 4, offsets))
    assert served == {extension.product_form("low", 9): 2}


def counted(products: str, call: Any) -> tuple[torch.Tensor, dict[str, int]]:
    """What ``call`` returns, and the products that served it by form."""
    extension: Any = native.extension()
    names = ("wide", "dots", "tiles", "emulated") if products in {"fine", "coarse"} else FLOAT_FORMS
    before = Counter({name: extension.counted_products(products, name) for name in names})
    result = call()
    after = Counter({name: extension.counted_products(products, name) for name in names})
    return result, dict(after - before)


FLOAT_FORMS = ("wide", "pairs", "tiles", "emulated", "halves")
