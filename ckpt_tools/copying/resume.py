"""Which files of an unfinished output are finished, and who may write them.

``OUT.partial`` holds the new files in ``new``, a manifest, and a log for each process that writes.
The manifest says what the output is made from, and which last steps are done; only the process that
holds its lock changes the folder. A log names the files in which its process has written
and synced all that is its own. Each line has a CRC-32, so that a torn last line says nothing.
"""

from __future__ import annotations

import fcntl
import json
import os
import threading
import time
import zlib
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from glob import escape, glob
from typing import Literal, NamedTuple

from ckpt_tools.copying.origin import Origin
from ckpt_tools.core.plan import LazyPlans
from ckpt_tools.errors import OutputExistsError, WriteError, unwritable
from ckpt_tools.storage.unfinished import MANIFEST

# All is written and durable · the old OUT is about to make room for the new one.
Mark = Literal["complete", "replacing"]

# After a sync the next one waits so many times as long as it took: small files are synced together.
SYNC_PAUSE = 10.0
_LOG = ".finished."
_LOG_ROOM = 256 << 10  # bytes for thousands of files, which a disk that fills up does not take
_PATIENCE = 5.0  # seconds: a process that was killed, or lost its job, needs a moment to be gone
_PAUSE = 0.05
_TRIES = 10


@dataclass(frozen=True, slots=True)
class OutputPlace:
    """The folder in which an output is made, ``OUT.partial``."""

    partial: str

    @property
    def folder(self) -> str:
        """Where the files of the output are."""
        return os.path.join(self.partial, "new")

    def log(self, index: int) -> str:
        """The log of the process that does share ``index``."""
        return os.path.join(self.partial, f"{_LOG}{index}")

    def logs(self) -> list[str]:
        """All logs that are there."""
        return sorted(glob(os.path.join(escape(self.partial), f"{_LOG}*")))


class TaskRange(NamedTuple):
    """Tasks ``first`` to ``end - 1`` ``of`` those that write the file ``path``."""

    path: str
    first: int
    end: int
    of: int


def noted_files(place: OutputPlace) -> set[str]:
    """The files whose parts were all written and synced."""
    parts: dict[str, list[TaskRange]] = {}
    for log in place.logs():
        for body in _lines_in(log):
            for part in (TaskRange(*fields) for fields in json.loads(body)):
                parts.setdefault(part.path, []).append(part)
    return {path for path, own in parts.items() if _is_all(own)}


def finished_files(place: OutputPlace, plans: LazyPlans) -> set[str]:
    """The noted files that are in these plans and still have their planned length."""
    noted = noted_files(place)
    return {
        file.path
        for file in plans.files
        if file.path in noted and _length(os.path.join(place.folder, file.path)) == file.length
    }


def keep_finished(place: OutputPlace, plans: LazyPlans) -> set[str]:
    """Merge all logs into one before the run resumes; returns the finished files.

    Others are removed: what is not written in a file must be zero. Only for the process that holds
    the manifest. Raises OSError.
    """
    finished = finished_files(place, plans)
    for path in {file.path for file in plans.files} - finished:
        remove(os.path.join(place.folder, path))
    old, kept = place.logs(), place.log(-1)
    fresh = os.path.join(place.partial, ".kept")
    with open(fresh, "wb") as file:
        file.write(_line_of(json.dumps([TaskRange(path, 0, 1, 1) for path in sorted(finished)])))
    sync_files([fresh])
    os.replace(fresh, kept)
    for log in old:
        if log != kept:
            os.unlink(log)
    sync_files([kept])  # no old log comes back after a crash
    return finished


def _is_all(parts: Sequence[TaskRange]) -> bool:
    end = 0
    for part in sorted(parts):
        if part.first > end:
            return False
        end = max(end, part.end)
    return end == parts[0].of


def _length(path: str) -> int | None:
    try:
        return os.stat(path).st_size
    except OSError:
        return None


@contextmanager
def logged(place: OutputPlace, index: int) -> Iterator[FileLog]:
    """The log of one share, locked by this process during the block.

    Raises WriteError, and OutputExistsError when another process holds it.
    """
    log = FileLog(place, index)
    try:
        yield log
    except BaseException:
        with suppress(WriteError):  # the error that ended the block says more
            log.close()
        raise
    log.close()


class FileLog:
    """Syncs what a process has written of a file, and notes it; several files at a time."""

    def __init__(self, place: OutputPlace, index: int) -> None:
        self._place, self._path = place, place.log(index)
        try:
            self._fd = _open_locked(self._path, what=place.partial)
            fcntl.fcntl(self._fd, fcntl.F_SETFL, 0)  # what comes last in it is room from now on
            os.lseek(self._fd, 0, os.SEEK_END)
            with suppress(OSError):
                os.posix_fallocate(self._fd, 0, _LOG_ROOM)
            os.write(self._fd, _line_of("[]"))
        except OSError as error:
            raise unwritable(self._path, error) from error
        self._lock = threading.Lock()
        self._unsynced: list[TaskRange] = []
        self._next_sync = 0.0

    def written(self, part: TaskRange) -> None:
        """Take note of a part whose bytes are all written. Raises WriteError."""
        with self._lock:
            self._unsynced.append(part)
            started = time.monotonic()
            if started < self._next_sync:
                return
            parts, self._unsynced = self._unsynced, []
        self._sync(parts)
        ended = time.monotonic()
        self._next_sync = ended + SYNC_PAUSE * (ended - started)

    def close(self) -> None:
        """Sync and note what is left. Raises WriteError."""
        try:
            if self._unsynced:
                self._sync(self._unsynced)
        finally:
            os.ftruncate(self._fd, os.lseek(self._fd, 0, os.SEEK_CUR))
            os.close(self._fd)

    def _sync(self, parts: Sequence[TaskRange]) -> None:
        try:
            sync_files([os.path.join(self._place.folder, part.path) for part in parts])
            os.write(self._fd, _line_of(json.dumps(parts)))
        except OSError as error:
            raise unwritable(self._place.folder, error) from error


def sync_files(paths: Collection[str]) -> None:
    """Make these files durable, and that they are in their folders. Raises OSError."""
    for path in [*sorted(paths), *sorted({os.path.dirname(path) for path in paths})]:
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


class Manifest:
    """The manifest of one ``OUT.partial``, held by this process."""

    def __init__(self, partial: str, fd: int) -> None:
        self.place = OutputPlace(partial)
        self._fd = fd
        self._path = os.path.join(partial, MANIFEST)
        first, *marks = list(_lines_in(self._path)) or ["{}"]
        facts = json.loads(first)
        self.origin = Origin(**facts["origin"]) if facts else None
        self._single_file: str | None = facts.get("single_file")
        self._marks = set(marks)

    @property
    def result(self) -> str:
        """What is to be renamed in the end: the folder, or the one file in it that matters."""
        folder = self.place.folder
        return os.path.join(folder, self._single_file) if self._single_file else folder

    def has(self, mark: Mark) -> bool:
        """Whether the output got as far as this mark, in this run or an earlier one."""
        return mark in self._marks

    def mark(self, mark: Mark) -> None:
        """Note, durably, how far the output has come."""
        os.write(self._fd, _line_of(mark))
        os.fsync(self._fd)
        self._marks.add(mark)

    def begin(self, origin: Origin, *, single_file: str | None) -> None:
        """Remove all that an earlier run left, and note what is made now."""
        os.ftruncate(self._fd, 0)
        self._marks.clear()
        self._clear()
        os.makedirs(self.place.folder)
        sync_files([self._path])  # no old log comes back after a crash, and is taken for a new one
        facts = {"origin": asdict(origin), "single_file": single_file}
        os.write(self._fd, _line_of(json.dumps(facts)))
        self.origin, self._single_file = origin, single_file

    def remove(self) -> None:
        """Remove the whole folder, the manifest itself last."""
        self._clear()
        with suppress(FileNotFoundError):
            os.unlink(self._path)
        with suppress(OSError):  # another process holds it already
            os.rmdir(self.place.partial)

    def _clear(self) -> None:
        for name in sorted(os.listdir(self.place.partial)):
            if name != MANIFEST:
                remove(os.path.join(self.place.partial, name))


def remove(path: str) -> None:
    """Remove a folder with all in it, a file, or nothing when nothing is there. Raises OSError."""
    if os.path.isdir(path) and not os.path.islink(path):
        from shutil import rmtree  # late: it loads every compressor, and a dry run removes nothing

        rmtree(path)
    elif os.path.lexists(path):
        os.unlink(path)


@contextmanager
def held(partial: str) -> Iterator[Manifest]:
    """Lock the manifest of an output in this folder; both are created if need be.

    Raises OutputExistsError when another process holds it, when a worker of a run that was killed
    still writes, and when the folder is not ours.
    """
    try:
        fd = _hold(partial)
    except OSError as error:
        raise unwritable(partial, error) from error
    try:
        for log in OutputPlace(partial).logs():
            os.close(_open_locked(log, what=partial))
        yield Manifest(partial, fd)
    finally:
        os.close(fd)


def _hold(partial: str) -> int:
    """An open and locked manifest, which is certainly the one that has its name."""
    path = os.path.join(partial, MANIFEST)
    for _ in range(_TRIES):
        refuse_foreign(partial)
        os.makedirs(partial, exist_ok=True)
        with suppress(FileNotFoundError):  # its holder is just done with it, and removed it
            fd = _open_locked(path, what=partial)
            with suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(fd), os.stat(path)):
                    return fd
            os.close(fd)
    raise OutputExistsError(f"{partial} appears and disappears: another process is writing it.")


def refuse_foreign(partial: str) -> None:
    """Raise OutputExistsError for what is there and is no unfinished output of ours.

    A link is none: what it leads to may be on another file system, from which nothing is renamed.
    """
    try:
        names = [] if os.path.islink(partial) else os.listdir(partial)
    except FileNotFoundError:
        return
    except NotADirectoryError:
        names = [partial]
    # One look: a run that ends just now removes all else first, then the manifest.
    if os.path.islink(partial) or (names and MANIFEST not in names):
        raise OutputExistsError(
            f"{partial} exists and is not an unfinished output of ckpt-tools.",
            hint="Move it away, or choose another output.",
        )


def _open_locked(path: str, *, what: str) -> int:
    """A file opened for appending, made if need be, and locked until it is closed.

    Raises OutputExistsError when another process holds it, and goes on where the system has no
    locks.
    """
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
    end = time.monotonic() + _PATIENCE
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            if time.monotonic() <= end:
                time.sleep(_PAUSE)
                continue
            os.close(fd)
            raise OutputExistsError(
                f"Another process is writing {what} now.",
                hint="Wait until it has finished, or choose another output.",
            ) from error
        except OSError:
            pass
        return fd


def _line_of(body: str) -> bytes:
    return f"{zlib.crc32(body.encode()):08x} {body}\n".encode()


def _lines_in(path: str) -> Iterator[str]:
    """The lines of a manifest or log up to the first that is torn; none when it does not exist."""
    try:
        with open(path, "rb") as file:
            data = file.read()
    except FileNotFoundError:
        return
    for line in data.split(b"\n")[:-1]:
        crc, _, body = line.partition(b" ")
        if crc != b"%08x" % zlib.crc32(body):
            return
        yield body.decode()
