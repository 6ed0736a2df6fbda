"""Worker process of `-j N`: does the order that it receives over its connection.

python -m ckpt_tools.distributed.worker FD     the connection is the open file of this number
"""

from __future__ import annotations

import os
import signal
import sys
from multiprocessing.connection import Connection
from threading import Thread

from ckpt_tools.convert.write import ShareOrder, write_share
from ckpt_tools.core.crc import KnownCrcs
from ckpt_tools.distributed import messages
from ckpt_tools.distributed.workers import Said
from ckpt_tools.errors import CkptError
from ckpt_tools.storage.waiting import WAITING


def _end_with(parent: Connection[Said, ShareOrder]) -> None:
    """End this process as soon as the parent is gone: another run may resume its output."""
    parent.poll(None)  # it sends nothing more
    os._exit(1)


def main(fd: int) -> int:
    """Do one order and send the parent the result; returns the exit code."""
    parent: Connection[Said, ShareOrder] = Connection(fd)
    # SIGTERM ends the work as Ctrl-C does in the parent: what is finished gets its name.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    seen, unsent = KnownCrcs(), 0

    def count(nbytes: int) -> None:
        nonlocal unsent
        unsent += nbytes
        if unsent >= order.options.sizes.reported:
            parent.send(unsent)
            unsent = 0

    try:
        order = parent.recv()
        WAITING.patience = order.patience
        Thread(target=_end_with, args=(parent,), daemon=True).start()
        write_share(order, on_bytes=count, seen=seen)
        parent.send(unsent)
        parent.send(seen.packed())
    except (BrokenPipeError, ConnectionResetError, EOFError, KeyboardInterrupt):
        return 1  # the parent is gone, or wants no more
    except (CkptError, OSError, MemoryError) as error:
        parent.send(messages.encode(error))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
