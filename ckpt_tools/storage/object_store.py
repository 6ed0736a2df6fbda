"""S3, Google Cloud Storage, Azure and web servers through obstore, with the methods of `fsspec`.

Every answer is held against the first one of its object: one that was replaced while it is read is
never pieced together from two versions. Faults come out as OSError, those that may pass a moment
later with the number EAGAIN.
"""

from __future__ import annotations

import os
import re
from base64 import b64encode
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import timedelta
from errno import EACCES, EAGAIN, ENOENT
from functools import partial
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit

from ckpt_tools.errors import CkptError, UnreadableError, UsageError

if TYPE_CHECKING:
    from concurrent.futures import Executor, Future

    from obstore import GetResult, ObjectMeta
    from obstore.auth.boto3 import Boto3CredentialProvider
    from obstore.store import ClientConfig, ObjectStore, RetryConfig, S3Config

STALLED = timedelta(seconds=10)  # without a byte
_PART = 16 << 20  # bytes of what is sent, of one object at most so many parts
_MOST_PARTS = 9_000
_ONCE: RetryConfig = {"max_retries": 0}  # `waiting` tries again, and says so
_STATUS = re.compile(r"status code: (\d{3}[^:\n]*)")
_CAUSE = re.compile(r'(?:error|message): "([^"]+)"|InvalidCertificate\(\s*(\w+)|kind: (Timeout)')
_NO_HEAD = ("400", "403", "405", "501")  # answers to who may only GET: a signature is of one verb
# Where a client that knows no credentials asks the machine for them.
_MACHINES = ("169.254.169.254", "metadata.google.internal")
_OTHER_RANGE = ("UnexpectedRange", "RangeNotSupported", "ContentRange")
_LASTING = ("InvalidCertificate", "following redirect")
_BUSY = ("408", "429", "5")  # answers that may be others a moment later, by their first digits
_AWS_KEYS = ("AWS_ACCESS_KEY_ID", "AWS_WEB_IDENTITY_TOKEN_FILE", "AWS_SKIP_SIGNATURE")
_AWS_HOSTS = ("AWS_CONTAINER_CREDENTIALS_RELATIVE_URI", "AWS_CONTAINER_CREDENTIALS_FULL_URI")
_CREDENTIALS = (
    "Credentials of S3 are AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or a profile "
    "(AWS_PROFILE); a public bucket needs AWS_SKIP_SIGNATURE=true. Google has "
    "GOOGLE_APPLICATION_CREDENTIALS, Azure AZURE_STORAGE_ACCOUNT_NAME and _KEY."
)


def opened(root: str, settings: Mapping[str, object]) -> Bucket:
    """The bucket or container of this address, or the folder of a web server, for which fsspec has
    these settings. Raises UsageError.
    """
    if root.startswith(("http://", "https://")):
        return _Site(root, _opened_site(root, settings))
    return Bucket(root, _opened_bucket(root))


class Bucket:
    """A bucket or container, with the methods of an fsspec file system; ``root`` is its address."""

    def __init__(self, root: str, store: ObjectStore) -> None:
        self._root, self._store = root, store
        self._seen: dict[str, ObjectMeta] = {}
        self._begun: dict[str, Future[tuple[ObjectMeta, memoryview]]] = {}

    def info(self, path: str) -> Mapping[str, object]:
        """Facts of a file. Raises FileNotFoundError, also of a folder, or another OSError."""
        import obstore

        if not self._key(path):
            raise FileNotFoundError(ENOENT, "it is a bucket", path)
        with _faults_of(path):
            meta = obstore.head(self._store, self._key(path))
        self._seen.setdefault(self._key(path), meta)
        return _facts(meta)

    def ls(self, path: str, *, detail: bool) -> list[Mapping[str, object]]:  # noqa: ARG002 (fsspec's)
        """Facts of everything in a folder, whose files are then seen anew. Raises OSError."""
        import obstore

        with _faults_of(path):
            found = obstore.list_with_delimiter(self._store, self._key(path))
        self._seen |= {meta["path"]: meta for meta in found["objects"]}
        folders = [{"name": name, "type": "directory"} for name in found["common_prefixes"]]
        return [*map(_facts, found["objects"]), *folders]

    def begin(self, path: str, nbytes: int, pool: Executor) -> None:
        """Ask for the first bytes of a file that may be there, once, before it is seen."""
        key = self._key(path)
        if key not in self._seen and key not in self._begun:
            self._begun[key] = pool.submit(self._asked, key, 0, nbytes)

    def cat_file(self, path: str, *, start: int, end: int) -> memoryview:
        """The bytes of a file from ``start`` to ``end``, fewer where it ends.

        Raises OSError, and UnreadableError when the file has been replaced since it was first seen.
        """
        key = self._key(path)
        try:
            meta, data = self._begun_or_asked(key, start, end)
        except Exception as error:
            if "416" in _status(error):
                return memoryview(b"")
            raise _fault(error, path) from error
        if _is_another(self._seen.setdefault(key, meta), meta):
            self._seen.pop(key, None)  # who reads again begins again
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
        with _faults_of(rpath), open(lpath, "rb") as file:
            parts = iter(partial(file.read, part), b"")
            return obstore.put(self._store, key, parts, chunk_size=part, max_concurrency=4)

    def rm_file(self, path: str) -> None:
        """Remove a file. Raises OSError."""
        import obstore

        with _faults_of(path):
            obstore.delete(self._store, self._key(path))

    def invalidate_cache(self, path: str | None = None) -> None:
        """Nothing: no listings are kept here."""

    def _begun_or_asked(self, key: str, start: int, end: int) -> tuple[ObjectMeta, memoryview]:
        begun = self._begun.pop(key, None)
        # One that has not started may stand behind this one in the pool.
        if begun is not None and not begun.cancel() and start == 0 and begun.exception() is None:
            meta, data = begun.result()
            is_listed = not _is_another(self._seen.get(key, meta), meta)
            if is_listed and len(data) >= min(end, meta["size"]):
                return meta, data[:end]
        return self._asked(key, start, end)

    def _asked(self, key: str, start: int, end: int) -> tuple[ObjectMeta, memoryview]:
        answer = self._answer(key, start, end)
        return answer.meta, memoryview(answer.bytes())

    def _answer(self, key: str, start: int, end: int) -> GetResult:
        import obstore

        return obstore.get(self._store, key, options={"range": (start, end)})

    def _key(self, address: str) -> str:
        return address.removeprefix(self._root).strip("/")


class _Site(Bucket):
    """A folder of a web server, which lists nothing. The query of an address, such as a signature,
    is sent with each request.
    """

    def info(self, path: str) -> Mapping[str, object]:
        """Facts of a file; a page is in the place of a folder. Raises OSError."""
        import obstore

        key, named = self._key(path), {"name": path.partition("?")[0]}
        try:
            try:
                answer = obstore.get(self._store, key, options={"head": True})
            except Exception as error:
                if not _status(error).startswith(_NO_HEAD):
                    raise
                answer = self._answer(key, 0, 1)  # its Content-Range has the length, too
        except Exception as error:
            if "MissingContentLength" in str(error):
                return {**named, "type": "directory"}
            raise _fault(error, path) from error
        self._seen.setdefault(key, answer.meta)
        return {**_facts(answer.meta), **named, "mimetype": answer.attributes.get("Content-Type")}

    def _answer(self, key: str, start: int, end: int) -> GetResult:
        import obstore
        from obstore.exceptions import NotSupportedError

        try:
            return super()._answer(key, start, end)
        except NotSupportedError:  # all of the file was sent, which is right if it is no more
            answer = obstore.get(self._store, key)
            if start or answer.meta["size"] > end:
                raise
            return answer

    def _key(self, address: str) -> str:
        folder, file = (part.partition("?")[0] for part in (self._root, address))
        return unquote(file.removeprefix(folder).strip("/"))


def _versions(meta: ObjectMeta) -> tuple[object, ...]:
    """What changes when an object is replaced; a web server may tell none of it."""
    return meta["e_tag"], meta["version"], meta["last_modified"].timestamp()


def _is_another(first: ObjectMeta, later: ObjectMeta) -> bool:
    """Whether an object has been replaced, by the first thing that is told of it both times."""
    for before, after in zip(_versions(first), _versions(later), strict=True):
        if before and after:
            return before != after or first["size"] != later["size"]
    return first["size"] != later["size"]


def _facts(meta: ObjectMeta) -> Mapping[str, object]:
    tag = next(filter(None, _versions(meta)), None)
    return {"name": meta["path"], "size": meta["size"], "type": "file", "ETag": tag}


def _opened_bucket(root: str) -> ObjectStore:
    """The store of a bucket, with the user's own settings. Raises UsageError."""
    from obstore.store import from_url

    try:
        is_s3 = root.startswith(("s3://", "s3a://"))
        config, keys = _settings_of_s3() if is_s3 else ({}, None)
        named = "AWS_ENDPOINT_URL" if is_s3 else "AZURE_STORAGE_ENDPOINT"
        client = _client(config.get("endpoint") or os.environ.get(named, ""))
        return from_url(
            root, config=config, client_options=client, retry_config=_ONCE, credential_provider=keys
        )
    except UsageError:
        raise
    except Exception as error:  # of obstore, or of boto3
        raise UsageError(f"{root} cannot be opened: {_words(error)}.", hint=_CREDENTIALS) from error


def _opened_site(root: str, settings: Mapping[str, object]) -> ObjectStore:
    """The store of a folder of a web server, with the headers that fsspec is configured with.

    Raises UsageError.
    """
    from obstore.store import HTTPStore

    client = _client(root)
    headers = dict[str, str]()
    client_settings = settings.get("client_kwargs")
    if isinstance(client_settings, dict):
        headers |= client_settings.get("headers", {})
    parts = urlsplit(root)
    if parts.username is not None:
        login = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
        headers["Authorization"] = f"Basic {b64encode(login.encode()).decode()}"
    client["default_headers"] = headers
    url = parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()
    try:
        return HTTPStore(url, client_options=client, retry_config=_ONCE)
    except Exception as error:
        raise UsageError(f"{url} cannot be opened: {_words(error)}.") from error


def _client(address: str) -> ClientConfig:
    return {
        "connect_timeout": STALLED,
        "read_timeout": STALLED,
        "timeout": timedelta(minutes=10),  # of one answer, however large
        "allow_http": address.startswith("http://"),
    }


def _settings_of_s3() -> tuple[S3Config, Boto3CredentialProvider | None]:
    """What obstore does not look up itself: profiles, single sign-on and roles, through boto3."""
    environ = os.environ
    settings: S3Config = {}
    if own := environ.get("AWS_ENDPOINT_URL_S3"):
        settings["endpoint"] = own
    has_keys, named = any(map(environ.get, (*_AWS_KEYS, *_AWS_HOSTS))), environ.get("AWS_PROFILE")
    if has_keys and "AWS_PROFILE" not in environ:
        return settings, None
    files = (environ.get("AWS_CONFIG_FILE"), environ.get("AWS_SHARED_CREDENTIALS_FILE"))
    home = ("~/.aws/config", "~/.aws/credentials")
    if not any(os.path.exists(os.path.expanduser(path)) for path in (*filter(None, files), *home)):
        if named and not has_keys:
            raise UsageError(
                f"AWS_PROFILE is {named!r}, and there is neither {' nor '.join(home)}.",
                hint="AWS_CONFIG_FILE names one elsewhere; without AWS_PROFILE, the machine's own "
                "role is asked.",
            )
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
    """What a client says, without its inner workings, and why."""
    first = str(error).partition("\n")[0].rpartition(" - ")[2].rstrip(" :.")
    causes = [next(filter(None, found)) for found in _CAUSE.findall(str(error))]
    return f"{first} ({causes[-1]})" if causes else first


@contextmanager
def _faults_of(address: str) -> Iterator[None]:
    """Raise what a client raises inside of the block as an error of this address."""
    try:
        yield
    except Exception as error:
        raise _fault(error, address) from error


def _fault(error: Exception, address: str) -> OSError | CkptError:
    """The same as a sentence."""
    status, words, text = _status(error), _words(error), str(error)
    if isinstance(error, FileNotFoundError) or status.startswith("410"):
        return FileNotFoundError(ENOENT, "it does not exist", address)
    if any(machine in text for machine in _MACHINES):
        return UsageError(f"{address}: no credentials for its store.", hint=_CREDENTIALS)
    if any(kind in text for kind in _OTHER_RANGE):
        return UnreadableError(
            f"{address}: its server sent other bytes than asked for: {words}.",
            hint="It does not support range requests, or a cache on the way answers them wrongly. "
            "Download the file and read it from disk.",
        )
    what = f"its server answers {status}" if status else words
    if isinstance(error, PermissionError) or status[:3] in ("401", "403"):
        return PermissionError(EACCES, what, address)
    is_lasting = any(kind in text for kind in _LASTING)
    may_pass = status.startswith(_BUSY) or (not status and "HTTP error" in text and not is_lasting)
    return OSError(EAGAIN if may_pass else 0, what, address)
