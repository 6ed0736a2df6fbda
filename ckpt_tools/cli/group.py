"""The group of commands: imports a command when it is run, and turns exceptions into exit codes.

It knows nothing of checkpoints.
"""

from __future__ import annotations

import errno
import os
import re
import signal
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from types import TracebackType
from typing import TextIO

import click

from ckpt_tools._version import __version__
from ckpt_tools.cli import guesses
from ckpt_tools.errors import CkptError, Terminated, UsageError, from_system, printable
from ckpt_tools.storage.waiting import WAITING

_QUIET, _VERBOSE, _TYPED = "ckpt_tools.quiet", "ckpt_tools.verbose", "ckpt_tools.typed"
_WIDEST = 100
# What the shell calls the end of a program whose reader went away: 128 + SIGPIPE.
_PIPE_CLOSED = 141
_INTERRUPTED, _TERMINATED = 130, 143
_WRITE_FAILED = 4
_UNREADABLE = 3
_COMMAND = re.compile(r"(Error:)?\s*(For example: )?(ckpt-tools|pip|torchrun|python3?) ")
_BETWEEN_TICKS = re.compile(r"`[^`]*`")
_WRITE_ERRNOS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG})


class CommandGroup(click.Group):
    """Commands by name, with one line of help each, under headings; none imported until run.

    A command ``name`` is the object ``command`` of the module ``package.name``.
    """

    def __init__(self, *, groups: Mapping[str, Mapping[str, str]], package: str, help: str) -> None:  # noqa: A002 (click's word)
        settings: dict[str, object] = {"help_option_names": ["-h", "--help"]}
        settings["max_content_width"] = _WIDEST
        super().__init__(name="ckpt-tools", help=help, context_settings=settings)
        self._groups = groups
        self._package = package
        version = click.version_option(__version__, "-V", "--version", prog_name="ckpt-tools")
        version(self)

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002 (click's signature)
        """The commands' names, in the order of the help."""
        return [name for commands in self._groups.values() for name in commands]

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """The command that runs, and its arguments. Raises UsageError with what to type instead."""
        if args[0] not in self.list_commands(ctx) and not args[0].startswith("-"):
            raise guesses.no_command(args[0], self.list_commands(ctx))
        return super().resolve_command(ctx, args)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The command of this name, its module imported now; None when there is none."""
        if cmd_name not in self.list_commands(ctx):
            return None
        loaded = import_module(f"{self._package}.{cmd_name}").command
        return loaded if isinstance(loaded, click.Command) else None

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002 (click's signature)
        """The list of commands in the help, which imports none of them."""
        for heading, commands in self._groups.items():
            with formatter.section(heading):
                formatter.write_dl(list(commands.items()))

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Replace guessed words by commands, and keep all words for the hints of errors."""
        words = guesses.command_line(args)
        ctx.meta[_TYPED] = ["ckpt-tools", *words]
        with _printable_errors():
            return super().parse_args(ctx, words)

    def invoke(self, ctx: click.Context) -> object:
        """Run the command; what it raises on purpose becomes one error and its exit code."""
        if os.environ.get("NO_COLOR"):  # no-color.org, and force-color.org
            ctx.color = False
        elif os.environ.get("FORCE_COLOR", "0") not in {"", "0"}:
            ctx.color = True
        else:
            ctx.color = False if is_dumb() else None  # None: isatty says it
        WAITING.on_wait, WAITING.is_stopped = saying(), False
        try:
            with _printable_errors():
                answer: object = super().invoke(ctx)
            sys.stdout.flush()  # here, where a closed pipe or a full disk can still be reported
        except BrokenPipeError:
            # Else Python complains of the closed pipe at its exit.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            ctx.exit(_PIPE_CLOSED)
        except CkptError as error:
            say_error(error)
            ctx.exit(error.exit_code)
        except OSError as error:
            say_error(from_system(error))
            ctx.exit(_WRITE_FAILED if error.errno in _WRITE_ERRNOS else _UNREADABLE)
        except KeyboardInterrupt as error:
            is_terminated = isinstance(error, Terminated)
            how = "Stopped by SIGTERM." if is_terminated else "Stopped."
            click.echo(" ".join([how, *map(str, error.args)]), err=True)
            ctx.exit(_TERMINATED if is_terminated else _INTERRUPTED)
        return answer


def is_dumb() -> bool:
    """Whether the terminal says that it knows neither colours nor how to move the cursor."""
    return os.environ.get("TERM") == "dumb"


@contextmanager
def interruptible() -> Iterator[None]:
    """Let Ctrl-C raise KeyboardInterrupt in here, and SIGTERM Terminated, which end the process
    outside.

    Nothing changes where Ctrl-C is ignored, or raises already: in a process that is not our own.
    """

    def interrupt(*_: object) -> None:
        WAITING.is_stopped = True  # else the process ends when the last thread has waited
        raise KeyboardInterrupt

    def terminate(*_: object) -> None:
        WAITING.is_stopped = True
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # once is enough: what is done must be done
        raise Terminated

    outside = signal.getsignal(signal.SIGINT)
    if not callable(outside) or outside is signal.default_int_handler:
        yield
        return
    signal.signal(signal.SIGINT, interrupt)
    before = signal.signal(signal.SIGTERM, terminate)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, outside)
        signal.signal(signal.SIGTERM, before)


def end_if_interrupted(unraisable: sys.UnraisableHookArgs) -> None:
    """End the process for a Ctrl-C that came where Python can only report it, and would go on."""
    if isinstance(unraisable.exc_value, KeyboardInterrupt):
        os._exit(_TERMINATED if isinstance(unraisable.exc_value, Terminated) else _INTERRUPTED)
    sys.__unraisablehook__(unraisable)


@contextmanager
def _printable_errors() -> Iterator[None]:
    """Raise click's own errors as ours where they quote control characters: a shell may have typed
    the names of files. Lines are those of the help.
    """
    try:
        yield
    except click.ClickException as error:
        message = error.format_message()
        if message.replace("\n", "").isprintable():
            raise
        raise UsageError(message) from error


def say_error(error: CkptError) -> None:
    """Print an error to stderr: what happened, then what to try next, indented.

    With -vv the traceback of the exception in hand comes first.
    """
    if _verbosity() >= 2:
        import traceback  # late, here and below: it loads much, and few errors are shown so

        _echo(traceback.format_exc().split("\n"))
    first, *more = error.message.split("\n")
    hint = _hint(error) or ""
    first, *rest = _wrapped(f"Error: {first}")
    click.echo(first.replace("Error:", click.style("Error:", fg="red", bold=True), 1), err=True)
    more = [*map(str.strip, more), *hint.split("\n"), *_causes(error)]
    _echo([*rest, *(line for text in more if text for line in _wrapped(f"  {text}"))])


def error_json(error: CkptError) -> dict[str, str | list[str] | None]:
    """An error as --json has it, what to try next in the words that were typed."""
    return {**error.to_dict(), "hint": _hint(error)}


def _echo(lines: Iterable[str]) -> None:
    """Print lines on stderr: whatever they quote, each stays one."""
    for line in lines:
        click.echo(printable(line), err=True)


def _hint(error: CkptError) -> str | None:
    """What to try next: the corrected command, where there is one."""
    ctx = click.get_current_context()
    typed: list[str] = ctx.find_root().meta[_TYPED]
    ways = () if error.instead is None else error.instead.ways
    used = {text for way in ways for text in way.options if text.startswith("-")}
    group = ctx.find_root().command
    run = group.get_command(ctx, typed[1]) if used and isinstance(group, click.Group) else None
    known = {option for param in run.params for option in param.opts} if run is not None else set()
    return error.hint_for(typed) if used <= known else error.advice


def _causes(error: BaseException) -> list[str]:
    """What led to an error, with -v: the exceptions that it was raised from."""
    if error.__cause__ is None or not _verbosity():
        return []
    cause = error.__cause__
    return [f"Because of {type(cause).__name__}: {cause}", *_causes(cause)]


def say(text: str) -> None:
    """Print a note to stderr, unless --quiet was given."""
    saying()(text)


def saying() -> Callable[[str], None]:
    """The `say` of the command that runs, for its threads: click knows its command in one alone."""
    meta = click.get_current_context().meta

    def told(text: str) -> None:
        if not meta.get(_QUIET, False):
            _echo(_wrapped(printable(text)))

    return told


def answer(text: str) -> None:
    """Print one line of an answer to stdout, wrapped on a terminal."""
    click.echo("\n".join(_wrapped(printable(text), on=sys.stdout)))


def _wrapped(text: str, *, on: TextIO | None = None) -> list[str]:
    """The text wrapped to the width of the terminal; one line when ``on`` (stderr) is no terminal.

    A command to copy stays on its line: one between backticks, or a line that begins with one.
    """
    stream = on or sys.stderr
    width = os.get_terminal_size(stream.fileno()).columns if stream.isatty() else 0
    if len(text) <= width or not width or _COMMAND.match(text):
        return [text]
    from textwrap import wrap  # late: few texts are that long

    bound = _BETWEEN_TICKS.sub(lambda ticked: ticked[0].replace(" ", "\0"), text)
    lines = wrap(
        bound, width, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False
    )
    return [line.replace("\0", " ") for line in lines]


def is_quiet() -> bool:
    """Whether --quiet was given to the command that runs."""
    return bool(click.get_current_context().meta.get(_QUIET, False))


def set_quiet(ctx: click.Context, _: click.Parameter, on: bool) -> None:  # noqa: FBT001 (click's)
    """Have notes and progress left out."""
    ctx.meta[_QUIET] = on


def set_patience(_ctx: click.Context, _: click.Parameter, seconds: float | None) -> None:
    """Set how long stores are waited for, if that was given."""
    if seconds is not None:
        WAITING.patience = seconds


def _verbosity() -> int:
    """How often -v was given: 0, 1 or 2."""
    count = click.get_current_context().meta.get(_VERBOSE, 0)
    return count if isinstance(count, int) else 0


def set_verbosity(ctx: click.Context, _: click.Parameter, count: int) -> None:
    """Set how much is said of errors; with -vv a crash shows its whole traceback."""
    ctx.meta[_VERBOSE] = count
    if count >= 2:
        sys.excepthook = sys.__excepthook__


def report_crash(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    """Report a bug of ckpt-tools in two lines, and exit as for an unreadable checkpoint.

    Exit code 1, which Python itself would give, means "the answer is no" here.
    """
    if issubclass(kind, KeyboardInterrupt):
        raise SystemExit(_INTERRUPTED)
    import traceback

    place = traceback.extract_tb(trace)[-1:] if trace else []
    where = "".join(f" at {os.path.basename(p.filename)}:{p.lineno}" for p in place)
    text = printable(f"{kind.__name__}: {error}")
    sys.stderr.write(f"Error: ckpt-tools itself failed{where}: {text}\n")
    sys.stderr.write("  This is a bug in ckpt-tools; the same command with -vv shows where.\n")
    raise SystemExit(_UNREADABLE)
