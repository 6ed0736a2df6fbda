"""Plans a DCP directory as a real job of the target mesh would write it.

One `__R_0.distcp` for each rank, also for a rank that holds nothing; of equal shards one is kept,
on the rank that torch's planner would choose; `.metadata` is the last file. A rank's items lie in
the order of the state dict, objects before tensors.

What differs from a real job's directory: a tensor is always packed row-major (torch keeps the
strides of a transposed one), `.data/serialization_id` and `save_id` are digests of what is planned,
`checkpoint_id` is None, and a job on GPUs sorts each file's tensors by their global size.

This room plans; it opens no file.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import NamedTuple, TypeAlias

from ckpt_tools.core import names
from ckpt_tools.core.dtypes import DType
from ckpt_tools.core.geometry import Box
from ckpt_tools.core.index import NO_TREE, ObjectEntry
from ckpt_tools.core.layout import Layout
from ckpt_tools.core.plan import (
    FilePlan,
    Finder,
    Target,
    WriteItem,
    object_entry_as_tensor,
    placed_tree,
    refuse_types_not_in_torch,
)
from ckpt_tools.core.state_tree import Branch, Path
from ckpt_tools.errors import UsageError
from ckpt_tools.formats.dcp.flattening import items_of
from ckpt_tools.formats.dcp.items import TORCH_SAVE
from ckpt_tools.formats.dcp.metadata_write import (
    StoredItem,
    TensorRecord,
    encode_metadata,
)
from ckpt_tools.formats.pickle.dump import dumps, object_node, tensor_node
from ckpt_tools.formats.torch_file.write import pack
from ckpt_tools.formats.zip.layout import ArchiveLayout, lay_out


class _Copies(NamedTuple):
    """One box, and the ranks that hold it, in the order in which torch looks at them."""

    box: Box
    ranks: tuple[int, ...]


class _Piece(NamedTuple):
    """One box of one tensor, to be written by one rank; ``number`` counts the tensor's boxes."""

    target: Target
    box: Box
    number: int


class _Container(NamedTuple):
    """A tuple with tensors, or a list of such: torch pickles it whole, as one item."""

    fqn: str
    tree: Branch[Target | ObjectEntry]


class _Share(NamedTuple):
    """What one rank writes, in the order of the state dict."""

    objects: list[ObjectEntry | _Container]
    pieces: list[_Piece]


_Item: TypeAlias = Target | ObjectEntry | _Container


def plan_files(
    targets: Sequence[Target],
    objects: Sequence[ObjectEntry],
    *,
    world_size: int,
    tree: Branch[str] = NO_TREE,
) -> list[FilePlan]:
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
    chosen = _share_out(entries, world_size=world_size)
    records: dict[str, TensorRecord | None] = {}
    shares = [_share(entries, places, records) for places in chosen]
    sources = _Sources()
    files = [_File(f"__{rank}_0.distcp") for rank in range(world_size)]
    for file, share in zip(files, shares, strict=True):
        for one in share.objects:
            if isinstance(one, _Container):
                file.add_container(one)
            else:
                file.add_object(one)
        for piece in share.pieces:
            file.add_tensor(piece, sources)
    stored = [item for file in files for item in file.stored]
    metadata = encode_metadata(records, stored, planner_data=paths)
    plans = [file.plan() for file in files]
    return [*plans, FilePlan(".metadata", len(metadata), ((0, metadata),), ())]


def _share_out(entries: Sequence[_Item], *, world_size: int) -> list[list[tuple[int, Box]]]:
    """For each rank the entries it writes, by their places, with the box of each.

    Of equal boxes one is kept, on the rank with the fewest bytes so far. The rule and its order are
    those of torch's `dedup_save_plans`, which counts the bytes of the whole tensor for each of its
    boxes, and 1 for an object.
    """
    copies = _CopiesOf(world_size)
    held = [copies.of(entry) for entry in entries]
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


def _share(
    entries: Sequence[_Item],
    chosen: Sequence[tuple[int, Box]],
    records: dict[str, TensorRecord | None],
) -> _Share:
    """What a rank writes; its boxes are added to the records, which number them."""
    share = _Share([], [])
    for place, box in chosen:
        entry = entries[place]
        if not isinstance(entry, Target):
            records[entry.fqn] = None
            share.objects.append(entry)
            continue
        record = records.get(entry.fqn)
        if record is None:
            record = records[entry.fqn] = TensorRecord(entry.dtype, entry.entry.shape, [])
        share.pieces.append(_Piece(entry, box, len(record.chunks)))
        record.chunks.append(box)
    return share


class _CopiesOf:
    """Which ranks hold which box; tensors of one shape and layout share the answer."""

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        self._known: dict[tuple[Layout, tuple[int, ...]], dict[int, _Copies]] = {}

    def of(self, entry: _Item) -> dict[int, _Copies]:
        """The boxes of an entry, by the first rank that holds them."""
        everyone = tuple(range(self._world_size))
        if not isinstance(entry, Target):
            return {0: _Copies(Box((), ()), everyone)}
        if entry.layout is None:
            return {0: _Copies(Box.whole(entry.entry.shape), everyone)}
        self._check(entry, entry.layout)
        key = (entry.layout, entry.entry.shape)
        if key not in self._known:
            self._known[key] = _copies(*key)
        return self._known[key]

    def _check(self, target: Target, layout: Layout) -> None:
        if layout.mesh.size != self._world_size:
            raise UsageError(
                f"{target.fqn}: a mesh of {layout.mesh.size} ranks ({layout.mesh}) in a checkpoint "
                f"for {self._world_size}."
            )


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


class _Sources:
    """What pieces share: the finder of a tensor's chunks, the archive of one type and size."""

    def __init__(self) -> None:
        self._archives: dict[tuple[DType, tuple[int, ...]], ArchiveLayout] = {}
        self._finders: dict[str, Finder] = {}

    def finder(self, target: Target) -> Finder:
        """The finder of a target's source chunks."""
        known = self._finders.get(target.fqn)
        if known is None:
            known = self._finders[target.fqn] = Finder(target.entry).require_whole()
        return known

    def archive(self, dtype: DType, sizes: tuple[int, ...]) -> ArchiveLayout:
        """The torch.save archive of a tensor of this type and size."""
        known = self._archives.get((dtype, sizes))
        if known is None:
            pickle = dumps(tensor_node(dtype, sizes, key=0))
            known = lay_out(pickle, [prod(sizes) * dtype.itemsize])
            self._archives[dtype, sizes] = known
        return known


def archive_of(entry: ObjectEntry) -> bytes:
    """The archive of an object's value, as an item holds it."""
    archive = lay_out(dumps(object_node(entry)), ())
    data = bytearray(archive.length)
    for offset, literal in archive.literals_at(0):
        data[offset : offset + len(literal)] = literal
    return bytes(data)


class _File:
    """One `.distcp` file: items one behind the other, each a whole torch.save archive."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.stored: list[StoredItem] = []
        self._length = 0
        self._literals: list[tuple[int, bytes]] = []
        self._items: list[WriteItem] = []

    def add_object(self, entry: ObjectEntry) -> None:
        """Put an object behind what is there: its archive byte for byte, or its value pickled."""
        if entry.codec == TORCH_SAVE:
            self._copy(entry)
            self._store(entry.fqn, None, entry.data.length)
            return
        archive = lay_out(dumps(object_node(entry)), ())
        self._literals.extend(archive.literals_at(self._length))
        self._store(entry.fqn, None, archive.length)

    def add_container(self, container: _Container) -> None:
        """Put a container with whole tensors behind what is there, as one archive."""
        packed = pack(container.tree)
        archive = lay_out(packed.pickle, packed.sizes)
        self._literals.extend(archive.literals_at(self._length))
        self._items.extend(packed.items(archive.slots_at(self._length), self.path))
        self._store(container.fqn, None, archive.length)

    def _copy(self, entry: ObjectEntry) -> None:
        source = object_entry_as_tensor(entry)
        box = Box.whole(source.shape)
        dtype, finder = source.dtype, Finder(source)
        self._items.append(WriteItem(entry.fqn, self.path, self._length, box, dtype, dtype, finder))

    def add_tensor(self, piece: _Piece, sources: _Sources) -> None:
        """Put one box of a tensor behind what is there."""
        target, box, number = piece
        archive = sources.archive(target.dtype, box.sizes)
        self._literals.extend(archive.literals_at(self._length))
        for slot in archive.slots_at(self._length) if box.numel else ():
            item = WriteItem(
                target.fqn,
                self.path,
                slot.offset,
                box,
                target.entry.dtype,
                target.dtype,
                sources.finder(target),
                slot.crc_at,
            )
            self._items.append(item)
        self._store(target.fqn, number, archive.length)

    def _store(self, fqn: str, number: int | None, length: int) -> None:
        self.stored.append(StoredItem(fqn, number, self.path, self._length, length))
        self._length += length

    def plan(self) -> FilePlan:
        """The file as it is to be written."""
        return FilePlan(self.path, self._length, tuple(self._literals), tuple(self._items))
