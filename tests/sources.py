"""Tensors whose chunks lie in real files, strided in every way: what tests of the mover read."""

from __future__ import annotations

import os

import numpy as np
from hypothesis import strategies as st

from ckpt_tools.core.dtypes import DType
from ckpt_tools.core.geometry import Box
from ckpt_tools.core.index import ByteRange, Chunk, TensorEntry
from ckpt_tools.core.layout import Layout, Mesh, Placement, Replicate, Shard

DTYPES = {1: "uint8", 2: "int16", 4: "float32", 8: "int64", 16: "complex128"}
WORDS = {1: "u1", 2: "<u2", 4: "<u4", 8: "<u8", 16: "<c16"}


def values(shape: tuple[int, ...], itemsize: int, seed: int = 0) -> np.ndarray:
    raw = np.random.default_rng(seed).bytes(int(np.prod(shape)) * itemsize)
    return np.frombuffer(raw, WORDS[itemsize]).reshape(shape)


def region(box: Box) -> tuple[slice, ...]:
    return tuple(slice(a, a + n) for a, n in zip(box.offsets, box.sizes, strict=True))


def stored(part: np.ndarray, order: tuple[int, ...], pad: int) -> tuple[bytes, tuple[int, ...]]:
    """The bytes of an array with its dimensions in this order, rows padded; and its strides."""
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
        draw(st.sampled_from([Replicate(), *(Shard(dim) for dim in range(ndim))])) for _ in shape
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
