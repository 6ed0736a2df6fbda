"""Options that several commands share, as data, and how their texts are read.

A command lists them in ``params`` and gets their values as arguments.
"""

from __future__ import annotations

from dataclasses import dataclass

import click

from ckpt_tools.cli.group import set_quiet, set_verbosity
from ckpt_tools.core.dtypes import DType, parse_dtype
from ckpt_tools.core.index import SECTIONS, Section
from ckpt_tools.core.text import parse_size
from ckpt_tools.errors import UsageError
from ckpt_tools.formats.options import ReadOptions


@dataclass(frozen=True, slots=True)
class Filters:
    """Which entries are wanted: name patterns, and a section or None for all."""

    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    only: Section | None = None

    @classmethod
    def of(cls, include: tuple[str, ...], exclude: tuple[str, ...], only: str) -> Filters:
        """The filters that the values of the options in `filters` mean."""
        return cls(include, exclude, next((name for name in SECTIONS if name == only), None))

    @classmethod
    def given(cls) -> Filters:
        """Those of the command that runs."""
        params = click.get_current_context().params
        return cls.of(params["include"], params["exclude"], params["only"])

    @property
    def wants_all(self) -> bool:
        """Whether nothing is filtered at all."""
        return not (self.include or self.exclude or self.only)


def filters(*, only: str = "all") -> list[click.Parameter]:
    """--include, --exclude and --only, as ``include``, ``exclude`` and ``only``."""
    return [
        click.Option(
            ["-i", "--include"],
            multiple=True,
            metavar="GLOB",
            help="Only names that match this glob, or the regex after `re:`. Repeatable.",
        ),
        click.Option(
            ["-x", "--exclude"], multiple=True, metavar="GLOB", help="Leave out names that match."
        ),
        click.Option(
            ["--only"],
            type=click.Choice([*SECTIONS, "all"]),
            default=only,
            show_default=True,
            help="Only this section.",
        ),
    ]


def reading() -> list[click.Parameter]:
    """--allow-global, as ``allow_global``."""
    return [
        click.Option(
            ["--allow-global"],
            multiple=True,
            metavar="NAME",
            help="Accept this class name in pickles; nothing of it is imported or run.",
        )
    ]


def as_json() -> click.Parameter:
    """--json, as ``json``."""
    return click.Option(["--json"], is_flag=True, help="One JSON object on stdout.")


def talk() -> list[click.Parameter]:
    """--quiet and --verbose, which say how much goes to stderr; no arguments."""
    return [
        click.Option(
            ["-v", "--verbose"],
            count=True,
            expose_value=False,
            callback=_remember_verbosity,
            help="Say what led to an error; -vv shows tracebacks.",
        ),
        click.Option(
            ["-q", "--quiet"],
            is_flag=True,
            expose_value=False,
            callback=_remember_quiet,
            help="No notes and no progress on stderr.",
        ),
    ]


def _remember_verbosity(ctx: click.Context, param: click.Parameter, value: int) -> None:  # noqa: ARG001 (click's signature)
    set_verbosity(ctx, value)


def _remember_quiet(ctx: click.Context, param: click.Parameter, value: bool) -> None:  # noqa: ARG001, FBT001 (click's signature)
    set_quiet(ctx, quiet=value)


def checkpoint() -> click.Parameter:
    """The argument CKPT, as ``ckpt``."""
    return click.Argument(["ckpt"], metavar="CKPT", type=click.Path())


def output() -> click.Parameter:
    """-o OUT, as ``out``."""
    return click.Option(
        ["-o", "--output", "out"], metavar="OUT", required=True, help="Where the result goes."
    )


def writing() -> list[click.Parameter]:
    """--dry-run, --force, --resume, --check, --jobs, --threads and --max-memory."""
    return [
        click.Option(
            ["--dry-run"], is_flag=True, help="Plan and check everything, but write nothing."
        ),
        click.Option(["--force"], is_flag=True, help="Replace an output that is there already."),
        click.Option(
            ["--resume"],
            is_flag=True,
            help="Keep the files that the same command had finished when it stopped, and write the "
            "others; an output of one file begins again.",
        ),
        click.Option(
            ["--check"],
            is_flag=True,
            help="Read the result back and compare it with the source before it gets its name.",
        ),
        click.Option(
            ["-j", "--jobs"],
            metavar="N",
            type=click.IntRange(min=1),
            default=1,
            show_default=True,
            help="Worker processes on this machine.",
        ),
        click.Option(
            ["--threads"],
            metavar="N",
            type=click.IntRange(min=1),
            default=2,
            show_default=True,
            help="Threads of each process.",
        ),
        size("--max-memory", default="64MiB", text="Memory of all buffers together."),
    ]


def reading_given() -> ReadOptions:
    """The options of `reading` of the command that runs."""
    return ReadOptions(click.get_current_context().params["allow_global"])


def size(name: str, *, default: str, text: str) -> click.Parameter:
    """An option that takes an amount of bytes such as ``5GB`` or ``64MiB``."""
    return click.Option(
        [name], metavar="SIZE", default=default, show_default=True, callback=_size, help=text
    )


def _size(ctx: click.Context, param: click.Parameter, value: str) -> int:
    try:
        return parse_size(value)
    except UsageError as error:
        raise click.BadParameter(f"{error.message} {error.hint or ''}", ctx, param) from error


def keep_rank_states() -> click.Parameter:
    """--keep-rank-states, as ``keep_rank_states``."""
    return click.Option(
        ["--keep-rank-states"],
        is_flag=True,
        help="Keep data positions and random states that each rank saved for itself, though the "
        "target has another number of ranks. Else they are left out and named.",
    )


def dtype() -> click.Parameter:
    """--dtype, as ``dtype``: an element type, or None to keep each tensor's own."""
    return click.Option(
        ["--dtype"],
        metavar="keep|TYPE",
        default="keep",
        show_default=True,
        callback=_dtype,
        help="Cast floating tensors, rounding to nearest even: bf16, fp16, fp32, float8_e4m3fn…",
    )


def _dtype(ctx: click.Context, param: click.Parameter, value: str) -> DType | None:
    if value == "keep":
        return None
    found = parse_dtype(value)
    if found is None or not found.holds_weights:
        raise click.BadParameter(
            f"{value!r} is no floating type for weights; write keep, bf16, fp16 or fp32.",
            ctx,
            param,
        )
    return found


def examples(*lines: str) -> str:
    """The end of a command's help: examples, one a line, kept as they are."""
    return "\b\nExamples:\n" + "\n".join(f"  {line}" for line in lines)
