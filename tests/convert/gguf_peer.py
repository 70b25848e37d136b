"""GGUF files that `moelight convert` writes, as llama.cpp reads and writes them.

    python -m tests.convert.gguf_peer [--names NAME ...] [--types TYPE ...]

Needs the package llama-cpp-python with a library that computes; `make gguf-peer` builds both. Of each family a tiny
checkpoint is written in float32, and greedy tokens of three prompts are compared with llama.cpp's. Then llama.cpp's
quantiser writes the same checkpoint in each file type: the types of all tensors must be those of our file, and the
errors of rounding alike.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import logging
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf.quants import dequantize

from moelight.convert.gguf_file import GGUFOptions, convert_to_gguf
from moelight.convert.gguf_types import FILE_TYPES
from tests.convert.families import NAMES, save_family
from tests.engine import gguf_architectures as architectures
from tests.llama import LlamaFile, library

QUANTISED = ("qwen3_moe", "llama", "gemma3", "mixtral")
_WORSE = 1.02  # times llama.cpp's mean squared error, of any tensor


def written(directory: Path, file_type: str) -> Path:
    out = directory / f"{file_type}.gguf"
    convert_to_gguf(GGUFOptions(model=str(directory), output=out, file_type=file_type))
    return out


def quantised(llama: Any, path: Path, file_type: str) -> dict[str, Any]:
    """The tensors by name of the file that llama.cpp's quantiser makes of the float32 file ``path``."""
    options = llama.llama_model_quantize_default_params()
    options.nthread = 1
    options.ftype = int(gguf.LlamaFileType[FILE_TYPES[file_type][0]])
    out = path.with_name(f"theirs-{file_type}.gguf")
    assert llama.llama_model_quantize(str(path).encode(), str(out).encode(), ctypes.byref(options)) == 0
    return {tensor.name: tensor for tensor in gguf.GGUFReader(out).tensors}


def worst_error(ours: dict[str, Any], theirs: dict[str, Any], plain: dict[str, Any]) -> float:
    """The largest quotient of mean squared errors of a tensor, ours over theirs."""
    quotients = [1.0]
    for name, values in plain.items():
        errors = [
            np.square(dequantize(file[name].data, file[name].tensor_type).reshape(-1) - values.data.reshape(-1)).mean()
            for file in (ours, theirs)
        ]
        if errors[1] > 0:
            quotients.append(float(errors[0] / errors[1]))
    return max(quotients)


def main(report: Callable[[str], None] = print) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--names", nargs="*", default=list(NAMES), choices=list(NAMES), metavar="NAME")
    parser.add_argument("--types", nargs="*", default=list(FILE_TYPES), choices=list(FILE_TYPES), metavar="TYPE")
    arguments = parser.parse_args()
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    llama, alike, other_types, worst = library(), 0, 0, 0.0
    for name in arguments.names:
        with tempfile.TemporaryDirectory() as scratch:
            save_family(name, Path(scratch))
            path = written(Path(scratch), "F32")
            with LlamaFile(path) as file:
                theirs = [file.greedy(prompt, architectures.TOKENS) for prompt in architectures.PROMPTS]
            same = theirs == architectures.tokens_of(path)
            alike += same
            report(f"{name}: {'the same tokens' if same else 'other tokens'}")
    for name in [name for name in QUANTISED if name in arguments.names]:
        with tempfile.TemporaryDirectory() as scratch:
            save_family(name, Path(scratch), hidden_size=256)
            plain = written(Path(scratch), "F32")
            for file_type in arguments.types:
                if file_type == "F32":
                    continue
                files = [
                    {tensor.name: tensor for tensor in gguf.GGUFReader(written(Path(scratch), file_type)).tensors},
                    quantised(llama, plain, file_type),
                    {tensor.name: tensor for tensor in gguf.GGUFReader(plain).tensors},
                ]
                differing = [key for key in files[2] if files[0][key].tensor_type != files[1][key].tensor_type]
                other_types += len(differing)
                quotient = worst_error(*files) if not differing else 0.0
                worst = max(worst, quotient)
                report(f"{name} in {file_type}: {differing or 'the same types'}, errors {quotient:.4f} of llama.cpp's")
    result = {"families": len(arguments.names), "the same tokens": alike, "other types": other_types, "errors": worst}
    report(json.dumps(result))
    return 0 if alike == len(arguments.names) and not other_types and worst <= _WORSE else 1


if __name__ == "__main__":
    sys.exit(main())
