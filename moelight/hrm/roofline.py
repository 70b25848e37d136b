"""The Hierarchical Roofline Model (MoE-Lightning, section 3.2): roofs and turning points of a chain of memories.

A level is a memory and the processor beside it. Level i computes; data may be on a farther level j, behind a link. The
intensity I_x^i of work x is its flops over the bytes it touches at level i. Does not estimate seconds and does not draw
(``observe.plots``).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import inf, isfinite

from moelight.core.dtypes import DTYPES, FLOAT16, DType
from moelight.core.policy import Policy
from moelight.hrm import costs
from moelight.hrm.machine_model import speeds_of
from moelight.profiles.hardware import HardwareProfile
from moelight.profiles.model import ModelProfile
from moelight.profiles.workload import Workload

ACTIVATION_BYTES = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class Level:
    """A memory of ``bandwidth`` bytes/s beside a processor of ``peak_flops`` flop/s (none: ``""`` and 0).
    ``link_bandwidth``: bytes/s from the next farther level; 0 at the end of the chain. The figures are those that the
    hardware profile states, or, in a sustained chain, those that the cost model plans with."""

    name: str
    processor: str
    peak_flops: float
    bandwidth: float
    link_bandwidth: float = 0.0


Chain = tuple[Level, ...]


def chain_of(hardware: HardwareProfile) -> Chain:
    """The levels of a machine: device, host, disk, as far as they exist; all GPUs and their links together. Without a
    stated link, as for disks, the slower memory is the limit."""
    tiers = [tier for name in ("device", "host", "disk") if (tier := hardware.tier(name)) is not None]
    levels: list[Level] = []
    for tier, farther in zip(tiers, [*tiers[1:], None], strict=True):
        unit = hardware.processor({"device": "gpu", "host": "cpu"}.get(tier.name, ""))
        count = unit.count if unit is not None and tier.name == "device" else 1
        stated = None if farther is None else hardware.link(farther.name, tier.name)
        link = 0.0 if farther is None else min(tier.bandwidth_bytes_per_s, farther.bandwidth_bytes_per_s)
        levels.append(
            Level(
                name=tier.name,
                processor="" if unit is None else unit.name,
                peak_flops=0.0 if unit is None else unit.peak_flops * unit.count,
                bandwidth=tier.bandwidth_bytes_per_s * count,
                link_bandwidth=link if stated is None else stated.bandwidth_bytes_per_s * count,
            )
        )
    return tuple(levels)


def sustained_chain(hardware: HardwareProfile) -> Chain:
    """`chain_of` at the speeds that the cost model plans with: measured ones, or else the usual shares of the peaks."""
    speeds, stated = speeds_of(hardware), chain_of(hardware)
    units, memories = {"device": speeds.gpu, "host": speeds.cpu}, {"host": speeds.dram, "disk": speeds.disk}
    levels = []
    for level, farther in zip(stated, [*stated[1:], None], strict=True):
        unit = units.get(level.name)
        near = memories.get(level.name, 0.0 if unit is None else unit.memory)
        link = 0.0 if farther is None else min(near, memories[farther.name])
        if level.name == "device" and isfinite(speeds.h2d):
            link = speeds.h2d
        flops = 0.0 if unit is None else unit.flops
        levels.append(replace(level, peak_flops=flops, bandwidth=near, link_bandwidth=link))
    return tuple(levels)


def link_between(chain: Chain, near: int, far: int) -> float:
    """B_peak^{j,i}: bytes/s from level ``far`` (j) to level ``near`` (i); the slowest link on the way."""
    return min(level.link_bandwidth for level in chain[near:far])


def compute_roof(level: Level) -> float:
    """Eq. (4): P_x^i <= P_peak^i."""
    return level.peak_flops


def memory_roof(level: Level, intensity: float) -> float:
    """Eq. (5): P_x^i <= B_peak^i I_x^i."""
    return level.bandwidth * intensity


def link_roof(link_bandwidth: float, far_intensity: float) -> float:
    """Eq. (6): P_x^i <= B_peak^{j,i} I_x^j, the cross-level roof."""
    return link_bandwidth * far_intensity


def attainable_from(level: Level, link_bandwidth: float, intensity: float, far_intensity: float) -> float:
    """Eq. (7): min(P_peak^i, B_peak^i I_x^i, B_peak^{j,i} I_x^j), for data that are transferred from level j."""
    return min(attainable(level, intensity), link_roof(link_bandwidth, far_intensity))


def attainable(level: Level, intensity: float) -> float:
    """Eq. (8): min(P_peak^i, B_peak^i I_x^i), for data that are all at level i."""
    return min(compute_roof(level), memory_roof(level, intensity))


def turning_point(level: Level) -> float:
    """Eq. (3): P_peak / B_peak, the intensity from which on the memory of one level is no longer the limit."""
    return level.peak_flops / level.bandwidth


def first_turning_point(far: Level, link_bandwidth: float, far_intensity: float = inf) -> float:
    """Eq. (9), P1: min(P_peak^j, B_peak^j I_x^j) / B_peak^{j,i}; below this intensity, work is done at level j. With
    infinite ``far_intensity`` the point where the link's roof crosses the compute roof of j."""
    return attainable(far, far_intensity) / link_bandwidth


def second_turning_point(near: Level, link_bandwidth: float, intensity: float = inf) -> float:
    """Eq. (10), P2: min(P_peak^i, B_peak^i I_x^i) / B_peak^{j,i}; below this intensity, work is bound by the link. With
    infinite ``intensity`` the point where the link's roof reaches the compute roof of i."""
    return attainable(near, intensity) / link_bandwidth


def balance_point(near: Level, link_bandwidth: float, intensity: float) -> float:
    """Eq. (11): the I_x^j at which B_peak^i I_x^i = B_peak^{j,i} I_x^j. Beyond this point a larger I_x^j (a larger N)
    has no effect; only a larger I_x^i (a larger μ) has."""
    return memory_roof(near, intensity) / link_bandwidth


def attention_intensity(model: ModelProfile, context: float, *, kv_dtype: DType = FLOAT16) -> float:
    """Decode attention of an average layer: flops of scores and values over the bytes of queries, outputs, keys, values
    (0 if no layer attends over the paged cache)."""
    flops = touched = 0.0
    for kind in costs.attention_kinds(model):
        share, seen, spec = kind.layers / model.num_layers, float(kind.seen_on_average(context)), kind.spec
        flops += share * float(costs.attention_flops(spec, seen))
        crossing = ACTIVATION_BYTES * (spec.query_width + spec.output_width)
        touched += share * (crossing + seen * costs.kv_row_bytes(spec, kv_dtype))
    return flops / touched if touched else 0.0


def scores_intensity(model: ModelProfile, context: float, *, dtype: DType = FLOAT16) -> float:
    """`attention_intensity` as in the paper's figures 4 and 5: flops of scores and softmax alone, (2 d + 2) n_q L;
    queries and outputs have the dtype of the cache."""
    spec = model.attention
    flops = context * spec.num_heads * (2 * spec.head_dim + 2)
    return flops * 8 / (dtype.bits * (2 * spec.q_dim + context * spec.cache_width))


def ffn_intensity(model: ModelProfile, tokens: float, *, weight_dtype: DType = FLOAT16) -> float:
    """Experts of one layer over ``tokens``: 6 t h1 h2 k flops over 2 t h1 + 2 t h2 + W_i bytes, each expert read once.
    With t = μ, I^i of the level that computes."""
    weights = model.experts.num_experts * costs.page_bytes(model, weight_dtype)
    touched = ACTIVATION_BYTES * tokens * (model.hidden_size + model.experts.intermediate_size)
    return flops_of_experts(model, tokens) / (touched + weights)


def flops_of_experts(model: ModelProfile, tokens: float) -> float:
    """Flops of the experts of one layer over ``tokens``."""
    routed = tokens * model.router.top_k / model.ranks
    return 6.0 * routed * model.hidden_size * model.experts.intermediate_size


def fed_intensity(
    model: ModelProfile, tokens: float, *, share: float, weight_dtype: DType = FLOAT16, hidden_bytes: float = 0.0
) -> float:
    """I^j of the experts of one layer over ``tokens`` = N: their flops over what crosses the link from level j, which
    is the ``share`` of the weights that lies at j or beyond, and ``hidden_bytes`` of hidden states."""
    weights = model.experts.num_experts * costs.moved_page_bytes(model, weight_dtype) * share
    return flops_of_experts(model, tokens) / (weights + hidden_bytes)


@dataclass(frozen=True, kw_only=True, slots=True)
class Point:
    """One kind of work of a policy under the roofs. ``level`` computes, ``home`` holds the data (equal if nothing
    crosses a link); ``flops`` is the attained flop/s and ``bound`` its limit: ``compute``, ``memory`` or ``link``."""

    work: str
    level: str
    home: str
    intensity: float
    home_intensity: float
    flops: float
    bound: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Mark:
    """A turning point of the link between ``near`` and ``far``: its intensity at ``far`` and its flop/s."""

    name: str
    near: str
    far: str
    far_intensity: float
    flops: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Roofline:
    """The roofs of a machine, the work of a policy under them, and the relevant turning points.

    ``chain`` has the speeds that the machine sustains, under which the work and the turning points lie; ``stated``
    those of its profile."""

    machine: str
    model: str
    chain: Chain
    stated: Chain
    points: tuple[Point, ...]
    marks: tuple[Mark, ...]
    batch_size: int
    micro_batch_size: int


def roofline_of(hardware: HardwareProfile, model: ModelProfile, policy: Policy, workload: Workload) -> Roofline:
    """The roofline of decoding under ``policy``: attention at the average context, experts at μ and N."""
    chain = sustained_chain(hardware)
    attention, experts = _attention_point(chain, model, policy, workload), _ffn_points(chain, model, policy)
    return Roofline(
        machine=hardware.name,
        model=model.name,
        chain=chain,
        stated=chain_of(hardware),
        points=(attention, *experts),
        marks=_marks(chain, experts[0]),
        batch_size=policy.batch_size,
        micro_batch_size=policy.micro_batch_size,
    )


def _places(chain: Chain) -> dict[str, int]:
    """The index of each level by its name and by its processor."""
    return {key: index for index, level in enumerate(chain) for key in (level.name, level.processor)}


def _point(chain: Chain, work: str, near: int, far: int, intensity: float, far_intensity: float) -> Point:
    level = chain[near]
    bounds = {"compute": compute_roof(level), "memory": memory_roof(level, intensity)}
    if far != near:
        bounds["link"] = link_roof(chain[far - 1].link_bandwidth, far_intensity)
    bound = min(bounds, key=bounds.__getitem__)
    return Point(
        work=work,
        level=level.name,
        home=chain[far].name,
        intensity=intensity,
        home_intensity=far_intensity,
        flops=bounds[bound],
        bound=bound,
    )


def _attention_point(chain: Chain, model: ModelProfile, policy: Policy, workload: Workload) -> Point:
    places = _places(chain)
    near = places.get(policy.attention_device, 0)
    context = workload.prompt_len + workload.gen_len / 2
    intensity = attention_intensity(model, context, kv_dtype=_dtype(policy.kv_dtype, model))
    shares = {places[name]: getattr(policy.kv, name) for name in ("device", "host") if name in places}
    far = max([near, *(tier for tier, share in shares.items() if share)])
    return _point(chain, "attention", near, far, intensity, intensity / (shares[far] if far > near else 1.0))


def _ffn_points(chain: Chain, model: ModelProfile, policy: Policy) -> tuple[Point, ...]:
    """The points of the experts, fed over the tightest link; with ``split`` also the experts that the CPU computes.

    A page crosses every link from its home to the level that computes; hidden states cross the link to the device where
    the CPU attends."""
    places, dtype = _places(chain), costs.page_dtype(model, DTYPES[model.dtype], policy.weight_dtype)
    near = places.get("cpu" if policy.ffn_device == "cpu" else "gpu", 0)
    intensity = ffn_intensity(model, policy.micro_batch_size, weight_dtype=dtype)
    beyond = {"host": policy.weights.host - policy.cpu_experts + policy.weights.disk, "disk": policy.weights.disk}
    attended = places.get(policy.attention_device, 0)
    options = []
    for far, level in enumerate(chain[near + 1 :], near + 1):
        if (share := beyond[level.name]) > 0:
            crosses = near < far <= attended
            hidden = costs.hidden_bytes(model, DTYPES[model.dtype], policy.batch_size) if crosses else 0
            fed = fed_intensity(model, policy.batch_size, share=share, weight_dtype=dtype, hidden_bytes=hidden)
            options.append(_point(chain, "ffn", near, far, intensity, fed))
    local = _point(chain, "ffn", near, near, intensity, intensity)
    points = [min(options, key=lambda point: point.flops, default=local)]
    if policy.cpu_experts > 0:
        beside = places.get("cpu", 0)
        points.append(_point(chain, "ffn on the CPU", beside, beside, intensity, intensity))
    return tuple(points)


def _marks(chain: Chain, ffn: Point) -> tuple[Mark, ...]:
    """P1 of every link whose far level computes; P2 and the balance point of the link that bounds the experts."""
    marks: list[Mark] = []

    def add(name: str, near: int, far: int, far_intensity: float) -> None:
        flops = link_roof(chain[far - 1].link_bandwidth, far_intensity)
        ends = {"near": chain[near].name, "far": chain[far].name}
        marks.append(Mark(name=name, **ends, far_intensity=far_intensity, flops=flops))

    for far in range(1, len(chain)):
        if chain[far].peak_flops:
            add("P1", far - 1, far, first_turning_point(chain[far], chain[far - 1].link_bandwidth))
    near = _places(chain)[ffn.level]
    far = _places(chain)[ffn.home] if ffn.home != ffn.level else near + 1
    if far < len(chain):
        link = chain[far - 1].link_bandwidth
        add("P2", near, far, second_turning_point(chain[near], link, ffn.intensity))
        add("balance", near, far, balance_point(chain[near], link, ffn.intensity))
    return tuple(marks)


def _dtype(name: str, model: ModelProfile) -> DType:
    return DTYPES[model.dtype if name == "auto" else name]
