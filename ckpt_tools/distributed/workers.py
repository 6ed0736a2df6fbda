"""Worker processes on this machine: `-j N`.

Each is a Python of its own that is given the plan and does its share of it, so that the bytes are
the same however many there are. A process is started anew, never forked: a fork of a process with
threads (a progress bar and numpy have some) may hang.
"""

from __future__ import annotations

import pickle
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from tempfile import TemporaryFile
from typing import NamedTuple

from ckpt_tools.copying.resume import Place, logged
from ckpt_tools.core.plan import FilePlan
from ckpt_tools.distributed import messages
from ckpt_tools.errors import CkptError, WriteError
from ckpt_tools.storage.reader import Files

_MODULE = "ckpt_tools.distributed.worker"
_LEAST_MEMORY = 1 << 20
# What a worker says last.
DONE = "done"


class Order(NamedTuple):
    """What all workers are told: the plan, where they write, and what each may use."""

    plans: Sequence[FilePlan]
    place: Place
    workers: int
    threads: int | None
    max_memory: int


def write_with_workers(order: Order, *, on_bytes: Callable[[int], None]) -> None:
    """Write the files of a plan with ``order.workers`` processes; the first error ends them all.

    ``order.max_memory`` is that of all workers together. Raises what `copy.write_files` raises, and
    WriteError when a worker dies.
    """
    with TemporaryFile() as plan:
        each = max(_LEAST_MEMORY, order.max_memory // order.workers)
        pickle.dump(order._replace(max_memory=each), plan, protocol=pickle.HIGHEST_PROTOCOL)
        plan.flush()
        workers = _Workers(order.workers, on_bytes)
        try:
            workers.start(plan.fileno())
            workers.wait()
        finally:
            workers.end()


def write_share(order: Order, index: int, *, on_bytes: Callable[[int], None]) -> None:
    """Do the part of worker ``index`` in this process. Raises what `copy.write_files` raises.

    ``on_bytes`` hears of no bytes first, as soon as nobody else can take over this share.
    """
    from ckpt_tools.copying import (
        write as copy,  # numpy comes with it: only those who write pay for it
    )

    with Files() as files, logged(order.place, index) as log:
        on_bytes(0)
        copy.write_files(
            order.plans,
            root=order.place.folder,
            files=files,
            threads=order.threads,
            max_memory=order.max_memory,
            on_bytes=on_bytes,
            share=copy.Share(index, order.workers),
            on_file=log.written,
        )


class _Workers:
    """The processes, and a thread for each that listens to it."""

    def __init__(self, count: int, on_bytes: Callable[[int], None]) -> None:
        self._count = count
        self._on_bytes = on_bytes
        self._lock = threading.Lock()
        self._processes: list[subprocess.Popen[str]] = []
        self._listeners: list[threading.Thread] = []
        self._errors: list[CkptError] = []

    def start(self, plan: int) -> None:
        for index in range(self._count):
            process = subprocess.Popen(  # noqa: S603 - our own module, no shell
                [sys.executable, "-m", _MODULE, str(index)],
                stdin=plan,
                stdout=subprocess.PIPE,
                text=True,
            )
            self._processes.append(process)
            listener = threading.Thread(target=self._listen, args=(index, process), daemon=True)
            self._listeners.append(listener)
            listener.start()

    def wait(self) -> None:
        """Wait for all. Raises the first error of any."""
        for listener in self._listeners:
            while listener.is_alive():
                listener.join(0.1)
                self._raise_first()
        self._raise_first()

    def end(self) -> None:
        """End those that still run, and wait until they are gone: they must write no more."""
        for process in self._processes:
            process.terminate()
        for process in self._processes:
            process.wait()
        for listener in self._listeners:
            listener.join()
        for process in self._processes:
            if process.stdout is not None:
                process.stdout.close()

    def _raise_first(self) -> None:
        if self._errors:
            raise self._errors[0]

    def _listen(self, index: int, process: subprocess.Popen[str]) -> None:
        last = ""
        for line in process.stdout or ():
            last = line.strip()
            if last.isdecimal():
                with self._lock:
                    self._on_bytes(int(last))
        if last == DONE:
            return
        error = messages.decode(last) if last.startswith("{") else self._death(index, process)
        self._errors.append(error)

    def _death(self, index: int, process: subprocess.Popen[str]) -> WriteError:
        code = process.wait()
        why = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        return WriteError(
            f"Worker {index + 1} of {self._count} died ({why}) before its share was written.",
            hint="Killed for want of memory? Fewer workers (-j) need less.",
        )
