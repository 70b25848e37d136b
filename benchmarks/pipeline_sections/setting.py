"""What every section is told, and how it starts moelight and peers alone, under a real limit of memory."""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from runner.contestants import OURS, Contestant, EndedError, Places, Work
from runner.limits import forget, memory_limit


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One run of the benchmark.

    Attributes:
        models: resident ones.
        big: one that is bigger than the memory it is given; ``ring``: one of which two layers are.
        scratch: a directory on a disk, with room for a second copy of ``big``.
    """

    models: list[Path]
    big: Path
    ring: Path
    places: Places
    scratch: Path
    threads: int
    rounds: int
    options: dict[str, Any]


@contextmanager
def started(
    name: str, setting: Setting, work: Work, *, limit: int | None = None, warm: bool = False, **options: Any
) -> Iterator[Contestant | str]:
    """Contestant ``name`` alone, loaded from a disk and not from the page cache, with at most ``limit`` bytes of memory
    (its page cache included) where control groups can be made. Where it cannot load, the reason; who ends later raises
    `EndedError`."""
    told = setting.places.options(name, work.model)
    for path in {work.model, Path(told.get("gguf", work.model))}:
        forget(path)
    with memory_limit(limit) if limit else _unlimited() as group, _folder(setting.scratch) as offload:
        extra = {**told, "offload": str(offload), **options}
        one = Contestant(name, setting.places, work, setting.scratch, group=group, warm=warm, options=extra)
        try:
            yield one if (reason := _waited(one)) is None else reason
        finally:
            one.close()


def _waited(one: Contestant) -> str | None:
    """Why it has not loaded; None where it has."""
    try:
        one.wait()
    except EndedError as ended:
        print(f"{ended.args[0]}\n{ended.args[1][-600:]}", file=sys.stderr)
        return "; ".join([ended.args[0], *ended.args[1].strip().splitlines()[-1:]])
    return None


def limits_memory() -> bool:
    """Whether control groups can be made here."""
    with memory_limit(1 << 30) as group:
        return group is not None


def why_absent(name: str, setting: Setting, model: Path) -> str | None:
    """Why a peer cannot take part; moelight always can."""
    return None if name.startswith(OURS) else setting.places.lacks(name, model)


@contextmanager
def _unlimited() -> Iterator[None]:
    yield None


@contextmanager
def _folder(parent: Path) -> Iterator[Path]:
    made = Path(tempfile.mkdtemp(dir=parent))
    try:
        yield made
    finally:
        shutil.rmtree(made)
