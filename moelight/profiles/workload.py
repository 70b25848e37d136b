"""Workloads: the numbers of requests, prompt tokens and new tokens; by name, ``workload_profiles/NAME.yaml``."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path

from moelight.core.errors import ConfigError, quoted
from moelight.profiles.files import find_profile, read_yaml

EXPECTED_GEN_LEN = 256  # of answers of which nothing is known but that the context limits them
MOST_REQUESTS, MOST_TOKENS = 1 << 30, 1 << 24  # in all; per prompt, and per answer


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """The requests that a plan is made for, by number and length.

    Attributes:
        num_requests: requests in all.
        prompt_len: prompt tokens of a request, on average.
        max_prompt_len: prompt tokens of the longest request, at least ``prompt_len``.
        gen_len: new tokens of a request: at most, or as expected where ``max_gen_len`` is set.
        max_gen_len: new tokens of the longest request, for which the cache must have room, at least ``gen_len``; None:
            ``gen_len``.

    Raises:
        ConfigError: a value is below 1 or too large, or ``prompt_len`` exceeds ``max_prompt_len``.
    """

    num_requests: int = 1024
    prompt_len: int = 256
    max_prompt_len: int = 1024
    gen_len: int = EXPECTED_GEN_LEN
    max_gen_len: int | None = None

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if name == "max_gen_len" and value is None:
                continue
            limit = MOST_REQUESTS if name == "num_requests" else MOST_TOKENS
            if not 1 <= value <= limit:
                raise ConfigError(f"{name} must be from 1 to {limit:,}, not {quoted(value)}")
        if self.prompt_len > self.max_prompt_len:
            raise ConfigError(f"prompt_len ({self.prompt_len}) exceeds max_prompt_len ({self.max_prompt_len})")
        if self.gen_len > self.longest_answer:
            raise ConfigError(f"gen_len ({self.gen_len}) exceeds max_gen_len ({self.max_gen_len})")

    @property
    def longest_answer(self) -> int:
        """New tokens of the longest request."""
        return self.gen_len if self.max_gen_len is None else self.max_gen_len


def load_workload(name_or_path: str) -> Workload:
    """The workload called ``name_or_path``, or that of a YAML file."""
    path = Path(name_or_path)
    if path.name == name_or_path and path.suffix not in (".yaml", ".yml"):
        path = find_profile("workload", name_or_path)
    figures = [name for name, value in asdict(Workload()).items() if value is not None]
    entries = read_yaml(path).fields("source", required=("name", *figures))
    for key in entries.keys() - set(figures):
        entries[key].text()
    try:
        return Workload(**{key: entries[key].integer() for key in figures})
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
