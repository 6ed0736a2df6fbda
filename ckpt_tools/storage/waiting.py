"""How long a store that does not answer is asked again. It knows nothing of stores."""

from __future__ import annotations

import time
from collections.abc import Callable
from errno import EAGAIN
from threading import Lock
from typing import TypeVar

Result = TypeVar("Result")
PATIENCE = 30.0  # seconds, by default


class _Waiting:
    """Asks stores again for ``patience`` seconds: one that is gone is one wait for all threads
    together.

    The first wait takes up to ``pause`` seconds, each later one twice as long, up to 5. ``on_wait``
    gets a line when it has waited for ``silence`` seconds. Once ``is_stopped``, each question is
    asked once.
    """

    def __init__(self) -> None:
        self.patience, self.silence, self.pause = PATIENCE, 3.0, 0.2
        self.is_stopped = False
        self.on_wait: Callable[[str], object] = lambda _: None
        self._lock = Lock()
        self._since: float | None = None  # no thread had an answer
        self._has_said = False

    def asked(self, ask: Callable[[], Result]) -> Result:
        """The answer. Raises OSError: a fault that may pass (EAGAIN) when it has not in time."""
        from random import uniform  # late: few commands ask a store

        pause, since = self.pause, 0.0
        while True:
            try:
                answer = ask()
            except OSError as error:
                if error.errno != EAGAIN or self.is_stopped:
                    raise
                since = since or time.monotonic()
                waited = self._waited(since, error)
                if waited >= self.patience:
                    why = f"{error.strerror}, for {waited:.0f} seconds"
                    raise OSError(0, why, error.filename) from error
            else:
                self._since, self._has_said = None, False
                return answer
            end = time.monotonic() + pause * uniform(0.5, 1.0)  # noqa: S311 (not all at once)
            while time.monotonic() < end and not self.is_stopped:
                time.sleep(min(0.1, pause))
            pause = min(2 * pause, 5.0)

    def _waited(self, since: float, error: OSError) -> float:
        """For how long this thread, or all, have had no answer."""
        with self._lock:
            if self._since is None:
                self._since = since
            waited = time.monotonic() - min(since, self._since)
            if waited >= self.silence and not self._has_said:
                self._has_said = True
                wait = f"waiting up to {self.patience:.0f} seconds"
                self.on_wait(f"{error.filename}: {error.strerror}; {wait}.")
            return waited


WAITING = _Waiting()


def wait_for_stores(seconds: float) -> None:
    """Ask stores that do not answer again for so long from now on; 30 seconds by default."""
    WAITING.patience = seconds
