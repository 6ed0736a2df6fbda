"""S3, Google Cloud Storage and Azure through obstore: what `fsspec_store` asks of a file system.

Every answer is held against the first one of its object: one that was replaced while it is read is
never pieced together from two versions. Faults come out as OSError, those that may pass a moment
later with the number EAGAIN.
"""

from __future__ import annotations

import io
import os
import re
from collections.abc import Mapping
from contextlib import suppress
from datetime import timedelta
from errno import EACCES, EAGAIN, ENOENT
from functools import partial
from typing import TYPE_CHECKING, BinaryIO

from ckpt_tools.errors import CkptError, UnreadableError, UsageError

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer
    from obstore import ObjectMeta
    from obstore.auth.boto3 import Boto3CredentialProvider
    from obstore.store import ClientConfig, ObjectStore, RetryConfig, S3Config

STALLED = timedelta(seconds=10)  # without a byte
_PART = 16 << 20  # bytes of what is sent, of one object at most so many parts
_MOST_PARTS = 9_000
_BLOCK = 1 << 18  # of streams: pickles of an old file, read from front to back
_STATUS = re.compile(r"status code: (\d{3}[^:\n]*)")
# Where a client that knows no credentials asks the machine for them.
_MACHINES = ("169.254.169.254", "metadata.google.internal")
_BUSY = ("408", "429", "5")  # answers that may be others a moment later, by their first digits
_AWS_KEYS = ("AWS_ACCESS_KEY_ID", "AWS_WEB_IDENTITY_TOKEN_FILE", "AWS_SKIP_SIGNATURE")
_AWS_HOSTS = ("AWS_CONTAINER_CREDENTIALS_RELATIVE_URI", "AWS_CONTAINER_CREDENTIALS_FULL_URI")
_CREDENTIALS = (
    "Credentials of S3 are AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or a profile "
    "(AWS_PROFILE); a public bucket needs AWS_SKIP_SIGNATURE=true. Google has "
    "GOOGLE_APPLICATION_CREDENTIALS, Azure AZURE_STORAGE_ACCOUNT_NAME and _KEY."
)


class Bucket:
    """A bucket or container, with the methods of an fsspec file system; ``root`` is its address."""

    def __init__(self, root: str) -> None:
        self._root = root
        self._store = _opened(root)
        self._versions: dict[str, tuple[object, int]] = {}

    def info(self, path: str) -> Mapping[str, object]:
        """Facts of a file. Raises FileNotFoundError, also of a folder, or another OSError."""
        import obstore

        if not self._key(path):
            raise FileNotFoundError(ENOENT, "it is a bucket", path)
        try:
            meta = obstore.head(self._store, self._key(path))
        except Exception as error:
            raise _fault(error, path) from error
        self._versions.setdefault(meta["path"], _version(meta))
        return _facts(meta)

    def ls(self, path: str, *, detail: bool) -> list[Mapping[str, object]]:  # noqa: ARG002 (fsspec's)
        """Facts of everything in a folder, whose files are then seen anew. Raises OSError."""
        import obstore

        try:
            found = obstore.list_with_delimiter(self._store, self._key(path))
        except Exception as error:
            raise _fault(error, path) from error
        self._versions |= {meta["path"]: _version(meta) for meta in found["objects"]}
        folders = [{"name": name, "type": "directory"} for name in found["common_prefixes"]]
        return [*map(_facts, found["objects"]), *folders]

    def cat_file(self, path: str, *, start: int, end: int) -> memoryview:
        """The bytes of a file from ``start`` to ``end``, fewer where it ends.

        Raises OSError, and UnreadableError when the file has been replaced since it was first seen.
        """
        import obstore

        key = self._key(path)
        try:
            answer = obstore.get(self._store, key, options={"range": (start, end)})
            data = memoryview(answer.bytes())
        except Exception as error:
            if "416" in _status(error):
                return memoryview(b"")
            raise _fault(error, path) from error
        if self._versions.setdefault(key, _version(answer.meta)) != _version(answer.meta):
            self._versions.clear()  # who reads again begins again
            raise UnreadableError(
                f"{path} has been replaced while it was read.",
                hint="Run the command again when nothing writes to it.",
            )
        return data

    def put_file(self, lpath: str, rpath: str) -> object:
        """Send a file of this machine, in parts where it is large. Raises OSError.

        Ctrl-C ends it between two parts, and the store then drops those that it has.
        """
        import obstore

        key, part = self._key(rpath), max(_PART, os.path.getsize(lpath) // _MOST_PARTS)
        try:
            with open(lpath, "rb") as file:
                parts = iter(partial(file.read, part), b"")
                return obstore.put(self._store, key, parts, chunk_size=part, max_concurrency=4)
        except Exception as error:
            raise _fault(error, rpath) from error

    def rm_file(self, path: str) -> None:
        """Remove a file. Raises OSError."""
        import obstore

        try:
            obstore.delete(self._store, self._key(path))
        except Exception as error:
            raise _fault(error, path) from error

    def open(self, path: str, mode: str, *, block_size: int) -> BinaryIO:  # noqa: ARG002 (fsspec's)
        """A stream that can be sought in. Raises OSError."""
        size = self.info(path)["size"]
        return io.BufferedReader(_Stream(self, path, int(str(size))), block_size)

    def invalidate_cache(self, path: str | None = None) -> None:
        """Nothing: no listings are kept here."""

    def _key(self, address: str) -> str:
        return address.removeprefix(self._root).strip("/")


class _Stream(io.RawIOBase):
    def __init__(self, bucket: Bucket, path: str, size: int) -> None:
        self._bucket, self._path, self._size, self._at = bucket, path, size, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        self._at = start + offset
        return self._at

    def readinto(self, buffer: WriteableBuffer) -> int:
        view = memoryview(buffer).cast("B")
        end = min(self._at + len(view), self._size)
        if self._at >= end:
            return 0
        data = self._bucket.cat_file(self._path, start=self._at, end=end)
        view[: len(data)] = data
        self._at += len(data)
        return len(data)


def _version(meta: ObjectMeta) -> tuple[object, int]:
    """What changes when an object is replaced."""
    return meta["e_tag"] or meta["version"] or meta["last_modified"], meta["size"]


def _facts(meta: ObjectMeta) -> Mapping[str, object]:
    tag = _version(meta)[0]
    return {"name": meta["path"], "size": meta["size"], "type": "file", "ETag": tag}


def _opened(root: str) -> ObjectStore:
    """The store of a bucket, with the user's own settings. Raises UsageError."""
    from obstore.store import from_url

    is_s3 = root.startswith(("s3://", "s3a://"))
    client: ClientConfig = {
        "connect_timeout": STALLED,
        "read_timeout": STALLED,
        "timeout": timedelta(minutes=10),  # of one answer, however large
    }
    retry: RetryConfig = {"max_retries": 0}  # `fsspec_store` tries again, and says so
    try:
        config, provider = _settings_of_s3() if is_s3 else ({}, None)
        endpoint = config.get("endpoint") or os.environ.get("AWS_ENDPOINT_URL", "")
        client["allow_http"] = endpoint.startswith("http://")
        return from_url(
            root,
            config=config,
            client_options=client,
            retry_config=retry,
            credential_provider=provider,
        )
    except UsageError:
        raise
    except Exception as error:  # of obstore, or of boto3
        raise UsageError(f"{root} cannot be opened: {_words(error)}.", hint=_CREDENTIALS) from error


def _settings_of_s3() -> tuple[S3Config, Boto3CredentialProvider | None]:
    """What obstore does not look up itself: profiles, single sign-on and roles, through boto3."""
    environ = os.environ
    settings: S3Config = {}
    if own := environ.get("AWS_ENDPOINT_URL_S3"):
        settings["endpoint"] = own
    if any(map(environ.get, (*_AWS_KEYS, *_AWS_HOSTS))) and "AWS_PROFILE" not in environ:
        return settings, None
    files = (environ.get("AWS_CONFIG_FILE"), environ.get("AWS_SHARED_CREDENTIALS_FILE"))
    home = ("~/.aws/config", "~/.aws/credentials")
    if not any(os.path.exists(os.path.expanduser(path)) for path in (*filter(None, files), *home)):
        return settings, None
    try:
        from boto3.session import Session
        from obstore.auth.boto3 import Boto3CredentialProvider
    except ImportError as error:
        raise UsageError(
            "Profiles of AWS need boto3.", hint="pip install boto3, or set AWS_ACCESS_KEY_ID."
        ) from error
    session = Session()
    profile = session._session.get_scoped_config()  # noqa: SLF001 (boto3 has no other way to it)
    with suppress(KeyError):
        settings.setdefault("endpoint", profile["endpoint_url"])
    if session.region_name:
        settings["region"] = session.region_name
    has_any = session.get_credentials() is not None
    return settings, Boto3CredentialProvider(session) if has_any else None


def _status(error: Exception) -> str:
    found = _STATUS.search(str(error))
    return found[1].strip() if found else ""


def _words(error: Exception) -> str:
    """What a client says, without its inner workings."""
    return str(error).partition("\n")[0].rstrip(" :.")


def _fault(error: Exception, address: str) -> OSError | CkptError:
    """The same as a sentence."""
    if isinstance(error, FileNotFoundError):
        return FileNotFoundError(ENOENT, "it does not exist", address)
    status, words = _status(error), _words(error)
    if any(machine in words for machine in _MACHINES):
        return UsageError(f"{address}: no credentials for its store.", hint=_CREDENTIALS)
    if "UnexpectedRange" in str(error):
        return UnreadableError(f"{address}: its store sent other bytes than asked for: {words}.")
    what = f"its store answers {status}" if status else words
    if isinstance(error, PermissionError) or status[:3] in ("401", "403"):
        return PermissionError(EACCES, what, address)
    may_pass = status.startswith(_BUSY) or (not status and "HTTP error" in words)
    return OSError(EAGAIN if may_pass else 0, what, address)
