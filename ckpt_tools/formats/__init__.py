"""Checkpoints of any format: `find` reads the index at a path, and here each format does its part.

What other rooms ask of an index goes to the formats that it is of, which `registry` knows.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from ckpt_tools.core.index import (
    NO_TREE,
    CheckpointIndex,
    Chunk,
    LocatedIndex,
    ObjectEntry,
    TensorEntry,
)
from ckpt_tools.core.sizes import Sizes
from ckpt_tools.errors import UnreadableError
from ckpt_tools.formats.find import (
    checkpoints_in,
    is_checkpoint,
    of_step,
    read_index,
    read_written,
    run_of,
    steps_in,
)
from ckpt_tools.formats.options import ReadOptions
from ckpt_tools.formats.protocol import ChecksumPart, Format, Index, PlanOptions, Writes
from ckpt_tools.formats.registry import (
    FORMATS,
    checkpoint_files,
    detect,
    index_files,
    named,
    rank_of,
    targets,
)
from ckpt_tools.formats.runs import Saved
from ckpt_tools.storage.reader import Files

__all__ = [
    "FORMATS",
    "SMALL_OBJECT",
    "Format",
    "PlanOptions",
    "ReadOptions",
    "Saved",
    "Writes",
    "checkpoint_files",
    "checkpoints_in",
    "checksummed",
    "copyable_objects",
    "detect",
    "fetched_bytes",
    "index_files",
    "is_checkpoint",
    "locate",
    "locate_later",
    "located_in",
    "named",
    "object_digests",
    "of_step",
    "open_object",
    "open_objects",
    "rank_of",
    "read_index",
    "read_written",
    "run_of",
    "steps_in",
    "targets",
    "to_locate_in",
]


_ENDS = 8 << 10  # hold what torch writes around the elements of an item


def _formats_of(index: CheckpointIndex) -> list[Format]:
    """The format of an index; where parts were joined, also those that have entries in it."""
    main = named(index.format)
    codecs = {str(entry.codec) for entry in index.objects}
    codecs |= {str(chunk.codec) for entry in index.tensors for chunk in entry.chunks[:1]}
    others = codecs - main.codecs
    return [main, *(form for form in FORMATS if not form.codecs.isdisjoint(others))]


def locate(index: CheckpointIndex, files: Files) -> LocatedIndex:
    """The same index with every chunk as raw elements, each item checked against the index.

    What cannot be used becomes a problem of the index, named with the tensor.
    """
    wanted = index.tensors
    index = replace(index, tensors=tuple(map(_stored, wanted)))
    for form in _formats_of(index):
        index = form.locate(index, files)
    damaged = {fqn for problem in index.problems for fqn in problem.about}
    left = [
        UnreadableError(f"{entry.fqn}: no reader here knows {chunk.codec!r}.", about=[entry.fqn])
        for entry in index.tensors
        for chunk in entry.chunks[:1]
        if chunk.codec is not None and entry.fqn not in damaged
    ]
    tensors = tuple(map(_seen, wanted, index.tensors))
    return LocatedIndex(replace(index, tensors=tensors, problems=(*index.problems, *left)))


def _has_views(entry: TensorEntry) -> bool:
    return entry.grid is None and any(chunk.of is not None for chunk in entry.chunks)


def _stored(entry: TensorEntry) -> TensorEntry:
    """The entry with the chunks that its own are views of, each once."""
    if not _has_views(entry):
        return entry
    chunks = {id(chunk.stored): chunk.stored for chunk in entry.chunks}
    return replace(entry, chunks=tuple(chunks.values()))


def _seen(entry: TensorEntry, located: TensorEntry) -> TensorEntry:
    """The entry with its views of what `_stored` gave, now that this is located."""
    if not _has_views(entry):
        return located
    ids = dict.fromkeys(id(chunk.stored) for chunk in entry.chunks)
    found = {one: located.chunks[at] for at, one in enumerate(ids)}
    chunks = []
    for chunk in entry.chunks:
        stored = found[id(chunk.stored)]
        if chunk.of is not None:  # what could not be located has a problem now
            is_there = stored.codec is None
            stored = chunk.seen_in(stored, itemsize=entry.dtype.itemsize) if is_there else chunk
        chunks.append(stored)
    return replace(entry, chunks=tuple(chunks))


def located_in(
    source: CheckpointIndex, entries: Sequence[TensorEntry], files: Files
) -> Sequence[TensorEntry]:
    """Entries over chunks of this checkpoint, which are located now. Raises what keeps one from
    being used.
    """
    chunks = [chunk for entry in entries for chunk in entry.chunks]
    used = {data.path for chunk in chunks for data in (chunk.data, *chunk.replicas)}
    needed = tuple(file for file in source.files if file.path in used)
    index = replace(to_locate_in(source), tensors=tuple(entries), files=needed)
    located = locate(index, files)
    located.require_whole()
    return located.tensors


def fetched_bytes(chunk: Chunk, sizes: Sizes) -> int:
    """Bytes that `locate` fetches of a chunk in a store: all of a small item, the ends of others,
    nothing of raw elements.
    """
    stored = chunk.stored
    if stored.codec is None:
        return 0
    return stored.data.length if stored.data.length <= sizes.fetched_gap else _ENDS


def locate_later(index: CheckpointIndex, _files: Files) -> CheckpointIndex:
    """The same index, for a plan whose chunks workers locate when they read them; opens no file.

    Flaws of objects become problems here as there.
    """
    from ckpt_tools.formats.torch_file.locate import flaws

    return replace(index, problems=(*index.problems, *flaws(index.objects)))


def to_locate_in(index: CheckpointIndex) -> CheckpointIndex:
    """The same index without entries, to locate some of its chunks in; one object of each codec is
    kept, since it says which formats the chunks are of.
    """
    kinds = {entry.codec: replace(entry, flaw=None) for entry in index.objects}
    objects = tuple(kinds.values())
    return replace(index, tensors=(), objects=objects, problems=(), ties=(), tree=NO_TREE)


# What is looked at: a plain value is small, a pickled tokenizer or dataloader is not.
SMALL_OBJECT = 1 << 20


def open_objects(index: Index, files: Files, *, largest: int | None = None) -> Index:
    """The same index with the values of its plain objects, and with the tensors of tuples that a
    format keeps as objects.

    Other objects of more than ``largest`` bytes stay closed, where they have bytes of their own.
    Raises UnsafePickleError when an object asks for a global that could run code.
    """
    if all(entry.opened or entry.codec is None for entry in index.objects):
        return index
    for form in _formats_of(index):
        index = form.open_objects(index, files, largest=largest)
    return index


def open_object(index: CheckpointIndex, entry: ObjectEntry, files: Files) -> ObjectEntry:
    """One object of the index with its value, when it is plain; a tuple with tensors is not."""
    opened = open_objects(replace(index, tensors=(), objects=(entry,)), files)
    return opened.object(entry.fqn) or replace(entry, type_name="tuple or list with tensors")


def copyable_objects(index: Index, files: Files) -> Index:
    """The same index with every object that has bytes of its own, and no value that was read, as
    bytes that a writer can copy.
    """
    if all(entry.is_writable or entry.codec is None for entry in index.objects):
        return index
    for form in _formats_of(index):
        index = form.copyable_objects(index, files)
    return index


def object_digests(entry: ObjectEntry, files: Files) -> Mapping[str, bytes] | None:
    """SHA-256 of the bytes that make up an unopened object: equal bytes are equal values."""
    if entry.codec is None:
        return None
    values = (form.object_digests(entry, files) for form in FORMATS)
    return next((one for one in values if one is not None), None)


def checksummed(index: CheckpointIndex, files: Files) -> Iterable[ChecksumPart]:
    """All byte ranges of a checkpoint that `verify` reads, with their checksums."""
    return _formats_of(index)[-1].checksummed(index, files)
