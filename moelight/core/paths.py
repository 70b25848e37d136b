"""The cache directory for files that moelight can regenerate, and atomic writes."""

from __future__ import annotations

import contextlib
import os
import secrets
from pathlib import Path

CACHE_VARIABLE = "MOELIGHT_CACHE"


def cache_directory(*parts: str) -> Path:
    """``$MOELIGHT_CACHE``, else ``$XDG_CACHE_HOME/moelight``, else ``~/.cache/moelight``; with ``parts`` below it."""
    override, desktop = os.environ.get(CACHE_VARIABLE), os.environ.get("XDG_CACHE_HOME")
    base = (
        Path(override) if override else Path(desktop) / "moelight" if desktop else Path.home() / ".cache" / "moelight"
    )
    return base.joinpath(*parts)


def write_whole(path: Path, content: str | bytes) -> None:
    """Write ``content`` to ``path`` atomically; create missing parent directories. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name[:50]}.{secrets.token_hex(8)}")
    try:
        with part.open("xb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
        part.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            part.unlink()
        raise
