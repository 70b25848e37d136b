"""The metadata of a model in a GGUF file: the tables with which files are read (`profiles.gguf_config`,
`profiles.gguf_families`), the other way round. What a file of the family cannot state is refused: the metadata are read
back, and must give the config that they were made of."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from moelight.core.errors import ConfigError, quoted
from moelight.models.graph.gguf import config_values_of
from moelight.models.graph.model import config_of
from moelight.profiles.gguf import GGMLTensor, GGUFFile
from moelight.profiles.gguf_config import ARCHITECTURES, Architecture, config_values
from moelight.profiles.gguf_families import FIELDS, FULL, GRAPH_ARCHITECTURES, SLIDING, GraphArchitecture

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_COMMON = (
    "context_length",
    "embedding_length",
    "feed_forward_length",
    "attention.head_count",
    "attention.layer_norm_rms_epsilon",
    "vocab_size",
)
_EXPERTS = ("expert_count", "expert_used_count")
_ROUTED = (
    *_EXPERTS,
    "expert_feed_forward_length",
    "expert_shared_count",
    "expert_weights_scale",
    "expert_weights_norm",
    "expert_group_count",
    "expert_group_used_count",
    "leading_dense_block_count",
)
_SCALES = ("embedding_scale", "residual_scale", "attention.scale")
_SOFTMAX, _SIGMOID = 1, 2
_LOG_MULTIPLIER = 0.1
_CLOSE = 1e-5
_YARN = {"beta_fast": 32.0, "beta_slow": 1.0, "truncate": True}  # what transformers takes for absent entries
# Fields of configs that change no numbers of a forward pass, or that other keys of a file state.
_NOT_COMPARED = frozenset(
    {
        "_name_or_path",
        "architectures",
        "aux_loss_alpha",
        "attention_dropout",
        "bos_token_id",
        "dtype",
        "embedding_dropout",
        "embd_pdrop",
        "eos_token_id",
        "ep_size",
        "hidden_dropout",
        "initializer_range",
        "num_nextn_predict_layers",
        "output_router_logits",
        "pad_token_id",
        "pretraining_tp",
        "residual_dropout",
        "resid_pdrop",
        "rope_scaling",
        "rope_theta",
        "router_aux_loss_coef",
        "router_jitter_noise",
        "seq_aux",
        "tie_word_embeddings",  # stated by the tensors
        "transformers_version",
        "use_cache",
    }
)


def _nothing(config: Any) -> dict[str, Any]:  # noqa: ARG001
    return {}


@dataclass(frozen=True, kw_only=True, slots=True)
class WrittenFamily:
    """How a family is written.

    Attributes:
        architecture: ``general.architecture``.
        keys: of `FIELDS`, beside those that all architectures have.
        more: values of further keys, or of keys that the config states otherwise.
        read_as: the model_type that such files are read as, if it is another family's that computes the same.
    """

    architecture: str
    keys: tuple[str, ...] = ()
    more: Callable[[Any], dict[str, Any]] = _nothing
    read_as: str = ""

    @property
    def native(self) -> Architecture | None:
        """The row of the table of those that are read without a module graph, if it is one of them."""
        return ARCHITECTURES.get(self.architecture) if "expert_count" in self.keys else None

    @property
    def row(self) -> GraphArchitecture:
        """How numbers of the architecture are stored."""
        if self.native is None:
            return GRAPH_ARCHITECTURES[self.architecture]
        return GraphArchitecture(model_type=self.native.model_type, heads_in_pairs=self.native.heads_in_pairs)


def _clamped(config: Any) -> dict[str, Any]:
    return {} if config.clip_qkv is None else {"attention.clamp_kqv": config.clip_qkv}


def _gemma3(config: Any) -> dict[str, Any]:
    local = config.rope_parameters[SLIDING]
    return {"rope.freq_base_swa": local["rope_theta"]}


def _sigmoid(config: Any) -> dict[str, Any]:  # noqa: ARG001
    return {"expert_gating_func": _SIGMOID}


def _granite(config: Any) -> dict[str, Any]:
    return {"logit_scale": config.logits_scaling}


def _deepseek(config: Any) -> dict[str, Any]:
    rope, scores = config.qk_rope_head_dim, config.model_type == "deepseek_v3"
    keys = {
        "attention.head_count_kv": 1,
        "attention.kv_lora_rank": config.kv_lora_rank,
        "attention.key_length": config.kv_lora_rank + rope,
        "attention.value_length": config.kv_lora_rank,
        "attention.key_length_mla": config.qk_nope_head_dim + rope,
        "attention.value_length_mla": config.v_head_dim,
        "rope.dimension_count": rope,
        "expert_gating_func": _SIGMOID if scores else _SOFTMAX,
    }
    if config.q_lora_rank is not None:
        keys["attention.q_lora_rank"] = config.q_lora_rank
    if (scale := config.rope_parameters.get("mscale_all_dim")) is not None:
        keys["rope.scaling.yarn_log_multiplier"] = _LOG_MULTIPLIER * scale
    return keys


def _gpt_oss(config: Any) -> dict[str, Any]:
    return {"expert_feed_forward_length": config.intermediate_size}


WRITTEN: Mapping[str, WrittenFamily] = MappingProxyType(
    {
        "arcee": WrittenFamily(architecture="arcee"),
        "deepseek_v2": WrittenFamily(architecture="deepseek2", keys=_ROUTED, more=_deepseek),
        "deepseek_v3": WrittenFamily(architecture="deepseek2", keys=_ROUTED, more=_deepseek),
        "dots1": WrittenFamily(architecture="dots1", keys=_ROUTED, more=_sigmoid),
        "ernie4_5": WrittenFamily(architecture="ernie4_5"),
        "gemma": WrittenFamily(architecture="gemma"),
        "gemma2": WrittenFamily(
            architecture="gemma2",
            keys=("attention.sliding_window", "attn_logit_softcapping", "final_logit_softcapping"),
        ),
        "gemma3_text": WrittenFamily(
            architecture="gemma3", keys=("attention.sliding_window", "final_logit_softcapping"), more=_gemma3
        ),
        "glm4_moe": WrittenFamily(architecture="glm4moe", keys=_ROUTED, more=_sigmoid),
        "gpt_oss": WrittenFamily(architecture="gpt-oss", keys=(*_EXPERTS, "attention.sliding_window"), more=_gpt_oss),
        "granite": WrittenFamily(architecture="granite", keys=_SCALES, more=_granite),
        "granitemoe": WrittenFamily(architecture="granitemoe", keys=(*_EXPERTS, *_SCALES), more=_granite),
        "llama": WrittenFamily(architecture="llama"),
        "mixtral": WrittenFamily(architecture="llama", keys=_EXPERTS),
        "olmo2": WrittenFamily(architecture="olmo2"),
        "olmoe": WrittenFamily(architecture="olmoe", keys=_EXPERTS, more=_clamped),
        "qwen2": WrittenFamily(architecture="qwen2"),
        "qwen2_moe": WrittenFamily(
            architecture="qwen2moe",
            keys=(*_EXPERTS, "expert_feed_forward_length", "expert_shared_feed_forward_length"),
        ),
        "qwen3": WrittenFamily(architecture="qwen3"),
        "qwen3_moe": WrittenFamily(architecture="qwen3moe", keys=(*_EXPERTS, "expert_feed_forward_length")),
        "mistral": WrittenFamily(architecture="llama", read_as="llama"),
        "seed_oss": WrittenFamily(architecture="seed_oss"),
        "smollm3": WrittenFamily(architecture="smollm3"),
    }
)


def written_family(config: PretrainedConfig, *, where: str) -> WrittenFamily:
    """The row of the family of ``config``, which was read ``where``; raises ConfigError for one that is not written."""
    family = WRITTEN.get(config.model_type)
    if family is None:
        raise ConfigError(
            f"{where}: {config.model_type} is not written as GGUF; written are {', '.join(WRITTEN)}; use llama.cpp's "
            "converter"
        )
    return family


def metadata_of(config: Any, family: WrittenFamily) -> dict[str, Any]:
    """The keys of the architecture, without its prefix, for ``config``."""
    heads = config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    keys: dict[str, Any] = {"block_count": config.num_hidden_layers}
    for key in (*_COMMON, *family.keys):
        value = next((value for name in FIELDS[key] if (value := getattr(config, name, None)) is not None), None)
        if value is not None:
            keys[key] = value
    keys |= {
        "attention.head_count_kv": getattr(config, "num_key_value_heads", None) or heads,
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        **_rotary(config, head_dim),
    }
    return keys | family.more(config)


def _rotary(config: Any, head_dim: int) -> dict[str, Any]:
    rope = config.rope_parameters
    if FULL in rope:
        rope = rope[FULL]
    keys: dict[str, Any] = {
        "rope.freq_base": float(rope["rope_theta"]),
        "rope.dimension_count": int(head_dim * (rope.get("partial_rotary_factor") or 1.0)),
    }
    kind = rope.get("rope_type", "default")
    if kind in ("linear", "yarn"):
        keys |= {"rope.scaling.type": kind, "rope.scaling.factor": float(rope["factor"])}
    if kind == "yarn":
        original = rope.get("original_max_position_embeddings") or config.max_position_embeddings
        keys["rope.scaling.original_context_length"] = original
        for name, key in (
            ("beta_fast", "yarn_beta_fast"),
            ("beta_slow", "yarn_beta_slow"),
            ("attention_factor", "yarn_attn_factor"),
        ):
            if rope.get(name) is not None:
                keys[f"rope.scaling.{key}"] = float(rope[name])
    return keys


def check_read_back(
    config: PretrainedConfig,
    family: WrittenFamily,
    keys: Mapping[str, Any],
    tensors: Iterable[str],
    *,
    where: str,
) -> None:
    """Raise ConfigError if a file with the metadata ``keys`` and ``tensors`` is read as another config than ``config``,
    which was read ``where``."""
    name, path = family.architecture, Path(where)
    stubs = {
        tensor: GGMLTensor(name=tensor, file=path, type="F32", shape=(1,), offset=0, nbytes=4)
        for tensor in tensors
        if not tensor.startswith("rope_f")
    }
    metadata = {"general.architecture": name, **{f"{name}.{key}": value for key, value in keys.items()}}
    file = GGUFFile(path=path, metadata=metadata, tensors=stubs)
    if family.native is not None:
        values = config_values(file, name, family.native)
    else:
        values = config_values_of(file, name, family.row)
    read, stated = config_of(values, where=where).to_dict(), config.to_dict()
    stated["model_type"] = family.read_as or stated["model_type"]
    fields = type(config)().to_dict().keys() | {"head_dim"}  # others are read by nothing
    for key in sorted(fields - _NOT_COMPARED - _without_effect(stated)):
        first, second = (_value(values, key) for values in (stated, read))
        if not _same(first, second):
            raise ConfigError(
                f"{where}: {key} is {quoted(_shown(first))}, which files of {name} do not state (they mean "
                f"{quoted(_shown(second))}); such a model is not written as GGUF"
            )


def _without_effect(values: Mapping[str, Any]) -> set[str]:
    """Fields that say nothing in a config with these ``values``, or that tensors state."""
    fields = set()
    if "layer_types" in values and SLIDING not in (values["layer_types"] or ()):
        fields |= {"max_window_layers", "sliding_window", "use_sliding_window"}
    if values.get("topk_method") is None:
        fields.add("topk_method")
    rope = values.get("rope_parameters")
    if isinstance(rope, dict) and rope.get("rope_type") == "llama3":
        fields.add("rope_parameters")
    return fields


def _value(values: Mapping[str, Any], key: str) -> Any:
    value = values.get(key)
    if key == "head_dim" and value is None:
        return values["hidden_size"] // values["num_attention_heads"]
    if key == "rope_parameters" and isinstance(value, dict) and "rope_type" in value:
        stated = {name: entry for name, entry in value.items() if entry is not None and name != "type"}
        return {"partial_rotary_factor": 1.0, **(_YARN if value["rope_type"] == "yarn" else {}), **stated}
    return value


def _shown(value: Any) -> str:
    return str(value)[:80]


def _same(first: Any, second: Any) -> bool:
    """Whether two values of configs are the same, but for float32's digits and entries without a value."""
    if isinstance(first, dict) and isinstance(second, dict):
        return all(
            _same(first.get(key), second.get(key))
            for key in first.keys() | second.keys()
            if key != "max_position_embeddings"
        )
    if isinstance(first, list | tuple) and isinstance(second, list | tuple):
        return len(first) == len(second) and all(map(_same, first, second))
    if isinstance(first, float) or isinstance(second, float):
        comparable = isinstance(first, int | float) and isinstance(second, int | float)
        return comparable and math.isclose(first, second, rel_tol=_CLOSE, abs_tol=_CLOSE**2)
    return bool(first == second)
