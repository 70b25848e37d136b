"""Guesses are acted on once those of their rank have come true often enough, and no longer when they do not."""

from __future__ import annotations

import numpy as np

from moelight.experts.predict import SURE, PrefetchConfidence, RouterConfidence

IDS = np.array([4, 1, 7])


def ask(confidence: PrefetchConfidence, *chosen: int, row: int = 0) -> list[int]:
    """Guess `IDS`; ``chosen`` come."""
    result = confidence.likely(row, IDS).tolist()
    confidence.flush(row, np.array([chosen]))
    return result


def test_nobody_is_trusted_unseen_and_places_are_told_apart() -> None:
    confidence = PrefetchConfidence()
    asked = [ask(confidence, 4, *([1] if time % 2 else [])) for time in range(60)]
    assert asked[0] == []
    assert asked[-1] == [4]
    assert next(n for n, result in enumerate(asked) if result) == round(SURE / (1 - SURE))
    asked = [ask(confidence, 1, 7) for _ in range(200)]
    assert asked[-1] == [1, 7]


def test_guesses_that_are_not_acted_on_count_and_each_only_once() -> None:
    confidence = PrefetchConfidence()
    for _ in range(8):
        ask(confidence, 4, 1, 7)
    assert ask(confidence) == [4, 1, 7]
    for _ in range(9):  # nobody guessed: nothing was wrong
        confidence.flush(0, np.array([[0]]))
    assert ask(confidence, 4, 1, 7) == [4, 1, 7]


def test_layers_are_settled_apart_and_places_beyond_the_last_are_one() -> None:
    confidence, many = PrefetchConfidence(), np.arange(80)
    confidence.likely(0, IDS)
    confidence.likely(1, many)
    confidence.flush(1, many)
    assert confidence.likely(1, many).tolist() == list(range(63, 80))  # seventeen that came true
    confidence.flush(0, np.array([9]))
    for _ in range(9):
        confidence.flush(1, many)
        confidence.likely(1, many)
    assert len(confidence.likely(1, many)) == 80
    assert confidence.likely(1, many[:0]).tolist() == []


def test_routers_are_trusted_by_how_clearly_they_choose() -> None:
    """A token of two experts, one chosen clearly and one by a hair's breadth: the first comes true, the second not."""
    foresight, ids = RouterConfidence(6), np.array([[2, 5]])
    clearly = np.array([[0.9, 0.1]])
    for _ in range(9):
        foresight.add(0, ids, clearly)
        foresight.flush(0, np.array([[2, 0]]))
    foresight.add(0, np.array([[5, 1]]), clearly)
    assert foresight.likely(0)[0].tolist() == [5]
    foresight.flush(0, np.array([[5, 1]]))
    foresight.add(0, np.array([[5, 1]]), np.array([[0.51, 0.49]]))
    assert foresight.likely(0)[0].tolist() == []


def test_tokens_that_agree_make_an_expert_likelier_and_are_settled_each_with_its_own() -> None:
    foresight, weights = RouterConfidence(6), np.array([[0.9, 0.1]])
    for time in range(40):  # half of the clear choices of each of two micro-batches come true
        foresight.add(0, np.array([[1, 0]]), weights)
        foresight.add(0, np.array([[2, 0]]), weights)
        foresight.flush(0, np.array([[1, 3], [4, 3]] if time % 2 else [[4, 3], [2, 3]]))
    for tokens, wanted in ((1, []), (3, [1])):
        foresight.add(0, np.array([[1, 0]] * tokens), np.repeat(weights, tokens, axis=0))
        result, chances = foresight.likely(0)
        assert result.tolist() == wanted
        foresight.flush(0, np.array([[1, 3]] * tokens))
    assert 0.8 < chances[0] < 0.95
