"""The mover: whatever the layouts, files, threads and memory, the bytes are numpy's."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import threading
import tracemalloc
import zlib
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from launching import PATIENCE
from sources import DTYPES, Source, layouts, region, values

from ckpt_tools.copying import write as write_module
from ckpt_tools.copying.parallel import ignore_bytes
from ckpt_tools.copying.write import ALL, Share, write_files
from ckpt_tools.core.dtypes import BY_NAME
from ckpt_tools.core.geometry import Box
from ckpt_tools.core.index import ByteRange, Chunk, TensorEntry
from ckpt_tools.core.plan import FilePlan, Finder, KnownReads, LazyPlans, WriteItem
from ckpt_tools.core.sizes import Sizes
from ckpt_tools.errors import (
    CheckpointError,
    UnreadableError,
    UsageError,
    WriteError,
)
from ckpt_tools.storage.reader import Files

SMALL = Sizes(slab=1024, task=4096)


@settings(max_examples=settings.default.max_examples * 3 // 2)
@given(data=st.data())
def test_any_layout_to_any_layout_equals_numpy_slicing(data: st.DataObject) -> None:
    with TemporaryDirectory() as folder, Files() as files:
        items: dict[str, list[WriteItem]] = {}
        ends: dict[str, int] = {}
        expected: list[tuple[str, int, bytes]] = []
        for number in range(data.draw(st.integers(1, 3))):
            dtype = BY_NAME[DTYPES[data.draw(st.sampled_from([1, 2, 4, 8, 16]))]]
            source = Source(folder, data.draw, dtype=dtype, name=f"t{number}")
            finder = Finder(source.entry)
            for box in data.draw(layouts(len(source.entry.shape))).boxes(source.entry.shape):
                path = data.draw(st.sampled_from(["a", "b/c"]))
                offset = ends.get(path, 0) + data.draw(st.sampled_from([0, 0, 3]))
                item = WriteItem(source.entry.fqn, path, offset, box, dtype, dtype, finder)
                items.setdefault(path, []).append(item)
                raw = source.values[region(box)].tobytes()
                expected.append((path, offset, raw))
                ends[path] = offset + len(raw)
        plans = [FilePlan(path, ends[path], (), tuple(items[path])) for path in items]
        threads = data.draw(st.integers(1, 4))
        slab = data.draw(st.sampled_from([16, 64, 4096]))
        long_run = data.draw(st.sampled_from([1, 1 << 20]))
        write(plans, folder, files, threads=threads, slab=slab, long_run=long_run)
        for path, offset, raw in expected:
            assert Path(folder, path).read_bytes()[offset : offset + len(raw)] == raw


def write(
    plans: list[FilePlan],
    folder: str,
    files: Files,
    *,
    threads: int = 2,
    slab: int = 1 << 20,
    share: Share = ALL,
    parts: list[tuple[str, bool]] | None = None,
    **sizes: int,
) -> int:
    """Write with slabs of this size and tasks of four; gives the number of bytes reported."""
    parts = [] if parts is None else parts
    told: list[int] = []
    files.sizes = Sizes(slab=slab, task=4 * slab, **sizes)
    done = write_files(
        LazyPlans.of(plans),
        root=folder,
        files=files,
        threads=threads,
        max_memory=threads << 20,
        on_bytes=told.append,
        share=share,
        on_file=lambda *part: parts.append(part),
    )
    if share == ALL:
        assert done == sum(len(data) for plan in plans for _, data in plan.literals) + sum(
            item.box.numel * item.target.itemsize for plan in plans for item in plan.items
        )
    return sum(told)


def checked_plan(folder: Path, *, sizes: tuple[int, ...] = (5000, 0, 3, 700, 40)) -> FilePlan:
    """Items with a literal before and after each, both with room for the item's CRC-32."""
    items, literals, end = [], [], 0
    for number, size in enumerate(sizes):
        path = folder / f"source-{number}"
        path.write_bytes(values((size,), 1, seed=number).tobytes())
        chunk = Chunk(Box((0,), (size,)), ByteRange(str(path), 0, size))
        entry = TensorEntry(f"t{number}", (), "model", BY_NAME["uint8"], (size,), (chunk,))
        box = Box.whole((size,))
        literals += [(end, b"head0000"), (end + 8 + size, b"0000foot")]
        item = WriteItem(entry.fqn, "out", end + 8, box, entry.dtype, entry.dtype, Finder(entry))
        items.append(item._replace(crc_at=(end + 4, end + 8 + size)))
        end += 16 + size
    return FilePlan("out", end, tuple(literals), tuple(items))


def checked_bytes(plan: FilePlan) -> bytes:
    parts = []
    for item in plan.items:
        raw = b"".join(Path(read.chunk.data.path).read_bytes() for read in item.reads)
        crc = zlib.crc32(raw).to_bytes(4, "little")
        parts += [b"head", crc, raw, crc, b"foot"]
    return b"".join(parts)


@pytest.mark.parametrize("slab", [16, 64, 1024, 1 << 20])
@pytest.mark.parametrize("threads", [1, 3])
def test_the_crc_of_an_item_goes_to_its_slots(tmp_path: Path, slab: int, threads: int) -> None:
    plan = checked_plan(tmp_path)
    with Files() as files:
        write([plan], str(tmp_path), files, threads=threads, slab=slab)
    assert (tmp_path / "out").read_bytes() == checked_bytes(plan)


@pytest.mark.parametrize("count", [1, 2, 3, 20])
def test_shares_together_write_every_byte(tmp_path: Path, count: int) -> None:
    plan = checked_plan(tmp_path)
    with Files() as files:
        for index in reversed(range(count)):
            write([plan], str(tmp_path), files, slab=64, share=Share(index, count))
    assert (tmp_path / "out").read_bytes() == checked_bytes(plan)


@pytest.mark.parametrize("count", [1, 2, 3])
def test_each_worker_says_of_which_files_it_has_written_all(tmp_path: Path, count: int) -> None:
    plan = checked_plan(tmp_path)
    plans = [plan._replace(path=f"{number}") for number in range(4)]
    parts: list[tuple[str, bool]] = []
    with Files() as files:
        for index in range(count):
            write(plans, str(tmp_path), files, slab=64, share=Share(index, count), parts=parts)
    written = Counter(path for path, _ in parts)
    assert {path for path, is_whole in parts if is_whole} == {p for p in written if written[p] == 1}
    assert (len(parts), len(written)) == ((6, 4) if count == 3 else (4, 4))


def test_what_one_writer_leaves_another_may_write_again(tmp_path: Path) -> None:
    plan = checked_plan(tmp_path)
    with Files() as files:
        write([plan], str(tmp_path), files, slab=64, share=Share(1, 3))
        write([plan], str(tmp_path), files, slab=64)
    assert (tmp_path / "out").read_bytes() == checked_bytes(plan)


def test_every_byte_is_reported(tmp_path: Path) -> None:
    plan = checked_plan(tmp_path)
    plan = plan._replace(items=tuple(item._replace(crc_at=()) for item in plan.items))
    with Files() as files:
        assert write([plan], str(tmp_path), files, slab=64) == plan.length


@pytest.mark.parametrize("slab", [64, 1 << 20])
def test_casts_happen_on_the_way(tmp_path: Path, slab: int) -> None:
    numbers = [np.arange(n, dtype="<f4") / 7 for n in (1000, 3, 0, 5)]
    path, items, at, end = tmp_path / "source", [], 0, 0
    path.write_bytes(b"".join(part.tobytes() for part in numbers))
    for part, name in zip(numbers, ("float64", "float16", "float32", "float16"), strict=True):
        box = Box.whole(part.shape)
        chunk = Chunk(box, ByteRange(str(path), at, part.nbytes))
        entry = TensorEntry(name, (), "model", BY_NAME["float32"], part.shape, (chunk,))
        finder = Finder(entry)
        items.append(WriteItem(name, "out", end, box, entry.dtype, BY_NAME[name], finder))
        at, end = at + part.nbytes, end + part.size * BY_NAME[name].itemsize
    with Files() as files:
        write([FilePlan("out", end, (), tuple(items))], str(tmp_path), files, slab=slab)
    wanted = zip(numbers, ("<f8", "<f2", "<f4", "<f2"), strict=True)
    assert (tmp_path / "out").read_bytes() == b"".join(x.astype(y).tobytes() for x, y in wanted)


def test_a_file_without_contents_is_made(tmp_path: Path) -> None:
    with Files() as files:
        write(
            [FilePlan("sub/empty", 0, (), ()), FilePlan("zeros", 7, (), ())], str(tmp_path), files
        )
    assert (tmp_path / "sub/empty").read_bytes() == b""
    assert (tmp_path / "zeros").read_bytes() == bytes(7)


def test_a_source_that_is_cut_short_is_named(tmp_path: Path) -> None:
    plan = checked_plan(tmp_path)
    (tmp_path / "source-3").write_bytes(b"?" * 9)
    with Files() as files, pytest.raises(UnreadableError, match="source-3 is truncated"):
        write([plan], str(tmp_path), files)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO])
def test_an_output_that_cannot_be_written_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def fail(*_: object) -> int:
        raise OSError(number, os.strerror(number))

    plan = checked_plan(tmp_path)
    monkeypatch.setattr(os, "pwrite", fail)
    with Files() as files, pytest.raises(WriteError, match=f"out cannot .*{os.strerror(number)}"):
        write([plan], str(tmp_path), files)


def test_a_read_error_is_not_taken_for_a_write_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> int:
        raise OSError(errno.EIO, "Input/output error")

    plan = checked_plan(tmp_path)
    monkeypatch.setattr(os, "preadv", fail)
    with Files() as files, pytest.raises(UnreadableError, match=r"source-. cannot be read: Input"):
        write([plan], str(tmp_path), files)


def test_short_writes_are_gone_on_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pwrite = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, data, offset: pwrite(fd, data[:7], offset))
    plan = checked_plan(tmp_path)
    with Files() as files:
        write([plan], str(tmp_path), files)
    assert (tmp_path / "out").read_bytes() == checked_bytes(plan)


@pytest.mark.parametrize("slab", [5 * 4096, 1 << 16])
@pytest.mark.parametrize("answer", ["done", "short", "refused"])
def test_whole_blocks_may_go_past_the_page_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, slab: int, answer: str
) -> None:
    pwrite, passed = os.pwrite, []

    def write_some(fd: int, data: memoryview, offset: int) -> int:
        if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
            passed.append((offset, len(data)))
            if answer == "refused":
                raise OSError(errno.EINVAL, "as a system says that asks for more")
            data = data[:4096] if answer == "short" else data
        return pwrite(fd, data, offset)

    monkeypatch.setattr(os, "pwrite", write_some)
    plan = checked_plan(tmp_path, sizes=(50_000, 3, 4096, 300_000, 8000, 9000))
    with Files() as files:
        write([plan], str(tmp_path), files, slab=slab, direct_from=0, direct_least=4096)
    assert (tmp_path / "out").read_bytes() == checked_bytes(plan)
    assert not any(offset % 4096 or length % 4096 for offset, length in passed)
    assert len(passed) > 5 or os.major(tmp_path.stat().st_dev) == 0


def test_there_are_no_more_threads_than_memory_for_their_buffers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts: list[int] = []

    class Pool(ThreadPoolExecutor):
        def __init__(self, threads: int, **named: str) -> None:
            counts.append(threads)
            super().__init__(threads, **named)

    monkeypatch.setattr(write_module, "ThreadPoolExecutor", Pool)
    plan = checked_plan(tmp_path, sizes=(300_000,))
    with Files(sizes=Sizes(task=16 << 10)) as files:
        write_files(
            LazyPlans.of([plan]),
            root=str(tmp_path),
            files=files,
            threads=8,
            max_memory=1 << 20,
            on_bytes=ignore_bytes,
        )
    assert counts == [4]


def test_what_is_less_than_the_least_goes_through_the_page_cache(tmp_path: Path) -> None:
    plan = checked_plan(tmp_path, sizes=(50_000, 3, 4096, 300_000, 8000, 9000))
    with Files() as files:
        write([plan], str(tmp_path), files, direct_from=0, direct_least=1 << 20)
    assert (tmp_path / "out").read_bytes() == checked_bytes(plan)


def test_short_reads_are_gone_on_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    preadv = os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, some, offset: preadv(fd, [some[0][:7]], offset))
    plan = checked_plan(tmp_path)
    with Files() as files:
        write([plan], str(tmp_path), files)
    assert (tmp_path / "out").read_bytes() == checked_bytes(plan)


def _refused(*_args: int) -> int:
    raise OSError(errno.EXDEV, "cross-device link")


def _half(first: int, second: int, length: int, source: int, offset: int) -> int:
    return os.pwrite(second, os.pread(first, -(-length // 2), source), offset)


@pytest.mark.parametrize(
    "copy", [_refused, _half, lambda *_args: 0, None], ids=["refused", "half", "nothing", "none"]
)
@pytest.mark.parametrize("checked", [False, True])
def test_a_copy_that_the_system_refuses_or_cuts_is_finished(
    copy: Callable[..., int] | None,
    *,
    checked: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if copy is None:
        monkeypatch.delattr(os, "copy_file_range", raising=False)
    else:
        monkeypatch.setattr(os, "copy_file_range", copy, raising=False)
    plan = checked_plan(tmp_path, sizes=(1 << 20, 300_000, 5))
    plan = plan if checked else unchecked(plan)
    with Files() as files:
        write([plan], str(tmp_path), files, slab=64 << 10)
    assert (tmp_path / "out").read_bytes() == (checked_bytes if checked else plain_bytes)(plan)


@pytest.mark.parametrize("long_run", [4096, 1 << 30])
@pytest.mark.parametrize("checked", [False, True])
def test_zeros_take_no_room(tmp_path: Path, long_run: int, *, checked: bool) -> None:
    plan = checked_plan(tmp_path, sizes=(1 << 20, 20_000))
    os.truncate(tmp_path / "source-0", 0)
    os.truncate(tmp_path / "source-0", 1 << 20)
    plan = plan if checked else unchecked(plan)
    with Files() as files:
        write([plan], str(tmp_path), files, slab=64 << 10, threads=1, long_run=long_run)
    assert (tmp_path / "out").read_bytes() == (checked_bytes if checked else plain_bytes)(plan)
    assert (tmp_path / "out").stat().st_blocks * 512 < 200_000


def unchecked(plan: FilePlan) -> FilePlan:
    return plan._replace(items=tuple(item._replace(crc_at=()) for item in plan.items))


def plain_bytes(plan: FilePlan) -> bytes:
    parts = []
    for item in plan.items:
        raw = b"".join(Path(read.chunk.data.path).read_bytes() for read in item.reads)
        parts += [b"head0000", raw, b"0000foot"]
    return b"".join(parts)


def test_a_source_cut_short_under_a_long_run_is_an_error(tmp_path: Path) -> None:
    plan = unchecked(checked_plan(tmp_path, sizes=(1 << 20,)))
    os.truncate(tmp_path / "source-0", 700_000)
    with Files() as files, pytest.raises(UnreadableError, match="truncated: 700,000 bytes"):
        write([plan], str(tmp_path), files)


def test_an_error_stops_the_other_threads(tmp_path: Path) -> None:
    plan = checked_plan(tmp_path, sizes=(1 << 20,))
    told: list[int] = []

    def fail(nbytes: int) -> None:
        told.append(nbytes)
        if len(told) >= 2:
            raise UnreadableError("truncated")

    with Files(sizes=SMALL) as files, pytest.raises(UnreadableError):
        write_files(
            LazyPlans.of([plan]),
            root=str(tmp_path),
            files=files,
            threads=4,
            max_memory=4 << 20,
            on_bytes=fail,
        )
    assert len(told) <= 5
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("copy")]


def test_ctrl_c_stops_all_threads_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = checked_plan(tmp_path, sizes=(1 << 20,))
    told: list[int] = []
    stops: list[threading.Event] = []
    real = write_module.TaskWriter

    def watched(files: Files, *, stop: threading.Event, **named: object) -> write_module.TaskWriter:
        stops.append(stop)
        return real(files, stop=stop, **named)

    monkeypatch.setattr(write_module, "TaskWriter", watched)

    def interrupt(nbytes: int) -> None:
        told.append(nbytes)
        if len(told) == 3:
            os.kill(os.getpid(), signal.SIGINT)
        if len(told) >= 3:
            assert stops[0].wait(PATIENCE)  # until the main thread has taken it

    with Files(sizes=SMALL) as files, pytest.raises(KeyboardInterrupt):
        write_files(
            LazyPlans.of([plan]),
            root=str(tmp_path),
            files=files,
            threads=2,
            max_memory=2 << 20,
            on_bytes=interrupt,
        )
    assert sum(told) < 20 << 10
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("copy")]


def test_a_read_that_is_missing_is_no_output(tmp_path: Path) -> None:
    plan = checked_plan(tmp_path)
    hole = plan.items[3]._replace(finder=KnownReads(()))
    items = (*plan.items[:3], hole, *plan.items[4:])
    for slab in (64, 1 << 20):
        with Files() as files, pytest.raises(CheckpointError, match=r"are to be read|give 0 of"):
            write([plan._replace(items=items)], str(tmp_path), files, slab=slab)


def test_too_little_memory_is_refused(tmp_path: Path) -> None:
    said = "^9 bytes of memory for all buffers: 1,048,576 bytes are the least"
    with Files() as files, pytest.raises(UsageError, match=said):
        write_files(
            LazyPlans(), root=str(tmp_path), files=files, threads=None, max_memory=9, on_bytes=print
        )


def test_memory_stays_small_however_large_the_tensor(tmp_path: Path) -> None:
    size = 96 << 20
    with open(tmp_path / "source", "wb") as file:
        file.truncate(size)
    chunk = Chunk(Box((0,), (size // 4,)), ByteRange(str(tmp_path / "source"), 0, size))
    entry = TensorEntry("t", (), "model", BY_NAME["float32"], (size // 4,), (chunk,))
    box = Box.whole(entry.shape)
    item = WriteItem("t", "out", 0, box, entry.dtype, BY_NAME["bfloat16"], Finder(entry))
    plan = FilePlan("out", size // 2, (), (item,))
    tracemalloc.start()
    with Files() as files:
        write_files(
            LazyPlans.of([plan]),
            root=str(tmp_path),
            files=files,
            threads=2,
            max_memory=4 << 20,
            on_bytes=nothing,
        )
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 8 << 20  # the buffers, the casts' own blocks, and what importing numpy costs


def nothing(nbytes: int) -> None:
    pass
