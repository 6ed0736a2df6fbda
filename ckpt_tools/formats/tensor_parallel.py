"""Meta's ``consolidated.00.pth``, ``consolidated.01.pth`` …: each file is one tensor-parallel part.

Which tensors are cut, and along which dimension, stands in no file: it is the model's code that
knows it. So one part is no checkpoint, and several are joined only as a map says (`Cut`).
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import replace

from ckpt_tools.core.geometry import Box
from ckpt_tools.core.index import CheckpointIndex, Chunk, TensorEntry
from ckpt_tools.core.text import counted, some
from ckpt_tools.errors import CheckpointError, IncompleteError, Instead, UnsupportedError, Way
from ckpt_tools.formats.frameworks import number_of_part
from ckpt_tools.formats.protocol import Cut, ReadOptions
from ckpt_tools.formats.torch_file import read as torch_file
from ckpt_tools.storage import paths
from ckpt_tools.storage.reader import Files


def read_index(path: str, parts: Sequence[str], options: ReadOptions) -> CheckpointIndex:
    """The index of all parts joined as the ``cuts`` of the options say.

    Raises UnsupportedError where nothing says it, IncompleteError for a number that does not exist.
    What does not fit is a problem of its tensor.
    """
    folder = os.path.dirname(parts[0]) or "."
    if not options.cuts or not paths.is_dir(path):
        shown = some([os.path.basename(part) for part in parts])
        raise UnsupportedError(
            f"{folder} holds {len(parts)} tensor-parallel parts of one model ({shown}), and no "
            "file says which rows or columns of a tensor each of them has.",
            hint="A map that says how they are cut joins them, in `export` and `reshard`. The "
            "model's own script does, too (for Llama: transformers' "
            "convert_llama_weights_to_hf.py).",
            instead=Instead(path, (Way(folder, ("--map", "meta-llama-to-hf")),)),
        )
    held = set(map(number_of_part, parts))
    lost = [f"{number:02}" for number in range(len(held)) if number not in held]
    if lost:
        raise IncompleteError(
            f"{folder} lacks the tensor-parallel parts {some(lost)}; it has {max(held):02}."
        )
    indexes = [torch_file.read_file(part, options=options) for part in parts]
    tensors: list[TensorEntry] = []
    problems = [problem for part in indexes for problem in part.problems]
    with Files() as files:
        for fqn in sorted({entry.fqn for part in indexes for entry in part.tensors}):
            try:
                tensors.append(_joined(fqn, indexes, options.cuts, files))
            except CheckpointError as error:
                problems.append(error.at(f"{folder}: {fqn}").concerning([fqn]))
    return replace(
        indexes[0],
        root=folder,
        tensors=tuple(tensors),
        files=tuple(file for part in indexes for file in part.files),
        ties=(),
        notes=(f"Joined {len(indexes)} tensor-parallel parts: {counted(len(tensors), 'tensor')}.",),
        problems=tuple(problems),
    )


def _joined(
    fqn: str, parts: Sequence[CheckpointIndex], cuts: Sequence[Cut], files: Files
) -> TensorEntry:
    """The whole tensor of a name. Raises CheckpointError when the parts do not fit."""
    held = [entry for part in parts if (entry := part.tensor(fqn)) is not None]
    if len(held) < len(parts):
        raise IncompleteError(f"only {len(held)} of {len(parts)} parts have it.")
    if len({(entry.dtype.name, len(entry.shape)) for entry in held}) > 1:
        raise UnsupportedError("its parts differ in dtype or dimensions.")
    cut = next((cut for cut in cuts if re.fullmatch(cut.name, fqn)), None)
    if cut is None:
        raise UnsupportedError(
            "the map does not say how tensor-parallel parts have it.",
            hint='A rule says `parallel = 0`, `1` or `"same"`.',
        )
    if not cut.dims or not held[0].shape:
        return _same(held, files)
    as_long = parts[0].tensor(cut.length or "")
    length = None if as_long is None or not as_long.shape else as_long.shape[0]
    dim = _dim(cut, held, length)
    rest = {entry.shape[:dim] + entry.shape[dim + 1 :] for entry in held}
    if dim >= len(held[0].shape) or len(rest) > 1:
        shapes = some([str(list(entry.shape)) for entry in held])
        raise UnsupportedError(f"shapes {shapes} do not join along dimension {dim}.")
    size = sum(entry.shape[dim] for entry in held)
    if len(cut.dims) == 1 and length is not None and size != length:
        raise IncompleteError(
            f"{len(held)} parts have {size} of {length} along dimension {dim} "
            f"({cut.length} is as long). Is a part missing?"
        )
    return _concatenated(held, dim, size)


def _dim(cut: Cut, held: Sequence[TensorEntry], length: int | None) -> int:
    """Along which dimension it is cut; of several, the one that gives the last its length."""
    if len(cut.dims) == 1:
        return cut.dims[0]
    last = len(held[0].shape) - 1
    for dim in cut.dims:
        if length == (sum(e.shape[last] for e in held) if dim == last else held[0].shape[last]):
            return dim
    raise IncompleteError(
        f"no way to join {len(held)} parts gives it rows of {length} ({cut.length}). Is a part "
        "missing?"
    )


def _same(held: Sequence[TensorEntry], files: Files) -> TensorEntry:
    """A tensor that each part has whole, its bytes compared."""

    def stored(entry: TensorEntry) -> list[object]:
        return [(chunk.strides, files.read(*chunk.data)) for chunk in entry.chunks]

    first, *others = held
    own = stored(first)
    if any(entry.shape != first.shape or stored(entry) != own for entry in others):
        raise UnsupportedError("it should be equal in every part, but differs.")
    return first


def _concatenated(held: Sequence[TensorEntry], dim: int, size: int) -> TensorEntry:
    """The tensors one behind the other along a dimension, where they have ``size`` in all."""
    chunks: list[Chunk] = []
    start = 0
    for entry in held:
        for chunk in entry.chunks:
            offsets = list(chunk.box.offsets)
            offsets[dim] += start
            chunks.append(chunk._replace(box=Box(tuple(offsets), chunk.box.sizes)))
        start += entry.shape[dim]
    shape = (*held[0].shape[:dim], size, *held[0].shape[dim + 1 :])
    return replace(held[0], shape=shape, chunks=chunks)
