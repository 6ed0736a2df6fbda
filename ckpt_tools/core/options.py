"""How a field of a dataclass is given on a command line, said once, beside the field.

`cli.options` makes options of such fields, and the dataclasses of what was given. Callers from
Python need nothing of it: for them a field has a type and a default.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import Field, field
from typing import TYPE_CHECKING, Literal, NamedTuple, TypedDict, TypeVar

from ckpt_tools.errors import UsageError

if TYPE_CHECKING:
    from typing_extensions import Unpack  # of Python 3.11

# The headings of a command's help, in their order.
Heading = Literal[
    "Options",
    "Output",
    "Which entries",
    "Types and sizes",
    "Names",
    "Hugging Face folder",
    "LoRA",
    "Writing",
    "Other",
]
# Gives names of a checkpoint that fit the beginning of a word.
Completion = Callable[[str, str], list[str]]
T = TypeVar("T")
_KEY = "option"


class Option(NamedTuple):
    """``names`` are flags such as ``-o --output``, or the placeholder of an argument: ``CKPT``.

    ``typed`` is the default as text, where the help shows it so; ``shown`` says in words what
    happens without the option. In the help it stands ``after`` another one. ``own`` is for what may
    differ from rank to rank. ``parse`` makes the value of a text; None: it is a flag, a number or
    the text itself, as the field's type says.
    """

    names: str
    help: str | Callable[[], str] = ""
    metavar: str | None = None
    heading: Heading = "Options"
    after: str | None = None
    typed: str | Callable[[], str] | None = None
    shown: str | None = None
    at_least: int | None = None
    own: bool = False
    complete: Completion | None = None
    parse: Callable[[str], object] | None = None
    choices: tuple[str, ...] = ()
    repeated: bool = False

    @property
    def flag(self) -> str:
        """The longest of its names."""
        return max(self.names.split(), key=len)


class _Shown(TypedDict, total=False):
    """How an option of any kind stands in the help, and who else may say it: fields of `Option`."""

    metavar: str
    heading: Heading
    after: str
    shown: str
    at_least: int
    own: bool
    complete: Completion


def option(
    default: T,
    names: str,
    text: str = "",
    *,
    typed: str | Callable[[], str] | None = None,
    parse: Callable[[str], T] | None = None,
    choices: Mapping[str, T] | Sequence[T] = (),
    **shown: Unpack[_Shown],
) -> T:
    """A field with a default; a flag turns it over.

    A ValueError of ``parse`` is reported with the option's name, a UsageError as it is.
    """
    named = choices if isinstance(choices, Mapping) else {str(one): one for one in choices}
    typed = next((text for text, value in named.items() if value == default), typed)
    parse = named.__getitem__ if named else parse
    described = Option(names, text, typed=typed, parse=parse, choices=tuple(named), **shown)
    return field(default=default, metadata={_KEY: described})


def repeated(
    names: str,
    text: str | Callable[[], str] = "",
    *,
    parse: Callable[[str], T],
    **shown: Unpack[_Shown],
) -> tuple[T, ...]:
    """A field of all values that are given, none by default."""
    described = Option(names, text, parse=parse, repeated=True, **shown)
    return field(default=(), metadata={_KEY: described})


def required(
    names: str, text: str = "", *, parse: Callable[[str], T], **shown: Unpack[_Shown]
) -> T:
    """A field without a default."""
    made: T = field(metadata={_KEY: Option(names, text, parse=parse, **shown)})
    return made


def option_of(described: Field[object]) -> Option | None:
    """The option of a field; None for what no command line gives."""
    found = described.metadata.get(_KEY)
    return found if isinstance(found, Option) else None


def only_one_of(given: Mapping[str, bool]) -> None:
    """Raise UsageError when more than one of these options is given."""
    flags = [flag for flag, is_given in given.items() if is_given]
    if len(flags) > 1:
        raise UsageError(f"{' and '.join(flags)} cannot be used together.")
