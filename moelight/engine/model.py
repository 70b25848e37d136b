"""A model before its weights are loaded: its files, checks of sampling, and its plan. Imports no torch."""

from __future__ import annotations

import glob
import hashlib
import os
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from moelight.core.errors import CheckpointError, InputError
from moelight.core.policy import Policy
from moelight.core.request import PoolingParams, SamplingParams, ToolRequest
from moelight.core.small_files import open_regular, read_bytes, read_error_text
from moelight.engine.call_constraints import CallConstraints
from moelight.engine.constraints import Constraints
from moelight.engine.options import EngineOptions
from moelight.engine.routing import check_routing
from moelight.engine.tiktoken_file import TIKTOKEN
from moelight.engine.tokenizer import MOST_TOKENIZER_BYTES, Tokenizer
from moelight.engine.tool_calls import find_tool_format
from moelight.models.profiles import profile_of_checkpoint
from moelight.optimizer.explain import activations_text
from moelight.optimizer.plan import Plan
from moelight.optimizer.simulation import SimulationSetup
from moelight.profiles.gguf import gguf_parts
from moelight.profiles.model import ModelProfile
from moelight.profiles.model_files import load_model_profile
from moelight.profiles.pooling import MODULES, POOLING_CONFIGS, resolve_pooling
from moelight.profiles.workload import Workload
from moelight.weights.source import resolve_model

if TYPE_CHECKING:
    from moelight.engine.engine import Engine
    from moelight.weights.tensor_map import OpenCheckpoint

# Sequences that are running when a job is killed are computed again, and each costs some kilobytes of Python objects:
# plan more than this many at a time only if they make the job faster by more than the error of predictions.
_MANY, _AS_FAST = 4096, 0.85
_CONFIG = ("config.json", "generation_config.json", MODULES, POOLING_CONFIGS)
_TEXT = (
    "tokenizer.json",
    "tokenizer.model",
    "spiece.model",
    TIKTOKEN,
    "added_tokens.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "additional_chat_templates/*.jinja",
)
_SAMPLES, _SAMPLE_BYTES = 32, 1 << 16


class LazyModel:
    """The model ``name``, found (and downloaded) on first use; ``chat_template`` replaces the checkpoint's. Every
    member raises CheckpointError or ConfigError if the model is missing or unusable."""

    def __init__(self, name: str, *, chat_template: Path | None = None) -> None:
        self.name = name
        self._chat_template = chat_template

    @cached_property
    def directory(self) -> Path:
        return resolve_model(self.name)

    @cached_property
    def profile(self) -> ModelProfile:
        return load_model_profile(str(self.directory), profile_of_checkpoint)

    @cached_property
    def tokenizer(self) -> Tokenizer:
        return Tokenizer.of(self.directory, chat_template=self._chat_template)

    @property
    def context(self) -> int:
        return self.profile.max_positions

    def pooling(self, asked: PoolingParams) -> PoolingParams:
        """``asked`` over the pooling of the checkpoint (`resolve_pooling`)."""
        return resolve_pooling(self.directory, asked)

    def encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text)

    def token_bytes(self, token: int) -> bytes:
        return self.tokenizer.token_bytes(token)

    @cached_property
    def tool_format(self) -> str | None:
        """The name of the format of tool calls that the chat template writes, if it is known."""
        template = self.tokenizer.template
        return None if template is None else find_tool_format(template.sources.values())

    def check(self, sampling: SamplingParams) -> None:
        """Raise InputError for sampling parameters that can serve no prompt."""
        vocab_size = self.profile.vocab_size
        for token in (*sampling.stop_token_ids, *(sampling.logit_bias or ()), *(sampling.allowed_token_ids or ())):
            if token >= vocab_size:
                raise InputError(f"token id {token} is not below the vocabulary's {vocab_size}", code="bad_token_id")
        check_routing(sampling, self.profile)
        self.check_structure(sampling)

    def check_structure(self, sampling: SamplingParams) -> tuple[str, ...]:
        """Return warnings about the structured outputs of ``sampling``; raises InputError if they cannot be compiled.
        Each distinct one is compiled once, until `release`."""
        return () if sampling.structured_outputs is None else self._constraints.check(sampling.structured_outputs)

    def check_tools(self, tools: ToolRequest) -> tuple[str, ...]:
        """As `check_structure`, for the schemas of ``tools`` and the grammar of a forced call."""
        return self._calls.check(tools)

    def release(self) -> None:
        """Forget what `check_structure` and `check_tools` compiled, and end their process."""
        if "_constraints" in self.__dict__:
            self._constraints.close()

    @cached_property
    def _constraints(self) -> Constraints:
        return Constraints(self.tokenizer, self.profile.vocab_size)

    @cached_property
    def _calls(self) -> CallConstraints:
        return CallConstraints(self._constraints)

    def plan(self, options: EngineOptions, workload: Workload, policy: Policy | None = None) -> PlannedModel:
        """Audit the checkpoint; return ``policy``, or the fastest for ``workload`` (BudgetError if none fits). A
        machine of which no profile is kept is measured first if the job is long enough to be worth it."""
        from moelight.engine.planning import measured_for, plan_for
        from moelight.engine.ranks import count_ranks, open_for
        from moelight.runtime.machine import find_machine

        source = open_for(self.name, count_ranks(options.tp, options.device))
        if policy is not None:
            policy = replace(policy, model=self.name)
            return PlannedModel(source=source, policy=policy, plan=None, workload=workload, options=options)
        machine = find_machine(options.device)

        def planned() -> Plan:
            plan = plan_for(self.name, source, machine, options, workload)
            if plan.policy.batch_size > _MANY and options.batch_size is None:
                fewer = plan_for(self.name, source, machine, replace(options, batch_size=_MANY), workload)
                if fewer.estimate.tokens_per_s >= _AS_FAST * plan.estimate.tokens_per_s:
                    return fewer
            return plan

        plan = planned()
        if options.hw == "auto" and measured_for(plan.predicted_s, machine, self.directory):
            plan = planned()
        return PlannedModel(source=source, policy=plan.policy, plan=plan, workload=workload, options=options)


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedModel:
    """An audited checkpoint and its policy. ``plan`` is None if the user gave the policy."""

    source: OpenCheckpoint
    policy: Policy
    plan: Plan | None
    workload: Workload
    options: EngineOptions

    @property
    def why(self) -> str:
        if self.plan is not None:
            return self.plan.why
        policy = self.policy
        rounded = activations_text(policy, self.source.profile)
        how = f" with {rounded}" if rounded else ""
        return (
            f"as the policy says: N = {policy.batch_size} in micro-batches of {policy.micro_batch_size}, "
            f"{policy.schedule}, attention on the {policy.attention_device}, experts on {policy.ffn_device}{how}"
        )

    def load(self, *, record: bool = False) -> Engine:
        """Return the engine; a context manager. ``record``: keep figures of every expert."""
        from moelight.engine.engine import Engine

        options = replace(self.options, experts=replace(self.options.experts, record=record))
        return Engine(self.plan or self.policy, source=self.source, options=options)

    def simulation(self, policy: Policy) -> SimulationSetup:
        """Return the inputs of the cost model for ``policy``, as the engine resolved it, on the machine planned for."""
        from moelight.engine.planning import hardware_for

        hardware = hardware_for(self.options.hw, discrete=policy.discrete)
        return SimulationSetup(policy, self.source.profile, hardware, self.workload)


def model_facts(directory: Path) -> dict[str, str]:
    """Return digests of the config, the tokenizer files and a sample of the weights: 64 KiB at 32 places of each file.
    Training that changes only a few tensors may go undetected. Of a GGUF file all is in the sample."""
    if directory.is_file():
        parts = sorted(glob.escape(part.name) for part in gguf_parts(directory))
        return {"weights": _digest_of(directory.parent, parts, full=False)}
    return {
        "config": _digest_of(directory, _CONFIG, full=True),
        "tokenizer": _digest_of(directory, _TEXT, full=True),
        "weights": _digest_of(directory, ("*.safetensors",), full=False),
    }


def _digest_of(directory: Path, patterns: Iterable[str], *, full: bool) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for path in sorted(match for pattern in patterns for match in directory.glob(pattern)):
        digest.update(f"{path.relative_to(directory)}\0".encode())
        try:
            if full:
                data = read_bytes(path, max_bytes=MOST_TOKENIZER_BYTES)
                digest.update(len(data).to_bytes(8, "little") + data)
                continue
            with open(open_regular(path), "rb") as file:
                size = os.fstat(file.fileno()).st_size
                digest.update(size.to_bytes(8, "little"))
                if size <= _SAMPLES * _SAMPLE_BYTES:
                    digest.update(file.read(size))
                    continue
                for k in range(_SAMPLES):
                    file.seek((size - _SAMPLE_BYTES) * k // (_SAMPLES - 1))
                    digest.update(file.read(_SAMPLE_BYTES))
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be read ({read_error_text(error)})") from None
    return digest.hexdigest()
