"""A draft model changes how many tokens a pass chooses, never which; it drafts where that pays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moelight.cli.main import main
from moelight.core.dtypes import BFLOAT16
from moelight.core.errors import BudgetError, ConfigError
from moelight.core.policy import Policy, Shares
from moelight.core.request import StructuredOutputs
from moelight.engine.batcher import RunningSequence
from moelight.engine.draft_model import DraftModel
from moelight.engine.draft_planning import choose_drafts, plan_drafts, why_not_worth
from moelight.engine.draft_prices import DraftPrices
from moelight.engine.engine import Engine
from moelight.engine.options import EngineOptions
from moelight.engine.planning import hardware_for, plan_for, speeds_for
from moelight.engine.speculation import Speculation
from moelight.hrm.machine_model import speeds_of
from moelight.models.checkpoints import open_model
from moelight.profiles.model_files import load_model_profile
from moelight.profiles.workload import Workload
from moelight.runtime.machine import find_machine
from tests.cases import thorough
from tests.engine.test_drafts import StatedPrices, everything, sequence
from tests.engine.test_invariance import DEVICES
from tests.engine.test_speculation import GREEDY, PROMPTS, SAMPLED, SIZES, comparable, run
from tests.engines import Tiny
from tests.tiny import save_tiny
from tests.weights.gguf_files import write_gguf

MIXTRAL = load_model_profile("mixtral")
CPU = speeds_of(hardware_for("cpu-amx", discrete=False))
DRAFTED: dict[str, Any] = {"speculate": "model", "num_speculative_tokens": 3}


@pytest.fixture(scope="module")
def target(tiny: Tiny) -> Path:
    return tiny("mixtral", sliding_window=20)


@pytest.fixture(scope="module")
def other(tiny: Tiny) -> Path:
    """Another model of the same tokenizer, which guesses hardly any token."""
    return tiny("olmoe")


def check(policy: Policy, draft_model: Path, sampling: Any) -> tuple[Any, Any]:
    """Compare completions with and without the draft model; returns the statistics of these runs."""
    plain, before = run(policy, sampling)
    answers, after = run(policy, sampling, draft_model=str(draft_model), **DRAFTED)
    assert comparable(policy, answers) == comparable(policy, plain)
    assert after.completion_tokens == before.completion_tokens
    counts = after.counts
    kinds = {"model", "grammar"}
    assert counts["drafted_tokens"] == sum(counts.get(f"{kind}_drafted_tokens", 0) for kind in kinds) > 0
    assert counts["accepted_tokens"] == sum(counts.get(f"{kind}_accepted_tokens", 0) for kind in kinds)
    return before, after


@pytest.mark.parametrize("devices", thorough(DEVICES, but=["gpu-cache"]))
@pytest.mark.parametrize("sampling", thorough([GREEDY, SAMPLED], but=[SAMPLED]), ids=["greedy", "sampled"])
def test_another_model_gives_the_same_tokens(target: Path, other: Path, devices: str, sampling: Any) -> None:
    check(Policy(model=str(target), **SIZES, **DEVICES[devices]), other, sampling)


@pytest.mark.parametrize("devices", thorough(["cpu", "gpu-cache"], but=["cpu"]))
def test_a_model_guesses_its_greedy_tokens(target: Path, devices: str) -> None:
    """With room for all drafts every sequence goes on by four tokens in a pass."""
    policy = Policy(model=str(target), **{**SIZES, "micro_batch_tokens": 200}, **DEVICES[devices])
    before, after = check(policy, target, GREEDY)
    assert after.counts["model_accepted_tokens"] >= 0.9 * after.counts["model_drafted_tokens"]
    assert 2 * after.passes < before.passes


HOW: list[dict[str, Any]] = [
    {"repetition_penalty": 1.3, "logprobs": 2, "temperature": 0.7},
    {"stop": ["a", "e"], "logit_bias": {97: 3.0}, "min_tokens": 5},
    {"structured_outputs": StructuredOutputs(regex="(abc|abd)+[0-9]{3}")},
    {"n": 2, "max_tokens": 9, "temperature": 0.8, "bad_words": ["a"]},
]


@pytest.mark.parametrize("devices", thorough(["cpu", "gpu-cache"], but=["cpu"]))
@pytest.mark.parametrize("how", thorough(HOW, but=HOW[2:3]), ids="-".join)
def test_samplings_and_constraints_hold_within_a_draft(target: Path, devices: str, how: dict[str, Any]) -> None:
    policy = Policy(model=str(target), **SIZES, **DEVICES[devices])
    check(policy, target, [replace(GREEDY, seed=at, **how) for at in range(len(PROMPTS))])


@pytest.mark.parametrize("family", thorough(["gpt_oss", "deepseek_v2", "gemma3_text"], but=["gpt_oss"]))
def test_models_with_windows_or_latents_draft(target: Path, checkpoints: Any, family: str) -> None:
    directory, _ = checkpoints(family)
    policy = Policy(model=str(directory), **SIZES)
    assert check(policy, directory, GREEDY)[1].counts["model_accepted_tokens"] > 20


@pytest.mark.thorough
def test_a_file_drafts(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    write_gguf(path, "llama", experts="Q8_0", vocab=True)
    check(Policy(model=str(path), **SIZES), path, GREEDY)


@pytest.mark.parametrize("admission", thorough(["refill", "static"], but=["refill"]))
def test_answers_that_are_suspended_go_on(target: Path, other: Path, admission: str) -> None:
    sizes = {**SIZES, "kv_tokens": 528, "kv_block_size": 16, "batch_size": 6}
    how = replace(GREEDY, max_tokens=None, stop_token_ids=list(range(60, 97)), ignore_eos=False)
    check(Policy(model=str(target), admission=admission, **sizes), other, how)


def test_chosen_drafts_of_either_kind_give_the_same_tokens(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if rows were free, and tokens of the draft model took a tenth of a pass each."""
    predicted: list[np.ndarray] = []
    seconds = DraftModel.seconds

    def tenth(self: DraftModel, sequences: Sequence[RunningSequence], num_tokens: int) -> np.ndarray:
        predicted.append(seconds(self, sequences, num_tokens))
        return np.arange(num_tokens + 1) * 0.1

    policy = Policy(model=str(target), **{**SIZES, "micro_batch_tokens": 200})
    plain, before = run(policy, SAMPLED)
    monkeypatch.setattr(DraftModel, "seconds", tenth)
    monkeypatch.setattr("moelight.engine.speculation.DraftPrices.seconds", lambda *values: np.ones(len(values[-1])))
    monkeypatch.setattr("moelight.engine.speculation.DraftPrices.affordable", True)
    monkeypatch.setattr("moelight.engine.draft_planning.why_not_worth", lambda *_: None)
    answers, after = run(policy, SAMPLED, draft_model=str(target))
    assert answers == plain
    assert after.counts["model_accepted_tokens"] > 10
    assert after.passes < before.passes
    assert all(np.all(np.diff(times) > 0) and times[0] == 0 for times in predicted)


def test_predicted_seconds_grow_with_drafts_and_rows(target: Path) -> None:
    policy, machine = Policy(model=str(target), **SIZES), find_machine("cpu")
    drafts = plan_drafts(open_model(str(target)), policy, machine, CPU)
    model = DraftModel(drafts, machine, lanes="auto", vocab_size=300)
    try:
        few, many = sequence([1] * 30, [2]), [sequence([1] * 30, [2], index=index) for index in range(4)]
        one, four = model.seconds([few], 3), model.seconds(many, 3)
        assert one[0] == four[0] == 0
        assert np.all(np.diff(one) > 0) and np.all(four[1:] > one[1:])
        assert not np.any(model.seconds([], 3))
    finally:
        model.close()


def test_samples_share_the_blocks_of_their_prompt(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of each prompt, full blocks are computed once, whichever samples draft."""
    computed: list[int] = []
    monkeypatch.setattr(DraftPrices, "observe", lambda _, ran, **__: computed.append(ran.prompt_tokens))
    sampling = replace(GREEDY, n=5, temperature=0.8, seed=3, max_tokens=8)
    prompts = [[97 + at % 7 for at in range(80 + number)] for number in range(2)]
    with Engine(Policy(model=str(target), **SIZES), device="cpu", draft_model=str(target), **DRAFTED) as engine:
        engine.generate(prompts, sampling)
    assert sum(computed) < 2 * (81 + 5 * 32)


@pytest.mark.thorough
def test_a_full_cache_leaves_sequences_without_drafts(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts of 64 tokens share their blocks, which the cache of the draft model is not planned for."""
    policy = Policy(model=str(target), **{**SIZES, "kv_tokens": 5 * 96})
    monkeypatch.setattr("moelight.engine.batcher.PrefixCache.find", lambda *_: [])
    planned = plan_drafts

    def small(source: Any, resolved: Policy, *rest: Any, **named: Any) -> Any:
        return planned(source, replace(resolved, kv_tokens=1, batch_size=3), *rest, **named)

    plain, _ = run(policy)
    monkeypatch.setattr("moelight.engine.draft_planning.plan_drafts", small)
    answers, stats = run(policy, draft_model=str(target), **DRAFTED)
    assert answers == plain
    assert stats.counts["model_drafted_tokens"]


def test_a_later_call_drafts_too(target: Path) -> None:
    with Engine(Policy(model=str(target), **SIZES), device="cpu", draft_model=str(target), **DRAFTED) as engine:
        first = engine.generate(PROMPTS, GREEDY)
        stream = engine.stream(PROMPTS, GREEDY)
        next(stream)
        stream.close()  # type: ignore[attr-defined]
        before = engine.stats.counts["model_accepted_tokens"]
        again = engine.generate(PROMPTS, GREEDY)
        assert [one.token_ids for one in again] == [one.token_ids for one in first]
        assert engine.stats.counts["model_accepted_tokens"] > before


def with_tokenizer(directory: Path, old: str, new: str) -> None:
    text = (directory / "tokenizer.json").read_text(encoding="utf-8")
    assert old in text
    (directory / "tokenizer.json").write_text(text.replace(old, new), encoding="utf-8")


def test_another_tokenizer_is_refused_in_one_line(
    target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    strange = save_tiny(tmp_path / "strange", "mixtral")
    with_tokenizer(strange, "<|pad|>", "<|end|>")
    with pytest.raises(ConfigError, match=r"token 258 is '<\|end\|>' there and '<\|pad\|>' here"):
        Engine(Policy(model=str(target)), device="cpu", draft_model=str(strange))
    (tmp_path / "prompts.txt").write_text("a\n", encoding="utf-8")
    arguments = ["generate", str(tmp_path / "prompts.txt"), "--model", str(target), "--draft-model", str(strange)]
    capsys.readouterr()
    assert main([*arguments, "--device", "cpu", "--max-tokens", "2"]) == 2
    message = capsys.readouterr().err.strip()
    assert "its tokenizer is not that of" in message
    assert len(message.splitlines()) == 1


def test_a_model_with_state_is_refused(target: Path, checkpoints: Any) -> None:
    directory, _ = checkpoints("qwen3_next")
    with pytest.raises(ConfigError, match="qwen3_next keeps recurrent state"):
        Engine(Policy(model=str(target)), device="cpu", draft_model=str(directory))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"speculate": "model"}, "needs a draft_model"),
        ({"draft_model": "demo", "speculate": "ngram"}, "contradict"),
        ({"draft_model": "demo", "speculate": "off"}, "contradict"),
        ({"draft_model": "demo", "tp": "2"}, "--tp contradict"),
    ],
)
def test_options_are_checked(target: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Engine.from_pretrained(str(target), device="cpu", **options)


def test_a_plan_leaves_memory_for_the_draft_model(target: Path, other: Path, unproved: None) -> None:
    workload = Workload(num_requests=8, prompt_len=20, gen_len=8)
    source, machine, limit = open_model(str(target)), find_machine("cpu"), 120 << 20
    options = EngineOptions(device="cpu", host_memory=limit, draft_model=str(other), speculate="model")
    plan = plan_for(str(target), source, machine, options, workload)
    speeds = speeds_for(plan, discrete=False)
    drafts, refused = choose_drafts(options, source, plan.policy, machine, speeds)
    assert refused is None
    assert 0 < drafts.bytes_on("host") < limit
    assert plan.use_of("host").capacity_bytes <= limit - drafts.bytes_on("host")
    with pytest.raises(BudgetError) as alone:
        plan_for(str(target), source, machine, replace(options, host_memory=1), workload)
    with pytest.raises(BudgetError, match="for drafts of") as error:
        plan_for(str(target), source, machine, replace(options, host_memory=alone.value.needed_bytes), workload)
    plan_for(str(target), source, machine, replace(options, host_memory=error.value.needed_bytes), workload)


@pytest.mark.parametrize(
    ("weights", "sequences", "worth"),
    [(Shares(disk=1.0), 16, True), (Shares(host=1.0), 4096, False)],
    ids=["disk", "resident"],
)
def test_a_draft_model_is_refused_where_it_does_not_pay(
    target: Path, weights: Shares, sequences: int, worth: bool
) -> None:
    policy = Policy(
        model="m",
        batch_size=sequences,
        micro_batch_size=sequences,
        micro_batch_tokens=max(1024, sequences),
        kv_tokens=sequences * 512,
        weights=weights,
    )
    drafts = plan_drafts(open_model(str(target)), policy, find_machine("cpu"), CPU)
    reason = why_not_worth(drafts, MIXTRAL, policy, BFLOAT16, CPU, 16)
    assert (reason is None) == worth
    assert worth or "with 4,096 sequences a pass takes" in str(reason)


def test_an_engine_without_gain_opens_no_draft_model(
    target: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("moelight.engine.draft_planning.why_not_worth", lambda *_: "nothing is gained")
    with Engine(Policy(model=str(target), **SIZES), device="cpu", draft_model=str(target)) as engine:
        engine.generate(PROMPTS[:2], GREEDY)
        assert "model_drafted_tokens" not in engine.stats.counts
    assert "no draft model: nothing is gained" in caplog.text


class StatedModel:
    """Drafts of a model that take ``draft_s`` seconds each for all sequences together."""

    def __init__(self, draft_s: float) -> None:
        self.kind, self.seconds_spent, self._draft_s = "model", 0.0, draft_s
        self.asked: list[int] = []

    def seconds(self, sequences: Sequence[RunningSequence], num_tokens: int) -> np.ndarray:
        return self._draft_s * np.arange(num_tokens + 1)

    def draft(self, asked: Sequence[tuple[RunningSequence, int]]) -> Mapping[RunningSequence, tuple[int, ...]]:
        self.asked = [count for _, count in asked]
        self.seconds_spent += self._draft_s * max(self.asked)
        return {owner: tuple(range(count)) for owner, count in asked}

    def landed(self, *_: Any) -> None: ...

    def end(self, owner: RunningSequence) -> None: ...

    def clear(self) -> None: ...


@pytest.mark.parametrize(
    ("draft_s", "row_s", "counts"),
    [(0.0, 0.0, [4] * 10), (1.0, 0.0, []), (0.01, 0.2, []), (0.25, 0.0, [2, 3])],
    ids=["free", "slow to draft", "slow to verify", "between"],
)
def test_a_model_drafts_as_many_tokens_as_pay(draft_s: float, row_s: float, counts: list[int]) -> None:
    model, policy = StatedModel(draft_s), Policy(model="m")
    prices: Any = StatedPrices(draft_s=row_s)
    speculation = Speculation(None, 4, prices, model)
    for _ in range(2):
        speculation.after([], [], 1.0, {}, policy)
    some = [(sequence([1], [2], index=index), 8) for index in range(10)]
    drafts = speculation.propose(policy, everything, some, 1000, 0)
    assert set(model.asked) <= set(counts)
    assert bool(model.asked) == bool(drafts) == bool(counts)
    assert speculation.drafting_s == pytest.approx(draft_s * max(model.asked, default=0))
