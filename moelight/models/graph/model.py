"""The module graph of a family of transformers as a coroutine: a run is suspended at attention and at experts, and
resumed with their results. Does not depend on who serves them, on weights of checkpoints, or on the engine.

Attention and experts reach the run through transformers' own registries: `AttentionInterface` under the name `NAME`,
which has no mask function, so that graphs pass no mask; `ExpertsInterface` under the same name.

Legend: T rows of the micro-batch, H hidden, V vocabulary; others as in `effects`.
"""

from __future__ import annotations

import json
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from enum import Enum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from moelight.core.errors import ConfigError, MoelightError, quoted
from moelight.kernels import native
from moelight.kernels.arguments import one_thread_for_torch
from moelight.kernels.stored_weight import as_parameter
from moelight.models.graph.delta import DeltaModule, delta_module
from moelight.models.graph.effects import Attend, Effect, Ended, Experts, Latents, LayersPassed, MixerPassed
from moelight.models.graph.families import (
    ATTENTION,
    ENCODERS,
    OUTSIDE,
    STATEFUL,
    ExpertForm,
    interface_form,
    refusal,
)
from moelight.models.graph.imports import transformers_of_graphs
from moelight.models.graph.rotary import follow_length, is_by_length, length_rule, rotate_per_sequence
from moelight.models.graph.state import State, StatefulModule, StateSpec, own_config
from moelight.profiles.hf_config import with_family

if TYPE_CHECKING:
    from transformers import PretrainedConfig

NAME = "moelight"
_DRY_ROWS = 2
_MOST_ALONE = 1 << 20  # numbers of hidden states: adding so many takes one core 0.3 ms
_LARGE = 1 << 20  # numbers of a matrix: routers have fewer
_UNSAID = -1  # the window of attention that leaves it to masks
_PRODUCTS = (functional.linear, functional.embedding, torch.embedding)
# Errors of transformers over configs whose values it does not check.
_UNREADABLE = (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)
_HARMLESS = frozenset(("position_ids", "cache_position"))  # tensors of attention calls that say nothing new


class MixerKind(Enum):
    """How the mixer of a layer is served."""

    ATTENTION = "attention"  # the run is suspended
    LATENT = "latent"  # the run is suspended; the cache keeps latents
    RECURRENT = "recurrent"  # within the segment, with the state of each sequence
    OPAQUE = "opaque"  # within the segment, with transformers' cache of each sequence


class GraphModel:
    """One family's module graph and the order of its effects.

    Attributes:
        config: of the text model, as transformers read it.
        module: the whole causal language model; on the meta device until its parameters are filled.
        mixers: the kind of each mixer, in order; their number is the number of layers of a schedule.
        moe_layers: whether experts follow mixer l.
        experts: the module of each experts effect, in order; their parameters are never materialised.
        forms: how the experts of each of them compute, and what their pages are.
        multiplied: the names of the weights of linear layers and embeddings that are used for products and rows alone.
        pages: of a dense model (one without experts), the matrices of each layer's page by name: all that the run
            multiplies by between the mixer of this layer and that of the next, or the end, and nowhere else. Empty
            with experts.
        stateful: whether a sequence keeps state beside paged keys and values.
        predicts: whether `route` may be called: routers are called within blocks that are given hidden states alone.
        light: whether torch computes nothing large between the effects, once linear layers are kernels.
    """

    def __init__(self, module: Any, *, latents: bool = True) -> None:
        """Make ``module`` suspend; latent attention as `Latents`, or as `Attend` of expanded keys and values.

        Raises:
            ConfigError: the graph does something that runs cannot serve; the text names it.
        """
        _register()
        self.module: Any = module.eval().requires_grad_(False)
        self._decoder = decoder_of(module)
        self.config: PretrainedConfig = self._decoder.config
        if (reason := refusal(self.config)) is not None:
            raise ConfigError(f"{self.config.model_type}: {reason}")
        if not hasattr(self.config, "max_position_embeddings"):
            raise ConfigError(f"{self.config.model_type}: its config has no max_position_embeddings")
        self._by_length = length_rule(self.config)
        self._body = self._decoder.forward
        outer = next(child for child in module.children() if self._decoder in set(child.modules()))
        outer.forward = self._decoder.forward = _given_hidden
        self.forms: tuple[ExpertForm, ...] = ()
        self.experts: tuple[nn.Module, ...] = ()
        self.stateful, complete = self._hook(latents=latents)
        self.pages: tuple[tuple[str, ...], ...] = ()
        with _Uses() as uses:
            self.mixers, self.moe_layers = self._dry_run()
        self.multiplied = frozenset(self._weights_of_products(uses))
        if not any(self.moe_layers):
            self.pages = self._find_pages()
        usual = {MixerKind.ATTENTION, MixerKind.RECURRENT}
        self.light = complete and usual.issuperset(self.mixers) and self._multiplies_little()
        self._blocks = self._blocks_of_experts()
        self.predicts = bool(self._blocks) and self._routes_first()

    @classmethod
    def from_config(cls, directory: Path) -> GraphModel:
        """The graph of ``directory/config.json`` on the meta device; buffers that no checkpoint holds have values.

        Raises:
            ConfigError: transformers is missing or does not know the family, its code is remote, or it is not served.
        """
        return cls(on_meta(read_config(directory)))

    def start(
        self,
        token_ids: Tensor,
        positions: Tensor,
        sequences: Sequence[tuple[State, int]],
        lengths: Sequence[int] | None = None,
        *,
        together: bool = False,
    ) -> GraphRun:
        """A run over ``token_ids`` int64 [T] at ``positions`` int64 [T]: consecutive rows of ``sequences``, each its
        state and its number of rows. ``lengths``: of each sequence, with what other runs compute of its prompt; None:
        as far as the rows go. ``together``: usual layers are passed by, for one call to compute them."""
        how = {"by_pages": bool(self.pages), "alone": self._small(token_ids.numel())}
        layers = LayersPassed(len(self.mixers)) if together else None
        return GraphRun(self._body, token_ids, positions, sequences, lengths, **how, layers=layers)

    def logits(self, hidden: Tensor) -> Tensor:
        """The family's own head on ``hidden`` [S, H] after the final norm -> float32 [S, V]."""
        with torch.inference_mode():
            return self.module(inputs_embeds=hidden.unsqueeze(0), use_cache=False).logits[0].float()

    def route(self, index: int, x: Tensor) -> Experts:
        """The effect that block ``index``, of `experts`, would issue on ``x`` [T, H], its inputs; none is computed."""
        block = self._blocks[index]
        run = GraphRun(lambda **_: block(x[None]), x, x, (), alone=self._small(len(x)))
        try:
            effect = run.resume(None)
        finally:
            run.close()
        if not isinstance(effect, Experts):
            raise MoelightError(f"{type(block).__name__} does not route its input")
        return effect

    def _small(self, rows: int) -> bool:
        """Whether torch's own operations on this many rows are faster on one thread than on several."""
        return self.light and native.available() and rows * self.config.hidden_size <= _MOST_ALONE

    def _multiplies_little(self) -> bool:
        """Whether no matrix is large but those of linear layers, of embeddings, and of `experts`."""
        apart = {id(tensor) for expert in self.experts for tensor in expert.parameters()}
        owners = (part for part in self._decoder.modules() if not isinstance(part, nn.Linear | nn.Embedding))
        matrices = (tensor for part in owners for tensor in part._parameters.values() if tensor is not None)
        return all(matrix.ndim < 2 or matrix.numel() <= _LARGE or id(matrix) in apart for matrix in matrices)

    def _blocks_of_experts(self) -> tuple[nn.Module, ...]:
        """The modules that call `experts`, or those of them that have their routers within."""
        names = {part: name for name, part in self._decoder.named_modules()}
        return tuple(
            part
            if (outside := OUTSIDE.get(type(part).__name__)) is not None and outside.routes
            else self._decoder.get_submodule(names[part].rpartition(".")[0])
            for part in self.experts
        )

    def _routes_first(self) -> bool:
        weight = next(self.module.parameters())
        x = torch.zeros(_DRY_ROWS, self.config.hidden_size, dtype=weight.dtype, device=weight.device)
        try:
            self.route(0, x)
        except (AttributeError, IndexError, MoelightError, NotImplementedError, RuntimeError, TypeError, ValueError):
            return False
        return True

    def _hook(self, *, latents: bool) -> tuple[bool, bool]:
        """Let attention, experts and modules with state reach the run; returns whether there are modules with state,
        and whether kernels compute the rows of all sequences at once in all of them."""
        use(self.module, NAME)
        stateful, complete = False, True
        within: set[nn.Module] = set()
        cache: dict[Any, Any] = {}
        for part in self._decoder.modules():
            name = type(part).__name__
            if (spec := STATEFUL.get(name)) is not None and part not in within:
                within.update(part.modules())
                stateful, together = True, delta_module(part, cache)
                complete = complete and together is not None
                _run_per_sequence(part, spec, self._decoder, together)
            elif part in within:
                continue
            elif latents and hasattr(part, "expand_kv"):
                part.expand_kv = _keep_latents
                part.keeps_latents = True
            elif name in ATTENTION:
                ATTENTION[name].prepare(part)
            elif (outside := OUTSIDE.get(name)) is not None:
                if outside.forward is not None:
                    part.forward = partial(outside.forward, part, _mix)
            elif self._by_length is not None and is_by_length(part):
                rotate_per_sequence(part, self._by_length, lambda: running().lengths)
        return stateful, complete

    def _dry_run(self) -> tuple[tuple[MixerKind, ...], tuple[bool, ...]]:
        """Find the order of effects without computing; parameters are on the meta device or not."""
        family, run = self.config.model_type, self._dry_start(by_pages=False)
        follows: list[int] = []
        modules: list[nn.Module] = []
        value = None
        while not isinstance(effect := self._dry_resume(run, value), Ended):
            if isinstance(effect, Experts):
                if effect.layer < 0:
                    raise ConfigError(f"{family}: experts before the first mixer are not served")
                if effect.layer in follows:
                    raise ConfigError(f"{family}: two groups of experts in layer {effect.layer} are not served")
                follows.append(effect.layer)
                modules.append(run.module)
                value = torch.zeros_like(effect.x)
            else:
                value = zero_output(effect)
        self.experts = tuple(modules)
        self.forms = tuple(_form(expert_module) for expert_module in modules)
        return tuple(run.kinds), tuple(layer in follows for layer in range(len(run.kinds)))

    def _weights_of_products(self, uses: _Uses) -> Iterator[str]:
        for name, part in self.module.named_modules():
            if isinstance(part, nn.Linear | nn.Embedding) and id(part.weight) not in uses.otherwise:
                yield f"{name}.weight"

    def _find_pages(self) -> tuple[tuple[str, ...], ...]:
        """The names of the matrices that only one segment of a run uses, by the mixer that it follows."""
        run, users = self._dry_start(by_pages=True), defaultdict[int, set[int]](set)
        value, effect = None, None
        while not isinstance(effect, Ended):
            with _Uses() as uses:
                effect = self._dry_resume(run, value)
            segment = len(run.kinds) - (1 if isinstance(effect, Ended) else 2)
            for parameter in uses.parameters:
                users[parameter].add(segment)
            value = None if isinstance(effect, Ended) else zero_output(effect)
        pages: list[list[str]] = [[] for _ in run.kinds]
        parameters = list(self.module.named_parameters(remove_duplicate=False))
        tied = Counter(id(tensor) for _, tensor in parameters)
        for name, tensor in parameters:
            if tensor.ndim == 2 and tied[id(tensor)] == len(users[id(tensor)]) == 1 and min(users[id(tensor)]) >= 0:
                pages[min(users[id(tensor)])].append(name)
        return tuple(map(tuple, pages))

    def _dry_start(self, *, by_pages: bool) -> GraphRun:
        device = next(self.module.parameters()).device
        rows, positions = (
            torch.zeros(_DRY_ROWS, dtype=torch.int64, device=device),
            torch.arange(_DRY_ROWS, device=device),
        )
        return GraphRun(self._body, rows, positions, [(State(), _DRY_ROWS)], by_pages=by_pages)

    def _dry_resume(self, run: GraphRun, value: Tensor | None) -> Effect:
        try:
            return run.resume(value)
        except (AttributeError, IndexError, NotImplementedError, RuntimeError, TypeError, ValueError) as error:
            line = (str(error).splitlines() or [type(error).__name__])[0].partition(". ")[0]
            module = module_of(error)
            where = "its model" if module is None else type(module).__name__
            raise ConfigError(f"{self.config.model_type}: dry run failed in {where}: {line}") from error


def module_of(error: Exception) -> nn.Module | None:
    """The innermost module that ``error`` came from."""
    innermost, trace = None, error.__traceback__
    while trace is not None:
        owner = trace.tb_frame.f_locals.get("self")
        innermost = owner if isinstance(owner, nn.Module) else innermost
        trace = trace.tb_next
    return innermost


class _Uses(TorchFunctionMode):
    """Notes the identities of the parameters that torch's functions are given, and of those that others than linear
    layers and embeddings are given; those asked for an attribute alone are not used."""

    def __init__(self) -> None:
        super().__init__()
        self.parameters: set[int] = set()
        self.otherwise: set[int] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") != "__get__":
            used = set(map(id, _parameters((*args, *(kwargs or {}).values()))))
            self.parameters |= used
            if func not in _PRODUCTS:
                self.otherwise |= used
        return func(*args, **(kwargs or {}))


def _parameters(values: Iterable[Any]) -> Iterable[nn.Parameter]:
    for value in values:
        if isinstance(value, nn.Parameter):
            yield value
        elif isinstance(value, list | tuple):
            yield from _parameters(value)


def zero_output(effect: Effect) -> Tensor | None:
    """Return the value that resumes a dry run after the mixer ``effect``."""
    if isinstance(effect, Attend):
        return effect.q.new_zeros((*effect.q.shape[:2], effect.v.shape[2]))
    return torch.zeros_like(effect.q) if isinstance(effect, Latents) else None


class GraphRun:
    """One suspended run of a graph, to be resumed on one thread only.

    Attributes:
        sequences: whose consecutive rows the run has.
        positions: int64 [T], of the rows.
        lengths: the number of rows and the length of each sequence.
        kinds: of the mixers passed so far.
        module: that issued the last effect.
        by_pages: mixers with a state of their own suspend it too.
        layers: the effect of the layers that are passed by, which the last of them issues; None: each is computed.
    """

    def __init__(
        self,
        body: Callable[..., Any],
        token_ids: Tensor,
        positions: Tensor,
        sequences: Sequence[tuple[State, int]],
        lengths: Sequence[int] | None = None,
        *,
        by_pages: bool = False,
        alone: bool = False,
        layers: LayersPassed | None = None,
    ) -> None:
        """``lengths`` as of `GraphModel.start`; ``alone``: torch's operations are too small for several threads."""
        self.sequences, self.by_pages, self.layers = sequences, by_pages, layers
        self._threads = one_thread_for_torch if alone else nullcontext
        self.kinds: list[MixerKind] = []
        self.experts = 0
        self.module: Any
        self.positions = positions
        self._lengths = lengths
        self._repeating: list[Tensor] = []
        self._inputs = {"input_ids": token_ids[None], "position_ids": positions[None], "use_cache": False}
        self._body = body
        self._greenlet: Any = None

    def resume(self, value: Tensor | None) -> Effect:
        """Run on from the last effect, whose result is ``value`` (None: from the start), to the next effect."""
        from greenlet import getcurrent, greenlet

        with torch.inference_mode(), self._threads():
            if self._greenlet is None:
                self._greenlet = greenlet(self._forward)
                self._greenlet.run_of_graph = self
                return self._greenlet.switch()
            if self._greenlet.dead:
                raise MoelightError("the run of the graph has ended")
            self._greenlet.parent = getcurrent()
            return self._greenlet.switch(value)

    @property
    def lengths(self) -> Sequence[tuple[int, int]]:
        counts = [count for _, count in self.sequences]
        if self._lengths is not None:
            return list(zip(counts, self._lengths, strict=True))
        if self.positions.is_meta:
            return [(count, count) for count in counts]
        last = (torch.tensor(counts).cumsum(0) - 1).to(self.positions.device)
        return list(zip(counts, (self.positions[last] + 1).tolist(), strict=True))

    def repeats(self, *angles: Tensor) -> bool:
        """Whether the second half of each of ``angles`` [..., D] repeats the first; checked once per run."""
        for angle in angles:
            if any(angle is seen for seen in self._repeating):
                continue
            if not torch.equal(*angle.chunk(2, dim=-1)):
                return False
            self._repeating.append(angle)
        return True

    def close(self) -> None:
        """End the run where it is suspended."""
        if self._greenlet is not None and not self._greenlet.dead:
            self._greenlet.throw()

    def suspend(self, module: Any, effect: Effect | LayersPassed) -> Any:
        """Called within the run: hand ``effect`` of ``module`` out, return the value that the run is resumed with."""
        self.module = module
        return self._greenlet.parent.switch(effect)

    def _forward(self) -> Ended:
        return Ended(self._body(**self._inputs).last_hidden_state[0])


def read_config(directory: Path) -> PretrainedConfig:
    """The text model's config of ``directory/config.json``; raises ConfigError."""
    path = directory / "config.json"
    with _config_errors(str(path)) as transformers:
        content = json.loads(path.read_bytes())
        if (values := with_family(content)) is not content:
            return transformers.AutoConfig.for_model(**values)
        if "auto_map" in content and content.get("model_type") not in transformers.CONFIG_MAPPING:
            kind = quoted(content.get("model_type"))
            raise ConfigError(f"{path}: model_type {kind} is code of its own repository, which is never run")
        return transformers.AutoConfig.from_pretrained(directory, local_files_only=True, trust_remote_code=False)


def config_of(values: Mapping[str, Any], *, where: str) -> PretrainedConfig:
    """The config of ``values``, as a config.json would have them; raises ConfigError that names ``where``."""
    with _config_errors(where) as transformers:
        return transformers.AutoConfig.for_model(**values)


@contextmanager
def _config_errors(where: str) -> Iterator[Any]:
    """transformers; its errors become a ConfigError."""
    transformers = transformers_of_graphs()
    from huggingface_hub.errors import StrictDataclassError

    try:
        yield transformers
    except (*_UNREADABLE, OSError, StrictDataclassError) as error:
        lines = [line.strip() for line in str(error).splitlines() if not line.endswith(":")]
        version, message = transformers.__version__, (lines or [type(error).__name__])[0]
        raise ConfigError(f"{where}: transformers {version} cannot read it: {message}") from None


def on_meta(config: PretrainedConfig) -> Any:
    """The causal language model of ``config`` with parameters on the meta device and computed buffers on the CPU.

    Of a model that also sees or hears, the encoders are left out.
    """
    transformers = transformers_of_graphs()
    if (kind := language_model(type(config))) is None:
        version = transformers.__version__
        raise ConfigError(f"{config.model_type}: transformers {version} has no causal language model of it")
    if (reason := refusal(config)) is not None:
        raise ConfigError(f"{config.model_type}: {reason}")
    try:
        with torch.device("meta"):
            module = kind.from_config(config, trust_remote_code=False)
    except _UNREADABLE as error:
        message = (str(error).splitlines() or [type(error).__name__])[0]
        raise ConfigError(
            f"{config.model_type}: transformers cannot build the model of this config: {message}"
        ) from None
    _leave_out_encoders(module)
    fill_buffers(module)
    for part in module.modules():
        follow_length(part)
    return module


def binding(module: nn.Module, tensors: Mapping[str, Tensor]) -> Callable[[], None]:
    """Return a callable that installs ``tensors`` as the parameters of ``module`` with their names."""
    places = []
    for name, tensor in tensors.items():
        path, _, leaf = name.rpartition(".")
        parameters: dict[str, Any] = module.get_submodule(path)._parameters
        places.append((parameters, leaf, as_parameter(tensor)))

    def bind() -> None:
        for owner, leaf, parameter in places:
            owner[leaf] = parameter

    return bind


def decoder_of(module: Any) -> Any:
    """The text model within a causal language model."""
    decoder = module.get_decoder()
    return module.model if decoder is module else decoder


def _leave_out_encoders(module: Any) -> None:
    decoder = decoder_of(module)
    for part in list(module.modules()):
        if part is decoder:
            break
        if decoder in part.children():
            for name, child in list(part.named_children()):
                if child is not decoder and part is not module:
                    setattr(part, name, None)
    for part in decoder.modules():
        for name in ENCODERS.get(type(part).__name__, ()):
            setattr(part, name, None)


def language_model(config: type) -> Any:
    """The auto class of transformers that builds a language model of a class of configs, or None."""
    import transformers

    kinds = (transformers.AutoModelForCausalLM, transformers.AutoModelForImageTextToText)
    return next((kind for kind in kinds if config in kind._model_mapping), None)


def use(module: Any, name: str) -> None:
    """Let all attention and experts of ``module`` be those registered as ``name``."""
    configs = {id(part.config): part.config for part in module.modules() if hasattr(part, "config")}
    for config in configs.values():
        config._attn_implementation = config._experts_implementation = name
        config.output_router_logits = False


def fill_buffers(module: Any) -> None:
    """Compute the buffers that checkpoints do not hold, by the family's own initialisation, on the CPU."""
    from transformers import PreTrainedModel

    owner: dict[nn.Module, PreTrainedModel] = {}
    for part in module.modules():
        if isinstance(part, PreTrainedModel):
            owner.update(dict.fromkeys(part.modules(), part))
    for part, model in owner.items():
        names = [name for name in part._non_persistent_buffers_set if getattr(part, name) is not None]
        if not names:
            continue
        for name in names:
            buffer = torch.zeros_like(getattr(part, name), device="cpu")
            setattr(part, name, buffer.fill_(math.nan) if buffer.is_floating_point() else buffer)
        with torch.no_grad():
            model._init_weights(part)
            if any(bool(getattr(part, name).isnan().any()) for name in names):
                model._init_weights(model)  # some compute the buffers of their parts


def _register() -> None:
    transformers_of_graphs()
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS.register(NAME, _attend)
    ALL_EXPERTS_FUNCTIONS.register(NAME, _mix)


def running() -> GraphRun:
    """The run that the caller is within."""
    from greenlet import getcurrent

    return getcurrent().run_of_graph


class GivenHidden:
    """Outputs of a body of which only the hidden states are there; whatever else a head asks for is None."""

    def __init__(self, hidden: Tensor) -> None:
        self.last_hidden_state = hidden

    def __getitem__(self, index: int) -> Tensor | None:
        return None if index else self.last_hidden_state

    def __getattr__(self, name: str) -> None:
        return None


def _given_hidden(*_: object, inputs_embeds: Tensor, **__: object) -> GivenHidden:
    """In place of the body while the head is computed: what is given are the body's hidden states."""
    return GivenHidden(inputs_embeds)


def _form(experts: nn.Module) -> ExpertForm:
    outside = OUTSIDE.get(type(experts).__name__)
    return interface_form(experts) if outside is None else outside.form(experts)


def _run_per_sequence(module: Any, spec: StateSpec, decoder: Any, together: DeltaModule | None) -> None:
    """Let ``module`` run once for each sequence of the run that it is called in, or ``together`` for all of them;
    counted if it is a mixer."""
    kind = MixerKind.OPAQUE if spec.opaque else MixerKind.RECURRENT
    if spec.opaque:
        own_config(module)
    stateful = StatefulModule(module, spec, decoder, together)

    def forward(*args: Any, **kwargs: Any) -> Any:
        run = running()
        if spec.mixer:
            run.kinds.append(kind)
        output = stateful(run.sequences, *args, **kwargs)
        if spec.mixer and run.by_pages:
            run.suspend(module, MixerPassed(len(run.kinds) - 1))
        return output

    module.forward = forward


def _attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = _UNSAID,
    s_aux: Tensor | None = None,
    softcap: float | None = None,
    **others: object,
) -> tuple[Tensor, None]:
    """transformers' attention function: query [1, Hq, T, D], key and value [1, Hkv, T, D or Dv] -> [1, T, Hq, Dv]."""
    run = running()
    for name, other in others.items():
        if isinstance(other, Tensor) and name not in _HARMLESS:
            raise ConfigError(f"{type(module).__name__}: attention with {name} is not served")
    if not getattr(module, "is_causal", True):
        raise ConfigError(f"{type(module).__name__}: attention to later tokens is not served")
    if attention_mask is not None:
        raise ConfigError(f"{type(module).__name__}: attention with a mask of its own is not served")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if getattr(module, "keeps_latents", False):
        return _attend_latents(run, module, query[0], key[0, 0], value[0, 0], scale), None
    effect = Attend(
        layer=len(run.kinds),
        q=query[0].transpose(0, 1),
        k=key[0].transpose(0, 1),
        v=value[0].transpose(0, 1),
        scale=scale,
        window=getattr(module, "sliding_window", None) if sliding_window == _UNSAID else sliding_window,
        sinks=s_aux,
        softcap=softcap,
    )
    run.kinds.append(MixerKind.ATTENTION)
    if (more := ATTENTION.get(type(module).__name__)) is not None:
        more.complete(module, effect, run.positions)
    mixed = run.suspend(module, effect)  # a part of wider rows, where kernels pad heads; modules take views of it
    return mixed.contiguous()[None], None


def _keep_latents(latent: Tensor, rotated: Tensor) -> tuple[Tensor, Tensor]:
    """In place of a module's ``expand_kv``: latents [1, 1, T, R] and rotated keys [1, 1, T, Rr] go on as they are."""
    return latent, rotated


def _attend_latents(run: GraphRun, module: Any, query: Tensor, latent: Tensor, rotated: Tensor, scale: float) -> Tensor:
    """query [Hq, T, Dn + Rr], latent [T, R] and rotated [T, Rr] -> [1, T, Hq, Dv]."""
    nope = query.shape[2] - rotated.shape[1]
    expand = module.kv_b_proj.weight.unflatten(0, (query.shape[0], -1))  # [Hq, Dn + Dv, R]
    effect = Latents(
        layer=len(run.kinds),
        q=torch.bmm(query[:, :, :nope], expand[:, :nope]).transpose(0, 1),
        q_rope=query[:, :, nope:].transpose(0, 1),
        latent=torch.cat((latent, rotated), dim=-1),
        scale=scale,
    )
    run.kinds.append(MixerKind.LATENT)
    mixed = run.suspend(module, effect)
    return torch.bmm(mixed.transpose(0, 1), expand[:, nope:].transpose(1, 2)).transpose(0, 1)[None]


def _mix(module: Any, hidden: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """transformers' experts function: hidden [..., H], ids and weights [..., k] -> [..., H]."""
    run = running()
    k = ids.shape[-1]
    x = hidden.reshape(-1, hidden.shape[-1])
    effect = Experts(len(run.kinds) - 1, run.experts, x, ids.reshape(-1, k), weights.reshape(-1, k).float())
    run.experts += 1
    return run.suspend(module, effect).view(hidden.shape)
