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
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, fields, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

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
from moelight.kernels.ranks import Endpoints, Ranks, endpoints_of
from moelight.models.checkpoints import open_model
from moelight.optimizer.ranks import AUTO, parse_ranks
from moelight.runtime.context import Chunk
from moelight.runtime.machine import Machine, find_machine
from moelight.runtime.topology import read_topology
from moelight.weights.shard import shard
from moelight.weights.tensor_map import OpenCheckpoint

_log = logging.getLogger(__name__)
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
    return parse_ranks(str(asked))


def open_for(model: str, count: int) -> OpenCheckpoint:
    """The checkpoint ``model`` as rank 0 of ``count`` has it."""
    opened = open_model(model)
    return opened if count == 1 else shard(opened, 0, count)


def core_shares(count: int) -> list[list[int]]:
    """The processors of each of ``count`` ranks: cores in equal numbers, NUMA node by node; ranks share cores where
    there are fewer, which costs time. None where the system binds no process to cores."""
    if not usable_processors():
        _log.warning("this system binds no process to cores: %d ranks share all of them", count)
        return [[] for _ in range(count)]
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

    def __init__(self, count: int, device: str, machine: Machine) -> None:
        """Start ranks 1 to ``count`` - 1 on this machine, unless torchrun has. On a CPU this process is bound to its
        share of the cores until `stop`. Raises RankError if one of them ends before all have met."""
        self._processes = list[subprocess.Popen[bytes]]()  # those started here
        self._restore = list[int]()  # the processors that this process is bound to again at last
        shares = [list[int]()] * count
        if not machine.discrete or machine.twin:
            self._restore, shares = usable_processors(), core_shares(count)
            bind(shares[0])
        first, *others = endpoints_of(count)
        self.ranks = Ranks(first)
        try:
            self._start(others, device, shares)
            self.ranks.meet(machine.device)
        except RankError as error:
            lost = self.lost(error)
            self._free(0.0)
            raise lost from None
        except BaseException:
            self._free(0.0)
            raise

    def _start(self, others: Sequence[Endpoints], device: str, shares: Sequence[Sequence[int]]) -> None:
        """Start the ranks of the endpoints ``others``, or give these to those that torchrun started."""
        try:
            if (launched := led()) is not None:
                launched.hand_out(others, device=device, shares=shares)
                return
            for ends in others:
                task = RankTask(ends.rank, ends.count, device, ends.descriptors, shares[ends.rank])
                self._processes.append(_start(task))
        finally:
            for ends in others:
                ends.close()

    def tell(self, **message: Any) -> None:
        """Send ``message`` to all other ranks."""
        self.ranks.tell(json.dumps(message).encode())

    def lost(self, error: RankError) -> RankError:
        """``error`` as the rank that has ended, if one of these has."""
        for rank, process in enumerate(self._processes, 1):
            with suppress(subprocess.TimeoutExpired):
                code = process.wait(_NOTICED_S)
                reason = f"by signal {-code}" if code < 0 else f"with exit code {code}, and said why above"
                return RankError(f"rank {rank} of {self.ranks.count} ended {reason}; {_AGAIN}")
        return RankError(f"{error}; {_AGAIN}")

    def stop(self) -> None:
        """End the other ranks; this process may use its cores again."""
        with suppress(RankError):
            self.tell(do="close")
        self._free(_END_S)

    def _free(self, within_s: float) -> None:
        """Leave the other ranks, which are killed if they have not ended after so many seconds."""
        self.ranks.leave()
        for process in self._processes:
            try:
                process.wait(within_s)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            if process.stdin is not None:
                process.stdin.close()
        bind(self._restore)


def usable_processors() -> list[int]:
    """Numbers of the processors that this process may use; none where the system binds no process to any."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_setaffinity") else []


def bind(processors: Sequence[int]) -> None:
    """Bind this process to ``processors``, and torch to as many threads; to none where the system does not bind."""
    if processors:
        os.sched_setaffinity(0, processors)
        torch.set_num_threads(len(processors))


@dataclass(frozen=True, slots=True)
class RankTask:
    """What a process is told that becomes a rank."""

    rank: int
    count: int
    device: str
    descriptors: Sequence[int]
    processors: Sequence[int]


def _start(task: RankTask) -> subprocess.Popen[bytes]:
    """A process that becomes the rank of ``task``, and ends where this one does: its input ends then."""
    threads = len(task.processors) or max(1, (os.cpu_count() or 1) // task.count)
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    command = [sys.executable, "-m", "moelight.engine.rank_process", json.dumps(asdict(task))]
    passed: dict[str, Any] = {"env": environment, "pass_fds": task.descriptors}
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, **passed)


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

    def __init__(self, task: RankTask) -> None:
        self.ranks = Ranks(Endpoints.of(task.rank, task.count, task.descriptors))
        machine = find_machine(task.device)
        self._machine = replace(machine, device=device_of(machine.device, task.rank))
        self.ranks.meet(self._machine.device)
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


def follow(task: RankTask) -> int:
    """Be the rank of ``task`` until rank 0 closes its engine. Returns the exit code: 0, 1 if rank 0 was lost, 2 for
    what a user can mend, which is printed."""
    try:
        Follower(task).run()
    except RankError:
        return 1  # rank 0 says so
    except UserError as error:
        print(f"rank {task.rank}: {error}", file=sys.stderr, flush=True)
        return 2
    return 0


def _policy_of(message: Message) -> Policy:
    return Policy(**{**message, **{name: Shares(**message[name]) for name in ("weights", "kv")}})
