"""Colours by rank that people with any colour vision can tell apart.

The palette is Okabe and Ito's (2008), in an order that sets neighbours far apart in lightness, too.
After eight, pictures repeat it with stripes; after four times that, `repeated` says so in words.
"""

from __future__ import annotations

HEX = ("#56b4e9", "#e69f00", "#009e73", "#f0e442", "#0072b2", "#cc79a7", "#d55e00", "#b3b3b3")
STRIPES = (45, 135, 90)  # degrees, of the second to fourth eight
DISTINCT = len(HEX) * (1 + len(STRIPES))

# The nearest colours of the 256 that terminals know.
_ANSI = (74, 214, 36, 227, 25, 175, 166, 249)
_DARK = frozenset({4})  # white letters are the readable ones on these


def ink(number: int) -> str:
    """A colour for letters on that of this number."""
    return "#fff" if number in _DARK else "#111"


def classes(holder: int) -> str:
    """The classes of `css` that paint a holder; stripes tell it from the others of its colour."""
    striped = holder // len(HEX) % (1 + len(STRIPES))
    return f"c{holder % len(HEX)}" + (f" s{striped}" if striped else "")


def css() -> str:
    """Rules for the classes of all holders."""
    # Stripes are away from the colour of the letters, which stay readable.
    plain = [
        f".c{n} {{ background-color: {fill}; color: {ink(n)}; "
        f"--away: {'#0005' if n in _DARK else '#fff8'}; }}"
        for n, fill in enumerate(HEX)
    ]
    striped = [
        f".s{n} {{ background-image: repeating-linear-gradient({degrees}deg, "
        "var(--away) 0 2px, transparent 2px 7px); }"
        for n, degrees in enumerate(STRIPES, start=1)
    ]
    return "\n".join([*plain, *striped, ""])


def repeated(holders: int) -> str | None:
    """What to say where the colours of so many holders are not all different."""
    if holders <= DISTINCT:
        return None
    return f"Colours and stripes repeat after {DISTINCT}: the numbers tell which is which."


def painted(text: str, holder: int) -> str:
    """Text on the colour of a holder, for a terminal."""
    place = holder % len(_ANSI)
    letters = 231 if place in _DARK else 16
    return f"\x1b[38;5;{letters};48;5;{_ANSI[place]}m{text}\x1b[0m"
