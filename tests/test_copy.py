"""The mover: whatever the layouts, files, threads and memory, the bytes are numpy's."""

from __future__ import annotations

import errno
import os
import threading
import zlib
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpt_tools import copy, tasks
from ckpt_tools.copy import NO_JOURNAL, Journal, Share, read_array, read_box, write_files
from ckpt_tools.dtypes import BY_NAME, DType
from ckpt_tools.errors import CheckpointError, UnreadableError, UsageError, WriteError
from ckpt_tools.files import Files
from ckpt_tools.geometry import Box
from ckpt_tools.index import ByteRange, Chunk, TensorEntry
from ckpt_tools.layout import Layout, Mesh, Placement, Replicate
from ckpt_tools.layout import Shard as Cut
from ckpt_tools.plan import FilePlan, Finder, WriteItem

DTYPES = {1: "uint8", 2: "int16", 4: "float32", 8: "int64", 16: "complex128"}
WORDS = {1: "u1", 2: "<u2", 4: "<u4", 8: "<u8", 16: "<c16"}


def values(shape: tuple[int, ...], itemsize: int, seed: int = 0) -> np.ndarray:
    raw = np.random.default_rng(seed).bytes(int(np.prod(shape)) * itemsize)
    return np.frombuffer(raw, WORDS[itemsize]).reshape(shape)


def region(box: Box) -> tuple[slice, ...]:
    return tuple(slice(a, a + n) for a, n in zip(box.offsets, box.sizes, strict=True))


def stored(part: np.ndarray, order: tuple[int, ...], pad: int) -> tuple[bytes, tuple[int, ...]]:
    """The bytes of an array laid out with its dimensions in this order, rows padded; its strides."""
    sizes = [part.shape[dim] for dim in order]
    strides = [0] * part.ndim
    step = 1
    for place in reversed(range(part.ndim)):
        strides[order[place]] = step
        step *= sizes[place] + (pad if place else 0)
    extent = sum((n - 1) * s for n, s in zip(part.shape, strides, strict=True)) + 1
    memory = np.zeros(extent if part.size else 0, part.dtype)
    if part.size:
        steps = tuple(stride * part.itemsize for stride in strides)
        np.ndarray(part.shape, part.dtype, memory, strides=steps)[...] = part
    return memory.tobytes(), tuple(strides)


@st.composite
def layouts(draw: st.DrawFn, ndim: int) -> Layout:
    shape = draw(st.lists(st.integers(1, 3), min_size=1, max_size=3))
    placements: list[Placement] = [
        draw(st.sampled_from([Replicate(), *(Cut(dim) for dim in range(ndim))])) for _ in shape
    ]
    return Layout(
        Mesh(tuple(shape)), tuple(placements), tuple(draw(st.permutations(range(len(shape)))))
    )


class Source:
    """An entry whose chunks lie in real files, strided as drawn."""

    def __init__(self, folder: str, draw: st.DrawFn, *, dtype: DType, name: str) -> None:
        shape = tuple(draw(st.lists(st.integers(0, 7), max_size=4)))
        self.values = values(shape, dtype.itemsize, seed=draw(st.integers(0, 99)))
        chunks = []
        for rank, box in enumerate(draw(layouts(len(shape))).boxes(shape)):
            path = os.path.join(folder, f"source-{rank % 3}")
            order = tuple(draw(st.permutations(range(len(shape)))))
            packed = draw(st.booleans())
            part = self.values[region(box)]
            data, strides = (
                (part.tobytes(), None) if packed else stored(part, order, draw(st.integers(0, 2)))
            )
            with open(path, "ab") as file:
                file.write(b"?" * draw(st.integers(0, 9)))
                chunks.append(Chunk(box, ByteRange(path, file.tell(), len(data)), strides))
                file.write(data)
        self.entry = TensorEntry(name, (name,), "model", dtype, shape, tuple(chunks))


@st.composite
def shuffled(draw: st.DrawFn) -> object:
    return draw


@settings(deadline=None, max_examples=150)
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
                reads = finder.reads(box)
                item = WriteItem(source.entry.fqn, path, offset, box, dtype, dtype, reads)
                items.setdefault(path, []).append(item)
                raw = source.values[region(box)].tobytes()
                expected.append((path, offset, raw))
                ends[path] = offset + len(raw)
        plans = [FilePlan(path, ends[path], (), tuple(items[path])) for path in items]
        threads = data.draw(st.integers(1, 4))
        write(
            plans, folder, files, threads=threads, slab=data.draw(st.sampled_from([16, 64, 4096]))
        )
        for path, offset, raw in expected:
            assert Path(folder, path).read_bytes()[offset : offset + len(raw)] == raw


def write(
    plans: list[FilePlan],
    folder: str,
    files: Files,
    *,
    threads: int = 2,
    slab: int = 1 << 20,
    share: Share = copy.ALL,
    journal: Journal = NO_JOURNAL,
) -> int:
    """Write with slabs and tasks of this size; gives the number of bytes that were reported."""
    told: list[int] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ckpt_tools.carrier.SLAB_BYTES", slab)
        patch.setattr("ckpt_tools.tasks.TASK_BYTES", 4 * slab)
        write_files(
            plans,
            root=folder,
            files=files,
            threads=threads,
            max_memory=threads << 20,
            on_bytes=told.append,
            share=share,
            journal=journal,
        )
    return sum(told)
