"""The `ModelProfile` of a module graph on the meta device: what its layers store, keep and multiply, found by running it
over a few rows without computing. Torch and transformers are imported on first use."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moelight.core.errors import ConfigError
from moelight.profiles.hf_config import HFConfig
from moelight.profiles.model import (
    MOST_EXPERTS,
    MOST_LAYERS,
    MOST_PARAMETERS,
    AttentionSpec,
    ExpertSpec,
    LayerSpec,
    ModelProfile,
    RouterSpec,
    StoredTensor,
)
from moelight.profiles.names import TensorNames

if TYPE_CHECKING:
    from torch import nn

    from moelight.models.graph.effects import Attend
    from moelight.models.graph.model import GraphModel

_ROWS = 64  # of a dry run: a block of the linear attentions, which compute in blocks
_NO_ATTENTION = AttentionSpec(num_heads=0, num_kv_heads=0, head_dim=0)


def profile_of_directory(directory: Path) -> ModelProfile | None:
    """The profile of ``directory/config.json`` by its module graph; None if transformers does not know its family.

    Raises:
        ConfigError: transformers is missing, or the graph is not served.
    """
    from moelight.models.graph.model import GraphModel, knows

    config = HFConfig.from_file(directory / "config.json")
    if not knows(str(config.find("model_type"))):
        return None
    config.refuse_quantised()
    _refuse_absurd(config)
    return profile_of(GraphModel.from_config(directory), name=directory.resolve().name, where=config.where)


def profile_of(model: GraphModel, *, name: str, where: str) -> ModelProfile:
    """The profile of ``model``, whose parameters are on the meta device; errors name the file ``where``."""
    config, run = model.config, _DryRun.of(model)
    if not any(model.moe_layers):
        raise ConfigError(f"{where}: no layer has experts, so this is a dense model")
    layers = tuple(
        LayerSpec(
            attention=run.attention.get(layer, _NO_ATTENTION),
            before=run.before[layer] // (2 * _ROWS),
            after=run.after[layer] // (2 * _ROWS),
            state_bytes=run.state_bytes[layer],
            state_token_bytes=run.state_token_bytes[layer],
        )
        for layer in range(len(model.mixers))
    )
    attending = [layer.attention for layer in layers]
    tensors = tuple(_tensors(model, run))
    ends = [tensor for tensor in tensors if tensor.layer < 0 and len(tensor.shape) > 1]
    vocab_size = max(tensor.shape[0] for tensor in ends)
    return ModelProfile(
        name=name,
        model_type=config.model_type,
        num_layers=len(layers),
        hidden_size=config.hidden_size,
        vocab_size=vocab_size,
        max_positions=config.max_position_embeddings,
        norm_eps=getattr(config, "rms_norm_eps", 1e-6),
        tie_embeddings=bool(config.tie_word_embeddings),
        dtype=str(model.module.dtype).removeprefix("torch."),
        attention=max(attending, key=lambda spec: spec.cache_width),
        router=RouterSpec(top_k=run.top_k, normalize=False, weights_in_model_dtype=False),
        experts=_experts(model, run, where),
        moe_layers=model.moe_layers,
        names=TensorNames(router=()),
        layers=layers,
        tensors=tensors,
    )


@dataclass
class _DryRun:
    """What a run over `_ROWS` rows of one sequence, and another over as many after them, showed.

    Attributes:
        attention: of each layer that suspends the run there; ``owners`` are the names of the modules that did.
        before, after: flops of products up to the attention of each layer, and from there on to its experts.
        top_k, expert_input: experts of a row, and the width of what they are given.
    """

    attention: dict[int, AttentionSpec]
    owners: set[nn.Module]
    before: Counter[int]
    after: Counter[int]
    state_bytes: list[int]
    state_token_bytes: list[int]
    top_k: int = 0
    expert_input: int = 0

    @classmethod
    def of(cls, model: GraphModel) -> _DryRun:
        from moelight.models.graph.state import State

        count = len(model.mixers)
        run, state = cls({}, set(), Counter(), Counter(), [0] * count, [0] * count), State()
        first = run._passes(model, state, 0)
        second = run._passes(model, state, _ROWS)
        for layer in range(count):
            run.state_token_bytes[layer] = second[layer] // _ROWS
            run.state_bytes[layer] = first[layer] - _ROWS * run.state_token_bytes[layer]
        return run

    def _passes(self, model: GraphModel, state: Any, start: int) -> Counter[int]:
        """One pass over the rows from position ``start`` on; returns by how many bytes ``state`` grew in each layer."""
        import torch
        from torch.utils.flop_counter import FlopCounterMode

        from moelight.models.graph.effects import Attend, Ended, Experts

        device = next(model.module.parameters()).device
        ids = torch.zeros(_ROWS, dtype=torch.int64, device=device)
        run = model.start(ids, torch.arange(start, start + _ROWS, device=device), [(state, _ROWS)])
        grown, kept, counted = Counter[int](), state.nbytes, 0
        value, effect = None, None
        self.before.clear(), self.after.clear()
        with FlopCounterMode(display=False) as flops:
            while not isinstance(effect, Ended):
                effect = run.resume(value)
                layer, total = len(run.kinds) - 1, flops.get_total_flops()
                (self.before if isinstance(effect, Attend) else self.after)[layer] += total - counted
                grown[layer] += state.nbytes - kept
                counted, kept = total, state.nbytes
                if isinstance(effect, Attend):
                    self.owners.add(run.module)
                    self.attention[layer] = _attention(effect)
                    value = effect.q.new_zeros((*effect.q.shape[:2], effect.v.shape[2]))
                elif isinstance(effect, Experts):
                    self.top_k = max(self.top_k, effect.ids.shape[1])
                    self.expert_input = effect.x.shape[1]
                    value = torch.zeros_like(effect.x)
        return grown


def _attention(effect: Attend) -> AttentionSpec:
    (_, heads, width), value_width = effect.q.shape, effect.v.shape[2]
    return AttentionSpec(
        num_heads=heads,
        num_kv_heads=effect.k.shape[1],
        head_dim=width,
        value_head_dim=None if value_width == width else value_width,
        scale=None if effect.scale == width**-0.5 else float(effect.scale),
        sinks=effect.sinks is not None,
        window=effect.window,
        softcap=effect.softcap,
    )


def _experts(model: GraphModel, run: _DryRun, where: str) -> ExpertSpec:
    """Of all layers; raises ConfigError if they differ."""
    found = set()
    for form, module in zip(model.forms, model.experts, strict=True):
        page = form.page(module, 0)
        outward = page[form.outward.name]
        found.add(
            ExpertSpec(
                num_experts=form.count,
                intermediate_size=outward.shape[0 if form.outward.transposed else 1],
                gated=form.gated,
                bias=form.outward.bias is not None,
                input_size=None if run.expert_input == model.config.hidden_size else run.expert_input,
                transposed=form.outward.transposed and form.inward[0].transposed,
                interleaved=form.interleaved,
            )
        )
    if len(found) > 1:
        raise ConfigError(f"{where}: its layers have experts of {len(found)} sizes, and pages have one")
    return found.pop()


def _tensors(model: GraphModel, run: _DryRun) -> Iterator[StoredTensor]:
    """Everything that a checkpoint stores outside the experts."""
    from torch import nn

    from moelight.hrm.inventory import ATTENTION, DENSE_LAYERS, ENDS, SHARED
    from moelight.models.graph.families import STATEFUL

    names = {module: name for name, module in model.module.named_modules()}
    experts = [names[module] for module in model.experts]
    stacks = [names[each] for each in names if isinstance(each, nn.ModuleList)]
    stack = next(name for name in stacks if experts[0].startswith(f"{name}."))
    mixers = [names[each] for each in run.owners]
    mixers += [name for each, name in names.items() if type(each).__name__ in STATEFUL]
    paged = {f"{name}.{part}" for name, form in zip(experts, model.forms, strict=True) for part in form.names()}
    sparse = {_layer_of(name, stack) for name in experts}
    per_layer = len(model.mixers) / len(model.module.get_submodule(stack))
    stored = dict(model.module.named_parameters())
    own = model.module.dtype
    persistent = model.module.state_dict(keep_vars=True)
    stored |= {name: each for name, each in persistent.items() if isinstance(each, nn.Parameter) is False}
    for name, tensor in stored.items():
        if name in paged:
            continue
        layer, kind = _layer_of(name, stack), ATTENTION
        if layer is None:
            kind = ENDS
        elif tensor.ndim > 1 and tensor.shape[0] != model.forms[0].count and not _within(name, mixers):
            kind = SHARED if layer in sparse else DENSE_LAYERS
        size = tensor.element_size()
        yield StoredTensor(
            name=name,
            layer=-1 if layer is None else int(layer * per_layer),
            shape=tuple(tensor.shape),
            itemsize=None if size == own.itemsize else size,
            kind=kind,
        )


def _layer_of(name: str, stack: str) -> int | None:
    """The index in the list of layers ``stack`` of what is called ``name``; None outside."""
    inside = name.removeprefix(f"{stack}.")
    return None if inside == name else int(inside.partition(".")[0])


def _within(name: str, modules: list[str]) -> bool:
    return any(name.startswith(f"{module}.") for module in modules)


def _refuse_absurd(config: HFConfig) -> None:
    """Reject sizes that would exhaust memory before the graph is built."""
    raise NotImplementedError


_ = (math, MOST_EXPERTS, MOST_LAYERS, MOST_PARAMETERS)
