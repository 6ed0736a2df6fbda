"""What `import ckpt_tools` offers: a checkpoint that can be read from, and one function a verb.

This room only puts together what the others can do, with settings that suit most callers. It
prints nothing and knows neither options nor formats.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, KeysView, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Literal, TypeVar

from ckpt_tools import formats
from ckpt_tools.analysis import inspection, summary
from ckpt_tools.analysis.infer_mesh import FoundMesh
from ckpt_tools.analysis.inspection import Inspection
from ckpt_tools.convert.export import Export, ExportOptions, ExportPlan, format_of
from ckpt_tools.convert.write import EntryOptions, WriteOptions
from ckpt_tools.copying.origin import reading
from ckpt_tools.core.dtypes import DType, require_dtype
from ckpt_tools.core.index import (
    SECTIONS,
    CheckpointIndex,
    Entry,
    ObjectEntry,
    Section,
    TensorEntry,
)
from ckpt_tools.core.layout import Mesh
from ckpt_tools.core.mesh_spec import FSDP2_NAMES, parse_mesh
from ckpt_tools.core.names import NamePatterns, no_such_entry, selector
from ckpt_tools.core.plain_values import PickledValue, PlainValue
from ckpt_tools.core.progress import Listener, ignore_bytes
from ckpt_tools.core.records import Json
from ckpt_tools.core.state_tree import nested
from ckpt_tools.core.text import some
from ckpt_tools.errors import CheckpointError, NoSuchEntry, UnsupportedError, UsageError, in_python
from ckpt_tools.formats import ReadOptions
from ckpt_tools.lazy_tensor import LazyTensor
from ckpt_tools.proof import diff as _diff
from ckpt_tools.proof import fingerprint as _fingerprint
from ckpt_tools.proof import verify as _verify
from ckpt_tools.proof.diff import Diff
from ckpt_tools.proof.diff_options import DiffOptions
from ckpt_tools.proof.fingerprint import Fingerprint
from ckpt_tools.proof.look import look
from ckpt_tools.proof.verify import VerifyReport
from ckpt_tools.storage.reader import Files

if TYPE_CHECKING:
    import torch

    from ckpt_tools.convert.reshard import ReshardOptions, ReshardPlan
    from ckpt_tools.proof.stats import Statistics
    from ckpt_tools.transforms.frameworks import FrameworkLayout

_READ = ReadOptions()
_EXPORT = ExportOptions()
_WRITE = WriteOptions()
_DIFF = DiffOptions()
_MOST_NAMES = 10  # that are shown of all
Source = str | os.PathLike[str] | CheckpointIndex
Patterns = str | Iterable[str]
Entries = TypeVar("Entries", bound=EntryOptions)


def _read(source: Source, options: ReadOptions = _READ) -> CheckpointIndex:
    if isinstance(source, CheckpointIndex):
        return source
    return formats.read_index(os.fspath(source), options=options)


def _index(source: Source | Checkpoint) -> CheckpointIndex:
    """The index of a path or of a checkpoint that is open."""
    return source.index if isinstance(source, Checkpoint) else _read(source)


@in_python()
def inspect(source: Source | Checkpoint) -> Inspection:
    """What a checkpoint is: whole or not, resumable or not, step, age, mesh, sizes, optimizer."""
    return look(_index(source))


@in_python()
def latest(run: str | os.PathLike[str], *, complete: bool = False) -> str:
    """The path of the last step in a folder of several checkpoints, whole or not.

    With ``complete`` it is the last one that `verify_quick` calls whole; a lone checkpoint is
    itself. Raises AnswerNo when there is none, UnreadableError when several are of that step.
    """
    path = os.fspath(run)
    if not complete:
        return formats.of_step(path, None)
    from ckpt_tools.proof.latest import latest_complete  # late: few ask for it

    return latest_complete(path).path


@in_python()
def export(  # noqa: PLR0913 (what people set by its name, beside the rest in options)
    source: Source | Checkpoint,
    out: str | os.PathLike[str],
    *,
    dtype: str | DType | torch.dtype | None = None,
    only: Section | Literal["all"] | None = None,
    include: Patterns = (),
    exclude: Patterns = (),
    hf_assets: str | os.PathLike[str] | None = None,
    force: bool = False,
    check: bool = False,
    options: ExportOptions | None = None,
    write: WriteOptions = _WRITE,
    on_bytes: Callable[[int], None] = ignore_bytes,
) -> ExportPlan:
    """Write whole tensors to the folder or file ``out``, as safetensors or as one torch file.

    Without ``options`` the ending of ``out`` says the format. ``include`` and ``exclude`` are globs
    on names, ``hf_assets`` the folder of a model on the hub, whose config and tokenizer go along.
    What is given here comes before what ``options`` and ``write`` say. ``on_bytes`` is called with
    how many bytes were written since the last call. Raises what keeps the checkpoint from being
    whole, UsageError for what cannot be meant, WriteError when it cannot be written; then ``out``
    is as it was.
    """
    from ckpt_tools.distributed.run import write_here  # late: few also write

    path, index = os.fspath(out), _index(source)
    if options is None:
        options = replace(_EXPORT, format=format_of(path) or _EXPORT.format)
    if only is not None:
        options = replace(options, only=None if only == "all" else only)
    options = _chosen(options, dtype, include, exclude)
    if hf_assets is not None:
        from ckpt_tools.transforms.hf_folder import AssetsTransform, asset_config  # late: few have

        folder = os.fspath(hf_assets)
        assets = AssetsTransform(folder, asset_config(folder), index)
        options = replace(options, steps=(*options.steps, assets))
    write = replace(write, force=force or write.force, check=check or write.check)
    return write_here(Export(index, path, write, options), listener=Listener(on_bytes))


def _chosen(
    options: Entries,
    dtype: str | DType | torch.dtype | None,
    include: Patterns,
    exclude: Patterns,
) -> Entries:
    """The options, with what was given by its name."""
    if dtype is not None:
        options = replace(options, dtype=require_dtype(dtype))
    if include:
        options = replace(options, include=_patterns(include))
    if exclude:
        options = replace(options, exclude=_patterns(exclude))
    return options


def _patterns(given: Patterns) -> tuple[str, ...]:
    return (given,) if isinstance(given, str) else tuple(given)


@in_python()
def reshard(  # noqa: PLR0913 (what people set by its name, beside the rest in options)
    source: Source | Checkpoint,
    out: str | os.PathLike[str],
    to_mesh: str | int | Sequence[int] | Mesh | None = None,
    *,
    layout: FrameworkLayout | None = None,
    dtype: str | DType | torch.dtype | None = None,
    only: Section | Literal["all"] | None = None,
    include: Patterns = (),
    exclude: Patterns = (),
    force: bool = False,
    check: bool = False,
    options: ReshardOptions | None = None,
    write: WriteOptions = _WRITE,
    on_bytes: Callable[[int], None] = ignore_bytes,
) -> ReshardPlan:
    """Write a checkpoint as the shards of another mesh to the folder ``out``.

    The mesh is ``to_mesh``, such as ``"4x8"``, ``(4, 8)`` or ``32``, or that of the options;
    without one, a part or a cast of a checkpoint keeps the source's own boxes. ``layout`` is the
    framework whose loader reads the output. One process writes a mesh of any size.
    Raises what `export` raises.
    """
    from ckpt_tools.convert.reshard import Reshard, ReshardOptions  # late: few also write
    from ckpt_tools.distributed.run import write_here
    from ckpt_tools.transforms.frameworks import row_of, shards_format

    if to_mesh is not None and options is None:
        options = ReshardOptions(mesh=_mesh(to_mesh, row_of(layout).mesh_names))
    elif options is None and layout is None and (dtype or only or include or exclude):
        options = ReshardOptions()
    elif to_mesh is not None or options is None:
        raise UsageError("reshard takes a mesh, for example '4x8', or options with one.")
    if layout is not None:
        form = shards_format(layout, options.format)
        options = replace(options, layout=layout, format=form)
    if only is not None:
        options = replace(options, only=None if only == "all" else only)
    options = _chosen(options, dtype, include, exclude)
    write = replace(write, force=force or write.force, check=check or write.check)
    conversion = Reshard(_index(source), os.fspath(out), write, options)
    return write_here(conversion, listener=Listener(on_bytes))


@in_python()
def average(  # noqa: PLR0913 (what people set by its name)
    sources: Iterable[Source | Checkpoint],
    out: str | os.PathLike[str],
    to_mesh: str | int | Sequence[int] | Mesh | None = None,
    *,
    weights: Iterable[float] | None = None,
    ema: float | None = None,
    include: Patterns = (),
    exclude: Patterns = (),
    force: bool = False,
    check: bool = False,
    write: WriteOptions = _WRITE,
    on_bytes: Callable[[int], None] = ignore_bytes,
) -> ExportPlan | ReshardPlan:
    """Write the average of the weights of checkpoints of one model, the oldest first, to ``out``.

    Sums are in float64, in this order. ``weights`` are divided by their sum; ``ema`` is the decay
    of a moving average. ``out`` is as `export` writes it, with ``to_mesh`` as `reshard` does.
    Raises what these raise, and UnsupportedError for checkpoints that are not of one model.
    """
    from ckpt_tools.convert.average import Weighting, average_of  # late: few also write
    from ckpt_tools.distributed.run import write_here

    mesh = None if to_mesh is None else _mesh(to_mesh)
    weighting = Weighting(weights=None if weights is None else (*weights,), ema=ema)
    write = replace(write, force=force or write.force, check=check or write.check)
    indexes = [*map(_index, sources)]
    names = NamePatterns(include=_patterns(include), exclude=_patterns(exclude))
    conversion = average_of(indexes, os.fspath(out), write, weighting, mesh, names)
    return write_here(conversion, listener=Listener(on_bytes))


def _mesh(given: str | int | Sequence[int] | Mesh, unnamed: tuple[str, ...] = FSDP2_NAMES) -> Mesh:
    if isinstance(given, Mesh):
        return given
    if not isinstance(given, (str, int)):
        given = "x".join(map(str, given))
    return parse_mesh(str(given), unnamed)


@in_python()
def verify(
    source: Source | Checkpoint,
    *,
    threads: int | None = None,
    on_bytes: Callable[[int], None] = ignore_bytes,
) -> VerifyReport:
    """Read every byte range once, check every CRC and coverage; the report says what is damaged."""
    with Files() as files:
        return _verify.verify(_index(source), files, threads=threads, on_bytes=on_bytes)


@in_python()
def verify_quick(source: Source | Checkpoint) -> VerifyReport:
    """Check a checkpoint by its headers alone; the report says what is damaged."""
    with Files() as files:
        return _verify.verify_quick(_index(source), files)


@in_python()
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


@in_python()
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


@in_python()
def diff_headers(
    a: Source | Checkpoint, b: Source | Checkpoint, *, options: DiffOptions = _DIFF
) -> Diff:
    """What is different in names, types and shapes; no values are read, so of the options those on
    names count.
    """
    return _diff.diff_headers(_index(a), _index(b), options=options)


@in_python()
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


class _Names(KeysView[str]):
    def __repr__(self) -> str:
        """The first names, and how many more there are."""
        return f"KeysView({some(list(self), _MOST_NAMES)})"


class Checkpoint(Mapping[str, LazyTensor]):
    """A checkpoint whose headers were read: its tensors by name, as in a dict.

    ``index`` is all that headers say. Of a tensor only the bytes that are asked for are read, and
    no file is held open. What is no tensor is in ``objects``, and `value` reads it. Equal is only
    the same object: `diff` compares two checkpoints.
    """

    def __init__(self, source: Source, *, options: ReadOptions = _READ) -> None:
        self.index = _read(source, options)

    @property
    def path(self) -> str:
        """Its path or address."""
        return self.index.root

    @property
    def format(self) -> str:
        """``dcp``, ``ranks``, ``safetensors`` or ``torch``."""
        return self.index.format

    @property
    def framework(self) -> str | None:
        """The framework whose folder it is, None for any other."""
        return self.index.framework

    @property
    def files(self) -> tuple[str, ...]:
        """The paths of the files that it is read from."""
        return tuple(file.path for file in self.index.files)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(entry.nbytes for entry in self.index.tensors)

    @property
    def tensors(self) -> tuple[LazyTensor, ...]:
        """Every tensor, by name."""
        return tuple(map(self._lazy, self.index.tensors))

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

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that saved something of its tensors, where that is known."""
        chunks = (chunk for entry in self.index.tensors for chunk in entry.chunks)
        return tuple(sorted({chunk.rank for chunk in chunks if chunk.rank is not None}))

    @cached_property
    def mesh(self) -> FoundMesh | None:
        """The mesh and how it is known: its ``status`` is ``confirmed`` or ``inferred``."""
        return summary.mesh_of(self.index)

    @cached_property
    def step(self) -> int | None:
        """The step of the training at which it was saved; None where it does not say."""
        found = look(self.index).step
        return None if found is None else found.value

    @property
    def can_resume(self) -> bool:
        """Whether headers tell of all that training needs to go on; `inspect` says why not."""
        return summary.resume_verdict(self.index).yes

    @property
    def sections(self) -> tuple[Section, ...]:
        """Those of ``model``, ``optim`` and ``other`` that are not empty."""
        held = {entry.section for entry in self.index.entries}
        return tuple(section for section in SECTIONS if section in held)

    @property
    def model(self) -> Checkpoint:
        """The same checkpoint with the model alone, under the same names."""
        return self._only("model")

    @property
    def optim(self) -> Checkpoint:
        """The same with the optimizer alone."""
        return self._only("optim")

    def _only(self, section: Section) -> Checkpoint:
        held = {entry.fqn for entry in self.index.entries if entry.section == section}
        return Checkpoint(self.index.select(held))

    @in_python()
    def require_whole(self) -> None:
        """Raise what keeps the checkpoint from being whole; do nothing when it is."""
        self.index.require_whole()

    @in_python()
    def select(self, include: Patterns, *, exclude: Patterns = ()) -> Checkpoint:
        """The same checkpoint with the tensors and objects of these names.

        Names are as they stand, globs (``"*.fc1.*"``) or regular expressions after ``re:``. Raises
        NoSuchEntry, which is a KeyError, for one that chooses nothing.
        """
        chosen = set(self._named(include)) - set(self._named(exclude))
        return Checkpoint(self.index.select(chosen))

    def _named(self, patterns: Patterns) -> Iterator[str]:
        every = [entry.fqn for entry in self.index.entries]
        known = {*every, *self.index.lost}
        for pattern in [patterns] if isinstance(patterns, str) else patterns:
            found = [pattern] if pattern in known else list(filter(selector([pattern], []), every))
            if not found:
                raise self._unknown(pattern, "entry")
            yield from found

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Every tensor by its name, read whole: the memory for all of them is needed at once."""
        return {name: tensor.torch() for name, tensor in self.items()}

    @in_python()
    def value(self, name: str) -> PlainValue:
        """The value of an object: numbers, strings, bools, lists and dicts of them, or None.

        In a list or a dict, a value of another class is a `PickledValue`. Raises NoSuchEntry for an
        unknown name and UnsupportedError for what is no plain value.
        """
        entry = self.index.object(name)
        if entry is None:
            raise self._unknown(name, "object")
        index = self.index.select({name})
        index.require_whole()
        unchanged = reading(file for file in index.files if file.path == entry.data.path)
        with unchanged, Files() as files:
            opened = formats.open_object(self.index, entry, files)
        closed = opened.value if isinstance(opened.value, PickledValue) else None
        if not opened.opened or closed is not None:
            what = opened.type_name or "too large" if closed is None else closed.qualname
            raise UnsupportedError(f"{name} is not a plain value and was not opened: {what}.")
        return opened.value

    def get_tensor(self, name: str) -> torch.Tensor:
        """A whole tensor: the name that safetensors' ``safe_open`` has for it."""
        return self[name].torch()

    def get_slice(self, name: str) -> LazyTensor:
        """A tensor to be indexed: the name that safetensors' ``safe_open`` has for it."""
        return self[name]

    def metadata(self) -> dict[str, str]:
        """What headers say beside tensors: safetensors' ``__metadata__``; else it is empty."""
        return {} if self.index.strings is None else dict(self.index.strings.same)

    def keys(self) -> KeysView[str]:
        """The names of all tensors, sorted."""
        return _Names(self)

    # The functions above, with this checkpoint as their first argument.
    inspect = inspect
    info = inspect  # as pandas, xarray and zarr call it
    verify = verify
    verify_quick = verify_quick
    fingerprint = fingerprint
    stats = stats
    diff = diff
    export = export
    reshard = reshard

    def __len__(self) -> int:
        """The number of tensors."""
        return len(self.index.tensors)

    def __iter__(self) -> Iterator[str]:
        """The names of all tensors, sorted."""
        return (entry.fqn for entry in self.index.tensors)

    def __contains__(self, name: object) -> bool:
        """Whether there is a tensor of this name."""
        return isinstance(name, str) and self.index.tensor(name) is not None

    @in_python()
    def __getitem__(self, name: str) -> LazyTensor:
        """A tensor that is read when it is indexed. Raises NoSuchEntry, which is a KeyError."""
        entry = self.index.tensor(name)
        if entry is None:
            raise self._unknown(name, "tensor")
        return self._lazy(entry)

    def _lazy(self, entry: TensorEntry) -> LazyTensor:
        return LazyTensor(self.index, entry, lambda: self.mesh)

    def __eq__(self, other: object) -> bool:
        """Whether it is the same object."""
        return self is other

    def __hash__(self) -> int:
        """That of the object."""
        return id(self)

    def __enter__(self) -> Checkpoint:
        """Itself: no file is held open."""
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing: no file is held open."""

    def to_dict(self) -> dict[str, Json]:
        """What `inspect` says, as its command prints it with ``--json``."""
        return self.inspect().to_dict()

    def close(self) -> None:
        """Nothing: no file is held open."""

    def __repr__(self) -> str:
        """A few lines: what it is and what it holds."""
        return str(inspection.inspect(self.index, step=None, saved=None))

    def _repr_html_(self) -> str:
        """The same for a notebook, with the first tensors."""
        return inspection.html_of(self.index, repr(self))

    def _unknown(self, fqn: str, noun: str) -> NoSuchEntry:
        """The error for a name that does not exist. Raises what is wrong when the name is lost."""
        self.index.select({fqn}).require_whole()
        if noun == "tensor" and fqn in self.sections:
            hint = f"It is a section: checkpoint.{fqn} has its tensors, under their full names."
            return NoSuchEntry(f"{self.path} has no tensor {fqn!r}.", hint=hint)
        if noun == "tensor" and self.index.object(fqn) is not None:
            hint = f"It is an object: checkpoint.value({fqn!r}) gives its value."
            return NoSuchEntry(f"{self.path} has no tensor {fqn!r}.", hint=hint)
        return no_such_entry(self.index, fqn, noun)


@in_python()
def open_checkpoint(
    path: str | os.PathLike[str],
    *,
    latest: bool = False,
    step: int | None = None,
    options: ReadOptions = _READ,
) -> Checkpoint:
    """The checkpoint that ``path`` means: a file, a directory, or a glob of rank files.

    In a folder of several, ``latest`` or ``step`` choose one. Only headers are read. What keeps it
    from being whole is in ``problems``, and raised by ``require_whole()``. Raises a CheckpointError
    for what is no checkpoint at all; for what is not there it is a FileNotFoundError, too.
    """
    place = os.fspath(path)
    if latest and step is not None:
        raise UsageError("latest and step cannot be used together.")
    if latest or step is not None:
        place = formats.of_step(place, step)
    return Checkpoint(place, options=options)


open = open_checkpoint  # noqa: A001 (as gzip, zarr and PIL.Image call it)


@in_python()
def safe_open(
    filename: str | os.PathLike[str], framework: str = "pt", device: str = "cpu"
) -> Checkpoint:
    """A checkpoint of any format for code that uses safetensors' function of this name.

    Raises UsageError for another framework than torch and another device than the CPU.
    """
    if framework != "pt" or device != "cpu":
        raise UsageError(
            f"safe_open gives tensors of torch on the CPU, not of {framework!r} on {device!r}.",
            hint="`open_checkpoint(path)[name].numpy()` gives an array.",
        )
    return open_checkpoint(filename)


@in_python()
def load(path: str | os.PathLike[str]) -> dict[object, object]:
    """The state dict as it was saved: nested, every tensor read whole, objects as `value` has them.

    As ``torch.load`` of one file, for a checkpoint of any format; no pickle is run. The memory for
    all of it is needed at once. Raises what `value` raises, and what keeps it from being whole.
    """
    checkpoint = open_checkpoint(path)
    checkpoint.require_whole()

    def read(entry: Entry) -> object:
        return (
            checkpoint.value(entry.fqn)
            if isinstance(entry, ObjectEntry)
            else checkpoint[entry.fqn].torch()
        )

    state: object = nested(checkpoint.index.entry_tree(), read)
    if not isinstance(state, dict):
        raise UnsupportedError(f"{checkpoint.path} holds a {type(state).__name__}, not a dict.")
    return state


def load_file(path: str | os.PathLike[str]) -> dict[str, torch.Tensor]:
    """Every tensor of a checkpoint of any format, by its name, read whole.

    As safetensors' function of this name; `open_checkpoint` reads them one by one.
    """
    return open_checkpoint(path).state_dict()
