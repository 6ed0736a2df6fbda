"""The entries of two checkpoints side by side, and what is different about each pair.

`diff`, `verify --against` a checkpoint and --check all compare here: by headers, then objects by
value, tensors as the caller compares them. A difference in one entry never hides another.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Literal, NamedTuple

from ckpt_tools import formats
from ckpt_tools.copying.read import first_difference
from ckpt_tools.core.geometry import Box
from ckpt_tools.core.index import CheckpointIndex, Entry, LocatedIndex, ObjectEntry, TensorEntry
from ckpt_tools.core.progress import Tally
from ckpt_tools.core.records import Json, as_json
from ckpt_tools.proof.containers import compare_objects
from ckpt_tools.proof.threads import in_threads
from ckpt_tools.storage.paths import is_address
from ckpt_tools.storage.reader import Files

if TYPE_CHECKING:
    from ckpt_tools.proof.deltas import Delta

Status = Literal[
    "same", "only a", "only b", "kind", "dtype", "shape", "values", "unknown", "container"
]


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


class Pairs(NamedTuple):
    """The entries that both sides have, and those of one side only, by their comparable names."""

    both: dict[str, tuple[Entry, Entry]]
    only_a: dict[str, Entry]
    only_b: dict[str, Entry]


# What is found when the values of two tensors of one shape are compared, after their headers.
CompareValues = Callable[[EntryDiff, TensorEntry, TensorEntry], EntryDiff]


def pair(a: Mapping[str, Entry], b: Mapping[str, Entry]) -> Pairs:
    """Match entries by their comparable names."""
    return Pairs(
        both={name: (entry, b[name]) for name, entry in a.items() if name in b},
        only_a={name: entry for name, entry in a.items() if name not in b},
        only_b={name: entry for name, entry in b.items() if name not in a},
    )


def by_fqn(entries: Iterable[Entry]) -> dict[str, Entry]:
    """Entries by their own names, to be paired."""
    return {entry.fqn: entry for entry in entries}


def compare_headers(pairs: Pairs) -> list[EntryDiff]:
    """Compare names, types and shapes."""
    return [*_one_sided(pairs), *(_header(name, *both) for name, both in pairs.both.items())]


def compare_pairs(
    pairs: Pairs, values: CompareValues, files: Files, *, threads: int | None
) -> list[EntryDiff]:
    """Compare headers, tensors with ``values``, several at a time, and objects by value."""
    tensors: list[tuple[EntryDiff, TensorEntry, TensorEntry]] = []
    others: list[tuple[str, Entry, Entry]] = []
    for name, (a, b) in pairs.both.items():
        if isinstance(a, TensorEntry) and isinstance(b, TensorEntry):
            tensors.append((_header(name, a, b), a, b))
        else:
            others.append((name, a, b))

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
    return [*_one_sided(pairs), *found, *(_object(*one, files) for one in others)]


def compare_objects_of(a: CheckpointIndex, b: CheckpointIndex, files: Files) -> list[EntryDiff]:
    """Compare the objects of two opened checkpoints, by their own names."""
    pairs = pair(by_fqn(a.objects), by_fqn(b.objects))
    return [*_one_sided(pairs), *(_object(name, *both, files) for name, both in pairs.both.items())]


def equal_bits(a: TensorEntry, b: TensorEntry, files: Files, tally: Tally) -> bool:
    """Whether two located tensors of one type and shape are equal bit for bit."""
    whole = Box.whole(a.shape)
    place = first_difference(a, b, whole, files=files, on_bytes=lambda count: tally.add(2 * count))
    return place is None


def whole_and_located(index: CheckpointIndex, files: Files) -> LocatedIndex:
    """The index as its values are read. Raises what keeps it from being whole."""
    located = formats.locate(index, files)
    located.require_chosen()
    return located


def _one_sided(pairs: Pairs) -> Iterator[EntryDiff]:
    for name, entry in pairs.only_a.items():
        yield EntryDiff(name, "only a", _words(entry), None)
    for name, entry in pairs.only_b.items():
        yield EntryDiff(name, "only b", None, _words(entry))


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
