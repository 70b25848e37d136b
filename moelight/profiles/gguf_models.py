"""Models in GGUF files: their config under transformers' names, and which tensor of a file is which of `TensorNames`.

Architectures are data; their keys are those of llama.cpp's ``convert_hf_to_gguf.py``. A file is used as a whole or not
at all: unknown architectures, keys out of range, tensors that are missing, left over or mis-shaped are refused by name.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from moelight.core.errors import CheckpointError, ConfigError, quoted
from moelight.core.units import align_up
from moelight.profiles.families import profile_from_config
from moelight.profiles.gguf import GGMLTensor, GGUFFile, read_gguf
from moelight.profiles.hf_config import HFConfig
from moelight.profiles.model import ModelProfile, StoredTensor
from moelight.profiles.quantization import Kept, kept_matrices
from moelight.profiles.stored import PART_ALIGNMENT, StoredWeights, ggml_format
from moelight.profiles.tensor_list import dense_tensors

_DTYPE = "bfloat16"  # of computation
_EXPERTS = ("gate", "up", "down")
_LOG_MULTIPLIER = 0.1  # llama.cpp stores mscale_all_dim times this

# Parts of tensors' names and fields of `TensorNames`.
_ENDS = {"token_embd": "embed", "output_norm": "final_norm", "output": "head"}
_BLOCK = {
    "attn_norm": "input_norm",
    "ffn_norm": "post_norm",
    "post_attention_norm": "post_norm",
    "attn_q": "q",
    "attn_k": "k",
    "attn_v": "v",
    "attn_output": "o",
    "attn_q_norm": "q_norm",
    "attn_k_norm": "k_norm",
    "attn_sinks": "sinks",
    "attn_q_a": "q_a",
    "attn_q_a_norm": "q_a_norm",
    "attn_q_b": "q_b",
    "attn_kv_a_mqa": "kv_a",
    "attn_kv_a_norm": "kv_a_norm",
    "attn_kv_b": "kv_b",
    "attn_k_b": "k_b",
    "attn_v_b": "v_b",
    "ffn_gate_inp": "router",
    "exp_probs_b": "router_selection",
    "ffn_gate": "dense_gate",
    "ffn_up": "dense_up",
    "ffn_down": "dense_down",
    "ffn_gate_shexp": "shared_gate",
    "ffn_up_shexp": "shared_up",
    "ffn_down_shexp": "shared_down",
    "ffn_gate_inp_shexp": "shared_router",
    **{f"ffn_{matrix}_exps": matrix for matrix in _EXPERTS},
}
_NAME = re.compile(r"(?:blk\.(?P<layer>\d{1,5})\.)?(?P<part>[a-z_]+)\.(?P<kind>weight|bias)")
_COMMON = {
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "rope.freq_base": "rope_theta",
    "vocab_size": "vocab_size",
    "expert_used_count": "num_experts_per_tok",
}
_ROPE = {
    "factor": "factor",
    "original_context_length": "original_max_position_embeddings",
    "yarn_beta_fast": "beta_fast",
    "yarn_beta_slow": "beta_slow",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class _Architecture:
    """One ``general.architecture``: the family, keys beside `_COMMON`, and what llama.cpp takes for granted.

    ``rope``: the same of scaled rotary embeddings. ``heads_in_pairs``: rows of q and k are stored with the two halves
    of each head interleaved.
    """

    model_type: str
    keys: Mapping[str, str] = field(default_factory=dict)
    given: Mapping[str, Any] = field(default_factory=dict)
    rope: Mapping[str, Any] = field(default_factory=dict)
    more: Callable[[Mapping[str, Any]], dict[str, Any]] | None = None
    heads_in_pairs: bool = False


def _deepseek(values: Mapping[str, Any]) -> dict[str, Any]:
    """What several keys say together: `convert_hf_to_gguf.py: DeepseekV2Model`."""
    sigmoid, rope = values.get("expert_gating_func", 1) == 2, values.get("rope.dimension_count", 0)
    groups, width = values.get("expert_group_count", 1), values.get("attention.key_length_mla")
    found = {
        "model_type": "deepseek_v3" if sigmoid else "deepseek_v2",
        "topk_method": "noaux_tc" if sigmoid else "group_limited_greedy" if groups != 1 else "greedy",
        "n_group": groups,
        "topk_group": values.get("expert_group_used_count", 1),
        "q_lora_rank": values.get("attention.q_lora_rank"),
        "qk_nope_head_dim": _less(values.get("attention.key_length") if width is None else width, rope),
        "v_head_dim": values.get("attention.value_length_mla", values.get("attention.value_length")),
        "num_key_value_heads": values.get("attention.head_count"),
        "norm_topk_prob": values.get("expert_weights_norm", False),
    }
    scale = values.get("rope.scaling.yarn_log_multiplier")
    return {**found, "_mscale": scale / _LOG_MULTIPLIER} if isinstance(scale, float) else found


def _less(width: Any, part: Any) -> Any:
    return width - part if type(width) is int and type(part) is int else width


_QWEN = {
    "attention.key_length": "head_dim",
    "expert_count": "num_experts",
    "expert_feed_forward_length": "moe_intermediate_size",
}
_ARCHITECTURES = {
    "llama": _Architecture(
        model_type="mixtral",
        keys={"expert_count": "num_local_experts", "rope.dimension_count": "head_dim"},
        heads_in_pairs=True,
    ),
    "qwen3moe": _Architecture(model_type="qwen3_moe", keys=_QWEN, given={"norm_topk_prob": True}),
    "qwen2moe": _Architecture(
        model_type="qwen2_moe",
        keys={**_QWEN, "expert_shared_feed_forward_length": "shared_expert_intermediate_size"},
        given={"norm_topk_prob": False},
    ),
    "olmoe": _Architecture(
        model_type="olmoe",
        keys={"expert_count": "num_experts", "attention.clamp_kqv": "clip_qkv"},
        given={"norm_topk_prob": False},
    ),
    "deepseek2": _Architecture(
        model_type="deepseek_v2",
        keys={
            "expert_count": "n_routed_experts",
            "expert_shared_count": "n_shared_experts",
            "expert_feed_forward_length": "moe_intermediate_size",
            "expert_weights_scale": "routed_scaling_factor",
            "leading_dense_block_count": "first_k_dense_replace",
            "attention.kv_lora_rank": "kv_lora_rank",
            "rope.dimension_count": "qk_rope_head_dim",
        },
        more=_deepseek,
    ),
    "gpt-oss": _Architecture(
        model_type="gpt_oss",
        keys={
            "attention.key_length": "head_dim",
            "attention.sliding_window": "sliding_window",
            "expert_count": "num_local_experts",
            "expert_feed_forward_length": "intermediate_size",
        },
        rope={"truncate": False},
    ),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class GGUFModel:
    """A model of a GGUF file.

    Attributes:
        config: what its ``config.json`` would say.
        tensors: by field of `TensorNames` and layer (-1 outside); experts as stacks [E, rows, columns] under ``gate``,
            ``up`` and ``down``; biases with ``_bias``. DeepSeek's kv_b may be two stacks, ``k_b`` [heads, rank, width]
            (transposed) and ``v_b`` [heads, width, rank].
        heads_in_pairs: `hf_rows` gives the rows of q and k.
    """

    file: GGUFFile
    config: HFConfig
    profile: ModelProfile
    tensors: Mapping[tuple[str, int], GGMLTensor]
    heads_in_pairs: bool

    def heads_of(self, name: str) -> int:
        """Heads of the matrix ``name`` whose rows are in another order than transformers'; 0: none are."""
        spec = self.profile.attention
        return {"q": spec.num_heads, "k": spec.num_kv_heads}.get(name, 0) if self.heads_in_pairs else 0


def hf_rows(rows: int, heads: int) -> list[int]:
    """For each row of transformers' q or k its row in the file: there, halves of a head take turns (llama.cpp's
    ``permute``)."""
    half = rows // heads // 2
    return [2 * (head * half + row) + part for head in range(heads) for part in range(2) for row in range(half)]


def open_gguf(path: Path) -> GGUFModel:
    """The model in ``path``, of which only the header is read.

    Raises:
        CheckpointError: the file is damaged, or its tensors are not those that its metadata asks for.
        ConfigError: the architecture or a setting is not known.
    """
    file = read_gguf(path)
    name = file.metadata.get("general.architecture")
    if not isinstance(name, str) or name not in _ARCHITECTURES:
        raise ConfigError(
            f"{path}: general.architecture {quoted(name)} is not read; known: {', '.join(_ARCHITECTURES)}; "
            "use the checkpoint in safetensors"
        )
    architecture = _ARCHITECTURES[name]
    config = HFConfig(_config(file, name, architecture), where=str(path))
    profile = profile_from_config(config, name=path.stem)
    tensors = _tensors(file, profile)
    _check_shapes(file, profile, tensors)
    return GGUFModel(
        file=file,
        config=config,
        profile=replace(profile, stored=_stored(profile, tensors)),
        tensors=MappingProxyType(tensors),
        heads_in_pairs=architecture.heads_in_pairs,
    )


def _config(file: GGUFFile, name: str, architecture: _Architecture) -> dict[str, Any]:
    """What ``config.json`` would say; checks of the values are the families'."""
    prefix = f"{name}."
    given = {key.removeprefix(prefix): value for key, value in file.metadata.items() if key.startswith(prefix)}
    values = {key: _plain(value) for key, value in given.items()}
    if name == "llama" and not values.get("expert_count"):
        architecture = replace(architecture, model_type="llama")
    keys = {**_COMMON, **architecture.keys}
    config = {ours: values[theirs] for theirs, ours in keys.items() if values.get(theirs) is not None}
    config |= {"model_type": architecture.model_type, "dtype": _DTYPE, **architecture.given}
    config |= {} if architecture.more is None else architecture.more(values)
    tokens = file.metadata.get("tokenizer.ggml.tokens")
    if "vocab_size" not in config and isinstance(tokens, list):
        config["vocab_size"] = len(tokens)
    config["tie_word_embeddings"] = "output.weight" not in file.tensors
    scale = config.pop("_mscale", None)
    if (kind := values.get("rope.scaling.type")) not in (None, "none"):
        rope: dict[str, Any] = {"rope_type": kind, **architecture.rope}
        rope |= {ours: values.get(f"rope.scaling.{theirs}") for theirs, ours in _ROPE.items()}
        rope |= {} if scale is None else {"mscale": scale, "mscale_all_dim": scale}
        config["rope_scaling"] = {key: value for key, value in rope.items() if value is not None}
    return config


def _plain(value: Any) -> Any:
    """A number as JSON would have it: float32 values have at most 7 digits that mean something."""
    return float(f"{value:.7g}") if isinstance(value, float) and math.isfinite(value) else value


def _tensors(file: GGUFFile, profile: ModelProfile) -> dict[tuple[str, int], GGMLTensor]:
    """The tensors by field and layer; raises CheckpointError for one that has no place."""
    found: dict[tuple[str, int], GGMLTensor] = {}
    for tensor in file.tensors.values():
        match = _NAME.fullmatch(tensor.name)
        known = _ENDS if match is None or match["layer"] is None else _BLOCK
        layer = -1 if match is None or match["layer"] is None else int(match["layer"])
        if match is None or match["part"] not in known or layer >= profile.num_layers:
            raise CheckpointError(
                f"{tensor.file}: tensor {quoted(tensor.name)} {list(tensor.shape)} has no place in a model of "
                f"{profile.model_type} with {profile.num_layers} layers; convert it again with a newer llama.cpp"
            )
        name = known[match["part"]] + ("_bias" if match["kind"] == "bias" else "")
        if (name, layer) in found:
            raise CheckpointError(
                f"{tensor.file}: tensor {quoted(tensor.name)} and tensor {quoted(found[name, layer].name)} are two "
                "spellings of the same weights; convert the model again"
            )
        try:
            ggml_format(tensor.type)
        except ConfigError as error:
            raise CheckpointError(f"{tensor.file}: tensor {quoted(tensor.name)}: {error}") from None
        found[name, layer] = tensor
    return found


def _check_shapes(file: GGUFFile, profile: ModelProfile, tensors: Mapping[tuple[str, int], GGMLTensor]) -> None:
    """Raise CheckpointError unless ``tensors`` are all that ``profile`` asks for, and nothing else."""
    wanted = {(name, layer): shape for name, layer, shape in _wanted(profile, tensors)}
    for (name, layer), shape in wanted.items():
        tensor = tensors.get((name, layer))
        where = f" of layer {layer}" if layer >= 0 else ""
        if tensor is None:
            raise CheckpointError(
                f"{file.path}: the tensor {name}{where} {list(shape)} is missing, but the metadata asks for it "
                f"({profile.model_type}); fetch the whole file"
            )
        if tensor.shape != shape and not (math.prod(shape) == max(shape) == math.prod(tensor.shape)):
            raise CheckpointError(
                f"{tensor.file}: tensor {quoted(tensor.name)} has shape {list(tensor.shape)}, the metadata asks for "
                f"{list(shape)}; fetch it again"
            )
    if left := next((tensors[key] for key in tensors.keys() - wanted.keys()), None):
        raise CheckpointError(
            f"{left.file}: tensor {quoted(left.name)} {list(left.shape)} has no place in the model that the metadata "
            f"describes ({profile.model_type}); convert it again with a newer llama.cpp"
        )


def _wanted(
    profile: ModelProfile, tensors: Mapping[tuple[str, int], GGMLTensor]
) -> Iterator[tuple[str, int, tuple[int, ...]]]:
    """``(name, layer, shape)`` of each tensor of ``profile``."""
    for part in (part for tensor in dense_tensors(profile) for part in tensor.parts):
        yield from _halves(profile, part) if _halved(part, tensors) else ((part.name, part.layer, part.shape),)
    spec = profile.experts
    shapes = dict.fromkeys(_EXPERTS, (spec.intermediate_size, profile.hidden_size))
    shapes["down"] = shapes["down"][::-1]
    for layer, moe in enumerate(profile.moe_layers):
        for matrix, shape in shapes.items() if moe else ():
            yield matrix, layer, (spec.num_experts, *shape)
            if spec.bias:
                yield f"{matrix}_bias", layer, (spec.num_experts, shape[0])


def _halved(part: StoredTensor, tensors: Mapping[tuple[str, int], GGMLTensor]) -> bool:
    return part.name == "kv_b" and ("kv_b", part.layer) not in tensors and ("k_b", part.layer) in tensors


def _halves(profile: ModelProfile, part: StoredTensor) -> Iterator[tuple[str, int, tuple[int, ...]]]:
    spec, latent = profile.attention, profile.attention.latent
    if latent is not None:
        yield "k_b", part.layer, (spec.num_heads, latent.kv_lora_rank, latent.nope_head_dim)
        yield "v_b", part.layer, (spec.num_heads, latent.value_head_dim, latent.kv_lora_rank)


def _stored(profile: ModelProfile, tensors: Mapping[tuple[str, int], GGMLTensor]) -> StoredWeights:
    """The bytes of all tensors; those of k_b and v_b count as one."""
    experts, dense = dict[str, int](), dict[tuple[str, int], int]()
    pages = [0] * profile.num_layers
    for (name, layer), tensor in tensors.items():
        matrix = name.removesuffix("_bias")
        if matrix in _EXPERTS:
            pages[layer] += tensor.nbytes // profile.experts.num_experts
            experts[tensor.type] = experts.get(tensor.type, 0) + tensor.nbytes
        else:
            key = ("kv_b" if name in ("k_b", "v_b") else name, layer)
            dense[key] = dense.get(key, 0) + tensor.nbytes
    elements = 3 * profile.experts.intermediate_size * profile.hidden_size
    name = "GGUF " + " and ".join(sorted(experts, key=lambda each: -experts[each])[:2])
    sizes = [(name, layer, size) for (name, layer), size in sorted(dense.items())]
    count = profile.experts.num_experts

    def kept_as(part: StoredTensor) -> Kept | None:
        tensor = tensors.get((part.name, part.layer))
        return None if tensor is None else (ggml_format(tensor.type), align_up(tensor.nbytes, PART_ALIGNMENT))

    return StoredWeights.of(
        name,
        name,
        [[size] * count if size else [] for size in pages],
        elements,
        sizes,
        kept_matrices(profile, kept_as),
        {each: ggml_format(each).without_integers for each in experts},
    )
