"""Are copies of the same rows, saved by several ranks, equal?

Which of two different copies is the right one cannot be known.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import chain

from ckpt_tools import formats
from ckpt_tools.copying.parallel import Tally, ignore_bytes, in_threads
from ckpt_tools.copying.read import first_difference
from ckpt_tools.core.coverage import replicas_differ
from ckpt_tools.core.index import ByteRange, CheckpointIndex, Chunk, TensorEntry
from ckpt_tools.core.text import counted
from ckpt_tools.errors import CheckpointError
from ckpt_tools.storage.reader import Files


def differing_replicas(
    tensors: Sequence[TensorEntry],
    files: Files,
    *,
    is_good: Callable[[ByteRange], bool],
    threads: int | None,
    tally: Tally,
) -> list[CheckpointError]:
    """An error for each replica that does not hold what its chunk holds.

    ``is_good`` says which byte ranges can be read; only those are compared.
    """
    pairs = [
        (entry, chunk, other)
        for entry in tensors
        for chunk in entry.chunks
        for other in chunk.replicas
        if chunk.codec is None and chunk.box.numel and is_good(chunk.data) and is_good(other)
    ]

    def compare(pair: tuple[TensorEntry, Chunk, ByteRange]) -> list[CheckpointError]:
        entry, chunk, other = pair
        one = replace(entry, chunks=(chunk._replace(replicas=()),))
        two = replace(entry, chunks=(chunk._replace(replicas=(), data=other),))
        equal = first_difference(one, two, chunk.box, files=files, on_bytes=tally.add)
        if equal is None:
            return []
        who = f"({_holder(chunk.data)} and {_holder(other)}, after {equal:,} bytes)"
        return [replicas_differ({entry.fqn: f"{chunk.box} {who}"})]

    errors = in_threads(
        compare, pairs, files.sizes, threads=threads, nbytes=lambda pair: pair[2].length
    )
    return list(chain.from_iterable(errors))


def require_equal_replicas(index: CheckpointIndex, files: Files, *, threads: int | None) -> str:
    """Compare the replicas that were too large to be compared when the index was read.

    ``index`` is as its reader gave it, or a part of that. Returns a sentence that says so, or
    nothing where there are none. Raises UnsupportedError with tensors, boxes and ranks.
    """
    left = tuple(entry for entry in index.tensors if not entry.compared)
    if not left:
        return ""
    located = formats.locate(replace(index, tensors=left, objects=(), problems=()), files)
    errors = differing_replicas(
        located.tensors, files, is_good=lambda _: True, threads=threads, tally=Tally(ignore_bytes)
    )
    replace(located, problems=tuple(errors)).require_whole()
    return f" The replicas of {counted(len(left), 'tensor')}, compared byte by byte, are equal."


def _holder(data: ByteRange) -> str:
    """The rank that wrote a file, where its name says it, else the file."""
    rank = formats.rank_of(data.path)
    return data.path if rank is None else f"rank {rank}"
