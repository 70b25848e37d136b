"""Which GGUF file of a directory or a repository is meant: by the tag of its quantisation, or by its name. Nothing but
names of files is looked at."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from moelight.core.errors import CheckpointError, did_you_mean

GGUF = ".gguf"
_PART = re.compile(r"-\d{5}-of-\d{5}$")
# Types of ggml and file types of llama.cpp, with the prefix of Unsloth's dynamic ones.
_TAG = re.compile(
    r"(?:^|[-._])((?:UD-)?(?:I?Q\d\w*|TQ\d\w*|MXFP4\w*|NVFP4\w*|BF16|FP?16|FP?32))(?=[-.]|$)", re.IGNORECASE
)
_LAST_WORD = re.compile(r"[-.](\w+)$")
_DRAFTS = ("mtp-", "eagle3-", "dflash-", "dspark-")  # models that guess tokens of another one
_ENCODER = "mmproj"
_MAX_LISTED = 40


@dataclass(frozen=True, kw_only=True, slots=True)
class GGUFChoice:
    """One model among files.

    Attributes:
        stem: name without the number of the part and the suffix, relative to the directory.
        files: its file, or the parts that are present, in order.
    """

    stem: str
    files: tuple[str, ...]

    @property
    def tag(self) -> str:
        """The quantisation that the name states in upper case, else the last word of the name; empty without one."""
        name = PurePosixPath(self.stem).name
        words = _TAG.findall(name) or _LAST_WORD.findall(name)
        return str(words[-1]).upper() if words else ""

    def is_called(self, name: str) -> bool:
        """Whether ``name`` is that of a file of this model, with or without its directory, suffix and part."""
        names = {self.stem, *self.files, *(file.removesuffix(GGUF) for file in self.files)}
        return name in names or name in {PurePosixPath(item).name for item in names}

    def states(self, tag: str) -> bool:
        """Whether ``tag`` is a word of the name, in any case (llama.cpp: ``find_best_model``)."""
        return re.search(rf"(?:^|[-./]){re.escape(tag)}(?:[-./]|$)", self.stem, re.IGNORECASE) is not None


def gguf_choices(names: Iterable[str]) -> list[GGUFChoice]:
    """The models among the file ``names``; encoders of images, importance matrices and draft models are none."""
    files: dict[str, list[str]] = {}
    for name in sorted(names):
        stem = _PART.sub("", name.removesuffix(GGUF))
        if name.endswith(GGUF) and not _is_other(stem):
            files.setdefault(stem, []).append(name)
    return [GGUFChoice(stem=stem, files=tuple(parts)) for stem, parts in files.items()]


def choose_gguf(names: Iterable[str], tag: str, *, where: str) -> GGUFChoice:
    """The model among the file ``names`` with ``tag``, a quantisation or the name of a file; without one, the only
    model. ``where`` is what the caller calls the directory or repository.

    Raises:
        CheckpointError: no model has the tag, or several have it.
    """
    choices = gguf_choices(names)
    if not choices:
        raise CheckpointError(f"{where}: no GGUF file of a model there")
    if not tag:
        if len(choices) > 1:
            raise CheckpointError(f"{where}: holds {len(choices)} GGUF models; {_cure(where, choices)}")
        return choices[0]
    for matches in (
        [choice for choice in choices if choice.is_called(tag)],
        [choice for choice in choices if choice.tag == tag.upper()],
        [choice for choice in choices if choice.states(tag)],
    ):
        if len(matches) == 1:
            return matches[0]
        if matches:
            raise CheckpointError(f"{where}: {len(matches)} GGUF models are called {tag!r}; {_cure(where, matches)}")
    hint = did_you_mean(tag.upper(), [choice.tag for choice in choices])
    raise CheckpointError(f"{where}: no GGUF model there is called {tag!r}{hint}; {_cure(where, choices)}")


def gguf_in(directory: Path, tag: str) -> Path | None:
    """The GGUF file in ``directory`` with ``tag``, as `choose_gguf`; without a tag, None if there is none.

    Raises:
        CheckpointError: as `choose_gguf`, or the directory cannot be listed.
    """
    try:
        names = [
            path.relative_to(directory).as_posix()
            for pattern in (f"*{GGUF}", f"[!.]*/*{GGUF}")
            for path in directory.glob(pattern)
            if not path.name.startswith(".")
        ]
    except OSError as error:
        raise CheckpointError(f"{directory}: cannot be listed ({error.strerror or error})") from None
    if not tag and not gguf_choices(names):
        return None
    return directory / choose_gguf(names, tag, where=str(directory)).files[0]


def split_tag(model: str) -> tuple[str, str]:
    """``model`` and its tag: what follows the last colon."""
    name, colon, tag = model.rpartition(":")
    return (name, tag) if colon and name and tag else (model, "")


def unread_encoder(path: Path) -> str:
    """One line about an encoder of images beside the GGUF file ``path``; empty without one."""
    if path.suffix != GGUF:
        return ""
    name = next((entry.name for entry in sorted(path.parent.glob(f"*{GGUF}")) if _ENCODER in entry.name.lower()), "")
    return f"{name} beside it is not read: it encodes images, and prompts are text" if name else ""


def _is_other(stem: str) -> bool:
    name = PurePosixPath(stem).name.lower()
    return _ENCODER in name or name.startswith(_DRAFTS) or ("imatrix" in name and not _TAG.search(name))


def _cure(where: str, choices: list[GGUFChoice]) -> str:
    """How to name one of ``choices``: by tags where these differ."""
    tags = [choice.tag for choice in choices]
    if "" in tags or len(set(tags)) < len(tags):
        tags = [choice.files[0] for choice in choices]
    more = f" and {len(tags) - _MAX_LISTED} more" if len(tags) > _MAX_LISTED else ""
    return f"give one after a colon, such as {where}:{tags[0]}; there are {', '.join(tags[:_MAX_LISTED])}{more}"
