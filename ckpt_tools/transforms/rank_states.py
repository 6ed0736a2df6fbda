"""What belongs to the ranks of the job that saved: data positions and random states.

A job on another number of ranks finds these under the names it asks for, and goes on at the wrong
rows without a word. So what cannot fit the new ranks is left out and named. It is known by names:

    dataloader.dp_rank_0 … dp_rank_3      TorchTitan, one state for each data-parallel rank
    rng.0.torch … rng.3.numpy             Composer, a list with one dict for each rank
    extra_state.rng.numpy.rank_0 … 3      what differed between the files of ranks
    dataloader._snapshot…                 torchdata's StatefulDataLoader, of the rank that saved it

Random states that were saved once for all ranks stay, and so does what has no such mark.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Literal, NamedTuple

from ckpt_tools import formats
from ckpt_tools.core import names
from ckpt_tools.core.index import CheckpointIndex
from ckpt_tools.core.layout import Mesh
from ckpt_tools.core.records import Json
from ckpt_tools.core.state_tree import Path
from ckpt_tools.core.text import counted
from ckpt_tools.errors import AnswerNo
from ckpt_tools.storage.reader import Files

_Whose = Literal["ranks", "data-parallel ranks"]

_NUMBERED = re.compile(r"(?:rank_?|(?:rng|random)_states?_(?:rank_?)?)(\d+)")
_DATA_PARALLEL = re.compile(r"(?:dp_|data_parallel_)rank_?(\d+)")
_RANDOM = re.compile(r"rng|rng_states?|random_states?")
# Containers that are of the ranks as a whole, whatever else is in them (a world_size, say).
_OWN = re.compile(_RANDOM.pattern + r"|dataloaders?|train_dataloader|dl_state_dict|samplers?")
# Keys in the state of torchdata's StatefulDataLoader, with and without worker processes.
_LOADER = frozenset({"_snapshot", "_num_yielded", "_sampler_iter_state", "_sampler_iter_yielded"})
# Mesh dimensions whose ranks read different rows.
_READS_ROWS = re.compile(r"dp|ddp|hsdp|fsdp|data|replicate|shard")


class TargetRanks(NamedTuple):
    """How many ranks there are in the target, and how many of them read rows of their own.

    0 stands for every number; ``unknown`` is whether states of an unknown number of ranks fit.
    """

    world: int
    data_parallel: int
    unknown: bool = False

    @classmethod
    def of_mesh(cls, mesh: Mesh) -> TargetRanks:
        """Those of a mesh. A dimension without a name is taken to read rows of its own."""
        dims = zip(mesh.dim_names or ("dp",) * len(mesh.shape), mesh.shape, strict=True)
        reading = prod(size for name, size in dims if _READS_ROWS.search(name))
        return cls(mesh.size, reading)

    @classmethod
    def of_saved(cls, index: CheckpointIndex) -> TargetRanks:
        """Those that a checkpoint was written for. Without a mesh of its own, all read rows."""
        if index.mesh is not None:
            return cls.of_mesh(index.mesh)
        world = index.world_size
        return ONE_FILE if world is None else cls(world, world)

    def fit(self, whose: _Whose, count: int | None) -> bool:
        """Whether states of so many ranks can be loaded by the target's."""
        own = self.world if whose == "ranks" else self.data_parallel
        return own == 0 or (self.unknown if count is None else count == own)


# Of one file that every rank loads whole.
ONE_FILE = TargetRanks(1, 1, unknown=True)
# Of a target that takes the states of any ranks.
EVERY_RANK = TargetRanks(0, 0)


@dataclass(slots=True)
class RankStates:
    """States that go or stay together, by the name that people use for them: where they are, and of
    how many ranks they are.
    """

    name: str
    of: _Whose
    ranks: int | None = None
    places: set[Path] = field(default_factory=set)

    @property
    def count(self) -> str:
        """``4 ranks``, in words."""
        if self.ranks is None:
            return f"an unknown number of {self.of}"
        return counted(self.ranks, self.of[:-1])

    def __str__(self) -> str:
        """For a person: ``random states of 4 ranks``."""
        what = "random states" if _RANDOM.fullmatch(self.name.rpartition(".")[2]) else self.name
        return f"{what} of {self.count}"

    def to_dict(self) -> dict[str, Json]:
        """What `verify --json` prints of them."""
        return {"name": self.name, "of": self.of, "ranks": self.ranks}


class _Mark(NamedTuple):
    """What a path says of ranks: at which of its parts, whose, and the rank's number if any."""

    depth: int
    whose: _Whose
    rank: int | None


def without_old_ranks(
    index: CheckpointIndex, target: TargetRanks, *, places: Collection[str] | None = None
) -> tuple[CheckpointIndex, list[str]]:
    """The index without states of ranks that the target has not, and a note that names them.

    ``places`` are the outermost containers that the target has for other state, None for all: what
    it has no place for cannot be kept. Raises AnswerNo when nothing is left.
    """
    gone = _unfit(index, target)
    if not gone:
        return index, []
    kept = _without(index, gone)
    shown = ", ".join(f"{name} ({states.count})" for name, states in gone.items())
    has_place = [name for name in gone if places is None or name.partition(".")[0] in places]
    what = "them" if len(has_place) == len(gone) else ", ".join(has_place)
    way = f"--keep-rank-states keeps {what}." if has_place else ""
    if not kept.entries:
        raise AnswerNo(
            f"{index.root}: all that is chosen is state of the ranks that saved it: {shown}.",
            hint=way or None,
        )
    return kept, [f"Left out, state of the old ranks: {shown}. {way}".rstrip()]


def without_left_out(
    source: CheckpointIndex, output: CheckpointIndex, files: Files
) -> tuple[CheckpointIndex, CheckpointIndex, tuple[RankStates, ...]]:
    """Take out of the source what `without_old_ranks` leaves out for the ranks of the output.

    Returns the source without it, the output, and what was taken out.

    States of which the output has a part were not left out, and stay. An empty list in their place,
    as Composer's loader wants it, is taken out of the output.
    """
    kept = _states(output)
    unfit = _unfit(source, TargetRanks.of_saved(output)).items()
    gone = {name: states for name, states in unfit if name not in kept}
    there = [entry for entry in output.objects if entry.fqn in gone]
    empty = {e.fqn for e in there if formats.open_object(output, e, files).value == []}
    full = {entry.fqn for entry in output.entries} - empty
    return _without(source, gone), output.select(full), (*gone.values(),)


def _unfit(index: CheckpointIndex, target: TargetRanks) -> dict[str, RankStates]:
    """The states that the target's ranks cannot load, by name."""
    return {
        name: states
        for name, states in sorted(_states(index).items())
        if not target.fit(states.of, states.ranks)
    }


def _without(index: CheckpointIndex, gone: Mapping[str, RankStates]) -> CheckpointIndex:
    """The index without these states."""
    held = {place for states in gone.values() for place in states.places}
    kept = {
        entry.fqn
        for entry in index.entries
        for path in [_parts_of(entry.path)]
        if not any(path[:depth] in held for depth in range(1, len(path) + 1))
    }
    return index.select(kept | set(index.lost))


def _states(index: CheckpointIndex) -> dict[str, RankStates]:
    """All states of ranks, by their names."""
    by_name: dict[str, RankStates] = {}
    for entry in index.entries:
        path = _parts_of(entry.path)
        mark = _mark_of(path)
        if mark is None or not (entry.section == "other" or _own_depth(path, mark)):
            continue
        name, place = _place_of(path, mark)
        states = by_name.setdefault(name, RankStates(name, mark.whose))
        states.places.add(place)
        count = index.world_size if mark.rank is None else mark.rank + 1
        states.ranks = max(states.ranks or 0, count or 0) or None
    return by_name


def _parts_of(path: Path) -> Path:
    """The parts of a path, also of a key with dots: ``("dataloader.dp_rank_0",)`` has two."""
    return tuple(
        part for key in path for part in (key.split(".") if isinstance(key, str) else [key])
    )


def _own_depth(path: Path, mark: _Mark) -> int:
    """How many parts lead into the outermost container that is of the ranks; 0 for none."""
    depths = range(1, mark.depth + 2)
    return next((depth for depth in depths if _OWN.fullmatch(str(path[depth - 1]))), 0)


def _mark_of(path: Path) -> _Mark | None:
    """The outermost part of a path that names a rank."""
    for depth, part in enumerate(path):
        own = _DATA_PARALLEL.fullmatch(str(part))
        if own is not None:
            return _Mark(depth, "data-parallel ranks", int(own[1]))
        numbered = _NUMBERED.fullmatch(str(part))
        if numbered is not None:
            return _Mark(depth, "ranks", int(numbered[1]))
        inside = path[depth + 1 :]
        if _RANDOM.fullmatch(str(part)) and len(inside) > 1 and isinstance(inside[0], int):
            return _Mark(depth, "ranks", inside[0])
        if part in _LOADER:
            return _Mark(depth, "ranks", None)
    return None


def _place_of(path: Path, mark: _Mark) -> tuple[str, Path]:
    """What goes or stays as one: the container that is of the ranks, else the marked part."""
    depth = _own_depth(path, mark)
    if depth:
        return names.join(path[:depth]), path[:depth]
    if path[mark.depth] in _LOADER and mark.depth:
        return names.join(path[: mark.depth]), path[: mark.depth]
    starred = re.sub(r"\d+$", "*", str(path[mark.depth]))
    return names.join((*path[: mark.depth], starred)), path[: mark.depth + 1]
