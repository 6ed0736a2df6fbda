"""What the ranks of a job make sure of while they write one output: all see the same source and
the same folder, all go on, and in the end all of it is there.
"""

from __future__ import annotations

import os
import secrets
import time
import zlib
from collections.abc import Callable, Sequence
from contextlib import suppress

from ckpt_tools.copying.journal import Place
from ckpt_tools.copying.tasks import cut
from ckpt_tools.core.plan import FilePlan
from ckpt_tools.distributed.group import Group
from ckpt_tools.errors import UnreadableError, UsageError, WriteError

_PATIENCE = 5.0  # seconds: a file system over the network may show a new file late


def begin(group: Group, plans: Sequence[FilePlan], place: Place) -> bool:
    """Prove that all ranks are about to write the same files of the same source to one folder.

    Gives False when nothing is left to write: rank 0 goes on with a run that had written all.
    Raises UnreadableError or UsageError on all ranks when they are not.
    """
    if group.broadcast(str(len(plans))) == "0":
        return False
    require_same_plan(group, plans)
    require_same_folder(group, place)
    return True


def require_same_plan(group: Group, plans: Sequence[FilePlan]) -> None:
    """Raise UnreadableError when a rank has planned other files than rank 0.

    The ranks have then not seen the same checkpoint: one is out of date, or a disk is not shared.
    """
    mine = digest(plans)
    error = None
    if group.broadcast(mine) != mine:
        error = UnreadableError(
            "This rank finds another checkpoint than rank 0 does.",
            hint="All nodes must see the same files. Is the path on a node's own disk?",
        )
    group.barrier(error)


def require_same_folder(group: Group, place: Place) -> None:
    """Raise UsageError on all ranks unless each sees what rank 0 writes into the output's folder.

    A left-over folder of the same name on a node's own disk does not hold rank 0's random token.
    """
    path = os.path.join(place.journals, ".token-")
    token = secrets.token_hex(16)
    if group.rank == 0:
        with open(path + token, "w", encoding="ascii") as file:
            file.write(token)
    path += group.broadcast(token)  # a name never looked up before: no cache knows it as absent
    error = None
    if not _appears(path):
        error = UsageError(
            f"{os.path.abspath(place.journals)} on {os.uname().nodename} is not the folder that "
            "rank 0 made under this name; nothing was written.",
            hint="All ranks write one output: name an OUT on a file system that all nodes share.",
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
    group: Group, plans: Sequence[FilePlan], folder: str, *, nbytes: int
) -> None:
    """Raise WriteError on all ranks unless rank 0 finds every file with its length, and the
    ``nbytes`` that each rank wrote are together all bytes of the plans.
    """
    written = group.total(nbytes)
    error = None
    if group.rank == 0:
        faults = [fault for plan in plans if (fault := _fault(plan, folder)) is not None]
        planned = sum(task.nbytes for plan in plans for task in cut(plan))
        if not faults and written != planned:
            faults = [f"the ranks wrote {written:,} bytes of {planned:,}"]
        if faults:
            more = f" and {len(faults) - 1} more" if len(faults) > 1 else ""
            error = WriteError(
                f"{folder} is not all written: {faults[0]}{more}.",
                hint="The output was not given its name. Do all ranks see the same file system?",
            )
    group.barrier(error)


def _fault(plan: FilePlan, folder: str) -> str | None:
    try:
        length = os.stat(os.path.join(folder, plan.path)).st_size
    except OSError as error:
        return f"{plan.path} cannot be seen ({error.strerror})"
    if length == plan.length:
        return None
    return f"{plan.path} has {length:,} bytes, and {plan.length:,} were planned"


def digest(plans: Sequence[FilePlan]) -> str:
    """A short text that differs when plans of different files, lengths, boxes or literals do."""
    crc = 0
    for plan in plans:
        facts = (plan.path, plan.length, [item.offset for item in plan.items])
        crc = zlib.crc32(repr(facts).encode(), crc)
        for offset, data in plan.literals:
            crc = zlib.crc32(data, zlib.crc32(str(offset).encode(), crc))
    return f"{crc:08x} of {len(plans)}"


class Progress:
    """Counts the bytes that this rank writes, and stops it soon after another has failed."""

    def __init__(self, group: Group, on_bytes: Callable[[int], None]) -> None:
        self._group = group
        self._on_bytes = on_bytes
        self.nbytes = 0

    def add(self, nbytes: int) -> None:
        """Count some bytes. Raises PeerFailedError."""
        self._group.check_peers()
        self.nbytes += nbytes
        self._on_bytes(nbytes)
