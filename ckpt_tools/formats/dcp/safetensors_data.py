"""DCP directories whose data files are safetensors (`SerializationFormat.SAFETENSORS`).

`.metadata` does not say that they are, but its lengths tell (`read`). For every tensor of a file it
gives the byte at which the safetensors data begins (objects lie before it, each where `.metadata`
says): the byte ranges come from the header found there, which names the first element of each shard
in ``DCP_SHARDING_INFO``.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from typing import TypeAlias

from ckpt_tools.core.index import CheckpointIndex, Chunk, TensorEntry
from ckpt_tools.errors import CheckpointError
from ckpt_tools.formats.dcp import SAFETENSORS
from ckpt_tools.formats.foreign import sniff
from ckpt_tools.formats.safetensors.header import Stored, offsets_in, read_header
from ckpt_tools.storage.reader import Files

# Which shard of which tensor: its name, its first element, and the file that holds it.
_Shard: TypeAlias = tuple[str, tuple[int, ...], str]


def resolve(index: CheckpointIndex, files: Files) -> CheckpointIndex:
    """The same index with raw byte ranges, when its data files are safetensors; else as it is.

    Raises UnreadableError when a header is damaged. A shard that differs from what `.metadata`
    says of it becomes a problem.
    """
    lengths = {file.path: file.length or 0 for file in index.files}
    starts = {
        place.path: place.offset
        for entry in index.tensors
        for chunk in entry.chunks
        for place in (chunk.data, *chunk.replicas)
        if place.offset + 9 <= lengths.get(place.path, 0)  # what is missing is reported elsewhere
    }
    first = next(iter(starts.items()), None)
    if first is None or sniff(files.read(*first, 9)) != "safetensors":
        return index
    by_shard: dict[_Shard, Stored] = {}
    for path, start in starts.items():
        header = read_header(files, path, offset=start)
        saved = offsets_in(header) or {}
        for fqn, stored in header.tensors.items():
            by_shard[fqn, saved.get(fqn, (0,) * len(stored.shape)), path] = stored
    problems = list(index.problems)
    tensors = []
    for entry in index.tensors:
        try:
            tensors.append(_from_headers(entry, by_shard))
        except CheckpointError as error:
            problems.append(error)
            tensors.append(entry)
    return replace(index, format=SAFETENSORS.name, tensors=tuple(tensors), problems=tuple(problems))


def _from_headers(entry: TensorEntry, by_shard: Mapping[_Shard, Stored]) -> TensorEntry:
    """The tensor with its chunks' bytes from the headers; a shard that no header has is left out,
    which the coverage check then names as a hole.
    """
    chunks: list[Chunk] = []
    for chunk in entry.chunks:
        stored = by_shard.get((entry.fqn, chunk.box.offsets, chunk.data.path))
        if stored is None:
            continue
        if (stored.dtype, stored.shape) != (entry.dtype, chunk.box.sizes):
            raise CheckpointError(
                f"{os.path.basename(chunk.data.path)} holds {entry.fqn} as {stored.dtype.name} "
                f"{list(stored.shape)}, but .metadata says {entry.dtype.name} "
                f"{list(chunk.box.sizes)}.",
                about=(entry.fqn,),
            )
        places = ((entry.fqn, chunk.box.offsets, data.path) for data in chunk.replicas)
        others = map(by_shard.get, places)
        replicas = tuple(other.data for other in others if other is not None)
        chunks.append(chunk._replace(data=stored.data, codec=None, replicas=replicas))
    return replace(entry, chunks=chunks)
