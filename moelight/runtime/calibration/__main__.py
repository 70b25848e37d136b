"""``python -m moelight.runtime.calibration DEVICE DIRECTORY FILE``: a quick measurement in a process of its own.

What measuring takes of memory, and what libraries keep of it, is then nobody else's. Used by ``machine_profile``.
"""

from __future__ import annotations

import sys
from pathlib import Path

from moelight.core.errors import UserError
from moelight.profiles.hardware_text import write_hardware_profile
from moelight.runtime.calibration.effort import QUICK
from moelight.runtime.calibration.machine import measure_machine
from moelight.runtime.machine import find_machine


def run_calibration(device: str, directory: str, file: str) -> int:
    """Measure; 2 and one line on stderr where that cannot be."""
    try:
        found = measure_machine(find_machine(device), QUICK, name="auto", disk_dir=Path(directory), disk_needed=False)
        write_hardware_profile(found, Path(file))
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(run_calibration(*sys.argv[1:]))
