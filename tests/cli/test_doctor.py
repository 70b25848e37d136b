"""``moelight doctor`` says what there is, for people and for programs, with and without the extension."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
import torch

from moelight import __version__
from moelight.cli import doctor
from moelight.cli.doctor import machine_facts, machine_lines
from moelight.core.units import format_bytes
from moelight.kernels import native, variants
from moelight.kernels.gpu import serving as gpu_serving
from moelight.kernels.native import serving
from moelight.runtime.topology import PciSlot
from tests.cli.program import DEMO, ROOT, moelight, moelight_inside
from tests.runtime.machines import topology


def test_facts_as_json() -> None:
    done = moelight("doctor", "--json")
    assert (done.returncode, done.stderr) == (0, "")
    result = json.loads(done.stdout)
    assert result["moelight"] == __version__
    assert result["libraries"]["torch"].split("+")[0] == torch.__version__.split("+")[0]
    assert result["extension"]["available"] == native.available()
    operations = [*(row.operation for row in serving()), *variants.chosen()]
    assert [row["operation"] for row in result["kernels"]] == operations
    memory = result["memory"]
    assert 0 < memory["available_bytes"] <= memory["limit_bytes"] <= memory["physical_bytes"]
    assert 1 <= result["processor"]["usable"] <= result["processor"]["threads"] <= os.cpu_count()
    assert result["torch"]["fault"] is None
    cores, threads = result["cores"], result["threads"]
    assert cores["processors"] == result["processor"]["usable"] >= cores["usable"] == len(cores["places"])
    assert threads["compute"]["threads"] >= 1 and threads["reason"]
    assert result["numa"]["placement"]["kind"] in ("anywhere", "bound", "interleaved")
    assert result["huge_pages"] in ("always", "madvise", "never", None)
    assert result["direct_reads"]["directory"] == str(ROOT)


def test_files_of_a_model_are_tried() -> None:
    result = json.loads(moelight_inside("doctor", "--model", "demo", "--json").stdout)
    assert result["direct_reads"]["directory"] == str(DEMO)
    assert result["direct_reads"]["direct"] in ((True, False) if native.available() else (False,))
    weights = sum(file.stat().st_size for file in DEMO.glob("*.safetensors"))
    assert result["numa"]["placement"]["for_bytes"] == weights > 0


def test_a_directory_without_weights_is_tried_with_a_file_that_goes_again(tmp_path: Path) -> None:
    result = machine_facts(2, [], tmp_path)["direct_reads"]
    assert (result["directory"], result["direct"] is None) == (str(tmp_path), False)
    assert list(tmp_path.iterdir()) == []
    missing = machine_facts(2, [], tmp_path / "gone")["direct_reads"]
    if native.available():
        assert missing["direct"] is None and "gone" in missing["reason"]


def test_no_such_model_is_refused() -> None:
    done = moelight_inside("doctor", "--model", "owner/name")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "moelight: error: --model owner/name: no such directory\n"


def test_a_big_machine_with_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    present = topology(16, nodes=2, siblings=2)
    monkeypatch.setattr(doctor, "read_topology", lambda: present)
    monkeypatch.setattr(doctor, "why_not_placed", lambda: None)
    result = machine_facts(16, [PciSlot(address="0000:81:00.0", node=1, bytes_per_s=31.5e9)], DEMO)
    weights = result["numa"]["placement"]["for_bytes"]
    lines = [f"{name}: {line}" for name, line in machine_lines(json.loads(json.dumps(result)))]
    assert lines[:5] == [
        "threads: 16 threads, each bound to its core: 4 to stage pages, 11 to compute, 1 core left to launch work",
        "NUMA: node 0: 64.0GiB, 48.0GiB available",
        ": node 1: 64.0GiB, 48.0GiB available",
        ": device at 0000:81:00.0: node 1, its link carries 32 GB/s",
        f"host memory: bound: node 1, the device's, has room for {format_bytes(weights)}",
    ]
    assert any(line.startswith("pinning: ulimit -l: ") for line in lines)
    unknown = machine_facts(16, [PciSlot(address="0000:81:00.0")], None)
    assert unknown["numa"]["placement"]["kind"] == "interleaved"
    assert ("", "device at 0000:81:00.0: an unknown node") in list(machine_lines(unknown))


def test_facts_for_people() -> None:
    done = moelight("doctor")
    assert (done.returncode, done.stderr) == (0, "")
    for row in serving():
        assert row.operation in done.stdout
    said_too = ("threads", "NUMA", "host memory", "huge pages", "direct reads", "no quota")
    for message in (
        "moelight",
        "torch",
        "memory",
        "physical",
        "instructions",
        "kernels",
        "served by",
        "why",
        *said_too,
    ):
        assert message in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 100


def test_a_missing_extension_is_said_with_what_to_do() -> None:
    done = moelight("doctor", module="tests.cli.without_extension")
    assert done.returncode == 0
    line = done.stdout.splitlines()[0]
    assert line.startswith("no native kernels: the extension was not built; torch's serve") and "pip install" in line
    assert "avx512 of" not in done.stdout


@pytest.mark.parametrize(
    "command",
    [
        ("generate", "missing.jsonl", "-m", "demo"),
        ("serve-batch", "-m", "missing"),
        pytest.param(("lm-eval", "--model", "unknown"), marks=pytest.mark.thorough),  # imports the harness
        ("compare", "demo", "missing.jsonl", "--against", "demo"),
        ("convert", "missing", "out"),
    ],
)
@pytest.mark.usefixtures("without_extension")
def test_commands_that_compute_say_it_in_their_first_line(command: tuple[str, ...], tmp_path: Path) -> None:
    done = moelight_inside(
        *(tmp_path / word if word in ("missing", "missing.jsonl", "out") else word for word in command)
    )
    first = done.stderr.splitlines()[0]
    assert done.returncode == 2 and first.startswith("moelight: no native kernels: a test hides the extension; torch's")
    assert "pip install" in first


def test_a_broken_torch_is_a_fact_and_no_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    result = doctor.facts()
    assert result["torch"]["fault"]
    doctor.print_facts(result)
    assert "does not load" in capsys.readouterr().out


def test_a_limit_below_the_physical_memory_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    result = doctor.facts()
    result["memory"]["limit_bytes"] = 1 << 30
    doctor.print_facts(result)
    assert "1.0GiB is the limit of this control group" in capsys.readouterr().out


def test_a_devices_attention_has_a_server_and_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    for served, names in ((False, ("torch", "copies by run of blocks")), (True, ("triton", "one kernel"))):
        monkeypatch.setattr(gpu_serving, "serves", lambda *_, served=served: (served, "because"))
        rows = list(doctor._on_devices([{"id": "cpu"}]))
        result = {row.operation: (row.implementation, row.reason) for row in rows}
        assert result["attention on cpu"] == (names[0], "because")
        assert result["contexts from host memory on cpu"] == (names[1], "because")
    assert not list(doctor._on_devices([]))
