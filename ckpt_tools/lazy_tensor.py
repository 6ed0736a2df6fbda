"""A tensor of a checkpoint, known by its headers, and read when it is indexed."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

from ckpt_tools import formats
from ckpt_tools.analysis import summary
from ckpt_tools.analysis.infer_mesh import FoundMesh
from ckpt_tools.copying.origin import reading
from ckpt_tools.copying.read import stream_box
from ckpt_tools.core.crc import KnownCrcs
from ckpt_tools.core.geometry import Box
from ckpt_tools.core.index import CheckpointIndex, Section, TensorEntry
from ckpt_tools.core.indexing import indexed_box, require_inside
from ckpt_tools.core.layout import on_mesh
from ckpt_tools.core.text import format_size
from ckpt_tools.errors import CkptError, UnsupportedError, in_python
from ckpt_tools.proof.damage import require_undamaged
from ckpt_tools.storage.paths import is_address
from ckpt_tools.storage.reader import Files

if TYPE_CHECKING:
    import numpy as np
    import torch

    from ckpt_tools.core.indexing import Selection

    Array = np.ndarray[tuple[int, ...], np.dtype[np.generic[object]]]

# What numpy has no type for. Its complex32 is missing, too, and 4-bit floats come in pairs.
_NUMPY_KINDS = frozenset({"int", "uint", "bool"})
_NUMPY_OTHERS = frozenset({"float16", "float32", "float64", "complex64", "complex128"})
_MOST_CHUNKS = 64  # of a tensor whose values its repr looks at
_ON_CPU = (1, 0)  # kind and number of the device, as DLPack counts them


class LazyTensor:
    """A tensor of a checkpoint that is read when it is indexed: ``checkpoint["name"][0:4, :8]``.

    Indexing gives a torch tensor, and reads the bytes of the chosen part alone. A tensor that is
    read whole is compared with the checksums that the checkpoint keeps of it; a slice cannot be.
    numpy and torch take it where they take an array: ``numpy.asarray``, ``torch.as_tensor``.
    """

    def __init__(
        self, index: CheckpointIndex, entry: TensorEntry, mesh: Callable[[], FoundMesh | None]
    ) -> None:
        self._index = index
        self._mesh = mesh
        self.entry = entry

    @property
    def name(self) -> str:
        """The name of the entry."""
        return self.entry.fqn

    fqn = name

    @property
    def section(self) -> Section:
        """``model``, ``optim`` or ``other``."""
        return self.entry.section

    @property
    def shape(self) -> tuple[int, ...]:
        """The sizes of the whole tensor, however it is cut."""
        return self.entry.shape

    @property
    def ndim(self) -> int:
        """The number of dimensions."""
        return len(self.shape)

    @property
    def dtype(self) -> str:
        """The element type as torch names it: ``bfloat16``."""
        return self.entry.dtype.name

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return self.entry.dtype.itemsize

    @property
    def size(self) -> int:
        """The number of elements, as NumPy has it; torch calls it `numel`."""
        return self.entry.numel

    def numel(self) -> int:
        """The number of elements."""
        return self.entry.numel

    @property
    def nbytes(self) -> int:
        """Bytes of all elements."""
        return self.entry.nbytes

    @property
    def device(self) -> str:
        """``cpu``: where what is read of it lies, as NumPy has it."""
        return "cpu"

    @property
    def chunks(self) -> tuple[tuple[int, ...], ...] | None:
        """The sizes of its parts along each dimension, as dask has them: ``((3, 3, 2), (16,))``.

        None where the parts are no grid.
        """
        boxes = {chunk.box for chunk in self.entry.chunks}
        cuts = [
            sorted({(box.offsets[dim], box.sizes[dim]) for box in boxes})
            for dim in range(self.ndim)
        ]
        sizes = tuple(tuple(size for _, size in along) for along in cuts)
        is_grid = math.prod(map(len, sizes)) == len(boxes) and tuple(map(sum, sizes)) == self.shape
        return sizes if is_grid else None

    @property
    def mesh(self) -> FoundMesh | None:
        """The checkpoint's mesh and how it is known."""
        return self._mesh()

    @property
    def placements(self) -> tuple[str, ...] | None:
        """Its placements on the checkpoint's mesh, e.g. ``("Shard(0)",)``; None if unknown."""
        known = summary.layout_of(self.entry, self._mesh())
        return None if known is None else tuple(summary.placement_names(known[0]))

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that hold elements of it, or where no layout is known those that saved some."""
        boxes = self._boxes()
        if boxes is None:
            return tuple(sorted({c.rank for c in self.entry.chunks if c.rank is not None}))
        return tuple(rank for rank, box in enumerate(boxes) if box.numel)

    def shard(self, rank: int) -> torch.Tensor:
        """The part that a rank holds: what ``DTensor.to_local()`` gives there.

        Raises UnsupportedError where no layout is known, IndexError for a rank outside of the mesh,
        and what `torch` raises.
        """
        boxes = self._boxes()
        if boxes is None:
            raise UnsupportedError(
                f"{self.name}: no layout is known, so none of the part of a rank.",
                hint="`entry.chunks` are the boxes that are stored, and the ranks that saved them.",
            )
        if not 0 <= rank < len(boxes):
            raise IndexError(f"{self.name} lies on {len(boxes)} ranks; there is no rank {rank}.")
        return self.torch(boxes[rank])

    def _boxes(self) -> list[Box] | None:
        """The box of each rank of the checkpoint's mesh, None where no layout is known."""
        found = self._mesh()
        known = summary.layout_of(self.entry, found)
        if known is None:
            return None
        layout = known[0]
        if found is not None and layout.mesh.size != found.mesh.size:
            layout = on_mesh(layout, found.mesh) or layout
        return layout.boxes(self.shape)

    if not TYPE_CHECKING:  # which else would take every name for one of a tensor's

        def __getattr__(self, name: str) -> object:
            """Raise AttributeError, with how to get the values that have more methods."""
            raise AttributeError(
                f"{type(self).__name__!r} object has no attribute {name!r}: it is not read yet; "
                "tensor[:] and tensor.torch() give a torch tensor, tensor.numpy() an array"
            )

    def __len__(self) -> int:
        """The size of the first dimension."""
        if not self.shape:
            raise TypeError(f"{self.name} has no dimensions, so it has no length.")
        return self.shape[0]

    def __getitem__(self, key: Selection) -> torch.Tensor:
        """The part that indexes and slices choose, as torch would. Raises what `torch` raises."""
        box, after = indexed_box(self.entry, key)
        return self.torch(box)[after]

    @in_python()
    def torch(self, box: Box | None = None) -> torch.Tensor:
        """All of it, or a box in global coordinates, as a new torch tensor on the CPU.

        Raises UsageError for a box outside of the tensor, UnsupportedError for a type that the
        installed torch lacks, and what is wrong with the bytes.
        """
        import torch  # late: it takes seconds

        kind = getattr(torch, self.dtype, None)
        if not isinstance(kind, torch.dtype):
            raise UnsupportedError(f"{self.name} is of {self.dtype}, which this torch lacks.")
        wanted = require_inside(self.entry, box)
        if wanted.numel == 0:
            return torch.empty(wanted.sizes, dtype=kind)
        return torch.frombuffer(self._bytes(wanted), dtype=kind).reshape(wanted.sizes)

    @in_python()
    def numpy(self, box: Box | None = None) -> Array:
        """The same as a new numpy array.

        Raises what `torch` raises, and UnsupportedError for a type that numpy lacks (bfloat16,
        float8).
        """
        import numpy as np  # late: an index is had without it

        if self.entry.dtype.kind not in _NUMPY_KINDS and self.dtype not in _NUMPY_OTHERS:
            raise UnsupportedError(
                f"{self.name} is of {self.dtype}, which numpy does not have.",
                hint="`torch` gives a tensor of any type.",
            )
        wanted = require_inside(self.entry, box)
        little = np.dtype(self.dtype).newbyteorder("<")
        return np.frombuffer(self._bytes(wanted), little).reshape(wanted.sizes)

    # As polars, pandas and xarray call them.
    to_torch = torch
    to_numpy = numpy

    def __array__(self, dtype: object = None, copy: bool | None = None) -> Array:  # noqa: FBT001 (numpy's signature)
        """What `numpy.asarray` gives."""
        import numpy as np  # late: an index is had without it

        if copy is None:  # which numpy 1.26 does not take
            return np.asarray(self.numpy(), dtype=dtype)  # type: ignore[call-overload,no-any-return]
        return np.array(self.numpy(), dtype=dtype, copy=copy)  # type: ignore[call-overload,no-any-return]

    def __dlpack__(self, **asked: object) -> object:
        """What `torch.as_tensor` takes: a capsule of all of it."""
        return self.torch().__dlpack__(**asked)  # type: ignore[arg-type]

    def __dlpack_device__(self) -> tuple[int, int]:
        """That the capsule is in the memory of the CPU."""
        return _ON_CPU

    def __repr__(self) -> str:
        """Name, type, shape, size, placements, and the first and last values where a look at them
        is cheap; no value where they cannot be read.
        """
        lies = "" if self.placements is None else f", {', '.join(self.placements)}"
        facts = f"{self.name}: {self.dtype} {list(self.shape)}, {format_size(self.nbytes)}{lies}"
        # A store is asked over a network, a compressed item is inflated as one, and each chunk may
        # be a file to open.
        chunks = self.entry.chunks
        is_dear = len(chunks) > _MOST_CHUNKS or any(chunk.codec == "zstd" for chunk in chunks)
        if is_dear or not self.size or is_address(self._index.root):
            return facts
        try:
            return f"{facts}; {self._sample()}"
        except (CkptError, OSError):
            return facts

    def _sample(self) -> str:
        """``values 0.1 0.2 0.3 … 0.9``: the first three and the last. Raises what is wrong."""
        from ckpt_tools.copying.cast import decode  # late: numpy comes with it

        starts, ones = (0,) * self.ndim, (1,) * self.ndim
        few = (*ones[:-1], min(self.shape[-1], 3)) if self.shape else ()
        ends = tuple(size - 1 for size in self.shape)
        boxes = [Box(starts, few), Box(ends, ones)][: 1 if self.size == math.prod(few) else 2]
        values = [decode(bytes(self._bytes(box)), self.entry.dtype) for box in boxes]
        texts = [" ".join(f"{value:.4g}" for value in part) for part in values]
        between = " " if self.size == math.prod(few) + 1 else " … "
        return f"values {between.join(texts)}"

    def _bytes(self, box: Box) -> bytearray:
        """The packed elements of a box. Raises what is wrong with the tensor.

        What is read whole is compared with the checksums that the checkpoint keeps; a slice is not.
        """
        entry = self.entry
        is_whole, seen = box == Box.whole(entry.shape), KnownCrcs()
        data = bytearray(box.numel * entry.dtype.itemsize)
        held = {one.path for chunk in entry.chunks for one in (chunk.data, *chunk.replicas)}
        unchanged = reading(file for file in self._index.files if file.path in held)
        with unchanged, Files() as files:
            index = self._index.select({entry.fqn})
            located = formats.locate(index, files)
            located.require_whole()
            done = 0
            on_run = seen.add if is_whole else None
            for piece in stream_box(located.tensors[0], box, files=files, on_run=on_run):
                data[done : done + len(piece)] = piece
                done += len(piece)
            if is_whole:
                require_undamaged(index, files, seen=seen, threads=1, lost="")
        return data
