"""The pooling of a checkpoint as sentence-transformers stores it: ``modules.json``, a list of modules in order, and
``config.json`` in the directory of the pooling module; of a GGUF file its ``pooling_type``. The files are untrusted."""

from __future__ import annotations

import re
from functools import lru_cache
from pathlib import Path
from typing import Any

from moelight.core.errors import CheckpointError, ConfigError, InputError
from moelight.core.request import CLS, DEFAULT_POOLING, LAST, MEAN, PoolingParams
from moelight.core.small_files import read_error_text, read_json, read_object
from moelight.profiles.gguf import read_gguf
from moelight.profiles.gguf_choice import GGUF

MODULES = "modules.json"
POOLING_CONFIGS = "*_Pooling/config.json"
_DIRECTORY = re.compile(r"[\w-]{1,64}", re.ASCII)
_TYPES = {"lasttoken": LAST, "mean": MEAN, "cls": CLS}
_NUMBERS = {0: None, 1: MEAN, 2: CLS, 3: LAST}  # llama.cpp's enum llama_pooling_type
# Keys of older files, of which those that apply are true.
_MODES = {
    "pooling_mode_lasttoken": "lasttoken",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
}


@lru_cache(maxsize=64)
def resolve_pooling(directory: Path, asked: PoolingParams) -> PoolingParams:
    """``asked`` over what the checkpoint in ``directory``, or the GGUF file, says, or `DEFAULT_POOLING` if it says
    nothing.

    Raises:
        CheckpointError: a file of sentence-transformers cannot be read.
        ConfigError: the checkpoint has a pooling, or a module after it, that is not implemented, and ``asked`` names no
            pooling type.
    """
    if directory.suffix == GGUF:
        named = PoolingParams() if asked.pooling_type is not None else _pooling_of_file(directory)
        return asked.over(named.over(DEFAULT_POOLING))
    path = directory / MODULES
    if not path.is_file():
        return asked.over(DEFAULT_POOLING)
    try:
        modules = read_json(path)
        if not isinstance(modules, list) or not all(isinstance(module, dict) for module in modules):
            raise ValueError("must hold a list of objects")
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: cannot be read ({read_error_text(error)})") from None
    kinds = [str(module.get("type", "")).rpartition(".")[2] for module in modules]
    named = PoolingParams(normalize="Normalize" in kinds)
    if asked.pooling_type is None:
        for kind in kinds:
            if kind not in ("Transformer", "Pooling", "Normalize"):
                raise ConfigError(
                    f"{path}: the module {kind[:40]!r} is not implemented; --pooling takes the hidden states without it"
                )
        if "Pooling" in kinds:
            pooling_type = _pooling_type(directory, modules[kinds.index("Pooling")])
            named = PoolingParams(pooling_type=pooling_type, normalize=named.normalize)
    return asked.over(named.over(DEFAULT_POOLING))


def check_dimensions(pooling: PoolingParams, hidden_size: int) -> None:
    """Raise InputError if an embedding is to have more numbers than a hidden state."""
    if pooling.dimensions is not None and pooling.dimensions > hidden_size:
        raise InputError(
            f"dimensions must be at most {hidden_size}, the model's hidden size, not {pooling.dimensions}",
            field="dimensions",
        )


def _pooling_of_file(path: Path) -> PoolingParams:
    metadata = read_gguf(path).metadata
    number = metadata.get(f"{metadata.get('general.architecture')}.pooling_type", 0)
    if not isinstance(number, int) or number not in _NUMBERS:
        raise ConfigError(f"{path}: its pooling_type {str(number)[:80]} is not implemented; name one with --pooling")
    return PoolingParams(pooling_type=_NUMBERS[number])


def _pooling_type(directory: Path, module: dict[str, Any]) -> str:
    """The pooling type of the module ``module``."""
    name = module.get("path", "")
    if not isinstance(name, str) or not _DIRECTORY.fullmatch(name):
        raise CheckpointError(f"{directory / MODULES}: the path of the pooling module is no directory beside it")
    path = directory / name / "config.json"
    try:
        config = read_object(path)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: cannot be read ({read_error_text(error)})") from None
    stated = config.get("pooling_mode")
    if stated is None:
        stated = [mode for key, mode in _MODES.items() if config.get(key) is True]
    modes = [stated] if isinstance(stated, str) else stated
    if not isinstance(modes, list) or len(modes) != 1 or modes[0] not in _TYPES:
        raise ConfigError(f"{path}: its pooling ({str(stated)[:80]}) is not implemented; name one with --pooling")
    return _TYPES[modes[0]]
