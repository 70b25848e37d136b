"""Rows of which nothing is generated: choices are scored by their log-likelihood after the prompt, and the likeliest of
them is the label of the row."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import takewhile
from typing import Any, NamedTuple

from moelight.batch.rows import LEAST_LOGPROB, Prompt, Row
from moelight.batch.tasks import SCORE
from moelight.core.errors import InputError
from moelight.core.request import MOST_SAMPLES, Completion
from moelight.engine.tokenizer import Tokenizer


class EncodedPrompt(NamedTuple):
    """A prompt as the engine takes it; with ``prompt_logprobs``, tokens from ``scored_from`` on are scored."""

    token_ids: tuple[int, ...]
    scored_from: int = 1


def read_choices(value: Any) -> tuple[str, ...]:
    """The choices of a row or of a job; raises InputError unless they are distinct texts."""
    if value is None:
        raise InputError("choices is missing, and the job has no --choice", field="choices")
    texts = isinstance(value, (list, tuple)) and all(isinstance(choice, str) and choice for choice in value)
    if not texts or not 1 <= len(value) <= MOST_SAMPLES:
        raise InputError(f"choices must be a list of 1 to {MOST_SAMPLES:,} texts, none of them empty", field="choices")
    if len(set(value)) < len(value):
        repeated = next(choice for choice in value if value.count(choice) > 1)
        raise InputError(f"choices holds {repeated[:40]!r} twice", field="choices")
    return tuple(value)


def encode_choices(row: Row, tokenizer: Tokenizer, max_tokens: int) -> list[EncodedPrompt]:
    """The prompt of ``row`` with each of its choices behind it.

    A text is encoded together with its choice, as it would stand in a document, and spaces at the end of the prompt
    belong to the choice. Tokens are scored from the first one in which a choice changes how the prompt is encoded, for
    all choices alike, so that their log-likelihoods can be compared.
    """
    prompt: Prompt
    if row.conversation is not None:
        prompt = tuple(tokenizer.render(row.conversation, max_tokens=max_tokens))
    else:
        (prompt,) = row.prompts
    if not isinstance(prompt, str):
        behind = [tokenizer.encode(choice, add_special_tokens=False, max_tokens=max_tokens) for choice in row.choices]
        return [EncodedPrompt((*prompt, *choice), len(prompt)) for choice in behind]
    text = prompt.rstrip(" ")
    context = tokenizer.encode(text, max_tokens=max_tokens)
    complete = [tokenizer.encode(prompt + choice, max_tokens=max_tokens) for choice in row.choices]
    common = min(_common(context, ids) for ids in complete)
    return [EncodedPrompt(tuple(ids), common) for ids in complete]


def check_choices(row: Row, prompts: Sequence[EncodedPrompt]) -> None:
    """Raise InputError for a prompt of no token, and for a choice that adds none."""
    for choice, prompt in zip(row.choices, prompts, strict=True):
        if not prompt.scored_from:
            raise InputError("the prompt is empty: no token precedes the choices", code="empty_prompt")
        if prompt.scored_from >= len(prompt.token_ids):
            raise InputError(f"choice {choice[:40]!r} adds no token to the prompt", field="choices")


def score_fields(row: Row, completions: Sequence[Completion]) -> dict[str, Any]:
    """``scores`` of the choices of ``row`` in their order; to classify, the ``label`` and probabilities too."""
    scores: list[dict[str, Any]] = []
    for choice, completion in zip(row.choices, completions, strict=True):
        scored = [next(iter(entry.values())) for entry in completion.prompt_logprobs or () if entry is not None]
        scores.append(
            {
                "choice": choice,
                "logprob": max(LEAST_LOGPROB, math.fsum(token.logprob for token in scored)),
                "tokens": len(scored),
                "greedy": all(token.rank == 1 for token in scored),
            }
        )
    if row.answered["task"] == SCORE:
        return {"scores": scores}
    best = max(scores, key=lambda score: score["logprob"])
    weights = [math.exp(score["logprob"] - best["logprob"]) for score in scores]
    total = math.fsum(weights)
    for score, weight in zip(scores, weights, strict=True):
        score["probability"] = weight / total
    return {"label": best["choice"], "scores": scores}


def best_choice(row: Row, completions: Sequence[Completion]) -> str:
    """The choice of ``row`` to show, with its log-likelihood."""
    best = max(score_fields(row, completions)["scores"], key=lambda score: score["logprob"])
    return f"{best['choice'].strip()} ({best['logprob']:.3f})"


def _common(first: Sequence[int], second: Sequence[int]) -> int:
    """Length of the longest common prefix."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False)))
