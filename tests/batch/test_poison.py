"""Rows that would end their process, or never end: each is an error row, and the others are served."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Regex, models, pre_tokenizers
from tokenizers import Tokenizer as Inner

from moelight.core.errors import InputError
from moelight.engine.tokenizer import Tokenizer
from moelight.serve.data import DataDirectory
from moelight.serve.jobs import generate_command
from tests.cli.program import DEMO, moelight_inside, read_rows, write_prompts
from tests.serve.test_survival import batch_of, file_of, work

GOOD = {"prompt": "add 1 and 2 =", "max_tokens": 3}
PANICS = "x" * 60  # `fragile`'s pattern goes back over it more often than the library allows


def fragile(directory: Path) -> Path:
    """The bundled model, with a tokenizer that panics at ``PANICS``."""
    shutil.copytree(DEMO, directory)
    path = directory / "tokenizer.json"
    inner = Inner.from_file(str(path))
    inner.pre_tokenizer = pre_tokenizers.Split(Regex("(x+x+)+y"), "isolated")
    inner.save(str(path))
    return directory


def generate(directory: Path, *rows: Any, model: Path = DEMO, code: int = 1) -> tuple[list[Any], list[Any]]:
    """Rows that were answered, and those that were not, of a job that ends with ``code``."""
    prompts = write_prompts(directory / "in.jsonl", *rows)
    options = ("-o", directory / "out", "--error-file", directory / "err", "--model", model, "--host-memory", "1GiB")
    done = moelight_inside("generate", prompts, *options)
    assert done.returncode == code, done.stderr
    return read_rows((directory / "out").read_text()), read_rows((directory / "err").read_text())


def test_a_text_at_which_the_tokenizer_panics_is_an_error_row(tmp_path: Path) -> None:
    served, refused = generate(tmp_path, GOOD, {"prompt": PANICS}, GOOD, model=fragile(tmp_path / "model"))
    assert len(served) == 2 and served[0]["text"] == served[1]["text"]
    assert [(row["line"], row["error"]["code"]) for row in refused] == [(2, "tokenizer_failed")]
    assert "retry-limit-in-match over" in refused[0]["error"]["message"]


def test_blanks_at_which_qwens_pattern_panics(capfd: pytest.CaptureFixture[str]) -> None:
    """What the library prints of it, forty lines of a trace, is not shown where a text is long."""
    inner = Inner(models.BPE(vocab={"Ġ": 0}, merges=[]))
    blanks = pre_tokenizers.Split(Regex(r"\s*[\r\n]+|\s+(?!\S)|\s+"), "isolated")
    inner.pre_tokenizer = pre_tokenizers.Sequence(
        [blanks, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer = Tokenizer(inner, template=None, eos_token_ids=frozenset(), named={})
    with pytest.raises(InputError, match="tokenizer fails at the text") as refusal:
        tokenizer.encode(" " * 10_000_000)
    assert refusal.value.code == "tokenizer_failed"
    assert capfd.readouterr().err == ""
    assert tokenizer.encode("  ") == [0, 0]


def test_a_batch_with_a_text_at_which_the_tokenizer_panics_is_completed(tmp_path: Path) -> None:
    data = DataDirectory(tmp_path / "data")
    bodies = ["add 1 and 2 =", PANICS, "add 3 and 4 ="]
    asked = [
        {"custom_id": f"r{n}", "method": "POST", "url": "/v1/completions", "body": {"prompt": body, "max_tokens": 2}}
        for n, body in enumerate(bodies)
    ]
    write_prompts(data.files / "file-1", *asked)
    data.store.add_file(file_of("file-1"))
    data.store.add_batch(batch_of("batch_1"))
    model = fragile(tmp_path / "model")
    work(data, command=generate_command(str(model), ["--host-memory", "1GiB"], line_format="openai"), within_s=600)
    found = data.store.batch("batch_1")
    assert found is not None and found.status == "completed", found
    assert (found.counts.total, found.counts.completed, found.counts.failed) == (3, 2, 1)
    (refused,) = map(json.loads, (data.batches / "batch_1" / "errors.jsonl").read_text().splitlines())
    assert (refused["custom_id"], refused["error"]["code"]) == ("r1", "tokenizer_failed")
    data.close()


@pytest.mark.parametrize("n", [16_385, 1 << 31, (1 << 63) - 1, 1 << 63, 1 << 64, 10**4000])
def test_n_has_a_bound(n: int, tmp_path: Path) -> None:
    served, refused = generate(tmp_path, GOOD, {**GOOD, "n": n}, {**GOOD, "n": 2})
    assert len(served) == 2 and len(served[1]["choices"]) == 2
    assert [(row["line"], row["error"]["message"][:25]) for row in refused] == [(2, "n must be at most 16,384:")]


def test_n_has_a_bound_in_every_format(tmp_path: Path) -> None:
    body = {"prompt": "add 1 and 2 =", "max_tokens": 1}
    asked = [
        {"custom_id": f"r{at}", "url": "/v1/completions", "body": {**body, **more}}
        for at, more in enumerate(
            [{}, {"n": 16_385}, {"prompt": ["a"] * 129, "n": 128}, {"prompt": ["a"] * 20, "n": 2}]
        )
    ]
    asked.append({"custom_id": "r4", "url": "/v1/chat/completions", "body": {"messages": [], "n": 1 << 64}})
    served, refused = generate(tmp_path, *asked)
    assert [len(row["response"]["body"]["choices"]) for row in served] == [1, 40]
    assert [(row["custom_id"], row["response"]["body"]["error"]["param"]) for row in refused[:2]] == [
        ("r1", "n"),
        ("r2", "n"),
    ]
    assert refused[1]["error"]["message"].startswith("129 prompts and n 128 ask for more than 16,384 answers")
    table = tmp_path / "in.csv"
    table.write_text("prompt,n,max_tokens\nadd 1 and 2 =,1,1\nadd 1 and 2 =,18446744073709551616,1\n")
    done = moelight_inside("generate", table, "--host-memory", "1GiB")
    assert done.returncode == 1 and "n must be at most 16,384" in read_rows(done.stdout)[1]["error"]["message"]
