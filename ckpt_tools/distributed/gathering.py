"""Gathers DTensors, one at a time, from the shards that the ranks hold.

Shards are sent as bytes (a last dimension holds those of one element), so that every element type
works, bit for bit. torch's result is compared with the rank's own shard before it is used.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np  # noqa: TID253 - only the engine `gather` comes here

from ckpt_tools import formats
from ckpt_tools.copying.read import stream_box
from ckpt_tools.core.coverage import replicas_differ
from ckpt_tools.core.crc import KnownCrcs, crc32
from ckpt_tools.core.geometry import Box
from ckpt_tools.core.index import ByteRange, CheckpointIndex, Chunk, TensorEntry
from ckpt_tools.core.layout import Layout, Mesh, on_mesh
from ckpt_tools.core.plan import FilePlan, KnownReads, ReadItem, WriteItem
from ckpt_tools.core.sizes import Sizes
from ckpt_tools.distributed import devices
from ckpt_tools.distributed.group import Group
from ckpt_tools.errors import CheckpointError, CkptError, UnreadableError, UnsupportedError
from ckpt_tools.formats.rank_files.entries import RankTensor
from ckpt_tools.storage.reader import Files

if TYPE_CHECKING:
    import torch
    from torch.distributed.device_mesh import DeviceMesh

    Bytes = np.ndarray[tuple[int, ...], np.dtype[np.uint8]]

_IN_ONE_FOLDER = "Bring all rank files into one folder, and use --engine copy."

# Writes parts of files, with the bytes that are read from these.
Write = Callable[[Sequence[FilePlan], Files], None]


@dataclass(eq=False, slots=True)
class Gathering:
    """Puts tensors together and has this rank's part of them written; all ranks do it in step.

    ``index`` is of the whole checkpoint; ``parts`` are what this rank's file holds of each tensor,
    and ``seen`` gets the CRC-32s of what is read of them.
    """

    group: Group
    device_type: str
    index: CheckpointIndex
    parts: dict[str, RankTensor]
    files: Files
    seen: KnownCrcs
    _mesh: DeviceMesh | None = field(default=None, init=False)

    def run(self, wanted: Mapping[str, Sequence[FilePlan]], write: Write) -> None:
        """Put these tensors together, and write this rank's parts of files from each.

        Raises the error of the first rank that has one.
        """
        error: CkptError | None = None
        unmet = 0
        for fqn in sorted(wanted):
            entry = self.index.tensor(fqn)
            if entry is None:
                continue
            error = self._do(entry, wanted[fqn], write, error)
            unmet += entry.nbytes
            if unmet >= self.files.sizes.met:
                self.group.barrier(error)
                unmet = 0
        self.group.barrier(error)

    def _do(
        self, entry: TensorEntry, parts: Sequence[FilePlan], write: Write, error: CkptError | None
    ) -> CkptError | None:
        """Put one tensor together and write parts of it; gives the first error so far."""
        layout = self._layout(entry)  # all ranks find the same, so all raise or none does
        box = layout.box(entry.shape, layout.mesh.coordinate(self.group.rank))
        shard = bytearray(box.numel * entry.dtype.itemsize)
        try:
            shard = self._shard(entry, box)
        except CkptError as failure:
            error = error or failure
        try:
            whole = self._whole(entry, layout, box, shard)
        except UnsupportedError as failure:  # every rank has it: it lies in shape and layout
            return error or failure
        mine = None if error is not None else (box, crc32(shard))
        differing = None if entry.compared else self._differing(entry.fqn, mine)
        if error is not None or differing is not None:
            return error or differing
        try:
            _check(entry, whole, box, shard)
            write_from_memory(parts, whole, write, self.files.sizes)
        except CkptError as failure:
            return failure
        return None

    def _layout(self, entry: TensorEntry) -> Layout:
        """The layout of a tensor on the mesh of all ranks. Raises UnsupportedError."""
        mesh = self.index.mesh
        layout = None
        if mesh is not None and entry.layout is not None:
            layout = on_mesh(entry.layout, mesh)
        if layout is None:
            raise UnsupportedError(
                f"{entry.fqn}: its mesh is not that of all ranks, nor a named part of it.",
                hint=_IN_ONE_FOLDER,
            )
        return layout

    def _shard(self, entry: TensorEntry, box: Box) -> bytearray:
        """The bytes of this rank's shard, row-major, which must be those of ``box``.

        Raises CheckpointError when the file holds another box, and what reading raises.
        """
        part = self.parts.get(entry.fqn)
        held = None if part is None else part.chunk
        if held is None or (held.box != box and held.box.numel + box.numel > 0):
            raise UnreadableError(f"{entry.fqn}: this rank's file does not hold {box}.")
        alone = TensorEntry(entry.fqn, entry.path, entry.section, entry.dtype, entry.shape, (held,))
        lone = CheckpointIndex(self.index.root, self.index.format, (alone,))
        located = formats.locate(lone, self.files)
        located.require_whole()
        shard, seen = bytearray(), self.seen.add
        for piece in stream_box(located.tensors[0], held.box, files=self.files, on_run=seen):
            shard += piece
        return shard

    def _whole(self, entry: TensorEntry, layout: Layout, box: Box, shard: bytearray) -> Bytes:
        """The bytes of the whole tensor, of shape (…, itemsize).

        Raises UnsupportedError where this torch cannot put such shards together: torch 2.6 asserts
        that strided shards are even.
        """
        import torch

        size = entry.dtype.itemsize
        local = torch.empty((*box.sizes, size), dtype=torch.uint8)
        if shard:
            local = torch.frombuffer(shard, dtype=torch.uint8).view(*box.sizes, size)
        mesh, shape = self._mesh_of(layout.mesh), (*entry.shape, size)
        tensor = devices.dtensor(local.to(self.device_type), layout, mesh, shape=shape)
        try:
            whole: torch.Tensor = tensor.full_tensor()
        except AssertionError as error:
            raise UnsupportedError(
                f"{entry.fqn}: torch {torch.__version__} cannot gather it: {error}",
                hint="Use --engine copy; a newer torch may also work.",
            ) from error
        return np.asarray(whole.cpu().numpy(), dtype=np.uint8)

    def _differing(self, fqn: str, mine: tuple[Box, int] | None) -> UnsupportedError | None:
        """What to say when two ranks hold other values of one box. A collective.

        ``mine`` is the box that this rank holds and its CRC-32, None when that cannot be read.
        """
        import torch.distributed as dist

        held: list[tuple[Box, int] | None] = [None] * self.group.size
        dist.all_gather_object(held, mine)
        first: dict[Box, tuple[int, int]] = {}
        for rank, one in enumerate(held):
            if one is None:
                continue
            box, crc = one
            other, known = first.setdefault(box, (rank, crc))
            if crc != known:
                return replicas_differ({fqn: f"{box} (ranks {other} and {rank})"})
        return None

    def _mesh_of(self, mesh: Mesh) -> DeviceMesh:
        if mesh.size != self.group.size:
            raise UnsupportedError(
                f"The files' mesh {mesh} has {mesh.size} ranks, but {self.group.size} saved them.",
                hint=_IN_ONE_FOLDER,
            )
        if self._mesh is None:
            self._mesh = devices.device_mesh(mesh, self.device_type)
        return self._mesh


def write_from_memory(parts: Sequence[FilePlan], whole: Bytes, write: Write, sizes: Sizes) -> None:
    """Write boxes of a tensor that is in memory, of shape (…, itemsize)."""
    name = "a gathered tensor"
    chunk = Chunk(Box.whole(whole.shape[:-1]), ByteRange(name, 0, whole.nbytes))

    def from_memory(item: WriteItem) -> WriteItem:
        return item._replace(finder=KnownReads((ReadItem(chunk, item.box),)))

    with Files(sizes=sizes) as files:
        files.lend(name, np.ascontiguousarray(whole).reshape(-1).data)
        write([part._replace(items=(*map(from_memory, part.items),)) for part in parts], files)


def _check(entry: TensorEntry, whole: Bytes, box: Box, shard: bytearray) -> None:
    """Raise CheckpointError unless the whole tensor holds this rank's shard where it belongs."""
    mine = whole[tuple(map(slice, box.offsets, box.ends))]
    if whole.shape[:-1] != entry.shape or np.ascontiguousarray(mine).reshape(-1).data != shard:
        raise CheckpointError(
            f"{entry.fqn}: torch's full_tensor does not hold this rank's shard at {box}.",
            hint=_IN_ONE_FOLDER,
        )
