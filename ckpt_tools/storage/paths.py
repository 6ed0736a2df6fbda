"""Where files are: the questions that readers ask of paths, for local ones and for addresses.

The one seam between formats and what holds their files. It knows nothing of what is in them.
"""

from __future__ import annotations

import errno
import os
import re
import stat
from collections.abc import Collection, Iterable
from contextlib import suppress
from fnmatch import filter as filter_names
from functools import lru_cache
from glob import glob as local_glob
from itertools import islice
from typing import BinaryIO

from ckpt_tools.core.index import FileState
from ckpt_tools.errors import IncompleteError, UnreadableError
from ckpt_tools.storage import fsspec_store

# Outputs of this program that are not finished: folders ``OUT.partial`` with a manifest.
UNFINISHED = ".partial"
MANIFEST = ".manifest"
_ASKED = 256  # a file system of a cluster takes a millisecond for each file
_LONGEST = 4096  # bytes of a path: Linux's own limit
# By the letter that `ls -l` shows first.
_KINDS = {"-": "a file", "d": "a folder", "l": "a link", "p": "a FIFO", "s": "a socket"}
_KINDS |= {"b": "a block device", "c": "a character device"}
_ADDRESS = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+://")


def is_address(path: str) -> bool:
    """Whether this is an address such as ``s3://bucket/run7``, and no local path."""
    return _ADDRESS.match(path) is not None


def shows_changes(path: str) -> bool:
    """Whether each answer of this store is held against the first one of the file."""
    return is_address(path) and not fsspec_store.is_web(path) and fsspec_store.uses_obstore(path)


def is_unlisted(path: str) -> bool:
    """Whether this is the address of a web server, which does not say what is in a folder."""
    return fsspec_store.is_web(path)


def local(path: str) -> str | None:
    """The path on this machine that is meant, also by ``file://``; None for any other address."""
    scheme, separator, rest = path.partition("://")
    if separator and scheme in ("file", "local"):
        return rest
    return None if is_address(path) else path


def kind_of(mode: int) -> str:
    """What a ``st_mode`` is of, for a person."""
    return _KINDS.get(stat.filemode(mode)[0], "no file")


@lru_cache(maxsize=256)  # an index names one file a million times
def inside(relative: str) -> str:
    """A path below a folder as it is listed there: ``./a`` and ``b/../a`` are ``a``.

    Raises UnreadableError for one that leaves the folder, or that no file can have.
    """
    try:
        is_possible = relative and "\0" not in relative and len(os.fsencode(relative)) <= _LONGEST
    except UnicodeEncodeError:
        is_possible = False
    if not is_possible:
        raise UnreadableError(f"gives a file name that is not possible: {relative!r:.80}.")
    path = os.path.normpath(relative)
    if os.path.isabs(path) or path.split("/", 1)[0] in ("..", "."):
        raise UnreadableError(f"names a file outside of its folder: {relative!r:.80}.")
    return path


def special(path: str) -> str | None:
    """What is at a local path when it is neither a file nor a folder: ``a FIFO``, ``a socket``…"""
    try:
        mode = os.stat(path).st_mode
    except (OSError, ValueError):
        return None
    return None if stat.S_ISREG(mode) or stat.S_ISDIR(mode) else kind_of(mode)


def open_file(path: str) -> int:
    """A descriptor to read this file of a local path with. Raises OSError.

    What is no regular file is refused without opening it: a FIFO would wait for a writer for ever,
    and to open a device may already do something.
    """
    _require_regular(os.stat(path).st_mode, path)
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        _require_regular(os.fstat(fd).st_mode, path)  # it may have been exchanged meanwhile
    except BaseException:
        os.close(fd)
        raise
    return fd


def _require_regular(mode: int, path: str) -> None:
    if not stat.S_ISREG(mode):
        raise OSError(errno.EINVAL, f"it is {kind_of(mode)}, not a regular file", path)


def listdir(path: str) -> list[str]:
    """The names in a folder. Raises OSError."""
    if is_address(path):
        return [entry.name for entry in fsspec_store.listing(path)]
    return os.listdir(path)


def names_in(path: str) -> list[str]:
    """The names in a folder, sorted; none where it cannot be listed."""
    try:
        return sorted(listdir(path))
    except OSError:
        return []


def file_sizes(path: str) -> dict[str, int]:
    """The files right in a folder, and the bytes of each. Raises OSError."""
    if is_address(path):
        return {entry.name: entry.size for entry in fsspec_store.listing(path) if not entry.is_dir}
    with os.scandir(path) as entries:
        return {entry.name: entry.stat().st_size for entry in entries if entry.is_file()}


def sizes_of_named(folder: str, names: Collection[str]) -> dict[str, int]:
    """The bytes of these files where `file_sizes` does not list them, without those that are not
    there: those in folders below, and all of a web server. Raises OSError.
    """
    if fsspec_store.is_web(folder):
        return {entry.name: entry.size for entry in fsspec_store.files_named(folder, names)}
    sizes: dict[str, int] = {}
    below = {os.path.dirname(name) for name in names} - {""}
    for path in below:
        with suppress(OSError):  # what cannot be listed cannot be read
            inside = file_sizes(joined(folder, path))
            sizes |= {f"{path}/{name}": inside[name] for name in inside}
    return {name: sizes[name] for name in names if name in sizes}


def states(path: str) -> dict[str, FileState]:
    """The states of a file, or of the files right in a folder, by path. Raises OSError.

    Of a store only the listing of a folder is asked for, and of a web server, which has none,
    nothing.
    """
    if is_address(path):
        return {} if fsspec_store.is_web(path) or not is_dir(path) else _states_listed(path)
    if not os.path.isdir(path):
        return {path: _state_of(os.stat(path))}
    with os.scandir(path) as entries:
        return {
            os.path.join(path, entry.name): _state_of(entry.stat())
            for entry in entries
            if entry.is_file()
        }


def _state_of(status: os.stat_result) -> FileState:
    # No device: its number is another one on every node, and after every mount.
    return FileState(status.st_size, status.st_mtime_ns, f"inode {status.st_ino}")


def states_now(files: Iterable[str]) -> dict[str, FileState]:
    """The states of these files as they are now, without those that are not there."""
    states: dict[str, FileState] = {}
    folders: dict[str, set[str]] = {}
    for file in files:
        if is_address(file):
            folders.setdefault(os.path.dirname(file), set()).add(file)
            continue
        with suppress(OSError):
            states[file] = _state_of(os.stat(file))
    for folder, wanted in folders.items():
        fsspec_store.forget(folder)
        with suppress(OSError):
            listed = _states_listed(folder)
            states |= {path: listed[path] for path in wanted & listed.keys()}
    return states


def _states_listed(folder: str) -> dict[str, FileState]:
    """The states of the files in a folder of a store."""
    return {
        os.path.join(folder, one.name): FileState(one.size, version=one.version)
        for one in fsspec_store.listing(folder)
        if not one.is_dir
    }


def last_written(files: Iterable[str]) -> float | None:
    """When the newest of the first 256 local files was written, in seconds since 1970, or None."""
    times: list[float] = []
    for path in islice(files, _ASKED):
        if is_address(path):
            return None
        with suppress(OSError):
            times.append(os.stat(path).st_mtime)
    return max(times, default=None)


def is_dir(path: str) -> bool:
    """Whether this is a folder."""
    if is_address(path):
        return fsspec_store.is_dir(path)
    return os.path.isdir(path)


def is_file(path: str) -> bool:
    """Whether this is a file."""
    if is_address(path):
        with suppress(FileNotFoundError):
            return not fsspec_store.facts(path).is_dir
        return False
    return os.path.isfile(path)


def exists(path: str) -> bool:
    """Whether something is there; a link counts even when it leads nowhere."""
    if is_address(path):
        return is_dir(path) or is_file(path)
    return os.path.lexists(path)


def size(path: str) -> int:
    """Bytes of a file, a regular one. Raises OSError."""
    if is_address(path):
        return fsspec_store.facts(path).size
    status = os.stat(path)
    _require_regular(status.st_mode, path)
    return status.st_size


def head(path: str, length: int) -> bytes:
    """The first bytes of a file, fewer when it is shorter. Raises OSError."""
    if is_address(path):
        return fsspec_store.head(path, length)
    with stream(path) as file:
        return file.read(length)


def stream(path: str) -> BinaryIO:
    """The file, to be read from front to back. Raises OSError."""
    return fsspec_store.stream(path) if is_address(path) else open(open_file(path), "rb")


def glob(pattern: str) -> list[str]:
    """The paths that a pattern chooses, sorted; at an address its last part alone may be one."""
    if not is_address(pattern):
        return sorted(local_glob(pattern))
    folder, name = os.path.split(pattern)
    try:
        return sorted(os.path.join(folder, match) for match in filter_names(listdir(folder), name))
    except FileNotFoundError:
        return []


def absolute(path: str) -> str:
    """The same path, from the root on; an address is that already."""
    return path.rstrip("/") if is_address(path) else os.path.abspath(path)


def folder_of(path: str) -> str:
    """The folder of a path, spelled as the path is."""
    if is_address(path):
        return path.rstrip("/").rpartition("/")[0]
    return os.path.normpath(os.path.join(path, os.pardir))


def normal(path: str) -> str:
    """The same path without doubled or trailing slashes."""
    return path.rstrip("/") if is_address(path) else os.path.normpath(path)


def joined(folder: str, name: str) -> str:
    """The path of a name below a folder, without doubled slashes or a leading ``./``."""
    return normal(os.path.join(folder, name))


def is_unfinished(path: str) -> bool:
    """Whether exactly this folder is an output of this program that is not finished.

    Files in it are not all there, or have their full length and zeros where nothing is written yet:
    a reader that looks at lengths and headers would take them for whole.
    """
    named = path.rstrip(os.sep).endswith(UNFINISHED) and not is_address(path)
    return named and os.path.isfile(os.path.join(path, MANIFEST))


def refuse_unfinished(path: str) -> None:
    """Raise IncompleteError for an unfinished output, and for what is in one."""
    around = "" if is_address(path) else os.path.realpath(path)
    while around.strip(os.sep):
        if is_unfinished(around):
            raise IncompleteError(
                f"{path} is an output of ckpt-tools that is not finished: it is being written, or "
                "that was interrupted.",
                hint="Run the command that writes it again with --resume, or remove it.",
            )
        around = os.path.dirname(around)
