"""The GPU's kernels compile for cards that are not here: into the instructions and the shared memory they should."""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from moelight.kernels.gpu import grouped_cuda, serving, tiles
from tests.cases import thorough
from tests.kernels.turing import BFLOAT, HALF

ROOT = Path(__file__).resolve().parents[2]
# Bytes that a product of rows rounded to int8 may spill: 7 of 54 do for 8.0 and 4 for 9.0, at most 76 (docs/log.md).
SPILLED_BY_INTEGERS = 128


@pytest.mark.parametrize(
    ("cards", "variants"),
    thorough([("80", "few"), ("75,80,86", "whole"), ("89,90,100", "whole")], but=[]),
)
def test_compiles(cards: str, variants: str, tmp_path: Path) -> None:
    if not serving.triton_available():
        pytest.skip(serving.triton_reason())
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": os.pathsep.join((str(ROOT), *sys.path))}
    ran = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.kernels.compile_gpu", cards, variants],
        check=False,
        capture_output=True,
        text=True,
        env=environment,
        cwd=ROOT,
        timeout=3600,  # a hang, not a slow machine
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    rows = json.loads(ran.stdout.splitlines()[-1])["rows"]
    products = [row for row in rows if " gate_up " in row["what"] or " down " in row["what"]]
    products += [row for row in rows if " attention " in row["what"] and not row["what"].startswith("fp32")]
    assert {row["card"] for row in products} == {int(card) for card in cards.split(",")}
    for row in rows:
        assert row["shared"] <= tiles.shared_bytes(divmod(row["card"], 10)), row
        assert row["spilled"] <= (SPILLED_BY_INTEGERS if row["what"].startswith("int8 ") else 0), row
    for row in products:
        if row["card"] >= 80:
            assert row["cp.async"], f"loads do not run ahead: {row}"
            assert row["mma.sync"] or row["wgmma"] or row["tcgen05.mma"], f"no tensor units: {row}"


@pytest.mark.thorough
def test_record(tmp_path: Path) -> None:
    """Programs are not compiled again where the record has them, and one that is compiled is as the record says."""
    if not serving.triton_available():
        pytest.skip(serving.triton_reason())
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": os.pathsep.join((str(ROOT), *sys.path))}
    script = """
import json, triton
from tests.kernels import compile_gpu
triton.knobs.nvidia.dump_ptxas_log = True
recorded = json.loads(compile_gpu.RECORD.read_text())
row = compile_gpu.attend(80, compile_gpu.torch.float16, 128, 4, decodes=True, options="")
((key, values),) = compile_gpu.records.items()
compile_gpu.compile_program = None
assert compile_gpu.attend(80, compile_gpu.torch.float16, 128, 4, decodes=True, options="") == row
print(json.dumps([recorded.get(key), values]))
"""
    command = [sys.executable, "-W", "ignore", "-c", script]
    ran = subprocess.run(command, check=False, capture_output=True, text=True, env=environment, cwd=ROOT, timeout=3600)
    assert ran.returncode == 0, ran.stderr[-3000:]
    recorded, values = json.loads(ran.stdout.splitlines()[-1])
    assert recorded in (None, values), "make compiled"


@pytest.mark.parametrize("stored", [BFLOAT, pytest.param(HALF, marks=pytest.mark.thorough)])
@pytest.mark.parametrize("gated", [True, False])
def test_cuda_kernel_compiles(stored: int, gated: bool, tmp_path: Path, monkeypatch) -> None:
    """NVRTC takes `grouped_turing.cu` without any header; two blocks fit a multiprocessor, and nothing spills."""
    if not serving.triton_available():
        pytest.skip(f"cuobjdump comes with it: {serving.triton_reason()}")
    try:
        grouped_cuda.nvrtc()
    except OSError as error:
        pytest.skip(str(error))
    monkeypatch.setenv("MOELIGHT_CACHE", str(tmp_path))
    variant = grouped_cuda.Variant(stored=stored, gated=gated, rows=grouped_cuda.SLOT_ROWS, aligned=True)
    image = grouped_cuda.binary(variant)
    (retained,) = (tmp_path / "kernels").iterdir()
    assert retained.read_bytes() == grouped_cuda.binary(variant) == image
    tool = Path(importlib.import_module("triton").__file__ or "").parent / "backends/nvidia/bin/cuobjdump"
    message, code = (
        subprocess.run([tool, flag, retained], check=True, capture_output=True, text=True).stdout
        for flag in ("-res-usage", "-sass")
    )
    used = {name: int(number) for name, number in re.findall(r"(REG|STACK|SHARED|LOCAL):(\d+)", message)}
    assert used["STACK"] == used["LOCAL"] == 0, message
    assert used["REG"] * 2 * grouped_cuda.THREADS <= 1 << 16, message
    assert used["SHARED"] * 2 <= 64 << 10, message
    assert "HMMA.1688.F32" in code and "LDSM" in code
    assert not re.search(r"\b(LDL|STL)\b", code)
