"""What one rank's file holds of each entry, and what all ranks together say of one.

The parts of a tensor are joined here: boxes from the layouts that the ranks state, replicas where
boxes are equal, and a complaint where ranks do not agree. It reads no file but to compare small
tensors that should be equal, and it knows nothing of file names.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import product
from operator import mul
from typing import NamedTuple

from ckpt_tools.core.dtypes import DType, dtype_named
from ckpt_tools.core.geometry import Box
from ckpt_tools.core.index import ByteRange, Chunk
from ckpt_tools.core.layout import Layout
from ckpt_tools.core.plain_values import PlainValue
from ckpt_tools.errors import CheckpointError, UnsupportedError
from ckpt_tools.formats.pickle.stored import Stored, StoredDTensor, StoredPieces, StoredTensor
from ckpt_tools.formats.torch_file.open import SavedFile
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
    chunk: Chunk
    layout: Layout | None
    crc: int | None
    fills_record: bool
    flaw: str | None = None

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


def rank_tensors(stored: Stored, saved: SavedFile, rank: int) -> Iterator[RankTensor]:
    """The parts of a tensor that this file holds: a DTensor is one part, a CheckpointableTensor one
    for each of its pieces.
    """
    held, record = saved.held(stored), saved.record_of(stored.local.storage)
    for chunk in held.chunks:
        yield RankTensor(
            rank=rank,
            kind=_KINDS[type(stored)],
            dtype=dtype_named(stored.dtype),
            shape=stored.shape,
            chunk=chunk._replace(rank=rank),
            layout=held.layout,
            crc=record.crc,
            fills_record=chunk.data.length == record.length,
            flaw=None if held.flaw is None else held.flaw.message.removesuffix("."),
        )


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
            groups.setdefault(first.chunk.box, []).append(part)
        elif part.flaw is None and part.shape == first.shape:
            groups.setdefault(part.chunk.box, []).append(part)
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
    first = group[0].chunk
    layout = first.strides, first.codec, first.data.length
    replicas = (
        one.data
        for one in (part.chunk for part in group[1:])
        if (one.strides, one.codec, one.data.length) == layout
    )
    return first._replace(replicas=tuple(replicas))


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
        here, there = one.chunk, other.chunk
        if one.shape != other.shape or here.box != there.box or one.dtype != other.dtype:
            return False
        if here.box.numel == 0 or here.data == there.data:
            return True
        if here.codec != there.codec:
            return None
        whole = one.fills_record and other.fills_record and here.strides == there.strides
        if whole and one.crc is not None and other.crc is not None:
            return one.crc == other.crc
        if max(here.data.length, there.data.length) > MAX_COMPARED or self.left <= 0:
            return None
        self.left -= here.data.length
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
    data, strides, size = files.read(*part.chunk.data), part.chunk.strides, part.dtype.itemsize
    if strides is None:
        return data
    places = (sum(map(mul, index, strides)) for index in product(*map(range, part.chunk.box.sizes)))
    return b"".join(data[size * place : size * (place + 1)] for place in places)
