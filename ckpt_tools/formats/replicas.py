"""What several ranks hold of one name: one entry for all of them, one for each, or a problem.

It should be the same on all ranks. Where it is not:

    other state (random numbers, dataloaders)       each rank's own, kept as ….rank_N
    tensors of the model, all of the optimizer      a problem: none is known to be right
    counts of steps                                 a problem: the files are of several saves

Files of two saves in one folder fit together in every other way: the meshes, names and shapes are
the same, and no checksum spans two files. A job counts its steps on all ranks alike:

    step = 100 on rank 0, step = 200 on rank 1                        of two saves
    all of optim.state.*.step differ, and there is no other count     of two saves
    only optim.state.expert.step differs                              an expert without gradients
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import TypeVar

from ckpt_tools.core.index import Entry, ObjectEntry, TensorEntry
from ckpt_tools.core.names import is_step, join
from ckpt_tools.core.state_tree import Branch, dict_of
from ckpt_tools.core.text import some
from ckpt_tools.errors import CheckpointError, UnsupportedError

_Entry = TypeVar("_Entry", TensorEntry, ObjectEntry)
LEAVE_OUT = "Leave them out with -x, or save again from a job in which all ranks agree."


@dataclass(slots=True)
class Replicas:
    """The entries of all ranks, added one after the other, and what is to be said of them.

    ``complaints`` say why a name cannot be used, on whichever rank. ``differing`` are entries that
    should be equal and are not, each with the first rank that differs from the lowest.
    """

    complaints: dict[str, str] = field(default_factory=dict)
    differing: list[tuple[Entry, int | None]] = field(default_factory=list)
    _entries: list[Entry] = field(default_factory=list)
    _apart: dict[str, Branch[str]] = field(default_factory=dict)
    _steps: dict[str, str] = field(default_factory=dict)
    _optim_steps: dict[str, str] = field(default_factory=dict)
    _optim_step_is_equal: bool = False

    def add(self, entry: Entry, *, several: bool) -> None:
        """Take in an entry that one rank holds, or ``several`` alike."""
        self._entries.append(entry)
        if several and entry.section == "optim" and is_step(entry.path, "optim"):
            self._optim_step_is_equal = True

    def add_unequal(
        self, entry: Entry, held: Iterable[tuple[int | None, Entry]], *, rank: int | None, how: str
    ) -> None:
        """Take in an entry as the lowest rank holds it; ``rank`` is the first that has another.

        ``held`` is the entry as each rank holds it. ``how`` it differs is said in a few words, or
        empty where no rank's is known: then each keeps its own.
        """
        counts = how != "" and is_step(entry.path, entry.section)
        if counts:
            (self._optim_steps if entry.section == "optim" else self._steps)[entry.fqn] = how
        usable = entry.fqn not in self.complaints
        # Nothing of the optimizer, and no tensor of the model.
        may_differ = entry.section != "optim"
        if isinstance(entry, TensorEntry):
            may_differ = entry.section == "other" and len(entry.chunks) == 1
        if usable and not counts and (how == "" or may_differ):
            of_rank = {}
            for of, one in held:
                path = (*entry.path, f"rank_{of}")
                of_rank[f"rank_{of}"] = join(path)
                self._entries.append(replace(one, fqn=join(path), path=path))
            self._apart[entry.fqn] = dict_of(of_rank)
            return
        self._entries.append(entry)
        if usable and entry.fqn not in self._steps:
            self.differing.append((entry, rank))

    def sorted(self, kind: type[_Entry]) -> tuple[_Entry, ...]:
        """The tensors or the objects, by name."""
        found = (entry for entry in self._entries if isinstance(entry, kind))
        return tuple(sorted(found, key=attrgetter("fqn")))

    def within(self, tree: Branch[str]) -> Branch[str]:
        """The tree, with a dict of ``rank_0``, ``rank_1``… in place of what each rank keeps."""
        return tree.map(lambda fqn: self._apart.get(fqn, fqn))

    def notes(self) -> Iterator[str]:
        """Notes for people."""
        if self._apart:
            yield f"Kept once per rank, as ….rank_N: {some(sorted(self._apart))}."

    def problems(self, tensors: str, *, hint: str) -> Iterator[CheckpointError]:
        """What keeps entries from being used; ``tensors`` is what those that differ are called, and
        ``hint`` what to do about them.
        """
        yield from self._of_several_saves()
        grouped: dict[str, list[str]] = {}
        for fqn, complaint in self.complaints.items():
            grouped.setdefault(complaint, []).append(fqn)
        for complaint, fqns in grouped.items():
            yield UnsupportedError(
                f"{some(fqns)}: {complaint}.",
                hint="The files are of different saves, or torch saved them so; save again.",
                about=fqns,
            )
        for kind, what, way in ((TensorEntry, tensors, hint), (ObjectEntry, "values", LEAVE_OUT)):
            ranks = {one.fqn: rank for one, rank in self.differing if isinstance(one, kind)}
            if ranks:
                fqns = list(ranks)
                yield UnsupportedError(
                    f"{some(fqns)}: {what} that differ between ranks, so that none is known to be "
                    f"right; rank {ranks[fqns[0]]} is the first that differs.",
                    hint=way,
                    about=fqns,
                )

    def _of_several_saves(self) -> Iterator[CheckpointError]:
        """An error when counts of steps tell that the files are; it concerns all entries."""
        counts = self._steps if self._optim_step_is_equal else self._steps | self._optim_steps
        if not counts:
            return
        fqn, how = next(iter(counts.items()))
        more = f" {len(counts) - 1:,} more counts of steps differ." if len(counts) > 1 else ""
        yield UnsupportedError(
            f"The files are of several saves: {fqn} is {how}.{more}",
            hint="Bring together the files that all ranks wrote in one save.",
        )
