"""What stands at an output's place, and how a new one gets there without replacing what appeared.

A folder cannot be renamed onto one that has anything in it, and a link never replaces a file. Where
a file system has no links, the place is looked at directly before the rename: of two commands of
ours, only one holds the lock of OUT.partial.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import NamedTuple

from ckpt_tools.errors import OutputExistsError

_TAKEN = frozenset({errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR, errno.EISDIR})


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


def is_placed(made: str, out: str) -> bool:
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
