"""How many threads do a piece of work, how much memory they share, work in such threads, and who
hears of its progress.

Beyond ten threads of one Python process the interpreter's lock is what most work waits for. Below,
the cores that this process may use count: its affinity, and the CPU quota of its control groups.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from typing import Generic, TypeVar

from ckpt_tools.core.sizes import Sizes

Item = TypeVar("Item")
Result = TypeVar("Result")

# Held while a thread imports NumPy, or what comes with it, late: of two threads that begin at two
# ends of it, Python gives one a module that is half done (seen once in 60 runs with 16 threads).
IMPORTING = threading.RLock()

# On 16 cores ten verify 8 GB in 0.7 of the time of 16; eight and twelve copy as fast as these.
_MOST_THREADS = 10
_MOST_REQUESTS = 16  # threads that wait for a store
# Two overlap reading with writing even on one core.
_LEAST_THREADS = 2
_MEMORY_PER_CORE = 8 << 20
_LEAST_MEMORY, _MOST_MEMORY = 64 << 20, 128 << 20
_CGROUPS = "/sys/fs/cgroup"


def choose_threads(
    nbytes: int, sizes: Sizes, *, lanes: int, processes: int = 1, far: bool = False
) -> int:
    """How many threads of this process should work on so many bytes.

    A store that is ``far`` is waited for: then cores count for nothing, open requests do.

    ``lanes`` is the number of things that can be worked on without waiting for one another: output
    files to write, tensors or ranges to read. A lane keeps two threads busy: one writes its file
    while the other reads. ``processes`` share the cores.
    """
    cores = max(_LEAST_THREADS, min(_MOST_THREADS, usable_cores() // processes))
    if far:
        cores, lanes = _MOST_REQUESTS, _MOST_REQUESTS
    useful = min(2 * lanes, -(-nbytes // sizes.thread_work))
    return max(1, min(cores, useful))


def default_memory() -> str:
    """Bytes of all buffers together, as --max-memory takes them: 64 MiB up to 8 cores, 128 MiB
    from 16 on.
    """
    return str(max(_LEAST_MEMORY, min(_MOST_MEMORY, usable_cores() * _MEMORY_PER_CORE)))


@cache
def usable_cores() -> int:
    """Processors that this process may use, at least 1."""
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    else:
        cores = os.cpu_count() or 1
    listing = ""
    with suppress(OSError):
        listing = _text("/proc/self/cgroup")
    return max(1, min([cores, *map(int, quotas(_CGROUPS, listing))]))


def quotas(root: str, listing: str) -> Iterator[float]:
    """The CPU quotas of this process's control groups and of those around them, in cores.

    ``root`` is where they are mounted, ``listing`` what /proc/self/cgroup says, in lines such as
    "0::/user.slice" (version 2) and "4:cpu,cpuacct:/job" (version 1).
    Version 2 has ``cpu.max`` ("200000 100000" for two cores, "max …" for none), version 1 has
    ``cpu.cfs_quota_us`` (-1 for none) and ``cpu.cfs_period_us``. In a container the path that the
    kernel names may lie outside of what is mounted; its own group is then the root.
    """
    for folder in _groups(root, listing):
        with suppress(OSError, ValueError):
            quota, period = _text(f"{folder}/cpu.max").split()
            if quota != "max":
                yield max(1.0, int(quota) / int(period))
        with suppress(OSError, ValueError):
            used = int(_text(f"{folder}/cpu.cfs_quota_us"))
            if used > 0:
                yield max(1.0, used / int(_text(f"{folder}/cpu.cfs_period_us")))


def _groups(root: str, listing: str) -> Iterator[str]:
    """The folders of the control groups that rule processors, the outermost first."""
    for line in listing.splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        group = os.path.join(root, controllers).rstrip("/")
        yield group
        for part in filter(None, path.split("/")):
            group = f"{group}/{part}"
            yield group


def _text(path: str) -> str:
    with open(path, encoding="ascii") as file:
        return file.read()


class Background(Generic[Result]):
    """Work in a thread of its own that begins at once; left to itself when nobody asks for it.

    `concurrent.futures` is not used: to import it takes 7 ms, which looking commands need not pay.
    """

    def __init__(self, work: Callable[[], Result]) -> None:
        self._work = work
        self._results: list[Result] = []
        self.error: BaseException | None = None  # what it raised so far
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def result(self) -> Result:
        """What it gave, or raise what it raised, when it is done."""
        self.wait()
        if self.error is not None:
            raise self.error
        return self._results[0]

    def wait(self, seconds: float | None = None) -> bool:
        """Whether it is done, at the latest after so many seconds; None: when it is done."""
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            self._results.append(self._work())
        except BaseException as error:  # noqa: BLE001 - raised again in the thread that asks
            self.error = error


def in_threads(
    work: Callable[[Item], Result],
    items: Sequence[Item],
    sizes: Sizes,
    *,
    threads: int | None,
    nbytes: Callable[[Item], int],
    ahead: Callable[[list[Item]], object] | None = None,
) -> list[Result]:
    """The result of ``work`` on each item, in the order of the items; the largest come first.

    What the work is, is not known here: reading, hashing and numpy all release the GIL.

    ``nbytes`` says how large an item is. Of a store, ``ahead`` fetches what small items need that
    are next to be worked on by the thread that calls it. Without a number of ``threads``, the
    machine and the items choose it. The first error ends it all and is raised.
    """
    results: dict[int, Result] = {}
    left = iter(_in_groups(items, nbytes, sizes.proof_group))  # each thread takes its next from it
    stop = threading.Event()

    def run() -> None:
        try:
            for group in left:
                if ahead is not None and len(group) > 1 and not stop.is_set():
                    ahead([items[place] for place in group])
                for place in group:
                    if stop.is_set():
                        return
                    results[place] = work(items[place])
        except BaseException:
            stop.set()
            raise

    if threads is None:
        far, lanes = ahead is not None, len(items)
        threads = choose_threads(sum(map(nbytes, items)), sizes, lanes=lanes, far=far)
    pool = [Background(run) for _ in range(min(max(1, threads), len(items)))]
    try:
        for one in pool:
            one.result()
    finally:
        stop.set()
        for one in pool:
            one.wait()
    return [results[place] for place in range(len(items))]


def _in_groups(items: Sequence[Item], nbytes: Callable[[Item], int], most: int) -> list[list[int]]:
    """Places of the items: large ones alone and first, small ones together in their own order."""
    sizes = [nbytes(item) for item in items]
    large = [place for place, size in enumerate(sizes) if size >= most]
    groups = [[place] for place in sorted(large, key=lambda place: -sizes[place])]
    group: list[int] = []
    left = 0
    for place, size in enumerate(sizes):
        if size >= most:
            continue
        if left <= 0 or not group:
            group, left = [], most
            groups.append(group)
        group.append(place)
        left -= size + 4096  # opening an item costs something, too
    return groups


# ---------------------------------------------------------------------------------------- progress


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


def ignore_note(_note: str = "") -> None:
    """No-op callback for notes."""


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
    on_written: Callable[[], None] = ignore_note


SILENT = Listener()
