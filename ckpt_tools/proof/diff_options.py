"""How two checkpoints are compared: which names belong together, which values count as the same."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal, NamedTuple

from ckpt_tools.core.options import option, repeated
from ckpt_tools.errors import UsageError

Side = Literal["a", "b"]


class _Rename(NamedTuple):
    """A regular expression on names, and what its matches become; ``side`` None means both."""

    pattern: re.Pattern[str]
    replacement: str
    side: Side | None = None


def parse_rename(text: str) -> _Rename:
    """``PATTERN=NEW`` for both sides, or ``a:PATTERN=NEW`` and ``b:PATTERN=NEW`` for one.

    Raises UsageError when it is not of this form or the pattern cannot be read.
    """
    side: Side | None = None
    rest = text
    if text.startswith(("a:", "b:")):
        side, rest = ("a" if text[0] == "a" else "b"), text[2:]
    pattern, equals, replacement = rest.partition("=")
    if not equals or not pattern:
        raise UsageError(f"--rename {text!r} is not of the form [a:|b:]PATTERN=NEW.")
    try:
        compiled = re.compile(pattern)
        compiled.sub(replacement, "")
    except (re.error, IndexError) as error:
        raise UsageError(f"--rename {text!r} cannot be read: {error}.") from error
    return _Rename(compiled, replacement, side)


@dataclass(frozen=True, slots=True)
class DiffOptions:
    """How names are made comparable, and which values count as the same.

    Values are the same when they are at most ``atol + rtol * |b|`` apart; with both at zero they
    are compared bit by bit: a NaN's bits and a zero's sign count, too. With ``clean``, names are
    without containers and wrapper components, and those outside of the model begin with their
    section, as in ``optim:state.emb.weight.exp_avg``. Renames come after that, in order.
    """

    rtol: float = option(0.0, "--rtol", "Relative tolerance.", metavar="X", at_least=0)
    atol: float = option(0.0, "--atol", "Absolute tolerance.", metavar="X", at_least=0)
    ignore_dtypes: bool = option(
        False, "--ignore-dtypes", "Equal values of different types count as equal."
    )
    clean: bool = option(False, "--clean-names", "Compare names without containers and wrappers.")
    renames: tuple[_Rename, ...] = repeated(
        "--rename",
        "Change names before comparing. Repeatable.",
        metavar="[a:|b:]PATTERN=NEW",
        parse=parse_rename,
    )

    @property
    def is_bitwise(self) -> bool:
        """Whether bits are compared rather than values."""
        return self.rtol == 0.0 and self.atol == 0.0
