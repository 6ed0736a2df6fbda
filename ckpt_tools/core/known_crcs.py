"""CRC-32s of bytes that were read for something else: what a copy has seen is not read again."""

from __future__ import annotations

import json
import struct
import zlib
from itertools import starmap

from ckpt_tools.core.crc import combine
from ckpt_tools.core.index import ByteRange

_ROW = struct.Struct("<IQQI")  # number of the path, offset, length, CRC-32


class KnownCrcs:
    """The CRC-32s of runs of bytes that were read for something else, from any thread."""

    def __init__(self) -> None:
        self._runs: dict[tuple[str, int], tuple[int, int]] = {}

    def __len__(self) -> int:
        """How many runs there are."""
        return len(self._runs)

    @property
    def nbytes(self) -> int:
        """Bytes of all runs together."""
        return sum(length for length, _ in self._runs.values())

    def add(self, data: ByteRange, crc: int) -> None:
        """Add a run; of two that begin at one place, the longer one counts."""
        place = data.path, data.offset
        self._runs[place] = max(self._runs.get(place, (0, 0)), (data.length, crc))

    def crc_of(self, data: ByteRange) -> int | None:
        """The CRC-32 of a range that was seen run after run from its first byte to its last."""
        crc, at, end = 0, data.offset, data.offset + data.length
        while at < end:
            length, more = self._runs.get((data.path, at), (0, 0))
            if not length or at + length > end:
                return None
            crc = combine(crc, more, length=length)
            at += length
        return crc

    def packed(self) -> bytes:
        """All of it in few bytes, for another process."""
        paths = sorted({path for path, _ in self._runs})
        number = {path: at for at, path in enumerate(paths)}
        runs = [(number[p], at, length, crc) for (p, at), (length, crc) in self._runs.items()]
        head = json.dumps(paths).encode()
        rows = b"".join(starmap(_ROW.pack, sorted(runs)))
        return zlib.compress(len(head).to_bytes(8, "little") + head + rows, 1)

    def add_packed(self, data: bytes) -> None:
        """Add what another process has seen."""
        data = zlib.decompress(data)
        end = 8 + int.from_bytes(data[:8], "little")
        paths = json.loads(data[8:end])
        for path, at, length, crc in _ROW.iter_unpack(data[end:]):
            self.add(ByteRange(paths[path], at, length), crc)
