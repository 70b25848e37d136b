"""The time left of a job, from tokens: the number that is left, and the measured cost of each.

Remaining work: prompt tokens are counted; answer lengths are estimated from this run (`lengths`). Cost: seconds a pass,
a prompt token and a generated token, fitted to this run and regularized by the plan's prediction while there are few
measurements. Rows of earlier runs count neither as work nor as speed.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise

from moelight.batch.progress import JobCounts, JobStart, Progress
from moelight.core.request import Completion

_MOST_COHORTS = 64
_MOST_LENGTHS = 128


class Survival:
    """The share of answers longer than a number of tokens. ``shares[i]`` holds from ``steps[i]`` to the next step; past
    the last step each token ends the share ``tail`` of the remaining answers."""

    def __init__(self, steps: Sequence[int], shares: Sequence[float], tail: float) -> None:
        self._steps, self._shares, self._tail = steps, shares, tail
        self._tokens = [0.0]  # mean tokens of an answer up to each step
        for (start, end), share in zip(pairwise(steps), shares, strict=False):
            self._tokens.append(self._tokens[-1] + (end - start) * share)

    def share(self, length: float) -> float:
        """Return the share of answers longer than ``length``."""
        at = bisect_right(self._steps, length) - 1
        past = length - self._steps[at] if at == len(self._steps) - 1 else 0.0
        return float(self._shares[at] * (1 - self._tail) ** past)

    def _upto(self, length: float) -> float:
        at = bisect_right(self._steps, length) - 1
        past = length - self._steps[at]
        if at == len(self._steps) - 1 and self._tail > 0:
            past = (1 - (1 - self._tail) ** past) / self._tail
        return self._tokens[at] + self._shares[at] * past

    def rest(self, age: float, room: float) -> float:
        """Return the mean number of tokens to come of an answer of ``age`` tokens, limited to ``room`` tokens in
        all."""
        alive = self.share(age)
        if room <= age or alive <= 0:
            return 0.0
        return (self._upto(room) - self._upto(age)) / alive

    def last_of(self, answers: Sequence[tuple[float, float]], room: float) -> float:
        """Return the tokens until the last of ``answers``, pairs of an age and a count, ends."""
        alive = [(age, count / share) for age, count in answers if (share := self.share(age)) > 0]
        low, high = 0.0, max((room - age for age, _ in alive), default=0.0)
        while high - low > 1:
            middle = (low + high) / 2
            left = sum(weight * self.share(age + middle) for age, weight in alive if age + middle < room)
            low, high = (middle, high) if left > 0.5 else (low, middle)
        return max(0.0, high)


class Lengths:
    """The finished answers of a run by length, and the unfinished ones by the pass in which they began.

    Both are binned coarsely, so that a query takes about a millisecond for any size of job.
    """

    def __init__(self) -> None:
        self.tokens = 0  # of the finished answers
        self._ended: Counter[int] = Counter()  # by length, ended before their limit
        self._cut: Counter[int] = Counter()  # by length, ended at their limit
        self._width = 1  # lengths per bin
        self._pass = 0
        self._begun: list[int] = []  # passes, ascending
        self._running: list[int] = []  # unfinished answers that began in each

    def add(self, tokens: int, *, cut: bool) -> None:
        """Count a finished answer of ``tokens``; ``cut``: at its limit."""
        (self._cut if cut else self._ended)[self._middle(tokens)] += 1
        self.tokens += tokens
        if len(self._ended) + len(self._cut) > _MOST_LENGTHS:
            self._width *= 2
            for counts in (self._ended, self._cut):
                before = list(counts.items())
                counts.clear()
                for length, count in before:
                    counts[self._middle(length)] += count
        if self._begun:
            begun = self._pass - tokens
            at = bisect_left(self._begun, begun)
            if at == len(self._begun) or (at and begun - self._begun[at - 1] < self._begun[at] - begun):
                at -= 1
            self._take(at, 1)

    def _middle(self, tokens: int) -> int:
        return tokens // self._width * self._width + self._width // 2

    def running(self, count: int, passes: int) -> None:
        """Note ``count`` unfinished answers after ``passes``; additional answers began since the last call."""
        new = count - sum(self._running)
        if new > 0:
            self._begun.append((self._pass + passes) // 2)
            self._running.append(new)
        while new < 0:
            new += self._take(len(self._begun) - 1, -new)
        self._pass = passes
        if len(self._begun) > _MOST_COHORTS:
            self._begun = self._begun[::2]
            self._running = [sum(self._running[i : i + 2]) for i in range(0, len(self._running), 2)]

    def _take(self, at: int, count: int) -> int:
        taken = min(count, self._running[at])
        self._running[at] -= taken
        if not self._running[at]:
            del self._begun[at], self._running[at]
        return taken

    def ages(self, tokens: float) -> list[tuple[float, float]]:
        """Return pairs of tokens so far and count of the unfinished answers; ``tokens`` is the sum over all of them."""
        ages = [
            (float(self._pass - begun), float(count)) for begun, count in zip(self._begun, self._running, strict=True)
        ]
        total = sum(age * count for age, count in ages)
        if total <= 0:
            return [(tokens / max(1, sum(self._running)), count) for _, count in ages]
        return [(age * tokens / total, count) for age, count in ages]

    def survival(self, ages: Sequence[tuple[float, float]]) -> Survival:
        """Return the current estimate; ``ages`` are those of the unfinished answers."""
        events: list[tuple[float, int, float]] = [
            (float(length), ended, self._cut[length]) for length, ended in self._ended.items()
        ]
        events += [(float(length), 0, cut) for length, cut in self._cut.items() if length not in self._ended]
        events += [(age, 0, count) for age, count in ages]
        at_risk = float(sum(ended + left for _, ended, left in events))
        alive, steps, shares = 1.0, [0], [1.0]
        for length, ended, left in sorted(events):
            if ended:
                alive *= max(0.0, 1 - ended / at_risk)
                steps.append(int(length))
                shares.append(alive)
            at_risk -= ended + left
        oldest = max((length for length, _, _ in events), default=0.0)
        if oldest > steps[-1]:
            steps.append(int(oldest))
            shares.append(alive)
        # Past the longest observed length, answers end at the mean rate of the upper half of observed lengths.
        late = [(length - oldest / 2, ended, ended + left) for length, ended, left in events if length > oldest / 2]
        lived = sum(past * count for past, _, count in late)
        return Survival(steps, shares, min(1.0, sum(ended for _, ended, _ in late) / lived) if lived else 0.0)


_PASSES, _PROMPT, _GENERATED = range(3)
_PROMPT_COST = 0.1  # of a generated token's cost, without a plan; many prompt tokens share one transfer of each weight
_PASS_SHARE = 0.5  # of a generated token's cost: the fixed cost of a pass, until measured
_PLAN_WEIGHT = 0.001  # the plan weighs as much as measurements of this share of the job
_RIDGE = 0.05  # ridge weight: how strongly the three costs keep the prior's proportions
_REMEMBERED = 0.3  # of the job's work: older passes decay, so that a change of policy takes effect
_SMOOTHED_S = 5.0
_EVERY_S = 1.0
_LEAST_S = 1.0  # of running before measurements are used: the first passes warm caches


class TimeLeft(Progress):
    """Seconds until the job ends, renewed once a second. Must receive events before the watchers that read it."""

    def __init__(self) -> None:
        self.remaining_s: float | None = None
        self.expected_tokens = 0.0  # estimated tokens of the whole run; 0: not known yet
        self._plan: JobStart | None = None
        self._lengths = Lengths()
        self._normal = [[0.0] * 3 for _ in range(3)]
        self._right = [0.0] * 3
        self._at = JobCounts()
        self._most_running = 1
        self._end_s: float | None = None
        self._predicted_at_s = 0.0

    def started(self, start: JobStart) -> None:
        """Use the plan's prediction until the run has been measured."""
        self._plan = start
        self.remaining_s = start.predicted_s

    def completion(self, completion: Completion, *, room: int, latency_s: float | None = None) -> None:  # noqa: ARG002
        """Update the estimate of answer lengths."""
        tokens = completion.completion_tokens
        self._lengths.add(tokens, cut=tokens >= room)

    def counts(self, counts: JobCounts) -> None:
        """Update the costs of tokens and the prediction."""
        if counts.state in ("completed", "failed", "cancelled"):
            self.remaining_s = 0.0
            return
        before, self._at = self._at, counts
        self._most_running = max(self._most_running, counts.running)
        self._lengths.running(counts.running, counts.passes)
        seconds = counts.running_s - before.running_s
        if seconds > 0:
            self._learn(_work(before, counts), seconds)
        since_s = counts.elapsed_s - self._predicted_at_s
        if self._end_s is None or since_s >= _EVERY_S:
            self._predict(counts, since_s)

    def _learn(self, work: Sequence[float], seconds: float) -> None:
        """Add a stretch of the run, weighted by its work; a weight by seconds would count slow stretches too little."""
        weight, whole = self._prior_of(work), self._prior_of(self._total())
        if weight <= 0:
            return
        kept = math.exp(-weight / (_REMEMBERED * whole)) if whole > 0 else 1.0
        for row in range(3):
            self._right[row] = self._right[row] * kept + work[row] * seconds / weight
            for column in range(3):
                self._normal[row][column] = self._normal[row][column] * kept + work[row] * work[column] / weight

    def _predict(self, counts: JobCounts, since_s: float) -> None:
        if counts.running_s < _LEAST_S or not (counts.generation_tokens or counts.prompt_tokens):
            return
        costs = self._costs()
        left = self._left()
        self.expected_tokens = counts.generation_tokens + left[_GENERATED]
        left_s = sum(cost * work for cost, work in zip(costs, left, strict=True))
        end_s = counts.elapsed_s + left_s
        if self._end_s is not None:
            kept = math.exp(-since_s / min(_SMOOTHED_S, counts.running_s / 10))
            end_s = kept * self._end_s + (1 - kept) * end_s
        self._end_s, self._predicted_at_s = end_s, counts.elapsed_s
        self.remaining_s = max(0.0, end_s - counts.elapsed_s)

    def _prior(self) -> tuple[float, float, float]:
        """Return the cost of a pass, a prompt token and a generated token by the plan; without one, only their
        proportions."""
        prompt, generated = _PROMPT_COST, 1.0
        plan = self._plan
        if self._planned_s and plan is not None:
            work = prompt * plan.prompt_tokens + generated * plan.expected_tokens
            prompt, generated = prompt * self._planned_s / work, generated * self._planned_s / work
            if plan.predicted_prompt_s is not None and plan.prompt_tokens and plan.expected_tokens:
                prompt = plan.predicted_prompt_s / plan.prompt_tokens
                generated = (
                    max(self._planned_s - plan.predicted_prompt_s, 1e-3 * self._planned_s) / plan.expected_tokens
                )
        # If nothing is generated, prompts fill the passes, and the number of passes follows from the tokens.
        in_passes = _PASS_SHARE if self._at.passes and self._at.expected_tokens else 0.0
        return generated * in_passes * self._most_running, prompt, generated * (1 - in_passes)

    @property
    def _planned_s(self) -> float | None:
        """The predicted seconds of the plan, if it states their tokens."""
        plan = self._plan
        return plan.predicted_s if plan is not None and (plan.prompt_tokens or plan.expected_tokens) else None

    def _prior_of(self, work: Sequence[float]) -> float:
        return sum(cost * each for cost, each in zip(self._prior(), work, strict=True))

    def _costs(self) -> list[float]:
        """Return seconds of a pass, a prompt token, a generated token: least squares, regularized towards the prior's
        proportions.

        With u the work in the prior's seconds and θ the ratio of the actual cost of each kind to the prior's, this
        solves Σ (uᵀθ − t)² / |u| + held Σ (θ − s)² = min, s being the run's seconds over the prior's, all kinds
        together.
        """
        prior = self._prior()
        matrix = [[self._normal[i][j] * prior[i] * prior[j] for j in range(3)] for i in range(3)]
        right = [self._right[i] * prior[i] for i in range(3)]
        seen, squares = sum(right), sum(map(sum, matrix))
        scale = seen / squares if squares > 0 else 1.0
        if self._planned_s:
            weight = _PLAN_WEIGHT * self._planned_s
            scale = (seen + weight) / (squares + weight)
        held = _RIDGE * squares + 1e-12
        for i in range(3):
            matrix[i][i] += held
            right[i] += held * scale
        return [max(0.0, found) * cost for found, cost in zip(_solve(matrix, right), prior, strict=True)]

    def _left(self) -> tuple[float, float, float]:
        """Return the remaining passes, prompt tokens and generated tokens."""
        counts = self._at
        prompt = max(0.0, float(counts.expected_prompt_tokens - counts.prompt_tokens))
        unfinished = counts.running + counts.waiting
        if not unfinished:
            return 0.0, prompt, 0.0
        room = max(1.0, (counts.expected_tokens - self._lengths.tokens) / unfinished)
        ages = self._lengths.ages(max(0.0, float(counts.generation_tokens - self._lengths.tokens)))
        known = self._lengths.survival(ages)
        each = known.rest(0.0, room)
        generated = sum(count * known.rest(age, room) for age, count in ages) + counts.waiting * each
        generated = min(generated, max(0.0, float(counts.expected_tokens - counts.generation_tokens)))
        if not counts.waiting:
            return known.last_of(ages, room), prompt, generated
        # Full passes while sequences are waiting, and then as many as the longest of the last ones takes.
        places = max(1, min(self._most_running, unfinished))
        running_out = min(generated, places * each / 2)
        longest = known.last_of([(0.0, places)], room)
        return (generated - running_out) / places + longest / 2, prompt, generated

    def _total(self) -> tuple[float, float, float]:
        counts = self._at
        return (
            float(counts.passes),
            float(max(counts.expected_prompt_tokens, counts.prompt_tokens)),
            float(max(counts.expected_tokens, counts.generation_tokens)),
        )


def _work(before: JobCounts, now: JobCounts) -> tuple[float, float, float]:
    return (
        float(now.passes - before.passes),
        float(now.prompt_tokens - before.prompt_tokens),
        float(now.generation_tokens - before.generation_tokens),
    )


def _solve(matrix: list[list[float]], right: list[float]) -> list[float]:
    """Solve ``matrix`` x = ``right``; the matrix is symmetric and positive definite, so no pivot is needed."""
    size = len(right)
    rows = [[*matrix[i], right[i]] for i in range(size)]
    for i in range(size):
        for j in range(i + 1, size):
            factor = rows[j][i] / rows[i][i]
            rows[j] = [below - factor * above for below, above in zip(rows[j], rows[i], strict=True)]
    found = [0.0] * size
    for i in reversed(range(size)):
        found[i] = (rows[i][size] - sum(rows[i][j] * found[j] for j in range(i + 1, size))) / rows[i][i]
    return found
