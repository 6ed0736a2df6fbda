"""Every OUT: whether it may be written, before a byte is read for it, and how what was made gets
there without replacing what appeared meanwhile.

Nothing may be written over, into or around a source. Files and folders are compared by device and
inode, so that links, ``..``, slashes and another case hide nothing. A folder cannot be renamed onto
one that has anything in it, and a link never replaces a file. Where a file system has no links, the
place is looked at directly before the rename: of two commands of ours, only one holds the lock of
OUT.partial. Only paths are known here, never what is in files.
"""

from __future__ import annotations

import errno
import os
import re
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from typing import NamedTuple

from ckpt_tools.errors import OutputExistsError, UsageError, WriteError
from ckpt_tools.storage import paths

_Inode = tuple[int, int]
_TAKEN = frozenset({errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR, errno.EISDIR})
# The fifth word of a line is a mount point, with blanks as \040: proc(5).
_MOUNTS = "/proc/self/mountinfo"
_ESCAPED = re.compile(r"\\([0-7]{3})")


def partial_of(out: str) -> str:
    """The folder in which an output is made before it appears."""
    return f"{os.path.realpath(out)}{paths.UNFINISHED}"


def replaced_of(out: str) -> str:
    """Where the old output is for the moment in which the new one takes its place."""
    return f"{os.path.realpath(out)}.replaced"


def real(out: str) -> str:
    """The absolute path of an output without any link in it; an address as it is.

    A link to a folder is followed. Raises UsageError for what no output can replace: another link,
    a device, FIFO, socket or mount point, the working directory and what is above it.
    """
    if not out.strip() or "\0" in out or out == "-":
        hint = "An output is files, and is never written to stdout." if out == "-" else None
        raise UsageError(f"{out!r} is not a name for an output.", hint=hint)
    here = paths.local(out)
    if here is None:
        return paths.normal(out)
    given = here.rstrip(os.sep) or os.sep
    if os.path.islink(given) and not os.path.isdir(given):
        raise UsageError(
            f"{out} is a link to {os.readlink(given)}, which is not a folder.",
            hint="A link is never replaced: give the file itself, or another output.",
        )
    try:
        path = os.path.realpath(given)
        _refuse_kind(path)
        with suppress(FileNotFoundError):
            os.lstat(replaced_of(path))  # a name too long to be made when all is written
    except OSError as error:
        raise WriteError(f"{out} cannot be written: {error.strerror or error}.") from error
    return path


def _refuse_kind(path: str) -> None:
    """Raise UsageError for what may not be replaced, OSError for what cannot be looked at."""
    parent = existing_parent(path)
    if not os.path.isdir(parent):
        raise UsageError(f"{path} cannot be made: {parent} is not a folder.")
    try:
        mode = os.lstat(path).st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
        raise UsageError(
            f"{path} is {paths.kind_of(mode)}, and only files and folders are written.",
            hint="Name a file or a folder that does not exist yet.",
        )
    here = os.getcwd()
    if _inode(path) in map(_inode, (here, *_parents(here))):
        raise UsageError(
            f"{path} is the working directory, or above it.",
            hint="Name a folder in it that does not exist yet.",
        )
    if os.path.ismount(path) or path in _mount_points():
        raise UsageError(
            f"{path} is a mount point, which no output can replace.",
            hint="Name a folder in it that does not exist yet.",
        )


def _mount_points() -> set[str]:
    """Where file systems are mounted, also a file, or a folder of the same one; none if unknown.

    Of those `os.path.ismount` knows nothing, and the rename at the end would find out.
    """
    try:
        with open(_MOUNTS, encoding="utf-8", errors="surrogateescape") as file:
            fields = [line.split(" ")[4] for line in file]
    except OSError:
        return set()
    return {_ESCAPED.sub(lambda escaped: chr(int(escaped[1], 8)), field) for field in fields}


def existing_parent(path: str) -> str:
    """The nearest thing above this path that is there: a folder, unless the path cannot be made."""
    parent = os.path.dirname(path)
    while parent != os.sep and not os.path.lexists(parent):
        parent = os.path.dirname(parent)
    return parent


def refuse_source(out: str, sources: Iterable[str]) -> None:
    """Raise UsageError when ``out``, as `real` gives it, is, contains or lies inside a source.

    ``sources`` are files and folders that are read; what is not there counts for nothing. What is
    beside a source that is one file may be written.
    """
    if paths.is_address(out):
        _refuse_same_address(out, sources)
        return
    own = {_inode(path): path for path in (out, partial_of(out), replaced_of(out))}
    own.pop(None, None)
    above = set(map(_inode, _parents(out)))
    seen: set[str] = set()
    for given in sources:
        source = paths.local(given)
        inode = None if source is None else _inode(source)
        if source is None or inode is None:
            continue
        if inode in own:
            raise _sacred(own[inode], "is", given)
        if inode in above:
            raise _sacred(out, "lies inside", given)
        for parent in _parents(os.path.realpath(source)):
            if parent in seen:
                break
            seen.add(parent)
            if (held := _inode(parent)) in own:
                raise _sacred(own[held], "holds", given)


def _refuse_same_address(out: str, sources: Iterable[str]) -> None:
    """The same for an address: a store has no links, so that names are enough."""
    for given in filter(paths.is_address, sources):
        source = paths.normal(given)
        if out == source or out.startswith(f"{source}/") or source.startswith(f"{out}/"):
            raise _sacred(out, "shares a place with", given)


def _sacred(out: str, how: str, source: str) -> UsageError:
    return UsageError(
        f"{out} {how} the source {source}: OUT cannot be an input, inside an input or above it.",
        hint="Choose an output beside it; --force does not help.",
    )


def _parents(path: str) -> Iterator[str]:
    """Every folder above an absolute path, the nearest first."""
    while path != (path := os.path.dirname(path)):
        yield path


def _inode(path: str) -> _Inode | None:
    """What a path leads to, by device and inode; None when nothing is there that can be seen."""
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_dev, status.st_ino


class Standing(NamedTuple):
    """What is at a place: the number of its inode, and the states of all files in it."""

    inode: tuple[int, int]
    files: Mapping[str, tuple[int, int, int]]

    @classmethod
    def at(cls, out: str) -> Standing | None:
        """What is there now, if anything is."""
        try:
            state = os.lstat(out)
        except FileNotFoundError:
            return None
        files = {}
        for parent, _, names in os.walk(out):
            for path in (os.path.join(parent, name) for name in names):
                with suppress(FileNotFoundError):
                    files[os.path.relpath(path, out)] = _facts(os.lstat(path))
        return cls((state.st_dev, state.st_ino), files or {".": _facts(state)})

    def require(self, place: str, is_lost: Callable[[str], bool], *, named: str) -> None:
        """Raise OutputExistsError unless all at ``place`` that would be lost is as it was."""
        now = Standing.at(place)
        if now is None or now.inode != self.inode:
            raise appeared(named)
        if any(is_lost(path) and now.files[path] != self.files.get(path) for path in now.files):
            raise appeared(named)


def _facts(state: os.stat_result) -> tuple[int, int, int]:
    return state.st_ino, state.st_size, state.st_mtime_ns


def appeared(out: str) -> OutputExistsError:
    """The error for what another process has written at the place of an output."""
    return OutputExistsError(
        f"{out} appeared, or was changed, while this command ran; it was left as it is.",
        hint="Another process has written it. Move it away, or choose another output.",
    )


def place_file(made: str, out: str) -> None:
    """Make a file appear where none may be. Raises OutputExistsError."""
    try:
        os.link(made, out)
    except FileExistsError as error:
        raise appeared(out) from error
    except OSError as error:  # a file system without links
        if os.path.lexists(out):
            raise appeared(out) from error
        os.rename(made, out)
    else:
        os.unlink(made)


def is_linked(made: str, out: str) -> bool:
    """Whether a run was killed when its file had appeared, and its own name was still there."""
    try:
        return os.path.isfile(made) and os.path.samestat(os.lstat(made), os.lstat(out))
    except FileNotFoundError:
        return False


def place_folder(made: str, out: str) -> None:
    """Make a folder appear where nothing may be, not even an empty folder.

    Raises OutputExistsError.
    """
    if os.path.lexists(out):
        raise appeared(out)
    try:
        os.rename(made, out)
    except OSError as error:
        if error.errno in _TAKEN:
            raise appeared(out) from error
        raise
