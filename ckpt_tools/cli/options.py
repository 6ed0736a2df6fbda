"""Commands that take dataclasses: the options that fields describe, and the values given for them.

This is the one place where an option becomes a field. `Command` is the class of all commands:
guesses, and options under headings. Below are the fields that several commands share.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import MISSING, Field, fields, is_dataclass
from functools import cache, partial
from types import NoneType
from typing import TYPE_CHECKING, TypeVar, get_args, get_type_hints

import click

from ckpt_tools import formats
from ckpt_tools.cli import choosing, guesses
from ckpt_tools.cli.group import interruptible, set_patience, set_quiet, set_verbosity
from ckpt_tools.cli.render import cut_to, one_object
from ckpt_tools.core.dtypes import DType
from ckpt_tools.core.options import (
    Completion,
    Heading,
    Option,
    option,
    option_of,
    repeated,
    required,
)
from ckpt_tools.errors import CheckpointError, UsageError
from ckpt_tools.storage.waiting import PATIENCE

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

_GROUPED_FROM = 16  # options; fewer are read at a glance
_GLOB = "GLOB"  # what stands for a pattern of names in the help
# Suffixes that people may give to an output and that no command writes.
_FOREIGN = (".gguf", ".ggml", ".onnx", ".npz", ".h5", ".msgpack", ".pkl", ".zip", ".tar", ".json")
# Options of all commands: how long stores are waited for, and how much goes to stderr, from the
# moment on when they are read.
_OF_ALL = (
    click.Option(
        ["--store-timeout"],
        type=click.FloatRange(min=0, min_open=True),
        metavar="SECONDS",
        expose_value=False,
        callback=set_patience,
        show_default=f"{PATIENCE:g}",
        help="How long to retry a store that does not answer.",
    ),
    click.Option(
        ["-v", "--verbose"],
        count=True,
        expose_value=False,
        callback=set_verbosity,
        help="Show the cause of an error; -vv shows tracebacks.",
    ),
    click.Option(
        ["-q", "--quiet"],
        is_flag=True,
        expose_value=False,
        callback=set_quiet,
        help="No notes and no progress on stderr.",
    ),
)


class Command(click.Command):
    """A command that corrects guessed words, and prints its options under headings."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the arguments. Raises UsageError for guesses that have no meaning."""
        words = guesses.arguments(self, args)
        try:
            return super().parse_args(ctx, words)
        except click.NoSuchOption as error:
            raise guesses.no_option(self, error.option_name, ctx) or error from error
        except click.MissingParameter as error:
            _, _, first = (self.help or "").partition("Examples:\n")
            example = first.strip().partition("\n")[0]
            # Choices stand on lines of their own.
            missing = " ".join(error.format_message().split())
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
        with interruptible(), one_object(ctx, with_error=bool(ctx.params.get("json"))):
            try:
                answer: object = super().invoke(ctx)
            except CheckpointError as error:
                choosing.name_newest(error)
                raise
            return answer

    def headed(self, ctx: click.Context) -> dict[str, list[click.Option]]:
        """The options under their headings; a command of few options has one heading."""
        taken = [param for param in self.get_params(ctx) if isinstance(param, click.Option)]
        if len(taken) < _GROUPED_FROM:
            return {"Options": taken}
        groups: dict[str, list[click.Option]] = {heading: [] for heading in get_args(Heading)}
        for one in taken:
            groups[one.described.heading if isinstance(one, _Described) else "Other"].append(one)
        return {heading: options for heading, options in groups.items() if options}

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The options in the help."""
        for heading, taken in self.headed(ctx).items():
            records = [record for option in taken if (record := option.get_help_record(ctx))]
            with formatter.section(heading):
                formatter.write_dl(records)


Asked = TypeVar("Asked", bound="DataclassInstance")


def command(
    name: str,
    takes: type[Asked],
    *,
    help: str,  # noqa: A002 (click's word)
) -> Callable[[Callable[[Asked], None]], Command]:
    """A command whose function takes what was given, as the dataclass ``takes``."""

    def made(function: Callable[[Asked], None]) -> Command:
        def run(**given: object) -> None:
            function(_made(takes, given))

        return Command(name, callback=run, params=[*_placed(_params(takes)), *_OF_ALL], help=help)

    return made


def _params(takes: type[DataclassInstance]) -> list[click.Parameter]:
    """The options and arguments that the fields describe, those of dataclasses in it among them."""
    hints, params = get_type_hints(takes), list[click.Parameter]()
    usual: Heading = getattr(takes, "heading", "Options")  # of a class that has one for its fields
    for one in fields(takes):
        described, part = option_of(one), _part(hints[one.name])
        if described is None:
            params += [] if part is None else _params(part)
        elif _name(described) not in {param.name for param in params}:
            heading = usual if described.heading == "Options" else described.heading
            params.append(_param(described._replace(heading=heading), one, hints[one.name]))
    return params


def _placed(params: Sequence[click.Parameter]) -> list[click.Parameter]:
    """The same, each option after the one that its field names."""
    placed = [*params]
    for one in params:
        after = one.described.after if isinstance(one, _Described) else None
        for other in [other for other in placed if after in other.opts]:
            placed.remove(one)
            placed.insert(placed.index(other) + 1, one)
    return placed


@cache
def _part(hint: Hashable) -> type[DataclassInstance] | None:
    """The dataclass that a field holds, where the fields of that describe options."""
    if not isinstance(hint, type) or not is_dataclass(hint):
        return None
    own = any(map(option_of, fields(hint)))
    return hint if own or any(map(_part, get_type_hints(hint).values())) else None


def _made(takes: type[Asked], given: Mapping[str, object]) -> Asked:
    """The dataclass of what was given. Raises what the parsers of its fields raise."""
    hints, values = get_type_hints(takes), dict[str, object]()
    for one in fields(takes):
        described, part = option_of(one), _part(hints[one.name])
        if described is not None and given[_name(described)] is not None:
            values[one.name] = _value(described, given[_name(described)])
        elif described is None and part is not None:
            values[one.name] = _made(part, given)
    return takes(**values)  # click's own values: `_type` has seen to each


def _value(described: Option, given: object) -> object:
    """The value of what click gives. Raises what its parser raises."""
    if described.parse is None:
        return given
    try:
        if isinstance(given, tuple):
            return tuple(map(described.parse, given))
        return described.parse(str(given))
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint=described.names.split()) from error


def _name(described: Option) -> str:
    """What click calls it."""
    return described.flag.strip("-.[]").replace("-", "_").lower()


class _Described(click.Option):
    """An option of a field; its help may be made when it is shown."""

    described = Option("")

    def get_help_record(self, ctx: click.Context) -> tuple[str, str] | None:
        """The option's lines in the help."""
        text = self.described.help
        self.help = text if isinstance(text, str) else text()
        return super().get_help_record(ctx)


def _param(described: Option, field: Field[object], hint: object) -> click.Parameter:
    """The option or the argument of a field."""
    if not described.names.startswith("-"):
        is_required = field.default is MISSING or described.repeated
        named = partial(click.Argument, [_name(described)], metavar=described.names)
        argument = partial(named, required=is_required, nargs=-1 if described.repeated else 1)
        if described.complete is None:
            return argument(type=click.Path())
        return argument(shell_complete=partial(_completed, described.complete))
    make = partial(_Described, [*described.names.split(), _name(described)])
    if hint is bool:
        made = make(is_flag=True, flag_value=not field.default, default=field.default)
    else:
        make = partial(make, type=_type(described, hint), metavar=described.metavar)
        if described.metavar == _GLOB:
            make = partial(make, shell_complete=partial(_completed, choosing.names))
        if described.repeated:
            made = make(multiple=True)
        elif field.default is MISSING:
            made = make(required=True)
        else:
            default = described.typed if described.parse else field.default
            made = make(default=default, show_default=described.shown or bool(default))
    made.described = described
    return made


def _completed(
    complete: Completion, ctx: click.Context, _param: click.Parameter, incomplete: str
) -> list[str]:
    """What a shell is offered for a name in CKPT."""
    # click has not come to the arguments where an option lacks its value, as the one to complete.
    ckpt = ctx.params.get("ckpt") or next(iter(ctx.args), None)
    return complete(ckpt, incomplete) if isinstance(ckpt, str) else []


def _type(described: Option, hint: object) -> object:
    """The type that click has for a field. Raises TypeError where it makes no values of that."""
    if described.parse is not None:
        return click.Choice(described.choices) if described.choices else click.STRING
    least = described.at_least
    kinds: dict[object, object] = {
        str: click.STRING,
        int: click.IntRange(min=least),
        float: click.FLOAT if least is None else click.FloatRange(min=least),
    }
    for kind in {*get_args(hint)} - {NoneType} or {hint}:
        if kind not in kinds:
            raise TypeError(f"{described.flag}: nothing makes {hint} of a text.")
    return kinds[kind]


def texts(asked: DataclassInstance) -> dict[str, str]:
    """What all ranks of a job must have been given alike, by the flags."""
    found: dict[str, str] = {}
    for one in fields(asked):
        described, value = option_of(one), getattr(asked, one.name)
        if described is None and is_dataclass(value) and not isinstance(value, type):
            found |= texts(value)
        elif described is not None and not described.own and value not in (None, ()):
            found[described.flag] = _text(value)
    return found


def _text(value: object) -> str:
    if isinstance(value, tuple) and not isinstance(value, DType):
        return ", ".join(map(_text, value))
    return value.name if isinstance(value, DType) else str(value)


def ckpt() -> str:
    """The field of CKPT."""
    return required("CKPT", own=True, parse=str)


def ckpts() -> tuple[str, ...]:
    """The field of CKPT...: one or more."""
    return repeated("CKPT...", own=True, parse=str)


def as_json() -> bool:
    """The field of --json."""
    return option(False, "--json", "One JSON object on stdout.", heading="Other", own=True)


def output(verb: str) -> str:
    """The field of -o OUT, for the command that makes it."""
    return required(
        "-o --output",
        "Output folder or file.",
        metavar="OUT",
        heading="Output",
        parse=partial(_out, verb),
    )


def _out(verb: str, value: str) -> str:
    """The output. Raises UsageError for the name of a file that this command does not write."""
    is_export = verb != "reshard"
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
        f"{value}: {verb} does not write {suffix} files.",
        hint=f"{hint}\nA / at the end makes a folder of this name.",
    )


def examples(*lines: str) -> str:
    """The end of a command's help: examples, one a line, kept as they are."""
    return "\b\nExamples:\n" + "\n".join(f"  {line}" for line in lines)


def threads() -> int | None:
    """The field of -j; None to choose by the machine and the work."""
    return option(
        None,
        "-j --threads",
        "Tensors or byte ranges to read at a time.",
        metavar="N",
        at_least=1,
        shown="the cores this process may use, at most 16",
    )
