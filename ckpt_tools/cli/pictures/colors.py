"""Colours by rank that people with any colour vision can tell apart.

The palette is Okabe and Ito's (2008), in an order that sets neighbours far apart in lightness, too.
It repeats after eight; numbers and edges tell the rest.
"""

from __future__ import annotations

HEX = (
    "#56b4e9",
    "#e69f00",
    "#009e73",
    "#f0e442",
    "#0072b2",
    "#cc79a7",
    "#d55e00",
    "#b3b3b3",
)
NOBODY = "#8886"

# The nearest colours of the 256 that terminals know.
_ANSI = (74, 214, 36, 227, 25, 175, 166, 249)
_DARK = frozenset({4})  # white letters are the readable ones on these


def fill(holder: int) -> str:
    """The colour of a holder, as CSS has it."""
    return HEX[holder % len(HEX)]


def ink(holder: int) -> str:
    """A colour for letters on that."""
    return "#fff" if holder % len(HEX) in _DARK else "#111"


def painted(text: str, holder: int) -> str:
    """Text on the colour of a holder, for a terminal."""
    place = holder % len(_ANSI)
    letters = 231 if place in _DARK else 16
    return f"\x1b[38;5;{letters};48;5;{_ANSI[place]}m{text}\x1b[0m"
