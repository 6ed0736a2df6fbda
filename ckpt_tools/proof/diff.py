"""What is different between two checkpoints of any formats and meshes.

Entries are matched by name, renamed and cleaned, and compared as in `pairs`, tensors by their
elements.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Literal, NamedTuple

from ckpt_tools import formats
from ckpt_tools.copying.origin import reads_one_save
from ckpt_tools.core.index import CheckpointIndex, Entry, ObjectEntry, TensorEntry
from ckpt_tools.core.options import option, repeated
from ckpt_tools.core.progress import Tally, ignore_bytes
from ckpt_tools.core.records import Json
from ckpt_tools.errors import UsageError
from ckpt_tools.proof.canonical_names import Inside, canonical_names
from ckpt_tools.proof.containers import compare_containers
from ckpt_tools.proof.pairs import (
    EntryDiff,
    Pairs,
    compare_headers,
    compare_pairs,
    equal_bits,
    pair,
    whole_and_located,
)
from ckpt_tools.proof.tolerance import Tolerance
from ckpt_tools.storage.reader import Files

Side = Literal["a", "b"]


class Rename(NamedTuple):
    """A regular expression on names, and what its matches become; ``side`` None means both."""

    pattern: re.Pattern[str]
    replacement: str
    side: Side | None = None


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


@dataclass(frozen=True, slots=True)
class Naming:
    """How names are made comparable: with ``clean``, without containers and wrapper components.

    Renames come after that, in order. Clean names outside of the model begin with their section,
    as in ``optim:state.emb.weight.exp_avg``.
    """

    clean: bool = option(
        False,
        "--clean-names",
        "Compare names without containers and wrappers.",
        after="--ignore-dtypes",
    )
    renames: tuple[Rename, ...] = repeated(
        "--rename",
        "Change names before comparing. Repeatable.",
        metavar="[a:|b:]PATTERN=NEW",
        after="--clean-names",
        parse=parse_rename,
    )


def _names(index: CheckpointIndex, naming: Naming, side: Side) -> dict[str, Entry]:
    """The entries of one side by their comparable names, sorted by these."""
    inside = canonical_names(index) if naming.clean else {}
    by_name: dict[str, Entry] = {}
    for entry in index.entries:
        section, name = inside.get(entry.fqn, Inside("model", entry.fqn))
        for rename in naming.renames:
            if rename.side in (None, side):
                name = rename.pattern.sub(rename.replacement, name)
        if section != "model":
            name = f"{section}:{name}"
        other = by_name.setdefault(name, entry)
        if other.fqn != entry.fqn:
            raise UsageError(
                f"{index.root}: {other.fqn} and {entry.fqn} would both be called {name}."
            )
    return dict(sorted(by_name.items(), key=itemgetter(0)))


@dataclass(frozen=True, slots=True)
class DiffOptions:
    """How to compare: names, values, and whether equal values of different types are the same."""

    naming: Naming = field(default_factory=Naming)
    tolerance: Tolerance = field(default_factory=Tolerance)
    ignore_dtypes: bool = option(
        False, "--ignore-dtypes", "Equal values of different types count as equal."
    )


@dataclass(frozen=True, slots=True)
class Diff:
    """The differences of two checkpoints, by name; ``same`` counts the entries that are equal.

    ``a`` and ``b`` are their paths. ``containers`` are those that both sides have, None when
    containers were not compared: names were changed, or one side has none.
    """

    a: str
    b: str
    values_compared: bool
    containers: int | None
    tensors: int
    objects: int
    same: int
    entries: tuple[EntryDiff, ...]

    @property
    def equal(self) -> bool:
        """Whether everything that was asked for was compared and is equal."""
        return self.tensors + self.objects > 0 and all(e.status == "same" for e in self.entries)

    def to_dict(self) -> dict[str, Json]:
        """The object of schema ckpt-tools/diff/1, which `diff --json` prints."""
        return {
            "schema": "ckpt-tools/diff/1",
            "a": self.a,
            "b": self.b,
            "equal": self.equal,
            "values_compared": self.values_compared,
            "tensors": self.tensors,
            "objects": self.objects,
            "containers": self.containers,
            "same": self.same,
            "differences": [one.to_dict() for one in self.entries if one.status != "same"],
        }


def diff_headers(a: CheckpointIndex, b: CheckpointIndex, *, naming: Naming) -> Diff:
    """Compare names, types and shapes; nothing but headers is read, and no values are compared."""
    pairs = _pairs(a, b, naming)
    entries = compare_headers(pairs)
    return _diff(pairs, entries, sides=(a, b), naming=naming, values_compared=False)


@reads_one_save
def diff(
    a: CheckpointIndex,
    b: CheckpointIndex,
    files: Files,
    *,
    options: DiffOptions,
    threads: int | None = None,
    on_bytes: Callable[[int], None] = ignore_bytes,
) -> Diff:
    """Compare two checkpoints, values included.

    Tensors are compared several at a time, in a few MiB of memory for each of ``threads``; where
    their bits differ, they are read again to tell by how much.

    Raises what keeps either from being whole, and UsageError when two names of one side become one.
    """
    from ckpt_tools.proof.deltas import delta  # numpy: headers do without it

    # Of one format, objects that are large are compared by their bytes.
    largest = formats.SMALL_OBJECT if a.format == b.format else None
    here, there = (
        formats.open_objects(whole_and_located(one, files), files, largest=largest)
        for one in (a, b)
    )
    pairs = _pairs(here, there, options.naming)
    tally = Tally(on_bytes)

    def values(header: EntryDiff, one: TensorEntry, other: TensorEntry) -> EntryDiff:
        if header.status == "same" and equal_bits(one, other, files, tally):
            return header
        found = delta(one, other, files, tolerance=options.tolerance)
        status = header.status
        if found.differing:
            status = "values" if status == "same" else "dtype"
        elif options.ignore_dtypes:
            status = "same"
        return header._replace(status=status, delta=found)

    entries = compare_pairs(pairs, values, files, threads=threads)
    return _diff(pairs, entries, sides=(here, there), naming=options.naming, values_compared=True)


def _pairs(a: CheckpointIndex, b: CheckpointIndex, naming: Naming) -> Pairs:
    """Match all entries. Raises UsageError when two names of one side become one."""
    return pair(_names(a, naming, "a"), _names(b, naming, "b"))


def _diff(
    pairs: Pairs,
    entries: list[EntryDiff],
    *,
    sides: tuple[CheckpointIndex, CheckpointIndex],
    naming: Naming,
    values_compared: bool,
) -> Diff:
    objects = sum(isinstance(one, ObjectEntry) for one, _ in pairs.both.values())
    containers = None if naming.clean or naming.renames else compare_containers(*sides)
    if containers is not None:
        entries += [
            EntryDiff(one.name or "(all)", "container", one.a, one.b)
            for one in containers.differing
        ]
    return Diff(
        a=sides[0].root,
        b=sides[1].root,
        values_compared=values_compared,
        containers=None if containers is None else containers.count,
        tensors=len(pairs.both) - objects,
        objects=objects,
        same=sum(entry.status == "same" for entry in entries),
        entries=tuple(sorted(entries, key=lambda entry: entry.name)),
    )
