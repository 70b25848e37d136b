"""``moelight lm-eval``: lm-evaluation-harness with moelight registered as a model and used by default."""

from __future__ import annotations

import importlib.util
import sys
from argparse import ArgumentParser
from collections.abc import Sequence
from pathlib import Path

from moelight.cli.options import argument, with_options
from moelight.cli.tables import say_missing_kernels
from moelight.core.errors import ConfigError
from moelight.core.small_files import read_error_text, read_text
from moelight.core.units import MiB

MODEL = "moelight"
# Options that are passed to the harness unless the user gives them. The defaults of the harness (one sequence at a
# time, the first CUDA device) are indistinguishable from values that the user chose.
_DEFAULTS = {"model": MODEL, "batch_size": "auto", "device": "auto"}
_COMMANDS = ("run", "ls", "validate")
_MOST_CONFIG_BYTES = 4 * MiB


@with_options()
def lm_eval(
    arguments: list[str] | None = argument(
        "ARGUMENTS", "Commands and options of lm-evaluation-harness; `run --help` lists them.", default=None
    ),
) -> None:
    """Evaluate a model with lm-evaluation-harness, whose own options follow.

    moelight lm-eval --model_args pretrained=PATH --tasks NAME,... [--include_path DIR]
    """
    if importlib.util.find_spec("lm_eval") is None:
        raise ConfigError("lm-evaluation-harness is not installed: pip install 'moelight[lm-eval]'")
    say_missing_kernels()
    from lm_eval.__main__ import cli_evaluate

    import moelight.integrations.lm_eval  # noqa: F401 - so that the harness knows the model

    before, sys.argv = sys.argv, ["moelight lm-eval", *completed(arguments or [])]
    try:
        cli_evaluate()
    except (OSError, ValueError) as error:
        if not _raised_by_lm_eval(error):
            raise
        raise ConfigError(f"lm-eval: {error}") from error
    finally:
        sys.argv = before


def completed(arguments: Sequence[str]) -> list[str]:
    """Return ``arguments``, after moelight's defaults if they evaluate a moelight model; later options win."""
    first = arguments[0] if arguments else ""
    command, rest = (first, arguments[1:]) if not first or first in _COMMANDS else ("run", arguments)
    if command != "run" or not rest or {"-h", "--help"} & set(rest):
        return [*([command] if command else []), *rest]
    asked = ArgumentParser(add_help=False, allow_abbrev=False)
    asked.add_argument("--model", "-M")
    asked.add_argument("--config", "-C", type=Path)
    parsed = asked.parse_known_args(rest)[0]
    filed = _read_config(parsed.config) if parsed.config is not None else {}
    if (parsed.model or filed.get("model", MODEL)) != MODEL:
        return [command, *rest]
    defaults = [(f"--{name}", value) for name, value in _DEFAULTS.items() if name not in filed]
    return [command, *(part for pair in defaults for part in pair), *rest]


def _read_config(path: Path) -> dict[str, object]:
    import yaml

    try:
        values = yaml.safe_load(read_text(path, max_bytes=_MOST_CONFIG_BYTES))
    except yaml.YAMLError as error:
        raise ConfigError(f"--config {path}: cannot be read ({error})") from None
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"--config {path}: cannot be read ({read_error_text(error)})") from None
    return values if isinstance(values, dict) else {}


def _raised_by_lm_eval(error: BaseException) -> bool:
    """True if the harness or a library that it calls raised ``error``: its message is for the user."""
    trace, callers = error.__traceback__, set()
    while trace is not None:
        callers.add(str(trace.tb_frame.f_globals.get("__name__")))
        trace = trace.tb_next
    return not any(name.startswith("moelight.") and name != __name__ for name in callers)
