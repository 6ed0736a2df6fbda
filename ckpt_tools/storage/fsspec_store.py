"""Object stores and web servers, through obstore or fsspec: listings, sizes, reads by ranges.

An address is a path like ``s3://bucket/run7``. What it needs is loaded when the first address is
met. Faults come out as OSError, as those of local files do; only an answer that is not of the range
that was asked for, or of a file that was replaced meanwhile, is an UnreadableError.
"""

from __future__ import annotations

import io
import os
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from errno import EISDIR, ENOENT
from functools import cache, lru_cache
from operator import itemgetter
from typing import TYPE_CHECKING, BinaryIO, Generic, NamedTuple, Protocol, TypeVar

from ckpt_tools.errors import UsageError
from ckpt_tools.storage.waiting import WAITING

if TYPE_CHECKING:
    from concurrent.futures import ThreadPoolExecutor

    from _typeshed import WriteableBuffer

# What obstore reads, unless fsspec is configured for it.
SCHEMES = frozenset({"s3", "s3a", "gs", "az", "azure", "abfs", "abfss", "adl"})
AT_ONCE = 64  # requests of this process
# Name the other files: a web server, which lists no folder, is asked for them, and another store
# while it lists one, for as many of their bytes.
_INDEX_BYTES = 1 << 20
_INDEX_FILES = (".metadata", "model.safetensors.index.json", "pytorch_model.bin.index.json")
# A web server is asked for the same facts by every reader that looks at a folder: an answer holds
# for so many seconds.
_FRESH = 5.0
_HEAD = 1 << 10  # bytes that readers look at to find out what a file is
_BLOCK = 1 << 18  # of streams: pickles of an old file, read from front to back
Result = TypeVar("Result")


class _FileSystem(Protocol):
    """The few things that are asked of an fsspec file system."""

    def info(self, path: str) -> Mapping[str, object]:
        """Facts of a file or folder: name, size, type."""

    def ls(self, path: str, *, detail: bool) -> Sequence[Mapping[str, object]]:
        """Facts of everything in a folder."""

    def cat_file(self, path: str, *, start: int, end: int) -> bytes | memoryview:
        """The bytes of a file from ``start`` to ``end``."""

    def put_file(self, lpath: str, rpath: str) -> object:
        """Send a file of this machine, in parts where it is large."""

    def rm_file(self, path: str) -> None:
        """Remove a file."""

    def invalidate_cache(self, path: str | None = None) -> None:
        """Forget listings that are kept."""


class _Facts(NamedTuple):
    """What a store says of a name: ``size`` in bytes, 0 for a folder.

    ``version`` changes when the contents do; empty where the store tells none.
    """

    name: str
    size: int
    is_dir: bool
    version: str = ""


def uses_obstore(address: str) -> bool:
    """Whether obstore reads such an address: all of the web, and stores for which the user's own
    configuration of fsspec says nothing, if it is here.
    """
    scheme = address.partition("://")[0]
    if scheme not in SCHEMES:
        return is_web(address)
    from importlib.util import find_spec  # late, as all that addresses need

    return find_spec("obstore") is not None and not _settings(scheme)


@cache  # asked for with each request
def _has_settings() -> bool:
    folder = os.path.expanduser("~/.config/fsspec")
    return os.path.isdir(folder) or any(name.startswith("FSSPEC_") for name in os.environ)


def _settings(scheme: str) -> Mapping[str, object]:
    """What fsspec is configured with for a scheme, in files and in variables FSSPEC_….

    Without any of them it is not imported, which takes 60 ms.
    """
    if "fsspec" in sys.modules or _has_settings():
        with suppress(ImportError):
            from fsspec.config import conf

            found: Mapping[str, object] = conf.get(scheme, {})
            return found
    return {}


@lru_cache(maxsize=1024)
def _protocol(address: str) -> _FileSystem:
    """The file system of an address. Raises UsageError when it cannot be had here."""
    needed = "obstore" if is_web(address) else "fsspec"
    try:
        if uses_obstore(address):
            from ckpt_tools.storage import object_store  # late: only who gives an address pays

            return object_store.opened(address, _settings(address.partition("://")[0]))
        from fsspec import core
    except ImportError as error:
        raise UsageError(
            f"{address} is an address, for which {needed} is not installed.",
            hint="pip install 'ckpt-tools[remote]', and s3fs, gcsfs or huggingface_hub.",
        ) from error
    try:
        system: _FileSystem = core.url_to_fs(address)[0]
    except (ImportError, ValueError) as error:
        raise UsageError(
            f"{address} cannot be opened: {error}.",
            hint="s3:// needs s3fs, gs:// gcsfs, hf:// huggingface_hub.",
        ) from error
    return system


def _file_system(address: str) -> _FileSystem:
    scheme, _, rest = address.partition("://")
    if is_web(address):  # of a folder, whose files may have a query
        path, mark, query = rest.partition("?")
        return _protocol(f"{scheme}://{path.rpartition('/')[0] or path}{mark}{query}")
    return _protocol(f"{scheme}://{rest.partition('/')[0]}")


def _asked(address: str, ask: Callable[[_FileSystem], Result]) -> Result:
    """The answer of the store; whatever fault it has is an OSError."""
    system = _file_system(address)
    if uses_obstore(address):
        return WAITING.asked(lambda: ask(system))
    try:
        return ask(system)
    except OSError:
        raise
    except Exception as error:  # each client has faults of its own, and new ones
        raise OSError(0, f"{type(error).__name__}: {error}", address) from error


class _Answers(Generic[Result]):
    """What stores said a moment ago, but for those of fsspec, whose clients keep their listings."""

    def __init__(self) -> None:
        self._kept: dict[str, tuple[float, Result]] = {}

    def of(self, address: str, ask: Callable[[str], Result]) -> Result:
        """The answer for this address, asked for when none is fresh. Raises what ``ask`` raises."""
        answer = self.fresh(address)
        if answer is None:
            answer = ask(address)
            if uses_obstore(address):
                self._kept[address] = time.monotonic(), answer
        return answer

    def fresh(self, address: str) -> Result | None:
        """The answer for this address, None when there is no fresh one."""
        when, answer = self._kept.get(address, (-_FRESH, None))
        return answer if time.monotonic() - when <= _FRESH else None

    def forget(self) -> None:
        """Ask again from now on."""
        self._kept.clear()


_FACTS: _Answers[_Facts] = _Answers()
_HEADS: _Answers[bytes] = _Answers()
_LISTINGS: _Answers[list[_Facts]] = _Answers()


def facts(address: str) -> _Facts:
    """What the store says of an address. Raises FileNotFoundError, or another OSError."""
    try:
        return _facts_of(address)
    except PermissionError:
        if is_web(address) and listing(address):  # a folder that is not shown
            return _FACTS.of(address, lambda _: _Facts(_tail(address), 0, is_dir=True))
        raise


def _facts_of(address: str) -> _Facts:
    folder, _, name = address.rpartition("/")
    listed = None if is_web(address) else _LISTINGS.fresh(folder)
    if listed is None:
        return _FACTS.of(address, _ask_facts)
    for one in listed:
        if one.name == name:
            return one
    raise FileNotFoundError(ENOENT, "it does not exist", address)


def _ask_facts(address: str) -> _Facts:
    knows_files_alone = not is_web(address) and uses_obstore(address)
    listed = None
    if knows_files_alone and "." not in _tail(address):  # as folders are named
        from ckpt_tools.storage.object_store import Bucket  # late: see `_protocol`

        if isinstance(bucket := _file_system(address), Bucket):  # one for all threads
            for name in _INDEX_FILES:
                bucket.begin(f"{address}/{name}", _INDEX_BYTES, pool())
        listed = pool().submit(listing, address)
    try:
        return _facts(_asked(address, lambda system: system.info(address)))
    except FileNotFoundError:
        if knows_files_alone and (listing(address) if listed is None else listed.result()):
            return _Facts(_tail(address), 0, is_dir=True)
        raise


def _forget() -> None:
    for answers in (_FACTS, _HEADS, _LISTINGS):
        answers.forget()


def forget(address: str) -> None:
    """Have the next listing come from the store itself."""
    _forget()
    _file_system(address).invalidate_cache()


def listing(address: str) -> list[_Facts]:
    """What is in a folder, by name; of a web server, the files that name the others.

    Raises OSError.
    """
    return _LISTINGS.of(address, _ask_listing)


def is_dir(address: str) -> bool:
    """Whether this is a folder; of a web server, also one that it says is not there. Raises
    OSError.
    """
    try:
        return facts(address).is_dir
    except FileNotFoundError:
        return is_web(address) and bool(listing(address))


def _ask_listing(address: str) -> list[_Facts]:
    if is_web(address):
        return files_named(address, _INDEX_FILES)
    listed = _asked(address, lambda system: system.ls(address, detail=True))
    inside = sorted(filter(itemgetter(0), map(_facts, listed)))
    # Alone, it is the marker of the folder itself, or the file that was listed.
    is_itself = len(listed) == 1 and inside[:1] and inside[0][:3] == (_tail(address), 0, False)
    return [] if is_itself else inside


def is_web(address: str) -> bool:
    """Whether this is the address of a web server, which lists no folders."""
    return address.startswith(("http://", "https://"))


def files_named(address: str, names: Iterable[str]) -> list[_Facts]:
    """Those of these files that are in a folder; each is asked for. Raises OSError."""

    def ask(name: str) -> _Facts | None:
        with suppress(FileNotFoundError, PermissionError):
            found = _facts_of(f"{address.rstrip('/')}/{name}")
            return None if found.is_dir else found._replace(name=name)
        return None

    return list(filter(None, pool().map(ask, names)))


def _facts(entry: Mapping[str, object]) -> _Facts:
    size = entry.get("size")
    # To a web client all is a file; a page in the place of one is that of a folder.
    is_page = str(entry.get("mimetype", "")).startswith("text/html")
    is_dir = entry.get("type") == "directory" or is_page
    values = (entry.get(key) for key in ("ETag", "etag", "LastModified", "mtime", "created"))
    version = next((str(value) for value in values if value), "")
    known = size if isinstance(size, int) and not is_dir else 0
    return _Facts(_tail(str(entry["name"])), known, is_dir, version)


def _tail(path: str) -> str:
    return path.rstrip("/").rpartition("/")[2]


def read(address: str, offset: int, length: int) -> memoryview:
    """At most ``length`` bytes from ``offset`` on: fewer where the file ends. Raises OSError."""
    if length == 0:
        return memoryview(b"")
    # By name: some file systems have another argument in the second place.
    data = _asked(
        address, lambda system: system.cat_file(address, start=offset, end=offset + length)
    )
    return memoryview(data)


@cache
def pool() -> ThreadPoolExecutor:
    """Threads that wait for answers: all requests that are made at a time."""
    from concurrent.futures import ThreadPoolExecutor  # late, as all that addresses need

    return ThreadPoolExecutor(AT_ONCE, thread_name_prefix="store")


def head(address: str, length: int) -> bytes:
    """The first bytes of a file, fewer where it is shorter. Raises OSError."""

    def ask(address: str, most: int = _HEAD) -> bytes:
        return bytes(read(address, 0, min(most, facts(address).size)))

    return _HEADS.of(address, ask)[:length] if length <= _HEAD else ask(address, length)


def put(path: str, address: str) -> None:
    """Send a file of this machine to an address. Raises OSError."""
    _asked(address, lambda system: system.put_file(path, address))
    _forget()


def remove(address: str) -> None:
    """Remove a file. Raises OSError."""
    _asked(address, lambda system: system.rm_file(address))
    _forget()


class _Stream(io.RawIOBase):
    def __init__(self, address: str) -> None:
        found = facts(address)
        if found.is_dir:
            raise IsADirectoryError(EISDIR, "it is a folder", address)
        self._address, self._size, self._at = address, found.size, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        return self._at

    def readinto(self, buffer: WriteableBuffer) -> int:
        view = memoryview(buffer).cast("B")
        data = read(self._address, self._at, max(0, min(len(view), self._size - self._at)))
        view[: len(data)] = data
        self._at += len(data)
        return len(data)


def stream(address: str) -> BinaryIO:
    """A stream over a file, which can be sought in, read in small blocks. Raises OSError."""
    return io.BufferedReader(_Stream(address), _BLOCK)
