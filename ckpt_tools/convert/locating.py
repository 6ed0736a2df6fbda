"""Tasks whose chunks are raw elements: whoever does a task locates what it reads, and no more."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from typing import NamedTuple

from ckpt_tools import formats
from ckpt_tools.copying.tasks import Task
from ckpt_tools.core.index import CheckpointIndex, TensorEntry
from ckpt_tools.core.plan import KnownReads, ReadItem, WriteItem
from ckpt_tools.storage.paths import is_address
from ckpt_tools.storage.reader import Files, batches


def located_batches(
    tasks: list[Task], source: CheckpointIndex, files: Files
) -> Iterator[list[Task]]:
    """The same tasks located; of a store so many at a time that the small items that they read,
    which are fetched whole, are in memory until then.
    """
    if not is_address(source.root):
        yield located_tasks(tasks, source, files)
        return

    sizes = files.sizes

    def nbytes(task: Task) -> int:
        reads = (read for piece in task.pieces for read in piece.item.finder.reads(piece.box))
        return sum(formats.fetched_bytes(read.chunk, sizes) for read in reads)

    for batch in batches(tasks, nbytes, sizes.fetched):
        yield located_tasks(batch, source, files)


def located_tasks(tasks: list[Task], source: CheckpointIndex, files: Files) -> list[Task]:
    """The same tasks with the chunks that they read, and no others, as raw elements."""
    reads_of: dict[int, list[ReadItem]] = {}
    waiting: list[_Waiting] = []
    for piece in (piece for task in tasks for piece in task.pieces):
        reads = reads_of.setdefault(id(piece.item), [])
        for read in piece.item.finder.reads(piece.box):
            if read.chunk.codec is not None:
                waiting.append(_Waiting(read, reads, len(reads), piece.item))
            reads.append(read)
    # In the order of files: neighbours are one read.
    waiting.sort(key=lambda one: one.read.chunk.stored.data[:2])
    # Views of one chunk are located together, all else alone.
    grouped = groupby(waiting, key=lambda one: id(one.read.chunk.of or one))
    groups = [list(group) for _, group in grouped]
    entries = [
        TensorEntry(item.fqn, (), "other", item.source, (), tuple(one.read.chunk for one in group))
        for group in groups
        for item in [group[0].item]
    ]
    if entries:
        for group, entry in zip(groups, formats.located_in(source, entries, files), strict=True):
            for one, chunk in zip(group, entry.chunks, strict=True):
                one.reads[one.at] = one.read._replace(chunk=chunk)
    known = {key: KnownReads(reads) for key, reads in reads_of.items()}
    return [
        task._replace(
            pieces=tuple(
                piece._replace(item=piece.item._replace(finder=known[id(piece.item)]))
                for piece in task.pieces
            )
        )
        for task in tasks
    ]


class _Waiting(NamedTuple):
    """A read of an item, which is ``reads[at]``, whose chunk is to be located."""

    read: ReadItem
    reads: list[ReadItem]
    at: int
    item: WriteItem
