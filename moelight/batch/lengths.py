"""Online estimate of answer lengths, while most answers are unfinished.

Short answers finish first, so the mean of the finished ones is biased low for a long time. The estimator of Kaplan and
Meier (1958) counts unfinished answers too, as censored at their current length. The current lengths are not reported
per answer; they follow from the pass in which each answer began, at one token a pass.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise

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
