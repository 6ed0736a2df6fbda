"""Worker processes on this machine: `-j N`.

Each is a new Python process that gets its share of the plan and nothing else, so that the bytes are
the same for any number of workers. They are not forked: a fork of a process with threads (a
progress bar and numpy have some) may hang. multiprocessing's spawn would run the script again that
uses this library.

A worker sends over its connection: numbers of bytes written, an error as text, None at the end.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import groupby
from typing import TYPE_CHECKING, NamedTuple

from ckpt_tools.copying.resume import OutputPlace, logged
from ckpt_tools.copying.tasks import Share, Task
from ckpt_tools.core.index import CheckpointIndex, Chunk, TensorEntry
from ckpt_tools.core.plan import KnownReads, LazyPlans, ReadItem, WriteItem
from ckpt_tools.distributed import messages
from ckpt_tools.errors import WriteError
from ckpt_tools.storage.reader import Files

if TYPE_CHECKING:
    import subprocess
    from multiprocessing.connection import Connection

_MODULE = "ckpt_tools.distributed.worker"


class ShareOrder(NamedTuple):
    """One share of a plan: what to write, where, and what may be used for it.

    ``plans`` are those of the files that the share is in, at least. Chunks of ``source`` that they
    read are located before they are read; None when all of them are.
    """

    plans: LazyPlans
    share: Share
    place: OutputPlace
    threads: int | None
    max_memory: int
    source: CheckpointIndex | None = None


def write_share(order: ShareOrder, *, on_bytes: Callable[[int], None]) -> None:
    """Do one share in this process. Raises what `copy.write_files` raises, and what keeps a chunk
    that it reads from being used.

    ``on_bytes`` is called with 0 first, as soon as this process holds the lock of its share.
    """
    from ckpt_tools.copying import (
        write as copy,  # numpy comes with it: only those who write pay for it
    )

    with Files() as files, logged(order.place, order.share.index) as log:

        def locate(tasks: list[Task]) -> list[Task]:
            return tasks if order.source is None else _located(tasks, order.source, files)

        on_bytes(0)
        copy.write_files(
            order.plans,
            root=order.place.folder,
            files=files,
            threads=order.threads,
            max_memory=order.max_memory,
            on_bytes=on_bytes,
            share=replace(order.share, locate=locate),
            on_file=log.written,
        )


def _located(tasks: list[Task], source: CheckpointIndex, files: Files) -> list[Task]:
    """The same tasks with the chunks that they read, and no others, as raw elements."""
    reads_of: dict[int, list[ReadItem]] = {}
    waiting: list[_Waiting] = []
    for piece in (piece for task in tasks for piece in task.pieces):
        reads = reads_of.setdefault(id(piece.item), [])
        for read in piece.item.finder.reads(piece.box):
            if read.chunk.codec is not None:
                waiting.append(_Waiting(reads, len(reads), piece.item))
            reads.append(read)
    waiting.sort(key=lambda one: one.stored.data[:2])  # neighbours in a file are one read
    # Views of one chunk are located together, all else alone.
    grouped = groupby(waiting, key=lambda one: id(one.read.chunk.of or one))
    groups = [list(group) for _, group in grouped]
    entries = [
        TensorEntry(item.fqn, (), "other", item.source, (), tuple(one.read.chunk for one in group))
        for group in groups
        for item in [group[0].item]
    ]
    if entries:
        from ckpt_tools import formats  # late: where all is located already, no reader is needed

        for group, entry in zip(groups, formats.located_in(source, entries, files), strict=True):
            for one, chunk in zip(group, entry.chunks, strict=True):
                one.reads[one.at] = one.read._replace(chunk=chunk)
    known = {key: KnownReads(tuple(reads)) for key, reads in reads_of.items()}
    return [
        task._replace(
            pieces=tuple(
                piece._replace(item=piece.item._replace(finder=known[id(piece.item)]))
                for piece in task.pieces
            )
        )
        for task in tasks
    ]


class _Waiting(NamedTuple):
    """A read of an item whose chunk is to be located."""

    reads: list[ReadItem]
    at: int
    item: WriteItem

    @property
    def read(self) -> ReadItem:
        """The read itself."""
        return self.reads[self.at]

    @property
    def stored(self) -> Chunk:
        """The chunk in the file, of which that of the read may be a view."""
        return self.read.chunk.of or self.read.chunk


def write_with_workers(orders: Sequence[ShareOrder], *, on_bytes: Callable[[int], None]) -> None:
    """Do each order in a process of its own; the first error ends them all.

    Raises what `write_share` raises, and WriteError when a worker dies.
    """
    from multiprocessing.connection import Connection, wait  # late: only -j has workers

    workers: dict[Connection[object, object], subprocess.Popen[bytes]] = {}
    try:
        for _ in orders:
            connection, process = _started()
            workers[connection] = process
        busy = dict(zip(workers, orders, strict=True))
        for connection, order in busy.items():
            with suppress(BrokenPipeError, ConnectionResetError):  # it died: _received says how
                connection.send(order)
        while busy:
            for connection in [one for one in wait([*busy]) if isinstance(one, Connection)]:
                nbytes = _received(connection, workers[connection], busy[connection].share)
                if nbytes is None:
                    del busy[connection]
                else:
                    on_bytes(nbytes)
    finally:
        for process in workers.values():  # none may write after this returns
            process.terminate()
        for connection, process in workers.items():
            process.wait()
            connection.close()


def _started() -> tuple[Connection[object, object], subprocess.Popen[bytes]]:
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
    connection: Connection[object, object], process: subprocess.Popen[bytes], share: Share
) -> int | None:
    """How many bytes a worker has written since its last message; None when it is done.

    Raises the error that it sent, and WriteError when it died without sending one.
    """
    try:
        message: object = connection.recv()
    except (EOFError, ConnectionResetError):
        code = process.wait()
        from signal import Signals

        why = Signals(-code).name if code < 0 else f"exit code {code}"
        raise WriteError(
            f"Worker {share.index + 1} of {share.count} died ({why}) before its share was written.",
            hint="Out of memory? Use fewer workers (-j).",
        ) from None
    if isinstance(message, str):
        raise messages.decode(message)
    return message if isinstance(message, int) else None
