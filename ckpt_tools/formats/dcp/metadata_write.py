"""Writes the `.metadata` of a DCP directory, without torch and without its classes.

The opcodes are put together by hand, and piece by piece: a checkpoint of a thousand ranks has
millions of chunks. Through nodes and a subclass of `pickle._Pickler` a chunk was 74 µs and 133
bytes (400 tensors in 250 chunks each), with a few joins for each 9 µs and 100 bytes. Tensors that
lie alike differ in two places only, their names and where they are in a file, so that the rest is
put together once for all of them: 1 µs (45,395 tensors in 64 chunks each). Classes, names, file
paths and sizes are memoized, the objects that hold them are not: what is loaded is equal to what
torch wrote, not the same bytes.

This room does not know where items come from, or how they are spread over the ranks.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import accumulate, chain, islice
from typing import TypeAlias

from ckpt_tools.core.geometry import Box
from ckpt_tools.core.index import Path
from ckpt_tools.core.plan import FilePlan, PlannedFile, reads_of
from ckpt_tools.formats.dcp.metadata import TensorMeta
from ckpt_tools.formats.pickle.dump import encode_int

_VERSION = "1.0.0"  # of the layout of the directory, as torch counts it

_METADATA = "torch.distributed.checkpoint.metadata"
_BATCH = 1000


@dataclass(frozen=True, slots=True, eq=False)
class StoredPart:
    """What tensors that lie alike have in one file, each as an item of ``length`` bytes.

    ``chunk`` is the place of ``box`` in the tensor's chunks, None for an object.
    """

    box: Box
    chunk: int | None
    length: int


# A file of items one behind the other: its path, the name of each, and what of it that is.
StoredFile: TypeAlias = "tuple[str, Sequence[str], Sequence[StoredPart]]"


def plan_metadata(
    tensors: Mapping[str, TensorMeta | None],
    files: Sequence[Callable[[], StoredFile]],
    planner_data: Mapping[str, Path],
) -> PlannedFile:
    """The `.metadata` of these tensors, None for an object, and of where items lie.

    No byte of it is kept until it is written. Tensors that lie alike share one `TensorMeta`, which
    is known by its identity.
    """
    pickled = partial(_pickled, tensors, files, planner_data)
    length, last = 0, b""
    for last in pickled():
        length += len(last)
    head = b"\x80\x04\x95" + struct.pack("<Q", length)
    digest = hashlib.blake2b(head + last).digest()  # the last piece has a digest of all others
    make, read = partial(_plan, head, pickled), partial(reads_of, ())
    return PlannedFile(".metadata", len(head) + length, digest, make, read)


def _plan(head: bytes, pickled: Callable[[], Iterator[bytes]]) -> FilePlan:
    pieces = [head, *pickled()]
    places = accumulate(map(len, pieces), initial=0)
    literals = tuple(zip(places, pieces, strict=False))
    return FilePlan(".metadata", sum(map(len, pieces)), literals, ())


def _pickled(
    tensors: Mapping[str, TensorMeta | None],
    files: Sequence[Callable[[], StoredFile]],
    planner_data: Mapping[str, Path],
) -> Iterator[bytes]:
    """The pickle behind its frame's head.

    The ids in it come from its own content: nothing of the time or the machine is in them.
    """
    writer, state = _Writer(), hashlib.sha256()
    metas = (writer.text(fqn) + writer.meta(one) for fqn, one in tensors.items())
    places = (writer.text(fqn) + writer.path(at) for fqn, at in planner_data.items())
    contents = chain(
        [writer.instance(_METADATA, "Metadata") + b"}("],
        writer.field("state_dict_metadata", metas),
        writer.field("planner_data", places),
        writer.field("storage_data", writer.items(file() for file in files)),
    )
    for piece in contents:
        state.update(piece)
        yield piece
    # Written as a UUID is; the module uuid would load subprocess on Python 3.10.
    save_id = "-".join(p.hex() for p in struct.unpack("4s2s2s2s6s", state.digest()[:16]))
    yield writer.end(save_id=save_id)


def _batches(items: Iterator[bytes], *, end: bytes) -> Iterator[bytes]:
    while batch := b"".join(islice(items, _BATCH)):
        yield b"(" + batch + end


class _Writer:
    """Gives opcodes of values; what was memoized before is fetched by its number.

    What it gives must be put into the pickle once, in the order in which it was asked for.
    """

    def __init__(self) -> None:
        self._memo: dict[str | tuple[str, str] | tuple[int, ...], bytes] = {}
        # By the identity of tensors' metadata: what is written of those in which all is memoized.
        self._metas: dict[int, bytes] = {}

    def _remember(self, key: str | tuple[str, str] | tuple[int, ...], code: bytes) -> bytes:
        place = len(self._memo)
        self._memo[key] = b"h%c" % place if place < 256 else b"j" + struct.pack("<I", place)
        return code + b"\x94"

    def field(self, name: str, items: Iterator[bytes]) -> Iterator[bytes]:
        """A field of this name, and the dict of these items in it."""
        yield self.text(name) + b"}"
        yield from _batches(items, end=b"u")

    def text(self, value: str) -> bytes:
        """A string."""
        known = self._memo.get(value)
        return known if known is not None else self._remember(value, _text(value))

    def name(self, module: str, name: str) -> bytes:
        """A class, a function or a dtype."""
        known = self._memo.get((module, name))
        if known is not None:
            return known
        return self._remember((module, name), _text(module) + _text(name) + b"\x93")

    def instance(self, module: str, name: str) -> bytes:
        """A new object of a class, without its state."""
        return self.name(module, name) + b")\x81"

    def size(self, value: tuple[int, ...]) -> bytes:
        """A torch.Size."""
        known = self._memo.get(value)
        if known is not None:
            return known
        code = b"(" + b"".join(map(encode_int, value)) + b"t" if value else b")"
        return self._remember(value, self.name("torch", "Size") + code + b"\x85R")

    def path(self, value: Path) -> bytes:
        """A tuple of strings and list places."""
        parts = (self.text(x) if isinstance(x, str) else encode_int(x) for x in value)
        return b"(" + b"".join(parts) + b"t"

    def meta(self, meta: TensorMeta | None) -> bytes:
        """A TensorStorageMetadata or a BytesStorageMetadata."""
        if meta is None:
            return self.instance(_METADATA, "BytesStorageMetadata")
        if id(meta) in self._metas:
            return self._metas[id(meta)]
        memoized = len(self._memo)
        head = self.instance(_METADATA, "TensorStorageMetadata") + b"}("
        head += self.text("properties") + self._properties(meta.dtype)
        head += self.text("size") + self.size(meta.shape) + self.text("chunks") + b"]"
        code = b"".join([head, *_batches(map(self._chunk, meta.boxes), end=b"e"), b"ub"])
        if len(self._memo) == memoized:
            self._metas[id(meta)] = code
        return code

    def _properties(self, dtype: str) -> bytes:
        """A TensorProperties: strided, no gradient, contiguous, not pinned."""
        head = self.instance(_METADATA, "TensorProperties") + b"(" + self.name("torch", dtype)
        layout = self.name("torch.serialization", "_get_layout") + self.text("torch.strided")
        memory = self.name(_METADATA, "_MEM_FORMAT_ENCODING") + b"K\0"
        return head + layout + b"\x85R\x89" + memory + b"\x85R\x89tb"

    def _chunk(self, box: Box) -> bytes:
        """A ChunkStorageMetadata."""
        head = self.instance(_METADATA, "ChunkStorageMetadata") + b"}("
        offsets = self.text("offsets") + self.size(box.offsets)
        return head + offsets + self.text("sizes") + self.size(box.sizes) + b"ub"

    def items(self, files: Iterable[StoredFile]) -> Iterator[bytes]:
        """A MetadataIndex and its _StorageInfo for each item; all names were given before."""
        index, end = cache(self._index), cache(self._end)
        offsets: list[bytes] = []
        lengths: list[int] = []
        for path, fqns, parts in files:
            before, lengths = lengths, [part.length for part in parts]
            if lengths != before:  # mostly they are the same in all files
                offsets = list(map(encode_int, accumulate(lengths, initial=0)))
            for fqn, part in islice(zip(fqns, parts, strict=True), 1):
                # What the others have in common with it is memoized here, and the path is.
                yield self._index(fqn) + self._place(path, part) + b"K\0" + self._end(part.length)
            columns = (
                map(index, fqns),
                map(cache(partial(self._place, path)), parts),
                offsets,
                map(end, lengths),
            )
            yield from map(b"".join, islice(zip(*columns, strict=False), 1, None))

    def _index(self, fqn: str) -> bytes:
        head = self.instance(_METADATA, "MetadataIndex") + b"}("
        return head + self.text("fqn") + self.text(fqn) + self.text("index")

    def _place(self, path: str, part: StoredPart) -> bytes:
        """The end of an index, and the beginning of its info up to the offset."""
        where = b"N"
        if part.chunk is not None:
            where = encode_int(part.chunk) + self.text("offset") + self.size(part.box.offsets)
        info = self.instance("torch.distributed.checkpoint.filesystem", "_StorageInfo") + b"}("
        file = self.text("relative_path") + self.text(path)
        return where + b"ub" + info + file + self.text("offset")

    def _end(self, length: int) -> bytes:
        return self.text("length") + encode_int(length) + b"ub"

    def end(self, *, save_id: str) -> bytes:
        """A StorageMeta without the place of the checkpoint, which would be this machine's, and the
        version.
        """
        meta = self.text("storage_meta") + self.instance(_METADATA, "StorageMeta") + b"}("
        meta += self.text("checkpoint_id") + b"N" + self.text("save_id") + self.text(save_id)
        meta += self.text("load_id") + b"N" + self.text("modules") + b"]ub"
        return meta + self.text("version") + self.text(_VERSION) + b"ub."


def _text(value: str) -> bytes:
    data = value.encode("utf-8", "surrogatepass")
    if len(data) < 256:
        return b"\x8c%c" % len(data) + data
    return b"X" + struct.pack("<I", len(data)) + data
