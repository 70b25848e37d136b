"""Requests like MTBench's first turns (MoE-Lightning, table 3): prompts of 77 tokens on average and 418 at most."""

from __future__ import annotations

import math
from random import Random

from moelight.core.request import Request, SamplingParams
from moelight.profiles.workload import Workload

MEAN_PROMPT, LONGEST_PROMPT, QUESTIONS = 77, 418, 80


def prompt_lengths() -> list[int]:
    """80 lengths like MTBench's first turns: 77 on average, 418 at most, most of them short."""
    u = [(index + 0.5) / QUESTIONS for index in range(QUESTIONS)]

    def drawn(scale: float) -> list[int]:
        return [min(LONGEST_PROMPT, round(12 - scale * math.log(1 - item))) for item in u]

    low, high = 1.0, 400.0
    while high - low > 1e-3:
        middle = (low + high) / 2
        low, high = (middle, high) if sum(drawn(middle)[:-1]) + LONGEST_PROMPT < 80 * MEAN_PROMPT else (low, middle)
    return [*drawn(low)[:-1], LONGEST_PROMPT]


def mtbench_requests(count: int, new: int, vocabulary: int) -> list[Request]:
    """The questions over and over in one shuffled order, random ids below ``vocabulary``, ``new`` tokens each."""
    random, lengths = Random(1), prompt_lengths()
    random.shuffle(lengths)
    how = SamplingParams(max_tokens=new, ignore_eos=True)
    return [
        Request(
            index=index,
            token_ids=tuple(random.randrange(3, vocabulary) for _ in range(lengths[index % QUESTIONS])),
            sampling=how,
        )
        for index in range(count)
    ]


def mtbench_workload(count: int, new: int) -> Workload:
    """The same for the planner."""
    return Workload(num_requests=count, prompt_len=MEAN_PROMPT, max_prompt_len=LONGEST_PROMPT, gen_len=new)
