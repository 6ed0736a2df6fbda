"""A pickle without the runs of alike entries in it: what is left for the unpickler to load.

Where a run was, two persistent ids say its number, as key and value of a dict or as two items of a
list. Another id stands where the rest refers to a value that an entry of a run remembers. All other
opcodes stay, with the numbers of the memo moved up.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

from ckpt_tools.formats.pickle.entry_columns import UnlikeError
from ckpt_tools.formats.pickle.guard_shapes import Run

# Bytes of the argument of the opcodes that torch's pickles have. None takes off the stack what it
# makes nothing of, or names a place in the memo by itself.
_PLAIN = dict.fromkeys(b"().NR]abdelstu}\x81\x85\x86\x87\x88\x89\x8f\x90\x91\x92\x93\x94", 0)
_PLAIN |= {0x80: 1, 0x95: 8, ord("G"): 8, ord("J"): 4, ord("K"): 1, ord("M"): 2}
_PLAIN |= {ord("h"): 1, ord("j"): 4}
# How many bytes say the length of the argument of others.
_COUNTED = {0x8A: 1, 0x8B: 4, 0x8C: 1, 0x8D: 8, 0x8E: 8, ord("B"): 4, ord("C"): 1, ord("X"): 4}
_FRAME = 0x95
_MOVED = frozenset(b"\x95hj")
_MAX_ID = (1 << 31) - 1


class Condensed:
    """The pickle ``data`` up to ``end`` without these runs.

    Persistent ids from 0 on are runs, in order; -1, -2, … are the values ``wanted`` of the memo.
    Raises UnlikeError for opcodes that torch does not write.
    """

    def __init__(self, data: bytes, end: int, runs: Sequence[Run]) -> None:
        self.wanted: list[int] = []
        self._data = data
        self._firsts = [run.memo for run in runs]
        self._ends = [run.memo + run.entries * run.memos for run in runs]
        self._before = [0]
        for run in runs:
            self._before.append(self._before[-1] + run.entries * run.memos)
        self._out: list[bytes] = []
        at = 0
        for number, run in enumerate(runs):
            self._keep(at, run.start)
            self._out.append(_persistent(number) * 2)
            at = run.end
        self._keep(at, end)
        self.data = b"".join(self._out)

    def run_of(self, memo: int) -> int | None:
        """The run whose entries remember under this number; None for a value of the rest."""
        run = bisect_right(self._firsts, memo) - 1
        # A run that remembers nothing has the same first number as the one after it.
        return run if run >= 0 and memo < self._ends[run] else None

    def number(self, memo: int) -> int:
        """The number that a value of the rest has in the memo of what is left."""
        return memo - self._before[bisect_right(self._firsts, memo)]

    def _keep(self, at: int, stop: int) -> None:
        """Take over the opcodes from ``at`` to ``stop``."""
        data, out = self._data, self._out
        kept = at
        while at < stop:
            op = data[at]
            size = _PLAIN.get(op)
            if size is None:
                width = _COUNTED.get(op)
                if width is None:
                    raise UnlikeError
                size = width + int.from_bytes(data[at + 1 : at + 1 + width], "little")
            end = at + 1 + size
            if op in _MOVED:
                out.append(data[kept:at])
                kept = end
                number = int.from_bytes(data[at + 1 : end], "little")
                if op != _FRAME:
                    out.append(self._reference(number))
                elif end + number > len(data):
                    raise UnlikeError
            at = end
        if at != stop:
            raise UnlikeError
        out.append(data[kept:stop])

    def _reference(self, memo: int) -> bytes:
        """The opcodes that push what is remembered under a number."""
        if self.run_of(memo) is None:
            return b"j" + self.number(memo).to_bytes(4, "little")
        self.wanted.append(memo)
        return _persistent(-len(self.wanted))


def _persistent(number: int) -> bytes:
    if abs(number) > _MAX_ID:
        raise UnlikeError
    return b"J" + number.to_bytes(4, "little", signed=True) + b"Q"
