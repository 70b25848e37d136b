"""The cost of one task on a machine; ``scheduler.simulate`` simulates whole schedules of tasks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

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


def pass_costs(
    cost_model: CostModel,
    placement: Placement,
    loads: Sequence[MicroBatchLoad],
    *,
    host_kv: float = 1.0,
    routed_only: bool = False,
) -> Callable[[Task], TaskCost]:
    """A function that returns the cost of every task of a pass with micro-batches ``loads``. ``host_kv``: share of the
    cache in host memory. With ``routed_only`` each transfer has the cost of its expected share."""
    table = _Table(cost_model, placement, loads, host_kv)
    tokens = sum(load.tokens for load in loads)
    met = float(costs.distinct_experts(cost_model.model, tokens))
    share = met / cost_model.model.experts.num_experts if routed_only else 1.0

    def here(task: Task) -> float:
        """The share of a micro-batch's experts that ran before the offloaded pages arrived."""
        return table.resident_share(task) if routed_only and not cost_model.discrete and task.micro_batch >= 0 else 0.0

    by_kind: Mapping[TaskKind, Callable[[Task], TaskCost]] = {
        TaskKind.EMBED: lambda task: _alone(cost_model.expert_unit.touch_s(2 * table.residual_bytes(task))),
        TaskKind.PRE_ATTENTION: lambda task: _alone(cost_model.before_s(table.elements(task), table.tokens(task))),
        TaskKind.ATTENTION: table.attention,
        TaskKind.CPU_ATTENTION: table.attention,
        TaskKind.STORE_KV: table.stored,
        TaskKind.POST_ATTENTION: lambda task: _alone(table.after_s(task) + table.experts_s(task)),
        TaskKind.ROUTE: lambda task: _alone(table.after_s(task)),
        TaskKind.EXPERTS: lambda task: _alone(table.experts_s(task) * (1.0 - here(task))),
        TaskKind.RESIDENT_EXPERTS: lambda task: _alone(table.experts_s(task) * table.resident_share(task)),
        TaskKind.PREDICT_EXPERTS: lambda task: _alone(cost_model.expert_unit.touch_s(2 * table.residual_bytes(task))),
        TaskKind.CPU_EXPERTS: table.cpu_experts,
        TaskKind.COMBINE: lambda task: _alone(cost_model.expert_unit.touch_s(3 * table.residual_bytes(task))),
        TaskKind.SAMPLE: lambda task: _alone(cost_model.head_s(table.load(task).rows)),
        TaskKind.PREFETCHED_PAGE: lambda _: TaskCost(seconds=0.0),
    }

    def priced(task: Task) -> TaskCost:
        if task.kind in by_kind:
            return by_kind[task.kind](task)
        found = _moved(cost_model, task)
        if task.kind not in CHOSEN_KINDS:
            return found
        return TaskCost(seconds=share * found.seconds, dram_bytes=share * found.dram_bytes)

    # The key is all that a price depends on. Micro-batches of a pass have few different loads.
    known: dict[tuple[TaskKind, Lane, int, bool, MicroBatchLoad, int], TaskCost] = {}

    def cost(task: Task) -> TaskCost:
        key = (task.kind, task.lane, task.layer, task.micro_batch < 0, table.load(task), task.bytes)
        found = known.get(key)
        if found is None:
            found = known[key] = priced(task)
        return found

    return cost


class _Table:
    def __init__(
        self, cost_model: CostModel, placement: Placement, loads: Sequence[MicroBatchLoad], host_kv: float
    ) -> None:
        self._cost_model, self._loads, self._host_kv = cost_model, loads, host_kv
        self._elements = costs.layer_elements(cost_model.model)
        on_cpu = Counter(page.layer for page in placement.computed)
        self._streamed = Counter(page.layer for page in placement.streamed)
        self._computed = {layer: count / cost_model.model.experts.num_experts for layer, count in on_cpu.items()}
        together = [sum(getattr(load, name) for load in loads) for name in ("decode_tokens", "prompt_tokens", "rows")]
        self._all = MicroBatchLoad(decode_tokens=together[0], prompt_tokens=together[1], rows=together[2])

    def load(self, task: Task) -> MicroBatchLoad:
        """The load of the task's micro-batch, or of the whole pass."""
        return self._loads[task.micro_batch] if task.micro_batch >= 0 else self._all

    def resident_share(self, task: Task) -> float:
        """The share of a layer's experts that are not streamed."""
        return 1.0 - self._streamed.get(task.layer, 0) / self._cost_model.model.experts.num_experts

    def tokens(self, task: Task) -> float:
        return self.load(task).tokens

    def residual_bytes(self, task: Task) -> float:
        return self.tokens(task) * costs.residual_bytes(self._cost_model.model, self._cost_model.dtype, 1)

    def elements(self, task: Task) -> costs.LayerElements:
        return self._elements[task.layer]

    def attention(self, task: Task) -> TaskCost:
        """Decoding rows read the cache; prompts attend over themselves on the compute unit."""
        cost_model, load = self._cost_model, self.load(task)
        unit = cost_model.speeds.cpu if task.lane is Lane.CPU else cost_model.expert_unit
        seconds = read = 0.0
        if load.decode_tokens:
            seconds += float(cost_model.decode_attention_s(unit, load.decode_tokens, load.context))
            read = float(cost_model.kv_read_bytes(load.decode_tokens, load.context))
        if load.prompt_tokens:
            seconds += float(cost_model.prefill_attention_s(unit, load.prompt_tokens, load.prompt_len))
        return TaskCost(seconds=seconds, dram_bytes=read if task.lane is Lane.CPU else 0.0)

    def stored(self, task: Task) -> TaskCost:
        """The cost of writing new keys and values into the cache in host memory."""
        size = (
            2.0 * self._host_kv * self.tokens(task) * costs.kv_bytes(self._cost_model.model, self._cost_model.dtype, 1)
        )
        return TaskCost(seconds=float(self._cost_model.speeds.cpu.touch_s(size)), dram_bytes=size)

    def after_s(self, task: Task) -> float:
        moe = self._cost_model.model.moe_layers[task.layer]
        return float(self._cost_model.after_s(self.elements(task), self.tokens(task), moe=moe))

    def experts_s(self, task: Task) -> float:
        cost_model = self._cost_model
        if not cost_model.model.moe_layers[task.layer] or (cost_model.discrete and cost_model.ffn_device == "cpu"):
            return 0.0
        return float(
            cost_model.experts_s(cost_model.expert_unit, self.tokens(task), 1.0 - self._computed.get(task.layer, 0.0))
        )

    def cpu_experts(self, task: Task) -> TaskCost:
        cost_model = self._cost_model
        share = 1.0 if cost_model.ffn_device == "cpu" else self._computed.get(task.layer, 0.0)
        cpu = cost_model.speeds.cpu
        met = share * float(costs.distinct_experts(cost_model.model, self.tokens(task)))
        seconds = float(cost_model.experts_s(cpu, self.tokens(task), share)) + cpu.task_s
        return TaskCost(seconds=seconds, dram_bytes=met * cost_model.page_bytes())


def _moved(cost_model: CostModel, task: Task) -> TaskCost:
    """The cost of a transfer: a staging copy writes and reads host memory; every other transfer touches it once."""
    speeds = cost_model.speeds
    if task.lane is Lane.DISK:
        return TaskCost(seconds=task.bytes / speeds.disk if speeds.disk else float("inf"), dram_bytes=task.bytes)
    if task.lane is Lane.STAGE:
        return TaskCost(seconds=task.bytes / speeds.stage, dram_bytes=2.0 * task.bytes)
    rate = cost_model.up_s if task.lane is Lane.H2D else cost_model.down_s
    return TaskCost(seconds=float(rate(task.bytes)), dram_bytes=task.bytes)


def _alone(seconds: float) -> TaskCost:
    return TaskCost(seconds=float(seconds))
