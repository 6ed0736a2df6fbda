"""What one rank's file holds of each entry, and what all ranks together say of one.

The parts of a tensor are joined here: boxes from the layouts that the ranks state, replicas where
boxes are equal, and a complaint where ranks do not agree. It reads no file but to compare small
tensors that should be equal, and it knows nothing of file names.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import NamedTuple

from ckpt_tools.core.dtypes import DType, dtype_named
from ckpt_tools.core.geometry import Box
from ckpt_tools.core.index import ByteRange, Chunk
from ckpt_tools.core.layout import Layout
from ckpt_tools.core.plain_values import PlainValue
from ckpt_tools.errors import CheckpointError, UnsupportedError
from ckpt_tools.formats.pickle.stored import Stored, StoredDTensor, StoredPieces, StoredTensor
from ckpt_tools.formats.torch_file.dtensor_read import held_box, layout_of, pieces_of
from ckpt_tools.formats.torch_file.locate import strides_of
from ckpt_tools.formats.torch_file.open import SavedFile, byte_range_of
from ckpt_tools.storage.reader import Files

# Buffers and step counters are small; what is larger is compared by the CRCs of its records.
MAX_COMPARED = 1 << 20
_MAX_COMPARED_IN_ALL = 512 << 20
_PLAIN = "plain tensor"
_KINDS = {
    StoredTensor: _PLAIN,
    StoredDTensor: "DTensor",
    StoredPieces: "CheckpointableTensor",
}


class RankTensor(NamedTuple):
    """What one rank holds of a tensor.

    ``shape`` is the whole tensor's, ``layout`` a DTensor's. ``crc`` is that of the record, which
    the part fills when ``fills_record``. ``flaw`` says why the part cannot be placed.
    """

    rank: int
    kind: str
    dtype: DType
    shape: tuple[int, ...]
    box: Box
    data: ByteRange
    strides: tuple[int, ...] | None
    layout: Layout | None
    crc: int | None
    fills_record: bool
    flaw: str | None = None
    codec: str | None = None

    @property
    def is_plain(self) -> bool:
        """Whether it is no shard: every rank holds all of it."""
        return self.kind == _PLAIN


class RankObject(NamedTuple):
    """What one rank holds that is not a tensor, or one that cannot be read, as ``flaw`` says."""

    rank: int
    data: ByteRange
    value: PlainValue
    type_name: str | None
    flaw: CheckpointError | None = None

    @property
    def is_tensor(self) -> bool:
        """Whether tensors are in it, which cannot be read."""
        return isinstance(self.flaw, UnsupportedError)


class RankTensors:
    """Makes parts out of stored tensors; layouts and boxes are shared between equal ones.

    A DTensor is one part, a CheckpointableTensor one for each of its pieces.
    """

    def __init__(self) -> None:
        self._layouts: dict[object, Layout] = {}
        self._boxes: dict[object, Box] = {}

    def parts(self, stored: Stored, saved: SavedFile, rank: int) -> Iterator[RankTensor]:
        """The parts of a tensor that this file holds."""
        held = [(Box.whole(stored.local.shape), stored.local)]
        layout, flaw = None, None
        try:
            if isinstance(stored, StoredDTensor):
                layout = self._layout(stored)
                held = [(self._box(stored, layout), stored.local)]
            elif isinstance(stored, StoredPieces):
                held = pieces_of(stored)
        except UnsupportedError as error:
            flaw = error.message.removesuffix(".")
        record = saved.record_of(stored.local.storage)
        for box, local in held:
            data = byte_range_of(local, record, saved.path)
            yield RankTensor(
                rank=rank,
                kind=_KINDS[type(stored)],
                dtype=dtype_named(stored.dtype),
                shape=stored.shape,
                box=box,
                data=data,
                strides=strides_of(local),
                layout=layout,
                crc=record.crc,
                fills_record=data.length == record.length,
                flaw=flaw,
                codec=local.sign,
            )

    def _layout(self, stored: StoredDTensor) -> Layout:
        key = (stored.mesh.shape, stored.mesh.dim_names, stored.placements, stored.shard_order)
        if key not in self._layouts:
            self._layouts[key] = layout_of(stored)
        return self._layouts[key]

    def _box(self, stored: StoredDTensor, layout: Layout) -> Box:
        key = (layout, stored.shape, stored.mesh.coordinate, stored.local.shape)
        if key not in self._boxes:
            self._boxes[key] = held_box(stored, layout)
        return self._boxes[key]


class Joined(NamedTuple):
    """The parts of a tensor put together; ``complaint`` says why it must not be used as it is.

    ``unequal`` are a box and two ranks that hold other elements of it, the lowest and another;
    ``uncompared`` says that something was too large to be compared.
    """

    chunks: tuple[Chunk, ...]
    complaint: str | None
    unequal: tuple[Box, int, int] | None
    uncompared: bool


def join(parts: Sequence[RankTensor], comparison: ReplicaComparison) -> Joined:
    """One tensor from the parts of its ranks, which come in the order of the ranks."""
    first = parts[0]
    complaint = next((part.flaw for part in parts if part.flaw is not None), None)
    groups: dict[Box, list[RankTensor]] = {}
    for part in parts:
        if first.is_plain:  # every rank has all of it
            groups.setdefault(first.box, []).append(part)
        elif part.flaw is None and part.shape == first.shape:
            groups.setdefault(part.box, []).append(part)
    chunks, unequal, uncompared = [], None, False
    for box, (one, *others) in groups.items():
        verdicts = [comparison.equal(one, other) for other in others]
        uncompared = uncompared or None in verdicts
        if False in verdicts:
            unequal = unequal or (box, one.rank, others[verdicts.index(False)].rank)
        pairs = zip(others, verdicts, strict=True)
        alike = [other for other, is_equal in pairs if is_equal is not False]
        # Plain tensors that differ may even be of another shape.
        chunks.append(chunk_of([one, *(alike if first.is_plain else others)]))
    complaint = _disagreement(first, parts) if complaint is None else complaint
    return Joined(tuple(chunks), complaint, unequal, uncompared)


def chunk_of(group: Sequence[RankTensor]) -> Chunk:
    """One chunk of the parts that hold the same box; the lowest rank's bytes come first."""
    first = group[0]
    return Chunk(
        first.box,
        first.data,
        strides=first.strides,
        codec=first.codec,
        replicas=tuple(
            part.data
            for part in group[1:]
            if part.strides == first.strides
            and part.codec == first.codec
            and part.data.length == first.data.length
        ),
        rank=first.rank,
    )


def _disagreement(first: RankTensor, parts: Sequence[RankTensor]) -> str | None:
    """What two ranks say differently of one tensor, or None."""
    for part in parts:
        both, what = (first, part), "it is"
        layouts = [one.layout for one in both if one.layout is not None]
        if part.kind != first.kind:
            said = [f"a {one.kind}" for one in both]
        elif part.dtype != first.dtype:
            said = [one.dtype.name for one in both]
        elif not part.is_plain and part.shape != first.shape:
            said, what = [str(list(one.shape)) for one in both], "its global shape is"
        elif part.layout != first.layout:
            said = [f"({layout}) of {layout.mesh}" for layout in layouts]
        else:
            continue
        return f"{what} {said[0]} on rank {first.rank} and {said[1]} on rank {part.rank}"
    return None


@dataclass(slots=True)
class ReplicaComparison:
    """Compares parts that should be equal, by the CRCs of their records or by their bytes."""

    files: Files
    left: int = field(default=_MAX_COMPARED_IN_ALL)
    _kept: tuple[RankTensor, bytes] | None = None

    def equal(self, one: RankTensor, other: RankTensor) -> bool | None:
        """Whether two parts hold the same elements; None when they are too large to be read."""
        if one.shape != other.shape or one.box != other.box or one.dtype != other.dtype:
            return False
        if one.box.numel == 0 or one.data == other.data:
            return True
        if one.codec != other.codec:
            return None
        whole = one.fills_record and other.fills_record and one.strides == other.strides
        if whole and one.crc is not None and other.crc is not None:
            return one.crc == other.crc
        if max(one.data.length, other.data.length) > MAX_COMPARED or self.left <= 0:
            return None
        self.left -= one.data.length
        return self._elements(one) == self._elements(other, keep=False)

    def _elements(self, part: RankTensor, *, keep: bool = True) -> bytes:
        if self._kept is not None and self._kept[0] is part:  # two views may lie in one range
            return self._kept[1]
        data = elements(part, self.files)
        if keep:
            self._kept = (part, data)
        return data


def elements(part: RankTensor, files: Files) -> bytes:
    """The elements of a small part, row-major, as they are stored."""
    data = files.read(*part.data)
    return data if part.strides is None else b"".join(_gathered(data, part))


def _gathered(data: bytes, part: RankTensor) -> Iterator[bytes]:
    """The elements of a strided part, row-major."""
    size = part.dtype.itemsize
    strides = part.strides or ()
    for index in product(*map(range, part.box.sizes)):
        start = size * sum(i * stride for i, stride in zip(index, strides, strict=True))
        yield data[start : start + size]
