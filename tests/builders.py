"""Indexes made by hand: tensors cut by a layout, as a format that states no layout stores them."""

from __future__ import annotations

from collections.abc import Sequence

from ckpt_tools.core.dtypes import dtype_named
from ckpt_tools.core.geometry import Box
from ckpt_tools.core.index import (
    ByteRange,
    CheckpointIndex,
    Chunk,
    ObjectEntry,
    Path,
    Section,
    TensorEntry,
)
from ckpt_tools.core.layout import Layout
from ckpt_tools.core.plain_values import PlainValue


def tensor(
    fqn: str,
    shape: Sequence[int],
    *,
    layout: Layout | None = None,
    section: Section = "model",
    dtype: str = "float32",
    path: Path | None = None,
    with_ranks: bool = True,
) -> TensorEntry:
    """A tensor that each rank of a layout saved its own box of, replicas once; or whole."""
    kind = dtype_named(dtype)
    boxes = [Box.whole(shape)] if layout is None else layout.boxes(shape)
    first: dict[Box, int] = {}
    for rank, box in enumerate(boxes):
        first.setdefault(box, rank)
    chunks = [
        Chunk(
            box,
            ByteRange(f"rank{rank}", 0, box.numel * kind.itemsize),
            rank=rank if with_ranks else None,
        )
        for box, rank in first.items()
    ]
    return TensorEntry(fqn, path or tuple(fqn.split(".")), section, kind, tuple(shape), chunks)


def value(
    fqn: str, content: PlainValue, *, section: Section = "other", opened: bool = True
) -> ObjectEntry:
    """A plain object."""
    return ObjectEntry(
        fqn, tuple(fqn.split(".")), section, ByteRange("rank0", 0, 9), content, opened=opened
    )


def index(*entries: TensorEntry | ObjectEntry, world_size: int | None = None) -> CheckpointIndex:
    """An index of these entries."""
    tensors = [entry for entry in entries if isinstance(entry, TensorEntry)]
    objects = [entry for entry in entries if isinstance(entry, ObjectEntry)]
    return CheckpointIndex(
        root="run",
        format="dcp",
        tensors=tuple(sorted(tensors, key=lambda entry: entry.fqn)),
        objects=tuple(sorted(objects, key=lambda entry: entry.fqn)),
        world_size=world_size,
    )
