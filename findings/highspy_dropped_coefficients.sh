#!/usr/bin/env bash
# HiGHS drops matrix coefficients of magnitude up to small_matrix_value (1e-9) and still says kOptimal: the answer to a
# model scaled that way breaks its own constraint. addRow returns kWarning, which is easily overlooked; the solution and the
# model status are those of the model without the coefficients.
# A guess from memory would be: coefficients are kept, or the status says that the model was changed.
# Runs highspy alone, in a temporary environment; exits non-zero if the behaviour changes.
set -euo pipefail
place=$(mktemp -d); trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/venv"
"$place/venv/bin/pip" install -q highspy==1.15.1
"$place/venv/bin/python" - <<'P'
import importlib.metadata

import highspy
import numpy as np


def solve(coefficient):
    """Maximise x <= 1e12 under coefficient * x <= 1."""
    model = highspy.Highs()
    model.setOptionValue("output_flag", False)
    model.addVar(0.0, 1e12)
    model.changeColCost(0, -1.0)
    added = model.addRow(-highspy.kHighsInf, 1.0, 1, np.array([0], dtype=np.int32), np.array([coefficient]))
    model.run()
    x = model.getSolution().col_value[0]
    return added, model.getModelStatus(), x, coefficient * x, model.getLp().a_matrix_.value_


print("highspy", importlib.metadata.version("highspy"))
for coefficient in (1e-8, 1e-9):
    added, status, x, row, stored = solve(coefficient)
    print(f"{coefficient:g} x <= 1: addRow {added.name}, {status.name}, x = {x:g}, so the row is {row:g}; stored {list(stored)}")
kept, dropped = solve(1e-8), solve(1e-9)
assert kept[0] == highspy.HighsStatus.kOk and kept[3] <= 1 + 1e-6, kept
assert dropped[0] == highspy.HighsStatus.kWarning, dropped
assert dropped[1] == highspy.HighsModelStatus.kOptimal and dropped[3] > 900, dropped
P
