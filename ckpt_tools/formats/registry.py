"""Which formats there are, in which order they are asked, and what is asked of an index: that goes
to the formats that it is of.

Each format's own package knows the rest, and imports its modules when it is first asked.
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
from ckpt_tools.errors import UnreadableError, UsageError
from ckpt_tools.formats import dcp, rank_files, safetensors, torch_file
from ckpt_tools.formats.protocol import ChecksumPart, Format, Index, Writes
from ckpt_tools.storage.reader import Files

# In the order in which they are asked: a DCP directory may have .pt side files beside it.
FORMATS: list[Format] = [
    dcp.FORMAT,
    dcp.SAFETENSORS,
    rank_files.FORMAT,
    safetensors.FORMAT,
    torch_file.FORMAT,
    torch_file.FOLDER,
]
_ENDS = 8 << 10  # hold what torch writes around the elements of an item


def named(name: str) -> Format:
    """The format of this name, the first one of it. Raises UsageError when there is none."""
    for form in FORMATS:
        if form.name == name:
            return form
    known = ", ".join(dict.fromkeys(form.name for form in FORMATS))
    raise UsageError(f"Unknown format {name!r}.", hint=f"Formats are {known}.")


def targets(writes: Writes) -> list[Format]:
    """The formats that take whole tensors, or shards; the first one is the default."""
    return [form for form in FORMATS if form.writes == writes]


def checkpoint_files() -> tuple[str, ...]:
    """Globs of the names that files of checkpoints have: what --force may replace in a folder."""
    return tuple(glob for form in FORMATS for glob in form.files)


def index_files() -> tuple[str, ...]:
    """Suffixes of the files without which the others of a checkpoint cannot be read."""
    return tuple(end for form in FORMATS for end in form.index_files)


def rank_of(path: str) -> int | None:
    """The rank that wrote a file, as its name says in any format."""
    ranks = (form.rank_of(path) for form in FORMATS)
    return next((rank for rank in ranks if rank is not None), None)


def detect(path: str) -> Format | None:
    """The format of exactly this file or directory, or None; folders inside are not looked into."""
    return next((form for form in FORMATS if form.matches(path)), None)


# ------------------------------------------------------------------------------- asked of an index


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
    for form in _formats_of(index):
        index = form.locate(index, files)
    left = [
        UnreadableError(f"{entry.fqn}: no reader here knows {chunk.codec!r}.", about=[entry.fqn])
        for entry in index.tensors
        for chunk in entry.chunks[:1]
        if chunk.codec is not None and entry.fqn not in index.damaged
    ]
    return LocatedIndex(replace(index, problems=(*index.problems, *left)))


def located_in(
    source: CheckpointIndex, entries: Sequence[TensorEntry], files: Files
) -> Sequence[TensorEntry]:
    """Entries over chunks of this checkpoint, which are located now. Raises what keeps one from
    being used.
    """
    chunks = [chunk for entry in entries for chunk in entry.chunks]
    used = {data.path for chunk in chunks for data in (chunk.data, *chunk.replicas)}
    needed = tuple(file for file in source.files if file.path in used)
    located = locate(replace(to_locate_in(source), tensors=tuple(entries), files=needed), files)
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
