"""What each order is about: what it overlaps, what it makes wait, and how long a layer of it takes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import pytest

from moelight.core.errors import ConfigError
from moelight.core.policy import Policy, Shares
from moelight.core.schedule import Lane, Schedule, Task, TaskKind
from moelight.core.timeline import Span, Timeline
from moelight.hrm.task_cost import TaskCost
from moelight.scheduler import SCHEDULES
from moelight.scheduler.layout import Layout, MicroBatchShape, PassShape, layout_of
from moelight.scheduler.requirements import NEEDS, check_policy
from moelight.scheduler.schedules import loop
from moelight.scheduler.simulate import Price, steady_pass
from tests.shapes import FLOAT32, small_layout, small_model, small_policy

LAYERS, N, PAGES = 4, 5, 4
CPU_ATTENDS = small_layout((True,) * LAYERS, experts=PAGES, host=LAYERS * PAGES)
GPU_ATTENDS = small_layout((True,) * LAYERS, experts=PAGES, host=LAYERS * PAGES, attention_device="gpu")
PAGE_KINDS = (TaskKind.SEND_PAGE, TaskKind.STAGE_PAGE)


def steady_shape(layout: Layout, *, carries: bool = True, n: int = N) -> PassShape:
    batch = MicroBatchShape(tokens=4, context=30 if layout.context_crosses else 0)
    return PassShape(micro_batches=(batch,) * n, prefetched=PAGES if carries else 0, wraps=carries)


def build(name: str, layout: Layout, *, n: int = N) -> Schedule:
    carries = name not in ("serial", "flexgen-loop")
    return SCHEDULES.get(name)(layout, steady_shape(layout, carries=carries, n=n))


def price(**seconds: float) -> Price:
    """Seconds by kind of task; a whole layer's pages take ``w``; everything else takes nothing."""

    def cost(task: Task) -> TaskCost:
        return TaskCost(
            seconds=seconds.get("w", 0.0) / PAGES if task.kind is TaskKind.SEND_PAGE else _of(task, seconds)
        )

    return cost


def _of(task: Task, seconds: dict[str, float]) -> float:
    return seconds.get(str(task.kind), 0.0)


def layer_s(schedule: Schedule, **seconds: float) -> float:
    return steady_pass(schedule, price(**seconds)).seconds / LAYERS


def spans(timeline: Timeline, *kinds: TaskKind) -> list[Span]:
    return [span for span in timeline.spans if span.task.kind in kinds]


def kinds_on(schedule: Schedule, lane: Lane) -> list[str]:
    """The order of work on one lane: ``p3`` for a page of layer 3, ``h2.0`` for hidden states or a context."""
    names = []
    for task in schedule.tasks:
        if task.lane is lane and task.kind is not TaskKind.PREFETCHED_PAGE:
            names.append(f"p{task.page.layer}" if task.page else f"h{task.layer}.{task.micro_batch}")
    return names


def test_a_block_stands_in_front_of_its_own_layers_hidden_states() -> None:
    """S2: hidden states of one layer, then the next layer's pages all at once, then that layer's hidden states."""
    wanted = [f"h0.{j}" for j in range(N)]
    for layer in range(1, LAYERS):
        wanted += [f"p{layer}"] * PAGES + [f"h{layer}.{j}" for j in range(N)]
    assert kinds_on(build("fastdecode", CPU_ATTENDS), Lane.H2D) == [*wanted, *["p0"] * PAGES]


@pytest.mark.parametrize("name", ["flexgen-c", "flexgen"])
def test_a_block_is_launched_behind_the_first_micro_batch(name: str) -> None:
    layout = CPU_ATTENDS if name == "flexgen-c" else GPU_ATTENDS
    order = kinds_on(build(name, layout), Lane.H2D)
    for layer in range(LAYERS):
        first = order.index(f"p{(layer + 1) % LAYERS}")
        assert order[first : first + PAGES] == [f"p{(layer + 1) % LAYERS}"] * PAGES
        assert f"h{layer}.0" in order[:first]
        assert f"h{layer}.{N - 1}" in order[first:]


def test_paging_hides_what_a_block_exposes() -> None:
    """S1 takes what the link takes. S2 adds the micro-batches that no hidden states could be brought up for: all but
    the two that are up before the block begins. S3 goes through every chain alone, beside one block."""
    seconds = {"w": 10.0, "load_hidden": 0.1, "post_attention": 1.0, "cpu_attention": 0.2, "pre_attention": 0.1}
    link = 10.0 + N * 0.1
    assert layer_s(build("cgopipe", CPU_ATTENDS), **seconds) == pytest.approx(link)
    second = layer_s(build("fastdecode", CPU_ATTENDS), **seconds)
    assert link + (N - 3) * 1.1 < second < link + (N - 1) * 1.1
    third = layer_s(build("flexgen-c", CPU_ATTENDS), **seconds)
    assert third == pytest.approx(10.0 + (N - 1) * (0.1 + 1.0 + 0.1 + 0.2) + 0.1)
    assert second < third


def test_nothing_but_pages_overlaps_in_flexgen_c() -> None:
    seconds = {"w": 3.0, "load_hidden": 0.5, "post_attention": 1.0, "cpu_attention": 0.75, "pre_attention": 0.25}
    timeline = steady_pass(build("flexgen-c", CPU_ATTENDS), price(**seconds)).timeline
    chain = sorted((s for s in timeline.spans if s.task.page is None and s.end_s > s.start_s), key=lambda s: s.start_s)
    assert all(before.end_s <= after.start_s for before, after in pairwise(chain))


def test_the_next_context_crosses_while_the_device_works() -> None:
    """S4: with contexts slower than compute, a layer takes its contexts and its block: the link rests only where a
    pass ends."""
    seconds = {"w": 4.0, "load_kv": 1.5, "attention": 0.2, "post_attention": 1.0, "pre_attention": 0.1}
    result = steady_pass(build("flexgen", GPU_ATTENDS), price(**seconds))
    assert result.seconds == pytest.approx(LAYERS * (4.0 + N * 1.5) + 1.3, abs=0.11)
    loads = {s.task.micro_batch: s for s in spans(result.timeline, TaskKind.LOAD_KV) if s.task.layer == 2}
    for s in spans(result.timeline, TaskKind.ATTENTION):
        if s.task.layer == 2 and 1 < s.task.micro_batch < N - 1:  # the context of 2 stands behind the block
            assert loads[s.task.micro_batch + 1].start_s <= s.start_s


@pytest.mark.parametrize("w", [0.5, 7.0])
@pytest.mark.parametrize("context_s", [0.2, 3.0])
def test_flexgens_loop_takes_what_its_formula_says(w: float, context_s: float) -> None:
    """max(w, c, K) + (n - 1) max(c, K), where the block and the next context share one link."""
    c = 0.1 + 0.2 + 1.0
    seconds = {"w": w, "load_kv": context_s, "attention": 0.2, "post_attention": 1.0, "pre_attention": 0.1}
    schedule = loop(GPU_ATTENDS, steady_shape(GPU_ATTENDS), separate=False)
    assert layer_s(schedule, **seconds) == pytest.approx(max(w + context_s, c) + (N - 1) * max(c, context_s), rel=0.05)


@pytest.mark.parametrize("w", [0.5, 7.0])
@pytest.mark.parametrize("context_s", [0.2, 3.0])
def test_with_layers_of_their_own_experts_hide_no_contexts_but_one(w: float, context_s: float) -> None:
    """Attention: max(w + K, a) + (n - 2) max(a, K) + a; experts: (n - 1) e + max(e, K)."""
    a, e = 0.3, 1.0
    seconds = {"w": w, "load_kv": context_s, "attention": 0.2, "post_attention": e, "pre_attention": 0.1}
    attention = max(w + context_s, a) + (N - 2) * max(a, context_s) + a
    experts = (N - 1) * e + max(e, context_s)
    # The last layer has no next context to bring up beside its experts; the first pays for its own instead.
    at_the_end = (max(e, context_s) - e - context_s) / LAYERS
    result = layer_s(build("flexgen-loop", GPU_ATTENDS), **seconds)
    assert result == pytest.approx(attention + experts - at_the_end)


def test_module_runs_a_layers_experts_once() -> None:
    """They wait for all hidden states; the link and the CPU go on meanwhile."""
    schedule = build("module", CPU_ATTENDS)
    experts = [task for task in schedule.tasks if task.kind is TaskKind.EXPERTS]
    assert [(task.layer, task.micro_batch) for task in experts] == [(layer, -1) for layer in range(LAYERS)]
    assert not [task for task in schedule.tasks if task.kind is TaskKind.POST_ATTENTION]
    seconds = {"w": 10.0, "load_hidden": 0.1, "experts": 2.0, "cpu_attention": 0.5, "pre_attention": 0.1, "route": 0.1}
    assert layer_s(schedule, **seconds) == pytest.approx(10.0 + N * 0.1)
    bound_by_both = layer_s(schedule, **(seconds | {"w": 1.0}))
    assert bound_by_both == pytest.approx(2.0 + N * 0.5 + 0.1 + 0.1 + 0.1, rel=0.05)


def test_module_without_a_link_reads_pages_beside_compute() -> None:
    layout = small_layout((True,) * LAYERS, experts=PAGES, discrete=False)
    seconds: dict[str, float] = {"read_page": 1.0, "experts": 2.0, "cpu_attention": 0.5, "route": 0.1}

    def cost(task: Task) -> TaskCost:
        return TaskCost(seconds=_of(task, seconds))

    for inline in (False, True):
        result = steady_pass(build("module", layout), cost, inline=inline)
        assert result.seconds / LAYERS == pytest.approx(max(PAGES * 1.0, 2.0 + N * 0.6), rel=0.05)


NO_LINK = small_layout((True,) * LAYERS, experts=PAGES, discrete=False)


@pytest.mark.parametrize("n", [1, 2, 5])
@pytest.mark.parametrize("w", [0.5, 3.0, 12.0])
def test_flexgens_block_one_level_down(n: int, w: float) -> None:
    """It is read behind the first micro-batch's experts e and beside all that follows until the next ones: max(n c,
    e + w). A single one computes beside it. With CGOPipe it is read beside all of them."""
    c, seconds = 1.5, {"read_page": w / PAGES, "pre_attention": 0.2, "cpu_attention": 0.3, "post_attention": 1.0}

    def cost(task: Task) -> TaskCost:
        return TaskCost(seconds=_of(task, seconds))

    for inline in (False, True):
        result = {name: steady_pass(build(name, NO_LINK, n=n), cost, inline=inline) for name in ("flexgen", "cgopipe")}
        behind = max(n * c, w + (1.0 if n > 1 else 0.0))
        assert result["flexgen"].seconds / LAYERS == pytest.approx(behind, rel=1e-6)
        assert result["cgopipe"].seconds / LAYERS == pytest.approx(max(n * c, w), rel=1e-6)


@pytest.mark.parametrize("w", [0.1, 3.0, 12.0])
def test_flexgens_loop_one_level_down(w: float) -> None:
    """A layer's block is read beside its first attention, and nothing beside anything else: max(w, a) + (n - 1) a +
    n e."""
    seconds = {"read_page": w / PAGES, "pre_attention": 0.2, "cpu_attention": 0.3, "post_attention": 1.0}

    def cost(task: Task) -> TaskCost:
        return TaskCost(seconds=_of(task, seconds))

    for inline in (False, True):
        result = steady_pass(build("flexgen-loop", NO_LINK), cost, inline=inline)
        assert result.seconds / LAYERS == pytest.approx(max(w, 0.5) + (N - 1) * 0.5 + N * 1.0, rel=1e-6)


def test_the_published_orders_bring_every_page() -> None:
    shape = replace(steady_shape(NO_LINK, carries=False), routed_only=True)
    for name in ("flexgen", "flexgen-loop"):
        with pytest.raises(ConfigError, match=f"'{name}' moves every page"):
            SCHEDULES.get(name)(NO_LINK, shape)


@pytest.mark.parametrize("ffn", ["split", "cpu"])
def test_the_cpus_experts_work_beside_the_device(ffn: str) -> None:
    """A step's share of the CPU is computed while the device goes on with the next; nobody adds up the two."""
    host = {"split": LAYERS * PAGES, "cpu": 0}[ffn]
    changes = {"ffn_device": ffn, "attention_device": "gpu", "kv": Shares(device=1.0)}
    changes |= {"cpu_experts": 0.5} if ffn == "split" else {}
    resident = LAYERS * PAGES if ffn == "cpu" else 0
    layout = small_layout((True,) * LAYERS, experts=PAGES, resident=resident, host=host, **changes)
    shape = replace(steady_shape(layout), prefetched=len(layout.layer_pages[0]))
    schedule = SCHEDULES.get("cgopipe")(layout, shape)
    seconds = {"cpu_experts": 1.0, "experts": 0.5, "route": 0.1, "pre_attention": 0.1, "attention": 0.2}
    assert layer_s(schedule, **seconds) == pytest.approx(N * 1.0, rel=0.1)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"schedule": "flexgen"}, "'flexgen' needs attention_device gpu, not cpu; here these do: cgopipe, fastdecode"),
        ({"schedule": "flexgen-c", "attention_device": "gpu"}, "'flexgen-c' needs attention_device cpu, not gpu"),
        ({"schedule": "fastdecode", "attention_device": "gpu"}, "'fastdecode' needs attention_device cpu"),
        ({"schedule": "module", "ffn_device": "split"}, "'module' needs ffn_device gpu"),
        ({"schedule": "flexgen-c", "ffn_device": "cpu"}, "'flexgen-c' needs a GPU, and there is none"),
        (
            {"schedule": "flexgen-c", "ffn_device": "cpu"},
            "here these do: cgopipe, fastdecode, flexgen, flexgen-loop, serial, module",
        ),
    ],
)
def test_an_order_that_makes_no_sense_is_refused(changes: dict[str, str], words: str) -> None:
    """By the policy's door and by the builder's own, in the same words."""
    model = small_model()
    policy = replace(small_policy(model, discrete=changes.get("ffn_device") != "cpu"), **changes)  # type: ignore[arg-type]
    layout = layout_of(model, policy, FLOAT32)
    shape = PassShape(micro_batches=(MicroBatchShape(tokens=2),))
    doors: list[Callable[[], object]] = [
        lambda: check_policy(policy),
        lambda: SCHEDULES.get(policy.schedule)(layout, shape),
    ]
    for door in doors:
        with pytest.raises(ConfigError, match=words):
            door()


def test_every_builder_says_what_it_needs() -> None:
    assert tuple(NEEDS) == SCHEDULES.names()
    check_policy(Policy(model="m", schedule="module"))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"ffn_device": "cpu", "weights": Shares(device=0.5, host=0.5)}, "weights: a share on device needs ffn_device"),
        ({"kv": Shares(device=0.5, host=0.5)}, "kv: .* needs attention_device gpu"),
        ({"attention_device": "gpu", "kv": Shares(host=0.5, disk=0.5)}, "kv: the cache lives in host memory"),
    ],
)
def test_a_policy_that_contradicts_itself_has_no_layout(changes: dict[str, object], words: str) -> None:
    model = small_model()
    policy = replace(small_policy(model, discrete=True), **changes)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=words):
        layout_of(model, policy, FLOAT32)


def test_a_gpu_policy_has_no_layout_without_a_gpu() -> None:
    model = small_model()
    with pytest.raises(ConfigError, match="must be cpu on a machine without a GPU"):
        layout_of(model, small_policy(model, discrete=True), FLOAT32, discrete=False)
