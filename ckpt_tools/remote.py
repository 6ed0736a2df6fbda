"""Object stores and web servers through fsspec: listings, sizes, and reads by ranges.

An address is a path like ``s3://bucket/run7``. fsspec and what it needs for a protocol are loaded
when the first address is met. Faults come out as OSError, as those of local files do.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import BinaryIO, NamedTuple, Protocol, TypeVar

from ckpt_tools.errors import UsageError

_BLOCK = 1 << 18  # of streams: pickles of an old file, read from front to back
# What clients raise that is no OSError, by the module that has it; none is imported for this.
_FOREIGN = (
    ("botocore.exceptions", "BotoCoreError"),
    ("botocore.exceptions", "ClientError"),
    ("aiohttp", "ClientError"),
    ("requests", "RequestException"),
    ("google.auth.exceptions", "GoogleAuthError"),
    ("huggingface_hub.errors", "HfHubHTTPError"),
)

Result = TypeVar("Result")


class FileSystem(Protocol):
    """The few things that are asked of an fsspec file system."""

    def info(self, path: str) -> Mapping[str, object]:
        """Facts of a file or folder: name, size, type."""

    def ls(self, path: str, *, detail: bool) -> Sequence[Mapping[str, object]]:
        """Facts of everything in a folder."""

    def cat_file(self, path: str, *, start: int, end: int) -> bytes:
        """The bytes of a file from ``start`` to ``end``."""

    def put_file(self, lpath: str, rpath: str) -> object:
        """Send a file of this machine, in parts where it is large."""

    def open(self, path: str, mode: str, *, block_size: int) -> BinaryIO:
        """A stream that can be sought in."""


class Facts(NamedTuple):
    """What a store says of a name: ``size`` in bytes, 0 for a folder.

    ``version`` changes when the contents do; empty where the store tells none.
    """

    name: str
    size: int
    is_dir: bool
    version: str = ""


@lru_cache(maxsize=1024)
def _protocol(address: str) -> FileSystem:
    """The file system of an address. Raises UsageError when it cannot be had here."""
    try:
        from fsspec import core  # late: only who gives an address pays for it
    except ImportError as error:
        raise UsageError(
            f"{address} is an address, for which fsspec is not installed.",
            hint="pip install 'ckpt-tools[remote]', and s3fs, gcsfs or huggingface_hub.",
        ) from error
    try:
        found: FileSystem = core.url_to_fs(address)[0]
    except (ImportError, ValueError) as error:
        raise UsageError(
            f"{address} cannot be opened: {error}.",
            hint="s3:// needs s3fs, gs:// gcsfs, hf:// huggingface_hub, http:// aiohttp.",
        ) from error
    return found


def _file_system(address: str) -> FileSystem:
    scheme, _, rest = address.partition("://")
    return _protocol(f"{scheme}://{rest.partition('/')[0]}")


def _foreign() -> tuple[type[Exception], ...]:
    """The faults of those clients that are loaded."""
    found = (getattr(sys.modules.get(module), name, None) for module, name in _FOREIGN)
    return tuple(kind for kind in found if isinstance(kind, type) and issubclass(kind, Exception))


def _asked(address: str, ask: Callable[[FileSystem], Result]) -> Result:
    """The answer of the store; whatever fault it has is an OSError."""
    system = _file_system(address)
    try:
        return ask(system)
    except OSError:
        raise
    except _foreign() as error:
        raise OSError(0, f"{type(error).__name__}: {error}", address) from error


def facts(address: str) -> Facts:
    """What the store says of an address. Raises FileNotFoundError, or another OSError."""
    return _facts(_asked(address, lambda system: system.info(address)))


def listing(address: str) -> list[Facts]:
    """What is in a folder, by name. Raises OSError."""
    found = _asked(address, lambda system: system.ls(address, detail=True))
    own = _tail(address)
    inside = [_facts(entry) for entry in found]
    return sorted(entry for entry in inside if entry.name and not _is_itself(entry, own, found))


def _is_itself(entry: Facts, own: str, found: Sequence[Mapping[str, object]]) -> bool:
    """Whether an entry is the marker of the folder itself, or the file that was listed."""
    return entry.name == own and len(found) == 1 and not entry.is_dir and entry.size == 0


def _facts(entry: Mapping[str, object]) -> Facts:
    size = entry.get("size")
    is_dir = entry.get("type") == "directory"
    told = (entry.get(key) for key in ("ETag", "etag", "LastModified", "mtime", "created"))
    version = next((str(value) for value in told if value), "")
    return Facts(_tail(str(entry["name"])), size if isinstance(size, int) else 0, is_dir, version)


def _tail(path: str) -> str:
    return path.rstrip("/").rpartition("/")[2]


def read(address: str, offset: int, length: int) -> bytes:
    """At most ``length`` bytes from ``offset`` on: fewer where the file ends. Raises OSError."""
    if length == 0:
        return b""
    # By name: some file systems have another argument in the second place.
    return _asked(
        address, lambda system: system.cat_file(address, start=offset, end=offset + length)
    )


def put(path: str, address: str) -> None:
    """Send a file of this machine to an address. Raises OSError."""
    _asked(address, lambda system: system.put_file(path, address))


def stream(address: str) -> BinaryIO:
    """A stream over a file, read in small blocks. Raises OSError."""
    return _asked(address, lambda system: system.open(address, "rb", block_size=_BLOCK))
