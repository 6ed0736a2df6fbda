"""Is an output that is there the one that a plan would write? For a run that goes on after its end.

All files are compared by their lengths and by all bytes that the plan itself knows, which tell
names, types, shapes and places. Of the values samples are made anew and compared: another save of
the same model differs in all of its tensors.
"""

from __future__ import annotations

import os
import threading
from tempfile import TemporaryFile

from ckpt_tools.convert.locating import located_tasks
from ckpt_tools.convert.plan import Plan
from ckpt_tools.copying.parallel import ignore_bytes
from ckpt_tools.copying.task_writer import Output, TaskWriter
from ckpt_tools.copying.tasks import MIN_MEMORY, InlineBytes, Slab, Task, without_slots
from ckpt_tools.core.geometry import slabs
from ckpt_tools.core.index import CheckpointIndex
from ckpt_tools.core.plan import FilePlan
from ckpt_tools.core.sizes import Sizes
from ckpt_tools.errors import CheckpointError
from ckpt_tools.storage.reader import Files

_SAMPLES = 1024  # of an output


def is_written(out: str, plan: Plan, sizes: Sizes) -> bool:
    """Whether ``out`` has every file of the plan with its length and its known bytes, and samples
    of its values are what the source gives. False, too, where the source cannot be read here.
    """
    is_one = plan.single_file is not None
    places = {f.path: out if is_one else os.path.join(out, f.path) for f in plan.files.files}
    for file in plan.files.files:
        path = places[file.path]
        if not os.path.isfile(path) or os.path.getsize(path) != file.length:
            return False
    most = -(-_SAMPLES // max(1, len(places)))
    with Files(sizes=sizes) as files:
        for work in plan.works.values():
            work(files, plan.source)
        try:
            return all(_is_equal(f, places[f.path], plan.source, files, most) for f in plan.files)
        except CheckpointError:
            return False


def _is_equal(plan: FilePlan, path: str, source: CheckpointIndex, files: Files, most: int) -> bool:
    """Whether a file has the known bytes of its plan, and samples of its items."""
    slots = sorted(slot for item in plan.items for slot in item.crc_at)
    for literal in plan.literals:
        for offset, data in without_slots(InlineBytes(*literal), slots):
            if files.read(path, offset, len(data)) != data:
                return False
    items = [item._replace(crc_at=()) for item in plan.items if item.box.numel]
    tasks = []  # that write the first elements of an item each
    for item in items[:: max(1, -(-len(items) // most))]:
        itemsize = item.target.itemsize
        box = next(slabs(item.box, max_numel=max(1, files.sizes.sample // itemsize)))
        piece = Slab(item.offset, box.numel * itemsize, item, box)
        tasks.append(Task(plan, 0, piece.nbytes, (), (piece,), None, 1))
    writer = TaskWriter(files, memory=MIN_MEMORY, moved=ignore_bytes, stop=threading.Event())
    with TemporaryFile() as made:
        os.ftruncate(made.fileno(), plan.length)  # of a sparse file
        output = Output(path, made.fileno())
        for task in located_tasks(tasks, source, files):
            writer.write(task, output)
            start, end = task.span
            if os.pread(made.fileno(), end - start, start) != files.read(path, start, end - start):
                return False
    return True
