"""How frameworks want a checkpoint: folders, containers, and the files beside it.

Entries of any source are taken out of the containers that they stand in and put into those that the
framework's own loader looks for. What no conversion can know is left out and named: random states
and data positions belong to ranks that are no more. This room plans; it opens no file.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from ckpt_tools.core import names
from ckpt_tools.core.index import (
    ByteRange,
    CheckpointIndex,
    ObjectEntry,
    Path,
    TensorEntry,
)
from ckpt_tools.errors import UsageError
from ckpt_tools.transforms import optimizer_groups

FrameworkLayout = Literal["plain", "accelerate", "titan", "verl", "lightning", "composer"]
LAYOUTS: tuple[FrameworkLayout, ...] = (
    "plain",
    "accelerate",
    "titan",
    "verl",
    "lightning",
    "composer",
)

# Parts of a path that hold what each rank of the old job kept for itself.
_OF_RANKS = re.compile(
    r"rng|rng_states?|random_states?|rng_state_\d+|dataloaders?|train_dataloader"
    r"|dl_state_dict|sampler"
)
_STEP = re.compile(r"(?:global_step_|step[-_=]?|checkpoint-|ep\d+-ba)(\d+)(?:\D.*)?")


class Placed(NamedTuple):
    """An entry of the source, and where it goes: its new path, in the folder ``folder``."""

    entry: TensorEntry | ObjectEntry
    path: Path
    folder: str = ""

    @property
    def fqn(self) -> str:
        """Its new name."""
        return names.join(self.path)


@dataclass(frozen=True, slots=True)
class Arranged:
    """A checkpoint as a framework wants it.

    ``placed`` go into the DCP directories or rank files of their folders. ``beside`` are objects of
    one torch.save file of its own, ``texts`` whole small files, ``copied`` files of the source by
    their new names. ``notes`` say what was left out, for a person.
    """

    placed: tuple[Placed, ...]
    beside: Mapping[str, tuple[Placed, ...]]
    texts: Mapping[str, str]
    copied: Mapping[str, str]
    notes: tuple[str, ...]


class _Parts(NamedTuple):
    """A checkpoint without its containers: the model's entries by name, the optimizer's, others."""

    model: list[Placed]
    optim: list[Placed]
    other: list[Placed]
    gone: list[str]


def arrange(
    index: CheckpointIndex,
    layout: FrameworkLayout,
    *,
    world_size: int,
    order: Sequence[str] | None = None,
) -> Arranged:
    """The entries of a checkpoint, its objects opened, as the loader of ``layout`` expects them.

    ``order`` are the parameters' names in the order of the loading job's optimizer, which only verl
    needs. Raises UsageError when there are several optimizers, when two names become one, and for
    numbered optimizer states where names are expected or the other way round.
    """
    parts = _parts(index)
    _refuse_twins(parts.model)
    makers: dict[FrameworkLayout, _Arrange] = {
        "plain": _plain,
        "accelerate": _accelerate,
        "titan": _titan,
        "verl": _verl,
        "lightning": _lightning,
        "composer": _composer,
    }
    arranged = makers[layout](_Job(index, parts, world_size, order))
    if not parts.gone:
        return arranged
    note = f"Left out, of the old ranks: {', '.join(parts.gone)}."
    return replace(arranged, notes=(*arranged.notes, note))


class _Job(NamedTuple):
    """What an arrangement is made of."""

    source: CheckpointIndex
    parts: _Parts
    world_size: int
    order: Sequence[str] | None

    def nested(self) -> list[Placed]:
        """The optimizer by names, with groups: what `get_optimizer_state_dict` gives."""
        pairs = optimizer_groups.nested([(one.entry, one.path) for one in self.parts.optim])
        return [Placed(*pair) for pair in pairs]

    def step(self) -> int:
        """The step that the folder of the source is named after, else 1.

        Never 0 for want of a name: of a step 0 TorchTitan loads the model alone.
        """
        named = self.named_step()
        return 1 if named is None else named

    def named_step(self) -> int | None:
        """The step in the name of a folder that the source lies in, the nearest first."""
        for part in reversed(os.path.abspath(self.source.root).split(os.sep)):
            match = _STEP.fullmatch(part)
            if match:
                return int(match[1])
        return None

    def about_step(self) -> list[str]:
        """What to tell of a step that nothing told."""
        if self.named_step() is not None:
            return []
        return ["No folder's name tells the step, so it is 1; rename it."]


def _parts(index: CheckpointIndex) -> _Parts:
    """Take every entry out of its container."""
    entries: list[TensorEntry | ObjectEntry] = [*index.tensors, *index.objects]
    paths = [entry.path for entry in entries]
    kinds = names.classify(paths, objects={entry.path for entry in index.objects})
    parts = _Parts([], [], [], [])
    optimizers: set[Path] = set()
    gone: dict[str, None] = {}
    for entry, (_, prefix) in zip(entries, kinds, strict=True):
        rest = entry.path[len(prefix) :]
        if entry.section == "model":
            parts.model.append(Placed(entry, (_unwrapped(names.join(rest)),)))
        elif entry.section == "optim":
            inner, state = optimizer_groups.split(rest)
            optimizers.add((*prefix, *inner))
            parts.optim.append(Placed(entry, state))
        elif _of_ranks(entry.path):
            gone[names.join(entry.path[: _of_ranks(entry.path)])] = None
        else:
            parts.other.append(Placed(entry, entry.path))
    if len(optimizers) > 1:
        shown = ", ".join(sorted(map(names.join, optimizers)))
        raise UsageError(
            f"{index.root} has several optimizers: {shown}. A framework's layout is of one.",
            hint="Choose one with --include, or leave --layout out to keep them as they are.",
        )
    parts.gone.extend(gone)
    return parts


def _unwrapped(name: str) -> str:
    """The name without the components of wrapper modules, as torch's own state dict calls name it.

    A leading ``module`` stays: it is Composer's own, and nothing tells it from that of DDP.
    """
    return ".".join(part for part in name.split(".") if part not in names.WRAPPERS)


def _of_ranks(path: Path) -> int:
    """How many parts of a path name what was the old ranks' own; 0 when it is not theirs."""
    return next((n + 1 for n, part in enumerate(path) if _OF_RANKS.fullmatch(str(part))), 0)


def _refuse_twins(placed: Sequence[Placed]) -> None:
    first: dict[str, Placed] = {}
    for one in placed:
        other = first.setdefault(one.fqn, one)
        if other is not one:
            raise UsageError(
                f"{other.entry.fqn} and {one.entry.fqn} would both be {one.fqn}.",
                hint="Leave one of them out with --exclude.",
            )


def _under(prefix: Path, placed: Sequence[Placed], *, folder: str = "") -> list[Placed]:
    return [Placed(one.entry, (*prefix, *one.path), folder) for one in placed]


def _made(
    placed: Sequence[Placed],
    *,
    beside: Mapping[str, tuple[Placed, ...]] | None = None,
    texts: Mapping[str, str] | None = None,
    copied: Mapping[str, str] | None = None,
    notes: Sequence[str] = (),
) -> Arranged:
    return Arranged(tuple(placed), beside or {}, texts or {}, copied or {}, tuple(notes))


def _plain(job: _Job) -> Arranged:
    """What ``dcp.save({"model": …, "optim": …})`` of `get_state_dict` writes."""
    parts = job.parts
    return _made(
        [*_under(("model",), parts.model), *_under(("optim",), job.nested()), *parts.other]
    )


def _accelerate(job: _Job) -> Arranged:
    """The folder of ``Accelerator.save_state``, also that of the transformers Trainer."""
    placed = _under(("model",), job.parts.model, folder="pytorch_model_fsdp_0")
    placed += _under(("optimizer",), job.nested(), folder="optimizer_0")
    side = ("scheduler.bin", "scheduler.pt", "trainer_state.json", "config.json")
    copied = _beside_source(job.source, side, "sampler.*|scheduler_\\d+.bin|custom_checkpoint.*")
    notes = [_left_out(job.parts.other)] if job.parts.other else []
    states = _beside_source(job.source, (), r"random_states_\d+\.pkl|rng_state_\d+\.pth")
    if states:
        notes.append(f"Left out, of the old ranks: {', '.join(sorted(states))}.")
    return _made(placed, copied=copied, notes=notes)


def _beside_source(index: CheckpointIndex, known: Sequence[str], pattern: str) -> dict[str, str]:
    """Files of these names beside the source, in the folder that Accelerate keeps them in."""
    folder = os.path.dirname(os.path.abspath(index.root))
    if index.framework not in ("accelerate", "transformers"):
        return {}
    return {
        name: os.path.join(folder, name)
        for name in sorted(os.listdir(folder))
        if name in known or re.fullmatch(pattern, name)
    }


def _titan(job: _Job) -> Arranged:
    """One step of TorchTitan: the model's names at the top, the optimizer flattened."""
    pairs = optimizer_groups.flattened([(one.entry, one.path) for one in job.parts.optim])
    folder = f"step-{job.step()}"
    placed = _under((), job.parts.model, folder=folder)
    placed += [Placed(entry, ("optimizer", *path), folder) for entry, path in pairs]
    known = [one for one in job.parts.other if one.path[0] in ("lr_scheduler", "train_state")]
    placed += _under((), known, folder=folder)
    rest = [one for one in job.parts.other if one not in known]
    missing = {"lr_scheduler", "train_state"} - {str(one.path[0]) for one in known}
    absent = ",".join(sorted({*missing, "dataloader"}))
    notes = [f"TorchTitan must be told: --checkpoint.exclude_from_loading={absent}."]
    notes += job.about_step()
    return _made(placed, notes=[*notes, *([_left_out(rest)] if rest else [])])


def _verl(job: _Job) -> Arranged:
    """Rank files of verl: the optimizer numbered, as its loader gives it to the optimizer."""
    parts = job.parts
    folder = f"global_step_{job.step()}/actor"
    pairs = optimizer_groups.numbered([(one.entry, one.path) for one in parts.optim], job.order)
    placed = _under(("model",), parts.model, folder=folder)
    placed += [Placed(entry, ("optim", *path), folder) for entry, path in pairs]
    known = [one for one in parts.other if one.path[:2] == ("extra_state", "lr_scheduler")]
    placed += _under((), known, folder=folder)
    rest = [one for one in parts.other if one not in known]
    config = f'{{\n    "FSDP_version": 2,\n    "world_size": {job.world_size}\n}}'
    notes = ["Copy the folder huggingface (config and tokenizer) yourself.", *job.about_step()]
    if not known:
        notes.append("There is no lr_scheduler, so leave `extra` out of checkpoint.load_contents.")
    return _made(
        placed,
        texts={f"{folder}/fsdp_config.json": config},
        notes=[*notes, *([_left_out(rest)] if rest else [])],
    )


def _lightning(job: _Job) -> Arranged:
    """A sharded checkpoint of Lightning: all else that the user saved lies in ``meta.pt``."""
    parts = job.parts
    model, optim = _own(job.source, "model", "model"), _own(job.source, "optim", "optimizer")
    placed = [*_under((model,), parts.model), *_under((optim,), job.nested())]
    plain = [one for one in parts.other if isinstance(one.entry, ObjectEntry) and one.entry.opened]
    rest = [one for one in parts.other if one not in plain]
    meta = os.path.join(job.source.root, "meta.pt")
    if job.source.framework == "lightning" and os.path.isfile(meta):
        return _made(placed, copied={"meta.pt": meta})
    return _made(placed, beside={"meta.pt": tuple(plain)}, notes=[_left_out(rest)] if rest else [])


def _own(index: CheckpointIndex, section: str, otherwise: str) -> str:
    """The container that a Lightning user gave this section; of other sources, Fabric's usual."""
    tops = {entry.path[0] for entry in index.tensors if entry.section == section}
    return str(tops.pop()) if index.framework == "lightning" and len(tops) == 1 else otherwise


def _composer(job: _Job) -> Arranged:
    """One sharded checkpoint of Composer: all of it in ``state``."""
    parts = job.parts
    optimizer = _optimizer_class(job)
    batch = job.step()
    folder = f"ep0-ba{batch}"
    root = os.path.basename(os.path.abspath(job.source.root))
    if re.fullmatch(r"ep\d+-ba\d+", root):
        folder = root
    placed = _under(("state", "model"), parts.model, folder=folder)
    placed += _under(("state", "optimizers", optimizer), job.nested(), folder=folder)
    known = [one for one in parts.other if one.path[0] == "state"]
    placed += _under((), known, folder=folder)
    # Its loader asks for the random states of all ranks that saved them: of none.
    no_rng = ObjectEntry("rng", ("rng",), "other", ByteRange("", 0, 0), value=[], opened=True)
    placed.append(Placed(no_rng, ("rng",), folder))
    rest = [one for one in parts.other if one not in known]
    notes = [_left_out(rest)] if rest else []
    if not known:
        notes.append("Composer's own state (timestamp, …) is not there: load_weights_only=True.")
    return _made(placed, notes=notes)


def _optimizer_class(job: _Job) -> str:
    """What Composer calls the optimizer: its class, which other frameworks do not save."""
    for one in job.parts.optim:
        if one.entry.path[:2] == ("state", "optimizers"):
            return str(one.entry.path[2])
    return "AdamW"


def _left_out(placed: Sequence[Placed]) -> str:
    tops = dict.fromkeys(names.join(one.entry.path[:2]) for one in placed)
    return f"Left out, since this layout has no place for it: {', '.join(tops)}."


_Arrange = Callable[[_Job], Arranged]
