"""KL divergence of a checkpoint's rounded forms from itself, activations as they are and in int8.

Without --models: the bundled model, with zeros around its matrices so that their rows are whole blocks of 256 numbers
(which changes no logit, and leaves 64 numbers in a block), on 480 held-out problems with their answers; and a random
``mixtral-0p9b``, whose blocks are full, on random ids. Of each form three comparisons, as ``moelight compare`` makes
them: ``weights`` (activations as they are, against the checkpoint), ``both`` (int8 activations, against the checkpoint)
and ``activations`` (int8, against the same form with activations as they are).
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from experts_sections.padded import pad_to_blocks
from make_checkpoint import make_shape
from runner.contestants import random_work
from runner.forms import LlamaCpp, converted, llamacpp_of

from moelight.convert.compare import CompareOptions, compare_models
from moelight.core.policy import INT8
from moelight.engine.options import EngineOptions
from moelight.engine.tokenizer import Tokenizer
from quality_sections.tokens import PROBLEMS, RANDOM, TRAINED

BUNDLED = "demo-blocks"
GROUP = 32
CONVERTED = ("int4", "int8")  # other forms are types of GGUF files
HEADER = f"{'model':16}{'form':8}{'of':12}{'tokens':>8}{'KL':>10}{'low':>10}{'high':>10}{'top-1':>8}"


def run(args: argparse.Namespace) -> dict[str, Any]:
    """A row of each comparison."""
    models = args.models or [_bundled(args.scratch), make_shape(RANDOM, args.scratch)]
    print(HEADER)
    return {"rows": [row for model in models for row in _of_model(args, model, args.scratch, args.temporary)]}


def _bundled(position: Path) -> Path:
    pad_to_blocks(TRAINED["demo"], position / BUNDLED)
    return position / BUNDLED


def _of_model(args: argparse.Namespace, model: Path, position: Path, temporary: Path) -> list[dict[str, Any]]:
    prompts = _prompts(args, model, temporary / "prompts.jsonl")
    forms = {kind: _form(llamacpp_of(args), model, kind, position) for kind in args.forms}
    return [row for kind, form in forms.items() for row in _of_form(model, kind, form, prompts)]


def _form(llamacpp: LlamaCpp, model: Path, kind: str, position: Path) -> Path:
    """The checkpoint in the form ``kind``: made unless it is there."""
    return converted(model, kind, position, group_size=GROUP) if kind in CONVERTED else llamacpp.gguf(model, kind)


def _of_form(model: Path, kind: str, form: Path, prompts: Path) -> list[dict[str, Any]]:
    compared = {"weights": (model, None), "both": (model, INT8), "activations": (form, INT8)}
    rows = []
    for name, (reference, activations) in compared.items():
        result = compare_models(
            CompareOptions(
                model=str(form),
                reference=str(reference),
                prompts=prompts,
                engine=EngineOptions(activations=activations),
            )
        )
        row = {"model": model.name, "form": kind, "of": name, "tokens": result.tokens, "kl": result.kl.value}
        rows.append(row | {"kl_low": result.kl.low, "kl_high": result.kl.high, "top1": result.top1.value})
        print(
            f"{model.name:16}{kind:8}{name:12}{result.tokens:>8}{result.kl.value:>10.5f}{result.kl.low or 0:>10.5f}"
            f"{result.kl.high or 0:>10.5f}{result.top1.value:>8.2%}"
        )
    return rows


def _prompts(args: argparse.Namespace, model: Path, path: Path) -> Path:
    """Rows of token ids: held-out problems with their answers for the bundled model, else random ids."""
    if model.name == BUNDLED:
        tokenizer = Tokenizer.from_dir(TRAINED["demo"])
        problems = map(json.loads, PROBLEMS.read_text(encoding="utf-8").splitlines())
        ids = [tokenizer.encode(problem["prompt"] + problem["answer"] + "\n") for problem in problems]
    else:
        count = args.random_prompts
        ids = random_work(model, [args.random_len] * count, [1] * count, [count], 1).prompts
    lines = [{"custom_id": str(at), "method": "POST", "url": "/v1/completions"} for at in range(len(ids))]
    bodies = [{"model": model.name, "prompt": item} for item in ids]
    text = "".join(json.dumps({**line, "body": body}) + "\n" for line, body in zip(lines, bodies, strict=True))
    path.write_text(text, encoding="utf-8")
    return path
