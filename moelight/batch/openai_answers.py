"""OpenAI batch answers: the bodies ``chat.completion`` and ``text_completion`` around completions, lists of embeddings,
and error lines.

As in vLLM, a log-probability of minus infinity is written as -9999. Ids are derived from the input and the row, so that
a resumed job writes the same ids.
"""

from __future__ import annotations

import itertools
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from moelight.batch.embedding import BASE64, embedding_base64, embedding_numbers
from moelight.batch.fields import RowTokenizer
from moelight.batch.rows import (
    LEAST_LOGPROB,
    AnswerHeader,
    BadRow,
    Prompt,
    Row,
    metrics_fields,
    routing_fields,
    structure_fields,
)
from moelight.core.request import Completion, Logprob

CHAT, COMPLETIONS, EMBEDDINGS = ENDPOINTS = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings")
_OK = 200
_IDS = uuid.UUID("2e4f4ef5-9f60-5b5c-8c55-6d0f6c0a7d1e")


@dataclass(frozen=True, kw_only=True, slots=True)
class OpenAIFormat:
    """Answers in the format of OpenAI batches. Log-probabilities and echoed token ids require a ``vocabulary``."""

    vocabulary: RowTokenizer | None = None
    per_request_metrics: bool = False
    name: str = "openai"

    @property
    def _tokenizer(self) -> RowTokenizer:
        assert self.vocabulary is not None
        return self.vocabulary

    def answer(self, row: Row, completions: Sequence[Completion], served: AnswerHeader) -> dict[str, Any]:
        if row.kind == EMBEDDINGS:
            embeddings = _embeddings(row, completions, served)
            return _line(served, row.number, row.custom_id, status=_OK, body=embeddings, error=None)
        chat = row.kind == CHAT
        body: dict[str, Any] = {
            "id": f"{'chatcmpl' if chat else 'cmpl'}-{_id(served, row.number, 'body')}",
            "object": "chat.completion" if chat else "text_completion",
            "created": served.created,
            "model": served.model,
            "choices": [
                self._chat_choice(row, index, completion)
                if chat
                else self._choice(row, index, completion, len(completions))
                for index, completion in enumerate(completions)
            ],
            "usage": _usage(completions),
            "system_fingerprint": served.system_fingerprint,
        }
        if chat and row.answered["prompt_logprobs"]:
            body["prompt_logprobs"] = prompt_logprobs_row(completions[0])
        if chat or len(row.prompts) == 1:
            body |= routing_fields(completions[0], of_prompt=True)
        if self.per_request_metrics:
            body["metrics"] = metrics_fields(completions)
        failed = next(
            (completion.structure_error for completion in completions if completion.structure_error is not None), None
        )
        error = None if failed is None else {"code": failed.code, "message": failed.message}
        return _line(served, row.number, row.custom_id, status=_OK, body=body, error=error)

    def refuse(self, bad: BadRow, served: AnswerHeader) -> dict[str, Any]:
        """The output line of a row that was not served; its line number stands for a missing custom_id."""
        message = bad.message if bad.custom_id is not None else f"line {bad.line}: {bad.message}"
        told = {"message": message, "type": "invalid_request_error", "param": bad.param, "code": bad.code}
        # vLLM's clients read error.error, OpenAI's error.code or the body.
        error = {"code": bad.code, "message": message, "error": {**told, "code": bad.status}}
        line = _line(served, bad.number, bad.custom_id, status=bad.status, body={"error": told}, error=error)
        return line if bad.custom_id is not None else {**line, "line": bad.line}

    def _chat_choice(self, row: Row, index: int, completion: Completion) -> dict[str, Any]:
        asked = row.answered["logprobs"]
        message: dict[str, Any] = {"role": "assistant", "content": completion.text, "refusal": None}
        if completion.reasoning_tokens is not None:
            message["content"] = completion.text or None if completion.reasoning else completion.text
            if row.answered.get("include_reasoning", True):
                message["reasoning_content"] = completion.reasoning
        if completion.tool_calls:
            message["content"] = completion.text or None
            message["tool_calls"] = [
                {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for call in completion.tool_calls
            ]
        return {
            "index": index,
            "message": message,
            "logprobs": None if asked is None else {"content": self._content(completion, asked), "refusal": None},
            "finish_reason": completion.finish_reason,
            **structure_fields(completion),
            **routing_fields(completion, of_prompt=False),
        }

    def _choice(self, row: Row, index: int, completion: Completion, count: int) -> dict[str, Any]:
        prompt = row.prompts[index * len(row.prompts) // count]
        echo = row.answered["echo"]
        logprobs = row.answered["logprobs"]
        choice = {
            "text": (self._prompt_text(prompt) if echo else "") + completion.text,
            "index": index,
            "logprobs": None if logprobs is None else self._lists(completion, prompt if echo else None),
            "finish_reason": completion.finish_reason,
            **structure_fields(completion),
            **routing_fields(completion, of_prompt=False),
        }
        if row.answered["prompt_logprobs"]:
            choice["prompt_logprobs"] = prompt_logprobs_row(completion)
        if len(row.prompts) > 1:
            choice |= routing_fields(completion, of_prompt=True)
        return choice

    def _content(self, completion: Completion, max_count: int) -> list[dict[str, Any]]:
        """Chat log-probabilities: each token, and at most ``max_count`` of the likeliest at its position."""
        return [
            {
                **self._token(token, likely[token]),
                "top_logprobs": [self._token(other, likely[other]) for other in _by_rank(likely)[:max_count]],
            }
            for token, likely in zip(completion.token_ids, completion.logprobs or (), strict=False)
        ]

    def _token(self, token: int, of: Logprob) -> dict[str, Any]:
        raw = self._tokenizer.token_bytes(token)
        return {"token": of.decoded_token, "logprob": _finite(of.logprob), "bytes": list(raw)}

    def _lists(self, completion: Completion, prompt: Prompt | None) -> dict[str, Any]:
        """Log-probabilities as parallel lists, the echoed ``prompt`` first. The first token of a prompt has none."""
        places: list[tuple[int, Mapping[int, Logprob] | None]] = []
        if prompt is not None:
            ids = self._tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
            places += zip(ids, completion.prompt_logprobs or (None,) * len(ids), strict=False)
        places += zip(completion.token_ids, completion.logprobs or (), strict=False)
        tokens = [self._text(token) for token, _ in places]
        return {
            "tokens": tokens,
            "token_logprobs": [likely and _finite(likely[token].logprob) for token, likely in places],
            "top_logprobs": [
                likely and self._top(text, likely[token], likely)
                for text, (token, likely) in zip(tokens, places, strict=True)
            ],
            "text_offset": list(itertools.accumulate(map(len, tokens[:-1]), initial=0))[: len(tokens)],
        }

    def _top(self, text: str, chosen: Logprob, likely: Mapping[int, Logprob]) -> dict[str, float]:
        """Log-probabilities by text, the likeliest first. Of two tokens with equal text the likelier is kept, except
        that ``text``, the text of the token itself, keeps ``chosen``."""
        top: dict[str, float] = {}
        for other in _by_rank(likely):
            top.setdefault(self._text(other), _finite(likely[other].logprob))
        return {**top, text: _finite(chosen.logprob)}

    def _prompt_text(self, prompt: Prompt) -> str:
        if isinstance(prompt, str):
            return prompt
        return b"".join(map(self._tokenizer.token_bytes, prompt)).decode("utf-8", "replace")

    def _text(self, token: int) -> str:
        """The text of a token; partial characters are shown as bytes, so that such tokens differ."""
        raw = self._tokenizer.token_bytes(token)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def prompt_logprobs_row(completion: Completion) -> list[dict[str, Any] | None]:
    """vLLM's shape: for each prompt token its likeliest tokens by id, or null if none were requested."""
    return [None if likely is None else logprobs_row(likely) for likely in completion.prompt_logprobs or ()]


def logprobs_row(likely: Mapping[int, Logprob]) -> dict[str, Any]:
    """The tokens of one position by id, the likeliest first."""
    return {
        str(token): {
            "logprob": _finite(likely[token].logprob),
            "rank": likely[token].rank,
            "decoded_token": likely[token].decoded_token,
        }
        for token in _by_rank(likely)
    }


def _embeddings(row: Row, completions: Sequence[Completion], served: AnswerHeader) -> dict[str, Any]:
    encode = embedding_base64 if row.answered["encoding_format"] == BASE64 else embedding_numbers
    prompt_tokens = sum(completion.prompt_tokens for completion in completions)
    return {
        "id": f"embd-{_id(served, row.number, 'body')}",
        "object": "list",
        "created": served.created,
        "model": served.model,
        "data": [
            {"object": "embedding", "index": index, "embedding": encode(completion)}
            for index, completion in enumerate(completions)
        ],
        "usage": {"prompt_tokens": prompt_tokens, "total_tokens": prompt_tokens},
    }


def _line(
    served: AnswerHeader, number: int, custom_id: str | None, *, status: int, body: dict[str, Any], error: object
) -> dict[str, Any]:
    return {
        "id": f"batch_req_{_id(served, number, 'line')}",
        "custom_id": custom_id,
        "response": {"status_code": status, "request_id": _id(served, number, "request"), "body": body},
        "error": error,
    }


def _id(served: AnswerHeader, number: int, kind: str) -> str:
    return uuid.uuid5(_IDS, f"{served.job}:{number}:{kind}").hex


def _usage(completions: Sequence[Completion]) -> dict[str, Any]:
    """Token counts: prompt tokens once per prompt, completion tokens of all samples."""
    prompts = [completion for completion in completions if completion.sample == 0]
    prompt_tokens = sum(completion.prompt_tokens for completion in prompts)
    completion_tokens = sum(completion.completion_tokens for completion in completions)
    reasoning = [completion.reasoning_tokens for completion in completions if completion.reasoning_tokens is not None]
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": sum(completion.cached_tokens for completion in prompts)},
        **({"completion_tokens_details": {"reasoning_tokens": sum(reasoning)}} if reasoning else {}),
    }


def _by_rank(likely: Mapping[int, Logprob]) -> list[int]:
    return sorted(likely, key=lambda token: (likely[token].rank, token))


def _finite(logprob: float) -> float:
    return max(logprob, LEAST_LOGPROB)
