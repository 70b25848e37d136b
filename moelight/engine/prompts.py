"""Converts every form that a prompt may take in Python into requests."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

from moelight.core.errors import InputError, did_you_mean
from moelight.core.request import Request, SamplingParams
from moelight.engine.tokenizer import Tokenizer

Prompt: TypeAlias = str | Mapping[str, Any] | Sequence[int]
_FORMS = ("prompt", "messages", "prompt_token_ids")


def requests_from(
    prompts: Prompt | Sequence[Prompt],
    sampling_params: SamplingParams | Sequence[SamplingParams] | None,
    tokenizer: Tokenizer,
) -> list[Request]:
    """One request per prompt, in order.

    Raises:
        InputError: a prompt has no known form, or the number of sampling parameters differs from that of the prompts.
    """
    if not isinstance(prompts, Iterable):
        raise InputError(f"prompts must be a prompt or a sequence of them, not {prompts!r}")
    many: Sequence[Prompt] = [prompts] if isinstance(prompts, (str, Mapping)) else list(prompts)  # type: ignore[arg-type]
    if many and all(isinstance(prompt, int) for prompt in many):
        many = [many]  # type: ignore[list-item]
    if sampling_params is None or isinstance(sampling_params, SamplingParams):
        sampling = [sampling_params or SamplingParams()] * len(many)
    else:
        sampling = list(sampling_params)
    if len(sampling) != len(many):
        raise InputError(f"{len(sampling)} sampling_params were given for {len(many)} prompts; give one, or one each")
    return [
        Request(index=index, token_ids=_token_ids(prompt, index, tokenizer), sampling=how)
        for index, (prompt, how) in enumerate(zip(many, sampling, strict=True))
    ]


def _token_ids(prompt: Prompt, index: int, tokenizer: Tokenizer) -> tuple[int, ...]:
    if isinstance(prompt, str):
        return tuple(tokenizer.encode(prompt))
    if isinstance(prompt, Mapping):
        return _from_mapping(prompt, index, tokenizer)
    if isinstance(prompt, Sequence):
        ids: list[Any] = list(prompt)
        if all(isinstance(token, int) and not isinstance(token, bool) for token in ids):
            return tuple(ids)
    raise InputError(f"prompt {index}: must be a string, an object with one of {', '.join(_FORMS)}, or token ids")


def _from_mapping(prompt: Mapping[str, Any], index: int, tokenizer: Tokenizer) -> tuple[int, ...]:
    for key in prompt:
        if key not in _FORMS:
            raise InputError(f"prompt {index}: unknown key {key!r}{did_you_mean(str(key), _FORMS)}")
    if len(prompt) != 1:
        raise InputError(f"prompt {index}: needs exactly one of {', '.join(_FORMS)}")
    ((form, value),) = prompt.items()
    if form == "messages":
        return tuple(tokenizer.render(value))
    if isinstance(value, str) != (form == "prompt") or not isinstance(value, Sequence):
        raise InputError(f"prompt {index}: {form} must be {'a string' if form == 'prompt' else 'a list of token ids'}")
    return _token_ids(value, index, tokenizer)
