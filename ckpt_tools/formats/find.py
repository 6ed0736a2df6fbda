"""Finds the checkpoint that a path means, and reads its index.

A path is a checkpoint, a file of one, a link to one, a folder around one or several, or a glob.
Several of one training are a run: their steps are what names say, those of frameworks among them.
What is in a file is not known here.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import NamedTuple

from ckpt_tools.core.index import CheckpointIndex, FileEntry, FileState
from ckpt_tools.core.text import some
from ckpt_tools.errors import (
    AnswerNo,
    Instead,
    NotThereError,
    UnreadableError,
    UsageError,
    Way,
    paths_instead,
)
from ckpt_tools.formats import foreign, frameworks, rank_files, slices, torch_file
from ckpt_tools.formats.protocol import ReadOptions
from ckpt_tools.formats.registry import detect, rank_of
from ckpt_tools.storage import paths
from ckpt_tools.storage.reader import refuse_special

# What names say of a step, the surest first: ep1-ba200, epoch=1-step=200.ckpt, global_step_200,
# iter_0000200, checkpoint-200, epoch_2, and a bare number.
_STEPS = (
    r"(?<![a-z])ba(\d+)",
    r"(?<![a-z])(?<!target_)steps?[-_=]?(\d+)",  # Modalities adds that of the run's end
    r"(?<![a-z])iter(?:ation)?[-_=]?(\d+)",
    r"(?<![a-z])(?:checkpoint|ckpt)[-_=]?(\d+)",
    r"(?<![a-z])ep(?:och)?[-_=]?(\d+)",
    r"\A(\d+)(?:\.[a-z]+)?\Z",
)
_SHOWN = 10  # steps of a run in an error
_MAX_DEPTH = 4
_MAX_FOLDERS = 5_000
_MAX_LINK = 1_024  # bytes of a path in a text file
_SUPPORTED = (
    "Known are: DCP directories (.metadata with .distcp files), folders of per-rank .pt files of "
    "DTensors, torch.save files (.pt, .pth, .bin, .ckpt), and safetensors files and folders."
)
# Ends of the names of side files that commands may read: they say which names and sizes there are.
_BESIDE = (".index.json", "config.json")
_UNLISTED = (
    "Folders of a web server are not listed. Give the address of one file, of a DCP directory (its "
    ".metadata names the files), or of a Hugging Face folder (its index JSON does)."
)


def read_index(path: str, options: ReadOptions = ReadOptions()) -> CheckpointIndex:
    """The index of the checkpoint that ``path`` means.

    ``path`` is a file, a directory, a parent with one checkpoint inside, or a glob of rank files.
    Where it is not the checkpoint itself, a note of the index says which was read.

    Raises IncompleteError when nothing is there, or only an output that this program has not
    finished, UnsupportedError for a format of other tools, UnreadableError when there are several
    checkpoints, which its hint lists.
    """
    paths.refuse_unfinished(path)
    return read_written(path, options=options)


def read_written(path: str, *, options: ReadOptions = ReadOptions()) -> CheckpointIndex:
    """The same, also where this program has written a checkpoint that it has not yet renamed."""
    if not paths.exists(path):
        return _read_glob(path, options)
    refuse_special([path])
    place = member(path)
    foreign.refuse_foreign(place)
    cut = frameworks.tensor_parallel_parts(place)
    if cut:
        from ckpt_tools.formats import tensor_parallel  # late: few models are in such parts

        before = _states(os.path.dirname(cut[0]) or ".")
        return _with_states(tensor_parallel.read_index(place, cut, options), before)
    if not is_checkpoint(place):
        place = _only_one_inside(place, options)
        if paths.is_unfinished(place):
            paths.refuse_unfinished(place)
    index, shown_by = _read_place(place, options)
    notes = list(index.notes)
    if paths.normal(place) != paths.normal(path):
        notes.insert(0, f"Reading {place}.")
    if shown_by is not None:
        notes.append(f"Framework: {index.framework}, recognized by {shown_by}.")
    others = _beside(place, [file.path for file in index.files])
    others = [name for name in others if not any(name in note for note in index.notes)]
    if others:
        notes.append(f"Beside it, and not read: {some(others, 5)}.")
    return replace(index, notes=tuple(notes))


def is_checkpoint(path: str) -> bool:
    """Whether exactly this is a checkpoint: of one format, or a framework's folder of parts."""
    return frameworks.parts_of(path, _format_of) is not None or detect(path) is not None


def _format_of(path: str) -> str | None:
    form = detect(path)
    return None if form is None else form.name


def _read_place(place: str, options: ReadOptions) -> tuple[CheckpointIndex, str | None]:
    """The index of what is a checkpoint, with its framework, and what shows the framework."""
    folder_parts = frameworks.parts_of(place, _format_of)
    # A file that changes while headers are read has changed, too; so do those beside it. In a store
    # the listing of the folder has them.
    folder = place if paths.is_dir(place) else os.path.dirname(place) or "."
    beside = () if paths.is_address(place) else (folder, os.path.join(folder, "huggingface"))
    read_from = () if folder_parts is None else folder_parts.paths
    before: dict[str, FileState] = {}
    for one in (place, *beside, *read_from):
        before |= _states(one)
    if folder_parts is not None:

        def read(path: str) -> CheckpointIndex:  # a part, or rank files that a glob chooses
            return (_read_format if paths.exists(path) else _read_glob)(path, options)

        from ckpt_tools.formats import parts  # late: few folders have parts

        index = parts.joined(folder_parts, read, options)
        return _with_states(index, before), folder_parts.shown_by
    index = slices.checked(_read_format(place, options), _read_format, options)
    index = _with_states(index, before)
    framework, shown_by = frameworks.framework(index)
    return replace(index, framework=framework), shown_by


def _read_format(path: str, options: ReadOptions) -> CheckpointIndex:
    form = detect(path)
    if form is None:
        raise UnreadableError(f"{path} is not a checkpoint of a known format.", hint=_SUPPORTED)
    return form.read_index(path, options=options)


def _states(place: str) -> dict[str, FileState]:
    try:
        return paths.states(place)
    except OSError:
        return {}  # reading it will say what is wrong


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
        index = read_index(folder, options=options)
        chosen = set(map(paths.normal, matched))
        held = {paths.normal(c.data.path) for e in index.tensors for c in e.chunks}
        if held <= chosen:
            return index
        raise UsageError(
            f"{path} chooses {len(held & chosen)} of the {len(held)} files that {folder} is read "
            "from.",
            hint="A checkpoint is read from all of its files; choose names with -i and -x.",
            instead=paths_instead(path, [folder]),
        )
    from ckpt_tools.formats.rank_files import numbered
    from ckpt_tools.formats.rank_files import read as of_ranks
    from ckpt_tools.formats.torch_file import folder as of_files

    before = paths.states_now(matched)
    are_of_ranks = any(rank_of(one) is not None for one in matched)
    are_parts = not are_of_ranks and slices.numbers_of(matched) is not None
    is_joined = are_parts and not numbered.are_rank_files(matched)
    read = of_files.read_index if is_joined else of_ranks.read_index
    index = slices.checked(read(matched, options=options), _read_format, options)
    return _with_states(index, before)


def _only_one_inside(folder: str, options: ReadOptions) -> str:
    """The only checkpoint below a folder; raises when there is none or more than one."""
    saves = checkpoints_in(folder)
    if len(saves) == 1:
        return saves[0].path
    if not saves:
        for path in _inside(folder, foreign.is_foreign):
            foreign.refuse_foreign(path)
        foreign.refuse_inside(folder)
        around = paths.folder_of(folder)
        if is_checkpoint(around):  # verl's huggingface/, a config.json's folder
            raise UnreadableError(
                f"{folder} holds no checkpoint, but is inside one.",
                instead=paths_instead(folder, [around]),
            )
        hint = _UNLISTED if paths.is_unlisted(folder) else _SUPPORTED
        raise UnreadableError(f"{folder} holds no checkpoint.", hint=hint)
    inside = [one.path for one in reversed(saves)]
    message = f"{folder} is not a checkpoint; {len(inside)} are inside."
    twice = frameworks.saved_twice(inside)
    more = () if twice is None else (f"  {twice}",)
    of_ranks = rank_files.globs_of(inside)
    whole, problem = slices.whole_among(of_ranks or inside, _read_format, options)
    if problem is None:
        raise UnreadableError(message, *more, instead=paths_instead(folder, whole))
    ways = () if problem.instead is None else problem.instead.ways
    raise UnreadableError(
        message,
        *more,
        f"  {problem.message}",
        hint=problem.advice,
        instead=Instead(folder, (*ways, *map(Way, whole))),
    )


# ----------------------------------------------------------------------------------------- of a run


class Saved(NamedTuple):
    """One checkpoint of a run, and its step if a name tells it."""

    path: str
    step: int | None


def checkpoints_in(folder: str) -> list[Saved]:
    """The checkpoints below a folder by their steps, the newest last; those without a step first.

    Among them is what is of no use: reading it may say what is wrong.
    """

    def is_shown(path: str) -> bool:
        return foreign.is_foreign(path) or paths.is_unfinished(path) or is_checkpoint(path)

    inside = [path for path in _inside(folder, is_shown) if not foreign.is_foreign(path)]
    saved = [Saved(path, step_of(os.path.relpath(path, folder))) for path in inside]
    return sorted(saved, key=_place)


def step_of(path: str) -> int | None:
    """The step in the name of a file, or of the nearest folder that tells one."""
    for name in reversed(path.split(os.sep)):
        for pattern in _STEPS:
            steps = re.findall(pattern, name, re.IGNORECASE)
            if steps:
                return int(steps[-1])
    return None


def _place(saved: Saved) -> tuple[int, list[tuple[int, int, str]]]:
    words = re.split(r"(\d+)", saved.path)
    natural = [(1, int(w), "") if w.isdigit() else (0, 0, w) for w in words]
    return (-1 if saved.step is None else saved.step), natural


def run_of(path: str) -> list[Saved]:
    """The checkpoints of a folder that is none itself, when there are several; else nothing.

    Rank files in folders of their own are parts of one: reading the folder gives their glob.
    """
    path = _followed(path)
    if not paths.is_dir(path) or is_checkpoint(path) or foreign.is_foreign(path):
        return []
    saves = checkpoints_in(path)
    is_run = len(saves) > 1 and not rank_files.globs_of([one.path for one in saves])
    return saves if is_run else []


def of_step(path: str, step: int | None) -> str:
    """The checkpoint of a step in a run, of the last one for None; a lone checkpoint is itself, and
    of rank files that lie with those of other steps it is their glob.

    Raises AnswerNo when the step is not there, UnreadableError when several checkpoints are of it.
    """
    if not paths.is_dir(path):
        return path  # reading it will say what it is
    stepped = _stepped(path)
    if not stepped and is_checkpoint(path) and step in (None, step_of(paths.absolute(path))):
        return path
    steps = sorted({own for own, _ in stepped})
    wanted = steps[-1] if step is None and steps else step
    found = [place for own, place in stepped if own == wanted]
    if not steps:
        raise AnswerNo(f"{path} has no checkpoint with a step in its name.")
    if not found:
        shown = ", ".join(map(str, steps[-_SHOWN:]))
        raise AnswerNo(f"{path} has no checkpoint of step {step}; its last steps are {shown}.")
    if len(found) > 1:
        globs = rank_files.globs_of(found)
        if len(globs) == 1 and {*paths.glob(globs[0])} == {*found}:
            return globs[0]
        raise UnreadableError(
            f"{path} has {len(found)} checkpoints of step {wanted}.",
            hint=f"`ckpt-tools inspect {shlex.quote(path)}` says what each of them holds.",
            instead=paths_instead(path, found, without=("--latest", "--latest-complete")),
        )
    return found[0]


def steps_in(path: str) -> list[int]:
    """The steps of a run's finished checkpoints, the newest last; none of a lone checkpoint."""
    return sorted({step for step, _ in _stepped(path)}) if paths.is_dir(path) else []


def _stepped(folder: str) -> list[tuple[int, str]]:
    """The finished checkpoints of a folder that have a step, by their steps."""
    saves = checkpoints_in(folder)
    finished = [one for one in saves if not paths.is_unfinished(one.path)]
    return [(one.step, one.path) for one in finished if one.step is not None]


# -------------------------------------------------------------------------------------- in folders


def member(path: str) -> str:
    """The checkpoint that a path means: through links, and the folder when a file is but a part."""
    path = _followed(path)
    name = os.path.basename(path)
    if paths.is_file(path) and (name == ".metadata" or name.endswith(".distcp")):
        return os.path.dirname(path) or "."
    return path


def _followed(path: str) -> str:
    """Where a link leads that git or an archive turned into a text file, or a model's folder in the
    cache of Hugging Face; else the path itself.

    Such a file holds nothing but the path of something that is there (``latest-rank0.pt`` of
    Composer is a link by birth). Links of the file system need no help.
    """
    if not paths.is_address(path) and os.path.isdir(path):
        return _snapshot_of(path) or path
    if paths.is_address(path) or not os.path.isfile(path) or os.path.getsize(path) > _MAX_LINK:
        return path
    with open(paths.open_file(path), "rb") as file:
        text = file.read(_MAX_LINK)
    try:
        target = os.path.join(os.path.dirname(path), text.decode())
    except UnicodeDecodeError:
        return path
    is_path = text.strip() == text and text and b"\n" not in text and b"\0" not in text
    return target if is_path and os.path.exists(target) else path


def _snapshot_of(folder: str) -> str | None:
    """What ``refs/main`` names in ``models--org--name`` of Hugging Face's cache; None elsewhere."""
    named = os.path.join(folder, "refs", "main")
    is_model = os.path.basename(paths.absolute(folder)).startswith("models--")
    if not is_model or not os.path.isfile(named):
        return None
    with open(paths.open_file(named), "rb") as file:
        revision = file.read(_MAX_LINK).decode("ascii", "replace").strip()
    snapshot = os.path.join(folder, "snapshots", revision)
    return snapshot if re.fullmatch(r"\w+", revision) and os.path.isdir(snapshot) else None


def _inside(folder: str, is_checkpoint: Callable[[str], bool]) -> list[str]:
    """Checkpoints below a folder, shallow ones first, each once however many links lead to it.

    What is inside of a checkpoint is not looked into.
    """
    found: list[str] = []
    level = [folder]
    seen = 0
    for _ in range(_MAX_DEPTH):
        below: list[str] = []
        for parent in level:
            names = (name for name in paths.names_in(parent) if not frameworks.is_side(name))
            for path in (os.path.join(parent, name) for name in names):
                seen += 1
                place = _followed(path)
                if is_checkpoint(place):
                    found.append(place)
                elif paths.is_dir(path) and not os.path.islink(path):
                    below.append(path)
        level = below
        if seen > _MAX_FOLDERS:
            break
    by_real_path: dict[str, str] = {}  # by its own name rather than by that of a link to it
    for path in found:
        real = path if paths.is_address(path) else os.path.realpath(path)
        if real not in by_real_path or os.path.islink(by_real_path[real]):
            by_real_path[real] = path
    return list(by_real_path.values())


def _beside(folder: str, read: Collection[str]) -> list[str]:
    """Checkpoints in a folder of which ``read`` are the files that were read, by their names in it.

    An index JSON by itself is none: its files are. Nothing is looked for in stores, where each
    folder would be a request.
    """
    if paths.is_address(folder) or not os.path.isdir(folder):
        return []
    known = {os.path.realpath(path) for file in read for path in (file, os.path.dirname(file))}

    def is_other(path: str) -> bool:
        is_own = path.endswith(".index.json") or os.path.realpath(path) in known
        return not is_own and is_checkpoint(path)

    return [os.path.relpath(path, folder) for path in _inside(folder, is_other)]
