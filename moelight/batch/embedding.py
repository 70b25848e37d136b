"""Rows whose prompts become embeddings, and embeddings in JSON."""

from __future__ import annotations

import base64

import numpy as np

from moelight.core.errors import MoelightError
from moelight.core.request import Completion

FLOAT, BASE64 = ENCODING_FORMATS = ("float", "base64")


def embedding_numbers(completion: Completion) -> list[float]:
    """The embedding as numbers of as many digits as float32 needs."""
    return [float(f"{number:.9g}") for number in _embedding(completion).tolist()]


def embedding_base64(completion: Completion) -> str:
    """The embedding as its float32 numbers, little-endian, in base64, as OpenAI's API has it."""
    return base64.b64encode(_embedding(completion).astype("<f4").tobytes()).decode("ascii")


def embedding_label(completion: Completion) -> str:
    """A short text in place of the numbers."""
    return f"{len(_embedding(completion)):,} dimensions"


def _embedding(completion: Completion) -> np.ndarray:
    if completion.embedding is None:
        raise MoelightError(f"request {completion.index} has no embedding")
    return completion.embedding
