"""Objects among the items of a DCP directory: their values, and the tensors inside of some.

torch pickles a tuple as one item whatever it holds, and so do other tools with other containers.
`open_containers` finds those that hold tensors, and gives each tensor and value its own entry.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import suppress
from dataclasses import replace

from ckpt_tools.core.dtypes import dtype_named
from ckpt_tools.core.geometry import Box
from ckpt_tools.core.index import (
    ByteRange,
    CheckpointIndex,
    Entry,
    ObjectEntry,
    PackedObject,
    TensorEntry,
)
from ckpt_tools.core.state_tree import Branch
from ckpt_tools.errors import CheckpointError, IncompleteError, UnsafePickleError, UnsupportedError
from ckpt_tools.formats.dcp.items import (
    ARCHIVES,
    TORCH_SAVE,
    ZSTD,
    archive_of_object,
    fetched,
    unpacked,
)
from ckpt_tools.formats.pickle import load as pickles
from ckpt_tools.formats.pickle.nodes import Opaque
from ckpt_tools.formats.pickle.stored import StoredTensor
from ckpt_tools.formats.protocol import Index, is_there, lengths_of
from ckpt_tools.formats.torch_file.locate import resolved
from ckpt_tools.formats.zip import read as torch_zip
from ckpt_tools.storage.reader import Files

# What is compressed is inflated in memory.
_MAX_INFLATED = 1 << 20
# The pickle of a hundred thousand tensors in one tuple.
_MAX_TREE = 64 << 20
# The directory of an archive is at its end.
_RECORDS = b"/data/"
_END = 4 << 10


def open_containers(index: Index, files: Files) -> Index:
    """The same index with the tensors and values of items that are containers of tensors.

    Such an item becomes a container in the tree, with an entry for each tensor and value in it, of
    the item's section; `CheckpointIndex.packed` keeps the item. One that is damaged gets a flaw.
    What could run code, and what is of an unknown class, stays one object.
    """
    containers: dict[str, tuple[list[Entry], Branch[str]]] = {}
    damaged: dict[str, CheckpointError] = {}
    for entry in _with_records(index, files):
        try:
            # Not for what could run code, nor without the package that inflates it.
            with suppress(UnsafePickleError, UnsupportedError):
                container = _container(entry, files, allow=index.allowed)
                if container is not None:
                    containers[entry.fqn] = container
        except CheckpointError as error:
            damaged[entry.fqn] = error
    if not containers and not damaged:
        return index
    entries: list[Entry] = [*index.tensors]
    packed = [*index.packed]
    for entry in index.objects:
        container = containers.get(entry.fqn)
        if container is None:
            entries.append(replace(entry, flaw=damaged.get(entry.fqn, entry.flaw)))
            continue
        inside, tree = container
        entries += inside
        packed.append(PackedObject(entry, frozenset(tree.leaves())))

    def part(fqn: str) -> str | Branch[str]:
        return containers[fqn][1] if fqn in containers else fqn

    return replace(index.holding(entries), packed=tuple(packed), tree=index.nesting.map(part))


def open_objects(index: Index, files: Files, *, largest: int | None = None) -> Index:
    """The same index with the values of its plain objects, and with what containers hold.

    Items of more than ``largest`` bytes stay closed, unless they are containers of tensors.

    Raises UnsafePickleError when objects ask for a global that could run code; it is about all of
    them.
    """
    had_flaws = {entry.fqn for entry in index.objects if entry.flaw is not None}
    index = open_containers(index, files)
    for entry in index.objects:
        if entry.flaw is not None and entry.fqn not in had_flaws:
            raise entry.flaw  # problems were asked for when it was read: a copy would lack it
    objects: list[ObjectEntry] = []
    unsafe: dict[str, UnsafePickleError] = {}
    for entry in index.objects:
        try:
            is_small = largest is None or entry.data.length <= largest
            objects.append(opened(entry, files, allow=index.allowed) if is_small else entry)
        except UnsafePickleError as error:
            unsafe[entry.fqn] = error
    for first in unsafe.values():
        raise first.concerning(unsafe)
    return replace(index, objects=tuple(objects))


def _with_records(index: CheckpointIndex, files: Files) -> Iterator[ObjectEntry]:
    """The items whose archives have a record of a storage, or may have: the end is damaged."""
    lengths = lengths_of(index)
    there = [
        entry
        for entry in index.objects
        if entry.codec in ARCHIVES
        and not entry.opened
        and entry.flaw is None
        and entry.fqn not in index.damaged
        and is_there(entry.data, lengths)
    ]
    archives = sorted((e for e in there if e.codec == TORCH_SAVE), key=lambda entry: entry.data)
    ends = {entry.fqn: torch_zip.ends_of(entry.data, _END)[1] for entry in archives}
    said_later = (CheckpointError,)  # when they are opened
    for entry in fetched(archives, lambda e: [ends[e.fqn]], files, spared=said_later):
        end = b""
        with suppress(*said_later):
            end = files.read(*ends[entry.fqn])
        # Names stand in the directory as they are. torch's own ".data/…" has a dot before it.
        if _RECORDS in end or b"PK\x05\x06" not in end:
            yield entry
    yield from (entry for entry in there if entry.codec == ZSTD)


def opened(entry: ObjectEntry, files: Files, *, allow: Collection[str] = ()) -> ObjectEntry:
    """The same object with its value when that is plain, else with the name of its type."""
    if entry.opened or entry.codec is None or entry.flaw is not None:
        return entry
    if entry.codec != TORCH_SAVE and entry.data.length > _MAX_INFLATED:
        return entry  # it would be inflated to be looked at
    archive = archive_of_object(entry, files)
    value = pickles.load_plain(archive.read("data.pkl"), where=archive.where, allow=allow)
    if not isinstance(value, Opaque):
        return replace(entry, value=value, opened=True)
    return replace(entry, type_name=value.qualname)


def _container(
    entry: ObjectEntry, files: Files, *, allow: Collection[str]
) -> tuple[list[Entry], Branch[str]] | None:
    """What is in an item with tensors, and its own containers with their names.

    None where it is no container, or has what cannot be read. Raises IncompleteError where it has
    one rank's shards of tensors.
    """
    from ckpt_tools.formats.pickle.state_dict import flatten_at  # late: few directories have such
    from ckpt_tools.formats.torch_file.open import chunk_of

    archive = archive_of_object(entry, files)
    if not any(name.startswith("data/") for name in archive.names):
        return None
    data = archive.record("data.pkl")
    if data.length > _MAX_TREE:
        return None
    value = pickles.load_tensors(archive.read("data.pkl"), where=archive.where, allow=allow)
    state = flatten_at(value, where=archive.where, fqn=entry.fqn, path=entry.path)
    if state is None or not state.tensors or any(leaf.flaw for leaf in state.objects):
        return None
    path = unpacked(files, entry.data, str(entry.codec)).path
    pickle = ByteRange(path, data.offset, data.length)
    entries: list[Entry] = [leaf.entry(entry.section, pickle) for leaf in state.objects]
    if any(leaf.stored.local.shape != leaf.stored.shape for leaf in state.tensors):
        raise IncompleteError(
            "torch wrote it as one pickle with one rank's shards, and those of the other ranks "
            "were never written.",
            hint="Save again with a list or a dict in place of the tuple.",
        )
    for leaf in state.tensors:
        if not isinstance(leaf.stored, StoredTensor):
            return None
        record = archive.record(f"data/{leaf.stored.storage.key}")
        dtype, shape = dtype_named(leaf.stored.dtype), leaf.stored.shape
        chunk = chunk_of(Box.whole(shape), leaf.stored, record, path)
        if chunk.codec is not None:
            chunk = resolved(chunk, dtype, files)
        entries.append(TensorEntry(leaf.fqn, leaf.path, entry.section, dtype, shape, (chunk,)))
    torch_zip.require_little_endian(archive)
    return entries, state.tree


def copyable_objects(index: Index, files: Files) -> Index:
    """The same index with objects as archives of torch.save, those that are packed inflated.

    Raises UnreadableError for an archive that cannot be opened: its copy would be as damaged.
    """
    said_later = (CheckpointError,)
    found = fetched(
        index.objects, lambda one: torch_zip.ends_of(one.data), files, spared=said_later
    )
    objects = []
    for one in found:
        entry = one
        if one.codec == ZSTD and not one.is_writable:
            entry = replace(one, data=unpacked(files, one.data, ZSTD), codec=TORCH_SAVE)
        if entry.codec == TORCH_SAVE:
            try:
                archive_of_object(entry, files).read("data.pkl")
            except CheckpointError as error:
                raise error.concerning((entry.fqn,)) from error
        objects.append(entry)
    return replace(index, objects=tuple(objects))


def object_digests(entry: ObjectEntry, files: Files) -> dict[str, bytes] | None:
    """The SHA-256 of each record of an object's archive that makes up its value."""
    if entry.codec not in ARCHIVES:
        return None
    try:
        archive = archive_of_object(entry, files)
        names = [name for name in archive.names if name == "data.pkl" or name.startswith("data/")]
        return {name: archive.digest(name) for name in names}
    except CheckpointError as error:
        raise error.concerning((entry.fqn,)) from error
