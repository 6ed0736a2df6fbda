"""Which torch pickles a DTensor in which form: a row for each time that torch changed DeviceMesh.

A pickled DeviceMesh is the inside of a class that torch changes, and each torch reads its own
alone. The rows are what files of 2.9, 2.11, 2.13 and 2.15 hold (tests/data/checkpoints) and, for
2.5 and 2.10, of which there are no files, what torch's source gives.
"""

from __future__ import annotations

import re
from collections.abc import Set as AbstractSet
from typing import NamedTuple

from ckpt_tools.errors import UsageError

TorchVersion = tuple[int, int]


class Generation(NamedTuple):
    """How torch ``first`` to ``last`` pickle a DTensor: the attributes of its objects, in order.

    ``mesh`` are those of DeviceMesh, ``layout`` of its _MeshLayout, ``spec`` of DTensorSpec.
    """

    first: TorchVersion
    last: TorchVersion
    mesh: tuple[str, ...]
    layout: tuple[str, ...]
    spec: tuple[str, ...]

    def __str__(self) -> str:
        """The versions: ``2.15``, ``2.13 or 2.14``, ``2.5 to 2.7``."""
        ends = dict.fromkeys(map(version_text, (self.first, self.last)))
        return (" to " if self.last[1] - self.first[1] > 1 else " or ").join(ends)


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


_EARLY = "device_type mesh mesh_dim_names _flatten_mesh_list _thread_id "
_RANK_MAP = "_device_type _layout _rank_map _mesh_dim_names _root_mesh "
_FLAT_MAP = "_flatten_rank_map _thread_id _flatten_mapping _dim_group_names "
_PLACE = "_coordinate_on_dim _hash"
_RANKED = _words(f"{_RANK_MAP}{_FLAT_MAP}_rank {_PLACE}")
_NEWER = _words(f"{_RANK_MAP}_preserve_rank_order {_FLAT_MAP}_rank {_PLACE}")
_PLAIN = _words("mesh placements tensor_meta _hash")
_WITH_ORDER = _words("mesh placements tensor_meta shard_order _hash")
_ORDERED = _words("mesh placements tensor_meta shard_order use_strided_shard_as_shard_order _hash")
_SIZES = ("shape", "stride")

GENERATIONS = (
    Generation((2, 5), (2, 7), _words(f"{_EARLY}_dim_group_infos {_PLACE}"), (), _PLAIN),
    Generation((2, 8), (2, 9), _words(f"{_EARLY}_dim_group_names {_PLACE}"), (), _PLAIN),
    Generation((2, 10), (2, 10), _words(f"{_RANK_MAP}{_FLAT_MAP}{_PLACE}"), _SIZES, _WITH_ORDER),
    Generation((2, 11), (2, 12), _RANKED, _SIZES, _ORDERED),
    Generation((2, 13), (2, 14), _RANKED, ("axes",), _ORDERED),
    Generation((2, 15), (2, 15), _NEWER, ("axes",), _ORDERED),
)
NEWEST = GENERATIONS[-1]
# A mesh without process groups has no names of them, and in torch 2.10 no hash until it is asked.
_SOMETIMES = {"_dim_group_infos", "_dim_group_names", "_hash"}


def parse_version(text: str) -> TorchVersion:
    """The two numbers that a torch version starts with: ``2.11.0+cu130`` gives (2, 11).

    Raises UsageError for a text that does not start so.
    """
    match = re.match(r"(\d+)\.(\d+)", text)
    if match is None:
        raise UsageError(f"{text!r} is not a version of torch, which looks like 2.13.")
    return int(match[1]), int(match[2])


def version_text(version: TorchVersion) -> str:
    """The version as torch writes it."""
    return ".".join(map(str, version))


def generation_of(version: TorchVersion, *, why: str = "") -> Generation:
    """The row of a torch, which is asked for as ``why`` says. Raises UsageError where none is."""
    for row in GENERATIONS:
        if row.first <= version <= row.last:
            return row
    known = f"{version_text(GENERATIONS[0].first)} to {version_text(NEWEST.last)}"
    raise UsageError(
        f"Rank files can be written for torch {known}, not for {version_text(version)}{why}: each "
        "torch reads only its own DeviceMesh, and that one is not known here.",
        hint="--torch-version names the torch that will load them; --format dcp is read by all.",
    )


def written_by(attributes: AbstractSet[str]) -> str | None:
    """The torch that pickles a DeviceMesh and its layout with these attributes; None if unknown.

    One that has all of the newest row's and others is of a newer torch: ``2.16 or newer``.
    """
    for row in reversed(GENERATIONS):
        known = {*row.mesh, *row.layout}
        if known - _SOMETIMES <= attributes <= known:
            return str(row)
    newer = attributes >= {*NEWEST.mesh, *NEWEST.layout} - _SOMETIMES
    return f"{NEWEST.last[0]}.{NEWEST.last[1] + 1} or newer" if newer else None
