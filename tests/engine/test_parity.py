"""The same numbers as transformers: logits of every family in odd shapes, greedy tokens, and bfloat16's spread."""

from __future__ import annotations

from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from moelight.core.policy import Policy, Shares
from moelight.core.request import SamplingParams
from moelight.engine.engine import Engine
from tests.cases import thorough
from tests.engines import Tiny, forced, relative
from tests.tiny import FAMILIES, hf_model

pytestmark = pytest.mark.peer

TOLERANCE = 1e-4
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("mixtral", {}),
    "mixtral, tied, sliding window": ("mixtral", {"tie": True, "sliding_window": 7}),
    "mixtral, stretched positions": (
        "mixtral",
        {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 5e3}},
    ),
    "qwen3_moe, dense layers": ("qwen3_moe", {}),
    "qwen3_moe, tied, biases, sliding window": (
        "qwen3_moe",
        {
            "tie": True,
            "attention_bias": True,
            "norm_topk_prob": False,
            "use_sliding_window": True,
            "sliding_window": 9,
            "mlp_only_layers": [0],
            "decoder_sparse_step": 1,
            "rope_parameters": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
        },
    ),
    "olmoe, clipped": ("olmoe", {}),
    "olmoe, tied, biases, not clipped": (
        "olmoe",
        {
            "tie": True,
            "attention_bias": True,
            "norm_topk_prob": True,
            "clip_qkv": None,
            "rope_parameters": {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 32,
            },
        },
    ),
}
CUT = {"micro_batch_tokens": 12, "micro_batch_size": 5, "kv_block_size": 16}
WHERE = {
    "twin": {"device": "twin"},
    "chunks": CUT,
    "twin, chunks": {"device": "twin", **CUT},
    "experts of a pass at once": {"schedule": "module", **CUT},
    "attention on the device": {"device": "twin", "attention_device": "gpu", **CUT},
    "cache on the device": {"device": "twin", "attention_device": "gpu", "kv": Shares(device=1.0), **CUT},
    "experts on both": {"device": "twin", "ffn_device": "split", "cpu_experts": 0.5, **CUT},
    "experts on the host": {"device": "twin", "ffn_device": "cpu", "attention_device": "gpu", **CUT},
}
TURNS = cycle(WHERE)
IN_TURN = [(name, (next(TURNS), next(TURNS))) for name in MODELS]
USUAL = (  # every family; windows, stretched positions, biases, tied embeddings, clipping
    "mixtral, tied, sliding window",
    "mixtral, stretched positions",
    "qwen3_moe, tied, biases, sliding window",
    "olmoe, clipped",
)


def texts(lengths: list[int], seed: int = 3) -> list[list[int]]:
    """Random token ids, special tokens left out."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, 256, (length,), generator=generator).tolist() for length in lengths]


@torch.no_grad()
def reference(model: torch.nn.Module, sequences: list[list[int]]) -> list[Tensor]:
    return [model(torch.tensor([ids])).logits[0].float() for ids in sequences]


@pytest.mark.parametrize(("name", "elsewhere"), thorough(IN_TURN, but=[item for item in IN_TURN if item[0] in USUAL]))
def test_logits_are_those_of_transformers(name: str, elsewhere: tuple[str, str], tiny: Tiny) -> None:
    """Every position, teacher-forced: token by token, as the end of a whole prompt, and after half a prompt; all
    in memory, and in two other places, which take turns over the models."""
    family, options = MODELS[name]
    directory = tiny(family, **options)
    sequences = texts([12, 17, 1])
    wanted = reference(hf_model(directory), sequences)
    halves = [(len(ids) + 1) // 2 for ids in sequences]
    for where, policy in {"in memory": {}, **{position: WHERE[position] for position in elsewhere}}.items():
        with forced(directory, **{"batch_size": 96, "kv_tokens": 8192, **policy}) as engine:  # type: ignore[arg-type]
            by_token = engine.logits(sequences, [1] * len(sequences))
            by_prompt = engine.by_prefixes(sequences)
            by_halves = engine.logits(sequences, halves)
        for token, prompt, half, first, theirs in zip(by_token, by_prompt, by_halves, halves, wanted, strict=True):
            assert relative(token, theirs) < TOLERANCE, f"{where}: token by token"
            assert relative(prompt, theirs) < TOLERANCE, f"{where}: as whole prompts"
            assert relative(half, theirs[first - 1 :]) < TOLERANCE, f"{where}: half prompt, half tokens"


@torch.no_grad()
def greedy(directory: Path, prompts: list[list[int]], max_tokens: int) -> list[tuple[int, ...]]:
    """What transformers generates, prompts of one length at a time, so that nothing is padded."""
    model = hf_model(directory)
    answers: dict[int, tuple[int, ...]] = {}
    for length in sorted({len(prompt) for prompt in prompts}):
        rows = [index for index, prompt in enumerate(prompts) if len(prompt) == length]
        ids = torch.tensor([prompts[index] for index in rows])
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=max_tokens,
            min_new_tokens=max_tokens,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        answers.update({index: tuple(row[length:].tolist()) for index, row in zip(rows, out, strict=True)})
    return [answers[index] for index in range(len(prompts))]


@pytest.mark.thorough
@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens_are_those_of_transformers(family: str, tiny: Tiny) -> None:
    """24 ragged prompts, 8 tokens each; on one machine with everything in memory, on the other with pages streamed."""
    directory = tiny(family)
    lengths = [1, 2, 3, 13, 16, 17, 33, 47]
    prompts = texts([length for length in lengths for _ in range(3)], seed=11)
    wanted = greedy(directory, prompts, 8)
    sampling = SamplingParams(max_tokens=8, ignore_eos=True)
    resident = Policy(model=str(directory), batch_size=16, micro_batch_size=16, micro_batch_tokens=40)
    with Engine(resident, device="cpu") as engine:
        assert [completion.token_ids for completion in engine.generate(prompts, sampling)] == wanted
    streamed = Policy(model=str(directory), ffn_device="gpu", weights=Shares(host=0.5, disk=0.5), micro_batch_size=9)
    with Engine(streamed, device="twin") as engine:
        assert [completion.token_ids for completion in engine.generate(prompts, sampling)] == wanted
    assert len(set(wanted)) > 16


def distance(ours: Tensor, theirs: Tensor) -> dict[str, float]:
    """|difference| over the largest logit of its position, [N, V]: mean, median token, 99th percentile of tokens."""
    item = ((ours - theirs).abs() / theirs.abs().amax(-1, keepdim=True)).mean(-1)
    return {"mean": float(item.mean()), "median": float(item.median()), "p99": float(item.quantile(0.99))}


@pytest.mark.parametrize("family", thorough(FAMILIES, but=["olmoe"]))
def test_bfloat16_is_within_the_spread_of_transformers_own_attention(family: str, tiny: Tiny) -> None:
    """Over 640 positions: how far a position's logits are off on average, relative to the largest of them; of that the
    mean, the median and the 99th percentile (where a router chose another expert). Against the nearer of transformers'
    eager and sdpa attention ours is at most 1.25 times what lies between those two."""
    directory = tiny(family, dtype="bfloat16")
    sequences = texts([32] * 20, seed=5)
    backends = [
        torch.cat(reference(hf_model(directory, dtype=torch.bfloat16, attn_implementation=name), sequences))
        for name in ("eager", "sdpa")
    ]
    spread = distance(*backends)
    with forced(directory, batch_size=256, micro_batch_size=256, kv_tokens=65536) as engine:
        by_token = torch.cat(engine.logits(sequences, [1] * len(sequences)))
        by_prompt = torch.cat(engine.by_prefixes(sequences))
    for ours in (by_token, by_prompt):
        apart = [distance(ours, theirs) for theirs in backends]
        nearer = min(apart, key=lambda item: item["mean"])
        figures = {name: f"{nearer[name]:.5f} against {spread[name]:.5f}" for name in spread}
        print(family, figures)
        assert all(nearer[name] <= 1.25 * spread[name] for name in spread), figures
