"""The module graph of a family of transformers as a coroutine: a run is suspended at attention and at experts, and
resumed with their results. Does not depend on who serves them, on weights of checkpoints, or on the engine.

Attention and experts reach the run through transformers' own registries: `AttentionInterface` under the name `NAME`,
which has no mask function, so that graphs pass no mask; `ExpertsInterface` under the same name.

Legend: T rows of the micro-batch, H hidden, V vocabulary; others as in `effects`.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from moelight.core.errors import ConfigError, MoelightError
from moelight.models.graph.effects import Attend, Effect, Ended, Experts
from moelight.models.graph.state import State

if TYPE_CHECKING:
    from greenlet import greenlet
    from transformers import PretrainedConfig

NAME = "moelight"
_DRY_ROWS = 2


class MixerKind(Enum):
    """How the mixer of a layer is served."""

    ATTENTION = "attention"


class GraphModel:
    """One family's module graph and the order of its effects.

    Attributes:
        config: of the text model, as transformers read it.
        module: the whole causal language model; on the meta device until its parameters are filled.
        experts: the module of each experts effect, in order; their parameters are never materialised.
        mixers: the kind of each mixer effect, in order; their number is the number of layers of a schedule.
        moe_layers: whether experts follow mixer l.
    """

    def __init__(self, module: nn.Module) -> None:
        """Make ``module`` suspend; raises ConfigError, naming what the graph does that runs cannot serve."""
        _register()
        self.module = module.eval().requires_grad_(False)
        self.config: PretrainedConfig = module.config
        self.config.output_router_logits = False
        for each in {id(part.config): part.config for part in module.modules() if hasattr(part, "config")}.values():
            each._attn_implementation = each._experts_implementation = NAME
        base = module.base_model
        self._body = base.forward
        base.forward = _given_hidden
        self.mixers: tuple[MixerKind, ...] = ()
        self.experts: tuple[nn.Module, ...] = ()
        self.moe_layers: tuple[bool, ...] = ()
        self._dry_run()

    @classmethod
    def from_config(cls, directory: Path) -> GraphModel:
        """The graph of ``directory/config.json`` on the meta device; buffers that no checkpoint holds have values.

        Raises:
            ConfigError: transformers is missing or does not know the family, its code is remote, or it is not served.
        """
        return cls(on_meta(read_config(directory)))

    def start(self, token_ids: Tensor, positions: Tensor, sequences: Sequence[tuple[State, int]]) -> GraphRun:
        """A run over ``token_ids`` int64 [T] at ``positions`` int64 [T]: consecutive rows of ``sequences``, each its
        state and its number of rows."""
        return GraphRun(self, token_ids, positions, sequences)

    def logits(self, hidden: Tensor) -> Tensor:
        """The family's own head on ``hidden`` [S, H] after the final norm -> float32 [S, V]."""
        with torch.inference_mode():
            return self.module(inputs_embeds=hidden.unsqueeze(0), use_cache=False).logits[0].float()

    def _dry_run(self) -> None:
        """Find the order of effects without computing; parameters are on the meta device or not."""
        device = next(self.module.parameters()).device
        rows = torch.zeros(_DRY_ROWS, dtype=torch.int64, device=device)
        run = self.start(rows, torch.arange(_DRY_ROWS, device=device), [(State(), _DRY_ROWS)])
        modules, follows = [], []
        value = None
        while not isinstance(effect := run.resume(value), Ended):
            if isinstance(effect, Experts):
                if effect.layer < 0:
                    raise ConfigError(f"{self.config.model_type}: experts before the first attention are not served")
                if follows and follows[-1] == effect.layer:
                    raise ConfigError(f"{self.config.model_type}: layer {effect.layer} has two groups of experts")
                follows.append(effect.layer)
                modules.append(run.module)
                value = torch.zeros_like(effect.x)
            else:
                value = effect.q.new_zeros((*effect.q.shape[:2], effect.v.shape[2]))
        self.mixers = tuple(run.kinds)
        self.experts = tuple(modules)
        self.moe_layers = tuple(layer in follows for layer in range(len(self.mixers)))


class GraphRun:
    """One suspended run of a graph, to be resumed on one thread only.

    Attributes:
        kinds: of the mixers passed so far.
        module: that issued the last effect.
    """

    def __init__(
        self, model: GraphModel, token_ids: Tensor, positions: Tensor, sequences: Sequence[tuple[State, int]]
    ) -> None:
        self.sequences = sequences
        self.kinds: list[MixerKind] = []
        self.module: nn.Module | None = None
        self._model = model
        self._inputs = token_ids, positions
        self._greenlet: greenlet | None = None

    def resume(self, value: Tensor | None) -> Effect:
        """Run on from the last effect, whose result is ``value`` (None: from the start), to the next effect."""
        from greenlet import getcurrent, greenlet

        with torch.inference_mode():
            if self._greenlet is None:
                self._greenlet = greenlet(self._forward)
                self._greenlet.run_of_graph = self
                return self._greenlet.switch()
            if self._greenlet.dead:
                raise MoelightError("the run of the graph has ended")
            self._greenlet.parent = getcurrent()
            return self._greenlet.switch(value)

    def suspend(self, module: nn.Module, effect: Effect) -> Tensor:
        """Called within the run: hand ``effect`` of ``module`` out, return the value that the run is resumed with."""
        self.module = module
        return self._greenlet.parent.switch(effect)

    def _forward(self) -> Ended:
        token_ids, positions = self._inputs
        out = self._model._body(input_ids=token_ids[None], position_ids=positions[None], use_cache=False)
        return Ended(out.last_hidden_state[0])


def read_config(directory: Path) -> PretrainedConfig:
    """The text model's config of ``directory/config.json``; raises ConfigError."""
    transformers = _transformers()
    path = directory / "config.json"
    try:
        config = transformers.AutoConfig.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ConfigError(f"{path}: transformers {transformers.__version__} cannot read it: {first}") from None
    return config


def on_meta(config: PretrainedConfig) -> nn.Module:
    """The causal language model of ``config`` with parameters on the meta device and computed buffers on the CPU."""
    transformers = _transformers()
    try:
        with torch.device("meta"):
            module = transformers.AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    except ValueError as error:
        raise ConfigError(f"{config.model_type}: {str(error).splitlines()[0]}") from None
    fill_buffers(module)
    return module


def fill_buffers(module: nn.Module) -> None:
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
            setattr(part, name, torch.empty_like(getattr(part, name), device="cpu"))
        with torch.no_grad():
            model._init_weights(part)


def _transformers() -> Any:
    try:
        importlib.import_module("greenlet")
        return importlib.import_module("transformers")
    except ImportError as error:
        raise ConfigError(
            f"this family needs transformers and greenlet: pip install 'moelight[graph]' ({error})"
        ) from None


def _register() -> None:
    _transformers()
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS.register(NAME, _attend)
    ALL_EXPERTS_FUNCTIONS.register(NAME, _mix)


def _running() -> GraphRun:
    from greenlet import getcurrent

    return getcurrent().run_of_graph


def _given_hidden(*, inputs_embeds: Tensor, **_: object) -> Any:
    """In place of the body while the head is computed: what is given are the body's hidden states."""
    from transformers.modeling_outputs import MoeModelOutputWithPast

    return MoeModelOutputWithPast(last_hidden_state=inputs_embeds)


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    _mask: Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    s_aux: Tensor | None = None,
    softcap: float | None = None,
    **_: object,
) -> tuple[Tensor, None]:
    """transformers' attention function: query [1, Hq, T, D], key and value [1, Hkv, T, D or Dv] -> [1, T, Hq, Dv]."""
    run = _running()
    effect = Attend(
        layer=len(run.kinds),
        q=query[0].transpose(0, 1),
        k=key[0].transpose(0, 1),
        v=value[0].transpose(0, 1),
        scale=query.shape[-1] ** -0.5 if scaling is None else scaling,
        window=sliding_window,
        sinks=s_aux,
        softcap=softcap,
    )
    run.kinds.append(MixerKind.ATTENTION)
    return run.suspend(module, effect)[None], None


def _mix(module: nn.Module, hidden: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    run = _running()
    k = ids.shape[-1]
    x = hidden.reshape(-1, hidden.shape[-1])
    effect = Experts(len(run.kinds) - 1, x, ids.reshape(-1, k), weights.reshape(-1, k).float())
    return run.suspend(module, effect).view(hidden.shape)
