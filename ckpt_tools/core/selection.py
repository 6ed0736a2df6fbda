"""Which entries a person means: by section and by patterns on their names."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from ckpt_tools.core import names
from ckpt_tools.core.index import CheckpointIndex, Section
from ckpt_tools.errors import AnswerNo


def select(
    index: CheckpointIndex, *, include: Sequence[str], exclude: Sequence[str], only: Section | None
) -> CheckpointIndex:
    """The part of a checkpoint that a section and name patterns choose, with the problems it has.

    The patterns choose lost names as they would have chosen the entries; which section those were
    in is not known, so a section alone chooses them all.

    Raises AnswerNo when nothing is left, and what is wrong when that is because all of it is lost.
    """
    chosen = names.selector(include, exclude)
    entries = index.entries
    fqns = {e.fqn for e in entries if (only is None or e.section == only) and chosen(e.fqn)}
    lost = set(filter(chosen, index.lost))
    if not fqns:
        index.select(lost).require_whole()
        counts = Counter(entry.section for entry in entries)
        there = ", ".join(f"{count} {section}" for section, count in counts.items()) or "nothing"
        raise AnswerNo(
            f"{index.root}: no entry is chosen by these filters; it holds {there}.",
            hint="`ckpt-tools ls` lists the names; --only chooses a section.",
        )
    return index.select(fqns | lost)
