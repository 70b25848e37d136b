"""The ``moelight`` program: its commands, and the one place where every error becomes a line and an exit code.

Exit codes: 0 all is well; 1 some lines of a job, or a policy file, have errors; 2 refused, one clear line says why; 70
a fault of moelight's own or of a library's; 74 a disk is full or fails; 130 interrupted; 141 the reader of the output
went away.
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
# What typer raises for a wrong command line; older typers take it from click, newer ones carry their own.
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
    """Run the program with ``arguments`` (default: the process's own) and return its exit code."""
    # Rounds that torch's threads (libgomp) spin after each operation, on cores that the kernels' own threads want: its
    # 300,000 take 3 to 4 % of a run on two cores. Read when torch is first imported; a choice of the user's stands.
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
        # A parser of a library's own, lm-eval's, leaves with 0 behind its help and 2 behind its complaint.
        return int(leave.code) if leave.code in (0, REFUSED) else _fault(leave, given)
    except BaseException as error:  # a panic of a library in Rust is no Exception
        return _fault(error, given)
    return 0


def _fault(error: BaseException, given: Sequence[str]) -> int:
    """Of moelight's own, or of a library of its. Python's own exit code, 1, would mean something else."""
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
    """One line on stderr, whatever line breaks and control characters the message quotes."""
    line = " ".join(message.split())
    print("".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in line), file=sys.stderr)


def _forget_stdout() -> None:
    """Point stdout at nothing, or the interpreter complains once more when it flushes at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    sys.exit(main())
