"""Ranks of one engine: the process of the engine is rank 0, the others are started beside it and follow its passes.

What is asked of rank 0's `PassRunner` is told to the others, who do the same with their experts and heads. They take
sampled tokens from rank 0, and return nothing.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import tempfile
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, fields, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed import Store

from moelight.core.errors import ConfigError, RankError, UserError
from moelight.core.policy import Policy, Shares
from moelight.core.timeline import Timeline
from moelight.engine.batcher import MicroBatchPlan
from moelight.engine.experts import ExpertRuntime, choices_for
from moelight.engine.launched import led
from moelight.engine.loaded_model import weight_dtype
from moelight.engine.pass_runner import PackedPass, PassRunner, Results
from moelight.engine.planning import speeds_for
from moelight.experts.options import ExpertOptions
from moelight.kernels.device import count_of
from moelight.kernels.ranks import Ranks, meeting_file
from moelight.models.checkpoints import open_model
from moelight.runtime.context import Chunk
from moelight.runtime.machine import Machine, find_machine
from moelight.runtime.topology import read_topology
from moelight.weights.shard import shard
from moelight.weights.tensor_map import OpenCheckpoint

_log = logging.getLogger(__name__)
AUTO = "auto"
MAX_RANKS = 64
_END_S, _NOTICED_S = 10.0, 1.0
_AGAIN = "run the same command again: finished rows are kept"
Message = dict[str, Any]


def count_ranks(asked: str | int, device: str) -> int:
    """The number of ranks that ``--tp`` asks for on ``device``; ``auto``: one for each NUMA node, or GPU. torchrun's
    processes are as many as there are. Raises ConfigError for what is no number from 1 to `MAX_RANKS`."""
    if (launched := led()) is not None:
        if str(asked) not in ("1", AUTO, str(launched.launch.count)):
            raise ConfigError(f"--tp {asked}: torchrun started {launched.launch.count} ranks; leave --tp out")
        return launched.launch.count
    if asked == AUTO:
        kind = device.partition(":")[0]
        if kind in ("auto", "cuda") and (cards := count_of("cuda")):
            return 1 if ":" in device else cards
        return 1 if kind == "twin" else max(1, len({core.node for core in read_topology().cores}))
    if not str(asked).isdecimal() or not 1 <= int(asked) <= MAX_RANKS:
        raise ConfigError(f"tp must be {AUTO} or a number of ranks from 1 to {MAX_RANKS}, not {asked!r}")
    return int(asked)


def open_for(model: str, count: int) -> OpenCheckpoint:
    """The checkpoint ``model`` as rank 0 of ``count`` has it."""
    opened = open_model(model)
    return opened if count == 1 else shard(opened, 0, count)


def core_shares(count: int) -> list[list[int]]:
    """The processors of each of ``count`` ranks: cores in equal numbers, NUMA node by node; ranks share cores where
    there are fewer, which costs time."""
    cores = sorted(read_topology().cores, key=lambda core: core.node)
    if len(cores) < count:
        _log.warning("%d ranks share %d cores and wait for each other; lower --tp", count, len(cores))
        cores = [cores[rank * len(cores) // count] for rank in range(count)]
    cuts = [len(cores) * rank // count for rank in range(count + 1)]
    return [
        [processor for core in cores[first:last] for processor in core.processors] for first, last in pairwise(cuts)
    ]


def device_of(device: torch.device, rank: int) -> torch.device:
    """The device of ``rank`` where rank 0 computes on ``device``."""
    return device if device.type == "cpu" else torch.device(device.type, (device.index or 0) + rank)


class RankGroup:
    """Rank 0 and the processes of the others."""

    def __init__(
        self,
        ranks: Ranks,
        processes: Sequence[subprocess.Popen[bytes]],
        scratch: tempfile.TemporaryDirectory[str] | None,
        restore: set[int] | None,
    ) -> None:
        """``processes``: those started here, none of torchrun's; ``restore``: the processors that this process is bound
        to again at last; None: it was not bound."""
        self.ranks, self._processes, self._scratch, self._restore = ranks, processes, scratch, restore

    @classmethod
    def start(cls, count: int, device: str, machine: Machine) -> RankGroup:
        """Start ranks 1 to ``count`` - 1 on this machine, unless torchrun has. On a CPU this process is bound to its
        share of the cores until `stop`. Raises RankError if one of them ends before all have met."""
        restore, shares = None, [list[int]()] * count
        if not machine.discrete or machine.twin:
            restore, shares = os.sched_getaffinity(0), core_shares(count)
            bind(shares[0])
        scratch, processes = None, list[subprocess.Popen[bytes]]()
        if (launched := led()) is not None:
            store = launched.announce(device=device, shares=shares)
        else:
            scratch = tempfile.TemporaryDirectory(prefix="moelight-")  # others may meet there when a rank has joined
            meeting = Path(scratch.name) / "meeting"
            processes = [_start(RankTask(rank, count, device, str(meeting), shares[rank])) for rank in range(1, count)]
            store = meeting_file(meeting, count)
        try:
            ranks = Ranks.join(0, count, machine.device, store, lambda: _refuse_ended(processes, 0.0))
        except BaseException:
            _end(processes, 0.0)
            if scratch is not None:
                scratch.cleanup()
            if restore is not None:
                bind(sorted(restore))
            raise
        return cls(ranks, processes, scratch, restore)

    def tell(self, **message: Any) -> None:
        """Send ``message`` to all other ranks."""
        self.ranks.tell(json.dumps(message).encode())

    def lost(self, error: RankError) -> RankError:
        """``error`` as the rank that has ended, if one of these has."""
        try:
            _refuse_ended(self._processes, _NOTICED_S)
        except RankError as ended:
            return ended
        return RankError(f"{error}; {_AGAIN}")

    def stop(self) -> None:
        """End the other ranks; this process may use its cores again."""
        with suppress(RankError):
            self.tell(do="close")
        self.ranks.leave()
        _end(self._processes, _END_S)
        if self._scratch is not None:
            self._scratch.cleanup()
        if self._restore is not None:
            bind(sorted(self._restore))


def _refuse_ended(processes: Sequence[subprocess.Popen[bytes]], within_s: float) -> None:
    """Raise RankError if one of ``processes``, ranks 1 and further, has ended, or does so within so many seconds."""
    for rank, process in enumerate(processes, 1):
        with suppress(subprocess.TimeoutExpired):
            code = process.wait(within_s)
            reason = f"by signal {-code}" if code < 0 else f"with exit code {code}, and said why above"
            raise RankError(f"rank {rank} of {len(processes) + 1} ended {reason}; {_AGAIN}")


def _end(processes: Sequence[subprocess.Popen[bytes]], within_s: float) -> None:
    """Wait until ``processes`` have ended, which are killed after so many seconds."""
    for process in processes:
        try:
            process.wait(within_s)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        if process.stdin is not None:
            process.stdin.close()


def bind(processors: Sequence[int]) -> None:
    """Bind this process to ``processors``, and torch to as many threads."""
    os.sched_setaffinity(0, processors)
    torch.set_num_threads(len(processors))


@dataclass(frozen=True, slots=True)
class RankTask:
    """What a process is told that becomes a rank."""

    rank: int
    count: int
    device: str
    meeting: str
    processors: list[int]


def _start(task: RankTask) -> subprocess.Popen[bytes]:
    """A process that becomes the rank of ``task``, and ends where this one does: its input ends then."""
    environment = {**os.environ, "OMP_NUM_THREADS": str(len(task.processors) or 1)}
    command = [sys.executable, "-m", "moelight.engine.rank_process", json.dumps(asdict(task))]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, env=environment)


class LeadingRunner(PassRunner):
    """The `PassRunner` of rank 0."""

    def __init__(
        self,
        group: RankGroup,
        source: OpenCheckpoint,
        policy: Policy,
        machine: Machine,
        lanes: str,
        experts: ExpertRuntime | None,
    ) -> None:
        self._group = group
        plain = experts is not None and experts.plain
        group.tell(do="load", policy=asdict(policy), lanes=lanes, plain=plain)
        super().__init__(source, policy, machine, lanes, experts, cuda_graphs=False)

    @property
    def policy(self) -> Policy:
        return self._policy

    @policy.setter
    def policy(self, policy: Policy) -> None:
        self._allocation.check(policy)
        self._policy = policy
        self._group.tell(do="policy", policy=asdict(policy))

    def pack(self, plans: Sequence[MicroBatchPlan]) -> PackedPass:
        packed = super().pack(plans)
        loads = [
            {
                "prefill_only": load.prefill_only,
                "continues": load.continues,
                "chunks": [_message_of(chunk) for chunk in micro_batch.chunks],
            }
            for load, micro_batch in zip(plans, packed.micro_batches, strict=True)
        ]
        self._group.tell(do="pack", loads=loads)
        return packed

    def launch_with(
        self,
        packed: PackedPass,
        results: Results,
        *,
        follows: bool,
        on_demand: bool | None = None,
        captures_routing: bool = False,
    ) -> PackedPass:
        ranks, (sample, score, pool_hidden) = self._group.ranks, results
        on_demand = self._is_on_demand(packed) if on_demand is None else on_demand
        self._group.tell(do="launch", follows=follows, on_demand=on_demand)

        def sample_for_all(j: int, first: int, logits: Tensor) -> Tensor:
            tokens = sample(j, first, logits).contiguous()
            ranks.share_(tokens)
            return tokens

        shared = sample_for_all, score, pool_hidden
        return super().launch_with(
            packed, shared, follows=follows, on_demand=on_demand, captures_routing=captures_routing
        )

    def land(self, launched: PackedPass) -> tuple[Timeline, list[list[int]]]:
        self._group.tell(do="land")
        return super().land(launched)

    def drain(self, launched: PackedPass) -> None:
        if not self.model.executor.broken:
            self._group.tell(do="land")
        super().drain(launched)


def _message_of(chunk: Chunk) -> Message:
    values = {field.name: getattr(chunk, field.name) for field in fields(chunk)}
    numbered = {name: value if isinstance(value, int) else list(map(int, value)) for name, value in values.items()}
    return {**numbered, "pooled": [chunk.pooled.start, chunk.pooled.stop]}


@dataclass(frozen=True, kw_only=True, slots=True)
class FollowedPlan:
    """A micro-batch as rank 0 told it; as `MicroBatchPlan`."""

    chunks: tuple[Chunk, ...]
    prefill_only: bool
    continues: bool

    @classmethod
    def of(cls, message: Message) -> FollowedPlan:
        chunks = (Chunk(**{**chunk, "pooled": range(*chunk["pooled"])}) for chunk in message["chunks"])
        return cls(chunks=tuple(chunks), prefill_only=message["prefill_only"], continues=message["continues"])

    @property
    def tokens(self) -> int:
        return sum(chunk.count for chunk in self.chunks)


class Follower:
    """A rank other than 0: does what rank 0 tells it, until that ends."""

    def __init__(self, task: RankTask, store: Store | None = None) -> None:
        """``store``: where ranks meet; None: at the file that the task names."""
        machine = find_machine(task.device)
        self._machine = replace(machine, device=device_of(machine.device, task.rank))
        store = store or meeting_file(Path(task.meeting), task.count)
        self.ranks = Ranks.join(task.rank, task.count, self._machine.device, store)
        self._runner: PassRunner | None = None
        self._packed: PackedPass | None = None
        self._in_flight = deque[PackedPass]()

    def run(self) -> None:
        """Raises RankError if rank 0 is lost."""
        while (message := json.loads(self.ranks.hear()))["do"] != "close":
            getattr(self, f"_{message.pop('do')}")(**message)
        self._close()
        self.ranks.leave()

    def _load(self, policy: Message, lanes: str, *, plain: bool) -> None:
        self._close()
        opened = shard(open_model(policy["model"]), self.ranks.rank, self.ranks.count)
        source = replace(opened, source=opened.source.joined(self.ranks))
        asked, options = _policy_of(policy), ExpertOptions(plain=plain)
        dtype, speeds = weight_dtype(asked, source, self._machine), speeds_for(None, discrete=self._machine.discrete)
        experts = choices_for(options, asked, source.profile, dtype, speeds, rank=self.ranks.rank)
        self._runner = PassRunner(source, asked, self._machine, lanes, experts, cuda_graphs=False)

    def _policy(self, policy: Message) -> None:
        self._loaded.policy = _policy_of(policy)

    def _pack(self, loads: Sequence[Message]) -> None:
        plans = [FollowedPlan.of(load) for load in loads]
        self._packed = self._loaded.pack_chunks(plans, [list(plan.chunks) for plan in plans])

    def _launch(self, *, follows: bool, on_demand: bool) -> None:
        assert self._packed is not None
        how = {"follows": follows, "on_demand": on_demand}
        self._in_flight.append(self._loaded.launch_with(self._packed, self._results(), **how))

    def _land(self) -> None:
        self._loaded.drain(self._in_flight.popleft())

    def _results(self) -> Results:
        ranks = self.ranks

        def sample(_j: int, _first: int, logits: Tensor) -> Tensor:
            tokens = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
            ranks.share_(tokens)
            return tokens

        return sample, lambda *_: None, lambda *_: None

    @property
    def _loaded(self) -> PassRunner:
        assert self._runner is not None
        return self._runner

    def _close(self) -> None:
        if self._runner is not None:
            self._runner.close()
            self._runner = None


def follow(task: RankTask, store: Store | None = None) -> int:
    """Be the rank of ``task`` until rank 0 closes its engine. Returns the exit code: 0, 1 if rank 0 was lost, 2 for
    what a user can mend, which is printed."""
    try:
        Follower(task, store).run()
    except RankError:
        return 1  # rank 0 says so
    except UserError as error:
        print(f"rank {task.rank}: {error}", file=sys.stderr, flush=True)
        return 2
    return 0


def _policy_of(message: Message) -> Policy:
    return Policy(**{**message, **{name: Shares(**message[name]) for name in ("weights", "kv")}})
