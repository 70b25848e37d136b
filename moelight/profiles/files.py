"""Strict YAML with file and line in every error, comments of written YAML, and the search path of profiles.

Unknown keys (the error names the closest known one), repeated keys, aliases and wrong types are errors.
"""

from __future__ import annotations

import math
import os
import re
import textwrap
from collections.abc import Iterable, Iterator
from datetime import date
from pathlib import Path
from typing import Any

import yaml

from moelight.core.errors import ConfigError, did_you_mean
from moelight.core.small_files import read_text
from moelight.core.units import MiB

PROFILES_VARIABLE = "MOELIGHT_PROFILES"
_PACKAGE = Path(__file__).resolve().parents[1]
_MAX_FILE_BYTES = 4 * MiB
_MAX_DEPTH = 20
_MOST_BITS = 1000  # of an integer, so that it fits a float
_TAGS = {f"tag:yaml.org,2002:{kind}" for kind in ("map", "seq", "str", "int", "float", "bool", "null", "timestamp")}
_FLOAT = re.compile(r"[-+]?(?:\d+(?:\.\d*)?|\.\d+)[eE][-+]?\d+")


class _Loader(yaml.SafeLoader):
    """Plain data only: no aliases. ``1e9`` is a number (YAML 1.1 alone reads a string)."""

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            mark = self.peek_event().start_mark  # type: ignore[no-untyped-call]
            raise yaml.composer.ComposerError(None, None, "aliases are not allowed", mark)
        return super().compose_node(parent, index)


_Loader.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+.0123456789"))


class YamlNode:
    """One value of a YAML file; ``key`` is its dotted path.

    A method that reads the value raises `ConfigError` with file, line and key if the value breaks the method's rule.
    """

    def __init__(self, path: Path, node: yaml.Node, loader: _Loader, key: str = "") -> None:
        self._path, self._node, self._loader, self.key = path, node, loader, key
        if key.count(".") > _MAX_DEPTH:
            raise self.error("is nested too deeply")
        if node.tag not in _TAGS:
            raise self.error(f"has the tag {node.tag!r}; only plain data is read")

    @property
    def where(self) -> str:
        """``file:line`` of the value."""
        return f"{self._path}:{self._node.start_mark.line + 1}"

    def error(self, complaint: str) -> ConfigError:
        """A `ConfigError` with file, line, key and ``complaint``."""
        return ConfigError(f"{self.where}: {self.key or 'the file'} {complaint}")

    def is_mapping(self) -> bool:
        return isinstance(self._node, yaml.MappingNode)

    def entries(self) -> dict[str, YamlNode]:
        """The values of a mapping with arbitrary, distinct keys."""
        if not isinstance(self._node, yaml.MappingNode):
            raise self.error(f"must be a mapping, not {self._shown()}")
        result: dict[str, YamlNode] = {}
        for key_node, value_node in self._node.value:
            name = key_node.value
            line = f"{self._path}:{key_node.start_mark.line + 1}"
            if not isinstance(key_node, yaml.ScalarNode) or not isinstance(name, str):
                raise ConfigError(f"{line}: a key must be text")
            if name in result:
                raise ConfigError(f"{line}: key {name!r} is given twice")
            result[name] = YamlNode(self._path, value_node, self._loader, f"{self.key}.{name}" if self.key else name)
        return result

    def fields(self, *optional: str, required: Iterable[str] = ()) -> dict[str, YamlNode]:
        """The values of a mapping that has all keys of ``required``, and no others than these and ``optional``."""
        entries = self.entries()
        names = (*required, *optional)
        for name, node in entries.items():
            if name not in names:
                inside = f" in {self.key}" if self.key else ""
                known_keys = f"{did_you_mean(name, names)}; known: {', '.join(names)}"
                raise ConfigError(f"{node.where}: unknown key {name!r}{inside}{known_keys}")
        for name in required:
            if name not in entries:
                raise self.error(f"lacks the key {name!r}")
        return entries

    def scalar(self) -> str | int | float | bool | None:
        """A single value, as parsed by YAML; neither a date nor a number that a float cannot hold."""
        value: Any = self
        if isinstance(self._node, yaml.ScalarNode):
            try:
                value = self._loader.construct_object(self._node)
            except (yaml.YAMLError, ValueError):
                raise self.error(f"cannot be read: {self._shown()}") from None
        if not isinstance(value, (str, int, float, bool, type(None))):
            raise self.error(f"must be a single value, not {self._shown()}")
        if isinstance(value, float) and not math.isfinite(value):
            raise self.error(f"must be finite, not {value}")
        if isinstance(value, int) and value.bit_length() > _MOST_BITS:
            raise self.error(f"is too large a number: {self._shown()}")
        return value

    def text(self) -> str:
        """Non-empty text."""
        value = self.scalar()
        if not isinstance(value, str) or not value.strip():
            raise self.error(f"must be text, not {self._shown()}")
        return value

    def truth(self) -> bool:
        value = self.scalar()
        if not isinstance(value, bool):
            raise self.error(f"must be true or false, not {self._shown()}")
        return value

    def integer(self, *, least: int = 1, maximum: int | None = None) -> int:
        value = self.scalar()
        within = isinstance(value, int) and least <= value and (maximum is None or value <= maximum)
        if isinstance(value, bool) or not isinstance(value, int) or not within:
            wanted = f"of at least {least}" if maximum is None else f"from {least} to {maximum:,}"
            raise self.error(f"must be a whole number {wanted}, not {self._shown()}")
        return value

    def number(self, *, maximum: float, wanted: str) -> float:
        """A number from 0 to ``maximum``; an error describes the range as ``wanted``."""
        value = self.scalar()
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= maximum:
            raise self.error(f"must be a number {wanted}, not {value!r}")
        return float(value)

    def day(self) -> str:
        """A date in the format ``2026-11-03``, quoted or not."""
        shown = self._node.value if isinstance(self._node, yaml.ScalarNode) else ""
        try:
            return date.fromisoformat(shown).isoformat()
        except ValueError:
            raise self.error(f"must be a day like 2026-11-03, not {self._shown()}") from None

    def plain(self) -> Any:
        """The value as dicts, lists and scalars."""
        if isinstance(self._node, yaml.MappingNode):
            return {name: node.plain() for name, node in self.entries().items()}
        if isinstance(self._node, yaml.SequenceNode):
            items = enumerate(self._node.value)
            return [YamlNode(self._path, item, self._loader, f"{self.key}.{i}").plain() for i, item in items]
        return self.scalar()

    def _shown(self) -> str:
        if isinstance(self._node, yaml.ScalarNode):
            return repr(self._node.value[:60])
        return "a mapping" if self.is_mapping() else "a list"


def read_yaml(path: Path) -> YamlNode:
    """The single, non-empty document of ``path``."""
    try:
        loader = _Loader(read_text(path, max_bytes=_MAX_FILE_BYTES))
        node = loader.get_single_node()
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror or error})") from None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        raise ConfigError(f"{path}:{mark.line + 1 if mark else 1}: {error.problem or error.context}") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: not YAML ({str(error).splitlines()[0]})") from None
    if node is None:
        raise ConfigError(f"{path}:1: the file is empty")
    return YamlNode(path, node, loader)


def yaml_comments(paragraphs: Iterable[str], width: int) -> Iterator[str]:
    """The lines of ``paragraphs`` as comments, wrapped at ``width``."""
    for paragraph in paragraphs:
        plain = "".join(c if c.isprintable() else " " for c in paragraph)
        yield from (f"# {line}" for line in textwrap.wrap(plain, width, break_long_words=False, break_on_hyphens=False))


def profile_directories(kind: str) -> list[Path]:
    """The directories searched for profiles of ``kind`` (``hardware``, ``model`` or ``workload``), in order."""
    override = os.environ.get(PROFILES_VARIABLE)
    if override and not Path(override).is_dir():
        raise ConfigError(f"{PROFILES_VARIABLE}={override}: no such directory")
    checkouts = [*([Path(override)] if override else []), _PACKAGE.parent]
    return [*(checkout / f"{kind}_profiles" for checkout in checkouts), _PACKAGE / "profiles" / "data" / kind]


def profile_names(kind: str) -> dict[str, Path]:
    """All profiles of ``kind`` by name; an earlier directory takes precedence."""
    paths: dict[str, Path] = {}
    for directory in reversed(profile_directories(kind)):
        paths.update({path.stem: path for path in sorted(directory.glob("*.yaml"))})
    return dict(sorted(paths.items()))


def find_profile(kind: str, name: str) -> Path:
    """The file of the ``kind`` profile called ``name``; the error for an unknown name lists the known ones."""
    paths = profile_names(kind)
    if name not in paths:
        listed = ", ".join(paths) or "none"
        raise ConfigError(f"unknown {kind} profile {name!r}{did_you_mean(name, paths)}; known: {listed}")
    return paths[name]
