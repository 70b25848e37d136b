"""The published programme of a cell against a solver, and the published grid against plain enumeration."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import count
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moelight.core.dtypes import FLOAT16
from moelight.core.units import MiB
from moelight.optimizer import published as paper_grid
from moelight.optimizer.published import Limits
from moelight.optimizer.published import formulas as paper
from moelight.optimizer.published.formulas import PaperPolicy, PaperSetting
from moelight.profiles.model_files import load_model_profile
from moelight.profiles.workload import Workload
from tests.published import l4, machine
from tests.shapes import examples, small_model

MIXTRAL = load_model_profile("mixtral")


def work(prompt_len: int, gen_len: int) -> Workload:
    return Workload(prompt_len=prompt_len, max_prompt_len=prompt_len, gen_len=gen_len)


# ---------------------------------------------------------------------------------------------------------------------
# The programme of a cell


def solver_link_s(x: PaperSetting, cell: Limits, g: int, nb: int) -> float | None:
    """The artifact's programme as it is written there, by HiGHS: the least link time of one cell; None: infeasible."""
    from scipy.optimize import linprog

    a_g, bls, layers, h1, tp = cell.gpu_attention, g * nb, x.num_layers, x.hidden_size, x.gpus
    w_i, w_oth = paper.expert_layer_bytes(x), paper.projection_layers_bytes(x)
    s, length, h_kv = x.prompt_len, x.context, x.kv_size
    inter = 2.4 * (g * x.top_k * h1 * tp * s + 3 * g * x.top_k * x.expert_size * s)
    unit, scale = w_i / x.link_bandwidth, x.device_bytes  # programmes in bytes are badly scaled

    def sides(v: np.ndarray) -> np.ndarray:
        """Seconds on the link, and what may be at most 0."""
        wg, wc, cg, cc, peak = v
        home_d = w_oth + w_i * layers * wg + 4 * h1 * bls * tp + 4 * length * h_kv * bls * layers * (cg + cc * a_g)
        home_p = w_oth + w_i * layers * wg + 4 * s * h_kv * bls * cg + tp * (4 * h1 * g * s + 2 * h1 * bls * s)
        home_p = home_p + 8 * s * h_kv * g * cc
        cpu = w_i * layers * wc + 4 * length * h_kv * bls * layers * cc + 2 * h1 * bls * s * tp + 2 * w_i * (1 - wg)
        link = (w_i * wc + 4 * (s + x.gen_len / 2) * h_kv * bls * cc * a_g) / x.link_bandwidth
        device = peak + (2 * w_i * (1 - wg) + inter) / scale - 0.86
        return np.array([link / unit, home_d / scale - peak, home_p / scale - peak, device, cpu / x.host_bytes - 0.8])

    base = sides(np.zeros(5))
    slopes = np.stack([sides(one) - base for one in np.eye(5)], axis=1)  # every side is affine
    result = linprog(
        slopes[0],
        A_ub=slopes[1:],
        b_ub=-base[1:],
        A_eq=[[1, 1, 0, 0, 0], [0, 0, 1, 1, 0]],
        b_eq=[1, 1],
        bounds=[(0, None), cell.weights_host, (0, None), cell.kv_host, (0, None)],
        method="highs",
    )
    return float(result.fun + base[0]) * unit if result.status == 0 else None


def random_setting(rng: np.random.Generator) -> PaperSetting:
    """A model of one to six layers on a machine that nearly holds it, or does not."""
    hidden, experts = int(rng.integers(1, 9)) * 64, int(rng.integers(1, 9))
    x = paper.setting_of(l4(), MIXTRAL, work(77, 32), weight_dtype=FLOAT16, kv_dtype=FLOAT16)
    x = replace(
        x,
        prompt_len=int(10 ** rng.uniform(0, 3)),
        gen_len=int(10 ** rng.uniform(0.3, 2)),
        num_layers=int(rng.integers(1, 7)),
        hidden_size=hidden,
        expert_size=int(rng.integers(1, 9)) * 64,
        query_size=hidden,
        kv_size=hidden / int(rng.choice([1, 4, 64])),
        num_experts=experts,
        top_k=int(rng.integers(1, experts + 1)),
        gpus=int(rng.integers(1, 3)),
    )
    everything = paper.expert_layer_bytes(x) * x.num_layers + paper.projection_layers_bytes(x)
    return replace(
        x,
        device_bytes=int(everything * 10 ** rng.uniform(-0.3, 0.6)),
        host_bytes=int(everything * 10 ** rng.uniform(-0.3, 0.6)),
        link_bandwidth=float(10 ** rng.uniform(6, 9)),
    )


@pytest.mark.parametrize("gpu_attention", [False, True])
def test_the_closed_form_is_the_solvers_answer(gpu_attention: bool) -> None:
    rng, solved, refused, mixed = np.random.default_rng(5), 0, 0, 0
    while solved < 18 or refused < 3:
        x = random_setting(rng)
        g, nb = (int(10 ** rng.uniform(0, 2.2)) for _ in range(2))
        low = rng.uniform(0, 0.5) if rng.random() < 0.3 else 0.0
        cell = Limits(
            gpu_attention=gpu_attention,
            weights_host=(low, rng.uniform(low, 1.0)) if low else (0.0, 1.0),
            kv_host=(0.0, 1.0) if gpu_attention else (1.0, 1.0),
        )
        result = paper_grid.solve_cells(x, cell, np.array([g]), np.array([nb]))
        expected = solver_link_s(x, cell, g, nb)
        if expected is None:
            assert not result.feasible[0]
            refused += 1
            continue
        assert result.feasible[0]
        choice = PaperPolicy(
            micro_batch_size=g,
            num_micro_batches=nb,
            weights_host=result.weights_host[0],
            kv_host=result.kv_host[0],
            gpu_attention=gpu_attention,
        )
        unit = paper.expert_layer_bytes(x) / x.link_bandwidth
        assert paper.decode_link_s(x, choice) == pytest.approx(expected, rel=1e-5, abs=1e-6 * unit)
        solved += 1
        mixed += 0 < result.weights_host[0] < 1
    assert mixed >= 4


def test_any_three_rows_are_solved_as_by_highs() -> None:
    """Rows of either sign, so that both shares are often strictly between their ends."""
    from scipy.optimize import linprog

    rng, between = np.random.default_rng(7), 0
    for _ in range(150):
        values = (rng.normal(size=(3, 3)) + np.array([0.8, -0.8, -0.8])) * 10 ** rng.uniform(-2, 2, size=(3, 1))
        rows = [paper_grid.CapacityRow(base=np.array([b]), weights=w, kv=c, cap=0.5) for b, w, c in values]
        price_w, price_c = rng.uniform(0.1, 3, size=2)
        limits = Limits(weights_host=(0.0, 1.0), kv_host=(0.0, 1.0))
        result = paper_grid.least_shares(rows, limits, lambda w, c, a=price_w, b=price_c: a * w + b * c)
        exact = linprog([price_w, price_c], A_ub=values[:, 1:], b_ub=0.5 - values[:, 0], bounds=[(0, 1), (0, 1)])
        assert bool(result.feasible[0]) == exact.success
        if exact.success:
            w_c, c_c = result.weights_host[0], result.kv_host[0]
            assert price_w * w_c + price_c * c_c == pytest.approx(exact.fun, abs=1e-7)
            between += 1e-6 < w_c < 1 - 1e-6 and 1e-6 < c_c < 1 - 1e-6
    assert between > 4


def test_the_closed_form_is_the_solvers_answer_on_the_published_machine() -> None:
    x = paper.setting_of(l4(), MIXTRAL, work(77, 32), weight_dtype=FLOAT16, kv_dtype=FLOAT16)
    for g, nb in ((1, 1), (36, 14), (324, 14), (324, 15), (292, 16), (68, 70), (700, 2)):
        result = paper_grid.solve_cells(x, Limits(), np.array([g]), np.array([nb]))
        expected = solver_link_s(x, Limits(), g, nb)
        assert bool(result.feasible[0]) == (expected is not None)
        if expected is not None:
            link_s = paper.expert_layer_bytes(x) * result.weights_host[0] / x.link_bandwidth
            assert link_s == pytest.approx(expected, rel=1e-6)


# ---------------------------------------------------------------------------------------------------------------------
# The grid


def grid() -> Iterator[int]:
    yield from (1, 2, 3, 4)
    yield from count(36, 32)


def enumerate_grid(x: PaperSetting, limits: Limits) -> tuple[float, int, int] | None:
    """The least T / N and its cell, the last of equals, by pricing every cell of every micro-batch size that fits."""
    best: tuple[float, int, int] | None = None
    for g in grid():
        maximum = next(nb for nb in count(1) if not fits(x, limits, g, np.array([nb * 64]))) * 64
        counts = np.arange(1, maximum + 1)
        counts = counts[fits(x, limits, g, counts)]
        if not len(counts):
            return best
        shares = paper_grid.solve_cells(x, limits, np.full_like(counts, g), counts)
        choice = PaperPolicy(
            micro_batch_size=g,
            num_micro_batches=counts,
            weights_host=shares.weights_host,
            kv_host=shares.kv_host,
            gpu_attention=limits.gpu_attention,
        )
        for nb, each_s in zip(counts, paper.decode_time(x, choice).layer_s / (g * counts), strict=True):
            if best is None or each_s <= best[0] * (1 + paper_grid.TIE):
                best = (float(each_s), g, int(nb))
    return best


def fits(x: PaperSetting, limits: Limits, g: int, counts: np.ndarray) -> Any:
    return paper_grid.solve_cells(x, limits, np.full_like(counts, g), counts).feasible


@examples(80)
@given(
    layers=st.integers(1, 5),
    device_mb=st.floats(0.006, 0.08),
    host_mb=st.floats(0.01, 0.15),
    link=st.floats(4, 8),
    gpu_flops=st.floats(6, 9),
    cpu_bandwidth=st.floats(5, 9),
    prompt_len=st.integers(1, 12),
    gen_len=st.integers(2, 12),
    gpu_attention=st.booleans(),
)
def test_the_search_equals_enumeration(
    layers: int,
    device_mb: float,
    host_mb: float,
    link: float,
    gpu_flops: float,
    cpu_bandwidth: float,
    prompt_len: int,
    gen_len: int,
    gpu_attention: bool,
) -> None:
    hardware = machine(
        device_bytes=int(device_mb * MiB),
        device_bandwidth=1e8,
        gpu_flops=10**gpu_flops,
        cpu_flops=1e8,
        host_bytes=int(host_mb * MiB),
        host_bandwidth=10**cpu_bandwidth,
        link=10**link,
    )
    model = small_model((True,) * layers)
    x = paper.setting_of(hardware, model, work(prompt_len, gen_len), weight_dtype=FLOAT16, kv_dtype=FLOAT16)
    limits = Limits(gpu_attention=gpu_attention, kv_host=(0.0, 1.0) if gpu_attention else (1.0, 1.0))
    expected, result = enumerate_grid(x, limits), paper_grid.best_cell(x, limits)
    if expected is None or result is None:
        assert expected is result
        return
    each_s = paper.decode_time(x, result).layer_s / result.batch_size
    assert each_s == pytest.approx(expected[0], rel=1e-11)
    assert (result.micro_batch_size, result.num_micro_batches) == expected[1:]
