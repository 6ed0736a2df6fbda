"""Plans a DCP directory as a real job of the target mesh would write it.

One `__R_0.distcp` for each rank, also for a rank that holds nothing; of equal shards one is kept, on
the rank that torch's planner would choose; `.metadata` is the last file. A rank's items lie in the
order of the state dict, objects before tensors.

What differs from a real job's directory: a tensor is always packed row-major (torch keeps the
strides of a transposed one), `.data/serialization_id` and `save_id` are digests of what is planned,
`checkpoint_id` is None, and a job on GPUs sorts each file's tensors by their global size.

This room plans; it opens no file.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import NamedTuple

from ckpt_tools.dtypes import DType, dtype_named
from ckpt_tools.errors import UsageError
from ckpt_tools.formats.metadata_out import StoredItem, TensorRecord, encode_metadata
from ckpt_tools.formats.pickle_out import dumps, object_node, tensor_node
from ckpt_tools.formats.zip_layout import ArchiveLayout, lay_out
from ckpt_tools.geometry import Box
from ckpt_tools.index import ObjectEntry, Path
from ckpt_tools.layout import Layout
from ckpt_tools.plan import FilePlan, Finder, Target, WriteItem, object_entry_as_tensor

_UINT8 = dtype_named("uint8")

Entry = Target | ObjectEntry


class _Copies(NamedTuple):
    """One box, and the ranks that hold it."""

    box: Box
    ranks: tuple[int, ...]


class _Share(NamedTuple):
    """What one rank writes: places in the list of entries, each with its box (None: an object)."""

    objects: list[int]
    tensors: list[tuple[int, Box]]


def plan_files(
    targets: Sequence[Target],
    objects: Sequence[ObjectEntry],
    *,
    world_size: int,
    planner_data: Mapping[str, Path],
) -> list[FilePlan]:
    """The files of a DCP directory for ``world_size`` ranks, `.metadata` last.

    A target without a layout is a plain tensor, which each rank holds whole. Items follow the order
    of ``planner_data``, which is that of the state dict; names that it lacks come last.

    Raises UsageError when a layout's mesh has another size, IncompleteError when the source's
    chunks do not cover a tensor.
    """
    entries = _in_order([*targets, *objects], planner_data)
    shares = _share_out(entries, world_size=world_size)
    layouts = _ItemLayouts()
    records: dict[str, TensorRecord | None] = {}
    hints = [_number_chunks(entries, share, records) for share in shares]
    plans: list[FilePlan] = []
    stored: list[StoredItem] = []
    for rank, share in enumerate(shares):
        file = _File(f"__{rank}_0.distcp")
        for place in share.objects:
            stored.append(file.add_object(_object(entries[place])))
        for (place, box), hint in zip(share.tensors, hints[rank], strict=True):
            target = _target(entries[place])
            stored.append(
                file.add_tensor(target, box, layout=layouts.of(target.dtype, box), chunk=hint)
            )
        plans.append(file.plan())
    paths = {entry.fqn: planner_data.get(entry.fqn, entry.path) for entry in entries}
    metadata = encode_metadata(records, stored, planner_data=paths)
    return [*plans, FilePlan(".metadata", len(metadata), ((0, metadata),), ())]
