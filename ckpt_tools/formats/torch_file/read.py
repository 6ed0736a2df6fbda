"""One torch.save file as a whole checkpoint: FSDP1's FULL_STATE_DICT, a Composer monolith, a
Lightning .ckpt, or any other .pt, .pth and .bin file of a state dict.

What is not a tensor has no bytes of its own in such a file: the byte range of an object is that of
the whole pickle, and only its value is compared.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import replace

from ckpt_tools.core import names
from ckpt_tools.core.coverage import uncovered
from ckpt_tools.core.dtypes import dtype_named
from ckpt_tools.core.index import CheckpointIndex, FileEntry, TensorEntry
from ckpt_tools.core.layout import Replicate
from ckpt_tools.core.text import counted, some
from ckpt_tools.errors import CheckpointError, IncompleteError, paths_instead
from ckpt_tools.formats.foreign import HEAD, sniff
from ckpt_tools.formats.numbered import only_a_part
from ckpt_tools.formats.pickle.shared_storage import overlapping, tied
from ckpt_tools.formats.pickle.state_dict import TensorLeaf, flatten
from ckpt_tools.formats.pickle.stored import StoredDTensor
from ckpt_tools.formats.protocol import ReadOptions
from ckpt_tools.formats.torch_file.open import Held, open_saved
from ckpt_tools.storage import paths
from ckpt_tools.storage.reader import Files

FORMAT = "torch"
_OF_RANKS = (".pt", ".pth", ".ckpt", ".bin", ".tar")  # of files that are read together
_SUFFIXES = (".pt", ".pth", ".ckpt", ".bin", ".pkl")
# Programs of torch.jit and torch.export: reading them says what they are.
_PROGRAMS = (".pt2", ".ptl", ".ts", ".torchscript", ".jit")
# Many archives one after the other, each of a part of one tensor.
_DCP_DATA = ".distcp"
_OTHER_BIN = ("unknown", "json", "gguf", "npy", "hdf5")  # all else is a download gone wrong
# The magic number that every older file begins with, as a pickle of protocol 2.
_LEGACY_HEAD = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."


def matches(path: str) -> bool:
    """Whether this is a file that torch.save wrote, or that its name says it should have."""
    suffix = os.path.splitext(path)[1].lower()
    if not paths.is_file(path) or suffix == _DCP_DATA:
        return False
    try:
        head = paths.head(path, HEAD)
    except OSError:
        return suffix in _SUFFIXES  # reading it will say what is wrong
    kind = sniff(head)
    if head.startswith(_LEGACY_HEAD) or (kind == "zip" and b"data.pkl" in head):
        return True
    if suffix in _PROGRAMS:
        return kind == "zip"
    if suffix not in _SUFFIXES or kind == "safetensors":
        return False
    return suffix != ".bin" or kind not in _OTHER_BIN


def read_index(path: str, *, options: ReadOptions = ReadOptions()) -> CheckpointIndex:
    """The index of one torch.save file by itself; see `read_file`.

    A file that says that it is one of several is not whole by itself.
    """
    index = read_file(path, options=options)
    with Files() as files:
        part = only_a_part(path, files)
    return index if part is None else replace(index, problems=(part, *index.problems))


def read_file(path: str, *, options: ReadOptions) -> CheckpointIndex:
    """The index of one torch.save file, from its headers alone.

    Raises UnreadableError for a file that is cut or something else, UnsafePickleError for a pickle
    with unknown globals, UnsupportedError for ShardedTensors and flat parameters. A file with one
    rank's shards of DTensors is read, with problems that say what is not in it.
    """
    with Files() as files:
        saved = open_saved(path, files, options=options)
    state = flatten(saved.value, where=path)
    leaf_paths = [*(leaf.path for leaf in state.tensors), *(leaf.path for leaf in state.objects)]
    no_tensors = frozenset(leaf.path for leaf in state.objects if not leaf.is_tensor)
    sections = names.sections_of(leaf_paths, objects=no_tensors)
    held = [saved.held(leaf.stored) for leaf in state.tensors]
    tensors = [
        TensorEntry(
            fqn=leaf.fqn,
            path=leaf.path,
            section=sections[leaf.path],
            dtype=dtype_named(leaf.stored.dtype),
            shape=leaf.stored.shape,
            chunks=one.chunks,
            layout=one.layout if one.flaw is None else None,
        )
        for leaf, one in zip(state.tensors, held, strict=True)
    ]
    tensors.sort(key=lambda entry: entry.fqn)
    pairs = some([f"{one} and {other}" for one, other in overlapping(state.tensors)])
    overlaps = [f"Views that share elements of one storage: {pairs}."] if pairs else []
    objects = [leaf.entry(sections[leaf.path], saved.pickle) for leaf in state.objects]
    problems = [*_problems(state.tensors, held, path)]
    problems += uncovered(tensors, known=frozenset().union(*(one.about for one in problems)))
    return CheckpointIndex(
        root=path,
        format=FORMAT,
        tensors=tuple(tensors),
        objects=tuple(sorted(objects, key=lambda entry: entry.fqn)),
        files=(FileEntry(path, saved.length),),
        ties=tied(state.tensors),
        notes=(*_zero_weights(tensors), *overlaps),
        problems=tuple(problems),
        tree=state.tree,
    )


def _problems(
    leaves: Sequence[TensorLeaf], held: Sequence[Held], path: str
) -> Iterator[CheckpointError]:
    """What keeps the tensors of the file from being whole: shards of one rank, Partial."""
    shards = []
    for leaf, (_, layout, flaw) in zip(leaves, held, strict=True):
        if flaw is not None:
            yield flaw.reworded(f"{path}: {leaf.fqn}: {flaw.message}.").concerning((leaf.fqn,))
        elif isinstance(leaf.stored, StoredDTensor) and layout is not None:
            dims = zip(layout.mesh.shape, layout.placements, strict=True)
            if any(size > 1 and not isinstance(how, Replicate) for size, how in dims):
                shards.append((leaf.fqn, leaf.stored, layout))
    if not shards:
        return
    fqn, stored, layout = shards[0]
    at = stored.mesh.coordinate
    who = f"rank {stored.mesh.rank}" if stored.mesh.rank is not None else f"the rank at {at}"
    folder, suffix = paths.folder_of(path), os.path.splitext(path)[1]
    alike = [name for name in paths.names_in(folder) if name.endswith(suffix)]
    hint = "Give the folder of all ranks' files, or a quoted glob of them."
    if suffix.lower() not in _OF_RANKS:
        alike, file = [], os.path.basename(path)
        hint = f"Rename all ranks' files, {file} to {file}.pt, and give their folder."
    yield IncompleteError(
        f"{path} holds the shards of {who} of a mesh {layout.mesh}, not whole tensors: "
        f"{len(shards)} of {len(leaves)} tensors, {fqn} among them. "
        f"The files of the other {layout.mesh.size - 1} ranks are needed.",
        hint=hint,
        # Alone, it is what the folder means, too.
        instead=paths_instead(path, [folder]) if len(alike) > 1 else None,
        about=tuple(name for name, _, _ in shards),
    )


def _zero_weights(tensors: Sequence[TensorEntry]) -> Iterator[str]:
    """A note when weights have lost their elements: one rank's save of an FSDP1 model.

    Outside of its FSDP unit's forward, a parameter of an FSDP1 model is flat and may be empty.
    """
    empty = [
        entry.fqn
        for entry in tensors
        if entry.section == "model" and entry.shape == (0,) and entry.dtype.kind == "float"
    ]
    if not empty:
        return
    flat = [
        f"{entry.fqn} {list(entry.shape)}"
        for entry in tensors
        if entry.section == "model" and len(entry.shape) == 1 and "emb" in entry.fqn.lower()
    ]
    also = f" {some(flat)} flattened, too." if flat else ""
    yield (
        f"Broken save: no elements in {counted(len(empty), 'weight')}: {some(empty)}.{also} "
        "Such a file comes from saving an FSDP1 model's state on one rank without gathering it."
    )
