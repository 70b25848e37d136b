"""moelight and llama.cpp on the same GGUF file: how many greedy tokens are equal.

Without --models: the bundled model and ``models/many``, both trained, with zeros around their matrices so that their
rows are whole blocks of 256 numbers (which changes no logit), and a random ``mixtral-0p9b``. llama.cpp rounds
activations to 8 bits for its products, moelight does with ``int8`` activations alone, and tokens differ where two are
about as likely.
``positions`` is the share of positions of moelight's continuations at which llama.cpp, given the same tokens before,
chooses the same one; ``free`` the share of equal tokens where each goes on by itself, ``whole`` the prompts whose
every token is equal. Trained models go on behind rows of problems and answers, random ones behind random ids.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

from experts_sections.padded import pad_to_blocks
from make_checkpoint import make_shape
from runner.contestants import random_work
from runner.forms import LlamaCpp, llamacpp_of

from moelight import Engine, Policy, SamplingParams
from moelight.core.policy import Shares
from moelight.engine.tokenizer import Tokenizer

ROOT = Path(__file__).parents[2]
TRAINED = {"demo": ROOT / "moelight" / "demo", "many": ROOT / "benchmarks" / "models" / "many"}
RANDOM = "mixtral-0p9b"
PROBLEMS = ROOT / "tests" / "demo" / "heldout.jsonl"
BAR = 0.95
_BLOCK = 32  # tokens of the cache that a sequence may leave unused


def run(args: argparse.Namespace) -> dict[str, Any]:
    """A row of each file and of what moelight computes in."""
    llamacpp = llamacpp_of(args)
    models = args.models or [*_trained(args.scratch), make_shape(RANDOM, args.scratch)]
    files = [(model, kind) for model in models for kind in args.kinds]
    forms = [(dtype, activations) for dtype in args.dtypes for activations in args.activations]
    return {"rows": [_compare(args, llamacpp, *file, *form, args.temporary) for file in files for form in forms]}


def _trained(position: Path) -> list[Path]:
    """The trained models with rows of whole blocks."""
    made = []
    for name, source in TRAINED.items():
        made.append(position / f"{name}-blocks")
        pad_to_blocks(source, made[-1])
    return made


def _compare(
    args: argparse.Namespace, llamacpp: LlamaCpp, model: Path, kind: str, dtype: str, activations: str, position: Path
) -> dict[str, Any]:
    path = llamacpp.gguf(model, kind)
    prompts = _prompts(args, model)
    how = SamplingParams(max_tokens=args.new_tokens, ignore_eos=True)
    policy = Policy(
        model=str(path),
        batch_size=args.prompts,
        micro_batch_size=args.prompts,
        kv_tokens=args.prompts * (args.prompt_len + args.new_tokens + _BLOCK),
        weights=Shares(host=1.0),
        ffn_device="cpu",
        weight_dtype=dtype,
        activations=activations,
    )
    with Engine(policy, device="cpu", prefix_caching=False) as engine:
        ours = [list(item.token_ids) for item in engine.generate(prompts, how)]
    theirs = _theirs(args, llamacpp, {"gguf": str(path), "prompts": prompts, "continuations": ours}, position)
    total = sum(map(len, ours))
    row = {
        "model": model.name,
        "kind": kind,
        "dtype": dtype,
        "activations": activations,
        "tokens": total,
        "positions": _equal(ours, theirs["forced"]) / total,
        "free": _equal(ours, theirs["free"]) / total,
        "whole": sum(one == other for one, other in zip(ours, theirs["free"], strict=True)),
        "prompts": len(prompts),
    }
    below = "" if row["positions"] >= BAR else "  BELOW"
    print(
        f"{row['model']:16}{kind:8}{dtype:9} {activations:5} after equal tokens {row['positions']:.1%}, "
        f"by itself {row['free']:.1%}, {row['whole']} of {row['prompts']} prompts whole{below}"
    )
    return row


def _equal(ours: list[list[int]], theirs: list[list[int]]) -> int:
    pairs = (pair for one, other in zip(ours, theirs, strict=True) for pair in zip(one, other, strict=True))
    return sum(selected == other for selected, other in pairs)


def _theirs(args: argparse.Namespace, llamacpp: LlamaCpp, task: dict[str, Any], position: Path) -> dict[str, Any]:
    told = position / "task.json"
    told.write_text(json.dumps({**task, "threads": args.threads}), encoding="utf-8")
    script = Path(__file__).parents[1] / "peers" / "llamacpp_tokens.py"
    command = [sys.executable, script, llamacpp.source, llamacpp.programs, told]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"llama.cpp ended with {done.returncode}\n{done.stderr[-2000:]}")
    return dict(json.loads(done.stdout.splitlines()[-1]))


def _prompts(args: argparse.Namespace, model: Path) -> list[list[int]]:
    """Rows of solved problems, the last one unsolved, for models that were trained on them; else random ids."""
    source = TRAINED.get(model.name.removesuffix("-blocks"))
    if source is None:
        count = args.prompts
        return random_work(model, [args.prompt_len] * count, [1] * count, [count], args.threads).prompts
    tokenizer, draw = Tokenizer.from_dir(source), random.Random(0)
    problems = [json.loads(line) for line in PROBLEMS.read_text(encoding="utf-8").splitlines()]
    result = []
    for _ in range(args.prompts):
        ids: list[int] = tokenizer.encode(draw.choice(problems)["prompt"])
        while len(ids) < args.prompt_len:
            solved = draw.choice(problems)
            ids = [*tokenizer.encode(solved["prompt"] + solved["answer"] + "\n"), *ids]
        result.append(ids[-args.prompt_len :])
    return result
