"""OpenAI batch lines of ``/v1/chat/completions``, ``/v1/completions`` and ``/v1/embeddings``: their valid fields, and
the rows read from them.

Omitted fields take the job's defaults, not OpenAI's (whose temperature is 1); `COMPLETION_TOKENS` where the job limits
no answer. URLs and paths in a line are neither fetched nor opened.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, TypeVar

import msgspec

from moelight.batch.embedding import ENCODING_FORMATS, FLOAT
from moelight.batch.fields import (
    LineReader,
    RowContext,
    are_token_ids,
    read_custom_id,
    read_messages,
    read_row_object,
    unknown_field,
)
from moelight.batch.openai_answers import CHAT, COMPLETIONS, EMBEDDINGS, OpenAIFormat
from moelight.batch.rows import BadRow, Prompt, Row, bad_row
from moelight.batch.source import InputSource
from moelight.core.errors import InputError
from moelight.core.request import MOST_SAMPLES, PROMPT_ONLY, PoolingParams, SamplingParams, ToolRequest
from moelight.engine.chat import Conversation

_LINE_FIELDS = ("custom_id", "method", "url", "body")
_MOST_LOGPROBS = 20
COMPLETION_TOKENS = 16  # of /v1/completions without ``max_tokens``, as at OpenAI and in vLLM; null: no limit
_TOOL_NAME, _NAME_LETTERS = re.compile(r"[\w.-]{1,128}"), "letters, digits, _, - and ."

# Older names of constraints, and the StructuredOutputs field of each.
_GUIDED = {"guided_json": "json", "guided_regex": "regex", "guided_choice": "choice", "guided_grammar": "grammar"}
# Fields for a service that do not apply to a job: any value is accepted and ignored.
_IGNORED = frozenset({
    "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention",
    "verbosity", "priority", "request_id", "guided_decoding_backend",
    "cache_salt", "length_penalty", "spaces_between_special_tokens",
})  # fmt: skip
# Known fields that would change the answer and are not served: accepted only with a false value.
_REFUSED = {
    "stream": "a batch is not streamed",
    "stream_options": "a batch is not streamed",
    "suffix": "text is continued, not filled in",
    "functions": "send tools",
    "function_call": "send tool_choice",
    "audio": "only text is generated",
    "prediction": "predicted outputs are not used",
    "web_search_options": "nothing is fetched",
    "chat_template": "the checkpoint's own template is used",
    "documents": "send them in chat_template_kwargs",
    "echo": "only completions echo",
    "use_beam_search": "no beam search",
    "logits_processors": "no code is taken from a row",
    "vllm_xargs": "there are none",
    "truncate_prompt_tokens": "prompts are not cut",
    "mm_processor_kwargs": "only text is read",
    "return_tokens_as_token_ids": "use the simple format with token_ids",
    "return_token_ids": "use the simple format with token_ids",
}  # fmt: skip


class _Body(msgspec.Struct, kw_only=True):
    model: str | None = None
    add_special_tokens: bool | None = None


class _RequestBody(_Body, kw_only=True):
    n: int | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
    thinking_token_budget: int | None = None
    return_routed_experts: bool | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None


class _ChatBody(_RequestBody, kw_only=True):
    messages: Any = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    modalities: list[str] | None = None
    reasoning_effort: str | None = None
    include_reasoning: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None


class _CompletionBody(_RequestBody, kw_only=True):
    prompt: Any = None
    logprobs: int | None = None
    echo: bool | None = None
    best_of: int | None = None


class _EmbeddingBody(_Body, kw_only=True):
    input: Any = None
    encoding_format: str | None = None
    dimensions: int | None = None
    normalize: bool | None = None


_BODIES: dict[str, type[_Body]] = {CHAT: _ChatBody, COMPLETIONS: _CompletionBody, EMBEDDINGS: _EmbeddingBody}
_FIELDS = {url: frozenset(body.__struct_fields__) for url, body in _BODIES.items()}
# Fields that are passed to SamplingParams unchanged.
_SAMPLING_FIELDS = {field.name for field in fields(SamplingParams)} & {*_RequestBody.__struct_fields__}
_SAMPLING_FIELDS.remove("structured_outputs")
_B = TypeVar("_B", bound=_Body)


@dataclass(frozen=True, kw_only=True, slots=True)
class _ParsedBody:
    """The parsed request of a body; its sampling fields are not yet validated. ``defaults``: of its endpoint.
    ``pooling``: of embeddings."""

    prompts: tuple[Prompt, ...] = ()
    conversation: Conversation | None = None
    tools: ToolRequest | None = None
    pooling: PoolingParams | None = None
    sampling: dict[str, Any] = field(default_factory=dict)
    defaults: Mapping[str, Any] = field(default_factory=dict)
    answered: Mapping[str, Any]


class OpenAIReader(LineReader):
    """Reads rows from OpenAI batch lines."""

    def __init__(self, context: RowContext, source: InputSource) -> None:
        super().__init__(context, source)
        metrics = context.per_request_metrics
        self.format = OpenAIFormat(vocabulary=context.vocabulary, per_request_metrics=metrics)
        self._readers: Mapping[str, Callable[[dict[str, Any]], _ParsedBody]] = {
            CHAT: self._chat,
            COMPLETIONS: self._completion,
            EMBEDDINGS: self._embedding,
        }

    def read(self, raw: bytes, number: int, line: int) -> Row | BadRow:
        custom_id: str | None = None
        kind = ""
        try:
            values = read_row_object(raw, holding="custom_id, method, url and body")
            custom_id = read_custom_id(values)
            kind = _url(values)
            if custom_id is None:
                raise _missing("custom_id")
            body = values.get("body")
            if body is None:
                raise _missing("body")
            if not isinstance(body, dict):
                raise InputError("body must be an object", field="body")
            _check_names(body, _FIELDS[kind])
            asked = self._readers[kind](body)
            return Row(
                number=number,
                line=line,
                custom_id=custom_id,
                kind=kind,
                prompts=asked.prompts,
                conversation=asked.conversation,
                tools=asked.tools,
                sampling=PROMPT_ONLY if asked.pooling is not None else self._sampling(asked, body),
                pooling=asked.pooling,
                limit=asked.sampling.get("max_tokens"),
                answered=asked.answered,
            )
        except (InputError, RecursionError) as error:
            return bad_row(number, line, custom_id, error, kind=kind)

    def _sampling(self, asked: _ParsedBody, body: dict[str, Any]) -> SamplingParams:
        try:
            sampling = self._samplings.make({**asked.defaults, **asked.sampling})
        except InputError as error:
            if error.field == "max_tokens" and body.get("max_tokens") is None:
                error.field = "max_completion_tokens"
            raise
        if sampling.n > 1 and sampling.n * len(asked.prompts) > MOST_SAMPLES:
            message = f"{len(asked.prompts):,} prompts and n {sampling.n:,} ask for more than {MOST_SAMPLES:,} answers"
            raise InputError(f"{message}; send them as several rows", field="n")
        return sampling

    def _chat(self, values: dict[str, Any]) -> _ParsedBody:
        body, sampling = self._convert(values, _ChatBody)
        if body.messages is None:
            raise _missing("messages")
        conversation = _conversation(body)
        _constrain(sampling, body)
        tools = self._tools(body) if conversation.tools else None
        if tools is None and body.tool_choice not in (None, "none", "auto"):
            raise InputError("tool_choice needs tools", field="tool_choice")
        if tools is not None and tools.forced and "structured_outputs" in sampling:
            raise InputError("a forced tool call cannot have another structure; send one of them", field="tool_choice")
        if body.max_completion_tokens is not None:
            if body.max_tokens not in (None, body.max_completion_tokens):
                raise InputError("max_tokens and max_completion_tokens differ; send one of them", field="max_tokens")
            sampling["max_tokens"] = body.max_completion_tokens
        _check_logprobs("top_logprobs", body.top_logprobs)
        if body.top_logprobs and not body.logprobs:
            raise InputError("top_logprobs needs logprobs to be true", field="top_logprobs")
        asked = (body.top_logprobs or 0) if body.logprobs else None
        if asked is not None:
            sampling["logprobs"] = asked
        answered = {
            "logprobs": asked,
            "prompt_logprobs": body.prompt_logprobs is not None,
            "include_reasoning": body.include_reasoning is not False,
        }
        return _ParsedBody(conversation=conversation, tools=tools, sampling=sampling, answered=answered)

    def _tools(self, body: _ChatBody) -> ToolRequest:
        """The tools of ``body``, and which must be called."""
        return ToolRequest(
            tools=body.tools or (),
            choice=_tool_choice(body),
            parallel=body.parallel_tool_calls is not False,
            strict=self._context.strict,
            resamplings=self._context.resamplings,
        )

    def _completion(self, values: dict[str, Any]) -> _ParsedBody:
        body, sampling = self._convert(values, _CompletionBody)
        prompts = _prompts("prompt", body.prompt)
        defaults = {}
        if "max_tokens" not in values and self._context.defaults.max_tokens is None:
            defaults["max_tokens"] = max(COMPLETION_TOKENS, body.min_tokens or 0)
        _constrain(sampling, body)
        if body.best_of is not None and body.best_of != (body.n or 1):
            raise InputError("best_of must be equal to n, or left out", field="best_of", code="unsupported_parameter")
        shown = body.prompt_logprobs is not None
        _check_logprobs("logprobs", body.logprobs)
        if body.logprobs is not None:
            sampling["logprobs"] = body.logprobs
        # Echoed tokens have log-probabilities too, and a prompt that is only scored must request some.
        if body.echo and not shown and (body.logprobs is not None or body.max_tokens == 0):
            sampling["prompt_logprobs"] = body.logprobs or 0
        answered = {"logprobs": body.logprobs, "echo": bool(body.echo), "prompt_logprobs": shown}
        return _ParsedBody(prompts=prompts, sampling=sampling, defaults=defaults, answered=answered)

    def _embedding(self, values: dict[str, Any]) -> _ParsedBody:
        body, _ = self._convert(values, _EmbeddingBody)
        encoding_format = body.encoding_format or FLOAT
        if encoding_format not in ENCODING_FORMATS:
            message = f"encoding_format must be {' or '.join(ENCODING_FORMATS)}, not {encoding_format[:40]!r}"
            raise InputError(message, field="encoding_format")
        pooling = PoolingParams(dimensions=body.dimensions, normalize=body.normalize)
        return _ParsedBody(
            prompts=_prompts("input", body.input),
            pooling=pooling.over(self._context.pooling),
            answered={"encoding_format": encoding_format},
        )

    def _convert(self, values: dict[str, Any], kind: type[_B]) -> tuple[_B, dict[str, Any]]:
        """``values`` with their types checked, and those that SamplingParams takes unchanged."""
        try:
            body = msgspec.convert(values, kind, strict=False)
        except msgspec.ValidationError as error:
            # msgspec reports the expected type, the actual type, and after this mark the path.
            message, _, path = str(error).partition(" - at `$.")
            path = path.removesuffix("`")
            message = message.replace(" | null", "").replace("`", "").replace("Expected", "must be", 1)
            raise InputError(f"{path} {message}".strip(), field=path or None) from None
        except UnicodeEncodeError:
            raise InputError("a key holds half of a surrogate pair", code="invalid_text") from None
        special_tokens = kind is not _ChatBody
        if body.add_special_tokens not in (None, special_tokens):
            around = "around a prompt the tokenizer puts them" if special_tokens else "the chat template writes them"
            raise _unsupported("add_special_tokens", around)
        if body.model is not None:
            try:
                self._context.models.check(body.model)
            except InputError as error:
                raise InputError(str(error), field="model", code=error.code) from None
        return body, {
            name: value for name in values if name in _SAMPLING_FIELDS and (value := getattr(body, name)) is not None
        }


def _missing(param: str) -> InputError:
    return InputError(f"{param} is missing", field=param, code="missing_required_parameter")


def _unsupported(param: str, reason: str) -> InputError:
    return InputError(f"{param}: {reason}", field=param, code="unsupported_parameter")


def _url(values: dict[str, Any]) -> str:
    for name in values:
        if name not in _LINE_FIELDS:
            raise unknown_field(name, _LINE_FIELDS)
    url, method = values.get("url"), values.get("method", "POST")
    if url is None:
        raise _missing("url")
    if not isinstance(url, str) or url not in _BODIES:
        served = f"{CHAT}, {COMPLETIONS} and {EMBEDDINGS} are served"
        raise InputError(f"unknown endpoint {url!r}: {served}", field="url", code="invalid_url")
    if method != "POST":
        raise InputError(f"method must be POST, not {method!r}", field="method", code="invalid_method")
    return url


def _check_names(values: dict[str, Any], known_names: frozenset[str]) -> None:
    """Refuse fields that are unknown, or known and not served."""
    for name in values.keys() - known_names - _IGNORED:
        if name not in _REFUSED:
            raise unknown_field(name, sorted(known_names | _IGNORED | _REFUSED.keys()))
        if values[name]:
            raise _unsupported(name, _REFUSED[name])


def _conversation(body: _ChatBody) -> Conversation:
    messages = read_messages(body.messages)
    if body.modalities not in (None, ["text"]):
        raise _unsupported("modalities", "only text is generated")
    goes_on = bool(body.continue_final_message)
    if goes_on and body.add_generation_prompt:
        raise InputError(
            "continue_final_message and add_generation_prompt exclude each other", field="continue_final_message"
        )
    kwargs = dict(body.chat_template_kwargs or {})
    if body.reasoning_effort is not None:
        kwargs.setdefault("reasoning_effort", body.reasoning_effort)
    return Conversation(
        messages=messages,
        tools=body.tools if body.tools and body.tool_choice != "none" else None,
        add_generation_prompt=not goes_on if body.add_generation_prompt is None else body.add_generation_prompt,
        continue_final_message=goes_on,
        template_kwargs=kwargs,
    )


def _tool_choice(body: _ChatBody) -> str:
    """Which of the tools of ``body`` must be called; raises InputError if they, or the choice, are none."""
    names = []
    for number, tool in enumerate(body.tools or (), start=1):
        function = tool.get("function")
        name = function.get("name") if isinstance(function, dict) else None
        if not isinstance(function, dict) or not isinstance(name, str) or not _TOOL_NAME.fullmatch(name):
            raise InputError(f"tool {number}: function must be an object with a name of {_NAME_LETTERS}", field="tools")
        if not isinstance(function.get("parameters") or {}, dict):
            raise InputError(f"tool {number}: parameters must be a JSON schema", field="tools")
        names.append(name)
    choice: Any = body.tool_choice or "auto"
    if isinstance(choice, dict):
        function = choice.get("function")
        choice = function.get("name") if isinstance(function, dict) else None
        if choice not in names:
            raise InputError(f"tool_choice: no tool is named {choice!r}", field="tool_choice")
    elif choice not in ("auto", "required"):
        raise InputError(f"tool_choice must be none, auto, required or a function, not {choice!r}", field="tool_choice")
    return str(choice)


def _constrain(sampling: dict[str, Any], body: _RequestBody) -> None:
    """Set ``structured_outputs`` from whichever field of ``body`` gives a constraint."""
    constraints = {
        "response_format": _response_format(body.response_format),
        "structured_outputs": body.structured_outputs,
        **{alias: {name: value} for alias, name in _GUIDED.items() if (value := getattr(body, alias)) is not None},
    }
    requested = {name: constraint for name, constraint in constraints.items() if constraint is not None}
    if len(requested) > 1:
        raise InputError(f"{' and '.join(requested)} are given; send one of them", field=next(iter(requested)))
    for constraint in requested.values():
        sampling["structured_outputs"] = constraint


def _response_format(value: dict[str, Any] | None) -> dict[str, Any] | None:
    if value is None:
        return None
    kind = value.get("type")
    if kind == "text":
        return None
    if kind == "json_object":
        return {"json_object": True}
    if kind != "json_schema":
        raise InputError("response_format: type must be text, json_object or json_schema", field="response_format.type")
    described = value.get("json_schema")
    schema = described.get("schema") if isinstance(described, dict) else None
    if not isinstance(schema, dict):
        raise InputError(
            "response_format: json_schema must be an object with a name and a schema",
            field="response_format.json_schema",
        )
    strict = described.get("strict") if isinstance(described, dict) else None
    return {"json": schema} if strict is None else {"json": schema, "strict": strict}


def _check_logprobs(name: str, value: int | None) -> None:
    if value is not None and not 0 <= value <= _MOST_LOGPROBS:
        raise InputError(f"{name} must be between 0 and {_MOST_LOGPROBS}, not {value}", field=name)


def _prompts(name: str, value: object) -> tuple[Prompt, ...]:
    """``value`` of the field ``name`` is a text, a list of texts, a list of token ids, or a list of such lists."""
    if value is None:
        raise _missing(name)
    if isinstance(value, str):
        return (value,)
    if isinstance(value, list) and value:
        if all(isinstance(item, str) for item in value):
            return tuple(value)
        if are_token_ids(value):
            return (tuple(value),)
        if all(item and are_token_ids(item) for item in value):
            return tuple(tuple(item) for item in value)
    raise InputError(
        f"{name} must be a string, a list of strings, a list of token ids, or a list of such lists", field=name
    )
