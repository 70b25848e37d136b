"""Seconds of each layer phase of a micro-batch: the ledger's bytes and flops over a machine's speeds. Token counts may
be numbers or arrays. Does not depend on schedules."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from moelight.core.dtypes import DType
from moelight.core.policy import INT8
from moelight.hrm import costs
from moelight.hrm.machine_model import Speeds, Unit
from moelight.profiles.model import ModelProfile

# Bytes touched by norms, rotations, residuals, routing and the gathering of rows, for each number of the hidden state:
# a phase reads and writes the number in float32 a few times, and the expert phase once more for every routed copy.
TOUCHED_BEFORE = 40
TOUCHED_AFTER = 40
TOUCHED_PER_EXPERT = 16
# Kernels that a phase of one micro-batch launches on a GPU, counted by tests/engine/test_launches.py: norm, product,
# rotation; append, attention in one form; product, norm, router, choice; sort, map, two products, sum; rows, norm,
# product, floats.
KERNELS = {"before": 3, "attention": 2, "after": 4, "experts": 5, "head": 3}


@dataclass(frozen=True, kw_only=True, slots=True)
class CostModel:
    """Costs of one model on one machine. ``dtype``: of computation and activations; ``page_dtype``: of the expert
    weights; ``pinned_pages``: expert pages in host memory are page-locked and cross the link without a staging copy."""

    model: ModelProfile
    speeds: Speeds
    dtype: DType
    kv_dtype: DType
    page_dtype: DType
    attention_device: str
    ffn_device: str
    activations: str = "auto"
    pinned_pages: bool = False

    @property
    def discrete(self) -> bool:
        """True if a GPU takes part."""
        return self.ffn_device != "cpu" or self.attention_device == "gpu"

    @property
    def expert_unit(self) -> Unit:
        """The unit that runs norms, projections, routers and the head."""
        gpu = self.speeds.gpu
        return gpu if self.discrete and gpu is not None else self.speeds.cpu

    def before_s(self, elements: costs.LayerElements, tokens: Any) -> Any:
        """Seconds of the norm, projections and rotations of ``tokens``."""
        return self._phase_s("before", tokens, elements.before_attention, TOUCHED_BEFORE)

    def after_s(self, elements: costs.LayerElements, tokens: Any, *, moe: bool) -> Any:
        """Seconds of output projection, norm, router, shared experts or dense layer, and row gathering, unless it is
        measured with the experts."""
        copies = self.model.router.top_k if moe and self.expert_unit.experts is None else 0
        phase_s = self._phase_s("after", tokens, elements.after_attention, TOUCHED_AFTER + copies * TOUCHED_PER_EXPERT)
        return phase_s + sum(self._exchange_s(tokens * size) for size in costs.gathered_bytes(self.model, self.dtype))

    def sum_s(self, tokens: Any) -> Any:
        """Seconds of the sum over ranks of what the experts of a layer have computed for ``tokens``; 0 of one rank."""
        return self._exchange_s(tokens * costs.summed_bytes(self.model, self.dtype), sums=True)

    def exchanges_s(self, tokens: Any, rows: Any) -> Any:
        """Seconds of all exchanges with other ranks for ``tokens``, of which ``rows`` get logits: sums, and the gathers
        that are a part of phases."""
        gathered = sum(self._exchange_s(tokens * size) for size in costs.gathered_bytes(self.model, self.dtype))
        sums, gathers = self.model.num_moe_layers * self.sum_s(tokens), self.model.num_layers * gathered
        return sums + gathers + self._logits_s(rows)

    def _logits_s(self, rows: Any) -> Any:
        """Seconds in which ranks gather the parts of the logits of ``rows`` tokens."""
        if costs.vocabulary_ranks(self.model) == 1:
            return 0.0
        return self._exchange_s(rows * 4 * self.model.vocab_size)

    def _exchange_s(self, size: Any, *, sums: bool = False) -> Any:
        """Seconds in which all ranks get the ``size`` bytes of which each has a part, or (``sums``) a term: those of a
        ring, over which a term passes twice."""
        ranks, speeds = self.model.ranks, self.speeds
        moved = size * ((2.0 if sums else 1.0) * (ranks - 1) / ranks)
        return np.where(np.asarray(size) > 0, speeds.exchange_s + moved / speeds.exchange, 0.0) if ranks > 1 else 0.0

    def _phase_s(self, phase: str, tokens: Any, elements: int, touched: int) -> Any:
        unit, touch_s = self.expert_unit, self.expert_unit.touch_s
        product_s = self._dense_s(tokens, elements, head=False)
        return product_s + touch_s(tokens * self.model.hidden_size * touched) + self._overhead_s(unit, KERNELS[phase])

    def _dense_s(self, rows: Any, elements: int, *, head: bool) -> Any:
        """Seconds of ``rows`` times matrices outside the experts (the ``head`` or others), kept as stored or not."""
        if not costs.keeps_stored(self.model, self.dtype, discrete=self.discrete):
            return self.expert_unit.product_s(rows, elements, self.dtype)
        dtype = costs.kept_dtype(self.model, self.dtype, head=head)
        return self.expert_unit.product_s(rows, elements, dtype, faster=self._faster(self.expert_unit))

    def _faster(self, unit: Unit) -> float:
        return unit.int8 if self.activations == INT8 else 1.0

    def experts_s(self, unit: Unit, tokens: Any, share: Any = 1.0) -> Any:
        """Seconds of a ``share`` of the distinct experts of one layer for ``tokens`` tokens; each page is read once."""
        met = costs.distinct_experts(self.model, tokens)
        rows = tokens * self.model.router.top_k / self.model.ranks / np.maximum(met, 1e-9)
        launches = 0 if unit.experts is not None else KERNELS["experts"]  # else measured with the experts
        return share * (met * self.expert_s(unit, rows) + launches * unit.launch_s)

    def expert_s(self, unit: Unit, rows: Any) -> Any:
        """Seconds of one expert on ``unit`` over ``rows`` tokens, beside others of its launch. A dense layer runs as
        other products do."""
        model = self.model
        stored = model.stored if unit is self.speeds.gpu else None
        if stored is not None and self.page_dtype.bits < 16:
            rows = np.where(np.asarray(rows) > 0, rows + np.maximum(rows, costs.UNPACK_ROWS), 0.0)
        size, dtype = costs.page_elements(model), self.page_dtype
        seconds = unit.product_s(rows, size, dtype, experts=not model.dense, faster=self._faster(unit))
        slow = model.experts.by_torch or (stored is not None and (stored.mixed or not unit.unpacks))
        return seconds * costs.TORCH_EXPERTS if slow else seconds

    def rounding_s(self, tokens: Any) -> Any:
        """Seconds in which the CPU rounds the inputs of its experts to the format of the pages, in mixed precision."""
        if not self.dtype.pages:
            return 0.0
        return self.speeds.cpu.touch_s(2 * tokens * costs.residual_bytes(self.model, self.dtype, 1))

    def decode_attention_s(self, unit: Unit, tokens: Any, context: Any, kind: costs.AttentionKind) -> Any:
        """Seconds of the attention of ``tokens`` sequences over ``context`` cached tokens each in an average layer of
        ``kind``."""
        flops = costs.attention_flops(kind.spec, tokens * kind.seen_on_average(context))
        seconds = unit.attention_s(self.kv_read_bytes(tokens, context, kind), flops, context)
        return seconds + self._overhead_s(unit, KERNELS["attention"])

    def prefill_attention_s(self, unit: Unit, tokens: Any, prompt_len: Any, kind: costs.AttentionKind) -> Any:
        """Seconds of the attention of ``tokens`` prompt tokens over themselves in an average layer of ``kind``
        (equation of A_g = 1)."""
        flops = costs.attention_flops(kind.spec, tokens * kind.seen_on_average((prompt_len + 1) / 2))
        return unit.prefill_s(flops, prompt_len) + self._overhead_s(unit, KERNELS["attention"])

    def states_s(
        self, tokens: Any, context: Any, prompt_tokens: Any, prompt_len: Any, states: tuple[int, int] | None = None
    ) -> Any:
        """Seconds of ``states`` beside the paged cache (None: of all layers, `costs.state_bytes`) on the unit of the
        projections: each of ``tokens`` sequences reads and writes its own, and reads what it keeps of ``context``
        tokens; a prompt's token takes 4 flops, an outer product and a query, for each number that it sees."""
        per_sequence, of_token = costs.state_bytes(self.model) if states is None else states
        if not (per_sequence or of_token):
            return 0.0
        unit = self.expert_unit
        seen = (per_sequence + of_token * (prompt_len + 1) / 2) / self.dtype.itemsize
        touched = unit.touch_s(tokens * (2 * per_sequence + of_token * context))
        return touched + np.where(prompt_tokens > 0, unit.prefill_s(4.0 * prompt_tokens * seen, prompt_len), 0.0)

    def head_s(self, rows: Any) -> Any:
        """Seconds of the logits of ``rows`` tokens, of which a rank computes its part of the vocabulary."""
        parts = costs.vocabulary_ranks(self.model)
        product = self._dense_s(rows, costs.head_elements(self.model) // parts, head=True)
        return product + self._overhead_s(self.expert_unit, KERNELS["head"]) + self._logits_s(rows)

    def kv_read_bytes(self, tokens: Any, context: Any, kind: costs.AttentionKind) -> Any:
        """Bytes of the KV cache that the attention of ``tokens`` sequences reads in an average layer of ``kind``."""
        return tokens * kind.seen_on_average(context) * costs.kv_row_bytes(kind.spec, self.kv_dtype)

    def kv_crossing_bytes(self, layer: int) -> int:
        """Bytes of the new key and value of one token of ``layer`` where they cross the link."""
        dtype = costs.kv_crossing_dtype(self.attention_device, self.dtype, self.kv_dtype)
        return costs.kv_layer_bytes(self.model, dtype, layer)

    def page_bytes(self) -> int:
        """Bytes of a page that is transferred, on average."""
        return costs.moved_page_bytes(self.model, self.page_dtype)

    def repacked_bytes(self) -> int:
        """Bytes of such a page that are turned into packed integers when it is read from disk."""
        return costs.repacked_page_bytes(self.model, self.page_dtype, self.ffn_device, discrete=self.discrete)

    def repacking_s(self) -> Any:
        """Seconds of the CPU in which such a page is turned."""
        return self.speeds.cpu.touch_s(costs.REPACKING_PASSES * self.repacked_bytes())

    def up_s(self, size: Any, transfers: Any = 1.0) -> Any:
        """Seconds to move ``size`` bytes from host to device in ``transfers`` transfers."""
        return size / self.speeds.h2d + transfers * self.speeds.transfer_s

    def down_s(self, size: Any, transfers: Any = 1.0) -> Any:
        return size / self.speeds.d2h + transfers * self.speeds.transfer_s

    @staticmethod
    def _overhead_s(unit: Unit, kernels: int) -> float:
        return unit.task_s + kernels * unit.launch_s
