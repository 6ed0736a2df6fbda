"""One function a verb: `export` writes whole tensors for loading elsewhere.

A conversion is planned first, from the index alone, and refused there when it must be; then its
plan is carried out into an output that appears whole or not at all.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from ckpt_tools._version import __version__
from ckpt_tools.copying import atomic_output, out_path
from ckpt_tools.copying.origin import Origin, digest_of_reads, in_words
from ckpt_tools.copying.resume import Place
from ckpt_tools.copying.tasks import check_memory
from ckpt_tools.core import names
from ckpt_tools.core.dtypes import DType
from ckpt_tools.core.index import (
    NO_TREE,
    CheckpointIndex,
    ObjectEntry,
    Section,
    TensorEntry,
)
from ckpt_tools.core.names import select
from ckpt_tools.core.plan import FilePlan, Target
from ckpt_tools.core.state_tree import Branch
from ckpt_tools.core.text import counted, some
from ckpt_tools.errors import AnswerNo, UsageError
from ckpt_tools.formats.frameworks import sources_of
from ckpt_tools.storage import upload
from ckpt_tools.storage.paths import is_address, normal
from ckpt_tools.storage.reader import Files
from ckpt_tools.transforms import base as steps
from ckpt_tools.transforms import dtypes as casts
from ckpt_tools.transforms.base import Made, Outcome, Step, Work
from ckpt_tools.transforms.param_names import loadable
from ckpt_tools.transforms.rank_states import ONE_FILE, without_old_ranks


@dataclass(frozen=True, slots=True)
class ExportOptions:
    """What to export and how it is to look; ``max_shard_size`` in bytes, ``dtype`` None to keep.

    ``dtypes`` are exceptions from ``dtype`` by name patterns, the last match wins. ``steps`` change
    the entries after containers and wrappers are off their names. ``basename`` begins the name of
    each safetensors file. ``keep_rank_states`` takes what each rank saved for itself along where
    objects go along.
    """

    format: Literal["safetensors", "torch"] = "safetensors"
    dtype: DType | None = None
    dtypes: tuple[tuple[str, DType | None], ...] = ()
    keep_names: bool = False
    keep_rank_states: bool = False
    steps: tuple[Step, ...] = ()
    basename: str = "model"
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    only: Section | None = "model"
    max_shard_size: int = 5_000_000_000


@dataclass(frozen=True, slots=True)
class WriteOptions:
    """How to write: ``threads`` of this process, ``max_memory`` of all buffers in bytes.

    ``sources`` are files and folders that are read beside the checkpoint's own: like those, they
    are never written over. Raises UsageError for no thread, or less than 1 MiB of memory.
    """

    force: bool = False
    threads: int = 2
    max_memory: int = 64 << 20
    resume: bool = False
    check: bool = False
    sources: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_memory(self.threads, self.max_memory)


@dataclass(frozen=True, slots=True)
class ExportPlan:
    """Files to write, the tensors in them and where each comes from, and what a person should know.

    A target's entry is what is written, under its new name, as boxes over the source's bytes;
    ``origins`` are the names in the source that it comes from. ``works`` must be done once before
    the files are written. ``tree`` has the containers of the names, where the format keeps them.
    """

    files: tuple[FilePlan, ...]
    targets: tuple[Target, ...]
    origins: Mapping[str, tuple[str, ...]]
    notes: tuple[str, ...]
    nbytes: int
    single_file: str | None = None
    works: tuple[Work, ...] = ()
    objects: tuple[ObjectEntry, ...] = ()
    tree: Branch[str] = NO_TREE

    @property
    def tensors(self) -> int:
        """Number of tensors."""
        return len(self.targets)

    @property
    def names(self) -> Mapping[str, str]:
        """What each source name is called in the output, where it is all of one tensor there."""
        used = Counter(origin for origins in self.origins.values() for origin in origins)
        return {
            origins[0]: fqn
            for fqn, origins in self.origins.items()
            if len(origins) == 1 and used[origins[0]] == 1
        }


# Does the works of a plan and writes its files in this place.
CarryOut = Callable[[ExportPlan, Place], None]


def plan_export(
    index: CheckpointIndex,
    options: ExportOptions,
    *,
    single_file: str | None = None,
    check: bool = False,
) -> ExportPlan:
    """Plan an export from headers alone; nothing is written. ``check`` leaves room for the proof.

    Raises what keeps the chosen tensors from being whole, and UsageError or UnsupportedError for
    names and element types that the output cannot hold.
    """
    from ckpt_tools import formats  # the readers; a looking command that never plans skips them
    from ckpt_tools.formats.torch_file import write as torch_write

    chosen = select(index, include=options.include, exclude=options.exclude, only=options.only)
    of_ranks: list[str] = []
    if _keeps_nesting(options) and not options.keep_rank_states:  # objects go along
        chosen, of_ranks = without_old_ranks(chosen, ONE_FILE)
    with Files() as files:
        located = formats.locate(chosen, files)
        located.require_whole()
        if not chosen.tensors:
            raise AnswerNo(f"{index.root}: these filters choose objects only, and no tensor.")
        if _keeps_nesting(options):
            located = loadable(formats.open_objects(located, files))
        renamed, notes = rename(index, located.tensors, keep_names=options.keep_names)
        outcome = steps.carry_out(options.steps, _made(located.tensors, renamed), files)
    targets, kept = _targets(index, outcome, options)
    targets = _in_containers(targets, outcome, index, options)
    objects: tuple[ObjectEntry, ...] = ()
    tree = NO_TREE
    if _keeps_nesting(options):
        tree = located.nesting
        objects = tuple(entry for entry in located.objects if entry.opened)
        chosen = replace(chosen, objects=tuple(e for e in located.objects if not e.opened))
    facts = _provenance(index, check=check)
    if options.format == "torch":
        name = single_file or "model.pt"
        plans = torch_write.plan_files(targets, objects, filename=name, tree=tree)
    else:
        plans = _plan_safetensors(targets, options, facts=facts, single_file=single_file)
    return ExportPlan(
        files=(*plans, *outcome.files),
        targets=targets,
        origins={one.entry.fqn: one.origins for one in outcome.made},
        notes=(*index.notes, *notes, *outcome.notes, *kept, *of_ranks, *_left_out(index, chosen)),
        nbytes=sum(target.entry.numel * target.dtype.itemsize for target in targets),
        single_file=single_file,
        works=outcome.works,
        objects=objects,
        tree=tree,
    )


def _keeps_nesting(options: ExportOptions) -> bool:
    """Whether a torch file gets the source's own nesting and objects: a state dict as it was.

    Only so can an optimizer load it: its state is nested, and its groups are objects.
    """
    return options.format == "torch" and options.keep_names and not options.steps


def _in_containers(
    targets: Sequence[Target], outcome: Outcome, index: CheckpointIndex, options: ExportOptions
) -> tuple[Target, ...]:
    """The targets of a safetensors file at the path of the container that their names begin with.

    That is the source's, where it was not taken off; steps give names that stand in none.
    """
    if options.format != "safetensors" or options.steps:
        return tuple(targets)
    paths = [entry.path for entry in index.entries]
    classified = names.classify(paths, objects={entry.path for entry in index.objects})
    containers = {
        entry.fqn: container
        for entry, (_, container) in zip(index.entries, classified, strict=True)
    }
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


def _made(tensors: Sequence[TensorEntry], renamed: Mapping[str, str]) -> tuple[Made, ...]:
    """The entries under their output names, as the steps begin with them."""
    return tuple(
        Made(replace(entry, fqn=renamed[entry.fqn], path=(renamed[entry.fqn],)), (entry.fqn,))
        for entry in tensors
    )


def _targets(
    index: CheckpointIndex, outcome: Outcome, options: ExportOptions
) -> tuple[tuple[Target, ...], list[str]]:
    """What is written in which type, and a note on what keeps its own against --dtype."""
    entries = [one.entry for one in outcome.made]
    chosen, notes = casts.chosen_dtypes(outcome.made, options.dtype, options.dtypes, source=index)
    return tuple(Target(e.fqn, e.path, e, chosen[e.fqn]) for e in entries), notes


def export(
    index: CheckpointIndex,
    out: str,
    *,
    options: ExportOptions,
    write: WriteOptions,
    carry_out: CarryOut,
) -> ExportPlan:
    """Write the chosen tensors whole, in the asked format, to the folder or file ``out``.

    An address gets what was made whole here first. ``carry_out(plan, place)`` writes: no files,
    when a run that is gone on with had written all. Raises what `plan_export`, `output.appearing`
    and `uploads.staged` raise; in every case ``out`` is as it was.
    """
    out = out_path.real(out)
    if is_address(out):
        out_path.refuse_source(out, [*write.sources, *sources_of(index)])
        with upload.staged(out, force=write.force, resume=write.resume) as here:
            return export(index, here, options=options, write=write, carry_out=carry_out)
    sources = [*write.sources, *sources_of(index)]
    out = atomic_output.admit(out, sources=sources, force=write.force, resume=write.resume)
    single_file = single_file_of(out, options.format)
    plan = plan_export(index, options, single_file=single_file, check=write.check)
    words = in_words(options)
    if options.steps:  # functions, of which only what they gave can be compared
        words["what the names map does"] = digest_of_reads(plan.files)
    order = atomic_output.Order(
        out,
        plan.files,
        Origin.of(index, plan.files, words),
        source=index.files,
        single_file=single_file,
        resume=write.resume,
    )
    with atomic_output.appearing(order) as started:
        carry_out(replace(plan, files=tuple(started.plans)), started.place)
        proven = _check(plan, started.place.folder, index, write) if write.check else ()
    return replace(plan, notes=(*plan.notes, *started.notes, *proven))


def _check(
    plan: ExportPlan, folder: str, index: CheckpointIndex, write: WriteOptions
) -> tuple[str, ...]:
    """Read the output back, and record the proof in it where it has room."""
    from ckpt_tools.convert import check as checking  # the proofs: only --check pays for them

    written = os.path.join(folder, plan.single_file) if plan.single_file else folder
    wanted = checking.Written(plan.targets, plan.objects, plan.tree)
    words = checking.check(written, wanted, source=index, threads=write.threads)
    checking.record_in_headers(folder, words)
    return (words,)


def do_works(works: Sequence[Work], files: Files) -> None:
    """Make the bytes that a plan reads and no checkpoint holds."""
    for work in works:
        work(files)


def is_single_file(out: str, form: str) -> bool:
    """Whether this output name asks for one file rather than for a folder."""
    suffixes = (".safetensors",) if form == "safetensors" else (".pt", ".pth", ".bin", ".ckpt")
    return normal(out).endswith(suffixes)


def single_file_of(out: str, form: str) -> str | None:
    """The name of the one file to write, when ``out`` asks for one."""
    return os.path.basename(normal(out)) if is_single_file(out, form) else None


def rename(
    index: CheckpointIndex, chosen: Collection[TensorEntry], *, keep_names: bool
) -> tuple[dict[str, str], list[str]]:
    """The output name of each chosen tensor, and what was done to the names, for a person.

    The container that all chosen tensors stand in is taken off by path, wrapper components by whole
    component. Raises UsageError when two names become one.
    """
    if keep_names:
        return {entry.fqn: entry.fqn for entry in chosen}, []
    paths = [entry.path for entry in index.entries]
    objects = {entry.path for entry in index.objects}
    prefixes = dict(zip(paths, names.classify(paths, objects=objects), strict=True))
    used = {prefixes[entry.path][1] for entry in chosen}
    prefix = used.pop() if len(used) == 1 else ()
    bare = {entry.fqn: names.join(entry.path[len(prefix) :]) for entry in chosen}
    cleaned = {fqn: names.clean(name) for fqn, name in bare.items()}
    _refuse_collisions(cleaned)
    notes = []
    if prefix:
        notes.append(f"Took off the container {names.join(prefix)!r} that the names stood in.")
    changed = sum(cleaned[fqn] != name for fqn, name in bare.items())
    if changed:
        notes.append(
            f"Removed wrapper components from {counted(changed, 'name')}; --keep-names keeps them."
        )
    return cleaned, notes


def _refuse_collisions(renamed: Mapping[str, str]) -> None:
    first: dict[str, str] = {}
    for fqn, name in renamed.items():
        other = first.setdefault(name, fqn)
        if other != fqn:
            raise UsageError(
                f"{other} and {fqn} would both be called {name}.",
                hint="--keep-names keeps them apart; --exclude leaves one out.",
            )


def _left_out(index: CheckpointIndex, chosen: CheckpointIndex) -> list[str]:
    """What of the checkpoint does not go into an export of tensors."""
    notes = []
    kept = {entry.fqn for entry in chosen.tensors}
    rest = Counter(entry.section for entry in index.tensors if entry.fqn not in kept)
    if rest:
        counts = ", ".join(f"{count} of {section}" for section, count in sorted(rest.items()))
        notes.append(f"Left out {counts} (tensors); --only, --include and --exclude choose.")
    notes += casts.master_weights_note(index, chosen.tensors)
    if chosen.objects:
        shown = some([entry.fqn for entry in chosen.objects])
        skipped = counted(len(chosen.objects), "object")
        notes.append(f"Left out {skipped}, since only tensors are written: {shown}.")
    return notes


def _plan_safetensors(
    targets: Sequence[Target],
    options: ExportOptions,
    *,
    facts: Mapping[str, str],
    single_file: str | None,
) -> list[FilePlan]:
    from ckpt_tools.formats.safetensors import write as safetensors_write

    largest = sum(t.entry.numel * t.dtype.itemsize for t in targets) + 1
    plans = safetensors_write.plan_files(
        targets,
        max_shard_size=largest if single_file else options.max_shard_size,
        metadata=facts,
        basename=options.basename,
    )
    return [p._replace(path=single_file) for p in plans] if single_file else plans


def _provenance(index: CheckpointIndex, *, check: bool) -> dict[str, str]:
    """What the output says of its source: no path and no time, so that equal inputs stay equal."""
    facts = {"format": "pt", "ckpt_tools": __version__, "source_format": index.format}
    if index.world_size is not None:
        facts["source_world_size"] = str(index.world_size)
    if check:
        from ckpt_tools.convert.check import PROOF_FIELD, UNPROVEN

        facts[PROOF_FIELD] = UNPROVEN
    return facts
