"""Workloads: the number of requests, their prompt tokens and new tokens."""

from __future__ import annotations

from dataclasses import dataclass

from moelight.core.errors import ConfigError, quoted

MOST_REQUESTS, MOST_TOKENS = 1 << 30, 1 << 24  # in all; per prompt, and per answer
_MOST = {
    "num_requests": MOST_REQUESTS,
    "prompt_len": MOST_TOKENS,
    "max_prompt_len": MOST_TOKENS,
    "gen_len": MOST_TOKENS,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """A number of requests; tokens per request: ``prompt_len`` on average, ``max_prompt_len`` at most, ``gen_len``
    generated at most.
    """

    num_requests: int = 1024
    prompt_len: int = 256
    max_prompt_len: int = 1024
    gen_len: int = 256

    def __post_init__(self) -> None:
        for name, most in _MOST.items():
            if not 1 <= getattr(self, name) <= most:
                raise ConfigError(f"{name} must be from 1 to {most:,}, not {quoted(getattr(self, name))}")
        if self.prompt_len > self.max_prompt_len:
            raise ConfigError(f"prompt_len ({self.prompt_len}) exceeds max_prompt_len ({self.max_prompt_len})")
