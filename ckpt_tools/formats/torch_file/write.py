"""Plans one torch.save file of whole tensors in their nesting, without holding any of them.

`torch.load(..., weights_only=True)` reads it, with or without ``mmap=True``. Tensors that shared a
storage in the source are written each on their own. How paths become dicts and lists is told in
`nesting`.

This room plans; it opens no file.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from ckpt_tools.core.geometry import Box
from ckpt_tools.core.index import ObjectEntry, Path
from ckpt_tools.core.plan import FilePlan, Finder, Target, WriteItem, refuse_types_not_in_torch
from ckpt_tools.formats.pickle.dump import Node, dumps, object_node, tensor_node
from ckpt_tools.formats.pickle.nest import nested
from ckpt_tools.formats.zip.layout import lay_out


def plan_files(
    targets: Sequence[Target], objects: Sequence[ObjectEntry], *, filename: str
) -> list[FilePlan]:
    """The one file; tensors and objects stand in it at their paths, in the order given.

    Raises IncompleteError when the source's chunks do not cover a tensor, UnsupportedError for an
    object that was not opened and for paths that exclude each other.
    """
    refuse_types_not_in_torch(targets)
    leaves: list[tuple[Path, Node]] = [
        (target.path, tensor_node(target.dtype, target.entry.shape, key=key))
        for key, target in enumerate(targets)
    ]
    leaves += [(entry.path, object_node(entry)) for entry in objects]
    sizes = [target.entry.numel * target.dtype.itemsize for target in targets]
    archive = lay_out(dumps(nested(leaves)), sizes, archive=archive_name(filename))
    items = tuple(
        WriteItem(
            target.fqn,
            filename,
            slot.offset,
            box := Box.whole(target.entry.shape),
            target.entry.dtype,
            target.dtype,
            Finder(target.entry).reads(box),
            slot.crc_at,
        )
        for target, slot in zip(targets, archive.slots, strict=True)
        if slot.length
    )
    return [FilePlan(filename, archive.length, archive.literals, items)]


def archive_name(filename: str) -> str:
    """The folder that torch names the records of this file under: its name without the ending.

    torch writes a file with a name outside of ASCII as a stream, which it calls ``archive``.
    """
    name = os.path.basename(filename)
    return os.path.splitext(name)[0] if name.isascii() else "archive"
