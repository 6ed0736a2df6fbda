"""The stream that torch.save wrote before version 1.6, and still does when asked to.

Five pickles follow one another: a magic number, a version, the machine's properties, the saved
value, and the keys of its storages. Then comes each storage: its number of elements as a 64-bit
integer, and its bytes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import BinaryIO

from ckpt_tools.core.dtypes import dtype_named
from ckpt_tools.core.index import ByteRange
from ckpt_tools.errors import UnreadableError
from ckpt_tools.formats.pickle import load as pickles
from ckpt_tools.formats.pickle.stored import StoredStorage
from ckpt_tools.formats.protocol import ReadOptions
from ckpt_tools.formats.zip.read import Record, big_endian
from ckpt_tools.storage import paths

_MAGIC = 0x1950A86A20F9469CFC6C
_VERSION = 1001
_COUNT = 8


def read_stream(
    path: str, *, length: int, options: ReadOptions
) -> tuple[object, ByteRange, dict[str, Record]]:
    """The saved value, the byte range of its pickle, and where each storage lies, by key, of a file
    of ``length`` bytes.

    Raises UnreadableError for a pickle that torch.save did not write and for a file that is cut,
    UnsupportedError for big-endian bytes, and what `pickles.load_stream` raises.
    """
    with paths.stream(path) as file:
        _check_head(file, path)
        start = file.tell()
        storages: dict[str, StoredStorage] = {}
        value = pickles.load_stream(
            file, where=path, allow=options.allow_globals, storages=storages
        )
        end = file.tell()
        keys = pickles.load_stream(file, where=path)
        if not isinstance(keys, list):
            raise UnreadableError(f"{path} is damaged: its list of storages cannot be read.")
        records = _records(file, keys, storages, path=path, length=length)
    return value, ByteRange(path, start, end - start), records


def _check_head(file: BinaryIO, path: str) -> None:
    """Check the magic number, the version and the byte order."""
    if pickles.load_stream(file, where=path) != _MAGIC:
        raise UnreadableError(
            f"{path} is a plain pickle, not a file of torch.save.",
            hint="Load it where it was made, and save its state dict with torch.save.",
        )
    version = pickles.load_stream(file, where=path)
    if version != _VERSION:
        raise UnreadableError(f"{path}: version {version!r} of the old format is not known.")
    machine = pickles.load_stream(file, where=path)
    if not isinstance(machine, dict) or machine.get("little_endian") is not True:
        raise big_endian(path)


_QUANTIZED = {"qint8": 1, "quint8": 1, "qint32": 4, "quint4x2": 1, "quint2x4": 1}


def _records(
    file: BinaryIO,
    keys: Sequence[object],
    storages: Mapping[str, StoredStorage],
    *,
    path: str,
    length: int,
) -> dict[str, Record]:
    """Where each storage lies; the file must end with the last one."""
    records: dict[str, Record] = {}
    offset = file.tell()
    for key in keys:
        storage = storages.get(key) if isinstance(key, str) else None
        if storage is None:
            raise UnreadableError(f"{path} is damaged: no tensor has its storage {key!r:.40}.")
        file.seek(offset)
        count = int.from_bytes(file.read(_COUNT), "little")
        itemsize = 1
        if storage.dtype is not None:  # quantized ones are only passed over
            itemsize = _QUANTIZED.get(storage.dtype) or dtype_named(storage.dtype).itemsize
        offset += _COUNT
        end = offset + storage.numel * itemsize
        if end > length:
            raise UnreadableError(
                f"{path} is truncated: {length:,} bytes, its storages need {end:,} or more."
            )
        if count != storage.numel:
            raise UnreadableError(
                f"{path} is damaged: storage {key!r:.40} has {count:,} elements, "
                f"not {storage.numel:,}."
            )
        records[storage.key] = Record(offset, end - offset, None)
        offset = end
    return records
