"""A module graph as the runtime's `Decoder`: phases of a micro-batch are the segments between effects of its run.

Legend: T rows of the micro-batch, H hidden, Hq query heads, Hkv key/value heads, D head size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from operator import is_
from typing import TypeVar

import torch
from torch import Tensor

from moelight.core.errors import ScheduleError
from moelight.kernels import native
from moelight.kernels.activations import Activation
from moelight.kernels.layer import PagedCache, decode_layers
from moelight.kernels.products import Workspace
from moelight.kernels.ranks import Ranks
from moelight.models.decoder import Rows, Watch
from moelight.models.expert import ExpertFunction, LayerExperts
from moelight.models.graph.effects import Attend, Effect, Ended, Experts, Latents, LayersPassed, MixerPassed
from moelight.models.graph.experts import forward, recognised
from moelight.models.graph.families import ExpertForm
from moelight.models.graph.layers import Bound, usual_layers
from moelight.models.graph.model import GraphModel, GraphRun, binding
from moelight.models.graph.state import State
from moelight.models.moe import Experts as Pages
from moelight.models.moe import Routed, moe_forward
from moelight.models.pages import PagedExperts
from moelight.profiles.model import ModelProfile

Kind = TypeVar("Kind", bound=Effect)


@dataclass(slots=True)
class Running:
    """The run of one micro-batch between its phases.

    Attributes:
        effect: that the run waits for and no phase has taken.
        value: that the run is resumed with; None at its start, and while ``effect`` is not taken.
        routed: the input [T, H] of the last layer's experts.
        start: begins the run anew.
        passed: layers that the run passes by, which are computed by two calls each.
    """

    run: GraphRun
    start: Callable[..., GraphRun]
    effect: Effect | None = None
    value: Tensor | None = None
    routed: Tensor | None = None
    passed: LayersPassed | None = None

    def next(self) -> Effect:
        """The next effect, which remains until it is taken."""
        if self.effect is None:
            self.effect, self.value = self.run.resume(self.value), None
        return self.effect

    def take(self, kind: type[Kind], layer: int) -> Kind:
        """The next effect, which is ``kind`` of ``layer``."""
        effect = self.next()
        if not isinstance(effect, kind) or getattr(effect, "layer", layer) != layer:
            raise ScheduleError(f"the graph is at {effect!r:.80}, not at {kind.__name__} of layer {layer}")
        self.effect = None
        return effect


class GraphDecoder:
    """`Decoder` over suspended runs of one graph. The mixture of a layer's experts is summed in ``hidden``, with which
    the run is resumed; a mixer with state of its own runs within the segment before it would attend.

    A layer of a dense model is one expert, which every token is routed to: its page holds all matrices from the mixer
    of the layer to the next one, so after attention the run goes on as far as the queries of the next layer.
    """

    finite = None
    kinds: Sequence[tuple[object, ...]] = ()

    def __init__(
        self,
        model: ModelProfile,
        graph: GraphModel,
        paged: PagedExperts,
        space: Workspace,
        *,
        ranks: Ranks | None = None,
    ) -> None:
        self.ranks = ranks
        self.model, self.paged, self.space, self.dtype = model, paged, space, space.inputs.dtype
        self.sinks: dict[int, Tensor] = {}
        self._graph = graph
        self._states: dict[int, State] = {}  # of the running sequences, by place
        self._empty = State()
        self.predicts = graph.predicts
        self._usual = usual_layers(graph) if model.dense else []
        self.whole_layers = bool(self._usual)
        self._bound: tuple[Sequence[LayerExperts], Sequence[Bound]] = (), ()
        forms = iter(graph.forms)
        self._forms: list[ExpertForm | None] = [next(forms) if moe else None for moe in graph.moe_layers]
        self._functions = [
            None if form is None else ExpertFunction(recognised(form), partial(forward, form), form.finish)
            for form in self._forms
        ]
        self.activations: Sequence[Activation | None] = [
            None if function is None or function.finish is not None else function.activation
            for function in self._functions
        ]

    def begin(self, token_ids: Tensor, positions: Tensor, hidden: Tensor, rows: Sequence[Rows]) -> Running:  # noqa: ARG002
        """Prepare the run without computing: it starts with the first layer."""
        lengths = [row.length for row in rows]
        states = [(self._state(row), row.count) for row in rows]
        start = partial(self._graph.start, token_ids, positions, states, lengths)
        return Running(start(), start)

    def pre_attention(self, layer: int, hidden: Tensor, running: Running) -> Sequence[Tensor]:
        """Up to the attention of ``layer``: q [T, Hq, D], k and v [T, Hkv, D], or of latent attention absorbed queries
        [T, Hq, R], their rotary part and the row of the cache; through a mixer with state of its own, and nothing."""
        if running.passed is not None:
            (cos, sin), like = running.passed.angles[layer], self._usual[layer].attention.like
            heads = self._bound[1][layer][0].before_attention(hidden, cos[0], sin[0])
            return heads.split((like.q.shape[1], like.k.shape[1], like.k.shape[1]), dim=1)
        effect = running.next()
        if not isinstance(effect, Attend | Latents | MixerPassed) or effect.layer != layer:
            return ()
        running.effect = None
        if isinstance(effect, MixerPassed):
            return ()
        if isinstance(effect, Latents):
            return effect.q, effect.q_rope, effect.latent.unsqueeze(1)
        if effect.sinks is not None:
            self.sinks[layer] = effect.sinks
        return effect.q, effect.k, effect.v

    def split_heads(self, projected: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor] | None:
        if not projected:
            return None
        q, k, v = projected
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
        """A dense layer of a model with experts is computed with the segment that follows it."""
        if running.passed is not None:
            assert attention is not None, "layers that are passed by attend"
            native_layer, block = self._bound[1][layer]
            native_layer.after_attention(hidden, attention.flatten(1), block)
            return
        if self._forms[layer] is None and not self.model.dense:
            self._attended(layer, attention, running)
            return
        routed = self.route(layer, hidden, attention, running)
        if watch is not None:
            watch(layer, routed)
        routed = routed.on_rank(self.ranks, self.model.experts.num_experts)
        moe_forward(routed, experts, self.space, into=hidden, wide=wide)

    def decode_layers(
        self,
        layers: range,
        hidden: Tensor,
        caches: Sequence[PagedCache],
        block_tables: Sequence[Tensor],
        seq_lens: Tensor,
        experts: Sequence[LayerExperts],
        running: Running,
    ) -> bool:
        if (effect := self._pass_by(layers, hidden, experts, running)) is None:
            return False
        angles = {id(cos): (cos, sin) for cos, sin in effect.angles}
        turns = [list(angles).index(id(cos)) for cos, _ in effect.angles]
        first = 0
        for _, alike in groupby(block_tables, key=id):
            run = slice(first, first := first + len(list(alike)))
            bound = self._bound[1][run]
            decode_layers(
                [layer for layer, _ in bound],
                hidden,
                [(cos[0], sin[0]) for cos, sin in angles.values()],
                caches[run],
                block_tables[run.start],
                seq_lens,
                [block for _, block in bound],
                turns=turns[run],
            )
        return True

    def bind_layers(self, layers: range, hidden: Tensor, experts: Sequence[LayerExperts], running: Running) -> None:
        running.passed = self._pass_by(layers, hidden, experts, running)

    def _pass_by(
        self, layers: range, hidden: Tensor, experts: Sequence[LayerExperts], running: Running
    ) -> LayersPassed | None:
        """Have the run pass ``layers`` by, whose input is in ``hidden`` now, and is resumed with what that holds then;
        None if they are not all layers, or have no such calls: the run is at its start."""
        if len(layers) < len(self._usual) or not self._bind(experts):
            return None
        running.run = running.start(together=True)
        effect: object = running.next()
        if not isinstance(effect, LayersPassed) or effect.hidden is None:
            running.run.close()
            running.run, running.effect = running.start(), None
            return None
        hidden.copy_(effect.hidden[0])
        running.effect, running.value = None, hidden
        return effect

    def _bind(self, experts: Sequence[LayerExperts]) -> Sequence[Bound]:
        """All layers with the matrices of ``experts``, bound once for the same pages; none if some are elsewhere, or
        have no such call."""
        pages, bound = self._bound
        if len(pages) == len(experts) and all(map(is_, pages, experts)):
            return bound
        layers: list[Bound] = []
        installs = [page.install for page in experts if page.install is not None]
        if len(installs) == len(experts):
            for install in installs:
                install()
            calls = [layer.bound(self.dtype) for layer in self._usual]
            layers = [call for call in calls if call is not None]
        self._bound = experts, layers if len(layers) == len(experts) else ()
        return self._bound[1]

    def route(self, layer: int, hidden: Tensor, attention: Tensor | None, running: Running) -> Routed:
        self._attended(layer, attention, running)
        if self.model.dense:
            return self._to_page(layer, hidden, running)
        effect = running.take(Experts, layer)
        running.value, running.routed = _zeroed(hidden), effect.x
        return self._routed(layer, effect)

    def _routed(self, layer: int, effect: Experts) -> Routed:
        form = self._forms[layer]
        assert form is not None
        ids, order = effect.ids.sort(dim=-1)
        weights = effect.weights.gather(-1, order)
        beyond = ids >= form.count  # experts without a page add nothing
        return Routed(
            x=effect.x.contiguous(),
            weights=weights.masked_fill(beyond, 0.0),
            ids=ids.clamp(max=form.count - 1).to(torch.int32),
        )

    def _to_page(self, layer: int, hidden: Tensor, running: Running) -> Routed:
        """All rows of the micro-batch to the page of dense ``layer``."""

        def resume(experts: LayerExperts) -> None:
            assert experts.install is not None, f"the page of layer {layer} is not there"
            experts.install()
            running.next()

        if running.effect is not None:
            raise ScheduleError(f"the run is past layer {layer}, at {running.effect!r:.80}")
        once = (hidden.shape[0], 1)
        weights, ids = hidden.new_ones(once, dtype=torch.float32), hidden.new_zeros(once, dtype=torch.int32)
        return Routed(x=hidden, weights=weights, ids=ids, resume=resume)

    def experts(self, layer: int, pages: Sequence[Tensor | None]) -> LayerExperts:
        if self.model.dense:
            (page,) = pages
            if page is None:
                return LayerExperts((None,))
            matrices = self.paged.matrices(layer, page, self.dtype)
            return LayerExperts((None,), install=binding(self._graph.module, matrices))
        if (function := self._functions[layer]) is None:
            return LayerExperts(())
        return LayerExperts.on_rank(self.paged.of_layer(layer, pages), function, self.ranks)

    def sum_experts(self, hidden: Tensor, running: Running) -> None:
        """Sum the mixtures of the experts that ranks have, with which the run goes on."""
        assert self.ranks is not None and running.value is not None, "experts are summed between two segments"
        self.ranks.sum_(hidden)

    def predict_experts(self, layer: int, hidden: Tensor, running: Running) -> tuple[Tensor, Tensor]:  # noqa: ARG002
        """By the block of ``layer`` on the input of the last layer's experts: what the graph adds to it is within."""
        assert running.routed is not None, "experts of the layer before have been routed to"
        effect = self._graph.route(sum(self._graph.moe_layers[:layer]), running.routed)
        routed = self._routed(layer, effect)
        return routed.weights, routed.ids

    def end(self, hidden: Tensor, running: Running) -> None:
        hidden.copy_(running.take(Ended, -1).hidden)

    def final_hidden(self, hidden: Tensor) -> Tensor:
        """``hidden``: the family's decoder ends with its final norm."""
        return hidden

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
        if rows.start == 0 or rows.slot not in self._states:
            self._states[rows.slot] = State()
        return self._states[rows.slot]


def _zeroed(hidden: Tensor) -> Tensor:
    """``hidden`` [T, H], zeros from now on. On a CPU by one thread: torch shares a fill among its own threads, which
    compete with those of the kernels and take longer to wake than to fill."""
    if not native.on_cpu(hidden) or not hidden.is_contiguous():
        return hidden.zero_()
    hidden.view(torch.uint8).numpy().fill(0)
    return hidden
