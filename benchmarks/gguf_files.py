"""Checkpoints as GGUF files of llama.cpp's own making: its converter, then ``llama-quantize``.

    python benchmarks/gguf_files.py MODEL ... --llamacpp DIR --llamacpp-source DIR [--kinds Q8_0 Q4_K_M]

Files lie beside the checkpoint, under its name and their type (``MODEL-bf16.gguf``, ``MODEL-Q4_K_M.gguf``), and are
made once.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from contestants import WHOLE, gguf

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
            script = Path(__file__).parent / "peers" / "to_gguf.py"
            subprocess.run(
                [self.python, script, self.source / BINDING_VENDOR, model, out], check=True, stdout=sys.stderr
            )
            return out
        full, unfinished = self.gguf(model, WHOLE), out.with_name(out.name + ".unfinished")
        subprocess.run([self.programs / "llama-quantize", full, unfinished, kind], check=True, stdout=sys.stderr)
        unfinished.rename(out)
        return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", type=Path, nargs="+")
    parser.add_argument("--kinds", nargs="+", default=["Q8_0", "Q4_K_M"])
    add_llamacpp(parser)
    args = parser.parse_args()
    for model in args.models:
        for kind in args.kinds:
            print(llamacpp_of(args).gguf(model, kind))


def add_llamacpp(parser: argparse.ArgumentParser) -> None:
    """The options that say where llama.cpp lives."""
    parser.add_argument("--llamacpp", type=Path, required=True, help="directory with llama-quantize and libllama.so")
    parser.add_argument("--llamacpp-source", type=Path, required=True, help="unpacked source of llama-cpp-python")
    parser.add_argument("--hf-python", type=Path, default=Path(sys.executable), help="python with gguf, else this one")


def llamacpp_of(args: argparse.Namespace) -> LlamaCpp:
    return LlamaCpp(programs=args.llamacpp, source=args.llamacpp_source, python=args.hf_python)


if __name__ == "__main__":
    main()
