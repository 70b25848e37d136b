"""Memory that exists, is allowed and is used, and the processor's name and quota, from /proc, control groups (both
versions) and getrusage. Never imports torch."""

from __future__ import annotations

import platform
import resource
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil

PROC = Path("/proc")
# By version of control groups: the files of the limit and of the usage, and the entry of memory.stat for page cache.
_GROUP_FILES = {
    1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    2: ("memory.max", "memory.current", "inactive_file"),
}


def physical_bytes() -> int:
    """RAM of the machine."""
    return int(psutil.virtual_memory().total)


def memory_limit_bytes(*, proc: Path = PROC) -> int:
    """RAM, or a smaller limit of this process's control group or any group above it."""
    return min([physical_bytes(), *(limit for limit, _ in _group_limits(proc))])


def available_bytes(*, proc: Path = PROC) -> int:
    """Bytes that can be allocated now without swapping or reaching a control group's limit."""
    rooms = [max(0, limit - used) for limit, used in _group_limits(proc)]
    return min([int(psutil.virtual_memory().available), *rooms])


def peak_rss_bytes(*, proc: Path = PROC) -> int:
    """Largest resident set so far, with file-backed pages: VmHWM, because ``ru_maxrss`` includes the parent."""
    try:
        for line in (proc / "self/status").read_text(encoding="utf-8").splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        pass
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def current_rss_bytes() -> int:
    """Resident set now, with file-backed pages."""
    return int(psutil.Process().memory_info().rss)


def processor_name(*, proc: Path = PROC) -> str:
    """Model name of the processor."""
    for line in _lines(proc / "cpuinfo"):
        name, _, value = line.partition(":")
        if name.strip() == "model name":
            return value.strip()
    return platform.processor() or platform.machine()


def processor_quota(*, proc: Path = PROC) -> float | None:
    """Processors' worth of time that the control groups grant; None if they grant all."""
    granted = []
    for directory, version in _groups(proc, "cpu"):
        if version == 2:
            quota, _, period = "".join(_lines(directory / "cpu.max")).strip().partition(" ")
        else:
            quota, period = ("".join(_lines(directory / f"cpu.cfs_{name}_us")).strip() for name in ("quota", "period"))
        if quota.isdecimal() and period.isdecimal() and int(period):
            granted.append(int(quota) / int(period))
    return min(granted, default=None)


def _group_limits(proc: Path) -> Iterator[tuple[int, int]]:
    """``(limit, used)`` in bytes of every group with a limit, from this process's upwards, without page cache."""
    for directory, version in _groups(proc, "memory"):
        limit_file, usage_file, inactive = _GROUP_FILES[version]
        limit = _number(directory / limit_file)
        if limit is not None:
            used = (_number(directory / usage_file) or 0) - _inactive_bytes(directory, inactive)
            yield limit, max(0, used)


def _groups(proc: Path, controller: str) -> Iterator[tuple[Path, int]]:
    """Groups of ``controller`` from this process's up to the mount point, with the version of control groups."""
    paths = _paths_of_process(proc)
    for fstype, options, root, mount in _mounts(proc):
        if fstype == "cgroup2" and "" in paths:
            own, version = paths[""], 2
        elif fstype == "cgroup" and controller in options and controller in paths:
            own, version = paths[controller], 1
        else:
            continue
        # Inside a container the mount may show a subtree whose path the process's own file does not repeat.
        below = own[len(root) :] if root != "/" and own.startswith(root) else own
        directory = mount / below.strip("/")
        while True:
            yield directory, version
            if directory == mount:
                break
            directory = directory.parent


def _paths_of_process(proc: Path) -> dict[str, str]:
    paths = {}
    for line in _lines(proc / "self/cgroup"):
        _, _, rest = line.partition(":")
        controllers, found, path = rest.partition(":")
        if found and ".." not in path.split("/"):
            paths.update(dict.fromkeys(controllers.split(","), path))
    return paths


def _mounts(proc: Path) -> Iterator[tuple[str, list[str], str, Path]]:
    """``(fstype, super options, root, mount point)`` of every mounted control-group hierarchy."""
    for line in _lines(proc / "self/mountinfo"):
        left, _, right = line.partition(" - ")
        fields, types = left.split(), right.split()
        if len(fields) >= 5 and len(types) >= 3 and types[0] in ("cgroup", "cgroup2"):
            yield types[0], types[2].split(","), fields[3], Path(fields[4].replace("\\040", " "))


def _inactive_bytes(directory: Path, entry: str) -> int:
    for line in _lines(directory / "memory.stat"):
        name, _, value = line.partition(" ")
        if name == entry and value.strip().isdecimal():
            return int(value)
    return 0


def _number(path: Path) -> int | None:
    text = "".join(_lines(path)).strip()
    return int(text) if text.isdecimal() else None


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
