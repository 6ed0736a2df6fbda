"""What of a checkpoint is still good, given which byte ranges are not. It opens no file."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from ckpt_tools.core.geometry import Box
from ckpt_tools.core.index import ByteRange, Chunk, LocatedIndex, TensorEntry
from ckpt_tools.errors import CheckpointError
from ckpt_tools.proof.holes import holes
from ckpt_tools.proof.spans import Spans


class HurtTensor(NamedTuple):
    """A tensor that is not whole: which boxes are lost, and which ranks had saved them.

    ``lost`` is empty when all rows are there and something else is wrong.
    """

    fqn: str
    shape: tuple[int, ...]
    lost: tuple[Box, ...]
    ranks: tuple[int, ...]

    @property
    def lost_numel(self) -> int:
        """How many elements are lost."""
        return sum(box.numel for box in self.lost)


class Rescue(NamedTuple):
    """A box whose own bytes are not good, and the path of a replica that is."""

    fqn: str
    box: Box
    lost: str
    replica: str


def _owners(entry: TensorEntry, lost: Sequence[Box]) -> Iterator[int]:
    """The ranks that held lost boxes, where the format states the layout."""
    if entry.layout is None:
        return
    for rank, box in enumerate(entry.layout.boxes(entry.shape)):
        if any(box.intersect(other) is not None for other in lost):
            yield rank


class Condition:
    """Answers what is good; ``damaged`` are ranges beyond missing and short files."""

    def __init__(self, index: LocatedIndex, damaged: Sequence[ByteRange]) -> None:
        self._index = index
        self._lengths = {file.path: file.length for file in index.files}
        self._damaged = Spans(damaged)
        self._damaged_files = self._damaged.files()
        self._needed: dict[str, int] = defaultdict(int)
        for entry in index.tensors:
            for chunk in entry.chunks:
                end = chunk.data.offset + chunk.data.length
                self._needed[chunk.data.path] = max(self._needed[chunk.data.path], end)

    def is_good(self, data: ByteRange) -> bool:
        """Whether a byte range is there and undamaged."""
        length = self._lengths.get(data.path, data.offset + data.length)
        if length is None or data.offset + data.length > length:
            return False
        return not self._damaged.meeting(data)

    def is_hurt_file(self, path: str) -> bool:
        """Whether anything that a file should hold is not good."""
        length = self._lengths.get(path, self._needed[path])
        return length is None or length < self._needed[path] or path in self._damaged_files

    def hurt_tensors(self, problems: Sequence[CheckpointError]) -> tuple[HurtTensor, ...]:
        """The tensors that have lost rows, and those that any problem names."""
        named = {fqn for problem in problems for fqn in problem.about}
        found = (self._hurt(entry) for entry in self._index.tensors)
        return tuple(hurt for hurt in found if hurt.lost or hurt.fqn in named)

    def _hurt(self, entry: TensorEntry) -> HurtTensor:
        good = {chunk.box for chunk in entry.chunks if self._good_place(chunk) is not None}
        bad = [chunk for chunk in entry.chunks if chunk.box.numel and chunk.box not in good]
        may_lack = bool(bad) or sum(box.numel for box in good) != entry.numel
        lost = holes(entry.shape, good) if may_lack else []
        ranks = {chunk.rank for chunk in bad if chunk.rank is not None}
        ranks |= set(_owners(entry, lost)) if not bad else set()
        return HurtTensor(entry.fqn, entry.shape, tuple(lost), tuple(sorted(ranks)))

    def _good_place(self, chunk: Chunk) -> ByteRange | None:
        """The first place of a chunk that is good, or None."""
        return next(filter(self.is_good, (chunk.data, *chunk.replicas)), None)

    def hurt_objects(self, problems: Sequence[CheckpointError]) -> tuple[str, ...]:
        """The objects whose bytes are not good, or that any problem names."""
        named = {fqn for problem in problems for fqn in problem.about}
        return tuple(
            entry.fqn
            for entry in self._index.objects
            if entry.fqn in named or not self.is_good(entry.data)
        )

    def rescued(self) -> tuple[Rescue, ...]:
        """The boxes that only a replica still holds."""
        found: list[Rescue] = []
        for entry in self._index.tensors:
            for chunk in entry.chunks:
                place = self._good_place(chunk) if chunk.replicas else None
                if place is not None and place != chunk.data:
                    found.append(Rescue(entry.fqn, chunk.box, chunk.data.path, place.path))
        return tuple(found)
