"""Tasks: the same cut for everyone, every byte once, shares that are whole and even."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt_tools.copying.tasks import (
    ALL,
    Share,
    Task,
    contents_of,
    cut,
    share_of,
)
from ckpt_tools.core.dtypes import BY_NAME
from ckpt_tools.core.geometry import Box
from ckpt_tools.core.plan import FilePlan, KnownReads, WriteItem
from ckpt_tools.errors import WriteError

BYTE = BY_NAME["uint8"]
TASK_BYTES = 1 << 20


def item(offset: int, nbytes: int, crc_at: tuple[int, ...] = ()) -> WriteItem:
    box = Box((0,), (nbytes,))
    return WriteItem("t", "f", offset, box, BYTE, BYTE, KnownReads(()), crc_at)


@st.composite
def plans(draw: st.DrawFn) -> FilePlan:
    """Zip-like files: a head with a CRC slot, an item, a foot with another slot, gaps between."""
    literals, items, end = [], [], 0
    large = st.integers(TASK_BYTES + 1, 3 * TASK_BYTES)
    for size in draw(st.lists(st.integers(0, 20) | st.integers(0, TASK_BYTES) | large, max_size=6)):
        start = end + draw(st.integers(0, 3))
        literals += [(start, b"h" * 10), (start + 10 + size, b"f" * 10)]
        slots = (start + 3, start + 10 + size) if draw(st.booleans()) else ()
        items.append(item(start + 10, size, slots))
        end = start + 20 + size
    return FilePlan("f", end, tuple(literals), tuple(items))


@given(plans())
def test_tasks_write_every_byte_once_but_the_slots_of_others(plan: FilePlan) -> None:
    spans = [
        (content.offset, content.offset + content.nbytes)
        for task in cut(plan, TASK_BYTES)
        for content in contents_of(task)
        if content.nbytes
    ]
    assert all(before[1] <= after[0] for before, after in pairwise(spans))
    slots = [slot for one in plan.items for slot in one.crc_at]
    written = sum(end - start for start, end in spans)
    wanted = sum(len(data) for _, data in plan.literals) + sum(one.box.numel for one in plan.items)
    left_out = [slot for slot in slots if not any(start <= slot < end for start, end in spans)]
    assert written == wanted - 4 * len(left_out)


@given(plans())
def test_a_slot_is_a_literals_only_where_its_item_is_a_whole_part_of_the_task(
    plan: FilePlan,
) -> None:
    owners = {slot: one for one in plan.items for slot in one.crc_at}
    for task in cut(plan, TASK_BYTES):
        for literal in task.literals:
            for slot in owners.keys() & range(
                literal.offset - 3, literal.offset + len(literal.data)
            ):
                assert any(piece.item is owners[slot] for piece in task.pieces)
                assert task.checked is None


@given(plans())
def test_no_task_is_larger_than_it_should_be(plan: FilePlan) -> None:
    assert all(task.nbytes <= TASK_BYTES for task in cut(plan, TASK_BYTES))


@given(plans(), st.integers(1, 5))
def test_shares_hold_every_task_once(plan: FilePlan, count: int) -> None:
    tasks = list(cut(plan, TASK_BYTES))
    parts = [share_of(tasks, Share(index, count)) for index in range(count)]
    assert [task.number for part in parts for task in part] == [task.number for task in tasks]


@given(plans(), st.integers(1, 5))
def test_an_item_with_a_crc_is_one_workers(plan: FilePlan, count: int) -> None:
    tasks = list(cut(plan, TASK_BYTES))
    owners: dict[int, set[int]] = {}
    for index in range(count):
        for task in share_of(tasks, Share(index, count)):
            if task.checked is not None:
                owners.setdefault(task.checked.offset, set()).add(index)
    assert all(len(indices) == 1 for indices in owners.values())


def test_shares_are_even() -> None:
    tasks = list(cut(FilePlan("f", 64 * TASK_BYTES, (), (item(0, 64 * TASK_BYTES),)), TASK_BYTES))
    loads = [sum(map(nbytes, share_of(tasks, Share(index, 8)))) for index in range(8)]
    assert loads == [8 * TASK_BYTES] * 8


def nbytes(task: Task) -> int:
    return task.nbytes


def test_one_worker_does_all() -> None:
    tasks = list(cut(FilePlan("f", 9, (), (item(0, 9),)), TASK_BYTES))
    assert share_of(tasks, ALL) == tasks


def test_many_small_items_are_one_task() -> None:
    small = tuple(item(8 * n, 8) for n in range(10_000))
    assert len(list(cut(FilePlan("f", 80_000, (), small), TASK_BYTES))) == 1


def test_a_plan_that_writes_a_byte_twice_is_refused() -> None:
    plan = FilePlan("f", 20, ((4, b"1234"),), (item(7, 9),))
    with pytest.raises(WriteError, match="byte 7 twice"):
        list(cut(plan, TASK_BYTES))


def test_a_plan_that_writes_beyond_its_end_is_refused() -> None:
    with pytest.raises(WriteError, match="beyond its 20 bytes"):
        list(cut(FilePlan("f", 20, (), (item(12, 9),)), TASK_BYTES))
