"""The `ModelProfile` of a module graph on the meta device: what its layers store, keep and multiply, found by a run
over a few rows that computes nothing. Torch and transformers are imported on first use."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from moelight.core.errors import ConfigError, quoted
from moelight.hrm.inventory import ATTENTION, DENSE_LAYERS, ENDS, SHARED
from moelight.models.graph.family_table import Table
from moelight.profiles.families import FAMILIES, unknown_family
from moelight.profiles.hf_config import HFConfig
from moelight.profiles.model import (
    MOST_EXPERTS,
    MOST_LAYERS,
    MOST_PARAMETERS,
    AttentionSpec,
    ExpertSpec,
    LatentSpec,
    LayerSpec,
    ModelProfile,
    RouterSpec,
    StoredTensor,
)
from moelight.profiles.names import TensorNames
from moelight.profiles.quantization import read_quantization, with_stored
from moelight.profiles.rope import stretched_positions
from moelight.profiles.tensor_list import page_shapes

if TYPE_CHECKING:
    import torch
    from torch import nn
    from transformers import PretrainedConfig

    from moelight.models.graph.effects import Attend, Latents
    from moelight.models.graph.model import GraphModel
    from moelight.models.graph.state import State

_ROWS = 64  # of a dry run: as many as the blocks of linear attention
_STATE_ROWS = 256  # windows and compression lengths of attention that keeps a cache of its own, as a rule
_DTYPE = "bfloat16"  # of a checkpoint whose config names none
_NO_ATTENTION = AttentionSpec(num_heads=0, num_kv_heads=0, head_dim=0)


def profile_of_directory(directory: Path) -> ModelProfile:
    """The profile of ``directory/config.json``, of any family, by its module graph.

    Raises:
        ConfigError: transformers is missing or does not know the family, or the graph is not served.
    """
    config = HFConfig.from_file(directory / "config.json")
    try:
        from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES
    except ImportError:
        raise config.error(
            f"model_type {quoted(config.find('model_type'))} is no family of moelight's own, and transformers, which "
            "reads the others, is not installed: pip install 'moelight[graph]'"
        ) from None
    if config.find("model_type") not in CONFIG_MAPPING_NAMES:
        running = (kind for family in Table.read().families if family.how is not None for kind in family.types)
        raise unknown_family(config, (*FAMILIES, *running))
    from transformers.utils import logging

    from moelight.models.graph.model import GraphModel, on_meta, read_config

    quantization, theirs = read_quantization(config), read_config(directory)
    if not 1 <= (layers := getattr(theirs.get_text_config(), "num_hidden_layers", 1)) <= MOST_LAYERS:
        raise config.error(f"num_hidden_layers must be an integer from 1 to {MOST_LAYERS}, not {layers}")
    loud = logging.get_verbosity()
    logging.set_verbosity_error()  # it says which kernels it would like, and computes nothing here
    try:
        model = GraphModel(on_meta(theirs))
        profile = profile_of(model, name=directory.resolve().name, where=config.where)
    finally:
        logging.set_verbosity(loud)
    if quantization is None:
        return profile
    return with_stored(profile, quantization.format_of, config.where, multiplied=model.multiplied)


def profile_of(model: GraphModel, *, name: str, where: str) -> ModelProfile:
    """The profile of ``model``, whose parameters are on the meta device; errors name the file ``where``."""
    from moelight.models.graph.rotary import length_rule

    run, config, module = _DryRun.of(model), model.config, cast("Any", model.module)
    if not (any(model.moe_layers) or any(model.pages)):
        raise ConfigError(f"{where}: {config.model_type}: no layer has experts, or matrices of its own")
    stored, places = list(_tensors(model, run.owners)), _page_places(model)
    tensors = tuple(tensor for tensor in stored if tensor.name not in places)
    in_pages = tuple(replace(tensor, layer=places[tensor.name]) for tensor in stored if tensor.name in places)
    run.leave_out(in_pages)
    layers = tuple(run.layer(number) for number in range(len(model.mixers)))
    head = module.get_output_embeddings().weight
    profile = ModelProfile(
        name=name,
        model_type=config.model_type,
        num_layers=len(layers),
        hidden_size=head.shape[1],
        vocab_size=head.shape[0],
        max_positions=_context(config, where),
        norm_eps=getattr(config, "rms_norm_eps", 1e-6),
        tie_embeddings=head is module.get_input_embeddings().weight,
        dtype=_DTYPE if config.dtype is None else str(config.dtype).removeprefix("torch."),
        attention=max((layer.attention for layer in layers), key=lambda spec: spec.cache_width),
        router=RouterSpec(top_k=run.top_k or 1, normalize=False, weights_in_model_dtype=False),
        experts=_whole_layers(in_pages, head.shape[1]) if in_pages else _experts(model, run, where),
        moe_layers=(True,) * len(layers) if in_pages else model.moe_layers,
        names=TensorNames(router=()),
        layers=layers,
        tensors=tensors,
        page_tensors=in_pages,
        by_length=length_rule(config),
    )
    _check(profile, where)
    return profile


def _context(config: PretrainedConfig, where: str) -> int:
    """The most positions of a sequence; not every family's config checks that it is a number."""
    rope, positions = getattr(config, "rope_parameters", None), config.max_position_embeddings
    if type(positions) is not int or positions < 1:
        raise ConfigError(f"{where}: max_position_embeddings must be an integer of at least 1, not {quoted(positions)}")
    original = getattr(config, "original_max_position_embeddings", None)
    return stretched_positions(rope or {}, max_positions=positions, original=original)


def _page_places(model: GraphModel) -> dict[str, int]:
    """The layer of the page that each parameter of a dense model's pages is in."""
    return {name: layer for layer, names in enumerate(model.pages) for name in names}


def _whole_layers(tensors: Sequence[StoredTensor], hidden: int) -> ExpertSpec:
    """The one expert of each layer of a dense model: a feed-forward of as many numbers as the largest page has."""
    elements = Counter[int]()
    for tensor in tensors:
        elements[tensor.layer] += tensor.elements
    return ExpertSpec(num_experts=1, intermediate_size=max(1, max(elements.values()) // (3 * hidden)))


def _check(profile: ModelProfile, where: str) -> None:
    count, pages = profile.experts.num_experts, profile.num_moe_layers * profile.experts.num_experts
    elements = sum(tensor.elements for tensor in (*profile.tensors, *profile.page_tensors))
    elements += 0 if profile.dense else pages * sum(map(math.prod, page_shapes(profile).values()))
    if count > MOST_EXPERTS or elements > MOST_PARAMETERS:
        raise ConfigError(
            f"{where}: {count} experts a layer and {elements:.0e} parameters are more than can be planned for"
        )


@dataclass
class _DryRun:
    """The result of dry passes over the rows of one sequence.

    Attributes:
        attention: of each layer that suspends the run there; ``owners``: the modules that did.
        before, after: flops of the first pass up to the attention of each layer, and from there on to its experts; what
            follows them belongs to the next layer, at the end to the last one.
        state: bytes of the state of each layer after a first part of the rows; ``grown``: in the last ``rows`` of them.
        top_k, expert_input: experts of a row, and the width of what they are given.
    """

    attention: dict[int, AttentionSpec] = field(default_factory=dict)
    owners: set[nn.Module] = field(default_factory=set)
    before: Counter[int] = field(default_factory=Counter)
    after: Counter[int] = field(default_factory=Counter)
    state: Counter[int] = field(default_factory=Counter)
    grown: Counter[int] = field(default_factory=Counter)
    rows: int = 1
    begun: int = 0
    top_k: int = 0
    expert_input: int = 0

    @classmethod
    def of(cls, model: GraphModel) -> _DryRun:
        from moelight.models.graph.model import MixerKind
        from moelight.models.graph.state import State

        run, state = cls(), State()
        run._pass(model, state, _ROWS, run.state)
        flops = run.before.copy(), run.after.copy()
        if model.stateful:
            if MixerKind.OPAQUE in model.mixers:  # beyond windows
                run.rows = _STATE_ROWS
                run._pass(model, state, run.rows, run.state)
            run._pass(model, state, run.rows, run.grown)
        run.before, run.after = flops
        return run

    def layer(self, number: int) -> LayerSpec:
        of_token = max(0, self.grown[number]) // self.rows
        return LayerSpec(
            attention=self.attention.get(number, _NO_ATTENTION),
            before=self.before[number] // (2 * _ROWS),
            after=self.after[number] // (2 * _ROWS),
            state_bytes=self.state[number] + self.grown[number] - self.begun * of_token,
            state_token_bytes=of_token,
        )

    def leave_out(self, pages: Sequence[StoredTensor]) -> None:
        """Do not count the products by matrices of a dense model's ``pages``, which belong to the page: those after the
        last mixer were counted there, the others up to the next one."""
        last = max(self.before, default=0)
        for page in pages:
            counted, layer = (self.after, last) if page.layer == last else (self.before, page.layer + 1)
            counted[layer] = max(0, counted[layer] - 2 * _ROWS * page.elements)

    def _pass(self, model: GraphModel, state: State, rows: int, grown: Counter[int]) -> None:
        import torch
        from torch.utils.flop_counter import FlopCounterMode

        from moelight.models.graph.effects import Ended, Experts, MixerPassed
        from moelight.models.graph.model import zero_output

        start, ids = self.begun, torch.zeros(rows, dtype=torch.int64, device="meta")
        self.begun += rows
        run = model.start(ids, torch.arange(start, self.begun, device="meta"), [(state, rows)])
        value, counted, held = None, 0, state.nbytes
        with FlopCounterMode(display=False) as flops:
            while True:
                effect = run.resume(value)
                layer, total, now = len(run.kinds) - 1, flops.get_total_flops(), state.nbytes
                attends = not isinstance(effect, Experts | Ended)
                (self.before if attends else self.after)[layer] += total - counted
                grown[layer] += now - held
                counted, held = total, now
                if isinstance(effect, Ended):
                    return
                if isinstance(effect, Experts):
                    self.top_k = max(self.top_k, effect.ids.shape[1])
                    self.expert_input = effect.x.shape[1]
                    value = torch.zeros_like(effect.x)
                elif isinstance(effect, MixerPassed):
                    value = None
                else:
                    self.owners.add(run.module)
                    self.attention[layer] = _attention(effect, model.config)
                    value = zero_output(effect)


def _attention(effect: Attend | Latents, config: PretrainedConfig) -> AttentionSpec:
    from moelight.models.graph.effects import Latents

    _, heads, width = effect.q.shape
    if isinstance(effect, Latents):
        latent = LatentSpec(
            q_lora_rank=None,
            kv_lora_rank=width,
            nope_head_dim=config.qk_nope_head_dim,
            rope_head_dim=effect.q_rope.shape[2],
            value_head_dim=config.v_head_dim,
        )
        wide = latent.nope_head_dim + latent.rope_head_dim
        return AttentionSpec(num_heads=heads, num_kv_heads=heads, head_dim=wide, latent=latent, scale=effect.scale)
    value_width = effect.v.shape[2]
    return AttentionSpec(
        num_heads=heads,
        num_kv_heads=effect.k.shape[1],
        head_dim=width,
        value_head_dim=None if value_width == width else value_width,
        scale=None if effect.scale == width**-0.5 else float(effect.scale),
        sinks=effect.sinks is not None,
        window=effect.window,
        softcap=effect.softcap,
        chunk=effect.chunk,
    )


def _experts(model: GraphModel, run: _DryRun, where: str) -> ExpertSpec:
    """Return the expert spec shared by all layers; raises ConfigError if layers differ."""
    from moelight.models.graph.experts import recognised

    specs = set[ExpertSpec]()
    for form, module in zip(model.forms, model.experts, strict=True):
        page = form.page(module, 0)
        outward = page[form.outward.name]
        specs.add(
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
    if len(specs) > 1:
        raise ConfigError(f"{where}: its layers have experts of {len(specs)} sizes, and pages have one")
    return replace(specs.pop(), by_torch=any(recognised(form) is None for form in model.forms))


def _tensors(model: GraphModel, owners: Collection[nn.Module]) -> Iterator[StoredTensor]:
    """Everything that a checkpoint stores outside the experts: parameters and persistent buffers, of a dense model all.

    Attention is what lies in a mixer, vectors, and routers; the other matrices of a layer are shared experts beside
    experts, else a dense feed-forward.
    """
    from torch import nn

    from moelight.models.graph.families import STATEFUL

    modules = {module: name for name, module in model.module.named_modules()}
    experts = [modules[module] for module in model.experts]
    stacks = (name for module, name in modules.items() if isinstance(module, nn.ModuleList))
    mixers = [name for module, name in modules.items() if module in owners or type(module).__name__ in STATEFUL]
    within = experts[0] if experts else mixers[0]
    stack = next(name for name in stacks if within.startswith(f"{name}."))
    inside = tuple(f"{name}." for name in mixers)
    paged = {f"{name}.{part}" for name, form in zip(experts, model.forms, strict=True) for part in form.names()}
    sparse, routed = {_layer_of(name, stack) for name in experts}, model.forms[0].count if model.forms else 0
    children = list(model.module.get_submodule(stack).children())
    mixers_each, default_size = len(model.mixers) / len(children), cast("torch.dtype", model.module.dtype).itemsize
    held = set()
    for name, tensor in model.module.state_dict(keep_vars=True).items():
        if name in paged or tensor in held:  # tied
            continue
        held.add(tensor)
        layer, kind = _layer_of(name, stack), ATTENTION
        if layer is None:
            kind = ENDS
        elif tensor.ndim > 1 and tensor.shape[0] != routed and not name.startswith(inside):
            kind = SHARED if layer in sparse else DENSE_LAYERS
        size = tensor.element_size()
        yield StoredTensor(
            name=name,
            layer=-1 if layer is None else int(layer * mixers_each),
            shape=tuple(tensor.shape),
            itemsize=None if size == default_size else size,
            kind=kind,
        )


def _layer_of(name: str, stack: str) -> int | None:
    """The index in the list of layers ``stack`` of what is called ``name``; None outside."""
    within = name.removeprefix(f"{stack}.")
    return None if within == name else int(within.partition(".")[0])
