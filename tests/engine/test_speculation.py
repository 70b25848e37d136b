"""Drafts change how many tokens a pass chooses, never which: in all schedules, on all devices, for all samplings."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moelight.core.errors import ConfigError
from moelight.core.policy import KV_BLOCK_SIZES, Policy, Shares
from moelight.core.request import Completion, SamplingParams, StructuredOutputs
from moelight.engine.batcher import RunningSequence
from moelight.engine.draft_prices import DraftPrices
from moelight.engine.drafts import Draft, NgramDrafts
from moelight.engine.engine import Engine
from moelight.hrm import schedule_time
from moelight.kernels import native
from tests.cases import covering, thorough
from tests.engine.test_adaptation import restless
from tests.engine.test_invariance import DEVICES, MODELS, ON_DEMAND, served
from tests.engines import Tiny, in_turn
from tests.shapes import examples

SIZES: dict[str, Any] = {"batch_size": 5, "micro_batch_size": 3, "micro_batch_tokens": 40, "kv_tokens": 5 * 160}
NGRAM: dict[str, Any] = {"speculate": "ngram", "num_speculative_tokens": 4}
BY_MODELS = in_turn(served(), MODELS)


def prompts() -> list[list[int]]:
    """Of 1 to 90 tokens, some of which repeat themselves."""
    random = Random(11)
    texts = [[random.randrange(256) for _ in range(length)] for length in (1, 3, 40, 33, 9)]
    repeated = [random.randrange(97, 123) for _ in range(15)]
    return [*texts, repeated * 6, repeated * 2 + repeated[:4], [97, 98] * 8]


PROMPTS = prompts()
GREEDY = SamplingParams(max_tokens=12, ignore_eos=True)
SAMPLED = [
    replace(GREEDY, temperature=0.4 * (index % 3), top_p=0.9, seed=index, max_tokens=9 + index, ignore_eos=index > 3)
    for index in range(len(PROMPTS))
]
Install = Callable[[Sequence[Completion]], None]


@pytest.fixture
def drafted(monkeypatch: pytest.MonkeyPatch) -> Install:
    """``drafted(completions)``: engines draft from these completions of `PROMPTS`, in any length, and two of three
    drafts contain a wrong token somewhere."""

    def install(completions: Sequence[Completion]) -> None:
        answers = {(tuple(PROMPTS[one.index]), one.sample): one.token_ids for one in completions}

        def draft(_: NgramDrafts, sequence: RunningSequence, count: int) -> Draft:
            prompt, begin = sequence.request.token_ids, len(sequence.generated)
            token_ids = list(answers[prompt, sequence.sample][begin : begin + 1 + (7 * begin + len(prompt)) % count])
            if token_ids and begin % 3:
                at = (begin * 5 + len(prompt)) % len(token_ids)
                token_ids[at] = (token_ids[at] + 1) % 256
            return Draft(tuple(token_ids), 4)

        monkeypatch.setattr(NgramDrafts, "draft", draft)

    return install


def run(policy: Policy, sampling: Any = GREEDY, **options: Any) -> tuple[list[Completion], Any]:
    """The completions, and the statistics of the run."""
    with Engine(policy, device="twin" if policy.discrete else "cpu", **options) as engine:
        return engine.generate(PROMPTS, sampling), engine.stats


def comparable(policy: Policy, completions: Sequence[Completion]) -> list[Completion]:
    """Beside a device sums are in another order: log-probabilities are compared by their tokens."""
    if not policy.discrete:
        return list(completions)
    return [replace(one, logprobs=None, cumulative_logprob=None) for one in completions]


def check(policy: Policy, sampling: Any, drafted: Install, **options: Any) -> Sequence[Completion]:
    """Compare completions with and without drafts, which are accepted and rejected; returns them."""
    plain, before = run(policy, sampling, **options)
    drafted(plain)
    completions, after = run(policy, sampling, **{**options, **NGRAM})
    assert comparable(policy, completions) == comparable(policy, plain)
    assert 0 < after.counts["accepted_tokens"] <= after.counts["drafted_tokens"]
    assert after.passes < before.passes
    assert after.completion_tokens == before.completion_tokens
    return completions


@pytest.fixture(scope="module")
def model(tiny: Tiny) -> Path:
    return tiny("mixtral", **MODELS["mixtral"])


def test_look_up_gives_the_same_tokens(model: Path) -> None:
    """Answers of four letters repeat themselves."""
    policy, how = (
        Policy(model=str(model), **SIZES),
        [replace(how, allowed_token_ids=[97, 98, 99, 100]) for how in SAMPLED],
    )
    answers, stats = run(policy, how, **NGRAM)
    assert answers == run(policy, how)[0]
    assert stats.counts["accepted_tokens"] >= 10


@pytest.mark.parametrize(("schedule", "devices", "name"), thorough(BY_MODELS, but=covering(BY_MODELS)[::2]))
@pytest.mark.parametrize("sampling", thorough([GREEDY, SAMPLED], but=[SAMPLED]), ids=["greedy", "sampled"])
def test_every_schedule_and_device_gives_the_same_tokens(
    tiny: Tiny, schedule: str, devices: str, name: str, sampling: Any, drafted: Install
) -> None:
    policy = Policy(model=str(tiny(name, **MODELS[name])), schedule=schedule, **SIZES, **DEVICES[devices])
    check(policy, sampling, drafted)


@pytest.mark.parametrize(("schedule", "devices"), thorough(ON_DEMAND[::3], but=ON_DEMAND[::18]))
def test_on_demand_passes_give_the_same_tokens(
    tiny: Tiny, schedule: str, devices: str, drafted: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(schedule_time, "ROUTED_ONLY_SHARE", 0.0)
    policy = Policy(model=str(tiny("olmoe")), schedule=schedule, **SIZES, **DEVICES[devices])
    check(policy, SAMPLED, drafted)


@pytest.mark.parametrize("devices", thorough(["cpu", "gpu", "gpu-attention", "gpu-cache-both"], but=["gpu-cache-both"]))
def test_an_int8_cache_gives_the_same_tokens(tiny: Tiny, devices: str, drafted: Install) -> None:
    shape: dict[str, Any] = {"hidden_size": 64, "head_dim": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    policy = Policy(model=str(tiny("mixtral", **shape)), kv_dtype="int8", **SIZES, **DEVICES[devices])
    check(policy, SAMPLED, drafted)


@pytest.mark.parametrize(
    ("dtype", "micro_batch_size"),
    thorough(product(["float32", "bfloat16"], [3, 5]), but=[("bfloat16", 5)]),
)
def test_on_the_cpu_drafts_change_no_bit(tiny: Tiny, dtype: str, micro_batch_size: int, drafted: Install) -> None:
    """Every row of a sequence attends by itself, so log-probabilities are equal too."""
    if dtype != "float32" and not native.available():
        pytest.skip("torch's products depend on the number of rows")
    sizes = {**SIZES, "micro_batch_size": micro_batch_size, "weights": Shares(host=0.5, disk=0.5)}
    sampling = [replace(how, logprobs=3, prompt_logprobs=1) for how in SAMPLED]
    answers = check(Policy(model=str(tiny("mixtral", dtype=dtype)), **sizes), sampling, drafted)
    assert all(len(one.logprobs or ()) == len(one.token_ids) for one in answers)


HOW: list[dict[str, Any]] = [
    {"repetition_penalty": 1.3, "logprobs": 2},
    {"presence_penalty": 0.7, "frequency_penalty": 0.4, "temperature": 0.7},
    {"logit_bias": {97: 4.0, 98: -100.0}, "temperature": 0.9},
    {"min_tokens": 9, "ignore_eos": False, "logit_bias": {257: 9.0}},
    {"stop": ["a", "e"], "logit_bias": {97: 3.0}, "min_tokens": 5},
    {"stop_token_ids": list(range(40, 80)), "include_stop_str_in_output": True},
    {"bad_words": ["a", "b c", "ef"], "allowed_token_ids": list(range(97, 110)), "logprobs": 0},
    {"structured_outputs": StructuredOutputs(regex="(abc|abd)+[0-9]{3}")},
    {"structured_outputs": StructuredOutputs(regex="[a-f]{4,9}end"), "temperature": 1.0, "logprobs": 1},
    {"structured_outputs": StructuredOutputs(choice=["a long answer", "a long question"]), "min_tokens": 3},
    {"n": 3, "temperature": 0.8, "repetition_penalty": 1.1},
]


@pytest.mark.parametrize(
    ("how", "devices"),
    thorough(
        product(HOW, ["cpu", "gpu-cache"]),
        but=[(how, "gpu-cache") for how in HOW[::2]],
    ),
    ids=lambda value: value if isinstance(value, str) else "-".join(value),
)
def test_samplings_and_constraints_hold_within_a_draft(
    model: Path, how: dict[str, Any], devices: str, drafted: Install
) -> None:
    policy = Policy(model=str(model), **SIZES, **DEVICES[devices])
    check(policy, [replace(GREEDY, seed=at, **how) for at in range(len(PROMPTS))], drafted)


def test_a_grammar_that_allows_no_token_ends_the_same_answer(model: Path, drafted: Install) -> None:
    """After three letters of a draft the text may only go on by a digit, and digits are not allowed."""
    how = replace(
        GREEDY,
        structured_outputs=StructuredOutputs(regex="[a-f]{3}[0-9]"),
        allowed_token_ids=list(range(97, 123)),
    )
    policy = Policy(model=str(model), **SIZES)
    plain, _ = run(policy, how)
    assert {one.error_code for one in plain} == {"structured_outputs"}
    drafted(plain)
    assert run(policy, how, **NGRAM)[0] == plain


def test_what_a_grammar_forces_is_a_draft(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(NgramDrafts, "draft", lambda *_: Draft((), 0))
    how = replace(GREEDY, structured_outputs=StructuredOutputs(regex="the only possible (way|answer)"), max_tokens=40)
    policy = Policy(model=str(model), **SIZES)
    plain, before = run(policy, how)
    answers, after = run(policy, how, **NGRAM)
    assert answers == plain
    assert 2 * after.passes < before.passes
    assert after.counts["accepted_tokens"] == after.counts["drafted_tokens"] > 100


@pytest.mark.parametrize("admission", ["refill", "static"])
def test_open_ended_answers_give_the_same_tokens(model: Path, admission: str, drafted: Install) -> None:
    """Blocks are added as answers grow, and sequences are suspended where there are none."""
    sizes = {**SIZES, "kv_tokens": 528, "kv_block_size": 16, "batch_size": 6}
    how = replace(GREEDY, max_tokens=None, stop_token_ids=list(range(60, 97)), ignore_eos=False)
    policy = Policy(model=str(model), admission=admission, **sizes)
    plain, _ = run(policy, how)
    drafted(plain)
    answers, stats = run(policy, how, **NGRAM)
    assert answers == plain
    assert stats.counts["accepted_tokens"]


@pytest.mark.parametrize(
    ("family", "processor"),
    thorough(
        product(["gpt_oss", "deepseek_v2", "llama4_text"], ["cpu", "gpu"]),
        but=[("deepseek_v2", "gpu")],
    ),
)
def test_module_graphs_and_latent_attention_give_the_same_tokens(
    family: str, processor: str, checkpoints: Any, drafted: Install
) -> None:
    directory, _ = checkpoints(family)
    policy = Policy(model=str(directory), ffn_device=processor, attention_device=processor, **SIZES)
    check(policy, GREEDY, drafted)


@pytest.mark.parametrize(
    ("devices", "admission"),
    thorough(product(["cpu", "gpu", "gpu-cache"], ["refill", "static"]), but=[("gpu-cache", "refill")]),
)
def test_chosen_drafts_give_the_same_tokens(
    model: Path, devices: str, admission: str, drafted: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With passes that have drafts and passes that have none, in turns: as if time were always saved, and often not."""
    policy = Policy(model=str(model), admission=admission, **SIZES, **DEVICES[devices])
    plain, _ = run(policy, SAMPLED)
    drafted(plain)
    worth = DraftPrices.seconds

    def seconds(self: DraftPrices, *arguments: Any) -> np.ndarray:
        result = worth(self, *arguments)
        turn = int(result[0] * 1e7) % 3
        return result if turn == 0 else np.ones(len(result)) + (arguments[-1] if turn == 1 else 0.0)

    monkeypatch.setattr(DraftPrices, "seconds", seconds)
    monkeypatch.setattr(DraftPrices, "affordable", True)
    answers, stats = run(policy, SAMPLED, speculate="auto")
    assert comparable(policy, answers) == comparable(policy, plain)
    assert stats.counts["drafted_passes"] < stats.passes


@pytest.mark.parametrize(("devices", "length"), thorough(product(["cpu", "gpu-cache"], [2, 5]), but=[("gpu-cache", 5)]))
def test_stop_texts_end_within_any_part_of_a_draft(model: Path, devices: str, length: int, drafted: Install) -> None:
    """Texts of ``length`` tokens, so that they begin before drafts, in them and behind them."""
    policy = Policy(model=str(model), **SIZES, **DEVICES[devices])
    how = replace(GREEDY, max_tokens=20, allowed_token_ids=list(range(64, 90)))
    endless, _ = run(policy, how)
    assert all(len(one.text) == len(one.token_ids) == how.max_tokens for one in endless)
    ends = [replace(how, stop=[one.text[4 + at : 4 + at + length]], logprobs=0) for at, one in enumerate(endless)]
    drafted(endless)
    plain, _ = run(policy, ends)
    assert all(one.finish_reason == "stop" for one in plain)
    for some in (1, 2, 3, 6):
        answers, stats = run(policy, ends, speculate="ngram", num_speculative_tokens=some)
        assert comparable(policy, answers) == comparable(policy, plain)
        assert stats.counts["accepted_tokens"]


@pytest.mark.parametrize("devices", thorough(["cpu", "gpu", "gpu-attention", "split"], but=["split"]))
def test_policies_that_change_between_passes_give_the_same_tokens(model: Path, devices: str, drafted: Install) -> None:
    policy = Policy(model=str(model), **{**SIZES, "kv_tokens": 8 * 160}, **DEVICES[devices])
    plain, _ = run(policy, SAMPLED)
    drafted(plain)
    with Engine(policy, device="twin" if policy.discrete else "cpu", **NGRAM) as engine:
        drawn = restless(engine, seed=len(devices))
        answers, counts = engine.generate(PROMPTS, SAMPLED), engine.stats.counts
    assert comparable(policy, answers) == comparable(policy, plain)
    assert counts["accepted_tokens"] > 0
    assert len(drawn) > 3


def test_models_that_cannot_verify_drafts_say_so(checkpoints: Any, caplog: pytest.LogCaptureFixture) -> None:
    directory, _ = checkpoints("qwen3_next")
    policy = Policy(model=str(directory), **SIZES)
    answers, stats = run(policy, **NGRAM)
    assert "no drafts: qwen3_next keeps recurrent state" in caplog.text
    assert "drafted_tokens" not in stats.counts
    assert answers == run(policy)[0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"speculate": "ngrams"}, "did you mean 'ngram'"),
        ({"speculate": "ngram", "num_speculative_tokens": 65}, "from 1 to 64, not 65"),
        ({"num_speculative_tokens": 3}, "needs speculate"),
    ],
)
def test_options_are_checked(model: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Engine(Policy(model=str(model)), device="cpu", **options)


@examples(10)
@given(data=st.data())
def test_any_policy_gives_the_same_tokens(tiny: Tiny, data: st.DataObject) -> None:
    """Look-up in models that repeat themselves, in passes of any size."""
    name, (schedule, devices) = data.draw(st.sampled_from(sorted(MODELS))), data.draw(st.sampled_from(served()))
    mu, n = (data.draw(st.sampled_from(range(limit, 0, -1))) for limit in (6, 9))
    policy = Policy(
        model=str(tiny(name, **MODELS[name])),
        schedule=schedule,
        batch_size=n,
        micro_batch_size=mu,
        micro_batch_tokens=data.draw(st.sampled_from(range(50, mu - 1, -1))),
        prompt_micro_batches=data.draw(st.integers(1, 4)),
        kv_tokens=160 * max(2, n),
        kv_block_size=data.draw(st.sampled_from(KV_BLOCK_SIZES)),
        **DEVICES[devices],
    )
    some = data.draw(st.integers(1, 12))
    options = {"speculate": "ngram", "num_speculative_tokens": some}
    assert run(policy, SAMPLED, **options)[0] == run(policy, SAMPLED)[0]
