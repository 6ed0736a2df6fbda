"""Chunks as raw elements: what formats of torch have in common when they locate theirs.

A lazily negated or conjugated tensor (`torch.Tensor.conj()`, `.imag` of one) is saved with a mark
and with its elements as they are; its chunk then points at a copy of the bytes with other signs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import TYPE_CHECKING

from ckpt_tools.core.dtypes import DType
from ckpt_tools.core.geometry import row_major_strides
from ckpt_tools.core.index import ByteRange, CheckpointIndex, Chunk, ObjectEntry, TensorEntry
from ckpt_tools.core.text import some
from ckpt_tools.errors import CheckpointError, NotReadError
from ckpt_tools.formats.protocol import is_there, lengths_of
from ckpt_tools.storage.reader import Files, Unpack

if TYPE_CHECKING:
    from ckpt_tools.formats.pickle.stored import StoredTensor

# Codecs of chunks whose stored elements have other signs than the tensor.
SIGNS = frozenset({"negated", "conjugated"})
_FLIPPED = bytes(byte ^ 0x80 for byte in range(256))

Raw = Callable[[TensorEntry, Chunk], Chunk]


def locate(index: CheckpointIndex, files: Files) -> CheckpointIndex:
    """The index of a format whose chunks are raw elements, or such with other signs.

    Others stay as they are: they came from a part of another format.
    """

    def raw(entry: TensorEntry, chunk: Chunk) -> Chunk:
        return resolved(chunk, entry.dtype, files) if chunk.codec in SIGNS else chunk

    return located(index, raw)


def located(
    index: CheckpointIndex, raw: Raw, *, entries: Iterable[TensorEntry] | None = None
) -> CheckpointIndex:
    """The same index with each chunk as ``raw`` gives it, with the replicas of the same layout.

    What ``raw`` raises becomes a problem of the index, so that one chunk does not hide the others,
    and one for all tensors of which it says the same (a file may not be opened); so do flaws of
    objects. ``entries`` are the tensors of the index, where something is to be read for each.
    """
    lengths = lengths_of(index)
    tensors, problems = [], list(index.problems)
    found: dict[str, tuple[CheckpointError, list[str]]] = {}
    for entry in index.tensors if entries is None else entries:
        if entry.fqn in index.damaged or all(chunk.codec is None for chunk in entry.chunks):
            tensors.append(entry)
            continue
        try:
            tensors.append(replace(entry, chunks=_located_chunks(entry, raw, lengths)))
        except CheckpointError as error:
            # Of the error without its traceback, whose frames hold what was read: 64 KiB each.
            found.setdefault(error.message, (error.concerning(()), []))[1].append(entry.fqn)
            tensors.append(entry)
    problems += [error.concerning(fqns) for error, fqns in found.values()]
    problems += flaws(index.objects)
    return replace(index, tensors=tuple(tensors), problems=tuple(problems))


def flaws(objects: Sequence[ObjectEntry]) -> Iterator[CheckpointError]:
    """Problems of entries that are there and cannot be used, one for all with the same flaw."""
    by_flaw: dict[tuple[str, str], list[ObjectEntry]] = {}
    for entry in objects:
        if entry.flaw is not None:
            by_flaw.setdefault((entry.data.path, entry.flaw.message), []).append(entry)
    for (path, _), entries in by_flaw.items():
        flaw, fqns = entries[0].flaw, [entry.fqn for entry in entries]
        if flaw is not None:
            yield flaw.at(f"{path}: {some(fqns)}").concerning(fqns)


def _located_chunks(entry: TensorEntry, raw: Raw, lengths: Mapping[str, int]) -> list[Chunk]:
    """The chunks of a tensor as raw elements; one of which others are views is located once."""
    one = partial(raw, entry)
    seen: dict[int, Chunk] = {}
    chunks = []
    for chunk in entry.chunks:
        if chunk.of is None:
            chunks.append(_with_replicas(chunk, one, lengths))
            continue
        if id(chunk.of) not in seen:
            seen[id(chunk.of)] = _with_replicas(chunk.of, one, lengths)
        stored = seen[id(chunk.of)]
        is_raw = stored.codec is None  # else it is of another format
        chunks.append(chunk.seen_in(stored, itemsize=entry.dtype.itemsize) if is_raw else chunk)
    return chunks


def _with_replicas(
    chunk: Chunk, raw: Callable[[Chunk], Chunk], lengths: Mapping[str, int]
) -> Chunk:
    """The chunk and those of its replicas with the same layout, as raw elements."""
    first = raw(chunk)
    if not chunk.replicas or chunk.codec is None:
        return first
    layout = (first.strides, first.codec, first.data.length)
    replicas = []
    for data in chunk.replicas:
        if not is_there(data, lengths):
            replicas.append(data)
            continue
        other = raw(chunk._replace(data=data, replicas=()))
        if (other.strides, other.codec, other.data.length) == layout:
            replicas.append(other.data)
    return first._replace(replicas=tuple(replicas))


def strides_of(stored: StoredTensor) -> tuple[int, ...] | None:
    """The strides of a tensor, or None when its elements are packed row-major."""
    if 0 in stored.shape:
        return None
    packed = row_major_strides(stored.shape)
    same = all(
        size == 1 or stride == step
        for size, stride, step in zip(stored.shape, stored.strides, packed, strict=True)
    )
    return None if same else stored.strides


def resolved(chunk: Chunk, dtype: DType, files: Files) -> Chunk:
    """The chunk of a lazily negated or conjugated tensor: a copy of its bytes with other signs.

    Raises NotReadError for element types of which torch makes no such view.
    """
    if chunk.codec == "conjugated":
        step, first = dtype.itemsize, dtype.itemsize - 1
    else:
        step = dtype.itemsize // (2 if dtype.kind == "complex" else 1)
        first = step - 1
    if dtype.kind not in {"float", "complex"} or step < 2:
        raise NotReadError(
            f"{chunk.data.path}: a lazily {chunk.codec} tensor of {dtype.name} is not read.",
            hint="Call .resolve_conj() and .resolve_neg() on it before saving.",
        )
    data = ByteRange(*files.spill(chunk.data, _flip(first, step)))
    return chunk._replace(data=data, codec=None)


@cache  # one copier for each pair: `Files` makes one copy of a byte range for each copier
def _flip(first: int, step: int) -> Unpack:
    """A copier that turns the sign bit in byte ``first`` of every ``step`` bytes."""

    def flip(blocks: Iterator[bytes], write: Callable[[bytes], object], _where: str) -> None:
        for block in blocks:
            turned = bytearray(block)
            turned[first::step] = turned[first::step].translate(_FLIPPED)
            write(bytes(turned))

    return flip
