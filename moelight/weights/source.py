"""Finds a checkpoint in a directory or on the Hugging Face hub and lists its tensors, in one safetensors file or in
shards with an index. Pickles are never opened; `tensor_map` interprets the tensors."""

from __future__ import annotations

import glob
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path, PurePosixPath
from types import MappingProxyType

from moelight.core.errors import CheckpointError
from moelight.core.small_files import read_error_text, read_json
from moelight.profiles.gguf import part_names
from moelight.profiles.gguf_choice import GGUF, choose_gguf, gguf_choices, gguf_in, split_tag
from moelight.weights.safetensors import read_header
from moelight.weights.tensor_info import TensorInfo

__all__ = ["DEMO", "GGUF", "Checkpoint", "IgnoredTensor", "TensorInfo", "local_model", "resolve_model"]

DEMO = "demo"
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
_DEMO_DIRECTORY = Path(__file__).resolve().parents[1] / "demo"
_HUB_ID = re.compile(r"(?P<name>[A-Za-z0-9][\w.-]*/[\w.-]+)(?:@(?P<revision>[\w./-]+))?(?::(?P<tag>[^\s:]+))?")
_MAX_INDEX_BYTES = 100_000_000
_NO_FILE = ["/"]  # whatever is in the cache will do
_HUB_FILES = [
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "tokenizer.model",
    "spiece.model",
    "tiktoken.model",
    "chat_template.jinja",
    "additional_chat_templates/*.jinja",
    INDEX,
    "model*.safetensors",
]


def resolve_model(model: str) -> Path:
    """The directory of ``model``, or its GGUF file: the word ``demo``, a local directory or file, or the id of a model
    on the hub (``owner/name`` or ``owner/name@revision``), of which only the required files are downloaded, into the
    hub's own cache. Of several GGUF files in a directory or repository, ``:TAG`` behind it names one: its quantisation
    (``owner/name:Q4_K_M``) or its file.

    Raises:
        CheckpointError: no such model exists, several could be meant, or the hub cannot be reached.
    """
    path = local_model(model)
    if path is not None:
        return path
    identity = _HUB_ID.fullmatch(model)
    assert identity is not None
    return _fetched(identity["name"], identity["revision"], identity["tag"] or "")


def local_model(model: str) -> Path | None:
    """The directory or GGUF file of ``model``, as `resolve_model`; None if it is the id of a model on the hub.

    Raises:
        CheckpointError: it is neither, or several GGUF files could be meant.
    """
    if model == DEMO:
        return _DEMO_DIRECTORY
    if not model.strip():
        raise CheckpointError("no model is named; give a directory or an id on the Hugging Face hub (owner/name)")
    path = Path(model).expanduser()
    try:
        if path.is_dir():
            return path if _holds_checkpoint(path) else gguf_in(path, "") or path
        if path.suffix == GGUF and path.exists():
            return path
        if path.exists():
            raise CheckpointError(f"{model}: a model is a directory with config.json and safetensors, or a .gguf file")
        name, tag = split_tag(model)
        if tag and (directory := Path(name).expanduser()).is_dir():
            return gguf_in(directory, tag)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{model!r}: not a usable path ({error})") from None
    if _HUB_ID.fullmatch(model) is None:
        raise CheckpointError(
            f"no model at {model!r}: no such directory, and an id on the Hugging Face hub has the form owner/name, or "
            "owner/name:Q4_K_M"
        )
    return None


def _holds_checkpoint(directory: Path) -> bool:
    return any((directory / name).exists() or (directory / name).is_symlink() for name in (SINGLE, INDEX))


def _fetched(name: str, revision: str | None, tag: str) -> Path:
    """The directory of a repository's checkpoint, or its GGUF file with ``tag``, with all of its parts."""
    names = _files_of(name, revision)
    checkpoint = any(PurePosixPath(file).suffix == ".safetensors" for file in names)
    if not names or (not tag and (checkpoint or not gguf_choices(names))):
        return _download(name, revision, _HUB_FILES)
    shown = name if revision is None else f"{name}@{revision}"
    choice = choose_gguf(names, tag, where=shown)
    parts = [str(part) for part in part_names(Path(choice.files[0]))]
    directory = _download(name, revision, [glob.escape(part) for part in parts])
    if lost := [part for part in parts if not (directory / part).exists()]:
        raise CheckpointError(
            f"{shown}: {lost[0]} is missing there, one of {len(parts)} parts of the model; use another quantisation"
        )
    return directory / parts[0]


def _files_of(name: str, revision: str | None) -> list[str]:
    """The names of all files of a repository; of those in the cache where the hub does not list them."""
    from huggingface_hub import HfApi, constants, snapshot_download

    failures = _failures()
    if not constants.HF_HUB_OFFLINE:
        try:
            return [file.rfilename for file in HfApi().model_info(name, revision=revision).siblings or ()]
        except failures:
            pass
    try:
        directory = Path(snapshot_download(name, revision=revision, local_files_only=True, allow_patterns=_NO_FILE))
    except failures:
        return []  # and the download says why
    return [path.relative_to(directory).as_posix() for path in directory.rglob("*")]


def _failures() -> tuple[type[BaseException], ...]:
    """Errors of a download. The first base of the hub's HTTP error is the root error of the HTTP library in use
    (requests or httpx)."""
    from huggingface_hub.errors import HfHubHTTPError

    return (OSError, ValueError, RuntimeError, HfHubHTTPError.__bases__[0])


def _download(name: str, revision: str | None, patterns: list[str]) -> Path:
    from huggingface_hub import snapshot_download

    failures = _failures()
    with _bars_on_terminals_only():
        try:
            return Path(snapshot_download(name, revision=revision, allow_patterns=patterns))
        except failures as error:
            shown = name if revision is None else f"{name}@{revision}"
            raise CheckpointError(f"no model at {shown!r}: no such directory, and {_hub_said(name, error)}") from None


@contextmanager
def _bars_on_terminals_only() -> Iterator[None]:
    from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    if sys.stderr.isatty() or are_progress_bars_disabled():
        yield
        return
    disable_progress_bars()
    try:
        yield
    finally:
        enable_progress_bars()


def _hub_said(name: str, error: BaseException) -> str:
    """The reason of a failed download and its remedy, as the end of a sentence."""
    from huggingface_hub import constants
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, RepositoryNotFoundError, RevisionNotFoundError

    page = f"{constants.ENDPOINT}/{name}"
    status = error.response.status_code if isinstance(error, HfHubHTTPError) else None
    if isinstance(error, GatedRepoError) or status == HTTPStatus.FORBIDDEN:
        return f"the Hugging Face hub asks for permission: accept its terms at {page}, then `hf auth login` or HF_TOKEN"
    if isinstance(error, RepositoryNotFoundError) or status == HTTPStatus.UNAUTHORIZED:
        return (
            "the Hugging Face hub has none of that name for you; check the spelling, and for a private model "
            "`hf auth login` or set HF_TOKEN"
        )
    if isinstance(error, RevisionNotFoundError):
        return f"the Hugging Face hub has no such revision of it; see {page}"
    if constants.HF_HUB_OFFLINE:
        return (
            "not all of it is in the hub's cache, and HF_HUB_OFFLINE forbids to fetch it; unset that, or fetch it first"
        )
    reason = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
    return f"the Hugging Face hub did not provide it ({reason}); run again, complete files are kept"


@dataclass(frozen=True, kw_only=True, slots=True)
class IgnoredTensor:
    """A tensor that is not read; ``reason`` says in a few words what it is."""

    info: TensorInfo
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Checkpoint:
    """The tensors of one checkpoint by name. ``listing`` is the file that lists them: the index, or the only file.
    ``ignored``: further tensors of it, which are not among ``tensors``."""

    directory: Path
    listing: Path
    tensors: Mapping[str, TensorInfo]
    ignored: tuple[IgnoredTensor, ...] = ()

    @classmethod
    def open(cls, directory: Path) -> Checkpoint:
        """Read the headers of the checkpoint in ``directory``; raises CheckpointError for a damaged one."""
        single, index = directory / SINGLE, directory / INDEX
        if single.exists() or single.is_symlink():
            tensors, listing = read_header(single), single
        elif index.exists() or index.is_symlink():
            tensors, listing = _read_shards(directory, index), index
        else:
            raise CheckpointError(_nothing_there(directory))
        if not tensors:
            raise CheckpointError(f"{listing}: holds no tensors; fetch the checkpoint again")
        return cls(directory=directory, listing=listing, tensors=MappingProxyType(tensors))


def _nothing_there(directory: Path) -> str:
    if not directory.is_dir():
        return f"{directory}: no such directory"
    loose = sorted(path.name for path in directory.glob("*.safetensors"))
    pickles = sorted(path.name for pattern in ("*.bin", "*.pt", "*.pth") for path in directory.glob(pattern))
    if loose:
        return f"{directory}: {loose[0]} is there, but neither {SINGLE} nor {INDEX}; fetch the index too"
    if pickles:
        return (
            f"{directory}: only {pickles[0]} is there, a pickle, which is never opened (it can run code); "
            f"save the model as safetensors (save_pretrained does) or fetch a safetensors version"
        )
    return f"{directory}: no weights there: neither {SINGLE} nor {INDEX}"


def _read_shards(directory: Path, index: Path) -> dict[str, TensorInfo]:
    weight_map = _read_index(index)
    tensors: dict[str, TensorInfo] = {}
    for shard in dict.fromkeys(weight_map.values()):
        for name, info in read_header(directory / shard).items():
            if name in tensors:
                raise CheckpointError(
                    f"{info.file}: tensor {name!r} is in {tensors[name].file.name} too; fetch the checkpoint again"
                )
            if name not in weight_map:
                raise CheckpointError(
                    f"{info.file}: tensor {name!r} is not listed in {index.name}; "
                    "shards and index do not belong together, fetch both again"
                )
            tensors[name] = info
    for name, shard in weight_map.items():
        if name not in tensors:
            raise CheckpointError(
                f"{directory / shard}: tensor {name!r} is missing, though {index.name} lists it there; "
                "fetch that file again"
            )
        if tensors[name].file != directory / shard:
            raise CheckpointError(
                f"{tensors[name].file}: tensor {name!r} is here, but {index.name} lists it in {shard!r}; "
                "shards and index do not belong together, fetch both again"
            )
    return tensors


def _read_index(index: Path) -> dict[str, str]:
    try:
        values = read_json(index, max_bytes=_MAX_INDEX_BYTES)
    except ValueError as error:
        raise CheckpointError(f"{index}: cannot be read as JSON ({error}); fetch it again") from None
    except OSError as error:
        raise CheckpointError(f"{index}: cannot be read ({read_error_text(error)})") from None
    weight_map = values.get("weight_map") if isinstance(values, dict) else None
    if not isinstance(weight_map, dict) or not all(isinstance(shard, str) for shard in weight_map.values()):
        raise CheckpointError(f"{index}: weight_map must map tensor names to file names; fetch the index again")
    if not weight_map:
        raise CheckpointError(f"{index}: weight_map is empty, so there are no weights; fetch the index again")
    for name, shard in weight_map.items():
        if not _is_inside(shard):
            raise CheckpointError(
                f"{index}: tensor {name!r} is said to be in {shard!r}, which is not a safetensors file inside "
                f"{index.parent}; refused"
            )
    return weight_map


def _is_inside(shard: str) -> bool:
    """True if ``shard`` is a relative path, without ``..``, to a ``.safetensors`` file. Links are allowed: the hub
    cache uses them."""
    path = PurePosixPath(shard)
    plain = shard.isprintable() and "\\" not in shard and path.suffix == ".safetensors"
    return plain and not path.is_absolute() and ".." not in path.parts
