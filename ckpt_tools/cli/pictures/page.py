"""Who holds what as a page: every tensor, folded by layer, before and after a reshard."""

from __future__ import annotations

from collections.abc import Sequence

from ckpt_tools.analysis.inspection import Inspection
from ckpt_tools.analysis.ownership import Holdings, Moved
from ckpt_tools.cli.pictures.banner import banner, named_by
from ckpt_tools.cli.pictures.bars import who_holds_what
from ckpt_tools.cli.pictures.shell import page, text
from ckpt_tools.cli.pictures.text import moved_words
from ckpt_tools.core.text import counted, format_size
from ckpt_tools.errors import CheckpointError


def layout_page(
    inspection: Inspection,
    before: Holdings,
    *,
    target: Holdings | None = None,
    change: Moved | None = None,
    problems: Sequence[CheckpointError] = (),
) -> str:
    """The page of a checkpoint, and of its layout after a reshard when there is a target."""
    facts = [counted(len(before.tensors), "tensor")]
    facts.append(format_size(sum(held.nbytes for held in before.tensors)))
    if target is not None and change is not None:
        facts.append(moved_words(target, change))
    parts = [*banner(inspection, problems), f"<p>{text(', '.join(facts))}.</p>"]
    parts += who_holds_what(before, target=target, change=change, damaged=named_by(problems))
    return page(f"Layout of {inspection.root}", parts)
