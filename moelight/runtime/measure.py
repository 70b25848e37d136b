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
    peak = _number(entry(proc / "self/status", "VmHWM").removesuffix(" kB"))
    if peak is not None:
        return peak * 1024
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def current_rss_bytes() -> int:
    """Resident set now, with file-backed pages."""
    return int(psutil.Process().memory_info().rss)


def processor_name(*, proc: Path = PROC) -> str:
    """Model name of the processor."""
    return entry(proc / "cpuinfo", "model name") or platform.processor() or platform.machine()


def processor_quota(*, proc: Path = PROC) -> float | None:
    """Processors' worth of time that the control groups grant; None if they grant all."""
    granted = []
    for directory, version in _groups(proc, "cpu"):
        if version == 2:
            words = [*text_of(directory / "cpu.max").split(), "", ""][:2]
        else:
            words = [text_of(directory / f"cpu.cfs_{name}_us") for name in ("quota", "period")]
        quota, period = map(_number, words)
        if quota is not None and period:
            granted.append(quota / period)
    return min(granted, default=None)


def text_of(path: Path) -> str:
    """Contents of a file of the system; empty if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


def entry(path: Path, name: str, separator: str = ":") -> str:
    """Value of the first line ``name: value`` of a file of the system; empty if there is none."""
    for line in text_of(path).splitlines():
        key, _, value = line.partition(separator)
        if key.strip() == name:
            return value.strip()
    return ""


def _group_limits(proc: Path) -> Iterator[tuple[int, int]]:
    """``(limit, used)`` in bytes of every group with a limit, from this process's upwards, without page cache."""
    for directory, version in _groups(proc, "memory"):
        limit_file, usage_file, inactive = _GROUP_FILES[version]
        limit = _number(text_of(directory / limit_file))
        if limit is not None:
            used, cached = text_of(directory / usage_file), entry(directory / "memory.stat", inactive, " ")
            yield limit, max(0, (_number(used) or 0) - (_number(cached) or 0))


def _groups(proc: Path, controller: str) -> Iterator[tuple[Path, int]]:
    """Groups of ``controller`` from this process's up to the mount point, with the version of control groups."""
    paths = _paths_of_process(proc)
    for fstype, options, root, mount in _mounts(proc):
        if fstype == "cgroup2" and "" in paths:
            group, version = paths[""], 2
        elif fstype == "cgroup" and controller in options and controller in paths:
            group, version = paths[controller], 1
        else:
            continue
        # Inside a container the mount may show a subtree whose path the process's own file does not repeat.
        below = group[len(root) :] if root != "/" and group.startswith(root) else group
        directory = mount / below.strip("/")
        yield from ((parent, version) for parent in (directory, *directory.parents) if parent.is_relative_to(mount))


def _paths_of_process(proc: Path) -> dict[str, str]:
    paths = {}
    for line in text_of(proc / "self/cgroup").splitlines():
        _, _, rest = line.partition(":")
        controllers, separator, path = rest.partition(":")
        if separator and ".." not in path.split("/"):
            paths.update(dict.fromkeys(controllers.split(","), path))
    return paths


def _mounts(proc: Path) -> Iterator[tuple[str, list[str], str, Path]]:
    """``(fstype, super options, root, mount point)`` of every mounted control-group hierarchy."""
    for line in text_of(proc / "self/mountinfo").splitlines():
        left, _, right = line.partition(" - ")
        fields, types = left.split(), right.split()
        if len(fields) >= 5 and len(types) >= 3 and types[0] in ("cgroup", "cgroup2"):
            yield types[0], types[2].split(","), fields[3], Path(fields[4].replace("\\040", " "))


def _number(text: str) -> int | None:
    return int(text) if text.isdecimal() else None
