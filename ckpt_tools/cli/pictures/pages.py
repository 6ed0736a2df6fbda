"""Pages for a colleague: the report of `inspect`, and who holds what before and after a reshard."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from ckpt_tools.analysis.inspection import Inspection
from ckpt_tools.analysis.ownership import Holdings, Moved, holdings_of
from ckpt_tools.cli import entries, render, report
from ckpt_tools.cli.pictures.banner import banner
from ckpt_tools.cli.pictures.bars import who_holds_what
from ckpt_tools.cli.pictures.shell import page, table, text
from ckpt_tools.cli.pictures.text import moved_words
from ckpt_tools.core.index import CheckpointIndex
from ckpt_tools.core.text import counted, format_size
from ckpt_tools.errors import CheckpointError
from ckpt_tools.proof.look import look
from ckpt_tools.storage.reader import Files

if TYPE_CHECKING:
    from ckpt_tools.proof.stats import Statistics

_MAX_OBJECTS, _MAX_STATS, _MAX_OPEN = 500, 5_000, 60
_WIDE, _HIGH = 120, 20
_STATS_HEADER = ("NAME", "MEAN", "STD", "MIN", "MAX", "L2", "NAN", "INF", "ZEROS", "SPREAD")


def layout_page(
    inspection: Inspection,
    before: Holdings,
    after: Moved | None = None,
    *,
    damaged: frozenset[str] = frozenset(),
) -> str:
    """Who holds what of a checkpoint, and after a reshard if there is one."""
    facts = [counted(len(before.tensors), "tensor")]
    facts.append(format_size(sum(held.nbytes for held in before.tensors)))
    if after is not None:
        facts.append(moved_words(after))
    parts = [*banner(inspection), f"<p>{text(', '.join(facts))}.</p>"]
    parts += who_holds_what(before, after, damaged=damaged)
    return page(f"Layout of {inspection.root}", parts)


class _Seen(NamedTuple):
    """All values of a checkpoint: statistics, and the counts of each tensor's histogram by name."""

    statistics: Statistics
    histograms: Mapping[str, tuple[int, ...]]


def read_values(index: CheckpointIndex) -> _Seen:
    """Read every tensor, twice. Raises what keeps the tensors from being whole."""
    from ckpt_tools.proof.stats import histograms, stats  # late: both need numpy

    with render.byte_bar(2 * index.count.nbytes, label="stats") as on_bytes, Files() as files:
        statistics = stats(index, files, on_bytes=on_bytes)
        return _Seen(statistics, histograms(index, files, statistics, on_bytes=on_bytes))


def report_page(
    whole: CheckpointIndex,
    index: CheckpointIndex,
    *,
    seen: _Seen | None,
    unseen: CheckpointError | None,
) -> str:
    """The page of a checkpoint; the filters chose ``index`` out of ``whole``.

    ``unseen`` is why its values could not be read.
    """
    inspection = look(whole, index)
    parts = [*banner(inspection), *_facts(report.identity(inspection))]
    parts += table(report.SECTION_HEADER, report.section_rows(index), numbers=range(1, 5))
    parts += _facts(report.state(inspection))
    if unseen is not None:
        parts.append(f'<p class="bad">The values were not read: {text(unseen.message)}</p>')
    if seen is not None:
        parts += _values(seen)
    parts.append("<h2>Who holds what</h2>")
    parts += who_holds_what(holdings_of(index, inspection.mesh), damaged=whole.damaged)
    if index.objects:
        number = counted(len(index.objects), "object")
        parts.append(f'<details class="section"><summary>{number}</summary>')
        rows = [(one.fqn, entries.value_text(one)[:400]) for one in index.objects[:_MAX_OBJECTS]]
        parts += table(("NAME", "VALUE"), rows)
        if len(index.objects) > _MAX_OBJECTS:
            more = len(index.objects) - _MAX_OBJECTS
            parts.append(f'<p class="quiet">and {more:,} more</p>')
        parts.append("</details>")
    return page(f"Report of {whole.root}", parts)


def _facts(pairs: Iterable[render.Fact]) -> Iterator[str]:
    yield "<dl>"
    for label, value in pairs:
        lines = "<br>".join(map(text, [value] if isinstance(value, str) else value))
        yield f"<dt>{text(label)}</dt><dd>{lines}</dd>"
    yield "</dl>"


def _values(seen: _Seen) -> Iterator[str]:
    """What is odd, and a row of numbers for each tensor, with its histogram."""
    if seen.statistics.anomalies:
        yield '<h2 class="bad">Suspicious regions: their edges are shard edges</h2>'
        odd = [
            (
                one.kind,
                one.fqn,
                str(one.box),
                "-" if one.rank is None else str(one.rank),
                one.detail,
            )
            for one in seen.statistics.anomalies[:500]
        ]
        yield from table(("KIND", "NAME", "BOX", "RANK", "DETAIL"), odd)
    else:
        yield '<p class="quiet">No suspicious values at the edges of shards.</p>'
    tensors = seen.statistics.tensors
    bad = seen.statistics.nonfinite
    nonfinite = f", <span class=bad>{bad:,} values are NaN or infinite</span>" if bad else ""
    opened = " open" if len(tensors) <= _MAX_OPEN else ""
    number = counted(len(tensors), "tensor")
    yield f'<details class="section"{opened}><summary>Values of {number}{nonfinite}</summary>'
    yield '<div class="scroll"><table class="mono stats"><thead><tr>'
    for name in _STATS_HEADER:
        yield f'<th class="{"" if name in ("NAME", "SPREAD") else "n"}">{name.lower()}</th>'
    yield "</tr></thead><tbody>"
    for one in tensors[:_MAX_STATS]:
        titled = zip(_STATS_HEADER[1:-1], entries.stats_cells(one), strict=True)
        cells = "".join(f'<td class="n" title="{t.lower()}">{text(c)}</td>' for t, c in titled)
        counts = seen.histograms.get(one.fqn)
        drawn = "" if counts is None else _histogram(counts)
        yield f'<tr><td class="name">{text(one.fqn)}</td>{cells}<td>{drawn}</td></tr>'
    yield "</tbody></table></div>"
    if len(tensors) > _MAX_STATS:
        yield f'<p class="quiet">and {len(tensors) - _MAX_STATS:,} more; `stats --csv` has all</p>'
    yield "</details>"


def _histogram(counts: Sequence[int]) -> str:
    """Columns between the least and the greatest value."""
    most, step = max(counts) or 1, _WIDE / len(counts)
    bars = "".join(
        f"M{place * step:g} {_HIGH}v{-max(1.0, _HIGH * count / most):.1f}h{step - 0.5:g}V{_HIGH}z"
        for place, count in enumerate(counts)
        if count
    )
    return (
        f'<svg class="hist" viewBox="0 0 {_WIDE} {_HIGH}" role="img" aria-label="histogram">'
        f'<path d="{bars}"/></svg>'
    )
