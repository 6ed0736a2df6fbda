"""The files of a checkpoint that was arranged for a framework: one plan for all its folders.

Which format a folder has, and how its files are planned, is the caller's to say. This room plans;
it asks the file system only for the lengths of small files that are copied along.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ckpt_tools import formats
from ckpt_tools.core import names
from ckpt_tools.core.index import CheckpointIndex, Entry, TensorEntry
from ckpt_tools.core.plan import LazyPlans, Target
from ckpt_tools.core.state_tree import Branch
from ckpt_tools.errors import unwritable
from ckpt_tools.transforms.base import copied_file, small_file
from ckpt_tools.transforms.frameworks import Arranged

PlanFolder = Callable[[str, Sequence[Target], CheckpointIndex], LazyPlans]


def plan_files(
    arranged: Arranged,
    located: CheckpointIndex,
    targets: Sequence[Target],
    plan_folder: PlanFolder,
) -> LazyPlans:
    """All files of the arrangement, folder by folder, then what lies beside them.

    ``targets`` equal the source's tensors under their own names; ``plan_folder`` plans the files of
    a folder, by its name, from its targets and its part of the index, both under new names.
    """
    plans = LazyPlans()
    for folder, tree in arranged.folders.items():
        moved = located.arranged(tree)
        if moved.entries:
            plans += plan_folder(folder, renamed(tree, targets), moved).inside(folder)
    for name, tree in arranged.beside.items():
        moved = located.arranged(tree)
        if moved.entries:
            wanted = formats.PlanOptions(tree=moved.tree, single_file=name)
            torch = formats.named("torch")
            plans += torch.plan_files(renamed(tree, targets), moved.objects, options=wanted)
    beside = [small_file(name, text.encode()) for name, text in arranged.texts.items()]
    for name, path in arranged.copied.items():
        try:
            beside.append(copied_file(name, path))
        except OSError as error:
            raise unwritable(path, error, doing="copied along") from error
    return plans + LazyPlans.of(beside)


def renamed(tree: Branch[Entry], targets: Sequence[Target]) -> tuple[Target, ...]:
    """The targets of a tree's tensors, under the names of their places, sorted by these."""
    by_name = {target.fqn: target for target in targets}
    placed = [
        by_name[entry.fqn]._replace(fqn=names.join(path), path=path)
        for path, entry in tree.walk()
        if isinstance(entry, TensorEntry)
    ]
    return tuple(sorted(placed, key=lambda target: target.fqn))
