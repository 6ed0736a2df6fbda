"""Steps between what a checkpoint holds and what is written: each turns entries into other entries.

A step renames, cuts, joins or leaves out entries, as boxes over byte ranges; values that it has to
compute are `Works` to do before the files are written. No step is known by name here.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import NamedTuple

from ckpt_tools.core.index import ByteRange, CheckpointIndex, ObjectEntry, TensorEntry
from ckpt_tools.core.plan import FilePlan, Finder, WriteItem, object_entry_as_tensor
from ckpt_tools.errors import UsageError, unwritable
from ckpt_tools.storage import paths
from ckpt_tools.storage.reader import Files
from ckpt_tools.transforms.dtypes import DtypePolicy


class TransformedTensor(NamedTuple):
    """An entry to write, and the names in the source that its elements come from."""

    entry: TensorEntry
    origins: tuple[str, ...]

    def named(self, fqn: str) -> TransformedTensor:
        """The same tensor under another name, in no container."""
        return self._replace(entry=replace(self.entry, fqn=fqn, path=(fqn,)))


# What must be done once before tensors are read: each makes the file of this path, which their
# chunks point at. What it reads is located in the index. Each gives the names of tensors of which
# its cast made finite values infinite.
Works = Mapping[str, Callable[[Files, CheckpointIndex], Collection[str]]]


class TransformResult(NamedTuple):
    """What a step gives.

    ``notes`` are for people, ``files`` go into the output beside the tensors, ``works`` make
    bytes that the entries' chunks point at.
    """

    made: tuple[TransformedTensor, ...]
    notes: tuple[str, ...] = ()
    files: tuple[FilePlan, ...] = ()
    works: Works = MappingProxyType({})


Transform = Callable[[tuple[TransformedTensor, ...], Files, DtypePolicy], TransformResult]


def apply(
    steps: Sequence[Transform],
    made: tuple[TransformedTensor, ...],
    files: Files,
    types: DtypePolicy,
) -> TransformResult:
    """Apply the steps in order; their notes, files and works are collected.

    ``types`` are those in which the result will be written. Raises UsageError when two entries end
    with one name.
    """
    outcome = TransformResult(made)
    for step in steps:
        one = step(outcome.made, files, types)
        refuse_collisions(one.made)
        outcome = TransformResult(
            one.made,
            (*outcome.notes, *one.notes),
            (*outcome.files, *one.files),
            {**outcome.works, **one.works},
        )
    return outcome


def small_file(path: str, body: bytes) -> FilePlan:
    """A file of these bytes beside the tensors."""
    return FilePlan(path, len(body), ((0, body),), ())


def copied_file(path: str, source: str) -> FilePlan:
    """A file beside the tensors that is a copy of the file ``source``. Raises WriteError."""
    try:
        length = paths.size(source)
    except OSError as error:
        raise unwritable(source, error, doing="copied along") from error
    entry = object_entry_as_tensor(
        ObjectEntry(path, (path,), "other", ByteRange(source, 0, length))
    )
    box = entry.chunks[0].box
    item = WriteItem(path, path, 0, box, entry.dtype, entry.dtype, Finder(entry))
    return FilePlan(path, length, (), (item,) if length else ())


def refuse_collisions(
    made: Sequence[TransformedTensor],
    *,
    hint: str = "Change the renaming, or leave one out with --exclude.",
) -> None:
    """Raise UsageError, with where they came from, when two entries have one name."""
    first: dict[str, TransformedTensor] = {}
    for one in made:
        other = first.setdefault(one.entry.fqn, one)
        if other is not one:
            raise UsageError(
                f"{_some(other.origins)} and {_some(one.origins)} would both be called "
                f"{one.entry.fqn}.",
                hint=hint,
            )


def _some(origins: tuple[str, ...]) -> str:
    more = f" (and {len(origins) - 1} more)" if len(origins) > 1 else ""
    return f"{origins[0]}{more}" if origins else "a new tensor"
