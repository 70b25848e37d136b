"""Drafts of a length and an acceptance that a benchmark sets, in place of those that an engine finds: what they gain,
and what its prices say that they do."""

from __future__ import annotations

import time
from collections.abc import Sequence
from random import Random
from typing import Any

import numpy as np

from moelight import Engine
from moelight.core.policy import Policy
from moelight.engine.batcher import RunningSequence
from moelight.engine.drafts import NO_DRAFT, Draft, NgramDrafts
from moelight.engine.speculation import DraftPrices, Speculation

NEVER = 1 << 30  # passes until drafts are tried


class PlantedDrafts:
    """The drafts of an engine with ``speculate`` auto, whose ``answers`` are played: every sequence brings K tokens of
    its answer, each of them right with probability ``acceptance``. Generations go through ``settings``, pairs of K and
    acceptance, of which the first has K = 0: from its passes the engine learns what it predicts of the others."""

    def __init__(self, engine: Engine, answers: Sequence[Sequence[int]], settings: Sequence[tuple[int, float]]) -> None:
        self._engine, self._answers, self._settings, self._at = engine, answers, list(settings), -1
        self._predictions: list[dict[str, float]] = []
        NgramDrafts.draft = self._draft  # type: ignore[assignment, method-assign]
        Speculation._most_worth = _all_of_them  # type: ignore[assignment, method-assign]
        DraftPrices.affordable = True  # type: ignore[assignment, method-assign]

    def begin(self) -> None:
        """The next setting."""
        self._at = (self._at + 1) % len(self._settings)
        self._speculation._resting = 0 if self._settings[self._at][0] else NEVER
        self._passes = [(time.perf_counter(), self._engine.progress_tokens)]
        self._first_end: int | None = None

    def on_pass(self) -> None:
        self._passes.append((time.perf_counter(), self._engine.progress_tokens))

    def on_completion(self) -> None:
        self._first_end = len(self._passes) - 1 if self._first_end is None else self._first_end

    def facts(self, sequences: int, context: float) -> dict[str, Any]:
        """Of the passes after that of the prompts, until a sequence ended."""
        began_tokens = self._passes[0][1]
        begin = next(at for at, (_, tokens) in enumerate(self._passes) if tokens - began_tokens >= sequences)
        end = max(begin + 1, (self._first_end or len(self._passes)) - 1)
        (from_s, before), (until_s, after) = self._passes[begin], self._passes[min(end, len(self._passes) - 1)]
        if not self._predictions:
            self._predictions = [self._predicted(*setting, sequences, context) for setting in self._settings]
        count, acceptance = self._settings[self._at]
        return {
            "num_speculative_tokens": count,
            "acceptance": acceptance,
            "decode_passes": end - begin,
            "decode_tokens_per_s": (after - before) / (until_s - from_s),
            "tokens_per_pass": (after - before) / (end - begin) / sequences,
            **self._predictions[self._at],
        }

    def _predicted(self, count: int, acceptance: float, sequences: int, context: float) -> dict[str, float]:
        """What ``count`` drafts gain by prices corrected by the passes so far, and by the ledger alone."""
        tokens = sum(acceptance**at for at in range(count + 1))
        learned, policy = self._speculation._prices, self._engine.policy
        assert learned is not None
        result = {}
        for name, prices in (("predicted", learned), ("ledger", DraftPrices(learned._prices))):
            seconds = prices.seconds(policy, sequences, context, 0, np.array([0, count * sequences]))
            result[name] = float(tokens * seconds[0] / seconds[1])
        return result

    @property
    def _speculation(self) -> Speculation:
        assert self._engine._speculation is not None
        return self._engine._speculation

    def _draft(self, sequence: RunningSequence, count: int) -> Draft:
        (limit, acceptance), begin = self._settings[self._at], len(sequence.generated)
        token_ids = list(self._answers[sequence.request.index][begin : begin + min(count, limit)])
        random = Random(1000 * sequence.request.index + begin)
        for at, token in enumerate(token_ids):
            if random.random() >= acceptance:
                token_ids[at] = token + 1 if token else 2
        return Draft(tuple(token_ids), 4) if token_ids else NO_DRAFT


def _all_of_them(_: Speculation, policy: Policy, gains: np.ndarray, *rest: object) -> int:  # noqa: ARG001
    """The number of drafts to verify, whatever they are worth."""
    return len(gains)
