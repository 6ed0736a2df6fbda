"""A conversion as the join of two lists: chunks that are there, boxes that are wanted. No I/O."""

from __future__ import annotations

from typing import NamedTuple

from ckpt_tools.dtypes import DType
from ckpt_tools.geometry import Box
from ckpt_tools.index import Chunk, Path, TensorEntry
from ckpt_tools.layout import Layout


class ReadItem(NamedTuple):
    """Take ``box`` (global coordinates of the tensor) out of ``chunk``, which contains it."""

    chunk: Chunk
    box: Box


class WriteItem(NamedTuple):
    """One box to write, packed row-major, at byte ``offset`` of file ``path``.

    ``reads`` tile the box. Elements are ``source`` in the chunks and ``target`` in the file. When
    all of the box is written, its CRC-32 goes as four little-endian bytes to each offset in
    ``crc_at``.
    """

    fqn: str
    path: str
    offset: int
    box: Box
    source: DType
    target: DType
    reads: tuple[ReadItem, ...]
    crc_at: tuple[int, ...] = ()


class FilePlan(NamedTuple):
    """One file to write: its length in bytes, the bytes known already, and the boxes to fill in."""

    path: str
    length: int
    literals: tuple[tuple[int, bytes], ...]
    items: tuple[WriteItem, ...]


class Target(NamedTuple):
    """One tensor to write: its name and place in the output, its source, its type, its layout."""

    fqn: str
    path: Path
    entry: TensorEntry
    dtype: DType
    layout: Layout | None = None
