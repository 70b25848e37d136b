"""What answers of published models are compared with: logits of transformers or llama.cpp after the same tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase

from tests.llama import LlamaFile


class Judge(Protocol):
    def prompt_ids(self, text: str) -> list[int]:
        """Ids of the prompt ``text``, which the template has rendered already."""

    def logits(self, prompt: Sequence[int], answer: Sequence[int]) -> Tensor:
        """(tokens of the answer, vocabulary): before each token of the answer."""


class TransformersJudge:
    """The checkpoint in ``directory``, computed in float32."""

    def __init__(self, directory: Path, tokenizer: PreTrainedTokenizerBase) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
        self._tokenizer = tokenizer

    def prompt_ids(self, text: str) -> list[int]:
        return list(self._tokenizer(text, add_special_tokens=self._tokenizer.chat_template is None).input_ids)

    @torch.inference_mode()
    def logits(self, prompt: Sequence[int], answer: Sequence[int]) -> Tensor:
        ids = torch.tensor([[*prompt, *answer[:-1]]])
        return self._model(ids, logits_to_keep=len(answer)).logits[0]


class LlamaJudge:
    """The GGUF file, computed by llama.cpp, which rounds activations to 8 bits."""

    def __init__(self, file: LlamaFile) -> None:
        self._file = file

    def prompt_ids(self, text: str) -> list[int]:
        return self._file.ids(text)

    def logits(self, prompt: Sequence[int], answer: Sequence[int]) -> Tensor:
        return torch.from_numpy(self._file.logits([*prompt, *answer[:-1]], len(answer)))


@contextmanager
def judge_of(name: str, directory: Path, file: Path) -> Iterator[Judge]:
    """The judge ``transformers`` or ``llama.cpp`` of a model in both forms."""
    if name == "transformers":
        yield TransformersJudge(directory, AutoTokenizer.from_pretrained(directory))
    else:
        with LlamaFile(file, torch.get_num_threads()) as loaded:
            yield LlamaJudge(loaded)
