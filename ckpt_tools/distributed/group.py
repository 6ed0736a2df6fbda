"""The ranks of a torchrun job as a group: they start, fail and end together.

Barriers go through the job's own key-value store, a few bytes at a time, so that a waiting rank
learns that another has failed or is gone, and can be interrupted. No tensor goes this way.
"""

from __future__ import annotations

import atexit
import os
import sys
import time
from base64 import b64decode, b64encode
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, TypeVar

from ckpt_tools.copying.out_path import partial_of
from ckpt_tools.copying.parallel import Background
from ckpt_tools.distributed import environment, messages
from ckpt_tools.distributed.environment import RankPlace, let_it_finish
from ckpt_tools.distributed.heartbeat import Heartbeat, Store, store_is_gone
from ckpt_tools.distributed.meeting import meet
from ckpt_tools.errors import CkptError, PeerFailedError, Terminated, UsageError

if TYPE_CHECKING:
    from torch.distributed import Store as JobStore  # type: ignore[attr-defined]

T = TypeVar("T")

_REFUSED = 5.0
_LAST_WORD = 30.0
_LAST_WRITES = 10.0
_LONGEST_PAUSE = 0.05
_RANKS_A_MILLISECOND = 20  # requests that one store can answer
_INTERRUPTED, _TERMINATED = 130, 143
_LONGEST_VALUE = 2 << 20  # the store takes 8 MiB

# A process may join its job several times, and must not read keys of an earlier group.
_groups = count()


class Group:
    """All ranks of the job. Each makes one, and calls the same methods in the same order.

    ``place`` is which of them this process is. Others may use the ``store`` under a prefix of their
    own. What is in the ``lasting`` one, later attempts of the job see; ``attempt`` counts those
    before this one, which is 0 for the first.
    """

    def __init__(
        self,
        store: Store,
        place: RankPlace,
        *,
        heartbeat: Heartbeat,
        lasting: Store | None = None,
        attempt: int = 0,
    ) -> None:
        self.store = store
        self.attempt = attempt
        self._lasting = store if lasting is None else lasting
        self.place = place
        self._heartbeat = heartbeat
        self.command = ""  # its options, as all ranks have them
        self.is_done = False
        self._meetings = 0
        self._is_over = False
        self._stuck: int | None = None  # the exit code of a process with a thread left behind

    @property
    def rank(self) -> int:
        """The number of this rank."""
        return self.place.rank

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.place.world_size

    def barrier(self, error: BaseException | None = None) -> None:
        """Wait for all ranks; raise the error of the lowest rank that has one.

        Raises PeerFailedError when a rank or the store is gone.
        """
        self._meetings += 1
        room = str(self._meetings)
        if error is not None:
            words = messages.encode(error)
            self._ask(lambda: self.store.set(f"{room}/error/{self.rank}", words))
            self._ask(lambda: self.store.set("failed", "1"))
            self._ask(lambda: self.store.add(f"{room}/failed", 1))
        try:
            self._require_all_alive()  # before the others count this rank as well
            self._ask(lambda: self.store.add(f"{room}/here", 1))
            self._wait(lambda: self.store.add(f"{room}/here", 0) >= self.size)
        except PeerFailedError as lost:
            raise self._what_came_first(room) or lost from None
        if self._ask(lambda: self.store.add(f"{room}/failed", 0)):
            self._is_over = True
            raise self._ask(lambda: self._first_error(room))

    def broadcast(self, text: str) -> str:
        """The text of rank 0; the argument of other ranks is ignored."""
        if self.rank == 0:
            key = f"{self._meetings + 1}/text"
            self._ask(lambda: self.store.set(key, text))
        self.barrier()
        return self._ask(lambda: self.store.get(f"{self._meetings}/text")).decode()

    def gather(self, mine: bytes) -> list[bytes]:
        """What all ranks bring, for rank 0; nothing for others. It goes in parts."""
        room, step = f"{self._meetings + 1}/part/", _LONGEST_VALUE
        parts = [mine[at : at + step] for at in range(0, len(mine), step)]
        for number, part in enumerate(parts):
            text, key = b64encode(part).decode(), f"{room}{self.rank}/{number}"
            self._ask(partial(self.store.set, key, text))
        self._ask(lambda: self.store.set(f"{room}{self.rank}", str(len(parts))))
        self.barrier()
        return [self._brought(f"{room}{rank}") for rank in range(self.size) if self.rank == 0]

    def _brought(self, key: str) -> bytes:
        count = int(self._ask(lambda: self.store.get(key)))
        parts = (self._ask(partial(self.store.get, f"{key}/{n}")) for n in range(count))
        return b"".join(map(b64decode, parts))

    def total(self, number: int) -> int:
        """The sum of the numbers that all ranks bring."""
        key = f"{self._meetings + 1}/total"
        self._ask(lambda: self.store.add(key, number))
        self.barrier()
        return self._ask(lambda: self.store.add(key, 0))

    def note_written(self, out: str, source: str) -> None:
        """Have later attempts of this job know that all of ``out`` is written from ``source``."""
        self._ask(lambda: self._lasting.set(self._written(out, source), "1"))

    def has_written(self, out: str, source: str) -> bool:
        """Whether an earlier attempt of this command has made ``out`` from ``source``, as rank 0
        sees it. A meeting.
        """
        key = self._written(out, source)
        is_there = os.path.lexists(out) and not os.path.lexists(partial_of(out))
        noted = self.rank == 0 and is_there and self._ask(lambda: self._lasting.check([key]))
        return bool(self.broadcast("1" if noted else ""))

    def _written(self, out: str, source: str) -> str:
        return f"written/{os.path.abspath(out)}/{os.path.abspath(source)}/{self.command}"

    @contextmanager
    def collective(self) -> Iterator[None]:
        """A block that succeeds on all ranks or on none: what one rank raises, all raise."""
        try:
            yield
            self.barrier()
        except BaseException as error:
            if self._is_over or isinstance(error, KeyboardInterrupt):
                raise
            self.barrier(None if isinstance(error, PeerFailedError) else error)
            raise

    def check_peers(self) -> None:
        """Raise PeerFailedError when another rank has failed or is gone; costs nothing."""
        trouble = self._heartbeat.trouble()
        if trouble is not None or self._heartbeat.has_failed:
            raise trouble or PeerFailedError("Another rank has failed.")

    def guarded(self, work: Callable[[], T]) -> T:
        """What ``work`` gives, which may wait in torch's collectives for ranks that are gone.

        It runs in a thread, which is left behind in that case. Raises PeerFailedError then.
        """
        working = Background(work)
        try:
            while not working.wait(_LONGEST_PAUSE):
                trouble = self._heartbeat.trouble()
                if trouble is None and not self._heartbeat.has_failed:
                    continue
                if not working.wait(_LAST_WRITES if trouble else environment.peer_timeout()):
                    self._stuck = PeerFailedError.exit_code
                    raise self._lost(trouble or PeerFailedError("Another rank has failed."))
        except KeyboardInterrupt as error:
            self._stuck = _TERMINATED if isinstance(error, Terminated) else _INTERRUPTED
            raise
        return working.result()

    def abandon(self, error: BaseException) -> None:
        """Tell the others that this rank ends, when they do not know it."""
        if not self._is_over:
            why = f"Rank {self.rank} was stopped ({type(error).__name__})."
            self._heartbeat.report(PeerFailedError(why))

    def leave(self) -> None:
        """Exit after rank 0: torchrun kills all ranks as soon as one has failed.

        Rank 0 of a job that is done waits until all have come here: the agent of one that is killed
        before starts it again, which it cannot do when another agent has ended.
        """
        with suppress(RuntimeError):  # the store is gone with rank 0, which has exited
            if self.rank == 0:
                self.store.set("ended", "1")
            self.store.add("left", 1)
            is_alone = self._heartbeat.is_leaderless or (self.rank == 0 and not self.is_done)
            end = time.monotonic() + (0 if is_alone else _LAST_WORD)
            while time.monotonic() < end and not self._may_leave():
                time.sleep(_LONGEST_PAUSE)
        if self._stuck is not None:  # Python's own end may wait for what that thread waits for
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(self._stuck)

    def _may_leave(self) -> bool:
        if self.rank == 0:
            return self.store.add("left", 0) >= self.size
        return self.store.check(["ended"])

    def _ask(self, call: Callable[[], T]) -> T:
        """What the store answers, which may be gone, or on a node that is.

        Raises PeerFailedError when it gives no answer.
        """
        asked, why = Background(call), "no answer"
        if asked.wait(environment.peer_timeout()):
            try:
                return asked.result()
            except RuntimeError as error:
                why = str(error).partition("\n")[0]
        raise self._lost(self._heartbeat.store_is_gone(why))

    def _lost(self, trouble: CkptError) -> CkptError:
        """The error for a job that cannot go on, when the ranks that live have stopped writing."""
        if not self._is_over:
            self._is_over = True
            with suppress(RuntimeError):
                self._await_the_living()
        if self._heartbeat.is_leaderless and self.place.local_rank == 0:
            environment.speak()  # rank 0 cannot
        return trouble

    def _await_the_living(self) -> None:
        if (
            self._heartbeat.is_leaderless or self._meetings < 2
        ):  # no rank writes before the second barrier
            return
        self.store.add("stopped", 1)
        end = time.monotonic() + _LAST_WRITES
        while self.rank == 0 and time.monotonic() < end:
            if self.store.add("stopped", 0) >= self.size - 1:
                return
            time.sleep(_LONGEST_PAUSE)

    def _what_came_first(self, room: str) -> CkptError | None:
        """An error that a rank raised here before another one was lost, maybe because of it."""
        with suppress(RuntimeError):
            if not self._heartbeat.is_leaderless and self.store.add(f"{room}/failed", 0):
                error = self._first_error(room)
                return None if type(error) is CkptError else error
        return None

    def _first_error(self, room: str) -> CkptError:
        """The error of the lowest rank that failed, with its number unless it is this rank's."""
        failed = (r for r in range(self.size) if self.store.check([f"{room}/error/{r}"]))
        rank = next(failed)
        error = messages.decode(self.store.get(f"{room}/error/{rank}").decode())
        return error if rank == 0 else error.at(f"Rank {rank}")

    def _wait(self, done: Callable[[], bool]) -> None:
        """Poll, so that a signal or the end of a rank can end the wait."""
        longest = max(_LONGEST_PAUSE, self.size / _RANKS_A_MILLISECOND / 1000)
        pause = 0.001
        while not self._ask(done):
            self._require_all_alive()
            time.sleep(pause)
            pause = min(longest, pause * 1.5)

    def _require_all_alive(self) -> None:
        trouble = self._heartbeat.trouble()
        if trouble is not None:
            raise self._lost(trouble)


@contextmanager
def join(place: RankPlace, *, workers: int) -> Iterator[Group]:
    """The group of all ranks of this job. Raises UsageError for workers beside them, and when there
    is no store to meet at, PeerFailedError when the store is gone.
    """
    if workers > 1:
        raise UsageError(
            f"-j {workers} starts workers of its own, but this is a torchrun job, whose "
            f"{place.world_size} ranks are the workers.",
            hint="Leave -j out, or run without torchrun.",
        )
    store, beats = _stores(place)
    try:
        prefix, attempt = meet(beats, place, f"ckpt-tools/{next(_groups)}")
    except RuntimeError as error:
        if place.local_rank == 0:
            environment.speak()  # rank 0 may be gone with it
        raise store_is_gone(str(error).partition("\n")[0]) from error
    heartbeat = Heartbeat(_under(prefix, beats), place)
    group = Group(
        _under(prefix, store),
        place,
        heartbeat=heartbeat,
        lasting=_under("ckpt-tools/job", beats),
        attempt=attempt,
    )
    atexit.unregister(let_it_finish)
    atexit.register(group.leave)
    with heartbeat.running():
        try:
            yield group
        except BaseException as error:
            group.abandon(error)
            raise
        group.is_done = True


def _under(prefix: str, store: JobStore) -> Store:
    from torch.distributed import PrefixStore  # type: ignore[attr-defined]

    under: Store = PrefixStore(prefix, store)
    return under


def _stores(place: RankPlace) -> tuple[JobStore, JobStore]:
    """The job's store by two connections, for one may be busy while the other beats."""
    # torch is needed for its store alone, and costs seconds: only ranks of a job pay for it.
    from torch.distributed import TCPStore, rendezvous  # type: ignore[attr-defined]

    seconds = environment.join_timeout()
    limit = timedelta(seconds=seconds)

    def connect() -> tuple[JobStore, JobStore]:
        if environment.agent_has_store():
            _require_listener(seconds)
        store, _, _ = next(rendezvous("env://", timeout=limit))
        address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        beats = TCPStore(*address, is_master=False, wait_for_workers=False, timeout=limit)
        return store, beats

    connecting = Background(connect)
    if connecting.wait(seconds + _REFUSED) and connecting.error is None:
        return connecting.result()
    error = connecting.error
    if place.local_rank == 0:
        environment.speak()  # rank 0 may not be there at all
    if error is not None and not isinstance(error, RuntimeError | OSError):
        raise error
    if isinstance(error, ConnectionRefusedError):
        raise PeerFailedError(
            f"Nothing listens at {os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}: the "
            "torchrun agent that holds the job's store has ended."
        )
    why = f"waited {seconds:.0f} seconds" if error is None else str(error).partition("\n")[0]
    raise UsageError(
        f"Rank {place.rank} did not find the {place.world_size} ranks of its torchrun job ({why}).",
        hint="All ranks must run this same command. Inside of another torchrun job, run it without "
        "that job's variables: env -u RANK ckpt-tools …",
    )


def _require_listener(seconds: float) -> None:
    """Raise ConnectionRefusedError when nobody listens where torchrun's agent must; torch itself
    would try again for as long as it waits for a slow one.
    """
    import socket  # late: one process alone needs none

    end = time.monotonic() + _REFUSED
    while True:
        try:
            address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
            socket.create_connection(address, timeout=seconds).close()
        except ConnectionRefusedError:
            if time.monotonic() > end:
                raise
            time.sleep(_LONGEST_PAUSE)
        else:
            return
