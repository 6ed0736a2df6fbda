"""What `browse` walks through: one checkpoint or two, arranged as a tree. It knows no screen."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import cached_property
from typing import Literal

from ckpt_tools.analysis.summary import FoundMesh, file_loads, mesh_of
from ckpt_tools.cli import entries, report, show
from ckpt_tools.cli.diff import WORDS
from ckpt_tools.cli.ls import Leaf, parts_of
from ckpt_tools.cli.render import facts
from ckpt_tools.cli.show import located, object_facts, tensor_facts
from ckpt_tools.copying.origin import reads_one_save
from ckpt_tools.core.index import CheckpointIndex, Entry, ObjectEntry, TensorEntry, count_of
from ckpt_tools.core.names import selector
from ckpt_tools.core.text import counted, format_size
from ckpt_tools.errors import UsageError, printable
from ckpt_tools.formats import open_object
from ckpt_tools.proof.diff import DiffOptions, EntryDiff, Naming, Pairs, diff, diff_headers, pair
from ckpt_tools.storage.reader import Files

_MOST_VALUES = 10_000  # in a table
_MOST_LINES = 500  # of the value of an object

Arrangement = Literal["section", "name", "file"]


class Sides:
    """One checkpoint, or two with what is known of their differences, by comparable names."""

    def __init__(self, indexes: Sequence[CheckpointIndex], naming: Naming) -> None:
        self.indexes = indexes
        self._naming = naming
        self._found: dict[str, EntryDiff] = {}
        self._compared: set[str] = set()
        self._placed: dict[Arrangement, list[Leaf]] = {}
        if self.two:
            entries = diff_headers(*indexes, naming=naming).entries
            self._found = {one.name: one for one in entries}

    @property
    def two(self) -> bool:
        """Whether there are two checkpoints, so that they can differ."""
        return len(self.indexes) == 2

    @cached_property
    def _pairs(self) -> Pairs:
        if self.two:
            return pair(self.indexes[0], self.indexes[1], self._naming)
        return Pairs({}, {entry.fqn: entry for entry in self.indexes[0].entries}, {})

    @cached_property
    def _damaged(self) -> frozenset[str]:
        """Names that a problem is about."""
        problems = [problem.about for index in self.indexes for problem in index.problems]
        return frozenset().union(*problems)

    def entries(self, name: str) -> tuple[Entry | None, ...]:
        """What each side has under a comparable name."""
        pairs = self._pairs
        held = pairs.both.get(name, (pairs.only_a.get(name), pairs.only_b.get(name)))
        return held[: len(self.indexes)]

    def leaves(self, arrangement: Arrangement, text: str, *, differing: bool) -> list[Leaf]:
        """Every entry whose name has the text in it, or matches it as --include does, in its place.

        By files, an entry stands below each file that holds a part of it. Raises UsageError for a
        regular expression that cannot be read.
        """
        if arrangement not in self._placed:
            names = (*self._pairs.both, *self._pairs.only_a, *self._pairs.only_b)
            self._placed[arrangement] = [
                p for name in names for p in self._place(name, arrangement)
            ]
        pattern = text.startswith("re:") or any(sign in text for sign in "*?")
        chosen = selector([text], []) if pattern else None
        shown = self._placed[arrangement]
        if text:
            low = text.lower()
            shown = [p for p in shown if (chosen(p.name) if chosen else low in p.name.lower())]
        if differing:
            shown = [leaf for leaf in shown if self.status(leaf.name) not in ("", "same")]
        return shown

    def _place(self, name: str, arrangement: Arrangement) -> Iterator[Leaf]:
        held = [entry for entry in self.entries(name) if entry is not None]
        entry = held[0]
        parts = parts_of(entry) if name == entry.fqn else tuple(name.split("."))
        if arrangement == "file":
            for label, nbytes in self._files_of(name).items():
                yield Leaf(name, (label, *parts), entry, nbytes)
        else:
            above = (entry.section,) if arrangement == "section" else ()
            yield Leaf(name, (*above, *parts), entry, max(e.nbytes or 0 for e in held))

    def _files_of(self, name: str) -> Counter[str]:
        """The bytes of an entry in each file that holds a part of it, replicas too."""
        held: Counter[str] = Counter()
        for labels, entry in zip(self._labels, self.entries(name), strict=False):
            if isinstance(entry, ObjectEntry):
                held[labels.get(entry.data.path, entry.data.path)] += entry.nbytes or 0
            if isinstance(entry, TensorEntry):
                for chunk in entry.chunks:
                    for place in (chunk.data, *chunk.replicas):
                        held[labels[place.path]] += chunk.box.numel * entry.dtype.itemsize
        return held

    @cached_property
    def _labels(self) -> list[dict[str, str]]:
        """What each file of each side is called: its rank if known, and its name."""
        sides = ("A, ", "B, ") if self.two else ("",)
        return [
            {
                load.path: side
                + ("" if load.rank is None else f"rank {load.rank}: ")
                + entries.file_name(load.path, index.root)
                for load in file_loads(index)
            }
            for side, index in zip(sides, self.indexes, strict=True)
        ]

    def status(self, name: str) -> str:
        """What is known of a name: empty when headers agree and values were not compared."""
        if not self.two:
            return "damaged" if name in self._damaged else ""
        entry_diff = self._found.get(name)
        if entry_diff is None or (entry_diff.status == "same" and name not in self._compared):
            return ""
        return entry_diff.status

    def difference(self, name: str) -> EntryDiff | None:
        """What `diff` says of a name, or of a container."""
        return self._found.get(name)

    def compare(self, names: Collection[str], on_bytes: Callable[[int], None]) -> None:
        """Compare the values of these names. Raises what keeps a side from being whole."""
        held = [{e.fqn for n in names if (e := self.entries(n)[side])} for side in (0, 1)]
        a, b = (index.select(fqns) for index, fqns in zip(self.indexes, held, strict=True))
        with Files() as files:
            compared = diff(a, b, files, options=DiffOptions(self._naming), on_bytes=on_bytes)
        for one in compared.entries:
            if one.status != "container":
                self._found[one.name] = one
                self._compared.add(one.name)

    def nbytes(self, names: Collection[str]) -> int:
        """The bytes of the tensors of these names, on both sides."""
        held = [entry for name in names for entry in self.entries(name) if entry is not None]
        return count_of(held).nbytes

    def summary(self, below: Sequence[Leaf]) -> str:
        """How many entries there are, of which types, and what is known of their differences."""
        counts = Counter(self.status(leaf.name) for leaf in below)
        dtypes: Counter[str] = Counter()
        for leaf in below:
            if isinstance(leaf.entry, TensorEntry):
                dtypes[leaf.entry.dtype.name] += leaf.nbytes
        lines = [kinds([leaf.entry for leaf in below])]
        lines += [f"  {name:<14} {format_size(size):>9}" for name, size in dtypes.most_common()]
        if self.two:
            unknown = "same by headers; c compares the values"
            lines += [
                f"  {status_text(status) or unknown}: {count:,}" for status, count in counts.items()
            ]
        return "\n".join(lines)

    def report(self, side: int) -> str:
        """What `inspect` says of one side, and what is wrong with it."""
        index = self.indexes[side]
        problems = [printable(problem.message) for problem in index.problems]
        return "\n".join([*report.lines(index, index, every=False, shards=False), *problems])

    def facts(self, entry: Entry, side: int) -> str:
        """What headers say of an entry of one side."""
        if isinstance(entry, ObjectEntry):
            return "\n".join([printable(entry.fqn), *facts(object_facts(entry))])
        mesh = self._meshes[side]
        return "\n".join([printable(entry.fqn), *facts(tensor_facts(entry, mesh))])

    @cached_property
    def _meshes(self) -> list[FoundMesh | None]:
        return [mesh_of(index) for index in self.indexes]

    def values(self, entry: Entry, side: int, part: str | None) -> show.Corner | str:
        """Values of a tensor as `show` reads them, or the value of an object as text.

        Raises what is wrong with the slice or with the bytes.
        """
        one = self.indexes[side].select({entry.fqn})
        if any(entry.fqn in problem.about for problem in one.problems):
            one.require_whole()
        return _values(one, entry, part)


@reads_one_save
def _values(one: CheckpointIndex, entry: Entry, part: str | None) -> show.Corner | str:
    if isinstance(entry, TensorEntry):
        if part is not None and show.parse_slice(part, entry.shape).numel > _MOST_VALUES:
            raise UsageError(f"At most {_MOST_VALUES:,} values are shown at once.")
        return show.read_corner(located(one), part)
    with Files() as files:
        opened = open_object(one, entry, files)
    if not opened.opened:
        return entries.value_text(opened)
    text = json.dumps(entries.plain_json(opened.value), indent=2)
    return "\n".join(map(printable, text.splitlines()[:_MOST_LINES]))


def status_text(status: str) -> str:
    """The text for the status of a name; empty when it is not known yet."""
    return WORDS.get(status, status)


def kinds(held: Collection[Entry]) -> str:
    """``33 tensors, 13 objects``."""
    count = count_of(held)
    counts = ((count.tensors, "tensor"), (count.objects, "object"))
    return ", ".join(counted(count, noun) for count, noun in counts if count)
