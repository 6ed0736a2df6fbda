"""A checkpoint and its reference: what is not the same, by section and by name inside it.

The reference is a fingerprint or another checkpoint. Both are compared as in `diff` with clean
names; of a section that the reference lacks nothing is compared, so that a file of the model's
weights can be the reference of a whole checkpoint.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

from ckpt_tools import formats
from ckpt_tools.copying.origin import reads_one_save
from ckpt_tools.copying.parallel import Tally, ignore_bytes
from ckpt_tools.core.dtypes import BY_NAME, DType
from ckpt_tools.core.index import (
    SECTIONS,
    CheckpointIndex,
    Entry,
    LocatedIndex,
    Section,
    TensorEntry,
)
from ckpt_tools.proof.canonical_names import canonical_names
from ckpt_tools.proof.fingerprint import Fingerprint, digest_of
from ckpt_tools.proof.pairs import (
    CompareValues,
    EntryDiff,
    compare_entries,
    compare_objects_of,
    equal_bits,
    whole_and_located,
)
from ckpt_tools.storage.reader import Files

_SHOWN = 60  # characters of an object's value

Kind = Literal["missing", "extra", "dtype", "shape", "values", "object"]
# The tensors of each section by their names inside it.
_Sections = Mapping[Section, Mapping[str, Entry]]


class Difference(NamedTuple):
    """What is not the same about a tensor; a ``missing`` one is only in the reference.

    ``found`` and ``expected`` are type and shape or, where values differ, digests. An ``object``
    is no tensor: its value is another one, or it is on one side only.
    """

    section: Section
    name: str
    what: Kind
    found: str | None
    expected: str | None


@dataclass(frozen=True, slots=True)
class Comparison:
    """Which sections were compared, and what differs; ``extra`` sections the reference lacks.

    ``absent`` ones are not here, and every tensor of theirs is a difference.
    ``casts`` counts the tensors that are the same after a cast, "float32 to bfloat16".
    """

    compared: tuple[Section, ...]
    extra: tuple[Section, ...]
    absent: tuple[Section, ...]
    differences: tuple[Difference, ...]
    casts: Mapping[str, int] = field(default_factory=dict)

    @property
    def same(self) -> bool:
        """Whether something was compared and all of it is the same."""
        return bool(self.compared) and not self.differences


@reads_one_save
def compare(
    index: CheckpointIndex,
    reference: Fingerprint,
    files: Files,
    *,
    threads: int | None = None,
    on_bytes: Callable[[int], None] = ignore_bytes,
) -> Comparison:
    """Compare a checkpoint with its fingerprint; ``on_bytes`` gets the number of bytes read.

    Raises what keeps the checkpoint from being whole, and UnsupportedError when two names are one.
    """
    here, tally = whole_and_located(index, files), Tally(on_bytes)
    digests = {tensor.fqn: tensor.sha256 for tensor in reference.tensors}

    def values(header: EntryDiff, one: TensorEntry, other: TensorEntry) -> EntryDiff:
        if header.status == "dtype":
            return header
        found, expected = digest_of(one, files, on_bytes=tally.add), digests[other.fqn]
        if found == expected:
            return header
        return header._replace(status="values", a=found, b=expected)

    theirs: dict[Section, dict[str, Entry]] = {s: {} for s in SECTIONS if s in reference.sections}
    for one in reference.tensors:
        dtype = BY_NAME.get(one.dtype) or DType(one.dtype, None, 8, "raw")
        section, name = one.inside
        theirs[section][name] = TensorEntry(one.fqn, (one.fqn,), section, dtype, one.shape, ())
    return _compared(here, theirs, values, files, threads=threads)


@reads_one_save
def compare_checkpoints(
    index: CheckpointIndex,
    reference: CheckpointIndex,
    files: Files,
    *,
    cast: bool = False,
    threads: int | None = None,
    on_bytes: Callable[[int], None] = ignore_bytes,
) -> Comparison:
    """Compare two checkpoints; ``on_bytes`` gets the number of bytes read of both.

    With ``cast``, floating tensors of another type are the same when the reference's values, cast
    as `export` casts them, are.

    Formats and nestings keep objects differently: only those of checkpoints of one format, whose
    tensors have the same raw names, are compared. Objects that are not opened count when their
    names differ; their bytes may differ for equal values.

    Raises what keeps either from being whole, and UnsupportedError when two names are one.
    """
    here, there = whole_and_located(index, files), whole_and_located(reference, files)
    tally = Tally(on_bytes)
    casts: list[str] = []

    def values(header: EntryDiff, one: TensorEntry, other: TensorEntry) -> EntryDiff:
        if header.status == "dtype":
            if not cast or {one.dtype.kind, other.dtype.kind} != {"float"}:
                return header
            if not equal_bits(one, other, files, tally):
                return header._replace(status="values")
            casts.append(f"{other.dtype.name} to {one.dtype.name}")
            return header._replace(status="same")
        if equal_bits(one, other, files, tally):
            return header
        return header._replace(status="values", a=digest_of(one, files), b=digest_of(other, files))

    compared = _compared(here, _sections(there), values, files, threads=threads)
    compared = replace(compared, casts=Counter(sorted(casts)))
    names = [[entry.fqn for entry in one.tensors] for one in (here, there)]
    if here.format != there.format or names[0] != names[1]:
        return compared
    objects = _objects(index, reference, files)
    return replace(compared, differences=(*compared.differences, *objects))


def _compared(
    index: LocatedIndex,
    reference: _Sections,
    values: CompareValues,
    files: Files,
    *,
    threads: int | None,
) -> Comparison:
    """Compare the tensors of each section that the reference has."""
    mine = _sections(index)
    differences: list[Difference] = []
    for section, expected in reference.items():
        here = mine.get(section, {})
        differences += [
            Difference(section, one.name, _kind(one), one.a, one.b)
            for one in sorted(compare_entries(here, expected, values, files, threads=threads))
            if one.status != "same"
        ]
    extra = tuple(section for section in mine if section not in reference)
    absent = tuple(section for section in reference if section not in mine)
    return Comparison(tuple(reference), extra, absent, tuple(differences))


def _sections(index: CheckpointIndex) -> _Sections:
    sections: dict[Section, dict[str, Entry]] = {section: {} for section in SECTIONS}
    inside = canonical_names(index, index.tensors)
    for entry in index.tensors:
        sections[entry.section][inside[entry.fqn].name] = entry
    return {section: entries for section, entries in sections.items() if entries}


def _kind(one: EntryDiff) -> Kind:
    """What differs about a tensor: the type first, where the shape differs, too."""
    if one.a is None or one.b is None:
        return "missing" if one.a is None else "extra"
    if one.status == "values":
        return "values"
    types = {words.partition(" ")[0] for words in (one.a, one.b)}
    return "dtype" if len(types) > 1 else "shape"


def _objects(index: CheckpointIndex, reference: CheckpointIndex, files: Files) -> list[Difference]:
    """The objects that differ, or are on one side only."""
    here, there = (
        formats.open_objects(one, files, largest=formats.SMALL_OBJECT) for one in (index, reference)
    )
    differences = []
    for one in sorted(compare_objects_of(here, there, files)):
        if one.status in ("same", "unknown"):
            continue
        sides = [side.object(one.name) for side in (here, there)]
        if None in sides:
            found, expected = (None if entry is None else "there" for entry in sides)
        else:
            found, expected = (repr(entry.value)[:_SHOWN] for entry in sides if entry is not None)
        section = next(entry.section for entry in sides if entry is not None)
        differences.append(Difference(section, one.name, "object", found, expected))
    return differences
