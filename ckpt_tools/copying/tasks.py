"""Cuts file plans into tasks: contiguous ranges of files that can be written in any order.

The cut depends on the plan alone, never on threads or memory, so that a task's number means the
same in every process. This room opens no file.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import NamedTuple

from ckpt_tools.core.geometry import Box, slabs
from ckpt_tools.core.plan import FilePlan, LazyPlans, WriteItem
from ckpt_tools.core.sizes import Sizes
from ckpt_tools.errors import UsageError, WriteError

MIN_MEMORY = 1 << 20
_ITEM_BYTES = 2_500  # about what an item of a plan takes
SLOT_BYTES = 4


class InlineBytes(NamedTuple):
    """Bytes that are known already, to write at byte ``offset`` of the file."""

    offset: int
    data: bytes

    @property
    def nbytes(self) -> int:
        """Bytes that it takes in the file."""
        return len(self.data)


class Slab(NamedTuple):
    """The part ``box`` of one item, to write at byte ``offset`` of the file."""

    offset: int
    nbytes: int
    item: WriteItem
    box: Box


Content = InlineBytes | Slab


class Task(NamedTuple):
    """The literals and pieces of a contiguous range of one file.

    It is task ``number`` ``of`` those that write the file, and ``nbytes`` are to be written.
    ``checked`` is the item when the task is one of several
    that write an item whose CRC-32 is wanted: no single task can know that number.
    """

    file: FilePlan
    number: int
    nbytes: int
    literals: tuple[InlineBytes, ...]
    pieces: tuple[Slab, ...]
    checked: WriteItem | None
    of: int

    @property
    def is_part(self) -> bool:
        """Whether the task is one of several that write one large item."""
        return _part_of_item(self.pieces) is not None

    @property
    def span(self) -> tuple[int, int]:
        """The first byte of the file that the task writes, and the byte after the last."""
        literals, pieces = self.literals, self.pieces  # each in the order of the file
        ends: list[Content] = [*literals[:1], *literals[-1:], *pieces[:1], *pieces[-1:]]
        first = min((one.offset for one in ends), default=0)
        return first, max((one.offset + one.nbytes for one in ends), default=0)


@dataclass(frozen=True, slots=True)
class Share:
    """Worker ``index`` of ``count`` (0-based) does its own part of the tasks.

    ``before`` bytes of what it is not given lie before what it is, of ``total`` in all files; None
    when it is given all.
    """

    index: int
    count: int
    before: int = 0
    total: int | None = None


ALL = Share(0, 1)


def contents_of(task: Task) -> list[Content]:
    """The literals and pieces of a task, in the order of the file."""
    contents: list[Content] = [*task.literals, *task.pieces]
    contents.sort(key=_place)
    return contents


def cut(plan: FilePlan, task_bytes: int) -> Iterator[Task]:
    """The tasks of one file, in ascending order of their ranges.

    A large item becomes tasks of about ``task_bytes``, small ones that lie together become one.
    The four bytes of a CRC-32 that a task cannot write itself are left out of every literal, so
    that no order between tasks matters.

    Raises WriteError when the plan writes a byte twice or beyond the end of the file.
    """
    ranges = list(_ranges(_contents(plan), task_bytes))
    slots = sorted(slot for contents in ranges for slot in _foreign_slots(contents))
    for number, contents in enumerate(ranges):
        literals = [one for one in contents if isinstance(one, InlineBytes)]
        if slots:
            literals = [left for literal in literals for left in without_slots(literal, slots)]
        pieces = tuple(one for one in contents if isinstance(one, Slab))
        item = _part_of_item(pieces)
        checked = item if item is not None and item.crc_at else None
        nbytes = sum(one.nbytes for one in contents)
        yield Task(plan, number, nbytes, tuple(literals), pieces, checked, len(ranges))


def _part_of_item(pieces: Sequence[Slab]) -> WriteItem | None:
    """The item of which these pieces are one part; None when they are whole items."""
    if not pieces or pieces[0].box == pieces[0].item.box:
        return None
    return pieces[0].item


def _contents(plan: FilePlan) -> list[Content]:
    """Everything that the plan writes, in order, checked not to overlap."""
    contents: list[Content] = [InlineBytes(*literal) for literal in plan.literals]
    contents += [
        Slab(item.offset, item.box.numel * item.target.itemsize, item, item.box)
        for item in plan.items
    ]
    contents.sort(key=_place)
    end = 0
    for content in contents:
        if content.offset < end:
            raise WriteError(f"The plan of {plan.path} writes byte {content.offset:,} twice.")
        end = content.offset + content.nbytes
    if end > plan.length:
        raise WriteError(f"The plan of {plan.path} writes beyond its {plan.length:,} bytes.")
    return contents


def _place(content: Content) -> tuple[int, int]:
    return content.offset, content.nbytes


def _ranges(contents: Iterable[Content], most: int) -> Iterator[list[Content]]:
    """Group contents into ranges of about ``most`` bytes; what is larger is cut or stands alone."""
    group: list[Content] = []
    size = 0
    for content in contents:
        nbytes = content.nbytes
        is_cut = isinstance(content, Slab) and nbytes > most
        if group and (is_cut or (size and size + nbytes > most)):
            yield group
            group, size = [], 0
        if isinstance(content, Slab) and is_cut:
            offset, itemsize = content.offset, content.item.target.itemsize
            for box in slabs(content.box, max_numel=most // itemsize):
                part = Slab(offset, box.numel * itemsize, content.item, box)
                yield [part]
                offset += part.nbytes
        else:
            group.append(content)
            size += nbytes
    if group:
        yield group


def _foreign_slots(contents: Sequence[Content]) -> Iterator[int]:
    """The CRC slots of a range's items that another range's literals may cover."""
    pieces = [one for one in contents if isinstance(one, Slab)]
    is_part = _part_of_item(pieces) is not None
    start, end = contents[0].offset, contents[-1].offset + contents[-1].nbytes
    for slot in (slot for piece in pieces for slot in piece.item.crc_at):
        if is_part or slot < start or slot + SLOT_BYTES > end:
            yield slot


def without_slots(literal: InlineBytes, slots: Sequence[int]) -> Iterator[InlineBytes]:
    """The parts of a literal around the slots (sorted) that lie in it."""
    offset, data = literal
    start, end = offset, offset + len(data)
    for slot in slots[bisect_left(slots, offset - SLOT_BYTES + 1) : bisect_left(slots, end)]:
        if slot > start:
            yield InlineBytes(start, data[start - offset : slot - offset])
        start = max(start, slot + SLOT_BYTES)
    if start < end:
        yield InlineBytes(start, data[start - offset :])


def check_memory(threads: int | None, max_memory: int) -> None:
    """Raise UsageError for fewer threads or bytes of buffers than any work can be done with."""
    if threads is not None and threads < 1:
        raise UsageError(f"{threads} threads: one is the least.")
    if max_memory < MIN_MEMORY:
        raise UsageError(
            f"{max_memory:,} bytes of memory for all buffers: {MIN_MEMORY:,} bytes are the least.",
            hint="--max-memory 1MiB is as much.",
        )


def share_of(tasks: Sequence[Task], share: Share) -> list[Task]:
    """The tasks of one worker: neighbours stay together, and bytes are as even as that allows.

    ``tasks`` are all, or some before which ``share.before`` of ``share.total`` bytes lie. All tasks
    of an item with a CRC-32 go to one worker. Every task goes to exactly one.
    """
    if share.count == 1:
        return list(tasks)
    total = sum(task.nbytes for task in tasks) if share.total is None else share.total
    before = share.before
    mine: list[Task] = []
    for _, same in groupby(tasks, key=_unit):
        unit = list(same)
        nbytes = sum(task.nbytes for task in unit)
        middle = 2 * before + nbytes
        index = min(share.count - 1, middle * share.count // max(1, 2 * total))
        if index == share.index:
            mine += unit
        before += nbytes
    return mine


def files_of_share(plans: LazyPlans, share: Share) -> tuple[LazyPlans, Share]:
    """The files that a worker writes in, and its share of them; no plan is made for it."""
    total = plans.length if share.total is None else share.total
    least, most = total * share.index, total * (share.index + 1)
    before, first, end = share.before, None, 0
    start = before
    for place, file in enumerate(plans.files):
        if before * share.count <= most and (before + file.length) * share.count >= least:
            if first is None:
                first, start = place, before
            end = place + 1
        before += file.length
    return LazyPlans(plans.files[first or 0 : end]), replace(share, before=start, total=total)


def groups_of(
    plans: LazyPlans, share: Share, sizes: Sizes
) -> Iterator[tuple[list[FilePlan], list[Task]]]:
    """Plans of the files that a worker writes in, and its tasks in them.

    Plans are made here, a bounded part of them at a time.
    """
    plans, share = files_of_share(plans, share)
    held = 0
    group: list[FilePlan] = []
    tasks: list[Task] = []
    for plan in plans:
        group.append(plan)
        tasks += share_of(list(cut(plan, sizes.task)), share)
        share = replace(share, before=share.before + plan.length)
        literals = {id(data): len(data) for _, data in plan.literals}  # many items share theirs
        held += sum(literals.values()) + _ITEM_BYTES * len(plan.items)
        if held > (sizes.plans if len(group) >= sizes.plan_files else sizes.most_plans):
            yield group, tasks
            group, tasks, held = [], [], 0
    yield group, tasks


def _unit(task: Task) -> tuple[str, int]:
    """What must stay on one worker: tasks with equal answers."""
    if task.checked is None:
        return task.file.path, task.number
    return task.file.path, -1 - task.checked.offset
