"""Every error a user can meet, drawn once.

::

    MoelightError
    ├── UserError                the user can mend it: one clear line, exit code 2
    │   ├── ConfigError          a profile, policy or option says something impossible or unknown
    │   ├── CheckpointError      the model on disk is missing, damaged or not what its config says
    │   ├── BudgetError          the memory allowed is smaller than the least that would do
    │   └── InputError           a prompt, message list or sampling field cannot be served
    │       └── StorageError     a disk that is written to is full or fails; exit code 74
    └── ScheduleError            an order of work breaks an invariant: our fault, never the user's
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class MoelightError(Exception):
    """The root: catch this to catch everything moelight raises on purpose."""


class UserError(MoelightError):
    """Something the user can put right. Its text is one clear line: what, where, what to do."""


class ConfigError(UserError):
    """A profile, policy, config.json or option holds an unknown name or an impossible value."""


class CheckpointError(UserError):
    """The weights on disk are missing, damaged, or disagree with their config. Names file and tensor."""


class BudgetError(UserError):
    """The allowed memory is too small. ``needed_bytes`` would be enough on ``tier``."""

    def __init__(self, message: str, *, tier: str, needed_bytes: int) -> None:
        super().__init__(message)
        self.tier = tier
        self.needed_bytes = needed_bytes


class InputError(UserError):
    """A request cannot be served. ``code`` is a short machine-readable reason."""

    def __init__(self, message: str, *, code: str = "invalid_request") -> None:
        super().__init__(message)
        self.code = code


class StorageError(InputError):
    """A disk that is written to is full or fails. What was done is kept, and once it is mended the command goes on."""


class ScheduleError(MoelightError):
    """A schedule broke an invariant (cycle, overwritten slot, missing crossing, wrong bytes)."""


_LONGEST_SHOWN = 60  # characters
_LONGEST_BITS = 1000
_SHORT_WORD = 3  # one letter of it says more


def quoted(value: object) -> str:
    """``value`` as an error quotes it: its beginning, where it is long."""
    if isinstance(value, int) and value.bit_length() > _LONGEST_BITS:  # Python would not write it in decimal
        return f"an integer of {value.bit_length()} bits"
    text = repr(value)
    return text if len(text) <= _LONGEST_SHOWN else f"{text[:_LONGEST_SHOWN]}…"


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """``" (did you mean 'x'?)"`` for the known word nearest to ``word``, or an empty string."""
    near = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6 if len(word) > _SHORT_WORD else 0.5)
    return f" (did you mean {near[0]!r}?)" if near else ""
