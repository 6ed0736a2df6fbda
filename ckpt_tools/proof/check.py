"""Proof that an output holds what its source held: the source's digests, and the result's own.

`same_tensors` and `same_objects` are what --check runs before an output is given its name.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from hashlib import sha256
from typing import NamedTuple

from ckpt_tools import formats
from ckpt_tools.copying.parallel import IMPORTING
from ckpt_tools.copying.read import stream_box
from ckpt_tools.core.dtypes import DType
from ckpt_tools.core.geometry import Box
from ckpt_tools.core.index import ByteRange, CheckpointIndex, LocatedIndex, ObjectEntry, TensorEntry
from ckpt_tools.core.known_crcs import KnownCrcs
from ckpt_tools.core.progress import Tally, ignore_bytes
from ckpt_tools.core.state_tree import Branch
from ckpt_tools.core.text import counted, some
from ckpt_tools.errors import WriteError
from ckpt_tools.proof.containers import as_read_back, compare_containers, compare_objects
from ckpt_tools.proof.damage import read_everything
from ckpt_tools.proof.fingerprint import digest_of_box
from ckpt_tools.proof.replicas import differing_replicas
from ckpt_tools.proof.threads import in_threads
from ckpt_tools.storage.paths import is_address
from ckpt_tools.storage.reader import Files

_AGAIN = (
    "OUT was not created. Write it again, without --resume; if this happens again, suspect the "
    "disk or the memory of this machine."
)


class _Pair(NamedTuple):
    """A tensor of the source, what it became, and the type that it was to have."""

    source: TensorEntry
    result: TensorEntry
    dtype: DType


def same_tensors(  # noqa: PLR0913 (what is compared, how, and who hears of it)
    source: CheckpointIndex,
    result: CheckpointIndex,
    files: Files,
    *,
    renamed: Mapping[str, str],
    dtypes: Mapping[str, DType],
    threads: int | None = None,
    own: Collection[str] | None = None,
    seen: KnownCrcs | None = None,
    on_bytes: Callable[[int], None] = ignore_bytes,
) -> str:
    """Read back ``result`` and compare the SHA-256 of each tensor with the source's.

    ``renamed`` gives the name in the result of each source tensor that was written, ``dtypes`` the
    type that it was to have there; where that is another one, the source is cast again, in memory.
    With ``own``, the only files of the source that can be read here, the boxes that they hold are
    compared. Of a source in a store each chunk is compared alone, as it lies there: so its CRC-32
    is that of the very bytes that were compared, and not of another answer of the server.
    ``seen`` gets the CRC-32s of what is read of either side in its order,
    ``on_bytes`` gets how many bytes of the result were read.
    Returns one line that says what was proven.

    Raises WriteError when a tensor differs, is missing, or is there without a source, and what
    keeps either side from being whole.
    """
    here = formats.locate(source.select(renamed.keys()), files)
    there = formats.locate(result, files)
    here.require_whole()
    there.require_whole()
    pairs = _pairs(here, there, renamed, dtypes)
    on_run, tally = None if seen is None else seen.add, Tally(on_bytes)

    def differs(pair: _Pair) -> bool:
        return any(
            digest_of_box(pair.result, box, files, on_bytes=tally.add, on_run=on_run)
            != _digest_as(part, box, pair.dtype, files, on_run)
            for part, box in _parts(pair.source, own)
        )

    verdicts = in_threads(
        differs, pairs, files.sizes, threads=threads, nbytes=lambda pair: pair.source.nbytes
    )
    wrong = [pair.result.fqn for pair, bad in zip(pairs, verdicts, strict=True) if bad]
    if wrong:
        raise WriteError(
            f"{result.root}: {len(wrong)} of {len(pairs)} tensors, read back, are not what the "
            f"source holds: {some(wrong)}.",
            hint=_AGAIN,
        )
    return _statement(pairs, method="SHA-256" if own is None else "comparison on every rank")


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


def same_objects(source: CheckpointIndex, result: CheckpointIndex, files: Files) -> str:
    """Compare the objects and the containers of a result, read back, with what was to be written.

    Both must be opened, and have the result's names. Returns a sentence that says what was proven,
    or nothing when there was nothing to compare.

    Raises WriteError for an object that differs, is missing, or is there without a source, and for
    a container that is another one.
    """
    source = as_read_back(source, result.format)
    faults = [f"{entry.fqn} has no source" for entry in result.objects if not _has(source, entry)]
    for entry in source.objects:
        other = result.object(entry.fqn)
        if other is None:
            faults.append(f"{entry.fqn} is missing")
            continue
        verdict, why = compare_objects(entry, other, files)
        if not verdict:
            faults.append(f"{entry.fqn}: {why}")
    containers = compare_containers(source, result)
    faults += [
        f"{one.name or 'all'} is {one.b or 'not there'}, not {one.a or 'there'}"
        for one in (containers.differing if containers is not None else ())
    ]
    if faults:
        raise WriteError(
            f"{result.root}, read back, is not what was to be written: {some(faults)}."
        )
    parts = [counted(len(source.objects), "object")] if source.objects else []
    parts += [counted(containers.count, "container")] if containers is not None else []
    return f" So are its {' and '.join(parts)}, by value." if parts else ""


def _has(source: CheckpointIndex, entry: ObjectEntry) -> bool:
    """Whether the source has the object, or an empty place of a list where None was written."""
    if source.object(entry.fqn) is not None:
        return True
    holder = source.nesting.get(*entry.path[:-1]) if entry.opened and entry.value is None else None
    return isinstance(holder, Branch) and (entry.path[-1], None) in holder.pairs()


def _pairs(
    source: LocatedIndex,
    result: LocatedIndex,
    renamed: Mapping[str, str],
    dtypes: Mapping[str, DType],
) -> list[_Pair]:
    """Each source tensor with what it became, checked by name, type and shape."""
    names = {fqn: name for fqn, name in renamed.items() if source.tensor(fqn) is not None}
    extra = {entry.fqn for entry in result.tensors} - set(names.values())
    faults = [f"{name} has no source" for name in sorted(extra)]
    pairs: list[_Pair] = []
    for entry in source.tensors:
        other = result.tensor(names[entry.fqn])
        dtype = dtypes.get(entry.fqn, entry.dtype)
        if other is None:
            faults.append(f"{names[entry.fqn]} is missing")
        elif (other.dtype, other.shape) != (dtype, entry.shape):
            faults.append(
                f"{other.fqn} is {other.dtype.name} {list(other.shape)}, not {dtype.name} "
                f"{list(entry.shape)}"
            )
        else:
            pairs.append(_Pair(entry, other, dtype))
    if faults:
        raise WriteError(
            f"{result.root}, read back, is not what was to be written: {some(faults)}."
        )
    return pairs


def _parts(source: TensorEntry, own: Collection[str] | None) -> list[tuple[TensorEntry, Box]]:
    """What is compared at a time: the whole tensor, or each chunk of its own with its box."""
    is_far = any(is_address(chunk.data.path) for chunk in source.chunks)
    if own is None and not is_far:
        return [(source, Box.whole(source.shape))]
    return [
        (replace(source, chunks=(chunk._replace(data=data, replicas=()),)), chunk.box)
        for chunk in source.chunks
        for data in ((chunk.data,) if own is None else (chunk.data, *chunk.replicas))
        if chunk.box.numel and (own is None or data.path in own)
    ]


def _digest_as(
    entry: TensorEntry,
    box: Box,
    dtype: DType,
    files: Files,
    on_run: Callable[[ByteRange, int], None] | None,
) -> str:
    """The SHA-256 that a box of the source has in the type that it was to have."""
    if entry.dtype == dtype:
        return digest_of_box(entry, box, files, on_run=on_run)
    with IMPORTING:
        from ckpt_tools.copying.cast import Caster

    caster, most = Caster(entry.dtype, dtype), files.sizes.numbers
    buffer = memoryview(bytearray(most * dtype.itemsize))
    block = most * entry.dtype.itemsize
    state = sha256()
    for piece in stream_box(entry, box, files=files, on_run=on_run):
        for start in range(0, len(piece), block):
            raw = piece[start : start + block]
            out = buffer[: len(raw) // entry.dtype.itemsize * dtype.itemsize]
            caster.cast(raw, out)
            state.update(out)
    return state.hexdigest()


def _statement(pairs: list[_Pair], *, method: str) -> str:
    casts = Counter(
        f"{pair.source.dtype.name} to {pair.dtype.name}"
        for pair in pairs
        if pair.dtype != pair.source.dtype
    )
    nbytes = sum(pair.result.nbytes for pair in pairs)
    kept = len(pairs) - sum(casts.values())
    parts = [f"{kept:,} bit for bit"] if kept or not casts else []
    parts += [f"{count:,} cast from {cast}" for cast, count in sorted(casts.items())]
    return (
        f"Proven by {method}: the {counted(len(pairs), 'tensor')} written ({nbytes:,} bytes), "
        f"read back, {'equals' if len(pairs) == 1 else 'equal'} the source: {', '.join(parts)}."
    )
