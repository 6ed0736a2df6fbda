"""The files of a checkpoint that was arranged for a framework: one plan for all its folders.

Which format a folder has, and how its files are planned, is the caller's to say. This room plans;
it asks the file system only for the lengths of small files that are copied along.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from ckpt_tools.core.index import (
    ByteRange,
    CheckpointIndex,
    ObjectEntry,
    TensorEntry,
)
from ckpt_tools.core.plan import (
    FilePlan,
    Finder,
    Target,
    WriteItem,
    inside,
    joined,
    object_entry_as_tensor,
)
from ckpt_tools.errors import WriteError
from ckpt_tools.formats.torch_file import write as torch_write
from ckpt_tools.storage import paths
from ckpt_tools.transforms.frameworks import Arranged, Placed

PlanFolder = Callable[[Sequence[Target], CheckpointIndex], Sequence[FilePlan]]


def plan_files(
    arranged: Arranged,
    located: CheckpointIndex,
    targets: Sequence[Target],
    plan_folder: PlanFolder,
) -> Sequence[FilePlan]:
    """All files of the arrangement, folder by folder, then what lies beside them.

    ``targets`` are the source's tensors under their own names; ``plan_folder`` plans the files of
    one folder from its targets and its part of the index, both under their new names.
    """
    folders: dict[str, list[Placed]] = {}
    for one in arranged.placed:
        folders.setdefault(one.folder, []).append(one)
    parts: list[Sequence[FilePlan]] = []
    for folder, placed in folders.items():
        moved = _moved(located, placed)
        parts.append(inside(folder, plan_folder(renamed(placed, targets), moved)))
    plans: list[FilePlan] = []
    for name, beside in arranged.beside.items():
        plans += torch_write.plan_files((), _moved(located, beside).objects, filename=name)
    plans += [_text(name, text) for name, text in arranged.texts.items()]
    plans += [_copy(name, path) for name, path in arranged.copied.items()]
    return joined([*parts, plans])


def _moved(located: CheckpointIndex, placed: Sequence[Placed]) -> CheckpointIndex:
    """The part of the index that goes into one folder, under its new names."""
    tensors = [
        replace(one.entry, fqn=one.fqn, path=one.path)
        for one in placed
        if isinstance(one.entry, TensorEntry)
    ]
    objects = [
        replace(one.entry, fqn=one.fqn, path=one.path)
        for one in placed
        if isinstance(one.entry, ObjectEntry)
    ]
    return replace(
        located,
        tensors=tuple(sorted(tensors, key=lambda entry: entry.fqn)),
        objects=tuple(sorted(objects, key=lambda entry: entry.fqn)),
    )


def renamed(placed: Sequence[Placed], targets: Sequence[Target]) -> tuple[Target, ...]:
    """The targets that these places are for, under their new names, sorted by them."""
    by_name = {target.fqn: target for target in targets}
    found = []
    for one in placed:
        if isinstance(one.entry, TensorEntry):
            target = by_name[one.entry.fqn]
            found.append(target._replace(fqn=one.fqn, path=one.path))
    return tuple(sorted(found, key=lambda target: target.fqn))


def _text(name: str, text: str) -> FilePlan:
    body = text.encode()
    return FilePlan(name, len(body), ((0, body),), ())


def _copy(name: str, path: str) -> FilePlan:
    """A file that is copied as it is."""
    try:
        length = paths.size(path)
    except OSError as error:
        raise WriteError(f"{path} cannot be copied along: {error.strerror}.") from error
    source = ObjectEntry(name, (name,), "other", ByteRange(path, 0, length))
    entry = object_entry_as_tensor(source)
    box = entry.chunks[0].box
    reads = Finder(entry).reads(box)
    items = (WriteItem(name, name, 0, box, entry.dtype, entry.dtype, reads),) if length else ()
    return FilePlan(name, length, (), items)
