"""What one item of a DCP data file is: the raw bytes of a chunk inside its own torch.save archive.

`locate` turns the items that a `.metadata` names into raw byte ranges, and checks what each item
says of itself against what `.metadata` says of it. torch 2.13 itself writes directories in which
the two disagree (FSDP2 over a tensor-parallel dimension that does not divide).

Items of one shape and type are equal but for their elements and checksums (`zip.archives`), so that
only the first is parsed, and others are recognised by their bytes (`Templates`).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import NamedTuple, TypeVar

from ckpt_tools.core.crc import StoredCrc
from ckpt_tools.core.index import ByteRange, CheckpointIndex, Chunk, ObjectEntry, TensorEntry
from ckpt_tools.errors import CheckpointError, UnreadableError, UnsafePickleError, UnsupportedError
from ckpt_tools.formats.pickle import load as pickles
from ckpt_tools.formats.pickle.nodes import shown
from ckpt_tools.formats.pickle.rebuild import RESAVE
from ckpt_tools.formats.pickle.stored import Stored, StoredTensor
from ckpt_tools.formats.protocol import Checksummed, ChecksumPart, is_there, lengths_of, plain_parts
from ckpt_tools.formats.torch_file.locate import SIGNS, located, resolved, strides_of
from ckpt_tools.formats.zip import read as torch_zip
from ckpt_tools.formats.zip.archives import MAX_FRAME, Archives, KnownArchives, parts_of_files
from ckpt_tools.storage.paths import is_address
from ckpt_tools.storage.reader import Files, Window, batches

TORCH_SAVE = "torch.save"
ZSTD = "zstd"
ARCHIVES = frozenset({TORCH_SAVE, ZSTD})

_CACHED_PICKLES = 4096
_AHEAD = 16 << 20
_NO_ARCHIVES = (".distcp", ".metadata")  # the former begins like one: with its first item
_MAX_WINDOW = 64 << 10
_Entry = TypeVar("_Entry", TensorEntry, ObjectEntry)
# The constructors that NamedTuple generates would take half a second of a million items.
_make = tuple.__new__


def locate(index: CheckpointIndex, files: Files) -> CheckpointIndex:
    """The same index with every chunk as raw little-endian elements.

    Items that cannot be used become problems of the index, so that one damaged item does not hide
    the others.
    """
    opener = _Opener(files, lengths_of(index))
    if not is_address(index.root):
        return located(index, opener.raw)
    # What fits into memory stays there until its elements are read.
    nbytes = sum(chunk.data.length for entry in index.tensors for chunk in entry.chunks)
    sizes = files.sizes
    whole = sizes.fetched if nbytes <= sizes.fetched else max(MAX_FRAME, sizes.fetched_gap)
    edges = partial(opener.edges, whole=whole)
    return located(index, opener.raw, entries=fetched(index.tensors, edges, files))


def fetched(
    entries: Iterable[_Entry],
    ranges: Callable[[_Entry], Iterable[ByteRange]],
    files: Files,
    *,
    spared: tuple[type[CheckpointError], ...] = (),
) -> Iterator[_Entry]:
    """The entries, each when these ranges of it are in memory, which are asked of a store together.

    It answers after tens of milliseconds: thousands of items asked for one by one are minutes.
    Raises what `Files.fetch` raises, but for ``spared`` errors.
    """
    wanted = ((entry, list(ranges(entry))) for entry in entries)
    most = files.sizes.fetched
    for batch in batches(wanted, lambda one: sum(part.length for part in one[1]), most):
        with suppress(*spared):
            files.fetch((part for _, parts in batch for part in parts), most=most)
        yield from (entry for entry, _ in batch)


class _Opener:
    """Opens items, remembering pickles: chunks of one shape have the same one, byte for byte."""

    def __init__(self, files: Files, lengths: Mapping[str, int]) -> None:
        self._files = files
        self._lengths = lengths
        self._crcs = files.crcs if any(map(is_address, lengths)) else None
        self._seen: dict[bytes, StoredTensor] = {}
        self._known: KnownArchives[_ItemContents] = KnownArchives()
        self._of_kinds: dict[Hashable, _ItemContents] = {}
        self._kinds_fetched = set[Hashable]()
        self._window = min(_MAX_WINDOW, max(MAX_FRAME, _AHEAD // max(1, len(lengths))))
        self._windows: dict[str, Window] = {}

    def edges(self, entry: TensorEntry, *, whole: int) -> Iterator[ByteRange]:
        """What stands around the elements of a tensor's items, and all of those of up to ``whole``
        bytes; of those that were read before, only of one of each kind.
        """
        for chunk in {id(one.stored): one.stored for one in entry.chunks}.values():
            path, offset, length = chunk.data
            kind = self._files.kinds.get(chunk.data)
            is_first = kind is None or kind not in self._kinds_fetched
            if chunk.codec is not None and is_there(chunk.data, self._lengths) and is_first:
                self._kinds_fetched.add(kind)
                if length <= whole:
                    yield chunk.data
                    continue
                yield ByteRange(path, offset, MAX_FRAME)
                yield ByteRange(path, offset + length - MAX_FRAME, MAX_FRAME)

    def raw(self, entry: TensorEntry, chunk: Chunk) -> Chunk:
        """The chunk as raw elements, checked against its own archive."""
        place = self._as_known(entry, chunk)
        if place is not None:
            return self._as_found(entry, chunk, chunk.data, place)
        if chunk.codec is None:
            return chunk
        if 0 in chunk.box.sizes and not is_there(chunk.data, self._lengths):
            return chunk._replace(data=chunk.data._replace(length=0), codec=None)
        if chunk.codec in SIGNS:
            return resolved(chunk, entry.dtype, self._files)
        item = unpacked(self._files, chunk.data, str(chunk.codec))
        return self._as_found(entry, chunk, item, self._read(entry, chunk, item))

    def _as_known(self, entry: TensorEntry, chunk: Chunk) -> _ItemContents | None:
        """What an item is, when it is like one that was read and as `.metadata` says."""
        if chunk.codec != TORCH_SAVE or not is_there(chunk.data, self._lengths):
            return None
        kind = self._files.kinds.get(chunk.data)
        place = None if kind is None else self._of_kinds.get(kind)
        place = place or self._found(chunk.data)
        if place is None:
            return None
        is_same = (place.stored.dtype, place.stored.shape) == (entry.dtype.name, chunk.box.sizes)
        return place if is_same else None

    def _found(self, item: ByteRange) -> _ItemContents | None:
        """What an item is, when it is like one that was read."""
        path, offset, length = item
        window = self._windows.get(path)
        if window is None:
            window = self._windows[path] = Window(self._files, self._window)
        # Of large items, only the end of one and the beginning of the next are worth reading; what
        # is read of a store is there already.
        ahead = self._window if length <= self._window else 2 * MAX_FRAME
        end = offset if is_address(path) else self._lengths[path]

        def block(at: int, nbytes: int) -> tuple[bytearray, int]:
            start = offset + at
            return window.block(path, start, nbytes, until=min(start + ahead, end))

        found = self._known.find(length, block)
        if found is None:
            return None
        frame, place = found
        stored = None if self._crcs is None else frame.stored_crc(item, block)
        if self._crcs is not None and stored is not None:
            self._crcs.stored[item] = stored
        return place

    def _as_found(
        self, entry: TensorEntry, chunk: Chunk, item: ByteRange, place: _ItemContents
    ) -> Chunk:
        """The chunk as raw elements, which lie in the item where it was found."""
        path, offset, _ = item
        data = _make(ByteRange, (path, offset + place.offset, place.length))
        sign = place.stored.sign
        raw = _make(Chunk, (chunk.box, data, place.strides, sign, chunk.replicas, chunk.rank, None))
        return raw if sign is None else resolved(raw, entry.dtype, self._files)

    def _read(self, entry: TensorEntry, chunk: Chunk, item: ByteRange) -> _ItemContents:
        """What an item is, from its own archive."""
        where = f"{item.path}, item of {entry.fqn}"
        archive = archive_of(self._files, item, where)
        stored = self._stored(archive.read("data.pkl"), where)
        if stored.dtype != entry.dtype.name:
            raise CheckpointError(
                f"{where} is {stored.dtype}, but .metadata says {entry.dtype.name}."
            )
        if stored.shape != chunk.box.sizes:
            raise CheckpointError(
                f"{where} has shape {list(stored.shape)}, but .metadata says "
                f"{list(chunk.box.sizes)} at {list(chunk.box.offsets)}.",
                hint="torch saved it so: FSDP2 over a tensor-parallel dimension that does not "
                "divide. Which rows these are cannot be known; save again from the job, gathered.",
            )
        name = f"data/{stored.storage.key}"
        record = archive.record(name)
        if self._crcs is not None and record.crc is not None:
            elements = ByteRange(item.path, record.offset, record.length)
            self._crcs.stored[item] = StoredCrc(elements, record.crc, f"record {name!r}")
        itemsize = entry.dtype.itemsize
        start, end = stored.storage_offset * itemsize, stored.end * itemsize
        if start == end:
            start = end = 0  # torch keeps the offset of an empty view
        if end > record.length:
            raise UnreadableError(
                f"{where}: its tensor needs bytes {start:,} to {end:,} of a storage that has "
                f"{record.length:,}."
            )
        if itemsize > 1:
            torch_zip.require_little_endian(archive)
        offset = record.offset + start - item.offset
        place = _ItemContents(stored, offset, end - start, strides_of(stored))
        if is_there(item, self._lengths):
            self._known.learn(archive, name, place)
            self._of_kinds[self._files.kinds.get(item)] = place
        return place

    def _stored(self, data: bytes, where: str) -> StoredTensor:
        stored = self._seen.get(data)
        if stored is None:
            try:
                value = pickles.load_tensors(data, where=where)
            except UnsafePickleError as error:
                if error.advice and error.advice.startswith("--allow-global"):
                    error.advice = RESAVE  # a class of tensors: a closed value is no tensor
                raise
            if not isinstance(value, StoredTensor):
                raise UnreadableError(f"{where} holds no tensor but {shown(value)}.")
            if len(self._seen) >= _CACHED_PICKLES:
                self._seen.clear()
            stored = self._seen[data] = value
        return stored


class _ItemContents(NamedTuple):
    """What an item is: the tensor that it says it holds, and where its bytes lie in the item.

    ``strides`` are None for elements that are packed row-major.
    """

    stored: StoredTensor
    offset: int
    length: int
    strides: tuple[int, ...] | None


def checksummed(index: CheckpointIndex, files: Files) -> Iterator[ChecksumPart]:
    """Each item by itself, then the files that hold anything else: of `.metadata`, and of plain
    bytes, reading proves only that they can be read.
    """
    lengths = lengths_of(index)
    items = [
        (data, chunk.codec)
        for entry in index.tensors
        for chunk in entry.chunks
        for data in (chunk.data, *chunk.replicas)
    ]
    objects = [*index.objects, *(one.item for one in index.packed)]
    items += [(one.data, one.codec) for one in objects]
    only_items: set[str] = set()
    archives = Archives(files)
    for data, codec in items:
        if codec not in ARCHIVES or not is_there(data, lengths):
            continue
        only_items.add(data.path)
        if codec == TORCH_SAVE:
            yield from archives.parts(data)
        else:
            yield ChecksumPart(data, data.length, partial(_inflated_records, files, data))
    packed = frozenset().union(*(one.held for one in index.packed))
    apart = (entry for entry in index.tensors if entry.fqn not in packed)
    only_items -= {c.data.path for e in apart for c in e.chunks if c.codec is None}
    others = [path for path in lengths if path not in only_items]
    for path in others:
        if path.endswith(_NO_ARCHIVES):
            yield from plain_parts(path, lengths[path])
    beside = [file for file in index.files if file.path in others]
    beside = [file for file in beside if not file.path.endswith(_NO_ARCHIVES)]
    yield from parts_of_files(replace(index, files=tuple(beside)), files)


def _inflated_records(files: Files, data: ByteRange, window: Window) -> Iterator[Checksummed]:
    for one in Archives(files).records(unpacked(files, data, ZSTD), window):
        yield one._replace(stored=data)


def tensors_in(entry: ObjectEntry, files: Files) -> list[Stored]:
    """The tensors in a pickled object: a whole state dict, saved with flatten_state_dict=False.

    An object that cannot be opened counts as one without: choosing it raises the error. Raises what
    inflating it raises.
    """
    item = unpacked(files, entry.data, entry.codec or TORCH_SAVE)
    try:
        archive = archive_of(files, item, f"{entry.data.path}, item of {entry.fqn}")
        if not any(name.startswith("data/") for name in archive.names):
            return []
        value = pickles.load_tensors(archive.read("data.pkl"), where=archive.where)
    except CheckpointError:
        return []
    # torch packs a tuple of tensors always.
    inside: list[object] = [value] if isinstance(value, dict) else []
    for one in inside:  # which grows
        if isinstance(one, dict):
            inside += one.values()
        elif isinstance(one, list | tuple):
            inside += one
    return [one for one in inside if isinstance(one, Stored)]


def archive_of_object(entry: ObjectEntry, files: Files) -> torch_zip.Archive:
    """The archive of an object, inflated where it is compressed. Raises UnreadableError."""
    item = unpacked(files, entry.data, entry.codec or TORCH_SAVE)
    return archive_of(files, item, f"{entry.data.path}, item of {entry.fqn}")


def archive_of(files: Files, item: ByteRange, where: str) -> torch_zip.Archive:
    """The archive that an item is. Raises UnreadableError."""
    path, offset, length = item
    # Of a larger item, what `_Opener.edges` has fetched: with the directory of what torch writes.
    window = MAX_FRAME if length > torch_zip.WINDOW else torch_zip.WINDOW
    read = partial(files.read, path)
    return torch_zip.read_archive(read, offset=offset, length=length, where=where, window=window)


def unpacked(files: Files, item: ByteRange, codec: str) -> ByteRange:
    """The torch.save archive of an item: itself, or inflated into a temporary file for zstd."""
    if codec == TORCH_SAVE:
        return item
    if codec != ZSTD:
        raise UnsupportedError(f"{item.path}: unknown codec {codec!r}.")
    return ByteRange(*files.spill(item, _inflate))


def _inflate(blocks: Iterator[bytes], write: Callable[[bytes], object], where: str) -> None:
    """Inflate zstd blocks; raises UnsupportedError without the zstandard package."""
    try:
        import zstandard  # an extra: only compressed checkpoints need it
    except ImportError as error:
        raise UnsupportedError(
            f"{where} is compressed with zstd, and the zstandard package is not installed.",
            hint="pip install 'ckpt-tools[zstd]'",
        ) from error
    inflater = zstandard.ZstdDecompressor().decompressobj()
    try:
        for block in blocks:
            write(inflater.decompress(block))
    except zstandard.ZstdError as error:
        raise UnreadableError(f"{where}: its zstd data is damaged: {error}.") from error
    if not inflater.eof:
        raise UnreadableError(f"{where}: its zstd data is truncated.")
