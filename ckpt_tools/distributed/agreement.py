"""What the ranks of a job make sure of while they share a plan: it is one, and all go on."""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable, Sequence
from hashlib import blake2b

from ckpt_tools.core.index import CheckpointIndex
from ckpt_tools.core.plan import FilePlan
from ckpt_tools.distributed.group import Group
from ckpt_tools.errors import CkptError, UnreadableError
from ckpt_tools.storage.paths import is_address
from ckpt_tools.storage.reader import Files

# Files of which bytes are compared, evenly out of all, and how many and how long samples of each,
# from its head to its tail: there a torch.save archive has the CRC-32s of its records.
_MAX_SAMPLED = 256
_SAMPLES = 8
_SAMPLE = 4 << 10


def require_same_plan(
    group: Group, plans: Sequence[FilePlan], *, source: CheckpointIndex | None = None
) -> None:
    """Raise UnreadableError when a rank has planned other files than rank 0, or has another source.

    The ranks have then not seen the same checkpoint: one is out of date, or a disk is not shared.
    ``source`` is None where each rank reads files of its own.
    """
    mine = digest(plans)
    error = None
    if source is not None:
        try:
            mine = f"{mine}, {identity(source)}"
        except CkptError as failure:  # no rank may be waited for in vain
            error = failure
    if group.tell(mine) != mine and error is None:
        error = UnreadableError(
            "This rank finds another checkpoint than rank 0 does.",
            hint="All nodes must see the same files. Is the path on a node's own disk?",
        )
    group.meet(error)


def digest(plans: Sequence[FilePlan]) -> str:
    """A short text that differs when plans of different files, lengths, boxes or literals do."""
    crc = 0
    for plan in plans:
        facts = (plan.path, plan.length, [item.offset for item in plan.items])
        crc = zlib.crc32(repr(facts).encode(), crc)
        for offset, data in plan.literals:
            crc = zlib.crc32(data, zlib.crc32(str(offset).encode(), crc))
    return f"{crc:08x} of {len(plans)}"


def identity(index: CheckpointIndex) -> str:
    """A short text that differs for two saves, though their layouts are the same.

    It goes by the lengths of all files, what was read of objects, and samples of the files' bytes,
    where a disk holds them; stores tell a version. Where files lie and when they were copied there
    is no part of it.
    """
    state = blake2b(digest_size=16)
    files = sorted(file for file in index.files if file.length is not None)
    for file in files:
        version = file.state.version if file.state and is_address(file.path) else ""
        told = os.path.basename(file.path), file.length, version
        state.update(repr(told).encode())
    for entry in index.objects:
        if entry.opened:
            state.update(repr((entry.fqn, entry.value)).encode())
    step = max(1, -(-len(files) // _MAX_SAMPLED))
    with Files() as opened:
        for file in files[::step]:
            if not is_address(file.path):
                state.update(_sample(file.path, opened))
    return state.hexdigest()


def _sample(path: str, files: Files) -> bytes:
    size = files.size(path)
    if size <= _SAMPLES * _SAMPLE:
        return files.read(path, 0, size)
    starts = ((size - _SAMPLE) * n // (_SAMPLES - 1) for n in range(_SAMPLES))
    return b"".join(files.read(path, start, _SAMPLE) for start in starts)


def watchful(group: Group, on_bytes: Callable[[int], None]) -> Callable[[int], None]:
    """The same, and stops this rank soon after another has failed."""

    def moved(nbytes: int) -> None:
        group.look_around()
        on_bytes(nbytes)

    return moved
