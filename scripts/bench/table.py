"""Rounds of measurements as a Markdown table: every ratio is taken inside one round, where the
machine was as busy for both, and shown as the median over the rounds, with the range.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from statistics import median

from measure import Cost

HEADER = (
    "| case | command | seconds | CPU seconds | of the base (range) | CPU of the base "
    "| ours is faster by (range) | peak MiB a process |\n|---|---|--:|--:|--:|--:|--:|--:|"
)


def rows(
    case: str, costs: Mapping[str, Sequence[Cost]], *, ours: str, base: str | None
) -> Iterator[str]:
    """One row for each command of a case; ``costs`` has its costs round by round."""
    for name, mine in costs.items():
        against = costs.get(base or "")
        cells = [
            case,
            f"{name} (base)" if name == base else name,
            f"{median(cost.seconds for cost in mine):.2f}",
            f"{median(cost.cpu for cost in mine):.2f}",
            _ratio([c.seconds for c in mine], [c.seconds for c in against]) if against else "",
            _middle([c.cpu for c in mine], [c.cpu for c in against]) if against else "",
            ""
            if name == ours or ours not in costs
            else _ratio([c.seconds for c in mine], [c.seconds for c in costs[ours]]),
            f"{max(cost.peak for cost in mine) / 2**20:,.0f}",
        ]
        yield f"| {' | '.join(cells)} |"


def _ratios(above: Sequence[float], below: Sequence[float]) -> list[float]:
    return [a / max(b, 1e-9) for a, b in zip(above, below, strict=False)]


def _middle(above: Sequence[float], below: Sequence[float]) -> str:
    return f"{median(_ratios(above, below)):.2f}"


def _ratio(above: Sequence[float], below: Sequence[float]) -> str:
    ratios = _ratios(above, below)
    return f"{median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
