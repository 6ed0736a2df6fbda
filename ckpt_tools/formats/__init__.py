"""Finds the checkpoint at a path, and reads its index, in any format.

This module knows which formats there are and in which order to ask them; each format's own package
knows the rest, and is imported when it is first asked.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from ckpt_tools.core.index import (
    NO_TREE,
    CheckpointIndex,
    FileEntry,
    FileState,
    LocatedIndex,
    ObjectEntry,
    TensorEntry,
)
from ckpt_tools.core.text import some
from ckpt_tools.errors import (
    Instead,
    NotThereError,
    UnreadableError,
    UsageError,
    Way,
    paths_instead,
)
from ckpt_tools.formats import (
    dcp,
    foreign,
    frameworks,
    parts,
    rank_files,
    runs,
    safetensors,
    slices,
    tensor_parallel,
    torch_file,
)
from ckpt_tools.formats.options import ReadOptions
from ckpt_tools.formats.protocol import ChecksumPart, Format, Index, PlanOptions, Writes
from ckpt_tools.formats.runs import Saved
from ckpt_tools.storage import paths, unfinished
from ckpt_tools.storage.reader import Files, refuse_special

__all__ = [
    "FORMATS",
    "SMALL_OBJECT",
    "Format",
    "PlanOptions",
    "ReadOptions",
    "Saved",
    "Writes",
    "checkpoint_files",
    "checkpoints_in",
    "checksummed",
    "copyable_objects",
    "detect",
    "index_files",
    "is_checkpoint",
    "locate",
    "locate_later",
    "located_in",
    "named",
    "object_digests",
    "of_step",
    "open_object",
    "open_objects",
    "rank_of",
    "read_index",
    "read_written",
    "run_of",
    "targets",
    "to_locate_in",
]

# In the order in which they are asked: a DCP directory may have .pt side files beside it.
# (The builtin `zip` cannot be used in this module: importing the package `zip` replaces it.)
FORMATS: list[Format] = [
    dcp.FORMAT,
    dcp.SAFETENSORS,
    rank_files.FORMAT,
    safetensors.FORMAT,
    torch_file.FORMAT,
    torch_file.FOLDER,
]

# Ends of the names of files that say which names and sizes there are.
_BESIDE = (".index.json", "config.json")
_UNLISTED = (
    "Folders of a web server are not listed. Give the address of one file, of a DCP directory (its "
    ".metadata names the files), or of a Hugging Face folder (its index JSON does)."
)


def named(name: str) -> Format:
    """The format of this name, the first one of it. Raises UsageError when there is none."""
    for form in FORMATS:
        if form.name == name:
            return form
    known = ", ".join(dict.fromkeys(form.name for form in FORMATS))
    raise UsageError(f"Unknown format {name!r}.", hint=f"Formats are {known}.")


def _formats_of(index: CheckpointIndex) -> list[Format]:
    """The format of an index; where parts were joined, also those that have entries in it."""
    main = named(index.format)
    codecs = {str(entry.codec) for entry in index.objects}
    codecs |= {str(chunk.codec) for entry in index.tensors for chunk in entry.chunks[:1]}
    others = codecs - main.codecs
    return [main, *(form for form in FORMATS if not form.codecs.isdisjoint(others))]


def targets(writes: Writes) -> list[Format]:
    """The formats that take whole tensors, or shards; the first one is the default."""
    return [form for form in FORMATS if form.writes == writes]


def checkpoint_files() -> tuple[str, ...]:
    """Globs of the names that files of checkpoints have: what --force may replace in a folder."""
    return tuple(glob for form in FORMATS for glob in form.files)


def index_files() -> tuple[str, ...]:
    """Suffixes of the files without which the others of a checkpoint cannot be read."""
    return tuple(end for form in FORMATS for end in form.index_files)


def rank_of(path: str) -> int | None:
    """The rank that wrote a file, as its name says in any format."""
    ranks = (form.rank_of(path) for form in FORMATS)
    return next((rank for rank in ranks if rank is not None), None)


def locate(index: CheckpointIndex, files: Files) -> LocatedIndex:
    """The same index with every chunk as raw elements, each item checked against the index.

    What cannot be used becomes a problem of the index, named with the tensor.
    """
    wanted = index.tensors
    index = replace(index, tensors=tuple(map(_stored, wanted)))
    for form in _formats_of(index):
        index = form.locate(index, files)
    damaged = {fqn for problem in index.problems for fqn in problem.about}
    left = [
        UnreadableError(f"{entry.fqn}: no reader here knows {chunk.codec!r}.", about=[entry.fqn])
        for entry in index.tensors
        for chunk in entry.chunks[:1]
        if chunk.codec is not None and entry.fqn not in damaged
    ]
    tensors = tuple(map(_seen, wanted, index.tensors))
    return LocatedIndex(replace(index, tensors=tensors, problems=(*index.problems, *left)))


def _has_views(entry: TensorEntry) -> bool:
    return entry.grid is None and any(chunk.of is not None for chunk in entry.chunks)


def _stored(entry: TensorEntry) -> TensorEntry:
    """The entry with the chunks that its own are views of, each once."""
    if not _has_views(entry):
        return entry
    chunks = {id(chunk.stored): chunk.stored for chunk in entry.chunks}
    return replace(entry, chunks=tuple(chunks.values()))


def _seen(entry: TensorEntry, located: TensorEntry) -> TensorEntry:
    """The entry with its views of what `_stored` gave, now that this is located."""
    if not _has_views(entry):
        return located
    ids = dict.fromkeys(id(chunk.stored) for chunk in entry.chunks)
    found = {one: located.chunks[at] for at, one in enumerate(ids)}
    chunks = []
    for chunk in entry.chunks:
        stored = found[id(chunk.stored)]
        if chunk.of is not None:  # what could not be located has a problem now
            is_there = stored.codec is None
            stored = chunk.seen_in(stored, itemsize=entry.dtype.itemsize) if is_there else chunk
        chunks.append(stored)
    return replace(entry, chunks=tuple(chunks))


def located_in(
    source: CheckpointIndex, entries: Sequence[TensorEntry], files: Files
) -> Sequence[TensorEntry]:
    """Entries over chunks of this checkpoint, which are located now. Raises what keeps one from
    being used.
    """
    chunks = [chunk for entry in entries for chunk in entry.chunks]
    used = {data.path for chunk in chunks for data in (chunk.data, *chunk.replicas)}
    needed = tuple(file for file in source.files if file.path in used)
    index = replace(to_locate_in(source), tensors=tuple(entries), files=needed)
    located = locate(index, files)
    located.require_whole()
    return located.tensors


def locate_later(index: CheckpointIndex, _files: Files) -> CheckpointIndex:
    """The same index, for a plan whose chunks workers locate when they read them; opens no file.

    Flaws of objects become problems here as there.
    """
    from ckpt_tools.formats.torch_file.locate import flaws

    return replace(index, problems=(*index.problems, *flaws(index.objects)))


def to_locate_in(index: CheckpointIndex) -> CheckpointIndex:
    """The same index without entries, to locate some of its chunks in; one object of each codec is
    kept, since it says which formats the chunks are of.
    """
    kinds = {entry.codec: replace(entry, flaw=None) for entry in index.objects}
    objects = tuple(kinds.values())
    return replace(index, tensors=(), objects=objects, problems=(), ties=(), tree=NO_TREE)


# What is looked at: a plain value is small, a pickled tokenizer or dataloader is not.
SMALL_OBJECT = 1 << 20


def open_objects(index: Index, files: Files, *, largest: int | None = None) -> Index:
    """The same index with the values of its plain objects, and with the tensors of tuples that a
    format keeps as objects.

    Other objects of more than ``largest`` bytes stay closed, where they have bytes of their own.
    Raises UnsafePickleError when an object asks for a global that could run code.
    """
    if all(entry.opened or entry.codec is None for entry in index.objects):
        return index
    for form in _formats_of(index):
        index = form.open_objects(index, files, largest=largest)
    return index


def open_object(index: CheckpointIndex, entry: ObjectEntry, files: Files) -> ObjectEntry:
    """One object of the index with its value, when it is plain; a tuple with tensors is not."""
    opened = open_objects(replace(index, tensors=(), objects=(entry,)), files)
    return opened.object(entry.fqn) or replace(entry, type_name="tuple or list with tensors")


def copyable_objects(index: Index, files: Files) -> Index:
    """The same index with every object that has bytes of its own, and no value that was read, as
    bytes that a writer can copy.
    """
    if all(entry.is_writable or entry.codec is None for entry in index.objects):
        return index
    for form in _formats_of(index):
        index = form.copyable_objects(index, files)
    return index


def object_digests(entry: ObjectEntry, files: Files) -> Mapping[str, bytes] | None:
    """SHA-256 of the bytes that make up an unopened object: equal bytes are equal values."""
    if entry.codec is None:
        return None
    values = (form.object_digests(entry, files) for form in FORMATS)
    return next((one for one in values if one is not None), None)


def checksummed(index: CheckpointIndex, files: Files) -> Iterable[ChecksumPart]:
    """All byte ranges of a checkpoint that `verify` reads, with their checksums."""
    return _formats_of(index)[-1].checksummed(index, files)


def detect(path: str) -> Format | None:
    """The format of exactly this file or directory, or None; folders inside are not looked into."""
    return next((form for form in FORMATS if form.matches(path)), None)


def read_index(path: str, options: ReadOptions = ReadOptions()) -> CheckpointIndex:
    """The index of the checkpoint that ``path`` means.

    ``path`` is a file, a directory, a parent with one checkpoint inside, or a glob of rank files.
    Where it is not the checkpoint itself, a note of the index says which was read.

    Raises IncompleteError when nothing is there, or only an output that this program has not
    finished, UnsupportedError for a format of other tools, UnreadableError when there are several
    checkpoints, which its hint lists.
    """
    unfinished.refuse_unfinished(path)
    return read_written(path, options=options)


def read_written(path: str, *, options: ReadOptions = ReadOptions()) -> CheckpointIndex:
    """The same, also where this program has written a checkpoint that it has not yet renamed."""
    if not paths.exists(path):
        return _read_glob(path, options)
    refuse_special([path])
    place = frameworks.member(path)
    foreign.refuse_foreign(place)
    cut = tensor_parallel.parts_at(place)
    if cut:
        before = _states(os.path.dirname(cut[0]) or ".")
        return _with_states(tensor_parallel.read_index(place, cut, options), before)
    if not is_checkpoint(place):
        place = _only_one_inside(place, options)
        if unfinished.is_unfinished(place):
            unfinished.refuse_unfinished(place)
    index, shown_by = _read_place(place, options)
    framework = index.framework
    notes = list(index.notes)
    if paths.normal(place) != paths.normal(path):
        notes.insert(0, f"Reading {place}.")
    if shown_by is not None:
        notes.append(f"Framework: {framework}, recognized by {shown_by}.")
    others = frameworks.beside(place, [file.path for file in index.files], is_checkpoint)
    others = [name for name in others if not any(name in note for note in index.notes)]
    if others:
        notes.append(f"Beside it, and not read: {some(others, 5)}.")
    return replace(index, notes=tuple(notes))


def is_checkpoint(path: str) -> bool:
    """Whether exactly this is a checkpoint: of one format, or a framework's folder of parts."""
    return frameworks.parts_of(path) is not None or detect(path) is not None


def _is_listed(path: str) -> bool:
    """Whether this is shown where checkpoints are looked for; reading it may say what is wrong."""
    return unfinished.is_unfinished(path) or is_checkpoint(path)


def _read_place(place: str, options: ReadOptions) -> tuple[CheckpointIndex, str | None]:
    """The index of what is a checkpoint, with its framework, and what shows the framework."""
    folder_parts = frameworks.parts_of(place)
    # A file that changes while headers are read has changed, too.
    before = _states(place) | _states_beside(place)
    if folder_parts is not None:
        before |= {
            path: state for part in folder_parts.paths for path, state in _states(part).items()
        }

        def read(path: str) -> CheckpointIndex:  # a part, or rank files that a glob chooses
            return (_read_format if paths.exists(path) else _read_glob)(path, options)

        index = parts.joined(folder_parts, read, options)
        return _with_states(index, before), folder_parts.shown_by
    index = slices.checked(_read_format(place, options), _read_format, options)
    index = _with_states(index, before)
    framework, shown_by = frameworks.framework(index)
    return replace(index, framework=framework), shown_by


def _read_format(path: str, options: ReadOptions) -> CheckpointIndex:
    form = detect(path)
    if form is None:
        raise UnreadableError(
            f"{path} is not a checkpoint of a known format.", hint=frameworks.SUPPORTED
        )
    return form.read_index(path, options=options)


def _states(place: str) -> dict[str, FileState]:
    try:
        return paths.states(place)
    except OSError:
        return {}  # reading it will say what is wrong


def _states_beside(place: str) -> dict[str, FileState]:
    """The states of side files that commands may read: index JSON, config.json."""
    if paths.is_address(place):
        return {}  # the listing of the folder has them
    folder = place if paths.is_dir(place) else os.path.dirname(place)
    return {
        path: state
        for one in {folder or ".", os.path.join(folder, "huggingface")}
        for path, state in _states(one).items()
        if path.endswith(_BESIDE)
    }


def _with_states(index: CheckpointIndex, before: Mapping[str, FileState]) -> CheckpointIndex:
    """The same index, its files with the states that they had before they were read.

    A store is asked for no more than its listing: each file by itself would be a request.
    """
    known = {paths.normal(path): state for path, state in before.items()}
    where = {file: paths.normal(file.path) for file in index.files}
    known |= paths.states_now(
        path for path in where.values() if path not in known and not paths.is_address(path)
    )
    beside = known.keys() - where.values()
    return replace(
        index,
        files=tuple(file._replace(state=known.get(at)) for file, at in where.items()),
        beside=tuple(
            FileEntry(path, known[path].size, known[path])
            for path in sorted(beside)
            if path.endswith(_BESIDE)
        ),
    )


def _read_glob(path: str, options: ReadOptions) -> CheckpointIndex:
    """The rank files, or the parts of a model, that a glob chooses, as one checkpoint."""
    matched = paths.glob(path) if any(c in path for c in "*?[") else []
    if not matched:
        hint = _UNLISTED if paths.is_unlisted(path) else None
        raise NotThereError(f"{path} does not exist.", hint=hint)
    if len(matched) == 1:
        return read_index(matched[0], options=options)
    folder = paths.folder_of(matched[0])
    form = detect(folder)
    if form not in (None, rank_files.FORMAT, torch_file.FORMAT):
        return _read_globbed_folder(path, folder, frozenset(map(paths.normal, matched)), options)
    from ckpt_tools.formats.rank_files import numbered
    from ckpt_tools.formats.rank_files import read as of_ranks
    from ckpt_tools.formats.torch_file import folder as of_files

    before = paths.states_now(matched)
    are_of_ranks = any(rank_of(one) is not None for one in matched)
    are_parts = not are_of_ranks and slices.are_numbered(matched)
    is_joined = are_parts and not numbered.are_rank_files(matched)
    read = of_files.read_index if is_joined else of_ranks.read_index
    index = slices.checked(read(matched, options=options), _read_format, options)
    return _with_states(index, before)


def _read_globbed_folder(
    path: str, folder: str, matched: frozenset[str], options: ReadOptions
) -> CheckpointIndex:
    """The checkpoint of a folder whose files a glob chooses, when it chooses all that hold tensors.

    Raises UsageError when it chooses some of them: what they hold is then chosen by name.
    """
    index = read_index(folder, options=options)
    held = {paths.normal(c.data.path) for e in index.tensors for c in e.chunks}
    if held <= matched:
        return index
    raise UsageError(
        f"{path} chooses {len(held & matched)} of the {len(held)} files that {folder} is read "
        "from.",
        hint="A checkpoint is read from all of its files; choose names with -i and -x.",
        instead=paths_instead(path, [folder]),
    )


def _only_one_inside(folder: str, options: ReadOptions) -> str:
    """The only checkpoint below a folder; raises when there is none or more than one."""
    saves = checkpoints_in(folder)
    if len(saves) == 1:
        return saves[0].path
    if not saves:
        for path in frameworks.inside(folder, foreign.is_foreign):
            foreign.refuse_foreign(path)
        foreign.refuse_inside(folder)
        around = paths.folder_of(folder)
        if is_checkpoint(around):  # verl's huggingface/, a config.json's folder
            raise UnreadableError(
                f"{folder} holds no checkpoint, but is inside one.",
                instead=paths_instead(folder, [around]),
            )
        hint = _UNLISTED if paths.is_unlisted(folder) else frameworks.SUPPORTED
        raise UnreadableError(f"{folder} holds no checkpoint.", hint=hint)
    inside = [one.path for one in reversed(saves)]
    message = f"{folder} is not a checkpoint; {len(inside)} are inside."
    of_ranks = rank_files.globs_of(inside)
    whole, problem = slices.whole_among(of_ranks or inside, _read_format, options)
    if problem is None:
        raise UnreadableError(message, instead=paths_instead(folder, whole))
    ways = () if problem.instead is None else problem.instead.ways
    raise UnreadableError(
        message,
        f"  {problem.message}",
        hint=problem.advice,
        instead=Instead(folder, (*ways, *map(Way, whole))),
    )


def checkpoints_in(folder: str) -> list[Saved]:
    """The checkpoints below a folder by their steps, the newest last."""
    inside = frameworks.inside(folder, lambda path: foreign.is_foreign(path) or _is_listed(path))
    return runs.in_order(folder, [path for path in inside if not foreign.is_foreign(path)])


def run_of(path: str) -> list[Saved]:
    """The checkpoints of a folder that is none itself, when there are several; else nothing.

    Rank files in folders of their own are parts of one: reading the folder gives their glob.
    """
    if not paths.is_dir(path) or is_checkpoint(path) or foreign.is_foreign(path):
        return []
    saves = checkpoints_in(path)
    is_run = len(saves) > 1 and not rank_files.globs_of([one.path for one in saves])
    return saves if is_run else []


def of_step(path: str, step: int | None) -> str:
    """The checkpoint of a step in a run, of the last one for None; a lone checkpoint is itself.

    Raises AnswerNo when the step is not there, UnreadableError when several checkpoints are of it.
    """
    if not paths.is_dir(path):
        return path  # reading it will say what it is
    saves = checkpoints_in(path)
    finished = [one for one in saves if not unfinished.is_unfinished(one.path)]
    stepped = [one for one in finished if one.step is not None]
    if not stepped and is_checkpoint(path) and step in (None, runs.step_of(paths.absolute(path))):
        return path
    return runs.chosen(path, stepped, step)
