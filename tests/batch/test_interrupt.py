"""Ctrl-C and SIGTERM: once, twice, before passes, and where they are not ours to take."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator

import pytest

from moelight.batch.job import Interrupt, terminable

BOTH = (signal.SIGINT, signal.SIGTERM)


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    """Those of a program that was just started; the tests' own come back."""
    before = {number: signal.getsignal(number) for number in BOTH}
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", BOTH)
def test_the_first_asks_and_the_second_ends(number: signal.Signals) -> None:
    told: list[str] = []
    with pytest.raises(KeyboardInterrupt), Interrupt(lambda: told.append("asked")) as interrupt:
        assert not interrupt.asked
        signal.raise_signal(number)
        assert interrupt.asked and told == ["asked"]
        signal.raise_signal(number)
    assert told == ["asked"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_what_a_process_was_started_to_ignore_it_ignores() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    with terminable(), Interrupt(lambda: None) as interrupt:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGTERM)
        assert not interrupt.asked
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN


def test_sigterm_is_ctrl_c_before_passes_too() -> None:
    with pytest.raises(KeyboardInterrupt), terminable():
        with Interrupt(lambda: None) as interrupt:
            signal.raise_signal(signal.SIGTERM)
            assert interrupt.asked
        signal.raise_signal(signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_in_another_thread_no_signal_is_taken() -> None:
    def enter() -> None:
        with terminable(), Interrupt(lambda: None):
            result.append(signal.getsignal(signal.SIGTERM))

    result: list[object] = []
    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert result == [signal.SIG_DFL]
