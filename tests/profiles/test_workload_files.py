"""Named workloads: the published figures, and what happens to a wrong name or file."""

from __future__ import annotations

from pathlib import Path

import pytest

from moelight.core.errors import ConfigError
from moelight.profiles.files import profile_names, read_yaml
from moelight.profiles.workload import Workload, load_workload

# MoE-Lightning, table 3; and the sequences of the largest batch the paper or its artifact runs.
PUBLISHED = {
    "mtbench": (77, 418, 128, 324 * 14),
    "summarization": (1693, 1984, 64, 8 * 36),
    "synthetic-reasoning": (242, 256, 50, 64 * 33),
}
GOOD = "name: mine\nnum_requests: 9\nprompt_len: 5\nmax_prompt_len: 7\ngen_len: 3\n"


def written(tmp_path: Path, text: str) -> str:
    path = tmp_path / "mine.yaml"
    path.write_text(text, encoding="utf-8")
    return str(path)


@pytest.mark.parametrize(("name", "figures"), PUBLISHED.items())
def test_shipped_workloads_have_the_published_figures(name: str, figures: tuple[int, ...]) -> None:
    workload = load_workload(name)
    *lengths, batch = figures
    assert [workload.prompt_len, workload.max_prompt_len, workload.gen_len] == lengths
    assert workload.num_requests >= batch


def test_mtbench_is_its_eighty_questions_over_and_over() -> None:
    assert load_workload("mtbench").num_requests % 80 == 0


def test_these_workloads_are_shipped_and_say_whence() -> None:
    known_names = profile_names("workload")
    assert list(known_names) == sorted(PUBLISHED)
    for name, path in known_names.items():
        fields = read_yaml(path).entries()
        assert fields["name"].text() == name
        assert "MoE-Lightning" in fields["source"].text()


def test_a_file_of_ones_own(tmp_path: Path) -> None:
    meant = Workload(num_requests=9, prompt_len=5, max_prompt_len=7, gen_len=3)
    assert load_workload(written(tmp_path, GOOD)) == meant
    assert load_workload(written(tmp_path, GOOD + "source: my own logs\n")) == meant


def test_own_workloads_come_before_the_shipped_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = tmp_path / "workload_profiles"
    original.mkdir()
    (original / "mtbench.yaml").write_text(GOOD, encoding="utf-8")
    monkeypatch.setenv("MOELIGHT_PROFILES", str(tmp_path))
    assert load_workload("mtbench").num_requests == 9


def test_an_unknown_name_offers_the_nearest_and_lists_all() -> None:
    with pytest.raises(ConfigError, match=r"unknown workload profile 'mtbensh' \(did you mean 'mtbench'\?\)") as caught:
        load_workload("mtbensh")
    for name in PUBLISHED:
        assert name in str(caught.value)


@pytest.mark.parametrize("name", ["", "no/such/place", "gone.yaml", "a\0b", "a/b\0", "."])
def test_a_wrong_place_is_one_clear_error(name: str) -> None:
    with pytest.raises(ConfigError):
        load_workload(name)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (GOOD.replace("gen_len", "gen_lenn"), "mine.yaml:5: unknown key 'gen_lenn' (did you mean 'gen_len'"),
        (GOOD.replace("gen_len: 3\n", ""), "mine.yaml:1: the file lacks the key 'gen_len'"),
        (GOOD.replace("num_requests: 9", "num_requests: 0"), "mine.yaml:2: num_requests must be a whole number"),
        (GOOD.replace("prompt_len: 5", "prompt_len: 5.5"), "mine.yaml:3: prompt_len must be a whole number"),
        (
            GOOD.replace("max_prompt_len: 7", "max_prompt_len: 4"),
            "mine.yaml: prompt_len (5) exceeds max_prompt_len (4)",
        ),
        (GOOD.replace("name: mine", "name: 3"), "mine.yaml:1: name must be text"),
        (GOOD + "source: [a]\n", "mine.yaml:6: source must be"),
        (GOOD + "gen_len: 4\n", "mine.yaml:6: key 'gen_len' is given twice"),
    ],
)
def test_every_mistake_in_a_file_is_told_with_its_place(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_workload(written(tmp_path, text))
    assert says in str(caught.value)
