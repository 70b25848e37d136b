"""The output processor: chooses tokens, collects log-probabilities, and decides when a sequence is finished."""

from __future__ import annotations

import logging
import math
import secrets
import time
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, MutableSequence, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import TypeAlias

import numpy as np
from torch import Tensor

from moelight.core.errors import InputError
from moelight.core.request import (
    INVALID,
    TRUNCATED,
    Completion,
    Logprob,
    Request,
    RequestMetrics,
    SamplingParams,
    StructureError,
    ToolCall,
)
from moelight.engine.batcher import Batcher, MicroBatchPlan, RunningSequence, SampledRow, SequenceChunk
from moelight.engine.call_constraints import CallConstraints
from moelight.engine.constraints import Constraint, Constraints, bits, without
from moelight.engine.detokenizer import BadWords, StopMatcher, TokenTexts, cut_at_stop, without_unfinished
from moelight.engine.pooling import Pooling, pool_rows
from moelight.engine.reasoning import AnswerSplit, Thinking, reasoning_format
from moelight.engine.routing import PassRouting, SequenceRouting
from moelight.engine.sampling import (
    CHANGE_BYTES,
    NOT_FINITE,
    Change,
    Scores,
    attempt_seed,
    blocks,
    change,
    likeliest_tokens,
    next_tokens,
    sample_seed,
    score,
    to_device,
)
from moelight.engine.tokenizer import Tokenizer

ScoreRows: TypeAlias = MutableSequence[tuple[Scores, int]]  # scores of several rows, and the row of this sequence
# Gets the request's index and the position of each scored prompt token, and its logits [R, V], in a lane's thread.
ScoreWatch: TypeAlias = Callable[[Sequence[tuple[int, int]], Tensor], None]
UNCHANGED = Change()
RESAMPLING_TEMPERATURE = 0.7  # of greedy rows, whose first attempt would only be repeated
NO_HIDDEN = "the model's hidden states are not finite"
NO_LOGITS = (
    "the model's logits are not finite: its weights hold infinities or NaNs, or its activations leave the range of "
    "their dtype; use a sound checkpoint, or a wider dtype"
)
STUCK = "structured_outputs"  # the code of an answer that no token continues
_LIKELIEST = SamplingParams()
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class SequenceEnd:
    """The end of a sequence. ``closing``: a last token outside the answer; ``stop``: stop string, token id, or the
    message of an error with ``code``; ``by_text``: a stop string matched, and the answer is still to be cut there."""

    reason: str
    closing: int | None = None
    stop: int | str | None = None
    by_text: bool = False
    code: str | None = None

    @property
    def by_itself(self) -> bool:
        """True if the model, or the structure of the answer, ended it."""
        return self.reason == "stop" and self.stop is None and not self.by_text


class SequenceState:
    """The state of a sequence that needs more than sampling from its logits until EOS.

    Attributes:
        chooses: tokens are chosen separately, since logits are changed or tokens scored.
        needs_history: all tokens must be known before the next one is chosen.
        top: number of likeliest tokens scored besides the chosen one; None if none is scored.
        chosen: scores of generated tokens not collected yet, or rejected; ``prompt``: of prompt tokens, at
            ``positions``.
        logprobs: log-probabilities of the collected tokens.
    """

    def __init__(self, request: Request, tokenizer: Tokenizer, constraints: Constraints) -> None:
        self._how = how = request.sampling
        self._token_ids, self._tokenizer, self._constraints = request.token_ids, tokenizer, constraints
        self.matcher: StopMatcher | None = None
        self._thinking: Thinking | None = None
        budget = how.thinking_token_budget
        if request.reasoning is not None and (how.stop or how.structured_outputs is not None or budget is not None):
            self._thinking = Thinking(request.reasoning, tokenizer, budget)
        marked = request.reasoning is not None and reasoning_format(request.reasoning).special
        self._raw = marked or request.tools is not None  # special tokens mark reasoning and calls in the text
        if how.stop:
            self.matcher = self._stop_matcher(request.token_ids, unsearched=how.min_tokens)
        grammar = how.structured_outputs
        self._constraint = None if grammar is None else constraints.open(grammar)
        self._penalties = _penalties(how)
        self._counts = self._penalties != UNCHANGED.penalties
        self._seen = dict.fromkeys(request.token_ids, 0) if how.repetition_penalty != 1 else {}
        self._eos: Collection[int] = () if how.ignore_eos else tokenizer.eos_token_ids
        self._ends = {*how.stop_token_ids, *self._eos}
        self._bad_words: BadWords | None = None
        if how.bad_words:
            self._bad_words = BadWords(partial(tokenizer.encode, add_special_tokens=False), how.bad_words)
        self._only = None if how.allowed_token_ids is None else bits(how.allowed_token_ids, constraints.vocab_size)
        self.needs_history = bool(self._counts or self._constraint or how.bad_words) or budget is not None
        self.top = how.logprobs
        self._texts, self._token_bytes = TokenTexts(tokenizer.token_bytes), tokenizer.token_bytes
        self.chooses = self.top is not None or _changes(how)
        self.chosen: deque[tuple[Scores, int]] = deque()
        self._behind: deque[SequenceState] = deque()  # as it will be behind the drafts of the pass under way
        self.logprobs: list[Mapping[int, Logprob]] = []
        self.positions: list[int] = []
        self.prompt: list[tuple[Scores, int]] = []

    def _stop_matcher(self, before: Sequence[int], *, unsearched: int) -> StopMatcher:
        """Finds the stop strings in the tokens after ``before``."""
        skip = self._how.skip_special_tokens and not self._raw
        decode = partial(self._tokenizer.decode, skip_special_tokens=skip)
        return StopMatcher(decode, self._how.stop, context=self._tokenizer.context(before), unsearched=unsearched)

    def change(self, position: int, drafts: Sequence[int] = ()) -> Change:
        """The change to the logits of generated token number ``position``, behind ``drafts`` that follow the tokens
        that arrived; called for one draft more each time."""
        if drafts and self.needs_history:
            self._behind.append((self._behind[-1] if self._behind else self)._followed(drafts[-1]))
            return self._behind[-1].change(position)
        how = self._how
        forbidden: Collection[int] = self._ends if position < how.min_tokens else ()
        allowed = self._only
        if self._thinking is not None and (end := self._thinking.next_end) is not None:
            allowed, forbidden = bits([end], self._constraints.vocab_size), ()
        elif self._constraint is not None:
            if self._thinking is None or self._thinking.over:
                allowed = self._constraint.allowed(self._only)
            elif self._thinking.opened:
                forbidden = forbidden or self._eos  # the content that the constraint describes is still to come
            else:
                allowed = self._or_reasoning(self._constraint, self._thinking)
        if self._bad_words is not None:
            forbidden = {*forbidden, *self._bad_words.forbidden()}
        if allowed is not None and forbidden:
            allowed, forbidden = without(allowed, forbidden), ()
        biases, seen = how.logit_bias or {}, self._seen
        if not (biases or forbidden or seen or allowed is not None):
            return UNCHANGED
        return Change(biases=biases, forbidden=forbidden, seen=seen, penalties=self._penalties, allowed=allowed)

    def _or_reasoning(self, constraint: Constraint, thinking: Thinking) -> np.ndarray | None:
        """The tokens by which an answer that may still open its reasoning goes on: those of the constraint, as long as
        the answer fits it, and the next one of the opening marker."""
        begin = thinking.next_begin
        allowed = None if constraint.left else constraint.allowed(self._only)
        if begin is None or begin >= self._constraints.vocab_size:
            return allowed
        marker = bits([begin], self._constraints.vocab_size)
        constraint.stuck = False
        return marker if allowed is None else allowed | marker

    def _followed(self, token: int) -> SequenceState:
        """The state as it would be once ``token`` arrived, of which `change` is asked."""
        state = copy(self)
        state.top, state.logprobs, state.matcher = None, [], None
        state._seen, state._behind = dict(self._seen), deque()
        state._bad_words = None if self._bad_words is None else self._bad_words.copy()
        state._constraint = None if self._constraint is None else self._constraint.copy()
        state._thinking = copy(self._thinking)
        if state.arrived(token, closes=False) is None:
            state.ends(token, ())
        return state

    def reject(self, count: int) -> None:
        """Drop the last ``count`` rows, whose drafts were not accepted."""
        for _ in range(count):
            if self.top is not None:
                self.chosen.pop()
            if self._behind:
                self._behind.pop()

    def accept(self) -> None:
        """The token that arrived was a draft, and the next one was chosen behind it, or none was."""
        if self._behind and (state := self._behind.popleft())._constraint is not None and self._constraint is not None:
            self._constraint.stuck, self._constraint.reason = state._constraint.stuck, state._constraint.reason

    def possible(self, drafts: Sequence[int], count: int) -> Sequence[int]:
        """The first of ``drafts`` that may follow, or at most ``count`` tokens that have to."""
        if self._constraint is not None and (self._thinking is None or self._thinking.over):
            drafts = self._constraint.possible(drafts, count)
        ends = (at for at, token in enumerate(drafts) if token in self._ends)
        return drafts[: next(ends, len(drafts))]

    def arrived(self, token: int, *, closes: bool) -> SequenceEnd | None:
        """Record ``token``; ``closes``: it ends the sequence and is not part of the answer. Returns the end of a
        sequence whose constraint allows no token, else None."""
        if self.top is not None:
            scores, row = self.chosen.popleft()
            if not closes:
                self.logprobs.append(_logprobs(token, scores, row, self._texts.text))
                self._texts.follow(token)
        if self._constraint is not None and self._constraint.stuck:
            del self.logprobs[-1:]
            return SequenceEnd("error", stop=f"structured_outputs: {self._constraint.reason}", code=STUCK)
        if self._counts:
            self._seen[token] = self._seen.get(token, 0) + 1
        if self._bad_words is not None:
            self._bad_words.follow(token)
        return None

    def ends(self, token: int, generated: Sequence[int]) -> SequenceEnd | None:
        """The end of the sequence if ``token``, which is part of the answer and the last of ``generated``, completes
        it; else None. Stop strings and constraints are those of the content, behind the reasoning."""
        thinking, content = self._thinking, [token]
        if thinking is not None and not thinking.over:
            over = thinking.go_on(token)
            if thinking.opened:
                if over:
                    self._begin_content(generated, thinking.rest)
                return None
            content = list(generated) if over else []  # until then they may open the reasoning
        if self.matcher is not None and any(self.matcher.matches(token_id) for token_id in content):
            return SequenceEnd("stop", by_text=True)
        if self._constraint is not None:
            if thinking is None:
                self._constraint.go_on(token)
            else:
                self._constraint.go_on_if_allowed(token)
            if self._constraint.complete:
                return SequenceEnd("stop")
        return None

    def _begin_content(self, generated: Sequence[int], rest: bytes) -> None:
        """``generated`` ends with the reasoning; ``rest`` of its last token is content."""
        if self.matcher is not None:
            unsearched = max(0, self._how.min_tokens - len(generated))
            self.matcher = self._stop_matcher([*self._token_ids, *generated], unsearched=unsearched)
        if self._how.structured_outputs is not None:
            self._constraint = self._constraints.open(self._how.structured_outputs)
            if text := rest.decode(errors="replace").lstrip("\n"):
                self._constraint.go_on_from(self._tokenizer.encode(text, add_special_tokens=False))

    @property
    def accepts(self) -> bool:
        """True if the answer matches its constraint as it is, or has none."""
        return self._constraint is None or self._constraint.accepts

    @property
    def scored_nan(self) -> bool:
        """True if a prompt token was scored by logits that are not finite; valid once all are scored."""
        return any(math.isnan(scores.logprobs[row]) for scores, row in self.prompt)

    def prompt_logprobs(self) -> tuple[Mapping[int, Logprob] | None, ...] | None:
        """One mapping per prompt token, None for an unscored one; None if none were requested."""
        if self._how.prompt_logprobs is None:
            return None
        scored, texts = dict(zip(self.positions, self.prompt, strict=True)), TokenTexts(self._token_bytes)
        result: list[Mapping[int, Logprob] | None] = []
        for position, token in enumerate(self._token_ids):
            result.append(_logprobs(token, *scored[position], texts.text) if position in scored else None)
            texts.follow(token)
        return tuple(result)


def _penalties(how: SamplingParams) -> tuple[float, float, float]:
    return how.repetition_penalty, how.frequency_penalty, how.presence_penalty


def _changes(how: SamplingParams) -> bool:
    """True if the logits of some token are changed before it is chosen."""
    changed = how.logit_bias or how.min_tokens or how.structured_outputs or how.allowed_token_ids or how.bad_words
    return bool(changed) or how.thinking_token_budget is not None or _penalties(how) != UNCHANGED.penalties


def _logprobs(token: int, scores: Scores, row: int, text: Callable[[int], str]) -> Mapping[int, Logprob]:
    """The scored token is first, then the likeliest tokens in order."""
    ids, logprobs = scores.top_ids[row].tolist(), scores.top_logprobs[row].tolist()
    ranked = {token: (float(scores.logprobs[row]), int(scores.ranks[row]))}
    for rank, (token_id, logprob) in enumerate(zip(ids, logprobs, strict=True), start=1):
        ranked.setdefault(token_id, (logprob, rank))
    return {
        token_id: Logprob(logprob=logprob, rank=rank, decoded_token=text(token_id))
        for token_id, (logprob, rank) in ranked.items()
    }


class OutputProcessor:
    """The ``sequences`` of one run, created lazily, and the rules that finish them; finished sequences are forgotten.

    Attributes:
        tokens: number of tokens generated so far.
        ended_tokens: number of tokens that the finished sequences generated; ``ended_most``: for which they were
            admitted.
    """

    def __init__(
        self,
        requests: Iterable[Request | None],
        tokenizer: Tokenizer,
        calls: CallConstraints,
        max_positions: int,
        range_lost: Callable[[], str] = str,
        on_scores: ScoreWatch | None = None,
        *,
        discrete: bool = True,
    ) -> None:
        """``range_lost``: where logits that are not finite come from, a clause for their error. ``discrete``: logits
        are a device's."""
        self._discrete = discrete
        self._range_lost, self._on_scores = range_lost, on_scores
        self._tokenizer, self._max_positions = tokenizer, max_positions
        self._calls, self._constraints = calls, calls.constraints
        self._eos = frozenset(tokenizer.eos_token_ids)
        self._ending = {NOT_FINITE, *self._eos}
        self._states: dict[RunningSequence, SequenceState] = {}
        self._poolings: dict[RunningSequence, Pooling] = {}
        self._routings: dict[RunningSequence, SequenceRouting] = {}
        self._historians = self._watching = 0
        self._collected_s = 0.0
        self._warned = False
        self.tokens = self.ended_tokens = self.ended_most = 0
        # None stands for `no request at present`.
        self.sequences: Iterator[RunningSequence | None] = (
            made for request in requests for made in (self._open(request) if request is not None else (None,))
        )

    def _open(self, request: Request) -> Iterator[RunningSequence]:
        if request.tools is not None and request.tools.forced:
            call = self._calls.structure(request.tools)
            request = replace(request, sampling=replace(request.sampling, structured_outputs=call))
        how = request.sampling
        seed = secrets.randbits(64) if how.seed is None else how.seed
        self._ending.update(how.stop_token_ids)
        for sample in range(how.n):
            sequence = RunningSequence(
                request=request,
                seed=sample_seed(seed, sample),
                max_tokens=how.most_tokens(len(request.token_ids), self._max_positions),
                grows=how.max_tokens is None,
                sample=sample,
            )
            self._track(sequence)
            yield sequence

    def _track(self, sequence: RunningSequence) -> None:
        """Create the state of ``sequence``, if it needs one."""
        how, pooling = sequence.request.sampling, sequence.request.pooling
        if how.return_routed_experts:
            self._routings[sequence] = SequenceRouting()
        if pooling is not None:
            self._poolings[sequence] = Pooling(pooling)
        elif how.stop or _changes(how) or how.logprobs is not None or how.prompt_logprobs is not None:
            state = SequenceState(sequence.request, self._tokenizer, self._constraints)
            self._states[sequence] = state
            self._historians += state.needs_history
            self._watching += state.matcher is not None

    def possible(self, sequence: RunningSequence, drafts: Sequence[int], count: int) -> Sequence[int]:
        """The first of ``drafts`` that may follow ``sequence`` without ending it, or at most ``count`` tokens that have
        to."""
        if (state := self._states.get(sequence)) is not None:
            return state.possible(drafts, count)
        how = sequence.request.sampling
        ends = how.stop_token_ids if how.ignore_eos else (*how.stop_token_ids, *self._eos)
        return drafts[: next((at for at, token in enumerate(drafts) if token in ends), len(drafts))]

    @property
    def captures_routing(self) -> bool:
        """True if the experts of some sequence are to be returned."""
        return bool(self._routings)

    @property
    def needs_history(self) -> bool:
        """True if the next token of some sequence can be chosen only after `collect` processed all earlier tokens."""
        return self._historians > 0

    def choose(self, sampled: Sequence[SampledRow], logits: Tensor) -> Tensor:
        """The token that follows each row, int64 [S], from logits float32 [S, V]; `NOT_FINITE` for a row whose logits
        are not finite, whatever its parameters. Behind a draft it is the token that follows if the draft is accepted,
        by the state and the random number that the sequence then has."""
        likeliest, lost = likeliest_tokens(logits, discrete=self._discrete)
        owners = [chunk.sequence for chunk, _ in sampled]
        params, seeds = [owner.request.sampling for owner in owners], [owner.seed for owner in owners]
        places = [row.earlier for row in sampled]
        states = [self._states.get(owner) for owner in owners] if self._states else ()
        special = {row: state for row, state in enumerate(states) if state is not None and state.chooses}
        plain = [_LIKELIEST if row in special else how for row, how in enumerate(params)]
        tokens = next_tokens(logits, plain, seeds, places, likeliest=likeliest)
        for rows in blocks(list(special), logits, CHANGE_BYTES):
            index, row_states = to_device(np.asarray(rows), logits), [special[row] for row in rows]
            changed = raw = logits[index]
            changes = [
                state.change(places[row], sampled[row].behind) for row, state in zip(rows, row_states, strict=True)
            ]
            if any(change is not UNCHANGED for change in changes):
                changed = raw.clone()
                change(changed, changes)
            tokens[index] = chosen = next_tokens(
                changed, [params[row] for row in rows], [seeds[row] for row in rows], [places[row] for row in rows]
            )
            wanted = [(row, state.top, state.chosen) for row, state in enumerate(row_states) if state.top is not None]
            _score(raw, chosen, wanted)
        return tokens.masked_fill_(lost, NOT_FINITE)

    def score(self, chunks: Sequence[SequenceChunk], first: int, logits: Tensor, targets: Tensor) -> None:
        """Keep the scores of prompt tokens ``targets`` int64 [R], the scored positions of ``chunks`` from number
        ``first`` on, under ``logits`` float32 [R, V]."""
        every = ((chunk.sequence, position) for chunk in chunks for position in chunk.scored)
        rows = list(islice(every, first, first + len(logits)))
        if self._on_scores is not None:
            self._on_scores([(sequence.request.index, position) for sequence, position in rows], logits)
        wanted = []
        for row, (sequence, position) in enumerate(rows):
            state = self._states.get(sequence)
            if state is not None:
                state.positions.append(position)
                wanted.append((row, sequence.request.sampling.prompt_logprobs or 0, state.prompt))
        _score(logits, targets, wanted)

    def pool_hidden(self, chunks: Sequence[SequenceChunk], hidden: Tensor) -> None:
        """Pool the final hidden states ``hidden`` [P, H] of the pooled positions of ``chunks``."""
        pooled = [chunk for chunk in chunks if chunk.pooled]
        sums = pool_rows(hidden, [len(chunk.pooled) for chunk in pooled])
        for chunk, row in zip(pooled, sums, strict=True):
            if (pooling := self._poolings.get(chunk.sequence)) is not None:
                pooling.add(row, len(chunk.pooled))

    def may_end(self, tokens: Sequence[Sequence[int]]) -> bool:
        """True if ``tokens`` may finish some sequence before its maximum length."""
        return self._watching > 0 or any(not self._ending.isdisjoint(new) for new in tokens)

    def collect(
        self,
        batcher: Batcher,
        plans: Sequence[MicroBatchPlan],
        tokens: Sequence[Sequence[int]],
        routing: PassRouting | None = None,
    ) -> list[Completion]:
        """Append each new token to its sequence; return the completions of the sequences that finish. ``routing``: the
        experts of the pass."""
        finished = []
        self._collected_s = time.perf_counter()
        if routing is not None:
            self._keep_routing(plans, tokens, routing)
        for load, new in zip(plans, tokens, strict=True):
            arriving = iter(new)
            for chunk in load.chunks:
                if not chunk.completes:
                    continue
                sequence, tokens_of_chunk = chunk.sequence, list(islice(arriving, chunk.samples))
                if sequence.finished:
                    continue  # the sequence finished after this pass had been launched
                accepted = chunk.accepted(tokens_of_chunk)
                if chunk.drafts:
                    batcher.accept(sequence, accepted)
                if (end := self._end_of(sequence, tokens_of_chunk, accepted)) is not None:
                    sequence.finished = True
                    batcher.retire(sequence)
                    self.ended_tokens += len(sequence.generated)
                    self.ended_most += sequence.reserved
                    completion = self._completion(sequence, end)
                    self._poolings.pop(sequence, None)
                    if (state := self._states.pop(sequence, None)) is not None:
                        self._historians -= state.needs_history
                        self._watching -= state.matcher is not None
                    if self._resamples(sequence, end, completion):
                        batcher.requeue(self._resampled(sequence))
                    else:
                        finished.append(completion)
        return finished

    def _keep_routing(
        self, plans: Sequence[MicroBatchPlan], tokens: Sequence[Sequence[int]], routing: PassRouting
    ) -> None:
        """Keep the experts of all rows but those of drafts that were not accepted."""
        for j, (load, new) in enumerate(zip(plans, tokens, strict=True)):
            first, experts, arriving = 0, routing.of(j), iter(new)
            for chunk in load.chunks:
                accepted = chunk.accepted(list(islice(arriving, chunk.samples)))
                if (routed := self._routings.get(chunk.sequence)) is not None:
                    count = chunk.count - len(chunk.drafts) + accepted
                    routed.put(chunk.start, experts[first : first + count])
                first += chunk.count

    def _resamples(self, sequence: RunningSequence, end: SequenceEnd, completion: Completion) -> bool:
        """True if the answer is to be generated again, since its structure is not the one asked for."""
        outputs, tools = sequence.request.sampling.structured_outputs, sequence.request.tools
        limit = 0 if tools is None else tools.resamplings
        if outputs is not None and outputs.schema is not None:
            limit = max(limit, outputs.resamplings)
        if sequence.attempt >= limit:
            return False
        invalid = end.by_itself and completion.structure_error is not None
        return invalid or end.code == STUCK

    def _resampled(self, sequence: RunningSequence) -> RunningSequence:
        """The next attempt at an answer: other draws, which its seed and the number of the attempt decide."""
        request, attempt = sequence.request, sequence.attempt + 1
        if request.sampling.greedy:
            request = replace(request, sampling=replace(request.sampling, temperature=RESAMPLING_TEMPERATURE))
        first_seed = sequence.seed - attempt_seed(0, sequence.attempt)
        again = RunningSequence(
            request=request,
            seed=attempt_seed(first_seed, attempt),
            max_tokens=sequence.max_tokens,
            sample=sequence.sample,
            grows=sequence.grows,
            number=sequence.number,
            arrival_s=sequence.arrival_s,
            scheduled_s=sequence.scheduled_s,
            first_token_s=sequence.first_token_s,
            attempt=attempt,
            discarded=sequence.discarded + len(sequence.generated),
        )
        self._track(again)
        return again

    def _structure_error(
        self, sequence: RunningSequence, end: SequenceEnd, split: AnswerSplit | None, text: str
    ) -> StructureError | None:
        """Why a finished answer, shown as ``text``, has not the structure asked for, if it has not."""
        request, state = sequence.request, self._states.get(sequence)
        outputs = request.sampling.structured_outputs
        if outputs is None or state is None or end.reason == "error" or not sequence.max_tokens:
            return None
        if outputs.schema is None:
            problem, complete = None, state.accepts or end.by_text or end.by_itself
        else:
            if not end.by_text:
                context = self._tokenizer.context(request.token_ids)
                skip = split is None or not split.special
                text = self._tokenizer.decode_after(context, sequence.generated, skip_special_tokens=skip)
                text = text if split is None else split(text, skip_special_tokens=True)[1]
            problem = self._constraints.mismatch(outputs, text)
            complete = problem is None or end.by_itself
        if complete:
            return problem
        limit = "max_tokens" if end.reason == "length" else "a stop text or stop token"
        return StructureError(code=TRUNCATED, message=f"{limit} ended the answer before its structure was complete")

    def _end_of(self, sequence: RunningSequence, tokens: Sequence[int], accepted: int) -> SequenceEnd | None:
        """Append the ``accepted`` first of ``tokens``, which were drafts, and the one that follows them, up to the end
        of ``sequence``, if they reach it."""
        if not tokens:
            return self._ends(sequence, None)
        state = self._states.get(sequence) if self._states else None
        if state is not None:
            state.reject(len(tokens) - accepted - 1)
        for token in tokens[: accepted + 1]:
            if (end := self._ends(sequence, token)) is not None:
                return end
            if state is not None:
                state.accept()
        return None

    def _ends(self, sequence: RunningSequence, token: int | None) -> SequenceEnd | None:
        """The end of the sequence if ``token`` (None where nothing is to be generated) finishes it, else None."""
        how, state = sequence.request.sampling, self._states.get(sequence) if self._states else None
        first = not sequence.generated
        if token == NOT_FINITE or (first and state is not None and state.scored_nan):
            reason = NO_LOGITS + self._range_lost()
            if not self._warned:
                self._warned = True
                _log.warning(reason)
            return SequenceEnd("error", stop=reason, code="not_finite")
        if (pooling := self._poolings.get(sequence)) is not None and not pooling.finite:
            return SequenceEnd("error", stop=NO_HIDDEN + self._range_lost(), code="not_finite")
        if token is None:
            return SequenceEnd("length")
        if sequence.first_token_s is None:
            sequence.first_token_s = self._collected_s
        end = None
        if token in self._eos and not how.ignore_eos:
            end = SequenceEnd("stop", closing=token)
        elif token in how.stop_token_ids:
            end = SequenceEnd("stop", closing=token, stop=token)
        if state is not None and (stuck := state.arrived(token, closes=end is not None)) is not None:
            return stuck
        if end is not None:
            return end
        sequence.generated.append(token)
        self.tokens += 1
        if state is not None and (ending := state.ends(token, sequence.generated)) is not None:
            return ending
        return SequenceEnd("length") if len(sequence.generated) >= sequence.max_tokens else None

    def _completion(self, sequence: RunningSequence, end: SequenceEnd) -> Completion:
        request, state, pooling = sequence.request, self._states.get(sequence), self._poolings.get(sequence)
        ids, start, prompt = sequence.generated, request.reasoning, len(request.token_ids)
        routing = None if (routed := self._routings.pop(sequence, None)) is None else routed.experts()
        split = None if start is None else AnswerSplit(start, self._tokenizer, ids)
        answer = self._read_answer(sequence, end, split)
        logprobs, total = None, None
        if state is not None and state.top is not None:
            logprobs = tuple(state.logprobs)
            total = sum(by_token[token].logprob for by_token, token in zip(logprobs, ids, strict=True))
        return Completion(
            index=request.index,
            sample=sequence.sample,
            text=answer.text,
            token_ids=tuple(ids),
            finish_reason="tool_calls" if answer.calls and end.reason == "stop" else end.reason,
            stop_reason=answer.stop,
            error_code=end.code,
            prompt_tokens=prompt,
            cached_tokens=sequence.cached,
            logprobs=logprobs,
            cumulative_logprob=total,
            prompt_logprobs=None if state is None else state.prompt_logprobs(),
            reasoning=answer.reasoning,
            reasoning_tokens=None if split is None else split.reasoning_tokens,
            structure_error=answer.error,
            attempts=sequence.attempt + 1,
            discarded_tokens=sequence.discarded,
            tool_calls=answer.calls,
            embedding=None if pooling is None or end.code else pooling.embedding(),
            prompt_routed_experts=None if routing is None else routing[:prompt],
            routed_experts=None if routing is None else routing[prompt : prompt + len(ids)],
            metrics=self._metrics(sequence),
        )

    def _metrics(self, sequence: RunningSequence) -> RequestMetrics:
        scheduled_s = sequence.arrival_s if sequence.scheduled_s is None else sequence.scheduled_s
        queue_s, first_s = scheduled_s - sequence.arrival_s, sequence.first_token_s
        if first_s is None:
            return RequestMetrics(queue_s=queue_s)
        return RequestMetrics(
            queue_s=queue_s, first_token_s=first_s - scheduled_s, generation_s=self._collected_s - first_s
        )

    def _read_answer(self, sequence: RunningSequence, end: SequenceEnd, split: AnswerSplit | None) -> _Answer:
        """The text of a finished sequence, cut at its stop text, without what is split from it."""
        request, tokenizer, ids = sequence.request, self._tokenizer, sequence.generated
        how, tools, stop = request.sampling, request.tools, end.stop
        raw = tools is not None or (split is not None and split.special)  # special tokens mark calls and reasoning
        context, skip = tokenizer.context(request.token_ids), how.skip_special_tokens
        decode = partial(tokenizer.decode_after, context, skip_special_tokens=skip and not raw)
        closing = [end.closing] if end.closing is not None and how.include_stop_str_in_output else []
        text, reasoning = without_unfinished([*ids, *closing], tokenizer.token_bytes, decode), None
        if end.by_text:
            begin = 0 if split is None else split.content_begin(text)
            if how.min_tokens:
                begin = max(begin, len(decode(ids[: how.min_tokens])) - max(map(len, how.stop)) + 1)
            text, stop = cut_at_stop(text, how.stop, begin=begin, include=how.include_stop_str_in_output)
        if split is not None:
            reasoning, text = split(text, skip_special_tokens=skip and tools is None)
        if tools is None:
            error = self._structure_error(sequence, end, split, text)
            return _Answer(text=text, reasoning=reasoning, stop=stop, error=error)
        clean = tokenizer.without_special_tokens
        error = self._structure_error(sequence, end, split, clean(text))
        text, calls = self._calls.read(tools, text)
        if error is None and end.reason != "error":
            error = self._calls.error(tools, calls)
            if tools.forced and not calls and end.by_itself:
                error = StructureError(code=INVALID, message="the answer calls no tool")
        if skip:
            text, reasoning = clean(text), None if reasoning is None else clean(reasoning)
        return _Answer(text=text, reasoning=reasoning, stop=stop, error=error, calls=calls)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Answer:
    """The parsed answer of a finished sequence; ``stop``: its stop text or stop token, if one ended it."""

    text: str
    reasoning: str | None
    stop: int | str | None
    error: StructureError | None
    calls: tuple[ToolCall, ...] = ()


def _score(logits: Tensor, tokens: Tensor, wanted: Sequence[tuple[int, int, ScoreRows]]) -> None:
    """``wanted``: (row, number of likeliest tokens, list that receives the scores)."""
    by_top: defaultdict[int, list[tuple[int, ScoreRows]]] = defaultdict(list)
    for row, top, chosen in wanted:
        by_top[top].append((row, chosen))
    for top, rows in by_top.items():
        if len(rows) == len(logits):
            scores = score(logits, tokens, top)
        else:
            index = to_device(np.asarray([row for row, _ in rows]), logits)
            scores = score(logits[index], tokens[index], top)
        for at, (_, chosen) in enumerate(rows):
            chosen.append((scores, at))


def check_tokens(request: Request, vocab_size: int, max_positions: int) -> None:
    """Raise InputError for an empty prompt, one longer than the context, or token ids outside the vocabulary."""
    tokens, how = len(request.token_ids), request.sampling
    if not tokens:
        raise InputError("the prompt has no tokens", code="empty_prompt")
    if not 0 <= min(request.token_ids) <= max(request.token_ids) < vocab_size:
        raise InputError(f"token ids must be below the vocabulary's {vocab_size}", code="bad_token_id")
    if tokens > request.most_tokens(max_positions):
        raise InputError(
            f"the prompt has {tokens} tokens, the model's context is {max_positions}", code="context_length_exceeded"
        )
    for name in ("logit_bias", "stop_token_ids", "allowed_token_ids"):
        token = max(getattr(how, name) or (0,))
        if token >= vocab_size:
            reason = f"{name}: token id {token} is not below the vocabulary's {vocab_size}"
            raise InputError(reason, code="bad_token_id")
