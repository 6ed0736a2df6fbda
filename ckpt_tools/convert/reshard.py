"""`reshard`: any checkpoint to shards for training on another mesh.

Planned from the index alone, like every conversion: which box each rank of the target mesh holds,
and which chunks fill it. Executors (threads, worker processes, the ranks of a torchrun job) are not
known here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import ClassVar

from ckpt_tools import formats
from ckpt_tools.analysis import summary
from ckpt_tools.analysis.infer_mesh import cut_of
from ckpt_tools.convert import arranging
from ckpt_tools.convert.export import renamed
from ckpt_tools.convert.plan import Plan
from ckpt_tools.convert.write import Conversion, EntryOptions, Locate, WriteOptions
from ckpt_tools.copying.origin import option_texts
from ckpt_tools.core import names
from ckpt_tools.core.dtypes import DType
from ckpt_tools.core.geometry import Box
from ckpt_tools.core.index import CheckpointIndex, TensorEntry
from ckpt_tools.core.layout import Layout, Mesh, Placement, Replicate, Shard, on_mesh
from ckpt_tools.core.mesh_spec import default_placements, described, fsdp_order, parse_mesh
from ckpt_tools.core.names import select
from ckpt_tools.core.options import option
from ckpt_tools.core.plan import Target
from ckpt_tools.core.records import Json, as_json, record_json
from ckpt_tools.core.text import counted, some
from ckpt_tools.errors import UnsupportedError, UsageError
from ckpt_tools.storage.reader import Files
from ckpt_tools.transforms import base as steps
from ckpt_tools.transforms import frameworks, param_names
from ckpt_tools.transforms.base import TransformedTensor
from ckpt_tools.transforms.dtypes import DtypePolicy, idle_notes
from ckpt_tools.transforms.frameworks import FrameworkLayout, LaidOut, LayoutTarget
from ckpt_tools.transforms.optimizer import ParamNames
from ckpt_tools.transforms.rank_states import EVERY_RANK, TargetRanks, without_old_ranks

OWN_BOXES = Mesh(())


@dataclass(frozen=True, slots=True)
class ReshardOptions(EntryOptions):
    """The target: a mesh, the placements of tensors on it, the format, and which tensors to write.

    A mesh of no dimension keeps the boxes that the source has, uneven ones too. ``placements`` None
    means FSDP2's own; ``rules`` of a glob (a regex after ``re:``) and placements overrule them by
    name, the last match wins; ``like`` takes each tensor's layout from another checkpoint where
    that has one. ``layout`` is the framework whose loader the output is for. ``param_names`` name a
    numbered optimizer's parameters in its order; empty, they are those that its groups store.
    ``torch_version`` is the torch of the job that will load rank files: None for that of rank files
    that are the source, else the installed one, else the newest known.
    """

    mesh: Mesh = option(
        OWN_BOXES,
        "--to-mesh",
        "The target mesh: 32, 4x8, or with names: dp_replicate=4,dp_shard=8; =32 has none.",
        metavar="MESH",
        heading="Output",
        shown="the source's own boxes, for a copy with --only, -x, --dtype or --rename",
        parse=parse_mesh,
    )
    placements: tuple[Placement, ...] | None = None
    rules: tuple[tuple[str, tuple[Placement, ...]], ...] = ()
    like: CheckpointIndex | None = None
    format: str = option(
        formats.targets("shards")[0].name,
        "--format",
        "A DCP directory, or one torch file of DTensors for each rank.",
        heading="Output",
        choices=[one.name for one in formats.targets("shards")],
    )
    layout: FrameworkLayout | None = option(
        None,
        "--layout",
        "Write the folders, containers and extra files that this framework's loader expects.",
        heading="Output",
        choices=frameworks.layouts("shards"),
    )
    param_names: ParamNames | None = None
    device_type: str = option(
        "cuda",
        "--device-type",
        "Device type of the mesh in --format ranks.",
        metavar="TYPE",
        heading="Output",
    )
    torch_version: str | None = option(
        None,
        "--torch-version",
        "The torch of the job that will load --format ranks, such as 2.13. Each reads only its "
        "own rank files.",
        metavar="VERSION",
        heading="Output",
        shown="that of rank files that are the source, else the installed one, else the "
        "newest known",
    )


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class ReshardPlan(Plan):
    """A plan whose targets have layouts on a ``mesh``.

    ``inside`` is how many tensors lie in objects that are copied as they are.
    """

    proof_beside: ClassVar[bool] = True
    mesh: Mesh
    inside: int = 0

    @property
    def tensors(self) -> int:
        """Number of tensors in the output, those inside of objects included."""
        return len(self.targets) + self.inside

    @property
    def nbytes(self) -> int:
        """Bytes of all files."""
        return self.files.length

    def to_dict(self) -> dict[str, Json]:
        """What `reshard --json` prints of a plan: all but where and by what it is written, and
        what is read for each file.
        """
        return {
            "mesh": record_json(self.mesh),
            "tensors": len(self.targets),
            "nbytes": self.nbytes,
            "files": [{"path": file.path, "nbytes": file.length} for file in self.files.files],
            "notes": as_json(self.notes),
        }


def reshard_of(
    index: CheckpointIndex, out: str, write: WriteOptions, options: ReshardOptions
) -> Conversion[ReshardPlan]:
    """The chosen tensors and objects as shards of the target mesh, to the folder ``out``.

    Its ``plan`` raises UsageError for --check of several checkpoints, and what `plan_reshard` does.
    """

    def planned(locate: Locate) -> ReshardPlan:
        refuse_check(options, write)
        return replace(plan_reshard(index, options, locate=locate), settings=option_texts(options))

    others = () if options.like is None else (options.like,)
    return Conversion(index, out, write, planned, others)


def plan_reshard(
    index: CheckpointIndex, options: ReshardOptions, *, locate: Locate = formats.locate
) -> ReshardPlan:
    """Plan a reshard from headers alone; nothing is written.

    Raises what keeps the chosen tensors from being whole, and UsageError or UnsupportedError for
    layouts that the tensors or torch's own loader cannot have.
    """
    is_own = options.mesh == OWN_BOXES
    if is_own:
        options = replace(options, mesh=_ranks_of(index))
    options, of_torch = _for_torch(index, options)
    index, notes = _with_names(index, options)
    places = frameworks.row_of(options.layout).places
    opened, of_ranks = without_old_ranks(
        select(index, options), _target_ranks(options), places=places
    )
    chosen = opened.closed() if _keeps_items(options) else opened
    located = _whole(chosen, options, locate)
    located, left_out = arranging.without_unopened(
        located, formats.named(options.format).object_codec
    )
    sharded, stepped = _sharded(index), list[str]()
    made = tuple(TransformedTensor(entry, (entry.fqn,)) for entry in located.tensors)
    types = DtypePolicy(options.dtype, options.dtypes, index)
    if options.steps:
        located, made, stepped = _stepped(index, located, options, types)
        sharded = frozenset(one.entry.fqn for one in made if not sharded.isdisjoint(one.origins))
    chosen_types, kept = types.types_of(made)
    if is_own:
        targets, said = _in_own_boxes(located.tensors, chosen_types, options.mesh)
    else:
        targets, said = _on_mesh(located.tensors, chosen_types, options, sharded)
    laid = _laid_out(targets, located, options)
    notes += [*said[:1], *stepped, *kept, *said[1:], *of_torch, *of_ranks, *left_out, *laid.notes]
    keeps_names = options.layout is None and not options.steps
    return ReshardPlan(
        files=laid.files + frameworks.megatrons_own(index) if keeps_names else laid.files,
        targets=laid.targets,
        chosen=chosen,
        mesh=options.mesh,
        inside=len(opened.tensors) - len(chosen.tensors),
        notes=(*index.notes, *notes, *arranging.left_out_strings(index.strings)),
        source=formats.to_locate_in(index),
        objects=laid.last.objects,
        tree=laid.last.nesting,
        origins={one.entry.fqn: one.origins for one in made},
    )


def _on_mesh(
    tensors: Sequence[TensorEntry],
    types: Mapping[str, DType],
    options: ReshardOptions,
    sharded: frozenset[str],
) -> tuple[tuple[Target, ...], list[str]]:
    """The tensors as they are placed on the target mesh, and notes on it."""
    mesh, usual = options.mesh, options.placements or default_placements(options.mesh)
    rules = [(names.matcher(pattern), cut_so) for pattern, cut_so in options.rules]
    like = _layouts_of(options.like) if options.like is not None else {}
    # What the source's job held whole on each rank beside sharded tensors (buffers, random states)
    # stays so. Of a source that stores everything whole, weights and optimizer state are cut.
    cut = sharded or {entry.fqn for entry in tensors if entry.section != "other"}
    layouts: dict[str, Layout | None] = {}  # None for one that each rank holds whole
    for entry in tensors:
        ruled = [placements for matches, placements in rules if matches(entry.fqn)]
        layout = None
        # A glob for a weight also matches the step counter of its optimizer, which has no shape.
        if entry.shape and not ruled and entry.fqn in like:
            layout = _moved_to_mesh(entry, like[entry.fqn], mesh)
        elif entry.shape and (ruled or entry.fqn in cut):
            placements = ruled[-1] if ruled else usual
            layout = Layout(mesh, placements, fsdp_order(mesh, placements))
        layouts[entry.fqn] = _checked(entry, layout)
    targets = (Target(e.fqn, e.path, e, types[e.fqn], layouts[e.fqn]) for e in tensors)
    idle = idle_notes("--place", (pattern for pattern, _ in options.rules), layouts)
    return (*targets,), [described(mesh, usual), *_notes(layouts, tensors, options), *idle]


def _in_own_boxes(
    tensors: Sequence[TensorEntry], types: Mapping[str, DType], ranks: Mesh
) -> tuple[tuple[Target, ...], list[str]]:
    """The tensors in the boxes that the source has, each on the rank that saved it."""
    targets = (
        Target(entry.fqn, entry.path, entry, types[entry.fqn], boxes=_own_boxes(entry))
        for entry in tensors
    )
    return (*targets,), [f"Keeps the source's own boxes, of {counted(ranks.size, 'rank')}."]


def _own_boxes(entry: TensorEntry) -> tuple[tuple[int, Box], ...]:
    """The distinct boxes of a tensor, each with a rank of its own: the one that saved it, or where
    that has another box already, the first that has none.
    """
    held = {chunk.box: chunk.rank or 0 for chunk in reversed(entry.chunks)}
    solid = {box: rank for box, rank in held.items() if box.numel} or held
    placed: dict[int, Box] = {}
    more = [box for box, rank in solid.items() if placed.setdefault(rank, box) != box]
    free = (rank for rank in count() if rank not in placed)
    return tuple(sorted((*placed.items(), *zip(free, more, strict=False))))


def _ranks_of(index: CheckpointIndex) -> Mesh:
    """The ranks that have saved a checkpoint. Raises UsageError for one that nothing is cut in."""
    if not _sharded(index):
        raise UsageError(
            f"{index.root} has full tensors, and no boxes to keep.",
            hint="Give --to-mesh; or write full tensors: ckpt-tools export CKPT -o OUT",
        )
    most = max(rank for entry in index.tensors for rank, _ in _own_boxes(entry))
    return Mesh((max(index.world_size or 1, most + 1),))


def _for_torch(
    index: CheckpointIndex, options: ReshardOptions
) -> tuple[ReshardOptions, tuple[str, ...]]:
    """The options with the torch that will load the output, and notes on what that needs."""
    loader = formats.named(options.format).loader(index, asked=options.torch_version)
    if loader is None:
        return options, ()
    version, note = loader
    options = replace(options, torch_version=version)
    named = options.mesh.dim_names
    own = None if index.mesh is None else index.mesh.dim_names
    if named in (None, own) or frameworks.row_of(options.layout).names_mesh:
        return options, (note,)
    bare = ",".join(f"={size}" for size in options.mesh.shape)
    must_match = (
        f"Torch loads them only into a mesh of the same names ({', '.join(named)}); --to-mesh "
        f"'{bare}' gives none, as init_device_mesh does without mesh_dim_names."
    )
    return options, (note, must_match)


def _keeps_items(options: ReshardOptions) -> bool:
    """Whether objects that hold tensors are copied as they are, byte for byte."""
    casts = options.dtype is not None or options.dtypes
    copied = formats.named(options.format).object_codec is not None
    return copied and not (casts or options.steps or options.layout)


def _whole(chosen: CheckpointIndex, options: ReshardOptions, locate: Locate) -> CheckpointIndex:
    """The chosen entries as they are planned, with objects as the target's format takes them.

    Raises what keeps the entries from being whole.
    """
    form = formats.named(options.format)
    with Files() as files:
        located = locate(chosen, files)
        names.require_chosen(located)
        foreign = any(
            not e.is_writable and e.codec not in (None, form.object_codec) for e in located.objects
        )
        if options.layout is not None or foreign:
            located = formats.open_objects(located, files)
        if form.nested:
            return param_names.loadable(located)
        return formats.copyable_objects(located, files)


def _target_ranks(options: ReshardOptions) -> TargetRanks:
    return EVERY_RANK if options.keep_rank_states else TargetRanks.of_mesh(options.mesh)


def _with_names(
    index: CheckpointIndex, options: ReshardOptions
) -> tuple[CheckpointIndex, list[str]]:
    """The index with its numbered optimizer's state by the names of --param-names, before anything
    is chosen by name; and what of -x matches none of them.
    """
    if options.param_names is None:
        return index, []
    index = _named(index, options.param_names, options)
    held = [*(entry.fqn for entry in index.entries), *index.lost]
    idle = names.idle(options.exclude, held)
    return index, [f"-x '{text}' matches nothing by the names of --param-names." for text in idle]


def _named(index: CheckpointIndex, given: ParamNames, options: ReshardOptions) -> CheckpointIndex:
    groups = [entry for entry in index.objects if "param_groups" in entry.path]
    with Files() as files:
        opened = formats.open_objects(replace(index, objects=tuple(groups)), files).objects
    known = {entry.fqn: entry for entry in opened}
    index = replace(index, objects=tuple(known.get(e.fqn, e) for e in index.objects))
    is_numbered = frameworks.row_of(options.layout).shape == "numbered"
    if is_numbered and not param_names.numbered(index):
        return index  # they are then the order in which to number
    named = param_names.with_names(index, given)
    return index if is_numbered and not given.names else named  # its own order: numbered as it was


def _laid_out(
    targets: tuple[Target, ...], located: CheckpointIndex, options: ReshardOptions
) -> LaidOut:
    """The files of the output, unchanged or as its framework wants them."""
    wanted = formats.PlanOptions(
        tree=located.nesting,
        mesh=options.mesh,
        device_type=options.device_type,
        torch_version=options.torch_version,
    )
    if options.layout is None:
        form = formats.named(options.format)
        plans = form.plan_files(targets, located.objects, options=wanted)
        return LaidOut(plans, targets, located, ())
    order = options.param_names if options.param_names and options.param_names.names else None
    with Files() as files:
        digest = arranging.digest_in(located, files)
        ranks = _target_ranks(options)
        target = LayoutTarget(options.format, wanted, ranks, order, digest)
        return frameworks.plan(located, targets, options.layout, target)


def _stepped(
    index: CheckpointIndex, located: CheckpointIndex, options: ReshardOptions, types: DtypePolicy
) -> tuple[CheckpointIndex, tuple[TransformedTensor, ...], list[str]]:
    """The index after all steps, its tensors in the order of their new names, and notes.

    Raises UsageError for an optimizer whose groups list the names that a step changes.
    """
    from ckpt_tools.transforms.maps import UnderTransform

    under = [step for step in options.steps if isinstance(step, UnderTransform)]
    if located.objects and len(under) == len(options.steps):
        moved = located
        for step in under:
            moved = step.everything(moved)
        pairs = zip(sorted(located.tensors, key=lambda e: e.fqn), moved.tensors, strict=True)
        return moved, tuple(TransformedTensor(new, (old.fqn,)) for old, new in pairs), []
    kept = next((entry.fqn for entry in located.objects if entry.section == "optim"), None)
    if kept is not None:
        raise UsageError(
            f"--map, --rename and --untie are for models: {kept} is of an optimizer, whose groups "
            "would keep the old names.",
            hint="Give --only model.",
        )
    bare, notes = renamed(index, located.tensors, keep_names=False)
    with Files() as files:
        outcome = steps.apply(options.steps, bare, files, types)
    made = tuple(sorted(outcome.made, key=lambda one: one.entry.fqn))
    tree = located.nesting.filter(lambda fqn: located.object(fqn) is not None)
    located = replace(located, tensors=tuple(one.entry for one in made), tree=tree)
    return located, made, [*notes, *outcome.notes]


def refuse_check(options: ReshardOptions, write: WriteOptions) -> None:
    """Raise UsageError for --check of an output that is not one checkpoint."""
    if write.check and not frameworks.row_of(options.layout).is_one:
        raise UsageError(
            f"--check reads one checkpoint back, and --layout {options.layout} writes several.",
            hint="Compare them afterwards: ckpt-tools diff CKPT OUT/… --clean-names.",
        )


def _sharded(index: CheckpointIndex) -> frozenset[str]:
    """Names that the source stores in pieces; empty when it stores everything whole."""
    return frozenset(
        entry.fqn
        for entry in index.tensors
        if entry.layout is not None or cut_of(entry) is not None
    )


def _layouts_of(like: CheckpointIndex) -> Mapping[str, Layout | None]:
    """Each tensor's layout in another checkpoint: stated, or inferred from its boxes."""
    found = summary.mesh_of(like)
    if found is None:
        raise UsageError(f"{like.root}: it has no mesh, so --like cannot use it.")
    known = {entry.fqn: summary.layout_of(entry, found) for entry in like.tensors}
    return {fqn: None if one is None else one[0] for fqn, one in known.items()}


def _moved_to_mesh(entry: TensorEntry, layout: Layout | None, mesh: Mesh) -> Layout | None:
    """A layout of --like on the target mesh; its own mesh may be a named part of that."""
    if layout is None:
        return None
    moved = on_mesh(layout, mesh)
    if moved is None:
        raise UsageError(
            f"{entry.fqn}: the other checkpoint has it on mesh {layout.mesh}, which is not part of "
            f"{mesh}.",
            hint=f"Give --to-mesh that checkpoint's mesh, or --place '{entry.fqn}=…'.",
        )
    return moved


def _checked(entry: TensorEntry, layout: Layout | None) -> Layout | None:
    """The layout, when the tensor can have it and torch's own loader gets it right.

    Where two mesh dimensions cut the same tensor dimension in strided order, torch computes wrong
    offsets unless the dimension divides by the parts of the first cut (measured on torch 2.13).
    """
    if layout is None or all(isinstance(p, Replicate) for p in layout.placements):
        return layout
    beyond = [p for p in layout.placements if isinstance(p, Shard) and p.dim >= len(entry.shape)]
    if beyond:
        raise UnsupportedError(
            f"{entry.fqn}: {beyond[0]} of a tensor of shape {list(entry.shape)}.",
            hint=f"Place it by its name: --place '{entry.fqn}=…'.",
        )
    if layout.order == tuple(range(len(layout.order))):
        return layout
    first = layout.order[0]
    placement = layout.placements[first]
    if isinstance(placement, Shard) and entry.shape[placement.dim] % layout.mesh.shape[first]:
        raise UnsupportedError(
            f"{entry.fqn}: dimension {placement.dim} of {list(entry.shape)} does not divide by "
            f"{layout.mesh.shape[first]}, and torch itself loads such shards wrong.",
            hint=f"Replicate it on that mesh dimension: --place '{entry.fqn}=…' with R there.",
        )
    return layout


def _notes(
    layouts: Mapping[str, Layout | None], tensors: Sequence[TensorEntry], options: ReshardOptions
) -> list[str]:
    """What each rank holds whole, that could be cut by its name; and what no placement uses."""
    whole = [entry for entry in tensors if layouts[entry.fqn] is None]
    named = [entry.fqn for entry in whole if entry.shape]
    notes = []
    if whole:
        scalars = [counted(len(whole) - len(named), "scalar")] if len(named) < len(whole) else []
        held = ", ".join([*scalars, *([some(named)] if named else [])])
        way = "; --place shards them" if named else ""
        notes.append(f"{counted(len(whole), 'tensor')} replicated on each rank: {held}{way}.")
    if options.placements is None and options.mesh.dim_names is not None:
        placed = default_placements(options.mesh)
        idle = [
            name
            for name, size, p in zip(
                options.mesh.dim_names, options.mesh.shape, placed, strict=True
            )
            if isinstance(p, Replicate) and size > 1 and not re.search("replicate|ddp", name)
        ]
        if idle and not options.rules and options.like is None:
            notes.append(
                f"No placement uses {', '.join(idle)}, so it replicates; see --place and --like."
            )
    return notes
