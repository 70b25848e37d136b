"""``moelight policy``: what it prints, writes and returns."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from moelight.experts.policy import EVICTIONS
from tests.cli.program import ROOT, moelight, moelight_inside
from tests.cli.test_startup import check_without_torch

CORPUS = ROOT / "tests" / "lang" / "corpus"
EXAMPLES = sorted((ROOT / "examples" / "policies").glob("*.moe"))
SOUND = "policy p {\n    cache {\n        capacity = 4\n    }\n}\n"
WARNED = "policy w { cache { capacity = 4 } prefetch { budget = 2 } }\n"
WRONG = "policy p {\n    cache {\n\tcapacty = 4\n        eviction = LRU\n    }\n}\n"


def written(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def test_sound_files(tmp_path: Path) -> None:
    done = moelight("policy", "check", *EXAMPLES)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.count("all is well") == len(EXAMPLES) >= 7


def test_errors_with_line_and_caret(tmp_path: Path) -> None:
    known_names = ", ".join((*EVICTIONS, "fallback"))
    path = written(tmp_path / "wrong.moe", WRONG)
    done = moelight_inside("policy", "check", path)
    assert (done.returncode, done.stderr) == (1, "")
    assert (
        done.stdout
        == f"""\
{path}:3:2: error[unknown_key]: cache has no key 'capacty' (did you mean 'capacity'?)
    3 |  capacty = 4
      |  ^^^^^^^

{path}:4:20: error[unknown_value]: 'LRU' is no value of eviction (did you mean 'lru'?); known: {known_names}
    4 |         eviction = LRU
      |                    ^^^

2 errors and no warnings in 1 file
"""
    )


def test_warnings_are_no_errors(tmp_path: Path) -> None:
    done = moelight_inside("policy", "check", written(tmp_path / "w.moe", WARNED))
    assert done.returncode == 0
    assert "warning[unread]: budget is read only by a strategy other than none" in done.stdout
    assert done.stdout.endswith("no errors and 1 warning in 1 file\n")


def test_json_has_a_row_for_each_file_in_order(tmp_path: Path) -> None:
    files = [
        written(tmp_path / "wrong.moe", WRONG),
        written(tmp_path / "sound.moe", SOUND),
        written(tmp_path / "warned.moe", WARNED),
    ]
    done = moelight_inside("policy", "check", *files, "--json")
    rows = json.loads(done.stdout)
    assert (done.returncode, done.stderr) == (1, "")
    assert [row["file"] for row in rows] == [str(file) for file in files]
    assert [row["ok"] for row in rows] == [False, True, True]
    assert all(list(row) == ["file", "ok", "errors", "warnings"] for row in rows)
    assert [(e["code"], e["line"], e["column"]) for e in rows[0]["errors"]] == [
        ("unknown_key", 3, 2),
        ("unknown_value", 4, 20),
    ]
    assert rows[1] == {"file": str(files[1]), "ok": True, "errors": [], "warnings": []}
    (warning,) = rows[2]["warnings"]
    assert list(warning) == ["code", "line", "column", "message"] and warning["code"] == "unread"


def test_json_names_files_as_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written(tmp_path / "p.moe", SOUND)
    monkeypatch.chdir(tmp_path)
    done = moelight_inside("policy", "check", "./p.moe", ".//p.moe", "--json")
    assert [row["file"] for row in json.loads(done.stdout)] == ["./p.moe", ".//p.moe"]


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    missing, sound = tmp_path / "none.moe", written(tmp_path / "sound.moe", SOUND)
    done = moelight_inside("policy", "check", missing, sound, "--json")
    rows = json.loads(done.stdout)
    assert done.returncode == 2
    assert [(row["ok"], [error["code"] for error in row["errors"]]) for row in rows] == [
        (False, ["unreadable"]),
        (True, []),
    ]
    assert done.stderr == f"moelight: error: {missing}: cannot be read: No such file or directory\n"
    for command in ("format", "explain"):
        done = moelight_inside("policy", command, tmp_path)
        assert (done.returncode, done.stdout) == (2, "")
        assert "cannot be read" in done.stderr and done.stderr.count("\n") == 1


def test_format(tmp_path: Path) -> None:
    path = written(tmp_path / "p.moe", "policy p { # why\n cache { capacity=4 } }")
    laid_out = SOUND.replace("p {", "p {  # why", 1)
    assert moelight_inside("policy", "format", path).stdout == laid_out
    done = moelight_inside("policy", "format", path, "--check")
    assert done.returncode == 1 and "not formatted" in done.stdout
    path.chmod(0o640)
    done = moelight_inside("policy", "format", path, "--write")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert path.read_text(encoding="utf-8") == laid_out
    assert path.stat().st_mode & 0o777 == 0o640
    assert [path.name for path in tmp_path.iterdir()] == ["p.moe"]
    assert moelight_inside("policy", "format", path, "--check").returncode == 0
    assert moelight_inside("policy", "format", path, "--check", "--write").returncode == 2


def test_format_leaves_a_wrong_file_alone(tmp_path: Path) -> None:
    path = written(tmp_path / "wrong.moe", WRONG)
    done = moelight_inside("policy", "format", path, "--write")
    assert done.returncode == 1 and "unknown_key" in done.stdout
    assert path.read_text(encoding="utf-8") == WRONG


def test_explain_in_words(tmp_path: Path) -> None:
    done = moelight_inside("policy", "explain", CORPUS / "good" / "every_key.moe")
    message = " ".join(done.stdout.split())
    assert done.returncode == 0
    for words in ("policy all_of_it", "capacity = 64", "ttl = 1", "evict by slru", "96 experts in all"):
        assert words in message
    assert "warning[pointless]" in message


def test_explain_says_something_of_every_line() -> None:
    from moelight.lang.explain import meanings
    from moelight.lang.files import load_expert_policy

    for path in EXAMPLES:
        for meaning in meanings(load_expert_policy(path)):
            assert meaning.line and meaning.words and "{" not in meaning.words, path


def test_explain_counts_memory(tmp_path: Path) -> None:
    path = written(tmp_path / "p.moe", SOUND.replace("4", "25%"))
    message = " ".join(
        moelight_inside("policy", "explain", path, "--model", "mixtral-8x7b", "--hw", "t4").stdout.split()
    )
    assert "64 of 256 experts (25.0%) have room, 21.0GiB at 336.0MiB each" in message
    assert "does not fit" in message  # 15 GiB of a T4
    message = " ".join(moelight_inside("policy", "explain", path, "--model", "demo", "--hw", "cpu-avx2").stdout.split())
    assert "8 of 32 experts" in message and "does not fit" not in message
    done = moelight_inside("policy", "explain", path, "--hw", "t4")
    assert done.returncode == 2 and "--model" in done.stderr


def test_policy_commands_need_no_torch(tmp_path: Path) -> None:
    path = str(written(tmp_path / "p.moe", SOUND))
    explain = ["policy", "explain", path, "--model", "demo", "--hw", "t4"]
    check_without_torch(["policy", "check", path], ["policy", "format", path], explain)
    assert "check" in moelight_inside("policy").stdout


def test_checking_imports_neither_numpy_nor_rich(tmp_path: Path) -> None:
    code = (
        "import sys; from moelight.cli.main import main; code = main(sys.argv[1:]); "
        "print(code, sorted({'torch', 'numpy', 'rich', 'yaml'} & set(sys.modules)), file=sys.stderr)"
    )
    path = str(written(tmp_path / "p.moe", SOUND))
    done = subprocess.run(
        [sys.executable, "-c", code, "policy", "check", path], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stderr == "0 []\n"
