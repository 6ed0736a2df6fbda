"""Which files of an unfinished output are finished, and who may write them.

``OUT.partial`` holds files that are being written in ``unfinished``, and each as soon as all of it
is written and synced, under its final name in ``new``. The manifest says what the output is made
from, and which last steps are done; only the process that holds its lock changes the folder. Each
of its lines has a CRC-32, so that a torn last line says nothing.
"""

from __future__ import annotations

import fcntl
import json
import os
import threading
import time
import zlib
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from typing import Literal

from ckpt_tools.copying.origin import Origin
from ckpt_tools.core.plan import LazyPlans
from ckpt_tools.errors import OutputExistsError, WriteError, unwritable
from ckpt_tools.storage.paths import MANIFEST

# All is written and durable · the old OUT is about to make room for the new one.
Mark = Literal["complete", "replacing"]

# After a sync the next one waits so many times as long as it took: small files are synced together.
SYNC_PAUSE = 10.0
_WRITERS = ".writers"
_PATIENCE = 5.0  # seconds: a process that was killed, or lost its job, needs a moment to be gone
_PAUSE = 0.05
_TRIES = 10


@dataclass(frozen=True, slots=True)
class OutputPlace:
    """The folder in which an output is made, ``OUT.partial``."""

    partial: str

    @property
    def folder(self) -> str:
        """Where the finished files of the output are."""
        return os.path.join(self.partial, "new")

    @property
    def unfinished(self) -> str:
        """Where files are until they are finished; where nothing is written yet they have zeros."""
        return os.path.join(self.partial, "unfinished")

    @property
    def writers(self) -> str:
        """A file that each process that writes holds a shared lock of."""
        return os.path.join(self.partial, _WRITERS)

    @property
    def has_finished(self) -> bool:
        """Whether any file is finished, of whatever plans."""
        return next(_listed(self.folder), None) is not None

    def allocated(self) -> Counter[str]:
        """Bytes on the disk of each file that is there, finished or not."""
        states = [*_listed(self.folder), *_listed(self.unfinished)]
        return Counter({path: state.st_blocks * 512 for path, state in states})

    def finished(self, plans: LazyPlans) -> set[str]:
        """The files of these plans that are finished, and still have their planned length."""
        lengths = {path: state.st_size for path, state in _listed(self.folder)}
        return {file.path for file in plans.files if lengths.get(file.path) == file.length}

    def keep_finished(self, plans: LazyPlans) -> set[str]:
        """Remove all but the finished files, and give these: what is not written in a file must be
        zero. Only for the process that holds the manifest. Raises OSError.
        """
        finished = self.finished(plans)
        for path, _ in _listed(self.folder):
            if path not in finished:
                remove(os.path.join(self.folder, path))
        remove(self.unfinished)
        return finished

    def finish(self, path: str) -> None:
        """Give a file its final name, all of which is written and synced. Raises OSError."""
        made, name = os.path.join(self.unfinished, path), os.path.join(self.folder, path)
        try:
            os.rename(made, name)
        except FileNotFoundError:
            if os.path.exists(made):  # the folder is not there yet
                os.makedirs(os.path.dirname(name), exist_ok=True)
                os.rename(made, name)
            elif not os.path.exists(name):
                raise

    def finish_all(self, plans: LazyPlans) -> None:
        """Do the same with all files of these plans that have not got theirs yet."""
        named = dict(_listed(self.folder))
        for file in plans.files:
            if file.path not in named:
                self.finish(file.path)


def _listed(folder: str) -> Iterator[tuple[str, os.stat_result]]:
    """The files in a folder, by their paths in it, and their states. They are listed, not looked up
    by names: a file system over the network remembers which names it did not find.
    """
    for parent, _, names in os.walk(folder):
        inside = "" if parent == folder else f"{parent[len(folder) + 1 :]}/"
        for name in names:
            with suppress(FileNotFoundError):
                yield f"{inside}{name}", os.stat(os.path.join(parent, name))


@contextmanager
def writing(place: OutputPlace) -> Iterator[None]:
    """This process as one that writes there: no other run may begin there during the block."""
    try:
        fd = _open_locked(place.writers, what=place.partial, lock=fcntl.LOCK_SH)
    except OSError as error:
        raise unwritable(place.writers, error) from error
    try:
        yield
    finally:
        os.close(fd)


@contextmanager
def finishing(place: OutputPlace) -> Iterator[Finisher]:
    """Finishes files that this process writes during the block. Raises WriteError."""
    finisher = Finisher(place)
    try:
        yield finisher
        finisher.close()
    except BaseException:
        with suppress(WriteError):  # the error that ended the block says more
            finisher.close()
        raise


class Finisher:
    """Syncs what this process has written of files, several at a time, and gives those that nobody
    else writes in their final names.
    """

    def __init__(self, place: OutputPlace) -> None:
        self._place = place
        self._lock = threading.Lock()
        self._unsynced: dict[str, bool] = {}
        self._syncing: dict[str, bool] = {}
        self._next_sync = 0.0

    def written(self, path: str, is_whole: bool) -> None:  # noqa: FBT001 (what is known of it)
        """Take note that this process has written its part of a file, which may be all of it.

        Raises WriteError.
        """
        with self._lock:
            self._unsynced[path] = is_whole
            started = time.monotonic()
            if started < self._next_sync:
                return
            written, self._unsynced = self._unsynced, {}
            self._syncing |= written
        self._finish(written)
        ended = time.monotonic()
        self._next_sync = ended + SYNC_PAUSE * (ended - started)

    def close(self) -> None:
        """Sync and finish what is left, also by a call that a signal ended. Raises WriteError."""
        begun = {
            path: is_whole
            for path, is_whole in self._syncing.items()
            if os.path.exists(os.path.join(self._place.unfinished, path))
        }
        left, self._unsynced = begun | self._unsynced, {}
        self._syncing |= left
        self._finish(left)

    def _finish(self, written: Mapping[str, bool]) -> None:
        try:
            for path in sorted(written):
                _sync(os.path.join(self._place.unfinished, path))
            for path, is_whole in written.items():
                if is_whole:
                    self._place.finish(path)
                self._syncing.pop(path, None)
        except OSError as error:
            # Never again: after an error a second sync can succeed without the data.
            for path in written:
                self._syncing.pop(path, None)
            raise unwritable(self._place.folder, error) from error


def sync_files(paths: Collection[str]) -> None:
    """Make these files durable, and that they are in their folders. Raises OSError."""
    for path in [*sorted(paths), *sorted({os.path.dirname(path) for path in paths})]:
        _sync(path)


def _sync(path: str) -> None:
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

    @property
    def is_placed(self) -> bool:
        """Whether all is written, and has been renamed to its place."""
        return self.has("complete") and not os.path.lexists(self.result)

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
        sync_files([self._path])  # no old file comes back after a crash, and is taken for a new one
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
        os.close(_open_locked(OutputPlace(partial).writers, what=partial))
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


def _open_locked(path: str, *, what: str, lock: int = fcntl.LOCK_EX) -> int:
    """A file opened for appending, made if need be, and locked until it is closed.

    Raises OutputExistsError when another process holds it, and goes on where the system has no
    locks.
    """
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
    end = time.monotonic() + _PATIENCE
    while True:
        try:
            fcntl.flock(fd, lock | fcntl.LOCK_NB)
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
    """The lines of a manifest up to the first that is torn."""
    with open(path, "rb") as file:
        data = file.read()
    for line in data.split(b"\n")[:-1]:
        crc, _, body = line.partition(b" ")
        if crc != b"%08x" % zlib.crc32(body):
            return
        yield body.decode()
