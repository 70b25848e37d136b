"""What a process imports to run module graphs, and that what was left out is there for whoever wants it."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytest.importorskip("transformers")
pytest.importorskip("greenlet")

CHILD = """
import importlib.util, logging, sys
from moelight.models.graph.imports import transformers_of_graphs
transformers_of_graphs()
import torch
if not torch.accelerator.is_available():
    assert "triton" not in sys.modules
    if importlib.util.find_spec("triton") is not None:
        import triton
        assert torch.utils._triton.has_triton_package()
if importlib.util.find_spec("scipy") is not None:
    assert "scipy.optimize" not in sys.modules
    from transformers.loss.loss_for_object_detection import linear_sum_assignment
    assert linear_sum_assignment([[1, 0], [0, 1]])[1].tolist() == [1, 0]
    from scipy.optimize import linear_sum_assignment as theirs
    assert theirs is sys.modules["scipy.optimize"].linear_sum_assignment
assert logging.root.manager.disable == 0
"""


@pytest.mark.thorough
def test_compilers_and_solvers_are_imported_only_by_who_uses_them() -> None:
    done = subprocess.run([sys.executable, "-c", CHILD], check=False, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
