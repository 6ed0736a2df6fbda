"""--check: read an output back before it is renamed into place, and record what was proven.

The record is one line of text: in the headers of files that take metadata, in a field of fixed
length that the plan leaves for it, or in a small JSON file beside the shards of a training
checkpoint. A single torch.save file has no place for it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from itertools import chain

from ckpt_tools import formats
from ckpt_tools._version import __version__
from ckpt_tools.convert.plan import Plan
from ckpt_tools.copying.atomic_output import PROOF_FILE
from ckpt_tools.copying.parallel import ignore_bytes
from ckpt_tools.core.crc import KnownCrcs
from ckpt_tools.core.index import CheckpointIndex, ObjectEntry
from ckpt_tools.core.plain_values import closed_in
from ckpt_tools.errors import UnsafePickleError
from ckpt_tools.formats.protocol import Index, ReadOptions
from ckpt_tools.proof.check import require_intact, same_objects, same_tensors
from ckpt_tools.proof.damage import require_undamaged
from ckpt_tools.proof.replicas import require_equal_replicas
from ckpt_tools.storage.reader import Files

PROOF_FIELD = "proof"
# Bytes of the field in a header; the text is padded with blanks.
_ROOM = 400
UNPROVEN = "-" * _ROOM


def check(
    folder: str,
    plan: Plan,
    files: Files,
    *,
    threads: int | None,
    own: Collection[str] | None = None,
    on_bytes: Callable[[int], None] = ignore_bytes,
) -> str:
    """Compare what is in ``folder`` with what was planned; one line says what is proven.

    ``own`` are the source's files that this process can read, when that is not all of them: then
    only tensors in these are compared; other ranks compare the rest. ``on_bytes`` gets the number
    of bytes read.

    Raises WriteError when a tensor, an object or a container differs, UnreadableError when the
    source's own checksums say that what was read is damaged, and UnsupportedError when its replicas
    differ.
    """
    objects = plan.objects if own is None else ()
    closed = chain.from_iterable(closed_in(entry.value) for entry in objects)
    unlisted = {name for one in closed for name in one.unlisted}
    allowed = ReadOptions((*unlisted.union(plan.chosen.allowed),))
    back = formats.read_written(folder, options=allowed)
    result = _opened(back, files)
    wanted = _expected(plan, objects, result.format, files)
    seen = KnownCrcs()
    statement = same_tensors(
        *(wanted, result, files),
        dtypes={target.fqn: target.dtype for target in plan.targets},
        means=plan.means,
        threads=threads,
        own=own,
        seen=seen,
        on_bytes=on_bytes,
    )
    if own is not None:
        held = held_in(plan.chosen, own)
        return statement + require_undamaged(held, files, seen=seen, threads=threads)
    statement += same_objects(wanted, result, files)
    statement += require_equal_replicas(plan.chosen, files, threads=threads)
    # First the source: what is copied as it is would make the output look at fault.
    statement += require_undamaged(plan.chosen, files, seen=seen, threads=threads)
    for other in plan.also:
        require_equal_replicas(other, files, threads=threads)
        require_undamaged(other, files, seen=seen, threads=threads)
    if formats.named(back.format).guarded:
        require_intact(back, files, seen=seen, threads=threads, on_bytes=on_bytes)
    return statement


def _expected(
    plan: Plan, objects: Sequence[ObjectEntry], form: str, files: Files
) -> CheckpointIndex:
    """The index that the output should have, its chunks where the source has them."""
    entries = [replace(t.entry, fqn=t.fqn, path=t.path) for t in plan.targets]
    here = replace(
        formats.to_locate_in(plan.chosen), tensors=tuple(sorted(entries, key=lambda e: e.fqn))
    )
    located = formats.locate(here, files)
    located.require_whole()
    wanted = replace(
        plan.chosen,
        format=form,
        tensors=located.tensors,
        objects=tuple(sorted(objects, key=lambda e: e.fqn)),
        tree=plan.tree,
        problems=(),
    )
    return _opened(wanted, files)


def _opened(index: Index, files: Files) -> Index:
    """The same index, opened. What could run code stays unopened, and is compared by its bytes."""
    try:
        return formats.open_objects(index, files)
    except UnsafePickleError as error:
        unsafe = [entry for entry in index.objects if entry.fqn in error.about]
        if not unsafe:
            raise
        others = tuple(entry for entry in index.objects if entry.fqn not in error.about)
        rest = formats.open_objects(replace(index, objects=others), files)
        every = sorted((*rest.objects, *unsafe), key=lambda entry: entry.fqn)
        return replace(rest, objects=tuple(every))


def held_in(source: CheckpointIndex, own: Collection[str]) -> CheckpointIndex:
    """The part of a checkpoint that is in these files, each replica as a chunk of its own."""
    tensors = [
        replace(
            entry,
            chunks=tuple(
                chunk._replace(data=data, replicas=())
                for chunk in entry.chunks
                for data in (chunk.data, *chunk.replicas)
                if data.path in own
            ),
        )
        for entry in source.tensors
    ]
    objects = tuple(entry for entry in source.objects if entry.data.path in own)
    return replace(source, tensors=tuple(tensors), objects=objects)


def record(folder: str, plan: Plan, statement: str) -> None:
    """Write the statement of what is proven into the field of each header that has one, or into a
    JSON file beside shards.
    """
    if plan.proof_beside:
        facts = {
            "schema": "ckpt-tools/proof/1",
            "ckpt_tools": __version__,
            "source_format": plan.source.format,
            "source_world_size": plan.source.world_size,
            "proof": statement,
        }
        with open(os.path.join(folder, PROOF_FILE), "w", encoding="utf-8") as file:
            file.write(json.dumps(facts, indent=2) + "\n")
        return
    text = statement.encode("ascii", "replace")[:_ROOM].replace(b'"', b"'").replace(b"\\", b"/")
    field = f'"{PROOF_FIELD}":"'.encode()
    for made in plan.files:
        for offset, known in made.literals:
            place = known.find(field + UNPROVEN.encode())
            if place >= 0:
                with open(os.path.join(folder, made.path), "r+b") as header:
                    header.seek(offset + place + len(field))
                    header.write(text.ljust(_ROOM))
