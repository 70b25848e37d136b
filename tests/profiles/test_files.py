"""The YAML reader: every mistake is told with file, line and the nearest right word."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moelight.core.errors import ConfigError
from moelight.profiles.files import find_profile, profile_directories, read_yaml


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "some.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def test_values_come_as_they_were_written(tmp_path: Path) -> None:
    root = read_yaml(written(tmp_path, "a: 1\nb: {c: [x, 2.5, null, true], d: 1e6}\ne: 24GiB\n"))
    assert root.plain() == {"a": 1, "b": {"c": ["x", 2.5, None, True], "d": 1e6}, "e": "24GiB"}
    assert root.entries()["b"].entries()["d"].where.endswith("some.yaml:2")


def test_an_unknown_key_is_named_with_line_and_nearest(tmp_path: Path) -> None:
    root = read_yaml(written(tmp_path, "name: x\ntiers:\n  host:\n    capacty: 1\n"))
    host = root.entries()["tiers"].entries()["host"]
    with pytest.raises(
        ConfigError, match=r"some\.yaml:4: unknown key 'capacty' in tiers\.host \(did you mean 'capacity'"
    ):
        host.fields("capacity", "bandwidth")


def test_a_missing_key_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"some\.yaml:2: tiers lacks the key 'host'"):
        read_yaml(written(tmp_path, "tiers:\n  disk: 1\n")).entries()["tiers"].fields("disk", required=("host",))


@pytest.mark.parametrize(
    ("text", "line", "says"),
    [
        ("a: 1\nb: 2\na: 3\n", 3, "'a' is given twice"),
        ("a: &x 1\nb: *x\n", 2, "aliases are not allowed"),
        ("a: [1\nb: 2\n", 2, ""),
        ("a: 1\n\tb: 2\n", 2, ""),
        ("? [1, 2]\n: 3\n", 1, "a key must be text"),
        ("", 1, "empty"),
        ("a: 1\n---\nb: 2\n", 2, ""),
        ("a:\n  b: .inf\n", 2, "a.b must be finite"),
        ("a:\n  b: 2001-01-01\n", 2, "a.b must be a single value"),
        ("a:\n  b: 2001-99-99\n", 2, "a.b cannot be read"),
        ("a:\n  b: !!python/object/apply:os.getcwd []\n", 2, ""),
        ("a:\n  b: !!int x\n", 2, "a.b cannot be read"),
        ("- 1\n", 1, "must be a mapping"),
    ],
)
def test_what_is_not_plain_data_is_refused_with_its_line(tmp_path: Path, text: str, line: int, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        root = read_yaml(written(tmp_path, text))
        root.entries()
        root.plain()
    assert f"some.yaml:{line}:" in str(caught.value)
    assert says in str(caught.value)


@pytest.mark.parametrize("content", [b"\xff\xfe\x00", b"a: \x00", b"[" * 5000, b"a: {" * 3000])
def test_bytes_that_are_not_yaml_are_refused_with_their_file(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "some.yaml"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"some\.yaml"):
        read_yaml(path).plain()


@pytest.mark.parametrize("text", ["a: x", "a: 1.5", "a: true", "a: 0", "a: [1]", "a: {b: 1}", "a: null"])
def test_a_whole_number_is_nothing_else(tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigError, match=r"some\.yaml:1: a must be a"):
        read_yaml(written(tmp_path, text)).entries()["a"].integer()


@pytest.mark.parametrize("text", ["a: 1", "a: ''", "a: [x]", "a: null", "a: yes"])
def test_text_is_nothing_else(tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigError, match=r"some\.yaml:1: a must be"):
        read_yaml(written(tmp_path, text)).entries()["a"].text()


@given(st.text(max_size=60))
def test_no_text_gets_past_the_reader_but_as_data_or_config_error(
    tmp_path_factory: pytest.TempPathFactory, text: str
) -> None:
    path = tmp_path_factory.getbasetemp() / "fuzz.yaml"
    path.write_bytes(text.encode("utf-8", errors="surrogatepass"))
    try:
        read_yaml(path).plain()
    except ConfigError as error:
        assert "fuzz.yaml" in str(error)


def test_own_profiles_come_before_the_shipped_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shipped = find_profile("hardware", "t4")
    original = tmp_path / "hardware_profiles"
    original.mkdir()
    (original / "t4.yaml").write_text("name: mine\n", encoding="utf-8")
    monkeypatch.setenv("MOELIGHT_PROFILES", str(tmp_path))
    assert find_profile("hardware", "t4") == original / "t4.yaml" != shipped
    assert find_profile("hardware", "l4") == shipped.parent / "l4.yaml"


def test_a_wrong_directory_in_the_environment_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOELIGHT_PROFILES", "/no/such/place")
    with pytest.raises(ConfigError, match="MOELIGHT_PROFILES=/no/such/place"):
        profile_directories("model")


@pytest.mark.parametrize("name", ["mixtrl-8x7b", "../model_profiles/mixtral-8x7b", "", "mixtral-8x7b.yaml"])
def test_an_unknown_name_lists_the_known_ones(name: str) -> None:
    with pytest.raises(ConfigError, match="mixtral-8x7b"):
        find_profile("model", name)
