"""DCP directories: `.metadata` and the data files that it names, as torch.distributed.checkpoint
writes them (FSDP2, and FSDP1 through DCP).

The index comes from `.metadata` and the sizes of the files alone; what lies inside the items is the
business of `items`. DCP stores boxes and no mesh, so no layout is stated here.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
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
from ckpt_tools.formats.dcp.checks import DATA_FILE, problems_of
from ckpt_tools.formats.dcp.chunks import StoredItems
from ckpt_tools.formats.dcp.items import TORCH_SAVE, tensors_in
from ckpt_tools.formats.dcp.metadata import Metadata, load_metadata
from ckpt_tools.formats.dcp.objects import open_containers
from ckpt_tools.formats.dcp.per_rank import RANK_METADATA, Union
from ckpt_tools.formats.foreign import is_lfs_pointer, lfs_pointer
from ckpt_tools.formats.options import ReadOptions
from ckpt_tools.formats.pickle.interpret import collector_paused
from ckpt_tools.formats.pickle.stored import StoredTensor
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


def read_index(path: str, *, options: ReadOptions = ReadOptions()) -> CheckpointIndex:  # noqa: ARG001 (one signature for all)
    """The index of a DCP directory, from `.metadata` and file sizes.

    Raises IncompleteError without `.metadata`, UnreadableError when it is damaged or names a
    foreign class, UnsupportedError for transforms and flat parameters. Missing or short files,
    holes and overlaps become problems of the index.
    """
    with collector_paused():  # it would look through millions of new chunks again and again
        return _read_index(path)


def _read_index(path: str) -> CheckpointIndex:
    refuse_special([os.path.join(path, ".metadata")])
    sizes = _file_sizes(path)
    union = _read_metadata(path, sizes)
    sizes |= paths.sizes_of_named(path, union.files - sizes.keys())
    metadata = union.metadata
    _refuse_flat_parameters(path, metadata.tensors)
    path_of = _paths(metadata)
    tensors, objects = _entries(metadata, path_of, StoredItems(path, metadata.storage))
    refuse_special(os.path.join(path, name) for name in union.files - sizes.keys())
    # Of another save into the same folder; those of ranks with nothing are empty.
    strays = {n for n in sizes.keys() - union.files if DATA_FILE.fullmatch(n) and sizes[n]}
    # Even a rank with nothing leaves a file.
    names_of_data = filter(None, map(DATA_FILE.fullmatch, (sizes.keys() | union.files) - strays))
    ranks = [int(match[1]) for match in names_of_data]
    index = CheckpointIndex(
        root=path,
        format="dcp",
        tensors=tensors,
        objects=tuple(entry for entry in objects if entry is not None),
        files=tuple(
            FileEntry(os.path.join(path, name), sizes.get(name)) for name in sorted(union.files)
        ),
        world_size=max(ranks) + 1 if ranks else None,
        notes=tuple(_notes(sizes, strays, objects)),
        problems=(*union.problems, *_misplaced(metadata, path), *_reshaped(metadata)),
        tree=of_paths((path, fqn) for fqn, path in path_of.items()),
    )
    index = per_rank.with_replicas(index, union.written_twice) if union.written_twice else index
    with Files() as files:
        if _lengths_are_bare(index):
            from ckpt_tools.formats.dcp import safetensors_data  # late: few directories have such

            index = safetensors_data.resolve(index, files)
        if union.written_twice or union.complaints:
            index = per_rank.compared(index, union.written_twice, union.complaints, files)
        if not metadata.planner_data:
            index = _with_packed(index, files)
        index = replace(index, problems=(*index.problems, *problems_of(index, sizes)))
        index = open_containers(index, files)
    return _classified(index) if index.packed else index


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
    metadata: Metadata, path_of: Mapping[str, Path], stored: StoredItems
) -> tuple[tuple[TensorEntry, ...], tuple[ObjectEntry | None, ...]]:
    """Tensors and objects by name; None for an object without a place in any file."""
    opaque = {path_of[fqn] for fqn in metadata.objects}
    by_path = names.sections_of(list(path_of.values()), objects=opaque)
    sections = {fqn: by_path[path] for fqn, path in path_of.items()}
    tensors = tuple(
        TensorEntry(
            fqn=fqn,
            path=path_of[fqn],
            section=sections[fqn],
            dtype=dtype_named(meta.dtype),
            shape=tuple(meta.shape),
            chunks=stored.chunks(fqn, meta.boxes),
        )
        for fqn, meta in sorted(metadata.tensors.items())
        if meta.dtype in BY_NAME
    )
    unread = {fqn for fqn, meta in metadata.tensors.items() if meta.dtype not in BY_NAME}
    objects = tuple(
        stored.object(fqn, path_of[fqn], sections[fqn])
        if fqn in metadata.objects
        else stored.unread(fqn, path_of[fqn], sections[fqn], dtype=metadata.tensors[fqn].dtype)
        for fqn in sorted({*metadata.objects, *unread})
    )
    return tensors, objects


def _classified(index: CheckpointIndex) -> CheckpointIndex:
    """The same entries in the sections that they have beside what containers held."""
    objects = {entry.path for entry in index.objects}
    sections = names.sections_of([entry.path for entry in index.entries], objects=objects)
    return replace(
        index,
        tensors=tuple(replace(entry, section=sections[entry.path]) for entry in index.tensors),
        objects=tuple(replace(entry, section=sections[entry.path]) for entry in index.objects),
    )


def _file_sizes(path: str) -> dict[str, int]:
    """Length in bytes of every file in the directory, those in sub-folders not included."""
    try:
        return paths.file_sizes(path)
    except OSError as error:
        raise unreadable(path, error, doing="listed") from error


def _read_metadata(path: str, sizes: Mapping[str, int]) -> Union:
    with Files() as files:

        def load(name: str) -> Metadata:
            where = os.path.join(path, name)
            if sizes[name] == 0:
                raise UnreadableError(f"{where} is empty.", hint="The save was interrupted.")
            data = files.read(where, 0, sizes[name])
            if is_lfs_pointer(data):
                raise lfs_pointer(where)
            return load_metadata(data, where=where)

        if ".metadata" in sizes:
            metadata = load(".metadata")
            needed = frozenset({".metadata", *StoredItems(path, metadata.storage).file_names})
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


def _refuse_flat_parameters(path: str, fqns: Iterable[str]) -> None:
    for fqn in fqns:
        if fqn.rpartition(".")[2] in _FLAT_PARAM:
            raise UnsupportedError(
                f"{path} holds flat parameters ({fqn}): FSDP1 saved it with LOCAL_STATE_DICT, and "
                "neither names nor shapes of the parameters in them are stored.",
                hint="Load it in the job that saved it, with as many ranks, and save again with "
                "SHARDED_STATE_DICT and a device_mesh, or with FULL_STATE_DICT.",
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


def _misplaced(metadata: Metadata, where: str) -> Iterator[CheckpointError]:
    """Names that planner_data places elsewhere than they say: one of the two is damaged.

    torch names an entry by its path, with dots between the keys.
    """
    planner = metadata.planner_data or {}
    entries = metadata.tensors.keys() | metadata.objects
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


def _reshaped(metadata: Metadata) -> Iterator[CheckpointError]:
    """The tensors that Megatron's distributed optimizer has flattened, which are not read."""
    for fqn in sorted(metadata.reshaped or ()):
        if fqn in metadata.tensors:
            yield UnsupportedError(
                f"{fqn} is flattened by Megatron's distributed optimizer: pieces of ranks are "
                f"stored, in the shape {list(metadata.tensors[fqn].shape)} that no tensor has.",
                hint="Megatron keeps its shape with --dist-ckpt-optim-fully-reshardable; --only "
                "model leaves it out.",
                about=[fqn],
            )


def _notes(
    sizes: Mapping[str, int], strays: Collection[str], objects: Sequence[ObjectEntry | None]
) -> Iterable[str]:
    if strays:
        them = some(sorted(strays))
        yield f"Ignored {len(strays)} data files that .metadata does not name: {them}."
    if any(name.endswith(".metadata.tmp") for name in sizes):
        yield (
            "There is a .metadata.tmp beside .metadata: a later save into this folder was "
            "interrupted, and has written over data files."
        )
    lost = sum(entry is None for entry in objects)
    if lost:
        yield f"{counted(lost, 'object')} named in .metadata without a place in any file."


def _with_packed(index: CheckpointIndex, files: Files) -> CheckpointIndex:
    """The index with a problem when flatten_state_dict=False left objects with tensors inside.

    Such an object is of the section that it is the container of.

    Raises what is wrong when nothing but such objects is there, or when one holds the shards of
    the rank that wrote it alone.
    """
    held = [(e.fqn, tensors) for e in index.objects if (tensors := tensors_in(e, files))]
    for fqn, tensors in held:
        if not all(isinstance(tensor, StoredTensor) for tensor in tensors):
            raise IncompleteError(
                f"{index.root} was saved with flatten_state_dict=False: {fqn!r} is one "
                "pickle with one rank's shards, and those of the other ranks were never written.",
                hint="Save again with the default planner (flatten_state_dict=True).",
            )
    if not held:
        return index
    counts = some([f"{fqn!r} ({len(tensors)} tensors inside)" for fqn, tensors in held])
    error = UnsupportedError(
        f"{index.root} was saved with flatten_state_dict=False: {counts} is one pickle, not an "
        "entry for each tensor.",
        hint="Load it with DefaultLoadPlanner(flatten_state_dict=False) of "
        "torch.distributed.checkpoint, and save it again with the default planner or torch.save.",
        about=[fqn for fqn, _ in held],
    )
    if not index.tensors:
        raise error
    objects = [
        replace(entry, section=names.container_of([(*entry.path, "")]).get(entry.path, "other"))
        if entry.fqn in error.about
        else entry
        for entry in index.objects
    ]
    return replace(index, objects=tuple(objects), problems=(*index.problems, error))
