"""The report of `inspect` as a page for a colleague: facts, sections, values, who holds what."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from ckpt_tools.analysis.ownership import holdings_of
from ckpt_tools.cli import entries, options, report
from ckpt_tools.cli.pictures.page import LIST, SCRIPTS, heads, layout_data
from ckpt_tools.cli.pictures.shell import page, text
from ckpt_tools.cli.values import Seen
from ckpt_tools.core.index import CheckpointIndex, ObjectEntry
from ckpt_tools.core.text import counted
from ckpt_tools.proof import Anomaly
from ckpt_tools.proof.stats import TensorStats

_MAX_OBJECTS, _MAX_STATS, _MAX_OPEN = 500, 5_000, 60
_WIDE, _HIGH = 120, 20
_STATS_HEADER = ("NAME", "MEAN", "STD", "MIN", "MAX", "L2", "NAN", "INF", "ZEROS", "SPREAD")


def report_page(whole: CheckpointIndex, index: CheckpointIndex, *, seen: Seen | None) -> str:
    """The page of a checkpoint; the filters chose ``index`` out of ``whole``."""
    parts = ["<main>", f"<h1>{text(whole.root)}</h1>"]
    facts = report.look(whole, index)
    parts.append(f"<p><b>{text(', '.join(part.text for part in facts.verdict))}</b></p>")
    parts += _facts(report.identity(facts))
    parts += _table(report.SECTION_HEADER, report.section_rows(index), numbers=range(1, 5))
    parts += _facts(report.state(whole, facts))
    parts += _problems(whole)
    if seen is not None:
        parts += _anomalies(seen.statistics.anomalies)
        parts += _statistics(seen)
    parts += ["<h2>Who holds what</h2>", '<div id="sides" class="sides"></div>']
    parts += [LIST.format(heads=heads(None)), *_objects(index.objects), "</main>"]
    parts += ['<div id="tip" role="tooltip"></div>', '<aside id="detail"></aside>']
    data = layout_data(holdings_of(index, facts.mesh))
    return page(f"Report of {whole.root}", parts, scripts=SCRIPTS, data=data)


def _facts(pairs: Iterable[tuple[str, str]]) -> Iterator[str]:
    yield "<dl>"
    for label, words in pairs:
        lines = "<br>".join(text(line) for line in words.split("\n"))
        yield f"<dt>{text(label)}</dt><dd>{lines}</dd>"
    yield "</dl>"


def _table(
    header: Sequence[str], rows: Iterable[Sequence[str]], *, numbers: Iterable[int]
) -> Iterator[str]:
    """A table of texts; ``numbers`` are the columns that are set to the right."""
    right = frozenset(numbers)
    styles = [' class="n"' if place in right else "" for place in range(len(header))]
    yield '<div class="scroll"><table><thead><tr>'
    for style, name in zip(styles, header, strict=True):
        yield f"<th{style}>{text(name.lower())}</th>"
    yield "</tr></thead><tbody>"
    for row in rows:
        cells = (f"<td{style}>{text(cell)}</td>" for style, cell in zip(styles, row, strict=True))
        yield f"<tr>{''.join(cells)}</tr>"
    yield "</tbody></table></div>"


def _problems(whole: CheckpointIndex) -> Iterator[str]:
    if not whole.problems:
        return
    yield '<h2 class="bad">Not whole</h2><ul>'
    for problem in whole.problems[:50]:
        yield f"<li>{text(problem.message)}</li>"
    if len(whole.problems) > 50:
        yield f"<li>and {len(whole.problems) - 50:,} more</li>"
    yield "</ul>"


def _anomalies(found: Sequence[Anomaly]) -> Iterator[str]:
    if not found:
        yield '<p class="quiet">No value stands out along the edges of a shard.</p>'
        return
    yield '<h2 class="bad">Look at these: their edges are shard edges</h2>'
    rows = [
        (odd.kind, odd.fqn, str(odd.box), "-" if odd.rank is None else str(odd.rank), odd.detail)
        for odd in found[:500]
    ]
    yield from _table(("KIND", "NAME", "BOX", "RANK", "DETAIL"), rows, numbers=())


def _statistics(seen: Seen) -> Iterator[str]:
    """A row of numbers for each tensor, with its histogram."""
    tensors = seen.statistics.tensors
    bad = seen.statistics.nonfinite
    odd = f", <span class=bad>{bad:,} values are NaN or infinite</span>" if bad else ""
    opened = " open" if len(tensors) <= _MAX_OPEN else ""
    yield f"<details{opened}><summary>Values of {counted(len(tensors), 'tensor')}{odd}</summary>"
    yield '<div class="scroll"><table class="mono"><thead><tr>'
    for name in _STATS_HEADER:
        yield f'<th class="{"" if name in ("NAME", "SPREAD") else "n"}">{name.lower()}</th>'
    yield "</tr></thead><tbody>"
    for one in tensors[:_MAX_STATS]:
        yield _stats_row(one, seen.histograms.get(one.fqn))
    yield "</tbody></table></div>"
    if len(tensors) > _MAX_STATS:
        yield f'<p class="quiet">and {len(tensors) - _MAX_STATS:,} more; `stats --csv` has all</p>'
    yield "</details>"


def _stats_row(one: TensorStats, counts: Sequence[int] | None) -> str:
    values = map(options.number, (one.mean, one.std, one.min, one.max, one.l2))
    tallies = (f"{count:,}" for count in (one.nan, one.inf, one.zeros))
    cells = "".join(f'<td class="n">{text(cell)}</td>' for cell in (*values, *tallies))
    drawn = "" if counts is None else _histogram(counts)
    return f'<tr><td class="name">{text(one.fqn)}</td>{cells}<td>{drawn}</td></tr>'


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


def _objects(objects: Sequence[ObjectEntry]) -> Iterator[str]:
    if not objects:
        return
    yield f"<details><summary>{counted(len(objects), 'object')}</summary>"
    rows = [(one.fqn, entries.value_text(one)[:400]) for one in objects[:_MAX_OBJECTS]]
    yield from _table(("NAME", "VALUE"), rows, numbers=())
    if len(objects) > _MAX_OBJECTS:
        yield f'<p class="quiet">and {len(objects) - _MAX_OBJECTS:,} more</p>'
    yield "</details>"
