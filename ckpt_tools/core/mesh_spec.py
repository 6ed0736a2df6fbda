"""The words in which people ask for meshes and placements: ``4x8``, ``dp=2,tp=4``, ``R,S(0)``.

Text in, layout types out; it knows no checkpoint.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from ckpt_tools.core.layout import Mesh, Placement, Replicate, Shard
from ckpt_tools.errors import UsageError

_SIZES = re.compile(r"\d+(x\d+)*")
_NAMED = re.compile(r"([A-Za-z_]\w*)?=(\d+)")
_PLACEMENT = re.compile(
    r"(R)|S\((\d+)\)|S(\d+)|(Replicate)(?:\(\))?|Shard\((?:dim=)?(\d+)\)", re.IGNORECASE
)

# What FSDP2 and TorchTitan call the mesh dimensions along which parameters are cut. Along all other
# names (dp_replicate, tp, ep, pp, …) nothing is cut unless a person says so.
_SHARD_NAMES = frozenset(
    {"dp_shard", "dp", "fsdp", "shard", "dp_shard_cp", "data_parallel", "data"}
)
# FSDP2's own reading of a mesh of one or two sizes without names.
FSDP2_NAMES = ("dp_replicate", "dp_shard")


def parse_mesh(text: str, unnamed: tuple[str, ...] = FSDP2_NAMES) -> Mesh:
    """The mesh that ``32``, ``4x8`` or ``dp_replicate=4,dp_shard=8`` means.

    Sizes without names get the last ones of ``unnamed``; ``=4,=8`` has none, as torch's
    `init_device_mesh` makes it unless it is given some. Raises UsageError for anything else.
    """
    spec = text.replace(" ", "")
    if _SIZES.fullmatch(spec):
        shape = tuple(int(size) for size in spec.split("x"))
        if len(shape) > len(unnamed):
            raise UsageError(
                f"A mesh of {len(shape)} dimensions needs names: {text!r}.",
                hint="For example --to-mesh dp_replicate=2,dp_shard=2,tp=2.",
            )
        return Mesh(shape, unnamed[-len(shape) :])
    pairs = [_NAMED.fullmatch(part) for part in spec.split(",")]
    if not spec or any(pair is None for pair in pairs):
        raise UsageError(
            f"{text!r} is not a mesh.", hint="Write 32, 4x8, or names: dp_replicate=4,dp_shard=8."
        )
    shape = tuple(int(pair[2]) for pair in pairs if pair is not None)
    names = tuple(pair[1] for pair in pairs if pair is not None and pair[1])
    if not names:
        return Mesh(shape)
    if len(names) < len(shape):
        raise UsageError(f"{text!r} names some mesh dimensions and not all.")
    if len(set(names)) != len(names):
        raise UsageError(f"{text!r} names a mesh dimension twice.")
    return Mesh(shape, names)


def parse_placements(text: str, mesh: Mesh) -> tuple[Placement, ...]:
    """The placements that ``R,S(0)`` means, one for each dimension of the mesh.

    Raises UsageError when a word is no placement or their number is not the mesh's.
    """
    placements: list[Placement] = []
    for word in re.split(r",\s*", text.strip()):
        match = _PLACEMENT.fullmatch(word.strip())
        if match is None:
            raise UsageError(
                f"{word!r} in {text!r} is not a placement.",
                hint="R is Replicate, S(0) is Shard(0). Partial cannot be saved.",
            )
        dim = next((group for group in match.group(2, 3, 5) if group is not None), None)
        placements.append(Replicate() if dim is None else Shard(int(dim)))
    if len(placements) != len(mesh.shape):
        raise UsageError(
            f"{text!r} gives {len(placements)} placements, the mesh {mesh} has {len(mesh.shape)} "
            "dimensions."
        )
    return tuple(placements)


def parse_rule(text: str, mesh: Mesh) -> tuple[str, tuple[Placement, ...]]:
    """The pattern of names and the placements that ``GLOB=S(0),S(1)`` means, or one of a regex.

    Raises UsageError as `parse_placements` does.
    """
    pattern, equals, placements = text.rpartition("=")
    if not equals or not pattern:
        raise UsageError(
            f"{text!r} is not a rule.", hint="For example --place '*.wq.weight=S(0),S(0)'."
        )
    return pattern, parse_placements(placements, mesh)


def default_placements(mesh: Mesh) -> tuple[Placement, ...]:
    """FSDP2's placements on this mesh: cut along dimension 0 by the data-parallel shard dimension.

    Dimensions of other names (tp, ep, …) replicate: what they cut is never guessed.
    """
    if mesh.dim_names is None:
        return (*(Replicate() for _ in mesh.shape[1:]), Shard(0))
    return tuple(Shard(0) if name in _SHARD_NAMES else Replicate() for name in mesh.dim_names)


def fsdp_order(mesh: Mesh, placements: Sequence[Placement]) -> tuple[int, ...]:
    """Which mesh dimension cuts first: tensor and expert parallelism before data parallelism.

    A job parallelizes its modules first and wraps them in FSDP afterwards, so FSDP cuts what
    tensor parallelism has left (torch's `_StridedShard`). Only matters where both cut the same
    dimension of a tensor.
    """
    names = mesh.dim_names or ("",) * len(mesh.shape)
    inner = [dim for dim in range(len(placements)) if names[dim] in _SHARD_NAMES]
    outer = [dim for dim in range(len(placements)) if dim not in inner]
    cut = {placements[dim] for dim in inner} & {placements[dim] for dim in outer}
    if not any(isinstance(placement, Shard) for placement in cut):
        return tuple(range(len(placements)))
    return (*outer, *inner)


def described(mesh: Mesh, placements: Sequence[Placement]) -> str:
    """As text: ``dp_replicate=4 × dp_shard=8: Replicate, Shard(0)``."""
    names = mesh.names
    sizes = " × ".join(f"{n}={s}" for n, s in zip(names, mesh.shape, strict=True))
    return f"{sizes}: {', '.join(map(str, placements))}"
