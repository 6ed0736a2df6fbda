"""What a person may ask of a reader."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ReadOptions:
    """``allow_globals`` names pickled globals to read as opaque values, which are never run."""

    allow_globals: tuple[str, ...] = ()
