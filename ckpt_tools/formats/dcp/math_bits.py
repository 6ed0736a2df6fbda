"""Tensors that torch saved lazily negated or conjugated: their stored elements have other signs.

`torch.Tensor.conj()` and `.imag` of one leave a mark instead of changing elements, and torch.save
keeps it. A chunk of such a tensor has one of these codecs; its real values are in a temporary copy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache

from ckpt_tools.core.dtypes import DType
from ckpt_tools.core.index import ByteRange, Chunk
from ckpt_tools.errors import UnsupportedError
from ckpt_tools.storage.reader import Files, Unpack

NEGATED = "negated"
CONJUGATED = "conjugated"
CODECS = frozenset({NEGATED, CONJUGATED})

_FLIPPED = bytes(byte ^ 0x80 for byte in range(256))


def resolved(chunk: Chunk, dtype: DType, files: Files) -> Chunk:
    """The chunk with raw elements: a copy of its byte range in which signs are as they should be.

    Raises UnsupportedError for element types of which torch makes no such view.
    """
    if chunk.codec == CONJUGATED:
        step, first = dtype.itemsize, dtype.itemsize - 1
    else:
        step = dtype.itemsize // (2 if dtype.kind == "complex" else 1)
        first = step - 1
    if dtype.kind not in {"float", "complex"} or step < 2:
        raise UnsupportedError(
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
