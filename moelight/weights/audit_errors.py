"""Error messages for checkpoints that contradict their config: file, tensor, and the config key most likely at
fault.
"""

from __future__ import annotations

from moelight.core.dtypes import BY_SAFETENSORS
from moelight.profiles.families import FAMILIES
from moelight.profiles.model import ModelProfile
from moelight.weights.source import Checkpoint, TensorInfo

_HEADS = "num_attention_heads or head_dim"
_KV_HEADS = "num_key_value_heads or head_dim"


class AuditErrors:
    """Collects fault messages about one checkpoint and one model, in the order found."""

    def __init__(self, checkpoint: Checkpoint, model: ModelProfile) -> None:
        self._listing = checkpoint.listing
        self._model = model
        self._axes = _axes(FAMILIES.get(model.model_type).expert_width_key)
        self.found: list[str] = []

    def missing(self, part: str, name: str, shape: tuple[int, ...]) -> None:
        """``config.json`` requires ``name``, and no spelling of it is stored."""
        model = self._model
        reason = {
            "head": "tie_word_embeddings is false",
            **dict.fromkeys(("q_bias", "k_bias", "v_bias", "o_bias"), "attention_bias is true"),
            **dict.fromkeys(("dense_gate", "dense_up", "dense_down"), "mlp_only_layers, decoder_sparse_step"),
            **dict.fromkeys(("gate", "up", "down"), f"num_experts {model.experts.num_experts}"),
        }.get(part, f"model_type {model.model_type}")
        self.found.append(
            f"{self._listing}: tensor {name!r} {list(shape)} is missing, but config.json asks for it ({reason}, "
            f"num_hidden_layers {model.num_layers}); mend config.json or fetch the whole checkpoint"
        )

    def wrong_shape(self, part: str, info: TensorInfo, shape: tuple[int, ...]) -> None:
        """``info`` does not have the ``shape`` that ``config.json`` implies."""
        axes = self._axes.get(part, ())
        keys = [key for key, has, wants in zip(axes, info.shape, shape, strict=False) if has != wants]
        hint = f"; check {', '.join(keys)} there" if keys and len(info.shape) == len(shape) else ""
        self.found.append(
            f"{info.file}: tensor {info.name!r} has shape {list(info.shape)}, "
            f"but config.json asks for {list(shape)}{hint}"
        )

    def twice(self, first: TensorInfo, second: TensorInfo) -> None:
        """``first`` and ``second`` hold the same weights under different names."""
        self.found.append(
            f"{first.file}: tensor {first.name!r} and tensor {second.name!r} (in {second.file.name}) are two "
            "spellings of the same weights; save the model again, with one of them"
        )

    def left_over(self, info: TensorInfo) -> None:
        """``info`` is not part of the model."""
        model = self._model
        self.found.append(
            f"{info.file}: tensor {info.name!r} {list(info.shape)} has no place in the model config.json describes "
            f"({model.model_type}, num_hidden_layers {model.num_layers}, num_experts {model.experts.num_experts})"
        )

    def unsupported_dtype(self, info: TensorInfo) -> None:
        """``info`` has a dtype that no kernel supports."""
        known = ", ".join(BY_SAFETENSORS)
        self.found.append(f"{info.file}: tensor {info.name!r} has dtype {info.dtype}; supported: {known}")

    def other_dtype(self, info: TensorInfo, common: str) -> None:
        """``info`` does not have the dtype of the other tensors."""
        self.found.append(
            f"{info.file}: tensor {info.name!r} has dtype {info.dtype}, the others {common}; "
            "save the model again in one dtype"
        )

    def summary(self) -> str:
        """The first fault, and the number of others."""
        more = len(self.found) - 1
        return self.found[0] + (f" (and {more} more fault{'s' if more > 1 else ''})" if more else "")


def _axes(width: str) -> dict[str, tuple[str, ...]]:
    """The config keys that determine each dimension of each part."""
    hidden, experts = "hidden_size", "num_experts or num_local_experts"
    return {
        "embed": ("vocab_size", hidden),
        "head": ("vocab_size", hidden),
        "final_norm": (hidden,),
        "input_norm": (hidden,),
        "post_norm": (hidden,),
        "q": (_HEADS, hidden),
        "k": (_KV_HEADS, hidden),
        "v": (_KV_HEADS, hidden),
        "o": (hidden, _HEADS),
        "q_bias": (_HEADS,),
        "k_bias": (_KV_HEADS,),
        "v_bias": (_KV_HEADS,),
        "o_bias": (hidden,),
        "q_norm": ("head_dim",),
        "k_norm": ("head_dim",),
        "router": (experts, hidden),
        "gate": (width, hidden),
        "up": (width, hidden),
        "down": (hidden, width),
        "fused_gate_up": (experts, width, hidden),
        "fused_down": (experts, hidden, width),
        "dense_gate": ("intermediate_size", hidden),
        "dense_up": ("intermediate_size", hidden),
        "dense_down": (hidden, "intermediate_size"),
    }
