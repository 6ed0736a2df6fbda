"""Writes boxes of a whole tensor that is in memory, as file plans want them.

For the engine `gather`, whose tensors do not come from files. It knows no torch: a tensor is an
array of bytes whose last dimension is one element.
"""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np  # noqa: TID253 - only that engine comes here

from ckpt_tools.copying.cast import Caster
from ckpt_tools.core.geometry import Box, slabs
from ckpt_tools.core.plan import WriteItem
from ckpt_tools.errors import unwritable

if TYPE_CHECKING:
    Bytes = np.ndarray[tuple[int, ...], np.dtype[np.uint8]]

_SLAB_BYTES = 4 << 20
_CRC = struct.Struct("<I")


class PieceWriter:
    """Writes below ``folder`` into files that are there and have their length."""

    def __init__(self, folder: str, *, on_bytes: Callable[[int], None]) -> None:
        self._folder = folder
        self._on_bytes = on_bytes

    def write(self, item: WriteItem, whole: Bytes) -> None:
        """Write one item from the whole tensor, of shape (…, itemsize). Raises WriteError."""
        path = os.path.join(self._folder, item.path)
        try:
            fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
            try:
                self._write(fd, item, whole)
            finally:
                os.close(fd)
        except OSError as error:
            raise unwritable(path, error) from error

    def _write(self, fd: int, item: WriteItem, whole: Bytes) -> None:
        caster = None if item.source == item.target else Caster(item.source, item.target)
        widest = max(item.source.itemsize, item.target.itemsize)
        offset, crc = item.offset, 0
        for slab in slabs(item.box, max_numel=_SLAB_BYTES // widest):
            data = packed(whole, slab)
            if caster is not None:
                cast = memoryview(bytearray(slab.numel * item.target.itemsize))
                caster.cast(data, cast)
                data = cast
            crc = zlib.crc32(data, crc)
            _write_all(fd, data, offset)
            offset += len(data)
            self._on_bytes(len(data))
        for place in item.crc_at:
            _write_all(fd, memoryview(_CRC.pack(crc)), place)


def packed(whole: Bytes, box: Box) -> memoryview:
    """The bytes of a box of a whole tensor, row-major."""
    part = whole[tuple(slice(a, b) for a, b in zip(box.offsets, box.ends, strict=True))]
    return np.ascontiguousarray(part).reshape(-1).data


def _write_all(fd: int, data: memoryview, offset: int) -> None:
    while data:
        count = os.pwrite(fd, data, offset)
        data, offset = data[count:], offset + count
