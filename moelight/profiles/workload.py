"""How many requests, how long in, how long out."""

from __future__ import annotations

from dataclasses import dataclass

from moelight.core.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """Tokens per request: ``prompt_len`` on average, ``max_prompt_len`` at most, ``gen_len`` generated at most."""

    num_requests: int = 1024
    prompt_len: int = 256
    max_prompt_len: int = 1024
    gen_len: int = 256

    def __post_init__(self) -> None:
        for name in ("num_requests", "prompt_len", "max_prompt_len", "gen_len"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, not {getattr(self, name)}")
        if self.prompt_len > self.max_prompt_len:
            raise ConfigError(f"prompt_len ({self.prompt_len}) exceeds max_prompt_len ({self.max_prompt_len})")
