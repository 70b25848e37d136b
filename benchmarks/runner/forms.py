"""A checkpoint in other forms: as a GGUF file of llama.cpp's own making, by its converter and then ``llama-quantize``,
or with rounded experts, by ``moelight convert``.

GGUF files lie beside the checkpoint, under its name and their type (``MODEL-bf16.gguf``, ``MODEL-Q4_K_M.gguf``), and
are made once.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from runner.contestants import WHOLE, gguf

BINDING_VENDOR = "vendor/llama.cpp"  # of the source of llama-cpp-python


@dataclass(frozen=True, kw_only=True)
class LlamaCpp:
    """Where llama.cpp lives: ``programs`` and libraries it was built to, the unpacked ``source`` of llama-cpp-python,
    and a ``python`` with torch, transformers and gguf for its converter."""

    programs: Path
    source: Path
    python: Path = Path(sys.executable)

    def gguf(self, model: Path, kind: str) -> Path:
        """The checkpoint ``model`` with numbers of ``kind`` (``bf16``, ``Q8_0``, ``Q4_K_M``, …)."""
        out = gguf(model, kind)
        if out.exists():
            return out
        if kind == WHOLE:
            script = Path(__file__).parents[1] / "peers" / "to_gguf.py"
            subprocess.run(
                [self.python, script, self.source / BINDING_VENDOR, model, out], check=True, stdout=sys.stderr
            )
            return out
        full, unfinished = self.gguf(model, WHOLE), out.with_name(out.name + ".unfinished")
        subprocess.run([self.programs / "llama-quantize", full, unfinished, kind], check=True, stdout=sys.stderr)
        unfinished.rename(out)
        return out


def converted(model: Path, kind: str, directory: Path, *, group_size: int | None = None) -> Path:
    """The checkpoint with experts of ``kind``, by ``moelight convert``, in ``directory``: made unless it is there."""
    out = directory / (f"{model.name}-{kind}" + ("" if group_size is None else f"-g{group_size}"))
    command = [sys.executable, "-m", "moelight.cli.main", "convert", str(model), str(out), "--experts", kind]
    command += [] if group_size is None else ["--group-size", str(group_size)]
    subprocess.run(command, check=True, stdout=sys.stderr)
    return out


def add_llamacpp(parser: argparse.ArgumentParser) -> None:
    """The options that say where llama.cpp lives."""
    parser.add_argument("--llamacpp", type=Path, required=True, help="directory with llama-quantize and libllama.so")
    parser.add_argument("--llamacpp-source", type=Path, required=True, help="unpacked source of llama-cpp-python")
    parser.add_argument("--hf-python", type=Path, default=Path(sys.executable), help="python with gguf, else this one")


def llamacpp_of(args: argparse.Namespace) -> LlamaCpp:
    return LlamaCpp(programs=args.llamacpp, source=args.llamacpp_source, python=args.hf_python)
