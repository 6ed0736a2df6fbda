"""How frameworks want a checkpoint: folders, containers, and the files beside it.

Entries of any source are taken out of the containers that they stand in and put into those that the
framework's own loader looks for: a tree in, a tree for each folder out. What a layout has no place
for is left out and named. Which format a folder has, and how its files are planned, is the caller's
to say. This room plans: of the disk it asks only how long the files are that are copied along.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial, reduce
from itertools import combinations
from typing import Literal, NamedTuple, get_args

from ckpt_tools import formats
from ckpt_tools.core import names
from ckpt_tools.core.index import ByteRange, CheckpointIndex, Entry, ObjectEntry, TensorEntry
from ckpt_tools.core.plan import LazyPlans, Target
from ckpt_tools.core.state_tree import Branch, Tree, dict_of, merge
from ckpt_tools.errors import AnswerNo, UsageError, unwritable
from ckpt_tools.formats.frameworks import folder_of_save
from ckpt_tools.transforms import optimizer, param_names
from ckpt_tools.transforms.base import copied_file, small_file
from ckpt_tools.transforms.optimizer import Digest, ParamNames
from ckpt_tools.transforms.rank_states import TargetRanks

FrameworkLayout = Literal[
    "plain",
    "accelerate",
    "titan",
    "verl",
    "lightning",
    "lightning-fsdp1",
    "lightning-fsdp2",
    "composer",
]
LAYOUTS: tuple[FrameworkLayout, ...] = get_args(FrameworkLayout)
# Plans the files of a folder, by its name, from its targets and its part of the index.
PlanFolder = Callable[[str, Sequence[Target], CheckpointIndex], LazyPlans]

# The outermost containers of other state that a layout has a place for; the others take any.
_PLACES: Mapping[str, tuple[str, ...]] = {
    "accelerate": ("scheduler", "trainer_state", "random_states", "rng_state"),  # as files
    "titan": ("lr_scheduler", "train_state", "dataloader"),
    "verl": (),  # but for one entry, see `_verl`
    "composer": ("state", "rng"),
}
# What verl calls the dimensions of its mesh; torch loads no DTensor of a mesh with other names.
VERL_MESH = ("ddp", "fsdp")

_STEP = re.compile(r"(?:global_step_|step[-_=]?|checkpoint-|ep\d+-ba)(\d+)(?:\D.*)?")
# What Composer's Trainer may call its gradient scaler: FSDP1 has the last, FSDP2 one of the others.
_SCALERS = ("GradScaler", "ClosureGradScaler", "ShardedGradScaler")
# verl's folder of config and tokenizer may hold a copy of the model, too.
_HUB = "huggingface"
_WEIGHTS = re.compile(r".*\.(safetensors|bin|pth?)(\.index\.json)?")
_RANK_FILES = r"random_states_\d+\.pkl|rng_state_\d+\.pth"


def places_of(layout: str | None) -> tuple[str, ...] | None:
    """The outermost containers of other state that a layout has a place for, None for any."""
    return None if layout is None else _PLACES.get(layout)


@dataclass(frozen=True, slots=True)
class Arranged:
    """A checkpoint as a framework wants it.

    ``folders`` are the trees of DCP directories or rank files by their folders; where
    ``rank_names`` has some of them, these are rank files of such names, and the others DCP
    directories whatever the format that was asked for. ``beside`` are
    trees of which each is one torch.save file, ``texts`` whole small files, ``copied`` files of the
    source by their new names. ``notes`` say what was left out, for a person.
    """

    folders: Mapping[str, Branch[Entry]]
    rank_names: Mapping[str, str] = field(default_factory=dict)
    beside: Mapping[str, Branch[Entry]] = field(default_factory=dict)
    texts: Mapping[str, str] = field(default_factory=dict)
    copied: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class LayoutTarget:
    """What an arrangement is for.

    ``order`` are the parameters' names in the order of the loading job's optimizer, which only verl
    needs; ``digest`` compares hyper-parameters; ``by_ranks`` asks for the model in rank files.
    """

    world_size: int
    ranks: TargetRanks
    order: ParamNames | None
    digest: Digest
    by_ranks: bool = False


class _StateParts(NamedTuple):
    """A checkpoint without its containers: the model by its names, the optimizer, all else."""

    model: Branch[Entry]
    optim: Branch[Entry] | None
    other: Branch[Entry]


def arrange(index: CheckpointIndex, layout: FrameworkLayout, target: LayoutTarget) -> Arranged:
    """The entries of a checkpoint, its objects opened, as the loader of ``layout`` expects them.

    Raises UsageError when there are several optimizers, when two names become one, and for
    numbered optimizer states where names are expected or the other way round; UnsupportedError for
    an optimizer's state that cannot be had in the framework's shape, AnswerNo when nothing is left.
    """
    makers: dict[FrameworkLayout, Callable[[_Job], Arranged]] = {
        "plain": _plain,
        "accelerate": _accelerate,
        "titan": _titan,
        "verl": _verl,
        "lightning": _lightning,
        "lightning-fsdp1": partial(_lightning, trainers="model"),
        "lightning-fsdp2": partial(_lightning, trainers="state_dict"),
        "composer": _composer,
    }
    arranged = makers[layout](_Job(index, _parts(index), target))
    return _not_empty(arranged, index, layout)


def arrange_whole(index: CheckpointIndex, layout: str, target: LayoutTarget) -> Arranged:
    """The same for Accelerate's loader of FULL_STATE_DICT: two torch.save files of whole tensors,
    whose names have no container.

    Raises what `arrange` raises.
    """
    job = _Job(index, _parts(index), target)
    files = {"pytorch_model_fsdp.bin": job.parts.model, "optimizer.bin": _in((), job.nested())}
    copied, notes = _side_files(job)
    arranged = Arranged({}, beside=files, copied=copied, notes=tuple(notes))
    return _not_empty(arranged, index, layout)


def _not_empty(arranged: Arranged, index: CheckpointIndex, layout: str) -> Arranged:
    trees = (*arranged.folders.values(), *arranged.beside.values())
    if not any(next(tree.leaves(), None) for tree in trees):
        raise AnswerNo(
            f"{index.root}: nothing that is chosen has a place in --layout {layout}.",
            hint="Leave --layout out to keep it unchanged.",
        )
    return arranged


class _Job(NamedTuple):
    """What an arrangement is made of."""

    source: CheckpointIndex
    parts: _StateParts
    target: LayoutTarget

    def nested(self) -> Tree[Entry]:
        """The optimizer by names, with groups: what `get_optimizer_state_dict` gives."""
        optim = self.parts.optim
        return None if optim is None else optimizer.nested(optim, digest=self.target.digest)

    def taken(self, *tops: str) -> Branch[Entry]:
        """Of what is neither the model's nor the optimizer's, what these keys hold."""
        return dict_of({top: self.parts.other.get(top) for top in tops})

    def left_out(self, *tops: str) -> list[str]:
        """A note on what these keys do not hold."""
        paths = [path for path, _ in self.parts.other.walk() if path[0] not in tops]
        if not paths:
            return []
        shown = ", ".join(dict.fromkeys(names.join(path[:2]) for path in paths))
        return [f"Left out, because this layout has no place for it: {shown}."]

    def step(self) -> tuple[int, list[str]]:
        """The step that a folder above the source is named after, the nearest first; else 1, with a
        note.

        Never 0 for want of a name: of a step 0 TorchTitan loads the model alone.
        """
        for part in reversed(os.path.abspath(self.source.root).split(os.sep)):
            match = _STEP.fullmatch(part)
            if match:
                return int(match[1]), []
        return 1, ["No folder name has the step, so it is 1; rename the folder if needed."]


def _parts(index: CheckpointIndex) -> _StateParts:
    """Take everything out of its container."""
    optimizers = param_names.optimizers_of(index)
    if len(optimizers) > 1:
        shown = ", ".join(sorted(map(names.join, optimizers)))
        raise UsageError(
            f"{index.root} has several optimizers: {shown}. A framework's layout is of one.",
            hint="Choose one with --include, or leave --layout out to keep them unchanged.",
        )
    optim = next(iter(optimizers.values()), None)
    stray = next((entry for entry in index.entries if entry.section == "optim"), None)
    if optim is None and stray is not None:
        raise UsageError(
            f"{stray.fqn}: no state dict of an optimizer has it, with state and param_groups.",
            hint="Leave it out with --exclude, or leave --layout out to keep it unchanged.",
        )
    containers = names.containers_of(index)
    tree = index.entry_tree()
    model: dict[str, Entry] = {}
    for path, entry in tree.walk():
        if entry.section == "model":
            name = names.unwrapped(names.join(path[len(containers[entry.fqn]) :]))
            other = model.setdefault(name, entry)
            if other is not entry:
                raise UsageError(
                    f"{other.fqn} and {entry.fqn} would both be {name}.",
                    hint="Leave one of them out with --exclude.",
                )
    own = {entry.fqn for entry in model.values()}
    own |= {entry.fqn for entry in optim.leaves()} if optim is not None else set()
    return _StateParts(dict_of(model), optim, tree.filter(lambda entry: entry.fqn not in own))


def _in(path: Sequence[str], tree: Tree[Entry]) -> Branch[Entry]:
    """A tree in dicts, one for each part of the path; without leaves it is nothing."""
    if not isinstance(tree, Branch) or next(tree.leaves(), None) is None:
        return dict_of({})
    for part in reversed(path):
        tree = dict_of({part: tree})
    return tree


def _together(*trees: Branch[Entry]) -> Branch[Entry]:
    names_of = [{names.join(path) for path, _ in tree.walk()} for tree in trees]
    twice = next((a & b for a, b in combinations(names_of, 2) if a & b), None)
    if twice:
        raise UsageError(
            f"This layout would call two entries {min(twice)}.",
            hint="Leave one of them out with --exclude.",
        )
    return reduce(merge, trees)


def _plain(job: _Job) -> Arranged:
    """What ``dcp.save({"model": …, "optim": …})`` of `get_state_dict` writes."""
    model, optim = _in(("model",), job.parts.model), _in(("optim",), job.nested())
    return Arranged({"": _together(model, optim, job.parts.other)})


def _accelerate(job: _Job) -> Arranged:
    """The folder of ``Accelerator.save_state``, also that of the transformers Trainer.

    Its loader takes rank files of the model's bare state dict, with LOCAL_STATE_DICT; it has the
    optimizer in a DCP directory all the same.
    """
    by_ranks, optim = job.target.by_ranks, _in(("optimizer",), job.nested())
    model = job.parts.model
    folders = {"": model} if by_ranks else {"pytorch_model_fsdp_0": _in(("model",), model)}
    rank_names = {"": "pytorch_model_fsdp_rank{rank}.bin"} if by_ranks else {}
    copied, notes = _side_files(job)
    if by_ranks:
        notes.append(
            "Accelerate reads these files with LOCAL_STATE_DICT alone, and into FSDP2 only: on a "
            "mesh of the same dimension names."
        )
    elif next(optim.leaves(), None) is not None:
        notes.append(
            "With FSDP1, Accelerate's loader of SHARDED_STATE_DICT leaves a new optimizer empty, "
            "also from its own shards. For FSDP1: ckpt-tools export CKPT -o OUT --layout "
            "accelerate, and state_dict_type FULL_STATE_DICT."
        )
    folders["optimizer_0"] = optim
    return Arranged(folders, rank_names, copied=copied, notes=tuple(notes))


def _side_files(job: _Job) -> tuple[dict[str, str], list[str]]:
    """What Accelerate finds beside model and optimizer, and notes on what was left out."""
    side = ("scheduler.bin", "scheduler.pt", "trainer_state.json", "config.json")
    copied = _beside_source(job.source, side, r"sampler.*|scheduler_\d+.bin|custom_checkpoint.*")
    states = _beside_source(job.source, (), _RANK_FILES)
    ranks = len(states) or job.source.world_size
    states |= _beside_source(job.source, (), r"dl_state_dict.*")  # positions in the data
    left_out = job.left_out(*_PLACES["accelerate"])
    if job.target.ranks.fit("ranks", ranks):
        return copied | states, left_out
    notes = [f"Left out, state of the old ranks: {', '.join(sorted(states))}."] if states else []
    return copied, [*left_out, *notes]


def _beside_source(index: CheckpointIndex, known: Collection[str], pattern: str) -> dict[str, str]:
    """Files of these names beside the source, in the folder that Accelerate keeps them in."""
    folder = folder_of_save(index)
    if folder is None or index.framework not in ("accelerate", "transformers"):
        return {}
    return {
        name: os.path.join(folder, name)
        for name in sorted(os.listdir(folder))
        if name in known or re.fullmatch(pattern, name)
    }


def _titan(job: _Job) -> Arranged:
    """One step of TorchTitan: the model's names at the top, the optimizer flattened."""
    optim = None if job.parts.optim is None else optimizer.flattened(job.parts.optim)
    tops = _PLACES["titan"]
    taken = job.taken(*tops)
    tree = _together(job.parts.model, _in(("optimizer",), optim), taken)
    step, notes = job.step()
    notes += job.left_out(*tops)
    absent = ",".join(sorted(set(tops) - set(map(str, taken.parts()))))
    if absent:
        notes = [f"TorchTitan needs: --checkpoint.exclude_from_loading={absent}.", *notes]
    return Arranged({f"step-{step}": tree}, notes=tuple(notes))


def _verl(job: _Job) -> Arranged:
    """Rank files of verl: the optimizer numbered, as its loader gives it to the optimizer."""
    parts, target = job.parts, job.target
    step, notes = job.step()
    folder = f"global_step_{step}/actor"
    optim = parts.optim
    if optim is not None:
        optim = optimizer.numbered(optim, target.order, digest=target.digest)
    scheduler = parts.other.get("extra_state", "lr_scheduler")
    own = {e.fqn for e in scheduler.leaves()} if isinstance(scheduler, Branch) else set()
    tree = _together(
        _in(("model",), parts.model),
        _in(("optim",), optim),
        _in(("extra_state", "lr_scheduler"), scheduler),
    )
    rank_names = {}
    if len(tree.items) == 1:  # also alone it is what the container holds
        ((family, tree),) = ((str(part), _in((), inner)) for part, inner in tree.pairs())
        rank_names = {folder: f"{family}_world_size_{{world}}_rank_{{rank}}.pt"}
    rest = parts._replace(other=parts.other.filter(lambda entry: entry.fqn not in own))
    copied = _of_hub(job.source, folder)
    if not copied:
        notes.append(
            f"There is no folder {_HUB} (config and tokenizer), which verl's merger wants."
        )
    if not own:
        notes.append("There is no lr_scheduler, so leave `extra` out of checkpoint.load_contents.")
    config = f'{{\n    "FSDP_version": 2,\n    "world_size": {target.world_size}\n}}'
    return Arranged(
        {folder: tree},
        rank_names,
        texts={f"{folder}/fsdp_config.json": config},
        copied=copied,
        notes=(*notes, *job._replace(parts=rest).left_out()),
    )


def _of_hub(index: CheckpointIndex, folder: str) -> dict[str, str]:
    """The files of verl's folder of config and tokenizer, by their places in the output."""
    home = os.path.join(index.root, _HUB)
    found = (
        os.path.relpath(os.path.join(parent, name), home)
        for parent, _, files in os.walk(home)
        for name in files
        if not _WEIGHTS.fullmatch(name)
    )
    return {f"{folder}/{_HUB}/{name}": os.path.join(home, name) for name in sorted(found)}


def _lightning(job: _Job, trainers: str = "") -> Arranged:
    """A sharded checkpoint of Lightning: all else that the user saved lies in ``meta.pt``.

    ``trainers`` is the container in which its Trainer looks for the model: that of FSDPStrategy is
    another one than that of ModelParallelStrategy (Lightning 2.6). Else a container stays.
    """
    parts = job.parts
    model = trainers or _own(job.source, "model", "model")
    optim = _own(job.source, "optim", "optimizer")
    if trainers and not re.fullmatch(r"optimizer_\d+", optim):  # in its one file: optimizer_states
        optim = "optimizer_0"
    folders = {"": _together(_in((model,), parts.model), _in((optim,), job.nested()))}
    meta = os.path.join(job.source.root, "meta.pt")
    if job.source.framework == "lightning" and os.path.isfile(meta):
        return Arranged(folders, copied={"meta.pt": meta})
    plain = {entry.fqn for entry in job.source.objects if entry.opened}
    beside = parts.other.filter(lambda entry: entry.fqn in plain)
    rest = parts._replace(other=parts.other.filter(lambda entry: entry.fqn not in plain))
    notes = job._replace(parts=rest).left_out()
    return Arranged(folders, beside={"meta.pt": beside}, notes=tuple(notes))


def _own(index: CheckpointIndex, section: str, otherwise: str) -> str:
    """The container that a Lightning user gave this section; of other sources, Fabric's usual."""
    tops = {entry.path[0] for entry in index.tensors if entry.section == section}
    return str(tops.pop()) if index.framework == "lightning" and len(tops) == 1 else otherwise


def _composer(job: _Job) -> Arranged:
    """One sharded checkpoint of Composer: all of it in ``state``."""
    kind = _optimizer_class(job)
    root = os.path.basename(os.path.abspath(job.source.root))
    folder = root if re.fullmatch(r"ep\d+-ba\d+", root) else f"ep0-ba{job.step()[0]}"
    tops = _PLACES["composer"]
    taken = job.taken(*tops)
    if taken.get("rng") is None:
        # Its loader asks for the random states of all ranks that saved them: of none.
        none = ObjectEntry("rng", ("rng",), "other", ByteRange("", 0, 0), value=[], opened=True)
        taken = _together(taken, dict_of({"rng": none}))
    tree = _together(
        _in(("state", "model"), job.parts.model),
        _in(("state", "optimizers", kind), job.nested()),
        merge(taken, _scalers(taken)),
    )
    notes = job.left_out(*tops)
    if taken.get("state") is None:
        notes.append("Composer's own state (timestamp, …) is missing: use load_weights_only=True.")
    return Arranged({folder: tree}, notes=tuple(notes))


def _scalers(taken: Branch[Entry]) -> Branch[Entry]:
    """The gradient scaler under all names that a Trainer may ask for: it saves it on GPUs alone,
    and asks for that of its own class.
    """
    saved = taken.get("state", "scaler")
    known = next(iter(saved.items), None) if isinstance(saved, Branch) else None
    return _in(("state", "scaler"), dict_of(dict.fromkeys(_SCALERS, known)))


def _optimizer_class(job: _Job) -> str:
    """What Composer calls the optimizer: its class, which other frameworks do not save."""
    for path in param_names.optimizers_of(job.source):
        if path[:2] == ("state", "optimizers") and len(path) > 2:
            return str(path[2])
    return "AdamW"


def plan_files(
    arranged: Arranged,
    located: CheckpointIndex,
    targets: Sequence[Target],
    plan_folder: PlanFolder,
) -> LazyPlans:
    """All files of the arrangement, folder by folder, then what lies beside them.

    ``targets`` equal the source's tensors under their own names; ``plan_folder`` plans the files of
    a folder, by its name, from its targets and its part of the index, both under new names.
    """
    plans = LazyPlans()
    for folder, tree in arranged.folders.items():
        moved = located.arranged(tree)
        if moved.entries:
            plans += plan_folder(folder, renamed(tree, targets), moved).inside(folder)
    for name, tree in arranged.beside.items():
        moved = located.arranged(tree)
        if moved.entries:
            wanted = formats.PlanOptions(tree=moved.tree, single_file=name)
            torch = formats.named("torch")
            plans += torch.plan_files(renamed(tree, targets), moved.objects, options=wanted)
    beside = [small_file(name, text.encode()) for name, text in arranged.texts.items()]
    for name, path in arranged.copied.items():
        try:
            beside.append(copied_file(name, path))
        except OSError as error:
            raise unwritable(path, error, doing="copied along") from error
    return plans + LazyPlans.of(beside)


def renamed(tree: Branch[Entry], targets: Sequence[Target]) -> tuple[Target, ...]:
    """The targets of a tree's tensors, under the names of their places, sorted by these."""
    by_name = {target.fqn: target for target in targets}
    placed = [
        by_name[entry.fqn]._replace(fqn=names.join(path), path=path)
        for path, entry in tree.walk()
        if isinstance(entry, TensorEntry)
    ]
    return tuple(sorted(placed, key=lambda target: target.fqn))
