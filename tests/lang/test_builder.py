"""Python's spelling of a policy gives the same object under the same rules."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from moelight.core.errors import ConfigError
from moelight.experts.policy import Capacity, ExpertPolicy
from moelight.lang.builder import PolicyBuilder, check_expert_policy, expert_policy
from moelight.lang.check import read

TEXT = """
policy twin {
    cache { capacity = 25% eviction = lfu | lru pin = [1, 2] profile = "a \\"b\\".json" frequency_decay = 0.9 }
    prefetch { predictor = next_router budget = 4 : 2 when hit_rate > 0.9 }
    schedule { mode = hybrid overlap = true }
    monitor { metrics = [hit_rate, eviction_rate] window = 10 }
    per_layer { allocation = uniform }
    adapt {
        when hit_rate < 0.4 for 100 accesses { eviction = slru }
        when eviction_rate > 0.5 { trigger memory_pressure }
        when hit_rate != 0.5 { rebalance per_layer }
    }
}
"""


def test_the_decorator_gives_what_the_text_gives() -> None:
    @expert_policy
    def twin(p: PolicyBuilder) -> None:
        p.cache(
            capacity="25%",
            eviction="lfu | lru",
            pin=[1, np.int64(2)],
            profile='a "b".json',
            frequency_decay=np.float32(0.5),
        )
        p.prefetch(predictor="next_router", budget="4 : 2 when hit_rate > 0.9")
        p.schedule(mode="hybrid", overlap=True)
        p.monitor(metrics=("hit_rate", "eviction_rate"), window=10)
        p.per_layer(allocation="uniform")
        p.when("hit_rate < 0.4", accesses=100, eviction="slru")
        p.when("eviction_rate > 0.5", trigger="memory_pressure")
        p.when("hit_rate != 0.5", rebalance="per_layer")

    assert isinstance(twin, ExpertPolicy)
    assert (twin,) == read(TEXT.replace("0.9 }\n    prefetch", "0.5 }\n    prefetch")).policies


def test_calls_chain() -> None:
    built = (
        PolicyBuilder("q").cache(capacity=Capacity(value=1 << 30, unit="bytes")).prefetch(strategy="history").build()
    )
    assert (built,) == read("policy q { cache { capacity = 1GiB } prefetch { strategy = history } }").policies


def test_every_broken_rule_is_named() -> None:
    builder = PolicyBuilder("bad").cache(capacity=0, evction="lru", ttl=1.5).schedule(mode="hybrid", overlap=False)
    with pytest.raises(ConfigError) as caught:
        builder.when("hit_rate < 0.5", accesses=0, eviction="lfu").build()
    message = str(caught.value)
    for words in ("policy bad: ", "[V1]", "did you mean 'eviction'?", "[type]", "[V14]", "[range]"):
        assert words in message


@pytest.mark.parametrize(
    ("keys", "code"),
    [
        ({"capacity": "16 } }"}, "more than one value"),
        ({"capacity": "16 eviction = lfu"}, "more than one value"),
        ({"capacity": None}, "no value of the policy language"),
        ({"capacity": float("nan")}, "type"),
        ({"capacity": True}, "type"),
        ({"eviction": "lru"}, "missing_key"),
        ({"capacity": 4, "profile": "a\nb"}, "more than|syntax"),
        ({"capacity": 4, "pin": ["a"]}, "type"),
        ({"capacity": 4, "eviction": "score"}, "V15"),
    ],
)
def test_wrong_values_are_refused(keys: dict[str, Any], code: str) -> None:
    with pytest.raises(ConfigError, match=code):
        PolicyBuilder("p").cache(**keys).build()


def test_a_name_that_is_none() -> None:
    with pytest.raises(ConfigError, match="syntax"):
        PolicyBuilder("a b").cache(capacity=4).build()


def test_objects_made_by_hand_are_checked() -> None:
    policy = PolicyBuilder("p").cache(capacity=4).build()
    check_expert_policy(policy)
    for wrong, words in (
        ({"eviction": ("score",)}, "V15"),
        ({"eviction": ("mru",)}, "unknown_value"),
        ({"pin": (600,)}, "V2"),
        ({"capacity": Capacity(value=4, unit="pages")}, "type that the language"),
    ):
        with pytest.raises(ConfigError, match=words):
            check_expert_policy(replace(policy, cache=replace(policy.cache, **wrong)))
