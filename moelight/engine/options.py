"""The options of an engine, once for the Python interface, jobs and the command line. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, TypeVar

from moelight.core.errors import ConfigError, did_you_mean, refuse_unknown
from moelight.core.units import parse_bytes
from moelight.experts.options import ExpertOptions

AUTO, OFF, NGRAM, MODEL, MTP = "auto", "off", "ngram", "model", "mtp"
SPECULATION = (OFF, NGRAM, MODEL, MTP, AUTO)
MOST_DRAFT_TOKENS = 64
_Options = TypeVar("_Options", bound="RunOptions")


def _option(text: str, *, default: Any = None, **settings: Any) -> Any:
    """Return an option that the command line has, too; ``settings`` are those of `typer.Option`."""
    return field(default=default, metadata={"help": text, **settings})


@dataclass(frozen=True, kw_only=True, slots=True)
class RunOptions:
    """The keywords of `Engine`. The metadata of a field is its description, and its option of the command line.

    Attributes:
        adapt: N, μ, look-ahead and prefills in decode passes may change between passes if other values prove faster;
            None: under a plan only. Values that the user fixed in the plan are kept.
        lanes: ``auto``, ``inline`` (nothing overlaps) or ``threads``.
        prefix_caching: compute common prefixes of prompts once, in whole blocks; not of stateful models.
        experts: residency of experts in on-demand passes, and what is recorded of it.
    """

    device: str = _option(
        "Device to run on: auto, cpu, cuda, xpu, one card (cuda:1), or twin (a GPU emulated on the CPU).", default=AUTO
    )
    adapt: bool | None = _option(
        "Adapt N, micro-batches, look-ahead and prefills in decode passes to measured speed; on by default unless "
        "--policy is given."
    )
    cuda_graphs: bool = _option("Capture small repeating passes as CUDA graphs.", default=True)
    reasoning: str = _option(
        "auto splits the reasoning of reasoning models from the answer, and applies stop strings and "
        "constraints to the answer only; off leaves the text as generated.",
        metavar="auto|off",
        default=AUTO,
    )
    speculate: str | None = _option(
        "Speculative decoding: ngram verifies all drafts of tokens that followed the same tokens before, in the prompt "
        "or in completions; model all drafts of --draft-model; mtp all of the model's own layer of multi-token "
        "prediction; auto those of n-grams and of --draft-model that are expected to save time. By default off, or "
        "auto with --draft-model. Completions stay the same.",
        metavar="off|ngram|model|mtp|auto",
    )
    draft_model: str | None = _option(
        "Smaller model with the same tokenizer that drafts tokens: a directory, a GGUF file or a hub id. It stays in "
        "memory.",
        metavar="MODEL",
    )
    num_speculative_tokens: int | None = _option(
        "Maximum number of draft tokens per sequence and pass; by default 5, 16 with --speculate auto, 1 with mtp.",
        min=1,
        max=MOST_DRAFT_TOKENS,
        metavar="K",
    )
    tp: str = _option(
        "Number of ranks that compute the model together, each with a part of the experts and heads: processes on "
        "shares of the cores, or on a GPU each; auto is one for each NUMA node or GPU.",
        metavar="N|auto",
        default="1",
    )
    lanes: str = AUTO
    prefix_caching: bool = True
    experts: ExpertOptions = field(default_factory=ExpertOptions)

    @property
    def speculation(self) -> str:
        """The value of ``speculate``, or its default."""
        return self.speculate or (OFF if self.draft_model is None else AUTO)

    @property
    def drafts_by_model(self) -> bool:
        """Whether a draft model, or the layer of multi-token prediction, is to be loaded."""
        return self.draft_model is not None or self.speculation == MTP

    def draft_tokens(self) -> int:
        """The most draft tokens of a sequence in a pass; 0 without speculative decoding. Raises ConfigError for an
        unknown value of ``speculate``, for a number of tokens that is out of range, and for options without effect."""
        count, how = self.num_speculative_tokens, self.speculation
        if how not in SPECULATION:
            raise ConfigError(
                f"speculate must be one of {', '.join(SPECULATION)}, not {how!r}{did_you_mean(how, SPECULATION)}"
            )
        if count is not None and not 1 <= count <= MOST_DRAFT_TOKENS:
            raise ConfigError(f"num_speculative_tokens must be from 1 to {MOST_DRAFT_TOKENS}, not {count}")
        if self.draft_model is None and how == MODEL:
            raise ConfigError("speculate model needs a draft_model")
        if self.draft_model is not None and how in (OFF, NGRAM, MTP):
            raise ConfigError(f"draft_model {self.draft_model} and speculate {how} contradict each other")
        if how == OFF:
            if count is not None:
                raise ConfigError(f"num_speculative_tokens {count} needs speculate ngram, model, mtp or auto")
            return 0
        return count or {AUTO: 16, MTP: 1}.get(how, 5)

    def changed(self: _Options, values: Mapping[str, Any]) -> _Options:
        """Return the options with ``values``, by name; None of ``experts`` is the default. Raises ConfigError for an
        unknown name, and for text that is no size of memory."""
        refuse_unknown(values, [option.name for option in fields(self)])
        sizes = {
            name: parse_bytes(values[name], label=name)
            for name in ("host_memory", "device_memory")
            if values.get(name) is not None
        }
        named = {name: value for name, value in values.items() if name != "experts" or value is not None}
        return replace(self, **{**named, **sizes})


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineOptions(RunOptions):
    """The keywords of `Engine.from_pretrained`: those of `Engine`, and those of its plan. None leaves the choice to the
    planner, and takes 90 % of the free memory. Memory is in bytes, or in Python text such as ``"16GiB"``. An expert
    policy in ``experts`` restricts the search to schedules with on-demand passes."""

    host_memory: int | None = _option("Maximum host memory to use, e.g. 3GiB.", metavar="SIZE")
    device_memory: int | None = _option("Maximum GPU memory to use, e.g. 10GiB.", metavar="SIZE")
    batch_size: int | None = _option("Maximum number of sequences per pass; planned by default.", min=1)
    micro_batch_size: int | None = _option("Maximum number of sequences per micro-batch; planned by default.", min=1)
    schedule: str | None = _option(
        "Schedule: cgopipe, fastdecode, flexgen-c, flexgen, flexgen-loop, serial or module; planned by default."
    )
    dtype: str = _option(
        "Data type of activations and of unquantised weights; auto uses the checkpoint's.",
        metavar="auto|bfloat16|float16|float32",
        default=AUTO,
    )
    kv_dtype: str = _option(
        "Data type of the KV cache: auto uses --dtype, choose takes the faster of the two.",
        metavar="auto|choose|int8",
        default=AUTO,
    )
    activations: str | None = _option(
        "int8 rounds activations to int8 before products with experts that are stored as integers.", metavar="auto|int8"
    )
    hw: str = _option("Hardware profile to plan for; auto uses this machine.", metavar="NAME|FILE|auto", default=AUTO)


_RUN = {option.name for option in fields(RunOptions)}
# What a plan decides, or is made for.
PLANNING = tuple(option.name for option in fields(EngineOptions) if option.name not in _RUN)
