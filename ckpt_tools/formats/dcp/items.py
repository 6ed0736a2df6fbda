"""What one item of a DCP data file is: the raw bytes of a chunk inside its own torch.save archive.

`locate` turns the items that a `.metadata` names into raw byte ranges, and checks what each item
says of itself against what `.metadata` says of it. torch 2.13 itself writes directories in which
the two disagree (FSDP2 over a tensor-parallel dimension that does not divide).

Items of one shape and type are equal but for their elements and checksums (`zip.frames`), so that
only the first is parsed, and others are recognised by their bytes (`Templates`).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from ckpt_tools.core.index import (
    ByteRange,
    CheckpointIndex,
    Chunk,
    ObjectEntry,
    TensorEntry,
)
from ckpt_tools.errors import (
    CheckpointError,
    UnreadableError,
    UnsafePickleError,
    UnsupportedError,
)
from ckpt_tools.formats.pickle import load as pickles
from ckpt_tools.formats.pickle.rebuild import RESAVE
from ckpt_tools.formats.pickle.torch_stubs import (
    Stored,
    StoredTensor,
    shown,
)
from ckpt_tools.formats.protocol import Checksummed, ChecksumPart, lengths_of, plain_parts
from ckpt_tools.formats.torch_file.locate import SIGNS, located, resolved
from ckpt_tools.formats.torch_file.open import strides_of
from ckpt_tools.formats.zip import checksums
from ckpt_tools.formats.zip import read as torch_zip
from ckpt_tools.formats.zip.frames import MAX_FRAME, Frame, frame_of
from ckpt_tools.storage.paths import is_address
from ckpt_tools.storage.reader import Files, Window

TORCH_SAVE = "torch.save"
ZSTD = "zstd"
ARCHIVES = frozenset({TORCH_SAVE, ZSTD})

_CACHED_PICKLES = 4096
_MAX_OF_ONE_LENGTH = 16
_AHEAD = 16 << 20
_MAX_WINDOW = 64 << 10
_FETCHED = 64 << 20  # bytes of a store in memory at a time, of which little is kept
# The constructors that NamedTuple generates would take half a second of a million items.
_make = tuple.__new__


def locate(index: CheckpointIndex, files: Files) -> CheckpointIndex:
    """The same index with every chunk as raw little-endian elements.

    Items that cannot be used become problems of the index, so that one damaged item does not hide
    the others.
    """
    opener = _Opener(files, lengths_of(index))
    if is_address(index.root):
        opener.fetch(c.data for entry in index.tensors for c in entry.chunks if c.codec is not None)
    return located(index, opener.raw)


class _Opener:
    """Opens items, remembering pickles: chunks of one shape have the same one, byte for byte."""

    def __init__(self, files: Files, lengths: Mapping[str, int]) -> None:
        self._files = files
        self._lengths = lengths
        self._seen: dict[bytes, StoredTensor] = {}
        self._templates = Templates(files, lengths)
        self.fetch = self._templates.fetch

    def raw(self, entry: TensorEntry, chunk: Chunk) -> Chunk:
        """The chunk as raw elements, checked against its own archive."""
        place = self._known(entry, chunk)
        if place is not None:
            return self._as_found(entry, chunk, chunk.data, place)
        if chunk.codec is None:
            return chunk
        if 0 in chunk.box.sizes and not self._is_there(chunk.data):
            return chunk._replace(data=chunk.data._replace(length=0), codec=None)
        if chunk.codec in SIGNS:
            return resolved(chunk, entry.dtype, self._files)
        item = unpacked(self._files, chunk.data, str(chunk.codec))
        return self._as_found(entry, chunk, item, self._read(entry, chunk, item))

    def _known(self, entry: TensorEntry, chunk: Chunk) -> ItemContents | None:
        """What an item is, when it is like one that was read and as `.metadata` says."""
        if chunk.codec != TORCH_SAVE or not self._is_there(chunk.data):
            return None
        place = self._templates.find(chunk.data)
        if place is None or place.stored.dtype != entry.dtype.name:
            return None
        return place if place.stored.shape == chunk.box.sizes else None

    def _as_found(
        self, entry: TensorEntry, chunk: Chunk, item: ByteRange, place: ItemContents
    ) -> Chunk:
        """The chunk as raw elements, which lie in the item where it was found."""
        path, offset, _ = item
        data = _make(ByteRange, (path, offset + place.offset, place.length))
        sign = place.stored.sign
        raw = _make(Chunk, (chunk.box, data, place.strides, sign, chunk.replicas, chunk.rank))
        return raw if sign is None else resolved(raw, entry.dtype, self._files)

    def _read(self, entry: TensorEntry, chunk: Chunk, item: ByteRange) -> ItemContents:
        """What an item is, from its own archive."""
        where = f"{item.path}, item of {entry.fqn}"
        archive = archive_of(self._files, item, where)
        stored = self._stored(archive.read("data.pkl"), where)
        _check(entry, chunk, stored, where)
        record = archive.record(f"data/{stored.storage.key}")
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
        place = ItemContents(stored, offset, end - start, strides_of(stored))
        if self._is_there(item):
            self._templates.learn(item, archive, place)
        return place

    def _is_there(self, data: ByteRange) -> bool:
        return data.offset + data.length <= self._lengths.get(data.path, 0)

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


class ItemContents(NamedTuple):
    """What an item is: the tensor that it says it holds, and where its bytes lie in the item.

    ``strides`` are None for elements that are packed row-major.
    """

    stored: StoredTensor
    offset: int
    length: int
    strides: tuple[int, ...] | None


class Templates:
    """The items that were learned, by their length, and blocks of files read ahead.

    It compares bytes, and does not know what an archive is.
    """

    def __init__(self, files: Files, lengths: Mapping[str, int]) -> None:
        self._files = files
        self._lengths = lengths
        self._known: dict[int, list[tuple[Frame, ItemContents]]] = {}
        self._window = min(_MAX_WINDOW, max(MAX_FRAME, _AHEAD // max(1, len(lengths))))
        self._blocks: dict[str, tuple[int, bytes]] = {}
        self._fetched: dict[str, tuple[list[int], list[bytes]]] = {}

    def fetch(self, items: Iterable[ByteRange]) -> None:
        """Read what stands around the elements of these items, many at a time.

        A store answers after tens of milliseconds: thousands of items asked for one by one are
        minutes.
        """
        windows = [window for item in items for window in self._ends_of(item)]
        joined: list[ByteRange] = []
        for window in sorted(windows):
            last = joined[-1] if joined else ByteRange("", 0, 0)
            end = window.offset + window.length
            if window.path == last.path and window.offset <= last.offset + last.length:
                joined[-1] = last._replace(length=max(last.length, end - last.offset))
            else:
                joined.append(window)
        for batch in self._batches(joined):
            self._files.fetch(batch, most=_FETCHED)
            for window in batch:
                starts, data = self._fetched.setdefault(window.path, ([], []))
                starts.append(window.offset)
                data.append(self._files.read(*window))

    def _batches(self, windows: Iterable[ByteRange]) -> Iterator[list[ByteRange]]:
        """The windows in parts, so that what is fetched with them is dropped soon."""
        batch: list[ByteRange] = []
        left, last, near = _FETCHED, ByteRange("", 0, 0), self._files.sizes.fetched_gap
        for window in windows:
            gap = window.offset - last.offset - last.length if window.path == last.path else 0
            left -= window.length + (gap if gap <= near else 0)
            if left < 0 and batch:
                yield batch
                batch, left = [], _FETCHED
            batch.append(window)
            last = window
        yield batch

    def _ends_of(self, item: ByteRange) -> Iterable[ByteRange]:
        path, offset, length = item
        if offset + length <= self._lengths.get(path, 0):
            edge = min(length, MAX_FRAME)
            yield ByteRange(path, offset, edge)
            yield ByteRange(path, offset + length - edge, edge)

    def find(self, item: ByteRange) -> ItemContents | None:
        """What an item is, when it is like one that was learned."""
        path, offset, length = item
        # Of large items, only the end of one and the beginning of the next are worth reading.
        ahead = self._window if length <= self._window else 2 * MAX_FRAME
        for frame, place in self._known.get(length, ()):
            block, at = self._block(path, offset, len(frame.head), ahead=ahead)
            if not frame.begins(block, at):
                continue
            tail = length - frame.tail_at
            block, at = self._block(path, offset + frame.tail_at, tail, ahead=ahead)
            if frame.ends(block, at):
                return place
        return None

    def learn(self, item: ByteRange, archive: torch_zip.Archive, place: ItemContents) -> None:
        """Remember an item that was read, when little stands around its elements."""
        templates = self._known.setdefault(item.length, [])
        if len(templates) < _MAX_OF_ONE_LENGTH:
            frame = frame_of(archive, f"data/{place.stored.storage.key}")
            if frame is not None:
                templates.append((frame, place))

    def _block(self, path: str, offset: int, length: int, *, ahead: int) -> tuple[bytes, int]:
        """A block of a file that holds these bytes, and where: the last one, or one read now."""
        starts, blocks = self._fetched.get(path, ((), ()))
        place = bisect_right(starts, offset) - 1
        if place >= 0 and offset + length <= starts[place] + len(blocks[place]):
            return blocks[place], offset - starts[place]
        start, data = self._blocks.get(path, (0, b""))
        if offset < start or offset + length > start + len(data):
            start = offset
            left = self._lengths.get(path, 0) - offset
            data = self._files.read(path, offset, max(length, min(ahead, left)))
            self._blocks[path] = start, data
        return data, offset - start


def _check(entry: TensorEntry, chunk: Chunk, stored: StoredTensor, where: str) -> None:
    """The item's own dtype and shape must be what `.metadata` says."""
    if stored.dtype != entry.dtype.name:
        raise CheckpointError(f"{where} is {stored.dtype}, but .metadata says {entry.dtype.name}.")
    if stored.shape != chunk.box.sizes:
        raise CheckpointError(
            f"{where} has shape {list(stored.shape)}, but .metadata says {list(chunk.box.sizes)} "
            f"at {list(chunk.box.offsets)}.",
            hint="torch saved it so: FSDP2 over a tensor-parallel dimension that does not divide. "
            "Which rows these are cannot be known; save again from the job, gathered.",
        )


def checksummed(index: CheckpointIndex, files: Files) -> Iterator[ChecksumPart]:
    """Each item by itself, then the files that hold anything else: of `.metadata`, and of plain
    bytes, reading proves only that they can be read.
    """
    lengths = lengths_of(index)
    items = [
        (data, str(chunk.codec))
        for entry in index.tensors
        for chunk in entry.chunks
        if chunk.codec in ARCHIVES
        for data in (chunk.data, *chunk.replicas)
    ]
    objects = [*index.objects, *(one.item for one in index.packed)]
    items += [(one.data, str(one.codec)) for one in objects if one.codec in ARCHIVES]
    only_items: set[str] = set()
    archives = checksums.Archives(files)
    for data, codec in items:
        if data.offset + data.length <= lengths.get(data.path, 0):
            only_items.add(data.path)
            if codec == TORCH_SAVE:
                yield from archives.parts(data)
            else:
                yield ChecksumPart(
                    data, data.length, partial(_unpacked_records, files, data, codec)
                )
    packed = frozenset().union(*(one.held for one in index.packed))
    apart = (entry for entry in index.tensors if entry.fqn not in packed)
    only_items -= {c.data.path for e in apart for c in e.chunks if c.codec is None}
    others = [path for path in lengths if path not in only_items]
    for path in others:
        if path.endswith(".distcp"):  # begins like an archive: with its first item
            yield from plain_parts(path, lengths[path])
    beside = [file for file in index.files if file.path in others]
    beside = [file for file in beside if not file.path.endswith(".distcp")]
    yield from checksums.parts_of_files(replace(index, files=tuple(beside)), files)


def _unpacked_records(
    files: Files, data: ByteRange, codec: str, window: Window
) -> Iterator[Checksummed]:
    for one in checksums.Archives(files).records(unpacked(files, data, codec), window):
        yield one._replace(stored=data)


def tensors_in(entry: ObjectEntry, files: Files) -> list[Stored]:
    """The tensors in a pickled object: a whole state dict, saved with flatten_state_dict=False.

    An object that cannot be opened counts as one without: choosing it raises the error.
    """
    item = unpacked(files, entry.data, entry.codec or TORCH_SAVE)
    where = f"{item.path}, item of {entry.fqn}"
    try:
        archive = archive_of(files, item, where)
        if not any(name.startswith("data/") for name in archive.names):
            return []
        value = pickles.load_tensors(archive.read("data.pkl"), where=where)
    except CheckpointError:
        return []
    if not isinstance(value, dict):
        return []  # torch packs a tuple of tensors always
    return [leaf for leaf in _leaves(value) if isinstance(leaf, Stored)]


def _leaves(value: object) -> Iterator[object]:
    waiting = [value]
    while waiting:
        value = waiting.pop()
        if isinstance(value, dict):
            waiting.extend(value.values())
        elif isinstance(value, list | tuple):
            waiting.extend(value)
        yield value


def archive_of(files: Files, item: ByteRange, where: str) -> torch_zip.Archive:
    """The archive that an item is. Raises UnreadableError."""
    read = partial(files.read, item.path)
    return torch_zip.read_archive(read, offset=item.offset, length=item.length, where=where)


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
