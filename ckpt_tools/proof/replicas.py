"""Whether copies of the same rows, saved by several ranks, are the same.

Which of two that differ is the right one cannot be known here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import chain
from typing import NamedTuple

from ckpt_tools.core.index import ByteRange, Chunk, TensorEntry
from ckpt_tools.errors import CheckpointError
from ckpt_tools.proof.threads import Tally, in_threads
from ckpt_tools.storage.reader import Files


class _Pair(NamedTuple):
    """A chunk of a tensor, and another place that holds the same box."""

    entry: TensorEntry
    chunk: Chunk
    other: ByteRange


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

    def compare(pair: _Pair) -> list[CheckpointError]:
        return _compare(pair, files, tally)

    pairs = [
        _Pair(entry, chunk, other)
        for entry in tensors
        for chunk in entry.chunks
        for other in chunk.replicas
        if chunk.codec is None and chunk.box.numel and is_good(chunk.data) and is_good(other)
    ]
    found = in_threads(compare, pairs, threads=threads, nbytes=_nbytes)
    return list(chain.from_iterable(found))


def _nbytes(pair: _Pair) -> int:
    return pair.other.length


def _compare(pair: _Pair, files: Files, tally: Tally) -> list[CheckpointError]:
    from ckpt_tools.copying.write import (
        read_box,  # numpy comes with it, and looking commands go without
    )

    entry, chunk, other = pair
    one = replace(entry, chunks=(chunk._replace(replicas=()),))
    two = replace(entry, chunks=(chunk._replace(replicas=(), data=other),))
    done = 0
    pieces = zip(
        read_box(one, chunk.box, files=files), read_box(two, chunk.box, files=files), strict=True
    )
    for here, there in pieces:
        tally.add(len(there))
        if bytes(here) != bytes(there):
            return [
                CheckpointError(
                    f"{entry.fqn} {chunk.box}: {chunk.data.path} and {other.path} hold different "
                    f"values (in the {len(here):,} bytes from byte {done:,} of it on).",
                    hint="Replicas are equal in one save: a file is damaged or of another one.",
                    about=(entry.fqn,),
                )
            ]
        done += len(here)
    return []
