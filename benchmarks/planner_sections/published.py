"""What MoE-Lightning and its artifact published about Mixtral 8x7B, and a prediction of it by simulation.

Every constant below is one that the paper (ASPLOS 2025) or its artifact states, or follows from two that are stated;
none is tuned to what is predicted here. How a figure is made:

- A run of N requests with prompts of s tokens and n new ones takes N s / a + (n - 1) t: prompts at the rate a, then
  n - 1 decode steps. Prompts are not simulated: a is the rate that fits the published runs of the system itself (a fit
  of two numbers to four runs; the baselines get the rate of the padded runs on the same machine).
- t is the time of a steady pass of the system's own order of work, simulated task by task at the mean context s + n/2.
- Kernel latencies are those measured for figure 9 on an L4 with a 24-core Xeon, interpolated linearly in micro-batch
  size and context, and continued at constant speed outside. On the T4 what the GPU does takes 285/300 of that, the
  bandwidths the artifact uses for the two: at these batch sizes experts are bound by it (231 of 306 GB/s). The hosts
  are alike (24-core Xeons, 2.3 and 2.2 GHz) and not scaled. Projections and attention on the GPU, which were not
  published, move their bytes at the speed of the experts.
- A system that pins its memory streams at 84 GiB over the step time that fits its published runs: the expert weights
  cross once a step and bind it. FlexGen's published MTBench runs did not pin, and FlexGen fitted 5.43 and 5.44 GiB/s on
  these machines. Both rates are of the whole way from DRAM to the device, so copies into pinned memory cost nothing
  more, and contention for DRAM is in them.
- FlexGen's loop waits for everything after every micro-batch, and ran with attention and experts as layers of their
  own. Its CPU attention works on fp32 copies: 2 bytes read, 4 written and 4 read where the kernel of figure 9 reads 2.
- DeepSpeed: one micro-batch, cache on the GPU, the next layer's weights stream from pinned memory while this one
  computes. Its batch on MTBench was not published: it is taken on the line, in logarithms, through the two that were
  (table 4: 306 tokens a request, 102 and 156 requests; 2048 tokens, 8 and 12).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import log

from moelight.core.dtypes import FLOAT16
from moelight.core.policy import Policy, Shares
from moelight.core.schedule import Lane, Schedule, Task, TaskKind
from moelight.core.units import GiB
from moelight.hrm import costs
from moelight.hrm.task_cost import TaskCost
from moelight.profiles.model_files import load_model_profile
from moelight.scheduler import SCHEDULES
from moelight.scheduler.layout import MicroBatchShape, PassShape, layout_of
from moelight.scheduler.schedules import loop
from moelight.scheduler.simulate import Price, SteadyPass, steady_pass

MODEL = load_model_profile("mixtral-8x7b")
GENERATED = (32, 64, 128, 256)
PADDED, RAGGED = 418, 77  # MTBench: longest and mean prompt

# Figure 9, seconds of one layer on the L4 machine: decode attention on the CPU by micro-batch size and context, and
# the experts by micro-batch size.
CONTEXTS = (128, 256, 512, 1024, 2048)
CPU_ATTENTION = {
    32: (0.00044, 0.00067, 0.00173, 0.003, 0.00594),
    64: (0.00074, 0.00148, 0.00298, 0.00589, 0.0116),
    128: (0.00157, 0.00298, 0.00632, 0.0114, 0.0232),
    256: (0.00371, 0.00673, 0.01178, 0.02206, 0.04458),
}
EXPERTS = {32: 0.0122, 64: 0.0123, 128: 0.0125, 256: 0.0130}
FP32_COPIES = 5.0  # bytes touched on the way to fp32 products, over those of an fp16 kernel


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """One machine of table 2. Rates in bytes and tokens per second; ``device_s``: its GPU's time over the L4's."""

    name: str
    device_s: float
    unpinned: float
    padded_step_s: float
    ragged_step_s: float
    padded_prefill: float
    ragged_prefill: float
    requests: tuple[tuple[int, int], tuple[int, int]]

    def pinned(self, *, ragged: bool) -> float:
        """The rate of the weight stream that the published runs of MoE-Lightning imply."""
        return 84 * GiB / (self.ragged_step_s if ragged else self.padded_step_s)

    def prefill(self, *, ragged: bool) -> float:
        """Prompt tokens per second."""
        return self.ragged_prefill if ragged else self.padded_prefill


SETTINGS = {
    "S1": Setting(
        name="S1 (T4)",
        device_s=285 / 300,
        unpinned=5.43 * GiB,
        padded_step_s=12.1,
        ragged_step_s=14.1,
        padded_prefill=334,
        ragged_prefill=209,
        requests=((306, 102), (2048, 8)),
    ),
    "S2": Setting(
        name="S2 (L4)",
        device_s=1.0,
        unpinned=5.44 * GiB,
        padded_step_s=8.7,
        ragged_step_s=9.0,
        padded_prefill=1143,
        ragged_prefill=891,
        requests=((306, 156), (2048, 12)),
    ),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """How one system serves: its order of work, its policy, and what makes its tasks cost what they do.

    Attributes:
        link: bytes per second between host and device, each way.
        context: tokens each sequence attends over.
        kv_device, weights_device: shares of the cache and of the experts on the GPU.
        attention_bytes: bytes that attention on the CPU touches, over those of figure 9's kernel.
        merged: FlexGen's loop with attention and experts in one turn, which the published runs did not have.
    """

    schedule: str
    micro_batch_size: int
    num_micro_batches: int
    link: float
    context: float
    device_s: float
    attention: str = "cpu"
    kv_device: float = 0.0
    weights_device: float = 0.0
    attention_bytes: float = 1.0
    merged: bool = False

    @property
    def batch_size(self) -> int:
        """N."""
        return self.micro_batch_size * self.num_micro_batches


def step(run: Run) -> SteadyPass:
    """One steady decode step of ``run``."""
    return steady_pass(build(run), price(run))


@lru_cache(maxsize=256)
def step_s(run: Run) -> float:
    """Seconds of `step`; its ten thousand spans are not kept."""
    return step(run).seconds


def build(run: Run) -> Schedule:
    """The order of a steady decode step: it carries in what it carries out."""
    layout = layout_of(MODEL, _policy(run), FLOAT16)
    context = round(run.micro_batch_size * run.context) if layout.context_crosses else 0
    batch = MicroBatchShape(
        tokens=run.micro_batch_size,
        context=context,
        device_tokens=layout.device_tokens(run.micro_batch_size),
        device_context=layout.device_tokens(context),
    )
    batches = (batch,) * run.num_micro_batches
    carries = run.schedule != "flexgen-loop" or run.merged
    carried = len(layout.layer_pages[0]) if carries else 0
    shape = PassShape(micro_batches=batches, prefetched=carried, wraps=carries)
    return loop(layout, shape, separate=False) if run.merged else SCHEDULES.get(run.schedule)(layout, shape)


def price(run: Run) -> Price:
    """What each task of ``run`` costs."""
    mu, (elements, *_) = run.micro_batch_size, costs.layer_elements(MODEL)
    device_bytes_per_s = 8 * costs.page_bytes(MODEL, FLOAT16) / (EXPERTS[32] * run.device_s)
    before_s = 2 * elements.before_attention / device_bytes_per_s
    after_s = 2 * elements.after_attention / device_bytes_per_s
    seconds = {
        TaskKind.PRE_ATTENTION: before_s,
        TaskKind.ATTENTION: mu * run.context * costs.kv_layer_bytes(MODEL, FLOAT16) / device_bytes_per_s,
        TaskKind.CPU_ATTENTION: cpu_attention_latency(mu, run.context) * run.attention_bytes,
        TaskKind.POST_ATTENTION: after_s + expert_latency(mu) * run.device_s,
        TaskKind.ROUTE: after_s,
        TaskKind.EXPERTS: expert_latency(run.batch_size) * run.device_s,
    }

    def cost(task: Task) -> TaskCost:
        if task.lane in (Lane.H2D, Lane.D2H):
            return TaskCost(seconds=task.bytes / run.link)
        return TaskCost(seconds=seconds.get(task.kind, 0.0))

    return cost


def _policy(run: Run) -> Policy:
    return Policy(
        model=MODEL.name,
        batch_size=run.batch_size,
        micro_batch_size=run.micro_batch_size,
        ffn_device="gpu",
        attention_device=run.attention,
        weights=Shares(device=run.weights_device, host=1 - run.weights_device),
        kv=Shares(device=run.kv_device, host=1 - run.kv_device),
    )


def expert_latency(tokens: int) -> float:
    """Experts of one layer on the L4. Below 32 tokens fewer experts are met."""
    met = costs.distinct_experts(MODEL, tokens) / costs.distinct_experts(MODEL, 32)
    return _between(list(EXPERTS.items()), max(tokens, 32)) * min(1.0, float(met))


def cpu_attention_latency(sequences: float, context: float) -> float:
    """Decode attention of one layer on the CPU; at constant speed outside the table."""
    inside = min(max(sequences, 32), 256), min(max(context, 128), 2048)
    rows = [(mu, _between(list(zip(CONTEXTS, row, strict=True)), inside[1])) for mu, row in CPU_ATTENTION.items()]
    return _between(rows, inside[0]) * (sequences / inside[0]) * (context / inside[1])


def _between(points: list[tuple[int, float]], at: float) -> float:
    """Straight lines through ``points``, the first and last continued."""
    after = next((n for n, (x, _) in enumerate(points) if n and at <= x), len(points) - 1)
    (x0, y0), (x1, y1) = points[after - 1], points[after]
    return y0 + (y1 - y0) * (at - x0) / (x1 - x0)


# ---------------------------------------------------------------------------------------------------------------------
# Figure 7, Mixtral 8x7B on MTBench: tokens per second at 32, 64, 128 and 256 new tokens, and the policies of the runs

PUBLISHED = {
    ("S1", "FlexGen"): (12.1, 12.3, 9.5, 9.6),
    ("S1", "FlexGen(c)"): (9.8, 9.4, 7.2, 6.8),
    ("S1", "DeepSpeed"): (7.1, 7.6, 7.8, 6.7),
    ("S1", "MoE-Lightning(p)"): (15.6, 24.0, 30.1, 33.9),
    ("S1", "MoE-Lightning"): (63.0, 101.3, 97.7, 96.7),
    ("S2", "FlexGen"): (29.2, 34.9, 37.2, 28.8),
    ("S2", "FlexGen(c)"): (17.5, 18.9, 20.0, 15.9),
    ("S2", "DeepSpeed"): (12.7, 13.3, 12.1, 11.8),
    ("S2", "MoE-Lightning(p)"): (53.7, 67.4, 79.0, 78.6),
    ("S2", "MoE-Lightning"): (203.0, 294.5, 217.5, 167.9),
}
# (micro-batch size, micro-batches), and for FlexGen the share of weights on the GPU. The artifact's scripts and README;
# the padded ones follow from its result files. FlexGen(c) is given FlexGen's policies, as in table 4.
FLEXGEN = {
    "S1": ((32, 40, 0.070), (16, 78, 0.081), (8, 139, 0.086), (8, 113, 0.086)),
    "S2": ((64, 21, 0.128), (64, 20, 0.128), (64, 18, 0.128), (32, 30, 0.149)),
}
PAPER_PADDED = {"S1": ((36, 14),) * 4, "S2": ((68, 16), (68, 15), (68, 13), (68, 11))}
PAPER_RAGGED = {
    "S1": ((164, 19), (164, 19), (164, 14), (100, 15)),
    "S2": ((324, 14), (228, 16), (164, 16), (132, 12)),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Card:
    """A card of a published run and its link, by their data sheets, in bytes per second; both are PCIe."""

    name: str
    link: float
    memory: float


# The cards of S1 and S2 are the hardware profiles t4 and l4. MoE-Gen: one A5000 (24 GB, PCIe 4.0 x16), 512 GB of host
# memory (arXiv 2503.09716).
CARDS = {
    "S1": Card(name="T4", link=15.75e9, memory=320e9),
    "S2": Card(name="L4", link=31.5e9, memory=300e9),
    "A5000": Card(name="A5000", link=31.5e9, memory=768e9),
}
# MoE-Gen on the A5000, Mixtral 8x7B, prompts of 512 tokens and 256 new ones: prompt and new tokens per second.
MOE_GEN = {"prefill": 2790.0, "decode": 469.0}


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One published figure and its prediction, tokens per second."""

    setting: str
    system: str
    gen_len: int
    published: float
    predicted: float
    prompts_share: float

    @property
    def error(self) -> float:
        """Predicted over published, less 1."""
        return self.predicted / self.published - 1


def rows(link: float | None = None) -> list[Row]:
    """All forty; with the same ``link`` for everybody where one is given."""
    result = []
    for (setting, system), figures in PUBLISHED.items():
        for at, (gen_len, published) in enumerate(zip(GENERATED, figures, strict=True)):
            run, ragged = run_of(setting, system, at), system == "MoE-Lightning"
            if link is not None:
                run = replace(run, link=link)
            prompts_s = prompts_of(setting, run.batch_size, ragged=ragged)
            seconds = prompts_s + (gen_len - 1) * step_s(run)
            result.append(
                Row(
                    setting=setting,
                    system=system,
                    gen_len=gen_len,
                    published=published,
                    predicted=run.batch_size * gen_len / seconds,
                    prompts_share=prompts_s / seconds,
                )
            )
    return result


def prompts_of(setting: str, requests: int, *, ragged: bool) -> float:
    """Seconds that the prompts of one batch take."""
    return requests * (RAGGED if ragged else PADDED) / SETTINGS[setting].prefill(ragged=ragged)


def run_of(setting: str, system: str, at: int) -> Run:
    """The run behind the figure for ``GENERATED[at]`` new tokens."""
    machine, gen_len = SETTINGS[setting], GENERATED[at]
    ragged = system == "MoE-Lightning"
    context = (RAGGED if ragged else PADDED) + gen_len / 2
    common = {"context": context, "device_s": machine.device_s}
    if system.startswith("MoE-Lightning"):
        mu, count = (PAPER_RAGGED if ragged else PAPER_PADDED)[setting][at]
        link = machine.pinned(ragged=ragged)
        return Run(schedule="cgopipe", micro_batch_size=mu, num_micro_batches=count, link=link, **common)
    if system == "DeepSpeed":
        return Run(
            schedule="flexgen",
            attention="gpu",
            kv_device=1.0,
            micro_batch_size=deepspeed_batch(machine, PADDED + gen_len),
            num_micro_batches=1,
            link=machine.pinned(ragged=False),
            **common,
        )
    mu, count, resident = FLEXGEN[setting][at]
    return Run(
        schedule="flexgen-loop",
        attention="cpu" if system == "FlexGen(c)" else "gpu",
        attention_bytes=FP32_COPIES,
        micro_batch_size=mu,
        num_micro_batches=count,
        weights_device=resident,
        link=machine.unpinned,
        **common,
    )


def deepspeed_batch(setting: Setting, tokens: int) -> int:
    """Requests of ``tokens`` each, on the line through the two published batches."""
    (x0, y0), (x1, y1) = setting.requests
    slope = log(y1 / y0) / log(x1 / x0)
    return round(y0 * (tokens / x0) ** slope)


def rank_correlation(result: Sequence[Row]) -> float:
    """Spearman's: the correlation of the ranks of predicted and published figures."""
    from scipy.stats import spearmanr

    return float(spearmanr([row.published for row in result], [row.predicted for row in result]).statistic)
