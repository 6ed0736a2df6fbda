"""What a reshard will read, write and hold in memory, from its plan alone."""

from __future__ import annotations

from typing import NamedTuple

from ckpt_tools.convert.reshard import ReshardPlan
from ckpt_tools.convert.write import WriteOptions

# Measured on Linux, Python 3.11: the process with numpy, the process with torch 2.13, what is known
# of each box of all files, and what one box takes in the plan of its file, with the read that fills
# it and the bytes around it.
_WITH_NUMPY = 50_000_000
_WITH_TORCH = 330_000_000
_PER_BOX = 300
_PER_PLANNED_BOX = 2_500


class _FileForecast(NamedTuple):
    """One file to write: its bytes and boxes, the bytes read for it, and from how many files.

    `reshard --json` has these names, too.
    """

    path: str
    nbytes: int
    boxes: int
    read: int
    sources: int


def of(
    plan: ReshardPlan, write: WriteOptions, engine: str, jobs: int
) -> tuple[list[_FileForecast], int, int]:
    """Each file of a plan, in one pass; from how many files all of them are read; and about how
    many bytes the largest of ``jobs`` processes will hold.

    The engine `copy` holds plans and buffers, `dcp` a rank's shards, `gather` the largest tensor
    twice.
    """
    files, sources, sizes = [], set[str](), write.sizes
    for file in plan.files.files:
        boxes, nbytes, paths = file.reads()
        sources |= paths
        files.append(_FileForecast(file.path, file.length, boxes, nbytes, len(paths)))
    boxes = sum(file.boxes for file in files)
    most = max((file.boxes for file in files), default=0) * _PER_PLANNED_BOX
    group = max(sizes.plans, min(sizes.plan_files * most, sizes.most_plans)) + most
    held = boxes * _PER_BOX + min(boxes * _PER_PLANNED_BOX, group)
    if engine == "copy":
        return files, len(sources), _WITH_NUMPY + held + write.max_memory // jobs
    if engine == "gather":
        largest = max((target.entry.nbytes for target in plan.targets), default=0)
        return files, len(sources), _WITH_TORCH + held + 2 * largest
    shards = 0  # of the rank of the target mesh that has most
    for coordinate in plan.mesh.coordinates():
        nbytes = 0
        for target in plan.targets:
            entry, layout = target.entry, target.layout
            part = entry if layout is None else layout.box(entry.shape, coordinate)
            nbytes += part.numel * target.dtype.itemsize
        shards = max(shards, nbytes)
    return files, len(sources), _WITH_TORCH + held + shards
