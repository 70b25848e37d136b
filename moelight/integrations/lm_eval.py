"""moelight as a model of lm-evaluation-harness: ``--model moelight`` there, or an instance for ``simple_evaluate``.
Texts are tokenized, truncated and answered as by the harness's class for transformers models."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar, cast

# Imported before registering: lm_eval lists its own models only on a lookup while the registry is empty.
import lm_eval.models  # noqa: F401
import torch
from lm_eval import utils
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.models.utils import handle_stop_sequences, normalize_gen_kwargs, postprocess_generated_text
from tqdm import tqdm  # type: ignore[import-untyped]

from moelight import __version__
from moelight.core.errors import ConfigError, InputError, did_you_mean
from moelight.core.request import PROMPT_ONLY, Completion, Request, SamplingParams
from moelight.engine.chat import DEFAULT, Conversation, check_messages
from moelight.engine.options import AUTO, PLANNING
from moelight.engine.tokenizer import Tokenizer
from moelight.models.checkpoints import open_model
from moelight.optimizer.fixed_values import check_activations, check_dtype
from moelight.optimizer.plan import policy_as_dict
from moelight.profiles.workload import Workload

if TYPE_CHECKING:
    from lm_eval.api.instance import Instance

    from moelight.engine.engine import Engine

_T = TypeVar("_T")
_log = logging.getLogger(__name__)

MAX_GEN_TOKS = 256  # the harness's default if a task sets none
_PLANNING = tuple(name for name in PLANNING if name != "batch_size")
Scored = tuple[tuple[str, str] | None, list[int], list[int]]  # texts, ids of the context, ids of the continuation


@register_model("moelight")
class MoELightLM(TemplateLM):
    """A checkpoint behind the three request types of the harness; ``close`` frees the model. Longer requests, or a
    switch between scoring and generation, load the model again with another plan."""

    def __init__(
        self,
        pretrained: str | Engine,
        *,
        max_length: int | None = None,
        batch_size: int | str | None = None,
        device: str | None = None,
        add_bos_token: bool | None = None,
        prefix_token_id: int | None = None,
        max_gen_toks: int = MAX_GEN_TOKS,
        enable_thinking: bool | None = None,
        think_end_token: str | int | None = None,
        chat_template_args: Mapping[str, Any] | None = None,
        **planning: Any,
    ) -> None:
        """Open the checkpoint and its tokenizer; raises ConfigError or CheckpointError.

        Args:
            pretrained: a directory, ``demo``, a model id on the hub, or an engine, which the caller still owns.
            max_length: most tokens that condition a token; None: the model's context.
            batch_size: sequences in a pass; None or ``auto``: planned.
            device: as `Engine` takes it; the number of a device (``cuda:0``) is dropped.
            add_bos_token: True if texts begin with the bos token; None: as the checkpoint's tokenizer does.
            prefix_token_id: id that conditions the first token of a text; None: bos, or eos where there is none.
            max_gen_toks: most generated tokens if a task does not set them.
            enable_thinking: argument of the chat template, as are ``chat_template_args``.
            think_end_token: text or id of the token after which an answer begins.
            planning: `_PLANNING`, as `Engine.from_pretrained` takes them.
        """
        super().__init__()
        for name in planning:
            if name not in _PLANNING:
                raise ConfigError(f"unknown model argument {name!r}{did_you_mean(name, _PLANNING)}")
        check_activations(planning.get("activations"), option="activations")
        check_dtype(planning.get("dtype", AUTO), option="dtype")
        if enable_thinking and think_end_token is None:
            raise ConfigError("enable_thinking=True needs think_end_token: what follows it is the answer")
        self._borrowed = not isinstance(pretrained, str)
        self._name = pretrained if isinstance(pretrained, str) else pretrained.policy.model
        self.engine: Engine | None = None if isinstance(pretrained, str) else pretrained
        self._scores = False  # True if the engine was planned for scoring
        source = open_model(self._name)
        self.profile = source.profile
        self.tokenizer = Tokenizer.of(source.directory)
        self.max_length = max_length or self.profile.max_positions
        self._planning = {
            **planning,
            "batch_size": None if batch_size is None or str(batch_size).startswith(AUTO) else int(batch_size),
            "device": AUTO if device is None else str(device).partition(":")[0],
        }
        self.add_bos_token, self.custom_prefix_token_id = add_bos_token, prefix_token_id
        self.max_gen_toks, self.enable_thinking = max_gen_toks, enable_thinking
        is_id = isinstance(think_end_token, str) and think_end_token.isdigit()
        self.think_end_token = int(cast("str", think_end_token)) if is_id else think_end_token
        self.chat_template_args = dict(chat_template_args or {})
        if enable_thinking is not None:
            self.chat_template_args["enable_thinking"] = enable_thinking

    @classmethod
    def create_from_arg_string(cls, arg_string: str, additional_config: dict[str, Any] | None = None) -> MoELightLM:
        return cls.create_from_arg_obj(utils.simple_parse_args_string(arg_string), additional_config)

    @classmethod
    def create_from_arg_obj(
        cls, arg_dict: dict[str, Any], additional_config: dict[str, Any] | None = None
    ) -> MoELightLM:
        """``arg_dict`` overrides the harness's additional configuration."""
        arguments = {name: value for name, value in (additional_config or {}).items() if value is not None} | arg_dict
        if "pretrained" not in arguments:
            raise ConfigError("the model's arguments name no checkpoint: --model_args pretrained=PATH")
        return cls(**arguments)

    def close(self) -> None:
        """Free the model, unless the caller owns the engine."""
        if self.engine is not None and not self._borrowed:
            self.engine.close()
            self.engine = None

    # --- tokenizer interface of the harness ---

    @property
    def eot_token_id(self) -> int | None:
        """The tokenizer's eos, else the smallest id that ends a completion."""
        named = self.tokenizer.token_id("eos_token")
        return min(self.tokenizer.eos_token_ids, default=None) if named is None else named

    @property
    def prefix_token_id(self) -> int:
        """Id of the token that conditions the first token of a text."""
        for token in (self.custom_prefix_token_id, self.tokenizer.token_id("bos_token"), self.eot_token_id):
            if token is not None:
                return token
        raise ConfigError(f"{self._name}: its tokenizer has neither bos nor eos; give prefix_token_id=ID")

    @property
    def tokenizer_name(self) -> str:
        """Key of the harness's cache of requests."""
        return self._name.replace("/", "__")

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """``add_special_tokens`` None: follow `add_bos_token`, without a second bos for a text that begins with one."""
        special = self.add_bos_token if add_special_tokens is None else add_special_tokens
        if add_special_tokens is None and string.startswith(self._prefix_text):
            special = False
        ids = self.tokenizer.encode(string, add_special_tokens=special is not False)
        bos = self.tokenizer.token_id("bos_token")
        return [bos, *ids] if special and self.add_bos_token and bos is not None and ids[:1] != [bos] else ids

    def tok_decode(self, tokens: Sequence[int], skip_special_tokens: bool = True) -> str:
        return self.tokenizer.decode(tokens, skip_special_tokens=skip_special_tokens)

    @cached_property
    def _prefix_text(self) -> str:
        return self.tok_decode([self.prefix_token_id], skip_special_tokens=False)

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        """Source of the default chat template, for the harness's records."""
        template = self.tokenizer.template
        return template.sources.get(DEFAULT) if chat_template and template is not None else None

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """The conversation as text, with the assistant's turn opened, or its last message left open."""
        template = self.tokenizer.template
        if template is None:
            raise InputError(f"{self._name} has no chat template: evaluate it without --apply_chat_template")

        def rendered(messages: list[dict[str, Any]]) -> str:
            conversation = Conversation(
                messages=check_messages(messages),
                add_generation_prompt=add_generation_prompt,
                continue_final_message=not add_generation_prompt,
                template_kwargs=self.chat_template_args,
            )
            return template.render(conversation)

        try:
            return rendered(chat_history)
        except InputError as error:
            spoken = [message for message in chat_history if message["role"] != "system"]
            if error.code != "chat_template" or len(spoken) == len(chat_history):
                raise
            _log.warning("the chat template refuses a system message, so it is left out (%s)", error)
            return rendered(spoken)

    def get_model_info(self) -> dict[str, Any]:
        policy = None if self.engine is None else policy_as_dict(self.engine.policy)
        return {"model_dtype": self.profile.dtype, "moelight_version": __version__, "moelight_policy": policy}

    # --- request types of the harness ---

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """Log-probability of each request's continuation, and True if the continuation is greedy."""
        if self.enable_thinking:
            raise ConfigError("enable_thinking=True goes with tasks that generate, and one of these scores")
        return cast("list[tuple[float, bool]]", super().loglikelihood(requests, disable_tqdm=disable_tqdm))

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """Log-probability of each request's text, in windows of ``max_length``."""
        windows: list[Scored] = []
        owners: list[int] = []
        for number, request in enumerate(requests):
            rolling = utils.get_rolling_token_windows(
                token_list=self.tok_encode(request.args[0]),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length,
                context_len=1,
            )
            windows.extend((None, *utils.make_disjoint_window(window)) for window in rolling)
            owners.extend([number] * (len(windows) - len(owners)))
        totals = [0.0] * len(requests)
        for owner, (logprob, _) in zip(owners, self._loglikelihood_tokens(windows, disable_tqdm), strict=True):
            totals[owner] += logprob
        for request, total in zip(requests, totals, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return totals

    def _loglikelihood_tokens(
        self, requests: Sequence[Scored], disable_tqdm: bool = False, **_: Any
    ) -> list[tuple[float, bool]]:
        def answer(completion: Completion) -> tuple[float, bool]:
            texts, _context, continuation = requests[completion.index]
            scored = _score(completion, continuation)
            if texts is not None:  # windows of a longer text are not cached as requests
                self.cache_hook.add_partial("loglikelihood", texts, scored)
            return scored

        asked = [self._scoring(index, *ids) for index, (_texts, *ids) in enumerate(requests)]
        # Sorted by tokens, requests with a common context are adjacent, and its keys and values are computed once.
        asked.sort(key=lambda request: request.token_ids)
        return self._answers(asked, answer, "Running loglikelihood requests", disable_tqdm)

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Generated text of each request, before the first of ``until``."""

        def answer(completion: Completion) -> str:
            text = self._text(completion, asked[completion.index].sampling.stop)
            self.cache_hook.add_partial("generate_until", requests[completion.index].args, text)
            return text

        asked = [self._generation(index, *request.args) for index, request in enumerate(requests)]
        return self._answers(asked, answer, "Running generate_until requests", disable_tqdm)

    # --- conversion of requests and answers ---

    def _scoring(self, index: int, context: list[int], continuation: list[int]) -> Request:
        """The last token is not computed, so ``max_length`` tokens may precede it."""
        if not context or not 0 < len(continuation) <= self.max_length:
            raise InputError(
                f"request {index}: a continuation must have 1 to {self.max_length} tokens after its context, not "
                f"{len(continuation)} after {len(context)}"
            )
        ids = (context + continuation)[-(self.max_length + 1) :]
        return Request(
            index=index, token_ids=tuple(ids), sampling=PROMPT_ONLY, scored_from=len(ids) - len(continuation)
        )

    def _generation(self, index: int, context: str, gen_kwargs: dict[str, Any]) -> Request:
        constraints: dict[str, Any] = dict(normalize_gen_kwargs(gen_kwargs, self.max_gen_toks))
        eos = None if self.eot_token_id is None else self.tok_decode([self.eot_token_id], skip_special_tokens=False)
        until = handle_stop_sequences(constraints.pop("until"), eos=eos)
        tokens = constraints.pop("max_gen_toks")
        if not 0 < tokens < self.max_length:
            raise InputError(
                f"request {index}: max_gen_toks must be above 0 and below max_length {self.max_length}, not {tokens}"
            )
        ids = self.tok_encode(context)[-(self.max_length - tokens) :] or [self.prefix_token_id]
        return Request(index=index, token_ids=tuple(ids), sampling=_sampling(constraints, until, tokens))

    def _text(self, completion: Completion, until: Sequence[str]) -> str:
        tokens, end = list(completion.token_ids), self.think_end_token
        if not isinstance(end, int):
            return str(postprocess_generated_text(self.tok_decode(tokens), list(until), end))
        if end in tokens:
            tokens = tokens[len(tokens) - tokens[::-1].index(end) :]
        return str(postprocess_generated_text(self.tok_decode(tokens).lstrip(), list(until), None))

    def _answers(
        self, requests: list[Request], answer: Callable[[Completion], _T], label: str, quiet: bool
    ) -> list[_T]:
        """The answers in order of ``index``; ``answer`` is called when a completion finishes."""
        if not requests:
            return []
        answers: dict[int, _T] = {}
        with tqdm(total=len(requests), desc=label, disable=quiet) as bar:
            for completion in self._engine_for(requests).run(requests):
                bar.update(1)
                answers[completion.index] = answer(completion)
        return [answers[index] for index in range(len(requests))]

    def _engine_for(self, requests: Sequence[Request]) -> Engine:
        """The loaded engine, if its plan is of the same kind and fits all requests; else a new one."""
        from moelight.engine.engine import Engine

        scores = requests[0].sampling is PROMPT_ONLY
        if self.engine is not None and (self._borrowed or self._scores == scores):
            try:
                for request in requests:
                    self.engine.check(request)
                return self.engine
            except InputError as error:
                if self._borrowed or error.code != "kv_capacity_exceeded":
                    raise
        self.close()
        lengths = [min(len(request.token_ids), self.profile.max_positions) for request in requests]
        workload = Workload(
            num_requests=len(lengths),
            prompt_len=-(-sum(lengths) // len(lengths)),
            max_prompt_len=max(lengths),
            gen_len=max(1, *(request.sampling.max_tokens or 0 for request in requests)),
        )
        self.engine, self._scores = Engine.from_pretrained(self._name, workload=workload, **self._planning), scores
        for request in requests:
            self.engine.check(request)
        return self.engine


def _score(completion: Completion, continuation: Sequence[int]) -> tuple[float, bool]:
    """Sum of the continuation's log-probabilities, and True if each of its tokens is the likeliest."""
    if completion.finish_reason == "error":
        raise InputError(str(completion.stop_reason), code=completion.error_code or "error")
    logprobs = cast("Sequence[Mapping[int, Any]]", completion.prompt_logprobs)[-len(continuation) :]
    tokens = [scored[token] for scored, token in zip(logprobs, continuation, strict=True)]
    return sum(token.logprob for token in tokens), all(token.rank == 1 for token in tokens)


def _sampling(constraints: dict[str, Any], until: Sequence[str], tokens: int) -> SamplingParams:
    """Stop strings match special tokens too, as in the harness; the answer is decoded without special tokens."""
    if not constraints.pop("do_sample"):
        constraints.update(temperature=0.0)
    elif "seed" not in constraints:
        constraints["seed"] = int(torch.randint(1 << 62, ()).item())  # the harness seeds torch's generator (--seed)
    if constraints.pop("num_beams", 1) != 1:
        raise InputError("num_beams: beam search is not what moelight does; leave it out, or take 1")
    stop = [text for text in until if text]
    return SamplingParams.from_dict({"max_tokens": tokens, "stop": stop, "skip_special_tokens": False, **constraints})
