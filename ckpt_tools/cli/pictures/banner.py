"""The head of a page: whether the checkpoint is whole, what wrote it and when, what is wrong.

A checkpoint that cannot be read has such a page, too.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from time import gmtime, strftime

from ckpt_tools._version import __version__
from ckpt_tools.analysis.inspection import Inspection, VerdictPart
from ckpt_tools.cli import choosing, report
from ckpt_tools.cli.pictures.shell import page, table, text, write
from ckpt_tools.copying import one_file
from ckpt_tools.core.index import CheckpointIndex, FileState
from ckpt_tools.core.text import first_of
from ckpt_tools.errors import CheckpointError
from ckpt_tools.formats import ReadOptions
from ckpt_tools.storage import paths
from ckpt_tools.storage.paths import last_written

_MAX_PROBLEMS, _MAX_FILES = 50, 500


def banner(inspection: Inspection) -> Iterator[str]:
    """The verdict, the version and the date of the source, and what is wrong with it."""
    facts = [report.written_as(inspection), _date(inspection.saved)]
    reasons = first_of(list(map(_why, inspection.problems)), _MAX_PROBLEMS)
    yield from _banner(inspection.root, inspection.state, facts, reasons)


def _banner(
    root: str, verdict: Sequence[VerdictPart], facts: Sequence[str], problems: Iterable[str]
) -> Iterator[str]:
    kinds = {part.kind for part in verdict}
    kind = next(kind for kind in ("bad", "doubtful", "good", "plain") if kind in kinds)
    words = ", ".join(f'<span class="{part.kind}">{text(part.text)}</span>' for part in verdict)
    yield f'<header class="banner {kind}"><h1>{text(root)}</h1>'
    source = " · ".join([*facts, f"read by ckpt-tools {__version__}"])
    yield f"<p><b>{words}</b></p><p>{text(source)}</p>"
    for problem in problems:
        yield f"<p>{'<br>'.join(text(line.strip()) for line in problem.splitlines())}</p>"
    yield "</header>"


def _date(seconds: float | None) -> str:
    if seconds is None:
        return "date of the files not known"
    return f"files of {strftime('%Y-%m-%d %H:%M UTC', gmtime(seconds))}"


def _why(error: CheckpointError) -> str:
    return "\n".join(filter(None, [error.message, error.hint]))


def read(ckpt: str, html: str, reading: ReadOptions, *, force: bool) -> CheckpointIndex:
    """The index of a checkpoint whose page is going to be ``html``.

    Where reading fails, that gets a page of why, and it fails. A path that is not there, or in
    whose place another was meant, is no broken checkpoint. Raises what `one_file.admit` raises.
    """
    if html != "-":
        one_file.admit(html, sources=[ckpt], force=force)
    try:
        return choosing.read(ckpt, reading)
    except CheckpointError as error:
        elsewhere = error.instead is not None and any(way.path for way in error.instead.ways)
        is_there = False
        with suppress(OSError):
            is_there = not elsewhere and (paths.exists(ckpt) or bool(paths.glob(ckpt)))
        if is_there:
            write(html, failure_page(ckpt, error), sources=(ckpt,), force=force)
        raise


def failure_page(ckpt: str, error: CheckpointError) -> str:
    """The page of a checkpoint that cannot be read: why, what to try, and the files there."""
    states: dict[str, FileState] = {}
    with suppress(OSError):
        states = paths.states(ckpt)
    verdict = [VerdictPart("CANNOT BE READ", "bad")]
    parts = list(_banner(ckpt, verdict, [_date(last_written(states))], [_why(error)]))
    shown = sorted(states.items())[:_MAX_FILES]
    rows = ((os.path.basename(path), f"{state.size:,}") for path, state in shown)
    parts += table(("FILE", "BYTES"), rows, numbers=[1])
    if len(states) > len(shown):
        parts.append(f'<p class="quiet">and {len(states) - len(shown):,} more files</p>')
    return page(f"Report of {ckpt}", parts)
