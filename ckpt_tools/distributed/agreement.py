"""Checks between the ranks that write one output: all see the same source and the same folder, none
has failed, and in the end every byte is written.
"""

from __future__ import annotations

import json
import os
import secrets
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from hashlib import blake2b

from ckpt_tools.copying.resume import OutputPlace
from ckpt_tools.core.index import CheckpointIndex
from ckpt_tools.core.plan import LazyPlans, PlannedFile
from ckpt_tools.core.sizes import Sizes
from ckpt_tools.distributed.group import Group
from ckpt_tools.errors import CkptError, UnreadableError, UsageError, WriteError
from ckpt_tools.storage.paths import is_address
from ckpt_tools.storage.reader import Files

_PATIENCE = 5.0  # seconds: a file system over the network may show a new file late
# Files of which bytes are compared, evenly out of all, and how many samples of each, from its head
# to its tail: there a torch.save archive has the CRC-32s of its records.
_MAX_SAMPLED = 256
_SAMPLES = 8


def begin(
    group: Group,
    plans: LazyPlans,
    place: OutputPlace,
    sizes: Sizes,
    *,
    source: CheckpointIndex | None = None,
) -> LazyPlans:
    """Check that all ranks will write the same files of the same source to one folder.

    Returns the plans that are left to write; only rank 0 knows them before, when it resumes an
    earlier run. ``source`` is None where each rank reads files of its own. Raises UnreadableError
    or UsageError on all ranks when they differ.
    """
    count = int(group.broadcast(str(len(plans))))
    if group.total(len(plans) - count):
        left = set(json.loads(group.broadcast(json.dumps([file.path for file in plans.files]))))
        plans = plans.without({file.path for file in plans.files} - left)
    if not plans:
        return plans
    # Ranks that see other bytes or plan other files have not seen the same checkpoint: one is out
    # of date, or a disk is not shared.
    mine = plans.digest
    error = None
    if source is not None:
        try:
            mine = f"{mine}, {identity(source, sizes.sample)}"
        except CkptError as failure:  # the others wait for this rank at the barrier
            error = failure
    if group.broadcast(mine) != mine and error is None:
        error = UnreadableError(
            "This rank sees another checkpoint than rank 0.",
            hint="All nodes must see the same files. Is the path on a node's own disk?",
        )
    group.barrier(error)
    require_same_folder(group, place)
    return plans


def require_same_options(group: Group, mine: Mapping[str, str]) -> None:
    """Raise UsageError on all ranks when one has other options than rank 0."""
    group.command = group.broadcast(json.dumps(dict(mine)))
    theirs = json.loads(group.command)
    error = None
    for name in sorted({*mine, *theirs}):
        here, there = mine.get(name, "not given"), theirs.get(name, "not given")
        if here != there:
            error = UsageError(
                f"{name} differs: {here} here, and {there} on rank 0.",
                hint="Start all ranks with one command line.",
            )
            break
    group.barrier(error)


def require_same_folder(group: Group, place: OutputPlace) -> None:
    """Raise UsageError on all ranks unless each sees what rank 0 writes into the output's folder.

    A left-over folder of the same name on a node's own disk does not hold rank 0's random token.
    """
    path = os.path.join(place.partial, ".token-")
    token = secrets.token_hex(16)
    if group.rank == 0:
        with open(path + token, "w", encoding="ascii") as file:
            file.write(token)
    path += group.broadcast(token)  # a name never looked up before: no cache knows it as absent
    error = None
    if not _appears(path):
        error = UsageError(
            f"{os.path.abspath(place.partial)} on {os.uname().nodename} is not the folder that "
            "rank 0 made under this name; nothing was written.",
            hint="All ranks write one output: choose an OUT on a file system that all nodes share.",
        )
    try:
        group.barrier(error)
    finally:
        if group.rank == 0:
            with suppress(OSError):
                os.unlink(path)


def _appears(path: str) -> bool:
    token = path.rpartition("-")[2]
    end = time.monotonic() + _PATIENCE
    while time.monotonic() < end:
        with suppress(OSError), open(path, encoding="ascii") as file:
            if file.read() == token:
                return True
        time.sleep(_PATIENCE / 50)
    return False


def require_all_written(
    group: Group, plans: LazyPlans, place: OutputPlace, *, nbytes: int, planned: int | None = None
) -> None:
    """Have rank 0 give all files their final names, which each rank has synced its part of.

    Raises WriteError on all ranks unless rank 0 finds every file with its length, and the
    ``nbytes`` of tasks that each rank did are together the ``planned`` ones: by default all bytes
    of the plans, which leave no byte out.
    """
    written = group.total(nbytes)
    error = None
    if group.rank == 0:
        faults = [fault for plan in plans.files if (fault := _fault(plan, place)) is not None]
        planned = plans.length if planned is None else planned
        if not faults and written != planned:
            faults = [f"the ranks wrote {written:,} bytes of {planned:,}"]
        if faults:
            more = f" and {len(faults) - 1} more" if len(faults) > 1 else ""
            error = WriteError(
                f"{place.partial} is incomplete: {faults[0]}{more}.",
                hint="OUT was not created. Do all ranks see the same file system?",
            )
        else:
            place.finish_all(plans)
    group.barrier(error)


def _fault(plan: PlannedFile, place: OutputPlace) -> str | None:
    named, unnamed = (os.path.join(at, plan.path) for at in (place.folder, place.unfinished))
    try:
        length = os.stat(named if os.path.exists(named) else unnamed).st_size
    except OSError as error:
        return f"{plan.path} cannot be seen ({error.strerror})"
    if length == plan.length:
        return None
    return f"{plan.path} has {length:,} bytes, and {plan.length:,} were planned"


def identity(index: CheckpointIndex, sample: int) -> str:
    """A short text that differs for two saves, though their layouts are the same.

    Digest of the lengths of all files, the objects that were read, and samples of so many bytes of
    files on disks; of stores the version. Paths and times are no part of it.
    """
    state = blake2b(digest_size=16)
    files = sorted(file for file in index.files if file.length is not None)
    for file in files:
        version = file.state.version if file.state and is_address(file.path) else ""
        known = os.path.basename(file.path), file.length, version
        state.update(repr(known).encode())
    for entry in index.objects:
        if entry.opened:
            state.update(repr((entry.fqn, entry.value)).encode())
    step = max(1, -(-len(files) // _MAX_SAMPLED))
    paths = [file.path for file in files[::step] if not is_address(file.path)]
    with Files() as opened:
        for path in paths:
            size = opened.size(path)
            if size <= _SAMPLES * sample:
                state.update(opened.read(path, 0, size))
                continue
            for n in range(_SAMPLES):
                state.update(opened.read(path, (size - sample) * n // (_SAMPLES - 1), sample))
    return state.hexdigest()


def stopping(group: Group, on_bytes: Callable[[int], None]) -> Callable[[int], None]:
    """``on_bytes`` that raises PeerFailedError, so that a rank stops soon after another failed."""

    def add(nbytes: int) -> None:
        group.check_peers()
        on_bytes(nbytes)

    return add
