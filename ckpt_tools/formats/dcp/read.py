"""DCP directories: `.metadata` and the data files that it names, as torch.distributed.checkpoint
writes them (FSDP2, and FSDP1 through DCP).

The index comes from `.metadata` and the sizes of the files alone; what lies inside the items is the
business of `items`. DCP stores boxes and no mesh, so no layout is stated here.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace

from ckpt_tools.core import names
from ckpt_tools.core.dtypes import BY_NAME, dtype_named
from ckpt_tools.core.index import (
    CheckpointIndex,
    FileEntry,
    ObjectEntry,
    Path,
    TensorEntry,
)
from ckpt_tools.core.state_tree import of_paths
from ckpt_tools.core.text import counted, some
from ckpt_tools.errors import (
    CheckpointError,
    IncompleteError,
    UnreadableError,
    UnsupportedError,
    unreadable,
)
from ckpt_tools.formats.dcp import per_rank
from ckpt_tools.formats.dcp.data_files import DATA_FILE, StoredItems, files_of, problems_of
from ckpt_tools.formats.dcp.items import TORCH_SAVE, tensors_in
from ckpt_tools.formats.dcp.metadata import Metadata, load_metadata
from ckpt_tools.formats.dcp.objects import open_containers
from ckpt_tools.formats.dcp.per_rank import RANK_METADATA, Union
from ckpt_tools.formats.foreign import lfs_pointer, sniff
from ckpt_tools.formats.pickle.load import collector_paused
from ckpt_tools.formats.pickle.stored import StoredTensor
from ckpt_tools.formats.protocol import ReadOptions
from ckpt_tools.storage import paths
from ckpt_tools.storage.reader import Files, refuse_special

_MEGATRON_OPTIM = "optimizer."
_FLAT_PARAM = ("_flat_param", "flat_param")
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
def read_index(path: str, *, options: ReadOptions = ReadOptions()) -> CheckpointIndex:  # noqa: ARG001 (one signature for all)
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
    union = _read_metadata(path, sizes)
    sizes |= paths.sizes_of_named(path, union.files - sizes.keys())
    index = _as_stated(path, union, sizes)
    refuse_special(os.path.join(path, name) for name in union.files - sizes.keys())
    index = per_rank.with_replicas(index, union.written_twice) if union.written_twice else index
    with Files() as files:
        if _lengths_are_bare(index):
            from ckpt_tools.formats.dcp import safetensors_data  # late: few directories have such

            index = safetensors_data.resolve(index, files)
        if union.written_twice or union.complaints:
            index = per_rank.compared(index, union.written_twice, union.complaints, files)
        if not union.metadata.planner_data:
            index = _with_packed(index, files)
        index = replace(index, problems=(*index.problems, *problems_of(index, sizes)))
        index = open_containers(index, files)
    if not index.packed:
        return index
    # The sections that entries have beside what containers held.
    objects = {entry.path for entry in index.objects}
    sections = names.sections_of([entry.path for entry in index.entries], objects=objects)
    return index.holding(replace(one, section=sections[one.path]) for one in index.entries)


def _as_stated(path: str, union: Union, sizes: Mapping[str, int]) -> CheckpointIndex:
    """The index as `.metadata` states it; no data file is opened."""
    path_of = _paths(union.metadata)
    tensors, objects = _entries(path, union.metadata, path_of)
    # Of another save into the same folder; those of ranks with nothing are empty.
    strays = {n for n in sizes.keys() - union.files if DATA_FILE.fullmatch(n) and sizes[n]}
    # Even a rank with nothing leaves a file.
    names_of_data = filter(None, map(DATA_FILE.fullmatch, (sizes.keys() | union.files) - strays))
    ranks = [int(match[1]) for match in names_of_data]
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
            FileEntry(os.path.join(path, name), sizes.get(name)) for name in sorted(union.files)
        ),
        world_size=max(ranks) + 1 if ranks else None,
        notes=tuple(notes),
        problems=(*union.problems, *_problems(union.metadata, path)),
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
    stored = StoredItems(root, metadata.storage)
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


def _read_metadata(path: str, sizes: Mapping[str, int]) -> Union:
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
            needed = frozenset({".metadata", *files_of(metadata.storage)})
            return Union(metadata, {}, needed, {}, ())
        parts = {int(match[1]): name for name in sizes if (match := RANK_METADATA.fullmatch(name))}
        if not parts:
            raise _no_metadata(path, sizes)
        by_rank = {rank: load(name) for rank, name in sorted(parts.items())}
        return per_rank.union(by_rank, sizes, path)


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
