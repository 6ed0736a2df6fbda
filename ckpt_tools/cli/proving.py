"""What the commands that read every value share: their -j, and numbers for a person."""

from __future__ import annotations

import click


def threads() -> click.Parameter:
    """-j, as ``threads``; None leaves the number to the machine and the work."""
    return click.Option(
        ["-j", "--threads"],
        type=click.IntRange(min=1),
        default=None,
        show_default="the cores this process may use, 16 at most",
        help="Tensors or byte ranges read at a time.",
    )


def number(value: complex | None) -> str:
    """A number in a few digits, ``-`` for none."""
    if value is None:
        return "-"
    if isinstance(value, int) and abs(value) < 10**12:
        return str(value)
    if isinstance(value, (int, float)):
        return f"{value:.4g}"
    return f"{value.real:.4g}{value.imag:+.4g}j"
