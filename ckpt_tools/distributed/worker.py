"""Worker process of `-j N`: does the order that it receives over its connection.

python -m ckpt_tools.distributed.worker FD     the connection is the open file of this number
"""

from __future__ import annotations

import os
import sys
from multiprocessing.connection import Connection

from ckpt_tools.core.known_crcs import KnownCrcs
from ckpt_tools.distributed import messages
from ckpt_tools.distributed.workers import ShareOrder, write_share
from ckpt_tools.errors import CkptError


class _Progress:
    """Sends the parent how many bytes were written, once ``every`` so many."""

    def __init__(self, parent: Connection[object, object], *, every: int) -> None:
        self._connection, self._every = parent, every
        self._unsent = 0
        self._parent = os.getppid()

    def add(self, nbytes: int) -> None:
        """Count some bytes. 0 is sent at once: without a parent the worker ends before it writes.

        Raises BrokenPipeError as soon as the parent is gone: another run may resume its output.
        """
        if os.getppid() != self._parent:
            raise BrokenPipeError
        self._unsent += nbytes
        if self._unsent >= self._every or nbytes == 0:
            self.send()

    def send(self) -> None:
        """Send the count. Raises BrokenPipeError when the parent has closed the connection."""
        self._connection.send(self._unsent)
        self._unsent = 0


def _work(parent: Connection[object, object]) -> None:
    order = parent.recv()
    if not isinstance(order, ShareOrder):
        raise CkptError(f"A worker was given {type(order).__name__} instead of an order.")
    progress = _Progress(parent, every=order.sizes.reported)
    seen = KnownCrcs()
    write_share(order, on_bytes=progress.add, seen=seen)
    progress.send()
    parent.send(seen.packed())


def main(fd: int) -> int:
    """Do one order and send the parent the result; returns the exit code."""
    parent: Connection[object, object] = Connection(fd)
    try:
        _work(parent)
    except (BrokenPipeError, ConnectionResetError, EOFError):
        return 1  # the parent is gone
    except (CkptError, OSError, MemoryError) as error:
        parent.send(messages.encode(error))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
