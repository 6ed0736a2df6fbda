"""What a reshard will read, write and hold in memory, told from its plan alone."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from ckpt_tools.convert.reshard import ReshardPlan
from ckpt_tools.core.plan import FilePlan

# Measured on Linux, Python 3.11: the process with numpy, the process with torch 2.13, and what one
# box of a plan takes, with the read that fills it and the bytes around it in the file.
_WITH_NUMPY = 50_000_000
_WITH_TORCH = 330_000_000
_PER_BOX = 2_500


class FileForecast(NamedTuple):
    """One file to write: its bytes and boxes, the bytes read for it, and from how many files."""

    path: str
    nbytes: int
    boxes: int
    read: int
    sources: int


def files(plan: ReshardPlan) -> Iterator[FileForecast]:
    """Each file of the plan: in both formats there is one for each rank of the target mesh."""
    for file in plan.files:
        yield FileForecast(
            path=file.path,
            nbytes=file.length,
            boxes=len(file.items),
            read=bytes_read(file),
            sources=len({read.chunk.data.path for item in file.items for read in item.reads}),
        )


def bytes_read(file: FilePlan) -> int:
    """Bytes of the elements that are read for a file, without the gaps between them."""
    return sum(read.box.numel * item.source.itemsize for item in file.items for read in item.reads)


def sources(plan: ReshardPlan) -> set[str]:
    """Paths of the files that are read."""
    return {
        read.chunk.data.path for file in plan.files for item in file.items for read in item.reads
    }


def peak_memory(plan: ReshardPlan, *, engine: str, buffers: int) -> int:
    """Bytes that the largest process will hold, about; ``buffers`` are the bytes of its buffers.

    The engine `copy` holds only those, `dcp` a rank's shards, `gather` the largest tensor twice.
    """
    boxes = sum(len(file.items) for file in plan.files) * _PER_BOX
    if engine == "copy":
        return _WITH_NUMPY + boxes + buffers
    if engine == "gather":
        largest = max((target.entry.nbytes for target in plan.targets), default=0)
        return _WITH_TORCH + boxes + 2 * largest
    return _WITH_TORCH + boxes + max(_held(plan), default=0)


def _held(plan: ReshardPlan) -> Iterator[int]:
    """Bytes of the tensors of each rank of the target mesh."""
    for coordinate in plan.mesh.coordinates():
        yield sum(
            target.dtype.itemsize
            * (
                target.entry.numel
                if target.layout is None
                else target.layout.box(target.entry.shape, coordinate).numel
            )
            for target in plan.targets
        )
