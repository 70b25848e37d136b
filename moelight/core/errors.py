"""Every error that moelight raises on purpose.

::

    MoelightError
    ├── UserError                the user can correct it: one clear line, exit code 2
    │   ├── ConfigError          a profile, policy or option holds an impossible or unknown value
    │   ├── CheckpointError      the model on disk is missing, damaged or contradicts its config
    │   ├── BudgetError          the allowed memory is smaller than the least that suffices
    │   ├── RankError            a process that computes a part of the model has ended
    │   └── InputError           a prompt, message list or sampling field cannot be served
    │       └── StorageError     a disk that is written to is full or fails; exit code 74
    └── ScheduleError            a schedule breaks an invariant: a bug in moelight, never a user error
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence


class MoelightError(Exception):
    """Base class of every error that moelight raises on purpose."""


class UserError(MoelightError):
    """An error that the user can correct. The text is one clear line: what, where, what to do."""


class ConfigError(UserError):
    """A profile, policy, config.json or option holds an unknown name or an impossible value."""


class CheckpointError(UserError):
    """The weights on disk are missing, damaged, or disagree with their config. The text names file and tensor;
    ``faults``: all faults that were noticed, one line each, if the text is of more than one."""

    def __init__(self, message: str, *, faults: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.faults = tuple(faults)


class BudgetError(UserError):
    """The allowed memory on ``tier`` is too small; ``needed_bytes`` suffice."""

    def __init__(self, message: str, *, tier: str, needed_bytes: int) -> None:
        super().__init__(message)
        self.tier = tier
        self.needed_bytes = needed_bytes


class RankError(UserError):
    """A rank, a process that computes a part of the model, has ended. Finished work is kept, so the command can be run
    again."""


class InputError(UserError):
    """A request cannot be served. ``code`` is a short machine-readable reason, ``field`` the one that is wrong."""

    def __init__(self, message: str, *, code: str = "invalid_request", field: str | None = None) -> None:
        super().__init__(message)
        self.code, self.field = code, field


class StorageError(InputError):
    """A disk that is written to is full or fails. Finished work is kept, so the command can be run again."""


class ScheduleError(MoelightError):
    """A schedule breaks an invariant (cycle, overwritten slot, missing transfer, wrong bytes)."""


_LONGEST_SHOWN = 60  # characters
_LONGEST_BITS = 1000
_SHORT_WORD = 3  # a single differing letter weighs more in these


def quoted(value: object) -> str:
    """``repr(value)`` for an error message, cut to a bounded length."""
    if isinstance(value, int) and value.bit_length() > _LONGEST_BITS:  # beyond what Python converts to decimal
        return f"an integer of {value.bit_length()} bits"
    text = repr(value)
    return text if len(text) <= _LONGEST_SHOWN else f"{text[:_LONGEST_SHOWN]}…"


def refuse_unknown(values: Iterable[str], names: Sequence[str]) -> None:
    """Raise ConfigError for the first of the keywords ``values`` that is none of ``names``."""
    for name in values:
        if name not in names:
            raise ConfigError(f"{name!r} is no option here{did_you_mean(name, names)}")


def did_you_mean(word: str, known_names: Iterable[str]) -> str:
    """``" (did you mean 'x'?)"`` for the known word closest to ``word``, or an empty string."""
    near = difflib.get_close_matches(word, list(known_names), n=1, cutoff=0.6 if len(word) > _SHORT_WORD else 0.5)
    return f" (did you mean {near[0]!r}?)" if near else ""
