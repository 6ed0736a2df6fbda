"""`export`: whole tensors, for loading elsewhere; planned from the index alone."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256

from ckpt_tools import formats
from ckpt_tools._version import __version__
from ckpt_tools.convert.arranging import (
    OWN_STRINGS,
    digest_in,
    left_out_strings,
    note_on_unopened,
    without_unopened,
)
from ckpt_tools.convert.plan import Plan
from ckpt_tools.convert.write import Conversion, EntryOptions, Locate, WriteOptions
from ckpt_tools.copying.origin import option_texts
from ckpt_tools.core import names
from ckpt_tools.core.index import NO_TREE, CheckpointIndex, Section, TensorEntry
from ckpt_tools.core.names import select
from ckpt_tools.core.options import option
from ckpt_tools.core.plan import LazyPlans, Target
from ckpt_tools.core.records import Json, as_json
from ckpt_tools.core.text import counted, parse_size, some
from ckpt_tools.errors import AnswerNo, UsageError
from ckpt_tools.storage.paths import normal
from ckpt_tools.storage.reader import Files
from ckpt_tools.transforms import base as steps
from ckpt_tools.transforms import frameworks
from ckpt_tools.transforms.base import Transform, TransformedTensor, TransformResult
from ckpt_tools.transforms.dtypes import DtypePolicy, master_weights_note
from ckpt_tools.transforms.frameworks import FrameworkLayout, LayoutTarget


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportOptions(EntryOptions):
    """What to export and in which form; ``max_shard_size`` in bytes.

    ``basename`` begins the name of each safetensors file. States of ranks go along where objects
    do. ``layout`` is the framework for whose loader torch files are laid out; it gives the names,
    so that neither ``steps`` nor ``keep_names`` go with it.
    """

    format: str = formats.targets("whole")[0].name
    layout: FrameworkLayout | None = option(
        None,
        "--layout",
        "Write the full tensors and optimizer as this framework's loader reads them.",
        heading="Output",
        choices=frameworks.layouts("whole"),
    )
    keep_names: bool = option(False, "--keep-names", "Keep every name unchanged.", heading="Names")
    max_shard_size: int = option(
        5_000_000_000,
        "--max-shard-size",
        "Tensor bytes of one safetensors file, at most.",
        metavar="SIZE",
        heading="Types and sizes",
        after="--dtype",
        typed="5GB",
        parse=parse_size,
    )
    only: Section | None = "model"
    basename: str = "model"


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class ExportPlan(Plan):
    """A plan of whole tensors."""

    @property
    def names(self) -> Mapping[str, str]:
        """What each source name is called in the output, where it is all of one tensor there."""
        used = Counter(origin for origins in self.origins.values() for origin in origins)
        return {
            origins[0]: fqn
            for fqn, origins in self.origins.items()
            if len(origins) == 1 and used[origins[0]] == 1
        }

    def to_dict(self) -> dict[str, Json]:
        """What `export --json` prints of a plan: all but where it is written, and whether it is."""
        return {
            "tensors": self.tensors,
            "nbytes": self.nbytes,
            "files": [{"path": file.path, "nbytes": file.length} for file in self.files.files],
            "names": as_json(self.names),
            "origins": as_json(self.origins),
            "notes": as_json(self.notes),
        }


def export_of(
    index: CheckpointIndex, out: str, write: WriteOptions, options: ExportOptions
) -> Conversion[ExportPlan]:
    """The chosen tensors whole, in the asked format, to the folder or file ``out``."""
    check = write.check
    single_file = os.path.basename(normal(out)) if is_single_file(out, options.format) else None

    def planned(locate: Locate) -> ExportPlan:
        if options.layout is not None:
            _refuse_with_layout(options, single_file=single_file, check=check)
            plan = _plan_layout(index, options, options.layout, locate)
        else:
            plan = plan_export(index, options, single_file=single_file, check=check, locate=locate)
        settings = option_texts(options)
        if options.steps:  # of a map that is a function, the names and boxes that it gave
            digest = sha256()
            for target in plan.targets:
                made = (target.fqn, plan.origins[target.fqn], list(target.entry.boxes))
                digest.update(repr(made).encode())
            settings["what the names map does"] = digest.hexdigest()[:32]
        return replace(plan, settings=settings)

    return Conversion(index, out, write, planned)


def plan_export(
    index: CheckpointIndex,
    options: ExportOptions,
    *,
    single_file: str | None = None,
    check: bool = False,
    locate: Locate = formats.locate,
) -> ExportPlan:
    """Plan an export from headers alone; nothing is written. ``check`` leaves room for its record.

    Raises what keeps the chosen tensors from being whole, and UsageError or UnsupportedError for
    names and element types that the output cannot hold.
    """
    chosen, of_ranks = _chosen(index, options)
    keeps_nesting = _keeps_nesting(options)
    read = chosen if keeps_nesting else replace(chosen, objects=())
    with Files() as files:
        located = _whole(chosen, options, locate, files)
        bare, notes = renamed(index, located.tensors, keep_names=options.keep_names)
        types = DtypePolicy(options.dtype, options.dtypes, index)
        outcome = steps.apply(options.steps, bare, files, types)
    targets, kept = _targets(outcome.made, types)
    targets = _in_containers(targets, outcome, index, options)
    objects = tuple(e for e in located.objects if keeps_nesting and e.is_writable)
    left_out = _left_out(index, chosen, located, nested=keeps_nesting)
    strings, gone = _kept_strings(index, located, outcome.made, targets, form=options.format)
    wanted = formats.PlanOptions(
        tree=located.nesting if keeps_nesting else NO_TREE,
        single_file=single_file,
        basename=options.basename,
        max_shard_size=options.max_shard_size,
        metadata=strings | _provenance(index, check=check),
    )
    plans = formats.named(options.format).plan_files(targets, objects, options=wanted)
    return ExportPlan(
        files=plans + LazyPlans.of(outcome.files),
        targets=targets,
        chosen=read,
        origins={one.entry.fqn: one.origins for one in outcome.made},
        notes=(*index.notes, *notes, *outcome.notes, *kept, *of_ranks, *left_out, *gone),
        source=formats.to_locate_in(index),
        single_file=single_file,
        works=outcome.works,
        objects=objects,
        tree=wanted.tree,
    )


def _chosen(index: CheckpointIndex, options: ExportOptions) -> tuple[CheckpointIndex, list[str]]:
    """The entries that are exported, and a note on states of ranks that one file has no use for."""
    chosen = select(index, options)
    _refuse_split_adapters(index, chosen, options.steps)
    if options.keep_rank_states or not _keeps_nesting(options):  # these are objects
        return chosen, []
    from ckpt_tools.transforms.rank_states import ONE_FILE, without_old_ranks  # late: few take any

    return without_old_ranks(chosen, ONE_FILE)


def _refuse_split_adapters(
    index: CheckpointIndex, chosen: CheckpointIndex, given: Sequence[Transform]
) -> None:
    """Raise UsageError for filters that take a part of an adapter away from a step that needs it.

    A step itself sees only what was chosen.
    """
    if not given:
        return
    from ckpt_tools.transforms import lora  # late: few exports have steps

    for step in given:
        if isinstance(step, (lora.AdapterTransform, lora.MergeTransform)):
            lora.refuse_split(index, chosen, step.adapter)


def _refuse_with_layout(options: ExportOptions, *, single_file: str | None, check: bool) -> None:
    """Raise UsageError for options that do not go with a framework's layout."""
    whole = frameworks.row_of(options.layout).formats("whole")
    if options.format not in whole or single_file is not None:
        raise UsageError(
            f"--layout {options.layout} is a folder of torch files; it has no other --format, and "
            "OUT no ending."
        )
    if options.steps or options.keep_names:
        raise UsageError(
            f"--layout {options.layout} sets the names: no --keep-names, no --map or "
            "--rename, no LoRA or Hugging Face options."
        )
    if check:
        raise UsageError(
            f"--check reads one file or one folder of shards back, which --layout {options.layout} "
            "is not.",
            hint="Compare them afterwards: ckpt-tools diff CKPT OUT.",
        )


def _plan_layout(
    index: CheckpointIndex, options: ExportOptions, layout: FrameworkLayout, locate: Locate
) -> ExportPlan:
    """Plan whole tensors and objects as the framework's own loader finds them."""
    from ckpt_tools.transforms.rank_states import EVERY_RANK, ONE_FILE, without_old_ranks

    ranks = EVERY_RANK if options.keep_rank_states else ONE_FILE
    chosen = select(index, options)
    chosen, of_ranks = without_old_ranks(chosen, ranks, places=frameworks.row_of(layout).places)
    with Files() as files:
        located = _whole(chosen, options, locate, files)
        located, left_out = without_unopened(located, None)
        made = tuple(TransformedTensor(entry, (entry.fqn,)) for entry in located.tensors)
        targets, kept = _targets(made, DtypePolicy(options.dtype, options.dtypes, index))
        digest = digest_in(index, files)
        wanted = LayoutTarget(options.format, formats.PlanOptions(), ranks, None, digest)
        laid = frameworks.plan(located, targets, layout, wanted)
    gone = left_out_strings(index.strings)
    return ExportPlan(
        files=laid.files,
        targets=targets,
        chosen=chosen,
        source=formats.to_locate_in(index),
        origins={target.fqn: (target.fqn,) for target in targets},
        notes=(*index.notes, *kept, *of_ranks, *left_out, *laid.notes, *gone),
    )


def _whole(
    chosen: CheckpointIndex, options: ExportOptions, locate: Locate, files: Files
) -> CheckpointIndex:
    """The chosen entries as they are planned. Raises what keeps them from being whole."""
    located = locate(chosen, files)
    names.require_chosen(located)
    if _keeps_nesting(options):
        from ckpt_tools.transforms.param_names import loadable  # late: most take tensors alone

        return loadable(formats.open_objects(located, files))
    if not chosen.tensors:
        raise AnswerNo(f"{chosen.root}: these filters choose only objects, no tensors.")
    return located


def _keeps_nesting(options: ExportOptions) -> bool:
    """Whether the output gets the source's objects, and its nesting or that of a framework.

    Only so can an optimizer load it: its state is nested, and its groups are objects.
    """
    as_it_was = options.keep_names and not options.steps
    return options.layout is not None or (formats.named(options.format).nested and as_it_was)


def _in_containers(
    targets: Sequence[Target],
    outcome: TransformResult,
    index: CheckpointIndex,
    options: ExportOptions,
) -> tuple[Target, ...]:
    """The targets of a format without containers, each in the container that its name begins with.

    Containers are those of the source that were not taken off; names from steps have none.
    """
    if formats.named(options.format).nested or options.steps:
        return tuple(targets)
    containers = names.containers_of(index)
    common = {containers[made.origins[0]] for made in outcome.made}
    if len(common) == 1 and not options.keep_names:
        return tuple(targets)  # the one container of all was taken off
    placed = []
    for target, made in zip(targets, outcome.made, strict=True):
        container = containers[made.origins[0]]
        prefix = names.join((*container, ""))
        inside = container and target.fqn.startswith(prefix)
        path = (*container, target.fqn[len(prefix) :]) if inside else (target.fqn,)
        placed.append(target._replace(path=path))
    return tuple(placed)


def _targets(
    made: Sequence[TransformedTensor], types: DtypePolicy
) -> tuple[tuple[Target, ...], list[str]]:
    """The targets with their types, and a note on those that keep their own against --dtype."""
    chosen, notes = types.types_of(made)
    entries = (one.entry for one in made)
    return tuple(Target(e.fqn, e.path, e, chosen[e.fqn]) for e in entries), notes


def is_single_file(out: str, form: str) -> bool:
    """Whether this output is one file, by its suffix, and not a folder."""
    return normal(out).endswith(formats.named(form).suffixes)


def format_of(out: str) -> str | None:
    """The format of this output by its suffix; None for a folder."""
    forms = (form.name for form in formats.targets("whole"))
    return next((form for form in forms if is_single_file(out, form)), None)


def renamed(
    index: CheckpointIndex, chosen: Collection[TensorEntry], *, keep_names: bool
) -> tuple[tuple[TransformedTensor, ...], list[str]]:
    """The chosen tensors under their output names, and notes on what was done to the names.

    The container that holds all chosen tensors is taken off, and so are wrapper components. Raises
    UsageError when two names become one.
    """
    if keep_names:
        return tuple(TransformedTensor(e, (e.fqn,)).named(e.fqn) for e in chosen), []
    containers = names.containers_of(index)
    used = {containers[entry.fqn] for entry in chosen}
    prefix = used.pop() if len(used) == 1 else ()
    bare = {entry.fqn: names.join(entry.path[len(prefix) :]) for entry in chosen}
    cleaned = {fqn: names.clean(name) for fqn, name in bare.items()}
    made = tuple(TransformedTensor(e, (e.fqn,)).named(cleaned[e.fqn]) for e in chosen)
    steps.refuse_collisions(made, hint="--keep-names keeps both names; --exclude leaves one out.")
    notes = []
    if prefix:
        notes.append(f"Removed the container {names.join(prefix)!r} from all names.")
    changed = sum(cleaned[fqn] != name for fqn, name in bare.items())
    if changed:
        notes.append(
            f"Removed wrapper components from {counted(changed, 'name')}; --keep-names keeps them."
        )
    return made, notes


def _left_out(
    index: CheckpointIndex, chosen: CheckpointIndex, located: CheckpointIndex, *, nested: bool
) -> list[str]:
    """Notes on what of the checkpoint is left out, and on chosen objects that are not written."""
    notes = []
    kept = {entry.fqn for entry in chosen.tensors}
    rest = Counter(entry.section for entry in index.tensors if entry.fqn not in kept)
    if rest:
        counts = ", ".join(f"{count} of {section}" for section, count in sorted(rest.items()))
        notes.append(f"Left out tensors: {counts}; choose with --only, --include and --exclude.")
    notes += master_weights_note(index, chosen.tensors)
    lost = [entry for entry in located.objects if not entry.is_writable] if nested else []
    if lost:
        notes.append(note_on_unopened(lost))
    elif chosen.objects and not nested:
        shown = some([entry.fqn for entry in chosen.objects])
        skipped = counted(len(chosen.objects), "object")
        notes.append(f"Left out {skipped}, because only tensors are written: {shown}.")
    return notes


def _kept_strings(
    index: CheckpointIndex,
    located: CheckpointIndex,
    made: Sequence[TransformedTensor],
    targets: Sequence[Target],
    *,
    form: str,
) -> tuple[dict[str, str], list[str]]:
    """What headers of the source say beside their tensors (safetensors' ``__metadata__``) that is
    true of these targets, and notes on what is left out.

    It may say how to read the tensors, as torchao's and ComfyUI's does, or what they mean, as the
    alpha of a LoRA: a reader goes wrong without it. Nobody here knows of what it speaks, so it goes
    along where names, types, shapes and values are those that it was written for. ``made`` are the
    targets' tensors, from those of ``located`` and of ``index``.
    """
    if not index.strings:
        return {}, []
    chunks = {entry.fqn: entry.chunks for entry in located.tensors}
    is_same = all(
        len(one.origins) == 1 and one.entry.chunks == chunks.get(one.origins[0]) for one in made
    )
    now = {target.fqn: target.entry.shape for target in targets}
    written_for = {fqn: shape for fqn, (_, shape) in index.strings_for.items()}
    if not formats.named(form).strings:
        return {}, left_out_strings(index.strings)
    changed = None
    if not is_same or not now.items() <= written_for.items():
        changed = "tensors were changed or renamed"
    elif len(now) < len(written_for):
        changed = "tensors were left out"
    elif any(target.dtype != index.strings_for[target.fqn][0] for target in targets):
        changed = "element types were changed"
    if changed is not None:
        return {}, left_out_strings(index.strings, f"{changed}, and it may be of them")
    differing = [name for name, text in index.strings.items() if text is None]
    stated = ((n, text) for n, text in index.strings.items() if n not in OWN_STRINGS)
    same = {name: text for name, text in stated if text is not None}
    return same, left_out_strings(differing, "it is not the same in all files")


def _provenance(index: CheckpointIndex, *, check: bool) -> dict[str, str]:
    """Metadata on the source: no path and no time, so that equal inputs give equal bytes."""
    facts = {"format": "pt", "ckpt_tools": __version__, "source_format": index.format}
    if index.world_size is not None:
        facts["source_world_size"] = str(index.world_size)
    if check:
        from ckpt_tools.convert.check import PROOF_FIELD, UNPROVEN

        facts[PROOF_FIELD] = UNPROVEN
    return facts
