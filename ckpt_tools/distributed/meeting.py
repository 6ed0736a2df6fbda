"""Where the ranks of one attempt of a job find one another, in a store that all attempts share.

torchrun --max-restarts starts ranks again beside what the last ones have left in the job's store.
Each agent counts the failures of its own ranks alone, so no number that a rank is given says which
attempt it is of. Rank 0 names it, and says so again when it has seen every rank of it:

    rank 0 of the first     name = a81f              is killed
    rank 1 of the second    a81f/rank/1 = 77c0       joins what it finds, and waits
    rank 0 of the second    name = 3e52
    rank 1 of the second    3e52/rank/1 = 77c0       sees another name
    rank 0 of the second    3e52/all = 1,3e52,77c0   one attempt before this, and its ranks
"""

from __future__ import annotations

import secrets
import time

from ckpt_tools.core.text import some
from ckpt_tools.distributed import environment, messages
from ckpt_tools.distributed.environment import RankPlace
from ckpt_tools.distributed.heartbeat import Store
from ckpt_tools.errors import PeerFailedError

_PAUSE = 0.05
_RANKS_A_SECOND = 20_000  # requests that one store can answer
_SECOND_LOOK = 5.0
_NAMED = 8


def meet(store: Store, place: RankPlace, room: str) -> tuple[str, int]:
    """Wait for all ranks of this attempt, under the keys ``room``.

    Gives the prefix of the attempt's own keys, and how many attempts there were before it. Raises
    PeerFailedError when some do not come, and RuntimeError when the store is gone.
    """
    return _Meeting(store, place, room).attempt()


class _Meeting:
    """What one rank knows of it; ``mine`` is this process alone, and the name if it is rank 0."""

    def __init__(self, store: Store, place: RankPlace, room: str) -> None:
        self._store, self._place, self._room = store, place, room
        self._mine = secrets.token_hex(8)
        self._prefix = ""
        self._pause = max(_PAUSE, place.world_size / _RANKS_A_SECOND)

    def attempt(self) -> tuple[str, int]:
        """Wait until rank 0 has seen this process. Waits are counted in looks, not by the clock, so
        that a job may be suspended.
        """
        before = 0
        if self._place.rank == 0:
            before = self._store.add(f"{self._room}/attempts", 1) - 1
            self._store.set(f"{self._room}/name", self._mine)
        looks = joined = 0
        while True:
            self._join()
            if self._place.rank == 0 and self._store.check(self._ranks()):
                tokens = [token.decode() for token in self._store.multi_get(self._ranks())]
                self._store.set(f"{self._prefix}/all", ",".join((str(before), *tokens)))
            number, *seen = self._said("all").split(",")
            if self._mine in seen:
                return self._prefix, int(number)
            now = self._store.add(f"{self._prefix}/joined", 0)
            looks, joined = (looks + 1 if now == joined else 0), now
            self._require_patience(looks * self._pause)
            time.sleep(self._pause)

    def _join(self) -> None:
        """Say that this rank is there, to the newest rank 0."""
        key = f"{self._room}/name"
        name = self._store.get(key).decode() if self._store.check([key]) else "nobody"
        if self._prefix != f"{self._room}/{name}":
            self._prefix = f"{self._room}/{name}"
            self._store.set(f"{self._prefix}/beat/{self._place.rank}", "0")  # `heartbeat` goes on
            self._store.set(f"{self._prefix}/rank/{self._place.rank}", self._mine)
            self._store.add(f"{self._prefix}/joined", 1)

    def _ranks(self) -> list[str]:
        return [f"{self._prefix}/rank/{rank}" for rank in range(self._place.world_size)]

    def _said(self, word: str) -> str:
        """What rank 0 has said to all; empty if it has not."""
        key = f"{self._prefix}/{word}"
        return self._store.get(key).decode() if self._store.check([key]) else ""

    def _require_patience(self, waited: float) -> None:
        """Raise PeerFailedError, for all, when ranks did not come for too long.

        Rank 0 alone makes the list, unless it does not exist.
        """
        lost = self._said("lost")
        if lost:
            raise messages.decode(lost)
        limit = environment.join_timeout()
        here = self._place
        if waited < limit + (_SECOND_LOOK * (1 + here.local_rank) if here.rank else 0):
            return
        absent = [n for n, key in enumerate(self._ranks()) if not self._store.check([key])] or [0]
        shown = some(list(map(str, absent)), _NAMED)
        error = PeerFailedError(
            f"Of the {here.world_size} ranks of this torchrun job, {shown} did not join within "
            f"{limit:.0f} seconds of the last that did: killed as they started, or on a slow or "
            "lost node.",
            hint="Check that node, then run the same command again on all of them. Inside of "
            "another torchrun job, run it without that job's variables: env -u RANK ckpt-tools …",
        )
        self._store.set(f"{self._prefix}/lost", messages.encode(error))
        if 0 in absent and here.local_rank == 0:
            environment.speak()  # rank 0 cannot
        raise error
