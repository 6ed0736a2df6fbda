"""Whether the ranks of a job are alive: each one counts up a key in the store, others look at it.

Rank 0 watches all ranks, and every rank watches rank 0. Time is counted in own looks, not by the
clock, so that a job that was suspended as a whole (`docker pause`) goes on when it wakes up.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Protocol

from ckpt_tools.distributed import environment
from ckpt_tools.distributed.environment import Place

_INTERVAL = 1.0
_RANKS_A_SECOND = 2000  # what one store answers beside its other work
_SECOND_LOOK = 5.0


class Store(Protocol):
    """What is used of torch's key-value store, which all ranks share."""

    def set(self, key: str, value: str) -> None: ...  # noqa: D102 (torch's)
    def get(self, key: str) -> bytes: ...  # noqa: D102
    def add(self, key: str, value: int) -> int: ...  # noqa: D102
    def check(self, keys: list[str]) -> bool: ...  # noqa: D102
    def multi_get(self, keys: list[str]) -> list[bytes]: ...  # noqa: D102


class Heartbeat:
    """Beats for this rank and watches others, in a thread of its own."""

    def __init__(self, store: Store, place: Place) -> None:
        self._store = store
        self._place = place
        self._limit = environment.peer_timeout()
        self._interval = min(max(_INTERVAL, place.world_size / _RANKS_A_SECOND), self._limit / 5)
        self._count = 0
        self._watched: list[int] = []
        self._seen: dict[int, tuple[bytes, int]] = {}
        self._stopped = threading.Event()
        self._lost: str | None = None
        self._last = time.monotonic()
        self._silent_since: float | None = None
        self.has_failed = False
        self.is_leaderless = False

    @contextmanager
    def running(self) -> Iterator[None]:
        """Beat as long as the block lasts."""
        with suppress(RuntimeError):  # a store that is gone is told of by whoever asks it next
            self._store.set(f"host/{self._place.rank}", os.uname().nodename)
            self._beat()
        thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._stopped.set()

    def watch(self) -> None:
        """From now on look for ranks that stop: all have begun."""
        if not self._watched:
            self._watched = [0] if self._place.rank else list(range(1, self._place.world_size))

    def trouble(self) -> str | None:
        """Why this job cannot go on, or None: a rank, an agent or the store is gone."""
        if self._lost is None and time.monotonic() - self._last > self._limit:
            # This process itself may have been stopped for so long: look once more.
            now = time.monotonic()
            self._silent_since = self._silent_since or now
            if now - self._silent_since > _SECOND_LOOK:
                self.store_is_gone(f"no answer for {self._limit:.0f} seconds")
        else:
            self._silent_since = None
        return self._lost

    def store_is_gone(self, why: str) -> str:
        """Note that the store does not answer any more; gives the words for it."""
        self.is_leaderless = True
        address = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        self._lost = self._lost or (
            f"The torchrun job's store at {address} is gone ({why}): "
            "its node or the torchrun agent there has ended."
        )
        return self._lost

    def report(self, text: str) -> None:
        """Tell all ranks that the job cannot go on."""
        with suppress(RuntimeError):
            self._store.set("lost", text)
        self._lost = self._lost or text

    def _run(self) -> None:
        while self._lost is None and not self._stopped.wait(self._interval):
            try:
                self._beat()
                self._look()
            except RuntimeError as error:
                if not self._stopped.is_set():
                    self.store_is_gone(str(error).partition("\n")[0])

    def _beat(self) -> None:
        self._count += 1
        self._store.set(f"beat/{self._place.rank}", str(self._count))
        self._last = time.monotonic()

    def _look(self) -> None:
        self.has_failed = self._store.check(["failed"])
        if self._store.check(["lost"]):
            self._lost = self._store.get("lost").decode()
            return
        if environment.is_orphan():
            self.is_leaderless = True
            self.report(
                f"{self._name(self._place.rank)} has lost the torchrun agent that started it."
            )
            return
        if not self._watched:
            return
        beats = self._store.multi_get([f"beat/{rank}" for rank in self._watched])
        for rank, beat in zip(self._watched, beats, strict=True):
            last, looks = self._seen.get(rank, (b"", 0))
            self._seen[rank] = (beat, looks + 1 if beat == last else 0)
        lost = [r for r, (_, looks) in self._seen.items() if looks * self._interval >= self._limit]
        if lost:
            self.is_leaderless = lost[0] == 0
            more = f" and {len(lost) - 1} more" if len(lost) > 1 else ""
            self.report(
                f"{self._name(lost[0])}{more} gave no sign of life for {self._limit:.0f} seconds: "
                "killed, stopped, or cut off from the network."
            )

    def _name(self, rank: int) -> str:
        key = f"host/{rank}"
        host = self._store.get(key).decode() if self._store.check([key]) else "an unknown node"
        return f"Rank {rank} on {host}"
