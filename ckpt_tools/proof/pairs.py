"""The entries of two checkpoints side by side, and what is different about each pair.

`diff`, `verify --against` a checkpoint and --check all compare here: by headers, then objects by
value, tensors as the caller compares them. A difference in one entry never hides another.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Literal, NamedTuple

from ckpt_tools import formats
from ckpt_tools.copying.parallel import IMPORTING, Tally, in_threads
from ckpt_tools.copying.read import OnRun, first_unequal, stream_box
from ckpt_tools.core.dtypes import DType
from ckpt_tools.core.geometry import Box
from ckpt_tools.core.index import CheckpointIndex, Entry, LocatedIndex, ObjectEntry, TensorEntry
from ckpt_tools.core.names import require_chosen
from ckpt_tools.core.plain_values import PlainValue
from ckpt_tools.core.records import Json, as_json
from ckpt_tools.errors import CheckpointError
from ckpt_tools.storage.paths import is_address
from ckpt_tools.storage.reader import Files, batches

if TYPE_CHECKING:
    from ckpt_tools.proof.deltas import Delta

Status = Literal[
    "same", "only a", "only b", "kind", "dtype", "shape", "values", "unknown", "container"
]


# Larger pickles are not read to compare them.
_MAX_COMPARED = 64 << 20


class EntryDiff(NamedTuple):
    """One name and the result of comparing it; ``container`` is of a dict, a list or a tuple.

    ``a`` and ``b`` say in words what is on each side. ``unknown`` means that it could not be
    compared, which is never the same as being equal. ``delta`` is there when values were compared
    and are not bit for bit the same.
    """

    name: str
    status: Status
    a: str | None
    b: str | None
    detail: str = ""
    delta: Delta | None = None

    def to_dict(self) -> dict[str, Json]:
        """The difference as `diff --json` prints it."""
        return {
            "name": self.name,
            "what": self.status.replace(" ", "_"),
            "a": self.a,
            "b": self.b,
            "detail": self.detail or None,
            "values": as_json(self.delta),
        }


# What is found when the values of two tensors of one shape are compared, after their headers.
CompareValues = Callable[[EntryDiff, TensorEntry, TensorEntry], EntryDiff]


def by_fqn(entries: Iterable[Entry]) -> dict[str, Entry]:
    """Entries by their own names, to be paired."""
    return {entry.fqn: entry for entry in entries}


def compare_headers(a: Mapping[str, Entry], b: Mapping[str, Entry]) -> list[EntryDiff]:
    """Compare names, types and shapes of entries, by their comparable names."""
    both = (_header(name, one, b[name]) for name, one in a.items() if name in b)
    return [*_one_sided(a, b), *both]


def compare_entries(
    a: Mapping[str, Entry],
    b: Mapping[str, Entry],
    values: CompareValues,
    files: Files,
    *,
    threads: int | None,
) -> list[EntryDiff]:
    """Compare headers, tensors with ``values``, several at a time, and objects by value."""
    tensors: list[tuple[EntryDiff, TensorEntry, TensorEntry]] = []
    others: list[str] = []
    for name in (name for name in a if name in b):
        one, other = a[name], b[name]
        if isinstance(one, TensorEntry) and isinstance(other, TensorEntry):
            tensors.append((_header(name, one, other), one, other))
        else:
            others.append(name)

    def ahead(group: Iterable[tuple[EntryDiff, TensorEntry, TensorEntry]]) -> None:
        files.fetch(chunk.data for _, *both in group for one in both for chunk in one.chunks)

    first = [chunk for _, *both in tensors[:1] for one in both for chunk in one.chunks]
    is_far = any(is_address(chunk.data.path) for chunk in first)
    found = in_threads(
        lambda one: one[0] if one[0].status == "shape" else values(*one),
        tensors,
        files.sizes,
        threads=threads,
        nbytes=lambda one: one[1].nbytes,
        ahead=ahead if is_far else None,
    )
    objects = (_object(name, a[name], b[name], files) for name in others)
    return [*_one_sided(a, b), *found, *objects]


def compare_objects_of(a: CheckpointIndex, b: CheckpointIndex, files: Files) -> list[EntryDiff]:
    """Compare the objects of two opened checkpoints, by their own names."""
    here, there = by_fqn(a.objects), by_fqn(b.objects)
    both = (_object(name, one, there[name], files) for name, one in here.items() if name in there)
    return [*_one_sided(here, there), *both]


def equal_bits(a: TensorEntry, b: TensorEntry, files: Files, tally: Tally) -> bool:
    """Whether two located tensors of one shape are equal bit for bit, ``b`` in the type of ``a``.

    Raises UnsupportedError when there is no such cast.
    """
    whole = Box.whole(a.shape)
    place = first_unequal(
        stream_box(a, whole, files=files),
        stream_as(b, whole, a.dtype, files),
        on_bytes=lambda count: tally.add(count + count * b.dtype.bits // a.dtype.bits),
    )
    return place is None


def stream_as(
    entry: TensorEntry, box: Box, dtype: DType, files: Files, *, on_run: OnRun | None = None
) -> Iterator[memoryview]:
    """The bytes of a box in a type, in pieces; ``on_run`` as `stream_box` has it.

    Raises UnsupportedError when there is no such cast, and what `stream_box` raises.
    """
    pieces = stream_box(entry, box, files=files, on_run=on_run)
    if entry.dtype == dtype:
        yield from pieces
        return
    with IMPORTING:
        from ckpt_tools.copying.cast import Caster

    caster, most = Caster(entry.dtype, dtype), files.sizes.numbers
    buffer = memoryview(bytearray(most * dtype.itemsize))
    block = most * entry.dtype.itemsize
    for piece in pieces:
        for start in range(0, len(piece), block):
            raw = piece[start : start + block]
            out = buffer[: len(raw) // entry.dtype.itemsize * dtype.itemsize]
            caster.cast(raw, out)
            yield out


def whole_and_located(index: CheckpointIndex, files: Files) -> LocatedIndex:
    """The index as its values are read. Raises what keeps it from being whole."""
    located = formats.locate(index, files)
    require_chosen(located)
    return located


def located_batches(index: CheckpointIndex, files: Files) -> Iterator[LocatedIndex]:
    """The index as its values are read, of a store as much at a time as its small items fit into
    memory with, which are fetched whole, in the order of its files.

    Raises what keeps it from being whole.
    """
    if not is_address(index.root) or not index.tensors:
        yield whole_and_located(index, files)
        return
    require_chosen(index)

    sizes = files.sizes

    def nbytes(entry: TensorEntry) -> int:
        return sum(formats.fetched_bytes(chunk, sizes) for chunk in entry.chunks)

    tensors = sorted(index.tensors, key=lambda entry: [one.stored.data for one in entry.chunks[:1]])
    for batch in batches(tensors, nbytes, sizes.fetched):
        try:
            located = whole_and_located(replace(index, tensors=tuple(batch)), files)
        except CheckpointError:
            whole_and_located(index, files)  # raises one error for all that is damaged
            raise
        yield located


def _one_sided(a: Mapping[str, Entry], b: Mapping[str, Entry]) -> Iterator[EntryDiff]:
    yield from (EntryDiff(n, "only a", _words(one), None) for n, one in a.items() if n not in b)
    yield from (EntryDiff(n, "only b", None, _words(one)) for n, one in b.items() if n not in a)


def _words(entry: Entry) -> str:
    if isinstance(entry, TensorEntry):
        return f"{entry.dtype.name} {list(entry.shape)}"
    return f"object {entry.value!r}" if entry.opened else f"object ({entry.type_name or 'closed'})"


def _header(name: str, one: Entry, other: Entry) -> EntryDiff:
    """A pair compared by its headers."""
    same = EntryDiff(name, "same", _words(one), _words(other))
    if not isinstance(one, TensorEntry) or not isinstance(other, TensorEntry):
        objects = isinstance(one, ObjectEntry) and isinstance(other, ObjectEntry)
        return same if objects else same._replace(status="kind")
    if one.shape != other.shape:
        return same._replace(status="shape")
    return same if one.dtype == other.dtype else same._replace(status="dtype")


def _object(name: str, one: Entry, other: Entry, files: Files) -> EntryDiff:
    header = _header(name, one, other)
    if not isinstance(one, ObjectEntry) or not isinstance(other, ObjectEntry):
        return header
    verdict, detail = compare_objects(one, other, files)
    status: Status = "unknown" if verdict is None else "same" if verdict else "values"
    return header._replace(status=status, detail=detail)


def compare_objects(a: ObjectEntry, b: ObjectEntry, files: Files) -> tuple[bool | None, str]:
    """Whether two objects are equal and, if not, why; None when it cannot be known.

    Plain values are equal when they are equal in Python and of the same types, with keys of the
    same types; only an OrderedDict equals a dict, and a NaN another. What is not opened is compared
    by its pickle: equal bytes are equal values, different bytes may be, too.
    """
    if a.opened and b.opened:
        same = _same(a.value, b.value)
        return same, "" if same else f"{a.value!r} and {b.value!r}"
    if a.opened != b.opened:
        if (b if a.opened else a).type_name is None:
            return None, "too large to be opened"
        return False, "one is a plain value, the other is not"
    here, there = formats.object_digests(a, files), formats.object_digests(b, files)
    if here is None and there is None and a.codec is None and b.codec is None and a.path == b.path:
        # The same part of two pickles, whose bytes may be equal (NumPy's arrays are in them).
        is_small = 0 < a.data.length == b.data.length <= _MAX_COMPARED
        if is_small and files.read(*a.data) == files.read(*b.data):
            return True, ""
    if here is None or there is None:
        return None, "not opened, and without bytes of its own to compare"
    if here == there:
        return True, ""
    return None, "not opened; the pickled bytes differ, which need not mean that the values do"


def _same(a: PlainValue, b: PlainValue) -> bool:
    if isinstance(a, dict) and isinstance(b, dict):
        same_keys = {(type(key), key) for key in a} == {(type(key), key) for key in b}
        return same_keys and all(_same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return type(a) is type(b) and len(a) == len(b) and all(map(_same, a, b))
    if isinstance(a, float) and isinstance(b, float):
        return a == b or (math.isnan(a) and math.isnan(b))
    return type(a) is type(b) and a == b
