"""A panic of a library in Rust is an ordinary error, and says nothing of its own where that is asked for."""

from __future__ import annotations

import json
import os

import pytest
import tokenizers

from moelight.core.errors import CheckpointError
from moelight.core.panics import is_panic, panics_as

_PANICS = json.dumps(
    {
        "version": "1.0",
        "normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"},
        "model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"},
    }
)


def test_a_panic_is_known_by_its_class() -> None:
    with pytest.raises(BaseException, match="Cannot parse precompiled_charsmap") as caught:
        tokenizers.Tokenizer.from_str(_PANICS)
    assert is_panic(caught.value) and not isinstance(caught.value, Exception)
    assert not is_panic(KeyboardInterrupt()) and not is_panic(ValueError("PanicException"))


@pytest.mark.parametrize("quiet", [False, True])
def test_a_panic_becomes_the_error_that_is_made_of_its_message(quiet: bool, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(CheckpointError, match=r"^tokenizer: Precompiled: .*charsmap.*$") as caught:  # noqa: SIM117
        with panics_as(lambda message: CheckpointError(f"tokenizer: {message}"), quiet=quiet):
            tokenizers.Tokenizer.from_str(_PANICS)
    assert "\n" not in str(caught.value)
    assert ("panicked at" in capfd.readouterr().err) is not quiet


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, ValueError])
def test_everything_else_passes(error: type[BaseException]) -> None:
    with pytest.raises(error), panics_as(CheckpointError, quiet=True):
        raise error


def test_what_others_write_meanwhile_is_kept(capfd: pytest.CaptureFixture[str]) -> None:
    with panics_as(CheckpointError, quiet=True):
        os.write(2, b"meanwhile\n")
        assert capfd.readouterr().err == ""
    os.write(2, b"behind\n")
    assert capfd.readouterr().err == "meanwhile\nbehind\n"


def test_a_closed_stderr_is_no_obstacle() -> None:
    retained = os.dup(2)
    os.close(2)
    try:
        with pytest.raises(CheckpointError), panics_as(CheckpointError, quiet=True):
            tokenizers.Tokenizer.from_str(_PANICS)
    finally:
        os.dup2(retained, 2)
        os.close(retained)
