"""One file that torch.save wrote: its nested value, and where the bytes of each tensor lie.

The zip format and the stream that torch wrote before 1.6, and still does when asked to, look the
same from here on. Whether the file is a whole checkpoint or one rank's part of one is for others to
know.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import BinaryIO, NamedTuple

from ckpt_tools.core.dtypes import dtype_named
from ckpt_tools.core.geometry import Box
from ckpt_tools.core.index import ByteRange, Chunk
from ckpt_tools.core.layout import Layout
from ckpt_tools.errors import UnreadableError, UnsupportedError
from ckpt_tools.formats.foreign import HEAD, sniff
from ckpt_tools.formats.pickle import load as pickles
from ckpt_tools.formats.pickle.stored import (
    Stored,
    StoredDTensor,
    StoredPieces,
    StoredStorage,
    StoredTensor,
)
from ckpt_tools.formats.protocol import ReadOptions
from ckpt_tools.formats.torch_file.dtensor_read import held_box, layout_of, pieces_of
from ckpt_tools.formats.torch_file.locate import strides_of
from ckpt_tools.formats.zip import read as torch_zip
from ckpt_tools.formats.zip.read import Record
from ckpt_tools.storage import paths
from ckpt_tools.storage.reader import Files

# Of the old format.
_MAGIC = 0x1950A86A20F9469CFC6C
_VERSION = 1001
_COUNT = 8  # bytes of a storage's number of elements
_QUANTIZED = {"qint8": 1, "quint8": 1, "qint32": 4, "quint4x2": 1, "quint2x4": 1}


class Held(NamedTuple):
    """What a file holds of a tensor: boxes, and where their bytes are; ``layout`` is a DTensor's.

    ``flaw`` says why it cannot be known which elements these are: the box is then that of the
    file's own tensor.
    """

    chunks: tuple[Chunk, ...]
    layout: Layout | None
    flaw: UnsupportedError | None


@dataclass(frozen=True, slots=True)
class SavedFile:
    """A torch.save file: ``value`` is what was saved, with records in place of tensors.

    ``pickle`` is the byte range of the pickle; ``record_of`` finds the bytes of a storage.
    """

    path: str
    length: int
    value: object
    pickle: ByteRange
    record_of: Callable[[StoredStorage], Record]

    def held(self, stored: Stored) -> Held:
        """Where the elements of a tensor are: all of it, unless it is a part of a larger one.

        Raises UnreadableError when its storage is shorter than it says.
        """
        boxes = [(Box.whole(stored.local.shape), stored.local)]
        rank = stored.mesh.rank if isinstance(stored, StoredDTensor) else None
        layout: Layout | None = None
        flaw = None
        try:
            if isinstance(stored, StoredPieces):
                boxes = pieces_of(stored)
            elif isinstance(stored, StoredDTensor):
                layout = layout_of(stored)
                boxes = [(held_box(stored, layout), stored.local)]
        except UnsupportedError as error:
            flaw = error
        record = self.record_of(stored.local.storage)
        chunks = (chunk_of(box, view, record, self.path) for box, view in boxes)
        return Held(tuple(chunk._replace(rank=rank) for chunk in chunks), layout, flaw)


def open_saved(path: str, files: Files, *, options: ReadOptions) -> SavedFile:
    """Read the headers of a torch.save file.

    Raises UnreadableError for anything else and for a file that is cut, UnsafePickleError for a
    pickle that asks for unknown globals, UnsupportedError for what torch can save and we refuse.
    """
    length = files.size(path)
    whole = ByteRange(path, 0, length)
    files.fetch(torch_zip.ends_of(whole))
    kind = sniff(files.read(path, 0, min(HEAD, length)))
    if kind == "pickle":
        return _open_stream(path, length=length, options=options)
    if kind == "tar":
        raise UnsupportedError(
            f"{path} is a tar archive; torch.save wrote those before version 0.2.",
            hint="Load it with an older torch (torch.load) and save it again.",
        )
    archive = torch_zip.archive_in(files, whole, path)
    torch_zip.require_little_endian(archive)
    value = pickles.load_tensors(archive.read("data.pkl"), where=path, allow=options.allow_globals)
    pickle = archive.record("data.pkl")
    return SavedFile(
        path,
        length,
        value,
        ByteRange(path, pickle.offset, pickle.length),
        lambda storage: archive.record(f"data/{storage.key}"),
    )


def _open_stream(path: str, *, length: int, options: ReadOptions) -> SavedFile:
    """A file of the old format, of ``length`` bytes.

    Five pickles follow one another: a magic number, a version, the machine's properties, the saved
    value, and the keys of its storages. Then comes each storage: its number of elements as a 64-bit
    integer, and its bytes.

    Raises UnreadableError for a pickle that torch.save did not write and for a file that is cut,
    UnsupportedError for big-endian bytes, and what `pickles.load_stream` raises.
    """
    with paths.stream(path) as file:
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
            raise torch_zip.big_endian(path)
        start = file.tell()
        storages: dict[str, StoredStorage] = {}
        allowed = options.allow_globals
        value = pickles.load_stream(file, where=path, allow=allowed, storages=storages)
        end = file.tell()
        keys = pickles.load_stream(file, where=path)
        if not isinstance(keys, list):
            raise UnreadableError(f"{path} is damaged: its list of storages cannot be read.")
        records = _records(file, keys, storages, path=path, length=length)

    def record_of(storage: StoredStorage) -> Record:
        record = records.get(storage.key)
        if record is None:
            text = f"{path} is truncated or damaged: it lacks storage {storage.key!r}."
            raise UnreadableError(text)
        return record

    return SavedFile(path, length, value, ByteRange(path, start, end - start), record_of)


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


def chunk_of(box: Box, view: StoredTensor, record: Record, path: str) -> Chunk:
    """A view of a storage, whose bytes are ``record``, as the box of a tensor: its bytes are those
    from the first to the last element.

    Raises UnreadableError when the storage is shorter than it says.
    """
    itemsize = dtype_named(view.dtype).itemsize
    unit = 1 if view.storage.dtype is None else dtype_named(view.storage.dtype).itemsize
    nbytes = view.storage.numel * unit
    if record.length != nbytes:
        raise UnreadableError(
            f"{path}: storage {view.storage.key!r} has {record.length:,} bytes, "
            f"its tensors were saved with {nbytes:,}."
        )
    start, end = view.storage_offset * itemsize, view.end * itemsize
    if 0 in view.shape:
        start = end = 0
    if end > nbytes:
        raise UnreadableError(
            f"{path}: a tensor of {list(view.shape)} needs bytes {start:,} to {end:,} of "
            f"storage {view.storage.key!r}, which has {nbytes:,}."
        )
    data = ByteRange(path, record.offset + start, end - start)
    return Chunk(box, data, strides_of(view), view.sign)
