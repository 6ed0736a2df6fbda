"""Writes the `.metadata` of a DCP directory, without torch and without its classes.

The opcodes are put together by hand: a checkpoint of a thousand ranks has millions of chunks, and
each costs a few joins here: 4 µs and 93 bytes. Through nodes and a subclass of `pickle._Pickler` it
was 74 µs and 133 bytes (400 tensors in 250 chunks each). Classes, names, file paths and sizes are
memoized, the objects that hold them are not: what is loaded is equal to what torch wrote, not the
same bytes.

This room does not know where items come from, or how they are spread over the ranks.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from typing import NamedTuple

from ckpt_tools.core.dtypes import DType
from ckpt_tools.core.geometry import Box
from ckpt_tools.core.index import Path
from ckpt_tools.formats.pickle.dump import encode_int

_VERSION = "1.0.0"  # of the layout of the directory, as torch counts it

_METADATA = "torch.distributed.checkpoint.metadata"
_BATCH = 1000


class TensorRecord(NamedTuple):
    """A tensor of the directory: type, global shape, and its chunks in the order of their index."""

    dtype: DType
    shape: tuple[int, ...]
    chunks: list[Box]


class StoredItem(NamedTuple):
    """Where one item lies: ``length`` bytes from byte ``offset`` of file ``path`` on.

    ``chunk`` is the place of its box in the tensor's chunks, None for an object.
    """

    fqn: str
    chunk: int | None
    path: str
    offset: int
    length: int


def encode_metadata(
    records: Mapping[str, TensorRecord | None],
    items: Iterable[StoredItem],
    *,
    planner_data: Mapping[str, Path],
) -> bytes:
    """The bytes of `.metadata`; a record of None is an object's.

    The ids in it come from its own content: nothing of the time or the machine is in them.
    """
    writer = _Writer()
    body = [
        writer.instance(_METADATA, "Metadata"),
        b"}(",
        writer.text("state_dict_metadata"),
        _dict((writer.text(fqn), writer.record(record)) for fqn, record in records.items()),
        writer.text("planner_data"),
        _dict((writer.text(fqn), writer.path(path)) for fqn, path in planner_data.items()),
        writer.text("storage_data"),
        _dict(writer.item(item, records[item.fqn]) for item in items),
    ]
    digest = hashlib.sha256(b"".join(body)).digest()
    # Written as a UUID is; the module uuid would load subprocess on Python 3.10.
    save_id = "-".join(part.hex() for part in struct.unpack("4s2s2s2s6s", digest[:16]))
    body += [
        writer.text("storage_meta"),
        writer.storage_meta(save_id=save_id),
        writer.text("version"),
        writer.text(_VERSION),
        b"ub.",
    ]
    data = b"".join(body)
    return b"\x80\x04\x95" + struct.pack("<Q", len(data)) + data


def _dict(pairs: Iterable[tuple[bytes, bytes]]) -> bytes:
    """A dict of keys and values that are opcodes already."""
    return b"}" + b"".join(_batches((key + value for key, value in pairs), end=b"u"))


def _batches(items: Iterator[bytes], *, end: bytes) -> Iterator[bytes]:
    while batch := b"".join(islice(items, _BATCH)):
        yield b"(" + batch + end


class _Writer:
    """Gives opcodes of values; what was memoized before is fetched by its number.

    What it gives must be put into the pickle once, in the order in which it was asked for.
    """

    def __init__(self) -> None:
        self._memo: dict[str | tuple[str, str] | tuple[int, ...], bytes] = {}

    def _remember(self, key: str | tuple[str, str] | tuple[int, ...], code: bytes) -> bytes:
        place = len(self._memo)
        self._memo[key] = b"h%c" % place if place < 256 else b"j" + struct.pack("<I", place)
        return code + b"\x94"

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
        return self._remember(value, self.name("torch", "Size") + _tuple(value) + b"\x85R")

    def path(self, value: Path) -> bytes:
        """A tuple of strings and list places."""
        parts = (self.text(x) if isinstance(x, str) else encode_int(x) for x in value)
        return b"(" + b"".join(parts) + b"t"

    def record(self, record: TensorRecord | None) -> bytes:
        """A TensorStorageMetadata or a BytesStorageMetadata."""
        if record is None:
            return self.instance(_METADATA, "BytesStorageMetadata")
        head = [
            self.instance(_METADATA, "TensorStorageMetadata"),
            b"}(",
            self.text("properties"),
            self._properties(record.dtype),
            self.text("size"),
            self.size(record.shape),
            self.text("chunks"),
            b"]",
        ]
        chunks = _batches(map(self._chunk, record.chunks), end=b"e")
        return b"".join([*head, *chunks, b"ub"])

    def _properties(self, dtype: DType) -> bytes:
        """A TensorProperties: strided, no gradient, contiguous, not pinned."""
        parts = [
            self.instance(_METADATA, "TensorProperties"),
            b"(",
            self.name("torch", dtype.name),
            self.name("torch.serialization", "_get_layout"),
            self.text("torch.strided"),
            b"\x85R\x89",
            self.name(_METADATA, "_MEM_FORMAT_ENCODING"),
            b"K\0\x85R\x89tb",
        ]
        return b"".join(parts)

    def _chunk(self, box: Box) -> bytes:
        """A ChunkStorageMetadata."""
        parts = [
            self.instance(_METADATA, "ChunkStorageMetadata"),
            b"}(",
            self.text("offsets"),
            self.size(box.offsets),
            self.text("sizes"),
            self.size(box.sizes),
            b"ub",
        ]
        return b"".join(parts)

    def item(self, item: StoredItem, record: TensorRecord | None) -> tuple[bytes, bytes]:
        """A MetadataIndex and its _StorageInfo."""
        index = [self.instance(_METADATA, "MetadataIndex"), b"}("]
        index += [self.text("fqn"), self.text(item.fqn), self.text("index")]
        if record is None or item.chunk is None:
            index.append(b"N")
        else:
            offsets = record.chunks[item.chunk].offsets
            index += [encode_int(item.chunk), self.text("offset"), self.size(offsets)]
        index.append(b"ub")
        info = [
            self.instance("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
            b"}(",
            self.text("relative_path"),
            self.text(item.path),
            self.text("offset"),
            encode_int(item.offset),
            self.text("length"),
            encode_int(item.length),
            b"ub",
        ]
        return b"".join(index), b"".join(info)

    def storage_meta(self, *, save_id: str) -> bytes:
        """A StorageMeta without the place of the checkpoint, which would be this machine's."""
        parts = [
            self.instance(_METADATA, "StorageMeta"),
            b"}(",
            self.text("checkpoint_id"),
            b"N",
            self.text("save_id"),
            self.text(save_id),
            self.text("load_id"),
            b"N",
            self.text("modules"),
            b"]ub",
        ]
        return b"".join(parts)


def _text(value: str) -> bytes:
    data = value.encode("utf-8", "surrogatepass")
    if len(data) < 256:
        return b"\x8c%c" % len(data) + data
    return b"X" + struct.pack("<I", len(data)) + data


def _tuple(values: tuple[int, ...]) -> bytes:
    if not values:
        return b")"
    return b"(" + b"".join(map(encode_int, values)) + b"t"
