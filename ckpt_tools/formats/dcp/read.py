"""DCP directories: `.metadata` and the data files that it names, as torch.distributed.checkpoint
writes them (FSDP2, and FSDP1 through DCP).

The index comes from `.metadata` and the sizes of the files alone; what lies inside the items is the
business of `items`. DCP stores boxes and no mesh, so no layout is stated here.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from ckpt_tools.core import names
from ckpt_tools.core.dtypes import BY_NAME, dtype_named
from ckpt_tools.core.geometry import Box
from ckpt_tools.core.index import (
    ByteRange,
    CheckpointIndex,
    Chunk,
    FileEntry,
    Grid,
    ObjectEntry,
    Path,
    Section,
    TensorEntry,
)
from ckpt_tools.core.state_tree import of_paths
from ckpt_tools.core.text import counted, some
from ckpt_tools.errors import (
    CheckpointError,
    IncompleteError,
    NotReadError,
    UnreadableError,
    UnsupportedError,
    unreadable,
)
from ckpt_tools.formats.dcp.data_files import DATA_FILE, RANK_METADATA, problems_of, rank_of
from ckpt_tools.formats.dcp.items import TORCH_SAVE, ZSTD, tensors_in
from ckpt_tools.formats.dcp.metadata import Metadata, Storage, StorageInfo, load_metadata
from ckpt_tools.formats.dcp.objects import open_containers
from ckpt_tools.formats.foreign import lfs_pointer, sniff
from ckpt_tools.formats.pickle.load import collector_paused
from ckpt_tools.formats.pickle.stored import StoredTensor
from ckpt_tools.formats.protocol import ReadOptions
from ckpt_tools.storage import paths
from ckpt_tools.storage.reader import Files, refuse_special

_MEGATRON_OPTIM = "optimizer."
_FLAT_PARAM = ("_flat_param", "flat_param")
_CODECS = {(): TORCH_SAVE, ("stream.zstd/1",): ZSTD}  # by the transforms of an item
# What browsers and other downloads make of the name .metadata.
_RENAMED = re.compile(r"[._-]?metadata(\.txt|\.bin)?( ?\(\d+\))?")


def matches(path: str) -> bool:
    """Whether this is a directory that DCP wrote, or began to write."""
    if not paths.is_dir(path):
        return False
    return any(
        name in (".metadata", ".metadata.tmp")
        or DATA_FILE.fullmatch(name)
        or RANK_METADATA.fullmatch(name)
        for name in paths.listdir(path)
    )


@collector_paused()  # it would look through millions of new chunks again and again
def read_index(path: str, *, options: ReadOptions = ReadOptions()) -> CheckpointIndex:
    """The index of a DCP directory, from `.metadata` and file sizes.

    Raises IncompleteError without `.metadata`, UnreadableError when it is damaged or names a
    foreign class, UnsupportedError for transforms and flat parameters. Missing or short files,
    holes and overlaps become problems of the index.
    """
    refuse_special([os.path.join(path, ".metadata")])
    try:
        sizes = paths.file_sizes(path)
    except OSError as error:
        raise unreadable(path, error, doing="listed") from error
    metadata, needed, lacking = _read_metadata(path, sizes)
    sizes |= paths.sizes_of_named(path, needed - sizes.keys())
    index = _as_stated(path, metadata, sizes, needed=needed)
    index = replace(index, allowed=options.allow_globals)
    refuse_special(os.path.join(path, name) for name in needed - sizes.keys())
    if metadata.copies:
        from ckpt_tools.formats.dcp import per_rank  # late, here and below: few are saved so

        index = per_rank.with_replicas(index, metadata.copies)
    with Files() as files:
        if _lengths_are_bare(index):
            from ckpt_tools.formats.dcp import safetensors_data  # late: few directories have such

            index = safetensors_data.resolve(index, files)
        if metadata.copies or metadata.complaints:
            from ckpt_tools.formats.dcp import per_rank

            index = per_rank.compared(index, metadata, files)
        if not metadata.planner_data:
            index = _with_packed(index, files)
        problems = (*lacking, *index.problems, *problems_of(index, sizes))
        index = replace(index, problems=problems)
        index = open_containers(index, files)
    if not index.packed:
        return index
    # The sections that entries have beside what containers held.
    objects = {entry.path for entry in index.objects}
    sections = names.sections_of([entry.path for entry in index.entries], objects=objects)
    return index.holding(replace(one, section=sections[one.path]) for one in index.entries)


def _as_stated(
    path: str, metadata: Metadata, sizes: Mapping[str, int], *, needed: set[str]
) -> CheckpointIndex:
    """The index as `.metadata` states it; no data file is opened."""
    path_of = _paths(metadata)
    tensors, objects = _entries(path, metadata, path_of)
    # Of another save into the same folder; those of ranks with nothing are empty.
    strays = {n for n in sizes.keys() - needed if DATA_FILE.fullmatch(n) and sizes[n]}
    # Even a rank with nothing leaves a file.
    names_of_data = map(os.path.basename, (sizes.keys() | needed) - strays)
    ranks = [int(match[1]) for match in map(DATA_FILE.fullmatch, names_of_data) if match]
    notes = []
    if strays:
        them = some(sorted(strays))
        notes.append(f"Ignored {len(strays)} data files that .metadata does not name: {them}.")
    if any(name.endswith(".metadata.tmp") for name in sizes):
        notes.append(
            "There is a .metadata.tmp beside .metadata: a later save into this folder was "
            "interrupted, and has written over data files."
        )
    lost = counted(sum(entry is None for entry in objects), "object")
    if None in objects:
        notes.append(f"{lost} named in .metadata without a place in any file.")
    return CheckpointIndex(
        root=path,
        format="dcp",
        tensors=tensors,
        objects=tuple(entry for entry in objects if entry is not None),
        files=tuple(
            FileEntry(os.path.join(path, name), sizes.get(name)) for name in sorted(needed)
        ),
        world_size=max(ranks) + 1 if ranks else None,
        notes=tuple(notes),
        problems=tuple(_problems(metadata, path)),
        tree=of_paths((path, fqn) for fqn, path in path_of.items()),
    )


def _lengths_are_bare(index: CheckpointIndex) -> bool:
    """Whether `.metadata` gives an item the length of its elements alone, as it does only here.

    An item that is a torch.save archive is longer, a compressed one has a transform. So a usual
    directory is recognised without reading its data files.
    """
    for entry in index.tensors:
        for chunk in entry.chunks:
            if 0 not in chunk.box.sizes:
                is_archive = chunk.codec == TORCH_SAVE
                return is_archive and chunk.data.length == chunk.box.numel * entry.dtype.itemsize
    return False


def _entries(
    root: str, metadata: Metadata, path_of: Mapping[str, Path]
) -> tuple[tuple[TensorEntry, ...], tuple[ObjectEntry | None, ...]]:
    """Tensors and objects by name; None for an object without a place in any file."""
    flat = next((fqn for fqn in metadata.tensors if fqn.rpartition(".")[2] in _FLAT_PARAM), None)
    if flat is not None:
        raise UnsupportedError(
            f"{root} holds flat parameters ({flat}): FSDP1 saved it with LOCAL_STATE_DICT, and "
            "neither names nor shapes of the parameters in them are stored.",
            hint="Load it in the job that saved it, with as many ranks, and save again with "
            "SHARDED_STATE_DICT and a device_mesh, or with FULL_STATE_DICT.",
        )
    opaque = {path_of[fqn] for fqn in metadata.objects}
    sections = names.sections_of(list(path_of.values()), objects=opaque)
    stored = _StoredItems(root, metadata.storage)
    tensors = tuple(
        TensorEntry(
            fqn=fqn,
            path=path_of[fqn],
            section=sections[path_of[fqn]],
            dtype=dtype_named(meta.dtype),
            shape=tuple(meta.shape),
            chunks=stored.chunks(fqn, meta.boxes),
        )
        for fqn, meta in sorted(metadata.tensors.items())
        if meta.dtype in BY_NAME
    )
    unread = {f: meta.dtype for f, meta in metadata.tensors.items() if meta.dtype not in BY_NAME}
    objects = tuple(
        stored.object(fqn, path_of[fqn], sections[path_of[fqn]], unread.get(fqn))
        for fqn in sorted({*metadata.objects, *unread})
    )
    return tensors, objects


class _DataFile(NamedTuple):
    """What a relative path and its transforms mean: file, packing of items, and who wrote it."""

    path: str
    codec: str
    rank: int | None


class _StoredItems:
    """The items of a DCP directory: chunks of tensors, and objects.

    A million chunks cost two numbers each: which boxes there are and who saved them is the same for
    most tensors, and kept once.
    """

    def __init__(self, root: str, storage: Storage) -> None:
        self._root = root
        self._storage = storage
        self._places: dict[tuple[str, tuple[str, ...]], _DataFile] = {}
        # By the identity of the boxes, which tensors with the same cut share and a grid keeps.
        self._grids: dict[tuple[int, tuple[str, ...], tuple[str, ...]], Grid] = {}

    def chunks(self, fqn: str, boxes: tuple[Box, ...]) -> Sequence[Chunk]:
        """The chunks that have an item; one without is a hole, which the coverage check names."""
        items = self._storage.get(fqn, {})
        try:
            infos = [items[box.offsets] for box in boxes]
        except KeyError:
            boxes = tuple(box for box in boxes if box.offsets in items)
            infos = [items[box.offsets] for box in boxes]
        kinds = {info.transforms for info in infos}
        if len(kinds) != 1:
            return list(map(self._chunk, boxes, infos))
        transforms = kinds.pop()
        key = id(boxes), tuple([info.relative_path for info in infos]), transforms
        grid = self._grids.get(key)
        if grid is None:
            places = [self._place(path, transforms) for path in key[1]]
            paths, ranks = (place.path for place in places), (place.rank for place in places)
            grid = self._grids[key] = Grid(boxes, tuple(paths), tuple(ranks))
        starts, lengths = [info.offset for info in infos], [info.length for info in infos]
        return grid.chunks(starts, lengths, self._place(key[1][0], transforms).codec)

    def _chunk(self, box: Box, info: StorageInfo) -> Chunk:
        place = self._place(info.relative_path, info.transforms)
        data = ByteRange(place.path, info.offset, info.length)
        return Chunk(box, data, codec=place.codec, rank=place.rank)

    def object(
        self, fqn: str, path: Path, section: Section, unread: str | None
    ) -> ObjectEntry | None:
        """The entry of an object, or of a tensor whose element type is ``unread``; None when no
        file holds it.
        """
        infos = self._storage.get(fqn, {})
        info = infos.get(None) if unread is None else next(iter(infos.values()), None)
        if info is None:
            return None
        place = self._place(info.relative_path, info.transforms)
        data = ByteRange(place.path, info.offset, info.length)
        entry = ObjectEntry(fqn, path, section, data, codec=place.codec)
        if unread is None:
            return entry
        flaw = NotReadError(
            f"a tensor of element type {unread}, which is not read.",
            hint="Load it where it was saved, make plain tensors of it (.dequantize()), and save "
            "it again; -x leaves the entry out.",
        )
        return replace(entry, type_name=f"tensor of {unread}", flaw=flaw)

    def _place(self, relative_path: str, transforms: tuple[str, ...]) -> _DataFile:
        """Raises UnsupportedError for a transform that is not known."""
        key = relative_path, transforms
        if key not in self._places:
            path, codec = os.path.join(self._root, relative_path), _CODECS.get(transforms)
            if codec is None:
                raise UnsupportedError(
                    f"{path} is packed with {list(transforms)}, which is not known here; only "
                    "stream.zstd/1 is.",
                    hint="Save again without this extension.",
                )
            self._places[key] = _DataFile(path, codec, rank_of(relative_path))
        return self._places[key]


def _read_metadata(
    path: str, sizes: Mapping[str, int]
) -> tuple[Metadata, set[str], Sequence[CheckpointError]]:
    """What the ranks' metadata say, the names of all files that are needed, and what is missing."""
    with Files() as files:

        def load(name: str) -> Metadata:
            where = os.path.join(path, name)
            if sizes[name] == 0:
                raise UnreadableError(f"{where} is empty.", hint="The save was interrupted.")
            data = files.read(where, 0, sizes[name])
            if sniff(data[:64]) == "lfs":
                raise lfs_pointer(where)
            return load_metadata(data, where=where)

        if ".metadata" in sizes:
            metadata = load(".metadata")
            return metadata, {".metadata", *metadata.files}, ()
        parts = {int(match[1]): name for name in sizes if (match := RANK_METADATA.fullmatch(name))}
        if not parts:
            raise _no_metadata(path, sizes)
        from ckpt_tools.formats.dcp import per_rank

        by_rank = {rank: load(name) for rank, name in sorted(parts.items())}
    metadata = per_rank.union(by_rank)
    needed = metadata.files.union(f"__{rank}.metadata" for rank in by_rank)
    return metadata, needed, [*per_rank.missing_ranks(by_rank, sizes, path)]


def _no_metadata(path: str, sizes: Mapping[str, int]) -> IncompleteError:
    if any(name.endswith(".metadata.tmp") for name in sizes):
        return IncompleteError(
            f"{path} has no .metadata, only .metadata.tmp: the save was interrupted.",
            hint="Use the checkpoint before this one.",
        )
    ranks = sorted({int(m[1]) for name in sizes if (m := DATA_FILE.fullmatch(name))})
    renamed = min(filter(_RENAMED.fullmatch, sizes), default=None)
    way = (
        "Rank 0 writes .metadata when all ranks are done: look on the node of rank 0, or a copy "
        "left out hidden files, or the save was interrupted. With node-local disks, gather the "
        "files of all nodes in one folder."
    )
    return IncompleteError(
        f"{path} has no .metadata, only data files of ranks {', '.join(map(str, ranks))}.",
        hint=way if renamed is None else f"If {renamed!r} is it, rename it to .metadata.",
    )


def _paths(metadata: Metadata) -> dict[str, Path]:
    """The path of every entry: planner_data's, in its order, or the name alone without one.

    Megatron-core writes none, and its names say what is of the optimizer.
    """
    planner = metadata.planner_data or {}
    entries = metadata.tensors.keys() | metadata.objects
    known = {fqn: tuple(path) for fqn, path in planner.items() if fqn in entries}
    rest = (fqn for fqn in (*metadata.tensors, *sorted(metadata.objects)) if fqn not in known)
    paths: dict[str, Path] = {fqn: (fqn,) for fqn in rest}
    if metadata.reshaped is not None:
        optim = (fqn for fqn in paths if fqn.startswith(_MEGATRON_OPTIM))
        paths |= {fqn: (*fqn.split(".", 1),) for fqn in optim}
    return known | paths


def _problems(metadata: Metadata, where: str) -> Iterator[CheckpointError]:
    """Entries of which `.metadata` itself says that they cannot be used."""
    planner = metadata.planner_data or {}
    entries = metadata.tensors.keys() | metadata.objects
    # torch names an entry by its path, with dots between the keys: one of the two is damaged.
    wrong = {fqn for fqn, path in planner.items() if ".".join(map(str, path)) != fqn}
    strangers, left = planner.keys() - entries, entries - planner.keys()
    if planner and strangers and left:
        wrong |= left
    if wrong & entries:
        yield UnreadableError(
            f"{where}/.metadata is damaged: names and places in the state dict (planner_data) "
            f"differ for {some(sorted(wrong & entries))}.",
            hint="Take .metadata from another copy; which of the two is right cannot be known.",
            about=wrong & entries,
        )
    for fqn in sorted(metadata.tensors.keys() & (metadata.reshaped or ())):
        yield UnsupportedError(
            f"{fqn} is flattened by Megatron's distributed optimizer: pieces of ranks are "
            f"stored, in the shape {list(metadata.tensors[fqn].shape)} that no tensor has.",
            hint="Megatron keeps its shape with --dist-ckpt-optim-fully-reshardable; --only "
            "model leaves it out.",
            about=[fqn],
        )


def _with_packed(index: CheckpointIndex, files: Files) -> CheckpointIndex:
    """The index with a problem when flatten_state_dict=False left objects with tensors inside.

    Such an object is of the section that it is the container of.

    Raises what is wrong when nothing but such objects is there, or when one holds the shards of
    the rank that wrote it alone.
    """
    held = {e.fqn: tensors for e in index.objects if (tensors := tensors_in(e, files))}
    for fqn, tensors in held.items():
        if not all(isinstance(tensor, StoredTensor) for tensor in tensors):
            raise IncompleteError(
                f"{index.root} was saved with flatten_state_dict=False: {fqn!r} is one "
                "pickle with one rank's shards, and those of the other ranks were never written.",
                hint="Save again with the default planner (flatten_state_dict=True).",
            )
    if not held:
        return index
    counts = some([f"{fqn!r} ({len(tensors)} tensors inside)" for fqn, tensors in held.items()])
    error = UnsupportedError(
        f"{index.root} was saved with flatten_state_dict=False: {counts} is one pickle, not an "
        "entry for each tensor.",
        hint="Load it with DefaultLoadPlanner(flatten_state_dict=False) of "
        "torch.distributed.checkpoint, and save it again with the default planner or torch.save.",
        about=held,
    )
    if not index.tensors:
        raise error
    objects = [
        replace(entry, section=names.container_of([(*entry.path, "")]).get(entry.path, "other"))
        if entry.fqn in held
        else entry
        for entry in index.objects
    ]
    return replace(index, objects=tuple(objects), problems=(*index.problems, error))
