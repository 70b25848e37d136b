"""Numbers that no machine, model or job could have are one line and exit code 2: no warning, no stack, no plan."""

from __future__ import annotations

import itertools
import json
import re
import shutil
from pathlib import Path

import pytest

from tests.cli.program import DEMO, moelight_inside, write_prompts

OPTIMIZE = "optimize --hw t4 --model mixtral --no-cache"
HUGE = {"2^62": str(1 << 62), "10^21": str(10**21), "5,000 digits": "9" * 5000}
COUNTS = ("batch_size", "micro_batch_size", "num_micro_batches", "micro_batch_tokens", "prompt_micro_batches")
OPTIONS = {
    **{name: f"{OPTIMIZE} --{name}" for name in ("prompt-len", "max-prompt-len", "gen-len", "num-requests")},
    **{f"fixed {key}": f"{OPTIMIZE} --fix {key}=@" for key in (*COUNTS, "kv_block_size", "look_ahead")},
    **{f"{name} of a job": f"generate JOB -m demo --{name}" for name in ("batch-size", "micro-batch-size")},
    "num-requests of a simulation": "simulate --hw t4 --model mixtral --no-cache --num-requests",
    "prompt-len of an inspection": "inspect mixtral --hw t4 --prompt-len",
}


def refused(*arguments: str | Path, says: str) -> str:
    """What is said of a command that must be refused in a short line with ``says``. Any warning fails a test."""
    done = moelight_inside(*arguments)
    assert (done.returncode, done.stdout) == (2, ""), done.stderr[:500]
    assert done.stderr.count("\n") == 1 and len(done.stderr) < 400 + 5200 * ("9" * 5000 in done.stderr)
    assert re.search(says, done.stderr), done.stderr[:500]
    return done.stderr


# Every option meets one of the numbers; one option of each kind meets all.
CASES = [
    *zip(OPTIONS, itertools.cycle(HUGE)),
    *((option, huge) for option in ("gen-len", "fixed kv_block_size") for huge in HUGE),
]


@pytest.mark.parametrize(("option", "huge"), list(dict.fromkeys(CASES)))
def test_a_count_beyond_reason_is_refused(option: str, huge: str, tmp_path: Path) -> None:
    job = write_prompts(tmp_path / "job.jsonl", {"prompt": "add 1 and 2 ="})
    arguments = OPTIONS[option].replace("JOB", str(job)).split()
    if "@" in arguments[-1]:
        arguments[-1] = arguments[-1].replace("@", HUGE[huge])
    else:
        arguments.append(HUGE[huge])
    refused(*arguments, says=r"from 1 to [\d,]+|is one of 16|Invalid value for '--")


def test_sequences_whose_bytes_cannot_be_counted_are_refused(tmp_path: Path) -> None:
    config = {**json.loads((DEMO / "config.json").read_text()), "max_position_embeddings": 1 << 24}
    (tmp_path / "config.json").write_text(json.dumps(config))
    long = "--num-requests 1000000000 --prompt-len 16000000 --no-cache"
    refused(*f"optimize --hw t4 --model {tmp_path} {long}".split(), says="more than can be planned for")
    fixed = "--fix batch_size=1000000000"
    refused(*f"optimize --hw t4 --model {tmp_path} {long} {fixed}".split(), says=f"{fixed} with up to")


CONFIG = {
    "an integer of 5,000 digits": ("rope_theta", "9" * 5000, r"config\.json: .*more than 4300 digits"),
    "an integer beyond a float": (
        "rope_theta",
        "9" * 400,
        r"rope_theta must be a number above 0, .* not an integer of",
    ),
    "a number that is none to float32": ("rms_norm_eps", "1e-300", "rms_norm_eps must be a number above 0"),
    "a size of 400 digits": ("hidden_size", "9" * 400, "hidden_size must be an integer from 1 to 16777216"),
    "100,000 layers": ("num_hidden_layers", "100000", "num_hidden_layers must be an integer from 1 to 1024"),
    "10,000 experts": ("num_experts", "10000", "num_local_experts must be an integer from 1 to 4096"),
    "widths beyond any memory": ("moe_intermediate_size", "16777216", r"a model of .* parameters, above 1e\+15"),
}


@pytest.mark.parametrize(
    ("command", "kind"), [*(("inspect", kind) for kind in CONFIG), *(("generate", kind) for kind in list(CONFIG)[::4])]
)
def test_a_config_beyond_reason_is_refused(command: str, kind: str, tmp_path: Path) -> None:
    key, value, says = CONFIG[kind]
    model = shutil.copytree(DEMO, tmp_path / "model")
    result = json.loads((model / "config.json").read_text())
    if key == "moe_intermediate_size":
        result |= {"num_hidden_layers": 1024, "num_experts": 4096, "hidden_size": 65536}
    text = json.dumps({**result, key: "@"}).replace('"@"', value)
    (model / "config.json").write_text(text)
    job = write_prompts(tmp_path / "job.jsonl", {"prompt": "add 1 and 2 ="})
    refused(*(("inspect", model) if command == "inspect" else ("generate", job, "-m", model)), says=says)
