"""What a worker process of `-j N` does: the order that comes over its connection.

python -m ckpt_tools.distributed.worker FD     the connection is the open file of this number
"""

from __future__ import annotations

import os
import signal
import sys
from multiprocessing.connection import Connection

from ckpt_tools.distributed import messages
from ckpt_tools.distributed.workers import Order, write_share
from ckpt_tools.errors import CkptError

_TELL_EVERY = 16 << 20


class _News:
    """Tells the parent how many bytes were written, not more often than it needs to know."""

    def __init__(self, parent: Connection[object, object]) -> None:
        self._connection = parent
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
        """Also how a worker finds out that its parent is gone: then the connection is closed."""
        self._connection.send(self._untold)
        self._untold = 0


def _work(parent: Connection[object, object]) -> None:
    order = parent.recv()
    if not isinstance(order, Order):
        raise CkptError(f"A worker was given {type(order).__name__} instead of an order.")
    news = _News(parent)
    write_share(order, on_bytes=news.add)
    news.tell()


def main(fd: int) -> int:
    """Work, and tell the parent how it went; gives the exit code."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the parent, who ends us
    parent: Connection[object, object] = Connection(fd)
    try:
        _work(parent)
        parent.send(None)
    except (BrokenPipeError, ConnectionResetError, EOFError):
        return 1  # the parent is gone
    except (CkptError, OSError, MemoryError) as error:
        parent.send(messages.encode(error))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
