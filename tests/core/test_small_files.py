"""Small files are read whole and within a limit; whatever else a path names is an error at once."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest

from moelight.core.small_files import open_regular, parse_json, read_bytes, read_error_text, read_object, read_text
from tests.hostile.endless import ENDLESS, guarded, put
from tests.process import descriptors


@pytest.mark.parametrize("kind", ENDLESS)
def test_what_is_no_regular_file_is_refused_at_once(kind: str, tmp_path: Path) -> None:
    with guarded(), pytest.raises(OSError, match=ENDLESS[kind][1]) as caught:
        read_bytes(put(kind, tmp_path / "it"), max_bytes=100)
    assert str(tmp_path) not in read_error_text(caught.value) and "\n" not in read_error_text(caught.value)


def test_a_fifo_with_a_writer_is_none_either(tmp_path: Path) -> None:
    path = put("fifo", tmp_path / "it")
    writer = os.open(path, os.O_RDWR)
    try:
        os.write(writer, b"{}")
        with guarded(), pytest.raises(OSError, match="a FIFO, not a file"):
            read_bytes(path, max_bytes=100)
    finally:
        os.close(writer)


def test_no_descriptor_is_left_open(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("12345")
    before = descriptors()
    for kind in ENDLESS:
        with pytest.raises(OSError, match=ENDLESS[kind][1]):
            open_regular(put(kind, tmp_path / kind))
    with pytest.raises(OSError, match="larger"):
        read_bytes(tmp_path / "file", max_bytes=4)
    assert descriptors().items() <= before.items()


@pytest.mark.parametrize("size", [0, 1, 99, 100])
def test_a_file_within_the_limit_is_read_whole(size: int, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x" * size)
    (tmp_path / "link").symlink_to("file")
    assert read_bytes(tmp_path / "link", max_bytes=100) == b"x" * size


def test_the_limit_is_of_what_is_read(tmp_path: Path) -> None:
    """A file of the kernel's says a size of 0, and a file full of holes takes no room on its disk."""
    maps = Path("/proc/self/maps")
    assert maps.stat().st_size == 0
    with pytest.raises(OSError, match="larger than 100B"):
        read_bytes(maps, max_bytes=100)
    assert b"[stack]" in read_bytes(maps, max_bytes=1 << 24)
    with (tmp_path / "holes").open("wb") as file:
        file.truncate(1 << 40)
    with guarded(), pytest.raises(OSError, match=r"larger than 1\.0MiB"):
        read_bytes(tmp_path / "holes", max_bytes=1 << 20)


@pytest.mark.parametrize("path", ["none", "file/below", "to nothing"])
def test_what_is_not_there_is_the_systems_own_error(path: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "to nothing").symlink_to("gone")
    with pytest.raises((FileNotFoundError, NotADirectoryError)):
        read_text(tmp_path / path, max_bytes=1)


def test_text_is_utf_8_and_a_path_has_no_null(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"\xff")
    with pytest.raises(ValueError, match="utf-8"):
        read_text(tmp_path / "file", max_bytes=1)
    with pytest.raises(ValueError, match="null"):
        read_text("a\0b", max_bytes=1)


WRONG = {
    "{": "Expecting property name",
    "[" * 100_000: "nest too deep",
    "9" * 5000: "an integer of more than 4300 digits",
    '{"a": [-' + "9" * 5000 + "]}": "an integer of more than 4300 digits",
}


@pytest.mark.parametrize("text", WRONG, ids=WRONG.values())
def test_what_is_no_json_is_one_line(text: str) -> None:
    assert sys.get_int_max_str_digits() == 4300
    with pytest.raises(ValueError, match=WRONG[text]) as caught:
        parse_json(text)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 200


@pytest.mark.parametrize("value", ["[]", "1", "null", '"x"'])
def test_an_object_is_an_object(value: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text(value)
    with pytest.raises(ValueError, match="must hold a JSON object"):
        read_object(tmp_path / "file")
    (tmp_path / "file").write_text(f'{{"a": {value}}}')
    result: dict[str, Any] = read_object(tmp_path / "file")
    assert list(result) == ["a"]
