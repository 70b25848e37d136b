"""What a job does with its rows."""

from __future__ import annotations

from moelight.core.errors import ConfigError, did_you_mean

GENERATE, SCORE, CLASSIFY, EMBED = TASKS = ("generate", "score", "classify", "embed")
SCORING_TASKS = (SCORE, CLASSIFY)


def check_task(task: str) -> None:
    """Raise ConfigError if ``task`` is not one of `TASKS`."""
    if task not in TASKS:
        raise ConfigError(
            f"--task must be {', '.join(TASKS[:-1])} or {TASKS[-1]}, not {task!r}{did_you_mean(task, TASKS)}"
        )
