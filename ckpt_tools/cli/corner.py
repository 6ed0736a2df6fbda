"""The values of a small part of a tensor: which part, its bytes, and how they look."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from ckpt_tools.cli.render import Json
from ckpt_tools.core.geometry import Box
from ckpt_tools.core.index import TensorEntry
from ckpt_tools.errors import UsageError
from ckpt_tools.storage.reader import Files

Number = bool | int | float | complex

_ROWS, _COLUMNS = 6, 6
_MAX_VALUES = 100_000


class Corner(NamedTuple):
    """The elements of ``box`` of a tensor in row-major order, and what they are called."""

    fqn: str
    box: Box
    values: Sequence[Number]
    noun: str = "values"

    @property
    def numel(self) -> int:
        """Number of elements."""
        return len(self.values)


def read_corner(entry: TensorEntry, part: str | None) -> Corner:
    """Read what the slice text chooses of a located tensor, or its first corner without one.

    Raises UsageError for a slice that cannot be meant or that is too large to print.
    """
    # late: numpy comes with it, only values need it
    from ckpt_tools.copying.cast import decode, has_numbers
    from ckpt_tools.copying.write import read_array

    box = first_corner(entry.shape) if part is None else parse_slice(part, entry.shape)
    if box.numel > _MAX_VALUES:
        raise UsageError(
            f"--slice chooses {box.numel:,} values; at most {_MAX_VALUES:,} are printed.",
            hint="`ckpt-tools export --format torch` writes whole tensors.",
        )
    with Files() as files:
        data = read_array(entry, box, files=files)
    noun = "values" if has_numbers(entry.dtype) else "packed bits, as integers,"
    return Corner(entry.fqn, box, decode(bytes(data), entry.dtype), noun)


def first_corner(shape: Sequence[int]) -> Box:
    """The first few rows and columns of the last two dimensions, at 0 of all others."""
    limits = [1] * (len(shape) - 2) + [_ROWS, _COLUMNS][-len(shape) :] if shape else []
    sizes = tuple(min(size, limit) for size, limit in zip(shape, limits, strict=True))
    return Box((0,) * len(shape), sizes)


def parse_slice(text: str, shape: Sequence[int]) -> Box:
    """The box that ``0:4,:8`` or ``-1`` means for this shape; dimensions left out are whole.

    Raises UsageError when it cannot be read, has too many dimensions, or chooses nothing there.
    """
    parts = [part.strip() for part in text.strip("[] ").split(",") if part.strip()]
    if len(parts) > len(shape):
        raise UsageError(f"--slice {text!r} has {len(parts)} dimensions, the tensor {len(shape)}.")
    spans = [_span(part, size) for part, size in zip(parts, shape, strict=False)]
    spans += [(0, size) for size in shape[len(parts) :]]
    return Box(tuple(start for start, _ in spans), tuple(size for _, size in spans))


def _span(part: str, size: int) -> tuple[int, int]:
    """Start and length of one dimension's part."""
    first, colon, last = part.partition(":")
    try:
        if not colon:
            start = int(first) + (size if int(first) < 0 else 0)
            if not 0 <= start < size:
                raise UsageError(f"--slice: index {part} is outside of a dimension of {size}.")
            return start, 1
        chosen = range(size)[slice(int(first) if first else None, int(last) if last else None)]
    except ValueError as error:
        raise UsageError(
            f"--slice: {part!r} cannot be read.", hint="Write START:END for each dimension."
        ) from error
    if not chosen and size:
        raise UsageError(f"--slice: {part} chooses nothing of a dimension of {size}.")
    return (chosen.start if chosen else 0), len(chosen)


def flat(corner: Corner) -> list[Json]:
    """The values as JSON has them: complex numbers as pairs."""
    return [[v.real, v.imag] if isinstance(v, complex) else v for v in corner.values]


def nested(corner: Corner) -> Json:
    """The values as nested lists, one level a dimension; a bare value for a scalar."""
    return _nest(flat(corner), corner.box.sizes)


def _nest(values: Sequence[Json], sizes: Sequence[int]) -> Json:
    if not sizes:
        return values[0]
    step = len(values) // sizes[0] if sizes[0] else 0
    return [_nest(values[i * step : (i + 1) * step], sizes[1:]) for i in range(sizes[0])]


def lines(corner: Corner) -> Iterator[str]:
    """The values as rows of the last dimension, under the slice that each block is."""
    if not corner.values:
        yield "  no elements"
        return
    texts = [value_text(value) for value in corner.values]
    width = max(map(len, texts))
    per_row = corner.box.sizes[-1] if corner.box.sizes else 1
    if corner.box.sizes:
        yield f"  {corner.noun} of {corner.box}"
    rows_in_block = corner.box.sizes[-2] if len(corner.box.sizes) > 1 else 1
    for number, start in enumerate(range(0, len(texts), per_row)):
        if number and number % rows_in_block == 0:
            yield ""
        yield "  " + " ".join(text.rjust(width) for text in texts[start : start + per_row])


def value_text(value: Number) -> str:
    """A value in at most seven digits."""
    if isinstance(value, (bool, int)):
        return str(value)
    if isinstance(value, complex):
        return f"{value.real:.7g}{value.imag:+.7g}j"
    return f"{value:.7g}"
