"""`attach`: a transformers model already built, its experts moved under a pager; `detach` moves them back.

Knows models, and who is asked for what. Refuses to know pages (`pager`), what experts compute (`serving`) and how a
policy decides (`policies`).
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
from moelight.integrations.offload import bring_back, put_away, trim
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
    """Move the experts of ``model``, a transformers MoE model for inference, under a pager.

    Beside the compute unit there is room for as many experts as the policy's capacity says, and `STAGED` more on their
    way through. All others are away: of a model on a CPU in a private file on a disk, of one on a GPU in host memory.
    ``model.generate`` and the model itself work as before and give the same tokens.

    Args:
        model: in float32, bfloat16, float16 or float64, its experts in memory and on one device.
        policy: an `ExpertPolicy`, the text of a ``.moe`` file with one policy, or the path of one.
        home: where experts are that have no slot: ``disk`` (for a model on a CPU), or ``memory``.
        directory: where the file of the experts is made, which has no name there; by default the system's for such
            files.

    Raises:
        ConfigError: the model has no experts that can be moved, or the policy is wrong or does not fit it.
        BudgetError: the memory for the slots is not there.
    """
    _refuse_attached(model)
    return Attachment(model, read_expert_policy(policy), home=home, directory=directory)


def auto_attach(
    model: nn.Module, *, batch: int = 1, home: str | None = None, directory: str | Path | None = None
) -> Attachment:
    """`attach` with a policy made for ``model``: room for twice a token's experts in every layer, or for what ``batch``
    tokens are expected to meet, as far as there is memory. `Attachment.reason` says what was chosen, and why."""
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
    """A model whose experts are under a pager, until `detach`; as a context manager, until its end.

    Attributes:
        model, policy: as given. reason: why `auto_attach` chose the policy; empty after `attach`.
        near_bytes: of memory that experts take beside the compute unit. away_bytes: of all experts.
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
                put_away(self._home, number, layer)
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
        """What the cache, the prediction and the link did so far, for JSON."""
        with self.pager.held():
            return _stats(self)

    def detach(self) -> None:
        """Bring the experts back into the model, whose modules and parameters are then those it had. Once is enough.

        Raises:
            CheckpointError: their file cannot be read; the model is unusable then.
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
            link = _link(self._device)  # a new one: an error has closed the old one for good
            try:
                for number in self._away:
                    bring_back(self._home, link, number, self._layers[number])
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
    """Asks the next layer's router about hidden states of this one, where the predictor in force wants to know."""

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
