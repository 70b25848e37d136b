"""Changes of policy between passes: the same tokens, said in the figures, the log and the progress, and cheap."""

from __future__ import annotations

import itertools
import logging
from dataclasses import replace
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest

from moelight.core.errors import ConfigError
from moelight.core.policy import Policy, Shares
from moelight.core.request import SamplingParams
from moelight.engine import adaptation
from moelight.engine.engine import Engine
from moelight.kernels import native
from moelight.optimizer.adapter import Allocation, values_of, with_values
from moelight.profiles.workload import Workload
from tests.cases import thorough
from tests.engine.test_invariance import DEVICES, MODELS, PROMPTS, SAMPLING, answers, truth
from tests.engines import Tiny, in_turn


def restless(engine: Engine, seed: int) -> set[tuple[int, ...]]:
    """Another policy of the allocation, drawn anew before every pass; returns those that were drawn."""
    random, passes, batcher, drawn = Random(seed), engine._loaded, engine._batcher, set()
    allocation, inner, first = Allocation(engine.profile, engine.policy, passes.dtype), batcher.next_pass, engine.policy

    def next_pass(*arguments: Any) -> Any:
        values = values_of(first)
        for _ in range(random.randint(0, 3)):
            values = random.choice(allocation.neighbours(values, most_running=random.randint(1, 48)))
        passes.policy = batcher.policy = replace(with_values(first, values), look_ahead=random.randint(1, 4))
        drawn.add(values_of(passes.policy))
        return inner(*arguments)

    batcher.next_pass = next_pass  # type: ignore[method-assign]
    return drawn


CHANGING = in_turn([(item,) for item in ("cpu", "gpu", "gpu-attention", "split")], MODELS)


@pytest.mark.parametrize(("devices", "name"), thorough(CHANGING, but=CHANGING[::3]))
def test_any_changes_between_passes_give_the_same_tokens(tiny: Tiny, devices: str, name: str) -> None:
    model = tiny(name, **MODELS[name])
    policy = Policy(
        model=str(model),
        batch_size=3,
        micro_batch_size=2,
        micro_batch_tokens=8,
        kv_tokens=20 * 160,
        **DEVICES[devices],
    )
    with Engine(policy, device="twin" if policy.discrete else "cpu") as engine:
        drawn = restless(engine, seed=len(devices))
        assert answers(engine.generate(PROMPTS, SAMPLING)) == truth(model)
    assert len(drawn) > 8
    assert len({values[0] for values in drawn}) > 2


@pytest.mark.skipif(not native.available(), reason="torch's products depend on the number of rows")
def test_in_bfloat16_too(tiny: Tiny) -> None:
    model = tiny("mixtral", dtype="bfloat16", num_hidden_layers=3, hidden_size=96, intermediate_size=200)
    policy = Policy(model=str(model), batch_size=3, micro_batch_size=2, micro_batch_tokens=8, kv_tokens=20 * 160)
    with Engine(policy, device="cpu") as engine:
        wanted = answers(engine.generate(PROMPTS, SAMPLING))
        drawn = restless(engine, seed=2)
        assert answers(engine.generate(PROMPTS, SAMPLING)) == wanted
    assert len(drawn) > 8


def test_a_policy_beyond_the_allocation_is_refused(tiny: Tiny) -> None:
    model = tiny("mixtral", **MODELS["mixtral"])
    with Engine(Policy(model=str(model), batch_size=4), device="cpu") as engine:
        runner = engine._loaded
        for change in ({"batch_size": 5}, {"micro_batch_tokens": 4096}, {"schedule": "serial"}):
            with pytest.raises(ConfigError, match="allocated"):
                runner.policy = replace(runner.policy, **change)  # type: ignore[arg-type]
        runner.policy = replace(runner.policy, batch_size=2, prompt_micro_batches=1)
        assert runner.policy.batch_size == 2


def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Look after every eighth pass, whatever it costs."""
    monkeypatch.setattr(adaptation, "LEAST_S", 0.0)
    monkeypatch.setattr(adaptation, "SHARE", 1e9)


def test_a_change_is_said_in_the_figures_the_log_and_to_whoever_watches(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A cache with room for far more sequences than N, on a machine where the interpreter takes most of each pass."""
    eager(monkeypatch)
    model = tiny("mixtral", **MODELS["mixtral"])
    policy = Policy(
        model=str(model),
        batch_size=2,
        micro_batch_size=32,
        micro_batch_tokens=64,
        kv_tokens=64 * 64,
        weights=Shares(disk=1),
    )
    how = SamplingParams(max_tokens=8, ignore_eos=True)
    prompts = [[65 + n % 26] * 6 for n in range(60)]
    with Engine(replace(policy, batch_size=32), device="cpu") as engine:
        wanted = [item.token_ids for item in engine.generate(prompts, how)]
        assert engine.adaptations == ()
        assert engine.stats.as_dict()["adaptations"] == []
    with caplog.at_level(logging.INFO, logger="moelight"), Engine(policy, device="cpu", adapt=True) as engine:
        assert [item.token_ids for item in engine.generate(prompts, how)] == wanted
        changes, message = engine.adaptations, engine.stats.as_dict()["adaptations"]
        assert engine.policy.batch_size == 2
    first = changes[0]
    assert first.now["batch_size"] > 2
    assert first.before["batch_size"] == 2
    assert message[0] == {
        "pass": first.after_pass,
        "from": dict(first.before),
        "to": dict(first.now),
        "reason": first.reason,
        "predicted_gain": first.predicted_gain,
    }
    assert "so N goes from 2 to" in first.reason
    assert [record.getMessage() for record in caplog.records if record.name == "moelight.engine.adaptation"] == [
        f"after pass {change.after_pass}: {change.reason}" for change in changes
    ]


def test_a_plan_adapts_as_far_as_nobody_fixed_it_and_a_policy_does_not(tiny: Tiny) -> None:
    model, work = tiny("mixtral", **MODELS["mixtral"]), Workload(num_requests=8, gen_len=8)
    with Engine.from_pretrained(model, device="cpu", workload=work, batch_size=3) as engine:
        assert engine._adapting is not None
        assert engine.plan is not None
        assert engine.plan.speeds is not None
        assert "batch_size" in engine.plan.fixed
        fixed = engine._adapting._adapter.allocation
        assert {values[0] for values in fixed.neighbours(values_of(engine.policy), most_running=99)} == {3}
    with Engine.from_pretrained(model, device="cpu", workload=work, adapt=False) as engine:
        assert engine._adapting is None
    static = Policy(model=str(model), admission="static")
    for policy, adapt in ((Policy(model=str(model)), None), (static, True)):
        with Engine(policy, device="cpu", adapt=adapt) as engine:
            assert engine._adapting is None


@pytest.mark.parametrize(("pass_s", "looked"), [(1e-3, False), (10.0, True)])
def test_watching_keeps_to_its_share_of_the_time(
    pass_s: float, looked: bool, tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Passes of a millisecond leave no time for looks that take as long. The clock is the test's own: watching a pass
    takes a tenth of a millisecond by it, and passes take what the test says."""
    ticks = itertools.count()
    monkeypatch.setattr(adaptation, "time", SimpleNamespace(perf_counter=lambda: next(ticks) * 1e-4))
    looks: list[object] = []
    model = tiny("mixtral", **MODELS["mixtral"])
    with Engine(Policy(model=str(model), batch_size=4), device="cpu", adapt=True) as engine:
        watching = engine._adapting
        assert watching is not None
        after = watching.after
        monkeypatch.setattr(watching, "after", lambda loads, _, busy_s: after(loads, pass_s, busy_s))
        monkeypatch.setattr(watching, "_look", lambda *lengths: looks.append(lengths))
        engine.generate(PROMPTS * 6, SAMPLING * 6)
        assert watching._passed > 10
        assert watching._spent_s <= adaptation.SHARE * watching._all_s + 1.0001e-4
        assert bool(looks) is looked
