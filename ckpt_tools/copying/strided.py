"""Where the elements of a chunk lie in its file and go in a packed buffer: pure arithmetic.

Boxes and strides in elements come in, byte offsets and byte steps go out. Nothing here reads.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from math import prod
from typing import NamedTuple

from ckpt_tools.core.geometry import Box, row_major_strides
from ckpt_tools.core.plan import ReadItem, WriteItem
from ckpt_tools.errors import CheckpointError


class Dim(NamedTuple):
    """``size`` steps of ``source`` bytes in the file and ``target`` bytes in the buffer."""

    size: int
    source: int
    target: int


class StridedCopy(NamedTuple):
    """How the elements of one chunk go into a buffer.

    ``unit`` bytes lie together on both sides, at byte ``source`` of the file and ``target`` of the
    buffer, and again for each step along ``dims``, which are sorted by their steps in the file,
    longest first. An element has ``itemsize`` bytes.
    """

    path: str
    source: int
    target: int
    unit: int
    itemsize: int
    dims: tuple[Dim, ...]


# Copy from a file (path, first byte, number of bytes) to this byte of the buffer. A plain tuple:
# there is one for every chunk of every small tensor.
Job = tuple[str, int, int, int]


def copy_of(read: ReadItem, part: Box, *, within: Box, itemsize: int) -> StridedCopy:
    """How ``part`` of a chunk goes into the packed row-major memory of ``within``.

    Raises CheckpointError when the chunk's byte range does not hold it, or is not raw bytes.
    """
    chunk = read.chunk
    into = row_major_strides(within.sizes)
    if chunk.codec is not None:
        raise CheckpointError(f"The bytes of {chunk.box} in {chunk.data.path} are not located yet.")
    strides = chunk.strides
    if strides is None:
        strides = row_major_strides(chunk.box.sizes)
    source = target = last = 0
    dims: list[Dim] = []
    for dim, (start, size) in enumerate(zip(part.offsets, part.sizes, strict=True)):
        source += (start - chunk.box.offsets[dim]) * strides[dim]
        target += (start - within.offsets[dim]) * into[dim]
        last += (size - 1) * strides[dim]
        if size > 1:
            dims.append(Dim(size, strides[dim] * itemsize, into[dim] * itemsize))
    needed = (source + last + 1) * itemsize
    if needed > chunk.data.length:
        raise CheckpointError(
            f"{chunk.data.path}: chunk {chunk.box} has {chunk.data.length:,} bytes at "
            f"{chunk.data.offset:,}, its shape and strides need {needed:,}."
        )
    dims = _joined(sorted(dims, key=lambda dim: dim.source, reverse=True))
    unit = itemsize
    if dims and dims[-1].source == dims[-1].target == itemsize:
        unit *= dims.pop().size
    start = chunk.data.offset + source * itemsize
    return StridedCopy(chunk.data.path, start, target * itemsize, unit, itemsize, tuple(dims))


def copies_of(reads: Sequence[ReadItem], box: Box, *, itemsize: int) -> list[StridedCopy]:
    """The copies that fill the packed row-major memory of a box.

    Raises CheckpointError when the reads do not hold every element once, and as `copy_of` does.
    """
    parts = [(read, read.box.intersect(box)) for read in reads]
    filled = sum(part.numel for _, part in parts if part is not None)
    if filled != box.numel:
        raise CheckpointError(f"The reads of {box} give {filled:,} of {box.numel:,} elements.")
    return [
        copy_of(read, part, within=box, itemsize=itemsize)
        for read, part in parts
        if part is not None
    ]


def _joined(dims: Sequence[Dim]) -> list[Dim]:
    """The same steps in as few dimensions as possible."""
    out: list[Dim] = []
    for dim in dims:
        count, source, target = dim
        if out and out[-1].source == count * source and out[-1].target == count * target:
            out[-1] = Dim(out[-1].size * count, source, target)
        else:
            out.append(dim)
    return out


def steps(dims: Sequence[Dim]) -> Iterator[tuple[int, int]]:
    """The source and target bytes of every step along these dimensions, relative to the first."""
    if len(dims) == 1 and dims[0].source and dims[0].target:  # an expanded tensor has steps of 0
        count, source, target = dims[0]
        places = range(0, count * source, source), range(0, count * target, target)
        yield from zip(*places, strict=True)
        return
    for index in product(*(range(dim.size) for dim in dims)):
        yield (
            sum(i * dim.source for i, dim in zip(index, dims, strict=True)),
            sum(i * dim.target for i, dim in zip(index, dims, strict=True)),
        )


def blocks_of(copy: StridedCopy, *, limit: int, gap: int) -> Iterator[StridedCopy]:
    """The copy in blocks that are read in one go, the largest whose bytes in the file, gaps of at
    most ``gap`` included, are at most ``limit``; the least is a unit.
    """
    dims, span, step = copy.dims, copy.unit, 0
    place = len(dims)
    while place > 0:
        count, source, _ = dims[place - 1]
        fit = count if source == 0 else min(count, (limit - span) // source + 1)
        if fit < 2 or source - span > gap:
            break
        place, step = place - 1, fit
        if fit < count:
            break
        span += (count - 1) * source
    for source, target in steps(dims[:place]):
        block = copy._replace(source=copy.source + source, target=copy.target + target, dims=())
        if place == len(dims):
            yield block
            continue
        count, by, to = dims[place]
        for first in range(0, count, step):
            cut = Dim(min(step, count - first), by, to)
            yield block._replace(
                source=block.source + first * by,
                target=block.target + first * to,
                dims=(cut, *dims[place + 1 :]),
            )


def span_of(copy: StridedCopy) -> int:
    """Bytes in the file from the first to the last, gaps included."""
    return copy.unit + sum((dim.size - 1) * dim.source for dim in copy.dims)


def runs_of(reads: Sequence[ReadItem], box: Box, *, itemsize: int) -> list[StridedCopy] | None:
    """The copies that fill a box, in the order of the buffer, where each is one run of bytes.

    None when an element lies alone on either side. Raises CheckpointError as `copies_of` does.
    """
    runs = sorted(copies_of(reads, box, itemsize=itemsize), key=lambda copy: copy.target)
    end = 0
    for copy in runs:
        if copy.dims or copy.target != end:
            return None
        end += copy.unit
    return runs


def add_jobs(item: WriteItem, target: int, jobs: list[Job], *, most: int) -> bool:
    """Append the copies that gather a small item to byte ``target`` of a buffer.

    Returns False, and appends nothing, when those of one chunk are more than ``most``.
    Raises CheckpointError when the reads do not hold every element once.
    """
    box, itemsize = item.box, item.source.itemsize
    tail = box.sizes[1:]
    row = prod(tail) * itemsize
    before = len(jobs)
    nbytes = 0
    # This loop runs for every chunk of every small tensor: a whole packed chunk takes no detour.
    for read in item.reads:
        chunk, part = read
        data = chunk.data
        length = part.sizes[0] * row if tail or part.sizes else itemsize
        if (
            chunk.strides is None
            and length == data.length
            and part.sizes[1:] == tail
            and part == chunk.box
            and chunk.codec is None
        ):
            place = (part.offsets[0] - box.offsets[0]) * row if part.sizes else 0
            jobs.append((data.path, data.offset, length, target + place))
            nbytes += length
            continue
        copy = copy_of(read, part, within=box, itemsize=itemsize)
        count = prod(dim.size for dim in copy.dims)
        if count > most:
            del jobs[before:]
            return False
        nbytes += count * copy.unit
        for source, place in steps(copy.dims):
            start = target + copy.target + place
            jobs.append((data.path, copy.source + source, copy.unit, start))
    if nbytes != box.numel * itemsize:
        raise CheckpointError(f"{item.fqn}: {nbytes:,} bytes are to be read for {box}.")
    return True
