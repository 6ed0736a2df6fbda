"""Checkpoints in a store are read by ranges, as if they were here, and never written there."""

from __future__ import annotations

import importlib.util
import os
import pickle
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from datetime import timedelta
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from itertools import count
from pathlib import Path
from threading import Barrier, Event, Thread, current_thread
from typing import ClassVar, NamedTuple

import pytest
import torch
from launching import PATIENCE
from running import run

from ckpt_tools import api
from ckpt_tools.convert.write import WriteOptions
from ckpt_tools.core.index import ByteRange
from ckpt_tools.core.sizes import Sizes
from ckpt_tools.errors import (
    CheckpointError,
    IncompleteError,
    OutputExistsError,
    UnreadableError,
    UsageError,
)
from ckpt_tools.formats import read_index
from ckpt_tools.formats.zip.read import read_archive
from ckpt_tools.proof.fingerprint import fingerprint
from ckpt_tools.proof.verify import verify
from ckpt_tools.storage import fsspec_store, object_store, paths, reader, upload
from ckpt_tools.storage.reader import Files
from ckpt_tools.storage.waiting import WAITING

fsspec = pytest.importorskip("fsspec")

REAL = Path(__file__).parents[1] / "data" / "checkpoints"
KINDS = (
    "fsdp2_dcp_hsdp_2x4/ckpt",
    "fsdp2_tp_torchsave_2x2/ckpt",
    "fsdp2_torchsave_legacy_4r/ckpt",
    "fsdp1_full_torchsave/ckpt",
    "hf_sharded_safetensors",
    "dcp_hf_sharded_4r/ckpt",
    "dcp_zstd_4r/ckpt",
)


@pytest.fixture(autouse=True)
def _temporary_files(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))


@pytest.fixture
def put() -> Iterator[object]:
    """Puts a folder into memory, and takes all away in the end."""
    system = fsspec.filesystem("memory")

    def place(folder: Path, name: str) -> str:
        system.put(str(folder), f"/bucket/{name}", recursive=True)
        return f"memory://bucket/{name}"

    yield place
    system.rm("/bucket", recursive=True)


@pytest.mark.parametrize("kind", KINDS)
def test_a_checkpoint_in_a_store_has_the_same_tensors(kind: str, put) -> None:  # noqa: ANN001
    if "zstd" in kind:
        pytest.importorskip("zstandard")
    here, there = str(REAL / kind), put(REAL / kind, "run")
    assert run("fingerprint", there, "-q").stdout == run("fingerprint", here, "-q").stdout


@pytest.mark.parametrize("kind", KINDS[:2])
@pytest.mark.parametrize("command", [("ls",), ("layout",), ("verify", "--quick"), ("stats",)])
def test_looking_is_the_same_as_at_home(kind: str, command: tuple[str, ...], put) -> None:  # noqa: ANN001
    here, there = str(REAL / kind), put(REAL / kind, "run")
    first, second = (run(*command, place, "-q") for place in (here, there))
    assert second.exit_code == 0
    assert second.stdout.replace(there, here) == first.stdout


def test_export_and_reshard_write_here_what_they_read_there(tmp_path: Path, put) -> None:  # noqa: ANN001
    here = str(REAL / KINDS[0])
    there = put(REAL / KINDS[0], "run")
    for source, name in ((here, "here"), (there, "there")):
        out = str(tmp_path / name)
        assert run("export", source, "-o", f"{out}-hf", "-q").exit_code == 0
        assert run("reshard", source, "-o", out, "--to-mesh", "2x2", "-q").exit_code == 0
    for name in ("", "-hf"):
        first = {p.name: p.read_bytes() for p in (tmp_path / f"here{name}").iterdir()}
        second = {p.name: p.read_bytes() for p in (tmp_path / f"there{name}").iterdir()}
        assert first == second


def test_a_parent_with_one_checkpoint_inside_is_found(put) -> None:  # noqa: ANN001
    there = put(REAL / KINDS[0], "run/step-10")
    done = run("inspect", there.removesuffix("/step-10"))
    assert "step-10" in done.stdout


@pytest.mark.parametrize("command", [("export",), ("reshard", "--to-mesh", "3")])
def test_small_items_are_read_once_and_compared_with_their_checksums(
    command: tuple[str, ...],
    tmp_path: Path,
    put,  # noqa: ANN001
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    taken = _counted(monkeypatch)
    shutil.copytree(REAL / KINDS[0], tmp_path / "run")
    done = run(*command, put(tmp_path / "run", "run"), "-o", str(tmp_path / "out"))
    assert done.exit_code == 0
    stored = sum(one.stat().st_size for one in (tmp_path / "run").iterdir())
    assert sum(taken) < 1.5 * stored

    tensors = read_index(str(tmp_path / "run")).tensors
    item = next(entry for entry in tensors if entry.section == "model").chunks[-1].data
    _damage(item.path, _elements(item))
    done = run(*command, put(tmp_path / "run", "other"), "-o", str(tmp_path / "other"))
    assert done.exit_code == 3
    assert "record 'data/0' (bytes" in done.stderr
    assert "is damaged: its CRC-32 is" in done.stderr


@pytest.mark.parametrize("place", ["nowhere", "elements", "pickle", "directory"])
def test_verify_finds_in_a_store_what_it_finds_at_home(place: str, tmp_path: Path, put) -> None:  # noqa: ANN001
    shutil.copytree(REAL / KINDS[0], tmp_path / "run")
    item = read_index(str(tmp_path / "run")).tensors[3].chunks[-1].data
    start, end = item.offset, item.offset + item.length
    places = {"elements": _elements(item), "pickle": start + 200, "directory": end - 60}
    if place in places:
        _damage(item.path, places[place])
    here, there = str(tmp_path / "run"), put(tmp_path / "run", "run")
    first, second = run("verify", here, "--json"), run("verify", there, "--json")
    assert first.exit_code == second.exit_code == (place in places)
    assert second.stdout.replace(there, here) == first.stdout


def test_all_that_is_damaged_in_a_store_is_one_error(tmp_path: Path, put) -> None:  # noqa: ANN001
    shutil.copytree(REAL / KINDS[0], tmp_path / "run")
    model = [e for e in read_index(str(tmp_path / "run")).tensors if e.section == "model"]
    for entry in (model[0], model[-1]):
        item = entry.chunks[0].data
        _damage(item.path, item.offset + item.length - 60)
    index = read_index(put(tmp_path / "run", "run"))
    one_at_a_time = Sizes(fetched=1)
    with Files(sizes=one_at_a_time) as files, pytest.raises(CheckpointError) as caught:
        fingerprint(index, files)
    assert all(entry.fqn in str(caught.value) for entry in (model[0], model[-1]))


def test_verify_reads_what_stands_around_elements_with_them(
    tmp_path: Path,
    put,  # noqa: ANN001
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch.save({f"w{n}": torch.ones(40_000) for n in range(9)}, tmp_path / "model.pt")
    folder = tmp_path / "run"
    run("reshard", str(tmp_path / "model.pt"), "-o", str(folder), "--to-mesh", "4")
    index = read_index(put(folder, "run"))
    taken = _counted(monkeypatch)
    with Files(sizes=Sizes(fetched_gap=0)) as files:
        assert verify(index, files).whole
    assert len(taken) < sum(len(entry.chunks) for entry in index.tensors) / 2


@pytest.mark.parametrize("gap", [Sizes().fetched_gap, 2 << 10])
def test_items_are_read_once_however_few_fit_into_memory(
    gap: int,
    tmp_path: Path,
    put,  # noqa: ANN001
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Items of 20 KB of eight ranks, small ones or large ones as the gap says."""
    model, here = tmp_path / "model.pt", tmp_path / "run"
    torch.save({f"layers.{n}.w": torch.full((8, 5000), n) for n in range(12)}, model)
    assert run("reshard", str(model), "-o", str(here), "--to-mesh", "8").exit_code == 0
    stored = sum(one.stat().st_size for one in here.glob("*.distcp"))
    index = read_index(put(here, "run"))
    sizes = Sizes(task=40_000, fetched=300_000, fetched_gap=gap)
    taken = _counted(monkeypatch)
    with Files(sizes=sizes) as files:
        found = fingerprint(index, files)
    assert stored * 0.9 < sum(taken) < stored * 1.3
    assert found == fingerprint(read_index(str(here)), Files())
    taken.clear()
    api.export(index, tmp_path / "out", write=WriteOptions(sizes=sizes))
    assert stored * 0.9 < sum(taken) < stored * 1.3
    assert fingerprint(read_index(str(tmp_path / "out")), Files()).digest == found.digest


def test_threads_that_wait_for_a_store_share_one_file(
    tmp_path: Path,
    put,  # noqa: ANN001
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tensors = {f"w{n}": torch.full((25_000,), float(n)) for n in range(8)}
    torch.save(tensors, tmp_path / "model.pt")
    assert run("export", str(tmp_path / "model.pt"), "-o", str(tmp_path / "hf")).exit_code == 0
    index = read_index(put(tmp_path / "hf", "run"))
    several, reads = Barrier(4, timeout=PATIENCE), count()
    answer = reader._answer

    def waiting(address: str, offset: int, length: int) -> memoryview:
        if next(reads) < 4:
            several.wait()  # until four threads ask
        return answer(address, offset, length)

    monkeypatch.setattr(reader, "_answer", waiting)
    sizes = Sizes(slab=100_000, thread_work=100_000)
    api.export(index, tmp_path / "out", write=WriteOptions(sizes=sizes))
    assert next(reads) >= 8


def _counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The bytes of each answer of a store from now on."""
    taken: list[int] = []
    answer = reader._answer

    def counted(address: str, offset: int, length: int) -> memoryview:
        data = answer(address, offset, length)
        taken.append(len(data))
        return data

    monkeypatch.setattr(reader, "_answer", counted)
    return taken


def _damage(path: str, offset: int) -> None:
    data = bytearray(Path(path).read_bytes())
    data[offset] ^= 1
    Path(path).write_bytes(data)


def _elements(item: ByteRange) -> int:
    """Where the first element of an item of a DCP file stands."""
    with Files() as files:
        archive = read_archive(
            partial(files.read, item.path), offset=item.offset, length=item.length, where=""
        )
    return archive.record("data/0").offset


def test_headers_of_records_are_asked_for_together(
    tmp_path: Path,
    put,  # noqa: ANN001
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "run").mkdir()
    torch.save({f"w{n}": torch.ones(40_000) for n in range(9)}, tmp_path / "run" / "model.pt")
    alone: list[int] = []
    answer = reader._answer

    def counted(address: str, offset: int, length: int) -> memoryview:
        if not current_thread().name.startswith("store"):
            alone.append(offset)
        return answer(address, offset, length)

    monkeypatch.setattr(reader, "_answer", counted)
    address = put(tmp_path / "run", "run")
    assert len(read_index(f"{address}/model.pt").tensors) == 9
    assert alone == []
    assert run("verify", f"{address}/model.pt").exit_code == 0
    assert alone == []


def test_headers_of_shards_are_asked_for_together(
    put,  # noqa: ANN001
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    alone: list[str] = []
    fetch = Files._fetch

    def counted(self: Files, address: str, offset: int, length: int) -> memoryview:
        if self._held(address, offset, length) is None:
            alone.append(os.path.basename(address))
        return fetch(self, address, offset, length)

    monkeypatch.setattr(Files, "_fetch", counted)
    read_index(put(REAL / KINDS[4] / "ckpt", "run"))
    assert alone == ["model.safetensors.index.json"]


def test_rank_files_are_opened_before_their_turn(
    put,  # noqa: ANN001
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    opened: list[str] = []
    several = Barrier(4, timeout=PATIENCE)
    answer = reader._answer

    def waiting(address: str, offset: int, length: int) -> memoryview:
        if address not in opened:
            opened.append(address)
            several.wait()  # until the first bytes of four files are asked for
        return answer(address, offset, length)

    monkeypatch.setattr(reader, "_answer", waiting)
    assert len(read_index(put(REAL / KINDS[1], "run")).files) == 4


def test_a_glob_chooses_rank_files(put) -> None:  # noqa: ANN001
    there = put(REAL / KINDS[1], "run")
    done = run("inspect", f"{there}/model_rank*.pt")
    assert done.exit_code == 0, done.stderr
    assert "dp=2,tp=2, confirmed" in done.stdout


def test_a_server_that_knows_no_ranges_is_not_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fsspec_store, "read", lambda *_: b"all of the file")
    with Files() as files, pytest.raises(UnreadableError, match=r"asked for 4 bytes and sent 15"):
        files.read("memory://bucket/file", 0, 4)


def test_what_is_not_there_is_said_in_one_line() -> None:
    done = run("inspect", "memory://bucket/nowhere")
    assert done.exit_code == 3
    assert done.stderr == "Error: memory://bucket/nowhere does not exist.\n"


def test_an_unknown_protocol_is_a_matter_of_usage() -> None:
    done = run("inspect", "nonsense://bucket/run")
    assert done.exit_code == 2
    assert "s3fs" in done.stderr


@pytest.mark.parametrize("args", [("export",), ("reshard", "--to-mesh", "2x2")])
def test_an_output_in_a_store_is_what_it_is_on_a_disk(
    args: tuple[str, ...],
    tmp_path: Path,
    put,  # noqa: ANN001
) -> None:
    source, there = put(REAL / KINDS[0], "run"), "memory://bucket/out"
    assert run(*args, source, "-o", there, "-q").exit_code == 0
    assert run(*args, source, "-o", str(tmp_path / "out"), "-q").exit_code == 0
    system = fsspec.filesystem("memory")
    first = {p.name: p.read_bytes() for p in (tmp_path / "out").iterdir()}
    assert {
        Path(p).name: system.cat_file(p) for p in system.ls("/bucket/out", detail=False)
    } == first


@pytest.mark.parametrize("flags", [(), ("--force",)])
def test_nothing_in_a_store_is_replaced(flags: tuple[str, ...], put) -> None:  # noqa: ANN001
    there = put(REAL / KINDS[0], "run")
    done = run("export", str(REAL / KINDS[0]), "-o", there, *flags)
    assert done.exit_code == 2
    assert "already exists" in done.stderr


def test_what_makes_a_checkpoint_is_sent_last(
    put,  # noqa: ANN001
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    source, sent = put(REAL / KINDS[0], "run"), []
    real = fsspec_store.put

    def watched(path: str, address: str) -> None:
        sent.append(address)
        real(path, address)

    monkeypatch.setattr(fsspec_store, "put", watched)
    assert run("reshard", source, "-o", "memory://bucket/out", "--to-mesh", "2").exit_code == 0
    assert sent[-1] == "memory://bucket/out/.metadata"


def test_a_store_that_keeps_too_few_bytes_is_found_out(
    put,  # noqa: ANN001
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    source = put(REAL / KINDS[0], "run")
    system = fsspec.filesystem("memory")
    monkeypatch.setattr(fsspec_store, "put", lambda path, address: system.pipe_file(address, b"?"))  # noqa: ARG005
    done = run("export", source, "-o", "memory://bucket/out")
    assert done.exit_code == 4
    assert "were sent" in done.stderr


def test_a_run_that_was_ended_while_it_sent_goes_on(
    put,  # noqa: ANN001
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    source, out = put(REAL / KINDS[0], "run"), "memory://bucket/out"
    command = ("reshard", source, "-o", out, "--to-mesh", "4")
    sent, real = list[str](), fsspec_store.put

    def killed(path: str, address: str) -> None:
        if address.endswith("__2_0.distcp") and not sent[2:]:
            sent.append("killed")
            raise SystemExit(9)
        sent.append(address.rpartition("/")[2])
        real(path, address)

    monkeypatch.setattr(fsspec_store, "put", killed)
    assert run(*command).exit_code == 9
    assert run(*command).exit_code == 2  # OUT is there
    system, other = fsspec.filesystem("memory"), "/bucket/out/__1_0.distcp"
    system.pipe_file(other, b"of somebody else")
    done = run(*command, "--resume")
    assert done.exit_code == 2
    assert f"memory:/{other} is not the object that was sent" in done.stderr
    system.rm_file(other)
    done = run(*command, "--resume")
    assert done.exit_code == 0, done.stderr
    first = ["__0_0.distcp", "__1_0.distcp", "killed"]
    assert sent == [*first, "__1_0.distcp", "__2_0.distcp", "__3_0.distcp", ".metadata"]
    prints = [run("fingerprint", at, "-q").stdout for at in (source, out)]
    assert prints[0] == prints[1] != ""
    assert not list((tmp_path / "tmp").iterdir())


def test_nothing_of_others_is_mixed_with_what_was_sent(
    put,  # noqa: ANN001
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    out, system = "memory://bucket/out", fsspec.filesystem("memory")
    command = ("reshard", put(REAL / KINDS[0], "run"), "-o", out, "--to-mesh", "2")
    real = fsspec_store.put

    def refused(path: str, address: str) -> None:
        if address.endswith(".metadata"):
            raise OSError(0, "its server answers 503", address)
        real(path, address)

    with monkeypatch.context() as patch:
        patch.setattr(fsspec_store, "put", refused)
        done = run(*command)
    assert done.exit_code == 4
    assert "the same command with --resume sends what is missing" in done.stderr
    system.pipe_file("/bucket/out/old.distcp", b"old")
    done = run(*command, "--resume")
    assert done.exit_code == 2
    assert f"{out} has old.distcp, too" in done.stderr
    system.rm_file("/bucket/out/old.distcp")
    assert run(*command, "--resume").exit_code == 0
    assert run("verify", out).exit_code == 0


def test_a_rehearsal_sends_nothing() -> None:
    args = ("--to-mesh", "2", "--dry-run")
    done = run("reshard", str(REAL / KINDS[0]), "-o", "memory://bucket/out", *args)
    assert done.exit_code == 0, done.stderr
    assert not paths.exists("memory://bucket/out")


def test_a_file_that_shrank_is_cut_short(put) -> None:  # noqa: ANN001
    there = put(REAL / KINDS[0], "run")
    with Files() as files, pytest.raises(UnreadableError, match="truncated"):
        files.read(f"{there}/.metadata", 10, 10**9)


def test_a_file_that_is_gone_is_incomplete() -> None:
    with Files() as files, pytest.raises(IncompleteError, match="does not exist"):
        files.size("memory://bucket/gone")


def test_without_fsspec_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fsspec", None)
    fsspec_store._protocol.cache_clear()
    with pytest.raises(UsageError) as caught:
        paths.is_dir("memory://bucket")
    assert "ckpt-tools[remote]" in str(caught.value.hint)


@pytest.mark.parametrize("path", ["C:\\run", "run7/step", "/a//b", "a:b", "./s3:/x"])
def test_local_paths_are_no_addresses(path: str) -> None:
    assert not paths.is_address(path)


# ------------------------------------------------------------------------------------ a web server


@pytest.fixture
def site() -> Iterator[str]:
    """The address of a web server that shows folders as pages and knows no ranges."""
    pytest.importorskip("obstore")
    handler = partial(SimpleHTTPRequestHandler, directory=str(REAL))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        _Troubled.released.clear()
        yield f"http://127.0.0.1:{server.server_port}"
        _Troubled.released.set()
        server.shutdown()


def test_a_folder_of_a_web_server_is_looked_at(site: str) -> None:
    far = read_index(f"{site}/fsdp2_dcp_1d_4r/ckpt")
    near = read_index(str(REAL / "fsdp2_dcp_1d_4r" / "ckpt"))
    assert [entry.fqn for entry in far.entries] == [entry.fqn for entry in near.entries]
    assert not far.problems


class _Quiet(SimpleHTTPRequestHandler):
    """A server that shows no folder, as nginx does."""

    asked: ClassVar[list[str]] = []

    def log_request(self, *_: object) -> None:
        self.asked.append(self.path)

    def list_directory(self, _: str) -> None:  # type: ignore[override]
        self.send_error(403)


def test_a_web_server_that_shows_no_folder_is_asked_for_metadata_and_not_often() -> None:
    pytest.importorskip("obstore")
    folder = "fsdp2_dcp_1d_4r/ckpt"
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(_Quiet, directory=str(REAL))) as server:
        Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        far = read_index(f"http://127.0.0.1:{server.server_port}/{folder}")
        server.shutdown()
    assert [entry.fqn for entry in far.tensors] == [
        entry.fqn for entry in read_index(str(REAL / folder)).tensors
    ]
    assert _Quiet.asked.count(f"/{folder}/__0_0.distcp") == 1


class _Ranges(_Quiet):
    """The same, and it sends the range that is asked for."""

    def do_GET(self) -> None:
        asked = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        path = Path(self.translate_path(self.path))
        if asked is None or not path.is_file():
            super().do_GET()
            return
        data = path.read_bytes()
        start, end = int(asked[1]), min(int(asked[2]) + 1, path.stat().st_size)
        self.send_response(206)
        self.send_header("Content-Range", f"bytes {start}-{end - 1}/{len(data)}")
        self.send_header("Content-Length", str(end - start))
        self.end_headers()
        self.wfile.write(data[start:end])


def test_a_hugging_face_folder_of_a_web_server_is_asked_for_its_index() -> None:
    pytest.importorskip("obstore")
    folder = "hf_sharded_safetensors/ckpt"
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(_Ranges, directory=str(REAL))) as server:
        Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        far = read_index(f"http://127.0.0.1:{server.server_port}/{folder}")
        server.shutdown()
    assert [entry.fqn for entry in far.tensors] == [
        entry.fqn for entry in read_index(str(REAL / folder)).tensors
    ]
    assert not far.problems


@pytest.mark.parametrize("folder", ["fsdp2_torchsave_1d_4r/ckpt", "nowhere"])
def test_another_folder_of_a_web_server_is_refused_with_what_can_be_read(
    site: str, folder: str
) -> None:
    done = run("inspect", f"{site}/{folder}")
    assert done.exit_code == 3
    assert "Folders of a web server are not listed." in done.stderr
    assert ".metadata names the files" in done.stderr


def test_a_web_server_without_ranges_is_an_error_that_says_so(site: str) -> None:
    with pytest.raises(UnreadableError, match="other bytes than asked for") as caught:
        read_index(f"{site}/fsdp1_full_torchsave/ckpt/model.pt")
    assert "does not support range requests" in str(caught.value.hint)


class _Troubled(SimpleHTTPRequestHandler):
    """A server whose answers are, for a path that says so, not those that are hoped for."""

    busy: ClassVar[dict[str, int]] = {}
    released: ClassVar[Event] = Event()  # what is stalled may end

    def do_HEAD(self) -> None:
        if not self._is_troubled():
            super().do_HEAD()

    def do_GET(self) -> None:
        if not self._is_troubled():
            super().do_GET()

    def log_message(self, *_: object) -> None:
        """Say nothing."""

    def _is_troubled(self) -> bool:
        if "stalled" in self.path:
            self.released.wait(PATIENCE)
        elif "loop" in self.path:
            self._answer(302, Location=f"{self.path}?again")
        elif "busy" in self.path or self.busy.get(self.path, 0):
            self.busy[self.path] = self.busy.get(self.path, 0) - 1
            self._answer(503)
        else:
            return False
        return True

    def _answer(self, status: int, page: str = "", **headers: str) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(page))}.items():
            self.send_header(name, value)
        self.send_header("Content-Type", "text/html")
        self.end_headers()
        self.wfile.write(page.encode() if self.command == "GET" else b"")


@pytest.fixture
def troubled(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The address of that server; clients have little patience with it."""
    pytest.importorskip("obstore")
    monkeypatch.setattr(WAITING, "patience", 0.5)
    monkeypatch.setattr(WAITING, "_since", None)
    handler = partial(_Troubled, directory=str(REAL))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        _Troubled.released.clear()
        yield f"http://127.0.0.1:{server.server_port}"
        _Troubled.released.set()
        server.shutdown()


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("stalled.pt", "error sending request (Timeout), for "),
        ("loop.pt", "error following redirect"),
        ("busy.pt", "its server answers 503 Service Unavailable, for "),
        ("nowhere.pt", "does not exist"),
    ],
)
def test_a_fault_of_a_web_server_is_a_sentence(
    troubled: str, path: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if path == "stalled.pt":
        monkeypatch.setattr(object_store, "STALLED", timedelta(seconds=0.2))
    done = run("inspect", f"{troubled}/{path}")
    assert done.exit_code == 3
    assert said in done.stderr
    assert path in done.stderr


def test_one_busy_answer_ends_norun(troubled: str, monkeypatch: pytest.MonkeyPatch) -> None:
    there = "fsdp2_dcp_1d_4r/ckpt"
    files = [f"/{there}/{name}" for name in sorted(os.listdir(REAL / there))]
    monkeypatch.setattr(_Troubled, "busy", dict.fromkeys([f"/{there}", *files], 1))
    monkeypatch.setattr(WAITING, "patience", PATIENCE)
    done = run("inspect", f"{troubled}/{there}")
    assert done.exit_code == 0, done.stderr
    assert _Troubled.busy == dict.fromkeys([f"/{there}", *files], 0)


def test_a_fault_of_a_client_is_no_fault_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken:
        def info(self, path: str) -> dict[str, object]:
            raise LookupError(path)

    monkeypatch.setattr("ckpt_tools.storage.fsspec_store._protocol", lambda _: Broken())
    with pytest.raises(OSError, match="LookupError"):
        fsspec_store.facts("odd://store/run7")


# ------------------------------------------------------------------------------- a real S3 server

needs_s3 = pytest.mark.skipif(
    not (importlib.util.find_spec("moto") and importlib.util.find_spec("s3fs")),
    reason="needs moto and s3fs",
)


class Server(NamedTuple):
    """A server on this machine: what its clients need to know, and what it has been asked."""

    env: dict[str, str]
    log: Path

    def run(self, *args: str) -> subprocess.CompletedProcess[str]:
        """Run ckpt-tools against it."""
        command = [sys.executable, "-m", "ckpt_tools", *args]
        return subprocess.run(command, env=self.env, capture_output=True, text=True, check=False)

    def put(self, folder: Path, name: str) -> None:
        """Upload a folder to s3://bucket/name."""
        code = (
            "import s3fs, sys; fs = s3fs.S3FileSystem(); fs.mkdirs('bucket', exist_ok=True);"
            "fs.put(sys.argv[1], 'bucket/' + sys.argv[2], recursive=True)"
        )
        subprocess.run([sys.executable, "-c", code, str(folder), name], env=self.env, check=True)

    def sent(self) -> dict[str, int]:
        """Bytes sent for each object since the log was emptied; listings are left out."""
        sums: dict[str, int] = {}
        for line in self.log.read_text().splitlines():
            method, path, nbytes, kind = line.split(" ")
            if method == "GET" and kind == "-":
                sums[path] = sums.get(path, 0) + int(nbytes)
        return sums


@pytest.fixture(scope="module")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("s3")
    script = str(Path(__file__).parents[1] / "jobs" / "s3_server.py")
    port, log = folder / "port", folder / "log"
    process = subprocess.Popen(
        [sys.executable, script, str(port), str(log)], stderr=subprocess.DEVNULL
    )
    try:
        while not (port.exists() and port.read_text()):
            assert process.poll() is None
            time.sleep(0.05)
        env = {
            **os.environ,
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port.read_text()}",
            "AWS_ACCESS_KEY_ID": "test",
            "AWS_SECRET_ACCESS_KEY": "test",
            "AWS_DEFAULT_REGION": "us-east-1",
        }
        yield Server(env, log)
    finally:
        process.kill()
        process.wait()


@needs_s3
@pytest.mark.slow
def test_export_from_s3_gives_the_same_bytes(s3: Server, tmp_path: Path) -> None:
    s3.put(REAL / KINDS[0], "run7")
    done = s3.run("export", "s3://bucket/run7", "-o", str(tmp_path / "there.safetensors"))
    assert done.returncode == 0, done.stderr
    s3.run("export", str(REAL / KINDS[0]), "-o", str(tmp_path / "here.safetensors"))
    assert (tmp_path / "there.safetensors").read_bytes() == (
        tmp_path / "here.safetensors"
    ).read_bytes()


@needs_s3
@pytest.mark.slow
def test_inspect_of_large_metadata_reads_no_tensor(s3: Server, tmp_path: Path) -> None:
    _write_large_checkpoint(tmp_path / "large")
    size = (tmp_path / "large" / ".metadata").stat().st_size
    assert size > 20 << 20
    s3.put(tmp_path / "large", "large")
    s3.log.write_text("")
    done = s3.run("inspect", "s3://bucket/large")
    assert done.returncode == 0, done.stderr
    sent = s3.sent()
    # Its first MiB is asked for before its size is known.
    assert size <= sent.pop("/bucket/large/.metadata") <= size + (1 << 20)
    assert sum(sent.values()) < 1000


@needs_s3
@pytest.mark.slow
def test_one_value_of_s3_costs_few_bytes(s3: Server) -> None:
    s3.put(REAL / KINDS[0], "run7")
    s3.log.write_text("")
    done = s3.run("show", "--raw", "s3://bucket/run7", "step")
    assert done.stdout == "2\n", done.stderr
    parts = {path: n for path, n in s3.sent().items() if not path.endswith(".metadata")}
    assert sum(parts.values()) < 32_000  # the ends of all objects, and one of them


@needs_s3
@pytest.mark.slow
def test_reshard_from_s3_to_s3_keeps_every_value(s3: Server) -> None:
    s3.put(REAL / KINDS[0], "run7")
    done = s3.run("reshard", "s3://bucket/run7", "-o", "s3://bucket/run7-4", "--to-mesh", "4")
    assert done.returncode == 0, done.stderr
    first, second = (s3.run("fingerprint", f"s3://bucket/{n}") for n in ("run7", "run7-4"))
    assert first.stdout == second.stdout != ""


@needs_s3
@pytest.mark.slow
def test_a_bucket_that_is_not_there_is_one_line(s3: Server) -> None:
    done = s3.run("inspect", "s3://nobody/run7")
    assert done.returncode == 3
    assert len(done.stderr.splitlines()) == 1
    assert done.stderr.startswith("Error: ")


def _write_large_checkpoint(folder: Path) -> None:
    """A DCP directory whose `.metadata` is larger than 20 MiB."""
    from torch.distributed.checkpoint.filesystem import _StorageInfo
    from torch.distributed.checkpoint.metadata import (
        ChunkStorageMetadata,
        Metadata,
        MetadataIndex,
        TensorProperties,
        TensorStorageMetadata,
    )

    folder.mkdir()
    tensors, places = {}, {}
    properties = TensorProperties(torch.float32)
    whole, zero = torch.Size((4,)), torch.Size((0,))
    for number in range(60_000):
        fqn = f"model.layers.{number}.{'a_rather_long_name_of_a_module' * 7}.weight"
        tensors[fqn] = TensorStorageMetadata(properties, whole, [ChunkStorageMetadata(zero, whole)])
        places[MetadataIndex(fqn, zero, 0)] = _StorageInfo("__0_0.distcp", number * 2_000, 2_000)
    with open(folder / ".metadata", "wb") as file:
        pickle.dump(Metadata(tensors, storage_data=places), file)
    with open(folder / "__0_0.distcp", "wb") as file:
        file.truncate(60_000 * 2_000)


def use_here(s3: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have this process use the server, which has s3://bucket/run7."""
    s3.put(REAL / KINDS[0], "run7")
    for name, value in s3.env.items():
        monkeypatch.setenv(name, value)
    fsspec_store._protocol.cache_clear()


@needs_s3
@pytest.mark.slow
def test_what_a_stopped_run_has_sent_is_removed(
    s3: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_here(s3, monkeypatch)
    put = fsspec_store.put

    def stopped(path: str, address: str) -> None:
        if address.endswith("__2_0.distcp"):
            raise KeyboardInterrupt
        put(path, address)

    monkeypatch.setattr(fsspec_store, "put", stopped)
    words = ("reshard", "s3://bucket/run7", "-o", "s3://bucket/run7-stopped", "--to-mesh", "4")
    done = run(*words)
    assert done.exit_code == 130
    assert "What had been sent to s3://bucket/run7-stopped was removed." in done.stderr
    assert not paths.exists("s3://bucket/run7-stopped")
    monkeypatch.setattr(fsspec_store, "put", put)
    assert run(*words, "--resume").exit_code == 0
    assert run("verify", "s3://bucket/run7-stopped").exit_code == 0


@needs_s3
@pytest.mark.slow
def test_an_output_that_appears_meanwhile_is_kept(
    s3: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_here(s3, monkeypatch)
    out = "s3://bucket/run7-late"

    def write_late() -> None:
        with upload.staged(out, force=False, resume=False) as here:
            Path(here).mkdir()
            (Path(here) / "model.safetensors").write_bytes(b"mine")
            s3.put(REAL / KINDS[0], "run7-late")

    with pytest.raises(OutputExistsError, match="already exists"):
        write_late()
    assert "model.safetensors" not in paths.listdir(out)


@needs_s3
@pytest.mark.slow
def test_what_cannot_be_sent_stays_here(s3: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    use_here(s3, monkeypatch)
    put = fsspec_store.put

    def refused(path: str, address: str) -> None:
        if address.endswith(".metadata"):
            raise PermissionError(13, "its store answers 403 Forbidden", address)
        put(path, address)

    monkeypatch.setattr(fsspec_store, "put", refused)
    out = "s3://bucket/run7-refused"
    done = run("reshard", "s3://bucket/run7", "-o", out, "--to-mesh", "4")
    assert done.exit_code == 4
    assert f"{out}/.metadata cannot be sent: its store answers 403 Forbidden" in done.stderr
    (here,) = re.findall(r"All of it is in (\S+): the same command with --resume", done.stderr)
    assert run("verify", here).exit_code == 0
    sent = paths.states(out)
    assert len(sent) == 4
    monkeypatch.setattr(fsspec_store, "put", put)
    assert (
        run("reshard", "s3://bucket/run7", "-o", out, "--to-mesh", "4", "--resume").exit_code == 0
    )
    assert paths.states(out).items() > sent.items()
    assert not os.path.exists(here)
