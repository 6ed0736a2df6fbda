"""Runs work on many tensors in a few threads, the largest tensors first.

Reading, hashing and numpy all release the GIL. What the work is, is not known here.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TypeVar

from ckpt_tools.copying.parallel import Background, choose_threads
from ckpt_tools.core.sizes import Sizes

Item = TypeVar("Item")
Result = TypeVar("Result")


def in_threads(
    work: Callable[[Item], Result],
    items: Sequence[Item],
    sizes: Sizes,
    *,
    threads: int | None,
    nbytes: Callable[[Item], int],
    ahead: Callable[[list[Item]], object] | None = None,
) -> list[Result]:
    """The result of ``work`` on each item, in the order of the items.

    ``nbytes`` says how large an item is. Of a store, ``ahead`` fetches what small items need that
    are next to be worked on by the thread that calls it. Without a number of ``threads``, the
    machine and the items choose it. The first error ends it all and is raised.
    """
    results: dict[int, Result] = {}
    left = iter(
        _groups(items, nbytes, sizes.proof_group)
    )  # each thread takes its next group from it
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


def _groups(items: Sequence[Item], nbytes: Callable[[Item], int], most: int) -> list[list[int]]:
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
