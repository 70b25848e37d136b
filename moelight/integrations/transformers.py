"""`attach`: pages the experts of a built transformers model; `detach` restores the model."""

from __future__ import annotations

import ctypes
import math
import os
import tempfile
import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from moelight.core.errors import BudgetError, ConfigError, did_you_mean
from moelight.core.schedule import Page
from moelight.core.units import align_up, format_bytes, parse_bytes
from moelight.experts.policy import DEFAULT_POLICY, MODES, STRATEGIES, Capacity, ExpertPolicy
from moelight.experts.profile import facts_of_model, load_profile
from moelight.experts.sizing import RESERVE_BYTES, Status, plan_slots
from moelight.integrations.layers import (
    ATTACHMENT,
    PAGE_ALIGNMENT,
    ExpertParameter,
    MoeLayer,
    find_moe_layers,
    moe_layers,
)
from moelight.integrations.paged_modules import PagedExpertList, PagedExpertModule, PagedFusedExperts
from moelight.kernels.device import Device
from moelight.lang.check import read
from moelight.lang.files import load_expert_policy
from moelight.paging.arena import on_huge_pages
from moelight.paging.offload import DiskStore, HostStore, OffloadStore, bytes_of
from moelight.paging.residency import ModelFacts, ResidencyManager
from moelight.paging.slots import PendingPage
from moelight.paging.turns import STAGED, SlotPager
from moelight.runtime.measure import available_bytes
from moelight.weights.source import resolve_model


def offload_layer(store: OffloadStore, number: int, layer: MoeLayer) -> None:
    """Copy the experts of layer ``number`` to ``store``; free their memory."""
    store.keep(number, layer.name, layer.tensors())
    for held in layer.parameters:
        parameter = held.parameter
        if not parameter.is_meta:
            held.owner._parameters[held.key] = nn.Parameter(
                torch.empty_like(parameter, device="meta"), requires_grad=parameter.requires_grad
            )
        if held.stored is not None:
            held.stored.data = held.stored.data.new_empty(0)


def restore_layer(store: OffloadStore, number: int, layer: MoeLayer) -> None:
    """Put the parameters of layer ``number`` back into the model, or into the memory in which accelerate had them.
    After CheckpointError the layer remains offloaded."""
    pending: list[PendingPage] = []
    restored: list[tuple[ExpertParameter, Tensor, Tensor]] = []
    for held in layer.parameters:
        if held.stored is None:
            continue
        shape = held.piece.shape if held.expert is not None else (layer.num_experts, *held.piece.shape)
        restored.append((held, held.stored, held.stored.data.new_empty(shape)))
        for expert, tensor in held.parts(restored[-1][2]):
            pending.append(store.start(Page(layer=number, expert=expert), [(held.piece.offset, bytes_of(tensor))]))
    for transfer in pending:
        transfer.wait()
    for held, stored, full_tensor in restored:
        stored.data = full_tensor
        held.owner._parameters[held.key] = held.parameter


def residency_of(policy: ExpertPolicy, model: nn.Module, layers: Sequence[MoeLayer]) -> tuple[ResidencyManager, int]:
    """The residency of ``policy`` on ``model``, and the most slots that the policy or one of its rules sets; raises
    ConfigError if policy or profile do not fit the model."""
    for layer in layers:
        if policy.prefetch.strategy == "next_router" and layer.router is None:
            raise ConfigError(
                f"predictor next_router: {layer.name} has no router beside it that could be asked; "
                "choose another predictor"
            )
    count, experts, page_bytes = len(layers), max(layer.num_experts for layer in layers), _slot_bytes(layers)
    facts = facts_of_model(
        model_type=str(getattr(getattr(model, "config", None), "model_type", type(model).__name__)),
        moe_layers=count,
        num_experts=experts,
        top_k=layers[0].top_k,
        expert_numbers=sum(math.prod(piece.shape) for piece in layers[0].pieces),
    )
    profile = None
    if policy.cache.profile is not None:
        profile = load_profile(Path(policy.cache.profile), model=facts, num_layers=count, num_experts=experts)
    values = [rule.action.value for rule in policy.adapt]
    sizes = [policy.slots_of(value, count, experts, page_bytes) for value in values if isinstance(value, Capacity)]
    max_slots = max([policy.slots(count, experts, page_bytes), *sizes])
    shape = ModelFacts(
        moe_layers=(True,) * count, num_experts=experts, top_k=layers[0].top_k, page_bytes=page_bytes, facts=facts
    )
    return ResidencyManager(policy, shape, resident=None, profile=profile, most_slots=max_slots), max_slots


def policy_for(
    layers: Sequence[MoeLayer], batch: int, *, memory: int | None = None, prefetch: str | None = None
) -> tuple[ExpertPolicy, str]:
    """`DEFAULT_POLICY` with slots for twice a token's experts, or for the experts that ``batch`` tokens are expected to
    use, as far as free memory, or ``memory`` bytes of it, suffices, and the reason; ``prefetch`` is its strategy.
    Raises BudgetError if not one expert fits."""
    top_k, experts = max(layer.top_k or 1 for layer in layers), sum(layer.num_experts for layer in layers)
    page_bytes, device = _slot_bytes(layers), layers[0].device
    free = available_bytes() if Device(device).host else Device(device).memory()[0]
    free += sum(layer.num_experts * layer.page_bytes for layer in layers if layer.resident)
    reserve = RESERVE_BYTES + STAGED * page_bytes
    if memory is not None and memory < free:
        free, reserve = memory, STAGED * page_bytes
    plan = plan_slots(
        layers=len(layers),
        num_experts=max(layer.num_experts for layer in layers),
        active=top_k,
        free_bytes=free,
        per_expert_bytes=page_bytes,
        reserve_bytes=reserve,
        batch=batch,
    )
    if plan.status is Status.BUDGET_EXHAUSTED:
        raise BudgetError(
            f"{format_bytes(free)} are free, {format_bytes(reserve + page_bytes, round_up=True)} is the least to "
            "attach with",
            tier="host",
            needed_bytes=reserve + page_bytes,
        )
    slots, rules = min(plan.slots, plan.recommended, experts), DEFAULT_POLICY
    strategy = rules.prefetch.strategy if all(layer.top_k is not None for layer in layers) else "previous"
    if plan.status is not Status.OK:
        reason = "as many as there is memory for"
    elif slots >= experts:
        reason, strategy = "all of them", "none"
    elif batch == 1:
        reason = f"twice the {top_k} of a token in each of {len(layers)} layers"
    else:
        reason = f"what {batch} tokens of {top_k} experts are expected to meet in each of {len(layers)} layers"
    strategy = strategy if prefetch is None else prefetch
    even = None if rules.per_layer is None or slots < len(layers) else replace(rules.per_layer, total_budget=slots)
    policy = replace(
        rules,
        name="auto",
        cache=replace(rules.cache, capacity=Capacity(value=slots)),
        prefetch=replace(rules.prefetch, strategy=strategy, budget=top_k),
        per_layer=even,
    )
    return policy, (
        f"room for {slots} of {experts} experts ({format_bytes(slots * page_bytes)}): {reason}, with "
        f"{format_bytes(free)} free; {' | '.join(rules.cache.eviction)}, prefetch {strategy}"
    )


def read_expert_policy(policy: ExpertPolicy | str | Path) -> ExpertPolicy:
    """``policy`` itself, or parsed from the text of a ``.moe`` file (which contains braces) or from a path; raises
    ConfigError if that is not exactly one valid policy."""
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


def attach(
    model: nn.Module | str | Path,
    policy: ExpertPolicy | str | Path,
    *,
    device: str | torch.device | None = None,
    dtype: str = "auto",
    home: str | None = None,
    directory: str | Path | None = None,
) -> Attachment:
    """Page the experts of ``model``, a transformers MoE model for inference.

    Beside the compute unit there are as many slots as the policy's capacity, and 4 more (`STAGED`), through which
    experts without a slot are streamed, or, where the policy's ``mode`` says so, computed from host memory. All other
    experts are offloaded. ``model.generate`` and the model itself work as before and give the same tokens, on a GPU
    beside the CPU up to rounding.

    Args:
        model: in float32, bfloat16, float16 or float64, its experts on one device, or offloaded by accelerate and
            computed on one; or a checkpoint (a directory, a hub id or ``demo``), whose experts are never all in memory:
            `Attachment.model` is the model.
        policy: an `ExpertPolicy`, the text of a ``.moe`` file with one policy, or the path of one.
        device: of the model of a checkpoint; by default ``cpu``.
        dtype: of the model of a checkpoint, as transformers takes it: by default that of the checkpoint.
        home: store of the offloaded experts, ``disk`` (a private file; only for a model on a CPU) or ``memory`` (host
            memory). By default ``disk`` for a model on a CPU, ``memory`` for one on a GPU.
        directory: directory of the experts' file, which is unlinked once written; by default the system's temporary
            directory.

    Returns:
        The attachment; its ``detach`` restores the model. A checkpoint's model has all experts in memory then.

    Raises:
        ConfigError: the model has no experts that can be moved or is attached already, or the policy is invalid or does
            not fit the model.
        BudgetError: there is too little memory for the slots.
    """
    rules = read_expert_policy(policy)
    with opened(model, device, dtype, directory) as (built, layers):
        return Attachment(built, rules, layers, home=home, directory=directory)


def auto_attach(
    model: nn.Module | str | Path,
    *,
    batch: int = 1,
    memory: int | str | None = None,
    prefetch: str | None = None,
    warm_pin: int | None = None,
    mode: str = "gpu_only",
    device: str | torch.device | None = None,
    dtype: str = "auto",
    home: str | None = None,
    directory: str | Path | None = None,
) -> Attachment:
    """Page the experts of ``model`` as `attach` does, with a policy made for the model and the free memory.

    Every layer gets slots for twice a token's experts, or for the experts that ``batch`` tokens are expected to use, as
    far as memory suffices. `Attachment.reason` gives the choice and the reason.

    Args:
        model: as in `attach`.
        batch: tokens that one forward pass computes together, for example the number of sequences that are decoded.
        memory: the most bytes that slots take, or text such as ``"6GiB"``; by default as much as is free.
        prefetch: the strategy by which experts are prefetched (``strategy`` of the policy language); by default by the
            next layer's router, or by the tokens before where there is none, and ``none`` if all experts have slots.
        warm_pin: accesses after which the busiest resident experts are pinned; by default none are.
        mode: where a missing expert is computed (``mode`` of the policy language).
        device: as in `attach`.
        dtype: as in `attach`.
        home: as in `attach`.
        directory: as in `attach`.

    Raises:
        ConfigError: the model has no experts that can be moved, or is attached already; or no such strategy or mode.
        BudgetError: there is too little memory for the slots.
    """
    max_bytes = None if memory is None else parse_bytes(memory, label="memory")
    if prefetch is not None and prefetch not in STRATEGIES:
        strategies = ", ".join(STRATEGIES)
        raise ConfigError(f"prefetch {prefetch!r}: known are {strategies}{did_you_mean(prefetch, STRATEGIES)}")
    if mode not in MODES:
        raise ConfigError(f"mode {mode!r}: known are {', '.join(MODES)}{did_you_mean(mode, MODES)}")
    if warm_pin is not None and warm_pin < 1:
        raise ConfigError(f"warm_pin must be at least 1 access, not {warm_pin}")
    with opened(model, device, dtype, directory) as (built, layers):
        policy, reason = policy_for(layers, batch, memory=max_bytes, prefetch=prefetch)
        schedule = replace(policy.schedule, mode=mode)
        policy = replace(policy, cache=replace(policy.cache, warm_pin=warm_pin), schedule=schedule)
        return Attachment(built, policy, layers, home=home, directory=directory, reason=reason)


@contextmanager
def opened(
    model: nn.Module | str | Path, device: str | torch.device | None, dtype: str, directory: str | Path | None
) -> Iterator[tuple[nn.Module, list[MoeLayer]]]:
    """``model`` and its layers. Of a checkpoint everything but the experts is loaded to ``device``; the experts are
    files in ``directory`` until the block is left, or the checkpoint's where they are stored as the model has them."""
    if isinstance(model, nn.Module) or not isinstance(model, (str, os.PathLike)):
        if device is not None or dtype != "auto":
            raise ConfigError("device and dtype are for checkpoints; a model that is built has its own")
        yield model, moe_layers(model)
        return
    with tempfile.TemporaryDirectory(prefix="moelight-", dir=directory) as folder:
        built = _without_experts(resolve_model(str(model)), dtype, folder)
        layers = moe_layers(built)
        _to_device(built, layers, torch.device("cpu" if device is None else device))
        yield built, layers


def _without_experts(checkpoint: Path, dtype: str, folder: str) -> nn.Module:
    try:
        from accelerate.hooks import remove_hook_from_module  # noqa: F401
        from transformers import AutoConfig, AutoModelForCausalLM
    except ImportError as error:
        raise ConfigError(
            f"attach reads checkpoints with transformers and accelerate ({error}): pip install 'moelight[transformers]'"
        ) from None
    config = AutoConfig.from_pretrained(checkpoint)
    with torch.device("meta"):
        outline = AutoModelForCausalLM.from_config(config)
    device_map = _device_map(outline, {layer.name for layer in find_moe_layers(outline)})
    model: nn.Module = AutoModelForCausalLM.from_pretrained(
        checkpoint, config=config, dtype=dtype, device_map=device_map, offload_folder=folder
    )
    return model.eval()


def _device_map(module: nn.Module, experts: set[str], name: str = "") -> dict[str, str]:
    """accelerate's device map: ``experts`` on the disk, all other modules in memory."""
    if name in experts:
        return {name: "disk"}
    if not any(path.startswith(f"{name}." if name else "") for path in experts):
        return {name: "cpu"}
    devices = {}
    for key, child in module.named_children():
        devices.update(_device_map(child, experts, f"{name}.{key}".lstrip(".")))
    tensors = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
    return {**devices, **{f"{name}.{key}".lstrip("."): "cpu" for key, _ in tensors}}


def _to_device(model: nn.Module, layers: Sequence[MoeLayer], device: torch.device) -> None:
    """Take accelerate's hooks off ``model``, and move it to ``device``; its experts compute there."""
    from accelerate.hooks import remove_hook_from_module

    remove_hook_from_module(model, recurse=True)
    vars(model).pop("hf_device_map", None)
    for module in model.modules():
        for parameter in module._parameters.values():
            if parameter is not None and not parameter.is_meta:
                parameter.data = parameter.data.to(device)
        for key, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[key] = buffer.to(device)
    for layer in layers:
        layer.device = device
        for held in layer.parameters:
            empty = torch.empty(0, dtype=held.piece.dtype, device=device)
            held.parameter = nn.Parameter(empty, requires_grad=held.parameter.requires_grad)
            held.stored = held.parameter


class Attachment:
    """A model with paged experts, until `detach`; also a context manager.

    Attributes:
        model: as given, or loaded from the checkpoint.
        policy: as given, or as `auto_attach` chose it.
        reason: why `auto_attach` chose the policy; empty after `attach`.
        resident_bytes: memory of the slots beside the compute unit.
        offloaded_bytes: memory of all experts.
    """

    def __init__(
        self,
        model: nn.Module,
        policy: ExpertPolicy,
        layers: list[MoeLayer],
        *,
        home: str | None = None,
        directory: str | Path | None = None,
        reason: str = "",
    ) -> None:
        self.model, self.policy, self.reason, self._layers = model, policy, reason, layers
        residency, max_slots = residency_of(policy, model, layers)
        slots = _slots(max_slots + STAGED, _slot_bytes(layers), layers[0].device)
        self._store = _store(home, directory, layers)
        self.pager = SlotPager(residency, self._store, slots)
        self.resident_bytes = slots.numel()
        self.offloaded_bytes = sum(layer.num_experts * _slot_bytes([layer]) for layer in layers)
        weakref.finalize(self.pager, self._store.close)
        self._detaching = threading.Lock()
        with ExitStack() as undo:
            undo.callback(self._store.close)
            paged: list[PagedExpertModule] = []
            for number, layer in enumerate(layers):
                following = (number + 1) % len(layers)
                kind = PagedFusedExperts if layer.fused else PagedExpertList
                paged.append(kind(layer, number, (following, layers[following]), self.pager))
            try:
                for number, layer in enumerate(layers):
                    offload_layer(self._store, number, layer)
                    undo.callback(restore_layer, self._store, number, layer)
            finally:
                self._store.finish()
            if (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:
                trim(0)  # glibc keeps freed allocations of less than 32 MiB; other C libraries do not
            undo.callback(self.pager.end)
            for module in paged:
                undo.enter_context(module.undo)
                module.install()
            self.pager.begin()
            setattr(model, ATTACHMENT, self)
            undo.callback(delattr, model, ATTACHMENT)
            self._undo = undo.pop_all()

    def get_stats(self) -> dict[str, Any]:
        """Statistics of the cache, the prefetcher and the link, for JSON."""
        with self.pager.lock:
            moved, residency = self.pager.stats, self.pager.residency
            cache = residency.residency.cache.stats
            return {
                "policy": {
                    "name": self.policy.name,
                    "steps": moved.visits,
                    "cache": {
                        "hits": int(cache.hits.sum()),
                        "misses": int(cache.misses.sum()),
                        "evictions": cache.evictions,
                        "hit_rate": cache.hit_rate,
                    },
                    "prefetch": {
                        "issued": moved.ahead_pages,
                        "useful": moved.ahead_useful,
                        "accuracy": moved.ahead_useful / moved.ahead_pages if moved.ahead_pages else 0.0,
                    },
                },
                "placement": {
                    "home": self._store.where,
                    "transfers": moved.pages,
                    "bytes": moved.bytes,
                    "transfer_s": self._store.busy_s,
                    "stall_s": moved.stall_s,
                    "streamed": moved.streamed,
                    "in_place": moved.in_place,
                },
                "experts": residency.stats({"link": moved.stall_s}),
                "resident_bytes": self.resident_bytes,
                "offloaded_bytes": self.offloaded_bytes,
            }

    def detach(self) -> None:
        """Restore the experts in the model, with its original modules and parameters; further calls have no effect.

        Raises CheckpointError if the experts' file cannot be read; the model is unusable then.
        """
        with self._detaching:
            self._undo.close()

    close = detach

    def __enter__(self) -> Attachment:
        return self

    def __exit__(self, *_: object) -> None:
        self.detach()


def _slot_bytes(layers: Sequence[MoeLayer]) -> int:
    return align_up(max(layer.page_bytes for layer in layers), PAGE_ALIGNMENT)


def _slots(count: int, slot_bytes: int, device: torch.device) -> Tensor:
    size = count * slot_bytes
    try:
        near = on_huge_pages(size) if Device(device).host else torch.empty(size, dtype=torch.uint8, device=device)
    except (RuntimeError, MemoryError, OSError):
        raise BudgetError(
            f"{device} has no {format_bytes(size)} for {count} experts; lower the policy's capacity",
            tier="host" if Device(device).host else "device",
            needed_bytes=size,
        ) from None
    return near.view(count, slot_bytes)


_STORES = ("disk", "memory")


def _store(home: str | None, directory: str | Path | None, layers: list[MoeLayer]) -> OffloadStore:
    device, experts = layers[0].device, [layer.num_experts for layer in layers]
    slot_bytes = [_slot_bytes([layer]) for layer in layers]
    if home is not None and home not in _STORES:
        raise ConfigError(f"home {home!r}: known are {', '.join(_STORES)}{did_you_mean(home, _STORES)}")
    if home == "disk" and not Device(device).host:
        raise ConfigError(f"home 'disk' is for models on a CPU; experts of one on {device} go to memory")
    if home == "memory" or not Device(device).host:
        return HostStore(device, experts, slot_bytes)
    return DiskStore(Path(directory or tempfile.gettempdir()), experts, slot_bytes)
