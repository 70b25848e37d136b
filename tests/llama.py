"""llama.cpp through its Python package, which the suite does not need: ids, logits and greedy tokens of GGUF files."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache
from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy as np

_CONTEXT = 1024  # tokens


@cache
def library() -> Any:
    """The functions of llama.cpp, quiet."""
    from llama_cpp import llama_cpp

    llama_cpp.llama_backend_init()
    library.silent = llama_cpp.llama_log_callback(lambda *_: None)  # type: ignore[attr-defined]
    llama_cpp.llama_log_set(library.silent, ctypes.c_void_p(0))  # type: ignore[attr-defined]
    return llama_cpp


class LlamaFile:
    """The GGUF file ``path`` in llama.cpp on the CPU, with its defaults; one sequence at a time."""

    def __init__(self, path: Path, threads: int = 1) -> None:
        self._llama = llama = library()
        options = llama.llama_model_default_params()
        options.n_gpu_layers = 0
        self._model = llama.llama_model_load_from_file(str(path).encode(), options)
        assert self._model, f"llama.cpp does not load {path}"
        self._vocabulary = llama.llama_model_get_vocab(self._model)
        self._size = llama.llama_vocab_n_tokens(self._vocabulary)
        options = llama.llama_context_default_params()
        options.n_ctx, options.n_threads, options.n_threads_batch = _CONTEXT, threads, threads
        self._context, self._held = llama.llama_init_from_model(self._model, options), list[int]()

    def __enter__(self) -> LlamaFile:
        return self

    def __exit__(self, *_: object) -> None:
        self._llama.llama_free(self._context)
        self._llama.llama_model_free(self._model)

    def ids(self, text: str) -> list[int]:
        """Of ``text``, with the file's own special tokens around it and those that it names."""
        data = text.encode()
        ids = (self._llama.llama_token * (len(data) + 8))()
        count = self._llama.llama_tokenize(self._vocabulary, data, len(data), ids, len(ids), True, True)
        return list(ids[:count])

    def logits(self, ids: Sequence[int], count: int) -> np.ndarray:
        """Logits after the last ``count`` of ``ids``, in one pass behind what the last ones begin with, too."""
        llama, pairs = self._llama, zip(self._held, ids[:-count], strict=False)
        held = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        memory = llama.llama_get_memory(self._context)
        if not llama.llama_memory_seq_rm(memory, 0, held, -1):  # as of a state that cannot go back
            llama.llama_memory_clear(memory, True)
            held = 0
        self._held = self._held[:held]
        return self._pass(ids[held:], count)

    def greedy(self, prompt: Sequence[int], count: int) -> list[int]:
        """The likeliest ``count`` tokens after ``prompt``, one after another."""
        result = [int(self.logits(prompt, 1).argmax())]
        while len(result) < count:
            result.append(int(self._pass(result[-1:], 1).argmax()))
        return result

    def _pass(self, ids: Sequence[int], count: int) -> np.ndarray:
        """Logits after the last ``count`` of ``ids``, which follow those that the context holds."""
        llama, start = self._llama, len(self._held)
        batch = llama.llama_batch_init(len(ids), 0, 1)
        batch.n_tokens = len(ids)
        for index, token in enumerate(ids):
            batch.token[index], batch.pos[index] = token, start + index
            batch.n_seq_id[index], batch.seq_id[index][0] = 1, 0
            batch.logits[index] = index >= len(ids) - count
        failed = llama.llama_decode(self._context, batch)
        llama.llama_batch_free(batch)
        assert failed == 0, f"llama.cpp failed on {len(ids)} tokens"
        self._held += ids
        return np.ctypeslib.as_array(llama.llama_get_logits(self._context), shape=(count, self._size)).copy()
