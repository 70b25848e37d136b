"""Models in GGUF files: which tensor of a file is which of `TensorNames`.

A file is used as a whole or not at all: tensors that are missing, left over or mis-shaped are refused by name.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType

from moelight.core.errors import CheckpointError, ConfigError, quoted
from moelight.core.units import align_up
from moelight.formats.format import PAGE_ALIGNMENT
from moelight.formats.ggml import ggml_format
from moelight.profiles.families import profile_from_config
from moelight.profiles.gguf import GGMLTensor, GGUFFile, read_gguf
from moelight.profiles.gguf_config import Metadata, config_values
from moelight.profiles.gguf_families import GraphArchitecture, architecture_of
from moelight.profiles.hf_config import HFConfig
from moelight.profiles.model import ModelProfile, StoredTensor
from moelight.profiles.quantization import Kept, cpu_integers_of, kept_matrices
from moelight.profiles.stored import StoredWeights
from moelight.profiles.tensor_list import dense_tensors

_EXPERTS = ("gate", "up", "down")

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
    "ffn_gate_up_exps": "gate_up",
}
_BESIDE = re.compile(r"blk\.(\d{1,5})\..*")
_NAME = re.compile(r"(?:blk\.(?P<layer>\d{1,5})\.)?(?P<part>[a-z_]+)\.(?P<kind>weight|bias)")


@dataclass(frozen=True, kw_only=True, slots=True)
class GGUFModel:
    """A model of a GGUF file.

    Attributes:
        config: what its ``config.json`` would say.
        tensors: by field of `TensorNames` and layer (-1 outside); experts as stacks [E, rows, columns] under ``gate``,
            ``up`` and ``down``, or gate rows before up rows under ``gate_up``; biases with ``_bias``. DeepSeek's kv_b
            may be two stacks, ``k_b`` [heads, rank, width] (transposed) and ``v_b`` [heads, width, rank].
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


def open_gguf(path: Path) -> GGUFModel:
    """The model in ``path``, of which only the header is read.

    Raises:
        CheckpointError: the file is damaged, or its tensors are not those that its metadata asks for.
        ConfigError: the architecture or a setting is not known.
    """
    file = read_gguf(path)
    name, architecture = architecture_of(file)
    if isinstance(architecture, GraphArchitecture):
        raise ConfigError(f"{path}: {architecture.model_type} has no decoder here and runs as its module graph")
    config = HFConfig(config_values(file, name, architecture), where=str(path))
    profile = profile_from_config(config, name=path.stem)
    tensors = _tensors(file, name, profile)
    _check_shapes(file, name, profile, tensors)
    return GGUFModel(
        file=file,
        config=config,
        profile=replace(profile, stored=_stored(profile, tensors)),
        tensors=MappingProxyType(tensors),
        heads_in_pairs=architecture.heads_in_pairs,
    )


def _tensors(file: GGUFFile, architecture: str, profile: ModelProfile) -> dict[tuple[str, int], GGMLTensor]:
    """The tensors by field and layer, q, k and v apart; raises CheckpointError for one that has no place."""
    tensors: dict[tuple[str, int], GGMLTensor] = {}
    layers = Metadata(file, architecture).integer("block_count")
    for tensor in file.tensors.values():
        beside = _BESIDE.fullmatch(tensor.name)
        if beside is not None and profile.num_layers <= int(beside[1]) < layers:
            continue  # of a layer that predicts further tokens
        for name, layer, part in _placed(tensor, architecture, profile):
            if (name, layer) in tensors:
                raise CheckpointError(
                    f"{part.file}: tensor {quoted(part.name)} and tensor {quoted(tensors[name, layer].name)} are two "
                    "spellings of the same weights; convert the model again"
                )
            try:
                ggml_format(part.type)
            except ConfigError as error:
                raise CheckpointError(f"{part.file}: tensor {quoted(part.name)}: {error}") from None
            tensors[name, layer] = part
    return tensors


def _placed(tensor: GGMLTensor, architecture: str, profile: ModelProfile) -> Iterator[tuple[str, int, GGMLTensor]]:
    """The field of `TensorNames`, the layer and the part of ``tensor`` that it holds."""
    match = _NAME.fullmatch(tensor.name)
    names = _ENDS if match is None or match["layer"] is None else _BLOCK
    layer = -1 if match is None or match["layer"] is None else int(match["layer"])
    bias = "_bias" if match is not None and match["kind"] == "bias" else ""
    fused = layer >= 0 and match is not None and match["part"] == "attn_qkv" and profile.attention.latent is None
    if match is None or not (match["part"] in names or fused) or layer >= profile.num_layers:
        raise CheckpointError(
            f"{tensor.file}: tensor {quoted(tensor.name)} {list(tensor.shape)} has no place in what is read of "
            f"general.architecture {quoted(architecture)}: {profile.model_type} with {profile.num_layers} layers; "
            "use the checkpoint in safetensors, or a file without it"
        )
    if fused:
        for name, part in zip("qkv", _rows_apart(tensor, profile), strict=True):
            yield name + bias, layer, part
    else:
        yield names[match["part"]] + bias, layer, tensor


def _rows_apart(tensor: GGMLTensor, profile: ModelProfile) -> Iterator[GGMLTensor]:
    """q, k and v of ``attn_qkv``, whose rows lie one after another."""
    spec = profile.attention
    rows = [spec.num_heads * spec.head_dim, *[spec.num_kv_heads * spec.head_dim] * 2]
    if sum(rows) != tensor.shape[0] or tensor.nbytes % tensor.shape[0]:
        raise CheckpointError(
            f"{tensor.file}: tensor {quoted(tensor.name)} has shape {list(tensor.shape)}, the metadata asks for "
            f"{sum(rows)} rows of queries, keys and values; fetch the file again"
        )
    row, begin = tensor.nbytes // tensor.shape[0], 0
    for count in rows:
        yield replace(tensor, shape=(count, *tensor.shape[1:]), offset=tensor.offset + begin * row, nbytes=count * row)
        begin += count


def _check_shapes(
    file: GGUFFile, architecture: str, profile: ModelProfile, tensors: Mapping[tuple[str, int], GGMLTensor]
) -> None:
    """Raise CheckpointError unless ``tensors`` are all that ``profile`` asks for, and nothing else."""
    wanted = {(name, layer): shape for name, layer, shape in _wanted(profile, tensors)}
    for (name, layer), shape in wanted.items():
        tensor = tensors.get((name, layer))
        if tensor is None:
            raise CheckpointError(
                f"{file.path}: the tensor {_file_name(name, layer)} {list(shape)} is missing, but the metadata asks "
                f"for it ({profile.model_type}); fetch the whole file"
            )
        if tensor.shape != shape and not (math.prod(shape) == max(shape) == math.prod(tensor.shape)):
            raise CheckpointError(
                f"{tensor.file}: tensor {quoted(tensor.name)} has shape {list(tensor.shape)}, the metadata asks for "
                f"{list(shape)}; fetch it again"
            )
    if left := next((tensors[key] for key in tensors.keys() - wanted.keys()), None):
        raise CheckpointError(
            f"{left.file}: tensor {quoted(left.name)} {list(left.shape)} has no place in what is read of "
            f"general.architecture {quoted(architecture)} with this metadata ({profile.model_type}); use the "
            "checkpoint in safetensors, or a file without it"
        )
    if not profile.names.gate and any(name == "gate_up" for name, _ in tensors):
        raise CheckpointError(
            f"{file.path}: experts of {profile.model_type} whose gate and up are one tensor (ffn_gate_up_exps) are not "
            "read; convert the model again without --fuse-gate-up-exps"
        )


def _file_name(name: str, layer: int) -> str:
    """The name in a file of a field of `TensorNames`."""
    matrix, kind = name.removesuffix("_bias"), "bias" if name.endswith("_bias") else "weight"
    part = next(part for part, field in (_ENDS if layer < 0 else _BLOCK).items() if field == matrix)
    return f"{part}.{kind}" if layer < 0 else f"blk.{layer}.{part}.{kind}"


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
        fused = ("gate_up", layer) in tensors
        if moe and fused:
            yield "gate_up", layer, (spec.num_experts, 2 * spec.intermediate_size, profile.hidden_size)
        for matrix, shape in shapes.items() if moe else ():
            if matrix == "down" or not fused:
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
        if matrix in (*_EXPERTS, "gate_up"):
            pages[layer] += tensor.nbytes // profile.experts.num_experts
            experts[tensor.type] = experts.get(tensor.type, 0) + tensor.nbytes
        else:
            key = ("kv_b" if name in ("k_b", "v_b") else name, layer)
            dense[key] = dense.get(key, 0) + tensor.nbytes
    elements = 3 * profile.experts.intermediate_size * profile.hidden_size
    name = "GGUF " + " and ".join(sorted(experts, key=lambda kind: -experts[kind])[:2])
    sizes = [(name, layer, size) for (name, layer), size in sorted(dense.items())]
    count = profile.experts.num_experts

    def kept_as(part: StoredTensor) -> Kept | None:
        tensor = tensors.get((part.name, part.layer))
        return None if tensor is None else (ggml_format(tensor.type), align_up(tensor.nbytes, PAGE_ALIGNMENT))

    stored = StoredWeights.of(
        name,
        name,
        [[size] * count if size else [] for size in pages],
        elements,
        sizes,
        kept_matrices(profile, kept_as),
        {kind: ggml_format(kind).int8_reason for kind in experts},
    )
    reasons = (ggml_format(kind).cpu_reason for kind in experts)
    gates = {layer: tensor.type for (name, layer), tensor in tensors.items() if name == "gate"}
    apart = any(
        tensor.type != gates.get(layer, tensor.type) for (name, layer), tensor in tensors.items() if name == "up"
    )
    cpu_only = next((reason for reason in reasons if reason is not None), None)
    cpu_integers = cpu_integers_of(map(ggml_format, experts))
    return replace(stored, mixed=stored.mixed or apart, cpu_only=cpu_only, cpu_integers=cpu_integers)
