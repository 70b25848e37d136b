"""A module graph as the runtime's `Decoder`: phases of a micro-batch are the segments between effects of its run.

Legend: T rows of the micro-batch, H hidden, Hq query heads, Hkv key/value heads, D head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor

from moelight.core.errors import MoelightError, ScheduleError
from moelight.kernels.products import Workspace
from moelight.models.decoder import Rows, Watch
from moelight.models.graph.effects import Attend, Effect, Ended, Experts, Latents
from moelight.models.graph.experts import PageExpert
from moelight.models.graph.families import ExpertForm
from moelight.models.graph.model import GraphModel, GraphRun
from moelight.models.graph.state import State
from moelight.models.moe import Experts as Pages
from moelight.models.moe import ExpertWeights, Routed, moe_forward
from moelight.profiles.model import ModelProfile

Kind = TypeVar("Kind", bound=Effect)


@dataclass(slots=True)
class Running:
    """The run of one micro-batch between its phases.

    Attributes:
        effect: that the run waits for and no phase has taken.
        value: that the run is resumed with; None at its start, and while ``effect`` is not taken.
    """

    run: GraphRun
    effect: Effect | None = None
    value: Tensor | None = None

    def next(self) -> Effect:
        """The next effect, which remains until it is taken."""
        if self.effect is None:
            self.effect, self.value = self.run.resume(self.value), None
        return self.effect

    def take(self, kind: type[Kind], layer: int) -> Kind:
        """The next effect, which is ``kind`` of ``layer``."""
        found = self.next()
        if not isinstance(found, kind) or getattr(found, "layer", layer) != layer:
            raise ScheduleError(f"the graph is at {found!r:.80}, not at {kind.__name__} of layer {layer}")
        self.effect = None
        return found


class GraphDecoder:
    """`Decoder` over suspended runs of one graph. The mixture of a layer's experts is summed in ``hidden``, with which
    the run is resumed; a mixer with state of its own runs within the segment before it would attend.
    """

    predicts = False
    finite = None

    def __init__(self, model: ModelProfile, graph: GraphModel, space: Workspace) -> None:
        self.model, self.space, self.dtype = model, space, space.inputs.dtype
        self.sinks: dict[int, Tensor] = {}
        self._graph = graph
        self._states: dict[int, State] = {}  # of the running sequences, by place
        self._empty = State()
        forms = iter(graph.forms)
        self._forms: list[ExpertForm | None] = [next(forms) if moe else None for moe in graph.moe_layers]

    def begin(self, token_ids: Tensor, positions: Tensor, hidden: Tensor, rows: Sequence[Rows]) -> Running:  # noqa: ARG002
        """Nothing is computed yet: the run starts with the first layer."""
        return Running(self._graph.start(token_ids, positions, [(self._state(each), each.count) for each in rows]))

    def pre_attention(self, layer: int, hidden: Tensor, running: Running) -> Sequence[Tensor]:  # noqa: ARG002
        """Up to the attention of ``layer``: q [T, Hq, D], k and v [T, Hkv, D], or of latent attention absorbed queries
        [T, Hq, R], their rotary part and the row of the cache; through a mixer with state of its own, and nothing."""
        effect = running.next()
        if not isinstance(effect, Attend | Latents) or effect.layer != layer:
            return ()
        running.effect = None
        if isinstance(effect, Latents):
            return effect.q, effect.q_rope, effect.latent.unsqueeze(1)
        if effect.sinks is not None:
            self.sinks[layer] = effect.sinks
        return effect.q, effect.k, effect.v

    def split_heads(self, found: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor] | None:
        if not found:
            return None
        q, k, v = found
        return q, k, v

    def post_attention(
        self,
        layer: int,
        hidden: Tensor,
        attention: Tensor | None,
        experts: Pages,
        running: Running,
        watch: Watch | None = None,
        *,
        wide: bool = False,
    ) -> None:
        """A dense layer is computed with the segment that follows it."""
        if self._forms[layer] is None:
            self._attended(layer, attention, running)
            return
        routed = self.route(layer, hidden, attention, running)
        if watch is not None:
            watch(layer, routed)
        moe_forward(routed, experts, self.space, into=hidden, wide=wide)

    def route(self, layer: int, hidden: Tensor, attention: Tensor | None, running: Running) -> Routed:
        self._attended(layer, attention, running)
        effect, form = running.take(Experts, layer), self._forms[layer]
        assert form is not None
        running.value = hidden.zero_()
        ids, order = effect.ids.sort(dim=-1)
        weights = effect.weights.gather(-1, order)
        beyond = ids >= form.count  # experts without a page add nothing
        return Routed(
            x=effect.x.contiguous(),
            weights=weights.masked_fill(beyond, 0.0),
            ids=ids.clamp(max=form.count - 1).to(torch.int32),
        )

    def experts(self, layer: int, pages: Sequence[ExpertWeights | PageExpert | None]) -> Sequence[ExpertWeights | None]:
        if (form := self._forms[layer]) is None:
            return ()
        return [partial(page.forward, form) if isinstance(page, PageExpert) else page for page in pages]

    def predict_experts(self, layer: int, hidden: Tensor) -> tuple[Tensor, Tensor]:
        raise MoelightError(f"the graph of {self.model.model_type} predicts no experts (layer {layer}, {hidden.shape})")

    def end(self, hidden: Tensor, running: Running) -> None:
        hidden.copy_(running.take(Ended, -1).hidden)

    def logits(self, hidden: Tensor) -> Tensor:
        return self._graph.logits(hidden)

    def _attended(self, layer: int, attention: Tensor | None, running: Running) -> None:
        """Have the run resumed with ``attention`` [T, Hq, D], unless the mixer of ``layer`` has run already."""
        if attention is not None:
            if running.effect is not None:
                raise ScheduleError(f"attention of layer {layer}, whose mixer has state of its own")
            running.value = attention

    def _state(self, rows: Rows) -> State:
        if not self._graph.stateful:
            return self._empty
        if rows.start == 0 or rows.place not in self._states:
            self._states[rows.place] = State()
        return self._states[rows.place]
