"""A family proves itself before it runs: a tiny model with the switches of the user's config, transformers' eager
forward of each sequence alone against suspended runs of the graph; what has agreed is kept by versions. Does not
depend on checkpoints or the engine.

The runs share micro-batches in all the ways that the engine uses: ragged prompts, prompts in parts after a context,
prompts beside decode rows, two micro-batches interleaved at every suspension, experts that the graph does not hold.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from moelight.core.errors import ConfigError
from moelight.core.paths import cache_directory, write_whole
from moelight.models.graph.effects import Attend, Effect, Ended, Experts, Latents, MixerPassed
from moelight.models.graph.families import CHOSEN_BY_TOKEN, ExpertForm
from moelight.models.graph.family_table import versions
from moelight.models.graph.layers import use_kernels
from moelight.models.graph.model import (
    GraphModel,
    GraphRun,
    binding,
    module_of,
    on_meta,
    running,
    use,
)
from moelight.models.graph.state import State

if TYPE_CHECKING:
    from transformers import PretrainedConfig

TOLERANCE = 1e-4  # of logits, relative to the largest of their row
Page = dict[str, Tensor]


@dataclass
class Tokens:
    """A sequence of the test: all its tokens, and what passes have left of it so far."""

    ids: Tensor
    done: int = 0
    kv: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)
    state: State = field(default_factory=State)


Rows = Sequence[tuple[Tokens, int]]  # of a micro-batch: sequences and how many rows each brings


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """The result of a self-test.

    Attributes:
        error: largest error of logits, relative to the largest of their row.
        greedy: whether all greedy tokens are identical.
        differs: the operation that differs first, in words; None if all agree.
    """

    error: float
    greedy: bool
    differs: str | None


def serve_experts(effect: Experts, form: ExpertForm, pages: Sequence[Page]) -> Tensor:
    """The mixture of ``effect``, page by page, summed in float32."""
    out = torch.zeros(effect.x.shape, dtype=torch.float32, device=effect.x.device)
    for expert in effect.ids.unique().tolist():
        if expert < len(pages):
            rows, ranks = (effect.ids == expert).nonzero(as_tuple=True)
            y = form.forward(pages[expert], effect.x[rows])
            out.index_add_(0, rows, y.float() * effect.weights[rows, ranks, None])
    return out.to(effect.x.dtype)


def serve_attention(effect: Attend, rows: Rows) -> Tensor:
    """Attention of a micro-batch over the keys and values that its sequences kept, to which its own are appended."""
    out, start = [], 0
    for sequence, count in rows:
        k, v = effect.k[start : start + count], effect.v[start : start + count]
        if effect.layer in sequence.kv:
            cached = sequence.kv[effect.layer]
            k, v = torch.cat((cached[0], k)), torch.cat((cached[1], v))
        sequence.kv[effect.layer] = k, v
        out.append(_attention(effect, effect.q[start : start + count], k, v))
        start += count
    return torch.cat(out)


def serve_latents(effect: Latents, rows: Rows) -> Tensor:
    """As `serve_attention`, of one shared key a position, whose first part is its value too."""
    size = effect.q.shape[2]
    k = effect.latent[:, None]
    plain = Attend(effect.layer, torch.cat((effect.q, effect.q_rope), dim=-1), k, k[..., :size], effect.scale)
    return serve_attention(plain, rows)


def _attention(effect: Attend, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """q [n, Hq, D] are the last n of k [L, Hkv, D] and v [L, Hkv, Dv] -> [n, Hq, Dv]."""
    groups = q.shape[1] // k.shape[1]
    logits = torch.einsum("nhd,lhd->hnl", q, k.repeat_interleave(groups, 1)).float() * effect.scale
    if effect.softcap is not None:
        logits = effect.softcap * torch.tanh(logits / effect.softcap)
    key = torch.arange(k.shape[0], device=q.device)
    row = key[-q.shape[0] :, None]
    seen = key <= row
    if effect.window is not None:
        seen &= key > row - effect.window
    if effect.chunk is not None:
        seen &= key >= row // effect.chunk * effect.chunk
    logits = logits.masked_fill(~seen, float("-inf"))
    if effect.sinks is not None:
        sinks = effect.sinks.float().view(-1, 1, 1).expand(-1, logits.shape[1], 1)
        logits = torch.cat((logits, sinks), dim=-1)
    weights = logits.softmax(-1)[..., : k.shape[0]].to(v.dtype)
    return torch.einsum("hnl,lhd->nhd", weights, v.repeat_interleave(groups, 1))


class Bench:
    """A graph whose experts, of a dense model the pages, were taken out of it and whose leaves are kernels, and the
    passes of the self-test over it."""

    def __init__(self, module: nn.Module) -> None:
        self.model = GraphModel(module)
        self.pages = [
            take_pages(experts, form) for experts, form in zip(self.model.experts, self.model.forms, strict=True)
        ]
        use_kernels(module)
        lie_together(module)
        pages = [{name: module.get_parameter(name) for name in names} for names in self.model.pages]
        self._present = [binding(module, page) for page in pages]
        self._absent = [binding(module, {name: tensor.to("meta") for name, tensor in page.items()}) for page in pages]
        for leave in self._absent:
            leave()

    def run(self, micro_batches: Sequence[Rows]) -> list[Tensor]:
        """One pass over ``micro_batches``, all suspended and resumed in turn -> logits of all rows of each."""
        runs = [self._start(rows) for rows in micro_batches]
        values: list[Tensor | None] = [None] * len(runs)
        hidden: list[Tensor | None] = [None] * len(runs)
        while any(tensor is None for tensor in hidden):
            for number, run in enumerate(runs):
                if hidden[number] is None:
                    effect = self._resume(run, values[number])
                    if isinstance(effect, Ended):
                        hidden[number] = effect.hidden
                    else:
                        values[number] = self._serve(effect, micro_batches[number])
        for sequence, count in (entry for rows in micro_batches for entry in rows):
            sequence.done += count
        return [self.model.logits(tensor) for tensor in hidden if tensor is not None]

    def _start(self, rows: Rows) -> GraphRun:
        ids = torch.cat([sequence.ids[sequence.done : sequence.done + count] for sequence, count in rows])
        positions = torch.cat([torch.arange(sequence.done, sequence.done + count) for sequence, count in rows])
        lengths = [len(sequence.ids) for sequence, _ in rows]  # as if all were prompt, as it is in the eager forward
        return self.model.start(ids, positions, [(sequence.state, count) for sequence, count in rows], lengths)

    def _resume(self, run: GraphRun, value: Tensor | None) -> Effect:
        """To the next effect, with no matrices but those of the page of the last mixer."""
        layer = len(run.kinds) - 1
        if not self._present or layer < 0:
            return run.resume(value)
        self._present[layer]()
        try:
            return run.resume(value)
        finally:
            self._absent[layer]()

    def _serve(self, effect: Attend | Latents | MixerPassed | Experts, rows: Rows) -> Tensor | None:
        if isinstance(effect, MixerPassed):
            return None
        if isinstance(effect, Latents):
            return serve_latents(effect, rows)
        if isinstance(effect, Experts):
            return serve_experts(effect, self.model.forms[effect.index], self.pages[effect.index])
        return serve_attention(effect, rows)


def take_pages(experts: nn.Module, form: ExpertForm) -> list[Page]:
    """The page of each expert; the module keeps none of them."""
    pages = [{name: tensor.clone() for name, tensor in form.page(experts, e).items()} for e in range(form.count)]
    for name in form.names():
        owner, _, leaf = name.rpartition(".")
        module = experts.get_submodule(owner)
        empty = torch.empty_like(getattr(module, leaf), device="meta")
        setattr(module, leaf, nn.Parameter(empty, requires_grad=False))
    return pages


def lie_together(module: nn.Module) -> None:
    """Let all parameters of ``module`` lie one after another, as those of an engine do: joined matrices are views."""
    here = [parameter for parameter in module.parameters() if not parameter.is_meta]
    arena = torch.cat([parameter.detach().flatten() for parameter in here])
    for parameter, part in zip(here, arena.split([parameter.numel() for parameter in here]), strict=True):
        parameter.data = part.view(parameter.shape)


_LAYERS = 4  # of a tiny model at least; more where they are of more kinds
_HEADS = 4
_VOCABULARY = 160
_SIZES: dict[str, int] = {  # fields that are sizes alone and what they become; all others keep the user's values
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input"), _VOCABULARY),
    **dict.fromkeys(("unpadded_vocab_size",), _VOCABULARY - 10),
    **dict.fromkeys(("hidden_size", "embed_dim"), 64),
    **dict.fromkeys(("intermediate_size", "prefix_dense_intermediate_size", "dense_intermediate_size"), 96),
    **dict.fromkeys(("ffn_hidden_size",), 96),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "shared_intermediate_size"), 32),
    **dict.fromkeys(("moe_shared_expert_intermediate_size", "moe_shared_intermediate_size"), 32),
    **dict.fromkeys(("mamba_d_head",), 32),
    **dict.fromkeys(("mamba_d_ssm",), _HEADS * 32),
    **dict.fromkeys(("num_attention_heads", "swa_num_attention_heads", "mamba_num_heads", "mamba_n_heads"), _HEADS),
    **dict.fromkeys(("linear_num_value_heads", "linear_num_heads", "num_linear_attention_heads"), _HEADS),
    **dict.fromkeys(("head_dim", "v_head_dim", "swa_head_dim", "swa_v_head_dim", "kv_channels", "index_head_dim"), 16),
    **dict.fromkeys(("indexer_head_dim",), 16),
    **dict.fromkeys(("qk_nope_head_dim", "kv_lora_rank", "o_lora_rank", "mamba_head_dim", "global_head_dim"), 16),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim", "linear_head_dim"), 16),
    **dict.fromkeys(("hidden_size_per_layer_input",), 16),
    **dict.fromkeys(("qk_rope_head_dim", "ssm_state_size", "mamba_d_state", "chunk_size", "mamba_chunk_size"), 8),
    **dict.fromkeys(("q_lora_rank", "qk_head_dim"), 24),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 8),
    **dict.fromkeys(("num_key_value_heads", "swa_num_key_value_heads", "num_global_key_value_heads"), 2),
    **dict.fromkeys(("kv_n_heads", "num_sliding_attention_heads"), 2),
    **dict.fromkeys(("linear_num_key_heads", "n_groups", "mamba_n_groups", "o_groups"), 2),
    **dict.fromkeys(("index_n_heads",), 16),  # with few, scores after a ReLU tie at zero
}
_AT_MOST: dict[str, int] = {  # counts of which a few are enough, and lengths that prompts of the test must exceed
    **dict.fromkeys(("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "top_k_experts"), 2),
    **dict.fromkeys(("moe_top_k",), 2),
    **dict.fromkeys(("n_shared_experts", "num_shared_experts", "moe_num_shared_experts"), 2),
    **dict.fromkeys(("first_k_dense_replace", "num_dense_layers", "moe_layer_start_index"), 1),
    **dict.fromkeys(("num_nextn_predict_layers",), 0),
    **dict.fromkeys(("num_layers",), 2),
    **dict.fromkeys(("n_group", "num_expert_group"), 2),
    **dict.fromkeys(("topk_group",), 1),
    **dict.fromkeys(("sliding_window", "sliding_window_size", "attention_chunk_size", "index_topk", "block_size"), 8),
    **dict.fromkeys(("index_block_size", "rel_extent", "zero_expert_num", "index_kpool"), 4),
    **dict.fromkeys(("floor_scale", "log_scaling_n_floor", "indexer_budget", "keep_window_size"), 8),
    **dict.fromkeys(("indexer_compress_ratio",), 2),
    **dict.fromkeys(("hc_lowrank", "indexer_n_heads"), 16),
    **dict.fromkeys(("ngram_vocab_size_base",), 256),
    **dict.fromkeys(("split_ngram_parts",), 2),
    **dict.fromkeys(("make_ngram_vocab_size_divisible_by",), 2),
    **dict.fromkeys(("index_topk_blocks",), 3),
}
_EVEN = 4  # what tiny widths of heads are multiples of
_ORIGINAL = 16  # positions before they are stretched
ENCODER_OUTPUTS = (
    "out_hidden_size",
    "adapter_out_dim",
    "text_hidden_size",
)  # sizes of encoders that are the text model's


def tiny(config: PretrainedConfig) -> PretrainedConfig:
    """``config`` with small sizes, few layers that show every kind of layer, and every switch kept."""
    return type(config)(**_shrunk(config.to_dict(), config))


def _shrunk(fields: dict[str, Any], config: PretrainedConfig) -> dict[str, Any]:
    """The fields of ``config`` made tiny, those of configs within it too."""
    named = getattr(type(config), "attribute_map", {})
    fields = _small(fields, named)
    for name, value in fields.items():
        if name.endswith("_token_id"):
            fields[name] = 0 if isinstance(value, int) else [0] if isinstance(value, list) else value
    for name in config.sub_configs:
        if isinstance(fields.get(name), dict):
            within = getattr(config, name)
            if config.get_text_config() in (config, within):
                fields[name] = _shrunk(fields[name], within)
            else:  # an encoder, which is left out: it must only fit
                fields[name] |= {key: _SIZES["hidden_size"] for key in ENCODER_OUTPUTS if key in fields[name]}
    if "num_hidden_layers" in fields or "num_hidden_layers" in named:
        _few_layers(fields, config, named)
    short_rotations(fields)
    return fields | {"dtype": "float32"}


def _small(fields: dict[str, Any], named: Mapping[str, str]) -> dict[str, Any]:
    """``fields`` with sizes and counts made small, in proportions that families rely on."""
    had, fields = fields, dict(fields)
    heads, keys = (named.get(name, name) for name in ("num_attention_heads", "num_key_value_heads"))
    for name, value in {**_SIZES, **_AT_MOST}.items():
        old = had.get(field := named.get(name, name))
        if isinstance(old, int | float) and not isinstance(old, bool) and old:
            fields[field] = value if name in _SIZES else min(old, value)
        elif isinstance(old, list) and name in _SIZES and old and not isinstance(old[0], str):
            fields[field] = [value] * len(old)
    latent = had.get("kv_lora_rank") is not None
    if latent and had.get("qk_rope_head_dim"):
        for key in ("head_dim", "qk_nope_head_dim", "qk_head_dim"):
            if had.get(key):  # sums remain sums, and pairs of numbers pairs: complex views need even strides
                fields[key] = -(-had[key] * _SIZES["qk_rope_head_dim"] // had["qk_rope_head_dim"] // _EVEN) * _EVEN
    if keys in had and (latent or had[keys] == had.get(heads)):
        fields[keys] = _HEADS
    elif had.get(keys) == 1:  # multi-query attention, which some families compute where they fail at grouped queries
        fields[keys] = 1
    if "index_n_heads" in had and had["index_n_heads"] == had.get(keys) and not latent:
        fields["index_n_heads"] = fields[keys]
    return fields


def _few_layers(fields: dict[str, Any], config: PretrainedConfig, named: Mapping[str, str]) -> None:
    """Cut lists of one entry a layer, and the number of layers, to the first that show every combination."""
    count = config.num_hidden_layers
    values = {name: value for name, value in fields.items() if isinstance(value, list) and value}
    layer_lists = {name: value for name, value in values.items() if _are_layers(value, count)}
    lists = {name: value for name, value in values.items() if len(value) == count and name not in layer_lists}
    single = {int(layer): value for layer, value in (fields.get("per_layer_config") or {}).items()}
    kinds = [
        (
            *(repr(value[n]) for value in lists.values()),
            *(n in value for value in layer_lists.values()),
            repr(single.get(n)),
        )
        for n in range(count)
    ]
    few = min(count, max(_LAYERS, 1 + max(kinds.index(kind) for kind in set(kinds))))
    if fields.get("num_kv_shared_layers"):  # the last layers use keys and values of the first
        few = min(count, 2 * few)
        fields["num_kv_shared_layers"] = few // 2
    fields.update({name: [n for n in value if n < few] for name, value in layer_lists.items()})
    fields.update({name: value[:few] for name, value in lists.items()})
    fields[named.get("num_hidden_layers", "num_hidden_layers")] = few
    if single:
        values = config.to_dict()
        small = {n: _small({**values, **value}, named) for n, value in single.items() if n < few}
        fields["per_layer_config"] = {n: {name: small[n][name] for name in single[n]} for n in small}


def _are_layers(values: list[Any], count: int) -> bool:
    """Whether a field lists layer indices, not one value per layer."""
    ints = all(isinstance(value, int) and not isinstance(value, bool) for value in values)
    return ints and values == sorted(set(values)) and len(values) > 1 and values[-1] < count


def short_rotations(fields: dict[str, Any]) -> None:
    """Fit lists of one entry a frequency, or of numbers of frequencies, to the small heads, and the length from which
    positions are stretched to short prompts."""
    rope = fields.get("rope_parameters")
    if not isinstance(rope, dict):
        return
    if rope.get("original_max_position_embeddings"):
        rope["original_max_position_embeddings"] = min(rope["original_max_position_embeddings"], _ORIGINAL)
    for kind in rope.values():  # of layers of one kind
        if isinstance(kind, dict):
            short_rotations({"rope_parameters": kind, "head_dim": fields.get("head_dim")})
    half = int((fields.get("head_dim") or 16) * rope.get("partial_rotary_factor", 1.0)) // 2
    for name in ("long_factor", "short_factor"):
        if name in rope:
            rope[name] = rope[name][:half]
    if "mrope_section" in rope:
        parts = len(rope["mrope_section"])
        rope["mrope_section"] = [*[half // parts] * (parts - 1), half - half // parts * (parts - 1)]


SEEDS = (0, 1)  # scores of a router may tie but for rounding, which the draws of another seed do not repeat


def self_test(config: PretrainedConfig) -> Verdict:
    """Compare suspended runs of ``config``'s graph, made tiny, with transformers' eager forward, in float32: a
    difference counts where the weights and prompts of every one of `SEEDS` show one."""
    small = tiny(config)
    for seed in SEEDS:
        verdict = _compare(small, seed)
        if verdict.differs is None:
            break
    return verdict


def _compare(small: PretrainedConfig, seed: int) -> Verdict:
    try:
        expected, _ = _eager(small, seed, names=())
    except (AttributeError, IndexError, RuntimeError, TypeError, ValueError) as raised:
        module, line = module_of(raised), (str(raised).splitlines() or [type(raised).__name__])[0]
        name = "its model" if module is None else type(module).__name__
        raise ConfigError(
            f"{small.model_type}: transformers {versions()[0]} alone cannot run a tiny model with these switches, so "
            f"its graph cannot be compared with it; it fails in {name}: {line}"
        ) from raised
    try:
        got, _ = _suspended(small, seed, names=())
    except _GraphError as failed:
        return Verdict(error=math.inf, greedy=False, differs=str(failed))
    error = max(relative(ours, theirs) for ours, theirs in zip(got, expected, strict=True))
    pairs = zip(got, expected, strict=True)
    greedy = all(bool((ours.argmax(-1) == theirs.argmax(-1)).all()) for ours, theirs in pairs)
    differs = None if error <= TOLERANCE and greedy else _first_difference(small, seed)
    return Verdict(error=error, greedy=greedy, differs=differs)


class _GraphError(Exception):
    """A module that transformers alone computes fails in a suspended run."""

    def __init__(self, model: nn.Module, error: Exception) -> None:
        inner = module_of(error)
        name = next((name for name, module in model.named_modules() if module is inner), "its model")
        line = (str(error).splitlines() or [type(error).__name__])[0]
        super().__init__(f"{name} ({type(inner).__name__}), which fails: {line}")


Outputs = dict[str, list[Tensor]]  # of modules by name: rows of each sequence [n, ...]


def _eager(config: PretrainedConfig, seed: int, names: Collection[str]) -> tuple[list[Tensor], Outputs]:
    """Logits [n, V] of each sequence by transformers alone, and what modules ``names`` returned."""
    module = random_model(config, seed)
    outputs: Outputs = {name: [] for name in names}
    for name in names:
        module.get_submodule(name).register_forward_hook(lambda _, __, out, name=name: outputs[name].append(_rows(out)))
    with torch.inference_mode():
        return [module(input_ids=prompt[None], use_cache=False).logits[0].float() for prompt in _prompts(seed)], outputs


def _suspended(config: PretrainedConfig, seed: int, names: Collection[str]) -> tuple[list[Tensor], Outputs]:
    """As `_eager`, by suspended runs."""
    bench = Bench(random_model(config, seed))
    sequences = [Tokens(prompt) for prompt in _prompts(seed)]
    indices = {id(sequence.state): number for number, sequence in enumerate(sequences)}
    outputs: dict[str, list[list[Tensor]]] = {name: [[] for _ in sequences] for name in names}

    def record(name: str, out: Any) -> None:
        counts = [count for _, count in running().sequences]
        for (state, _), part in zip(running().sequences, _rows(out).split(counts), strict=True):
            outputs[name][indices[id(state)]].append(part)

    for name in names:
        bench.model.module.get_submodule(name).register_forward_hook(lambda _, __, out, name=name: record(name, out))
    logits: list[list[Tensor]] = [[] for _ in sequences]
    for micro_batches in _PASSES:
        rows = [[(sequences[number], count) for number, count in micro_batch] for micro_batch in micro_batches]
        try:
            ran = bench.run(rows)
        except (AttributeError, IndexError, RuntimeError, TypeError, ValueError) as error:
            raise _GraphError(bench.model.module, error) from error
        for result, batch in zip(ran, micro_batches, strict=True):
            for part, (number, _) in zip(result.split([count for _, count in batch]), batch, strict=True):
                logits[number].append(part)
    joined = {name: [torch.cat(piece) for piece in parts] for name, parts in outputs.items() if all(parts)}
    return [torch.cat(piece) for piece in logits], joined


def _first_difference(config: PretrainedConfig, seed: int) -> str:
    """The first module, in the order of the eager forward, whose output is another one in suspended runs."""
    module = random_model(config, seed)
    layers = [name for name, part in module.named_modules() if isinstance(part, nn.ModuleList) and name.count(".") < 3]
    names = [
        f"{layer}.{n}.{child}"
        for layer in layers[:1]
        for n, part in module.get_submodule(layer).named_children()
        for child, _ in part.named_children()
    ]
    theirs, ours = _eager(config, seed, names)[1], _suspended(config, seed, names)[1]
    for name in sorted(names, key=lambda name: [int(part) if part.isdigit() else 0 for part in name.split(".")]):
        pairs = list(zip(ours.get(name, []), theirs[name], strict=False))
        error = max((float((a - b).abs().max() / b.abs().max().clamp_min(1e-9)) for a, b in pairs), default=0.0)
        if not error <= TOLERANCE:
            return f"{name} ({type(module.get_submodule(name)).__name__}) differs by {error:.1e}"
    return "the head, or what else is outside of layers"


def _rows(out: Any) -> Tensor:
    """The rows [n, ...] of a module's output."""
    out = out[0] if isinstance(out, tuple) else out
    return out[0] if out.ndim > 2 and out.shape[0] == 1 else out


def _prompts(seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, _VOCABULARY - 10, (length,), generator=generator) for length in _LENGTHS]


_PASSES: tuple[tuple[tuple[tuple[int, int], ...], ...], ...] = (  # micro-batches of (sequence, rows)
    (((0, 9), (1, 12)), ((2, 5), (4, 1), (5, 1))),  # prompts, ragged; the second in part; two of a single token
    (((0, 1), (1, 13)), ((3, 70), (2, 1))),  # the rest of it after its context; a prompt beside decode rows
    (((0, 1), (4, 1), (2, 1), (3, 1)), ((1, 2), (5, 1))),
    (((1, 1), (0, 4), (2, 1)), ((3, 1), (4, 1))),  # several rows of a sequence that has decoded
)
_LENGTHS = tuple(
    sum(count for batches in _PASSES for batch in batches for number, count in batch if number == sequence)
    for sequence in range(1 + max(number for batches in _PASSES for batch in batches for number, _ in batch))
)


def relative(logits: Tensor, expected: Tensor) -> float:
    """Largest error of any row [n, V], relative to the row's largest logit; infinite where a row says nothing: is no
    number, or zero."""
    error = (logits - expected).abs().amax(-1) / expected.abs().amax(-1)
    return float(error.nan_to_num(nan=float("inf")).max())


def random_model(config: PretrainedConfig, seed: int) -> Any:
    """A model of ``config`` on the CPU in float32 with random weights of every parameter, eager throughout."""
    torch.manual_seed(seed)
    config = copy.deepcopy(config)
    module = on_meta(config).eval().requires_grad_(False)
    use(module, "eager")
    for part in module.modules():
        for name, weight in (*part.named_parameters(recurse=False), *part.named_buffers(recurse=False)):
            if not weight.is_meta:
                continue
            new = (
                torch.rand(weight.shape)
                if weight.is_floating_point()
                else torch.empty(weight.shape, dtype=weight.dtype)
            )
            setattr(part, name, nn.Parameter(new, requires_grad=False) if name in part._parameters else new)
    module.tie_weights()
    with torch.no_grad():
        module.initialize_weights()
    for part in module.modules():
        if (name := CHOSEN_BY_TOKEN.get(type(part).__name__)) is not None:
            table = getattr(part, name)
            table.copy_(torch.rand(len(table), len(part.weight)).argsort(-1)[:, : table.shape[1]])
    for weight in module.parameters():
        if weight.ndim > 1:
            weight.normal_(0, 0.1)
        else:
            weight.add_(torch.randn_like(weight), alpha=0.1)
    return module


def prove_config(config: PretrainedConfig, text: str, *, where: str) -> None:
    """Compare the graph of ``config``, which was read from ``text``, made tiny, with transformers' eager forward; done
    before with the same versions, nothing. Raises ConfigError with the operation that differs."""
    if _place(text).exists():
        return
    verdict = tested(config, text)
    if verdict.differs is not None:
        raise ConfigError(
            f"{where}: the graph of {config.model_type} differs from transformers {versions()[0]} in {verdict.differs} "
            f"(relative error {verdict.error:.1e}), so it is not run; report it with this config.json"
        )


def tested(config: PretrainedConfig, text: str) -> Verdict:
    """The self-test of ``config``, whose file is ``text``; that it passed is kept by versions."""
    verdict = self_test(config)
    if verdict.differs is None:
        with contextlib.suppress(OSError):
            write_whole(_place(text), " ".join((config.model_type, f"{verdict.error:.1e}", *versions())) + "\n")
    return verdict


def _place(text: str) -> Path:
    """Return the path of the record that the config ``text`` passed its self-test."""
    key = hashlib.sha256("\0".join((*versions(), text)).encode()).hexdigest()
    return cache_directory("self-tests", f"{key[:32]}.txt")
