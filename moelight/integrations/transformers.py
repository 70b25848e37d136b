"""`attach`: pages the experts of a built transformers model; `detach` restores the model.

Does not depend on the handling of pages (`pager`), what experts compute (`paged_modules`) and how a policy decides
(`policies`).
"""

from __future__ import annotations

import tempfile
import threading
import weakref
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from moelight.core.errors import BudgetError, ConfigError, did_you_mean
from moelight.core.units import align_up, format_bytes
from moelight.experts.policy import ExpertPolicy
from moelight.integrations.layers import PAGE_ALIGNMENT, MoeLayer, moe_layers
from moelight.integrations.links import HostLink, PageLink, StreamLink
from moelight.integrations.offload import offload_layer, restore_layer, trim
from moelight.integrations.page_stores import DiskStore, HostStore, OffloadStore
from moelight.integrations.paged_modules import PagedExpertList, PagedExperts, PagedFusedExperts
from moelight.integrations.pager import STAGED, ExpertPager
from moelight.integrations.policies import policy_for, read_expert_policy, residency_of
from moelight.integrations.routers import ask, chosen, top_k
from moelight.memory.locking import on_huge_pages
from moelight.runtime.measure import available_bytes

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
        "near_bytes": attachment.resident_bytes,
        "away_bytes": attachment.offloaded_bytes,
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
