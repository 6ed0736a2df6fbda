"""Which entries of two checkpoints belong together, by name. Headers only; no file is opened."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from ckpt_tools.core.index import CheckpointIndex
from ckpt_tools.errors import UsageError
from ckpt_tools.proof.inside import Inside, names_inside

Side = Literal["a", "b"]


class Rename(NamedTuple):
    """A regular expression on names, and what its matches become; ``side`` None means both."""

    pattern: re.Pattern[str]
    replacement: str
    side: Side | None = None


@dataclass(frozen=True, slots=True)
class Naming:
    """How names are made comparable: with ``clean``, without containers and wrapper components.

    Renames come after that, in order. Clean names outside of the model begin with their section,
    as in ``optim:state.emb.weight.exp_avg``.
    """

    clean: bool = False
    renames: tuple[Rename, ...] = ()


def parse_rename(text: str) -> Rename:
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
    return Rename(compiled, replacement, side)


class Pairs(NamedTuple):
    """Names on both sides, and on one only; each name with what it is called there."""

    both: dict[str, tuple[str, str]]
    only_a: dict[str, str]
    only_b: dict[str, str]


def pair(a: CheckpointIndex, b: CheckpointIndex, naming: Naming) -> Pairs:
    """Match the tensors and objects of two checkpoints; values of the result are raw names.

    Raises UsageError when two names of one side become one.
    """
    here, there = _names(a, naming, "a"), _names(b, naming, "b")
    return Pairs(
        both={name: (fqn, there[name]) for name, fqn in here.items() if name in there},
        only_a={name: fqn for name, fqn in here.items() if name not in there},
        only_b={name: fqn for name, fqn in there.items() if name not in here},
    )


def _names(index: CheckpointIndex, naming: Naming, side: Side) -> dict[str, str]:
    """The comparable name of each entry of one side, sorted, with its raw name."""
    rename = _renamer([r for r in naming.renames if r.side in (None, side)])
    fqns = [entry.fqn for entry in index.tensors] + [entry.fqn for entry in index.objects]
    inside = names_inside(index) if naming.clean else {}
    found: dict[str, str] = {}
    for fqn in fqns:
        place = inside.get(fqn, Inside("model", fqn))
        name = rename(place.name)
        if place.section != "model":
            name = f"{place.section}:{name}"
        other = found.setdefault(name, fqn)
        if other != fqn:
            raise UsageError(f"{index.root}: {other} and {fqn} would both be called {name}.")
    return dict(sorted(found.items()))


def _renamer(renames: Sequence[Rename]) -> Callable[[str], str]:
    def rename(name: str) -> str:
        for one in renames:
            name = one.pattern.sub(one.replacement, name)
        return name

    return rename
