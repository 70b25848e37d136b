"""The ``moelight`` program: its commands, and the one place that turns every error into a line and an exit code.

Exit codes: 0 success; 1 some lines of a job, or a policy file, have errors; 2 refused, with one line of reason; 70 an
internal error of moelight or a library; 74 a disk is full or fails; 130 interrupted; 141 the reader of the output
closed the pipe.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Sequence
from typing import Annotated, Any

import typer
import typer.main

from moelight import __version__
from moelight.cli.commands import Commands
from moelight.cli.streams import shield_streams
from moelight.core.errors import StorageError, UserError

REFUSED, INTERNAL, STORAGE, INTERRUPTED, PIPE_CLOSED = 2, 70, 74, 130, 141
# The exception of typer for a wrong command line: older versions take it from click, newer ones define their own.
_USAGE_ERROR: Any = typer.BadParameter.__base__

app = typer.Typer(
    name="moelight", cls=Commands, add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False
)


@app.callback(invoke_without_command=True)
def moelight(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version and leave.")] = False,
    with_traceback: Annotated[  # noqa: ARG001 (main looks for it when something has gone wrong)
        bool, typer.Option("--traceback", help="Show the stack when moelight itself is at fault.")
    ] = False,
) -> None:
    """Offline batch generation with Mixture-of-Experts models that are bigger than the machine."""
    if version:
        typer.echo(f"moelight {__version__}")
    elif context.invoked_subcommand is None:
        typer.echo(context.get_help())


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the program with ``arguments`` (default: those of the process) and return the exit code."""
    # Rounds that torch's threads (libgomp) spin after each operation, on cores that the kernels' own threads use: the
    # default of 300,000 costs 3 to 4 % of a run on two cores. Read when torch is first imported; a value set by the
    # user is kept.
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")
    shield_streams()
    given = list(sys.argv[1:] if arguments is None else arguments)
    try:
        command = typer.main.get_command(app)
        with command.make_context("moelight", list(given)) as context:
            command.invoke(context)
        sys.stdout.flush()
    except typer.Exit as leave:
        return leave.exit_code
    except (KeyboardInterrupt, typer.Abort):
        return INTERRUPTED
    except BrokenPipeError:
        _forget_stdout()
        return PIPE_CLOSED
    except _USAGE_ERROR as error:
        path = error.ctx.command_path if error.ctx is not None else "moelight"
        return _refuse(f"{error.format_message()} (see {path} --help)")
    except StorageError as error:
        return _refuse(str(error), STORAGE)
    except UserError as error:
        return _refuse(str(error))
    except SystemExit as leave:
        # The argument parser of lm-eval exits with 0 after its help text and with 2 after a usage error.
        return int(leave.code) if leave.code in (0, REFUSED) else _fault(leave, given)
    except BaseException as error:  # a panic of a Rust library is not an Exception
        return _fault(error, given)
    return 0


def _fault(error: BaseException, given: Sequence[str]) -> int:
    """Report an internal error and return `INTERNAL`, since Python's exit code 1 already means rows with errors."""
    if "--traceback" in given:
        traceback.print_exc()
    else:
        hint = "run moelight --traceback ... for the stack"
        _say(f"moelight: internal error: {type(error).__name__}: {error} ({hint})")
    return INTERNAL


def _refuse(message: str, code: int = REFUSED) -> int:
    _say(f"moelight: error: {message}")
    try:
        sys.stdout.flush()
    except OSError:
        _forget_stdout()
    return code


def _say(message: str) -> None:
    """Print ``message`` to stderr as one line, with line breaks joined and control characters escaped."""
    line = " ".join(message.split())
    print("".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in line), file=sys.stderr)


def _forget_stdout() -> None:
    """Redirect stdout to the null device; otherwise the interpreter reports the error again when it flushes at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    sys.exit(main())
