"""Plans one torch.save file of whole tensors in their nesting, without holding any of them.

`torch.load(..., weights_only=True)` reads it, with or without ``mmap=True``. Tensors that shared a
storage in the source are written each on their own. Containers are those of the tree.

This room plans; it opens no file.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence

from ckpt_tools.core.geometry import Box
from ckpt_tools.core.index import ObjectEntry
from ckpt_tools.core.plan import (
    FilePlan,
    Finder,
    LazyPlans,
    Target,
    WriteItem,
    placed_tree,
    refuse_types_not_in_torch,
)
from ckpt_tools.core.state_tree import Branch, nested
from ckpt_tools.formats.pickle.dump import dumps, object_node, tensor_node
from ckpt_tools.formats.protocol import PlanOptions
from ckpt_tools.formats.zip.layout import Slot, lay_out


def plan_files(
    targets: Sequence[Target], objects: Sequence[ObjectEntry], *, options: PlanOptions
) -> LazyPlans:
    """The one file, with tensors and objects where ``tree`` has their names, else at their paths.

    Raises IncompleteError when the source's chunks do not cover a tensor, UnsupportedError for an
    object that was not opened and for paths that exclude each other.
    """
    refuse_types_not_in_torch(targets)
    filename = options.single_file or "model.pt"
    pickle, whole = pack(placed_tree(targets, objects, options.tree))
    archive = lay_out(pickle, [one.nbytes for one in whole], archive=archive_name(filename))
    filled = (
        (target, Box.whole(target.entry.shape), Finder(target.entry).require_whole())
        for target in whole
    )
    items = items_in(archive.slots, filename, filled)
    return LazyPlans.of([FilePlan(filename, archive.length, archive.literals, tuple(items))])


def items_in(
    slots: Iterable[Slot],
    path: str,
    filled: Iterable[tuple[Target, Box, Finder]],
    *,
    start: int = 0,
) -> Iterator[WriteItem]:
    """What to write into the slots of an archive, a box of a tensor each; its first byte is byte
    ``start`` of the file ``path``.
    """
    for (target, box, finder), (offset, length, crc_at) in zip(filled, slots, strict=True):
        if length:
            source, dtype = target.entry.dtype, target.dtype
            at, sums = start + offset, tuple([start + place for place in crc_at])
            yield WriteItem(target.fqn, path, at, box, source, dtype, finder, sums)


def pack(tree: Branch[Target | ObjectEntry]) -> tuple[bytes, tuple[Target, ...]]:
    """The pickle of an archive of a tree, and the tensors of its storages, in the tree's order."""
    targets: list[Target] = []

    def node(leaf: Target | ObjectEntry) -> object:
        if isinstance(leaf, ObjectEntry):
            return object_node(leaf)
        targets.append(leaf)
        return tensor_node(leaf.dtype, leaf.entry.shape, key=len(targets) - 1)

    return dumps(nested(tree, node)), tuple(targets)


def archive_name(filename: str) -> str:
    """The folder that torch names the records of this file under: its name without the ending.

    torch writes a file with a name outside of ASCII as a stream, which it calls ``archive``.
    """
    name = os.path.basename(filename)
    return os.path.splitext(name)[0] if name.isascii() else "archive"
