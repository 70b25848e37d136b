"""Requests, sampling parameters and completions. Fields that vLLM also has keep vLLM's names."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any

from moelight.core.errors import InputError, did_you_mean

if TYPE_CHECKING:
    import numpy as np

MOST_SAMPLES = 16_384  # per prompt, and per row over all its prompts if n > 1; vLLM's bound of n
DEFAULT_RESAMPLINGS, MAX_RESAMPLINGS = 3, 16
INVALID, TRUNCATED = "structured_output_invalid", "structured_output_truncated"
LAST, MEAN, CLS = POOLING_TYPES = ("last", "mean", "cls")
STRUCTURES = ("json", "regex", "choice", "grammar", "json_object")
_MOST = sys.float_info.max
# The least value of integers, and the least and the most of numbers.
_LEAST = {
    "n": 1,
    "logprobs": -1,
    "prompt_logprobs": -1,
    "min_tokens": 0,
    "top_k": -1,
    "seed": 0,
    "thinking_token_budget": 0,
}
_RANGES = {
    "temperature": (0.0, 2.0),
    "top_p": (0.0, 1.0),
    "min_p": (0.0, 1.0),
    "presence_penalty": (-2.0, 2.0),
    "frequency_penalty": (-2.0, 2.0),
    "repetition_penalty": (0.0, _MOST),
}


_STRUCTURE = "structured_outputs"


@dataclass(frozen=True, kw_only=True, slots=True)
class StructuredOutputs:
    """The constraint on a completion's text: exactly one of the first five fields is given. Source: vLLM's
    StructuredOutputsParams.

    Attributes:
        json: a JSON schema, as an object or its text.
        regex: a regular expression that the whole text matches.
        choice: the allowed texts.
        grammar: a Lark grammar.
        json_object: True requires any JSON object.
        strict: True refuses a JSON schema with keywords that no grammar enforces. False, the default: finished answers
            are validated for these.
        resamplings: the most times that an answer is generated again because it fails validation; at most 16.

    Raises:
        InputError: no field or several fields are given, or a value has the wrong type.
    """

    json: Mapping[str, Any] | str | None = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    json_object: bool = False
    strict: bool = False
    resamplings: int = DEFAULT_RESAMPLINGS

    def __post_init__(self) -> None:
        for name in ("regex", "grammar"):
            value = getattr(self, name)
            if value is not None and not (isinstance(value, str) and value):
                raise _wrong_structure(f": {name} must be a non-empty string")
        if self.json is not None and not isinstance(self.json, (Mapping, str)):
            raise _wrong_structure(": json must be a JSON schema: an object or its text")
        if self.choice is not None:
            object.__setattr__(self, "choice", _texts(_STRUCTURE, self.choice, part=": choice"))
        _flag(_STRUCTURE, self.json_object, part=": json_object")
        _flag(_STRUCTURE, self.strict, part=": strict")
        _integer(_STRUCTURE, self.resamplings, least=0, part=": resamplings")
        if self.resamplings > MAX_RESAMPLINGS:
            raise _wrong_structure(f": resamplings must be at most {MAX_RESAMPLINGS}")
        set_fields = [name for name in STRUCTURES if getattr(self, name) not in (None, False)]
        if len(set_fields) != 1:
            raise _wrong_structure(
                f" needs exactly one of {', '.join(STRUCTURES)}, not {' and '.join(set_fields) or 'none of them'}"
            )

    @property
    def schema(self) -> str | None:
        """The text of the JSON schema; None if the structure is no JSON."""
        if self.json_object:
            return '{"type": "object"}'
        if self.json is None or isinstance(self.json, str):
            return self.json
        try:
            return json.dumps(self.json)
        except RecursionError:
            raise _wrong_structure(": json is nested too deeply") from None

    @classmethod
    def from_dict(cls, values: object) -> StructuredOutputs:
        """The constraint described by a request.

        Args:
            values: an object with one of the fields; null fields are ignored.

        Raises:
            InputError: ``values`` is no object, has an unknown field, or does not have exactly one of the known ones.
        """
        names = [field.name for field in fields(cls)]
        if not isinstance(values, dict):
            raise _wrong_structure(f" must be an object with one of {', '.join(STRUCTURES)}")
        for name in values:
            if name not in names:
                raise _wrong_structure(f": unknown field {name!r}{did_you_mean(str(name), names)}")
        return cls(**{name: value for name, value in values.items() if value is not None})


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingParams:
    """Sampling and stopping parameters: names, meanings and order of application are vLLM's.

    A sampled completion depends on ``seed`` and the sample's number alone, not on the rest of the batch.

    Attributes:
        n: completions per prompt, at most 16,384.
        max_tokens: the most generated tokens; None: as many as the model's context holds after the prompt; 0 scores the
            prompt alone and requires ``prompt_logprobs``.
        min_tokens: the tokens that are generated before eos, a stop token or a stop text may end the completion.
        temperature: 0 to 2; 0, the default, is greedy: offline jobs should be repeatable.
        top_p: the likeliest tokens of this total probability are sampled; 1: no limit.
        top_k: the number of likeliest tokens that are sampled; 0 or -1: no limit.
        min_p: the least probability of a sampled token, as a fraction of the likeliest token's.
        seed: at least 0 and below 2^64.
        stop: texts that end the completion.
        stop_token_ids: tokens that end the completion, besides eos.
        ignore_eos: True if eos does not end the completion.
        presence_penalty: -2 to 2, subtracted from the logits of tokens generated before.
        frequency_penalty: -2 to 2, subtracted once per earlier occurrence in the generated tokens.
        repetition_penalty: above 0; positive logits of tokens in the prompt or completion are divided by it, negative
            ones multiplied.
        logit_bias: -100 to 100 by token id, added to the logits.
        allowed_token_ids: the only tokens that may be generated, end-of-sequence tokens included; None: all.
        bad_words: texts that the completion never completes, at the start of a word and inside of one. A text of
            several tokens loses only its last one, and only after the others.
        logprobs: the log-probability of every generated token and those of this many likeliest tokens are returned,
            before temperature and penalties (0: the token itself only; -1: the whole vocabulary).
        prompt_logprobs: as ``logprobs``, for every prompt token but the first.
        skip_special_tokens: True if special tokens are left out of the text.
        include_stop_str_in_output: True if the stop text or stop token is kept in the text.
        structured_outputs: the constraint on the text, behind the reasoning if that is split off.
        thinking_token_budget: the most tokens of reasoning, after which it is closed; None: no limit. It applies where
            the reasoning is split off.
        return_routed_experts: the experts that each token was routed to are returned. The prompt is computed, even if
            an earlier one begins alike.

    Raises:
        InputError: a value is out of range or has the wrong type.
    """

    n: int = 1
    max_tokens: int | None = 16
    min_tokens: int = 0
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] | None = None
    allowed_token_ids: Sequence[int] | None = None
    bad_words: Sequence[str] = ()
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    structured_outputs: StructuredOutputs | None = None
    thinking_token_budget: int | None = None
    return_routed_experts: bool = False

    def __post_init__(self) -> None:
        for name, least in _LEAST.items():
            if getattr(self, name) is not None or name in ("n", "min_tokens", "top_k"):
                _integer(name, getattr(self, name), least=least)
        if self.n > MOST_SAMPLES:
            raise InputError(
                f"n must be at most {MOST_SAMPLES:,}: a row is written when its last answer is there", field="n"
            )
        self._check_lengths()
        for name, (low, high) in _RANGES.items():
            _number(name, getattr(self, name), low=low, high=high)
        for name in ("top_p", "repetition_penalty"):
            if getattr(self, name) == 0:
                raise InputError(f"{name} must be above 0, not 0", field=name)
        if self.seed is not None and self.seed >= 1 << 64:
            raise InputError(f"seed must be below 2**64, not {self.seed}", field="seed")
        object.__setattr__(self, "stop", _texts("stop", self.stop))
        object.__setattr__(self, "bad_words", _texts("bad_words", self.bad_words))
        object.__setattr__(self, "stop_token_ids", _token_ids("stop_token_ids", self.stop_token_ids))
        if self.allowed_token_ids is not None:
            allowed = _token_ids("allowed_token_ids", self.allowed_token_ids, at_least_one=True)
            object.__setattr__(self, "allowed_token_ids", allowed)
        if self.logit_bias is not None:
            object.__setattr__(self, "logit_bias", _biases(self.logit_bias))
        for name in ("ignore_eos", "skip_special_tokens", "include_stop_str_in_output", "return_routed_experts"):
            _flag(name, getattr(self, name))
        outputs: object = self.structured_outputs
        if outputs is not None and not isinstance(outputs, StructuredOutputs):
            object.__setattr__(self, "structured_outputs", StructuredOutputs.from_dict(outputs))

    def _check_lengths(self) -> None:
        if self.max_tokens is None:
            return
        _integer("max_tokens", self.max_tokens, least=0 if self.prompt_logprobs is not None else 1)
        if self.min_tokens > self.max_tokens:
            raise InputError(f"min_tokens {self.min_tokens} is above max_tokens {self.max_tokens}", field="min_tokens")

    @property
    def generates(self) -> bool:
        """True if tokens are to be generated; False if the prompt is only scored."""
        return self.max_tokens != 0

    def most_tokens(self, prompt_tokens: int, context: int) -> int:
        """The most tokens that may be generated after a prompt, in a context of ``context`` tokens."""
        room = max(0, context - prompt_tokens)
        return room if self.max_tokens is None else min(self.max_tokens, room)

    @property
    def greedy(self) -> bool:
        """True if the likeliest token is always taken."""
        return self.temperature == 0.0

    @classmethod
    def from_dict(cls, values: dict[str, Any], *, base: SamplingParams | None = None) -> SamplingParams:
        """The parameters ``base`` with the fields in ``values`` replaced.

        Args:
            values: values by field name; None keeps the field.
            base: the defaults if None.

        Raises:
            InputError: an unknown field (the message names the closest known one) or a value out of range.
        """
        names = [field.name for field in fields(cls)]
        for name in values:
            if name not in names:
                raise InputError(f"unknown sampling field {name!r}{did_you_mean(name, names)}", field=name)
        return replace(base or cls(), **{name: value for name, value in values.items() if value is not None})


@dataclass(frozen=True, kw_only=True, slots=True)
class PoolingParams:
    """How the final hidden states of a prompt become one embedding. Fields that vLLM also has keep vLLM's names. What
    is None is as the checkpoint's sentence-transformers files say, if it has them; else `DEFAULT_POOLING`.

    Attributes:
        pooling_type: ``last`` (the hidden state of the last token), ``mean`` (of all tokens) or ``cls`` (the first).
        normalize: True if the embedding, after `dimensions`, is divided by its L2 norm.
        dimensions: only so many first numbers of the embedding are kept (Matryoshka); None: all.

    Raises:
        InputError: a value is out of range or has the wrong type.
    """

    pooling_type: str | None = None
    normalize: bool | None = None
    dimensions: int | None = None

    def __post_init__(self) -> None:
        if self.pooling_type is not None and self.pooling_type not in POOLING_TYPES:
            near = did_you_mean(str(self.pooling_type), POOLING_TYPES)
            message = f"pooling_type must be last, mean or cls, not {self.pooling_type!r}{near}"
            raise InputError(message, field="pooling_type")
        if self.normalize is not None:
            _flag("normalize", self.normalize)
        if self.dimensions is not None:
            _integer("dimensions", self.dimensions, least=1)

    def over(self, defaults: PoolingParams) -> PoolingParams:
        """These parameters, with those of ``defaults`` where they are None."""
        stated = {name: value for name, value in asdict(self).items() if value is not None}
        return replace(defaults, **stated)


def most_prompt_tokens(sampling: SamplingParams, pooling: PoolingParams | None, context: int) -> int:
    """The most tokens that a prompt may have, in a context of ``context`` tokens. A token that is generated needs a
    position; the last one of a prompt that is only scored is not computed and needs none."""
    if sampling.generates:
        return context - 1
    return context + 1 if pooling is None else context


@dataclass(frozen=True, kw_only=True, slots=True)
class ReasoningStart:
    """The state of the reasoning at the start of an answer.

    Attributes:
        format: name of the markers around reasoning.
        state: ``open`` (the prompt has opened the reasoning), ``closed`` (the answer has none) or ``undecided`` (the
            model may open it).
        calls: the content is forced to be a tool call.
    """

    format: str
    state: str
    calls: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class ToolRequest:
    """The tools that an answer may call.

    Attributes:
        tools: OpenAI's tools, objects with a ``function`` of ``name``, ``parameters`` and ``strict``.
        choice: ``auto``, ``required``, or the name of the tool that must be called.
        parallel: an answer may have several calls.
        format: name of the format in which the model writes calls; empty until the model is known.
        strict: True refuses parameters with keywords that no grammar enforces, for tools without a ``strict``.
        resamplings: the most times that an answer is generated again because the arguments of a call are invalid.
    """

    tools: Sequence[Mapping[str, Any]]
    choice: str = "auto"
    parallel: bool = True
    format: str = ""
    strict: bool = False
    resamplings: int = DEFAULT_RESAMPLINGS

    @property
    def forced(self) -> bool:
        return self.choice != "auto"

    @property
    def callable(self) -> dict[str, Mapping[str, Any]]:
        """The functions that may be called, by name."""
        functions = [tool["function"] for tool in self.tools]
        any_of_them = self.choice in ("auto", "required")
        return {function["name"]: function for function in functions if any_of_them or function["name"] == self.choice}


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """One prompt to complete.

    Attributes:
        index: chosen by the caller; its completions have the same index.
        token_ids: the prompt.
        sampling: how the prompt is completed.
        scored_from: with ``prompt_logprobs``, the position of the first prompt token that is scored.
        reasoning: how the answer begins if its reasoning is split from its text; None if the text is left whole.
        tools: the tools that the answer may call; None if calls are not read.
        pooling: how the prompt becomes an embedding, with `PROMPT_ONLY`; None if it does not.
    """

    index: int
    token_ids: tuple[int, ...]
    sampling: SamplingParams
    scored_from: int = 1
    reasoning: ReasoningStart | None = None
    tools: ToolRequest | None = None
    pooling: PoolingParams | None = None

    def most_tokens(self, context: int) -> int:
        """The most tokens that the prompt may have, in a context of ``context`` tokens."""
        return most_prompt_tokens(self.sampling, self.pooling, context)

    @property
    def pooled(self) -> range:
        """Positions of the prompt whose final hidden states are pooled."""
        if self.pooling is None:
            return range(0)
        tokens = len(self.token_ids)
        by_type = {LAST: range(tokens - 1, tokens), MEAN: range(tokens), CLS: range(1)}
        return by_type[self.pooling.pooling_type or LAST]


@dataclass(frozen=True, kw_only=True, slots=True)
class Logprob:
    """The score of one token at one position.

    Attributes:
        logprob: natural logarithm of the token's probability.
        rank: rank among all tokens, 1 for the likeliest.
        decoded_token: the token's text.
    """

    logprob: float
    rank: int
    decoded_token: str


@dataclass(frozen=True, kw_only=True, slots=True)
class StructureError:
    """Why a finished answer does not have the structure that was asked for.

    Attributes:
        code: `INVALID`, or `TRUNCATED` if ``max_tokens`` or a stop ended it.
        path: the JSON pointer of the offending value in the answer; ``schema_path``: of the keyword in the schema.
    """

    code: str
    message: str
    path: str = ""
    schema_path: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class ToolCall:
    """A call of a tool in an answer.

    Attributes:
        name: the tool's.
        arguments: a JSON object as text.
        id: identity of the call; None until one is given to it.
    """

    name: str
    arguments: str
    id: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestMetrics:
    """Seconds of one answer. Tokens of one pass come at one time.

    Attributes:
        queue_s: from the arrival of the request until its first pass was packed.
        first_token_s: from then to the first token, also one of an answer that was generated again; None if nothing was
            generated.
        generation_s: from the first token to the last; None if nothing was generated.
    """

    queue_s: float
    first_token_s: float | None = None
    generation_s: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Completion:
    """One answer to one request.

    Attributes:
        index: the request's.
        text: the generated text, without the stop text unless ``include_stop_str_in_output``, and without the reasoning
            where that is split off.
        token_ids: generated tokens, without the closing eos or stop token.
        finish_reason: ``stop``, ``tool_calls``, ``length`` or ``error``.
        prompt_tokens: tokens of the prompt.
        sample: number of the answer among the request's ``n``, from 0.
        stop_reason: the stop text or stop token id that ended the completion, if one did; after an error, its text.
        error_code: after an error, a short machine-readable reason.
        cached_tokens: the first tokens of the prompt, which were computed for an earlier request.
        cumulative_logprob: sum of the generated tokens' log-probabilities; None without ``logprobs``.
        logprobs: one mapping by token id per generated token: the requested likeliest tokens and the token itself.
        prompt_logprobs: as ``logprobs``, one per prompt token; None where the token was not scored.
        reasoning: the reasoning before the text, without its markers; None if there is none.
        reasoning_tokens: number of generated tokens up to the end of the reasoning; None where it is not split off.
        structure_error: why the text, or the arguments of a call, lack the structure that was asked for; None if they
            have it, or none was.
        attempts: how often the answer was generated until it was valid, or until ``resamplings`` were used up;
            ``discarded_tokens``: the tokens of all attempts but the last.
        tool_calls: calls of tools, which are not in the text.
        embedding: float32 [dimensions], of a request with `PoolingParams`.
        prompt_routed_experts: with ``return_routed_experts``, int16 [prompt tokens, layers with experts, k]: the ids
            of the experts that compute each prompt token, in ascending order; without the last token if nothing is
            generated.
        routed_experts: the same of the generated tokens; the last one is missing if it was not computed, because
            ``max_tokens`` or a stop text ended the answer.
        metrics: the seconds that the answer took.
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    prompt_tokens: int
    sample: int = 0
    stop_reason: int | str | None = None
    error_code: str | None = None
    cached_tokens: int = 0
    cumulative_logprob: float | None = None
    logprobs: tuple[Mapping[int, Logprob], ...] | None = None
    prompt_logprobs: tuple[Mapping[int, Logprob] | None, ...] | None = None
    reasoning: str | None = None
    reasoning_tokens: int | None = None
    structure_error: StructureError | None = None
    attempts: int = 1
    discarded_tokens: int = 0
    tool_calls: tuple[ToolCall, ...] = ()
    embedding: np.ndarray | None = field(default=None, compare=False)
    prompt_routed_experts: np.ndarray | None = field(default=None, compare=False)
    routed_experts: np.ndarray | None = field(default=None, compare=False)
    metrics: RequestMetrics | None = field(default=None, compare=False)

    @property
    def completion_tokens(self) -> int:
        """Generated tokens, without the closing eos or stop token."""
        return len(self.token_ids)

    @property
    def time_to_first_token_s(self) -> float | None:
        """Seconds from the arrival of the request to the first token; None if there is none."""
        if self.metrics is None or self.metrics.first_token_s is None:
            return None
        return self.metrics.queue_s + self.metrics.first_token_s

    @property
    def time_per_output_token_s(self) -> float | None:
        """Mean seconds from one token to the next; None below two."""
        if self.metrics is None or self.metrics.generation_s is None or self.completion_tokens < 2:
            return None
        return self.metrics.generation_s / (self.completion_tokens - 1)


def _wrong_structure(text: str) -> InputError:
    return InputError(f"{_STRUCTURE}{text}", field=_STRUCTURE)


def _texts(field: str, value: object, *, part: str = "") -> tuple[str, ...]:
    texts = (value,) if isinstance(value, str) else value
    if not isinstance(texts, (tuple, list)) or not all(isinstance(text, str) and text for text in texts):
        raise InputError(f"{field}{part} must be a non-empty string or a list of them", field=field)
    return tuple(texts)


def _is_token_id(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _token_ids(field: str, value: object, *, at_least_one: bool = False) -> tuple[int, ...]:
    if not isinstance(value, (tuple, list)) or not all(map(_is_token_id, value)) or (at_least_one and not value):
        raise InputError(f"{field} must be a {'non-empty ' if at_least_one else ''}list of token ids", field=field)
    return tuple(value)


def _biases(value: object) -> dict[int, float]:
    """``value`` with integer token ids as keys; JSON keys are strings."""
    if not isinstance(value, Mapping):
        raise InputError("logit_bias must map token ids to numbers", field="logit_bias")
    biases: dict[int, float] = {}
    for key, bias in value.items():
        token = int(key) if isinstance(key, str) and key.isascii() and key.isdigit() and len(key) < 10 else key
        if not _is_token_id(token):
            raise InputError(f"logit_bias: {key!r} is no token id", field="logit_bias")
        _number("logit_bias", bias, low=-100.0, high=100.0, part=f" of {key}")
        biases[token] = float(bias)
    return biases


def _flag(field: str, value: object, *, part: str = "") -> None:
    if not isinstance(value, bool):
        raise InputError(f"{field}{part} must be true or false, not {value!r}", field=field)


def _integer(field: str, value: object, *, least: int, part: str = "") -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise InputError(f"{field}{part} must be an integer of at least {least}, not {value!r}", field=field)


def _number(field: str, value: object, *, low: float, high: float, part: str = "") -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value <= high:
        bound = f"at least {low:g}" if high == _MOST else f"between {low:g} and {high:g}"
        raise InputError(f"{field}{part} must be a finite number {bound}, not {value!r}", field=field)


PROMPT_ONLY = SamplingParams(max_tokens=0, prompt_logprobs=0)  # of a prompt after which nothing is generated
DEFAULT_POOLING = PoolingParams(pooling_type=LAST, normalize=False)
