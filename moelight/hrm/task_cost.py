"""The cost of one task on a machine; ``scheduler.simulate`` simulates whole schedules of tasks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from moelight.core.schedule import CHOSEN_KINDS, Lane, Task, TaskKind
from moelight.hrm import costs
from moelight.hrm.cost_model import CostModel
from moelight.hrm.placement import Placement


@dataclass(frozen=True, kw_only=True, slots=True)
class TaskCost:
    """``seconds`` of a task alone on the machine, and the bytes of host memory that it touches."""

    seconds: float
    dram_bytes: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class MicroBatchLoad:
    """The tokens of one micro-batch: sequences that decode at ``context`` tokens each, and ``prompt_tokens`` of prompts
    of ``prompt_len`` each; ``rows`` of them get a new token."""

    decode_tokens: float = 0.0
    context: float = 0.0
    prompt_tokens: float = 0.0
    prompt_len: float = 1.0
    rows: float = 0.0

    @property
    def tokens(self) -> float:
        return self.decode_tokens + self.prompt_tokens


class PassCosts:
    """The cost of every task of a pass with micro-batches ``loads``. ``host_kv``: share of the cache in host memory.
    With ``routed_only`` each transfer has the cost of its expected share."""

    def __init__(
        self,
        cost_model: CostModel,
        placement: Placement,
        loads: Sequence[MicroBatchLoad],
        *,
        host_kv: float = 1.0,
        routed_only: bool = False,
    ) -> None:
        self._cost_model, self._loads, self._host_kv, self._routed_only = cost_model, loads, host_kv, routed_only
        self._elements, self._experts = costs.layer_elements(cost_model.model), cost_model.model.experts.num_experts
        self._attending, self._states = costs.layer_attention(cost_model.model), costs.layer_states(cost_model.model)
        self._computed, self._streamed = (
            Counter(page.layer for page in pages) for pages in (placement.computed, placement.streamed)
        )
        names = ("decode_tokens", "prompt_tokens", "rows")
        self._all = MicroBatchLoad(**{name: sum(getattr(load, name) for load in loads) for name in names})
        met = float(costs.distinct_experts(cost_model.model, self._all.tokens))
        self._moved_share = met / self._experts if routed_only else 1.0
        # The key is all that a cost depends on. Micro-batches of a pass have few different loads.
        self._known: dict[tuple[object, ...], TaskCost] = {}

    def __call__(self, task: Task) -> TaskCost:
        load = self._all if task.serves_all else self._loads[task.micro_batch]
        key = (task.kind, task.lane, task.layer, task.serves_all, load, task.bytes, task.experts, task.layers)
        cost = self._known.get(key)
        if cost is None:
            cost = self._known[key] = self._priced(task, load)
        return cost

    def _priced(self, task: Task, load: MicroBatchLoad) -> TaskCost:
        cost_model, tokens, touched = self._cost_model, load.tokens, 0.0
        resident_share = 1.0 - self._streamed[task.layer] / self._experts
        residual = tokens * costs.residual_bytes(cost_model.model, cost_model.dtype, 1)
        seconds: Any = 0.0
        match task.kind:
            case TaskKind.EMBED | TaskKind.PREDICT_EXPERTS:
                seconds = cost_model.expert_unit.touch_s(2 * residual)
            case TaskKind.COMBINE:
                seconds = cost_model.expert_unit.touch_s(3 * residual)
            case TaskKind.PRE_ATTENTION:
                seconds = self._before_s(task, load)
            case TaskKind.ATTENTION | TaskKind.CPU_ATTENTION:
                return self._attention(task, load)
            case TaskKind.LAYERS:
                layer_costs = [self._layer(replace(task, layer=layer), load) for layer in task.layers or ()]
                seconds, touched = sum(one.seconds for one in layer_costs), sum(one.dram_bytes for one in layer_costs)
            case TaskKind.STORE_KV:  # new keys and values into the cache in host memory
                touched = 2.0 * self._host_kv * tokens * cost_model.kv_crossing_bytes(task.layer)
                seconds = cost_model.speeds.cpu.touch_s(touched)
            case TaskKind.POST_ATTENTION | TaskKind.ROUTE:
                seconds = self._after_s(task, tokens)
            case TaskKind.EXPERTS:  # without a link, resident experts run before routed pages are read
                early = self._routed_only and not cost_model.discrete and not task.serves_all
                seconds = self._experts_s(task, tokens) * (1.0 - resident_share * early)
            case TaskKind.RESIDENT_EXPERTS:
                seconds = self._experts_s(task, tokens) * resident_share
            case TaskKind.CPU_EXPERTS:
                share = 1.0 if cost_model.ffn_device == "cpu" else self._computed[task.layer] / self._experts
                met = share * float(costs.distinct_experts(cost_model.model, tokens))
                touched, cpu = met * cost_model.page_bytes(), cost_model.speeds.cpu
                seconds = cost_model.experts_s(cpu, tokens, share) + cpu.task_s + cost_model.rounding_s(tokens)
            case TaskKind.SAMPLE:
                seconds = cost_model.head_s(load.rows)
            case _:
                return self._transfer(task)
        return TaskCost(seconds=float(seconds), dram_bytes=touched)

    def _layer(self, task: Task, load: MicroBatchLoad) -> TaskCost:
        """All phases of one layer."""
        attention = self._attention(task, load)
        seconds = self._before_s(task, load) + attention.seconds + self._after_s(task, load.tokens)
        return TaskCost(seconds=seconds, dram_bytes=attention.dram_bytes)

    def _before_s(self, task: Task, load: MicroBatchLoad) -> float:
        cost_model = self._cost_model
        arguments = load.decode_tokens, load.context, load.prompt_tokens, load.prompt_len, self._states[task.layer]
        return float(cost_model.before_s(self._elements[task.layer], load.tokens) + cost_model.states_s(*arguments))

    def _after_s(self, task: Task, tokens: float) -> float:
        """Everything after attention, up to the experts where these are a task of their own."""
        cost_model, layer = self._cost_model, task.layer
        seconds = cost_model.after_s(self._elements[layer], tokens, moe=cost_model.model.moe_layers[layer])
        return float(seconds) + (0.0 if task.kind is TaskKind.ROUTE else self._experts_s(task, tokens))

    def _attention(self, task: Task, load: MicroBatchLoad) -> TaskCost:
        """Decoding rows read the cache; prompts attend over themselves on the compute unit."""
        cost_model, kind = self._cost_model, self._attending[task.layer]
        unit = cost_model.speeds.cpu if task.lane is Lane.CPU else cost_model.expert_unit
        seconds = read = 0.0
        if kind is not None and load.decode_tokens:
            seconds += float(cost_model.decode_attention_s(unit, load.decode_tokens, load.context, kind))
            read = float(cost_model.kv_read_bytes(load.decode_tokens, load.context, kind))
        if kind is not None and load.prompt_tokens:
            seconds += float(cost_model.prefill_attention_s(unit, load.prompt_tokens, load.prompt_len, kind))
        return TaskCost(seconds=seconds, dram_bytes=read if task.lane is Lane.CPU else 0.0)

    def _experts_s(self, task: Task, tokens: float) -> float:
        cost_model = self._cost_model
        if not cost_model.model.moe_layers[task.layer] or (cost_model.discrete and cost_model.ffn_device == "cpu"):
            return 0.0
        some = self._experts - self._computed[task.layer] if task.experts is None else len(task.experts)
        share = some / self._experts
        return float(cost_model.experts_s(cost_model.expert_unit, tokens, share))

    def _transfer(self, task: Task) -> TaskCost:
        """A staging copy writes and reads host memory, and so does what turns a page that was read; every other
        transfer touches it once; a page that is already prefetched costs nothing."""
        speeds, touched = self._cost_model.speeds, float(task.bytes)
        if task.kind is TaskKind.PREFETCHED_PAGE:
            return TaskCost(seconds=0.0)
        if task.lane is Lane.DISK:
            seconds = task.bytes / speeds.disk if speeds.disk else float("inf")
            turned = self._cost_model.repacked_bytes() / max(self._cost_model.page_bytes(), 1)
            touched += costs.REPACKING_PASSES * turned * task.bytes
        elif task.lane is Lane.STAGE:
            seconds, touched = task.bytes / speeds.stage, 2 * task.bytes
        elif task.lane is Lane.EXCHANGE:
            seconds, touched = speeds.exchange_s + task.bytes / speeds.exchange, 0.0
        else:
            rate = self._cost_model.up_s if task.lane is Lane.H2D else self._cost_model.down_s
            seconds = float(rate(task.bytes))
        share = self._moved_share if task.kind in CHOSEN_KINDS else 1.0
        return TaskCost(seconds=share * seconds, dram_bytes=share * touched)
