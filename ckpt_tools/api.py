"""What `import ckpt_tools` offers: a checkpoint that can be read from, and one function a verb.

This room only puts together what the others can do, with settings that suit most callers. It
prints nothing and knows neither options nor formats.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Literal

from ckpt_tools import formats
from ckpt_tools.analysis import inspection, summary
from ckpt_tools.analysis.inspection import Inspection
from ckpt_tools.analysis.summary import FoundMesh
from ckpt_tools.convert.export import Export, ExportOptions, ExportPlan, format_of
from ckpt_tools.convert.write import WriteOptions
from ckpt_tools.copying.origin import reading
from ckpt_tools.copying.read import stream_box
from ckpt_tools.core.dtypes import DType, require_dtype
from ckpt_tools.core.geometry import Box
from ckpt_tools.core.index import CheckpointIndex, ObjectEntry, Section, TensorEntry
from ckpt_tools.core.indexing import indexed_box, require_inside
from ckpt_tools.core.known_crcs import KnownCrcs
from ckpt_tools.core.layout import Mesh
from ckpt_tools.core.mesh_spec import parse_mesh
from ckpt_tools.core.names import no_such_entry
from ckpt_tools.core.plain_values import PickledValue, PlainValue
from ckpt_tools.core.progress import Listener, ignore_bytes
from ckpt_tools.core.text import format_size
from ckpt_tools.errors import CheckpointError, NoSuchEntry, UnsupportedError, UsageError
from ckpt_tools.formats import ReadOptions
from ckpt_tools.proof import diff as _diff
from ckpt_tools.proof import fingerprint as _fingerprint
from ckpt_tools.proof import verify as _verify
from ckpt_tools.proof.damage import require_undamaged
from ckpt_tools.proof.diff import Diff
from ckpt_tools.proof.diff_options import DiffOptions
from ckpt_tools.proof.fingerprint import Fingerprint
from ckpt_tools.proof.look import look
from ckpt_tools.proof.verify import VerifyReport
from ckpt_tools.storage.reader import Files

if TYPE_CHECKING:
    import numpy as np
    import torch

    from ckpt_tools.convert.reshard import ReshardOptions, ReshardPlan
    from ckpt_tools.core.indexing import Selection
    from ckpt_tools.proof.stats import Statistics

    Array = np.ndarray[tuple[int, ...], np.dtype[np.generic[object]]]

_READ = ReadOptions()
_EXPORT = ExportOptions()
_WRITE = WriteOptions()
_DIFF = DiffOptions()

# What numpy has no type for. Its complex32 is missing, too, and 4-bit floats come in pairs.
_NUMPY_KINDS = frozenset({"int", "uint", "bool"})
_NUMPY_OTHERS = frozenset({"float16", "float32", "float64", "complex64", "complex128"})


class LazyTensor:
    """A tensor of a checkpoint that is read when it is indexed: ``checkpoint["name"][0:4, :8]``.

    Indexing gives a torch tensor, and reads the bytes of the chosen part alone. A tensor that is
    read whole is compared with the checksums that the checkpoint keeps of it; a slice cannot be.
    """

    def __init__(self, checkpoint: Checkpoint, entry: TensorEntry) -> None:
        self._checkpoint = checkpoint
        self.entry = entry

    @property
    def name(self) -> str:
        """The name of the entry."""
        return self.entry.fqn

    @property
    def shape(self) -> tuple[int, ...]:
        """The sizes of the whole tensor, however it is cut."""
        return self.entry.shape

    @property
    def dtype(self) -> str:
        """The element type as torch names it: ``bfloat16``."""
        return self.entry.dtype.name

    @property
    def placements(self) -> tuple[str, ...] | None:
        """Its placements on the checkpoint's mesh, e.g. ``("Shard(0)",)``; None if unknown."""
        known = summary.layout_of(self.entry, self._checkpoint.mesh)
        return None if known is None else tuple(summary.placement_names(known[0]))

    def __len__(self) -> int:
        """The size of the first dimension."""
        if not self.shape:
            raise TypeError(f"{self.name} has no dimensions, so it has no length.")
        return self.shape[0]

    def __getitem__(self, key: Selection) -> torch.Tensor:
        """The part that indexes and slices choose, as torch would. Raises what `read` raises."""
        box, after = indexed_box(self.entry, key)
        return self._checkpoint.read_torch(self.name, box)[after]

    def torch(self) -> torch.Tensor:
        """The whole tensor."""
        return self._checkpoint.read_torch(self.name)

    def numpy(self) -> Array:
        """The whole tensor as a numpy array. Raises UnsupportedError for types that numpy lacks."""
        return self._checkpoint.read(self.name)

    def __array__(self, dtype: object = None, copy: bool | None = None) -> Array:  # noqa: FBT001 (numpy's signature)
        """What `numpy.asarray` gives."""
        import numpy as np  # late: an index is had without it

        if copy is None:  # which numpy 1.26 does not take
            return np.asarray(self.numpy(), dtype=dtype)  # type: ignore[call-overload,no-any-return]
        return np.array(self.numpy(), dtype=dtype, copy=copy)  # type: ignore[call-overload,no-any-return]

    def __repr__(self) -> str:
        """Name, type, shape, size and placements; no value is read."""
        lies = "" if self.placements is None else f", {', '.join(self.placements)}"
        size = format_size(self.entry.nbytes)
        return f"{self.name}: {self.dtype} {list(self.shape)}, {size}{lies}"


Source = str | os.PathLike[str] | CheckpointIndex


class Checkpoint:
    """A checkpoint whose headers were read: ``len``, ``in``, iteration and ``[name]`` by names.

    ``index`` is all that headers say. Of a tensor only the bytes that are asked for are read.
    """

    def __init__(self, index: CheckpointIndex) -> None:
        self.index = index

    @property
    def root(self) -> str:
        """Its path or address."""
        return self.index.root

    @property
    def format(self) -> str:
        """``dcp``, ``ranks``, ``safetensors`` or ``torch``."""
        return self.index.format

    @property
    def tensors(self) -> tuple[TensorEntry, ...]:
        """Every tensor, by name."""
        return self.index.tensors

    @property
    def objects(self) -> tuple[ObjectEntry, ...]:
        """Everything that is no tensor, by name."""
        return self.index.objects

    @property
    def problems(self) -> tuple[CheckpointError, ...]:
        """What keeps it from being whole, as far as headers tell."""
        return self.index.problems

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes for people on how it was read."""
        return self.index.notes

    @property
    def world_size(self) -> int | None:
        """How many ranks saved it, where that is known."""
        return self.index.world_size

    @cached_property
    def mesh(self) -> FoundMesh | None:
        """The mesh and how it is known: its ``status`` is ``confirmed`` or ``inferred``."""
        return summary.mesh_of(self.index)

    def tensor(self, name: str) -> TensorEntry | None:
        """What headers say of the tensor of this name, or None."""
        return self.index.tensor(name)

    def require_whole(self) -> None:
        """Raise what keeps the checkpoint from being whole; do nothing when it is."""
        self.index.require_whole()

    def select(self, fqns: Collection[str]) -> Checkpoint:
        """The same checkpoint with only these tensors and objects."""
        return Checkpoint(self.index.select(fqns))

    def inspect(self) -> Inspection:
        """What it is: whole or not, resumable or not, step, age, mesh, sizes, optimizer."""
        return look(self.index)

    def verify(self) -> VerifyReport:
        """Read every byte once and say what is damaged."""
        return verify(self)

    def export(
        self,
        out: str | os.PathLike[str],
        *,
        dtype: str | DType | torch.dtype | None = None,
        only: Section | Literal["all"] | None = None,
        force: bool = False,
        check: bool = False,
    ) -> ExportPlan:
        """Write whole tensors to the folder or file ``out``, as the function `export` does."""
        return export(self, out, dtype=dtype, only=only, force=force, check=check)

    def reshard(
        self, out: str | os.PathLike[str], to_mesh: str | int | Mesh, *, force: bool = False
    ) -> ReshardPlan:
        """Write the shards of another mesh, as the function `reshard` does."""
        return reshard(self, out, to_mesh, force=force)

    def __len__(self) -> int:
        """Number of tensors and objects."""
        return len(self.tensors) + len(self.objects)

    def __iter__(self) -> Iterator[str]:
        """The names of tensors and objects, sorted."""
        return iter(sorted(entry.fqn for entry in self.index.entries))

    def keys(self) -> list[str]:
        """The names of tensors and objects, sorted."""
        return list(self)

    def __contains__(self, name: object) -> bool:
        """Whether there is a tensor or an object of this name."""
        index = self.index
        return isinstance(name, str) and bool(index.tensor(name) or index.object(name))

    def __getitem__(self, name: str) -> LazyTensor | PlainValue:
        """A tensor that is read when it is indexed, or the value of an object.

        Raises NoSuchEntry, which is a KeyError, and what `read_value` raises.
        """
        entry = self.index.tensor(name)
        if entry is not None:
            return LazyTensor(self, entry)
        if name not in self:
            raise self._unknown(name, "entry")
        return self.read_value(name)

    def __repr__(self) -> str:
        """A few lines: what it is and what it holds."""
        return str(inspection.inspect(self.index, step=None, saved=None))

    def _repr_html_(self) -> str:
        """The same for a notebook, with the first tensors."""
        return inspection.html_of(self.index, repr(self))

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
        wanted = require_inside(entry, box)
        little = np.dtype(entry.dtype.name).newbyteorder("<")
        return np.frombuffer(self._bytes(entry, wanted), little).reshape(wanted.sizes)

    def read_torch(self, fqn: str, box: Box | None = None) -> torch.Tensor:
        """A tensor, or a box of it in global coordinates, as a new torch tensor on the CPU.

        Raises what `read` raises, and UnsupportedError for a type that the installed torch lacks.
        """
        import torch  # late: it takes seconds

        entry = self._entry(fqn)
        kind = getattr(torch, entry.dtype.name, None)
        if not isinstance(kind, torch.dtype):
            raise UnsupportedError(f"{fqn} is of {entry.dtype.name}, which this torch lacks.")
        wanted = require_inside(entry, box)
        if wanted.numel == 0:
            return torch.empty(wanted.sizes, dtype=kind)
        return torch.frombuffer(self._bytes(entry, wanted), dtype=kind).reshape(wanted.sizes)

    def read_value(self, fqn: str) -> PlainValue:
        """The value of an object: numbers, strings, bools, lists and dicts of them, or None.

        In a list or a dict, a value of another class is a `PickledValue`.

        Raises AnswerNo for an unknown name and UnsupportedError for what is no plain value.
        """
        entry = self.index.object(fqn)
        if entry is None:
            raise self._unknown(fqn, "object")
        self.index.select({fqn}).require_whole()
        with self._reading({entry.data.path}), Files() as files:
            opened = formats.open_object(self.index, entry, files)
        closed = opened.value if isinstance(opened.value, PickledValue) else None
        if not opened.opened or closed is not None:
            what = opened.type_name or "too large" if closed is None else closed.qualname
            raise UnsupportedError(f"{fqn} is not a plain value and was not opened: {what}.")
        return opened.value

    def _entry(self, fqn: str) -> TensorEntry:
        entry = self.index.tensor(fqn)
        if entry is None:
            raise self._unknown(fqn, "tensor")
        return entry

    def _bytes(self, entry: TensorEntry, box: Box) -> bytearray:
        """The packed elements of a box. Raises what is wrong with the tensor.

        What is read whole is compared with the checksums that the checkpoint keeps; a slice is not.
        """
        is_whole, seen = box == Box.whole(entry.shape), KnownCrcs()
        data = bytearray(box.numel * entry.dtype.itemsize)
        held = {one.path for chunk in entry.chunks for one in (chunk.data, *chunk.replicas)}
        with self._reading(held), Files() as files:
            index = self.index.select({entry.fqn})
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

    def _reading(self, held: Collection[str]) -> AbstractContextManager[None]:
        """Raises UnreadableError when one of these files is not as it was when it was opened."""
        return reading(file for file in self.index.files if file.path in held)

    def _unknown(self, fqn: str, noun: str) -> NoSuchEntry:
        """The error for a name that does not exist. Raises what is wrong when the name is lost."""
        self.index.select({fqn}).require_whole()
        return no_such_entry(self.index, fqn, noun)


def _index(source: Source | Checkpoint) -> CheckpointIndex:
    """The index of a path or of a checkpoint that is open."""
    if isinstance(source, Checkpoint):
        return source.index
    if isinstance(source, CheckpointIndex):
        return source
    return formats.read_index(os.fspath(source))


def open_checkpoint(path: str | os.PathLike[str], *, options: ReadOptions = _READ) -> Checkpoint:
    """The checkpoint that ``path`` means: a file, a directory, or a glob of rank files.

    Only headers are read. What keeps it from being whole is in ``problems``, and raised by
    ``require_whole()``. Raises a CheckpointError for what is no checkpoint at all.
    """
    return Checkpoint(formats.read_index(os.fspath(path), options=options))


def inspect(source: Source | Checkpoint) -> Inspection:
    """What a checkpoint is: whole or not, resumable or not, step, age, mesh, sizes, optimizer."""
    return look(_index(source))


def export(  # noqa: PLR0913 (what people set by its name, beside the rest in options)
    source: Source | Checkpoint,
    out: str | os.PathLike[str],
    *,
    dtype: str | DType | torch.dtype | None = None,
    only: Section | Literal["all"] | None = None,
    force: bool = False,
    check: bool = False,
    options: ExportOptions | None = None,
    write: WriteOptions = _WRITE,
    on_bytes: Callable[[int], None] = ignore_bytes,
) -> ExportPlan:
    """Write whole tensors to the folder or file ``out``, as safetensors or as one torch file.

    Without ``options`` the ending of ``out`` says the format. ``dtype``, ``only``, ``force`` and
    ``check`` come before what ``options`` and ``write`` say. ``on_bytes`` is called with how many
    bytes were written since the last call. Raises what keeps the checkpoint from being whole,
    UsageError for what cannot be meant, WriteError when it cannot be written; then ``out`` is as it
    was.
    """
    from ckpt_tools.distributed.run import write_here  # late: few also write

    path = os.fspath(out)
    if options is None:
        options = replace(_EXPORT, format=format_of(path) or _EXPORT.format)
    if dtype is not None:
        options = replace(options, dtype=require_dtype(dtype))
    if only is not None:
        options = replace(options, only=None if only == "all" else only)
    write = replace(write, force=force or write.force, check=check or write.check)
    conversion = Export(_index(source), path, write, options)
    return write_here(conversion, listener=Listener(on_bytes))


def reshard(  # noqa: PLR0913 (what people set by its name, beside the rest in options)
    source: Source | Checkpoint,
    out: str | os.PathLike[str],
    to_mesh: str | int | Mesh | None = None,
    *,
    dtype: str | DType | torch.dtype | None = None,
    force: bool = False,
    check: bool = False,
    options: ReshardOptions | None = None,
    write: WriteOptions = _WRITE,
    on_bytes: Callable[[int], None] = ignore_bytes,
) -> ReshardPlan:
    """Write a checkpoint as the shards of another mesh, such as ``"4x8"``, to the folder ``out``.

    The mesh is ``to_mesh`` or that of the options. One process writes a mesh of any size. Raises
    what `export` raises.
    """
    from ckpt_tools.convert.reshard import Reshard, ReshardOptions  # late: few also write
    from ckpt_tools.distributed.run import write_here

    if to_mesh is not None and options is None:
        options = ReshardOptions(to_mesh if isinstance(to_mesh, Mesh) else parse_mesh(str(to_mesh)))
    elif to_mesh is not None or options is None:
        raise UsageError("reshard takes a mesh, for example '4x8', or options with one.")
    if dtype is not None:
        options = replace(options, dtype=require_dtype(dtype))
    write = replace(write, force=force or write.force, check=check or write.check)
    conversion = Reshard(_index(source), os.fspath(out), write, options)
    return write_here(conversion, listener=Listener(on_bytes))


def verify(
    source: Source | Checkpoint,
    *,
    threads: int | None = None,
    on_bytes: Callable[[int], None] = ignore_bytes,
) -> VerifyReport:
    """Read every byte range once, check every CRC and coverage; the report says what is damaged."""
    with Files() as files:
        return _verify.verify(_index(source), files, threads=threads, on_bytes=on_bytes)


def verify_quick(source: Source | Checkpoint) -> VerifyReport:
    """Check a checkpoint by its headers alone; the report says what is damaged."""
    with Files() as files:
        return _verify.verify_quick(_index(source), files)


def fingerprint(
    source: Source | Checkpoint,
    *,
    threads: int | None = None,
    on_bytes: Callable[[int], None] = ignore_bytes,
) -> Fingerprint:
    """Digests of the logical tensors that no format, nesting or sharding changes.

    Raises what keeps the checkpoint from being whole.
    """
    with Files() as files:
        return _fingerprint.fingerprint(_index(source), files, threads=threads, on_bytes=on_bytes)


def diff(
    a: Source | Checkpoint,
    b: Source | Checkpoint,
    *,
    options: DiffOptions = _DIFF,
    threads: int | None = None,
) -> Diff:
    """What is different between two checkpoints of any formats and meshes, values included.

    Raises what keeps either from being whole.
    """
    with Files() as files:
        return _diff.diff(_index(a), _index(b), files, options=options, threads=threads)


def diff_headers(
    a: Source | Checkpoint, b: Source | Checkpoint, *, options: DiffOptions = _DIFF
) -> Diff:
    """What is different in names, types and shapes; no values are read, so of the options those on
    names count.
    """
    return _diff.diff_headers(_index(a), _index(b), options=options)


def stats(
    source: Source | Checkpoint,
    *,
    threads: int | None = None,
    on_bytes: Callable[[int], None] = ignore_bytes,
) -> Statistics:
    """Mean, spread, extremes and norm of each tensor, and what points at a lost rank.

    Raises what keeps the checkpoint from being whole.
    """
    from ckpt_tools.proof.stats import stats as look  # late: it needs numpy

    with Files() as files:
        return look(_index(source), files, threads=threads, on_bytes=on_bytes)
