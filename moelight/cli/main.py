"""The ``moelight`` program: its commands, its standard streams, and the one place that turns errors into exit codes."""

from __future__ import annotations

import importlib
import io
import os
import sys
import traceback
from collections.abc import Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Annotated, Any

import typer
import typer.core
import typer.main

from moelight import __version__
from moelight.cli import INTERNAL, INTERRUPTED, PIPE_CLOSED, REFUSED, STORAGE
from moelight.core.errors import StorageError, UserError


def shield_streams() -> None:
    """Open closed standard streams and ignore write errors on the process's own stderr; replaced streams are kept."""
    for descriptor in range(3):
        _occupy(descriptor)
    if sys.stdin is None:
        sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115 (it is the stream from now on)
    if sys.stdout is None:
        sys.stdout = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    if sys.stderr is None:
        sys.stderr = _swallowing(2, "utf-8")
    elif sys.__stderr__ is not None and sys.stderr is sys.__stderr__:
        sys.stderr = _swallowing(sys.__stderr__.fileno(), sys.__stderr__.encoding)


def _occupy(descriptor: int) -> None:
    """Open ``descriptor`` on the null device if it is closed: the next opened file would get what libraries print."""
    try:
        os.fstat(descriptor)
    except OSError:
        null = os.open(os.devnull, os.O_RDONLY)
        if null != descriptor:
            os.dup2(null, descriptor)
            os.close(null)


def _swallowing(descriptor: int, encoding: str) -> io.TextIOWrapper:
    """Return a line-buffered text stream that escapes what it cannot encode, as the interpreter's own stderr does."""
    buffer = io.BufferedWriter(_Swallowing(descriptor, "w", closefd=False))
    return io.TextIOWrapper(buffer, encoding, errors="backslashreplace", line_buffering=True, write_through=True)


class _Swallowing(io.FileIO):
    """Raw writer to a descriptor that it does not own; data of failed writes is dropped."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError:
            return len(data)


# The first sentence of the help of each command, which is the attribute of its module with the same name.
COMMANDS = {
    "generate": "Answer every row of PROMPTS.",
    "serve-batch": "Serve OpenAI's Files and Batches on this machine, or watch a folder.",
    "optimize": "Find the fastest policy that fits the memory, and explain it.",
    "simulate": "Run a policy's passes on a virtual clock.",
    "roofline": "Show roofs, turning points, and what binds a policy.",
    "report": "Compare a trace with its prediction, lane by lane, and attribute the idle time of the busiest lane.",
    "inspect": "Count a model's parameters and bytes, from its config alone.",
    "models": "List the families of models that run, how, and what was tested; of one MODEL all of that, and test it.",
    "convert": "Write MODEL again with rounded experts, in a quarter to half of the bytes.",
    "compare": "Measure how far the predictions of MODEL are from those of another checkpoint.",
    "profile": "Measure this machine in about a minute: memory, processor, disk, and a GPU and its link.",
    "doctor": "Show torch, the processors, the memory and the kernels of this machine.",
    "lm-eval": "Evaluate a model with lm-evaluation-harness, whose own options follow.",
    "policy": "Check, format, explain, compare and tune policies of resident experts.",
}
# Unknown options of lm-eval, and everything after the first word, belong to the harness.
_SETTINGS = {"lm-eval": {"ignore_unknown_options": True, "allow_extra_args": True, "allow_interspersed_args": False}}

ENGINE_COMMAND = "generate"  # the command whose engine ranks of torchrun follow
_HELP = {"-h", "--help"}

# Commands beside public functions of the same name.
_ATTRIBUTES = {"optimize": "optimize_command", "simulate": "simulate_command"}


@cache
def _command(name: str) -> Any:
    module = name.replace("-", "_")
    loaded = getattr(importlib.import_module(f"moelight.cli.{module}"), _ATTRIBUTES.get(name, module))
    if isinstance(loaded, typer.Typer):
        return typer.main.get_command(loaded)
    alone = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
    alone.command(name=name, context_settings=_SETTINGS.get(name))(loaded)
    return typer.main.get_command(alone)


class Commands(typer.core.TyperGroup):
    """Command group that imports a command at its first use, so that help imports none."""

    @property
    def commands(self) -> MutableMapping[str, Any]:
        return {name: _command(name) for name in COMMANDS}

    @commands.setter
    def commands(self, _: MutableMapping[str, Any]) -> None:
        pass  # the group's constructor sets the empty table of a new group

    def list_commands(self, ctx: Any) -> list[str]:  # noqa: ARG002 (typer's signature)
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:  # noqa: ARG002 (typer's signature)
        return _command(cmd_name) if cmd_name in COMMANDS else None

    def format_commands(self, ctx: Any, formatter: Any) -> None:  # noqa: ARG002 (typer's signature)
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


# The exception of typer for a wrong command line: older versions take it from click, newer ones define their own.
_USAGE_ERROR: Any = typer.BadParameter.__base__

app = typer.Typer(
    name="moelight",
    cls=Commands,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback(invoke_without_command=True)
def moelight(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
    with_traceback: Annotated[  # noqa: ARG001 (main looks for it when something has gone wrong)
        bool, typer.Option("--traceback", help="Show the stack trace of internal errors.")
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
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # its hints are on packages for GPUs
    shield_streams()
    argv = list(sys.argv[1:] if arguments is None else arguments)
    try:
        command = typer.main.get_command(app)
        with _launched_ranks(argv), command.make_context("moelight", list(argv)) as context:
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
        if isinstance(leave.__context__, BrokenPipeError):  # rich turns one into SystemExit(1)
            _forget_stdout()
            return PIPE_CLOSED
        # The argument parser of lm-eval exits with 0 after its help text and with 2 after a usage error.
        return int(leave.code) if leave.code in (0, REFUSED) else _fault(leave, argv)
    except BaseException as error:  # a panic of a Rust library is not an Exception
        return _fault(error, argv)
    return 0


@contextmanager
def _launched_ranks(argv: Sequence[str]) -> Iterator[None]:
    """The processes that torchrun started, if it did: rank 0 goes on with the command. The others follow its engines
    and end; of a command that is not `ENGINE_COMMAND`, or shows its help, they say nothing."""
    if "WORLD_SIZE" not in os.environ:
        yield
        return
    from moelight.engine.launched import Launch, leading, leads_alone

    command = next((word for word in argv if not word.startswith("-")), None)
    if command != ENGINE_COMMAND or not _HELP.isdisjoint(argv):
        if not leads_alone():
            raise typer.Exit
        yield
        return
    from moelight.engine.rank_process import follow_launch

    launch = Launch.read()
    if launch is not None and launch.rank:
        os._exit(follow_launch(launch))  # lanes may be at work
    with leading(launch):
        yield


def _fault(error: BaseException, argv: Sequence[str]) -> int:
    """Report an internal error and return `INTERNAL`; Python's own exit code, 1, means rows with errors."""
    if "--traceback" in argv:
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
    from moelight.cli.tables import printable

    print(printable(" ".join(message.split())), file=sys.stderr)


def _forget_stdout() -> None:
    """Redirect stdout to the null device, or the interpreter reports the error again when it flushes at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    sys.exit(main())
