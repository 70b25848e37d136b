"""Architectures of GGUF files whose families run as module graphs: their keys as fields of ``config.json``, as data.

`FIELDS` and `BY_TENSOR` hold for all architectures and are joined with the fields that a family's config has; a row of
`GRAPH_ARCHITECTURES` adds what is its own: values that llama.cpp's code fixes and files do not state
(`src/models/`), and how its converter stores numbers (`conversion/`).
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from moelight.core.errors import CheckpointError, ConfigError, did_you_mean, quoted
from moelight.core.small_files import open_regular, read_error_text
from moelight.profiles.gguf import GGMLTensor, GGUFFile
from moelight.profiles.gguf_config import ARCHITECTURES, DTYPE, Architecture, Metadata, layers_of, rotary

SLIDING, FULL = "sliding_attention", "full_attention"
_MOST_FACTORS = 1 << 12
_GATING = {1: "softmax", 2: "sigmoid"}

# Keys of files, and the fields of configs with the same value, under all names that families give them.
FIELDS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "context_length": ("max_position_embeddings",),
        "embedding_length": ("hidden_size",),
        "feed_forward_length": ("intermediate_size",),
        "vocab_size": ("vocab_size",),
        "attention.head_count": ("num_attention_heads",),
        "attention.layer_norm_rms_epsilon": ("rms_norm_eps", "norm_eps", "layer_norm_epsilon"),
        "attention.layer_norm_epsilon": ("layer_norm_eps", "norm_eps", "norm_epsilon", "layer_norm_epsilon"),
        "attention.sliding_window": ("sliding_window",),
        "attn_logit_softcapping": ("attn_logit_softcapping",),
        "final_logit_softcapping": ("final_logit_softcapping",),
        "expert_count": ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"),
        "expert_used_count": ("num_experts_per_tok", "num_experts_per_token", "moe_k", "moe_topk", "top_k_experts"),
        "expert_feed_forward_length": ("moe_intermediate_size",),
        "expert_shared_count": ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts"),
        "expert_shared_feed_forward_length": ("shared_expert_intermediate_size", "shared_intermediate_size"),
        "expert_weights_scale": (
            "routed_scaling_factor",
            "route_scale",
            "router_scaling_factor",
            "moe_routed_scaling_factor",
        ),
        "expert_weights_norm": ("norm_topk_prob", "route_norm"),
        "expert_group_count": ("n_group",),
        "expert_group_used_count": ("topk_group",),
        "leading_dense_block_count": ("first_k_dense_replace", "num_dense_layers"),
        "embedding_scale": ("embedding_multiplier",),
        "residual_scale": ("residual_multiplier",),
        "attention.scale": ("attention_multiplier",),
        "ssm.conv_kernel": ("mamba_d_conv", "conv_kernel", "linear_conv_kernel_dim"),
        "ssm.state_size": ("mamba_d_state", "ssm_state_size"),
        "shortconv.l_cache": ("conv_L_cache",),
    }
)
# Ends of those of their keys whose values are no whole numbers.
_NUMBERS, _FLAGS = ("epsilon", "softcapping", "scale"), ("_norm",)
# Keys that other functions read, or that state what the tensors show.
_READ_ELSEWHERE = frozenset(
    {
        "attention.head_count_kv",
        "attention.key_length",
        "attention.value_length",
        "block_count",
        "nextn_predict_layers",
        "rope.dimension_count",
        "rope.freq_base",
        "rope.scale_linear",
        "rope.scaling.attn_factor",
        "rope.scaling.factor",
        "rope.scaling.finetuned",
        "rope.scaling.original_context_length",
        "rope.scaling.type",
        "rope.scaling.yarn_attn_factor",
        "rope.scaling.yarn_beta_fast",
        "rope.scaling.yarn_beta_slow",
        "rope.scaling.yarn_log_multiplier",
        "use_parallel_residual",
    }
)
# Tensors whose presence is a field of some families' configs.
BY_TENSOR: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "attn_q.bias": ("attention_bias", "qkv_bias", "use_qkv_bias", "use_bias"),
        "ffn_gate.bias": ("mlp_bias",),
        "attn_q_norm.weight": ("use_qk_norm",),
    }
)


def _nothing(keys: Metadata) -> dict[str, Any]:  # noqa: ARG001
    return {}


@dataclass(frozen=True, kw_only=True, slots=True)
class GraphArchitecture:
    """One ``general.architecture`` whose family runs as a module graph.

    Attributes:
        model_type: of the family.
        with_key: by keys the model_type of files that have one.
        more: fields that `FIELDS` does not give.
        keys: further keys that ``more`` reads; a file with other keys is refused.
        heads_in_pairs: rows of q and k are stored with the two halves of each head interleaved.
        plus_one: parts of names of the norms that are stored with one added.
        negated_exp: parts of names of tensors that are stored as -exp(x).
        renamed: parts of tensors' names in the file, and in the module where gguf-py's map does not lead there.
        joined: names in the module of matrices that are stored in parts, with the parts of the names of those.
        orders: by parts of names the orders in which rows are stored, or parts of a matrix, of `weights.gguf_orders`.
        stored: by parts of names further functions of values that are stored, of `weights.stored_matrix`.
        by_layer: by keys of the metadata, which have a number for each layer, the parameter that it is in the module.
    """

    model_type: str
    with_key: Mapping[str, str] = field(default_factory=dict)
    more: Callable[[Metadata], dict[str, Any]] = _nothing
    keys: tuple[str, ...] = ()
    heads_in_pairs: bool = False
    plus_one: tuple[str, ...] = ()
    negated_exp: tuple[str, ...] = ()
    renamed: Mapping[str, str] = field(default_factory=dict)
    joined: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    orders: Mapping[str, str] = field(default_factory=dict)
    stored: Mapping[str, str] = field(default_factory=dict)
    by_layer: Mapping[str, str] = field(default_factory=dict)

    def stored_as(self, part: str) -> str:
        """How the numbers of tensor ``blk.N.part`` are stored, as of `StoredMatrix`."""
        if part in self.plus_one:
            return "plus_one"
        return "negated_exp" if part in self.negated_exp else self.stored.get(part, "")


def family_of(file: GGUFFile, name: str, row: GraphArchitecture) -> str:
    """The model_type of the models of ``row`` that ``file`` is one of."""
    return next((family for key, family in row.with_key.items() if file.metadata.get(f"{name}.{key}")), row.model_type)


def graph_values(file: GGUFFile, name: str, row: GraphArchitecture, has: Callable[[str], bool]) -> dict[str, Any]:
    """Return the values that ``config.json`` would have; ``has``: whether the family's config has a field.

    Raises:
        ConfigError: a key is missing, or means something that is not read.
    """
    keys = Metadata(file, name)
    _check_layers(keys)
    differ = "attention.head_count" in row.keys
    heads = max(_per_layer(keys, "attention.head_count")) if differ else keys.integer("attention.head_count", least=1)
    hidden = keys.integer("embedding_length", least=1)
    head_dim = keys.integer("attention.key_length", max(1, hidden // heads), least=1)
    if "attention.value_length" not in row.keys:
        keys.only("attention.value_length", (head_dim,), f"and keys have {head_dim} numbers")
    fields, model_type = row.more(keys), family_of(file, name, row)
    values: dict[str, Any] = {
        "num_hidden_layers": layers_of(keys),
        "head_dim": head_dim,
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "pad_token_id": file.metadata.get("tokenizer.ggml.padding_token_id"),
    }
    if has("rope_parameters") and "rope_parameters" not in fields:
        values["rope_parameters"] = rotary_of(keys, head_dim)
    if "num_key_value_heads" not in fields:
        values["num_key_value_heads"] = keys.get("attention.head_count_kv", heads)
    for key, names in FIELDS.items():
        wanted = [name for name in names if has(name) and name not in fields]
        value = _field_value(keys, key) if wanted or key not in row.keys else None
        if not wanted and value and fields.keys().isdisjoint(names) and key not in row.keys:
            raise keys.error(f"the metadata key {name}.{key} has no meaning in {model_type}; use safetensors")
        if value is not None:
            values |= dict.fromkeys(wanted, value)
    for tensor, names in BY_TENSOR.items():
        values |= dict.fromkeys(names, any(stored.endswith(f".{tensor}") for stored in file.tensors))
    read = {*FIELDS, *_READ_ELSEWHERE, *row.keys}
    if (left := next((key for key in keys.names() if key not in read), None)) is not None:
        raise keys.error(f"the metadata key {name}.{left} is not read of this architecture; use safetensors")
    if head_dim != hidden // heads:
        fields = {"head_dim": head_dim, **fields}  # read by families whose configs do not list it
    values = {key: value for key, value in values.items() if has(key)} | fields
    return {"model_type": model_type, "dtype": DTYPE} | values


def _field_value(keys: Metadata, key: str) -> Any:
    """The value of one of `FIELDS`, None without; raises ConfigError if it is of another kind than the field's."""
    value = keys.get(key)
    if value is None:
        return None
    if key.endswith(_FLAGS):
        if type(value) is not bool:
            raise keys.error(f"{keys.name}.{key} is {quoted(value)}, not true or false")
        return value
    return keys.number(key, 0.0) if key.endswith(_NUMBERS) else keys.integer(key)


def _check_layers(keys: Metadata) -> None:
    """Raise ConfigError if the file has no tensor of a layer that the metadata count."""
    stored = {tensor.split(".", 2)[1] for tensor in keys.file.tensors if tensor.startswith("blk.")}
    if layers_of(keys) > len(stored):
        raise keys.error(
            f"{keys.name}.block_count counts {layers_of(keys)} layers, and the file has tensors of {len(stored)}; "
            "fetch the whole file"
        )


def rotary_of(keys: Metadata, head_dim: int) -> dict[str, Any]:
    """``rope_parameters``, with the factors that are tensors: one list (Llama 3), or one up to the original context and
    one beyond (Phi 3)."""
    dimensions = keys.integer("rope.dimension_count", head_dim, least=1)
    partial = {"partial_rotary_factor": dimensions / head_dim}  # 1, too: some families have another default
    names = ("rope_freqs", "rope_factors_short", "rope_factors_long")
    single, short, long = (keys.file.tensors.get(f"{name}.weight") for name in names)
    if single is None and short is None and long is None:
        return rotary(keys, {}) | partial
    context = keys.integer("context_length", least=1)
    if single is not None:
        keys.only("rope.scaling.attn_factor", (1.0,), "beside factors of rotary frequencies")
        short, long, original = single, single, context
    else:
        original = keys.integer("rope.scaling.original_context_length", least=1)
    if short is None or long is None:
        raise CheckpointError(f"{keys.where}: of {names[1]} and {names[2]} one is missing; fetch the whole file")
    return {
        "rope_type": "longrope",
        "rope_theta": keys.number("rope.freq_base", 10000.0),
        "original_max_position_embeddings": original,
        "factor": context / original,
        "attention_factor": keys.number("rope.scaling.attn_factor", 1.0),
        "short_factor": _factors(short),
        "long_factor": _factors(long),
        **partial,
    }


def _factors(tensor: GGMLTensor) -> list[float]:
    """The numbers of ``tensor``, divisors of rotary frequencies, which must be float32 and positive."""
    count = math.prod(tensor.shape)
    if tensor.type != "F32" or count > _MOST_FACTORS:
        raise CheckpointError(
            f"{tensor.file}: tensor {quoted(tensor.name)} is {tensor.type} {list(tensor.shape)}, not a list of float32 "
            "factors; convert the model again"
        )
    try:
        with open(open_regular(tensor.file), "rb") as file:
            file.seek(tensor.offset)
            values = struct.unpack(f"<{count}f", file.read(tensor.nbytes))
    except OSError as error:
        raise CheckpointError(f"{tensor.file}: cannot be read ({read_error_text(error)})") from None
    except struct.error:
        raise CheckpointError(f"{tensor.file}: cut short inside tensor {quoted(tensor.name)}") from None
    if not all(math.isfinite(value) and value > 0 for value in values):
        raise CheckpointError(
            f"{tensor.file}: tensor {quoted(tensor.name)} has factors that are not positive; fetch the file again"
        )
    return [float(f"{value:.9g}") for value in values]


def windows(keys: Metadata, period: int) -> dict[str, Any]:
    """``layer_types`` of a file that may not say which layers have the window: else ``period - 1`` and one without."""
    key = f"{keys.name}.attention.sliding_window_pattern"
    pattern, layers = keys.file.metadata.get(key, period), layers_of(keys)
    if isinstance(pattern, list):
        if len(pattern) < layers or any(type(entry) not in (bool, int) or entry not in (0, 1) for entry in pattern):
            raise keys.error(f"{key} does not say of each layer whether it has the window")
        flags = pattern[:layers]
    elif type(pattern) is int and pattern > 0:
        flags = [layer % pattern != pattern - 1 for layer in range(layers)]
    else:
        raise keys.error(f"{key} is {quoted(pattern)}, not a number of layers")
    return {"layer_types": [SLIDING if flag else FULL for flag in flags]}


def _gating(keys: Metadata, default: str) -> str:
    function = keys.integer("expert_gating_func", 0)
    if function and function not in _GATING:
        raise keys.error(f"{keys.name}.expert_gating_func {function} is not computed; known: 1 (softmax), 2 (sigmoid)")
    return _GATING.get(function, default)


# llama.cpp scales the queries of Gemma by the size of heads, but those of 27B, which it knows by the layers.
_GEMMA2_27B, _GEMMA3_27B = 46, 62


def _query_scale(keys: Metadata, layers: int) -> int:
    """What the root of which divides queries; in a model of ``layers`` the width of a head's share of the embedding."""
    if layers_of(keys) == layers:
        return keys.integer("embedding_length") // keys.integer("attention.head_count", least=1)
    return keys.integer("attention.key_length")


def _gemma2(keys: Metadata) -> dict[str, Any]:
    return {**windows(keys, 2), "query_pre_attn_scalar": _query_scale(keys, _GEMMA2_27B)}


def _gemma3(keys: Metadata) -> dict[str, Any]:
    local = {"rope_type": "default", "rope_theta": keys.number("rope.freq_base_swa", 10000.0)}
    return {
        **windows(keys, 6),
        "rope_parameters": {FULL: rotary(keys, {}), SLIDING: local},
        "query_pre_attn_scalar": _query_scale(keys, _GEMMA3_27B),
    }


def _gemma4(keys: Metadata) -> dict[str, Any]:
    """Layers without the window have heads of their own width and number, rotate a share of it, and may have no values
    of their own; the last layers may have no keys, and a wider feed-forward network."""
    layers, tensors = layers_of(keys), keys.file.tensors
    kinds = windows(keys, 6)["layer_types"]
    full = [layer for layer, kind in enumerate(kinds) if kind == FULL]
    shared = keys.integer("attention.shared_kv_layers", 0)
    width, window_width = (keys.integer(f"attention.key_length{suffix}", least=1) for suffix in ("", "_swa"))
    keys.only("attention.value_length_swa", (window_width,), f"and keys have {window_width} numbers")
    keys.only("rope.dimension_count_swa", (window_width,), f"and heads have {window_width}, all of which are rotated")
    heads = _by_kind(keys, "attention.head_count_kv", kinds)
    inner = _per_layer(keys, "feed_forward_length")
    base = keys.number("rope.freq_base", 10000.0)
    unshared = [layer for layer in full if layer < layers - shared]
    return {
        "layer_types": kinds,
        "num_kv_shared_layers": shared,
        "head_dim": window_width,
        "num_key_value_heads": heads[SLIDING],
        "per_layer_config": {layer: {"head_dim": width, "num_key_value_heads": heads[FULL]} for layer in full},
        "attention_k_eq_v": any(f"blk.{layer}.attn_v.weight" not in tensors for layer in unshared),
        "intermediate_size": inner[0],
        "use_double_wide_mlp": inner[-1] != inner[0],
        "hidden_size_per_layer_input": keys.integer("embedding_length_per_layer_input", 0),
        "vocab_size_per_layer_input": keys.integer("vocab_size", least=1),
        "enable_moe_block": keys.integer("expert_count", 0) > 0,
        "rope_parameters": {
            SLIDING: {"rope_type": "default", "rope_theta": keys.number("rope.freq_base_swa", base)},
            FULL: {
                "rope_type": "proportional",
                "rope_theta": base,
                "partial_rotary_factor": _rotated(keys) * 2 / width,
            },
        },
    }


_NOT_ROTATED = 1e29  # divisors from here on leave no rotation; the converter writes 1e30


def _rotated(keys: Metadata) -> int:
    """The number of frequencies of layers without the window, by divisors of those that are none."""
    tensor = keys.file.tensors.get("rope_freqs.weight")
    if tensor is None:
        raise keys.error("tensor rope_freqs.weight is missing, which says what layers without a window rotate")
    factors = _factors(tensor)
    count = sum(factor == 1.0 for factor in factors)
    if (
        not count
        or any(factor != 1.0 for factor in factors[:count])
        or min(factors[count:], default=math.inf) < _NOT_ROTATED
    ):
        raise keys.error("tensor rope_freqs.weight has other divisors than 1 and 1e30, which are not computed")
    return count


def _per_layer(keys: Metadata, key: str) -> list[int]:
    """The whole number ``key`` of each layer, which may be one for all."""
    layers = layers_of(keys)
    value = keys.file.metadata.get(f"{keys.name}.{key}")
    if not isinstance(value, list):
        return [keys.integer(key, least=1)] * layers
    if len(value) < layers or any(type(number) is not int or number < 1 for number in value):
        raise keys.error(f"{keys.name}.{key} must have a positive number for each of {layers} layers")
    return value[:layers]


def _by_kind(keys: Metadata, key: str, kinds: list[str]) -> dict[str, int]:
    """The number ``key`` of the layers of each of ``kinds``, which must be one."""
    values = _per_layer(keys, key)
    result = {kind: {value for value, other in zip(values, kinds, strict=True) if other == kind} for kind in kinds}
    if any(len(present) > 1 for present in result.values()):
        raise keys.error(f"{keys.name}.{key} differs among layers of one kind, which is not computed")
    return {kind: min(result.get(kind, values)) for kind in (SLIDING, FULL)}


def _sigmoid(keys: Metadata) -> dict[str, Any]:
    """Families whose routers have sigmoid scores, for which older converters wrote no key."""
    _only(keys, "sigmoid", "sigmoid")
    return {}


def _only(keys: Metadata, function: str, default: str) -> None:
    if (stated := _gating(keys, default)) != function:
        raise keys.error(
            f"{keys.name}.expert_gating_func says {stated}, and this family's routers have {function} scores; use the "
            "checkpoint in safetensors"
        )


def _bailing_moe2(keys: Metadata) -> dict[str, Any]:
    _only(keys, "sigmoid", "sigmoid")
    width = keys.integer("expert_feed_forward_length", least=1) * keys.integer("expert_shared_count", 1)
    keys.only("expert_shared_feed_forward_length", (width,), f"and shared experts have {width}")
    return {}


def _ernie(keys: Metadata) -> dict[str, Any]:
    return {
        "moe_layer_start_index": keys.integer("leading_dense_block_count", 0),
        "moe_layer_interval": keys.integer("interleave_moe_layer_step", 1, least=1),
        "moe_layer_end_index": layers_of(keys) - 1,
    }


def _granite(keys: Metadata) -> dict[str, Any]:
    return {"logits_scaling": keys.number("logit_scale", 1.0) or 1.0}


def _granite_hybrid(keys: Metadata) -> dict[str, Any]:
    state, inner = _mixers(keys), keys.integer("ssm.inner_size", least=1)
    heads = keys.integer("ssm.time_step_rank", least=1)
    return {
        **_granite(keys),
        "layer_types": ["attention" if attends else "mamba" for attends in state],
        "num_key_value_heads": _key_heads(keys),
        "mamba_n_groups": keys.integer("ssm.group_count", least=1),
        "mamba_n_heads": heads,
        "mamba_d_head": inner // heads,
        "mamba_expand": inner // keys.integer("embedding_length", least=1),
        "mamba_conv_bias": "blk.0.ssm_conv1d.bias" in keys.file.tensors,
        "mamba_proj_bias": "blk.0.ssm_in.bias" in keys.file.tensors,
        # Converters write True for models that rotate positions.
        "position_embedding_type": "rope" if keys.get("rope.scaling.finetuned", False) else "nope",
    }


def _mixers(keys: Metadata) -> list[bool]:
    """Whether each layer attends: those have heads of keys."""
    heads = keys.file.metadata.get(f"{keys.name}.attention.head_count_kv")
    layers = layers_of(keys)
    if not isinstance(heads, list) or len(heads) < layers or any(type(count) is not int for count in heads):
        raise keys.error(f"{keys.name}.attention.head_count_kv must have a number for each of {layers} layers")
    return [count > 0 for count in heads[:layers]]


def _key_heads(keys: Metadata) -> int:
    """The heads of keys of the layers that have any; of queries, if none has."""
    counts = keys.file.metadata[f"{keys.name}.attention.head_count_kv"]
    present = {count for count in counts if count}
    if len(present) > 1:
        raise keys.error(f"{keys.name}.attention.head_count_kv differs from layer to layer, which is not computed")
    return present.pop() if present else keys.integer("attention.head_count", least=1)


def _jamba(keys: Metadata) -> dict[str, Any]:
    tensors, layers = keys.file.tensors, layers_of(keys)
    attend = [layer for layer, attends in enumerate(_mixers(keys)) if attends]
    routed = [layer for layer in range(layers) if f"blk.{layer}.ffn_gate_inp.weight" in tensors]
    offset, period = _every(keys, attend, layers, "attention")
    expert_offset, expert_period = _every(keys, routed, layers, "experts")
    inner, hidden = keys.integer("ssm.inner_size", least=1), keys.integer("embedding_length", least=1)
    return {
        "attn_layer_offset": offset,
        "attn_layer_period": period,
        "expert_layer_offset": expert_offset,
        "expert_layer_period": expert_period,
        "num_key_value_heads": _key_heads(keys),
        "mamba_dt_rank": keys.integer("ssm.time_step_rank", least=1),
        "mamba_expand": inner // hidden,
        "mamba_conv_bias": "blk.0.ssm_conv1d.bias" in tensors,
        "mamba_proj_bias": "blk.0.ssm_in.bias" in tensors,
    }


def _every(keys: Metadata, chosen: list[int], layers: int, what_for: str) -> tuple[int, int]:
    """Offset and period of the layers ``chosen``."""
    if not chosen:
        return layers, layers + 1
    period = chosen[1] - chosen[0] if len(chosen) > 1 else max(layers - chosen[0], chosen[0] + 1)
    if chosen != list(range(chosen[0], layers, period)):
        raise keys.error(f"the layers with {what_for} have no period, which is not computed; use safetensors")
    return chosen[0], period


def _lfm2(keys: Metadata) -> dict[str, Any]:
    return {
        "layer_types": [FULL if attends else "conv" for attends in _mixers(keys)],
        "num_key_value_heads": _key_heads(keys),
        "block_auto_adjust_ff_dim": False,
        "conv_bias": "blk.0.shortconv.conv.bias" in keys.file.tensors,
    }


def _lfm2_moe(keys: Metadata) -> dict[str, Any]:
    _only(keys, "sigmoid", "sigmoid")
    return {
        "layer_types": [FULL if attends else "conv" for attends in _mixers(keys)],
        "num_key_value_heads": _key_heads(keys),
        "conv_bias": "blk.0.shortconv.conv.bias" in keys.file.tensors,
        "use_expert_bias": any(name.endswith(".exp_probs_b.bias") for name in keys.file.tensors),
        "norm_topk_prob": True,
    }


def _nemotron_h(keys: Metadata) -> dict[str, Any]:
    tensors = keys.file.tensors
    inner, heads = keys.integer("ssm.inner_size", least=1), keys.integer("ssm.time_step_rank", least=1)
    kinds = []
    for layer, attends in enumerate(_mixers(keys)):
        routed, dense = (f"blk.{layer}.{part}.weight" in tensors for part in ("ffn_gate_inp", "ffn_up"))
        kinds.append("attention" if attends else "moe" if routed else "mlp" if dense else "mamba")
    widths = keys.file.metadata.get(f"{keys.name}.feed_forward_length")
    if isinstance(widths, list):
        widths = next((width for width, kind in zip(widths, kinds, strict=False) if kind == "mlp"), 0)
    return {
        "layers_block_type": kinds,
        "num_key_value_heads": _key_heads(keys),
        "n_groups": keys.integer("ssm.group_count", least=1),
        "mamba_num_heads": heads,
        "mamba_head_dim": inner // heads,
        "expand": max(1, inner // keys.integer("embedding_length", least=1)),
        "use_conv_bias": any(name.endswith(".ssm_conv1d.bias") for name in tensors),
        "intermediate_size": widths or keys.integer("embedding_length", least=1),  # without layers that have it
        "moe_shared_expert_intermediate_size": keys.integer("expert_shared_feed_forward_length", 0),
    }


def _linear_attention(keys: Metadata) -> dict[str, Any]:
    layers, interval = layers_of(keys), keys.integer("full_attention_interval", 4, least=1)
    linear = keys.file.metadata.get(
        f"{keys.name}.attention.recurrent_layers", [bool((layer + 1) % interval) for layer in range(layers)]
    )
    if not isinstance(linear, list) or len(linear) < layers or any(type(entry) is not bool for entry in linear):
        raise keys.error(f"{keys.name}.attention.recurrent_layers does not say of each layer whether it has a state")
    heads = keys.integer("ssm.time_step_rank", least=1)
    return {
        "layer_types": ["linear_attention" if flag else FULL for flag in linear[:layers]],
        "linear_num_key_heads": keys.integer("ssm.group_count", least=1),
        "linear_num_value_heads": heads,
        "linear_key_head_dim": keys.integer("ssm.state_size", least=1),
        "linear_value_head_dim": keys.integer("ssm.inner_size", least=heads) // heads,
    }


def _qwen3_next(keys: Metadata) -> dict[str, Any]:
    return {**_linear_attention(keys), "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []}


_MAVERICK = 128  # experts, whose queries and keys have no norm


def _llama4(keys: Metadata) -> dict[str, Any]:
    return {
        "intermediate_size": keys.integer("expert_feed_forward_length"),
        "intermediate_size_mlp": keys.integer("feed_forward_length"),
        "interleave_moe_layer_step": keys.integer("interleave_moe_layer_step", 1, least=1),
        "use_qk_norm": keys.integer("expert_count") != _MAVERICK,
    }


def _dbrx(keys: Metadata) -> dict[str, Any]:
    return {
        "attn_config": {
            "kv_n_heads": keys.integer("attention.head_count_kv", least=1),
            "clip_qkv": keys.get("attention.clamp_kqv"),
            "rope_theta": keys.number("rope.freq_base", 10000.0),
        },
        "ffn_config": {
            "ffn_act_fn": {"name": "silu"},
            "hidden_size": keys.integer("embedding_length", least=1),
            "ffn_hidden_size": keys.integer("feed_forward_length", least=1),
            "moe_num_experts": keys.integer("expert_count", least=1),
            "moe_top_k": keys.integer("expert_used_count", least=1),
        },
        "rope_parameters": {"rope_type": "default", "rope_theta": keys.number("rope.freq_base", 10000.0)},
    }


def _phi3(keys: Metadata) -> dict[str, Any]:
    original = keys.integer("rope.scaling.original_context_length", keys.integer("context_length"))
    window = keys.integer("attention.sliding_window", 0)
    return {"original_max_position_embeddings": original, "sliding_window": window or None}


def _exaone4(keys: Metadata) -> dict[str, Any]:
    if keys.get("attention.sliding_window") is None:
        return {"sliding_window": None, "layer_types": [FULL] * layers_of(keys)}
    return windows(keys, 4)


def _exaone_moe(keys: Metadata) -> dict[str, Any]:
    _only(keys, "sigmoid", "sigmoid")
    dense = keys.integer("leading_dense_block_count", 0)
    kinds = ["dense" if layer < dense else "sparse" for layer in range(layers_of(keys))]
    return {**windows(keys, 4), "mlp_layer_types": kinds}


def _afmoe(keys: Metadata) -> dict[str, Any]:
    _only(keys, "sigmoid", "sigmoid")
    # llama.cpp scales embeddings by the root of their width.
    return {**windows(keys, 4), "global_attn_every_n_layers": 4, "mup_enabled": True}


def _command_r(keys: Metadata) -> dict[str, Any]:
    return {"logit_scale": keys.number("logit_scale", 1.0)}


def _cohere2(keys: Metadata) -> dict[str, Any]:
    return {**windows(keys, 4), "logit_scale": keys.number("logit_scale", 1.0)}


def _cohere2_moe(keys: Metadata) -> dict[str, Any]:
    dense = keys.integer("leading_dense_block_count", 0)
    return {
        **windows(keys, 4),
        "logit_scale": keys.number("logit_scale", 1.0),
        "expert_selection_fn": _gating(keys, "sigmoid"),
        "mlp_layer_types": ["dense" if layer < dense else "sparse" for layer in range(layers_of(keys))],
        "intermediate_size": keys.integer("expert_feed_forward_length", least=1),
        "num_shared_experts": keys.integer("expert_shared_count", 0),
    }


def _mistral3(keys: Metadata) -> dict[str, Any]:
    rope = rotary(keys, {})
    beta = keys.number("attention.temperature_scale", 0.0)
    if rope["rope_type"] == "yarn":
        rope["llama_4_scaling_beta"] = beta
        return {"rope_parameters": rope, "sliding_window": None}
    if beta:
        raise keys.error(f"{keys.name}.attention.temperature_scale without yarn is not read; use safetensors")
    return {"sliding_window": None}


def _window_rotary(keys: Metadata, head_dim: int) -> dict[str, Any]:
    """``rope_parameters`` of layers with and without a window: what is stretched is without."""
    base = keys.number("rope.freq_base_swa", keys.number("rope.freq_base", 10000.0))
    return {FULL: rotary_of(keys, head_dim), SLIDING: {"rope_type": "default", "rope_theta": base}}


def _head_dim(keys: Metadata) -> int:
    heads = max(_per_layer(keys, "attention.head_count"))
    return keys.integer("attention.key_length", max(1, keys.integer("embedding_length", least=1) // heads), least=1)


def _olmo2(keys: Metadata) -> dict[str, Any]:
    if not keys.integer("attention.sliding_window", 0):
        return {}
    return {**windows(keys, 4), "rope_parameters": _window_rotary(keys, _head_dim(keys))}


def _mellum(keys: Metadata) -> dict[str, Any]:
    fields = {"norm_topk_prob": True, "rope_parameters": _window_rotary(keys, _head_dim(keys))}
    if not keys.integer("attention.sliding_window", 0):
        return {**fields, "sliding_window": None, "layer_types": [FULL] * layers_of(keys)}
    return {**fields, **windows(keys, 4)}


def _norm_topk(keys: Metadata) -> dict[str, Any]:  # noqa: ARG001
    return {"norm_topk_prob": True}


def _routed(keys: Metadata) -> list[str]:
    """``mlp_layer_types``: the layers with a router have experts."""
    tensors = keys.file.tensors
    routed = (f"blk.{layer}.ffn_gate_inp.weight" in tensors for layer in range(layers_of(keys)))
    return ["sparse" if has_router else "dense" for has_router in routed]


def _hy_v3(keys: Metadata) -> dict[str, Any]:
    _only(keys, "sigmoid", "sigmoid")
    keys.only("expert_weights_norm", (True,), "and the sum of weights is 1 in this family")
    width = keys.integer("expert_feed_forward_length", least=1)
    shared = keys.integer("expert_shared_feed_forward_length", 0)
    if shared % width:
        raise keys.error(f"{keys.name}.expert_shared_feed_forward_length {shared} is no multiple of {width}")
    return {"mlp_layer_types": _routed(keys), "num_shared_experts": shared // width}


def _laguna(keys: Metadata) -> dict[str, Any]:
    _only(keys, "sigmoid", "sigmoid")
    keys.only("expert_weights_norm", (True,), "and the sum of weights is 1 in this family")
    keys.only("expert_shared_count", (1,), "and 1 shared expert is computed")
    layers, head_dim = layers_of(keys), _head_dim(keys)
    heads = _per_layer(keys, "attention.head_count")
    rope = _window_rotary(keys, head_dim)
    rotated = keys.integer("rope.dimension_count_swa", head_dim, least=1)
    rope[SLIDING]["partial_rotary_factor"] = rotated / head_dim
    rope[FULL].setdefault("partial_rotary_factor", 1.0)
    window = keys.integer("attention.sliding_window", 0)
    kinds = [SLIDING if window and layer % 4 else FULL for layer in range(layers)]
    if f"{keys.name}.attention.sliding_window_pattern" in keys.file.metadata:
        kinds = windows(keys, 4)["layer_types"]
    gate = keys.file.tensors.get("blk.0.attn_gate.weight")
    return {
        "rope_parameters": rope,
        "layer_types": kinds,
        "mlp_layer_types": _routed(keys),
        "num_attention_heads": max(heads),
        "num_attention_heads_per_layer": heads,
        "gating": "per-head" if gate is None or gate.shape[0] == heads[0] else "per-element",
    }


def _stated_windows(keys: Metadata) -> dict[str, Any]:
    if f"{keys.name}.attention.sliding_window_pattern" not in keys.file.metadata:
        raise keys.error(f"the metadata key {keys.name}.attention.sliding_window_pattern is missing")
    return windows(keys, 4)


def _granite_swa(keys: Metadata) -> dict[str, Any]:
    return {**_granite(keys), **_stated_windows(keys)}


def _stablelm(keys: Metadata) -> dict[str, Any]:
    """Layers without a second norm compute attention and feed-forward beside each other."""
    return {"use_parallel_residual": "blk.0.ffn_norm.weight" not in keys.file.tensors}


def _gpt_neox(keys: Metadata) -> dict[str, Any]:
    return {"use_parallel_residual": keys.get("use_parallel_residual", True), "attention_bias": True}


def _phi2(keys: Metadata) -> dict[str, Any]:
    """The converter writes four times the width of the embedding, whatever the matrices have."""
    matrix = keys.file.tensors.get("blk.0.ffn_up.weight")
    return {"intermediate_size": keys.integer("feed_forward_length") if matrix is None else matrix.shape[0]}


def _nemotron(keys: Metadata) -> dict[str, Any]:
    return {"mlp_bias": "blk.0.ffn_up.bias" in keys.file.tensors}


def _olmo(keys: Metadata) -> dict[str, Any]:
    return {"clip_qkv": keys.get("attention.clamp_kqv")}


def _no_rope(keys: Metadata) -> dict[str, Any]:
    """Each fourth layer rotates nothing, which llama.cpp's code says."""
    layers = layers_of(keys)
    return {
        "no_rope_layer_interval": 4,
        "no_rope_layers": [int((layer + 1) % 4 != 0) for layer in range(layers)],
        "layer_types": [FULL] * layers,
        "sliding_window": None,
        "use_sliding_window": False,
    }


def _minicpm3(keys: Metadata) -> dict[str, Any]:
    """Files do not say the scales of embeddings, layers and logits, nor the width of values."""
    rope, heads = keys.integer("rope.dimension_count", least=1), keys.integer("attention.head_count", least=1)
    matrix = keys.file.tensors.get("blk.0.attn_output.weight")
    width = keys.integer("embedding_length", least=1) if matrix is None else matrix.shape[1]
    return {
        "q_lora_rank": keys.integer("attention.q_lora_rank", least=1),
        "kv_lora_rank": keys.integer("attention.kv_lora_rank", least=1),
        "qk_rope_head_dim": rope,
        "qk_nope_head_dim": keys.integer("attention.key_length", least=rope + 1) - rope,
        "v_head_dim": width // heads,
        "head_dim": rope,
        "scale_emb": 12,
        "scale_depth": 1.4,
        "dim_model_base": 256,
        "rope_parameters": rotary_of(keys, rope),
    }


def _minimax_m2(keys: Metadata) -> dict[str, Any]:
    _only(keys, "sigmoid", "sigmoid")
    return {"intermediate_size": keys.integer("expert_feed_forward_length", least=1)}


def _hunyuan_moe(keys: Metadata) -> dict[str, Any]:
    """Experts and the one shared expert are as wide as ``intermediate_size`` says."""
    width = keys.integer("feed_forward_length", least=1)
    for key in ("expert_feed_forward_length", "expert_shared_feed_forward_length"):
        keys.only(key, (width,), f"and feed_forward_length {width}")
    keys.only("expert_shared_count", (1,), "and 1 shared expert is computed")
    return {}


def _latent_attention(keys: Metadata) -> dict[str, Any]:
    """Queries, keys and values of latents, as `conversion/deepseek.py` states their sizes."""
    rope, width = keys.integer("rope.dimension_count", least=1), keys.integer("attention.key_length_mla", least=1)
    compressed = any(name.endswith(".attn_q_a.weight") for name in keys.file.tensors)
    return {
        "q_lora_rank": keys.integer("attention.q_lora_rank", least=1) if compressed else None,
        "kv_lora_rank": keys.integer("attention.kv_lora_rank", least=1),
        "qk_rope_head_dim": rope,
        "qk_nope_head_dim": width - rope,
        "v_head_dim": keys.integer("attention.value_length_mla", least=1),
        "num_key_value_heads": keys.integer("attention.head_count", least=1),
        "head_dim": rope,
        "rope_parameters": rotary(keys, {}),
    }


def _groups_of_experts(keys: Metadata) -> dict[str, Any]:
    groups = keys.integer("expert_group_count", 0)
    return {
        "n_group": max(1, groups),
        "topk_group": keys.integer("expert_group_used_count", least=1) if groups > 1 else 1,
        "routed_scaling_factor": keys.number("expert_weights_scale", 1.0) or 1.0,
        "norm_topk_prob": keys.get("expert_weights_norm", False),
    }


def _choosing(keys: Metadata) -> dict[str, Any]:
    """The sizes of what chooses keys."""
    sizes = {"index_n_heads": "head_count", "index_head_dim": "key_length", "index_topk": "top_k"}
    return {name: keys.integer(f"attention.indexer.{key}", least=1) for name, key in sizes.items()}


def _deepseek32(keys: Metadata) -> dict[str, Any]:
    keys.need("expert_gating_func")
    _only(keys, "sigmoid", "sigmoid")
    return {
        **_latent_attention(keys),
        **_groups_of_experts(keys),
        "mlp_layer_types": _routed(keys),
        **_choosing(keys),
    }


_SQRT_SOFTPLUS = 4  # of expert_gating_func
_COMPRESSED = {0: SLIDING, 4: "compressed_sparse_attention", 128: "heavily_compressed_attention"}


def _deepseek4(keys: Metadata) -> dict[str, Any]:
    """Layers by the number of positions whose keys are one; the first have experts that the token chooses."""
    layers = layers_of(keys)
    if (function := keys.integer("expert_gating_func")) != _SQRT_SOFTPLUS:
        raise keys.error(f"{keys.name}.expert_gating_func {function} is not computed; known: 4 (sqrtsoftplus)")
    ratios = keys.file.metadata.get(f"{keys.name}.attention.compress_ratios")
    if not isinstance(ratios, list) or len(ratios) < layers or any(ratio not in _COMPRESSED for ratio in ratios):
        raise keys.error(f"{keys.name}.attention.compress_ratios must be 0, 4 or 128 for each of {layers} layers")
    hashed = keys.integer("hash_layer_count")
    width, hidden = keys.integer("attention.key_length", least=1), keys.integer("embedding_length", least=1)
    keys.only("attention.value_length", (width,), f"and keys have {width} numbers")
    lanes = keys.integer("hyper_connection.count", least=1)
    keys.only("embedding_length_out", (hidden * lanes,), f"and {lanes} lanes have {hidden * lanes} numbers")
    share = {"partial_rotary_factor": keys.integer("rope.dimension_count", width, least=1) / width}
    base, compressed = keys.number("rope.freq_base", 10000.0), rotary(keys, {})
    if compressed["rope_type"] == "yarn":
        compressed["attention_factor"] = 1.0
    return {
        "layer_types": [_COMPRESSED[ratio] for ratio in ratios[:layers]],
        "mlp_layer_types": ["hash_moe" if layer < hashed else "moe" for layer in range(layers)],
        "head_dim": width,
        **share,
        "scoring_func": "sqrtsoftplus",
        "q_lora_rank": keys.integer("attention.q_lora_rank", least=1),
        "o_groups": keys.integer("attention.output_group_count", least=1),
        "o_lora_rank": keys.integer("attention.output_lora_rank", least=1),
        **_choosing(keys),
        **_lanes(keys),
        "swiglu_limit": _limit(keys, None),
        "rope_parameters": {
            "main": {"rope_type": "default", "rope_theta": base, **share},
            "compress": compressed | share | {"rope_theta": keys.number("attention.compress_rope_freq_base", base)},
        },
    }


_SHARED_INDEX = 1 << 20  # positions, from which on files without a key share the choice of keys among layers


def _indexers(keys: Metadata, default: list[bool]) -> list[str]:
    """``indexer_types``: whether each layer chooses keys of its own, or takes those of a layer before; ``default`` of a
    file that does not say."""
    name = f"{keys.name}.attention.indexer.types"
    choose = keys.file.metadata.get(name, default)
    if not isinstance(choose, list) or len(choose) < len(default) or any(type(entry) is not bool for entry in choose):
        raise keys.error(f"{name} does not say of each layer whether it chooses keys of its own")
    return ["full" if chooses else "shared" for chooses in choose[: len(default)]]


def _glm_dsa(keys: Metadata) -> dict[str, Any]:
    _only(keys, "sigmoid", "sigmoid")
    shared = keys.integer("context_length", least=1) >= _SHARED_INDEX
    default = [not shared or layer < 2 or layer % 4 == 2 for layer in range(layers_of(keys))]
    return {
        **_latent_attention(keys),
        **_groups_of_experts(keys),
        **_choosing(keys),
        "mlp_layer_types": _routed(keys),
        "indexer_types": _indexers(keys, default),
    }


def _lanes(keys: Metadata) -> dict[str, Any]:
    """Hyper-connections that are balanced by rounds."""
    return {
        "hc_mult": keys.integer("hyper_connection.count", least=1),
        "hc_sinkhorn_iters": keys.integer("hyper_connection.sinkhorn_iterations"),
        "hc_eps": keys.number("hyper_connection.epsilon", 1e-6),
    }


def _limit(keys: Metadata, default: float | None) -> float:
    """The limit of activations, of routed and of shared experts; 0 is none."""
    limit = keys.number("swiglu_clamp_exp", keys.need("swiglu_clamp_exp") if default is None else default)
    keys.only("swiglu_clamp_shexp", (limit,), f"and that of experts is {limit}")
    return limit or math.inf


def _glm5_next(keys: Metadata) -> dict[str, Any]:
    """Linear attention as Kimi's, and latent attention without rotations that chooses groups of keys."""
    _only(keys, "sigmoid", "sigmoid")
    keys.only("rope.dimension_count", (0,), "and nothing is rotated")
    keys.only("attention.layer_norm_epsilon", (1e-6,), "and 1e-6 is computed")
    attend, width = _mixers(keys), keys.integer("attention.key_length_mla", least=1)
    return {
        **_groups_of_experts(keys),
        **_choosing(keys),
        **_lanes(keys),
        "layer_types": ["indexed_attention" if attends else "linear_attention" for attends in attend],
        "mlp_layer_types": _routed(keys),
        "indexer_types": _indexers(keys, [True] * len(attend)),
        "index_kpool": keys.integer("attention.indexer.kpool", least=1),
        "index_kpool_always_select_tail": keys.get("attention.indexer.kpool_select_tail", True),
        "q_lora_rank": keys.integer("attention.q_lora_rank", least=1),
        "kv_lora_rank": keys.integer("attention.kv_lora_rank", least=1),
        "qk_rope_head_dim": 0,
        "qk_nope_head_dim": width,
        "head_dim": 0,
        "v_head_dim": keys.integer("attention.value_length_mla", least=1),
        "num_key_value_heads": keys.integer("attention.head_count", least=1),
        "linear_head_dim": keys.integer("kda.head_dim", least=1),
        "linear_num_heads": keys.integer("attention.head_count", least=1),
        "linear_lower_bound": keys.get("kda.gate_lower_bound"),
        "swiglu_limit": _limit(keys, 0.0),
    }


def _hy_v4(keys: Metadata) -> dict[str, Any]:
    """As GLM's with a choice of keys among layers; a file without one attends to all keys."""
    if not keys.get("attention.indexer.head_count"):
        raise keys.error(f"{keys.name} without a choice of keys is not computed; use the checkpoint in safetensors")
    return {
        **_glm_dsa(keys),
        "layer_types": ["indexed_attention"] * layers_of(keys),
        "hc_mult": keys.integer("hyper_connection.count", least=1),
        "hc_eps": keys.number("hyper_connection.epsilon", 1e-6),
        "hc_magnitude": keys.number("hyper_connection.magnitude", 2.0),
        "swiglu_limit": _limit(keys, 0.0),
    }


_MISTRAL4_BETA = 0.1  # the default of transformers, which the converter leaves out


def _mistral4(keys: Metadata) -> dict[str, Any]:
    _only(keys, "softmax", "softmax")
    fields = {**_latent_attention(keys), **_groups_of_experts(keys)}
    rope = fields["rope_parameters"]
    if rope["rope_type"] != "yarn":
        raise keys.error(f"{keys.name} without yarn is not read; use the checkpoint in safetensors")
    rope["llama_4_scaling_beta"] = keys.number("attention.temperature_scale", _MISTRAL4_BETA)
    width = fields["qk_nope_head_dim"] + fields["qk_rope_head_dim"]
    return {**fields, "head_dim": width, "first_k_dense_replace": _routed(keys).count("dense")}


def _minimax_m3(keys: Metadata) -> dict[str, Any]:
    _only(keys, "sigmoid", "sigmoid")
    keys.only("expert_weights_norm", (True,), "and the sum of weights is 1 in this family")
    keys.only("expert_shared_count", (1,), "and 1 shared expert is computed")
    tensors, width = keys.file.tensors, keys.integer("expert_feed_forward_length", least=1)
    shared = next((tensor for name, tensor in tensors.items() if name.endswith(".ffn_gate_shexp.weight")), None)
    chooses = (f"blk.{layer}.indexer.q_proj.weight" in tensors for layer in range(layers_of(keys)))
    return {
        "intermediate_size": width,
        "dense_intermediate_size": keys.integer("feed_forward_length", least=1),
        "shared_intermediate_size": width if shared is None else shared.shape[0],
        "mlp_layer_types": _routed(keys),
        "layer_types": ["minimax_m3_sparse" if sparse else FULL for sparse in chooses],
        "index_n_heads": keys.integer("attention.indexer.head_count", least=1),
        "index_head_dim": keys.integer("attention.indexer.key_length", least=1),
        "index_topk_blocks": keys.integer("attention.indexer.top_k", least=1),
        "index_block_size": keys.integer("attention.indexer.block_size", least=1),
        "index_local_blocks": keys.integer("attention.indexer.local_blocks"),
    }


def _mimo2(keys: Metadata) -> dict[str, Any]:
    """Layers with the window have twice as many heads of keys."""
    _only(keys, "sigmoid", "sigmoid")
    kinds, head_dim = _stated_windows(keys)["layer_types"], _head_dim(keys)
    heads = _by_kind(keys, "attention.head_count_kv", kinds)
    if SLIDING in kinds and FULL in kinds and heads[SLIDING] != 2 * heads[FULL]:
        raise keys.error(
            f"{keys.name}.attention.head_count_kv is {heads[SLIDING]} with the window and {heads[FULL]} without, and "
            "twice as many with it are computed; use the checkpoint in safetensors"
        )
    rope = _window_rotary(keys, head_dim)
    rope[SLIDING]["partial_rotary_factor"] = keys.integer("rope.dimension_count", head_dim, least=1) / head_dim
    return {
        **_groups_of_experts(keys),
        "norm_topk_prob": True,
        "layer_types": kinds,
        "mlp_layer_types": _routed(keys),
        "num_key_value_heads": heads[FULL] if FULL in kinds else heads[SLIDING] // 2,
        "v_head_dim": keys.integer("attention.value_length", head_dim, least=1),
        "attention_value_scale": keys.number("attention.value_scale", 1.0) or 1.0,
        "rope_parameters": rope,
    }


def _step35(keys: Metadata) -> dict[str, Any]:
    """Layers without the window rotate half of what the file says, and their divisors of frequencies come first."""
    _only(keys, "sigmoid", "sigmoid")
    keys.only("expert_weights_norm", (True,), "and the sum of weights is 1 in this family")
    kinds, head_dim = _stated_windows(keys)["layer_types"], _head_dim(keys)
    heads, rope = _by_kind(keys, "attention.head_count", kinds), _window_rotary(keys, head_dim)
    rotated = keys.integer("rope.dimension_count", head_dim, least=2) // 2
    rope[FULL]["partial_rotary_factor"] = rotated / head_dim
    for factors in ("short_factor", "long_factor"):
        if factors in rope[FULL]:
            rope[FULL][factors] = rope[FULL][factors][: rotated // 2]
    rope[SLIDING]["partial_rotary_factor"] = 2 * rotated / head_dim
    return {
        "allow_global_per_layer_attribute_access": True,  # by transformers' own check of the divisors
        "layer_types": kinds,
        "mlp_layer_types": _routed(keys),
        "num_attention_heads": heads[FULL],
        "num_sliding_attention_heads": heads[SLIDING],
        "share_expert_dim": keys.integer("expert_shared_feed_forward_length", least=1),
        "moe_router_scaling_factor": keys.number("expert_weights_scale", 1.0) or 1.0,
        "swiglu_limits": _limits(keys, "swiglu_clamp_exp"),
        "swiglu_limits_shared": _limits(keys, "swiglu_clamp_shexp"),
        "rope_parameters": {kind: rope[kind] for kind in dict.fromkeys(kinds)},
    }


def _limits(keys: Metadata, key: str) -> list[float] | None:
    """The number ``key`` of each layer, 0 for none."""
    values, layers = keys.file.metadata.get(f"{keys.name}.{key}"), layers_of(keys)
    if values is None:
        return None
    values = values if isinstance(values, list) else [values] * layers
    if len(values) < layers or not all(type(value) is float and value >= 0 for value in values):
        raise keys.error(f"{keys.name}.{key} must have a number for each of {layers} layers")
    return [float(f"{value:.7g}") for value in values[:layers]]


def _gpt2(keys: Metadata) -> dict[str, Any]:
    """Files have four times the width of the embedding as that of the feed-forward, whatever its matrices have."""
    matrix = keys.file.tensors.get("blk.0.ffn_up.weight")
    width = keys.integer("feed_forward_length") if matrix is None else matrix.shape[0]
    return {"n_inner": width, "pad_token_id": None}


def _starcoder(keys: Metadata) -> dict[str, Any]:
    heads, key_heads = keys.integer("attention.head_count", least=1), keys.integer("attention.head_count_kv", least=1)
    keys.only("attention.head_count_kv", (1, heads), f"and with {heads} heads 1 or all have keys of their own")
    return {**_gpt2(keys), "multi_query": key_heads < heads}


def _falcon_h1(keys: Metadata) -> dict[str, Any]:
    """Files have all multipliers within the matrices."""
    inner, heads = keys.integer("ssm.inner_size", least=1), keys.integer("ssm.time_step_rank", least=1)
    tensors = keys.file.tensors
    ones = ("embedding", "lm_head", "key", "attention_in", "attention_out", "ssm_in", "ssm_out")
    return {
        **{f"{name}_multiplier": 1.0 for name in ones},
        "mlp_multipliers": [1.0, 1.0],
        "ssm_multipliers": [1.0] * 5,
        "mamba_d_ssm": inner,
        "mamba_n_heads": heads,
        "mamba_d_head": inner // heads,
        "mamba_n_groups": keys.integer("ssm.group_count", least=1),
        "mamba_expand": max(1, inner // keys.integer("embedding_length", least=1)),
        "mamba_conv_bias": "blk.0.ssm_conv1d.bias" in tensors,
        "mamba_proj_bias": "blk.0.ssm_in.bias" in tensors,
        "mamba_rms_norm": "blk.0.ssm_norm.weight" in tensors,
        "mamba_norm_before_gate": False,
        "projectors_bias": "blk.0.attn_output.bias" in tensors,
    }


def _kimi_linear(keys: Metadata) -> dict[str, Any]:
    keys.need("expert_gating_func")
    _only(keys, "sigmoid", "sigmoid")
    attend, tensors = _mixers(keys), keys.file.tensors
    gates = (tensors.get(f"blk.{layer}.ssm_beta.weight") for layer in range(layers_of(keys)))
    heads = next((gate.shape[0] for gate in gates if gate is not None), 0)
    fields = _latent_attention(keys)
    del fields["rope_parameters"]  # nothing is rotated
    return {
        **fields,
        **_groups_of_experts(keys),
        "norm_topk_prob": True,
        "layer_types": [FULL if attends else "linear_attention" for attends in attend],
        "mlp_layer_types": _routed(keys),
        "linear_head_dim": keys.integer("kda.head_dim", least=1),
        "linear_num_heads": heads or keys.integer("attention.head_count", least=1),
    }


def _phimoe(keys: Metadata) -> dict[str, Any]:
    scale = keys.number("rope.scaling.attn_factor", 1.0)
    rope = rotary_of(keys, _head_dim(keys))
    if rope["rope_type"] == "longrope":
        del rope["attention_factor"]
        rope |= {"short_mscale": scale, "long_mscale": scale}
    return {"rope_parameters": rope, "sliding_window": keys.integer("attention.sliding_window", 0) or None}


_NORMS = ("attn_norm", "ffn_norm", "post_attention_norm", "post_ffw_norm", "attn_q_norm", "attn_k_norm", "output_norm")
_GATED = ("expert_gating_func",)
_PATTERN = ("attention.sliding_window_pattern",)
_SHARED = {"model.layers.{layer}.shared_mlp.input_linear.weight": ("ffn_gate_shexp.weight", "ffn_up_shexp.weight")}
_SHARED_KEYS = ("expert_shared_count", "expert_shared_feed_forward_length")
_GEMMA4 = (
    "attention.key_length_swa",
    "attention.shared_kv_layers",
    "attention.value_length_swa",
    "embedding_length_per_layer_input",
    "feed_forward_length",
    "rope.dimension_count_swa",
    "rope.freq_base_swa",
    *_PATTERN,
)
_DBRX = (
    "attention.clamp_kqv",
    "attention.layer_norm_epsilon",  # of torch's norms, which all files have
    "expert_count",
    "expert_used_count",
    "feed_forward_length",
)
_LINEAR = (
    "attention.recurrent_layers",
    "full_attention_interval",
    "rope.dimension_sections",
    "ssm.group_count",
    "ssm.inner_size",
    "ssm.state_size",
    "ssm.time_step_rank",
)
# Of linear attention whose heads of values are stored in rounds.
_QWEN35: Mapping[str, Any] = MappingProxyType(
    {
        "more": _linear_attention,
        "keys": _LINEAR,
        "plus_one": _NORMS,
        "negated_exp": ("ssm_a",),
        "renamed": {"ssm_dt.bias": "model.layers.{layer}.linear_attn.dt_bias"},
        "orders": {
            **dict.fromkeys(("attn_gate", "ssm_a", "ssm_alpha", "ssm_beta", "ssm_dt.bias"), "values_in_rounds"),
            **dict.fromkeys(("attn_qkv", "ssm_conv1d"), "values_in_rounds_last"),
        },
        "stored": {"ssm_out": "heads_in_rounds"},
    }
)
_LATENT_KEYS = (
    "attention.key_length_mla",
    "attention.kv_lora_rank",
    "attention.q_lora_rank",
    "attention.value_length",
    "attention.value_length_mla",
    "expert_group_count",
    "expert_group_used_count",
    "expert_weights_norm",
    "expert_weights_scale",
    "leading_dense_block_count",
)
_INDEXER = tuple(f"attention.indexer.{key}" for key in ("head_count", "key_length", "top_k"))
_HYPER = tuple(f"hyper_connection.{key}" for key in ("count", "epsilon", "sinkhorn_iterations"))
_DEEPSEEK4 = (
    *_INDEXER,
    *_GATED,
    "attention.compress_ratios",
    "attention.compress_rope_freq_base",
    "attention.output_group_count",
    "attention.output_lora_rank",
    "attention.q_lora_rank",
    "attention.value_length",
    "embedding_length_out",
    "hash_layer_count",
    *_HYPER,
    "swiglu_clamp_exp",
    "swiglu_clamp_shexp",
)
_CHOOSER = "model.layers.{layer}.self_attn.indexer"
_COMPRESSOR = "model.layers.{layer}.self_attn.compressor"
_COMPRESSOR_PARTS = {
    "kv": "kv_proj.weight",
    "gate": "gate_proj.weight",
    "ape": "position_bias",
    "norm": "kv_norm.weight",
}
_CONVOLUTION = {"model.layers.{layer}.self_attn.conv1d.weight": tuple(f"ssm_conv1d_{part}.weight" for part in "qkv")}
# Of hyper-connections, between the lanes of hidden states.
_LANES = {
    **{
        f"hc_{side}_{part}.weight": f"model.layers.{{layer}}.{side}_hc.{part}"
        for side in ("attn", "ffn")
        for part in ("fn", "base", "scale")
    },
    **{f"output_hc_{part}.weight": f"model.hc_head.hc_{part}" for part in ("fn", "base", "scale")},
}
# kv_b, which files have as the keys' part of each head, transposed, and the values' part.
_LATENT: Mapping[str, Any] = MappingProxyType(
    {
        "joined": {"model.layers.{layer}.self_attn.kv_b_proj.weight": ("attn_k_b.weight", "attn_v_b.weight")},
        "orders": {"attn_k_b": "keys_and_values"},
    }
)
_SSM = ("ssm.group_count", "ssm.inner_size", "ssm.time_step_rank")

GRAPH_ARCHITECTURES: Mapping[str, GraphArchitecture] = MappingProxyType(
    {
        "afmoe": GraphArchitecture(model_type="afmoe", more=_afmoe, keys=(*_GATED, *_PATTERN)),
        "apertus": GraphArchitecture(
            model_type="apertus",
            by_layer={
                f"xielu.{name}": f"model.layers.{{layer}}.mlp.act_fn.{name}"
                for name in ("alpha_n", "alpha_p", "beta", "eps")
            },
        ),
        "arcee": GraphArchitecture(model_type="arcee", heads_in_pairs=True),
        # Ling 2.0, which transformers does not have; it computes Sarvam's models, of this architecture, by this family.
        "bailingmoe2": GraphArchitecture(
            model_type="glm4_moe", more=_bailing_moe2, keys=("expert_shared_feed_forward_length", *_GATED)
        ),
        "chatglm": GraphArchitecture(model_type="glm"),
        "cohere2": GraphArchitecture(model_type="cohere2", more=_cohere2, keys=("logit_scale", *_PATTERN)),
        "cohere2moe": GraphArchitecture(
            model_type="cohere2_moe",
            more=_cohere2_moe,
            keys=("logit_scale", "expert_feed_forward_length", "leading_dense_block_count", *_GATED, *_PATTERN),
        ),
        "command-r": GraphArchitecture(model_type="cohere", more=_command_r, keys=("logit_scale",)),
        "dbrx": GraphArchitecture(model_type="dbrx", more=_dbrx, keys=_DBRX),
        "deepseek32": GraphArchitecture(
            model_type="deepseek_v32", more=_deepseek32, keys=(*_LATENT_KEYS, *_INDEXER, *_GATED), **_LATENT
        ),
        "deepseek4": GraphArchitecture(
            model_type="deepseek_v4",
            more=_deepseek4,
            keys=_DEEPSEEK4,
            renamed={
                "attn_sinks.weight": "model.layers.{layer}.self_attn.sinks",
                "attn_q_a_norm.weight": "model.layers.{layer}.self_attn.q_a_norm.weight",
                "attn_kv.weight": "model.layers.{layer}.self_attn.kv_proj.weight",
                "attn_kv_a_norm.weight": "model.layers.{layer}.self_attn.kv_norm.weight",
                "attn_output_a.weight": "model.layers.{layer}.self_attn.o_a_proj.weight",
                "attn_output_b.weight": "model.layers.{layer}.self_attn.o_b_proj.weight",
                "exp_probs_b.bias": "model.layers.{layer}.mlp.gate.e_score_correction_bias",
                "ffn_gate_tid2eid.weight": "model.layers.{layer}.mlp.gate.tid2eid",
                "indexer.proj.weight": f"{_COMPRESSOR}.indexer.scorer.weights_proj.weight",
                "indexer.attn_q_b.weight": f"{_COMPRESSOR}.indexer.q_b_proj.weight",
                **{
                    f"{stored}_{end}.weight": f"{_COMPRESSOR}{inner}.{parameter}"
                    for stored, inner in (("attn_compressor", ""), ("indexer_compressor", ".indexer"))
                    for end, parameter in _COMPRESSOR_PARTS.items()
                },
                **_LANES,
            },
        ),
        "dots1": GraphArchitecture(model_type="dots1", more=_sigmoid, keys=_GATED),
        "ernie4_5": GraphArchitecture(model_type="ernie4_5"),
        "ernie4_5-moe": GraphArchitecture(
            model_type="ernie4_5_moe",
            more=_ernie,
            keys=("interleave_moe_layer_step", "leading_dense_block_count", "expert_shared_feed_forward_length"),
        ),
        "exaone": GraphArchitecture(model_type="exaone"),
        "exaone-moe": GraphArchitecture(
            model_type="exaone_moe", more=_exaone_moe, keys=("expert_shared_feed_forward_length", *_GATED, *_PATTERN)
        ),
        "exaone4": GraphArchitecture(model_type="exaone4", more=_exaone4, keys=_PATTERN),
        "falcon-h1": GraphArchitecture(
            model_type="falcon_h1",
            more=_falcon_h1,
            keys=_SSM,
            negated_exp=("ssm_a",),
            renamed={"ssm_dt.bias": "model.layers.{layer}.mamba.dt_bias"},
        ),
        "gemma": GraphArchitecture(model_type="gemma", plus_one=_NORMS),
        "gemma2": GraphArchitecture(model_type="gemma2", more=_gemma2, plus_one=_NORMS),
        "gemma3": GraphArchitecture(
            model_type="gemma3_text", more=_gemma3, plus_one=_NORMS, keys=("rope.freq_base_swa", *_PATTERN)
        ),
        "gemma4": GraphArchitecture(
            model_type="gemma4_text",
            more=_gemma4,
            keys=_GEMMA4,
            renamed={
                "ffn_gate_inp.scale": "model.layers.{layer}.router.scale",
                "ffn_down_exps.scale": "model.layers.{layer}.router.per_expert_scale",
                "layer_output_scale.weight": "model.layers.{layer}.layer_scalar",
            },
        ),
        "glm-dsa": GraphArchitecture(
            model_type="glm_moe_dsa",
            more=_glm_dsa,
            keys=(*_LATENT_KEYS, *_INDEXER, "attention.indexer.types", *_GATED),
            **_LATENT,
        ),
        "glm5-next": GraphArchitecture(
            model_type="glm5_next",
            more=_glm5_next,
            keys=(
                *_LATENT_KEYS,
                *_INDEXER,
                *_HYPER,
                "attention.indexer.kpool",
                "attention.indexer.kpool_select_tail",
                "attention.indexer.types",
                "attention.layer_norm_epsilon",  # 1e-6, of the norm of chosen keys
                "kda.gate_lower_bound",
                "kda.head_dim",
                "swiglu_clamp_exp",
                "swiglu_clamp_shexp",
                *_GATED,
            ),
            negated_exp=("ssm_a",),
            joined={**_LATENT["joined"], **_CONVOLUTION},
            renamed={
                "ssm_dt.bias": "model.layers.{layer}.self_attn.forget_gate.dt_bias",
                "ssm_a": "model.layers.{layer}.self_attn.forget_gate.A_log",
                **{
                    f"indexer_compressor_{part}.weight": f"{_CHOOSER}.index_kpool_compress_{part}"
                    for part in ("ape", "gate")
                },
                **_LANES,
            },
            orders=_LATENT["orders"],
        ),
        "glm4": GraphArchitecture(model_type="glm4"),
        "glm4moe": GraphArchitecture(model_type="glm4_moe", more=_sigmoid, keys=_GATED),
        "gpt2": GraphArchitecture(
            model_type="gpt2",
            more=_gpt2,
            keys=("feed_forward_length",),
            stored=dict.fromkeys(("attn_qkv", "attn_output", "ffn_up", "ffn_down"), "transposed"),
        ),
        "gptneox": GraphArchitecture(
            model_type="gpt_neox", more=_gpt_neox, orders=dict.fromkeys(("attn_qkv", "attn_qkv.bias"), "by_head")
        ),
        "granite": GraphArchitecture(model_type="granite", more=_granite, keys=("logit_scale",), heads_in_pairs=True),
        "granite_swa": GraphArchitecture(
            model_type="granite_swa",
            with_key={"expert_count": "granitemoe_swa"},
            more=_granite_swa,
            keys=("logit_scale", *_PATTERN),
            heads_in_pairs=True,
            renamed={
                "ffn_gate_inp.weight": "model.layers.{layer}.block_sparse_moe.router.weight",
                "ffn_up_shexp.weight": "model.layers.{layer}.shared_mlp.input_linear.weight",
            },
        ),
        "granitehybrid": GraphArchitecture(
            model_type="granitemoehybrid",
            more=_granite_hybrid,
            keys=("logit_scale", *_SSM),
            heads_in_pairs=True,
            negated_exp=("ssm_a",),
            renamed={"ssm_dt.bias": "model.layers.{layer}.mamba.dt_bias"},
            joined=_SHARED,
        ),
        "granitemoe": GraphArchitecture(
            model_type="granitemoe",
            with_key={"expert_shared_feed_forward_length": "granitemoeshared"},
            more=_granite,
            keys=("logit_scale",),
            heads_in_pairs=True,
            joined=_SHARED,
        ),
        "hunyuan-dense": GraphArchitecture(model_type="hunyuan_v1_dense"),
        "hunyuan-moe": GraphArchitecture(
            model_type="hunyuan_v1_moe", more=_hunyuan_moe, keys=("expert_feed_forward_length", *_SHARED_KEYS)
        ),
        "hy_v3": GraphArchitecture(
            model_type="hy_v3", more=_hy_v3, keys=("expert_shared_feed_forward_length", "expert_weights_norm", *_GATED)
        ),
        "hy_v4": GraphArchitecture(
            model_type="hy_v4",
            more=_hy_v4,
            keys=(
                *_LATENT_KEYS,
                *_INDEXER,
                "attention.indexer.types",
                "hyper_connection.count",
                "hyper_connection.epsilon",
                "hyper_connection.magnitude",
                "swiglu_clamp_exp",
                *_GATED,
            ),
            renamed={
                "attn_sinks.weight": "model.layers.{layer}.self_attn.sinks",
                "attn_gate.weight": "model.layers.{layer}.self_attn.gate_proj.weight",
                **_LANES,
            },
            **_LATENT,
        ),
        "jamba": GraphArchitecture(model_type="jamba", more=_jamba, keys=_SSM, negated_exp=("ssm_a",)),
        "jais2": GraphArchitecture(model_type="jais2", more=_nemotron, keys=("attention.layer_norm_rms_epsilon",)),
        "kimi-linear": GraphArchitecture(
            model_type="kimi_linear",
            more=_kimi_linear,
            keys=(*_LATENT_KEYS, "kda.head_dim", *_GATED),
            negated_exp=("ssm_a",),
            renamed={"ssm_dt.bias": "model.layers.{layer}.self_attn.dt_bias"},
            joined={**_LATENT["joined"], **_CONVOLUTION},
            orders=_LATENT["orders"],
        ),
        "laguna": GraphArchitecture(
            model_type="laguna",
            more=_laguna,
            keys=(
                "attention.head_count",
                "expert_shared_count",
                "expert_weights_norm",
                "leading_dense_block_count",
                "rope.dimension_count_swa",
                "rope.freq_base_swa",
                *_GATED,
                *_PATTERN,
            ),
        ),
        "lfm2": GraphArchitecture(model_type="lfm2", more=_lfm2),
        "lfm2moe": GraphArchitecture(model_type="lfm2_moe", more=_lfm2_moe, keys=_GATED),
        "llama": GraphArchitecture(model_type="llama", heads_in_pairs=True),
        "llama4": GraphArchitecture(
            model_type="llama4_text", more=_llama4, keys=("interleave_moe_layer_step", "expert_feed_forward_length")
        ),
        "mellum": GraphArchitecture(model_type="mellum", more=_mellum, keys=("rope.freq_base_swa", *_PATTERN)),
        "minicpm3": GraphArchitecture(
            model_type="minicpm3", more=_minicpm3, keys=("attention.kv_lora_rank", "attention.q_lora_rank")
        ),
        "minimax-m2": GraphArchitecture(
            model_type="minimax_m2", more=_minimax_m2, keys=("expert_feed_forward_length", *_GATED)
        ),
        "mimo2": GraphArchitecture(
            model_type="mimo_v2_flash",
            more=_mimo2,
            keys=(
                "attention.value_length",
                "attention.value_scale",
                "expert_group_count",
                "expert_group_used_count",
                "expert_weights_norm",
                "expert_weights_scale",
                "rope.freq_base_swa",
                *_GATED,
                *_PATTERN,
            ),
        ),
        "minimax-m3": GraphArchitecture(
            model_type="minimax_m3_vl_text",
            more=_minimax_m3,
            keys=(
                *_INDEXER,
                "attention.indexer.block_size",
                "attention.indexer.local_blocks",
                "expert_feed_forward_length",
                "expert_shared_count",
                "expert_weights_norm",
                "leading_dense_block_count",
                *_GATED,
            ),
            plus_one=(*_NORMS, "indexer.q_norm", "indexer.k_norm"),
            renamed={
                f"indexer.{part}.weight": f"model.layers.{{layer}}.self_attn.indexer.{part}.weight"
                for part in ("q_proj", "k_proj", "q_norm", "k_norm")
            },
            joined={
                f"model.layers.{{layer}}.mlp.{path}.weight": (
                    f"ffn_gate{end}.weight",
                    f"ffn_up{end}.weight",
                )
                for path, end in (("gate_up_proj", ""), ("shared_experts.gate_up_proj", "_shexp"))
            },
        ),
        "mistral3": GraphArchitecture(
            model_type="ministral3", more=_mistral3, keys=("attention.temperature_scale",), heads_in_pairs=True
        ),
        "mistral4": GraphArchitecture(
            model_type="mistral4",
            more=_mistral4,
            keys=(*_LATENT_KEYS, "attention.temperature_scale", *_GATED),
            **_LATENT,
        ),
        "nemotron": GraphArchitecture(model_type="nemotron", more=_nemotron, plus_one=_NORMS),
        **dict.fromkeys(
            ("nemotron_h", "nemotron_h_moe"),
            GraphArchitecture(
                model_type="nemotron_h",
                more=_nemotron_h,
                keys=("expert_shared_feed_forward_length", "feed_forward_length", *_GATED, *_SSM),
                negated_exp=("ssm_a",),
                renamed={"ssm_dt.bias": "model.layers.{layer}.mixer.dt_bias"},
            ),
        ),
        "olmo": GraphArchitecture(
            model_type="olmo",
            more=_olmo,
            keys=("attention.clamp_kqv", "attention.layer_norm_epsilon"),
            heads_in_pairs=True,
        ),
        "olmo2": GraphArchitecture(
            model_type="olmo2",
            with_key={"attention.sliding_window": "olmo3"},
            more=_olmo2,
            keys=("rope.freq_base_swa", *_PATTERN),
        ),
        "phi2": GraphArchitecture(model_type="phi", more=_phi2, keys=("feed_forward_length",)),
        "phi3": GraphArchitecture(model_type="phi3", more=_phi3),
        "phimoe": GraphArchitecture(model_type="phimoe", more=_phimoe),
        "qwen2": GraphArchitecture(model_type="qwen2"),
        # Models that see: their text without images is computed as the family of the text alone.
        "qwen2vl": GraphArchitecture(model_type="qwen2", keys=("rope.dimension_sections",)),
        "qwen3": GraphArchitecture(model_type="qwen3"),
        "qwen35": GraphArchitecture(model_type="qwen3_5_text", **_QWEN35),
        "qwen35moe": GraphArchitecture(model_type="qwen3_5_moe_text", **_QWEN35),
        "qwen3next": GraphArchitecture(
            model_type="qwen3_next",
            more=_qwen3_next,
            keys=_LINEAR,
            plus_one=_NORMS,
            negated_exp=("ssm_a",),
            renamed={"ssm_dt.bias": "model.layers.{layer}.linear_attn.dt_bias"},
            joined={
                "model.layers.{layer}.linear_attn.in_proj_qkvz.weight": ("attn_qkv.weight", "attn_gate.weight"),
            },
            orders={"attn_qkv": "by_group"},
        ),
        "qwen3vl": GraphArchitecture(model_type="qwen3", keys=("n_deepstack_layers", "rope.dimension_sections")),
        "qwen3vlmoe": GraphArchitecture(
            model_type="qwen3_moe", more=_norm_topk, keys=("n_deepstack_layers", "rope.dimension_sections")
        ),
        "seed_oss": GraphArchitecture(model_type="seed_oss"),
        "smollm3": GraphArchitecture(model_type="smollm3", more=_no_rope, heads_in_pairs=True),
        "stablelm": GraphArchitecture(model_type="stablelm", more=_stablelm),
        "starcoder": GraphArchitecture(model_type="gpt_bigcode", more=_starcoder, keys=("feed_forward_length",)),
        "starcoder2": GraphArchitecture(model_type="starcoder2"),
        "step35": GraphArchitecture(
            model_type="step3p7",
            more=_step35,
            keys=(
                "attention.head_count",
                "expert_shared_feed_forward_length",
                "expert_weights_norm",
                "expert_weights_scale",
                "leading_dense_block_count",
                "moe_every_n_layers",
                "rope.freq_base_swa",
                "swiglu_clamp_exp",
                "swiglu_clamp_shexp",
                *_GATED,
                *_PATTERN,
            ),
            plus_one=_NORMS,
        ),
    }
)


# Architectures that are not read, whose models run from safetensors: their model_type, and what of files is not read.
FROM_SAFETENSORS: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "dots3note": ("dots3_note_text", "two kinds of latent attention, whose norms hold a scale that no key states"),
        "minimax-01": ("minimax", "rotations of a share of each head, where transformers rotates all of it"),
        "muse-glimmer": ("muse_glimmer", "a factor of queries that is stored as the weights of a norm"),
        "qwen4exp": ("qwen4_exp_text", "hyper-connections, and hashes of n-grams that are metadata"),
    }
)
_ALONE = "transformers computes their attention outside of its interface, through which it is served here"
_STATES = "transformers computes their states in a way that is not served here"
# Architectures of models that are not computed, though transformers has code for them.
NOT_SERVED: Mapping[str, str] = MappingProxyType(
    {
        **dict.fromkeys(("bloom", "falcon", "gptj", "mpt"), _ALONE),
        **dict.fromkeys(("mamba", "mamba2"), _STATES),
        "gemma3n": "differences of rounding grow within their layers, so they cannot be compared with transformers",
    }
)
# Architectures of models that do not continue a text.
_NO_TEXT = "its models encode, listen, speak or see, or guess tokens of another model, and do not continue texts alone"
NO_TEXT = frozenset(
    {
        "bert",
        "clip",
        "dflash",
        "eagle3",
        "eurobert",
        "gemma-embedding",
        "gemma4-assistant",
        "jina-bert-v2",
        "jina-bert-v3",
        "llama-embed",
        "modern-bert",
        "neo-bert",
        "nomic-bert",
        "nomic-bert-moe",
        "pockettts",
        "qwen3tts",
        "t5",
        "t5encoder",
        "wavtokenizer-dec",
    }
)
# Architectures of models that transformers has no code for.
NOT_COMPUTED = frozenset(
    {
        "arctic",
        "arwkv7",
        "baichuan",
        "bailingmoe",
        "bailingmoe3",
        "codeshell",
        "deci",
        "deepseek",
        "dream",
        "grok",
        "grovemoe",
        "internlm2",
        "jais",
        "kimi-k3",
        "llada",
        "llada-moe",
        "maincoder",
        "maple",
        "minicpm",
        "nanbeige",
        "openelm",
        "orion",
        "pangu-embedded",
        "plamo",
        "plamo2",
        "plamo3",
        "plm",
        "qwen",
        "refact",
        "rnd1",
        "rwkv6",
        "rwkv6qwen2",
        "rwkv7",
        "smallthinker",
        "spark2_5",
        "talkie",
        "xverse",
    }
)

_NO_SIZES = ("context_length", "sliding_window", "temperature_length")  # ends of keys


def _check_sizes(file: GGUFFile, name: str) -> None:
    """Raise ConfigError for a whole number of the metadata above the numbers of the largest tensor."""
    largest = max((math.prod(tensor.shape) for tensor in file.tensors.values()), default=0)
    for key, value in file.metadata.items():
        if not largest or not key.startswith(f"{name}.") or key.endswith(_NO_SIZES):
            continue
        wrong = next((size for size in (value if isinstance(value, list) else [value]) if _above(size, largest)), None)
        if wrong is not None:
            raise ConfigError(f"{file.path}: {key} is {wrong}, and no tensor has so many numbers; fetch the file again")


def _above(size: Any, largest: int) -> bool:
    return type(size) is int and size > largest


def architecture_of(file: GGUFFile) -> tuple[str, Architecture | GraphArchitecture]:
    """``general.architecture`` and its row; raises ConfigError for one that is not read, and for sizes that no tensor
    has."""
    name = file.metadata.get("general.architecture")
    if isinstance(name, str):
        _check_sizes(file, name)
        if name in ARCHITECTURES and not (name == "llama" and not file.metadata.get("llama.expert_count")):
            return name, ARCHITECTURES[name]
        if name in GRAPH_ARCHITECTURES:
            return name, GRAPH_ARCHITECTURES[name]
    names = {*ARCHITECTURES, *GRAPH_ARCHITECTURES}
    reason = "`moelight models` lists the architectures that are, and the families that run from safetensors"
    if name in NOT_COMPUTED:
        reason = "transformers has no code for these models"
    elif isinstance(name, str) and name in NOT_SERVED:
        reason = f"these models do not run: {NOT_SERVED[name]}"
    elif name in NO_TEXT:
        reason = _NO_TEXT
    elif isinstance(name, str) and name in FROM_SAFETENSORS:
        family, unread = FROM_SAFETENSORS[name]
        reason = f"its files have {unread}; the family runs from safetensors (model_type {family})"
    elif isinstance(name, str):
        reason = f"{reason}{did_you_mean(name, names)}"
    raise ConfigError(f"{file.path}: general.architecture {quoted(name)} is not read; {reason}")
