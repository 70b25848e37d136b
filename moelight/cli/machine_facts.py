"""Facts of ``moelight doctor`` about cores, NUMA nodes, huge pages and direct reads, as values and as lines of text.

`runtime.cores` decides how cores are shared and `runtime.numa` where memory is placed.
"""

from __future__ import annotations

import resource
import tempfile
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from moelight.core.units import format_bytes
from moelight.kernels import native
from moelight.runtime import measure
from moelight.runtime.cores import LINK_BYTES_PER_S, Demands, share_cores
from moelight.runtime.numa import place_memory, why_not_placed
from moelight.runtime.topology import SYS, PciSlot, Topology, read_topology

_PROBE_BYTES = 1 << 20
_FREE = 0.9  # share of the free memory that a plan uses by default


def machine_facts(torch_threads: int | None, plugs: list[PciSlot], model: Path | None) -> dict[str, Any]:
    """Return cores, threads, NUMA, huge pages, direct reads and pinned memory, ready for JSON.

    Args:
        torch_threads: the most threads that torch would use; None if torch does not load.
        plugs: where the devices are attached.
        model: directory whose files are read and whose size host memory would have to hold.
    """
    topology = read_topology()
    link = plugs[0].bytes_per_s or LINK_BYTES_PER_S if plugs else LINK_BYTES_PER_S
    node = plugs[0].node if plugs else None
    demands = Demands(device=bool(plugs), stages=bool(plugs), link_bytes_per_s=link, node=node)
    shares = share_cores(topology, demands, at_most=torch_threads or len(topology.cores))
    weights = [] if model is None else sorted(model.glob("*.safetensors"))
    wanted = sum(file.stat().st_size for file in weights) or int(_FREE * measure.available_bytes())
    place = place_memory(topology, wanted, device_node=node, refusal=why_not_placed())
    locked = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    return {
        "cores": _cores(topology),
        "threads": {
            "compute": None if shares.compute is None else asdict(shares.compute),
            "staging": None if shares.staging is None else asdict(shares.staging),
            "free": shares.free,
            "reason": shares.reason,
        },
        "numa": {
            "nodes": [asdict(each) for each in topology.nodes],
            "devices": [asdict(plug) for plug in plugs],
            "placement": {"for_bytes": wanted, **asdict(place)},
        },
        "huge_pages": _huge_pages(),
        "locked_limit_bytes": None if locked == resource.RLIM_INFINITY else locked,
        "direct_reads": _direct_reads(model or Path.cwd(), weights),
    }


def machine_lines(found: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the facts of `machine_facts` for a person: the name and the text of each line."""
    yield "threads", found["threads"]["reason"]
    nodes = found["numa"]["nodes"]
    for node in nodes:
        room = f"{format_bytes(node['total_bytes'])}, {format_bytes(node['available_bytes'])} available"
        yield "NUMA" if node is nodes[0] else "", f"node {node['number']}: {room}"
    for plug in found["numa"]["devices"]:
        rate = "" if plug["bytes_per_s"] is None else f", its link carries {plug['bytes_per_s'] / 1e9:.0f} GB/s"
        where = "an unknown node" if plug["node"] is None else f"node {plug['node']}"
        yield "", f"device at {plug['address']}: {where}{rate}"
    placement = found["numa"]["placement"]
    kind = "where the system puts it" if placement["kind"] == "anywhere" else placement["kind"]
    yield "host memory", f"{kind}: {placement['reason']}"
    yield "huge pages", _HUGE[found["huge_pages"]]
    if found["numa"]["devices"]:
        limit = found["locked_limit_bytes"]
        yield "pinning", f"ulimit -l: {'unlimited' if limit is None else format_bytes(limit)}"
    reads = found["direct_reads"]
    yield "direct reads", f"{_SAID[reads['direct']]}, from {reads['directory']}: {reads['reason']}"


_SAID = {True: "yes", False: "no", None: "unknown"}
_HUGE = {
    "always": "for everything (always)",
    "madvise": "where they are asked for, as arenas do (madvise)",
    "never": "never: reads and kernels miss address translations; see transparent_hugepage/enabled",
    None: "unknown here",
}


def _cores(topology: Topology) -> dict[str, Any]:
    return {
        "usable": len(topology.cores),
        "processors": sum(len(core.processors) for core in topology.cores),
        "quota": topology.quota,
        "places": [asdict(core) for core in topology.cores],
    }


def _huge_pages(*, sys: Path = SYS) -> str | None:
    try:
        said = (sys / "kernel/mm/transparent_hugepage/enabled").read_text(encoding="utf-8")
    except OSError:
        return None
    chosen = said.partition("[")[2].partition("]")[0]
    return chosen if chosen in _HUGE else None


def _direct_reads(directory: Path, files: list[Path]) -> dict[str, Any]:
    """Test if files of ``directory`` are read past the page cache, on the first of ``files`` or a temporary file."""
    found: dict[str, Any] = {"directory": str(directory), "direct": None}
    if not native.available():
        return {**found, "direct": False, "reason": "without the extension files are read through the page cache"}
    try:
        if files:
            direct = _reads_directly(files[0])
        else:
            with tempfile.NamedTemporaryFile(dir=directory, prefix=".moelight-doctor-") as made:
                made.write(bytes(_PROBE_BYTES))
                made.flush()
                direct = _reads_directly(Path(made.name))
    except (OSError, ImportError) as error:
        return {**found, "reason": " ".join(str(error).split())}
    said = "past the page cache" if direct else "the file system refuses, so they go through the page cache"
    return {**found, "direct": direct, "reason": said}


def _reads_directly(file: Path) -> bool:
    import torch

    from moelight.kernels.reads import FileReader, ReadPart

    with FileReader([file]) as reader:
        part = ReadPart(file, 0, torch.empty(min(4096, file.stat().st_size), dtype=torch.uint8))
        reader.submit([part]).wait()
        return reader.direct(file)
