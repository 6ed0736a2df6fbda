"""An output that appears whole or not at all, and can be gone on with.

Everything is written to ``OUT.partial/new``, made durable, and renamed once. What was at OUT before
stays untouched until that moment; then it is ``OUT.replaced`` for an instant. Whoever is killed at
any point leaves a state that the next run puts right. This room knows files and folders, never what
is in them.
"""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import PurePosixPath
from typing import NamedTuple

from ckpt_tools.copying.origin import Origin, require_unchanged, with_states
from ckpt_tools.copying.out_path import (
    existing_parent,
    partial_of,
    real,
    refuse_source,
    replaced_of,
)
from ckpt_tools.copying.resume import (
    Manifest,
    Place,
    finished_files,
    held,
    keep_finished,
    noted_files,
    refuse_foreign,
    sync_files,
)
from ckpt_tools.core.index import FileEntry
from ckpt_tools.core.plan import FilePlan, files_of, without
from ckpt_tools.core.text import counted, format_size
from ckpt_tools.errors import (
    CheckpointError,
    CkptError,
    OutputExistsError,
    SourceChangedError,
    UsageError,
    WriteError,
    unwritable,
)
from ckpt_tools.storage.paths import is_address

# Beside what the caller says: the proof of a checkpoint goes with it.
_PROOF = "ckpt_tools_proof.json"


@dataclass(frozen=True, slots=True)
class Order:
    """An output to make at ``out`` from ``origin``; ``single_file`` of the plans is all of it.

    ``source`` are the files that it is made from, which must stay as they are until its end.
    ``resume`` goes on with what an earlier run of the same order has finished. ``replaceable`` are
    globs of what may be replaced in a folder that already exists: a loader would take it for part
    of a checkpoint. Anything else in the folder is the user's and survives.
    """

    out: str
    plans: Sequence[FilePlan]
    origin: Origin
    source: Sequence[FileEntry] = ()
    single_file: str | None = None
    resume: bool = False
    replaceable: Sequence[str] = ()

    @property
    def partial(self) -> str:
        """The folder in which the output is made."""
        return partial_of(self.out)

    @property
    def place(self) -> Place:
        """Where it is made."""
        return place_of(self.out)


@dataclass(frozen=True, slots=True)
class Started:
    """An output that is being made in ``place``, and the ``plans`` of the files that are left.

    ``notes`` say what an earlier run has done.
    """

    place: Place
    plans: Sequence[FilePlan]
    notes: tuple[str, ...] = ()


def place_of(out: str) -> Place:
    """Where an output is made before it appears."""
    return Place(partial_of(out))


def admit(out: str, *, sources: Iterable[str], force: bool, resume: bool = False) -> str:
    """The absolute path of an output that may be written; nothing else is read or written for it.

    Raises what `out_path.real` and `out_path.refuse_source` raise, and OutputExistsError when
    something is at ``out`` and may not be replaced. What a killed run left half renamed is put
    right first. With ``resume``, its result may be there when that run was killed just before it
    would have ended.
    """
    out = _checked(out, sources)
    if os.path.lexists(partial_of(out)) and _settle(out, resume=resume):
        return out
    _refuse_taken(out, force=force)
    return out


def dry_run(out: str, *, sources: Iterable[str], force: bool, resume: bool = False) -> str:
    """The same, but what a killed run left stays as it is."""
    out = _checked(out, sources)
    refuse_foreign(partial_of(out))
    if not (resume and os.path.lexists(partial_of(out))):
        _refuse_taken(out, force=force)
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


def _settle(out: str, *, resume: bool) -> bool:
    """End what a killed run left between its last steps, or give back the old OUT.

    Gives whether the new OUT is in place and the rest is left to the run that resumes.
    """
    replaced = replaced_of(out)
    with held(partial_of(out)) as manifest:
        is_placed = manifest.has("complete") and not os.path.lexists(manifest.result)
        if is_placed and os.path.lexists(out):
            if not resume:
                _tidy(manifest, out)
            return resume
        if manifest.has("replacing") and os.path.lexists(replaced) and not os.path.lexists(out):
            os.rename(replaced, out)
        if is_placed or manifest.origin is None:
            manifest.remove()
        return False


def _tidy(manifest: Manifest, out: str) -> None:
    """Remove all but the new OUT."""
    if manifest.has("replacing"):
        _remove(replaced_of(out))
    manifest.remove()


def check_room(out: str, plans: Sequence[FilePlan], *, single_file: str | None = None) -> None:
    """Raise what would keep these files from becoming ``out``, as far as it shows before.

    OutputExistsError for a folder where one file is to be, or a file where a folder is to be;
    WriteError for a folder that may not be written in, or too little space.
    """
    _refuse_obstacles(out, single_file)
    _check_space(out, plans)


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


def _check_space(out: str, plans: Sequence[FilePlan]) -> None:
    """Raise WriteError for too little space; what an unfinished output holds counts as written."""
    folder = place_of(out).folder
    needed = sum(
        max(0, file.length - _allocated(os.path.join(folder, file.path)))
        for file in files_of(plans)
    )
    free = free_space(out)
    if needed > free:
        raise WriteError(
            f"{out} needs {needed:,} bytes, and its file system has {free:,} free; "
            "nothing was written.",
            hint="Free some space, or choose an output on another file system.",
        )


def free_space(out: str) -> int:
    """Bytes that are free on the file system on which ``out`` will be."""
    return shutil.disk_usage(existing_parent(os.path.realpath(out))).free


def _allocated(path: str) -> int:
    try:
        return os.stat(path).st_blocks * 512
    except OSError:
        return 0


@contextmanager
def appearing(order: Order) -> Iterator[Started]:
    """A place to write into, whose files become ``order.out`` when the block ends without an error.

    Raises WriteError for what the system does not allow, and UsageError when another process writes
    there, when ``order.resume`` cannot go on, or when something is in the way. After a failure the
    finished files are kept, if there are any and the checkpoint is not at fault, and the error says
    so; what was at ``out`` before is as it was.
    """
    _refuse_obstacles(order.out, order.single_file)
    with held(order.partial) as manifest:
        with _beginning(manifest, order):
            started = _start(manifest, order)
        with _kept_on_failure(manifest, order):
            _check_space(order.out, order.plans)
            with _one_source(order):
                yield started
            _appear(manifest, order)


@contextmanager
def _one_source(order: Order) -> Iterator[None]:
    """A block at whose end the source is as it was; what else went wrong may come of its change."""
    source = with_states(order.source)
    require_unchanged(source)
    try:
        yield
    except (CkptError, OSError) as error:
        try:
            require_unchanged(source)
        except SourceChangedError as changed:
            raise changed from error
        raise
    require_unchanged(source)


@contextmanager
def _beginning(manifest: Manifest, order: Order) -> Iterator[None]:
    """Leave all as it is when nothing is begun."""
    try:
        yield
    except BaseException as error:
        if manifest.origin is None:
            manifest.remove()
        if isinstance(error, OSError):
            raise unwritable(order.out, error) from error
        raise


@contextmanager
def _kept_on_failure(manifest: Manifest, order: Order) -> Iterator[None]:
    """Keep or remove what a failed run has written, and let its error say so."""
    try:
        yield
    except OSError as error:
        told = unwritable(order.out, error)
        told.advice = " ".join(filter(None, [told.hint, _kept(manifest, order)])) or None
        raise told from error
    except KeyboardInterrupt as error:
        kept = _kept(manifest, order)
        raise KeyboardInterrupt(*filter(None, [kept])) from error
    except CkptError as error:
        if _is_about_source(error):
            manifest.remove()
        else:
            error.advice = " ".join(filter(None, [error.advice, _kept(manifest, order)])) or None
        raise
    except BaseException:
        _kept(manifest, order)
        raise


def _start(manifest: Manifest, order: Order) -> Started:
    """Go on with what is there, or begin anew."""
    notes: tuple[str, ...] = ()
    if order.resume:
        going_on = _resumed(manifest, order)
        if going_on is not None:
            return going_on
        notes = ("Nothing to resume: started from the beginning.",)
    if os.path.lexists(replaced_of(order.out)):
        raise OutputExistsError(
            f"{replaced_of(order.out)} exists; its content must not be lost.", hint="Move it away."
        )
    manifest.begin(order.origin, single_file=order.single_file)
    return Started(order.place, order.plans, notes)


def _resumed(manifest: Manifest, order: Order) -> Started | None:
    """What an earlier run has done of this order; None when it has done nothing."""
    if manifest.origin is None:
        return None
    is_written = manifest.has("complete")
    if not is_written and not noted_files(order.place):
        return None
    different = manifest.origin.differences(order.origin)
    if different:
        raise UsageError(
            f"{order.partial} was started with other inputs or options, so it cannot be resumed. "
            + " ".join(different[:3]),
            hint="Without --resume it is removed, and the output is written again.",
        )
    if is_written:
        return Started(order.place, (), ("An earlier run had already written everything.",))
    finished = keep_finished(order.place, order.plans)
    if not finished:
        return None
    note = f"Resuming: {_progress(finished, order)} were already finished."
    return Started(order.place, without(order.plans, finished), (note,))


def _progress(finished: Collection[str], order: Order) -> str:
    """How much of an order these files are."""
    files = files_of(order.plans)
    done = sum(file.length for file in files if file.path in finished)
    total = sum(file.length for file in files)
    sizes = f"{format_size(done)} of {format_size(total)}"
    return f"{len(finished)} of {counted(len(files), 'file')} ({sizes})"


def _is_about_source(error: BaseException) -> bool:
    """Whether going on is of no use; what the system refused may go well the next time."""
    if isinstance(error, SourceChangedError):
        return True
    return isinstance(error, CheckpointError) and not isinstance(error.__cause__, OSError)


def _kept(manifest: Manifest, order: Order) -> str | None:
    """How to go on with what is finished; None when nothing is, and it is removed."""
    finished = finished_files(order.place, order.plans)
    if not finished and not manifest.has("complete"):
        manifest.remove()
        return None
    if manifest.has("complete"):
        return (
            f"All is written in {order.partial}: run the same command with --resume to finish it."
        )
    return (
        f"{_progress(finished, order)} are finished and kept in {order.partial}: the same command "
        "with --resume continues; delete that folder to discard it."
    )


def _appear(manifest: Manifest, order: Order) -> None:
    """Make all durable, and put it in place."""
    if not manifest.has("complete"):
        _sync_tree(manifest.place.folder)
        manifest.mark("complete")
    if os.path.lexists(manifest.result):
        if order.single_file is None:
            _put_folder(manifest, order)
        else:
            _keep_mode(order.out, manifest.result)
            os.replace(manifest.result, order.out)
        sync_files([order.out])
    _tidy(manifest, order.out)


def _remove(path: str) -> None:
    if os.path.isdir(path) and not os.path.islink(path):
        shutil.rmtree(path)
    elif os.path.lexists(path):
        os.unlink(path)


def _put_folder(manifest: Manifest, order: Order) -> None:
    """Rename the new folder into place, taking along what is the user's in the old one."""
    out = order.out
    if not os.path.lexists(out):
        os.rename(manifest.place.folder, out)
        return
    _link_survivors(out, manifest.place.folder, planned=_Planned.of(order))
    mode = stat.S_IMODE(os.stat(out).st_mode)
    os.chmod(manifest.place.folder, mode | stat.S_IRWXU)  # its own right to be renamed goes last
    manifest.mark("replacing")
    os.rename(out, replaced_of(out))
    try:
        os.rename(manifest.place.folder, out)
    except BaseException:
        os.rename(replaced_of(out), out)
        raise
    os.chmod(out, mode)


class _Planned(NamedTuple):
    """Paths of the files that are written, and of the folders that they are in; globs of names that
    go with the old output.
    """

    files: frozenset[str]
    folders: frozenset[str]
    replaceable: tuple[str, ...]

    @classmethod
    def of(cls, order: Order) -> _Planned:
        files = frozenset(file.path for file in files_of(order.plans))
        folders = {str(parent) for path in files for parent in PurePosixPath(path).parents}
        return cls(files, frozenset(folders), (*order.replaceable, _PROOF))


def _link_survivors(old: str, new: str, *, planned: _Planned, inside: str = "") -> None:
    """Give the new folder what of the old is not part of a checkpoint, and the modes of the rest.

    ``inside`` is the path of both folders in the output, as the plan has it.
    """
    for name in sorted(os.listdir(old)):
        source, target = os.path.join(old, name), os.path.join(new, name)
        path = f"{inside}{name}"
        if path in planned.files:
            _keep_mode(source, target)
        elif path in planned.folders:
            if os.path.isdir(source) and not os.path.islink(source):
                _link_survivors(source, target, planned=planned, inside=f"{path}/")
                _keep_mode(source, target)
        elif not any(fnmatch(name, glob) for glob in planned.replaceable):
            _remove(target)  # an earlier try has linked it
            _link(source, target)


def _link(source: str, target: str) -> None:
    if os.path.isdir(source) and not os.path.islink(source):
        shutil.copytree(source, target, symlinks=True, copy_function=os.link)
    else:
        os.link(source, target, follow_symlinks=False)


def _keep_mode(old: str, new: str) -> None:
    """Give what replaces a file or folder its mode, where both are of one kind."""
    with suppress(FileNotFoundError):
        mode = os.lstat(old).st_mode
        if stat.S_IFMT(mode) == stat.S_IFMT(os.lstat(new).st_mode):
            os.chmod(new, stat.S_IMODE(mode))


def _sync_tree(folder: str) -> None:
    """Make every file below the folder durable, one fsync a file, after all is written."""
    for parent, _, names in os.walk(folder):
        sync_files([os.path.join(parent, name) for name in names] or [parent])
