"""Options of readers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from ckpt_tools.core.options import repeated


class Cut(NamedTuple):
    """How tensor-parallel parts have the tensors whose names match the regular expression ``name``.

    They are cut along one of ``dims``; none: each part has the whole. ``length`` names a tensor,
    whole in each part, that is as long as the whole along the cut; of two ``dims``, as the whole's
    last dimension, which tells the two apart.
    """

    name: str
    dims: tuple[int, ...] = ()
    length: str | None = None


@dataclass(frozen=True, slots=True)
class ReadOptions:
    """``allow_globals`` names pickled globals to read as opaque values, which are never run.

    ``cuts`` say how tensor-parallel parts are to be joined, the first that matches a name.
    """

    allow_globals: tuple[str, ...] = repeated(
        "--allow-global",
        "Accept this class name in pickles; it is never imported or run.",
        metavar="NAME",
        heading="Other",
        parse=str,
    )
    cuts: tuple[Cut, ...] = ()
