"""Options that several commands share, and what they choose: the checkpoint, its step, its entries.

A command lists them in ``params`` and gets their values as arguments; `asked` makes the library's
dataclasses of them. `Command` is the class of all commands: guesses, and options under headings.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

import click

from ckpt_tools import formats
from ckpt_tools.cli import guesses
from ckpt_tools.cli.group import interruptible, say, set_verbosity
from ckpt_tools.cli.render import cut_to
from ckpt_tools.copying import parallel
from ckpt_tools.core.dtypes import DType, parse_dtype
from ckpt_tools.core.index import SECTIONS, CheckpointIndex, Section
from ckpt_tools.core.names import near_names, select
from ckpt_tools.core.text import parse_size
from ckpt_tools.errors import AnswerNo, UsageError, Way
from ckpt_tools.formats import SMALL_OBJECT, ReadOptions, is_checkpoint, open_objects, read_index
from ckpt_tools.formats.frameworks import whole_of
from ckpt_tools.storage.reader import Files

# The headings of a command's help, each with the names of its options. Any other comes first.
_HEADINGS = {
    "Output": "out to_mesh placements place like form layout device_type"
    " torch_version engine param_names keep_rank_states",
    "Which entries": "include exclude only latest step",
    "Types and sizes": "dtype dtype_for max_shard_size vocab_size",
    "Names": "keep_names map map_value force_map rename untie under",
    "Hugging Face folder": "hf_assets allow_mismatch",
    "LoRA": "adapter merge_lora lora_alpha adapter_config adapter_name lora_fan_in_fan_out",
    "Writing": "dry_run force resume check jobs threads max_memory",
    "Other": "json allow_global verbose quiet help _click_default_help",
}
_HEADING = {name: heading for heading, names in _HEADINGS.items() for name in names.split()}
_GROUPED_FROM = 16  # options; fewer are read at a glance
# Suffixes that people may give to an output and that no command writes.
_FOREIGN = (".gguf", ".ggml", ".onnx", ".npz", ".h5", ".msgpack", ".pkl", ".zip", ".tar", ".json")
_SMALLEST_BARE = 1_000  # a bare number below this is no number of bytes


class Command(click.Command):
    """A command that corrects guessed words, and prints its options under headings."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the arguments. Raises UsageError for guesses that have no meaning."""
        words = guesses.arguments(self, args)
        try:
            return super().parse_args(ctx, words)
        except click.NoSuchOption as error:
            raise guesses.no_option(self, error.option_name, _commands(ctx)) or error from error
        except click.MissingParameter as error:
            _, _, first = (self.help or "").partition("Examples:\n")
            example = first.strip().partition("\n")[0]
            missing = " ".join(
                error.format_message().split()
            )  # choices stand on lines of their own
            raise UsageError(missing, hint=f"For example: {example}") from error
        except click.BadParameter as error:
            if error.param is None or "--format" not in error.param.opts:
                raise
            raise UsageError(error.format_message(), hint=guesses.FORMATS) from error
        except click.UsageError as error:
            if "unexpected extra argument" not in error.message:
                raise
            hint = "CKPT is one path: a folder, a file, or a quoted glob of rank files."
            hint += "\n`ckpt-tools diff A B` compares two."
            raise UsageError(cut_to(error.message, 200), hint=hint) from error

    def invoke(self, ctx: click.Context) -> object:
        """Run the command, which Ctrl-C may leave tidily."""
        with interruptible():
            answer: object = super().invoke(ctx)
            return answer

    def headed(self, ctx: click.Context) -> dict[str, list[click.Option]]:
        """The options under their headings; a command of few options has one heading."""
        taken = [param for param in self.get_params(ctx) if isinstance(param, click.Option)]
        if len(taken) < _GROUPED_FROM:
            return {"Options": taken}
        groups: dict[str, list[click.Option]] = {name: [] for name in ("Options", *_HEADINGS)}
        writes = any(option.name == "out" for option in taken)
        for option in taken:
            heading = _HEADING.get(option.name or "", "Options")
            if heading in ("Output", "Writing") and not writes:
                heading = "Options"
            groups[heading].append(option)
        return {heading: options for heading, options in groups.items() if options}

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The options in the help."""
        for heading, taken in self.headed(ctx).items():
            records = [record for option in taken if (record := option.get_help_record(ctx))]
            with formatter.section(heading):
                formatter.write_dl(records)


def _commands(ctx: click.Context) -> dict[str, click.Command]:
    """Every command by its name."""
    parent = ctx.parent
    if parent is None or not isinstance(parent.command, click.Group):
        return {}
    group = parent.command
    commands = {name: group.get_command(parent, name) for name in group.list_commands(parent)}
    return {name: command for name, command in commands.items() if command is not None}


_LATEST, _STEP = "ckpt_tools.latest", "ckpt_tools.step"
# One path, or all of a command that takes several.
Given = TypeVar("Given", str, tuple[str, ...])


@dataclass(frozen=True, slots=True)
class Filters:
    """Which entries are wanted: name patterns, and a section or None for all."""

    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    only: Section | None = None

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
    """--allow-global, as ``allow_global``; --latest and --step, which `checkpoint` reads."""
    return [
        click.Option(
            ["--latest"],
            is_flag=True,
            is_eager=True,
            expose_value=False,
            callback=_remember,
            help="If CKPT is a folder of several: use the last step.",
        ),
        click.Option(
            ["--step"],
            metavar="N",
            type=click.IntRange(min=0),
            is_eager=True,
            expose_value=False,
            callback=_remember,
            help="If CKPT is a folder of several: use this step.",
        ),
        click.Option(
            ["--allow-global"],
            multiple=True,
            metavar="NAME",
            help="Accept this class name in pickles; it is never imported or run.",
        ),
    ]


def as_json() -> click.Parameter:
    """--json, as ``json``."""
    return click.Option(["--json"], is_flag=True, help="One JSON object on stdout.")


def talk() -> list[click.Parameter]:
    """--quiet and --verbose: how much goes to stderr. No arguments."""
    return [
        click.Option(
            ["-v", "--verbose"],
            count=True,
            expose_value=False,
            callback=lambda ctx, _param, value: set_verbosity(ctx, value),
            help="Show the cause of an error; -vv shows tracebacks.",
        ),
        click.Option(
            ["-q", "--quiet"],
            is_flag=True,
            expose_value=False,
            callback=_remember,
            help="No notes and no progress on stderr.",
        ),
    ]


def checkpoint() -> click.Parameter:
    """The argument CKPT, as ``ckpt``."""
    return click.Argument(["ckpt"], metavar="CKPT", type=click.Path(), callback=of_step)


def checkpoints() -> click.Parameter:
    """The argument CKPT..., as ``ckpts``: one or more."""
    return click.Argument(
        ["ckpts"],
        metavar="CKPT...",
        nargs=-1,
        required=True,
        type=click.Path(),
        callback=of_step,
    )


def of_step(ctx: click.Context, param: click.Parameter, value: Given) -> Given:  # noqa: ARG001 (click's signature)
    """The paths of checkpoints that --latest or --step choose in those that were given."""
    latest, step = ctx.meta.get(_LATEST, False), ctx.meta.get(_STEP)
    if latest and step is not None:
        raise UsageError("--latest and --step cannot be used together.")
    if not value or ctx.resilient_parsing or not (latest or isinstance(step, int)):
        return value
    from ckpt_tools import formats  # late: most commands name their checkpoint

    wanted = step if isinstance(step, int) else None
    if isinstance(value, str):
        return formats.of_step(value, wanted)
    return tuple(formats.of_step(path, wanted) for path in value)


def _remember(ctx: click.Context, param: click.Parameter, value: object) -> None:
    """Keep the value of --quiet, and of --latest or --step for CKPT, which is read after them."""
    ctx.meta[f"ckpt_tools.{param.name}"] = value


def output() -> click.Parameter:
    """-o OUT, as ``out``."""
    return click.Option(
        ["-o", "--output", "out"],
        metavar="OUT",
        required=True,
        callback=_out,
        help="Output folder or file.",
    )


def _out(ctx: click.Context, param: click.Parameter, value: str) -> str:  # noqa: ARG001 (click's signature)
    """The output. Raises UsageError for the name of a file that this command does not write."""
    is_export = ctx.command.name == "export"
    name = value.lower()
    single = tuple(suffix for form in formats.targets("whole") for suffix in form.suffixes)
    if not name.endswith(_FOREIGN) and (is_export or not name.endswith(single)):
        return value
    suffix = name[name.rindex(".") :]
    usual = " or ".join(form.suffixes[0] for form in formats.targets("whole"))
    hint = f"Name a folder, or a file that ends in {usual}."
    if suffix == ".gguf":
        hint += (
            "\nllama.cpp's convert_hf_to_gguf.py makes GGUF of a folder exported with --hf-assets."
        )
    if not is_export:
        hint = "Name a folder. `ckpt-tools export` writes full tensors into one file."
    raise UsageError(
        f"{value}: {ctx.command.name} does not write {suffix} files.",
        hint=f"{hint}\nA / at the end makes a folder of this name.",
    )


def writing() -> list[click.Parameter]:
    """--dry-run, --force, --resume, --check, --jobs, --threads and --max-memory."""
    return [
        click.Option(["--dry-run"], is_flag=True, help="Plan and check, but write nothing."),
        click.Option(["--force"], is_flag=True, help="Replace an existing output."),
        click.Option(
            ["--resume"],
            is_flag=True,
            help="Continue the same command after it was interrupted: keep finished files, write "
            "the others. An output of one file starts again.",
        ),
        click.Option(
            ["--no-verify-source", "verify_source"],
            is_flag=True,
            flag_value=False,
            default=True,
            help="Do not compare what is copied with the source's own checksums.",
        ),
        click.Option(
            ["--check"],
            is_flag=True,
            help="Read the result back before it is renamed to OUT, compare it with the source, "
            "and check the source's own checksums.",
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
            default=None,
            show_default="by cores, files and bytes",
            help="Threads of each process.",
        ),
        click.Option(
            ["--max-memory"],
            metavar="SIZE",
            default=lambda: str(parallel.default_memory()),
            show_default="64MiB; 128MiB with 16 cores or more",
            callback=_size,
            help="Total memory of all buffers.",
        ),
    ]


def size(name: str, *, default: str, text: str) -> click.Parameter:
    """An option that takes an amount of bytes such as ``5GB`` or ``64MiB``."""
    return click.Option(
        [name], metavar="SIZE", default=default, show_default=True, callback=_size, help=text
    )


def _size(ctx: click.Context, param: click.Parameter, value: str) -> int:
    if value.strip().isdigit() and 0 < int(value) < _SMALLEST_BARE:
        raise click.BadParameter(
            f"{value} of what? Write {value}GB, {value}GiB or {value}MB.", ctx, param
        )
    try:
        return parse_size(value)
    except UsageError as error:
        raise click.BadParameter(f"{error.message} {error.hint or ''}", ctx, param) from error


def keep_rank_states() -> click.Parameter:
    """--keep-rank-states, as ``keep_rank_states``."""
    return click.Option(
        ["--keep-rank-states"],
        is_flag=True,
        help="Keep each rank's own data positions and random states even if the target has another "
        "number of ranks. By default they are then left out, with a note.",
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
    dtype = parse_dtype(value)
    if dtype is None or not dtype.holds_weights:
        raise click.BadParameter(
            f"{value!r} is not a floating type for weights; use keep, bf16, fp16 or fp32.",
            ctx,
            param,
        )
    return dtype


def examples(*lines: str) -> str:
    """The end of a command's help: examples, one a line, kept as they are."""
    return "\b\nExamples:\n" + "\n".join(f"  {line}" for line in lines)


_MAX_SHOWN = 5


def read(ckpt: str, options: ReadOptions) -> CheckpointIndex:
    """The index of a checkpoint; its notes go to stderr."""
    index = read_index(ckpt, options=options)
    for note in index.notes:
        say(note)
    return index


def choose(index: CheckpointIndex, chosen: Filters) -> CheckpointIndex:
    """The entries that the filters choose. Raises AnswerNo, with names that are near, for none."""
    if chosen.wants_all:
        return index
    try:
        return select(index, include=chosen.include, exclude=chosen.exclude, only=chosen.only)
    except AnswerNo as error:
        names = [name for text in chosen.include for name in near_names(index, text.strip("*"))]
        whole = whole_of(index)
        is_half = whole is not None and is_checkpoint(whole)
        if not names and is_half and error.instead is not None:
            ways = (Way(whole), *error.instead.ways)
            error.instead = error.instead._replace(ways=ways)
        if not names:
            raise
        raise AnswerNo(error.message, hint=_did_you_mean(names)) from error


def with_values(index: CheckpointIndex) -> CheckpointIndex:
    """The same index with the values of its plain objects read, of those that are small."""
    if not index.objects:
        return index
    with Files() as files:
        return open_objects(index, files, largest=SMALL_OBJECT)


def no_such_name(index: CheckpointIndex, fqn: str) -> AnswerNo:
    """The error for a name that the checkpoint does not have, with names that are near.

    Raises what is wrong when the name is lost.
    """
    if fqn in index.lost:
        index.select({fqn}).require_whole()
    names = near_names(index, fqn)
    hint = _did_you_mean(names) if names else "`ckpt-tools ls` lists all names."
    return AnswerNo(f"{index.root} has no entry {fqn!r}.", hint=hint)


def _did_you_mean(names: list[str]) -> str:
    return "Did you mean one of these?\n" + "\n".join(names[:_MAX_SHOWN])


def threads() -> click.Parameter:
    """-j, as ``threads``; None to choose by the machine and the work."""
    return click.Option(
        ["-j", "--threads"],
        metavar="N",
        type=click.IntRange(min=1),
        default=None,
        show_default="the cores this process may use, at most 16",
        help="Tensors or byte ranges to read at a time.",
    )


def number(value: complex | None) -> str:
    """A number in a few digits, ``-`` for none."""
    if value is None:
        return "-"
    if isinstance(value, int) and abs(value) < 10**12:
        return str(value)
    if isinstance(value, (int, float)):
        return f"{value:.4g}"
    return f"{value.real:.4g}{value.imag:+.4g}j"
