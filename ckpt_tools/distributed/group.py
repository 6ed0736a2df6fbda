"""The ranks of a torchrun job as a group: they start, fail and end together.

They meet through the job's own key-value store, a few bytes at a time, so that a rank that waits
can still be told that another has failed, and can be stopped. No tensor goes this way.
"""

from __future__ import annotations

import atexit
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from itertools import count
from typing import Protocol

from ckpt_tools.distributed import messages
from ckpt_tools.distributed.environment import Place, let_it_finish
from ckpt_tools.errors import CkptError, UsageError

_FIRST_MEETING = 300.0  # seconds: as long as torch's own rendezvous waits
_LAST_WORD = 60.0
_LONGEST_PAUSE = 0.05
_RANKS_A_MILLISECOND = 20  # what one store answers without being flooded
_LOOK_EVERY = 0.5

# A process may join its job again and again, and must not find what was said the last time.
_groups = count()


class Store(Protocol):
    """What is used of torch's key-value store, which all ranks share."""

    def set(self, key: str, value: str) -> None: ...  # noqa: D102 (torch's)
    def get(self, key: str) -> bytes: ...  # noqa: D102
    def add(self, key: str, value: int) -> int: ...  # noqa: D102
    def check(self, keys: list[str]) -> bool: ...  # noqa: D102


class ElsewhereError(CkptError):
    """Another rank has failed; what it says is known when the ranks meet."""


class Group:
    """All ranks of the job. Each makes one, and calls the same methods in the same order."""

    def __init__(self, store: Store, place: Place) -> None:
        self._store = store
        self._place = place
        self._meetings = 0
        self._is_over = False
        self._looked_at = 0.0
        self._lock = threading.Lock()

    @classmethod
    def join(cls, place: Place) -> Group:
        """Find the other ranks of the job. Raises UsageError when they do not come."""
        # torch is needed for its store alone, and costs seconds: only ranks of a job pay for it.
        from torch.distributed import PrefixStore, rendezvous  # type: ignore[attr-defined]

        limit = timedelta(seconds=_FIRST_MEETING)
        try:
            store, _, _ = next(rendezvous("env://", timeout=limit))
        except (RuntimeError, OSError) as error:
            raise _nobody_came(place, str(error).partition("\n")[0]) from error
        group = cls(PrefixStore(f"ckpt-tools/{next(_groups)}", store), place)
        atexit.unregister(let_it_finish)
        atexit.register(group._leave)
        return group

    @property
    def place(self) -> Place:
        """Which rank of the job this process is."""
        return self._place

    @property
    def rank(self) -> int:
        """The number of this rank."""
        return self._place.rank

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self._place.world_size

    @property
    def store(self) -> Store:
        """The store, for others that put a prefix of their own before their keys."""
        return self._store

    def meet(self, error: BaseException | None = None) -> None:
        """Wait until all ranks are here; raise the error of the first of them that brings one."""
        self._meetings += 1
        room = str(self._meetings)
        if error is not None:
            self._store.set(f"{room}/error/{self.rank}", messages.encode(error))
            self._store.set("failed", "1")
            self._store.add(f"{room}/failed", 1)
        self._store.add(f"{room}/here", 1)
        limit = _FIRST_MEETING if self._meetings == 1 else None
        self._wait(lambda: self._store.add(f"{room}/here", 0) >= self.size, limit=limit)
        if self._store.add(f"{room}/failed", 0):
            self._is_over = True
            raise self._first_error(room)

    def tell(self, text: str) -> str:
        """The text that rank 0 has: what another rank says here is not looked at."""
        if self.rank == 0:
            self._store.set(f"{self._meetings + 1}/told", text)
        self.meet()
        return self._store.get(f"{self._meetings}/told").decode()

    @contextmanager
    def together(self) -> Iterator[None]:
        """A block that ends well on all ranks or on none: what one rank raises, all raise."""
        try:
            yield
            self.meet()
        except BaseException as error:
            if self._is_over or isinstance(error, KeyboardInterrupt):
                raise
            self.meet(None if isinstance(error, ElsewhereError) else error)
            raise

    def look_around(self) -> None:
        """Raise ElsewhereError when another rank has failed; asks the store only now and then."""
        now = time.monotonic()
        if now - self._looked_at < _LOOK_EVERY or not self._lock.acquire(blocking=False):
            return
        try:
            self._looked_at = now
            if self._store.check(["failed"]):
                raise ElsewhereError("Another rank has failed.")
        finally:
            self._lock.release()

    def _first_error(self, room: str) -> CkptError:
        """The error of the lowest rank that failed, with its number unless it is this rank's."""
        failed = (r for r in range(self.size) if self._store.check([f"{room}/error/{r}"]))
        rank = next(failed)
        error = messages.decode(self._store.get(f"{room}/error/{rank}").decode())
        return error if rank == 0 else error.at(f"Rank {rank}")

    def _wait(self, done: Callable[[], bool], *, limit: float | None) -> None:
        """Ask again and again, so that a signal can end the wait."""
        longest = max(_LONGEST_PAUSE, self.size / _RANKS_A_MILLISECOND / 1000)
        pause = 0.001
        end = None if limit is None else time.monotonic() + limit
        while not done():
            if end is not None and time.monotonic() > end:
                raise _nobody_came(self._place, f"waited {limit:.0f} seconds")
            time.sleep(pause)
            pause = min(longest, pause * 1.5)

    def _leave(self) -> None:
        """Let rank 0 have the last word: torchrun ends all ranks as soon as one has failed."""
        with suppress(RuntimeError):  # the store is gone with rank 0: that was its last word
            if self.rank == 0:
                self._store.set("ended", "1")
                return
            end = time.monotonic() + _LAST_WORD
            while not self._store.check(["ended"]) and time.monotonic() < end:
                time.sleep(_LONGEST_PAUSE)


def join(place: Place, *, workers: int) -> Group:
    """The group of all ranks of this job. Raises UsageError for workers beside them, and when the
    other ranks do not come.
    """
    if workers > 1:
        raise UsageError(
            f"-j {workers} starts workers of its own, but this is a torchrun job, whose "
            f"{place.world_size} ranks are the workers.",
            hint="Leave -j out, or run without torchrun.",
        )
    return Group.join(place)


def _nobody_came(place: Place, why: str) -> UsageError:
    return UsageError(
        f"Rank {place.rank} did not find the {place.world_size} ranks of its torchrun job ({why}).",
        hint="All ranks must run this same command. Inside of another torchrun job, run it without "
        "that job's variables: env -u RANK ckpt-tools …",
    )
