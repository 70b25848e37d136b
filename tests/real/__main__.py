"""The main job on published models: 200 questions answered by the command line, compared with transformers in float32.

    python -m tests.real [--cache DIR] [--questions 200] [--models smollm2 gemma3] [--gguf]

An instruct model gets the questions as chats through its own template, a base model as plain prompts that it continues
by fewer tokens, as nothing ends them. Each token of an
answer must be the likeliest one of transformers in float32, given the tokens before it; ties within 1e-4 are counted
apart. With --gguf the published file itself answers, computed in float32. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.real.published import GEMMA3, SMOLLM2, PublishedModel, dequantise, fetch

MODELS = {"smollm2": SMOLLM2, "gemma3": GEMMA3}
QUESTIONS = Path(__file__).parent / "questions.txt"
CHAT_TOKENS, PROMPT_TOKENS = 256, 32
TIE = 1e-4  # difference of logits that another order of float32 sums explains


def answer(model: Path, questions: list[str], max_tokens: int, chat: bool, scratch: Path) -> list[dict[str, Any]]:
    """The rows that `moelight generate` writes for ``questions``, with the model in a directory or GGUF file."""
    asked, answered = scratch / "questions.jsonl", scratch / "answers.jsonl"
    rows = [
        {"messages": [{"role": "user", "content": text}]} if chat else {"prompt": f"Question: {text}\nAnswer:"}
        for text in questions
    ]
    asked.write_text("".join(json.dumps(row) + "\n" for row in rows))
    command = [sys.executable, "-m", "moelight", "generate", asked, "--model", model, "-o", answered, "--restart"]
    wide = ["--dtype", "float32"] if model.is_file() else []
    subprocess.run([*command, *wide, "--token-ids", "--max-tokens", str(max_tokens)], check=True)
    return [json.loads(line) for line in answered.read_text().splitlines()]


@torch.inference_mode()
def compare(directory: Path, questions: list[str], answers: list[dict[str, Any]], chat: bool) -> Counter[str]:
    """Tokens that are transformers' likeliest, tied with it, or others."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    counts: Counter[str] = Counter()
    for text, row in zip(questions, answers, strict=True):
        if chat:
            messages = [{"role": "user", "content": text}]
            prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        else:
            prompt = tokenizer(f"Question: {text}\nAnswer:").input_ids
        counts["prompts of another length"] += len(prompt) != row["usage"]["prompt_tokens"]
        tokens = torch.tensor(row["token_ids"])
        logits = model(torch.tensor([[*prompt, *row["token_ids"]]])).logits[0, len(prompt) - 1 : -1]
        short = logits.amax(-1) - logits.gather(1, tokens[:, None])[:, 0]
        counts["likeliest"] += int((short == 0).sum())
        counts["tied"] += int(((short > 0) & (short <= TIE)).sum())
        counts["other"] += int((short > TIE).sum())
        plain = [token for token in row["token_ids"] if token not in tokenizer.all_special_ids]
        counts["other texts"] += tokenizer.decode(plain) != row["text"]
    return counts


def run(model: PublishedModel, cache: Path, questions: list[str], *, as_gguf: bool) -> dict[str, Any]:
    """Fetch, dequantise, answer, with the file ``as_gguf`` or with its values, and compare."""
    directory, file = cache / model.name, fetch(model, cache)
    if not (directory / "model.safetensors").exists():
        dequantise(model, file, directory)
    chat = AutoTokenizer.from_pretrained(directory).chat_template is not None
    with tempfile.TemporaryDirectory() as scratch:
        max_tokens = CHAT_TOKENS if chat else PROMPT_TOKENS
        answers = answer(file if as_gguf else directory, questions, max_tokens, chat, Path(scratch))
    for text, row in list(zip(questions, answers, strict=True))[:5]:
        print(f"  {text}\n    {row['text'].strip()[:160]!r} ({row['finish_reason']})")
    counts = compare(directory, questions, answers, chat)
    ended = sum(row["finish_reason"] == "stop" for row in answers)
    return {"model": model.name, "rows": len(answers), "ended by themselves": ended, **counts}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cache", type=Path, default=Path("build/real"), help="Where the models are kept.")
    parser.add_argument("--questions", type=int, default=200, help="Number of questions.")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--gguf", action="store_true", help="Answer with the GGUF file itself.")
    options = parser.parse_args()
    options.cache.mkdir(parents=True, exist_ok=True)
    questions = QUESTIONS.read_text().splitlines()[: options.questions]
    results = [run(MODELS[name], options.cache, questions, as_gguf=options.gguf) for name in options.models]
    print(json.dumps(results))
    wrong = [result for result in results if result["other"] or result["prompts of another length"]]
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
