"""Which of many byte ranges meet a given one, found by bisection."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from ckpt_tools.core.index import ByteRange


class _Cluster(NamedTuple):
    """Ranges of one file that overlap, and the bytes from the first to the last of them."""

    start: int
    end: int
    places: list[int]


class Spans:
    """Byte ranges, known by their places in the sequence that they came in."""

    def __init__(self, ranges: Sequence[ByteRange]) -> None:
        self._ranges = ranges
        by_path: dict[str, list[int]] = defaultdict(list)
        for place, data in enumerate(ranges):
            by_path[data.path].append(place)
        self._clusters = {path: self._clustered(places) for path, places in by_path.items()}
        self._starts = {
            path: [cluster.start for cluster in found] for path, found in self._clusters.items()
        }

    def _clustered(self, places: list[int]) -> list[_Cluster]:
        found: list[_Cluster] = []
        for place in sorted(places, key=lambda place: self._ranges[place].offset):
            _, start, length = self._ranges[place]
            end = start + length
            if found and start < found[-1].end:
                last = found[-1]
                last.places.append(place)
                found[-1] = last._replace(end=max(last.end, end))
            else:
                found.append(_Cluster(start, end, [place]))
        return found

    def meeting(self, data: ByteRange) -> list[int]:
        """Places of the ranges that have bytes in common with this one."""
        clusters = self._clusters.get(data.path)
        if clusters is None or data.length == 0:
            return []
        end = data.offset + data.length
        found: list[int] = []
        first = max(0, bisect_right(self._starts[data.path], data.offset) - 1)
        for cluster in clusters[first:]:
            if cluster.start >= end:
                break
            found += [place for place in cluster.places if _meet(self._ranges[place], data)]
        return found

    def files(self) -> frozenset[str]:
        """The paths of the files that have any of the ranges."""
        return frozenset(self._clusters)


def _meet(one: ByteRange, other: ByteRange) -> bool:
    return one.offset < other.offset + other.length and other.offset < one.offset + one.length
