"""A model in memory under one policy: weights, expert pages, KV cache, buffers of passes, and lanes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from moelight.core.dtypes import DType, computed_in, dtype_named
from moelight.core.errors import CheckpointError, ConfigError
from moelight.core.policy import INT8, Policy
from moelight.core.schedule import Lane
from moelight.engine.batcher import places
from moelight.engine.experts import ExpertRuntime
from moelight.hrm import costs
from moelight.hrm.footprint import (
    KV_BUFFERS,
    footprint,
    kv_blocks,
    kv_device_blocks,
    offloaded_pages,
    pass_tokens,
    window_blocks,
)
from moelight.hrm.placement import place_pages, slot_table
from moelight.kernels import native
from moelight.kernels.caching_allocator import RESULTS
from moelight.kernels.gpu.attention import prompt_form
from moelight.kernels.products import Workspace
from moelight.kernels.reads import FileReader, ReadPart
from moelight.models.decoder import Decoder
from moelight.models.pages import PagedExperts
from moelight.paging.arena import typed
from moelight.paging.kv import BlockPool, CachedRows, paged_cache, token_cache
from moelight.paging.ring import RingPager
from moelight.paging.store import PageStore
from moelight.runtime.attention_ops import DeviceAttention, HostAttention
from moelight.runtime.executor import Executor
from moelight.runtime.graphs import graphs_of
from moelight.runtime.interpreter import shared_by_lanes
from moelight.runtime.lanes import LaneRunner, Ticket
from moelight.runtime.machine import Machine, allocate_for, cores_for, open_lanes
from moelight.runtime.microbatch import SavedActivations, StagingBuffers
from moelight.runtime.moe_ops import MoEOps
from moelight.runtime.ops import Operations
from moelight.runtime.warm_up import warm_up
from moelight.scheduler.layout import Layout, layout_of
from moelight.weights.load import PageReader, page_files
from moelight.weights.tensor_map import OpenCheckpoint
from moelight.weights.torch_dtypes import to_torch


class LoadedModel:
    """A model in memory: ``executor`` runs schedules of ``operations`` on ``lanes``.

    Attributes:
        dtype: of weights and activations; of expert pages ``dtype.page_dtype``.
        placement: of the expert pages as loaded; ``layout`` likewise.
        pager: transfers ``pages`` in on-demand passes; None if no page is transferred.
        prompt_form: of prompts that attend on the device.
        hidden: [T, H], the hidden states of a pass; ``crossing``: their staging buffers, if a link is crossed.
        saved: saved activations, where experts run once per pass.
        graphs: of the device lane, on CUDA where they are wanted.
    """

    def __init__(
        self,
        source: OpenCheckpoint,
        policy: Policy,
        machine: Machine,
        lanes: str,
        experts: ExpertRuntime | None,
        *,
        cuda_graphs: bool,
    ) -> None:
        """``experts``: decides which experts are resident; None: the policy's placement does. ``cuda_graphs``: see
        `graphs`."""
        self.profile = source.profile
        self.dtype = weight_dtype(policy, source, machine)
        self.placement = place_pages(self.profile, policy)
        self.layout = layout_of(self.profile, policy, self.dtype, placement=self.placement)
        self.pool = BlockPool(kv_blocks(policy), kv_device_blocks(policy))
        self.window_pool = BlockPool(int(window_blocks(self.profile, policy)))
        dtype = to_torch(self.dtype)
        source = _repacked(source, policy, self.layout)
        self._experts = source.weight_map.experts.read_as(self.dtype.page_dtype.safetensors)
        with ExitStack() as opened:
            opened.enter_context(shared_by_lanes())
            opened.enter_context(RESULTS.caching())
            self._reader = opened.enter_context(_page_reader(source, self.dtype, policy, opened))
            runners = open_lanes(machine, lanes, cores_for(machine, policy), exchanges=self.profile.ranks > 1)
            self.lanes: tuple[Lane, ...] = tuple(runners)
            self.executor = Executor(runners, machine.habits.timed if machine.habits.takes_time else None)
            opened.callback(self.executor.close)
            stored = costs.page_dtype(self.profile, self.dtype)
            announced = footprint(self.profile, policy, dtype=self.dtype, page_dtype=stored)
            arenas = allocate_for(machine, announced, pinned_pages=self.layout.pinned_pages)
            tokens, hidden = pass_tokens(policy), self.profile.hidden_size
            residual = torch.float32 if self.dtype.pages else dtype
            self.hidden = typed(arenas["hidden"], residual, (tokens, hidden))
            self.crossing: StagingBuffers | None = None
            if "crossing" in arenas:
                self.crossing = StagingBuffers.in_arena(arenas["crossing"], self.profile, policy, self.dtype, tokens)
            self.saved: SavedActivations | None = None
            if (arena := arenas.get("mixture")) is not None:
                self.saved = SavedActivations.in_arena(arena, self.profile, tokens=tokens, dtype=dtype)
            make_decoder = self._load_dense(source, arenas["dense"], policy)
            self.pages = self._page_store(arenas, announced.slots, experts)
            self.pager: RingPager | None = None
            if experts is not None and self.layout.streamed:
                leave, remembers = experts.leave if policy.ffn_device == "split" else None, not experts.plain
                self.pager = RingPager(
                    self.pages, experts.residency, self._reader.start, leave=leave, remembers=remembers
                )
            spec = self.profile.attention
            heads = (spec.num_heads, spec.num_kv_heads, spec.cached_head_dim) if spec.num_heads else (1, 1, 8)
            self.prompt_form = prompt_form(machine.device, dtype, *heads)
            self.operations = self._operations(policy, machine, arenas, make_decoder)
            kinds = self.operations.decoder.kinds
            alone = self.profile.ranks == 1  # else phases exchange tensors with other ranks
            self.graphs = graphs_of(machine.device, int(tokens)) if cuda_graphs and kinds and alone else None
            warms = machine.compiles and kinds and alone
            self._load_pages(partial(self._warm_up, policy, runners[Lane.DEVICE]) if warms else None)
            machine.synchronize()  # lanes do not wait for the stream on which weights and pools were filled
            self._opened = opened.pop_all()

    def close(self) -> None:
        if self.pager is not None:
            self.pager.land()
        self._opened.close()

    def _load_dense(self, source: OpenCheckpoint, arena: Tensor, policy: Policy) -> Callable[[Workspace], Decoder]:
        """All weights outside experts, in ``arena``; returns what makes the decoder of them."""
        paged = PagedExperts(self._experts, policy.activations)
        keeps_stored = costs.keeps_stored(self.profile, self.dtype, discrete=policy.discrete)
        return source.source.decoder(self.profile, arena, to_torch(self.dtype), paged, as_stored=keeps_stored)

    def _page_store(
        self, arenas: Mapping[str, Tensor], slots: Mapping[str, Sequence[int]], experts: ExpertRuntime | None
    ) -> PageStore:
        profile, fast_tier = self.profile, self.placement.fast_tier
        return PageStore(
            arenas,
            slot_table(self.placement, profile) if experts is None else experts.residency.table,
            fast_tier=fast_tier,
            far=offloaded_pages(self.placement) if fast_tier == "device" else (),
            parts=self.layout.parts,
            slots=slots,
            bytes_of=self._experts.bytes_of,
        )

    def _load_pages(self, warm: Callable[[Collection[int]], Ticket] | None) -> None:
        """Fill the slots of pages, and warm up meanwhile; then those layers whose pages turned out to be wide."""
        warming = None if warm is None else warm(self._kinds())
        self.pages.load(self._reader.start)
        if warm is not None and warming is not None:
            warming.wait()
            if wide := self._reader.wide_layers & set(self._kinds()):
                warm(wide).wait()

    def _kinds(self) -> list[int]:
        """The first layer of each kind: others launch no other kernels."""
        kinds, layouts = dict[tuple[object, ...], int](), self._experts.ids_by_layer
        for layer, kind in enumerate(self.operations.decoder.kinds):
            pages = frozenset(layouts.get(layer, ())), layer in self._reader.wide_layers
            kinds.setdefault((pages, *kind), layer)
        return list(kinds.values())

    def _warm_up(self, policy: Policy, lane: LaneRunner, layers: Collection[int]) -> Ticket:
        """Warm up ``layers`` on the thread and stream of the device's ``lane``, while pages are read."""
        self.pages.follow(self.layout.streamed, self.layout.computed)
        work = partial(
            warm_up,
            self.operations,
            self.profile,
            self.hidden,
            layers=layers,
            saved=self.saved,
            most_rows=policy.micro_batch_tokens,
            block_size=policy.kv_block_size,
            form=self.prompt_form,
            has_experts=self.placement.fast_tier == "device",
            pool=self.pool if policy.attention_device == "gpu" else None,
        )
        return lane.submit(work, ())

    def _operations(
        self,
        policy: Policy,
        machine: Machine,
        arenas: Mapping[str, Tensor],
        make_decoder: Callable[[Workspace], Decoder],
    ) -> Operations:
        profile = self.profile
        spaces = {}
        for name in {"work", "host_work"} & set(arenas):
            grouped = name == "work" and policy.discrete
            kind = self.dtype if name == "work" else self.dtype.page_dtype
            sizes = costs.expert_workspace(profile, policy.micro_batch_tokens, kind, grouped=grouped)
            spaces[name] = Workspace(arenas[name], sizes, profile.hidden_size, to_torch(kind), mixed=bool(kind.pages))
        decoder, most_rows = make_decoder(spaces["work"]), policy.micro_batch_tokens
        moe_ops = MoEOps(
            decoder,
            self.pages,
            host_space=spaces.get("host_work"),
            saved=self.saved,
            hidden=self.hidden,
            most_rows=most_rows,
            wide_layers=self._reader.wide_layers,
        )
        if policy.activations == INT8 and policy.ffn_device != "cpu" and machine.compiles and not moe_ops.grouped:
            raise ConfigError(
                f"activations int8: torch computes these experts on {machine.device}, with activations as they are; "
                "leave activations at auto"
            )
        attention = self._attention(policy, arenas, decoder.sinks)
        in_place = decoder.whole_layers and not policy.discrete
        return Operations(
            decoder,
            self.pages,
            attention=attention.table,
            caches=attention.bound() if in_place and isinstance(attention, HostAttention) else (),
            windowed=attention.windowed if isinstance(attention, HostAttention) else (),
            moe_ops=moe_ops,
            start_page=self._reader.start,
            pool=torch.zeros(places(policy, self.pool.blocks), dtype=torch.int64, device=machine.device),
            head_rows=policy.micro_batch_size,
        )

    def _attention(
        self, policy: Policy, arenas: Mapping[str, Tensor], sinks: Mapping[int, Tensor]
    ) -> HostAttention | DeviceAttention:
        """On the host over its KV cache, or on the device over blocks in either memory."""
        kv_dtype = self.layout.kv_dtype
        specs = [self.profile.attention_of(layer) for layer in range(self.profile.num_layers)]
        blocks, size = self.pool.blocks, policy.kv_block_size
        if policy.attention_device == "cpu":
            kinds = costs.layer_attention(self.profile) if self.window_pool.blocks else ()
            windowed = [layer for layer, kind in enumerate(kinds) if kind is not None and kind.windowed]
            others = [layer for layer in range(len(specs)) if layer not in windowed]
            paged: list[tuple[Tensor, ...]] = [()] * len(specs)
            for name, layers, count in (("kv", others, blocks), ("window_kv", windowed, self.window_pool.blocks)):
                some = [specs[layer] for layer in layers]
                for layer, cache_of_layer in zip(
                    layers,
                    paged_cache(arenas[name], some, blocks=count, block_size=size, dtype=kv_dtype) if some else (),
                    strict=True,
                ):
                    paged[layer] = cache_of_layer
            return HostAttention(specs, paged, form=self.prompt_form, sinks=sinks, windowed=windowed)

        def cache(name: str, blocks: int) -> list[CachedRows]:
            return token_cache(arenas[name], specs, slots=blocks * size, dtype=kv_dtype)

        host, device_blocks = self.pool.host_blocks, blocks - self.pool.host_blocks
        return DeviceAttention(
            specs,
            arenas["kv_buffer"].view(KV_BUFFERS, -1),
            form=self.prompt_form,
            kv_dtype=kv_dtype,
            sinks=sinks,
            on_host=cache("kv", host) if self.layout.context_crosses else None,
            on_device=cache("device_kv", device_blocks) if device_blocks else None,
        )


def _page_reader(source: OpenCheckpoint, dtype: DType, policy: Policy, opened: ExitStack) -> PageReader:
    """A reader that bypasses the page cache, unless weights are converted while they are read. In mixed precision only
    a device rounds pages to ``dtype``."""
    weight_map, page_dtype = source.weight_map, to_torch(dtype.page_dtype)
    if weight_map.experts.dtype not in (None, dtype.page_dtype.safetensors):
        return PageReader(weight_map, page_dtype)
    try:
        files = opened.enter_context(FileReader(page_files(weight_map)))
    except OSError as error:
        raise CheckpointError(f"{error.filename}: cannot be opened ({error.strerror})") from None
    return PageReader(
        weight_map,
        page_dtype,
        lambda parts: files.submit([ReadPart(*part) for part in parts]),
        mixed=bool(dtype.pages) and policy.ffn_device != "cpu",
        in_order=policy.activations == INT8,
    )


def _repacked(source: OpenCheckpoint, policy: Policy, layout: Layout) -> OpenCheckpoint:
    """``source`` with its quantised pages turned on arrival, where a CPU computes experts and pages are read whole."""
    if not costs.repacks(policy.ffn_device) or len(layout.parts) > 1 or not native.available():
        return source
    return replace(source, weight_map=replace(source.weight_map, experts=source.weight_map.experts.repacked()))


def refuse_prediction(source: OpenCheckpoint, experts: ExpertRuntime | None) -> None:
    """Raise ConfigError if ``experts`` are to be predicted by routers that cannot be asked before their layer."""
    asks = experts is not None and experts.residency.predicts_experts
    if asks and not source.source.predicts:
        raise ConfigError(
            f"{source.directory / 'config.json'}: the routers of {source.profile.model_type} cannot be asked before "
            "their layer; use another predictor than next_router"
        )


def weight_dtype(policy: Policy, source: OpenCheckpoint, machine: Machine) -> DType:
    """The dtype of weights in memory: the policy's, or the checkpoint's as far as the machine supports it. float16 over
    a bfloat16 checkpoint is mixed precision, which a module graph does not compute (ConfigError)."""
    stored, asked = source.weight_map.dtype, policy.weight_dtype
    chosen = machine.native_dtype(stored) if asked == "auto" else computed_in(dtype_named(asked), stored)
    if chosen.pages and not source.source.mixes:
        raise ConfigError(
            f"{source.directory / 'config.json'}: {source.profile.model_type} runs as its module graph, which does not "
            "compute a bfloat16 checkpoint in float16; run a policy with weight_dtype float32, or use --device cpu"
        )
    return chosen
