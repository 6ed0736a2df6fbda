"""What of an unfinished output is finished: one small file for each process that writes.

A line is a fact, with a CRC-32 of its own, so that a torn last line says nothing. A task is told of
after all its bytes were written. As long as the machine is up that is proof enough: what was
written is in its page cache, or on its disk. What another boot (another machine, too) is to believe
was made durable before: every few seconds the files are synced, and then that is told.

This room knows files, tasks by their numbers, and lines. Who may write at all is `claim`'s.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache
from glob import escape, glob
from typing import NamedTuple

from ckpt_tools.copying.lock import hold, line_of, lines_in
from ckpt_tools.core.plan import FilePlan, files_of
from ckpt_tools.errors import WriteError, unwritable

# Seconds between two writes of lines, and between two syncs of what was written.
BATCH_SECONDS = 0.02
SYNC_SECONDS = 10.0

TaskId = tuple[str, int]


@dataclass(frozen=True, slots=True)
class Place:
    """Where an output is made: ``folder`` with its files, ``journals`` the folder of journals."""

    folder: str
    journals: str

    def share(self, index: int) -> str:
        """The journal of the process that does share ``index``."""
        return os.path.join(self.journals, f".journal.{index}")

    def shares(self) -> list[str]:
        """All journals of shares that are there."""
        return sorted(glob(os.path.join(escape(self.journals), ".journal.*")))


@cache
def boot_id() -> str:
    """What differs after every start of the machine; never the same where the system tells none."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return file.read().strip()
    except OSError:
        return os.urandom(16).hex()


@dataclass(slots=True)
class _Told:
    """What one journal says: finished tasks with their CRC-32, the first ``durable`` synced."""

    boot: str = ""
    tasks: list[tuple[TaskId, int]] = field(default_factory=list)
    durable: int = 0
    is_broken: bool = False
    length: int = 0

    @property
    def is_from_here(self) -> bool:
        """Whether the machine still runs that wrote it, and it is this one."""
        return self.boot == boot_id()


def _read(path: str) -> _Told:
    told = _Told()
    for body in lines_in(path):
        told.length += len(line_of(body))
        word, _, rest = body.partition(" ")
        if word == "task":
            number, crc, name = rest.split(" ", 2)
            told.tasks.append(((json.loads(name), int(number)), int(crc, 16)))
        elif word == "synced":
            told.durable = int(rest)
        elif word == "boot":
            told.boot = rest
        elif word == "broken":
            told.is_broken = True
    return told


class _Proven(NamedTuple):
    """Finished tasks with their CRC-32: those on disk, and those that this machine knows of."""

    synced: dict[TaskId, int]
    written: dict[TaskId, int]


def finished_tasks(place: Place, plans: Sequence[FilePlan]) -> dict[TaskId, int]:
    """Every task that is finished and proven, with its CRC-32.

    A file that is not there, or has another length than the plan says, has none.
    """
    proven = _proven(place, plans)
    return proven.synced | proven.written


def _proven(place: Place, plans: Sequence[FilePlan]) -> _Proven:
    all_told = [_read(path) for path in place.shares()]
    proven = _Proven({}, {})
    for told in all_told:
        proven.synced.update(told.tasks[: told.durable])
    if not any(told.is_broken for told in all_told):
        for told in all_told:
            if told.is_from_here:
                proven.written.update(told.tasks[told.durable :])
    lengths = {file.path: file.length for file in files_of(plans)}
    paths = {path for path, _ in proven.synced | proven.written}
    whole = {
        path for path in paths if _length(os.path.join(place.folder, path)) == lengths.get(path, -1)
    }
    return _Proven(*({task: crc for task, crc in p.items() if task[0] in whole} for p in proven))


def _length(path: str) -> int | None:
    try:
        return os.stat(path).st_size
    except OSError:
        return None


def gather_up(place: Place, plans: Sequence[FilePlan]) -> dict[TaskId, int]:
    """Put what all journals prove into that of share 0, and remove the others; gives the tasks.

    To be done before anyone goes on, by the one who holds the claim.
    """
    proven = _proven(place, plans)
    fresh = os.path.join(place.journals, ".journal-new")
    with open(fresh, "wb") as file:
        file.write(line_of(f"boot {boot_id()}"))
        file.writelines(_task_line(*task, crc) for task, crc in proven.synced.items())
        file.write(line_of(f"synced {len(proven.synced)}"))
        file.writelines(_task_line(*task, crc) for task, crc in proven.written.items())
    old = place.shares()
    os.replace(fresh, place.share(0))
    for path in old:
        if path != place.share(0):
            os.unlink(path)
    return proven.synced | proven.written


def distrust(place: Place) -> None:
    """Note that the disk did not take what was written: only what was synced counts from now on."""
    with open(place.share(0), "ab") as file:
        file.write(line_of("broken"))


def _task_line(path: str, number: int, crc: int) -> bytes:
    return line_of(f"task {number} {crc:08x} {json.dumps(path)}")


@contextmanager
def opened(place: Place, plans: Sequence[FilePlan], *, index: int) -> Iterator[ShareJournal]:
    """The journal of one share, held by this process alone as long as the block lasts.

    Raises WriteError, and UsageError when another process holds it.
    """
    journal = ShareJournal(place, plans, index=index)
    try:
        yield journal
    except BaseException:
        with suppress(WriteError):  # what ended the block says more
            journal.close()
        raise
    journal.close()


class ShareJournal:
    """Takes note of finished tasks, many at a time, and syncs what they wrote now and then."""

    def __init__(self, place: Place, plans: Sequence[FilePlan], *, index: int) -> None:
        self._place, self._path = place, place.share(index)
        self._known = finished_tasks(place, plans)
        try:
            flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
            self._fd = os.open(self._path, flags, 0o666)
        except OSError as error:
            raise unwritable(self._path, error) from error
        try:
            hold(self._fd, what=place.journals)
        except BaseException:
            os.close(self._fd)
            raise
        told = _read(self._path)
        is_ours = told.is_from_here or not told.boot
        os.ftruncate(self._fd, told.length if is_ours else 0)
        self._count = len(told.tasks) if is_ours else 0
        self._lines = [] if is_ours and told.boot else [line_of(f"boot {boot_id()}")]
        self._unsynced = {path for (path, _), _ in told.tasks} if is_ours else set()
        self._flushed = self._synced = time.monotonic()
        self._lock = threading.Lock()
        self._syncer: threading.Thread | None = None
        self._error: OSError | None = None

    def done(self, path: str, number: int) -> int | None:
        """The CRC-32 of a task that an earlier run finished, or None when it did not."""
        return self._known.get((path, number))

    def finished(self, path: str, number: int, crc: int) -> None:
        """Take note of a task whose bytes are all written. Raises WriteError."""
        now = time.monotonic()
        with self._lock:
            self._lines.append(_task_line(path, number, crc))
            self._count += 1
            self._unsynced.add(path)
        self._raise_error()
        if now - self._flushed >= BATCH_SECONDS:
            self._flushed = now
            self._flush()
        if now - self._synced >= SYNC_SECONDS:
            self._synced = now
            self._begin_sync()

    def close(self) -> None:
        """Write what is not written yet, as far as the disk takes it."""
        if self._syncer is not None:
            self._syncer.join()
        try:
            self._flush()
            self._raise_error()
        finally:
            os.close(self._fd)

    def _flush(self) -> None:
        try:
            self._write_lines()
        except OSError as error:
            raise unwritable(self._path, error) from error

    def _write_lines(self) -> None:
        with self._lock:
            data, self._lines = b"".join(self._lines), []
            while data:
                data = data[os.write(self._fd, data) :]

    def _raise_error(self) -> None:
        if self._error is not None:
            raise unwritable(self._place.folder, self._error) from self._error

    def _begin_sync(self) -> None:
        """Sync beside the work: the disk's time is not ours."""
        if self._syncer is None or not self._syncer.is_alive():
            self._syncer = threading.Thread(target=self._sync, name="sync", daemon=True)
            self._syncer.start()

    def _sync(self) -> None:
        with self._lock:
            paths, self._unsynced, count = self._unsynced, set(), self._count
        word = f"synced {count}"
        try:
            sync_files([os.path.join(self._place.folder, path) for path in paths])
        except OSError as error:
            self._error, word = error, "broken"
        with self._lock:
            self._lines.append(line_of(word))
        try:
            self._write_lines()
        except OSError as error:
            self._error = error


def sync_files(paths: Collection[str]) -> None:
    """Make these files durable, and that they are in their folders. Raises OSError."""
    for path in [*sorted(paths), *sorted(_folders(paths))]:
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def _folders(paths: Iterable[str]) -> set[str]:
    return {os.path.dirname(path) for path in paths}
