"""Carries file plans out with numpy alone: planners are tested without the project's mover."""

import struct
from collections.abc import Iterable, Sequence
from pathlib import Path
from zlib import crc32

import numpy as np

from ckpt_tools.core.dtypes import BY_NAME
from ckpt_tools.core.geometry import Box
from ckpt_tools.core.index import ByteRange, Chunk, ObjectEntry, TensorEntry
from ckpt_tools.core.layout import Layout
from ckpt_tools.core.plan import FilePlan, Target, WriteItem


def told(plans: Iterable[FilePlan]) -> list[FilePlan]:
    """The same plans with what their items read in the place of how they find it: to compare."""
    return [
        plan._replace(items=tuple(i._replace(finder=tuple(i.reads)) for i in plan.items))
        for plan in plans
    ]


def write_plans(plans: Iterable[FilePlan], root: Path) -> None:
    """Write every file of the plans under ``root``."""
    for plan in plans:
        data = bytearray(plan.length)
        for offset, literal in plan.literals:
            assert data[offset : offset + len(literal)] == bytes(len(literal)), "literals overlap"
            data[offset : offset + len(literal)] = literal
        for item in plan.items:
            _write_item(data, item)
        path = root / plan.path
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)


def _write_item(data: bytearray, item: WriteItem) -> None:
    assert item.source == item.target, "no casts here"
    element = np.dtype((np.void, item.source.itemsize))
    out = np.zeros(item.box.sizes, element)
    for chunk, box in item.reads:
        out[_slices(box, item.box)] = _elements(chunk, element)[_slices(box, chunk.box)]
    raw = out.tobytes()
    data[item.offset : item.offset + len(raw)] = raw
    for place in item.crc_at:
        assert data[place : place + 4] == bytes(4), "a CRC over something else"
        data[place : place + 4] = struct.pack("<I", crc32(raw))


def _slices(box: Box, within: Box) -> tuple[slice, ...]:
    inside = box.relative_to(within)
    return tuple(slice(a, b) for a, b in zip(inside.offsets, inside.ends, strict=True))


def _elements(chunk: Chunk, element: "np.dtype[np.void]") -> "np.ndarray":
    with open(chunk.data.path, "rb") as file:
        file.seek(chunk.data.offset)
        data = np.frombuffer(file.read(chunk.data.length), element)
    if chunk.strides is None:
        return data.reshape(chunk.box.sizes)
    strides = [stride * element.itemsize for stride in chunk.strides]
    return np.lib.stride_tricks.as_strided(data, chunk.box.sizes, strides, writeable=False)


class Source:
    """A file of raw tensors, one behind the other, to plan from."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "source.bin"
        self.path.write_bytes(b"")

    def target(
        self,
        fqn: str,
        values: "np.ndarray",
        *,
        dtype: str | None = None,
        layout: Layout | None = None,
    ) -> Target:
        """A target for these values; ``dtype`` is torch's name when numpy has no such type."""
        start = self.path.stat().st_size
        raw = values.tobytes()
        with self.path.open("ab") as file:
            file.write(raw)
        chunk = Chunk(Box.whole(values.shape), ByteRange(str(self.path), start, len(raw)))
        kind = BY_NAME[dtype or values.dtype.name]
        path = tuple(fqn.split("."))
        entry = TensorEntry(fqn, path, "model", kind, values.shape, (chunk,))
        return Target(fqn, path, entry, kind, layout)

    def bytes_object(self, fqn: str, raw: bytes) -> ObjectEntry:
        """An object that is these bytes of the file."""
        start = self.path.stat().st_size
        with self.path.open("ab") as file:
            file.write(raw)
        data = ByteRange(str(self.path), start, len(raw))
        return ObjectEntry(fqn, tuple(fqn.split(".")), "other", data, codec="torch.save")


def value_object(
    fqn: str, value: object, *, path: Sequence[str | int] | None = None
) -> ObjectEntry:
    """An object of which only the value is known."""
    place = tuple(path or fqn.split("."))
    return ObjectEntry(fqn, place, "other", ByteRange("", 0, 0), value=value, opened=True)
