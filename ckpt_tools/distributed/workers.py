"""Worker processes on this machine: `-j N`.

Each is a new Python process that gets its share of the plan and nothing else, so that the bytes are
the same for any number of workers. They are not forked: a fork of a process with threads (a
progress bar and numpy have some) may hang. multiprocessing's spawn would run the script again that
uses this library.

A worker sends over its connection: numbers of bytes written, an error as text, and in the end as
bytes the CRC-32s of what it has read. It gets nothing after its order, and ends when its connection
does, or on SIGTERM, when it first names the files that it has finished. concurrent.futures' pool is
not used: it hangs when a worker is killed as it sends its result.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from ckpt_tools.convert.write import ShareOrder
from ckpt_tools.copying.tasks import Share
from ckpt_tools.core.crc import KnownCrcs
from ckpt_tools.distributed import messages
from ckpt_tools.errors import WriteError

if TYPE_CHECKING:
    import subprocess
    from multiprocessing.connection import Connection

_MODULE = "ckpt_tools.distributed.worker"
_PATIENCE = 30.0  # seconds for workers to sync what they have finished when one has failed
Said = int | bytes | str  # of a worker


def write_with_workers(
    orders: Sequence[ShareOrder], *, on_bytes: Callable[[int], None], seen: KnownCrcs
) -> None:
    """Do each order in a process of its own; the first error ends them all.

    Raises what `write_share` raises, and WriteError when a worker dies.
    """
    from multiprocessing.connection import wait  # late: only -j has workers

    workers: dict[Connection[ShareOrder, Said], subprocess.Popen[bytes]] = {}
    try:
        for _ in orders:
            connection, process = _started()
            workers[connection] = process
        busy = dict(zip(workers, orders, strict=True))
        for connection, order in busy.items():
            with suppress(BrokenPipeError, ConnectionResetError):  # it died: _received says how
                connection.send(order)
        while busy:
            ready = wait([*busy])
            for connection in [one for one in busy if one in ready]:
                said = _received(connection, workers[connection], busy[connection].share)
                if isinstance(said, bytes):
                    seen.add_packed(said)
                    del busy[connection]
                else:
                    on_bytes(said)
    except BaseException:
        _ask_to_end(workers.values())
        raise
    finally:
        for process in workers.values():  # none may write after this returns
            process.kill()
        for connection, process in workers.items():
            process.wait()
            connection.close()


def _ask_to_end(processes: Collection[subprocess.Popen[bytes]]) -> None:
    """Have workers end, and give them time to name the files that they have finished."""
    from subprocess import TimeoutExpired

    for process in processes:
        process.terminate()
    end = time.monotonic() + _PATIENCE
    for process in processes:
        with suppress(TimeoutExpired):
            process.wait(max(0, end - time.monotonic()))


def _started() -> tuple[Connection[ShareOrder, Said], subprocess.Popen[bytes]]:
    """A new worker, and the connection to it. Ctrl-C reaches this process, who ends the worker."""
    import signal  # late, as all here: most conversions need no workers
    import subprocess
    from multiprocessing import Pipe

    ours, theirs = Pipe()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # the worker inherits it
    try:
        with theirs:
            command = [sys.executable, "-m", _MODULE, str(fd := theirs.fileno())]
            return ours, subprocess.Popen(command, pass_fds=[fd])  # noqa: S603 - our own, no shell
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _received(
    connection: Connection[ShareOrder, Said], process: subprocess.Popen[bytes], share: Share
) -> int | bytes:
    """What a worker says. Raises the error that it sent, and WriteError when it just died."""
    try:
        said = connection.recv()
    except (EOFError, ConnectionResetError):
        code = process.wait()
        from signal import Signals

        why = Signals(-code).name if code < 0 else f"exit code {code}"
        raise WriteError(
            f"Worker {share.index + 1} of {share.count} died ({why}) before its share was written.",
            hint="Out of memory? Use fewer workers (-j).",
        ) from None
    if isinstance(said, str):
        raise messages.decode(said)
    return said
