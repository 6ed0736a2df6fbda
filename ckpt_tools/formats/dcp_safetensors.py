"""DCP directories whose data files are safetensors (`SerializationFormat.SAFETENSORS`).

`.metadata` does not tell that they are, and its offsets and lengths mean nothing there: every byte
range comes from the header of the data file itself, which names the offsets of its shards in
``DCP_SHARDING_INFO``. Objects are not in these files at all.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import NamedTuple

from ckpt_tools.errors import CheckpointError, UnreadableError
from ckpt_tools.files import Files
from ckpt_tools.formats import torch_zip
from ckpt_tools.formats.safetensors_header import Stored, read_header
from ckpt_tools.index import CheckpointIndex, Chunk, TensorEntry


class _Shard(NamedTuple):
    """Which shard of which tensor: its name, its first element, and the file that holds it."""

    fqn: str
    offsets: tuple[int, ...]
    path: str


def resolve(index: CheckpointIndex, files: Files) -> CheckpointIndex:
    """The same index with raw byte ranges, when its data files are safetensors; else as it is.

    Raises UnreadableError when a header is damaged. A shard that differs from what `.metadata`
    says of it becomes a problem.
    """
    data = [file.path for file in index.files if file.path.endswith(".distcp") and file.length]
    if not data or torch_zip.sniff(files.read(data[0], 0, 9)) != "safetensors":
        return index
    found = {shard: stored for path in data for shard, stored in _shards(files, path)}
    problems = list(index.problems)
    tensors = []
    for entry in index.tensors:
        try:
            tensors.append(_from_headers(entry, found))
        except CheckpointError as error:
            problems.append(error)
            tensors.append(entry)
    notes = index.notes
    if index.objects:
        count = len(index.objects)
        notes += (f"{count} objects are named, but safetensors data files cannot hold objects.",)
    return replace(
        index,
        format="dcp-safetensors",
        tensors=tuple(tensors),
        objects=(),
        notes=notes,
        problems=tuple(problems),
    )


def _shards(files: Files, path: str) -> Iterator[tuple[_Shard, Stored]]:
    """The shards of one data file, with the offsets that its header tells."""
    header = read_header(files, path)
    offsets = _saved_offsets(header.metadata, path)
    for fqn, stored in header.tensors.items():
        yield _Shard(fqn, offsets.get(fqn, (0,) * len(stored.shape)), path), stored


def _saved_offsets(metadata: Mapping[str, str], path: str) -> dict[str, tuple[int, ...]]:
    try:
        info = json.loads(metadata.get("DCP_SHARDING_INFO", "{}"))
        return {fqn: tuple(map(int, told["saved_offsets"])) for fqn, told in info.items()}
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise UnreadableError(f"{path}: its DCP_SHARDING_INFO cannot be read: {error}.") from error


def _from_headers(entry: TensorEntry, found: Mapping[_Shard, Stored]) -> TensorEntry:
    """The tensor with its chunks' bytes from the headers; a shard that no header has is left out,
    which the coverage check then names as a hole.
    """
    chunks: list[Chunk] = []
    for chunk in entry.chunks:
        stored = found.get(_Shard(entry.fqn, chunk.box.offsets, chunk.data.path))
        if stored is None:
            continue
        if (stored.dtype, stored.shape) != (entry.dtype, chunk.box.sizes):
            raise CheckpointError(
                f"{os.path.basename(chunk.data.path)} holds {entry.fqn} as {stored.dtype.name} "
                f"{list(stored.shape)}, but .metadata says {entry.dtype.name} "
                f"{list(chunk.box.sizes)}.",
                about=(entry.fqn,),
            )
        chunks.append(chunk._replace(data=stored.data, codec=None))
    return replace(entry, chunks=chunks)
