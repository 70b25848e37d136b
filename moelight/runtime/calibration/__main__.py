"""``python -m moelight.runtime.calibration DEVICE DIRECTORY FILE``: a quick measurement in a process of its own.

Memory taken by the measurement, or cached by libraries, ends with the process. Used by ``machine_profile``.
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
    """Measure and write the profile. Return 0, or 2 with one line on stderr if the measurement fails."""
    try:
        found = measure_machine(find_machine(device), QUICK, name="auto", disk_dir=Path(directory), disk_needed=False)
        write_hardware_profile(found, Path(file))
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(run_calibration(*sys.argv[1:]))
