"""What a conversion has planned: pure, from headers alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from ckpt_tools.core.index import NO_TREE, CheckpointIndex, ObjectEntry
from ckpt_tools.core.plan import LazyPlans, Mean, Target
from ckpt_tools.core.state_tree import Branch
from ckpt_tools.core.text import Shown, counted, first_of, format_size
from ckpt_tools.transforms.base import Works


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Plan(Shown):
    """Files to write, the tensors and objects in them, and notes for people.

    A target's entry is what is written, under its new name, as boxes over the source's bytes.
    ``chosen`` is the part of the source that they come from, as its reader gave it. ``tree`` has
    the containers of the names in the output. ``works`` must be done once before the files are
    written. ``single_file`` is the name of the one file that is all of the output. What is read of
    chunks that are not located yet, workers locate in ``source``. ``means`` are what is averaged,
    by the names of targets, and ``also`` the parts of other checkpoints that are read for it.
    ``origins`` are the names in the source that each target comes from. ``settings`` are the
    options, as text that people can compare. What --check proves is written into headers, or
    ``proof_beside`` the files.
    """

    proof_beside: ClassVar[bool] = False

    files: LazyPlans
    targets: tuple[Target, ...]
    chosen: CheckpointIndex
    notes: tuple[str, ...]
    source: CheckpointIndex
    objects: tuple[ObjectEntry, ...] = ()
    tree: Branch[str] = NO_TREE
    works: Works = field(default_factory=dict)
    single_file: str | None = None
    origins: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    means: Mapping[str, Mean] = field(default_factory=dict)
    also: tuple[CheckpointIndex, ...] = ()
    settings: Mapping[str, str] = field(default_factory=dict)

    @property
    def tensors(self) -> int:
        """Number of tensors in the output."""
        return len(self.targets)

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors in the output."""
        return sum(target.nbytes for target in self.targets)

    def __str__(self) -> str:
        """What is written, and the notes."""
        files = counted(len(self.files.files), "file")
        what = f"{counted(self.tensors, 'tensor')}, {format_size(self.nbytes)}, in {files}"
        return "\n".join([what, *first_of(self.notes)])
