"""Two models on the same prompts: how far the predictions of one are from those of the other, token by token.

Each model is loaded once, the reference first; its distributions wait in a file without a name.

Shapes: N predicted tokens of all prompts, R of them at a time, V vocabulary, K likeliest tokens kept.
"""

from __future__ import annotations

import math
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from moelight.batch.fields import RowContext
from moelight.batch.input import AUTO, open_input
from moelight.batch.model_names import ModelNames
from moelight.batch.output import refused_write
from moelight.batch.rows import BadRow
from moelight.core.errors import ConfigError, InputError
from moelight.core.request import PROMPT_ONLY, Request
from moelight.core.units import GiB, format_bytes
from moelight.engine.engine import Engine
from moelight.engine.options import EngineOptions
from moelight.engine.output_processor import ScoreWatch
from moelight.engine.tokenizer import Tokenizer
from moelight.models.checkpoints import open_model
from moelight.profiles.workload import Workload

SPACE_BYTES = 8 * GiB
RESAMPLES = 2000
_MOST_KEPT, _LEAST_KEPT = 4096, 64  # tokens, where not all fit
_BLOCK_BYTES = 32 << 20  # of float32 logits at a time
_COVERED = 0.95  # by an interval

Progress = Callable[[str, int, int], None]  # whose turn it is, prompts done, of all


@dataclass(frozen=True, kw_only=True, slots=True)
class CompareOptions:
    """``model`` under the options ``engine`` is measured against ``reference``, which has neither their ``kv_dtype``
    nor their ``activations``; ``space_bytes`` of temporary files may be taken."""

    model: str
    reference: str
    prompts: Path
    format: str = AUTO
    space_bytes: int = SPACE_BYTES
    engine: EngineOptions = field(default_factory=EngineOptions)


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimated:
    """A mean over all predicted tokens, and an interval that covers it with 95 % over samples of prompts; ``low`` and
    ``high`` are None of a single prompt."""

    value: float
    low: float | None
    high: float | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """The result of a comparison over ``tokens`` predicted tokens of ``prompts``.

    Attributes:
        kept: tokens of the vocabulary that were compared one by one, ``vocabulary`` if all; else ``kl`` takes the
            others as one token, which makes it a lower bound.
        mass: the reference's probability of the tokens kept, on average.
        kl: KL divergence of the model from the reference, nats a token.
        top1: share of tokens where both have the same likeliest token.
        perplexity, reference_perplexity: of each; ``ratio``: of the first to the second.
    """

    prompts: int
    tokens: int
    vocabulary: int
    kept: int
    mass: float
    kl: Estimated
    top1: Estimated
    perplexity: Estimated
    reference_perplexity: Estimated
    ratio: Estimated


def compare_models(options: CompareOptions, progress: Progress = lambda *_: None) -> Comparison:
    """Run both models over all prompts. Raises UserErrors of one line."""
    profiles = [open_model(name).profile for name in (options.reference, options.model)]
    if profiles[0].vocab_size != profiles[1].vocab_size:
        raise ConfigError(
            f"{options.model} has a vocabulary of {profiles[1].vocab_size} tokens and {options.reference} one of "
            f"{profiles[0].vocab_size}; only models of one vocabulary can be compared"
        )
    prompts = read_prompts(options, min(profile.max_positions for profile in profiles))
    with _Distributions(prompts, profiles[0].vocab_size, options.space_bytes) as measured:
        reference = replace(options.engine, kv_dtype="auto", activations=None)
        for told, name, watch, engine in (
            ("reference", options.reference, measured.keep, reference),
            ("model", options.model, measured.compare, options.engine),
        ):
            score_all(name, prompts, watch, engine, partial(progress, told))
        return measured.result()


def read_prompts(options: CompareOptions, context: int) -> list[tuple[int, ...]]:
    """Token ids of all prompts, the same for both models."""
    ours, theirs = (Tokenizer.of(open_model(name).directory) for name in (options.reference, options.model))
    result: list[tuple[int, ...]] = []
    context_of_rows = RowContext(models=ModelNames(ignore=True))  # two models read them
    with open_input(options.prompts, context_of_rows, format=options.format) as source:
        for row in source.rows():
            where = f"{options.prompts} line {row.line}"
            if isinstance(row, BadRow):
                raise InputError(f"{where}: {row.message}", code=row.code)
            both = []
            for tokenizer in (ours, theirs):
                if row.conversation is not None:
                    both.append([tuple(tokenizer.render(row.conversation))])
                else:
                    both.append([tuple(tokenizer.encode(p)) if isinstance(p, str) else p for p in row.prompts])
            if both[0] != both[1]:
                raise InputError(
                    f"{where}: {options.model} and {options.reference} make other tokens of it; give token ids "
                    "(lines for /v1/completions), or models with one tokenizer"
                )
            for tokens in both[0]:
                if not 2 <= len(tokens) <= context:
                    raise InputError(f"{where}: {len(tokens)} tokens, and 2 to {context} can be compared")
            result += both[0]
    return result


def score_all(
    model: str,
    prompts: Sequence[tuple[int, ...]],
    watch: ScoreWatch,
    options: EngineOptions,
    progress: Callable[[int, int], None],
) -> None:
    """Let ``watch`` see the logits of every predicted token of ``prompts`` under ``model``."""
    requests = [Request(index=index, token_ids=tokens, sampling=PROMPT_ONLY) for index, tokens in enumerate(prompts)]
    lengths = [len(tokens) for tokens in prompts]
    workload = Workload(
        num_requests=len(lengths),
        prompt_len=-(-sum(lengths) // len(lengths)),
        max_prompt_len=max(lengths),
        gen_len=1,
    )
    progress(0, len(requests))
    with Engine.from_pretrained(model, workload=workload, options=replace(options, prefix_caching=False)) as engine:
        for request in requests:
            engine.check(request)
        for done, completion in enumerate(engine.run(requests, on_scores=watch), start=1):
            if completion.finish_reason == "error":
                raise InputError(f"{engine.policy.model}: prompt {completion.index}: {completion.stop_reason}")
            progress(done, len(requests))


class _Distributions:
    """The figures of each predicted token, and the file with the reference's distributions of them."""

    def __init__(self, prompts: Sequence[tuple[int, ...]], vocabulary: int, space: int) -> None:
        self._targets = np.concatenate([np.asarray(tokens[1:], dtype=np.int64) for tokens in prompts])
        self._ends = list(accumulate(len(tokens) - 1 for tokens in prompts))
        self._starts = [0, *self._ends]
        count = len(self._targets)
        self._vocabulary, self._kept = vocabulary, vocabulary
        if count * vocabulary * 4 > space:
            self._kept = min(_MOST_KEPT, vocabulary // 2, space // (count * 8))
        if self._kept < min(_LEAST_KEPT, vocabulary):
            raise ConfigError(
                f"{count:,} tokens to compare take more than {format_bytes(space)} of temporary files; allow more "
                "(--space), or give fewer prompts"
            )
        self._row_bytes = self._kept * (4 if self._whole else 8)
        # One row a token: KL, same likeliest token, negative log-likelihood of both, probability of the tokens kept.
        self._kl, self._same, self._loss, self._reference_loss, self._mass = np.full((5, count), np.nan)
        self._likeliest = np.zeros(count, dtype=np.int64)
        self._file = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115 (closed at the end of the context)

    @property
    def _whole(self) -> bool:
        return self._kept == self._vocabulary

    def __enter__(self) -> _Distributions:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def keep(self, rows: Sequence[tuple[int, int]], logits: Tensor) -> None:
        """Keep the reference's distributions: a `ScoreWatch`."""
        for places, logprobs in self._blocks(rows, logits):
            self._reference_loss[places] = _losses(logprobs, self._targets[places])
            self._likeliest[places] = logprobs.argmax(1).numpy()
            if self._whole:
                stored, self._mass[places] = logprobs, 1.0
            else:
                values, ids = logprobs.topk(self._kept, dim=1)
                self._mass[places] = values.double().exp().sum(1).numpy()
                stored = torch.cat([values, ids.int().view(torch.float32)], dim=1)
            try:
                for position, row in zip(places, stored.contiguous().numpy(), strict=True):
                    _write_row(self._file.fileno(), row.data.cast("B"), int(position) * self._row_bytes)
            except OSError as error:
                raise refused_write(error, f"temporary files in {tempfile.gettempdir()}") from None

    def compare(self, rows: Sequence[tuple[int, int]], logits: Tensor) -> None:
        """Compare the model's distributions with those kept: a `ScoreWatch`."""
        for places, logprobs in self._blocks(rows, logits):
            self._loss[places] = _losses(logprobs, self._targets[places])
            self._same[places] = logprobs.argmax(1).numpy() == self._likeliest[places]
            read = [
                os.pread(self._file.fileno(), self._row_bytes, int(position) * self._row_bytes) for position in places
            ]
            stored = torch.frombuffer(bytearray(b"".join(read)), dtype=torch.float32).view(len(places), -1)
            if self._whole:
                self._kl[places] = _divergence(stored, logprobs).numpy()
                continue
            reference = stored[:, : self._kept]
            others = logprobs.gather(1, stored[:, self._kept :].contiguous().view(torch.int32).long())
            self._kl[places] = (_divergence(reference, others) + _divergence(_rest(reference), _rest(others))).numpy()

    def _blocks(self, rows: Sequence[tuple[int, int]], logits: Tensor) -> Any:
        """``(numbers of tokens int64 [R], log-probabilities float32 [R, V])``, some rows at a time."""
        places = np.array([self._starts[index] + position - 1 for index, position in rows], dtype=np.int64)
        step = max(1, _BLOCK_BYTES // (4 * self._vocabulary))
        for first in range(0, len(rows), step):
            block = logits[first : first + step, : self._vocabulary].cpu()
            yield places[first : first + step], torch.log_softmax(block, dim=1)

    def result(self) -> Comparison:
        if np.isnan(self._loss).any() or np.isnan(self._reference_loss).any() or np.isnan(self._kl).any():
            raise InputError("a model gave no finite probability to some tokens of the prompts; look at its weights")
        sums = {
            name: np.add.reduceat(values, self._starts[:-1])
            for name, values in (
                ("kl", self._kl),
                ("same", self._same),
                ("loss", self._loss),
                ("reference", self._reference_loss),
            )
        }
        counts = np.diff(self._starts).astype(np.float64)
        figures = _resampled(sums, counts)
        return Comparison(
            prompts=len(counts),
            tokens=len(self._targets),
            vocabulary=self._vocabulary,
            kept=self._kept,
            mass=float(self._mass.mean()),
            **figures,
        )


def _resampled(sums: Mapping[str, np.ndarray], counts: np.ndarray) -> dict[str, Estimated]:
    """The figures from sums over each prompt, with percentiles over prompts drawn again (bootstrap)."""
    drawn = np.random.default_rng(0).multinomial(len(counts), np.full(len(counts), 1 / len(counts)), size=RESAMPLES)
    weights = np.vstack([np.ones(len(counts)), drawn])  # first the sample itself
    tokens = weights @ counts
    means = {name: (weights @ values) / tokens for name, values in sums.items()}
    result = {
        "kl": means["kl"],
        "top1": means["same"],
        "perplexity": np.exp(means["loss"]),
        "reference_perplexity": np.exp(means["reference"]),
        "ratio": np.exp(means["loss"] - means["reference"]),
    }
    tail = 50 * (1 - _COVERED)
    made = {}
    for name, values in result.items():
        low, high = np.percentile(values[1:], [tail, 100 - tail]) if len(counts) > 1 else (None, None)
        made[name] = Estimated(
            value=float(values[0]), low=None if low is None else float(low), high=None if high is None else float(high)
        )
    return made


def _losses(logprobs: Tensor, targets: np.ndarray) -> np.ndarray:
    """Negative log-likelihood of ``targets`` [R] under ``logprobs`` [R, V]."""
    losses: np.ndarray = -logprobs.gather(1, torch.from_numpy(targets).unsqueeze(1)).squeeze(1).double().numpy()
    return losses


def _divergence(reference: Tensor, other: Tensor) -> Tensor:
    """The sum over columns of p (log p - log q) of log-probabilities [R, any] -> float64 [R]; 0 where p is 0."""
    shares = reference.exp()
    parts = torch.where(shares > 0, shares * (reference - other), 0.0)
    return parts.sum(1, dtype=torch.float64)


def _rest(logprobs: Tensor) -> Tensor:
    """The log-probability [R, 1] of all tokens that are not among ``logprobs`` [R, K]."""
    left = 1.0 - logprobs.double().exp().sum(1, keepdim=True)
    return left.clamp(min=math.exp(-80)).log()


def _write_row(descriptor: int, data: memoryview, offset: int) -> None:
    done = 0
    while done < len(data):
        done += os.pwrite(descriptor, data[done:], offset + done)
