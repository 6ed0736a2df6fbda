"""Atomic, resumable output.

Everything is written in ``OUT.partial``, synced, and renamed once. What was at OUT before stays
untouched until that moment; then it is ``OUT.replaced`` for an instant. A run that is killed at any
point leaves a state that the next run recovers from. This module knows files and folders, never
what is in them.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from fnmatch import fnmatch

from ckpt_tools.copying.origin import Origin, writing_from
from ckpt_tools.copying.out_path import (
    Standing,
    appeared,
    existing_parent,
    is_linked,
    partial_of,
    place_file,
    place_folder,
    real,
    refuse_source,
    replaced_of,
)
from ckpt_tools.copying.parallel import ignore_note
from ckpt_tools.copying.resume import (
    Manifest,
    OutputPlace,
    held,
    refuse_foreign,
    remove,
    sync_files,
)
from ckpt_tools.core.index import FileEntry
from ckpt_tools.core.plan import LazyPlans
from ckpt_tools.core.text import counted, format_size
from ckpt_tools.errors import (
    CheckpointError,
    CkptError,
    OutputExistsError,
    SourceChangedError,
    UsageError,
    WriteError,
    reason_of,
    unwritable,
)
from ckpt_tools.storage.paths import is_address

# The record of what --check has proven, which is replaced together with the checkpoint.
PROOF_FILE = "ckpt_tools_proof.json"


@dataclass(frozen=True, slots=True)
class OutputSpec:
    """An output to make at ``out`` from ``origin``; ``single_file`` of the plans is all of it.

    ``source`` are the files that it is made from, which must not change before it is done.
    ``before`` is what it may replace, None for nothing: what appears meanwhile is nobody's to lose.
    ``resume`` keeps what an earlier run of the same command has finished; one that was
    ``restarted`` begins again when there is none. ``on_note`` gets what is discarded.
    ``replaceable`` are globs of what may be replaced in a folder that already exists: a loader
    would take it for part of a checkpoint. Anything else in the folder is the user's and survives.
    """

    out: str
    plans: LazyPlans
    origin: Origin
    source: Sequence[FileEntry] = ()
    before: Standing | None = None
    single_file: str | None = None
    resume: bool = False
    restarted: bool = False
    replaceable: Sequence[str] = ()
    on_note: Callable[[str], None] = ignore_note

    @property
    def place(self) -> OutputPlace:
        """Where it is made."""
        return place_of(self.out)

    @property
    def globs(self) -> tuple[str, ...]:
        """What is replaced in a folder that is there."""
        return (*self.replaceable, PROOF_FILE)


# The plans of the files that are left to write, and notes on what an earlier run has done.
Left = tuple[LazyPlans, tuple[str, ...]]


def place_of(out: str) -> OutputPlace:
    """Where an output is made before it appears."""
    return OutputPlace(partial_of(out))


def admit(out: str, *, sources: Iterable[str], force: bool, resume: bool = False) -> str:
    """The absolute path of an output that may be written; nothing else is read or written for it.

    Raises what `out_path.real` and `out_path.refuse_source` raise, and OutputExistsError when
    something is at ``out`` and may not be replaced. What a killed run left half renamed is put
    right first. With ``resume`` something may be there: maybe all that is to be written.
    """
    out = _checked(out, sources)
    if os.path.lexists(partial_of(out)) and _recover(out, resume=resume):
        return out
    _refuse_taken(out, force=force or (resume and is_settled(out)))
    return out


def is_settled(out: str) -> bool:
    """Whether something is at ``out`` that no run is about to replace."""
    return os.path.lexists(out) and not os.path.lexists(partial_of(out))


def dry_run(out: str, *, sources: Iterable[str], force: bool, resume: bool = False) -> str:
    """The checks of `admit`; what a killed run left stays as it is."""
    out = _checked(out, sources)
    refuse_foreign(partial_of(out))
    _refuse_taken(out, force=force or resume)
    return out


def _checked(out: str, sources: Iterable[str]) -> str:
    out = real(out)
    if is_address(out):
        raise UsageError(
            f"{out} is an address, and the ranks of a job write to a shared file system only.",
            hint="Without torchrun, one process makes it here and sends it; -j N helps.",
        )
    refuse_source(out, sources)
    return out


def _refuse_taken(out: str, *, force: bool) -> None:
    if os.path.lexists(out) and not force:
        raise OutputExistsError(
            f"{out} already exists; nothing was read or written.",
            hint="Choose another output, or use --force to replace the checkpoint files in it.",
        )


def _recover(out: str, *, resume: bool) -> bool:
    """Finish or undo the last steps of a killed run: the new OUT is in place, or the old one again.

    True when the new OUT is in place and the run that resumes will do the rest.
    """
    replaced = replaced_of(out)
    with held(partial_of(out)) as manifest:
        if manifest.has("complete") and is_linked(manifest.result, out):
            os.unlink(manifest.result)
        if manifest.is_placed and os.path.lexists(out):
            if not resume:
                _tidy(manifest, out)
            return resume
        if manifest.has("replacing") and os.path.lexists(replaced) and not os.path.lexists(out):
            os.rename(replaced, out)
        if manifest.is_placed or manifest.origin is None:
            manifest.remove()
        return False


def _tidy(manifest: Manifest, out: str) -> None:
    """Remove the old OUT and the folder of the run."""
    if manifest.has("replacing"):
        replaced = replaced_of(out)
        try:
            remove(replaced)
        except OSError as error:
            raise WriteError(
                f"{out} is written, but what it replaces cannot be removed: {reason_of(error)}.",
                hint=f"Remove {replaced} and {manifest.place.partial}.",
            ) from error
    manifest.remove()


def check_room(out: str, plans: LazyPlans, *, single_file: str | None = None) -> str | None:
    """A note on too little space for these files; None where there is enough.

    Raises what else would keep them from becoming ``out``, as far as it is known beforehand:
    OutputExistsError for a folder where one file is to be, or a file where a folder is to be;
    WriteError for a folder that may not be written in.
    """
    _refuse_obstacles(out, single_file)
    try:
        _check_space(out, plans)
    except WriteError as error:
        return error.message
    return None


def _refuse_obstacles(out: str, single_file: str | None) -> None:
    if os.path.lexists(out) and os.path.isdir(out) != (single_file is None):
        there, wanted = ("folder", "one file") if single_file else ("file", "a folder")
        raise OutputExistsError(
            f"{out} is a {there}, but {wanted} would be written.",
            hint="Choose another output; --force replaces a file by a file, a folder by a folder.",
        )
    parent = existing_parent(out)
    if not os.access(parent, os.W_OK | os.X_OK):
        raise WriteError(f"{out} could not be written: no permission to write in {parent}.")


def _check_space(out: str, plans: LazyPlans) -> None:
    """Raise WriteError for too little space; what an unfinished output holds counts as written."""
    there = place_of(out).allocated()
    needed = sum(max(0, file.length - there[file.path]) for file in plans.files)
    free = free_space(out)
    if needed > free:
        raise WriteError(
            f"{out} needs {needed:,} bytes, and its file system has {free:,} free; "
            "nothing was written.",
            hint="Free some space, or choose an output on another file system.",
        )


def free_space(out: str) -> int:
    """Bytes that are free on the file system on which ``out`` will be."""
    state = os.statvfs(existing_parent(os.path.realpath(out)))
    return state.f_bavail * state.f_frsize


@contextmanager
def open_output(spec: OutputSpec) -> Iterator[Left]:
    """What is left to write in ``spec.place``, whose files become ``spec.out`` when the block ends
    without an error.

    Raises WriteError for what the system does not allow, and UsageError when another process writes
    there, when ``spec.resume`` cannot go on, or when something is in the way. After a failure the
    finished files are kept, if there are any and the checkpoint is not at fault, and the error says
    so; what was at ``out`` before is as it was.
    """
    _refuse_obstacles(spec.out, spec.single_file)
    with held(spec.place.partial) as manifest:
        with _undone_if_unstarted(manifest, spec):
            if os.path.lexists(spec.out) and spec.before is None and not manifest.is_placed:
                raise appeared(spec.out)
            left = _start(manifest, spec)
        with _kept_on_failure(manifest, spec):
            _check_space(spec.out, left[0])
            with writing_from(spec.source):
                yield left
            _publish(manifest, spec)


@contextmanager
def _undone_if_unstarted(manifest: Manifest, spec: OutputSpec) -> Iterator[None]:
    """Remove the folder again when an error comes before the output is begun."""
    try:
        yield
    except BaseException as error:
        if manifest.origin is None:
            manifest.remove()
        if isinstance(error, OSError):
            raise unwritable(spec.out, error) from error
        raise


@contextmanager
def _kept_on_failure(manifest: Manifest, spec: OutputSpec) -> Iterator[None]:
    """Keep or remove what a failed run has written, and let its error say so."""
    try:
        yield
    except OSError as error:
        failure = unwritable(spec.out, error)
        failure.advice = " ".join(filter(None, [failure.hint, _kept(manifest, spec)])) or None
        raise failure from error
    except KeyboardInterrupt as error:
        kept = _kept(manifest, spec)
        raise type(error)(*filter(None, [kept])) from error
    except CkptError as error:
        # What the system refused may succeed the next time.
        is_fault = isinstance(error, CheckpointError) and not isinstance(error.__cause__, OSError)
        if is_fault or isinstance(error, SourceChangedError):
            manifest.remove()
        else:
            error.advice = " ".join(filter(None, [error.advice, _kept(manifest, spec)])) or None
        raise
    except BaseException:
        _kept(manifest, spec)
        raise


def _start(manifest: Manifest, spec: OutputSpec) -> Left:
    """Resume an earlier run, or start again and say what is removed of one."""
    notes: tuple[str, ...] = ()
    if spec.resume:
        resumed = _resumed(manifest, spec)
        if resumed is not None:
            return resumed
        notes = () if spec.restarted else ("Nothing to resume: started from the beginning.",)
    if os.path.lexists(replaced_of(spec.out)):
        raise OutputExistsError(
            f"{replaced_of(spec.out)} exists; its content must not be lost.", hint="Move it away."
        )
    nbytes = sum(spec.place.allocated().values())
    if manifest.origin is not None and nbytes:
        same = not spec.resume and not manifest.origin.differences(spec.origin)
        advice = " --resume would go on with what is finished." if same else ""
        discarded = f"{spec.place.partial} of an earlier run is removed ({format_size(nbytes)})."
        spec.on_note(discarded + advice)
    manifest.begin(spec.origin, single_file=spec.single_file)
    return spec.plans, notes


def _resumed(manifest: Manifest, spec: OutputSpec) -> Left | None:
    """What is left to do after an earlier run; None when that has finished nothing."""
    if manifest.origin is None:
        return None
    is_written = manifest.has("complete")
    if not is_written and not spec.place.has_finished:
        return None
    different = manifest.origin.differences(spec.origin)
    if different and spec.restarted:
        return None
    if different:
        raise UsageError(
            f"{spec.place.partial} was started with other inputs or options, so it cannot be "
            f"resumed. {' '.join(different[:3])}",
            hint="Without --resume it is removed, and the output is written again.",
        )
    if is_written:
        return LazyPlans(), ("An earlier run had already written everything.",)
    finished = spec.place.keep_finished(spec.plans)
    if not finished:
        return None
    note = f"Resuming: {_progress(finished, spec)} were already finished."
    return spec.plans.without(finished), (note,)


def _progress(finished: Collection[str], spec: OutputSpec) -> str:
    """How much of the output these files are."""
    files = spec.plans.files
    done = sum(file.length for file in files if file.path in finished)
    total = sum(file.length for file in files)
    sizes = f"{format_size(done)} of {format_size(total)}"
    return f"{len(finished)} of {counted(len(files), 'file')} ({sizes})"


def _kept(manifest: Manifest, spec: OutputSpec) -> str | None:
    """How to resume with the finished files; None when there are none, and all is removed."""
    finished, partial = spec.place.finished(spec.plans), spec.place.partial
    if not finished and not manifest.has("complete"):
        manifest.remove()
        return None
    if manifest.is_placed:
        return None
    if manifest.has("complete"):
        return f"All is written in {partial}: run the same command with --resume to finish it."
    return (
        f"{_progress(finished, spec)} are finished and kept in {partial}: the same command "
        "with --resume continues; delete that folder to discard it."
    )


def _publish(manifest: Manifest, spec: OutputSpec) -> None:
    """Sync all files, and rename the result to OUT, without replacing what may not be.

    Raises OutputExistsError when something has appeared there.
    """
    if not manifest.has("complete"):
        for parent, _, names in os.walk(manifest.place.folder):
            sync_files([os.path.join(parent, name) for name in names] or [parent])
        manifest.mark("complete")
    if os.path.lexists(manifest.result):
        if spec.single_file is None:
            _put_folder(manifest, spec)
        elif spec.before is None:
            place_file(manifest.result, spec.out)
        else:
            spec.before.require(spec.out, lambda _: True, named=spec.out)
            _keep_mode(spec.out, manifest.result)
            os.replace(manifest.result, spec.out)
        sync_files([spec.out])
    _tidy(manifest, spec.out)


def _put_folder(manifest: Manifest, spec: OutputSpec) -> None:
    """Rename the new folder to OUT, with links to the files of the user in the old one."""
    out = spec.out
    if spec.before is None:
        place_folder(manifest.place.folder, out)
        return
    new = {file.path for file in spec.plans.files}

    def is_lost(path: str) -> bool:
        return path in new or any(fnmatch(os.path.basename(path), glob) for glob in spec.globs)

    spec.before.require(out, is_lost, named=out)
    _link_survivors(spec, manifest.place.folder)
    mode = stat.S_IMODE(os.stat(out).st_mode)
    os.chmod(manifest.place.folder, mode | stat.S_IRWXU)  # its own right to be renamed goes last
    manifest.mark("replacing")
    os.rename(out, replaced_of(out))
    try:
        spec.before.require(replaced_of(out), is_lost, named=out)
        os.rename(manifest.place.folder, out)
    except BaseException:
        os.rename(replaced_of(out), out)
        raise
    os.chmod(out, mode)


def _link_survivors(spec: OutputSpec, new: str) -> None:
    """Link all else of the old folder into the new one; what is replaced keeps its old mode."""
    from shutil import copytree  # late: it loads every compressor

    files = {file.path for file in spec.plans.files}
    folders = {path[:at] for path in files for at, one in enumerate(path) if one == "/"}

    def link_folder(inside: str) -> None:
        for name in sorted(os.listdir(os.path.join(spec.out, inside))):
            path = f"{inside}{name}"
            source, target = os.path.join(spec.out, path), os.path.join(new, path)
            is_folder = os.path.isdir(source) and not os.path.islink(source)
            if path in files:
                _keep_mode(source, target)
            elif path in folders:
                if is_folder:
                    link_folder(f"{path}/")
                    _keep_mode(source, target)
            elif not any(fnmatch(name, glob) for glob in spec.globs):
                remove(target)  # an earlier try has linked it
                if is_folder:
                    copytree(source, target, symlinks=True, copy_function=os.link)
                else:
                    os.link(source, target, follow_symlinks=False)

    link_folder("")


def _keep_mode(old: str, new: str) -> None:
    """Copy the mode of what is replaced, where both are files or both are folders."""
    with suppress(FileNotFoundError):
        mode = os.lstat(old).st_mode
        if stat.S_IFMT(mode) == stat.S_IFMT(os.lstat(new).st_mode):
            os.chmod(new, stat.S_IMODE(mode))
