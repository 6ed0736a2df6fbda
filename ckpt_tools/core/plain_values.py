"""Values that are no tensors: numbers, texts and containers of them, and what stands for others."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import chain
from typing import Union

from ckpt_tools.core.state_tree import Key

_Single = Union[None, bool, int, float, complex, str, bytes, "PickledValue"]
PlainValue = (
    _Single | AbstractSet["PlainValue"] | Sequence["PlainValue"] | Mapping[Key, "PlainValue"]
)


class Size(tuple[int, ...]):
    """A torch.Size among plain values: a tuple of its own kind."""

    __slots__ = ()


class TorchValue(str):
    """A small value of torch's or of a trainer's among plain ones, by the text that makes it.

    ``torch.float32``, ``torch.strided``, ``torch.device('cuda:0')``, and what Composer saves with
    its progress: ``datetime.timedelta(0, 5, 250)``, ``torch.torch_version.TorchVersion('2.7.0')``.
    A scalar of NumPy, too: ``numpy.float64(0.1)``.
    """

    __slots__ = ()

    def __repr__(self) -> str:
        """The text itself, which tells it from a str."""
        return str(self)


@dataclass(frozen=True, slots=True)
class PickledValue:
    """A value among plain ones that is not opened, as the pickle that makes it: a date, an array.

    ``qualname`` is its class. ``unlisted`` are globals of the pickle that are not known to hold
    data and do nothing else: only those that the user allows are written into other pickles.
    ``fields`` is what a config holds, to be shown.
    """

    qualname: str
    pickle: bytes
    unlisted: tuple[str, ...] = field(default=(), compare=False)
    is_allowed: bool = field(default=True, compare=False)
    fields: PlainValue = field(default=None, compare=False)

    def __str__(self) -> str:
        """Its class in parentheses, which no plain value looks like."""
        return f"({self.qualname})"

    def __repr__(self) -> str:
        """Class, and length and digest of the pickle: equal for equal values only."""
        digest = blake2b(self.pickle, digest_size=8).hexdigest()
        return f"({self.qualname}, {len(self.pickle):,} bytes pickled, {digest})"


def are_same(one: PlainValue, other: PlainValue) -> bool:
    """Whether two values are equal and of equal types, also inside; a NaN is the same as another.

    Texts of values say that, but those of long bytes take seconds.
    """
    if one is other or isinstance(one, bytes):
        return one is other or (isinstance(other, bytes) and one == other)
    return repr(one) == repr(other)


def closed_in(value: PlainValue) -> Iterator[PickledValue]:
    """The values in a plain one that are not opened."""
    if isinstance(value, PickledValue):
        yield value
    elif isinstance(value, Mapping):
        yield from chain.from_iterable(map(closed_in, value.values()))
    elif isinstance(value, list | tuple):
        yield from chain.from_iterable(map(closed_in, value))
