"""What a worker process of `-j N` does: its share of a plan.

    python -m ckpt_tools.distributed.worker INDEX     the order is on stdin, the news on stdout

News are numbers of bytes written, a line each; the last line says `done`, or what went wrong.
"""

from __future__ import annotations

import os
import pickle
import signal
import sys

from ckpt_tools.distributed import messages
from ckpt_tools.distributed.workers import DONE, Order, write_share
from ckpt_tools.errors import CkptError

_TELL_EVERY = 16 << 20


class _News:
    """Tells the parent how many bytes were written, not more often than it needs to know."""

    def __init__(self) -> None:
        self._untold = 0
        self._parent = os.getppid()

    def add(self, nbytes: int) -> None:
        """Also of none: a worker whose parent is gone then ends before it writes anything.

        Raises BrokenPipeError as soon as the parent is gone: another run may go on with its output.
        """
        if os.getppid() != self._parent:
            raise BrokenPipeError
        self._untold += nbytes
        if self._untold >= _TELL_EVERY or nbytes == 0:
            self.tell()

    def tell(self) -> None:
        """Also how a worker finds out that its parent is gone: then the pipe is closed."""
        _say(str(self._untold))
        self._untold = 0


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def _work(index: int) -> None:
    news = _News()
    write_share(_read_order(), index, on_bytes=news.add)
    news.tell()


def _read_order() -> Order:
    """The order, read without moving the place in the file, which all workers share."""
    data = bytearray()
    while block := os.pread(0, 1 << 24, len(data)):
        data += block
    order = pickle.loads(data)  # noqa: S301 - written by our own parent, in a file without a name
    if not isinstance(order, Order):
        raise CkptError(f"A worker was given {type(order).__name__} instead of an order.")
    return order


def main(index: int) -> int:
    """Work, and tell the parent how it went; gives the exit code."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the parent, who ends us
    try:
        _work(index)
    except BrokenPipeError:
        return 1  # the parent is gone
    except (CkptError, OSError, MemoryError) as error:
        _say(messages.encode(error))
        return 1
    _say(DONE)
    return 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
