"""The published estimator: seconds of one layer and bytes of each memory, as MoE-Lightning's artifact computes them,
one function per formula.

Letters are those of the paper's table 1; g and nb are the artifact's. Not covered: projections and the head, transfers
of queries and hidden states in decoding, launches, contention, whole experts, shared experts, dense layers (all l
layers count as layers of n_e experts). Latent attention is treated as grouped queries over a cache of the same width.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from moelight.core.dtypes import DType
from moelight.core.errors import ConfigError
from moelight.hrm.costs import attention_kinds
from moelight.profiles.hardware import HardwareProfile
from moelight.profiles.model import AttentionSpec, ModelProfile
from moelight.profiles.workload import Workload

DEVICE_SHARE = 0.86  # the share of m_g that home + work may take
HOST_SHARE = 0.8  # of m_c
ACTIVATION_BYTES = 2  # everything the artifact counts is fp16
FUSED_KERNEL = 1.2  # workspace of the fused expert kernel, relative to its operands


@dataclass(frozen=True, kw_only=True, slots=True)
class PaperSetting:
    """Model, machine and workload in the estimator's terms; bytes, bytes/s, flop/s.

    Attributes:
        prompt_len, gen_len: s, n.
        num_layers, hidden_size, expert_size: l, h1, h2.
        query_size, kv_size: n_q d_h and n_kv d_h, in the paper h1 and h1 / G.
        num_heads, num_experts, top_k: n_q, n_e, k.
        expert_bytes, projection_bytes, kv_bytes: bytes of one number of the experts, of everything else that is stored,
            and of the KV cache; 2 in the paper.
        gpus: tp. ``device_bytes`` (m_g), ``device_bandwidth`` (b_g) and ``gpu_flops`` (p_g) are of all GPUs together.
        host_bytes, host_bandwidth, cpu_flops: m_c, b_c, p_c.
        link_bandwidth: b_cg, of one link, regardless of the number of GPUs.
    """

    prompt_len: int
    gen_len: int
    num_layers: int
    hidden_size: int
    expert_size: int
    query_size: float
    kv_size: float
    num_heads: float
    num_experts: int
    top_k: int
    expert_bytes: float
    projection_bytes: float
    kv_bytes: float
    gpus: int
    device_bytes: int
    host_bytes: int
    device_bandwidth: float
    host_bandwidth: float
    link_bandwidth: float
    gpu_flops: float
    cpu_flops: float

    @property
    def context(self) -> int:
        """L = s + n: the final length of a sequence."""
        return self.prompt_len + self.gen_len


@dataclass(frozen=True, kw_only=True, slots=True)
class PaperPolicy:
    """A policy in the estimator's terms; every field but the last may be an array: ``micro_batch_size`` μ (g),
    ``num_micro_batches`` n_ub (nb), ``weights_host`` w_c, ``kv_host`` c_c, ``gpu_attention`` A_g. The shares on the GPU
    are w_g = 1 - w_c and c_g = 1 - c_c; F_g is always 1."""

    micro_batch_size: Any
    num_micro_batches: Any
    weights_host: Any = 1.0
    kv_host: Any = 1.0
    gpu_attention: bool = False

    @property
    def batch_size(self) -> Any:
        """N = μ n_ub."""
        return self.micro_batch_size * self.num_micro_batches


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerTime:
    """Seconds of one layer for all micro-batches: on the link, on the CPU, on the GPU."""

    link_s: Any
    cpu_s: Any
    gpu_s: Any

    @property
    def layer_s(self) -> Any:
        """Eq. (12): T = max(comm, T_cpu, T_gpu)."""
        return np.maximum(np.maximum(self.link_s, self.cpu_s), self.gpu_s)


def setting_of(
    hardware: HardwareProfile, model: ModelProfile, workload: Workload, *, weight_dtype: DType, kv_dtype: DType
) -> PaperSetting:
    """The setting of a machine with a GPU; a grouped ``weight_dtype`` applies to the experts only."""
    device, host = hardware.tier("device"), hardware.tier("host")
    gpu, cpu = hardware.processor("gpu"), hardware.processor("cpu")
    link = hardware.link("host", "device")
    if device is None or host is None or gpu is None or cpu is None or link is None:
        raise ConfigError(
            f"the paper estimator models a GPU beside a CPU, and {hardware.name} has no GPU: "
            "use the calibrated estimator"
        )
    experts, kinds = model.experts, attention_kinds(model)

    def mean(figure: Callable[[AttentionSpec], int]) -> float:
        """Return the mean over all layers: the paper assumes identical layers."""
        return sum(kind.layers * figure(kind.spec) for kind in kinds) / model.num_layers

    return PaperSetting(
        prompt_len=workload.prompt_len,
        gen_len=workload.gen_len,
        num_layers=model.num_layers,
        hidden_size=model.hidden_size,
        expert_size=experts.intermediate_size,
        query_size=mean(lambda spec: spec.q_dim),
        kv_size=mean(lambda spec: spec.cache_width) / 2,
        num_heads=mean(lambda spec: spec.num_heads),
        num_experts=experts.num_experts,
        top_k=model.router.top_k,
        expert_bytes=bytes_each(weight_dtype),
        projection_bytes=ACTIVATION_BYTES if weight_dtype.group else bytes_each(weight_dtype),
        kv_bytes=bytes_each(kv_dtype),
        gpus=gpu.count,
        device_bytes=device.capacity_bytes * gpu.count,
        host_bytes=host.capacity_bytes,
        device_bandwidth=device.bandwidth_bytes_per_s * gpu.count,
        host_bandwidth=host.bandwidth_bytes_per_s,
        link_bandwidth=link.bandwidth_bytes_per_s,
        gpu_flops=gpu.peak_flops * gpu.count,
        cpu_flops=cpu.peak_flops * cpu.count,
    )


def bytes_each(dtype: DType) -> float:
    """Average bytes of one number, including its part of a scale."""
    many = 8 * max(dtype.group, 1)
    return dtype.bytes_for(many) / many


def expert_layer_bytes(setting: PaperSetting) -> float:
    """W_i = 6 h1 h2 n_e: all experts of one layer."""
    return 3 * setting.hidden_size * setting.expert_size * setting.num_experts * setting.expert_bytes


def projection_layers_bytes(setting: PaperSetting) -> float:
    """W_oth = l (4 h1² + 4 h1² / G): the attention projections of all layers, always on the GPU."""
    widths = 2 * setting.query_size + 2 * setting.kv_size
    return setting.num_layers * setting.hidden_size * widths * setting.projection_bytes


def ffn_flops(setting: PaperSetting, tokens: Any) -> Any:
    """6 t h1 h2 k: three products per token and expert over ``tokens`` tokens, one layer."""
    return 6.0 * tokens * setting.hidden_size * setting.expert_size * setting.top_k


def ffn_bytes(setting: PaperSetting, tokens: Any) -> Any:
    """2 t h1 + 2 t h2 + W_i: bytes that the experts of one layer read and write; all weights are read."""
    return ACTIVATION_BYTES * tokens * (setting.hidden_size + setting.expert_size) + expert_layer_bytes(setting)


def paper_attention_flops(setting: PaperSetting, sequences: Any, queries: int, context: float) -> Any:
    """2 g q L n_q d_h + 2 g q L n_q: scores and softmax of one layer. The product with the values is not counted."""
    return sequences * queries * context * (2.0 * setting.query_size + 2.0 * setting.num_heads)


def paper_attention_bytes(setting: PaperSetting, sequences: Any, queries: int, context: float) -> Any:
    """4 g q n_q d_h + 4 g L n_kv d_h: queries in, outputs out, keys and values read."""
    crossing = 2 * ACTIVATION_BYTES * queries * setting.query_size
    return sequences * (crossing + 2 * setting.kv_bytes * context * setting.kv_size)


def decode_link_s(setting: PaperSetting, policy: PaperPolicy) -> Any:
    """comm (decode) = [W_i w_c + 4 (s + n/2) h_kv N c_c A_g] / b_cg."""
    moved = expert_layer_bytes(setting) * policy.weights_host
    if policy.gpu_attention:
        average = setting.prompt_len + setting.gen_len / 2
        moved = moved + 2 * setting.kv_bytes * average * setting.kv_size * policy.batch_size * policy.kv_host
    return moved / setting.link_bandwidth


def prefill_link_s(setting: PaperSetting, policy: PaperPolicy) -> Any:
    """comm (prefill) = [W_i w_c + 2 N s h1] / b_cg."""
    hidden = ACTIVATION_BYTES * policy.batch_size * setting.prompt_len * setting.hidden_size
    return (expert_layer_bytes(setting) * policy.weights_host + hidden) / setting.link_bandwidth


def ffn_s(setting: PaperSetting, policy: PaperPolicy, tokens_each: int) -> Any:
    """nb max(6 t h1 h2 k / p_g, (2 t h1 + 2 t h2 + W_i) / b_g), t = g ``tokens_each``; W_i for every micro-batch."""
    tokens = policy.micro_batch_size * tokens_each
    compute_s = ffn_flops(setting, tokens) / setting.gpu_flops
    memory_s = ffn_bytes(setting, tokens) / setting.device_bandwidth
    return policy.num_micro_batches * np.maximum(compute_s, memory_s)


def attention_s(setting: PaperSetting, policy: PaperPolicy, *, queries: int, context: int, on_gpu: bool) -> Any:
    """nb max(flops / p_d, bytes / b_d) on the device d that attends, eq. (14)."""
    flops_per_s = setting.gpu_flops if on_gpu else setting.cpu_flops
    bandwidth = setting.device_bandwidth if on_gpu else setting.host_bandwidth
    compute_s = paper_attention_flops(setting, policy.micro_batch_size, queries, context) / flops_per_s
    memory_s = paper_attention_bytes(setting, policy.micro_batch_size, queries, context) / bandwidth
    return policy.num_micro_batches * np.maximum(compute_s, memory_s)


def decode_time(setting: PaperSetting, policy: PaperPolicy) -> LayerTime:
    """One layer of a decode step, eqs (12) to (14): attention over the final length L, on the CPU unless A_g."""
    attention = attention_s(setting, policy, queries=1, context=setting.context, on_gpu=policy.gpu_attention)
    experts = ffn_s(setting, policy, 1)
    return LayerTime(
        link_s=decode_link_s(setting, policy),
        cpu_s=attention * (not policy.gpu_attention),
        gpu_s=experts + attention * policy.gpu_attention,
    )


def prefill_time(setting: PaperSetting, policy: PaperPolicy) -> LayerTime:
    """One layer of the prompts: attention s x s and experts over g s tokens, both on the GPU."""
    prompt = setting.prompt_len
    attention = attention_s(setting, policy, queries=prompt, context=prompt, on_gpu=True)
    return LayerTime(
        link_s=prefill_link_s(setting, policy),
        cpu_s=0.0 * attention,
        gpu_s=attention + ffn_s(setting, policy, prompt),
    )


def decode_tokens_per_s(setting: PaperSetting, batch_size: int, layer_s: float) -> float:
    """N n / (T (n-1) l): the artifact's reported speed; excludes the time of prompts, counts the token they yield."""
    return batch_size * setting.gen_len / (layer_s * (setting.gen_len - 1) * setting.num_layers)


def job_tokens_per_s(setting: PaperSetting, batch_size: int, prefill_layer_s: float, layer_s: float) -> float:
    """N n / (T_prefill l + T (n-1) l): generated tokens over the whole time of one batch; the artifact computes both
    times and never adds them. Prompts yield the first token of each sequence, n-1 decode steps the others."""
    return batch_size * setting.gen_len / ((prefill_layer_s + layer_s * (setting.gen_len - 1)) * setting.num_layers)


def prefill_work_bytes(setting: PaperSetting, policy: PaperPolicy) -> Any:
    """inter = 2.4 (g k h1 tp s + 3 g k h2 s): activations of the fused expert kernel over one micro-batch's prompts."""
    width = setting.hidden_size * setting.gpus + 3 * setting.expert_size
    rows = policy.micro_batch_size * setting.top_k * setting.prompt_len
    return ACTIVATION_BYTES * FUSED_KERNEL * rows * width


def device_decode_bytes(setting: PaperSetting, policy: PaperPolicy) -> dict[str, Any]:
    """home_d + work, home_d = W_oth + W_i l w_g + 4 h1 N tp + 4 L h_kv N l (c_g + c_c A_g). With A_g = 1 the whole
    cache counts, whatever its placement."""
    on_device = 1.0 - policy.kv_host * (not policy.gpu_attention)
    cache = 2 * setting.kv_bytes * setting.context * setting.kv_size * policy.batch_size * setting.num_layers
    return {
        **_device_weights(setting, policy),
        "hidden": 2 * ACTIVATION_BYTES * setting.hidden_size * policy.batch_size * setting.gpus,
        "kv": cache * on_device,
        "work": prefill_work_bytes(setting, policy),
    }


def device_prefill_bytes(setting: PaperSetting, policy: PaperPolicy) -> dict[str, Any]:
    """home_p + work, home_p = W_oth + W_i l w_g + 4 s h_kv N c_g + tp (4 h1 g s + 2 h1 N s) + 8 s h_kv g c_c; 2 h1 N s
    is the residual of the whole batch; of the cache one layer is counted."""
    prompt, hidden = setting.prompt_len, setting.hidden_size
    one_layer = 2 * setting.kv_bytes * prompt * setting.kv_size
    in_flight = 2 * policy.micro_batch_size * policy.kv_host
    rows = 2 * policy.micro_batch_size + policy.batch_size
    return {
        **_device_weights(setting, policy),
        "hidden": ACTIVATION_BYTES * hidden * prompt * rows * setting.gpus,
        "kv": one_layer * (policy.batch_size * (1.0 - policy.kv_host) + in_flight),
        "work": prefill_work_bytes(setting, policy),
    }


def host_use_bytes(setting: PaperSetting, policy: PaperPolicy) -> dict[str, Any]:
    """W_i l w_c + 4 L h_kv N l c_c + 2 h1 N s tp + 2 W_i (1 - w_g); the last term is pinned."""
    experts = expert_layer_bytes(setting) * policy.weights_host
    cache = 2 * setting.kv_bytes * setting.context * setting.kv_size * policy.batch_size * setting.num_layers
    rows = policy.batch_size * setting.prompt_len
    return {
        "host_experts": experts * setting.num_layers,
        "kv": cache * policy.kv_host,
        "hidden": ACTIVATION_BYTES * setting.hidden_size * rows * setting.gpus,
        "pinned_ring": 2 * experts,
    }


def _device_weights(setting: PaperSetting, policy: PaperPolicy) -> dict[str, Any]:
    """W_oth, W_i l w_g, and the double buffer 2 W_i (1 - w_g)."""
    experts = expert_layer_bytes(setting)
    return {
        "dense": projection_layers_bytes(setting),
        "experts": experts * setting.num_layers * (1.0 - policy.weights_host),
        "ring": 2 * experts * policy.weights_host,
    }
