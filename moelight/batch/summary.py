"""The summary of a scan: rows by kind, problems by code, prompts by length; of bounded size for any input."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from moelight.batch.rows import BadRow
from moelight.profiles.workload import MOST_REQUESTS, Workload

OTHER = "other"
_COUNTS = (
    *("rows", "sequences", "prompts", "prompt_tokens", "max_prompt_len", "generated_tokens", "max_gen_len"),
    "samplings",
)
_MOST_KINDS, _MOST_CODES, _MOST_SAMPLINGS = 16, 32, 4096


@dataclass(frozen=True, kw_only=True, slots=True)
class InputProblem:
    """Rows refused for one reason: their number, and the line and message of the first."""

    count: int
    first_line: int
    message: str


@dataclass(frozen=True, kw_only=True, slots=True)
class ScanSummary:
    """The totals of an input, read once. A round trip through JSON does not change it: the job's journal stores it.

    Attributes:
        rows: rows, refused ones included.
        sequences: requested answers: prompts times samples, of the rows that can be served.
        kinds: rows by `Row.kind`; kinds past the 16th are counted as ``other``.
        problems: refused rows by code; codes past the 32nd are counted as ``other``.
        histogram: served prompts by tokens: entry i counts those of at least 2^i and fewer than 2^(i+1); entry 0 also
            counts empty prompts.
        prompt_tokens: the sum over all prompts that can be served; ``max_prompt_len`` the longest.
        generated_tokens: the most that will be generated; ``max_gen_len`` the most for one answer.
        samplings: distinct sampling parameters; 4,096 stands for that many or more.
    """

    rows: int = 0
    sequences: int = 0
    prompts: int = 0
    kinds: Mapping[str, int] = field(default_factory=dict)
    problems: Mapping[str, InputProblem] = field(default_factory=dict)
    histogram: tuple[int, ...] = ()
    prompt_tokens: int = 0
    max_prompt_len: int = 0
    generated_tokens: int = 0
    max_gen_len: int = 0
    samplings: int = 0

    @property
    def refused(self) -> int:
        return sum(problem.count for problem in self.problems.values())

    @property
    def served(self) -> int:
        return self.rows - self.refused

    @property
    def endpoint(self) -> str:
        """The endpoint of most rows; empty if rows name none."""
        paths = {kind: count for kind, count in self.kinds.items() if kind.startswith("/")}
        return max(paths, key=lambda kind: paths[kind], default="")

    def workload(self) -> Workload | None:
        """The workload for the planner; None if no row can be served."""
        if not self.sequences:
            return None
        return Workload(
            num_requests=min(self.sequences, MOST_REQUESTS),
            prompt_len=min(self.max_prompt_len, max(1, -(-self.prompt_tokens // self.prompts))),
            max_prompt_len=max(1, self.max_prompt_len),
            gen_len=max(1, self.max_gen_len),
        )

    def as_dict(self) -> dict[str, Any]:
        problems = {code: [each.count, each.first_line, each.message] for code, each in self.problems.items()}
        histogram = list(self.histogram)
        counts = {name: getattr(self, name) for name in _COUNTS}
        return {**counts, "kinds": dict(self.kinds), "problems": problems, "prompt_histogram": histogram}

    @classmethod
    def from_dict(cls, given: Mapping[str, Any]) -> ScanSummary:
        """The summary that `as_dict` has written; raises KeyError, TypeError or ValueError for anything else."""
        return cls(
            **{name: int(given[name]) for name in _COUNTS},
            kinds={str(kind): int(count) for kind, count in given["kinds"].items()},
            problems={
                str(code): InputProblem(count=int(count), first_line=int(line), message=str(message))
                for code, (count, line, message) in given["problems"].items()
            },
            histogram=tuple(int(count) for count in given["prompt_histogram"]),
        )


class Summing:
    """Counts rows one by one into a `ScanSummary`."""

    def __init__(self) -> None:
        self._counts = dict.fromkeys(("rows", "sequences", "prompts", "prompt_tokens", "generated_tokens"), 0)
        self._max_prompt_len = self._max_gen_len = 0
        self._kinds: dict[str, int] = {}
        self._problems: dict[str, InputProblem] = {}
        self._histogram: list[int] = []
        self._samplings: set[int] = set()

    def add(self, kind: str, tokens: int, room: int, *, samples: int = 1, sampling: int | None = None) -> None:
        """Add a row with one prompt of ``tokens`` tokens, whose ``samples`` answers have at most ``room`` tokens each;
        ``sampling`` is a hash that equal sampling parameters share."""
        self._rows(kind)
        self.prompt(tokens, room, samples=samples)
        if sampling is not None and len(self._samplings) < _MOST_SAMPLINGS:
            self._samplings.add(sampling)

    def prompt(self, tokens: int, room: int, *, samples: int = 1) -> None:
        """Add another prompt of the row that was added last."""
        counts = self._counts
        counts["prompts"] += 1
        counts["sequences"] += samples
        counts["prompt_tokens"] += tokens
        counts["generated_tokens"] += samples * room
        self._max_prompt_len = max(self._max_prompt_len, tokens)
        self._max_gen_len = max(self._max_gen_len, room)
        bucket = _bucket(tokens)
        self._histogram += [0] * (bucket + 1 - len(self._histogram))
        self._histogram[bucket] += 1

    def withdraw(self, bad: BadRow, prompts: Sequence[tuple[int, int]], *, samples: int) -> None:
        """Turn an added row of ``prompts``, each ``(tokens, room)``, into a refused row. The maximum lengths are not
        reduced."""
        counts = self._counts
        for tokens, room in prompts:
            counts["prompts"] -= 1
            counts["sequences"] -= samples
            counts["prompt_tokens"] -= tokens
            counts["generated_tokens"] -= samples * room
            self._histogram[_bucket(tokens)] -= 1
        self._problem(bad)

    def refuse(self, bad: BadRow) -> None:
        self._rows(bad.kind)
        self._problem(bad)

    def _problem(self, bad: BadRow) -> None:
        code = bad.code if bad.code in self._problems or len(self._problems) < _MOST_CODES else OTHER
        before = self._problems.get(code)
        if before is None:
            self._problems[code] = InputProblem(count=1, first_line=bad.line, message=bad.message)
        else:
            self._problems[code] = InputProblem(
                count=before.count + 1, first_line=before.first_line, message=before.message
            )

    def _rows(self, kind: str) -> None:
        self._counts["rows"] += 1
        if kind:
            kind = kind if kind in self._kinds or len(self._kinds) < _MOST_KINDS else OTHER
            self._kinds[kind] = self._kinds.get(kind, 0) + 1

    def summary(self) -> ScanSummary:
        return ScanSummary(
            **self._counts,
            kinds=dict(self._kinds),
            problems=dict(self._problems),
            histogram=tuple(self._histogram),
            max_prompt_len=self._max_prompt_len,
            max_gen_len=self._max_gen_len,
            samplings=len(self._samplings),
        )


def _bucket(tokens: int) -> int:
    """The histogram index of a prompt."""
    return max(0, tokens.bit_length() - 1)
