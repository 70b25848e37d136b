"""Special tokens of a checkpoint's directory in every spelling that transformers reads, and the tokens that end an
answer. Depends on no tokenizer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from moelight.core.errors import CheckpointError
from moelight.core.small_files import read_error_text, read_object

CONFIG, SPECIAL_MAP, ADDED = "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"
_ROLES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")
_EXTRA, _ADDITIONAL, _DECODER = "extra_special_tokens", "additional_special_tokens", "added_tokens_decoder"


@dataclass(frozen=True, kw_only=True, slots=True)
class AddedTokenSpec:
    """A token beside the vocabulary: its text, and the flags of tokenizers' AddedToken that a file states."""

    content: str
    flags: Mapping[str, bool] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class SpecialTokens:
    """Tokens that a checkpoint's configuration adds to its tokenizer.json.

    Attributes:
        listed: tokens by number, special or not.
        special: tokens that are special in any case: those with a role, then the others.
        named: texts of special tokens by role (``bos_token``, ``image_token``, ...), which chat templates may write.
    """

    listed: tuple[AddedTokenSpec, ...] = ()
    special: tuple[AddedTokenSpec, ...] = ()
    named: Mapping[str, str] = field(default_factory=dict)


def read_special_tokens(directory: Path, config: Mapping[str, Any]) -> SpecialTokens:
    """The tokens of ``config``, the contents of tokenizer_config.json, and of special_tokens_map.json and
    added_tokens.json. As in transformers, the two older files count where ``config`` lists no tokens by number, except
    that a role which ``config`` does not state is read from special_tokens_map.json in any case."""
    older = read_optional_object(directory / SPECIAL_MAP)
    sources = (config,) if _DECODER in config else (config, older)
    extras = [source.get(_EXTRA) for source in sources]
    by_role: dict[str, Any] = {
        role: token for extra in extras if isinstance(extra, dict) for role, token in extra.items()
    }
    for source in (older, *sources):
        by_role.update({role: token for role, token in source.items() if role.endswith("_token") and token is not None})
    order = [*_ROLES, *(role for role in by_role if role not in _ROLES)]
    named = {role: token for role in order if (token := _spec(by_role.get(role))) is not None}
    others = [token for extra in extras if isinstance(extra, list) for token in extra]
    if not others:
        others = next((list(tokens) for config in sources if isinstance(tokens := config.get(_ADDITIONAL), list)), [])
    special = [*named.values(), *filter(None, map(_spec, others))]
    return SpecialTokens(
        listed=tuple(_listed(directory, config, {token.content for token in special})),
        special=tuple(special),
        named={role: token.content for role, token in named.items()},
    )


def read_eos_token_ids(directory: Path) -> frozenset[int]:
    """Every ``eos_token_id`` of generation_config.json and config.json, whose text model may state its own."""
    ids: set[int] = set()
    for name in ("generation_config.json", "config.json"):
        values = read_optional_object(directory / name)
        nested = values.get("text_config")
        for source in (values, nested if isinstance(nested, dict) else {}):
            value = source.get("eos_token_id")
            stated = value if isinstance(value, list) else [] if value is None else [value]
            if not all(type(token) is int for token in stated):
                raise CheckpointError(
                    f"{directory / name}: eos_token_id must be an integer or a list of them, not {value!r}"
                )
            ids.update(stated)
    return frozenset(ids)


def read_optional_object(path: Path) -> dict[str, Any]:
    """The JSON object in ``path``; empty if there is no such file."""
    try:
        return read_object(path)
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: cannot be read as JSON ({read_error_text(error)})") from None


def _listed(directory: Path, config: Mapping[str, Any], special: set[str]) -> Iterator[AddedTokenSpec]:
    """Tokens by number, in the order of the numbers."""
    if _DECODER in config:
        entries = config[_DECODER]
        numbered = sorted(entries.items(), key=lambda item: _number(item[0])) if isinstance(entries, dict) else []
        yield from (token for _, value in numbered if isinstance(value, dict) and (token := _spec(value)) is not None)
        return
    older = read_optional_object(directory / ADDED)
    for content, _ in sorted(older.items(), key=lambda item: _number(item[1])):
        is_special = content in special
        yield AddedTokenSpec(content=content, flags={"special": is_special, "normalized": not is_special})


def _number(value: object) -> int:
    """The id of a token as a key or a value of JSON; a value that is none comes first."""
    if type(value) is int:
        return value
    return int(value) if isinstance(value, str) and value.isascii() and value.isdigit() and len(value) < 10 else -1


def _spec(value: object) -> AddedTokenSpec | None:
    """The token that a file states as its text, or as an object with ``content`` and flags; None for anything else."""
    content = value.get("content") if isinstance(value, dict) else value
    if not isinstance(content, str) or not content:
        return None
    stated = value if isinstance(value, dict) else {}
    return AddedTokenSpec(
        content=content, flags={name: stated[name] for name in _FLAGS if isinstance(stated.get(name), bool)}
    )
