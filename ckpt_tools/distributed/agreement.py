"""What the ranks of a job make sure of while they share a plan: it is one, and all go on."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence

from ckpt_tools.core.plan import FilePlan
from ckpt_tools.distributed.group import Group
from ckpt_tools.errors import UnreadableError


def require_same_plan(group: Group, plans: Sequence[FilePlan]) -> None:
    """Raise UnreadableError when a rank has planned other files than rank 0.

    The ranks have then not seen the same checkpoint: one is out of date, or a disk is not shared.
    """
    mine = digest(plans)
    error = None
    if group.tell(mine) != mine:
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


def watchful(group: Group, on_bytes: Callable[[int], None]) -> Callable[[int], None]:
    """The same, and stops this rank soon after another has failed."""

    def moved(nbytes: int) -> None:
        group.look_around()
        on_bytes(nbytes)

    return moved
