"""``moelight doctor``: what this machine and installation have: processors, memory, direct reads, torch, kernels."""

from __future__ import annotations

import contextlib
import os
import platform
import resource
from collections.abc import Iterator
from dataclasses import asdict
from importlib.metadata import distributions
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

import psutil

from moelight import __version__
from moelight.cli.options import option, with_options
from moelight.cli.tables import missing_kernels, open_console, print_json
from moelight.core.errors import InputError
from moelight.core.units import format_bytes
from moelight.kernels import native
from moelight.kernels.native import Serving, serving
from moelight.runtime import measure
from moelight.runtime.topology import (
    LINK_BYTES_PER_S,
    SYS,
    Demands,
    PciSlot,
    pci_slot_of,
    place_memory,
    read_topology,
    share_cores,
    why_not_placed,
)

LIBRARIES = ("torch", "transformers", "tokenizers", "numpy")


def facts(model: Path | None = None) -> dict[str, Any]:
    """Return the facts that ``--json`` prints, sizes in bytes. ``model``: a directory of weights."""
    torch = _torch()
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    versions = {
        name: next((distribution.version for distribution in distributions(name=name)), None) for name in LIBRARIES
    }
    plugs = [PciSlot(**plug) for device in torch["devices"] if (plug := device["plug"]) is not None]
    return {
        "moelight": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "libraries": versions,
        "processor": {
            "name": measure.processor_name(),
            "cores": psutil.cpu_count(logical=False),
            "threads": psutil.cpu_count(),
            "usable": usable,
            "instructions": native.cpu_features(),
        },
        "memory": {
            "physical_bytes": measure.physical_bytes(),
            "limit_bytes": measure.memory_limit_bytes(),
            "available_bytes": measure.available_bytes(),
        },
        **machine_facts(torch["threads"], plugs, model),
        "torch": torch,
        "extension": {
            "available": native.available(),
            "reason": native.reason(),
            "remedy": None if native.available() else native.remedy(),
        },
        "kernels": [asdict(row) for row in [*serving(), *_forms(torch), *_on_devices(torch["devices"])]],
    }


def print_facts(report: dict[str, Any]) -> None:
    """Print the facts ``report`` as tables."""
    from rich.table import Table

    console = open_console()
    if (line := missing_kernels()) is not None:
        console.print(line, soft_wrap=True)
        console.print()
    about = Table.grid(padding=(0, 2))
    for name, value in _about(report):
        about.add_row(name, value)
    console.print(about)
    kernels = Table("operation", "served by", "why", title="kernels", title_justify="left", header_style="bold")
    for row in report["kernels"]:
        kernels.add_row(row["operation"], row["implementation"], row["reason"])
    console.print()
    console.print(kernels)


def _about(report: dict[str, Any]) -> Iterator[tuple[str, str]]:
    processor, cores, torch = report["processor"], report["cores"], report["torch"]
    yield "moelight", f"{report['moelight']}  (Python {report['python']}, {report['platform']})"
    yield "libraries", ", ".join(f"{name} {version}" for name, version in report["libraries"].items() if version)
    yield "processor", processor["name"]
    quota = "no quota" if cores["quota"] is None else f"a quota of {cores['quota']:g} processors"
    usable = f"{cores['usable']} cores, {cores['processors']} threads, {quota}"
    yield "", f"{processor['cores']} cores, {processor['threads']} threads; usable here: {usable}"
    sets = ", ".join(name for name, available in processor["instructions"].items() if available)
    yield "instructions", sets or f"{torch['cpu_capability']}, as torch sees it"
    memory = {name: format_bytes(size) for name, size in report["memory"].items()}
    yield "memory", f"{memory['physical_bytes']} physical, {memory['available_bytes']} available"
    if report["memory"]["limit_bytes"] < report["memory"]["physical_bytes"]:
        yield "", f"{memory['limit_bytes']} is the limit of this control group"
    yield from machine_lines(report)
    if torch["fault"]:
        yield "torch", f"does not load: {torch['fault']}"
    else:
        yield "torch", f"{torch['threads']} threads, CPU capability {torch['cpu_capability']}"
    for device in torch["devices"]:
        yield "device", f"{device['id']}: {device['name']}, {format_bytes(device['total_bytes'])}"
    if not torch["devices"] and not torch["fault"]:
        yield "device", "cpu only: torch sees no accelerator"
    yield "extension", report["extension"]["reason"]


def _torch() -> dict[str, Any]:
    result: dict[str, Any] = {"fault": None, "threads": None, "cpu_capability": None, "devices": []}
    try:
        import torch
    except (ImportError, OSError) as error:
        return {**result, "fault": " ".join(str(error).split())}
    result["threads"] = torch.get_num_threads()
    result["cpu_capability"] = torch.backends.cpu.get_cpu_capability()
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None or not torch.accelerator.is_available():
        return result
    kind = accelerator.type
    for index in range(torch.accelerator.device_count()):
        properties = torch.get_device_module(kind).get_device_properties(index)
        plug = pci_slot_of(torch.device(kind, index))
        device = {"id": f"{kind}:{index}", "name": properties.name, "total_bytes": properties.total_memory}
        result["devices"].append({**device, "plug": None if plug is None else asdict(plug)})
    return result


def _forms(torch: dict[str, Any]) -> Iterator[Serving]:
    """Kernels whose form is chosen by a measurement."""
    if torch["fault"]:
        return
    from moelight.kernels import variants
    from moelight.profiles.hardware import KERNELS
    from moelight.runtime.machine_profile import kept_profile

    profile = kept_profile(say=lambda _: None)
    measured = {} if profile is None else dict(profile.kernels)
    for name, form in variants.chosen().items():
        by = "the fastest here, as measured" if name in measured else "by default: `moelight profile` measures it"
        yield Serving(operation=name, implementation=measured.get(name, form), reason=f"{KERNELS[name]}; {by}")


def _on_devices(devices: list[dict[str, Any]]) -> Iterator[Serving]:
    if devices:
        import torch

        from moelight.kernels.gpu.serving import serving_on

        for device in devices:
            yield from serving_on(torch.device(device["id"]))


_PROBE_BYTES = 1 << 20
_FREE = 0.9  # share of the free memory that a plan uses by default


def machine_facts(torch_threads: int | None, plugs: list[PciSlot], model: Path | None) -> dict[str, Any]:
    """Return cores, threads, NUMA, huge pages, direct reads and pinned memory, ready for JSON.

    ``torch_threads``: the most threads that torch uses, None if torch does not load. ``model``: a directory whose files
    are probed for direct reads and whose bytes host memory would have to hold.
    """
    topology = read_topology()
    link = plugs[0].bytes_per_s or LINK_BYTES_PER_S if plugs else LINK_BYTES_PER_S
    node = plugs[0].node if plugs else None
    demands = Demands(device=bool(plugs), stages=bool(plugs), link_bytes_per_s=link, node=node)
    shares = share_cores(topology, demands, at_most=torch_threads or len(topology.cores))
    weights = [] if model is None else sorted(model.glob("*.safetensors"))
    wanted = sum(file.stat().st_size for file in weights) or int(_FREE * measure.available_bytes())
    placement = place_memory(topology, wanted, device_node=node, refusal=why_not_placed())
    locked = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    return {
        "cores": {
            "usable": len(topology.cores),
            "processors": sum(len(core.processors) for core in topology.cores),
            "quota": topology.quota,
            "places": [asdict(core) for core in topology.cores],
        },
        "threads": {key: value for key, value in asdict(shares).items() if key != "shared"},
        "numa": {
            "nodes": [asdict(numa_node) for numa_node in topology.nodes],
            "devices": [asdict(plug) for plug in plugs],
            "placement": {"for_bytes": wanted, **asdict(placement)},
        },
        "huge_pages": _huge_pages(),
        "locked_limit_bytes": None if locked == resource.RLIM_INFINITY else locked,
        "direct_reads": _direct_reads(model or Path.cwd(), weights),
    }


def machine_lines(report: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the facts of `machine_facts` as lines of text: name and value."""
    yield "threads", report["threads"]["reason"]
    nodes = report["numa"]["nodes"]
    for node in nodes:
        room = f"{format_bytes(node['total_bytes'])}, {format_bytes(node['available_bytes'])} available"
        yield "NUMA" if node is nodes[0] else "", f"node {node['number']}: {room}"
    for plug in report["numa"]["devices"]:
        rate = "" if plug["bytes_per_s"] is None else f", its link carries {plug['bytes_per_s'] / 1e9:.0f} GB/s"
        where = "an unknown node" if plug["node"] is None else f"node {plug['node']}"
        yield "", f"device at {plug['address']}: {where}{rate}"
    placement = report["numa"]["placement"]
    kind = "where the system puts it" if placement["kind"] == "anywhere" else placement["kind"]
    yield "host memory", f"{kind}: {placement['reason']}"
    yield "huge pages", _HUGE[report["huge_pages"]]
    if report["numa"]["devices"]:
        limit = report["locked_limit_bytes"]
        yield "pinning", f"ulimit -l: {'unlimited' if limit is None else format_bytes(limit)}"
    reads = report["direct_reads"]
    yield "direct reads", f"{_SAID[reads['direct']]}, from {reads['directory']}: {reads['reason']}"


_SAID = {True: "yes", False: "no", None: "unknown"}
_HUGE = {
    "always": "for everything (always)",
    "madvise": "where they are asked for, as arenas do (madvise)",
    "never": "never: reads and kernels miss address translations; see transparent_hugepage/enabled",
    None: "unknown here",
}


def _huge_pages(*, sys: Path = SYS) -> str | None:
    try:
        setting = (sys / "kernel/mm/transparent_hugepage/enabled").read_text(encoding="utf-8")
    except OSError:
        return None
    chosen = setting.partition("[")[2].partition("]")[0]
    return chosen if chosen in _HUGE else None


def _direct_reads(directory: Path, files: list[Path]) -> dict[str, Any]:
    """Test whether reads bypass the page cache, on the first of ``files`` or, without any, on a temporary file."""
    result: dict[str, Any] = {"directory": str(directory), "direct": None}
    if not native.available():
        return {**result, "direct": False, "reason": "without the extension files are read through the page cache"}
    try:
        import torch

        from moelight.kernels.reads import FileReader, ReadPart

        with contextlib.ExitStack() as stack:
            if files:
                file = files[0]
            else:
                made = stack.enter_context(NamedTemporaryFile(dir=directory, prefix=".moelight-doctor-"))
                made.write(bytes(_PROBE_BYTES))
                made.flush()
                file = Path(made.name)
            reader = stack.enter_context(FileReader([file]))
            part = ReadPart(file, 0, torch.empty(min(4096, file.stat().st_size), dtype=torch.uint8))
            reader.submit([part]).wait()
            direct = reader.direct(file)
    except (OSError, ImportError) as error:
        return {**result, "reason": " ".join(str(error).split())}
    reason = "past the page cache" if direct else "the file system refuses, so they go through the page cache"
    return {**result, "direct": direct, "reason": reason}


@with_options()
def doctor(
    model: str | None = option("Model whose files are used for the disk checks.", "-m", "--model", metavar="DIR"),
    as_json: bool = option("Print one JSON object.", "--json", default=False),
) -> None:
    """Show torch, the processors, the memory and the kernels of this machine."""
    from moelight.weights.source import DEMO, resolve_model

    directory = None
    if model is not None:
        directory = Path(model).expanduser()
        if model != DEMO and not directory.is_dir():  # unlike other commands, this one does not query the hub
            raise InputError(f"--model {model}: no such directory")
        directory = resolve_model(DEMO) if model == DEMO else directory
    report = facts(directory)
    if as_json:
        print_json(report)
    else:
        print_facts(report)
