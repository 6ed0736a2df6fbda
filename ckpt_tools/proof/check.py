"""Proof that an output holds what its source held: the two are read and compared byte by byte.

`same_tensors` and `same_objects` are what --check runs before an output is given its name.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import reduce
from types import MappingProxyType
from typing import TYPE_CHECKING

from ckpt_tools import formats
from ckpt_tools.copying.parallel import IMPORTING, Tally, ignore_bytes
from ckpt_tools.copying.read import ChunkReader, OnRun, first_unequal, stream_box
from ckpt_tools.core.crc import KnownCrcs
from ckpt_tools.core.dtypes import DType
from ckpt_tools.core.geometry import Box, slabs
from ckpt_tools.core.index import CheckpointIndex, TensorEntry
from ckpt_tools.core.plan import Mean
from ckpt_tools.core.state_tree import Branch
from ckpt_tools.core.text import counted, some
from ckpt_tools.errors import WriteError
from ckpt_tools.proof.containers import compare_containers, lists_as_in
from ckpt_tools.proof.damage import read_everything
from ckpt_tools.proof.pairs import (
    EntryDiff,
    by_fqn,
    compare_entries,
    compare_headers,
    compare_objects_of,
    stream_as,
)
from ckpt_tools.proof.replicas import differing_replicas
from ckpt_tools.storage.paths import is_address
from ckpt_tools.storage.reader import Files

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_AGAIN = (
    "OUT was not created. Write it again, without --resume; if this happens again, suspect the "
    "disk or the memory of this machine."
)


def same_tensors(  # noqa: PLR0913 (what is compared, and how)
    wanted: CheckpointIndex,
    result: CheckpointIndex,
    files: Files,
    *,
    dtypes: Mapping[str, DType],
    means: Mapping[str, Mean] = MappingProxyType({}),
    threads: int | None = None,
    own: Collection[str] | None = None,
    seen: KnownCrcs | None = None,
    on_bytes: Callable[[int], None] = ignore_bytes,
) -> str:
    """Read back ``result`` and compare each tensor with the source, byte by byte.

    ``wanted`` are the source's tensors under their names in the result, ``dtypes`` their types
    there, to which they are cast again; ``means`` are computed again. With ``own``, the only files
    of the source that can be read here, the boxes in them are compared. ``seen`` gets CRC-32s of
    what is read in its order, ``on_bytes`` bytes of the result. Returns what was proven.

    Raises WriteError when a tensor differs or one side lacks it, and what makes one not whole.
    """
    here, there = (formats.locate(replace(one, objects=()), files) for one in (wanted, result))
    here.require_whole()
    there.require_whole()
    cast = [replace(e, dtype=dtypes.get(e.fqn, e.dtype)) for e in here.tensors]
    pair = by_fqn(cast), by_fqn(there.tensors)
    _require_same(result, compare_headers(*pair))
    sources = {entry.fqn: entry for entry in here.tensors}
    on_run, tally = None if seen is None else seen.add, Tally(on_bytes)
    on_own = on_run if formats.named(result.format).guarded else None  # others keep no CRC-32

    def values(header: EntryDiff, one: TensorEntry, other: TensorEntry) -> EntryDiff:
        for part, box in _parts(sources[one.fqn], own):
            if one.fqn in means:
                expected = _averaged(means[one.fqn], box, one.dtype, files, on_run)
            else:
                expected = stream_as(part, box, one.dtype, files, on_run=on_run)
            found = stream_box(other, box, files=files, on_run=on_own)
            if first_unequal(found, expected, on_bytes=tally.add) is not None:
                return header._replace(status="values")
        return header

    compared = compare_entries(*pair, values, files, threads=threads)
    if wrong := [one.name for one in compared if one.status != "same"]:
        raise WriteError(
            f"{result.root}: {len(wrong)} of {len(compared)} tensors, read back, are not what the "
            f"source holds: {some(wrong)}.",
            hint=_AGAIN,
        )
    return _statement(here.tensors, cast, averaged=len(means), on_every_rank=own is not None)


def require_intact(
    result: CheckpointIndex,
    files: Files,
    *,
    seen: KnownCrcs,
    threads: int | None,
    on_bytes: Callable[[int], None] = ignore_bytes,
) -> None:
    """Check the bytes of ``result`` that no tensor is read from: replicas, and all around items.

    ``result`` is as its reader gave it; what was ``seen`` is read again only as a replica. Raises
    WriteError for a wrong CRC-32, and for replicas that differ.
    """
    reading = read_everything(result, files, seen=seen, threads=threads, on_bytes=on_bytes)
    faults = [damage.error for damage in reading.damages] or differing_replicas(
        formats.locate(result, files).tensors,
        files,
        is_good=lambda _: True,
        threads=threads,
        tally=Tally(on_bytes),
    )
    if faults:
        raise WriteError(
            f"{result.root}, read back, is damaged: {some([fault.message for fault in faults])}",
            hint=_AGAIN,
        )


def same_objects(wanted: CheckpointIndex, result: CheckpointIndex, files: Files) -> str:
    """Compare the objects and the containers of a result, read back, with what was to be written.

    Both must be opened, and have the result's names. Returns a sentence that says what was proven,
    or nothing when there was nothing to compare.

    Raises WriteError for an object that differs, is missing, or is there without a source, and for
    a container that is another one.
    """
    wanted = lists_as_in(result, wanted)
    differences = []
    for one in compare_objects_of(wanted, result, files):
        entry = result.object(one.name) if one.status == "only b" else None
        if entry is not None and entry.opened and entry.value is None:
            holder = wanted.nesting.get(*entry.path[:-1])
            if isinstance(holder, Branch) and (entry.path[-1], None) in holder.pairs():
                continue  # the None that was written at an empty place of a list
        differences.append(one)
    containers, others = compare_containers(wanted, result) or (None, [])
    _require_same(result, [*differences, *others])
    parts = [counted(len(wanted.objects), "object")] if wanted.objects else []
    parts += [counted(containers, "container")] if containers is not None else []
    return f" So are its {' and '.join(parts)}, by value." if parts else ""


def _require_same(result: CheckpointIndex, differences: Iterable[EntryDiff]) -> None:
    """Raise WriteError for what is not as it was to be written."""
    faults = []
    for one in differences:
        if one.status == "only a":
            faults.append(f"{one.name} is missing")
        elif one.status == "only b":
            faults.append(f"{one.name} has no source")
        elif one.status == "container":
            wanted, found = one.a or "there", one.b or "not there"
            faults.append(f"{one.name or 'all'} is {found}, not {wanted}")
        elif one.status != "same":
            what = f": {one.detail}" if one.detail else f" is {one.b}, not {one.a}"
            faults.append(one.name + what)
    if faults:
        raise WriteError(
            f"{result.root}, read back, is not what was to be written: {some(faults)}."
        )


def _parts(source: TensorEntry, own: Collection[str] | None) -> list[tuple[TensorEntry, Box]]:
    """What is compared at a time: the whole tensor, or each chunk of its own with its box.

    Of a source in a store each chunk is compared alone, as it lies there: so its CRC-32 is that of
    the very bytes that were compared, and not of another answer of the server.
    """
    is_far = any(is_address(chunk.data.path) for chunk in source.chunks)
    if own is None and not is_far:
        return [(source, Box.whole(source.shape))]
    return [
        (replace(source, chunks=(chunk._replace(data=data, replicas=()),)), chunk.box)
        for chunk in source.chunks
        for data in ((chunk.data,) if own is None else (chunk.data, *chunk.replicas))
        if chunk.box.numel and (own is None or data.path in own)
    ]


def _averaged(
    mean: Mean, box: Box, dtype: DType, files: Files, on_run: OnRun | None
) -> Iterator[memoryview]:
    """An average of a box, computed a second time, and not by what wrote it."""
    with IMPORTING:
        from ckpt_tools.copying.cast import numbers, write_rounded

    sizes = files.sizes
    reader = ChunkReader(files, stage_bytes=sizes.numbers * dtype.itemsize, on_run=on_run)
    for slab in slabs(box, max_numel=sizes.numbers):
        raw = memoryview(bytearray(slab.numel * dtype.itemsize))
        weighted: list[NDArray[np.float64]] = []
        for weight, finder in mean.terms:
            reader.fill(finder.reads(slab), slab, itemsize=dtype.itemsize, out=raw)
            weighted.append(weight * numbers(raw, dtype).view("float64"))  # a complex one is two
            weighted = [reduce(lambda total, part: mean.keep * total + part, weighted)]
        write_rounded(weighted[0] / mean.divisor, dtype, raw)
        yield raw


def _statement(
    source: Sequence[TensorEntry],
    cast: Sequence[TensorEntry],
    *,
    averaged: int,
    on_every_rank: bool,
) -> str:
    casts = Counter(
        f"{one.dtype.name} to {other.dtype.name}"
        for one, other in zip(source, cast, strict=True)
        if one.dtype != other.dtype
    )
    count, nbytes = len(cast), sum(entry.nbytes for entry in cast)
    kept = count - sum(casts.values()) - averaged
    parts = [f"{averaged:,} averaged again, bit for bit"] if averaged else []
    parts += [f"{kept:,} bit for bit"] if kept or not (casts or averaged) else []
    parts += [f"{many:,} cast from {types}" for types, many in sorted(casts.items())]
    where = " on every rank" if on_every_rank else ""
    return (
        f"Proven by comparison{where}: the {counted(count, 'tensor')} written ({nbytes:,} bytes), "
        f"read back, {'equals' if count == 1 else 'equal'} the source: {', '.join(parts)}."
    )
