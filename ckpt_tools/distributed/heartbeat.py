"""Are the ranks of a job alive? Each increments a key in the store, and others watch it.

Rank 0 watches all ranks, which have met (`meeting`), and every rank watches rank 0. Time is counted
in polls, not by the clock, so that a job that was suspended as a whole (`docker pause`) continues
when it is resumed.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Protocol

from ckpt_tools.distributed import environment, messages
from ckpt_tools.distributed.environment import RankPlace
from ckpt_tools.errors import CkptError, PeerFailedError

_INTERVAL = 1.0
_RANKS_A_SECOND = 2000  # requests that one store answers beside its other work
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

    def __init__(self, store: Store, place: RankPlace) -> None:
        self._store = store
        self._place = place
        self._limit = environment.peer_timeout()
        self._interval = min(max(_INTERVAL, place.world_size / _RANKS_A_SECOND), self._limit / 5)
        self._count = 0
        self._watched = [0] if place.rank else list(range(1, place.world_size))
        self._seen: dict[int, tuple[bytes, int]] = {}
        self._stopped = threading.Event()
        self._lost: CkptError | None = None
        self._last = time.monotonic()
        self._silent_since: float | None = None
        self.has_failed = False
        self.is_leaderless = False

    @contextmanager
    def running(self) -> Iterator[None]:
        """Beat as long as the block lasts."""
        with suppress(RuntimeError):  # the next request to the store reports that it is gone
            self._store.set(f"host/{self._place.rank}", os.uname().nodename)
            self._beat()
        thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._stopped.set()
            thread.join(_SECOND_LOOK)  # Python must not exit while the thread is in torch's code

    def trouble(self) -> CkptError | None:
        """Why this job cannot continue, or None: a rank or the store is gone."""
        if self._lost is None and time.monotonic() - self._last > self._limit:
            # This process itself may have been suspended for so long: look once more.
            now = time.monotonic()
            self._silent_since = self._silent_since or now
            if now - self._silent_since > _SECOND_LOOK:
                self.store_is_gone(f"no answer for {self._limit:.0f} seconds")
        else:
            self._silent_since = None
        return self._lost

    def store_is_gone(self, why: str) -> CkptError:
        """Note that the store does not answer any more; gives the error for it."""
        self.is_leaderless = True
        self._lost = self._lost or store_is_gone(why)
        return self._lost

    def report(self, error: CkptError) -> None:
        """Publish to all ranks why the job cannot continue."""
        with suppress(RuntimeError):
            self._store.set("lost", messages.encode(error))
        self._lost = self._lost or error

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
            self.is_leaderless = self._store.check(["leaderless"])
            self._lost = messages.decode(self._store.get("lost").decode())
        else:
            self._look_for_silent()

    def _look_for_silent(self) -> None:
        beats = self._store.multi_get([f"beat/{rank}" for rank in self._watched])
        for rank, beat in zip(self._watched, beats, strict=True):
            last, looks = self._seen.get(rank, (b"", 0))
            self._seen[rank] = (beat, looks + 1 if beat == last else 0)
        lost = [r for r, (_, looks) in self._seen.items() if looks * self._interval >= self._limit]
        if lost:
            more = f" and {len(lost) - 1} more" if len(lost) > 1 else ""
            error = _gone(
                f"{self._name(lost[0])}{more} sent no heartbeat for {self._limit:.0f} "
                "seconds: killed, stopped, or cut off from the network."
            )
            if 0 in lost:  # others must speak
                self.is_leaderless = True
                self._store.set("leaderless", "1")
            self.report(error)

    def _name(self, rank: int) -> str:
        key = f"host/{rank}"
        host = self._store.get(key).decode() if self._store.check([key]) else "an unknown node"
        return f"Rank {rank} on {host}"


def store_is_gone(why: str) -> PeerFailedError:
    """The error for a job whose store does not answer."""
    address = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
    return _gone(
        f"The torchrun job's store at {address} is gone ({why}): "
        "its node or the torchrun agent there has ended."
    )


def _gone(text: str) -> PeerFailedError:
    return PeerFailedError(text, hint="Check that node, then run the same command again.")
