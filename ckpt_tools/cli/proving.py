"""What the commands that read every value share: their -j, and numbers for a person."""

from __future__ import annotations

import os

import click


def threads() -> click.Parameter:
    """-j, as ``threads``: half of the processors that this process may use, 8 at most."""
    return click.Option(
        ["-j", "--threads"],
        type=click.IntRange(min=1),
        default=_usual_threads,
        show_default="the processors, 8 at most",
        help="Tensors or byte ranges read at a time.",
    )


def _usual_threads() -> int:
    if hasattr(os, "sched_getaffinity"):
        return min(8, len(os.sched_getaffinity(0)))
    return min(8, os.cpu_count() or 1)


def number(value: complex | None) -> str:
    """A number in a few digits, ``-`` for none."""
    if value is None:
        return "-"
    if isinstance(value, int) and abs(value) < 10**12:
        return str(value)
    if isinstance(value, (int, float)):
        return f"{value:.4g}"
    return f"{value.real:.4g}{value.imag:+.4g}j"
