"""What `import ckpt_tools` offers: a checkpoint that can be read from, and one function a verb.

This room only puts together what the others can do, with settings that suit most callers. It
prints nothing and knows neither options nor formats.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

from ckpt_tools import formats, proof
from ckpt_tools.convert.export import ExportOptions, ExportPlan, WriteOptions
from ckpt_tools.core.geometry import Box
from ckpt_tools.core.index import CheckpointIndex, PlainValue, TensorEntry
from ckpt_tools.errors import AnswerNo, UnsupportedError, UsageError
from ckpt_tools.formats import ReadOptions
from ckpt_tools.proof import Diff, DiffOptions, Fingerprint, Naming, Report
from ckpt_tools.storage.reader import Files

if TYPE_CHECKING:
    import numpy as np
    import torch

    from ckpt_tools.convert.reshard import ReshardOptions, ReshardPlan
    from ckpt_tools.proof.stats import Statistics

    Array = np.ndarray[tuple[int, ...], np.dtype[np.generic[object]]]

_READ = ReadOptions()
_EXPORT = ExportOptions()
_WRITE = WriteOptions()
_DIFF = DiffOptions()

# What numpy has no type for. Its complex32 is missing, too, and 4-bit floats come in pairs.
_NUMPY_KINDS = frozenset({"int", "uint", "bool"})
_NUMPY_OTHERS = frozenset({"float16", "float32", "float64", "complex64", "complex128"})


def _ignore(nbytes: int) -> None:
    """Take the news and do nothing."""


@dataclass(frozen=True, slots=True)
class Checkpoint(CheckpointIndex):
    """An index whose entries can be read: of each tensor only the bytes that are asked for."""

    def read(self, fqn: str, box: Box | None = None) -> Array:
        """A tensor, or a box of it in global coordinates, as a new numpy array of its own type.

        Raises AnswerNo for an unknown name, UsageError for a box outside of the tensor,
        UnsupportedError for a type that numpy lacks (bfloat16, float8), and what is wrong with
        the bytes.
        """
        import numpy as np  # late: an index is had without it

        entry = self._entry(fqn)
        if entry.dtype.kind not in _NUMPY_KINDS and entry.dtype.name not in _NUMPY_OTHERS:
            raise UnsupportedError(
                f"{fqn} is of {entry.dtype.name}, which numpy does not have.",
                hint="`read_torch` gives a tensor of any type.",
            )
        wanted = _inside(entry, box)
        data = self._bytes(entry, wanted)
        little = np.dtype(entry.dtype.name).newbyteorder("<")
        return np.frombuffer(data, little).reshape(wanted.sizes)

    def read_torch(self, fqn: str, box: Box | None = None) -> torch.Tensor:
        """A tensor, or a box of it in global coordinates, as a new torch tensor on the CPU.

        Raises what `read` raises, and UnsupportedError for a type that the installed torch lacks.
        """
        import torch  # late: it takes seconds

        entry = self._entry(fqn)
        kind = getattr(torch, entry.dtype.name, None)
        if not isinstance(kind, torch.dtype):
            raise UnsupportedError(f"{fqn} is of {entry.dtype.name}, which this torch lacks.")
        wanted = _inside(entry, box)
        if wanted.numel == 0:
            return torch.empty(wanted.sizes, dtype=kind)
        return torch.frombuffer(self._bytes(entry, wanted), dtype=kind).reshape(wanted.sizes)

    def read_value(self, fqn: str) -> PlainValue:
        """The value of an object: numbers, strings, bools, lists and dicts of them, or None.

        Raises AnswerNo for an unknown name and UnsupportedError for what is no plain value.
        """
        entry = self.object(fqn)
        if entry is None:
            self.select({fqn}).require_whole()
            raise AnswerNo(f"{self.root} has no object {fqn!r}.")
        with Files() as files:
            self.select({fqn}).require_whole()
            found = formats.open_object(self, entry, files)
        if not found.opened:
            what = found.type_name or "too large"
            raise UnsupportedError(f"{fqn} is no plain value, and is not opened: {what}.")
        return found.value

    def _entry(self, fqn: str) -> TensorEntry:
        entry = self.tensor(fqn)
        if entry is None:
            self.select({fqn}).require_whole()
            raise AnswerNo(f"{self.root} has no tensor {fqn!r}.")
        return entry

    def _bytes(self, entry: TensorEntry, box: Box) -> bytearray:
        """The packed elements of a box. Raises what is wrong with the tensor."""
        from ckpt_tools.copying.write import read_box  # late: it needs numpy

        one = self.select({entry.fqn})
        data = bytearray(box.numel * entry.dtype.itemsize)
        with Files() as files:
            located = formats.locate(one, files)
            located.require_whole()
            done = 0
            for piece in read_box(located.tensors[0], box, files=files):
                data[done : done + len(piece)] = piece
                done += len(piece)
        return data


def _inside(entry: TensorEntry, box: Box | None) -> Box:
    """The box, or that of the whole tensor. Raises UsageError for one that is not inside it."""
    whole = Box.whole(entry.shape)
    if box is None:
        return whole
    if len(box.offsets) != len(entry.shape) or len(box.sizes) != len(entry.shape):
        raise UsageError(f"{entry.fqn} has {len(entry.shape)} dimensions, the box {box} does not.")
    if min(box.sizes, default=0) < 0 or not whole.contains(box):
        raise UsageError(f"{box} is not inside of {entry.fqn} with shape {list(entry.shape)}.")
    return box


def open_checkpoint(path: str, *, options: ReadOptions = _READ) -> Checkpoint:
    """The checkpoint that ``path`` means: a file, a directory, or a glob of rank files.

    Only headers are read. What keeps it from being whole is in ``problems``, and raised by
    ``require_whole()``. Raises a CheckpointError for what is no checkpoint at all.
    """
    index = formats.read_index(path, options=options)
    return Checkpoint(
        **{field.name: getattr(index, field.name) for field in fields(index) if field.init}
    )


def export(
    index: CheckpointIndex,
    out: str,
    *,
    options: ExportOptions = _EXPORT,
    write: WriteOptions = _WRITE,
    on_bytes: Callable[[int], None] = _ignore,
) -> ExportPlan:
    """Write whole tensors to the folder or file ``out``, as safetensors or as one torch file.

    ``on_bytes`` is told how many bytes were written since it was last called. Raises what keeps
    the checkpoint from being whole, UsageError for what cannot be meant, WriteError when it cannot
    be written; then ``out`` is as it was.
    """
    from ckpt_tools.distributed import export_engine  # late: few of those who look also write

    job = export_engine.ExportJob(out, write, on_bytes)
    return export_engine.export_here(index, options, job, workers=1)


def reshard(
    index: CheckpointIndex,
    out: str,
    *,
    options: ReshardOptions,
    write: WriteOptions = _WRITE,
    on_bytes: Callable[[int], None] = _ignore,
) -> ReshardPlan:
    """Write a checkpoint as the shards of another mesh to the folder ``out``.

    One process writes a mesh of any size. Raises what `export` raises.
    """
    from ckpt_tools.distributed import copy_engine  # late: few of those who look also write
    from ckpt_tools.distributed.job import Job

    return copy_engine.reshard_here(index, Job(out, options, write, on_bytes), workers=1)


def verify(
    index: CheckpointIndex, *, threads: int | None = None, on_bytes: Callable[[int], None] = _ignore
) -> Report:
    """Read every byte range once, check every CRC and coverage; the report says what is hurt."""
    with Files() as files:
        return proof.verify(index, files, threads=threads, on_bytes=on_bytes)


def verify_quick(index: CheckpointIndex) -> Report:
    """Check a checkpoint by its headers alone; the report says what is hurt."""
    with Files() as files:
        return proof.verify_quick(index, files)


def fingerprint(
    index: CheckpointIndex, *, threads: int | None = None, on_bytes: Callable[[int], None] = _ignore
) -> Fingerprint:
    """Digests of the logical tensors that no format, nesting or sharding changes.

    Raises what keeps the checkpoint from being whole.
    """
    with Files() as files:
        return proof.fingerprint(index, files, threads=threads, on_bytes=on_bytes)


def diff(
    a: CheckpointIndex,
    b: CheckpointIndex,
    *,
    options: DiffOptions = _DIFF,
    threads: int | None = None,
) -> Diff:
    """What is different between two checkpoints of any formats and meshes, values included.

    Raises what keeps either from being whole.
    """
    with Files() as files:
        return proof.diff(a, b, files, options=options, threads=threads)


def diff_headers(a: CheckpointIndex, b: CheckpointIndex, *, naming: Naming | None = None) -> Diff:
    """What is different in names, types and shapes; no values are read."""
    return proof.diff_headers(a, b, naming=Naming() if naming is None else naming)


def stats(
    index: CheckpointIndex, *, threads: int | None = None, on_bytes: Callable[[int], None] = _ignore
) -> Statistics:
    """Mean, spread, extremes and norm of each tensor, and what points at a lost rank.

    Raises what keeps the checkpoint from being whole.
    """
    from ckpt_tools.proof.stats import stats as look  # late: it needs numpy

    with Files() as files:
        return look(index, files, threads=threads, on_bytes=on_bytes)
