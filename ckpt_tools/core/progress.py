"""Progress in bytes: a callback gets how many were done since its last call."""

from __future__ import annotations

import threading
from collections.abc import Callable


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
