"""What a pickle of tensors says, without torch: tensors, DTensors and meshes, as plain records.

Nothing here holds a value of a tensor. It knows torch's own layouts, none of the checkpoint formats
around them. Errors name a record by its ``qualname``.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, TypeAlias

from ckpt_tools.core.plain_values import TorchValue
from ckpt_tools.errors import UnreadableError
from ckpt_tools.formats.pickle.limits import MAX_NDIM
from ckpt_tools.formats.pickle.nodes import shown

# The layouts of torch's tensors, which are no classes.
LAYOUTS = frozenset(
    {"torch.strided", "torch.jagged", "torch.sparse_coo", "torch.sparse_csr", "torch.sparse_csc"}
    | {"torch.sparse_bsr", "torch.sparse_bsc", "torch._mkldnn"}
)
# Types that torch had before 2.1 have a storage class each, later ones go by _rebuild_tensor_v3.
# fmt: off
STORAGES = {
    "float64": "DoubleStorage", "float32": "FloatStorage", "float16": "HalfStorage",
    "bfloat16": "BFloat16Storage", "int64": "LongStorage", "int32": "IntStorage",
    "int16": "ShortStorage", "int8": "CharStorage", "uint8": "ByteStorage", "bool": "BoolStorage",
    "complex64": "ComplexFloatStorage", "complex128": "ComplexDoubleStorage",
}
# fmt: on
_DTYPE = re.compile(
    r"torch\.(?:q?u?int\d+(?:x\d+)?|b?float\d+(?:_e\d+m\d+\w*)?|complex\d+|bits\d+(?:x\d+)?|bool)"
)


def is_dtype(name: str) -> bool:
    """Whether a global is an element type of torch, those included that we cannot read."""
    return _DTYPE.fullmatch(name) is not None


def dtype_name(value: object) -> str | None:
    """``float32`` of torch.float32 in a pickle, None of what is no element type."""
    named = isinstance(value, TorchValue) and is_dtype(value)
    return str(value).removeprefix("torch.") if named else None


Sign = Literal["negated", "conjugated"]


class StoredStorage(NamedTuple):
    """A storage: ``numel`` elements of ``dtype`` (bytes when it is None) in record ``key``."""

    key: str
    dtype: str | None
    numel: int

    @property
    def qualname(self) -> str:
        """What errors call it."""
        return "storage"


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A strided view of a storage: ``storage_offset`` and ``strides`` are in elements.

    ``sign`` says that the values are the negated or conjugated elements.
    """

    qualname = "tensor"

    storage: StoredStorage
    dtype: str
    storage_offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    sign: Sign | None = None

    @property
    def local(self) -> StoredTensor:
        """What is in this file of it: all, unlike of a `StoredDTensor`."""
        return self

    @property
    def end(self) -> int:
        """One past the last element of the storage that the view touches; its start when empty."""
        if 0 in self.shape:
            return self.storage_offset
        steps = zip(self.shape, self.strides, strict=True)
        return self.storage_offset + sum((size - 1) * stride for size, stride in steps) + 1


class StoredPlacement(NamedTuple):
    """How one mesh dimension treats a tensor.

    ``kind`` is S (cut along ``dim``), SS (the same, after ``split_factor`` pieces made by mesh
    dimensions to its right), R (replicated) or P (partial sums, by ``op``).
    """

    kind: Literal["S", "R", "SS", "P"]
    dim: int | None = None
    split_factor: int | None = None
    op: str | None = None


@dataclass(frozen=True, slots=True)
class StoredMesh:
    """The grid of ranks of a tensor, as the rank that saved it saw it.

    ``coordinate`` and ``rank`` are that rank's own. ``rank_map`` lists the ranks of the root mesh,
    ``strides`` step through it, one per dimension (None when a dimension has no single stride).
    ``attributes`` are the names of all that was pickled: each torch has its own.
    """

    shape: tuple[int, ...]
    dim_names: tuple[str, ...] | None
    coordinate: tuple[int, ...] | None
    rank: int | None
    # Equal meshes share it, and it can be long: a hash without it tells meshes apart as well.
    rank_map: tuple[object, ...] | None = field(hash=False)
    strides: tuple[int, ...] | None
    attributes: frozenset[str] = frozenset()

    def ranks(self) -> tuple[int, ...] | None:
        """The ranks of this mesh, row-major, or None when the file does not tell them."""
        if self.rank_map is None or self.strides is None or self.coordinate is None:
            return None
        ranks = tuple(rank for rank in self.rank_map if type(rank) is int)
        here = sum(a * b for a, b in zip(self.coordinate, self.strides, strict=True))
        own = ranks.index(self.rank) if self.rank in ranks else here
        places = [own - here]
        for size, stride in zip(self.shape, self.strides, strict=True):
            if len(places) * size > len(ranks):
                return None
            places = [place + index * stride for place in places for index in range(size)]
        if min(places) < 0 or max(places) >= len(ranks):
            return None
        return tuple(ranks[place] for place in places)


@dataclass(frozen=True, slots=True)
class StoredDTensor:
    """One rank's shard of a distributed tensor of this whole ``shape``.

    ``shard_order`` lists, per cut tensor dimension, the mesh dimensions from the first cut to the
    last, where the file says so.
    """

    qualname = "DTensor"

    local: StoredTensor
    shape: tuple[int, ...]
    dtype: str
    mesh: StoredMesh
    placements: tuple[StoredPlacement, ...]
    shard_order: tuple[tuple[int, tuple[int, ...]], ...] | None = None


@dataclass(frozen=True, slots=True)
class StoredPieces:
    """One rank's pieces of a tensor of this whole ``shape``: a CheckpointableTensor of torch 2.15.

    Piece i is ``sizes[i]`` elements from ``local_offsets[i]`` of ``local`` on, and belongs at
    ``global_offsets[i]`` of the whole. They are as the pickle has them, checked when they are used.
    """

    qualname = "CheckpointableTensor"

    local: StoredTensor
    shape: tuple[int, ...]
    global_offsets: Sequence[object]
    local_offsets: Sequence[object]
    sizes: Sequence[object]

    @property
    def dtype(self) -> str:
        """The element type."""
        return self.local.dtype


Stored: TypeAlias = StoredTensor | StoredDTensor | StoredPieces


def as_count(value: object, what: str) -> int:
    """An integer from 0 to 2**63 - 1, else UnreadableError."""
    if type(value) is not int or not 0 <= value < 1 << 63:
        raise UnreadableError(f"{what} is not a count: {shown(value)}.")
    return value


def as_counts(value: object, what: str) -> tuple[int, ...]:
    """A tuple of up to 64 counts, from a tuple, a list or one integer, else UnreadableError."""
    if type(value) is int:
        value = (value,)
    if not isinstance(value, tuple | list) or len(value) > MAX_NDIM:
        raise UnreadableError(f"{what} is not a list of counts: {shown(value)}.")
    for item in value:
        if type(item) is not int or not 0 <= item < 1 << 63:  # inline: shapes are most of the work
            as_count(item, what)
    return tuple(value)
