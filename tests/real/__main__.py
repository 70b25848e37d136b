"""The main job on published models: questions answered by the command line, compared with transformers and llama.cpp.

    python -m tests.real [--cache DIR] [--questions 100] [--max-tokens 256] [--models NAME ...] [--runs NAME ...]

An instruct model gets the questions as chats through its own template, a base model as plain prompts that it continues
by fewer tokens, as nothing ends them. Runs are those of the dequantised checkpoint (`safetensors`), and of the file
itself in float32 (`float32`), both beside transformers in float32, and of the file with activations rounded to int8
(`int8`) beside llama.cpp, which rounds them, too. Counted are the tokens of answers that are the other's likeliest ones
after the same tokens; ties within 1e-4 apart. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from tests.real.judges import judge_of
from tests.real.published import MODELS, PublishedModel, dequantise, describe, fetch

QUESTIONS = Path(__file__).parent / "questions.txt"
CHAT_TOKENS, PROMPT_TOKENS = 256, 32
TIE = 1e-4  # difference of logits that another order of float32 sums explains


@dataclass(frozen=True, kw_only=True, slots=True)
class RunKind:
    """How a model answers, and what its answers are compared with.

    Attributes:
        from_file: the published GGUF file answers, else the dequantised checkpoint.
        options: of `moelight generate`.
        judge: what its tokens are compared with.
        least: the least share of tokens that are the judge's likeliest.
    """

    from_file: bool = True
    options: tuple[str, ...] = ()
    judge: str = "transformers"
    least: float


RUNS = {
    "safetensors": RunKind(from_file=False, least=1.0),
    "float32": RunKind(options=("--dtype", "float32"), least=0.99),
    "int8": RunKind(options=("--dtype", "float32", "--activations", "int8"), judge="llama.cpp", least=0.95),
}


def answer(
    model: Path, questions: list[str], *, max_tokens: int, chat: bool, options: tuple[str, ...], scratch: Path
) -> list[dict[str, Any]]:
    """The rows that `moelight generate` writes for ``questions``, with the model in a directory or GGUF file."""
    asked, answered = scratch / "questions.jsonl", scratch / "answers.jsonl"
    rows = [{"messages": _messages(text)} if chat else {"prompt": _prompt(text)} for text in questions]
    asked.write_text("".join(json.dumps(row) + "\n" for row in rows))
    command = [sys.executable, "-m", "moelight", "generate", asked, "--model", model, "-o", answered, "--restart"]
    subprocess.run([*command, *options, "--token-ids", "--max-tokens", str(max_tokens)], check=True)
    return [json.loads(line) for line in answered.read_text().splitlines()]


def _messages(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def _prompt(text: str) -> str:
    return f"Question: {text}\nAnswer:"


def rendered(tokenizer: PreTrainedTokenizerBase, text: str) -> str:
    """The prompt of the question ``text``."""
    if tokenizer.chat_template is None:
        return _prompt(text)
    return str(tokenizer.apply_chat_template(_messages(text), add_generation_prompt=True, tokenize=False))


def compare(
    kind: RunKind, directory: Path, file: Path, questions: list[str], answers: list[dict[str, Any]]
) -> dict[str, Any]:
    """Count the tokens that are the judge's likeliest, tied with it, or others; the largest difference of logits."""
    tokenizer = AutoTokenizer.from_pretrained(directory)
    special, counts, largest = {*tokenizer.all_special_ids}, Counter[str](), 0.0
    with judge_of(kind.judge, directory, file) as judge:
        for text, row in zip(questions, answers, strict=True):
            prompt, ids = judge.prompt_ids(rendered(tokenizer, text)), row["token_ids"]
            counts["prompts of another length"] += len(prompt) != row["usage"]["prompt_tokens"]
            counts["other texts"] += tokenizer.decode([token for token in ids if token not in special]) != row["text"]
            logits = judge.logits(prompt, ids)
            short = logits.amax(-1) - logits[range(len(ids)), ids]
            counts["likeliest"] += int((short == 0).sum())
            counts["tied"] += int(((short > 0) & (short <= TIE)).sum())
            counts["other"] += int((short > TIE).sum())
            largest = max(largest, float(short.max()))
    return {**counts, "largest difference": round(largest, 4)}


def run(model: PublishedModel, name: str, cache: Path, questions: list[str], max_tokens: int) -> dict[str, Any]:
    """Fetch, dequantise, answer as the run ``name`` does, and compare."""
    kind, directory, file = RUNS[name], cache / model.name, fetch(model, cache)
    if not (directory / "tokenizer.json").exists():
        describe(model, file, directory)
    if (kind.judge == "transformers" or not kind.from_file) and not (directory / "model.safetensors").exists():
        dequantise(model, file, directory)
    chat = AutoTokenizer.from_pretrained(directory).chat_template is not None
    with tempfile.TemporaryDirectory() as scratch:
        try:
            answers = answer(
                file if kind.from_file else directory,
                questions,
                max_tokens=max_tokens if chat else min(max_tokens, PROMPT_TOKENS),
                chat=chat,
                options=kind.options,
                scratch=Path(scratch),
            )
        except subprocess.CalledProcessError as error:  # which has said why
            return {"model": model.name, "run": name, "exit code": error.returncode, "passed": False}
    for text, row in list(zip(questions, answers, strict=True))[:5]:
        print(f"  {text}\n    {row['text'].strip()[:160]!r} ({row['finish_reason']})")
    counts = compare(kind, directory, file, questions, answers)
    share = counts["likeliest"] / max(counts["likeliest"] + counts["other"], 1)
    ended = sum(row["finish_reason"] == "stop" for row in answers)
    result = {"model": model.name, "run": name, "rows": len(answers), "ended by themselves": ended, **counts}
    passed = share >= kind.least and not counts["prompts of another length"] and not counts["other texts"]
    return {**result, "share": round(share, 5), "compared with": kind.judge, "passed": passed}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cache", type=Path, default=Path("build/real"), help="Where the models are kept.")
    parser.add_argument("--questions", type=int, default=100, help="Number of questions, at most 200.")
    parser.add_argument("--max-tokens", type=int, default=CHAT_TOKENS, help="Tokens of an answer.")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--runs", nargs="+", choices=RUNS, default=["float32", "int8"])
    options = parser.parse_args()
    options.cache.mkdir(parents=True, exist_ok=True)
    questions = QUESTIONS.read_text().splitlines()[: options.questions]
    results = []
    for model in options.models:
        for name in options.runs:
            results.append(run(MODELS[model], name, options.cache, questions, options.max_tokens))
            print(json.dumps(results[-1]), flush=True)
    print(json.dumps(results))
    sys.exit(not all(result["passed"] for result in results))


if __name__ == "__main__":
    main()
