"""Reading boxes: numpy's bytes, slab by slab, from files as they lie."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sources import DTYPES, Source, layouts, region

from ckpt_tools.copying.read import (
    ChunkReader,
    first_unequal,
    read_array,
    read_box,
    stream_box,
)
from ckpt_tools.core.dtypes import BY_NAME
from ckpt_tools.core.geometry import Box
from ckpt_tools.core.index import ByteRange, Chunk, TensorEntry
from ckpt_tools.core.sizes import Sizes
from ckpt_tools.errors import CheckpointError, IncompleteError, UnreadableError
from ckpt_tools.storage.reader import Files


def entry_of(
    path: Path, shape: tuple[int, ...], *chunks: Chunk, name: str = "int32"
) -> TensorEntry:
    return TensorEntry(path.name, (), "model", BY_NAME[name], shape, chunks)


def chunk_of(
    path: Path, array: np.ndarray, shape: tuple[int, ...], strides: tuple[int, ...]
) -> Chunk:
    """A chunk whose elements lie in this memory with these strides."""
    path.write_bytes(array.tobytes())
    return Chunk(Box.whole(shape), ByteRange(str(path), 0, array.nbytes), strides)


@given(data=st.data())
def test_any_box_of_any_layout_is_numpys(data: st.DataObject) -> None:
    with TemporaryDirectory() as folder, Files() as files:
        dtype = BY_NAME[DTYPES[data.draw(st.sampled_from([1, 2, 4, 8, 16]))]]
        source = Source(folder, data.draw, dtype=dtype, name="t")
        shape = source.entry.shape
        box = data.draw(layouts(len(shape)).flatmap(lambda one: st.sampled_from(one.boxes(shape))))
        pieces = read_box(source.entry, box, files=files, slab_bytes=data.draw(st.integers(1, 300)))
        assert b"".join(map(bytes, pieces)) == source.values[region(box)].tobytes()


@given(data=st.data())
def test_a_stream_gives_the_bytes_of_the_box(data: st.DataObject) -> None:
    sizes = Sizes(stream=data.draw(st.integers(1, 64)))
    with TemporaryDirectory() as folder, Files(sizes=sizes) as files:
        dtype = BY_NAME[DTYPES[data.draw(st.sampled_from([1, 2, 4, 8, 16]))]]
        source = Source(folder, data.draw, dtype=dtype, name="t")
        shape = source.entry.shape
        box = data.draw(layouts(len(shape)).flatmap(lambda one: st.sampled_from(one.boxes(shape))))
        pieces = stream_box(source.entry, box, files=files)
        assert b"".join(map(bytes, pieces)) == source.values[region(box)].tobytes()


@given(one=st.binary(max_size=6), other=st.none() | st.binary(max_size=6), cuts=st.data())
def test_bytes_in_pieces_of_any_sizes_are_compared(
    one: bytes, other: bytes | None, cuts: st.DataObject
) -> None:
    ended: list[bytes] = []

    def pieces(data: bytes) -> Iterator[memoryview]:
        rest = memoryview(bytearray(data))
        while rest:
            count = cuts.draw(st.integers(1, len(rest)))
            yield rest[:count]
            rest = rest[count:]
        ended.append(data)

    there = one if other is None else other
    place = first_unequal(pieces(one), pieces(there))
    assert (place is None) == (one == there)
    assert one[:place] == there[:place]
    assert place is not None or len(ended) == 2  # what a piece's end tells others is told


def test_a_stream_of_a_file_cut_short_is_an_error(tmp_path: Path) -> None:
    values = np.arange(1 << 20, dtype="<i4")
    chunk = chunk_of(tmp_path / "f", values, (1 << 20,), (1,))
    entry = entry_of(tmp_path / "f", (1 << 20,), chunk)
    os.truncate(tmp_path / "f", 3_000_000)
    with Files() as files, pytest.raises(UnreadableError, match="truncated: 3,000,000 bytes"):
        list(stream_box(entry, chunk.box, files=files))


def test_an_expanded_dimension_repeats_its_elements(tmp_path: Path) -> None:
    row = np.arange(5, dtype="<i4")
    for shape, strides in (((3, 5), (0, 1)), ((5, 3), (1, 0)), ((2, 5, 2), (0, 1, 0))):
        chunk = chunk_of(tmp_path / "f", row, shape, strides)
        steps = tuple(4 * stride for stride in strides)
        wanted = np.lib.stride_tricks.as_strided(row, shape, steps)
        with Files() as files:
            found = read_array(entry_of(tmp_path / "f", shape, chunk), chunk.box, files=files)
        assert found == wanted.tobytes()


@pytest.mark.parametrize("stage", [4, 64, 1000, 1 << 20])
@pytest.mark.parametrize("width", [3, 700, 5000])
def test_columns_are_picked_out_of_rows_of_any_width(
    tmp_path: Path, stage: int, width: int
) -> None:
    values = np.arange(17 * width, dtype="<i4").reshape(17, width)
    chunk = chunk_of(tmp_path / "f", values, (17, width), (width, 1))
    box = Box((2, 1), (13, width - 2))
    entry = entry_of(tmp_path / "f", (17, width), chunk)
    with Files() as files:
        found = b"".join(map(bytes, read_box(entry, box, files=files, slab_bytes=stage)))
    assert found == values[2:15, 1:-1].tobytes()


@pytest.mark.parametrize("stage", [1 << 10, 1 << 16])
def test_a_transposed_tensor_that_no_buffer_holds_is_read_right(tmp_path: Path, stage: int) -> None:
    values = np.arange(150 * 170, dtype="<i4").reshape(150, 170)
    chunk = chunk_of(tmp_path / "f", values, (170, 150), (1, 170))
    entry = entry_of(tmp_path / "f", (170, 150), chunk)
    with Files() as files:
        found = b"".join(map(bytes, read_box(entry, chunk.box, files=files, slab_bytes=stage)))
    assert found == values.T.tobytes()


def test_long_rows_are_read_to_their_places(tmp_path: Path) -> None:
    left, right = np.arange(12000, dtype="<i4").reshape(2, 2000, 3).astype("<i4")
    halves = [np.tile(left, (1, 200)), np.tile(right, (1, 200))]
    chunks = []
    for number, half in enumerate(halves):
        (tmp_path / str(number)).write_bytes(half.tobytes())
        box = Box((0, 600 * number), half.shape)
        chunks.append(Chunk(box, ByteRange(str(tmp_path / str(number)), 0, half.nbytes)))
    entry = entry_of(tmp_path, (2000, 1200), *chunks)
    with Files() as files:
        found = b"".join(map(bytes, read_box(entry, Box.whole(entry.shape), files=files)))
    assert found == np.concatenate(halves, axis=1).tobytes()


def test_reading_a_box_holds_two_slabs_in_memory(tmp_path: Path) -> None:
    values = np.arange(1 << 20, dtype="<i4")
    chunk = chunk_of(tmp_path / "f", values, values.shape, (1,))
    entry = entry_of(tmp_path / "f", values.shape, chunk)
    with Files() as files:
        pieces = [len(piece) for piece in read_box(entry, chunk.box, files=files, slab_bytes=9999)]
    assert max(pieces) <= 9999
    assert sum(pieces) == values.nbytes


def test_a_hole_is_refused(tmp_path: Path) -> None:
    entry = entry_of(tmp_path / "f", (4,), chunk_of(tmp_path / "f", np.arange(3), (3,), (1,)))
    with Files() as files, pytest.raises(IncompleteError, match="chunks hold 3 of the 4"):
        read_array(entry, Box.whole((4,)), files=files)


def test_strides_that_leave_the_byte_range_are_refused(tmp_path: Path) -> None:
    values = np.arange(8, dtype="<i4")
    entry = entry_of(tmp_path / "f", (4,), chunk_of(tmp_path / "f", values, (4,), (3,)))
    with Files() as files, pytest.raises(CheckpointError, match="its shape and strides need 40"):
        read_array(entry, Box.whole((4,)), files=files)


def test_a_chunk_that_is_not_located_is_refused(tmp_path: Path) -> None:
    chunk = chunk_of(tmp_path / "f", np.arange(4, dtype="<i4"), (4,), (1,))._replace(
        codec="torch.save"
    )
    entry = entry_of(tmp_path / "f", (4,), chunk)
    with Files() as files, pytest.raises(CheckpointError, match="not located yet"):
        read_array(entry, Box.whole((4,)), files=files)


def test_a_file_that_is_cut_short_is_named(tmp_path: Path) -> None:
    chunk = chunk_of(tmp_path / "f", np.arange(4, dtype="<i4"), (4,), (1,))
    (tmp_path / "f").write_bytes(b"123")
    entry = entry_of(tmp_path / "f", (4,), chunk)
    with Files() as files, pytest.raises(UnreadableError, match="f is truncated"):
        read_array(entry, Box.whole((4,)), files=files)


def test_small_copies_that_lie_close_are_one_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "f"
    path.write_bytes(bytes(range(256)) * 400)
    jobs = [(str(path), 100 * n, 10, 10 * n) for n in reversed(range(1000))]
    calls: list[int] = []
    with Files() as files:
        read_into = files.read_into
        monkeypatch.setattr(files, "read_into", lambda *args: calls.append(1) or read_into(*args))
        out = memoryview(bytearray(10_000))
        ChunkReader(files, stage_bytes=2 << 20).run_jobs(jobs, out)
    data = path.read_bytes()
    assert bytes(out) == b"".join(data[100 * n : 100 * n + 10] for n in range(1000))
    assert len(calls) == 1
