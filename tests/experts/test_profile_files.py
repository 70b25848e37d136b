"""Expert profiles on disk: what goes out comes in, and everything else is refused by key."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from moelight.core.errors import ConfigError
from moelight.experts.predict import Transitions
from moelight.experts.profile import ActivationProfile, Facts, load_profile, save_profile
from tests.hostile.endless import ENDLESS, guarded, put

MODEL: Facts = {"model_type": "olmoe", "num_layers": 2, "num_experts": 3, "top_k": 1, "norm_topk_prob": False}


def saved(path: Path, half_life: float | None = None, *, transitions: bool = False) -> ActivationProfile:
    result = ActivationProfile(model=MODEL, num_layers=2, num_experts=3, half_life=half_life)
    result.record(0, np.array([2, 0]), np.array([5, 1]))
    result.record(1, np.array([1]), np.array([6]))
    if transitions:
        matrix = np.random.default_rng(1).random((2, 3, 3), dtype=np.float32)
        result.transitions = Transitions(matrix=matrix, times=np.arange(6).reshape(2, 3))
    save_profile(result, path)
    return result


def loaded(path: Path, **changes: object) -> ActivationProfile:
    model = {**MODEL, **changes}
    return load_profile(path, model=model, num_layers=int(str(model["num_layers"])), num_experts=3)  # type: ignore[arg-type]


@pytest.mark.parametrize("half_life", [None, 2.0])
def test_round_trip(tmp_path: Path, half_life: float | None) -> None:
    path = tmp_path / "new" / "experts.json"
    before = saved(path, half_life, transitions=True)
    after = loaded(path)
    np.testing.assert_array_equal(after.counts, before.counts)
    assert (after.accesses, after.fingerprint, after.half_life) == (3, before.fingerprint, None)
    assert before.transitions is not None
    assert after.transitions is not None
    assert after.transitions.times.tolist() == before.transitions.times.tolist()
    np.testing.assert_allclose(after.transitions.matrix, before.transitions.matrix, atol=0.5e-4)
    assert [path.name for path in path.parent.iterdir()] == ["experts.json"]


def test_the_file_says_what_it_is(tmp_path: Path) -> None:
    path = tmp_path / "experts.json"
    result = saved(path)
    assert json.loads(path.read_text()) == {
        "format": "moelight expert profile 1",
        "fingerprint": result.fingerprint,
        "model": MODEL,
        "num_layers": 2,
        "num_experts": 3,
        "half_life": None,
        "accesses": 3,
        "counts": [[1, 0, 5], [0, 6, 0]],
    }


def test_another_models_profile_is_refused_with_the_difference(tmp_path: Path) -> None:
    path = tmp_path / "experts.json"
    saved(path)
    with pytest.raises(ConfigError, match=r"experts.json: key 'fingerprint' is of another model \(top_k 1 and 2\)"):
        loaded(path, top_k=2)


LEARNED = {"times": [[0] * 3] * 2, "per_10000": [[[0] * 3] * 3] * 2}


@pytest.mark.parametrize(
    ("key", "value", "complaint"),
    [
        ("format", "2", "key 'format' is '2', not 'moelight expert profile 1'"),
        ("fingerprint", 5, "key 'fingerprint' is of another model; give"),
        ("num_layers", 3, "key 'num_layers' is 3 but the model has 2"),
        ("num_experts", "3", "key 'num_experts' is '3' but the model has 3"),
        ("accesses", True, "key 'accesses' must be a whole number of at least 0, not True"),
        ("counts", [[1, 2, 3]], "key 'counts' must be 2 x 3 numbers"),
        ("counts", [[1, 2, 3], [1, 2]], "key 'counts' must be 2 x 3 numbers"),
        ("counts", [[1, 2, "3"], [1, 2, 3]], "key 'counts' must be 2 x 3 numbers"),
        ("counts", [[1, 2, None], [1, 2, 3]], "key 'counts' must be 2 x 3 numbers"),
        ("counts", {}, "key 'counts' must be 2 x 3 numbers"),
        ("counts", [[1, 2, -3], [1, 2, 3]], "key 'counts' must be finite numbers of at least 0"),
        ("counts", [[1, 2, float("nan")], [1, 2, 3]], "key 'counts' must be finite numbers of at least 0"),
        ("count", 3, r"key 'count' is unknown \(did you mean 'counts'\?\); known: format"),
        ("affinity", [], "key 'affinity' must have the keys 'times' and 'per_10000'"),
        ("affinity", LEARNED | {"more": 1}, "key 'affinity' must have the keys"),
        ("affinity", LEARNED | {"times": [[0]]}, "key 'affinity.times' must be 2 x 3 numbers"),
        ("affinity", LEARNED | {"per_10000": [[[0] * 3] * 2 + [[10001] * 3]] * 2}, "holds 10001, above 10000"),
    ],
)
def test_a_value_that_cannot_be_is_refused(tmp_path: Path, key: str, value: object, complaint: str) -> None:
    path = tmp_path / "experts.json"
    saved(path)
    result = json.loads(path.read_text())
    if key == "fingerprint":
        del result["model"]
    path.write_text(json.dumps({**result, key: value}))
    with pytest.raises(ConfigError, match=f"experts.json: .*{complaint}"):
        loaded(path)


@pytest.mark.parametrize("key", ["format", "fingerprint", "num_layers", "num_experts", "counts"])
def test_a_missing_key_is_named(tmp_path: Path, key: str) -> None:
    path = tmp_path / "experts.json"
    saved(path)
    result = json.loads(path.read_text())
    del result[key]
    path.write_text(json.dumps(result))
    with pytest.raises(ConfigError, match=f"key '{key}' is missing; make a new one with --save-expert-profile"):
        loaded(path)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        (b"", r"experts.json:1: not JSON \("),
        (b'{"format":\n1,}', r"experts.json:2: not JSON \("),
        (b'{"format": 1, "format": 2}', "key 'format' is given twice"),
        (b"\xff\xfe", "not JSON in UTF-8"),
        (b"[" * 100_000, "not JSON"),
        (b"[]", "must be a JSON object, not \\[\\]"),
    ],
)
def test_a_file_that_is_none_is_refused(tmp_path: Path, text: bytes, complaint: str) -> None:
    path = tmp_path / "experts.json"
    path.write_bytes(text)
    with pytest.raises(ConfigError, match=complaint):
        loaded(path)


@pytest.mark.parametrize("kind", ENDLESS)
def test_what_is_no_file_or_never_ends_is_refused(kind: str, tmp_path: Path) -> None:
    with guarded(), pytest.raises(ConfigError, match=rf"experts.json: cannot be read \(.*{ENDLESS[kind][1]}"):
        loaded(put(kind, tmp_path / "experts.json"))


def test_a_place_that_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none.json: cannot be read"):
        loaded(tmp_path / "none.json")
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be written"):
        saved(tmp_path / "file" / "experts.json")
