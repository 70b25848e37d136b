"""Greedy tokens of llama.cpp on a GGUF file: by itself, and position by position after the tokens of another engine.

    python benchmarks/peers/llamacpp_tokens.py BINDING LIBRARIES TASK.json

BINDING is the unpacked source of llama-cpp-python, of which only the declarations of the C interface are used, and
LIBRARIES the directory with ``libllama.so``. TASK: ``gguf``, ``prompts`` (ids), ``continuations`` (ids that another
engine chose, as many for each), ``threads``. The last line of the output is JSON: ``free``, the ids that llama.cpp
chooses by itself, and ``forced``, those that it would choose at each position of the continuations.
Needs numpy, and no moelight.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
import types
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

_AT_A_TIME = 8  # sequences
_STEP = 512  # tokens of a batch


def main() -> None:
    binding, libraries, task = sys.argv[1:]
    lib = declarations(Path(binding), Path(libraries))
    told = json.loads(Path(task).read_text(encoding="utf-8"))
    model = Model(lib, told["gguf"], told["threads"])
    free: list[list[int]] = []
    forced: list[list[int]] = []
    for begin in range(0, len(told["prompts"]), _AT_A_TIME):
        prompts = told["prompts"][begin : begin + _AT_A_TIME]
        theirs = told["continuations"][begin : begin + _AT_A_TIME]
        free += model.greedy(prompts, len(theirs[0]))
        forced += model.forced(prompts, theirs)
    print(json.dumps({"free": free, "forced": forced}))


def declarations(binding: Path, libraries: Path) -> Any:
    """The module ``llama_cpp.llama_cpp`` of ``binding`` over the libraries, without the package around it."""
    os.environ["LLAMA_CPP_LIB_PATH"] = str(libraries.resolve())
    package = types.ModuleType("llama_cpp")
    package.__path__ = [str(binding / "llama_cpp")]
    sys.modules["llama_cpp"] = package
    from llama_cpp import llama_cpp  # ty: ignore

    return llama_cpp


class Model:
    """A model in memory, and batches of tokens through it."""

    def __init__(self, lib: Any, gguf: str, threads: int) -> None:
        self._lib, self._threads = lib, threads
        lib.llama_backend_init()
        self._model = lib.llama_model_load_from_file(gguf.encode(), lib.llama_model_default_params())
        if not self._model:
            raise SystemExit(f"llama.cpp does not load {gguf}")
        self._vocabulary = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(self._model))

    def greedy(self, prompts: Sequence[Sequence[int]], count: int) -> list[list[int]]:
        """The ``count`` most likely tokens of each prompt, one after another."""
        context = self._context(max(map(len, prompts)) + count, len(prompts))
        last = [ids[-1] for ids in self._chosen(context, [(0, ids, len(ids) - 1) for ids in prompts])]
        result = [[token] for token in last]
        for _ in range(count - 1):
            rows = [(len(prompt) + len(ids) - 1, ids[-1:], 0) for prompt, ids in zip(prompts, result, strict=True)]
            result = [ids + chosen for ids, chosen in zip(result, self._chosen(context, rows), strict=True)]
        self._lib.llama_free(context)
        return result

    def forced(self, prompts: Sequence[Sequence[int]], continuations: Sequence[Sequence[int]]) -> list[list[int]]:
        """The most likely token at each position of ``continuations``, given all before it."""
        context = self._context(max(map(len, prompts)) + max(map(len, continuations)), len(prompts))
        pairs = zip(prompts, continuations, strict=True)
        result = self._chosen(context, [(0, [*ids, *more[:-1]], len(ids) - 1) for ids, more in pairs])
        self._lib.llama_free(context)
        return result

    def _context(self, length: int, sequences: int) -> Any:
        params = self._lib.llama_context_default_params()
        params.n_ctx = sequences * -(-length // 256) * 256
        params.n_batch = params.n_ubatch = _STEP
        params.n_seq_max = sequences
        params.n_threads = params.n_threads_batch = self._threads
        return self._lib.llama_init_from_model(self._model, params)

    def _chosen(self, context: Any, rows: Sequence[tuple[int, Sequence[int], int]]) -> list[list[int]]:
        """For each sequence (position, ids, first) the most likely token after each of its ids from ``first`` on."""
        result: list[list[int]] = [[] for _ in rows]
        for piece in _pieces(rows):
            batch = self._lib.llama_batch_init(len(piece), 0, 1)
            batch.n_tokens = len(piece)
            for at, (sequence, position, token, wanted) in enumerate(piece):
                batch.token[at], batch.pos[at] = token, position
                batch.n_seq_id[at], batch.seq_id[at][0], batch.logits[at] = 1, sequence, wanted
            if self._lib.llama_decode(context, batch):
                raise SystemExit("llama.cpp refuses a batch")
            for at, (sequence, _, _, wanted) in enumerate(piece):
                if wanted:
                    result[sequence].append(self._most_likely(context, at))
            self._lib.llama_batch_free(batch)
        return result

    def _most_likely(self, context: Any, at: int) -> int:
        logits = ctypes.cast(self._lib.llama_get_logits_ith(context, at), ctypes.POINTER(ctypes.c_float))
        return int(np.ctypeslib.as_array(logits, (self._vocabulary,)).argmax())


def _pieces(rows: Sequence[tuple[int, Sequence[int], int]]) -> Iterator[list[tuple[int, int, int, bool]]]:
    """(sequence, position, token, whether its logits are wanted) of all tokens, `_STEP` at a time."""
    every = [
        (sequence, position + at, token, at >= first)
        for sequence, (position, ids, first) in enumerate(rows)
        for at, token in enumerate(ids)
    ]
    for begin in range(0, len(every), _STEP):
        yield every[begin : begin + _STEP]


if __name__ == "__main__":
    main()
