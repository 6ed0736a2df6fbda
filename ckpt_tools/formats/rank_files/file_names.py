"""What the names of per-rank files say: whose they are, how many there should be, what is in them.

``model_world_size_8_rank_3.pt`` is rank 3 of 8 of the family ``model``. Nothing here opens a file,
and what a name says is checked by others against what the file says.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from glob import escape
from typing import NamedTuple, TypeAlias

from ckpt_tools.core.text import counted
from ckpt_tools.errors import CkptError, UnsupportedError, UsageError, paths_instead

_RANK = re.compile(r"(?i)(?<![a-z])rank[-_.]?(\d+)(?:[-_]?of[-_]?(\d+))?(?=[-_.])")
_WORLD = re.compile(r"(?i)(?<![a-z])world[-_]?size[-_]?(\d+)(?=[-_.])")
SUFFIXES = (".pt", ".pth", ".bin", ".ckpt", ".tar")
# DeepSpeed's and Megatron's files also carry a rank, but of a model-parallel group.
_FOREIGN = re.compile(r"(?i)(^|[-_])(mp|zero_pp|tp|pp)[-_]?$")

_MODEL = frozenset({"", "model", "fsdp_model", "module", "weights", "checkpoint", "ckpt"})
_OPTIM = frozenset({"optim", "optimizer", "optim_state", "optimizer_state"})
_OTHER = frozenset(
    {"extra_state", "extra", "rng", "rng_state", "scheduler", "lr_scheduler", "dataloader"}
    | {"trainer_state", "train_state", "random_states"}
)


class RankFile(NamedTuple):
    """One file by its name: ``rank`` of ``world_size`` (None when the name does not say).

    ``pattern`` is the name with ``*`` for the rank, ``family`` what is left of it without numbers.
    """

    path: str
    rank: int
    world_size: int | None
    family: str
    pattern: str

    def path_of(self, rank: int) -> str:
        """Where the file of another rank should be, beside this one."""
        return os.path.join(os.path.dirname(self.path), self.pattern.replace("*", str(rank)))


# The files of one pattern, one of each rank, in the order of their ranks; never none.
Family: TypeAlias = tuple[RankFile, ...]


def parse(path: str) -> RankFile | None:
    """What the name of a file says, or None when it is no name of a per-rank file."""
    name = os.path.basename(path)
    ranks = list(_RANK.finditer(name))
    if not name.lower().endswith(SUFFIXES) or len(ranks) != 1 or "*" in name:
        return None
    (rank,) = ranks
    if _FOREIGN.search(name[: rank.start()]):
        return None
    world = _WORLD.search(name)
    size = rank[2] or (world[1] if world else None)
    stem, _ = os.path.splitext(_WORLD.sub(" ", _RANK.sub(" ", name), count=1))
    words = [part.strip("-_.") for part in stem.split(" ")]
    return RankFile(
        path=path,
        rank=int(rank[1]),
        world_size=None if size is None else int(size),
        family="_".join(filter(None, words)),
        pattern=name[: rank.start(1)] + "*" + name[rank.end(1) :],
    )


def families(paths: Iterable[str]) -> list[Family]:
    """The families that these files form, by name; files with other names are left out.

    Raises UnsupportedError when two files of one pattern claim the same rank.
    """
    by_pattern: dict[str, dict[int, RankFile]] = {}
    for file in filter(None, map(parse, paths)):
        ranks = by_pattern.setdefault(file.pattern, {})
        other = ranks.setdefault(file.rank, file)
        if other is not file:
            raise UnsupportedError(
                f"{other.path} and {file.path} both say that they are of rank {file.rank}.",
                hint="Name the files of one checkpoint by a quoted glob.",
            )
    return [tuple(ranks[rank] for rank in sorted(ranks)) for _, ranks in sorted(by_pattern.items())]


def joined(families: Sequence[Family], *, where: str) -> tuple[Family, ...]:
    """The families that are one checkpoint together, the model first.

    Raises UsageError when they are not, and UnsupportedError when they are of two world sizes.
    """
    if not families:
        raise UsageError(
            f"{where}: none of these files has a rank in its name.",
            hint="Names such as model_world_size_8_rank_3.pt or rank3.pt tell the rank.",
        )
    firsts = [family[0] for family in families]
    sizes = sorted({one.world_size for one in firsts if one.world_size is not None})
    parts = [_part(one.family) for one in firsts]
    if len(families) == 1 or (
        None not in parts and len(set(parts)) == len(families) and len(sizes) < 2
    ):
        order = sorted(zip(parts, families, strict=True), key=lambda pair: pair[0] or "")
        return tuple(family for _, family in order)
    listing = [f"  {f[0].pattern}  ({counted(len(f), 'file')})" for f in families]
    instead = paths_instead(where, [os.path.join(escape(where), one.pattern) for one in firsts])
    kind: type[CkptError] = UsageError
    held = "several families of rank files, which are not one checkpoint"
    if len(sizes) > 1:
        kind, shown = UnsupportedError, " and ".join(map(str, sizes))
        held = f"files of {len(sizes)} world sizes, {shown}, of different saves"
    hint = "Choose one with a quoted glob."
    raise kind(f"{where} holds {held}:", *listing, hint=hint, instead=instead)


def _part(name: str) -> str | None:
    """Which part of a checkpoint a family name means, sorted as parts go, or None."""
    lowered = name.lower()
    if lowered in _MODEL:
        return "0 model"
    if lowered in _OPTIM:
        return "1 optim"
    return f"2 {lowered}" if lowered in _OTHER else None


def has_container(keys: Iterable[object], name: str) -> bool:
    """Whether a state dict with these keys already says which part of a checkpoint it is."""
    part = _part(name) or ""
    expected = _OPTIM if part.startswith("1") else _MODEL - {""}
    return any(key == name or (part[:1] in ("0", "1") and key in expected) for key in keys)


def holds_other_state(name: str) -> bool:
    """Whether files of this family hold what each rank keeps for itself: RNG, data position."""
    return name.lower() in _OTHER
