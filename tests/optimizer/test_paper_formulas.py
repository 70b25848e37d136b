"""The published estimator, formula by formula, against the same formulas written with the paper's letters."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moelight.core.dtypes import FLOAT16, FLOAT32, INT4
from moelight.core.errors import ConfigError
from moelight.core.units import GiB
from moelight.optimizer.published import formulas as paper
from moelight.optimizer.published.formulas import PaperPolicy, PaperSetting
from moelight.profiles.hardware import HardwareProfile, Processor, Tier
from moelight.profiles.model_files import load_model_profile
from moelight.profiles.workload import Workload
from tests.published import l4, machine
from tests.shapes import examples, small_model

MIXTRAL = load_model_profile("mixtral")
WORK = Workload(prompt_len=77, max_prompt_len=418, gen_len=32)
TWO_GPUS = machine(device_bytes=15 * GiB, device_bandwidth=300e9, gpu_flops=65e12, cpu_flops=0.8e12, link=16e9, gpus=2)


def setting(hardware: HardwareProfile | None = None, work: Workload = WORK) -> PaperSetting:
    return paper.setting_of(hardware or l4(), MIXTRAL, work, weight_dtype=FLOAT16, kv_dtype=FLOAT16)


def total(use: dict[str, float]) -> float:
    return sum(use.values())


def test_the_readmes_policy_takes_what_its_log_says() -> None:
    """gpu 20.64 GB, cpu 147.28 GB, ctog 0.1549 s, T l 4.957 s, 944.66 token/s."""
    x, choice = setting(), PaperPolicy(micro_batch_size=324, num_micro_batches=14, weights_host=1 - 0.05588468812)
    assert total(paper.device_prefill_bytes(x, choice)) / GiB == pytest.approx(20.64, abs=5e-4)
    assert total(paper.host_use_bytes(x, choice)) / GiB == pytest.approx(147.28, abs=5e-3)
    assert paper.decode_link_s(x, choice) == pytest.approx(0.1549, abs=5e-5)
    layer_s = paper.decode_time(x, choice).layer_s
    assert layer_s * 32 == pytest.approx(4.957, abs=5e-4)
    assert paper.decode_tokens_per_s(x, 4536, layer_s) == pytest.approx(944.66, abs=5e-3)


def test_weights_of_mixtral() -> None:
    assert 32 * paper.expert_layer_bytes(setting()) == 84 * GiB
    assert paper.projection_layers_bytes(setting()) == 2.5 * GiB


def test_two_gpus_are_one_of_twice_the_size_on_one_link() -> None:
    x = setting(TWO_GPUS)
    assert (x.device_bytes, x.device_bandwidth, x.gpu_flops) == (30 * GiB, 600e9, 130e12)
    assert (x.link_bandwidth, x.host_bandwidth, x.cpu_flops) == (16e9, 76 * GiB, 0.8e12)


@examples(60)
@given(
    g=st.integers(1, 500),
    nb=st.integers(1, 40),
    wc=st.floats(0, 1),
    cc=st.floats(0, 1),
    a_g=st.booleans(),
    s=st.integers(1, 2000),
    n=st.integers(2, 300),
    gpus=st.integers(1, 4),
)
def test_every_formula(g: int, nb: int, wc: float, cc: float, a_g: bool, s: int, n: int, gpus: int) -> None:
    hardware = machine(device_bytes=GiB, device_bandwidth=3e11, gpu_flops=1e14, cpu_flops=1e12, link=1.6e10, gpus=gpus)
    x = setting(hardware, Workload(prompt_len=s, max_prompt_len=s, gen_len=n))
    choice = PaperPolicy(micro_batch_size=g, num_micro_batches=nb, weights_host=wc, kv_host=cc, gpu_attention=a_g)
    layers, h1, h2, n_q, n_kv, d, n_e, k = 32, 4096, 14336, 32, 8, 128, 8, 2
    tp, b_g, b_c, b_cg, p_g, p_c = gpus, 3e11 * gpus, 76 * GiB, 1.6e10, 1e14 * gpus, 1e12
    group, h_kv, length, bls, wg, cg = n_q // n_kv, h1 // (n_q // n_kv), s + n, g * nb, 1 - wc, 1 - cc
    w_i, w_oth = 6 * h1 * h2 * n_e, layers * (4 * h1**2 + 4 * h1**2 // group)

    link = (w_i * wc + 4 * (s + n / 2) * h_kv * bls * cc * a_g) / b_cg
    ffn = nb * max(6 * g * h1 * h2 * k / p_g, (2 * g * h1 + 2 * g * h2 + w_i) / b_g)
    flops = nb * (2 * g * length * n_q * d + 2 * g * length * n_q)
    size = nb * (4 * g * n_q * d + 4 * g * length * n_kv * d)
    on_gpu, on_cpu = max(flops / p_g, size / b_g), max(flops / p_c, size / b_c)
    decode = paper.decode_time(x, choice)
    expected = (link, on_cpu * (not a_g), ffn + on_gpu * a_g)
    assert (decode.link_s, decode.cpu_s, decode.gpu_s) == pytest.approx(expected)
    assert decode.layer_s == pytest.approx(max(expected))

    prefill = paper.prefill_time(x, choice)
    flops, size = (
        nb * (2 * g * s * s * n_q * d + 2 * g * s * s * n_q),
        nb * (4 * g * s * n_q * d + 4 * g * s * n_kv * d),
    )
    ffn = nb * max(6 * g * s * h1 * h2 * k / p_g, (2 * g * s * h1 + 2 * g * s * h2 + w_i) / b_g)
    assert prefill.link_s == pytest.approx((w_i * wc + 2 * bls * s * h1) / b_cg)
    assert prefill.gpu_s == pytest.approx(max(flops / p_g, size / b_g) + ffn)
    assert prefill.cpu_s == 0

    inter = 2.4 * (g * k * h1 * tp * s + 3 * g * k * h2 * s)
    work = 2 * w_i * (1 - wg) + inter
    home_d = w_oth + w_i * layers * wg + 4 * h1 * bls * tp + 4 * length * h_kv * bls * layers * (cg + cc * a_g)
    home_p = (
        w_oth
        + w_i * layers * wg
        + 4 * s * h_kv * bls * cg
        + tp * (4 * h1 * g * s + 2 * h1 * bls * s)
        + 8 * s * h_kv * g * cc
    )
    cpu = w_i * layers * wc + 4 * length * h_kv * bls * layers * cc + 2 * h1 * bls * s * tp + 2 * w_i * (1 - wg)
    assert total(paper.device_decode_bytes(x, choice)) == pytest.approx(home_d + work)
    assert total(paper.device_prefill_bytes(x, choice)) == pytest.approx(home_p + work)
    assert total(paper.host_use_bytes(x, choice)) == pytest.approx(cpu)


def test_numbers_and_arrays_give_the_same() -> None:
    x, sizes = setting(), np.array([1, 36, 324])
    many = paper.decode_time(x, PaperPolicy(micro_batch_size=sizes, num_micro_batches=3, weights_host=0.5))
    for index, size in enumerate(sizes):
        one = paper.decode_time(x, PaperPolicy(micro_batch_size=int(size), num_micro_batches=3, weights_host=0.5))
        assert one.layer_s == many.layer_s[index]


def test_prompts_are_in_the_jobs_rate_and_not_in_the_decode_rate() -> None:
    x = setting()
    assert paper.decode_tokens_per_s(x, 100, 0.1) == pytest.approx(100 * 32 / (0.1 * 31 * 32))
    assert paper.job_tokens_per_s(x, 100, 0.6, 0.1) == pytest.approx(100 * 32 / (0.6 * 32 + 0.1 * 31 * 32))


def test_grouped_weights_are_the_experts_alone() -> None:
    x = setting()
    packed = paper.setting_of(l4(), MIXTRAL, WORK, weight_dtype=INT4, kv_dtype=INT4)
    assert paper.expert_layer_bytes(packed) == paper.expert_layer_bytes(x) * (4 + 16 / 128) / 16
    assert paper.projection_layers_bytes(packed) == paper.projection_layers_bytes(x)
    wide = paper.setting_of(l4(), MIXTRAL, WORK, weight_dtype=FLOAT32, kv_dtype=FLOAT16)
    assert paper.projection_layers_bytes(wide) == 2 * paper.projection_layers_bytes(x)
    choice = PaperPolicy(micro_batch_size=4, num_micro_batches=4)
    assert paper.host_use_bytes(packed, choice)["kv"] < 0.3 * paper.host_use_bytes(x, choice)["kv"]


def test_heads_need_not_fill_the_hidden_size() -> None:
    model = small_model()
    model = replace(model, attention=replace(model.attention, num_heads=4, num_kv_heads=2, head_dim=16))
    x = paper.setting_of(l4(), model, WORK, weight_dtype=FLOAT16, kv_dtype=FLOAT16)
    assert (x.query_size, x.kv_size) == (64, 32)
    assert paper.projection_layers_bytes(x) == 2 * model.num_layers * model.hidden_size * (2 * 64 + 2 * 32)


def test_a_machine_without_a_gpu_is_refused_by_name() -> None:
    hardware = HardwareProfile(
        name="cpu-only",
        tiers=(Tier(name="host", capacity_bytes=1, bandwidth_bytes_per_s=1.0),),
        links=(),
        processors=(Processor(name="cpu", count=1, peak_flops=1.0),),
    )
    with pytest.raises(ConfigError, match="cpu-only has no GPU"):
        setting(hardware)
