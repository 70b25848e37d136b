"""Rows that would end their process, or never end: each is an error row, and the others are served."""

from __future__ import annotations

import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Regex, models, pre_tokenizers
from tokenizers import Tokenizer as Inner

from moelight.batch.crash_guard import CrashGuard
from moelight.batch.paths import journal_of
from moelight.batch.store import read_record
from moelight.core.errors import InputError
from moelight.engine.tokenizer import Tokenizer
from moelight.serve import jobs
from moelight.serve.store import Batch, DataDirectory
from tests.cli.program import DEMO, PLANNED, forked_job, moelight, moelight_inside, read_rows, write_prompts
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
    files = ("-o", directory / "out", "--error-file", directory / "err")
    done = moelight_inside("generate", prompts, *files, "--model", model, *PLANNED)
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


@pytest.fixture
def forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Jobs of a batch are forked."""
    monkeypatch.setattr(jobs.subprocess, "Popen", forked_job)


def batch(directory: Path, model: Path, prompts: list[str]) -> tuple[Batch, Any]:
    """A batch over these once it has ended, which must be well, and its only error row."""
    data = DataDirectory(directory / "data")
    asked = [
        {"custom_id": f"r{n}", "method": "POST", "url": "/v1/completions", "body": {"prompt": prompt, "max_tokens": 2}}
        for n, prompt in enumerate(prompts)
    ]
    write_prompts(data.files / "file-1", *asked)
    data.store.add_file(file_of("file-1"))
    data.store.add_batch(batch_of("batch_1"))
    work(data, command=jobs.generate_command(str(model), PLANNED, line_format="openai"))
    result = data.store.batch("batch_1")
    assert result is not None and result.status == "completed", result
    (refused,) = read_rows((data.batches / "batch_1" / "errors.jsonl").read_text())
    data.close()
    return result, refused


@pytest.mark.usefixtures("forked")
def test_a_batch_with_a_text_at_which_the_tokenizer_panics_is_completed(tmp_path: Path) -> None:
    result, refused = batch(tmp_path, fragile(tmp_path / "model"), ["add 1 and 2 =", PANICS, "add 3 and 4 ="])
    assert (result.counts.total, result.counts.completed, result.counts.failed) == (3, 2, 1)
    assert (refused["custom_id"], refused["error"]["code"]) == ("r1", "tokenizer_failed")


def test_n_has_a_bound(tmp_path: Path) -> None:
    values = [16_385, 1 << 31, (1 << 63) - 1, 1 << 63, 1 << 64, 10**4000]
    served, refused = generate(tmp_path, GOOD, *({**GOOD, "n": n} for n in values), {**GOOD, "n": 2})
    assert len(served) == 2 and len(served[1]["choices"]) == 2
    assert [row["line"] for row in refused] == [*range(2, 2 + len(values))]
    assert {row["error"]["message"][:25] for row in refused} == {"n must be at most 16,384:"}


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
    done = moelight_inside("generate", table, *PLANNED)
    assert done.returncode == 1 and "n must be at most 16,384" in read_rows(done.stdout)[1]["error"]["message"]


def chain(count: int) -> dict[str, Any]:
    """A schema of so many definitions, each of which is the next one."""
    names = {f"d{n}": {"$ref": f"#/$defs/d{n + 1}"} for n in range(count)}
    return {"$ref": "#/$defs/d0", "$defs": {**names, f"d{count}": {"type": "integer"}}}


@pytest.mark.thorough
def test_rows_whose_grammars_would_end_the_process_are_error_rows(tmp_path: Path) -> None:
    """Not in this process, which the second one would end."""
    rules = "\n".join(["start: r0", *(f"r{n}: r{n + 1}" for n in range(20_000)), 'r20000: "a"'])
    outputs = [{"regex": "[0-9]"}, {"json": chain(20_000)}, {"grammar": rules}, {"choice": ["yes", "no"]}]
    prompts = write_prompts(tmp_path / "in.jsonl", *({**GOOD, "structured_outputs": output} for output in outputs))
    done = moelight("generate", prompts, "-o", tmp_path / "out", *PLANNED)
    assert done.returncode == 1, done.stderr
    digit, deep, long, choice = read_rows((tmp_path / "out").read_text())
    assert digit["text"].isdigit() and choice["text"] in ("yes", "no")
    for row, kind in ((deep, "JSON Schema: "), (long, "")):
        assert row["error"]["code"] == "invalid_structured_output"
        assert row["error"]["message"].startswith(f"structured_outputs: {kind}it is chained or nested too deeply")


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def test_a_row_at_which_the_process_died_twice_is_an_error_row(tmp_path: Path) -> None:
    """One at which it died once is served; and each that is refused is a row that is done, however soon the process
    dies at the next: a server, which gives up where nothing is done, goes on."""
    output = tmp_path / "out"
    prompts = write_prompts(tmp_path / "in.jsonl", *({**GOOD, "custom_id": f"r{n}"} for n in range(5)))
    command = ("generate", prompts, "-o", output, *PLANNED)

    def dies(fault: str) -> bool:
        done = moelight(*command, env_extra={"MOELIGHT_FAULT": f"{fault}:kill"})
        return done.returncode == -signal.SIGKILL

    # A row is prepared twice: when it is counted, and when it is served.
    assert dies("row_0:1") and dies("row_1:2") and dies("row_1:1")
    assert names(tmp_path) == ["in.jsonl", "out", "out.deaths", "out.journal"]
    assert dies("row_3:1")
    past = read_record(journal_of(output))
    assert past is not None and (past.completed, past.failed) == (0, 1)
    assert dies("row_3:1")
    done = moelight_inside(*command)
    assert done.returncode == 1, done.stderr
    rows = read_rows(output.read_text())
    assert [row["custom_id"] for row in rows] == [f"r{n}" for n in range(5)]
    refused = [(row["line"], row["error"]["code"]) for row in rows if "error" in row]
    assert refused == [(2, "row_crashed"), (4, "row_crashed")]
    assert names(tmp_path) == ["in.jsonl", "out", "out.journal"]


@pytest.mark.thorough
@pytest.mark.usefixtures("forked")
def test_a_batch_with_a_row_that_ends_its_process_is_completed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOELIGHT_FAULT", "row_1:1:kill")  # of the jobs' processes; this one has read it
    result, refused = batch(tmp_path, DEMO, ["add 1 and 2 =", "add 5 and 6 =", "add 3 and 4 ="])
    assert (result.counts.total, result.counts.completed, result.counts.failed) == (3, 2, 1)
    assert (refused["custom_id"], refused["error"]["code"]) == ("r1", "row_crashed")


def die_at(path: Path, number: int) -> CrashGuard:
    """What a start finds behind one that was killed at row ``number``."""
    before = CrashGuard(path)
    with before.at(number):
        left = path.read_bytes()
    before.close(done=True)
    path.write_bytes(left)
    return CrashGuard(path)


def test_deaths_are_of_one_row_and_one_job(tmp_path: Path) -> None:
    path = tmp_path / "deaths"
    nobody = CrashGuard(path)
    with nobody.at(3):
        assert path.exists()
    nobody.close(done=False)
    assert not path.exists()
    assert die_at(path, 3).struck == die_at(path, 4).struck == frozenset()
    assert die_at(path, 3).struck == {3}
    assert CrashGuard(path, forget=True).struck == frozenset()
    twice = CrashGuard(path)
    with pytest.raises(InputError, match="died 2 times while this row was prepared"), twice.at(3):
        pass
    with twice.at(5):
        pass
    twice.close(done=False)
    assert CrashGuard(path).struck == {3}
    for damaged in (b"", b"\0", b"\0" * 8, b"\0" * 8 + b"[]", b"\xff" * 30):
        path.write_bytes(damaged)
        assert CrashGuard(path).struck == frozenset()


def test_where_deaths_cannot_be_kept_the_job_does_without(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    deaths = CrashGuard(tmp_path / "file" / "deaths")
    with deaths.at(1):
        pass
