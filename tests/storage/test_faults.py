"""Faults of stores and web servers: each command is right or refused, and soon."""

from __future__ import annotations

import re
import socket
import struct
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import count
from pathlib import Path
from threading import Barrier, Thread
from typing import ClassVar
from urllib.parse import parse_qs, urlsplit

import pytest
from launching import PATIENCE
from running import run

from ckpt_tools.storage import fsspec_store, object_store
from ckpt_tools.storage.waiting import WAITING

pytest.importorskip("obstore")
REAL = Path(__file__).parents[1] / "data" / "checkpoints"
CKPT = "fsdp2_dcp_hsdp_2x4/ckpt"


class Server(BaseHTTPRequestHandler):
    """An S3 with one bucket, and a web server, of the same files. ``faulty`` says of the number of
    a request whether its answer has the ``fault``.
    """

    protocol_version = "HTTP/1.1"
    fault: ClassVar[str] = ""
    faulty: ClassVar[Callable[[int], bool]]
    numbers: ClassVar[Iterator[int]]

    def do_GET(self) -> None:
        fault = self.fault if type(self).faulty(next(self.numbers)) else ""
        url = urlsplit(self.path)
        path = REAL / url.path.removeprefix("/b").strip("/")
        if "list-type" in url.query:
            self._list(parse_qs(url.query)["prefix"][0], fault)
        elif fault == "503":
            self._answer(503, b"")
        elif fault == "reset":
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.connection.close()
            self.close_connection = True
        elif path.is_file():
            self._file(path, fault)
        else:
            self._answer(404, b"")

    def do_HEAD(self) -> None:
        self.do_GET()

    def _file(self, path: Path, fault: str) -> None:
        data = path.read_bytes()
        tag = '"two"' if fault == "replaced" else '"one"'
        asked = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        if asked is None:
            self._answer(200, data, ETag=tag)
            return
        first, last = int(asked[1]), min(int(asked[2]), len(data) - 1)
        if fault == "another range":
            first, last = first - 1 if first else first, last - 1
        body, sent = data[first : last + 1], f"bytes {first}-{last}/{len(data)}"
        if fault not in ("truncated", "stalled"):
            self._answer(206, body, ETag=tag, **{"Content-Range": sent})
            return
        self._answer(206, body, len(body) // 2, ETag=tag, **{"Content-Range": sent})
        time.sleep(2 if fault == "stalled" else 0)
        self.close_connection = True

    def _list(self, prefix: str, fault: str) -> None:
        folder, entries = REAL / prefix, ""
        files = sorted(folder.iterdir()) if folder.is_dir() else []
        for file in files:
            size = file.stat().st_size // (2 if fault == "old listing" else 1)
            if file.is_file() and not (fault == "lagging listing" and "__1_0" in file.name):
                entries += (
                    f"<Contents><Key>{prefix}{file.name}</Key><Size>{size}</Size><ETag>&quot;one"
                    "&quot;</ETag><LastModified>2025-01-01T00:00:00Z</LastModified></Contents>"
                )
        self._answer(200, f"<ListBucketResult>{entries}</ListBucketResult>".encode())

    def _answer(self, status: int, body: bytes, cut: int | None = None, **headers: str) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name, value)
        self.send_header("Last-Modified", "Wed, 21 Oct 2015 07:28:00 GMT")
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body[:cut])
            self.wfile.flush()

    def log_message(self, *_: object) -> None:
        """Nothing is printed."""


@pytest.fixture(params=["s3", "http"])
def address(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The checkpoint at the server."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Server)
    Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    here = f"http://127.0.0.1:{server.server_port}"
    settings = {"ENDPOINT_URL": here, "ACCESS_KEY_ID": "a", "SECRET_ACCESS_KEY": "b"}
    for name, value in {**settings, "REGION": "us-east-1"}.items():
        monkeypatch.setenv(f"AWS_{name}", value)
    monkeypatch.setattr(WAITING, "patience", PATIENCE)
    monkeypatch.setattr(WAITING, "_since", None)
    fsspec_store._protocol.cache_clear()
    fsspec_store.forget(f"{here}/x")
    Server.numbers = count(1)
    yield f"s3://b/{CKPT}" if request.param == "s3" else f"{here}/{CKPT}"
    server.shutdown()
    server.server_close()
    fsspec_store._protocol.cache_clear()


def one_in(number: int) -> Callable[[int], bool]:
    return lambda request: request % number == 0


def has_faults(fault: str, faulty: Callable[[int], bool], monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the server answer so; only what stalls is not waited for."""
    monkeypatch.setattr(Server, "fault", fault)
    monkeypatch.setattr(Server, "faulty", staticmethod(faulty), raising=False)
    if fault == "stalled":
        monkeypatch.setattr(object_store, "STALLED", timedelta(seconds=0.3))


@pytest.mark.parametrize(
    ("fault", "faulty"),
    [
        ("", one_in(1)),
        ("503", one_in(7)),
        ("503", lambda request: request < 5),
        ("reset", one_in(5)),
        ("truncated", one_in(5)),
        ("stalled", one_in(9)),
    ],
)
def test_what_passes_changes_nothing(
    fault: str, faulty: Callable[[int], bool], address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    has_faults(fault, faulty, monkeypatch)
    done = run("fingerprint", address, "-q")
    assert done.exit_code == 0, done.stderr
    assert done.stdout == run("fingerprint", REAL / CKPT, "-q").stdout


@pytest.mark.parametrize(
    ("fault", "faulty", "said"),
    [
        ("503", one_in(1), r"its server answers 503 Service Unavailable, for \d+ seconds"),
        ("reset", one_in(1), r"error sending request.*, for \d+ seconds"),
        ("truncated", one_in(1), r", for \d+ seconds"),
        ("stalled", one_in(1), r", for \d+ seconds"),
        ("another range", one_in(2), "its server sent other bytes than asked for"),
        (
            "replaced",
            one_in(2),
            "has been replaced while it was read|has changed since it was first",
        ),
    ],
)
def test_what_lasts_is_refused(
    fault: str,
    faulty: Callable[[int], bool],
    said: str,
    address: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    has_faults(fault, faulty, monkeypatch)
    patience = 0.4 if "seconds" in said else PATIENCE
    done = run("fingerprint", address, "-q", "--store-timeout", patience)
    assert done.exit_code == 3
    assert re.search(said, done.stderr), done.stderr
    assert done.stdout == ""


@pytest.mark.parametrize("address", ["s3"], indirect=True)
def test_the_index_is_asked_for_while_its_folder_is_listed(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths: list[str] = []
    several = Barrier(2, timeout=PATIENCE)
    answer = Server.do_GET

    def waiting(self: Server) -> None:
        paths.append(self.path)
        if self.path.endswith("/.metadata") or "list-type" in self.path:
            several.wait()  # until both are asked for
        answer(self)

    monkeypatch.setattr(Server, "do_GET", waiting)
    monkeypatch.setattr(Server, "faulty", staticmethod(lambda _: False), raising=False)
    assert run("inspect", address, "-q").exit_code == 0
    assert sum(path.endswith("/.metadata") for path in paths) == 1


@pytest.mark.parametrize("address", ["s3"], indirect=True)
@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("lagging listing", r"1 of 8 data files is not there: __1_0\.distcp"),
        ("old listing", r"\.metadata"),
    ],
)
def test_a_listing_that_lags_is_never_half_a_checkpoint(
    fault: str, said: str, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Server, "fault", fault)
    monkeypatch.setattr(Server, "faulty", staticmethod(one_in(1)), raising=False)
    done = run("fingerprint", address, "-q")
    assert done.exit_code == 3
    assert re.search(said, done.stderr), done.stderr
    assert done.stdout == ""
