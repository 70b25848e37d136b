"""The summary of a scan: rows by kind, problems by code, prompts by length; of bounded size for any input."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from moelight.batch.rows import BadRow
from moelight.profiles.workload import EXPECTED_GEN_LEN, MOST_REQUESTS, Workload

OTHER = "other"
_MOST_KINDS, _MOST_CODES, _MOST_NOTES = 16, 32, 16


class InputProblem(msgspec.Struct, kw_only=True, array_like=True):
    """Rows refused for one reason: their number, and the line and message of the first."""

    count: int
    first_line: int
    message: str


@dataclass(frozen=True, kw_only=True, slots=True)
class RowLimit:
    """The limit of the answers of a row without its own ``max_tokens``: the ``default`` of the job or of the row's
    endpoint, or the ``context`` of the model alone."""

    default: int | None = None
    context: int | None = None


_LIMITED = RowLimit()


class ScanSummary(msgspec.Struct, kw_only=True):
    """The totals of an input, counted row by row. A round trip through JSON does not change it: the job's journal
    stores it.

    Attributes:
        rows: rows, refused ones included.
        sequences: requested answers: prompts times samples, of the rows that can be served.
        prompt_tokens: the sum over all prompts that can be served; ``max_prompt_len`` the longest.
        generated_tokens: the most that will be generated, or the expected ones of answers that only the context
            limits; ``max_gen_len`` those of one answer.
        defaulted: rows that set no ``max_tokens``, and take ``default_limit``.
        unlimited: rows that set none and that only ``context`` limits, with ``unlimited_sequences`` answers, of which
            the longest may have ``longest_answer`` tokens.
        samplings: distinct sampling parameters; 4,096 stands for that many or more.
        kinds: rows by `Row.kind`; kinds past the 16th are counted as ``other``.
        problems: refused rows by code; codes past the 32nd are counted as ``other``.
        notes: rows by what should be known about their structured outputs; the first 16 texts.
        histogram: served prompts by tokens: entry i counts those of at least 2^i and fewer than 2^(i+1); entry 0 also
            counts empty prompts.
    """

    rows: int = 0
    sequences: int = 0
    prompts: int = 0
    prompt_tokens: int = 0
    max_prompt_len: int = 0
    generated_tokens: int = 0
    max_gen_len: int = 0
    defaulted: int = 0
    default_limit: int = 0
    unlimited: int = 0
    unlimited_sequences: int = 0
    longest_answer: int = 0
    context: int = 0
    samplings: int = 0
    kinds: dict[str, int] = msgspec.field(default_factory=dict)
    problems: dict[str, InputProblem] = msgspec.field(default_factory=dict)
    notes: dict[str, InputProblem] = msgspec.field(default_factory=dict)
    histogram: list[int] = msgspec.field(name="prompt_histogram", default_factory=list)

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
            max_gen_len=max(1, self.max_gen_len, self.longest_answer) if self.unlimited else None,
        )

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        values: dict[str, Any] = msgspec.to_builtins(self)
        return values

    def add(
        self, kind: str, prompts: Sequence[tuple[int, int]], *, samples: int = 1, limit: RowLimit = _LIMITED
    ) -> None:
        """Count a row of ``prompts``, each ``(tokens, expected)``: its ``samples`` answers are planned with
        ``expected`` tokens. ``limit``: what else limits them if the row does not."""
        self._count_limit(limit, prompts, samples, 1)
        self._count_row(kind)
        self._count_prompts(prompts, samples, 1)
        for tokens, expected in prompts:
            self.max_prompt_len = max(self.max_prompt_len, tokens)
            self.max_gen_len = max(self.max_gen_len, expected)

    def refuse(self, bad: BadRow) -> None:
        """Count a row that cannot be served."""
        self._count_row(bad.kind)
        self._count_problem(bad)

    def note(self, notes: Sequence[str], line: int) -> None:
        """Count a row of which ``notes`` should be known."""
        for text in notes:
            if text in self.notes or len(self.notes) < _MOST_NOTES:
                first = InputProblem(count=0, first_line=line, message=text)
                self.notes.setdefault(text, first).count += 1

    @property
    def limits_text(self) -> str:
        """Return a note about rows that set no ``max_tokens``; empty if all set one, or take the job's in a format
        other than OpenAI's."""
        clauses = []
        if self.defaulted and self.endpoint:
            rows = "1 row sets" if self.defaulted == 1 else f"{self.defaulted:,} rows set"
            clauses.append(f"{rows} no max_tokens and may have {self.default_limit:,} (--max-tokens)")
        if self.unlimited:
            rows = "" if self.unlimited == self.served else f" in {self.unlimited:,} of {self.served:,} rows"
            clauses.append(
                f"no max_tokens{rows}: rest of the context ({self.context:,} tokens); planned for an expected "
                f"{min(self.context, EXPECTED_GEN_LEN):,}"
            )
        return "; ".join(clauses)

    def withdraw(
        self, bad: BadRow, prompts: Sequence[tuple[int, int]], *, samples: int, limit: RowLimit = _LIMITED
    ) -> None:
        """Turn a row that was added into a refused row. The maximum lengths are not reduced."""
        self._count_limit(limit, prompts, samples, -1)
        self._count_prompts(prompts, samples, -1)
        self._count_problem(bad)

    def _count_limit(self, limit: RowLimit, prompts: Sequence[tuple[int, int]], samples: int, sign: int) -> None:
        if limit.default is not None:
            self.defaulted, self.default_limit = self.defaulted + sign, limit.default
        if limit.context is not None:
            self.unlimited, self.context = self.unlimited + sign, limit.context
            self.unlimited_sequences += sign * samples * len(prompts)
            shortest = min((tokens for tokens, _ in prompts), default=limit.context)
            self.longest_answer = max(self.longest_answer, limit.context - shortest)

    def _count_row(self, kind: str) -> None:
        self.rows += 1
        if kind:
            kind = kind if kind in self.kinds or len(self.kinds) < _MOST_KINDS else OTHER
            self.kinds[kind] = self.kinds.get(kind, 0) + 1

    def _count_problem(self, bad: BadRow) -> None:
        code = bad.code if bad.code in self.problems or len(self.problems) < _MOST_CODES else OTHER
        first = InputProblem(count=0, first_line=bad.line, message=bad.message)
        self.problems.setdefault(code, first).count += 1

    def _count_prompts(self, prompts: Sequence[tuple[int, int]], samples: int, sign: int) -> None:
        for tokens, expected in prompts:
            self.prompts += sign
            self.sequences += sign * samples
            self.prompt_tokens += sign * tokens
            self.generated_tokens += sign * samples * expected
            bucket = max(0, tokens.bit_length() - 1)
            self.histogram += [0] * (bucket + 1 - len(self.histogram))
            self.histogram[bucket] += sign
