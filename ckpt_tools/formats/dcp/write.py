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

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from hashlib import blake2b
from math import prod
from typing import NamedTuple, TypeAlias

from ckpt_tools.core import names
from ckpt_tools.core.dtypes import BY_NAME, DType
from ckpt_tools.core.geometry import Box
from ckpt_tools.core.index import ObjectEntry
from ckpt_tools.core.plan import (
    FilePlan,
    FileReads,
    Finder,
    LazyPlans,
    PlannedFile,
    Target,
    WriteItem,
    object_entry_as_tensor,
    placed_tree,
    reads_of,
    refuse_types_not_in_torch,
    require_mesh_size,
)
from ckpt_tools.core.state_tree import Branch, Path
from ckpt_tools.formats.dcp.flattening import items_of
from ckpt_tools.formats.dcp.items import TORCH_SAVE
from ckpt_tools.formats.dcp.metadata import TensorMeta
from ckpt_tools.formats.dcp.metadata_write import StoredFile, StoredPart, plan_metadata
from ckpt_tools.formats.pickle.dump import dumps, object_node, tensor_node
from ckpt_tools.formats.protocol import PlanOptions
from ckpt_tools.formats.torch_file.write import items_in, pack
from ckpt_tools.formats.zip.layout import ArchiveLayout, Slot, lay_out


class _Container(NamedTuple):
    """A tuple with tensors, or a list of such: torch pickles it whole, as one item."""

    fqn: str
    tree: Branch[Target | ObjectEntry]


_Item: TypeAlias = Target | ObjectEntry | _Container
_Held: TypeAlias = tuple[Sequence[Box], Mapping[int, tuple[int, ...]]]


class _Packed(NamedTuple):
    """The archive that an item is, and the whole tensors that fill its slots.

    ``digest`` is one of what is known of it. A box of a tensor fills the one slot itself.
    """

    archive: ArchiveLayout
    digest: bytes
    targets: tuple[Target, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class _Part(StoredPart):
    """What a file has of each tensor of a kind: its box, as this archive."""

    packed: _Packed


@dataclass(frozen=True, slots=True, eq=False)
class _Kind:
    """Tensors that lie alike, or something else, of which ``meta`` is None: each rank's part.

    ``sources`` are the finders of all that is read, together where they find the same files.
    """

    parts: Mapping[int, _Part]
    meta: TensorMeta | None
    sources: dict[Hashable, list[Finder]]

    def reads(self, box: Box) -> Iterator[tuple[Finder, Box, int]]:
        """What is read for a part with this box: so many boxes as this one is."""
        for finders in self.sources.values():
            shape = finders[0].entry.shape
            yield finders[0], Box.whole(shape) if self.meta is None else box, len(finders)


def plan_files(
    targets: Sequence[Target], objects: Sequence[ObjectEntry], *, options: PlanOptions
) -> LazyPlans:
    """The files of a DCP directory for the ranks of a mesh, `.metadata` last.

    A target with neither layout nor boxes is a plain tensor, which each rank holds whole. ``tree``
    has the names where they stand in the state dict, in its order; those that it lacks come last,
    at their paths.

    Raises UsageError when a layout's mesh has another size, IncompleteError when the source's
    chunks do not cover a tensor, UnsupportedError for an object with neither bytes nor a value.
    """
    refuse_types_not_in_torch(targets)
    paths: dict[str, Path] = {}
    entries: list[_Item] = []
    world_size = options.mesh.size
    whole = placed_tree(targets, objects, options.tree)
    for path, item in items_of(whole, is_tensor=lambda leaf: isinstance(leaf, Target)):
        entry = _Container(names.join(path), item) if isinstance(item, Branch) else item
        paths[entry.fqn] = path
        entries.append(entry)
    require_mesh_size(targets, world_size)
    known: dict[Hashable, _Held] = {}  # tensors of one shape and layout share it
    held = []
    for one in entries:
        key = (one.boxes, one.layout, one.entry.shape) if isinstance(one, Target) else None
        if key not in known:
            known[key] = _held(one, world_size)
        held.append(known[key])
    shares = _share_out(entries, held, world_size=world_size)
    finders: dict[str, Finder] = {}
    kinds = _kinds(entries, held, shares, finders)
    files = [_RankFile(*one, entries, kinds, finders) for one in enumerate(shares)]
    # In the order of the state dict, which torch rebuilds from it, whatever rank has which item.
    metas = {entry.fqn: kind.meta for entry, kind in zip(entries, kinds, strict=True)}
    metadata = plan_metadata(metas, [file.stored for file in files], paths)
    return LazyPlans([*(file.planned() for file in files), metadata])


def _held(entry: _Item, world_size: int) -> _Held:
    """The box of each rank of an entry, and the ranks that have one box, by the first of them, in
    the order in which torch looks at them.
    """
    shape = entry.entry.shape if isinstance(entry, Target) else ()
    whole = [Box.whole(shape)] * world_size
    if isinstance(entry, Target) and entry.boxes:
        given = dict(entry.boxes)  # the other ranks have nothing of the tensor
        boxes = [given.get(rank, box) for rank, box in enumerate(whole)]
        return boxes, {rank: (rank,) for rank in given}
    if not isinstance(entry, Target) or entry.layout is None:
        return whole, {0: tuple(range(world_size))}
    boxes = [*entry.layout.boxes(shape)]
    for rank, (offsets, sizes) in enumerate(boxes):
        if 0 in sizes:
            # As torch places it: at the end of each dimension in which it is empty. There it cannot
            # have the offsets of a box with elements, which a loader looks chunks up by.
            places = zip(offsets, sizes, shape, strict=True)
            boxes[rank] = Box(tuple(a if size else end for a, size, end in places), sizes)
    ranks: dict[Box, list[int]] = {}
    for rank, box in enumerate(boxes):
        ranks.setdefault(box, []).append(rank)
    # A set's own order decides between equally loaded ranks in torch; here as there.
    return boxes, {some[0]: tuple(set(some)) for some in ranks.values()}


def _share_out(
    entries: Sequence[_Item], held: Sequence[_Held], *, world_size: int
) -> list[list[int]]:
    """For each rank the places of the entries that it writes its box of, objects before tensors.

    Of equal boxes one is kept, on the rank with the fewest bytes so far. The rule and its order are
    those of torch's `dedup_save_plans`, which counts the bytes of the whole tensor for each of its
    boxes, and 1 for an object.
    """
    weights = [(one.nbytes or 1) if isinstance(one, Target) else 1 for one in entries]
    load = [0] * world_size
    chosen: list[list[int]] = [[] for _ in range(world_size)]
    for first in range(world_size):
        for place, (_, groups) in enumerate(held):
            ranks = groups.get(first)
            if ranks is not None:
                rank = first if len(ranks) == 1 else min(ranks, key=load.__getitem__)
                load[rank] += weights[place]
                chosen[rank].append(place)
    is_tensor = [isinstance(entry, Target) for entry in entries]
    shares: list[list[int]] = []
    for places in chosen:
        places.sort()
        places.sort(key=is_tensor.__getitem__)
        shares.append(shares[-1] if shares and shares[-1] == places else places)
    return shares


def _kinds(
    entries: Sequence[_Item],
    held: Sequence[_Held],
    shares: Sequence[Sequence[int]],
    finders: dict[str, Finder],
) -> list[_Kind]:
    """The kind of each entry; ``finders`` get those of objects that are copied."""
    ranks: list[list[int]] = [[] for _ in entries]
    for rank, places in enumerate(shares):
        for place in places:
            ranks[place].append(rank)
    box_archive = cache(_packed_box)  # tensors of one type and size have the same
    known: dict[tuple[DType, DType, tuple[int, ...], int, tuple[int, ...]], _Kind] = {}
    kinds = []
    for entry, (boxes, _), at in zip(entries, held, ranks, strict=True):
        targets: tuple[Target, ...]
        if isinstance(entry, Target):
            targets = (entry,)
            dtype, shape = entry.dtype, entry.entry.shape
            key = entry.entry.dtype, dtype, shape, id(boxes), tuple(at)
            kind = known.get(key)
            if kind is None:
                parts = {}
                for number, rank in enumerate(at):
                    packed = box_archive(dtype, boxes[rank].sizes)
                    parts[rank] = _Part(boxes[rank], number, packed.archive.length, packed)
                meta = TensorMeta(dtype.name, shape, tuple(boxes[rank] for rank in at))
                kind = known[key] = _Kind(parts, meta, {})
        else:
            packed = _packed(entry)
            targets = packed.targets
            part = _Part(boxes[0], None, packed.archive.length, packed)
            kind = _Kind({at[0]: part}, None, {})
        for target in targets:
            if target.fqn not in finders:
                finders[target.fqn] = Finder(target.entry).require_whole()
            finder = finders[target.fqn]
            kind.sources.setdefault(finder.source, []).append(finder)
        kinds.append(kind)
    return kinds


@dataclass(frozen=True, slots=True)
class _RankFile:
    """The file of a rank: items one behind the other, of the entries at these places.

    ``entries`` and their ``kinds`` are those of all files.
    """

    rank: int
    places: Sequence[int]
    entries: Sequence[_Item]
    kinds: Sequence[_Kind]
    finders: Mapping[str, Finder]

    @property
    def path(self) -> str:
        """The name that torch gives it."""
        return f"__{self.rank}_0.distcp"

    @property
    def parts(self) -> list[_Part]:
        """What each item is."""
        return [self.kinds[place].parts[self.rank] for place in self.places]

    def stored(self) -> StoredFile:
        """The file as `.metadata` knows it."""
        return self.path, [self.entries[at].fqn for at in self.places], self.parts

    def planned(self) -> PlannedFile:
        """The file, to be planned later."""
        parts = self.parts
        length = sum([part.length for part in parts])
        digest = blake2b(b"".join([part.packed.digest for part in parts])).digest()
        return PlannedFile(self.path, length, digest, self._plan, self._reads)

    def _reads(self) -> FileReads:
        kinds = dict.fromkeys(self.kinds[place] for place in self.places)
        return reads_of(one for kind in kinds for one in kind.reads(kind.parts[self.rank].box))

    def _plan(self) -> FilePlan:
        start = 0
        literals: list[tuple[int, bytes]] = []
        items: list[WriteItem] = []
        for place, part in zip(self.places, self.parts, strict=True):
            archive, entry = part.packed.archive, self.entries[place]
            literals += ((start + offset, data) for offset, data in archive.literals)
            boxes = [(target, Box.whole(target.entry.shape)) for target in part.packed.targets]
            if isinstance(entry, Target):
                boxes = [(entry, part.box)]
            filled = ((target, box, self.finders[target.fqn]) for target, box in boxes)
            items += items_in(archive.slots, self.path, filled, start=start)
            start += archive.length
        return FilePlan(self.path, start, tuple(literals), tuple(items))


def _packed_box(dtype: DType, sizes: tuple[int, ...]) -> _Packed:
    """The archive of a tensor."""
    return _laid_out(dumps(tensor_node(dtype, sizes, key=0)), [prod(sizes) * dtype.itemsize])


def _packed(entry: ObjectEntry | _Container) -> _Packed:
    """An object's archive byte for byte, or its value pickled; a container with whole tensors."""
    if isinstance(entry, _Container):
        pickle, targets = pack(entry.tree)
        return _laid_out(pickle, [one.nbytes for one in targets], targets)
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
    ((_, data),) = lay_out(dumps(object_node(entry)), ()).literals  # without slots, it is one piece
    return data
