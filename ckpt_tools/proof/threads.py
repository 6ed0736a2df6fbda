"""Work on many tensors at a time: a few threads, each with one of them, largest first.

It knows nothing of what the work is. Reading, hashing and numpy all let go of the interpreter.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from ckpt_tools.copying.parallel import choose_threads

Item = TypeVar("Item")
Result = TypeVar("Result")

# Less than this is not worth a thread's turn: small items are worked on in groups.
_GROUP_BYTES = 4 << 20


def in_threads(
    work: Callable[[Item], Result],
    items: Sequence[Item],
    *,
    threads: int | None,
    nbytes: Callable[[Item], int],
    far: bool = False,
) -> list[Result]:
    """The result of ``work`` on each item, in the order of the items.

    ``nbytes`` says how large an item is, ``far`` that they lie in a store. Without a number of
    ``threads``, the machine and the items choose it. The first error ends it all and is raised.
    """
    results: dict[int, Result] = {}

    def work_on(group: Sequence[int]) -> None:
        for place in group:
            results[place] = work(items[place])

    if threads is None:
        threads = choose_threads(sum(map(nbytes, items)), lanes=len(items), far=far)
    pool = ThreadPoolExecutor(max_workers=max(1, threads))
    try:
        futures = [pool.submit(work_on, group) for group in _groups(items, nbytes)]
        _raise_first(futures)
    finally:
        pool.shutdown(cancel_futures=True)
    return [results[place] for place in range(len(items))]


def _raise_first(futures: Iterable[Future[None]]) -> None:
    for future in futures:
        future.result()


def _groups(items: Sequence[Item], nbytes: Callable[[Item], int]) -> list[list[int]]:
    """Places of the items: large ones alone and first, small ones together in their own order."""
    sizes = [nbytes(item) for item in items]
    large = [place for place, size in enumerate(sizes) if size >= _GROUP_BYTES]
    groups = [[place] for place in sorted(large, key=lambda place: -sizes[place])]
    group: list[int] = []
    left = 0
    for place, size in enumerate(sizes):
        if size >= _GROUP_BYTES:
            continue
        if left <= 0 or not group:
            group, left = [], _GROUP_BYTES
            groups.append(group)
        group.append(place)
        left -= size + 4096  # opening an item costs something, too
    return groups


class Tally:
    """Passes numbers of bytes on to one listener, from whichever thread they come."""

    def __init__(self, on_bytes: Callable[[int], None]) -> None:
        self._on_bytes = on_bytes
        self._lock = threading.Lock()
        self.total = 0

    def add(self, nbytes: int) -> None:
        """Count these bytes and tell the listener."""
        with self._lock:
            self.total += nbytes
            self._on_bytes(nbytes)


def ignore_bytes(nbytes: int) -> None:
    """A listener that does not care."""
