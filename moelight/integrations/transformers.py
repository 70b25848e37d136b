"""`attach`: pages the experts of a built transformers model; `detach` restores the model.

Does not depend on the handling of pages (`pager`), what experts compute (`paged_modules`) and how a policy decides
(`policies`).
"""

from __future__ import annotations

import ctypes
import math
import os
import tempfile
import threading
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from moelight.core.errors import BudgetError, ConfigError, did_you_mean
from moelight.core.units import align_up, format_bytes
from moelight.experts.policy import DEFAULT_POLICY, Capacity, ExpertPolicy
from moelight.experts.profile import Facts, facts_of_model, load_profile
from moelight.experts.residency import Residency
from moelight.experts.sizing import RESERVE_BYTES, Status, plan_slots
from moelight.integrations.layers import PAGE_ALIGNMENT, MoeLayer, ask, chosen, moe_layers, top_k
from moelight.integrations.links import HostLink, PageLink, StreamLink
from moelight.integrations.page_stores import DiskStore, HostStore, OffloadStore
from moelight.integrations.paged_modules import PagedExpertList, PagedExperts, PagedFusedExperts
from moelight.integrations.pager import STAGED, ExpertPager
from moelight.lang.check import read
from moelight.lang.files import load_expert_policy
from moelight.memory.locking import on_huge_pages
from moelight.runtime.measure import available_bytes


def offload_layer(home: OffloadStore, number: int, layer: MoeLayer) -> None:
    """Copy the experts of layer ``number`` to ``home`` and free their memory."""
    home.keep(number, layer)
    for held in layer.parameters:
        parameter = held.parameter
        held.owner._parameters[held.key] = nn.Parameter(
            torch.empty_like(parameter, device="meta"), requires_grad=parameter.requires_grad
        )
        parameter.data = parameter.data.new_empty(0)


def trim() -> None:
    """Return freed memory to the system: glibc keeps allocations of less than 32 MiB."""
    give = getattr(ctypes.CDLL(None), "malloc_trim", None)  # other C libraries lack malloc_trim and do not need it
    if give is not None:
        give(0)


def restore_layer(home: OffloadStore, link: PageLink, number: int, layer: MoeLayer) -> None:
    """Restore the bytes of the parameters of layer ``number`` and put them back into the model.

    Raises:
        CheckpointError: the offload store cannot be read; the layer remains offloaded.
    """
    coming, wholes = [], []
    for held in layer.parameters:
        shape = held.piece.shape if held.expert is not None else (layer.num_experts, *held.piece.shape)
        whole = held.parameter.data.new_empty(shape)
        wholes.append(whole)
        for expert, tensor in held.parts(whole):
            coming.append(link.start(home, number, expert, [(held.piece.offset, _cells(tensor))]))
    for in_flight in coming:
        in_flight.wait()
    for held, whole in zip(layer.parameters, wholes, strict=True):
        held.parameter.data = whole
        held.owner._parameters[held.key] = held.parameter


def _cells(tensor: Tensor) -> Tensor:
    return tensor.view(-1).view(torch.uint8)


def residency_of(
    policy: ExpertPolicy, model: nn.Module, layers: Sequence[MoeLayer], page_bytes: int, active: int | None
) -> tuple[Residency, int]:
    """The residency of ``policy`` on ``model``, and the most slots that the policy or one of its rules sets.

    Raises:
        ConfigError: the policy does not fit the model, or its profile is of another model.
    """
    count, experts = len(layers), max(layer.num_experts for layer in layers)
    known = None
    if policy.cache.profile is not None:
        facts = _facts(model, layers, active)
        known = load_profile(Path(policy.cache.profile), model=facts, num_layers=count, num_experts=experts)
    most = max(_capacities(policy, num_layers=count, num_experts=experts, page_bytes=page_bytes))
    residency = Residency(
        policy,
        num_layers=count,
        num_experts=experts,
        active=active,
        page_bytes=page_bytes,
        known=known,
        most_slots=most,
    )
    return residency, most


def _capacities(policy: ExpertPolicy, *, num_layers: int, num_experts: int, page_bytes: int) -> Iterator[int]:
    """Yield the initial slots of the policy, then the slots that its rules may set."""
    yield policy.slots(num_layers, num_experts, page_bytes)
    for rule in policy.adapt:
        if isinstance(rule.action.value, Capacity):
            yield policy.slots_of(rule.action.value, num_layers, num_experts, page_bytes)


def _facts(model: nn.Module, layers: Sequence[MoeLayer], active: int | None) -> Facts:
    """The facts that identify this model in profiles."""
    return facts_of_model(
        model_type=str(getattr(getattr(model, "config", None), "model_type", type(model).__name__)),
        moe_layers=len(layers),
        num_experts=max(layer.num_experts for layer in layers),
        top_k=active,
        expert_numbers=sum(math.prod(piece.shape) for piece in layers[0].pieces),
    )


def policy_for(
    experts: Sequence[int],
    active: Sequence[int | None],
    *,
    page_bytes: int,
    spare_bytes: int,
    free_bytes: int,
    batch: int,
) -> tuple[ExpertPolicy, str]:
    """A policy for layers with ``experts`` experts each, of which a token uses ``active`` (None: unknown), and the
    reason.

    The capacity is twice a token's experts, or the experts that ``batch`` tokens are expected to use
    (`experts.sizing`), as far as ``free_bytes`` suffice beside ``spare_bytes``. Everything else is as in
    `DEFAULT_POLICY`.

    Raises:
        BudgetError: there is no memory for a single expert.
    """
    layers, most, each = len(experts), max(experts), max((k or 1 for k in active), default=1)
    plan = plan_slots(
        layers=layers,
        num_experts=most,
        active=each,
        free_bytes=free_bytes,
        per_expert_bytes=page_bytes,
        reserve_bytes=RESERVE_BYTES + spare_bytes,
        batch=batch,
    )
    if plan.status is Status.BUDGET_EXHAUSTED:
        needed = RESERVE_BYTES + spare_bytes + page_bytes
        raise BudgetError(
            f"{format_bytes(free_bytes)} are free, {format_bytes(needed, round_up=True)} is the least to attach with",
            tier="host",
            needed_bytes=needed,
        )
    slots = min(plan.slots, plan.recommended, sum(experts))
    everything = slots >= sum(experts)
    rules = DEFAULT_POLICY
    strategy = "none" if everything else "previous" if None in active else rules.prefetch.strategy
    if plan.status is not Status.OK:
        why = "as many as there is memory for"
    elif everything:
        why = "all of them"
    elif batch == 1:
        why = f"twice the {each} of a token in each of {layers} layers"
    else:
        why = f"what {batch} tokens of {each} experts are expected to meet in each of {layers} layers"
    policy = replace(
        rules,
        name="auto",
        cache=replace(rules.cache, capacity=Capacity(value=slots)),
        prefetch=replace(rules.prefetch, strategy=strategy, budget=each),
        per_layer=None if rules.per_layer is None or slots < layers else replace(rules.per_layer, total_budget=slots),
    )
    reason = (
        f"room for {slots} of {sum(experts)} experts ({format_bytes(slots * page_bytes)}): {why}, with "
        f"{format_bytes(free_bytes)} free; {' | '.join(rules.cache.eviction)}, prefetch {strategy}"
    )
    return policy, reason


def read_expert_policy(policy: ExpertPolicy | str | Path) -> ExpertPolicy:
    """An expert policy given as an object, as the text of a ``.moe`` file (which contains braces), or as a path.

    Raises:
        ConfigError: the file does not exist, the text has errors, or it does not hold exactly one policy.
    """
    if isinstance(policy, ExpertPolicy):
        return policy
    if not isinstance(policy, (str, os.PathLike)):
        raise ConfigError(f"policy: an ExpertPolicy, .moe text or a path, not {type(policy).__name__}")
    if not isinstance(policy, str) or "{" not in policy:
        return load_expert_policy(policy)
    reading = read(policy)
    if reading.errors:
        raise ConfigError("policy: " + "; ".join(f"{e.line}:{e.column}: {e.message}" for e in reading.errors))
    if len(reading.policies) != 1:
        raise ConfigError(f"policy: the text has {len(reading.policies)} policies, attach takes one")
    return reading.policies[0]


HOMES = ("disk", "memory")
_MARK = "_moelight_attachment"


def attach(
    model: nn.Module,
    policy: ExpertPolicy | str | Path,
    *,
    home: str | None = None,
    directory: str | Path | None = None,
) -> Attachment:
    """Page the experts of ``model``, a transformers MoE model for inference.

    Beside the compute unit there are as many slots as the policy's capacity, and `STAGED` more for streamed experts.
    All other experts are offloaded: to a private file on disk for a model on a CPU, to host memory for one on a GPU.
    ``model.generate`` and the model itself work as before and give the same tokens.

    Args:
        model: in float32, bfloat16, float16 or float64, its experts in memory and on one device.
        policy: an `ExpertPolicy`, the text of a ``.moe`` file with one policy, or the path of one.
        home: store of offloaded experts: ``disk`` (for a model on a CPU), or ``memory``.
        directory: directory of the experts' file, which is unlinked once written; by default the system's temporary
            directory.

    Raises:
        ConfigError: the model has no experts that can be moved, or the policy is invalid or does not fit the model.
        BudgetError: there is too little memory for the slots.
    """
    _refuse_attached(model)
    return Attachment(model, read_expert_policy(policy), home=home, directory=directory)


def auto_attach(
    model: nn.Module, *, batch: int = 1, home: str | None = None, directory: str | Path | None = None
) -> Attachment:
    """`attach` with a policy made for ``model``: slots for twice a token's experts in every layer, or for the experts
    that ``batch`` tokens are expected to use, as far as memory suffices. `Attachment.reason` gives the choice and the
    reason."""
    _refuse_attached(model)
    layers = moe_layers(model)
    page_bytes = _slot_bytes(layers)
    counts = [layer.num_experts for layer in layers]
    policy, reason = policy_for(
        counts,
        [top_k(layer, getattr(model, "config", None)) for layer in layers],
        page_bytes=page_bytes,
        spare_bytes=STAGED * page_bytes,
        free_bytes=_free_bytes(layers[0].device) + sum(layer.num_experts * layer.page_bytes for layer in layers),
        batch=batch,
    )
    return Attachment(model, policy, home=home, directory=directory, reason=reason)


class Attachment:
    """A model with paged experts, until `detach`; also a context manager.

    Attributes:
        model, policy: as given.
        reason: why `auto_attach` chose the policy; empty after `attach`.
        resident_bytes: memory of the slots beside the compute unit.
        offloaded_bytes: memory of all experts.
    """

    def __init__(
        self,
        model: nn.Module,
        policy: ExpertPolicy,
        *,
        home: str | None = None,
        directory: str | Path | None = None,
        reason: str = "",
    ) -> None:
        self.model, self.policy, self.reason = model, policy, reason
        self._layers, self._turn = moe_layers(model), threading.Lock()
        layers, device, page_bytes = self._layers, self._layers[0].device, _slot_bytes(self._layers)
        self._top_k = [top_k(layer, getattr(model, "config", None)) for layer in layers]
        self._device, self._served, self._away = device, list[PagedExperts](), list[int]()
        residency, most = residency_of(policy, model, layers, page_bytes, active=self._top_k[0])
        slots = _slots(most + STAGED, page_bytes, device)
        self._home = _home(home, directory, layers, page_bytes)
        self.pager = ExpertPager(residency, self._home, _link(device), slots)
        self.resident_bytes, self.offloaded_bytes = (
            slots.numel(),
            sum(layer.num_experts for layer in layers) * page_bytes,
        )
        weakref.finalize(self.pager, _release, self.pager.link, self._home)
        self._attached = True
        try:
            served = [self._server(number) for number in range(len(layers))]
            for number, layer in enumerate(layers):
                offload_layer(self._home, number, layer)
                self._away.append(number)
            self._home.kept()
            trim()
            for each in served:
                self._served.append(each)
                each.install()
            self.pager.begin()
        except BaseException:
            self._home.kept()
            self.detach()
            raise
        setattr(model, _MARK, self)

    def get_stats(self) -> dict[str, Any]:
        """Statistics of the cache, the prefetcher and the link, for JSON."""
        with self.pager.held():
            return _stats(self)

    def detach(self) -> None:
        """Restore the experts in the model, with its original modules and parameters. Further calls have no effect.

        Raises:
            CheckpointError: the experts' file cannot be read; the model is unusable then.
        """
        with self._turn:
            if not self._attached:
                return
            self._attached = False
            if getattr(self.model, _MARK, None) is self:
                delattr(self.model, _MARK)
            for served in reversed(self._served):
                served.remove()
            self.pager.end()
            link = _link(self._device)  # a new link, since an error closes a link permanently
            try:
                for number in self._away:
                    restore_layer(self._home, link, number, self._layers[number])
            finally:
                link.close()
                self._home.close()

    close = detach

    def __enter__(self) -> Attachment:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.detach()

    def _server(self, number: int) -> PagedExperts:
        layer, k = self._layers[number], self._top_k[number]
        following = (number + 1) % len(self._layers)
        hint = _Hint(self.pager, following, self._layers[following].router, self._layers[following].num_experts, k)
        if self.policy.prefetch.strategy == "next_router" and hint.router is None:
            raise ConfigError(
                f"predictor next_router: {self._layers[following].name} has no router beside it that could be asked; "
                "choose another predictor"
            )
        if layer.fused:
            return PagedFusedExperts(layer, number, self.pager, hint)
        return PagedExpertList(layer, number, self.pager, hint, lambda output: chosen(output, layer.num_experts, k))


class _Hint:
    """Evaluates the next layer's router on this layer's hidden states, if the active predictor uses it."""

    def __init__(
        self, pager: ExpertPager, layer: int, router: nn.Module | None, num_experts: int, k: int | None
    ) -> None:
        self.router = router
        self._pager, self._layer, self._num_experts, self._k = pager, layer, num_experts, k

    def __call__(self, states: Tensor) -> None:
        if self.router is None or not self._pager.predicts_experts:
            return
        found = ask(self.router, states, self._num_experts, self._k)
        if found is not None:
            self._pager.hint(self._layer, *found)


def _stats(attachment: Attachment) -> dict[str, Any]:
    pager, cache = attachment.pager, attachment.pager.cache
    moved, stats = pager.moved, cache.stats
    return {
        "policy": {
            "name": attachment.policy.name,
            "steps": moved.turns,
            "cache": {
                "hits": int(stats.hits.sum()),
                "misses": int(stats.misses.sum()),
                "evictions": stats.evictions,
                "hit_rate": stats.hit_rate,
            },
            "prefetch": {
                "issued": moved.issued,
                "useful": moved.useful,
                "accuracy": moved.useful / moved.issued if moved.issued else 0.0,
            },
        },
        "placement": {
            "home": pager.home.where,
            "transfers": moved.transfers,
            "bytes": moved.bytes,
            "transfer_s": moved.transfer_s,
            "stall_s": moved.stall_s,
            "streamed": moved.streamed,
        },
        "experts": pager.residency.stats({"link": moved.stall_s}),
        "resident_bytes": attachment.resident_bytes,
        "offloaded_bytes": attachment.offloaded_bytes,
    }


def _refuse_attached(model: nn.Module) -> None:
    if not isinstance(model, nn.Module):
        raise ConfigError(f"attach wants a model, not {type(model).__name__}")
    if getattr(model, _MARK, None) is not None:
        raise ConfigError(f"{type(model).__name__} is attached already; detach() it first")


def _slot_bytes(layers: list[MoeLayer]) -> int:
    return align_up(max(layer.page_bytes for layer in layers), PAGE_ALIGNMENT)


def _slots(count: int, slot_bytes: int, device: torch.device) -> Tensor:
    size = count * slot_bytes
    try:
        near = on_huge_pages(size) if device.type == "cpu" else torch.empty(size, dtype=torch.uint8, device=device)
    except (RuntimeError, MemoryError, OSError):
        raise BudgetError(
            f"{device} has no {format_bytes(size)} for {count} experts; lower the policy's capacity",
            tier="host" if device.type == "cpu" else "device",
            needed_bytes=size,
        ) from None
    return near.view(count, slot_bytes)


def _home(home: str | None, directory: str | Path | None, layers: list[MoeLayer], slot_bytes: int) -> OffloadStore:
    device = layers[0].device
    if home is not None and home not in HOMES:
        raise ConfigError(f"home {home!r}: known are {', '.join(HOMES)}{did_you_mean(home, HOMES)}")
    if home == "disk" and device.type != "cpu":
        raise ConfigError(f"home 'disk' is for models on a CPU; experts of one on {device} go to memory")
    if home == "memory" or device.type != "cpu":
        return HostStore(device, len(layers), slot_bytes)
    most = max(layer.num_experts for layer in layers)
    return DiskStore(Path(directory or tempfile.gettempdir()), len(layers), most, slot_bytes)


def _link(device: torch.device) -> PageLink:
    return HostLink() if device.type == "cpu" else StreamLink.on(device)


def _free_bytes(device: torch.device) -> int:
    return available_bytes() if device.type == "cpu" else torch.get_device_module(device).mem_get_info(device)[0]


def _release(link: PageLink, home: OffloadStore) -> None:
    link.close()
    home.close()
