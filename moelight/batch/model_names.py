"""The names by which rows of a job may refer to its model."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from moelight.core.errors import InputError

# A folder of the hub's cache: hub/models--ORGANISATION--NAME/snapshots/REVISION
_CACHED = re.compile(r"models--(?P<organisation>.+?)--(?P<name>.+)")


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelNames:
    """``names`` of the loaded model; with ``ignore``, any other name is accepted too."""

    names: frozenset[str] = frozenset()
    ignore: bool = False

    @classmethod
    def of(cls, *models: str | Path, ignore: bool = False) -> ModelNames:
        """All names of the model ``models`` as a path, a hub id or both: each verbatim, absolute, its last component,
        and the hub id of a cached copy; a tag (``owner/name:Q4_K_M``) may be left out."""
        names: set[str] = set()
        texts = [str(model).rstrip("/") for model in models]
        for text in (*texts, *(text.rpartition(":")[0] for text in texts)):  # with and without the tag of a GGUF file
            path = Path(text)
            names |= {text, f"{text}/", path.name}
            if path.is_dir():
                resolved = path.resolve()
                names |= {str(path.absolute()), str(resolved), resolved.name}
                names |= _hub_ids(resolved)
        return cls(names=frozenset(names - {"", "/"}), ignore=ignore)

    def check(self, name: str) -> None:
        """Raise InputError (``model_not_found``) if ``name`` is another model."""
        if not self.ignore and name not in self.names:
            shortest = min(self.names, key=lambda model_name: (len(model_name), model_name), default="none")
            raise InputError(
                f"model {name!r} is not the loaded one ({shortest}); correct it, leave it out, or use --ignore-model",
                code="model_not_found",
            )


def _hub_ids(path: Path) -> set[str]:
    matches = [_CACHED.fullmatch(part) for part in path.parts]
    return {
        name for match in matches if match for name in (f"{match['organisation']}/{match['name']}", str(match["name"]))
    }
