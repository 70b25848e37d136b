"""Which model may draft for another one, how it is run beside it, and whether that pays."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from moelight.core.dtypes import DType
from moelight.core.errors import ConfigError
from moelight.core.policy import Policy, Shares
from moelight.engine.loaded_model import weight_dtype
from moelight.engine.options import AUTO, MTP, RunOptions
from moelight.engine.speculation import drafts_refusal
from moelight.engine.tokenizer import Tokenizer
from moelight.hrm.footprint import Footprint, footprint, pass_tokens
from moelight.hrm.machine_model import Speeds
from moelight.hrm.workload_model import Passes
from moelight.models.checkpoints import open_model, open_prediction
from moelight.optimizer.pass_prices import PassPrices
from moelight.profiles.model import ModelProfile
from moelight.runtime.machine import Machine
from moelight.weights.tensor_map import OpenCheckpoint

PROMPT_TOKENS = 512  # of a pass of the draft model, unless more sequences run
HOPED_ACCEPTANCE = 0.85  # of tokens drafted by a model, each after those before it
LEAST_GAIN = 1.05  # in tokens per second, of the best number of drafts at that acceptance


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedDrafts:
    """A draft model under the ``policy`` that runs it beside another one, with its memory and its prices."""

    source: OpenCheckpoint
    policy: Policy
    footprint: Footprint
    prices: PassPrices

    def bytes_on(self, tier: str) -> int:
        """Bytes of memory that the draft model takes; the process's part of them is there already."""
        return self.footprint.total(tier) - (self.footprint.bytes_of("runtime") if tier == "host" else 0)


def open_draft_model(name: str, target: OpenCheckpoint) -> OpenCheckpoint:
    """The draft model ``name`` for ``target``. Raises ConfigError if it has other tokens, or a sequence of it cannot go
    back to its last accepted token; CheckpointError if it is unusable."""
    source = open_model(name)
    if (reason := drafts_refusal(source.profile)) is not None:
        raise ConfigError(f"--draft-model {name}: {reason}")
    target_tokens, tokens = (Tokenizer.of(one.directory).vocabulary() for one in (target, source))
    common = target_tokens.keys() & tokens.keys()
    differing = sorted(token for token in common if target_tokens[token] != tokens[token])
    few, many = sorted((len(target_tokens), len(tokens)))
    if differing or 8 * few < 7 * many:
        difference = f"{many - few:,} tokens fewer or more"
        if differing:
            first = differing[0]
            difference = f"token {first} is {tokens[first]!r} there and {target_tokens[first]!r} here"
        raise ConfigError(
            f"--draft-model {name}: its tokenizer is not that of {target.directory} ({difference}); use a smaller "
            "model of the same family"
        )
    return source


def choose_drafts(
    options: RunOptions, target: OpenCheckpoint, policy: Policy, machine: Machine, speeds: Speeds
) -> tuple[PlannedDrafts, str | None]:
    """The draft model, or the prediction layer, of ``options`` for ``target`` under ``policy``, which is resolved; and
    why it does not pay, if that is asked for. Raises as `open_draft_model` and `open_prediction`."""
    predicts, name = options.speculation == MTP, str(options.draft_model)
    if target.profile.ranks > 1:
        option = "--speculate mtp" if predicts else f"--draft-model {name}"
        raise ConfigError(f"{option} and --tp contradict each other: ranks follow one model; leave out one")
    if predicts and machine.discrete:
        raise ConfigError("--speculate mtp is served on a CPU alone; use --device cpu, or --speculate ngram")
    source = open_prediction(target.directory) if predicts else open_draft_model(name, target)
    drafts = plan_drafts(source, policy, machine, speeds, dtype_name=policy.weight_dtype if predicts else "auto")
    if options.speculation != AUTO:
        return drafts, None
    dtype = weight_dtype(policy, target, machine)
    return drafts, why_not_worth(drafts, target.profile, policy, dtype, speeds, options.draft_tokens())


def plan_drafts(
    source: OpenCheckpoint, target: Policy, machine: Machine, speeds: Speeds, *, dtype_name: str = "auto"
) -> PlannedDrafts:
    """``source`` as it drafts for sequences that run under ``target``, which is resolved: resident, with room for all
    of them, and with weights of ``dtype_name``."""
    sequences = target.batch_size
    policy = Policy(
        model=str(source.directory),
        batch_size=sequences,
        micro_batch_size=sequences,
        micro_batch_tokens=max(sequences, PROMPT_TOKENS),
        prompt_micro_batches=1,
        kv_tokens=target.kv_tokens + sequences * target.kv_block_size,
        kv_block_size=target.kv_block_size,
        weight_dtype=dtype_name,
        residents="static",
        host_pages="staged",
    )
    if machine.discrete:
        on_device = Shares(device=1.0)
        policy = replace(policy, attention_device="gpu", ffn_device="gpu", weights=on_device, kv=on_device)
    dtype = weight_dtype(policy, source, machine)
    return PlannedDrafts(
        source=source,
        policy=policy,
        footprint=footprint(source.profile, policy, dtype=dtype),
        prices=PassPrices(source.profile, policy, speeds, dtype),
    )


def why_not_worth(
    drafts: PlannedDrafts, model: ModelProfile, policy: Policy, dtype: DType, speeds: Speeds, num_tokens: int
) -> str | None:
    """Why at most ``num_tokens`` drafts of each sequence save no time under ``policy``, which is resolved, even if
    `HOPED_ACCEPTANCE` of them are accepted; None if they may save some."""
    sequences = policy.batch_size
    counts = np.arange(min(num_tokens, int(pass_tokens(policy)) // sequences - 1) + 1)
    context = policy.kv_tokens / sequences / 2
    rows = sequences * (1.0 + counts)
    target = PassPrices(model, policy, speeds, dtype)
    verifying = target.seconds(policy, _decoding(rows, context), {}, np.full(len(counts), float(sequences)))
    drafting = drafts.prices.seconds(drafts.policy, _decoding(rows[:1], context), {}, rows[:1])
    rates = np.cumsum(HOPED_ACCEPTANCE**counts) / (verifying + counts * drafting)
    gain = float(np.max(rates) / rates[0])
    if gain >= LEAST_GAIN:
        return None
    return (
        f"with {sequences:,} sequences a pass takes {verifying[0]:.3g} s and {drafting[0]:.3g} s more for each draft, "
        f"{verifying[1] - verifying[0] if len(verifying) > 1 else 0.0:.3g} s to verify it: nothing is gained even if "
        f"{HOPED_ACCEPTANCE:.0%} of the drafts are accepted"
    )


def _decoding(rows: np.ndarray, context: float) -> Passes:
    """Passes of so many ``rows`` float64 [n] of decoding sequences with ``context`` tokens each."""
    return Passes(
        count=np.ones(len(rows)),
        decode_tokens=rows,
        prompt_tokens=np.zeros(len(rows)),
        context=context,
        prompt_len=1.0,
    )
