"""The engine's face: prompts in every form, every way to end, errors by code, the order of answers, several calls."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import replace
from itertools import cycle, product
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer as Words

from moelight.core.dtypes import FLOAT32
from moelight.core.errors import ConfigError, InputError, MoelightError
from moelight.core.policy import Policy, Shares
from moelight.core.request import Completion, SamplingParams
from moelight.engine import planning
from moelight.engine.engine import Engine
from moelight.engine.planning import resolve, resolve_host_pages
from moelight.models.checkpoints import open_model
from moelight.profiles.workload import Workload
from moelight.runtime.machine import Machine, find_machine
from tests.cases import thorough
from tests.engines import Tiny
from tests.process import affinities, holds_at_last
from tests.tiny import BOS

CONTEXT = 48
EIGHT = SamplingParams(max_tokens=8, ignore_eos=True)
PROMPTS = [list(f"prompt {n} ".encode() * (1 + n % 3)) for n in range(9)]


@pytest.fixture(scope="module")
def model(tiny: Tiny) -> Path:
    return tiny("mixtral", max_position_embeddings=CONTEXT)


def open_engine(model: Path, **policy: Any) -> Engine:
    return Engine(Policy(model=str(model), **{"batch_size": 4, "micro_batch_size": 2, **policy}), device="cpu")


@pytest.fixture(scope="module")
def engine(model: Path) -> Iterator[Engine]:
    with open_engine(model) as opened:
        yield opened


@pytest.fixture(scope="module")
def plain(engine: Engine) -> list[Completion]:
    """What the model says when nothing stops it but max_tokens."""
    return engine.generate(PROMPTS, EIGHT)


def test_completions_are_in_the_order_of_prompts(plain: list[Completion]) -> None:
    assert [completion.index for completion in plain] == list(range(len(PROMPTS)))
    for prompt, completion in zip(PROMPTS, plain, strict=True):
        assert completion.prompt_tokens == len(prompt)
        assert completion.completion_tokens == len(completion.token_ids) == 8
        assert completion.finish_reason == "length"
    assert len({completion.token_ids for completion in plain}) == len(PROMPTS)


def test_text_is_the_decoded_tokens(engine: Engine, plain: list[Completion]) -> None:
    for completion in plain:
        text = engine.tokenizer.decode(completion.token_ids)
        assert completion.text in (text, text.rstrip("\N{REPLACEMENT CHARACTER}"))  # a character cut by max_tokens


@pytest.mark.parametrize("limit", [1, 2, 5])
def test_max_tokens_cuts_the_same_answer_shorter(engine: Engine, plain: list[Completion], limit: int) -> None:
    for short, long in zip(engine.generate(PROMPTS, replace(EIGHT, max_tokens=limit)), plain, strict=True):
        assert short.token_ids == long.token_ids[:limit]
        assert short.finish_reason == "length"


def test_the_context_ends_an_answer(engine: Engine) -> None:
    prompts = [[65] * length for length in (CONTEXT - 1, CONTEXT - 2, CONTEXT - 20)]
    result = engine.generate(prompts, replace(EIGHT, max_tokens=10))
    assert [completion.completion_tokens for completion in result] == [1, 2, 10]
    assert [completion.finish_reason for completion in result] == ["length"] * 3


def test_a_stop_string_cuts_the_text_before_it(engine: Engine, plain: list[Completion]) -> None:
    """The tokens that spell it stay in token_ids; generation ends with them."""
    tried = 0
    for prompt, full in zip(PROMPTS, plain, strict=True):
        for end in range(2, 8):
            text = engine.tokenizer.decode(full.token_ids[:end])
            stop = text[-1:]
            if not stop or stop == "\ufffd" or text.index(stop) != len(text) - 1:
                continue
            tried += 1
            (cut,) = engine.generate([prompt], replace(EIGHT, stop=("never this", stop)))
            assert cut.finish_reason == "stop"
            assert cut.text == text[:-1]
            assert cut.token_ids == full.token_ids[: cut.completion_tokens]
            assert engine.tokenizer.decode(cut.token_ids).endswith(stop)
    assert tried > 5


def with_eos(model: Path, where: Path, eos: object, *, file: str = "generation_config.json") -> Path:
    directory = shutil.copytree(model, where)
    path = directory / file
    values = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps({**values, "eos_token_id": eos}))
    return directory


@pytest.mark.parametrize("many", [False, True])
def test_eos_ends_an_answer_and_is_not_part_of_it(
    model: Path, tmp_path: Path, plain: list[Completion], many: bool
) -> None:
    """One id or a list, from generation_config.json."""
    eos = [plain[0].token_ids[3], plain[1].token_ids[5]] if many else plain[0].token_ids[3]
    ids = set(eos) if isinstance(eos, list) else {eos}
    with open_engine(with_eos(model, tmp_path / "model", eos)) as engine:
        result = engine.generate(PROMPTS, replace(EIGHT, ignore_eos=False))
        ignoring = engine.generate(PROMPTS, EIGHT)
    assert [c.token_ids for c in ignoring] == [c.token_ids for c in plain]
    stopped = 0
    for cut, full in zip(result, plain, strict=True):
        end = next((at for at, token in enumerate(full.token_ids) if token in ids), None)
        assert cut.token_ids == (full.token_ids if end is None else full.token_ids[:end])
        assert cut.finish_reason == ("length" if end is None else "stop")
        stopped += end is not None
    assert stopped >= 1 + many


def test_eos_may_come_first_or_last(model: Path, tmp_path: Path, plain: list[Completion]) -> None:
    first, last = plain[0].token_ids[0], plain[1].token_ids[7]
    how = replace(EIGHT, ignore_eos=False)
    with open_engine(with_eos(model, tmp_path / "first", first)) as engine:
        assert engine.generate([PROMPTS[0]], how)[0] == replace(plain[0], text="", token_ids=(), finish_reason="stop")
    if last not in plain[1].token_ids[:7]:
        with open_engine(with_eos(model, tmp_path / "last", last)) as engine:
            (result,) = engine.generate([PROMPTS[1]], how)
            assert (result.completion_tokens, result.finish_reason) == (7, "stop")


def test_every_form_of_a_prompt_means_the_same(engine: Engine) -> None:
    text = "count the letters"
    ids = engine.tokenizer.encode(text)
    forms: list[Any] = [text, {"prompt": text}, ids, tuple(ids), {"prompt_token_ids": ids}]
    wanted = engine.generate([ids], EIGHT)[0].token_ids
    assert [c.token_ids for c in engine.generate(forms, EIGHT)] == [wanted] * len(forms)
    for alone in (text, {"prompt": text}, ids):
        assert [c.token_ids for c in engine.generate(alone, EIGHT)] == [wanted]
    assert engine.generate([], EIGHT) == []


def test_messages_go_through_the_chat_template(engine: Engine) -> None:
    messages = [{"role": "user", "content": "hello"}]
    written = engine.tokenizer.encode("<user>hello\n<assistant>")
    result, wanted = engine.generate([{"messages": messages}, written], EIGHT)
    assert result.token_ids == wanted.token_ids


def test_every_prompt_may_have_its_own_sampling(engine: Engine, plain: list[Completion]) -> None:
    hows = [replace(EIGHT, max_tokens=1 + n) for n in range(len(PROMPTS) - 1)] + [EIGHT]
    result = engine.generate(PROMPTS, hows)
    assert [c.token_ids for c in result] == [w.token_ids[: h.max_tokens] for w, h in zip(plain, hows, strict=True)]


BAD: dict[str, tuple[Any, str, str]] = {
    "no tokens": ([[65], []], "empty_prompt", "prompt 1: the prompt has no tokens"),
    "a token beyond the vocabulary": ([[65, 307]], "bad_token_id", "below the vocabulary's 307"),
    "a negative token": ([[65, -1]], "bad_token_id", "prompt 0"),
    "longer than the context": ([[65] * CONTEXT], "context_length_exceeded", "48 tokens, the model's context is 48"),
    "an unknown key": ([{"promt": "a"}], "invalid_request", "did you mean 'prompt'"),
    "two forms at once": ([{"prompt": "a", "messages": []}], "invalid_request", "exactly one of"),
    "text as token ids": ([{"prompt_token_ids": "abc"}], "invalid_request", "must be a list of token ids"),
    "a number as text": ([{"prompt": 5}], "invalid_request", "prompt must be a string"),
    "truth as a token": ([[True, False]], "invalid_request", "prompt 0"),
    "half a token": ([[1.5]], "invalid_request", "prompt 0"),
    "nothing": ([None], "invalid_request", "prompt 0: must be a string"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_cannot_be_served_is_refused_before_anything_runs(engine: Engine, name: str) -> None:
    prompts, code, words = BAD[name]
    before = engine.stats.passes
    with pytest.raises(InputError, match=words) as caught:
        engine.generate([*prompts], EIGHT)
    assert caught.value.code == code
    assert engine.stats.passes == before


def test_a_token_that_the_embeddings_do_not_have_is_refused(model: Path, tmp_path: Path) -> None:
    """Tools add tokens to a tokenizer and leave the matrix of embeddings as it is."""
    copy = Path(shutil.copytree(model, tmp_path / "copy"))
    words = Words.from_file(str(copy / "tokenizer.json"))
    words.add_special_tokens([f"<|extra {n}|>" for n in range(60)])
    words.save(str(copy / "tokenizer.json"))
    with Engine(Policy(model=str(copy)), device="cpu") as engine:
        with pytest.raises(InputError, match="must be below the vocabulary's 307") as caught:
            engine.generate(["a<|extra 59|>b"], EIGHT)
        assert caught.value.code == "bad_token_id"
        assert engine.generate(["a<|extra 0|>b"], EIGHT)[0].prompt_tokens == 3


def test_prompts_must_be_prompts(engine: Engine) -> None:
    with pytest.raises(InputError, match="a prompt or a sequence of them, not 5"):
        engine.generate(5, EIGHT)  # type: ignore[arg-type]


def test_sampling_must_be_one_or_one_each(engine: Engine) -> None:
    with pytest.raises(InputError, match="2 sampling_params were given for 3 prompts"):
        engine.generate(PROMPTS[:3], [EIGHT, EIGHT])


def test_a_request_larger_than_the_cache_is_refused(model: Path) -> None:
    with open_engine(model, kv_tokens=32, kv_block_size=16) as engine:
        assert engine.generate([[65] * 24], EIGHT)
        with pytest.raises(
            InputError, match=r"which take .* of KV memory; the KV cache holds 32 tokens; lower max_tokens"
        ) as caught:
            engine.generate([[65] * 25], EIGHT)
        assert caught.value.code == "kv_capacity_exceeded"


def test_no_chat_template(model: Path, tmp_path: Path) -> None:
    directory = shutil.copytree(model, tmp_path / "model")
    path = directory / "tokenizer_config.json"
    settings = json.loads(path.read_text())
    del settings["chat_template"]
    path.write_text(json.dumps(settings))
    with open_engine(directory) as engine, pytest.raises(InputError, match="no chat template") as caught:
        engine.generate([{"messages": [{"role": "user", "content": "hi"}]}], EIGHT)
    assert caught.value.code == "no_chat_template"


def test_completions_come_as_they_finish(engine: Engine, plain: list[Completion]) -> None:
    """Shorter answers of one batch first; all of them once."""
    hows = [replace(EIGHT, max_tokens=maximum) for maximum in (8, 2, 5, 1)]
    result = list(engine.stream(PROMPTS[:4], hows))
    assert [completion.index for completion in result] == [3, 1, 2, 0]
    assert all(c.token_ids == plain[c.index].token_ids[: hows[c.index].max_tokens] for c in result)


def test_calls_follow_each_other(model: Path, plain: list[Completion]) -> None:
    """Whatever came before, with pages still on their way from the last pass."""
    with open_engine(model, weights=Shares(disk=1.0)) as engine:
        for prompts in (PROMPTS, PROMPTS[:2], PROMPTS[5:], PROMPTS):
            wanted = [plain[PROMPTS.index(prompt)].token_ids for prompt in prompts]
            assert [c.token_ids for c in engine.generate(prompts, EIGHT)] == wanted


@pytest.mark.parametrize("weights", [Shares(host=1.0), Shares(disk=1.0)])
def test_an_abandoned_iterator_leaves_the_engine_usable(model: Path, plain: list[Completion], weights: Shares) -> None:
    with open_engine(model, weights=weights, kv_tokens=CONTEXT * 4) as engine:
        for taken in (1, 3):
            answers = engine.stream(PROMPTS, [replace(EIGHT, max_tokens=1 + n % 8) for n in range(len(PROMPTS))])
            for _ in range(taken):
                next(answers)
            with pytest.raises(MoelightError, match="still serving an earlier call"):
                engine.generate(PROMPTS, EIGHT)
            answers.close()  # type: ignore[attr-defined]
        assert [c.token_ids for c in engine.generate(PROMPTS, EIGHT)] == [c.token_ids for c in plain]


def test_a_closed_engine_says_so(model: Path) -> None:
    engine = open_engine(model)
    answers = engine.stream(PROMPTS, [replace(EIGHT, max_tokens=1 + n % 8) for n in range(len(PROMPTS))])
    next(answers)
    engine.close()
    engine.close()
    with pytest.raises(MoelightError, match="the engine is closed"):
        list(answers)
    with pytest.raises(MoelightError, match="the engine is closed"):
        engine.generate(PROMPTS, EIGHT)


def test_a_policy_must_suit_the_machine(model: Path) -> None:
    policy = Policy(model=str(model))
    for wrong, words in (
        (replace(policy, ffn_device="gpu"), "ffn_device is 'gpu', but the machine has no GPU"),
        (replace(policy, attention_device="gpu"), "attention_device is 'gpu', but the machine has no GPU"),
        (
            replace(policy, schedule="flexgen-c"),
            "needs a GPU, and there is none; here these do: cgopipe, fastdecode, flexgen, ",
        ),
        (replace(policy, weights=Shares(device=0.5, host=0.5)), "a share on 'device' needs a GPU"),
        (replace(policy, schedule="cgopip"), "did you mean 'cgopipe'"),
        (
            replace(policy, kv_dtype="bfloat16", weight_dtype="float32"),
            "kv_dtype 'bfloat16' must be int8 or the weights' dtype",
        ),
    ):
        with pytest.raises(ConfigError, match=words):
            Engine(wrong, device="cpu")
    beside = replace(policy, ffn_device="gpu", attention_device="gpu")
    for wrong, words in (
        (policy, "ffn_device is 'cpu', but the machine has a GPU"),
        (
            replace(beside, schedule="fastdecode"),
            "needs attention_device cpu, not gpu; here these do: cgopipe, flexgen",
        ),
        (replace(beside, ffn_device="split", schedule="module"), "no part of the experts on the CPU"),
        (replace(policy, ffn_device="gpu", kv=Shares(device=1.0)), "a share on device needs attention_device gpu"),
    ):
        with pytest.raises(ConfigError, match=words):
            Engine(wrong, device="twin")
    with pytest.raises(ConfigError, match="schedule 'flexgen-c' needs a GPU, and there is none"):
        Engine.from_pretrained(model, device="cpu", schedule="flexgen-c")
    with pytest.raises(ConfigError, match="this machine runs without a GPU"):
        Engine.from_pretrained(model, device="cpu", device_memory="1GiB")
    with pytest.raises(ConfigError, match="did you mean 'serial'"):
        Engine.from_pretrained(model, device="cpu", schedule="serail")


def test_homes_are_pinned_where_the_machine_locks_memory(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Decided with a reason; never on a twin, never for pages that do not cross, never where it would take too much."""
    profile, twin = open_model(str(model)).profile, find_machine("twin")
    cuda = replace(twin, twin=False, device=torch.device("cuda", 0))
    policy = resolve(Policy(model=str(model), ffn_device="gpu"), profile, discrete=True)

    def decided(policy: Policy, machine: Machine = cuda) -> tuple[str, str]:
        result, reason = resolve_host_pages(policy, profile, machine, FLOAT32)
        return result.host_pages, reason

    monkeypatch.setattr(planning, "locks_in_place", lambda device: device.type == "cuda")
    assert decided(policy) == ("pinned", "memory is locked in place, so expert pages are transferred directly")
    assert decided(policy, twin) == ("staged", "a twin locks no memory in place")
    assert decided(policy, replace(cuda, device=torch.device("xpu", 0)))[0] == "staged"
    assert decided(replace(policy, weights=Shares(disk=1.0)))[1] == "no expert page is transferred from host memory"
    assert decided(replace(policy, host_pages="staged")) == ("staged", "the policy says so")
    monkeypatch.setattr(planning, "memory_limit_bytes", lambda: 1 << 20)
    assert decided(policy)[0] == "staged" and "too much to lock" in decided(policy)[1]
    with Engine(Policy(model=str(model), ffn_device="gpu"), device="twin") as engine:
        assert engine.policy.host_pages == "staged"
        assert engine.host_pages_reason == "a twin locks no memory in place"


def test_a_request_longer_than_a_buffer_for_contexts_is_refused(model: Path) -> None:
    devices = {"ffn_device": "gpu", "attention_device": "gpu"}
    policy = Policy(model=str(model), batch_size=8, micro_batch_size=2, kv_tokens=128, **devices)  # type: ignore[arg-type]
    with Engine(policy, device="twin") as engine:
        assert engine.generate([[65] * 32], EIGHT)[0].completion_tokens == 8
        with pytest.raises(InputError, match=r"reach 41 tokens.*holds 40.*micro_batch_size of 3 or more") as caught:
            engine.generate([[65] * 33], EIGHT)
        assert caught.value.code == "kv_capacity_exceeded"


@pytest.mark.parametrize("schedule", ["flexgen", "flexgen-c", "module"])
def test_a_schedule_that_is_asked_for_is_planned_and_carried_out(model: Path, schedule: str) -> None:
    work = Workload(num_requests=5, prompt_len=8, max_prompt_len=16, gen_len=8)
    sizes = {"host_memory": "300MiB", "device_memory": "300MiB"}
    with Engine.from_pretrained(model, device="twin", workload=work, schedule=schedule, **sizes) as engine:  # type: ignore[arg-type]
        assert engine.policy.schedule == schedule
        devices = {"flexgen": ("gpu",), "flexgen-c": ("cpu",)}.get(schedule, ("cpu", "gpu"))
        assert engine.policy.attention_device in devices
        assert engine.generate([[BOS, 65]], EIGHT)[0].completion_tokens == 8


def test_a_planned_engine_keeps_its_plan(model: Path) -> None:
    work = Workload(num_requests=5, prompt_len=8, max_prompt_len=16, gen_len=8)
    with Engine.from_pretrained(model, device="cpu", host_memory="300MiB", workload=work, batch_size=3) as engine:
        assert engine.plan is not None
        assert engine.policy.batch_size == 3
        assert engine.policy == replace(engine.plan.policy, host_pages="staged", residents="static")
        assert engine.residents_reason == "every expert is resident"
        assert engine.plan.use_of("host").total_bytes <= 300 << 20
        assert engine.generate([[BOS, 65]], EIGHT)[0].completion_tokens == 8


BESIDE = {"ffn_device": "gpu", "attention_device": "gpu"}


PLACES: list[dict[str, Any]] = [
    {},
    {"schedule": "module"},
    {**BESIDE, "schedule": "flexgen"},
    {**BESIDE, "kv": Shares(device=1.0)},
    {"ffn_device": "split", "cpu_experts": 0.5},
    {"attention_device": "gpu"},
]


@pytest.mark.parametrize(
    ("devices", "dtype"),
    thorough(product(PLACES, ["bfloat16", "float16"]), but=[*zip(PLACES, cycle(["bfloat16", "float16"]))][:5]),
)
def test_weights_may_be_held_in_another_format(model: Path, dtype: str, devices: dict[str, Any]) -> None:
    policy = Policy(model=str(model), weight_dtype=dtype, weights=Shares(host=0.5, disk=0.5), **devices)
    with Engine(policy, device="twin" if policy.discrete else "cpu") as engine:
        assert all(c.completion_tokens == 3 for c in engine.generate(PROMPTS, replace(EIGHT, max_tokens=3)))


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="no affinity here")
@pytest.mark.parametrize(("device", "lanes"), [("cpu", "auto"), ("cpu", "threads"), ("twin", "auto")])
def test_a_process_keeps_its_cores_and_threads(
    model: Path, plain: list[Completion], monkeypatch: pytest.MonkeyPatch, device: str, lanes: str
) -> None:
    """Bound threads are the engine's own: the caller's affinity is what it was, and they end with the engine."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: len(os.sched_getaffinity(0)))
    selected, before = os.sched_getaffinity(0), affinities()
    gpu = {"ffn_device": "gpu"} if device == "twin" else {}
    with Engine(Policy(model=str(model), **gpu), device=device, lanes=lanes) as engine:  # type: ignore[arg-type]
        result = engine.generate([PROMPTS[0]], SamplingParams(max_tokens=4, ignore_eos=True))
        during = os.sched_getaffinity(0)
    assert result[0].token_ids == plain[0].token_ids[:4]
    assert during == os.sched_getaffinity(0) == selected
    # torch's own threads stay
    assert holds_at_last(lambda: all(bound == selected for task, bound in affinities().items() if task not in before))
