"""The CRC-32 that torch.save archives keep of each record, as `verify` asks for them."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from functools import partial

from ckpt_tools.core.index import ByteRange, CheckpointIndex
from ckpt_tools.errors import CheckpointError
from ckpt_tools.formats.protocol import Checksummed, Part, lengths_of, plain_parts
from ckpt_tools.formats.zip.read import Archive, read_archive, sniff
from ckpt_tools.storage.reader import Files

# An archive this small is read in one go, and its records are checked in memory.
_SMALL = 2 << 20
_PART_BYTES = 64 << 20


def parts_of_files(index: CheckpointIndex, files: Files, *, threads: int) -> Iterator[Part]:
    """Each file as one archive, or in parts of about 64 MiB when there are fewer than ``threads``;
    a file of torch.save's old format has no checksums.
    """
    lengths = lengths_of(index)
    for path, length in lengths.items():
        if sniff(files.read(path, 0, min(512, length))) != "zip":
            yield from plain_parts(path, length)
            continue
        data = ByteRange(path, 0, length)
        if len(lengths) < threads:
            yield from _by_records(files, data)
        else:
            yield Part(data, length, partial(records, files, data))


def _by_records(files: Files, data: ByteRange) -> Iterator[Part]:
    """One archive as several parts; as it is when it cannot be opened."""
    groups: list[list[str]] = [[]]
    left = _PART_BYTES
    try:
        archive, _ = _opened(files, data)
        for name in archive.names:
            if left <= 0:
                groups.append([])
                left = _PART_BYTES
            groups[-1].append(name)
            left -= archive.record(name).length
    except CheckpointError:
        yield Part(data, data.length, partial(records, files, data))
        return
    for group in groups:
        some = partial(records, files, data, only=group)
        yield Part(data, data.length // len(groups), some)


def records(
    files: Files,
    data: ByteRange,
    *,
    stored: ByteRange | None = None,
    only: Collection[str] | None = None,
) -> Iterator[Checksummed]:
    """The records of the archive that fills ``data``, all or ``only`` some.

    Raises UnreadableError where the archive, or the header of a record, is damaged.
    """
    archive, kept = _opened(files, data)
    for name in only or archive.names:
        offset, length, crc = archive.record(name)
        start = offset - data.offset
        yield Checksummed(
            ByteRange(data.path, offset, length),
            crc,
            f"record {name!r}",
            kept[start : start + length] if kept else None,
            stored,
        )


def _opened(files: Files, data: ByteRange) -> tuple[Archive, bytes]:
    """The archive, and its bytes when it is small."""
    kept = files.read(*data) if data.length <= _SMALL else b""

    def read(offset: int, length: int) -> bytes:
        if not kept:
            return files.read(data.path, offset, length)
        return kept[offset - data.offset : offset - data.offset + length]

    return read_archive(read, offset=data.offset, length=data.length, where=data.path), kept
