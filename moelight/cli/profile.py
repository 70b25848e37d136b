"""``moelight profile``: measure this machine, print the hardware profile and save it for ``--hw``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from moelight.core.errors import ConfigError

if TYPE_CHECKING:
    from moelight.profiles.hardware import HardwareProfile
    from moelight.runtime.calibration.effort import Effort


_Output = Annotated[
    Path | None,
    typer.Option("--output", "-o", metavar="FILE.yaml", help="The profile; kept for --hw auto if not given."),
]
_Device = Annotated[str, typer.Option(help="auto, cpu, cuda or xpu.")]
_Quick = Annotated[bool, typer.Option("--quick", help="In about ten seconds, with fewer points.")]
_DiskDir = Annotated[
    Path | None,
    typer.Option(metavar="DIR", help="On the disk that models come from; the current directory if not given."),
]


def profile(output: _Output = None, device: _Device = "auto", quick: _Quick = False, disk_dir: _DiskDir = None) -> None:
    """Measure this machine in about a minute: memory, processor, disk, and a GPU and its link.

    Prints what was found. The profile is written to FILE.yaml, which --hw then takes, or kept where --hw auto finds it.
    Leave the machine alone meanwhile: other programs make it look slower than it is.
    """
    from moelight.cli.profile_view import print_profile
    from moelight.cli.tables import open_console
    from moelight.profiles.hardware_text import write_hardware_profile
    from moelight.runtime.calibration.effort import FULL, QUICK
    from moelight.runtime.machine_profile import AUTO, COMMENTS, kept_path

    _check(output, disk_dir)
    path = kept_path(device) if output is None else output
    found = _measured(
        QUICK if quick else FULL, device=device, name=AUTO if output is None else path.stem, disk_dir=disk_dir
    )
    write_hardware_profile(found, path, comments=COMMENTS)
    print_profile(open_console(), found)
    _say_where(path, kept=output is None)


def _check(output: Path | None, disk_dir: Path | None) -> None:
    """Validate the paths before the measurement, which takes a minute.

    Raises:
        ConfigError: a path cannot be used.
    """
    if output is not None and output.suffix not in (".yaml", ".yml"):
        raise ConfigError(f"--output {output}: a profile is a .yaml file, or --hw would take it for a name")
    if output is not None and not output.parent.is_dir():
        raise ConfigError(f"--output {output}: there is no directory {output.parent}")
    if disk_dir is not None and not disk_dir.is_dir():
        raise ConfigError(f"--disk-dir {disk_dir}: no such directory")


def _measured(effort: Effort, *, device: str, name: str, disk_dir: Path | None) -> HardwareProfile:
    """Measure the machine; the current step is shown on stderr if stderr is a terminal."""
    from rich.console import Console

    from moelight.runtime.calibration.machine import measure_machine
    from moelight.runtime.machine import find_machine

    console = Console(stderr=True, highlight=False, markup=False)
    with console.status("looking around") as status:
        return measure_machine(
            find_machine(device),
            effort,
            name=name,
            disk_dir=disk_dir or Path.cwd(),
            disk_needed=disk_dir is not None,
            say=status.update,
        )


def _say_where(path: Path, *, kept: bool) -> None:
    use = "--hw auto uses it" if kept else f"use it with --hw {path}"
    print(f"moelight: wrote {path}; {use}", file=sys.stderr)
