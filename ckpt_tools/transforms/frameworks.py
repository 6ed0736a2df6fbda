"""How frameworks want a checkpoint: folders, containers, and the files beside it.

A row a framework. Entries of any source are taken out of the containers that they stand in and put
into those that its own loader looks for: a tree in, a tree for each folder out. What a layout has
no place for is left out and named. This room plans: of the disk it asks only how long the files are
that are copied along.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial, reduce
from itertools import combinations
from typing import TYPE_CHECKING, Literal, NamedTuple

from ckpt_tools import formats
from ckpt_tools.core import names
from ckpt_tools.core.index import ByteRange, CheckpointIndex, Entry, ObjectEntry, TensorEntry
from ckpt_tools.core.mesh_spec import FSDP2_NAMES
from ckpt_tools.core.optimizer_states import megatron_state
from ckpt_tools.core.plan import FilePlan, LazyPlans, Target
from ckpt_tools.core.state_tree import Branch, Tree, dict_of, merge
from ckpt_tools.errors import AnswerNo, UsageError
from ckpt_tools.formats.frameworks import HUB_FOLDER, RANDOM_STATES, folder_of_save
from ckpt_tools.storage import paths
from ckpt_tools.transforms.base import copied_file, small_file

if TYPE_CHECKING:
    from ckpt_tools.transforms.optimizer import Digest, ParamNames, Shape
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

_STEP = re.compile(r"(?:global_step_|step[-_=]?|checkpoint-|ep\d+-ba)(\d+)(?:\D.*)?")
# What Composer's Trainer may call its gradient scaler: FSDP1 has the last, FSDP2 one of the others.
_SCALERS = ("GradScaler", "ClosureGradScaler", "ShardedGradScaler")
# verl's folder of config and tokenizer may hold a copy of the model, too.
_WEIGHTS = re.compile(r".*\.(safetensors|bin|pth?)(\.index\.json)?")


@dataclass(frozen=True, slots=True)
class LayoutTarget:
    """What a layout is for: the ``format`` that was asked for, and the ``options`` of its writer.

    ``order`` are the parameters' names in the order of the loading job's optimizer, for layouts
    that number its states; ``digest`` compares hyper-parameters.
    """

    format: str
    options: formats.PlanOptions
    ranks: TargetRanks
    order: ParamNames | None
    digest: Digest


class _Job(NamedTuple):
    """A checkpoint without its containers: the model by its names, the optimizer, all else."""

    source: CheckpointIndex
    model: Branch[Entry]
    optim: Branch[Entry] | None
    other: Branch[Entry]
    target: LayoutTarget
    row: _Framework

    def tree(
        self, model: Sequence[str], optim: Sequence[str], *others: Branch[Entry]
    ) -> Branch[Entry]:
        """The model and the optimizer, as the framework has it, in these containers."""
        return _together(_in(model, self.model), _in(optim, self.shaped()), *others)

    def shaped(self) -> Tree[Entry]:
        """The optimizer in the framework's shape."""
        if self.optim is None:
            return None
        from ckpt_tools.transforms import optimizer  # late, as all that only --layout needs

        if self.row.shape == "flattened":
            return optimizer.flattened(self.optim)
        if self.row.shape == "numbered":
            return optimizer.numbered(self.optim, self.target.order, digest=self.target.digest)
        return optimizer.nested(self.optim, digest=self.target.digest)

    def taken(self) -> Branch[Entry]:
        """Of what is neither the model's nor the optimizer's, what there is a place for."""
        return dict_of({top: self.other.get(top) for top in self.row.places or ()})

    def left_out(self, taken: Collection[str] = ()) -> list[str]:
        """A note on what there is no place for; ``taken`` entries have one of their own."""
        lost = [path for path, entry in self.other.walk() if entry.fqn not in taken]
        places = self.row.places or ()
        shown = dict.fromkeys(names.join(path[:2]) for path in lost if path[0] not in places)
        if not shown:
            return []
        return [f"Left out, because this layout has no place for it: {', '.join(shown)}."]

    def folder(self) -> tuple[str, list[str]]:
        """The folder of the step that a folder above the source is named after, the nearest first;
        else of step 1, with a note.

        Never 0 for want of a name: of a step 0 TorchTitan loads the model alone.
        """
        for part in reversed(os.path.abspath(self.source.root).split(os.sep)):
            match = _STEP.fullmatch(part)
            if match:
                return self.row.folder.format(step=int(match[1])), []
        note = "No folder name has the step, so it is 1; rename the folder if needed."
        return self.row.folder.format(step=1), [note]


class _Part(NamedTuple):
    """The tree and the format of a folder, or of a file if that is torch; and the name of its rank
    files where it is not usual.
    """

    tree: Branch[Entry]
    format: str
    rank_name: str | None = None


@dataclass(frozen=True, slots=True)
class _Arranged:
    """A checkpoint as a framework wants it: its folders and files by their names.

    ``files`` are others that lie there, ``notes`` say what was left out, for a person.
    """

    parts: Mapping[str, _Part]
    files: Sequence[FilePlan] = ()
    notes: Sequence[str] = ()


class _Framework(NamedTuple):
    """What a framework's loader takes.

    ``reads`` are the formats, the usual ones first; ``folder`` is where it looks for a ``{step}``;
    ``shape`` is that of the optimizer. ``places`` are the outermost containers of other state that
    it has a place for, None for any. ``mesh_names`` are those of dimensions that nobody named:
    torch loads no DTensor of a mesh with other names. ``is_one``: its output is one checkpoint.
    """

    arrange: Callable[[_Job], _Arranged]
    reads: tuple[str, ...] = ("dcp",)
    folder: str = ""
    shape: Shape = "nested"
    places: tuple[str, ...] | None = None
    mesh_names: tuple[str, ...] = FSDP2_NAMES
    is_one: bool = False

    @property
    def names_mesh(self) -> bool:
        """Whether it has names of its own for a mesh."""
        return self.mesh_names != FSDP2_NAMES

    def formats(self, writes: formats.Writes) -> list[str]:
        """The formats that it reads, of those that are ``writes``."""
        return [one for one in self.reads if formats.named(one).writes == writes]


def _job(index: CheckpointIndex, target: LayoutTarget, row: _Framework) -> _Job:
    """Take everything out of its container."""
    from ckpt_tools.transforms import param_names

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
    rest = tree.filter(lambda entry: entry.fqn not in own)
    return _Job(index, dict_of(model), optim, rest, target, row)


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


def _plain(job: _Job) -> _Arranged:
    """What ``dcp.save({"model": …, "optim": …})`` of `get_state_dict` writes."""
    tree = job.tree(("model",), ("optim",), job.other)
    return _Arranged({"": _Part(tree, job.target.format)})


def _accelerate(job: _Job) -> _Arranged:
    """The folder of ``Accelerator.save_state``, also that of the transformers Trainer.

    For FULL_STATE_DICT these are two torch.save files of whole tensors, whose names have no
    container. For LOCAL_STATE_DICT its loader takes rank files of the model's bare state dict; it
    has the optimizer in a DCP directory all the same.
    """
    side, notes = _side_files(job)
    files = _copied(side)
    if job.target.format == "torch":
        whole = {"pytorch_model_fsdp.bin": job.model, "optimizer.bin": _in((), job.shaped())}
        parts = {name: _Part(tree, "torch") for name, tree in whole.items()}
        return _Arranged(parts, files, notes)
    optim = _in(("optimizer",), job.shaped())
    folders = {"optimizer_0": _Part(optim, "dcp")}
    if job.target.format == "ranks":
        notes.append(
            "Accelerate reads these files with LOCAL_STATE_DICT alone, and into FSDP2 only: on a "
            "mesh of the same dimension names."
        )
        model = {"": _Part(job.model, "ranks", "pytorch_model_fsdp_rank{rank}.bin")}
        return _Arranged(model | folders, files, notes)
    if next(optim.leaves(), None) is not None:
        notes.append(
            "With FSDP1, Accelerate's loader of SHARDED_STATE_DICT leaves a new optimizer empty, "
            "also from its own shards. For FSDP1: ckpt-tools export CKPT -o OUT --layout "
            "accelerate, and state_dict_type FULL_STATE_DICT."
        )
    model = {"pytorch_model_fsdp_0": _Part(_in(("model",), job.model), "dcp")}
    return _Arranged(model | folders, files, notes)


def _side_files(job: _Job) -> tuple[dict[str, str], list[str]]:
    """What Accelerate finds beside model and optimizer, and notes on what was left out."""
    side = ("scheduler.bin", "scheduler.pt", "trainer_state.json", "config.json")
    copied = _beside_source(job.source, side, r"sampler.*|scheduler_\d+.bin|custom_checkpoint.*")
    states = _beside_source(job.source, (), RANDOM_STATES.pattern)
    ranks = len(states) or job.source.world_size
    states |= _beside_source(job.source, (), r"dl_state_dict.*")  # positions in the data
    notes = job.left_out()
    if job.target.ranks.fit("ranks", ranks):
        copied |= states
    elif states:
        notes.append(f"Left out, state of the old ranks: {', '.join(sorted(states))}.")
    return copied, notes


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


def _copied(files: Mapping[str, str]) -> list[FilePlan]:
    """Copies of these files, by their new names."""
    return [copied_file(name, path) for name, path in files.items()]


def megatrons_own(index: CheckpointIndex) -> LazyPlans:
    """Copies of what Megatron-core loads beside a torch_dist directory, of whatever mesh."""
    is_its = any("/shard_" in entry.fqn for entry in index.objects)
    if not is_its and not any(megatron_state(entry.fqn) for entry in index.tensors):
        return LazyPlans()
    beside = {name: os.path.join(index.root, name) for name in ("metadata.json", "common.pt")}
    there = {name: path for name, path in beside.items() if paths.is_file(path)}
    return LazyPlans.of(_copied(there))


def _titan(job: _Job) -> _Arranged:
    """One step of TorchTitan: the model's names at the top, the optimizer flattened."""
    taken = job.taken()
    tree = job.tree((), ("optimizer",), taken)
    folder, notes = job.folder()
    notes += job.left_out()
    absent = ",".join(sorted(set(job.row.places or ()) - set(map(str, taken.parts()))))
    if absent:
        notes = [f"TorchTitan needs: --checkpoint.exclude_from_loading={absent}.", *notes]
    return _Arranged({folder: _Part(tree, "dcp")}, notes=notes)


def _verl(job: _Job) -> _Arranged:
    """Rank files of verl: the optimizer numbered, as its loader gives it to the optimizer."""
    folder, notes = job.folder()
    scheduler = job.other.get("extra_state", "lr_scheduler")
    own = {e.fqn for e in scheduler.leaves()} if isinstance(scheduler, Branch) else set()
    tree = job.tree(("model",), ("optim",), _in(("extra_state", "lr_scheduler"), scheduler))
    rank_name = None
    if len(tree.items) == 1:  # also alone it is what the container holds
        ((family, tree),) = ((str(part), _in((), inner)) for part, inner in tree.pairs())
        rank_name = f"{family}_world_size_{{world}}_rank_{{rank}}.pt"
    home = os.path.join(job.source.root, HUB_FOLDER)
    hub = [
        os.path.relpath(os.path.join(parent, name), home)
        for parent, _, files in os.walk(home)
        for name in files
        if not _WEIGHTS.fullmatch(name)
    ]
    if not hub:
        notes.append(
            f"There is no folder {HUB_FOLDER} (config and tokenizer), which verl's merger wants."
        )
    if not own:
        notes.append("There is no lr_scheduler, so leave `extra` out of checkpoint.load_contents.")
    world_size = job.target.options.mesh.size
    config = f'{{\n    "FSDP_version": 2,\n    "world_size": {world_size}\n}}'
    copies = {f"{folder}/{HUB_FOLDER}/{name}": os.path.join(home, name) for name in sorted(hub)}
    return _Arranged(
        {folder: _Part(tree, "ranks", rank_name)},
        files=[small_file(f"{folder}/fsdp_config.json", config.encode()), *_copied(copies)],
        notes=[*notes, *job.left_out(own)],
    )


def _lightning(job: _Job, trainers: str = "") -> _Arranged:
    """A sharded checkpoint of Lightning: all else that the user saved lies in ``meta.pt``.

    ``trainers`` is the container in which its Trainer looks for the model: that of FSDPStrategy is
    another one than that of ModelParallelStrategy (Lightning 2.6). Else a container stays.
    """
    model = trainers or _own(job.source, "model", "model")
    optim = _own(job.source, "optim", "optimizer")
    if trainers and not re.fullmatch(r"optimizer_\d+", optim):  # in its one file: optimizer_states
        optim = "optimizer_0"
    folders = {"": _Part(job.tree((model,), (optim,)), "dcp")}
    meta = os.path.join(job.source.root, "meta.pt")
    if job.source.framework == "lightning" and os.path.isfile(meta):
        return _Arranged(folders, files=_copied({"meta.pt": meta}))
    plain = {entry.fqn for entry in job.source.objects if entry.opened}
    beside = job.other.filter(lambda entry: entry.fqn in plain)
    notes = job.left_out(plain)
    return _Arranged(folders | {"meta.pt": _Part(beside, "torch")}, notes=notes)


def _own(index: CheckpointIndex, section: str, otherwise: str) -> str:
    """The container that a Lightning user gave this section; of other sources, Fabric's usual."""
    tops = {entry.path[0] for entry in index.tensors if entry.section == section}
    return str(tops.pop()) if index.framework == "lightning" and len(tops) == 1 else otherwise


def _composer(job: _Job) -> _Arranged:
    """One sharded checkpoint of Composer: all of it in ``state``."""
    from ckpt_tools.transforms import param_names

    # It calls the optimizer by its class, which other frameworks do not save.
    paths = param_names.optimizers_of(job.source)
    own = (path for path in paths if path[:2] == ("state", "optimizers") and len(path) > 2)
    kind = next((str(path[2]) for path in own), "AdamW")
    root = os.path.basename(os.path.abspath(job.source.root))
    folder = root if re.fullmatch(r"ep\d+-ba\d+", root) else job.folder()[0]
    taken = job.taken()
    if taken.get("rng") is None:
        # Its loader asks for the random states of all ranks that saved them: of none.
        none = ObjectEntry("rng", ("rng",), "other", ByteRange("", 0, 0), value=[], opened=True)
        taken = _together(taken, dict_of({"rng": none}))
    # Its Trainer saves the gradient scaler on GPUs alone, and asks for that of its own class.
    saved = taken.get("state", "scaler")
    scaler = next(iter(saved.items), None) if isinstance(saved, Branch) else None
    scalers = _in(("state", "scaler"), dict_of(dict.fromkeys(_SCALERS, scaler)))
    others = merge(taken, scalers)
    tree = job.tree(("state", "model"), ("state", "optimizers", kind), others)
    notes = job.left_out()
    if taken.get("state") is None:
        notes.append("Composer's own state (timestamp, …) is missing: use load_weights_only=True.")
    return _Arranged({folder: _Part(tree, "dcp")}, notes=notes)


_ROWS: Mapping[FrameworkLayout, _Framework] = {
    "plain": _Framework(_plain, ("dcp", "ranks"), is_one=True),
    "accelerate": _Framework(
        _accelerate,
        ("dcp", "ranks", "torch"),
        places=("scheduler", "trainer_state", "random_states", "rng_state"),  # as files
    ),
    "titan": _Framework(
        _titan,
        folder="step-{step}",
        shape="flattened",
        places=("lr_scheduler", "train_state", "dataloader"),
    ),
    "verl": _Framework(
        _verl,
        ("ranks",),
        folder="global_step_{step}/actor",
        shape="numbered",
        places=(),  # but for one entry
        mesh_names=("ddp", "fsdp"),
    ),
    "lightning": _Framework(_lightning),
    "lightning-fsdp1": _Framework(partial(_lightning, trainers="model")),
    "lightning-fsdp2": _Framework(partial(_lightning, trainers="state_dict")),
    "composer": _Framework(_composer, folder="ep0-ba{step}", places=("state", "rng")),
}


def row_of(layout: FrameworkLayout | None) -> _Framework:
    """The row of a layout; without one everything stays in its place, which asks for no more than
    plain.
    """
    return _ROWS[layout or "plain"]


def layouts(writes: formats.Writes) -> list[FrameworkLayout]:
    """The layouts that `export` ("whole" tensors) or `reshard` ("shards") can write."""
    return [layout for layout, row in _ROWS.items() if row.formats(writes)]


def shards_format(layout: FrameworkLayout | None, asked: str) -> str:
    """The format of shards in a layout: what is ``asked``, or its own in place of the usual one.

    Raises UsageError for another one.
    """
    own = row_of(layout).formats("shards")
    if asked == formats.targets("shards")[0].name:
        return own[0]
    if asked not in own:
        raise UsageError(f"--layout {layout} is of DCP directories; it has no --format {asked}.")
    return asked


class LaidOut(NamedTuple):
    """A checkpoint in a layout: its files, its targets under their new names, the index of its last
    folder, and notes on what was left out.
    """

    files: LazyPlans
    targets: tuple[Target, ...]
    last: CheckpointIndex
    notes: tuple[str, ...]


def plan(
    index: CheckpointIndex, targets: Sequence[Target], layout: FrameworkLayout, target: LayoutTarget
) -> LaidOut:
    """The files of a checkpoint, its objects opened, as the loader of ``layout`` expects them.

    ``targets`` equal the tensors of ``index`` under their own names. Raises UsageError when there
    are several optimizers, when two names become one, and for numbered optimizer states where names
    are expected or the other way round; UnsupportedError for an optimizer's state that cannot be
    had in the framework's shape, AnswerNo when nothing is left.
    """
    row = row_of(layout)
    arranged = row.arrange(_job(index, target, row))
    if not any(next(part.tree.leaves(), None) for part in arranged.parts.values()):
        raise AnswerNo(
            f"{index.root}: nothing that is chosen has a place in --layout {layout}.",
            hint="Leave --layout out to keep it unchanged.",
        )
    by_name = {target.fqn: target for target in targets}
    files, placed, last = LazyPlans(), list[Target](), index
    for name, part in arranged.parts.items():
        moved, form = index.arranged(part.tree), formats.named(part.format)
        if not moved.entries:
            continue
        moves = (
            by_name[entry.fqn]._replace(fqn=names.join(path), path=path)
            for path, entry in part.tree.walk()
            if isinstance(entry, TensorEntry)
        )
        here = tuple(sorted(moves, key=lambda one: one.fqn))
        if part.format == "torch":
            wanted = formats.PlanOptions(tree=moved.tree, single_file=name)
            files += form.plan_files(here, moved.objects, options=wanted)
        else:
            wanted = replace(target.options, tree=moved.nesting, rank_name=part.rank_name)
            files += form.plan_files(here, moved.objects, options=wanted).inside(name)
            placed, last = [*placed, *here], moved
    files += LazyPlans.of(arranged.files)
    return LaidOut(files, (*placed,), last, (*arranged.notes,))
