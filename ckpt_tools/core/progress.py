"""Progress: callbacks that get how many bytes were done since their last call, and notes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass


class Tally:
    """Passes numbers of bytes from any thread on to one callback."""

    def __init__(self, on_bytes: Callable[[int], None]) -> None:
        self._on_bytes = on_bytes
        self._lock = threading.Lock()
        self.total = 0

    def add(self, nbytes: int) -> None:
        """Count these bytes and call the callback."""
        with self._lock:
            self.total += nbytes
            self._on_bytes(nbytes)


def ignore_bytes(nbytes: int) -> None:
    """No-op progress callback."""


def ignore_note(note: str) -> None:
    """No-op callback for notes."""


def _ignore() -> None:
    """No-op callback."""


@dataclass(frozen=True, slots=True)
class Listener:
    """Who hears of the progress of a conversion.

    ``on_bytes`` gets the number of bytes that this process wrote or read back, ``on_total`` before
    that about how many there will be, ``on_note`` what a person must know before it is done.
    ``on_written`` is called when all is written, before it is renamed to its place.
    """

    on_bytes: Callable[[int], None] = ignore_bytes
    on_total: Callable[[int], None] = ignore_bytes
    on_note: Callable[[str], None] = ignore_note
    on_written: Callable[[], None] = _ignore


SILENT = Listener()
