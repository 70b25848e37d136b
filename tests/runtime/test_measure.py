"""Memory facts: real ones are plausible, control groups of both versions are read from invented trees."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from moelight.runtime import measure

UNLIMITED_V1 = 9223372036854771712
MiB = 1 << 20


def machine(tmp_path: Path, cgroup: str, mounts: list[str]) -> Path:
    proc = tmp_path / "proc"
    (proc / "self").mkdir(parents=True)
    (proc / "self" / "cgroup").write_text(cgroup)
    (proc / "self" / "mountinfo").write_text("".join(f"{mount}\n" for mount in mounts))
    return proc


def group(directory: Path, **files: int | str) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    for name, value in files.items():
        (directory / name.replace("__", ".")).write_text(f"{value}\n")


def mount_v2(point: Path, root: str = "/") -> str:
    return f"41 31 0:38 {root} {point} rw,relatime shared:9 - cgroup2 cgroup2 rw,nsdelegate"


def mount_v1(point: Path, root: str = "/", controllers: str = "memory") -> str:
    return f"35 31 0:32 {root} {point} rw,relatime - cgroup cgroup rw,{controllers}"


def test_no_control_groups(tmp_path: Path) -> None:
    assert measure.memory_limit_bytes(proc=tmp_path) == measure.physical_bytes()
    assert 0 < measure.available_bytes(proc=tmp_path) <= measure.physical_bytes()


def test_version_2_takes_the_smallest_limit_on_the_way_up(tmp_path: Path) -> None:
    root = tmp_path / "cgroup"
    proc = machine(tmp_path, "0::/a/b\n", [mount_v2(root)])
    group(root / "a" / "b", memory__max="max", memory__current=5 * MiB)
    group(root / "a", memory__max=64 * MiB, memory__current=40 * MiB, memory__stat=f"anon 1\ninactive_file {8 * MiB}")
    group(root)
    assert measure.memory_limit_bytes(proc=proc) == 64 * MiB
    assert measure.available_bytes(proc=proc) == 32 * MiB
    group(root / "a" / "b", memory__max=16 * MiB)
    assert measure.memory_limit_bytes(proc=proc) == 16 * MiB
    assert measure.available_bytes(proc=proc) == 11 * MiB


def test_version_1_takes_the_smallest_limit_on_the_way_up(tmp_path: Path) -> None:
    root, other = tmp_path / "memory", tmp_path / "cpu"
    proc = machine(
        tmp_path,
        "4:memory:/x/y\n2:cpu,cpuacct:/z\n1:name=systemd:/\n",
        [mount_v1(other, controllers="cpu"), mount_v1(root)],
    )
    group(root / "x" / "y", memory__limit_in_bytes=UNLIMITED_V1, memory__usage_in_bytes=1)
    group(
        root / "x",
        memory__limit_in_bytes=32 * MiB,
        memory__usage_in_bytes=20 * MiB,
        memory__stat=f"inactive_file 5\ntotal_inactive_file {4 * MiB}",
    )
    group(other / "x" / "y", memory__limit_in_bytes=1)
    assert measure.memory_limit_bytes(proc=proc) == 32 * MiB
    assert measure.available_bytes(proc=proc) == 16 * MiB


def test_a_quota_of_time_is_the_smallest_on_the_way_up(tmp_path: Path) -> None:
    root = tmp_path / "cgroup"
    proc = machine(tmp_path, "0::/a/b\n", [mount_v2(root)])
    group(root / "a" / "b", cpu__max="max 100000")
    group(root)
    assert measure.processor_quota(proc=proc) is None
    group(root / "a", cpu__max="150000 100000")
    assert measure.processor_quota(proc=proc) == 1.5
    group(root / "a" / "b", cpu__max="50000 100000")
    assert measure.processor_quota(proc=proc) == 0.5


def test_a_quota_of_version_1(tmp_path: Path) -> None:
    root = tmp_path / "cpu"
    proc = machine(tmp_path, "2:cpu,cpuacct:/z\n4:memory:/x\n", [mount_v1(root, controllers="cpu,cpuacct")])
    group(root / "z", cpu__cfs_quota_us=-1, cpu__cfs_period_us=100000)
    assert measure.processor_quota(proc=proc) is None
    group(root, cpu__cfs_quota_us=400000, cpu__cfs_period_us=100000)
    assert measure.processor_quota(proc=proc) == 4.0
    assert measure.processor_quota(proc=tmp_path / "nothing") is None


def test_a_container_that_sees_its_own_subtree_as_the_mount(tmp_path: Path) -> None:
    root = tmp_path / "memory"
    proc = machine(tmp_path, "4:memory:/docker/abc\n", [mount_v1(root, root="/docker/abc")])
    group(root, memory__limit_in_bytes=48 * MiB, memory__usage_in_bytes=0)
    assert measure.memory_limit_bytes(proc=proc) == 48 * MiB


def test_a_path_that_is_not_mounted_here_falls_back_to_the_mount(tmp_path: Path) -> None:
    root = tmp_path / "cgroup"
    proc = machine(tmp_path, "0::/host/only/path\n", [mount_v2(root)])
    group(root, memory__max=24 * MiB, memory__current=0)
    assert measure.memory_limit_bytes(proc=proc) == 24 * MiB


def test_a_namespace_path_that_climbs_is_not_followed(tmp_path: Path) -> None:
    root = tmp_path / "a" / "cgroup"
    proc = machine(tmp_path, "0::/../../a\n", [mount_v2(root)])
    group(tmp_path / "a", memory__max=1)
    assert measure.memory_limit_bytes(proc=proc) == measure.physical_bytes()


def test_both_versions_at_once(tmp_path: Path) -> None:
    one, two = tmp_path / "memory", tmp_path / "unified"
    proc = machine(tmp_path, "4:memory:/\n0::/\n", [mount_v1(one), mount_v2(two)])
    group(one, memory__limit_in_bytes=32 * MiB)
    group(two, memory__max=31 * MiB)
    assert measure.memory_limit_bytes(proc=proc) == 31 * MiB


def test_an_exceeded_limit_leaves_nothing(tmp_path: Path) -> None:
    root = tmp_path / "cgroup"
    proc = machine(tmp_path, "0::/\n", [mount_v2(root)])
    group(root, memory__max=MiB, memory__current=2 * MiB)
    assert measure.available_bytes(proc=proc) == 0


@pytest.mark.parametrize("garbage", ["", "::\n", "nonsense\n\n", "4:memory\n", "\x00\xff"])
def test_garbage_is_no_limit(garbage: str, tmp_path: Path) -> None:
    proc = machine(tmp_path, garbage, ["", "a b c", "1 2 3 / /x rw - cgroup2", garbage.strip()])
    assert measure.memory_limit_bytes(proc=proc) == measure.physical_bytes()


def test_the_processor_says_its_name(tmp_path: Path) -> None:
    (tmp_path / "cpuinfo").write_text("processor\t: 0\nmodel name\t: Xeon: the second\nmodel name\t: another\n")
    assert measure.processor_name(proc=tmp_path) == "Xeon: the second"
    assert measure.processor_name(proc=tmp_path / "none")


def test_this_process() -> None:
    assert 0 < measure.memory_limit_bytes() <= measure.physical_bytes()
    assert 0 < measure.available_bytes() <= measure.memory_limit_bytes()
    assert MiB < measure.current_rss_bytes() <= measure.peak_rss_bytes() + MiB
    assert measure.peak_rss_bytes() < measure.physical_bytes()
    assert abs(measure.current_rss_bytes() - psutil.Process().memory_info().rss) < 16 * MiB


@pytest.mark.skipif(sys.platform != "linux", reason="reads Linux's own mark")
def test_the_peak_is_this_programs_and_not_its_parents() -> None:
    """A child of a large process must not inherit its size: budgets are tested in children of large test runs."""
    large = b"x" * (256 * MiB)
    code = "from moelight.runtime.measure import peak_rss_bytes as p; a = p(); b = b'x' * (64 << 20); print(a, p())"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    before, after = map(int, out.split())
    assert before < len(large) / 2
    assert 56 * MiB < after - before < 80 * MiB


def test_without_the_mark_getrusage_answers(tmp_path: Path) -> None:
    assert measure.peak_rss_bytes(proc=tmp_path) > MiB


def test_no_torch() -> None:
    code = "import sys, moelight.runtime.measure, moelight.observe.trace; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"
