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
from ckpt_tools.copying.read import read_box, stream_box
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
from ckpt_tools.proof.fingerprint import digest_of
from ckpt_tools.proof.replicas import differing_replicas
from ckpt_tools.proof.threads import in_threads
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
    compared instead. ``seen`` gets the CRC-32s of what is read of either side in its order,
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
        if own is not None:
            return _boxes_differ(pair, own, files)
        expected = _digest_as(pair, files, on_run)
        return digest_of(pair.result, files, on_bytes=tally.add, on_run=on_run) != expected

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


def _digest_as(pair: _Pair, files: Files, on_run: Callable[[ByteRange, int], None] | None) -> str:
    """The SHA-256 that the source's tensor has in the type that it was to have."""
    entry, dtype = pair.source, pair.dtype
    if entry.dtype == dtype:
        return digest_of(entry, files, on_run=on_run)
    from ckpt_tools.copying.cast import Caster

    caster, most = Caster(entry.dtype, dtype), files.sizes.numbers
    buffer = memoryview(bytearray(most * dtype.itemsize))
    block = most * entry.dtype.itemsize
    state = sha256()
    for piece in stream_box(entry, Box.whole(entry.shape), files=files, on_run=on_run):
        for start in range(0, len(piece), block):
            raw = piece[start : start + block]
            out = buffer[: len(raw) // entry.dtype.itemsize * dtype.itemsize]
            caster.cast(raw, out)
            state.update(out)
    return state.hexdigest()


def _boxes_differ(pair: _Pair, own: Collection[str], files: Files) -> bool:
    """Whether the result holds anything else in the boxes that these files hold."""
    from ckpt_tools.copying.cast import Caster

    source, result = pair.source, pair.result
    caster = None if source.dtype == pair.dtype else Caster(source.dtype, pair.dtype)
    held = [
        chunk._replace(data=data, replicas=())
        for chunk in source.chunks
        for data in (chunk.data, *chunk.replicas)
        if data.path in own and chunk.box.numel
    ]
    for chunk in held:
        alone = replace(source, chunks=(chunk,))
        sides = (
            read_box(
                entry, chunk.box, files=files, slab_bytes=files.sizes.numbers * entry.dtype.itemsize
            )
            for entry in (alone, result)
        )
        for here, there in zip(*sides, strict=True):
            expected = bytearray(len(there))
            if caster is None:
                expected[:] = here
            else:
                caster.cast(here, memoryview(expected))
            if expected != there:
                return True
    return False


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
