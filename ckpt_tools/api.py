"""What `import ckpt_tools` can do: one function a verb, which are methods of `Checkpoint`, too.

This room only puts together what the others can do, with settings that suit most callers. It
prints nothing and knows neither options nor formats.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Literal, Protocol, TypeVar

from ckpt_tools import formats
from ckpt_tools.analysis.inspection import Inspection
from ckpt_tools.convert.export import ExportOptions, ExportPlan, export_of, format_of
from ckpt_tools.convert.write import EntryOptions, WriteOptions
from ckpt_tools.copying.parallel import Listener, ignore_bytes
from ckpt_tools.core.dtypes import DType, require_dtype
from ckpt_tools.core.index import CheckpointIndex, Section
from ckpt_tools.core.layout import Mesh
from ckpt_tools.core.mesh_spec import FSDP2_NAMES, parse_mesh
from ckpt_tools.core.names import NamePatterns
from ckpt_tools.errors import UnreadableError, UsageError, in_python
from ckpt_tools.formats.protocol import ReadOptions
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


class _Opened(Protocol):
    """A checkpoint that is open, such as `Checkpoint`."""

    index: CheckpointIndex


Source = str | os.PathLike[str] | CheckpointIndex | _Opened
Patterns = str | Iterable[str]
Entries = TypeVar("Entries", bound=EntryOptions)


def index_of(source: Source, options: ReadOptions = ReadOptions()) -> CheckpointIndex:
    """The index of a path or of a checkpoint that is open. Raises what reading it raises."""
    if not isinstance(source, str | os.PathLike):
        return source if isinstance(source, CheckpointIndex) else source.index
    path = os.fspath(source)
    try:
        return formats.read_index(path, options=options)
    except UnreadableError as error:
        if formats.run_of(path) and (steps := formats.steps_in(path)):
            way = "open_checkpoint(path, latest=True) opens the last step"
            error.advise(f"{way}, step={steps[-1]} that one.")
        raise


@in_python()
def inspect(source: Source) -> Inspection:
    """What a checkpoint is: whole or not, resumable or not, step, age, mesh, sizes, optimizer."""
    return look(index_of(source))


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
    source: Source,
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
    write: WriteOptions = WriteOptions(),
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

    path, index = os.fspath(out), index_of(source)
    if options is None:
        form = format_of(path)
        options = ExportOptions() if form is None else ExportOptions(format=form)
    options = _chosen(options, dtype, only, include, exclude)
    if hf_assets is not None:
        from ckpt_tools.transforms.hf_folder import AssetsTransform, asset_config  # late: few have

        folder = os.fspath(hf_assets)
        assets = AssetsTransform(folder, asset_config(folder), index)
        options = replace(options, steps=(*options.steps, assets))
    write = replace(write, force=force or write.force, check=check or write.check)
    return write_here(export_of(index, path, write, options), listener=Listener(on_bytes))


def _chosen(
    options: Entries,
    dtype: str | DType | torch.dtype | None,
    only: Section | Literal["all"] | None,
    include: Patterns,
    exclude: Patterns,
) -> Entries:
    """The options, with what was given by its name."""
    if dtype is not None:
        options = replace(options, dtype=require_dtype(dtype))
    if only is not None:
        options = replace(options, only=None if only == "all" else only)
    if include:
        options = replace(options, include=patterns(include))
    if exclude:
        options = replace(options, exclude=patterns(exclude))
    return options


def patterns(given: Patterns) -> tuple[str, ...]:
    """One glob or several, as a tuple."""
    return (given,) if isinstance(given, str) else tuple(given)


@in_python()
def reshard(  # noqa: PLR0913 (what people set by its name, beside the rest in options)
    source: Source,
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
    write: WriteOptions = WriteOptions(),
    on_bytes: Callable[[int], None] = ignore_bytes,
) -> ReshardPlan:
    """Write a checkpoint as the shards of another mesh to the folder ``out``.

    The mesh is ``to_mesh``, such as ``"4x8"``, ``(4, 8)`` or ``32``, or that of the options;
    without one, a part or a cast of a checkpoint keeps the source's own boxes. ``layout`` is the
    framework whose loader reads the output. One process writes a mesh of any size.
    Raises what `export` raises.
    """
    from ckpt_tools.convert.reshard import ReshardOptions, reshard_of  # late: few also write
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
    options = _chosen(options, dtype, only, include, exclude)
    write = replace(write, force=force or write.force, check=check or write.check)
    conversion = reshard_of(index_of(source), os.fspath(out), write, options)
    return write_here(conversion, listener=Listener(on_bytes))


@in_python()
def average(  # noqa: PLR0913 (what people set by its name)
    sources: Iterable[Source],
    out: str | os.PathLike[str],
    to_mesh: str | int | Sequence[int] | Mesh | None = None,
    *,
    weights: Iterable[float] | None = None,
    ema: float | None = None,
    include: Patterns = (),
    exclude: Patterns = (),
    force: bool = False,
    check: bool = False,
    write: WriteOptions = WriteOptions(),
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
    indexes = [*map(index_of, sources)]
    names = NamePatterns(include=patterns(include), exclude=patterns(exclude))
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
    source: Source, *, threads: int | None = None, on_bytes: Callable[[int], None] = ignore_bytes
) -> VerifyReport:
    """Read every byte range once, check every CRC and coverage; the report says what is damaged."""
    with Files() as files:
        return _verify.verify(index_of(source), files, threads=threads, on_bytes=on_bytes)


@in_python()
def verify_quick(source: Source) -> VerifyReport:
    """Check a checkpoint by its headers alone; the report says what is damaged."""
    with Files() as files:
        return _verify.verify_quick(index_of(source), files)


@in_python()
def fingerprint(
    source: Source, *, threads: int | None = None, on_bytes: Callable[[int], None] = ignore_bytes
) -> Fingerprint:
    """Digests of the logical tensors that no format, nesting or sharding changes.

    Raises what keeps the checkpoint from being whole.
    """
    with Files() as files:
        return _fingerprint.fingerprint(index_of(source), files, threads=threads, on_bytes=on_bytes)


@in_python()
def diff(
    a: Source, b: Source, *, options: DiffOptions = DiffOptions(), threads: int | None = None
) -> Diff:
    """What is different between two checkpoints of any formats and meshes, values included.

    Raises what keeps either from being whole.
    """
    with Files() as files:
        return _diff.diff(index_of(a), index_of(b), files, options=options, threads=threads)


@in_python()
def diff_headers(a: Source, b: Source, *, options: DiffOptions = DiffOptions()) -> Diff:
    """What is different in names, types and shapes; no values are read, so of the options those on
    names count.
    """
    return _diff.diff_headers(index_of(a), index_of(b), options=options)


@in_python()
def stats(
    source: Source, *, threads: int | None = None, on_bytes: Callable[[int], None] = ignore_bytes
) -> Statistics:
    """Mean, spread, extremes and norm of each tensor, and what points at a lost rank.

    Raises what keeps the checkpoint from being whole.
    """
    from ckpt_tools.proof.stats import stats as look  # late: it needs numpy

    with Files() as files:
        return look(index_of(source), files, threads=threads, on_bytes=on_bytes)
