"""The time left of a job: the work that is left, in tokens, over the measured speed. Lengths of answers are estimated
from this run; a prompt token counts as a share of a generated one. Rows of earlier runs do not count."""

from __future__ import annotations

import math

from moelight.batch.progress import JobCounts, JobStart, Progress
from moelight.core.request import Completion

_PROMPT_COST = 0.1  # of a generated token's cost, without a plan; many prompt tokens share one transfer of each weight
_PLAN_WEIGHT = 0.001  # the plan weighs as much as measurements of this share of the job
_REMEMBERED = 0.3  # of the job's work: older passes decay, so that a change of policy takes effect
_SMOOTHED_S = 5.0
_EVERY_S = 1.0
_LEAST_S = 1.0  # of running before measurements are used: the first passes warm caches


class TimeLeft(Progress):
    """Seconds until the job ends, renewed once a second. Must receive events before the watchers that read it."""

    def __init__(self) -> None:
        self.remaining_s: float | None = None
        self.expected_tokens = 0.0  # estimated tokens of the whole run; 0: not known yet
        self._planned_s = self._planned_work = 0.0
        self._prompt_cost = _PROMPT_COST
        self._answers = self._answer_tokens = 0  # that are finished
        self._work = self._seconds = 0.0  # of this run, decaying
        self._at = JobCounts()
        self._end_s: float | None = None
        self._predicted_at_s = 0.0

    def started(self, start: JobStart) -> None:
        self.remaining_s = start.predicted_s
        if start.predicted_s is None or not start.prompt_tokens + start.expected_tokens:
            return
        if start.predicted_prompt_s is not None and start.prompt_tokens and start.expected_tokens:
            decode_s = max(start.predicted_s - start.predicted_prompt_s, 1e-3 * start.predicted_s)
            self._prompt_cost = start.predicted_prompt_s / start.prompt_tokens * start.expected_tokens / decode_s
        self._planned_s = start.predicted_s
        self._planned_work = self._prompt_cost * start.prompt_tokens + start.expected_tokens

    def completion(self, completion: Completion, *, room: int, latency_s: float | None = None) -> None:  # noqa: ARG002
        self._answers += 1
        self._answer_tokens += completion.completion_tokens

    def counts(self, counts: JobCounts) -> None:
        before, self._at = self._at, counts
        prompt_tokens = counts.prompt_tokens - before.prompt_tokens
        work = self._prompt_cost * prompt_tokens + counts.generation_tokens - before.generation_tokens
        total = self._prompt_cost * counts.expected_prompt_tokens + counts.expected_tokens
        if counts.running_s > before.running_s:
            weight = math.exp(-work / (_REMEMBERED * total)) if total > 0 else 1.0
            self._work = self._work * weight + work
            self._seconds = self._seconds * weight + counts.running_s - before.running_s
        since_s = counts.elapsed_s - self._predicted_at_s
        measured = counts.running_s >= _LEAST_S and self._work > 0
        if measured and (self._end_s is None or since_s >= _EVERY_S):
            self._predict(counts, since_s)

    def _predict(self, counts: JobCounts, since_s: float) -> None:
        tokens = self._tokens_left()
        self.expected_tokens = counts.generation_tokens + tokens
        prompt_tokens = max(0, counts.expected_prompt_tokens - counts.prompt_tokens)
        seconds = self._seconds + _PLAN_WEIGHT * self._planned_s
        work = self._work + _PLAN_WEIGHT * self._planned_work
        end_s = counts.elapsed_s + (self._prompt_cost * prompt_tokens + tokens) * seconds / work
        if self._end_s is not None:
            weight = math.exp(-since_s / min(_SMOOTHED_S, counts.running_s / 10))
            end_s = weight * self._end_s + (1 - weight) * end_s
        self._end_s, self._predicted_at_s = end_s, counts.elapsed_s
        self.remaining_s = max(0.0, end_s - counts.elapsed_s)

    def _tokens_left(self) -> float:
        """All generated tokens, those of unfinished answers included, over the finished answers estimate the mean
        length: the most likely one of an exponential distribution, and the limit of any other while places are refilled
        as they become free."""
        counts = self._at
        unfinished = counts.running + counts.waiting
        max_left = max(0.0, float(counts.expected_tokens - counts.generation_tokens))
        if not unfinished:
            return 0.0
        length = (counts.expected_tokens - self._answer_tokens) / unfinished
        if self._answers:
            length = min(length, counts.generation_tokens / self._answers)
        begun = counts.generation_tokens - self._answer_tokens
        running = max(counts.running * length - begun, counts.running * length / 2)
        return min(max_left, counts.waiting * length + running)
