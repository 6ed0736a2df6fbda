"""Object stores through obstore: each answer is right or refused, and an outage ends."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Barrier, Thread, Timer
from typing import ClassVar

import pytest
from launching import PATIENCE
from running import run

from ckpt_tools.core.sizes import Sizes
from ckpt_tools.errors import UnreadableError, UsageError
from ckpt_tools.storage import fsspec_store, object_store, paths
from ckpt_tools.storage.reader import Files
from ckpt_tools.storage.waiting import WAITING

pytest.importorskip("obstore")
DATA = bytes(range(256)) * 40
REAL = Path(__file__).parents[1] / "data" / "checkpoints"


class Store(BaseHTTPRequestHandler):
    """An S3 of objects that are all ``DATA``; ``faults`` are of the next answers, one each."""

    protocol_version = "HTTP/1.1"
    faults: ClassVar[list[str]] = []
    etag: ClassVar[str] = '"one"'
    requests: ClassVar[list[str]] = []

    def do_GET(self) -> None:
        fault = self.faults.pop(0) if self.faults else ""
        self.requests.append(self.headers.get("Range", self.command))
        if fault.isdigit():
            self._head(int(fault), 0)
            return
        start, last = map(int, self.headers.get("Range", "bytes=0-9")[6:].split("-"))
        last = min(last, len(DATA) - 1)
        if fault == "other range":
            start, last = start + 1, last + 1
        self._head(206, last - start + 1, f"bytes {start}-{last}/{len(DATA)}")
        if fault in ("cut", "stalled"):
            self.wfile.write(DATA[start : start + 2])
            self.wfile.flush()
            time.sleep(PATIENCE if fault == "stalled" else 0)
            self.close_connection = True
            return
        self.wfile.write(DATA[start : last + 1])

    def do_HEAD(self) -> None:
        self.requests.append("HEAD")
        if self.faults:
            self._head(int(self.faults.pop(0)), 0)
            return
        self._head(200, len(DATA))

    def _head(self, status: int, length: int, of_range: str = "") -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(length))
        self.send_header("ETag", self.etag)
        self.send_header("Last-Modified", "Wed, 21 Oct 2015 07:28:00 GMT")
        if of_range:
            self.send_header("Content-Range", of_range)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Nothing is printed."""


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Store]]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Store)
    Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{server.server_port}")
    for name, value in (
        ("ACCESS_KEY_ID", "a"),
        ("SECRET_ACCESS_KEY", "b"),
        ("REGION", "us-east-1"),
    ):
        monkeypatch.setenv(f"AWS_{name}", value)
    monkeypatch.setattr(WAITING, "_since", None)  # an outage of another test
    monkeypatch.setattr(WAITING, "_has_said", False)
    monkeypatch.setattr(WAITING, "is_stopped", False)
    fsspec_store._protocol.cache_clear()
    fsspec_store._forget()
    Store.faults, Store.requests = [], []
    Store.etag = '"one"'
    yield Store
    server.shutdown()
    server.server_close()
    fsspec_store._protocol.cache_clear()


def test_ranges_that_lie_near_are_one_request(store: type[Store]) -> None:
    files = Files(sizes=Sizes(fetched_gap=100))
    ranges = [("s3://b/x", start, 10) for start in (0, 50, 140, 5_000)]
    files.fetch([*ranges, (str(REAL), 0, 1)])
    assert sorted(store.requests) == ["bytes=0-149", "bytes=5000-5009"]
    assert [files.read(*one) for one in ranges] == [DATA[at : at + 10] for _, at, _ in ranges]
    assert len(store.requests) == 2
    assert files.read("s3://b/x", 145, 10) == DATA[145:155]  # not all of it was fetched
    assert len(store.requests) == 3


def test_what_lies_between_ranges_takes_no_more_memory_than_is_allowed(store: type[Store]) -> None:
    files = Files(sizes=Sizes(fetched_gap=2_000))
    files.fetch([("s3://b/x", start, 10) for start in range(0, 10_000, 1_000)], most=5_000)
    assert len(store.requests) == 10
    store.requests.clear()
    files.fetch([("s3://b/x", start, 10) for start in range(1, 10_001, 1_000)], most=10_000)
    assert store.requests == ["bytes=1-9010"]


@pytest.mark.usefixtures("store")
def test_a_range_behind_the_end_is_a_truncated_file() -> None:
    end = len(DATA)
    files = Files()
    files.fetch([("s3://b/x", end - 4, 8)])
    assert files.read("s3://b/x", end - 4, 4) == DATA[-4:]
    with pytest.raises(UnreadableError, match=r"truncated: 10,240 bytes, the index needs 10,244"):
        files.read("s3://b/x", end - 4, 8)


@pytest.mark.parametrize("faults", [["503"], ["cut"], ["stalled"], ["429", "500", "cut"]])
def test_what_passes_is_asked_for_again(
    store: type[Store], faults: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(object_store, "STALLED", timedelta(seconds=2))
    store.faults = [*faults]
    assert Files().read("s3://b/x", 7, 30) == DATA[7:37]
    assert len(store.requests) == len(faults) + 1


def test_another_range_is_refused(store: type[Store]) -> None:
    store.faults = ["other range"]
    with pytest.raises(UnreadableError, match=r"other bytes than asked for: .*Requested 7..37"):
        Files().read("s3://b/x", 7, 30)


def test_an_object_that_is_replaced_while_it_is_read_is_refused(store: type[Store]) -> None:
    assert paths.size("s3://b/x") == len(DATA)
    files = Files()
    files.read("s3://b/x", 0, 5)
    store.etag = '"two"'
    fsspec_store._FACTS.forget()
    assert paths.size("s3://b/x") == len(DATA)  # asked again while it is read
    with pytest.raises(UnreadableError, match="has been replaced while it was read"):
        files.read("s3://b/x", 5, 5)
    assert files.read("s3://b/x", 5, 5) == DATA[5:10]  # begun again


def test_what_was_begun_is_read_if_it_is_of_the_version_that_was_seen(store: type[Store]) -> None:
    bucket = object_store.opened("s3://b", {})
    with ThreadPoolExecutor() as pool:
        for name, nbytes in (("whole", 100), ("short", 20), ("replaced", 100)):
            bucket.begin(f"s3://b/{name}", nbytes, pool)
    store.requests.clear()
    store.etag = '"two"'
    bucket.info("s3://b/replaced")
    assert store.requests == ["HEAD"]
    assert bucket.cat_file("s3://b/replaced", start=0, end=50) == DATA[:50]
    assert store.requests == ["HEAD", "bytes=0-49"]
    store.etag = '"one"'
    assert bucket.cat_file("s3://b/short", start=0, end=50) == DATA[:50]
    assert store.requests == ["HEAD", "bytes=0-49", "bytes=0-49"]
    for end in (50, 60):  # begun, then asked for
        assert bucket.cat_file("s3://b/whole", start=0, end=end) == DATA[:end]
    assert store.requests == ["HEAD", "bytes=0-49", "bytes=0-49", "bytes=0-59"]
    with ThreadPoolExecutor() as pool:
        bucket.begin("s3://b/whole", 100, pool)
    assert len(store.requests) == 4


def test_an_outage_is_one_wait_and_one_error(
    store: type[Store], monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr(WAITING, "on_wait", said.append)
    monkeypatch.setattr(WAITING, "patience", 1.0)
    monkeypatch.setattr(WAITING, "silence", 0.1)
    store.faults = ["503"] * 1000
    for _ in range(3):
        store.requests.clear()
        with pytest.raises(UnreadableError, match=r"its server answers 503.*for \d+ seconds"):
            Files().read("s3://b/x", 0, 5)
    assert len(store.requests) == 1  # the second and third are not waited for
    assert said == [
        "s3://b/x: its server answers 503 Service Unavailable; waiting up to 1 seconds."
    ]
    store.faults = []
    assert Files().read("s3://b/x", 0, 5) == DATA[:5]


def test_a_store_that_refuses_is_asked_once(store: type[Store]) -> None:
    store.faults = ["403"]
    with pytest.raises(UnreadableError, match="403 Forbidden"):
        Files().read("s3://b/x", 0, 5)
    assert len(store.requests) == 1


@pytest.mark.usefixtures("store")
def test_a_file_is_a_stream() -> None:
    with fsspec_store.stream("s3://b/x") as file:
        assert file.read(300) == DATA[:300]
        file.seek(-3, 2)
        assert (file.read(), file.tell()) == (DATA[-3:], len(DATA))
        file.seek(1)
        assert file.readline(4) == DATA[1:5]


def test_without_credentials_it_is_said_what_to_set() -> None:
    asked = "Error performing PUT http://169.254.169.254/latest/api/token in 1s - error sending"
    error = object_store._fault(Exception(asked), "s3://b/x")
    assert isinstance(error, UsageError)
    assert "AWS_ACCESS_KEY_ID" in str(error.hint)


@pytest.mark.usefixtures("store")
def test_a_profile_has_its_keys_and_its_endpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("boto3")
    endpoint = "AWS_ENDPOINT_URL"
    (tmp_path / "config").write_text(
        "[profile lab]\nregion = eu-west-1\naws_access_key_id = k\naws_secret_access_key = s\n"
        f"endpoint_url = {os.environ[endpoint]}\n"
    )
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_REGION", endpoint):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_PROFILE", "lab")
    assert Files().read("s3://b/x", 0, 5) == DATA[:5]


@pytest.mark.usefixtures("store")
def test_a_profile_that_is_not_there_is_one_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("boto3")
    (tmp_path / "config").write_text("[default]\nregion = eu-west-1\n")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_PROFILE", "nobody")
    done = run("inspect", "s3://b/x")
    assert done.exit_code == 2
    assert "s3://b cannot be opened: The config profile (nobody) could not be found" in done.stderr


@pytest.mark.usefixtures("store")
def test_a_profile_without_any_file_of_profiles_is_one_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("AWS_PROFILE", "lab")
    assert Files().read("s3://b/x", 0, 5) == DATA[:5]  # by the keys that are set
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    fsspec_store._protocol.cache_clear()
    done = run("inspect", "s3://other/x")
    assert done.exit_code == 2
    assert "AWS_PROFILE is 'lab', and there is neither ~/.aws/config nor" in done.stderr


def test_fsspecs_own_configuration_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    assert fsspec_store.uses_obstore("s3://b/x")
    assert not fsspec_store.uses_obstore("hf://org/model")
    monkeypatch.setitem(pytest.importorskip("fsspec.config").conf, "s3", {"anon": True})
    assert not fsspec_store.uses_obstore("s3://b/x")


def test_fsspec_is_not_imported_where_it_is_not_configured(tmp_path: Path) -> None:
    code = (
        "import sys; from ckpt_tools.storage.fsspec_store import uses_obstore; "
        "print(uses_obstore('s3://b/x'), 'fsspec' in sys.modules)"
    )
    environ = {**os.environ, "HOME": str(tmp_path)}
    ours = {name: value for name, value in environ.items() if not name.startswith("FSSPEC_")}
    for more, said in (({}, "True False\n"), ({"FSSPEC_S3_ANON": "true"}, "False True\n")):
        words = [sys.executable, "-c", code]
        done = subprocess.run(words, env=ours | more, check=True, capture_output=True, text=True)
        assert done.stdout == said


def test_what_a_file_is_is_asked_for_once(store: type[Store]) -> None:
    assert [paths.head("s3://b/x.pt", length) for length in (16, 512)] == [DATA[:16], DATA[:512]]
    assert paths.head("s3://b/x.pt", 2_000) == DATA[:2_000]
    assert store.requests == ["HEAD", "bytes=0-1023", "bytes=0-1999"]


def test_a_folder_is_listed_while_it_is_asked_whether_it_is_a_file(
    store: type[Store], monkeypatch: pytest.MonkeyPatch
) -> None:
    both = Barrier(2, timeout=PATIENCE)

    def head(self: Store) -> None:
        both.wait()
        self._head(404, 0)

    def listed(self: Store) -> None:
        both.wait()
        found = b"<ListBucketResult><CommonPrefixes><Prefix>run/a/</Prefix></CommonPrefixes>"
        self._head(200, len(found) + 19)
        self.wfile.write(found + b"</ListBucketResult>")

    monkeypatch.setattr(store, "do_HEAD", head)
    monkeypatch.setattr(store, "do_GET", listed)
    assert paths.is_dir("s3://b/run")


def test_a_store_that_is_gone_is_said_by_a_command(
    store: type[Store], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(WAITING, "silence", 0.1)
    monkeypatch.setattr(WAITING, "patience", 60)
    store.faults = ["500"] * 1000
    done = run("inspect", "s3://b/run", "--store-timeout", "0.3")
    assert done.exit_code == 3
    wait, error = done.stderr.splitlines()
    assert wait.startswith(
        "s3://b/run: its server answers 500 Internal Server Error; waiting up to"
    )
    assert error.startswith("Error: s3://b/run: its server answers 500 Internal Server Error, for")


def test_what_lay_between_is_not_read_again(store: type[Store]) -> None:
    files = Files(sizes=Sizes(fetched_gap=2_000))
    files.fetch([("s3://b/x", start, 10) for start in range(0, 10_000, 1_000)], most=20_000)
    store.requests.clear()

    def read() -> None:
        files.fetch([("s3://b/x", 500, 300)])
        assert files.read("s3://b/x", 500, 300) == DATA[500:800]

    other = Thread(target=read)
    other.start()
    other.join()
    assert store.requests == []


def test_who_waits_for_a_store_is_stopped_at_once(
    store: type[Store], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(WAITING, "is_stopped", False)
    store.faults = ["503"] * 1000
    Timer(0.3, setattr, (WAITING, "is_stopped", True)).start()  # as Ctrl-C does
    with pytest.raises(UnreadableError, match=r"503 Service Unavailable(?!.*, for \d+ seconds)"):
        Files().read("s3://b/x", 0, 5)
