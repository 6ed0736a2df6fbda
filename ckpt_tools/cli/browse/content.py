"""What `browse` walks through: a checkpoint arranged as a tree. It knows no screen."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from functools import cached_property
from typing import Literal

from ckpt_tools.analysis.infer_mesh import FoundMesh
from ckpt_tools.analysis.summary import file_loads, mesh_of
from ckpt_tools.cli import entries, report, show
from ckpt_tools.cli.ls import Leaf, parts_of
from ckpt_tools.cli.render import facts
from ckpt_tools.copying.origin import reading
from ckpt_tools.core.index import CheckpointIndex, Entry, ObjectEntry, TensorEntry, count_of
from ckpt_tools.core.names import selector
from ckpt_tools.core.text import counted, format_size
from ckpt_tools.errors import UsageError, printable
from ckpt_tools.formats import open_object
from ckpt_tools.storage.reader import Files

_MOST_VALUES = 10_000  # in a table
_MOST_LINES = 500  # of the value of an object

Arrangement = Literal["section", "name", "file"]


class Content:
    """The entries of a checkpoint, arranged and described."""

    def __init__(self, index: CheckpointIndex) -> None:
        self.index = index
        self._placed: dict[Arrangement, list[Leaf]] = {}

    def leaves(self, arrangement: Arrangement, text: str) -> list[Leaf]:
        """Every entry whose name has the text in it, or matches it as --include does, in its place.

        By files, an entry stands below each file that holds a part of it. Raises UsageError for a
        regular expression that cannot be read.
        """
        if arrangement not in self._placed:
            self._placed[arrangement] = [
                leaf for entry in self.index.entries for leaf in self._place(entry, arrangement)
            ]
        placed, low = self._placed[arrangement], text.lower()
        if text.startswith("re:") or any(sign in text for sign in "*?"):
            chosen = selector([text], [])
            return [leaf for leaf in placed if chosen(leaf.entry.fqn)]
        return [leaf for leaf in placed if low in leaf.entry.fqn.lower()]

    def _place(self, entry: Entry, arrangement: Arrangement) -> Iterator[Leaf]:
        parts = parts_of(entry)
        if arrangement == "file":
            for label, nbytes in self._files_of(entry).items():
                yield Leaf((label, *parts), entry, nbytes)
        else:
            above = (entry.section,) if arrangement == "section" else ()
            yield Leaf((*above, *parts), entry, entry.nbytes or 0)

    def _files_of(self, entry: Entry) -> Counter[str]:
        """The bytes of an entry in each file that holds a part of it, replicas too."""
        held: Counter[str] = Counter()
        if isinstance(entry, ObjectEntry):
            held[self._labels.get(entry.data.path, entry.data.path)] += entry.nbytes or 0
        if isinstance(entry, TensorEntry):
            for chunk in entry.chunks:
                for place in (chunk.data, *chunk.replicas):
                    held[self._labels[place.path]] += chunk.box.numel * entry.dtype.itemsize
        return held

    @cached_property
    def _labels(self) -> dict[str, str]:
        """What each file is called: its rank if known, and its name."""
        return {
            load.path: ("" if load.rank is None else f"rank {load.rank}: ")
            + entries.file_name(load.path, self.index.root)
            for load in file_loads(self.index)
        }

    def report(self) -> str:
        """What `inspect` says, and what is wrong."""
        problems = [printable(problem.message) for problem in self.index.problems]
        lines = report.lines(self.index, self.index, every=False, shards=False)
        return "\n".join([*lines, *problems])

    def facts(self, entry: Entry) -> str:
        """What headers say of an entry."""
        return "\n".join([printable(entry.fqn), *facts(show.facts_of(entry, self._mesh))])

    @cached_property
    def _mesh(self) -> FoundMesh | None:
        return mesh_of(self.index)

    def values(self, entry: Entry, part: str | None) -> show.Corner | str:
        """Values of a tensor as `show` reads them, or the value of an object as text.

        Raises what is wrong with the slice or with the bytes.
        """
        one = self.index.select({entry.fqn})
        if entry.fqn in self.index.damaged:
            one.require_whole()
        with reading(one.files), Files() as files:
            if isinstance(entry, TensorEntry):
                if part is not None and show.parse_slice(part, entry.shape).numel > _MOST_VALUES:
                    raise UsageError(f"At most {_MOST_VALUES:,} values are shown at once.")
                return show.read_corner(show.located(one), part)
            opened = open_object(one, entry, files)
        if not opened.opened:
            return entries.value_text(opened)
        text = json.dumps(entries.plain_json(opened.value), indent=2)
        return "\n".join(map(printable, text.splitlines()[:_MOST_LINES]))


def summary(below: Sequence[Leaf]) -> str:
    """How many entries there are, and how many bytes of which types."""
    dtypes: Counter[str] = Counter()
    for leaf in below:
        if isinstance(leaf.entry, TensorEntry):
            dtypes[leaf.entry.dtype.name] += leaf.nbytes
    lines = [f"  {name:<14} {format_size(size):>9}" for name, size in dtypes.most_common()]
    return "\n".join([kinds([leaf.entry for leaf in below]), *lines])


def kinds(held: Collection[Entry]) -> str:
    """``33 tensors, 13 objects``."""
    count = count_of(held)
    counts = ((count.tensors, "tensor"), (count.objects, "object"))
    return ", ".join(counted(count, noun) for count, noun in counts if count)
