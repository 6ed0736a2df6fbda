"""Every answer of a web server is compared with the range that it was asked for."""

from __future__ import annotations

import os
import re
from base64 import b64encode
from collections.abc import Callable, Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import ClassVar, NamedTuple

import numpy as np
import pytest
from running import Result, run
from safetensors.numpy import save_file

from ckpt_tools import formats
from ckpt_tools.errors import UnreadableError
from ckpt_tools.formats import read_index
from ckpt_tools.storage import paths
from ckpt_tools.storage.reader import Files
from ckpt_tools.storage.waiting import WAITING

pytest.importorskip("obstore")

REAL = Path(__file__).parents[1] / "data" / "checkpoints"
DCP = "fsdp2_dcp_hsdp_2x4/ckpt"
COLUMNS = "fsdp2_tp_dcp_2x2/ckpt"  # half of its shards are columns, which lie in strides
NUMBERS = bytes(range(256)) * 8
LOGIN = "Basic " + b64encode(b"me:a:b").decode()


class Answer(NamedTuple):
    """What a server sends: the status, its Content-Range, the bytes."""

    status: int
    content_range: str | None
    body: bytes


# Makes an answer of the bytes of a file, and the first and the last that were asked for.
Way = Callable[[bytes, int, int], Answer]


def right(data: bytes, first: int, last: int) -> Answer:
    last = min(last, len(data) - 1)
    return Answer(206, f"bytes {first}-{last}/{len(data)}", data[first : last + 1])


def shifted(data: bytes, first: int, last: int) -> Answer:
    return right(data, max(0, first - 4), last - 4)


def of_another_end(data: bytes, first: int, last: int) -> Answer:
    return right(data, first, last)._replace(content_range=f"bytes {first}-{last + 4}/{len(data)}")


def shorter(data: bytes, first: int, last: int) -> Answer:
    return right(data, first, last - 4)


def unnamed(data: bytes, first: int, last: int) -> Answer:
    return right(data, first, last)._replace(content_range=None)


def begun_anew(data: bytes, first: int, last: int) -> Answer:
    """All of a file that has become as short as what was asked for."""
    return Answer(200, None, data[: last + 1 - first])


def all_of_it(data: bytes, first: int, last: int) -> Answer:  # noqa: ARG001 (a way's signature)
    return Answer(200, None, data)


class _Ranged(SimpleHTTPRequestHandler):
    """A server that answers range requests in some way."""

    way: ClassVar[Way] = staticmethod(right)

    def do_GET(self) -> None:
        asked = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        path = self.translate_path(self.path)
        if asked is None or not os.path.isfile(path):
            return super().do_GET()
        data = Path(path).read_bytes()
        answer = type(self).way(data, *map(int, asked.groups()))
        self.send_response(answer.status)
        if answer.content_range is not None:
            self.send_header("Content-Range", answer.content_range)
        self.send_header("Content-Length", str(len(answer.body)))
        self.end_headers()
        self.wfile.write(answer.body)
        return None

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Callable[..., str]]:
    """Gives the address of a server of a folder that answers in this way."""
    servers: list[ThreadingHTTPServer] = []

    def start(way: Way, folder: Path = tmp_path, kind: type[_Ranged] = _Ranged) -> str:
        kind = type("_Way", (kind,), {"way": staticmethod(way)})
        server = ThreadingHTTPServer(("127.0.0.1", 0), partial(kind, directory=str(folder)))
        servers.append(server)
        Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        return f"http://127.0.0.1:{server.server_port}"

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def test_the_range_that_was_asked_for_is_taken(serve, tmp_path: Path) -> None:  # noqa: ANN001
    (tmp_path / "file").write_bytes(NUMBERS)
    with Files() as files:
        assert files.read(f"{serve(right)}/file", 100, 50) == NUMBERS[100:150]


def test_a_range_may_end_with_the_file(serve, tmp_path: Path) -> None:  # noqa: ANN001
    (tmp_path / "file").write_bytes(NUMBERS)
    with Files() as files, pytest.raises(UnreadableError, match="is truncated: 2,048 bytes"):
        files.read(f"{serve(right)}/file", 2_000, 100)


@pytest.mark.parametrize(
    ("way", "sent"),
    [
        (shifted, "Requested 100..150, got 96..146"),
        (of_another_end, "Requested 100..150, got 100..154"),
        (shorter, "Requested 100..150, got 100..146"),
        (unnamed, "Content-Range header not present"),
        (begun_anew, "Range request not supported"),
        (all_of_it, "Range request not supported"),
    ],
)
def test_another_answer_is_refused(way: Way, sent: str, serve, tmp_path: Path) -> None:  # noqa: ANN001
    (tmp_path / "file").write_bytes(NUMBERS)
    with Files() as files, pytest.raises(UnreadableError) as caught:
        files.read(f"{serve(way)}/file", 100, 50)
    assert "/file: its server sent other bytes than asked for: " in str(caught.value)
    assert sent in str(caught.value)
    assert "Download the file" in str(caught.value.hint)


def test_all_of_a_file_is_no_other_range_when_it_was_asked_for(serve, tmp_path: Path) -> None:  # noqa: ANN001
    (tmp_path / "file").write_bytes(NUMBERS)
    with Files() as files:
        assert files.read(f"{serve(all_of_it)}/file", 0, len(NUMBERS)) == NUMBERS


def test_a_stream_of_an_old_file_is_compared_too(serve) -> None:  # noqa: ANN001
    there = f"{serve(shifted, REAL)}/fsdp2_torchsave_legacy_4r/ckpt/model_rank0.pt"
    with pytest.raises(UnreadableError, match="other bytes than asked for"):
        read_index(there)


class _Guarded(_Ranged):
    """A server that lets in who knows the login, the header or the signature, and only to GET."""

    def do_HEAD(self) -> None:
        self.send_error(403)

    def do_GET(self) -> None:
        if self.headers["Authorization"] == LOGIN or "sig=a%2Fb" in self.path:
            super().do_GET()
        else:
            self.send_error(401)


def test_a_login_and_a_signature_are_sent(serve, tmp_path: Path) -> None:  # noqa: ANN001
    (tmp_path / "a b").write_bytes(NUMBERS)
    scheme, _, host = serve(right, kind=_Guarded).partition("://")
    for address in (f"{scheme}://me:a%3Ab@{host}/a%20b", f"{scheme}://{host}/a%20b?sig=a%2Fb"):
        assert paths.size(address) == len(NUMBERS)
        assert paths.is_file(address)
        with Files() as files:
            assert files.read(address, 100, 50) == NUMBERS[100:150]
    with Files() as files, pytest.raises(UnreadableError, match="its server answers 401"):
        files.read(f"{scheme}://me:wrong@{host}/a%20b", 100, 50)


def test_headers_that_fsspec_is_configured_with_are_sent(
    serve,  # noqa: ANN001
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    conf = pytest.importorskip("fsspec.config").conf
    monkeypatch.setitem(conf, "http", {"client_kwargs": {"headers": {"Authorization": LOGIN}}})
    (tmp_path / "file").write_bytes(NUMBERS)
    with Files() as files:
        assert files.read(f"{serve(right, kind=_Guarded)}/file", 100, 50) == NUMBERS[100:150]


def test_a_proxy_is_used_but_for_hosts_without(
    serve,  # noqa: ANN001
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "http:" / "store.invalid").mkdir(parents=True)
    (tmp_path / "http:" / "store.invalid" / "file").write_bytes(NUMBERS)  # what a proxy is asked
    monkeypatch.setattr(WAITING, "patience", 0.0)
    monkeypatch.setenv("HTTP_PROXY", serve(right))
    assert paths.size("http://store.invalid/file") == len(NUMBERS)
    monkeypatch.setenv("NO_PROXY", "other.invalid")
    with pytest.raises(OSError, match="failed to lookup"):
        paths.size("http://other.invalid/file")


def test_a_file_of_the_web_that_is_replaced_while_it_is_read_is_refused(
    serve,  # noqa: ANN001
    tmp_path: Path,
) -> None:
    (tmp_path / "file").write_bytes(NUMBERS)
    address = f"{serve(right)}/file"
    with Files() as files:
        files.read(address, 100, 50)
        (tmp_path / "file").write_bytes(NUMBERS * 2)
        with pytest.raises(UnreadableError, match="has been replaced while it was read"):
            files.read(address, 100, 50)


# --------------------------------------------------------------------------------- conversions


def _export(source: object, out: Path, *more: str) -> Result:
    return run("export", source, "-o", out, "-q", *more)


@pytest.mark.parametrize("more", [(), ("--check",)])
@pytest.mark.parametrize("kind", [DCP, COLUMNS])
def test_an_export_over_ranges_is_that_of_the_files(
    kind: str,
    more: tuple[str, ...],
    serve,  # noqa: ANN001
    tmp_path: Path,
) -> None:
    far, near = tmp_path / "far.safetensors", tmp_path / "near.safetensors"
    done = _export(f"{serve(right, REAL)}/{kind}", far, *more)
    assert done.exit_code == 0, done.stderr
    assert _export(REAL / kind, near, *more).exit_code == 0
    if not more:  # the record of a proof says what was downloaded again
        assert far.read_bytes() == near.read_bytes()


@pytest.mark.parametrize("placement", ["S(0)", "S(1)"])
def test_what_check_proves_are_the_bytes_that_were_copied(
    placement: str,
    serve,  # noqa: ANN001
    tmp_path: Path,
) -> None:
    """Of a server that sends a wrong byte when it is copied and when it is compared, not later."""
    save_file(
        {"w": np.arange(1 << 20, dtype=np.float32).reshape(1024, -1)}, tmp_path / "w.safetensors"
    )
    command = ["reshard", str(tmp_path / "w.safetensors"), "-o", str(tmp_path / "in"), "-q"]
    done = run(*command, "--to-mesh", "2", "--placements", placement)
    assert done.exit_code == 0, done.stderr
    with Files() as files:
        (entry,) = formats.locate(read_index(str(tmp_path / "in")), files).tensors
    (middle,) = {chunk.data.offset + chunk.data.length // 2 for chunk in entry.chunks}
    answers = list[int]()

    def damaging(data: bytes, first: int, last: int) -> Answer:
        body = bytearray(data)
        if first <= middle <= last < len(data):
            answers.append(first)
            body[middle] ^= len(answers) <= 2 * len(entry.chunks)
        return right(bytes(body), first, last)

    out = tmp_path / "out.safetensors"
    done = _export(f"{serve(damaging)}/in", out, "--check")
    assert done.exit_code == 3, done.stderr
    assert "what was read of it is damaged: w " in done.stderr
    assert not out.exists()


def test_a_file_that_ends_before_what_is_read_is_named_with_its_length(tmp_path: Path) -> None:
    path = tmp_path / "short"
    path.write_bytes(bytes(300))
    with Files() as files:
        for read in (files.read, lambda *asked: files.read_into(*asked[:2], bytearray(asked[2]))):
            with pytest.raises(UnreadableError, match="is truncated: 300 bytes, the index needs"):
                read(str(path), 1000, 10)
