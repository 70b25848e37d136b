"""The GPU's kernels compile for cards that are not here: into the instructions and the shared memory they should."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from moelight.kernels.gpu import serving, tiles

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
@pytest.mark.parametrize("card", [80, *(pytest.param(card, marks=pytest.mark.cards) for card in (75, 86, 89, 90, 100))])
def test_compiles(card: int, tmp_path: Path) -> None:
    if not serving.triton_available():
        pytest.skip(serving.triton_reason())
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": os.pathsep.join((str(ROOT), *sys.path))}
    ran = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.kernels.compile_gpu", str(card)],
        check=False,
        capture_output=True,
        text=True,
        env=environment,
        cwd=ROOT,
        timeout=3600,  # a hang, not a slow machine
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    rows = json.loads(ran.stdout.splitlines()[-1])
    others = {"map", "route", "combine", "append", "append int8", "fetch"}
    products = [row for row in rows if row["what"] not in others]
    assert len(products) < len(rows)
    for row in rows:
        assert row["shared"] <= tiles.shared_bytes(divmod(card, 10)), row
        assert row["spilled"] <= 64, row
    for row in products:
        if card >= 80 and not row["what"].startswith("fp32"):
            assert row["cp.async"], f"loads do not run ahead: {row}"
            assert row["mma.sync"] or row["wgmma"] or row["tcgen05.mma"], f"no tensor units: {row}"
