"""Read policy files as UTF-8, skipping a byte order mark; invalid bytes are an error with their position."""

from __future__ import annotations

import os

from moelight.core.errors import ConfigError, did_you_mean
from moelight.core.small_files import open_regular, read_error_text
from moelight.experts.policy import ExpertPolicy
from moelight.lang.check import read
from moelight.lang.diagnostics import CheckedText, LanguageError, checked
from moelight.lang.parse import MOST_CHARACTERS

_MOST_BYTES = 4 * MOST_CHARACTERS + 8  # of the longest allowed text, and a few more to detect a longer one


def read_file(path: str | os.PathLike[str]) -> CheckedText:
    """Return the policies of the file with its errors and warnings; raises ConfigError for an unreadable file."""
    try:
        with open(open_regular(path), "rb") as file:
            data = file.read(_MOST_BYTES)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{os.fspath(path)}: cannot be read: {read_error_text(error)}") from None
    try:
        return read(data.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        before = error.object[: error.start].decode("utf-8", "replace").removeprefix("\ufeff")
        text = before + data[error.start :].decode("utf-8", "replace")
        message = f"byte 0x{error.object[error.start]:02x} is not UTF-8; save the file as UTF-8"
        return checked(text, [LanguageError("encoding", message, (len(before), len(before) + 1))])


def load_expert_policies(path: str | os.PathLike[str]) -> tuple[ExpertPolicy, ...]:
    """Return the policies of a ``.moe`` file; raises ConfigError with all its errors, each with line and column."""
    reading = read_file(path)
    if reading.errors:
        message = "; ".join(f"{e.line}:{e.column}: {e.message} [{e.code}]" for e in reading.errors)
        raise ConfigError(f"{os.fspath(path)}:{message}")
    return reading.policies


def load_expert_policy(path: str | os.PathLike[str], name: str | None = None) -> ExpertPolicy:
    """Return the policy called ``name`` of a file, or its only one."""
    policies = load_expert_policies(path)
    names = [policy.name for policy in policies]
    if name is None:
        if len(policies) > 1:
            raise ConfigError(f"{os.fspath(path)} has {len(policies)} policies ({', '.join(names)}); name one")
        return policies[0]
    if name not in names:
        raise ConfigError(f"{os.fspath(path)} has no policy {name!r}{did_you_mean(name, names)}")
    return policies[names.index(name)]
