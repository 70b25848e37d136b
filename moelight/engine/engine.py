"""The engine: loads a model under a policy and turns prompts into completions, pass after pass."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, TypeAlias

import numpy as np
import torch

from moelight.core.dtypes import DType
from moelight.core.errors import ConfigError, InputError, MoelightError, RankError, did_you_mean
from moelight.core.policy import Adaptation, Policy
from moelight.core.request import PROMPT_ONLY, Completion, PoolingParams, Request, SamplingParams
from moelight.core.timeline import Timeline
from moelight.core.units import format_bytes
from moelight.engine.adaptation import PassAdaptation
from moelight.engine.batcher import Batcher, Propose
from moelight.engine.call_constraints import CallConstraints
from moelight.engine.chat import Conversation, check_messages
from moelight.engine.constraints import Constraints
from moelight.engine.draft_model import DraftModel
from moelight.engine.draft_planning import PlannedDrafts, choose_drafts
from moelight.engine.draft_prices import DraftPrices
from moelight.engine.drafts import NgramDrafts
from moelight.engine.experts import choices_for
from moelight.engine.loaded_model import weight_dtype
from moelight.engine.options import AUTO, MTP, NGRAM, EngineOptions, RunOptions
from moelight.engine.output_processor import OutputProcessor, ScoreWatch, check_tokens
from moelight.engine.pass_runner import PackedPass, PassRunner
from moelight.engine.planning import (
    choose_residents,
    plan_for,
    resolve,
    resolve_host_pages,
    speeds_for,
    stage_pages,
)
from moelight.engine.pooling import stack_embeddings
from moelight.engine.prediction_drafts import PredictionDrafts
from moelight.engine.ranks import LeadingRunner, RankGroup, count_ranks, open_for
from moelight.engine.reasoning import OFF, check_mode, reasoning_start
from moelight.engine.routing import check_routing
from moelight.engine.speculation import Speculation, drafts_refusal
from moelight.engine.tokenizer import Tokenizer
from moelight.engine.window_blocks import blocks_of_windows
from moelight.experts.profile import save_profile
from moelight.hrm.footprint import kv_block_bytes
from moelight.hrm.machine_model import Speeds
from moelight.kernels.device import Device
from moelight.observe.stats import Binding, LaneTotals, RunStats
from moelight.optimizer.pass_prices import PassPrices
from moelight.optimizer.plan import Plan
from moelight.paging.arena import PinningError
from moelight.profiles.gguf_choice import unread_encoder
from moelight.profiles.model import ModelProfile
from moelight.profiles.pooling import check_dimensions, resolve_pooling
from moelight.profiles.workload import EXPECTED_GEN_LEN, Workload
from moelight.runtime.executor import Idle
from moelight.runtime.machine import (
    device_peak,
    find_machine,
    out_of_device_memory,
)
from moelight.runtime.machine_profile import use_kept_kernels
from moelight.runtime.measure import peak_rss_bytes
from moelight.weights.ignored import unused_scales
from moelight.weights.shard import shard
from moelight.weights.tensor_map import OpenCheckpoint

_log = logging.getLogger(__name__)
Prompt: TypeAlias = str | Mapping[str, Any] | Sequence[int]
_FORMS = ("prompt", "messages", "prompt_token_ids")


def requests_from(
    prompts: Prompt | Sequence[Prompt],
    sampling_params: SamplingParams | Sequence[SamplingParams] | None,
    tokenizer: Tokenizer,
    *,
    reasoning: str = OFF,
    add_generation_prompt: bool = True,
) -> list[Request]:
    """Return one request per prompt, in order; raises InputError for a prompt of unknown form or unequal counts. With
    ``reasoning`` ``auto``, the reasoning in answers to messages is split off; ``add_generation_prompt``: messages open
    the assistant's turn."""
    if not isinstance(prompts, Iterable):
        raise InputError(f"prompts must be a prompt or a sequence of them, not {prompts!r}")
    many: Sequence[Prompt] = [prompts] if isinstance(prompts, (str, Mapping)) else list(prompts)  # type: ignore[arg-type]
    if many and all(isinstance(prompt, int) for prompt in many):
        many = [many]  # type: ignore[list-item]
    if sampling_params is None or isinstance(sampling_params, SamplingParams):
        sampling = [sampling_params or SamplingParams()] * len(many)
    else:
        sampling = list(sampling_params)
    if len(sampling) != len(many):
        raise InputError(f"{len(sampling)} sampling_params were given for {len(many)} prompts; give one, or one each")
    requests = []
    for index, (prompt, how) in enumerate(zip(many, sampling, strict=True)):
        token_ids, start = _token_ids(prompt, index, tokenizer, add_generation_prompt), None
        if reasoning == AUTO and isinstance(prompt, Mapping) and "messages" in prompt:
            start = reasoning_start(tokenizer, prompt["messages"], token_ids)
        requests.append(Request(index=index, token_ids=token_ids, sampling=how, reasoning=start))
    return requests


def _token_ids(prompt: Prompt, index: int, tokenizer: Tokenizer, add_generation_prompt: bool) -> tuple[int, ...]:
    form, value = "prompt" if isinstance(prompt, str) else "prompt_token_ids", prompt
    if isinstance(prompt, Mapping):
        for key in prompt:
            if key not in _FORMS:
                raise InputError(f"prompt {index}: unknown key {key!r}{did_you_mean(str(key), _FORMS)}")
        if len(prompt) != 1:
            raise InputError(f"prompt {index}: needs exactly one of {', '.join(_FORMS)}")
        ((form, value),) = prompt.items()
    if form == "messages":
        conversation = Conversation(messages=check_messages(value), add_generation_prompt=add_generation_prompt)
        return tuple(tokenizer.render(conversation))
    if form == "prompt" and isinstance(value, str):
        return tuple(tokenizer.encode(value))
    ids = value if form == "prompt_token_ids" and isinstance(value, Sequence) and not isinstance(value, str) else [None]
    if all(isinstance(token, int) and not isinstance(token, bool) for token in ids):
        return tuple(ids)  # type: ignore[arg-type]
    if isinstance(prompt, Mapping):
        raise InputError(f"prompt {index}: {form} must be {'a string' if form == 'prompt' else 'a list of token ids'}")
    raise InputError(f"prompt {index}: must be a string, an object with one of {', '.join(_FORMS)}, or token ids")


class Engine:
    """Load a model under a policy and generate completions.

    An engine is a context manager; its exit stops the lanes and frees the model.

    ```python
    with Engine.from_pretrained("path/to/mixtral", host_memory="16GiB") as engine:
        for completion in engine.generate(["Once upon a time"], SamplingParams(max_tokens=32)):
            print(completion.text)
    ```

    Attributes:
        plan: the plan, if the engine was opened with one.
        policy: the policy as resolved for this machine; passes may follow an adapted one, see `adaptations`.
        profile: the model's profile.
        tokenizer: the model's tokenizer.
        timeline: the timeline of the last pass; None before the first.
        progress_tokens: tokens generated in all runs so far.
        residents_reason: why ``policy.residents`` is ``static`` or ``learned``.
        host_pages_reason: why ``policy.host_pages`` is ``pinned`` or ``staged``.
    """

    def __init__(
        self,
        policy: Policy | Plan,
        *,
        source: OpenCheckpoint | None = None,
        options: RunOptions | None = None,
        **values: Any,
    ) -> None:
        """Load the model of ``policy`` under that policy.

        Args:
            policy: a policy, or a plan that holds one.
            source: the opened checkpoint, if the caller already has it.
            options: the options by name are its fields (`RunOptions`), such as ``device="cpu"``; ``device`` ``auto`` is
                as the policy's devices require.

        Raises:
            ConfigError: the policy is invalid or does not suit the machine.
            CheckpointError: the model is missing or unusable.
            BudgetError: memory is too small.
        """
        began = time.perf_counter()
        options = (options or RunOptions()).changed(values)
        self._reasoning = check_mode(options.reasoning)
        self.plan = policy if isinstance(policy, Plan) else None
        run_policy = policy.policy if isinstance(policy, Plan) else policy
        machine = find_machine("cpu" if options.device == AUTO and not run_policy.discrete else options.device)
        self._group: RankGroup | None = None
        count = count_ranks(options.tp, options.device)
        if count > 1 and (options.experts.policy is not None or options.experts.profile or options.experts.watches):
            raise ConfigError(
                "--tp: expert policies, traces and profiles are those of one process; leave out one of both"
            )
        source = source or open_for(run_policy.model, count)
        source = source if source.profile.ranks == count else shard(source, 0, count)
        self._directory = source.directory
        self.profile, self._machine, self._overlaps = source.profile, machine, machine.discrete
        resolved = resolve(run_policy, self.profile, discrete=machine.discrete, device=machine.device)
        dtype = weight_dtype(resolved, source, machine)
        resolved, self.residents_reason = choose_residents(resolved, self.plan, options.experts, self.profile, dtype)
        self.policy, self.host_pages_reason = resolve_host_pages(resolved, self.profile, machine, dtype)
        speeds = speeds_for(self.plan, discrete=machine.discrete)
        self._experts = choices_for(options.experts, self.policy, self.profile, dtype, speeds)
        self.tokenizer = Tokenizer.of(source.directory)
        self._constraints = Constraints(self.tokenizer, self.profile.vocab_size)
        self._calls = CallConstraints(self._constraints)
        self._device_limit = self.plan.use_of("device").capacity_bytes if self.plan and machine.discrete else 0
        drafts = self._plan_drafts(options, source, speeds)
        self._guard_device_memory()
        self._passes: PassRunner | None = self._load(source, options, dtype)
        share = options.prefix_caching and not self.profile.stateful
        self._batcher = _batcher(self.policy, self.plan, self.profile, self._passes, machine.discrete, share)
        self._adapting = self._adaptation(options.adapt, speeds, self._passes)
        self._speculation = self._open_speculation(options, drafts, speeds, dtype)
        self._totals = LaneTotals(self._passes.model.lanes)
        self._load_s = time.perf_counter() - began
        self._wall_s = self._python_s = self._collected_s = 0.0
        self._num_passes = self._device_waits = self.progress_tokens = 0
        self._serving = False
        self.timeline: Timeline | None = None

    def _adaptation(self, adapt: bool | None, speeds: Speeds, passes: PassRunner) -> PassAdaptation | None:
        """None under static admission too: one pass does not predict the next there."""
        if not (self.plan is not None if adapt is None else adapt) or self.policy.admission != "refill":
            return None
        fixed = () if self.plan is None else self.plan.fixed
        return PassAdaptation(self.profile, self.policy, speeds, fixed, self._batcher, passes)

    def _plan_drafts(self, options: RunOptions, source: OpenCheckpoint, speeds: Speeds) -> PlannedDrafts | None:
        """The draft model, if one is asked for and pays; its memory is none of the plan's."""
        options.draft_tokens()
        if not options.drafts_by_model or drafts_refusal(self.profile) is not None:
            return None
        drafts, refused = choose_drafts(options, source, self.policy, self._machine, speeds)
        if refused is not None:
            _log.warning("no draft model: %s", refused)
            return None
        if self._device_limit:
            self._device_limit += drafts.bytes_on("device")
        return drafts

    def _open_speculation(
        self, options: RunOptions, drafts: PlannedDrafts | None, speeds: Speeds, dtype: DType
    ) -> Speculation | None:
        """None where sequences bring no drafts."""
        self._draft_model: DraftModel | None = None
        if not (num_tokens := options.draft_tokens()):
            return None
        if (reason := drafts_refusal(self.profile)) is not None:
            _log.warning("no drafts: %s", reason)
            return None
        if drafts is not None:
            self._loaded.keeps_hidden = options.speculation == MTP
            kind = PredictionDrafts if options.speculation == MTP else DraftModel
            self._draft_model = kind(drafts, self._machine, lanes=options.lanes, vocab_size=self.profile.vocab_size)
        lookup = NgramDrafts() if options.speculation in (NGRAM, AUTO) else None
        prices = None
        if options.speculation == AUTO:
            prices = DraftPrices(PassPrices(self.profile, self.policy, speeds, dtype))
        return Speculation(lookup, num_tokens, prices, self._draft_model)

    def _load(self, source: OpenCheckpoint, options: RunOptions, dtype: DType) -> PassRunner:
        """The loaded model; expert pages are staged if the system refuses to lock their memory."""
        if line := unused_scales(source.ignored):
            _log.warning("%s: %s", source.directory, line)
        if line := unread_encoder(source.directory):
            _log.warning("%s: %s", source.directory, line)
        use_kept_kernels()
        try:
            if source.profile.ranks > 1:
                return self._lead(source, options)
            return PassRunner(source, self.policy, self._machine, options.lanes, self._experts, options.cuda_graphs)
        except PinningError as error:
            refused = error.with_traceback(None)  # whose frames hold the regions that were not refused
        except torch.OutOfMemoryError:
            raise out_of_device_memory(self._machine, self._device_limit) from None
        self.policy, self.host_pages_reason = stage_pages(self.policy, self.plan, self.profile, dtype, refused)
        _log.warning("%s", self.host_pages_reason)
        return self._load(source, options, dtype)

    def _lead(self, source: OpenCheckpoint, options: RunOptions) -> PassRunner:
        """The loaded model of rank 0; the other ranks are started, and follow it."""
        self._group = RankGroup(source.profile.ranks, options.device, self._machine)
        try:
            source = replace(source, source=source.source.joined(self._group.ranks))
            return LeadingRunner(self._group, source, self.policy, self._machine, options.lanes, self._experts)
        except RankError as error:
            lost = self._group.lost(error)
            self._group.stop()
            raise lost from None
        except BaseException:
            self._group.stop()
            raise

    @classmethod
    def from_pretrained(
        cls,
        model: str | Path,
        *,
        workload: Workload | None = None,
        options: EngineOptions | None = None,
        **values: Any,
    ) -> Engine:
        """Plan the fastest policy for ``workload`` within the memory limits, then load the model under it; the plan is
        in ``plan``.

        Args:
            model: a directory, ``demo``, or a model id on the hub.
            workload: what to plan for; None: the default `Workload`.
            options: the options by name are its fields (`EngineOptions`), such as ``host_memory="16GiB"``; ``device``
                ``auto`` is an accelerator if there is one, else ``cpu``.

        Raises:
            ConfigError: an option is invalid, or the hardware profile does not suit the machine.
            CheckpointError: the model is missing or unusable.
            BudgetError: no policy fits the memory limits.
        """
        options = (options or EngineOptions()).changed(values)
        source = open_for(str(model), count_ranks(options.tp, options.device))
        plan = plan_for(str(model), source, find_machine(options.device), options, workload or Workload())
        return cls(plan, source=source, options=options)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[Completion]:
        """Generate completions for all prompts, in the order of ``prompts`` and of a prompt's samples.

        Args:
            prompts: one prompt or several. A prompt is a string, ``{"prompt": str}``, ``{"messages": [...]}``,
                ``{"prompt_token_ids": [...]}`` or a list of token ids.
            sampling_params: one for all prompts, or one per prompt; None: the defaults.

        Raises:
            InputError: a prompt cannot be served; nothing has been generated then.
        """
        return sorted(
            self.stream(prompts, sampling_params), key=lambda completion: (completion.index, completion.sample)
        )

    def stream(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> Iterator[Completion]:
        """Generate completions and yield each when it is finished; ``completion.index`` is the prompt's position.

        Arguments and errors are those of `generate`. No other call can generate until the iterator is exhausted or
        closed.
        """
        return self._run_checked(requests_from(prompts, sampling_params, self.tokenizer, reasoning=self._reasoning))

    def embed(self, prompts: Prompt | Sequence[Prompt], pooling_params: PoolingParams | None = None) -> np.ndarray:
        """The embeddings of all prompts, float32 [prompts, dimensions], in their order: their final hidden states
        (transformers' ``last_hidden_state``), pooled. Nothing is generated.

        Args:
            prompts: as for `generate`; the chat template opens no turn of the assistant after messages.
            pooling_params: None, or what is None in them: as the checkpoint's sentence-transformers files say, if it
                has them, else the hidden state of the last token.

        Raises:
            InputError: a prompt cannot be served (nothing has been computed then), or its hidden states are not finite.
            ConfigError: the checkpoint names a pooling, or modules after it, that are not implemented.
        """
        asked = resolve_pooling(self._directory, pooling_params or PoolingParams())
        check_dimensions(asked, self.profile.hidden_size)
        requests = requests_from(prompts, PROMPT_ONLY, self.tokenizer, add_generation_prompt=False)
        completions = self._run_checked([replace(request, pooling=asked) for request in requests])
        return stack_embeddings(completions, len(requests), asked.dimensions or self.profile.hidden_size)

    def _run_checked(self, requests: Sequence[Request]) -> Iterator[Completion]:
        """`run`, if every request passes `check`."""
        for request in requests:
            try:
                self.check(request)
            except InputError as error:
                raise InputError(f"prompt {request.index}: {error}", code=error.code) from None
        return self.run(requests)

    def check(self, request: Request) -> None:
        """Reject a request that can never be served.

        Raises:
            InputError: no tokens, a token outside the vocabulary, a prompt longer than the context or the KV cache, or
                structured outputs or tools that cannot be compiled.
        """
        check_tokens(request, self.profile.vocab_size, self.profile.max_positions)
        prompt, context = len(request.token_ids), self.profile.max_positions
        longest = prompt + request.sampling.most_tokens(prompt, context)
        if (blocks := self._batcher.blocks_for(longest)) > self._loaded.pool.blocks:
            unlimited = request.sampling.max_tokens is None
            need = format_bytes(blocks * kv_block_bytes(self.profile, self.policy, self._loaded.dtype))
            raise InputError(
                f"prompt and completion may reach {longest} tokens{', the context,' if unlimited else ''} which take "
                f"{need} of KV memory; the KV cache holds {self.policy.kv_tokens} tokens; "
                f"{'set' if unlimited else 'lower'} max_tokens or allow more host memory",
                code="kv_capacity_exceeded",
            )
        self._batcher.check_buffer(longest)
        check_routing(request.sampling, self.profile)
        if request.sampling.structured_outputs is not None:
            self._constraints.check(request.sampling.structured_outputs)
        if request.tools is not None:
            self._calls.check(request.tools)

    def run(
        self,
        requests: Iterable[Request | None],
        *,
        on_pass: Callable[[], None] | None = None,
        until: Callable[[], bool] | None = None,
        on_scores: ScoreWatch | None = None,
    ) -> Iterator[Completion]:
        """Serve ``requests`` that `check` accepted; yield each completion when it is finished.

        Args:
            requests: read lazily, one ahead (None: none at present); exceptions are raised once the pass has ended.
            on_pass: called after every pass; `timeline`, `progress_tokens` and `binding` then describe that pass.
            until: called after every pass, once its completions were consumed; True ends the run and drops all
                unfinished requests.
            on_scores: called with the logits of every scored prompt token; it must not keep them.

        Raises:
            MoelightError: an earlier call is not finished, or the engine is closed.
        """
        if self._serving:
            raise MoelightError("the engine is still serving an earlier call; finish or close its iterator first")
        self._serving = True
        context, lost, discrete = self.profile.max_positions, self._loaded.range_lost, self._machine.discrete
        outputs = OutputProcessor(requests, self.tokenizer, self._calls, context, lost, on_scores, discrete=discrete)
        self._begin(outputs)
        wall_before, tokens_before, idle_before = self._wall_s, self.progress_tokens, self._python_s
        self._collected_s = began_s = time.perf_counter()
        self._totals.begin(began_s)
        idle = Idle(began_s)
        try:
            passes = self._overlapped_passes if self._overlaps else self._sequential_passes
            with closing(passes(outputs)) as landed:
                for finished in landed:
                    if self.timeline is not None:
                        idle.add(self.timeline)
                    self._wall_s = wall_before + time.perf_counter() - began_s
                    self._python_s = idle_before + idle.seconds
                    self.progress_tokens = tokens_before + outputs.tokens
                    if on_pass is not None:
                        on_pass()
                    yield from finished
                    if until is not None and until():
                        break
            self._python_s = idle_before + idle.until(began_s + self._wall_s - wall_before)
        except GeneratorExit:  # every launched pass has completed
            raise
        except torch.OutOfMemoryError:
            self._batcher.clear(failed=True)
            raise out_of_device_memory(self._machine, self._device_limit) from None
        except RankError as error:
            self._batcher.clear(failed=True)
            raise error if self._group is None else self._group.lost(error) from None
        except BaseException:
            self._batcher.clear(failed=True)
            raise
        finally:
            self._totals.end(began_s + self._wall_s - wall_before)
            self._batcher.clear()
            self._serving = False

    def _begin(self, outputs: OutputProcessor) -> None:
        self._batcher.add(outputs.sequences)
        if self._adapting is not None:
            self._adapting.begin(outputs, self._totals.busy_s)
        if self._speculation is not None:
            self._speculation.begin()

    def _overlapped_passes(self, outputs: OutputProcessor) -> Generator[list[Completion]]:
        """Each pass is launched before the tokens of the pass before it arrive: a sequence that finished early is
        computed once more and discarded. The launch waits only where the choice of a token, or a draft, needs earlier
        tokens on the host."""
        in_flight = self._launch(outputs, self._pack_next())
        try:
            while in_flight is not None:
                drafts = self._drafts_follow
                packed, waits = None if drafts else self._pack_next(), drafts or outputs.needs_history
                landing, in_flight = in_flight, None if waits else self._launch(outputs, packed)
                finished, changed = self._collect(outputs, landing, self._land(landing))
                if waits or self._waited(in_flight):
                    in_flight = self._relaunch(outputs, packed, changed=changed)
                yield finished
        finally:
            if in_flight is not None:
                self._loaded.drain(in_flight)

    def _sequential_passes(self, outputs: OutputProcessor) -> Generator[list[Completion]]:
        """A pass is packed while the pass before it runs, as if every sequence continued, and launched once the tokens
        have arrived: before they are processed, unless one of them may finish a sequence. With drafts it is packed once
        they are processed."""
        in_flight = self._launch(outputs, self._pack_next())
        try:
            while in_flight is not None:
                drafts = self._drafts_follow
                packed = None if drafts else self._pack_next()
                landing, in_flight = in_flight, None
                tokens = self._land(landing)
                waits = drafts or outputs.needs_history or outputs.may_end(tokens)
                if not waits:
                    in_flight = self._launch(outputs, packed)
                finished, changed = self._collect(outputs, landing, tokens)
                if waits or self._waited(in_flight):
                    in_flight = self._relaunch(outputs, packed, changed=changed)
                yield finished
        finally:
            if in_flight is not None:
                self._loaded.drain(in_flight)

    def _land(self, launched: PackedPass) -> list[list[int]]:
        """Wait for a pass; return the new tokens of each micro-batch."""
        self.timeline, tokens = self._loaded.land(launched)
        self._num_passes += 1
        self._device_waits = self._loaded.model.executor.device_waits
        self._totals.add(self.timeline)
        if self._speculation is not None:
            self._speculation.landed(launched.plans, tokens, self._loaded.model)
        return tokens

    def _collect(
        self, outputs: OutputProcessor, landed: PackedPass, tokens: list[list[int]]
    ) -> tuple[list[Completion], bool]:
        """The completions that a pass finishes, and whether the next pass may be another one than was packed: a
        sequence finished, or is generated again."""
        running = len(self._batcher.running)
        finished = outputs.collect(self._batcher, landed.plans, tokens, landed.routing)
        before_s, self._collected_s = self._collected_s, time.perf_counter()
        seconds = self._collected_s - before_s - (0.0 if self._speculation is None else self._speculation.drafting_s)
        if self._adapting is not None:
            self._adapting.after(landed.plans, seconds, self._totals.busy_s)
        if self._speculation is not None and self.timeline is not None:
            busy_s = {str(lane): busy for lane, busy in self.timeline.busy_s().items()}
            self._speculation.after(landed.plans, tokens, seconds, busy_s, self._loaded.policy)
        return finished, len(self._batcher.running) != running or self._batcher.requeued

    def _guard_device_memory(self) -> None:
        Device(self._machine.device).watch_memory()
        if self._device_limit:
            Device(self._machine.device).limit_memory(self._device_limit)

    def _pack_next(self, propose: Propose | None = None) -> PackedPass | None:
        plans = self._batcher.next_pass(propose) if self._batcher.busy else ()
        return self._loaded.pack(plans) if plans else None

    @property
    def _drafts_follow(self) -> bool:
        """Whether the pass after the one in flight is packed once all tokens are collected: it may have drafts, or the
        one in flight has some."""
        return self._speculation is not None and (self._speculation.active or self._speculation.under_way)

    def _relaunch(self, outputs: OutputProcessor, packed: PackedPass | None, *, changed: bool) -> PackedPass | None:
        """Launch the next pass once all tokens were collected: ``packed``, or another one where that may have
        ``changed``."""
        if packed is None or changed:
            propose = None
            if self._speculation is not None:
                propose = partial(self._speculation.propose, self._loaded.policy, outputs.possible)
            packed = self._pack_next(propose)
        return self._launch(outputs, packed)

    def _waited(self, in_flight: PackedPass | None) -> bool:
        """Whether no pass could be packed before the last tokens arrived, and sequences are running or suspended."""
        return in_flight is None and (bool(self._batcher.running) or self._batcher.requeued)

    def _launch(self, outputs: OutputProcessor, packed: PackedPass | None) -> PackedPass | None:
        if packed is None:
            return None
        self._batcher.launched(packed.plans)
        return self._loaded.launch(
            packed,
            outputs.choose,
            outputs.score,
            outputs.pool_hidden,
            follows=self._batcher.busy,
            captures_routing=outputs.captures_routing,
        )

    @property
    def stats(self) -> RunStats:
        """Totals of all runs so far."""
        admitted = self._batcher.admitted
        return RunStats(
            wall_s=self._wall_s,
            load_s=self._load_s,
            prompt_tokens=admitted.prompt_tokens,
            completion_tokens=self.progress_tokens,
            passes=self._num_passes,
            peak_rss_bytes=peak_rss_bytes(),
            lanes=self._totals.stats(),
            python_s=self._python_s,
            counts={
                "prefix_cache_queries": admitted.prompt_tokens,
                "prefix_cache_hits": admitted.cached_tokens,
                "device_waits": self._device_waits,
                "suspensions": admitted.suspended,
                **({} if self._speculation is None else self._speculation.counts),
            },
            adaptations=self.adaptations,
            device_peak_bytes=device_peak(self._machine).reserved,
        )

    @property
    def binding(self) -> Binding | None:
        """The busiest lane of the last few passes; None before the first."""
        return self._totals.binding

    @property
    def learned_len(self) -> int | None:
        """The mean length of answers without ``max_tokens``, as finished ones let expect; None before one is."""
        lengths = self._batcher.lengths
        return lengths.expected if lengths.ended else None

    @property
    def suspended(self) -> int:
        """How often a sequence without ``max_tokens`` was suspended, since the KV cache was full."""
        return self._batcher.admitted.suspended

    @property
    def kv_usage(self) -> float:
        """The share of KV blocks that sequences hold, 0 to 1."""
        pool = self._loaded.pool
        return 1.0 - pool.free / pool.blocks if pool.blocks else 0.0

    @property
    def expert_stats(self) -> dict[str, Any] | None:
        """Statistics of expert residency for JSON; None if all experts are resident and no option observes them."""
        if self._experts is None:
            return None
        return self._experts.residency.stats(stalls=self._loaded.stalls)

    def end_routing_trace(self) -> None:
        """Close the routing trace of `ExpertOptions`; raises the error that prevented writing it."""
        if self._experts is not None and self._experts.trace is not None:
            self._experts.trace.close()

    def save_expert_profile(self, path: Path) -> None:
        """Write the use counts of experts, from which a later run can start, to the file ``path``.

        Raises:
            ConfigError: the file cannot be written, or nothing was counted because every expert is resident;
                `ExpertOptions.record` counts in that case too.
        """
        if self._experts is None:
            raise ConfigError(
                f"{path}: routed experts were not recorded; open the engine with ExpertOptions(record=True)"
            )
        save_profile(self._experts.residency.profile(), path)

    @property
    def adaptations(self) -> tuple[Adaptation, ...]:
        """Policy changes between passes so far."""
        return () if self._adapting is None else tuple(self._adapting.changes)

    @property
    def _loaded(self) -> PassRunner:
        if self._passes is None:
            raise MoelightError("the engine is closed")
        return self._passes

    def close(self) -> None:
        """Stop the lanes, free the model and close the routing trace; closing twice is allowed."""
        self._constraints.close()
        if self._draft_model is not None:
            self._draft_model.close()
            self._draft_model = None
        if self._passes is not None:
            self._passes.close()
            self._passes = None
            if self._group is not None:
                self._group.stop()
            if self._device_limit:
                Device(self._machine.device).limit_memory(None)
        self.end_routing_trace()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


def _batcher(
    policy: Policy, plan: Plan | None, profile: ModelProfile, passes: PassRunner, discrete: bool, prefix_caching: bool
) -> Batcher:
    return Batcher(
        policy,
        passes.pool,
        windows=blocks_of_windows(profile, policy, passes.window_pool),
        discrete=discrete,
        window=profile.window,
        prefix_caching=prefix_caching,
        by_length=profile.by_length,
        expected_len=_expected_len(policy, plan),
    )


def _expected_len(policy: Policy, plan: Plan | None) -> int:
    """The expected length of answers that only the context limits: the plan's or, under a policy that was given, at
    most half of what the cache holds of each sequence."""
    if plan is not None:
        return plan.workload.gen_len
    return max(1, min(EXPECTED_GEN_LEN, policy.kv_tokens // policy.batch_size // 2))
