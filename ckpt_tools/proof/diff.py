"""What is different between two checkpoints of any formats and meshes.

`pair` matches entries by name, renamed and cleaned. Then names, types and shapes are compared from
headers, objects by value, tensors by their elements. A difference in one entry never hides another.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from operator import itemgetter
from typing import TYPE_CHECKING, Literal, NamedTuple

from ckpt_tools import formats
from ckpt_tools.copying.origin import reads_one_save
from ckpt_tools.copying.read import first_difference
from ckpt_tools.core.geometry import Box
from ckpt_tools.core.index import CheckpointIndex, Entry, LocatedIndex, ObjectEntry, TensorEntry
from ckpt_tools.core.options import option, repeated
from ckpt_tools.core.progress import Tally, ignore_bytes
from ckpt_tools.errors import UsageError
from ckpt_tools.proof.canonical_names import Inside, canonical_names
from ckpt_tools.proof.containers import compare_containers, compare_objects
from ckpt_tools.proof.threads import in_threads
from ckpt_tools.proof.tolerance import Tolerance
from ckpt_tools.storage.reader import Files

if TYPE_CHECKING:
    from ckpt_tools.proof.deltas import Delta

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


class Pairs(NamedTuple):
    """The entries that both sides have, and those of one side only, by their comparable names."""

    both: dict[str, tuple[Entry, Entry]]
    only_a: dict[str, Entry]
    only_b: dict[str, Entry]


def pair(a: CheckpointIndex, b: CheckpointIndex, naming: Naming) -> Pairs:
    """Match the tensors and objects of two checkpoints.

    Raises UsageError when two names of one side become one.
    """
    here, there = _names(a, naming, "a"), _names(b, naming, "b")
    return Pairs(
        both={name: (entry, there[name]) for name, entry in here.items() if name in there},
        only_a={name: entry for name, entry in here.items() if name not in there},
        only_b={name: entry for name, entry in there.items() if name not in here},
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


Status = Literal[
    "same", "only a", "only b", "kind", "dtype", "shape", "values", "unknown", "container"
]


class EntryDiff(NamedTuple):
    """One name and the result of comparing it; ``container`` is of a dict, a list or a tuple.

    ``a`` and ``b`` say in words what is on each side. ``unknown`` means that it could not be
    compared, which is never the same as being equal. ``delta`` is there when values were compared
    and are not bit for bit the same.
    """

    name: str
    status: Status
    a: str | None
    b: str | None
    detail: str = ""
    delta: Delta | None = None


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

    ``containers`` are those that both sides have, None when containers were not compared: names
    were changed, or one side has none.
    """

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


def diff_headers(a: CheckpointIndex, b: CheckpointIndex, *, naming: Naming) -> Diff:
    """Compare names, types and shapes; nothing but headers is read, and no values are compared."""
    pairs = pair(a, b, naming)
    headers = (_header(name, *both) for name, both in pairs.both.items())
    entries = [*_one_sided(pairs), *headers]
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
    here, there = _opened(a, files, largest), _opened(b, files, largest)
    pairs = pair(here, there, options.naming)
    tally = Tally(on_bytes)

    def values(pair: _TensorPair) -> EntryDiff:
        header, whole = _header(*pair), Box.whole(pair.a.shape)
        if header.status not in ("same", "dtype"):
            return header
        if header.status == "same":
            differing = first_difference(
                *(pair.a, pair.b, whole), files=files, on_bytes=lambda count: tally.add(2 * count)
            )
            if differing is None:
                return header
        found_delta = delta(pair.a, pair.b, files, tolerance=options.tolerance)
        return _with_delta(header, found_delta, options)

    tensors: list[_TensorPair] = []
    others: list[tuple[str, Entry, Entry]] = []
    for name, (one, other) in pairs.both.items():
        if isinstance(one, TensorEntry) and isinstance(other, TensorEntry):
            tensors.append(_TensorPair(name, one, other))
        else:
            others.append((name, one, other))
    entries = [
        *_one_sided(pairs),
        *in_threads(
            values, tensors, files.sizes, threads=threads, nbytes=lambda pair: pair.a.nbytes
        ),
        *(_object(name, one, other, files) for name, one, other in others),
    ]
    return _diff(pairs, entries, sides=(here, there), naming=options.naming, values_compared=True)


class _TensorPair(NamedTuple):
    """A name with the tensors of both sides."""

    name: str
    a: TensorEntry
    b: TensorEntry


def _opened(index: CheckpointIndex, files: Files, largest: int | None) -> LocatedIndex:
    located = formats.locate(index, files)
    located.require_chosen()
    return formats.open_objects(located, files, largest=largest)


def _one_sided(pairs: Pairs) -> Iterator[EntryDiff]:
    for name, entry in pairs.only_a.items():
        yield EntryDiff(name, "only a", _words(entry), None)
    for name, entry in pairs.only_b.items():
        yield EntryDiff(name, "only b", None, _words(entry))


def _words(entry: Entry) -> str:
    if isinstance(entry, TensorEntry):
        return f"{entry.dtype.name} {list(entry.shape)}"
    return f"object {entry.value!r}" if entry.opened else f"object ({entry.type_name or 'closed'})"


def _header(name: str, one: Entry, other: Entry) -> EntryDiff:
    """A pair compared by its headers."""
    same = EntryDiff(name, "same", _words(one), _words(other))
    if not isinstance(one, TensorEntry) or not isinstance(other, TensorEntry):
        objects = isinstance(one, ObjectEntry) and isinstance(other, ObjectEntry)
        return same if objects else same._replace(status="kind")
    if one.shape != other.shape:
        return same._replace(status="shape")
    return same if one.dtype == other.dtype else same._replace(status="dtype")


def _with_delta(header: EntryDiff, delta: Delta, options: DiffOptions) -> EntryDiff:
    if delta.differing:
        return header._replace(status="values" if header.status == "same" else "dtype", delta=delta)
    status: Status = "same" if options.ignore_dtypes else header.status
    return header._replace(status=status, delta=delta)


def _object(name: str, one: Entry, other: Entry, files: Files) -> EntryDiff:
    header = _header(name, one, other)
    if not isinstance(one, ObjectEntry) or not isinstance(other, ObjectEntry):
        return header
    verdict, detail = compare_objects(one, other, files)
    status: Status = "unknown" if verdict is None else "same" if verdict else "values"
    return header._replace(status=status, detail=detail)


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
    entries += [
        EntryDiff(one.name or "(all)", "container", one.a, one.b)
        for one in (containers.differing if containers is not None else ())
    ]
    return Diff(
        values_compared=values_compared,
        containers=None if containers is None else containers.count,
        tensors=len(pairs.both) - objects,
        objects=objects,
        same=sum(entry.status == "same" for entry in entries),
        entries=tuple(sorted(entries, key=lambda entry: entry.name)),
    )
