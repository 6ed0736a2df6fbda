"""Plans a DCP directory as a real job of the target mesh would write it.

One `__R_0.distcp` for each rank, also for a rank that holds nothing; of equal shards one is kept,
on the rank that torch's planner would choose; `.metadata` is the last file. A rank's items lie in
the order of the state dict, objects before tensors.

What differs from a real job's directory: `.metadata` lists all names in the order of the state dict
(torch: rank by rank), a tensor is always packed row-major (torch keeps the strides of a transposed
one), `.data/serialization_id` and `save_id` are digests of what is planned,
`checkpoint_id` is None, and a job on GPUs sorts each file's tensors by their global size.

This room plans; it opens no file.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from hashlib import blake2b
from typing import NamedTuple, TypeAlias

from ckpt_tools.core import names
from ckpt_tools.core.dtypes import BY_NAME, DType
from ckpt_tools.core.geometry import Box
from ckpt_tools.core.index import NO_TREE, ObjectEntry
from ckpt_tools.core.layout import Layout
from ckpt_tools.core.plan import (
    FilePlan,
    Finder,
    LazyPlans,
    PlannedFile,
    Target,
    WriteItem,
    object_entry_as_tensor,
    placed_tree,
    refuse_types_not_in_torch,
    require_mesh_size,
)
from ckpt_tools.core.state_tree import Branch, Path
from ckpt_tools.formats.dcp.flattening import items_of
from ckpt_tools.formats.dcp.items import TORCH_SAVE
from ckpt_tools.formats.dcp.metadata_write import (
    StoredItem,
    TensorRecord,
    encode_metadata,
)
from ckpt_tools.formats.pickle.dump import dumps, object_node, tensor_node
from ckpt_tools.formats.torch_file.write import items_in, pack
from ckpt_tools.formats.zip.layout import ArchiveLayout, Slot, lay_out


class _Copies(NamedTuple):
    """One box, and the ranks that hold it, in the order in which torch looks at them."""

    box: Box
    ranks: tuple[int, ...]


class _Container(NamedTuple):
    """A tuple with tensors, or a list of such: torch pickles it whole, as one item."""

    fqn: str
    tree: Branch[Target | ObjectEntry]


_Item: TypeAlias = Target | ObjectEntry | _Container


class _Part(NamedTuple):
    """What is one item of a file: a box of a tensor, of this number, or all of something else."""

    entry: _Item
    box: Box
    number: int | None


class _Packed(NamedTuple):
    """The archive that an item is, and the whole tensors that fill its slots.

    ``digest`` is one of what is known of it. A box of a tensor fills the one slot itself.
    """

    archive: ArchiveLayout
    digest: bytes
    targets: tuple[Target, ...] = ()


def plan_files(
    targets: Sequence[Target],
    objects: Sequence[ObjectEntry],
    *,
    world_size: int,
    tree: Branch[str] = NO_TREE,
) -> LazyPlans:
    """The files of a DCP directory for ``world_size`` ranks, `.metadata` last.

    A target without a layout is a plain tensor, which each rank holds whole. ``tree`` has the names
    where they stand in the state dict, in its order; those that it lacks come last, at their paths.

    Raises UsageError when a layout's mesh has another size, IncompleteError when the source's
    chunks do not cover a tensor, UnsupportedError for an object with neither bytes nor a value.
    """
    refuse_types_not_in_torch(targets)
    paths: dict[str, Path] = {}
    entries: list[_Item] = []
    whole = placed_tree(targets, objects, tree)
    for path, item in items_of(whole, is_tensor=lambda leaf: isinstance(leaf, Target)):
        entry = _Container(names.join(path), item) if isinstance(item, Branch) else item
        paths[entry.fqn] = path
        entries.append(entry)
    require_mesh_size(targets, world_size)
    planner = _Planner()
    # In the order of the state dict, which torch rebuilds from it, whatever rank has which item.
    records = {entry.fqn: _record(entry) for entry in entries}
    stored: list[StoredItem] = []
    files: list[PlannedFile] = []
    for rank, places in enumerate(_share_out(entries, world_size=world_size)):
        parts = [_part(entries[place], box, records) for place, box in places]
        parts.sort(key=lambda part: part.number is not None)  # objects before tensors
        file, items = planner.planned(f"__{rank}_0.distcp", parts)
        files.append(file)
        stored += items
    metadata = encode_metadata(records, stored, planner_data=paths)
    known = FilePlan(".metadata", len(metadata), ((0, metadata),), ())
    return LazyPlans(files) + LazyPlans.of([known])


def _share_out(entries: Sequence[_Item], *, world_size: int) -> list[list[tuple[int, Box]]]:
    """For each rank the entries it writes, by their places, with the box of each.

    Of equal boxes one is kept, on the rank with the fewest bytes so far. The rule and its order are
    those of torch's `dedup_save_plans`, which counts the bytes of the whole tensor for each of its
    boxes, and 1 for an object.
    """
    held = list(_held(entries, world_size=world_size))
    load = [0] * world_size
    chosen: list[list[tuple[int, Box]]] = [[] for _ in range(world_size)]
    for first in range(world_size):
        for place, groups in enumerate(held):
            group = groups.get(first)
            if group is not None:
                rank = min(group.ranks, key=load.__getitem__)
                load[rank] += _weight(entries[place])
                chosen[rank].append((place, group.box))
    return [sorted(places) for places in chosen]


def _weight(entry: _Item) -> int:
    if not isinstance(entry, Target):
        return 1
    return entry.entry.numel * entry.dtype.itemsize or 1


def _record(entry: _Item) -> TensorRecord | None:
    """What `.metadata` says of a tensor, its chunks still to come; None for an object."""
    if not isinstance(entry, Target):
        return None
    return TensorRecord(entry.dtype, entry.entry.shape, [])


def _part(entry: _Item, box: Box, records: Mapping[str, TensorRecord | None]) -> _Part:
    """A box of an entry; one of a tensor is added to its record and numbered by it."""
    record = records[entry.fqn]
    if record is None:
        return _Part(entry, box, None)
    record.chunks.append(box)
    return _Part(entry, box, len(record.chunks) - 1)


def _held(entries: Sequence[_Item], *, world_size: int) -> Iterator[dict[int, _Copies]]:
    """The boxes of each entry, by the first rank that holds them.

    Tensors of one shape and layout share the answer.
    """
    everyone = tuple(range(world_size))
    known: dict[tuple[Layout, tuple[int, ...]], dict[int, _Copies]] = {}
    for entry in entries:
        if not isinstance(entry, Target):
            yield {0: _Copies(Box((), ()), everyone)}
        elif entry.layout is None:
            yield {0: _Copies(Box.whole(entry.entry.shape), everyone)}
        else:
            key = (entry.layout, entry.entry.shape)
            if key not in known:
                known[key] = _copies(*key)
            yield known[key]


def _copies(layout: Layout, shape: tuple[int, ...]) -> dict[int, _Copies]:
    ranks: dict[Box, list[int]] = {}
    for rank, box in enumerate(layout.boxes(shape)):
        ranks.setdefault(_as_torch_places(box, shape), []).append(rank)
    # A set's own order decides between equally loaded ranks in torch; here as there.
    return {some[0]: _Copies(box, tuple(set(some))) for box, some in ranks.items()}


def _as_torch_places(box: Box, shape: tuple[int, ...]) -> Box:
    """The box, moved to the end of each dimension in which it is empty.

    There it cannot have the offsets of a box with elements, which a loader looks chunks up by.
    """
    if 0 not in box.sizes:
        return box
    places = zip(box.offsets, box.sizes, shape, strict=True)
    return Box(tuple(a if size else n for a, size, n in places), box.sizes)


class _Planner:
    """Plans the items of files; tensors of one type and size have the same archive."""

    def __init__(self) -> None:
        self._boxes: dict[tuple[DType, tuple[int, ...]], _Packed] = {}
        self._others: dict[str, _Packed] = {}
        self._finders: dict[str, Finder] = {}

    def planned(self, path: str, parts: Sequence[_Part]) -> tuple[PlannedFile, list[StoredItem]]:
        """A file of items one behind the other, to be planned later, and where they are in it.

        Now, and not when files are half written, it is seen that the chunks are all there.
        """
        start, digest = 0, blake2b()
        stored: list[StoredItem] = []
        for part in parts:
            archive, known, targets = self._packed(part)
            digest.update(known)
            for target in (part.entry,) if isinstance(part.entry, Target) else targets:
                if target.fqn not in self._finders:
                    self._finders[target.fqn] = Finder(target.entry).require_whole()
            stored.append(StoredItem(part.entry.fqn, part.number, path, start, archive.length))
            start += archive.length
        return PlannedFile(path, start, digest.digest(), partial(self._plan, path, parts)), stored

    def _packed(self, part: _Part) -> _Packed:
        entry = part.entry
        if not isinstance(entry, Target):
            if entry.fqn not in self._others:
                self._others[entry.fqn] = _packed(entry)
            return self._others[entry.fqn]
        key = entry.dtype, part.box.sizes
        if key not in self._boxes:
            pickle = dumps(tensor_node(entry.dtype, part.box.sizes, key=0))
            self._boxes[key] = _laid_out(pickle, [part.box.numel * entry.dtype.itemsize])
        return self._boxes[key]

    def _plan(self, path: str, parts: Sequence[_Part]) -> FilePlan:
        start = 0
        literals: list[tuple[int, bytes]] = []
        items: list[WriteItem] = []
        for part in parts:
            archive, _, targets = self._packed(part)
            literals += archive.literals_at(start)
            boxes = [(target, Box.whole(target.entry.shape)) for target in targets]
            if isinstance(part.entry, Target):
                boxes = [(part.entry, part.box)]
            filled = ((target, box, self._finders[target.fqn]) for target, box in boxes)
            items += items_in(archive.slots_at(start), path, filled)
            start += archive.length
        return FilePlan(path, start, tuple(literals), tuple(items))


def _packed(entry: ObjectEntry | _Container) -> _Packed:
    """An object's archive byte for byte, or its value pickled; a container with whole tensors."""
    if isinstance(entry, _Container):
        packed = pack(entry.tree)
        return _laid_out(packed.pickle, packed.sizes, packed.targets)
    if entry.codec != TORCH_SAVE:
        return _laid_out(dumps(object_node(entry)), ())
    length, byte = entry.data.length, BY_NAME["uint8"]
    source = Target(entry.fqn, entry.path, object_entry_as_tensor(entry), byte)
    return _Packed(ArchiveLayout(length, (), (Slot(0, length, ()),)), b"%d" % length, (source,))


def _laid_out(pickle: bytes, sizes: Sequence[int], targets: tuple[Target, ...] = ()) -> _Packed:
    digest = blake2b(repr(sizes).encode() + pickle, digest_size=16).digest()
    return _Packed(lay_out(pickle, sizes), digest, targets)


def archive_of(entry: ObjectEntry) -> bytes:
    """The archive of an object's value, as an item holds it."""
    archive = lay_out(dumps(object_node(entry)), ())
    data = bytearray(archive.length)
    for offset, literal in archive.literals_at(0):
        data[offset : offset + len(literal)] = literal
    return bytes(data)
