"""Who makes an output, and from what: the lock and the first lines of ``OUT.partial/.journal``.

One process holds the claim from its first look to the last rename. The first line says from which
files, by which options and to which layout; marks after it say how far the ending got. This room
knows nothing of tasks.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import time
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, fields, is_dataclass
from hashlib import blake2b
from typing import TYPE_CHECKING, Literal

from ckpt_tools._version import __version__
from ckpt_tools.copying.tasks import TASK_BYTES
from ckpt_tools.core.dtypes import DType
from ckpt_tools.core.index import CheckpointIndex, FileEntry
from ckpt_tools.core.plan import FilePlan, PlannedFile, files_of, plan_digest
from ckpt_tools.errors import OutputExistsError, SourceChangedError, unwritable
from ckpt_tools.storage import paths

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

# All is written and durable · the old OUT is about to make room for the new one.
Mark = Literal["complete", "replacing"]

_JOURNAL = ".journal"
_NEW = "new"
_PATIENCE = 1.0  # seconds: a process that was killed needs a moment to be gone
_PAUSE = 0.05
_TRIES = 10


@dataclass(frozen=True, slots=True)
class Origin:
    """What an output is made from; with equal origins every byte of two outputs is equal.

    ``sources`` are the source's files, by names that do not tell where it is, with their states
    before they were first read; ``options`` what was asked for, in words; ``layout`` a digest of
    the plan.
    """

    version: str
    sources: Mapping[str, str]
    options: Mapping[str, str]
    layout: str

    @classmethod
    def of(
        cls, index: CheckpointIndex, plans: Sequence[FilePlan], options: Mapping[str, str]
    ) -> Origin:
        """The origin of these plans, made with these options for this checkpoint."""
        top = index.root if paths.is_dir(index.root) else os.path.dirname(index.root)
        sources = {
            os.path.relpath(file.path, top or "."): str(file.state or "not there")
            for file in sorted(with_states(index.files))
        }
        return cls(__version__, sources, dict(options), _layout(plans))

    def differences(self, now: Origin) -> list[str]:
        """What is different now, a line each; nothing when the origins are equal."""
        found = []
        if self.version != now.version:
            found.append(f"ckpt-tools was {self.version} and is {now.version}.")
        for name in sorted(self.options.keys() | now.options.keys()):
            was, new = self.options.get(name, "not there"), now.options.get(name, "not there")
            if was != new:
                found.append(f"{name} was {was} and is {new}.")
        for name in sorted(self.sources.keys() | now.sources.keys()):
            was, new = self.sources.get(name, "not there"), now.sources.get(name, "not there")
            if was != new:
                found.append(f"{name} of the source has changed: was {was}, is {new}.")
        if not found and self.layout != now.layout:
            found.append("The files to write would be other ones.")
        return found


def with_states(files: Sequence[FileEntry]) -> list[FileEntry]:
    """The same files; those that nobody has looked at, with the states that they have now."""
    now = paths.states_now(file.path for file in files if file.state is None)
    return [file._replace(state=file.state or now.get(file.path)) for file in files]


def require_unchanged(files: Sequence[FileEntry]) -> None:
    """Raise SourceChangedError when a file is not as it was before its first byte was read."""
    now = paths.states_now(file.path for file in files)
    changed = [file for file in files if file.state != now.get(file.path)]
    if changed:
        first = changed[0]
        was, new = first.state or "not there", now.get(first.path) or "not there"
        more = f" {len(changed) - 1} more files have changed, too." if len(changed) > 1 else ""
        raise SourceChangedError(
            f"{first.path} has changed since it was first read: was {was}, is {new}.{more}",
            hint="The output would be of two sources, so it was not given its name. Run the "
            "command again when nothing writes there any more.",
        )


def _layout(plans: Sequence[FilePlan]) -> str:
    """Differs when files, lengths, places or known bytes do, or how they are cut into tasks."""
    digest = blake2b(str(TASK_BYTES).encode(), digest_size=16)
    for file in files_of(plans):
        known = file.digest if isinstance(file, PlannedFile) else plan_digest(file)
        digest.update(repr((file.path, file.length, known)).encode())
    return digest.hexdigest()


def digest_of_reads(plans: Sequence[FilePlan]) -> str:
    """Differs when other bytes of the source go to the same places."""
    digest = blake2b(digest_size=16)
    for plan in plans:
        for item in plan.items:
            reads = [(r.box, r.chunk.box, r.chunk.strides, r.chunk.data[1:]) for r in item.reads]
            digest.update(repr((item.offset, item.box, reads)).encode())
    return digest.hexdigest()


def in_words(options: DataclassInstance) -> dict[str, str]:
    """Options as words that a person can compare, field by field.

    Of another checkpoint only its place is told: what it changes is seen in the plan. A step is
    told by its own fields, and no address of a function gets into the words.
    """
    return {field.name: _in_words(getattr(options, field.name)) for field in fields(options)}


def _in_words(value: object) -> str:
    if isinstance(value, CheckpointIndex):
        return value.root
    if isinstance(value, DType):
        return value.name
    if value is None or value == ():
        return "not given"
    if isinstance(value, tuple) and any(callable(one) for one in value):
        return ", ".join(str(one) if is_dataclass(one) else "a function" for one in value)
    return str(value)


def line_of(body: str) -> bytes:
    """A fact as a line of a journal."""
    return f"{zlib.crc32(body.encode()):08x} {body}\n".encode()


def lines_in(path: str) -> Iterator[str]:
    """The facts of a journal up to the first line that is torn; none when it is not there."""
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


def hold(fd: int, *, what: str) -> None:
    """Lock an open file for this process, until it is closed.

    Raises UsageError when another process holds it, and goes on where the system has no locks.
    """
    end = time.monotonic() + _PATIENCE
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            if time.monotonic() > end:
                raise OutputExistsError(
                    f"Another process is writing {what} at this moment.",
                    hint="Wait until it is done, or name another output.",
                ) from error
            time.sleep(_PAUSE)
        except OSError:
            return
        else:
            return


def folder_in(partial: str) -> str:
    """Where the files of an unfinished output are."""
    return os.path.join(partial, _NEW)


class Claim:
    """The claim on one ``OUT.partial``; only its holder changes what is in that folder."""

    def __init__(self, partial: str, fd: int) -> None:
        self.partial = partial
        self.folder = folder_in(partial)
        self._fd = fd
        first, *marks = list(lines_in(self._journal)) or [""]
        told = json.loads(first) if first else {}
        self.origin = Origin(**told["origin"]) if told else None
        self._single_file: str | None = told.get("single_file")
        self._marks = set(marks)

    @property
    def result(self) -> str:
        """What is to be renamed in the end: the folder, or the one file in it that matters."""
        return os.path.join(self.folder, self._single_file) if self._single_file else self.folder

    @property
    def _journal(self) -> str:
        return os.path.join(self.partial, _JOURNAL)

    def has(self, mark: Mark) -> bool:
        """Whether the output got as far as this mark, in this run or an earlier one."""
        return mark in self._marks

    def mark(self, mark: Mark) -> None:
        """Note, durably, how far the output has come."""
        os.write(self._fd, line_of(mark))
        os.fsync(self._fd)
        self._marks.add(mark)

    def begin(self, origin: Origin, *, single_file: str | None) -> None:
        """Remove all that an earlier run left, and note what is made now."""
        os.ftruncate(self._fd, 0)
        self._marks.clear()
        self._clear()
        os.makedirs(self.folder)
        os.write(
            self._fd, line_of(json.dumps({"origin": asdict(origin), "single_file": single_file}))
        )
        self.origin, self._single_file = origin, single_file

    def remove(self) -> None:
        """Remove the whole folder, the claim itself last."""
        self._clear()
        with suppress(FileNotFoundError):
            os.unlink(self._journal)
        with suppress(OSError):  # somebody else has come by and claims it already
            os.rmdir(self.partial)

    def hold_shares(self) -> None:
        """Raise UsageError when a worker of a run that was killed still writes."""
        for name in self._others():
            if name.startswith(f"{_JOURNAL}."):
                fd = os.open(os.path.join(self.partial, name), os.O_RDWR | os.O_CLOEXEC)
                try:
                    hold(fd, what=self.partial)
                finally:
                    os.close(fd)

    def _others(self) -> list[str]:
        return [name for name in sorted(os.listdir(self.partial)) if name != _JOURNAL]

    def _clear(self) -> None:
        for name in self._others():
            path = os.path.join(self.partial, name)
            if os.path.isdir(path) and not os.path.islink(path):
                shutil.rmtree(path)
            else:
                os.unlink(path)


@contextmanager
def claimed(partial: str) -> Iterator[Claim]:
    """Claim the making of an output in this folder, which is made if need be.

    Raises OutputExistsError when another process holds the claim, and when the folder is not ours.
    """
    try:
        fd = _claim(partial)
    except OSError as error:
        raise unwritable(partial, error) from error
    try:
        claim = Claim(partial, fd)
        claim.hold_shares()
        yield claim
    finally:
        os.close(fd)


def _claim(partial: str) -> int:
    """An open and locked journal, which is certainly the one that has its name."""
    journal = os.path.join(partial, _JOURNAL)
    for _ in range(_TRIES):
        refuse_foreign(partial)
        os.makedirs(partial, exist_ok=True)
        with suppress(FileNotFoundError):  # its holder is just done with it, and removed it
            fd = os.open(journal, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
            try:
                hold(fd, what=partial)
                if os.path.samestat(os.fstat(fd), os.stat(journal)):
                    return fd
            except BaseException:
                os.close(fd)
                raise
            os.close(fd)
    raise OutputExistsError(f"{partial} comes and goes: another process is writing it.")


def refuse_foreign(partial: str) -> None:
    """Raise OutputExistsError for what is there and is no unfinished output of ours.

    A link is none: what it leads to may be on another file system, from which nothing is renamed.
    """
    if not os.path.lexists(partial):
        return
    is_ours = os.path.isdir(partial) and (
        not os.listdir(partial) or os.path.isfile(os.path.join(partial, _JOURNAL))
    )
    if not is_ours or os.path.islink(partial):
        raise OutputExistsError(
            f"{partial} is there, and no unfinished output of ckpt-tools.",
            hint="Move it away, or name another output.",
        )
