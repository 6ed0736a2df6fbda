"""What is different between two checkpoints of any formats and meshes.

Entries are matched by name, renamed and cleaned, and compared as in `pairs`, tensors by their
elements.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from operator import itemgetter

from ckpt_tools import formats
from ckpt_tools.copying.origin import reads_one_save
from ckpt_tools.copying.parallel import Tally, ignore_bytes
from ckpt_tools.core.index import CheckpointIndex, Entry, ObjectEntry, TensorEntry
from ckpt_tools.core.records import Json
from ckpt_tools.core.text import Shown, counted, first_of
from ckpt_tools.errors import CkptError, UsageError
from ckpt_tools.proof.canonical_names import Inside, canonical_names
from ckpt_tools.proof.containers import compare_containers
from ckpt_tools.proof.diff_options import DiffOptions, Side
from ckpt_tools.proof.pairs import (
    EntryDiff,
    compare_entries,
    compare_headers,
    equal_bits,
    whole_and_located,
)
from ckpt_tools.storage.reader import Files


def _names(index: CheckpointIndex, options: DiffOptions, side: Side) -> dict[str, Entry]:
    """The entries of one side by their comparable names, sorted by these. Raises UsageError."""
    inside = canonical_names(index) if options.clean else {}
    by_name: dict[str, Entry] = {}
    for entry in index.entries:
        section, name = inside.get(entry.fqn, Inside("model", entry.fqn))
        for rename in options.renames:
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


def fitting(a: CheckpointIndex, b: CheckpointIndex, options: DiffOptions) -> DiffOptions:
    """The options, with clean names where only these are on both sides."""
    names = [{entry.fqn for entry in side.tensors} for side in (a, b)]
    if options.clean or options.renames or not names[0].isdisjoint(names[1]):
        return options
    clean = replace(options, clean=True)
    try:
        here, there = _names(a, clean, "a"), _names(b, clean, "b")
    except CkptError:  # two names of one side would be one
        return options
    return options if here.keys().isdisjoint(there) else clean


@dataclass(frozen=True, slots=True, repr=False)
class Diff(Shown):
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

    def __str__(self) -> str:
        """Whether they are equal, and the first differences."""
        differing = [f"  {one.name}: {one.status}" for one in self.entries if one.status != "same"]
        entries = f"{counted(self.tensors, 'tensor')}, {counted(self.objects, 'object')}"
        verdict = "equal" if self.equal else f"{len(differing):,} differ"
        return "\n".join([f"{self.a} and {self.b}: {verdict}; {entries}", *first_of(differing, 12)])

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


def diff_headers(a: CheckpointIndex, b: CheckpointIndex, *, options: DiffOptions) -> Diff:
    """Compare names, types and shapes; nothing but headers is read, and no values are compared."""
    options = fitting(a, b, options)
    here, there = _names(a, options, "a"), _names(b, options, "b")
    entries = compare_headers(here, there)
    return _diff(here, there, entries, sides=(a, b), options=options, values_compared=False)


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

    options = fitting(a, b, options)
    # Of one format, objects that are large are compared by their bytes.
    largest = formats.SMALL_OBJECT if a.format == b.format else None
    here, there = (
        formats.open_objects(whole_and_located(one, files), files, largest=largest)
        for one in (a, b)
    )
    mine, theirs = _names(here, options, "a"), _names(there, options, "b")
    tally = Tally(on_bytes)

    def values(header: EntryDiff, one: TensorEntry, other: TensorEntry) -> EntryDiff:
        if header.status == "same" and equal_bits(one, other, files, tally):
            return header
        found = delta(one, other, files, options=options)
        status = header.status
        if found.differing:
            keeps = status == "dtype" and not options.ignore_dtypes
            status = "dtype" if keeps else "values"
        elif options.ignore_dtypes:
            status = "same"
        return header._replace(status=status, delta=found)

    entries = compare_entries(mine, theirs, values, files, threads=threads)
    return _diff(mine, theirs, entries, sides=(here, there), options=options, values_compared=True)


def _diff(
    a: Mapping[str, Entry],
    b: Mapping[str, Entry],
    entries: list[EntryDiff],
    *,
    sides: tuple[CheckpointIndex, CheckpointIndex],
    options: DiffOptions,
    values_compared: bool,
) -> Diff:
    both = [entry for name, entry in a.items() if name in b]
    objects = sum(isinstance(entry, ObjectEntry) for entry in both)
    kept = None if options.clean or options.renames else compare_containers(*sides)
    containers, others = kept or (None, [])
    entries += [one._replace(name=one.name or "(all)") for one in others]
    return Diff(
        a=sides[0].root,
        b=sides[1].root,
        values_compared=values_compared,
        containers=containers,
        tensors=len(both) - objects,
        objects=objects,
        same=sum(entry.status == "same" for entry in entries),
        entries=tuple(sorted(entries, key=lambda entry: entry.name)),
    )
