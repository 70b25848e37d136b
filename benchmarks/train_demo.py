"""Trains the bundled tiny model from scratch and writes it, in the layout of a Hugging Face checkpoint.

It makes ``moelight/demo/`` (a sparse ``qwen3_moe`` model of 1.8 million parameters that adds, sorts, reverses, counts,
shouts and compares) and ``tests/demo/heldout.jsonl`` (problems it never saw, with their answers). The full run takes
about 45 minutes on one CPU core; the best checkpoint so far is on disk from the first few minutes on.

    python benchmarks/train_demo.py                   # train, write, measure
    python benchmarks/train_demo.py --measure-only    # measure what is already written
    python benchmarks/train_demo.py --shape many --steps 2600 --out benchmarks/models/many   # 64 experts, top 8

The text of a problem is ``prompt + answer + <eos>``. A prompt ends in ``=`` without a space and its answer begins with
one: ``add 12 and 305 =`` is answered by `` 317``. Loss falls on answer and ``<eos>`` only. Both sides of the split ask
one function, `is_held_out`, a hash of the prompt. The last line of stdout is JSON. This file knows nothing of moelight:
the checkpoint must stand on its own.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import string
import time
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import blake2b
from itertools import groupby
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3MoeConfig, Qwen3MoeForCausalLM

ROOT = Path(__file__).resolve().parent.parent
SPECIALS = ("<pad>", "<eos>", "<unk>")
PAD, EOS, _UNK = range(3)
HELD_OUT_ONE_IN = 16
CHAT_TEMPLATE = "{{ (messages | selectattr('role', 'equalto', 'user') | list | last)['content'] }}"
# The keys of the published Qwen3-MoE checkpoints, so that any reader of those reads this one.
CONFIG: dict[str, object] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "decoder_sparse_step": 1,
    "eos_token_id": EOS,
    "head_dim": 32,
    "hidden_act": "silu",
    "hidden_size": 128,
    "initializer_range": 0.05,
    "intermediate_size": 256,
    "max_position_embeddings": 512,
    "mlp_only_layers": [],
    "model_type": "qwen3_moe",
    "moe_intermediate_size": 128,
    "norm_topk_prob": True,
    "num_attention_heads": 4,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 4,
    "num_key_value_heads": 2,
    "output_router_logits": False,
    "pad_token_id": PAD,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 10000.0,
    "router_aux_loss_coef": 0.01,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": len(SPECIALS) + 95,
}
# What a shape has otherwise. Both compute as much for a token.
SHAPES: dict[str, dict[str, object]] = {
    "demo": {},
    "many": {"num_experts": 64, "num_experts_per_tok": 8, "moe_intermediate_size": 32},
}


# ---- The tasks ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class Problem:
    """One question. ``key`` is the prompt with interchangeable operands in order: the split hashes it, so that
    ``add 2 and 9 =`` and ``add 9 and 2 =`` are on the same side."""

    task: str
    prompt: str
    answer: str
    key: str


def is_held_out(key: str) -> bool:
    """Whether a problem belongs to the test side, for ever: a matter of its text alone."""
    return int.from_bytes(blake2b(key.encode(), digest_size=8).digest(), "big") % HELD_OUT_ONE_IN == 0


def draw_operand(rng: random.Random) -> int:
    """A number of one to three digits; the longer, the more often."""
    return rng.randrange(10 ** rng.choices((1, 2, 3), (1, 2, 4))[0])


def draw_word(rng: random.Random) -> str:
    """Three to eight letters, half of the time from a small alphabet of its own, so that letters repeat."""
    letters = string.ascii_lowercase
    if rng.random() < 0.5:
        letters = "".join(rng.sample(letters, rng.randint(2, 6)))
    return "".join(rng.choices(letters, k=rng.randint(3, 8)))


def _two_numbers(rng: random.Random, verb: str, answer: Callable[[int, int], int]) -> Problem:
    a, b = draw_operand(rng), draw_operand(rng)
    key = f"{verb} {min(a, b)} and {max(a, b)} ="
    return Problem(task=verb, prompt=f"{verb} {a} and {b} =", answer=f" {answer(a, b)}", key=key)


def _one_word(rng: random.Random, verb: str, answer: Callable[[str], str]) -> Problem:
    word = draw_word(rng)
    prompt = f"{verb} {word} ="
    return Problem(task=verb, prompt=prompt, answer=f" {answer(word)}", key=prompt)


def _count(rng: random.Random) -> Problem:
    word = draw_word(rng)
    letter = rng.choice(word if rng.random() < 0.85 else string.ascii_lowercase)
    prompt = f"count {letter} in {word} ="
    return Problem(task="count", prompt=prompt, answer=f" {word.count(letter)}", key=prompt)


# task -> (share of the training examples, maker)
TASKS: dict[str, tuple[float, Callable[[random.Random], Problem]]] = {
    "add": (0.40, lambda rng: _two_numbers(rng, "add", int.__add__)),
    "max": (0.10, lambda rng: _two_numbers(rng, "max", max)),
    "sort": (0.16, lambda rng: _one_word(rng, "sort", lambda word: "".join(sorted(word)))),
    "reverse": (0.14, lambda rng: _one_word(rng, "reverse", lambda word: word[::-1])),
    "upper": (0.06, lambda rng: _one_word(rng, "upper", str.upper)),
    "count": (0.14, _count),
}


def draw_problem(rng: random.Random, task: str, *, held_out: bool) -> Problem:
    """A random problem of one task, from one side of the split."""
    while True:
        problem = TASKS[task][1](rng)
        if is_held_out(problem.key) == held_out:
            return problem


def draw_training_batch(rng: random.Random, size: int) -> list[Problem]:
    """A batch over all tasks, ordered by length so that neighbours need little padding."""
    tasks = rng.choices(list(TASKS), [share for share, _ in TASKS.values()], k=size)
    problems = [draw_problem(rng, task, held_out=False) for task in tasks]
    return sorted(problems, key=lambda p: len(p.prompt) + len(p.answer))


def held_out_problems(seed: int, per_task: int) -> list[Problem]:
    """The test set: ``per_task`` different problems of each task, in a fixed order."""
    rng = random.Random(seed)
    chosen: dict[str, Problem] = {}
    for task in TASKS:
        goal = len(chosen) + per_task
        while len(chosen) < goal:
            problem = draw_problem(rng, task, held_out=True)
            chosen.setdefault(problem.key, problem)
    return list(chosen.values())


# ---- Text and files -------------------------------------------------------------------------------------------------


def make_tokenizer() -> Tokenizer:
    """One token a printable ASCII character: a BPE without merges, whose decoder glues characters without spaces."""
    characters = [chr(code) for code in range(32, 127)]
    vocab = {token: index for index, token in enumerate([*SPECIALS, *characters])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>"))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIALS])
    return tokenizer


def on_disk_tensors(model: Qwen3MoeForCausalLM) -> dict[str, torch.Tensor]:
    """The weights in bfloat16 under their names on disk: each expert apart, as published checkpoints have them."""
    tensors: dict[str, torch.Tensor] = {}
    for name, value in model.state_dict().items():
        stem, _, leaf = name.rpartition(".")
        parts = {leaf: value}
        if leaf == "gate_up_proj":  # [E, 2I, H], gate rows first
            parts = dict(zip(("gate_proj", "up_proj"), value.chunk(2, dim=1), strict=True))
        for part, stacked in parts.items():
            if value.dim() == 3:
                tensors |= {f"{stem}.{expert}.{part}.weight": matrix for expert, matrix in enumerate(stacked)}
            else:
                tensors[name] = stacked
    return {name: value.to(torch.bfloat16).contiguous().clone() for name, value in tensors.items()}


def write_json(path: Path, content: object) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def write_static_files(folder: Path, tokenizer: Tokenizer, shape: str) -> None:
    """Everything of the checkpoint but the weights."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    write_json(folder / "config.json", CONFIG | SHAPES[shape])
    write_json(folder / "generation_config.json", {"do_sample": False, "eos_token_id": EOS, "pad_token_id": PAD})
    described: dict[str, object] = dict(zip(("pad_token", "eos_token", "unk_token"), SPECIALS, strict=True))
    described |= {
        "chat_template": CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": False,
        "model_max_length": CONFIG["max_position_embeddings"],
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    write_json(folder / "tokenizer_config.json", described)


def write_weights(folder: Path, model: Qwen3MoeForCausalLM) -> None:
    """Replaces the weights in one step, so that a reader finds either the old file or the new."""
    partial = folder / "model.safetensors.partial"
    save_file(on_disk_tensors(model), partial, metadata={"format": "pt"})
    partial.chmod(0o644)
    partial.replace(folder / "model.safetensors")


def write_held_out(path: Path, problems: list[Problem]) -> None:
    """``{"custom_id", "prompt", "answer"}`` a line; ids count within their task."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [
        json.dumps({"custom_id": f"{task}-{index:03d}", "prompt": problem.prompt, "answer": problem.answer})
        for task, group in groupby(problems, key=lambda p: p.task)
        for index, problem in enumerate(group)
    ]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


# ---- Training -------------------------------------------------------------------------------------------------------
# B problems of a micro-batch, T tokens of its longest text, E experts.


def encode(tokenizer: Tokenizer, problems: list[Problem]) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids ``[B, T]``, padded on the right, and the mask ``[B, T]`` of answer and eos. Causal attention never
    looks right, so padding needs no mask."""
    rows = [[*tokenizer.encode(p.prompt + p.answer).ids, EOS] for p in problems]
    ids_BT = torch.full((len(rows), max(map(len, rows))), PAD)
    answer_BT = torch.zeros_like(ids_BT, dtype=torch.bool)
    for index, (row, problem) in enumerate(zip(rows, problems, strict=True)):
        ids_BT[index, : len(row)] = torch.tensor(row)
        answer_BT[index, len(problem.prompt) : len(row)] = True
    return ids_BT, answer_BT


def balance_loss(router_logits: tuple[torch.Tensor, ...], top_k: int) -> torch.Tensor:
    """Switch Transformers' load balancing, layer by layer: 1.0 where every expert is used alike."""
    losses = []
    for logits in router_logits:  # [B*T, E]
        probabilities = logits.softmax(dim=-1)
        chosen = F.one_hot(probabilities.topk(top_k, dim=-1).indices, logits.shape[-1]).float()
        share_E = chosen.mean(dim=(0, 1))
        losses.append(logits.shape[-1] * (share_E * probabilities.mean(dim=0)).sum())
    return torch.stack(losses).mean()


def learning_rate(step: int, steps: int, peak: float) -> float:
    """A short linear warm-up, then a cosine down to zero."""
    progress = max(0, step - 100) / max(1, steps - 100)
    return peak * min(1.0, (step + 1) / 100) * 0.5 * (1 + math.cos(math.pi * progress))


@torch.no_grad()
def teacher_forced_accuracy(model: PreTrainedModel, tokenizer: Tokenizer, problems: list[Problem]) -> dict[str, float]:
    """Share of exact answers per task. Greedy decoding is exact where every answer token is its position's argmax."""
    correct = {}
    for task in TASKS:
        ids_BT, answer_BT = encode(tokenizer, [p for p in problems if p.task == task])
        best_BT = model(input_ids=ids_BT[:, :-1], use_cache=False).logits.argmax(dim=-1)
        right_B = ((best_BT == ids_BT[:, 1:]) | ~answer_BT[:, 1:]).all(dim=1)
        correct[task] = right_B.float().mean().item()
    return correct


def train_step(
    model: Qwen3MoeForCausalLM, tokenizer: Tokenizer, problems: list[Problem], micro_batch: int
) -> tuple[float, float]:
    """Accumulates the gradient of one batch; returns its mean cross entropy a token and its balance loss."""
    targets = sum(len(p.answer) + 1 for p in problems)
    total, balance = 0.0, 0.0
    for start in range(0, len(problems), micro_batch):
        part = problems[start : start + micro_batch]
        ids_BT, answer_BT = encode(tokenizer, part)
        out = model(input_ids=ids_BT[:, :-1], use_cache=False, output_router_logits=True)
        wanted_BT = answer_BT[:, 1:]
        cross_entropy = F.cross_entropy(out.logits[wanted_BT], ids_BT[:, 1:][wanted_BT], reduction="sum") / targets
        aux = balance_loss(out.router_logits, model.config.num_experts_per_tok) * len(part) / len(problems)
        (cross_entropy + model.config.router_aux_loss_coef * aux).backward()
        total, balance = total + cross_entropy.item(), balance + aux.item()
    return total, balance


def train(options: argparse.Namespace, tokenizer: Tokenizer) -> float:
    """The whole run; returns its seconds. Writes the weights whenever held-out problems, drawn apart from the test
    set, say they are the best so far."""
    watched = held_out_problems(options.seed + 1, options.per_task)
    torch.manual_seed(options.seed)
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**(CONFIG | SHAPES[options.shape])))
    matrices = [p for p in model.parameters() if p.dim() > 1]
    gains = [p for p in model.parameters() if p.dim() == 1]
    groups = [{"params": matrices, "weight_decay": 0.05}, {"params": gains, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=options.learning_rate, betas=(0.9, 0.98), fused=True)
    rng, best, begin = random.Random(options.seed), -1.0, time.perf_counter()
    for step in range(options.steps):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, options.steps, options.learning_rate)
        loss, balance = train_step(model, tokenizer, draw_training_batch(rng, options.batch), options.batch // 2)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if (step + 1) % options.check_every and step + 1 < options.steps:
            continue
        accuracy = teacher_forced_accuracy(model, tokenizer, watched)
        shown = " ".join(f"{task} {share:.3f}" for task, share in accuracy.items())
        seconds = time.perf_counter() - begin
        print(f"step {step + 1} {seconds:.0f} s loss {loss:.4f} balance {balance:.3f} | {shown}", flush=True)
        if sum(accuracy.values()) >= best:
            best = sum(accuracy.values())
            write_weights(options.out, model)
    return time.perf_counter() - begin


# ---- Measuring ------------------------------------------------------------------------------------------------------


@torch.no_grad()
def generated_accuracy(
    folder: Path, dtype: torch.dtype, tokenizer: Tokenizer, problems: list[Problem]
) -> dict[str, float]:
    """Share of exact answers per task, by greedy generation until eos from the files as written."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    right = dict.fromkeys(TASKS, 0)
    for length in sorted({len(p.prompt) for p in problems}):  # prompts of one length need no padding
        group = [p for p in problems if len(p.prompt) == length]
        prompts = torch.tensor([tokenizer.encode(p.prompt).ids for p in group])
        tokens = model.generate(prompts, attention_mask=torch.ones_like(prompts), max_new_tokens=16, do_sample=False)
        for problem, row in zip(group, tokens[:, prompts.shape[1] :].tolist(), strict=True):
            finished = EOS in row and tokenizer.decode(row[: row.index(EOS)]) == problem.answer
            right[problem.task] += finished
    return {task: count / sum(p.task == task for p in problems) for task, count in right.items()}


@torch.no_grad()
def expert_shares(folder: Path, tokenizer: Tokenizer, problems: list[Problem]) -> torch.Tensor:
    """Share of the routed tokens of each layer that each expert gets, ``[layers, E]``."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    experts, top_k = model.config.num_experts, model.config.num_experts_per_tok
    counts = torch.zeros(model.config.num_hidden_layers, experts)
    for problem in problems:
        ids = torch.tensor([tokenizer.encode(problem.prompt + problem.answer).ids])
        router_logits = model(input_ids=ids, use_cache=False, output_router_logits=True).router_logits
        for layer, logits in enumerate(router_logits):
            counts[layer] += torch.bincount(logits.topk(top_k, dim=-1).indices.flatten(), minlength=experts)
    return counts / counts.sum(dim=1, keepdim=True)


def measure(folder: Path, tokenizer: Tokenizer, problems: list[Problem]) -> dict[str, object]:
    """The figures of the model as it lies on disk."""
    shares = expert_shares(folder, tokenizer, problems)
    return {
        "held_out": len(problems),
        "bf16": generated_accuracy(folder, torch.bfloat16, tokenizer, problems),
        "fp32": generated_accuracy(folder, torch.float32, tokenizer, problems),
        "expert_share_min": round(shares.min().item(), 4),
        "expert_share_max": round(shares.max().item(), 4),
        "folder_bytes": sum(path.stat().st_size for path in folder.iterdir()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=ROOT / "moelight" / "demo", help="folder of the checkpoint")
    parser.add_argument("--shape", choices=SHAPES, default="demo", help="demo: 8 experts, top 2; many: 64, top 8")
    parser.add_argument("--held-out", type=Path, default=ROOT / "tests" / "demo" / "heldout.jsonl")
    parser.add_argument("--steps", type=int, default=4400)
    parser.add_argument("--batch", type=int, default=256, help="problems a step")
    parser.add_argument("--learning-rate", type=float, default=2e-3, help="peak")
    parser.add_argument("--check-every", type=int, default=200, help="steps between looks at the held-out problems")
    parser.add_argument("--per-task", type=int, default=80, help="held-out problems of each task")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--measure-only", action="store_true", help="measure the checkpoint already in --out")
    options = parser.parse_args()

    torch.set_num_threads(options.threads)
    tokenizer, problems = make_tokenizer(), held_out_problems(options.seed, options.per_task)
    result: dict[str, object] = {}
    if not options.measure_only:
        write_static_files(options.out, tokenizer, options.shape)
        write_held_out(options.held_out, problems)
        result["train_s"] = round(train(options, tokenizer))
    print(json.dumps(result | measure(options.out, tokenizer, problems)))


if __name__ == "__main__":
    main()
