"""The transposition of transposed weights, for instruction sets that multiply rows; compiled for the host."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.kernels.conftest import ISAS
from tests.kernels.turing import COMPILER

HERE = Path(__file__).parent


@pytest.mark.thorough
@pytest.mark.skipif(COMPILER is None or "avx512" not in ISAS, reason="needs a C++ compiler and AVX-512")
def test_columns_become_rows(tmp_path: Path) -> None:
    program = tmp_path / "transpose"
    flags = ["-std=c++20", "-O1", "-Wall", "-Wno-uninitialized", "-Wno-maybe-uninitialized", "-fsanitize=address"]
    flags += ["-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", f"-I{HERE.parents[1] / 'csrc' / 'include'}"]
    built = subprocess.run(
        [str(COMPILER), *flags, str(HERE / "transpose_on_host.cpp"), "-o", str(program)],
        check=False,
        capture_output=True,
        text=True,
    )
    assert built.returncode == 0, built.stderr[-3000:]
    ran = subprocess.run([str(program)], check=False, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout + ran.stderr[-3000:]
