"""The files of a checkpoint that was arranged for a framework: one plan for all its folders.

Which format a folder has, and how its files are planned, is the caller's to say. This room plans;
it asks the file system only for the lengths of small files that are copied along.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ckpt_tools import formats
from ckpt_tools.core import names
from ckpt_tools.core.index import ByteRange, CheckpointIndex, Entry, ObjectEntry, TensorEntry
from ckpt_tools.core.plan import (
    FilePlan,
    Finder,
    LazyPlans,
    Target,
    WriteItem,
    object_entry_as_tensor,
)
from ckpt_tools.core.state_tree import Branch
from ckpt_tools.errors import unwritable
from ckpt_tools.storage import paths
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
    bodies = {name: text.encode() for name, text in arranged.texts.items()}
    beside = [FilePlan(name, len(body), ((0, body),), ()) for name, body in bodies.items()]
    beside += [_copy(name, path) for name, path in arranged.copied.items()]
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


def _copy(name: str, path: str) -> FilePlan:
    """A file that is copied as it is."""
    try:
        length = paths.size(path)
    except OSError as error:
        raise unwritable(path, error, doing="copied along") from error
    source = ObjectEntry(name, (name,), "other", ByteRange(path, 0, length))
    entry = object_entry_as_tensor(source)
    box = entry.chunks[0].box
    finder = Finder(entry)
    items = (WriteItem(name, name, 0, box, entry.dtype, entry.dtype, finder),) if length else ()
    return FilePlan(name, length, (), items)
