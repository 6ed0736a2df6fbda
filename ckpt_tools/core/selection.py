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
    """The part of a checkpoint that a section and name patterns choose.

    Raises AnswerNo when nothing is left.
    """
    chosen = names.selector(include, exclude)
    entries = index.entries
    fqns = {e.fqn for e in entries if (only is None or e.section == only) and chosen(e.fqn)}
    if not fqns:
        counts = Counter(entry.section for entry in entries)
        there = ", ".join(f"{count} {section}" for section, count in counts.items()) or "nothing"
        raise AnswerNo(
            f"{index.root}: no entry is chosen by these filters; it holds {there}.",
            hint="`ckpt-tools ls` lists the names; --only chooses a section.",
        )
    return index.select(fqns)
