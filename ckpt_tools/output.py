"""An output that appears whole or not at all.

Everything is written to a sibling ``OUT.partial``, made durable, and renamed once. What was at OUT
before stays untouched until that moment. This room knows files and folders, never what is in them.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from fnmatch import fnmatch

from ckpt_tools.errors import OutputExistsError, WriteError
from ckpt_tools.plan import FilePlan

# What --force may replace in a folder that is there already: files that a loader would take for
# part of a checkpoint. Anything else in the folder is the user's and survives.
CHECKPOINT_FILES = (
    "*.safetensors",
    "*.safetensors.index.json",
    "pytorch_model*.bin",
    "pytorch_model*.bin.index.json",
    "*.distcp",
    ".metadata",
    "__*.metadata",
    "*rank_*.pt",
)


def refuse_existing(out: str, *, force: bool) -> None:
    """Raise OutputExistsError when something is at ``out`` and may not be replaced."""
    if os.path.lexists(out) and not force:
        raise OutputExistsError(
            f"{out} is there already; nothing was read or written.",
            hint="Name another output, or add --force to replace the checkpoint files in it.",
        )


def check_space(out: str, plans: Sequence[FilePlan]) -> None:
    """Raise WriteError when the output's file system has fewer bytes free than the plans need."""
    needed = sum(plan.length for plan in plans)
    free = free_space(out)
    if needed > free:
        raise WriteError(
            f"{out} needs {needed:,} bytes, and its file system has {free:,} free; "
            "nothing was written.",
            hint="Free some space, or name an output on another file system.",
        )


def free_space(out: str) -> int:
    """Bytes that are free on the file system where ``out`` is, or will be."""
    return shutil.disk_usage(_existing_parent(out)).free


@contextmanager
def appearing(out: str, *, single_file: str | None = None) -> Iterator[str]:
    """A folder to write into, which becomes ``out`` when the block ends without an error.

    With ``single_file`` the file of that name in the folder becomes ``out``. On any error the
    folder is removed, and what was at ``out`` before is as it was.
    """
    partial = f"{out}.partial"
    _remove(partial)
    try:
        os.makedirs(partial)
        yield partial
        _sync_tree(partial)
        if single_file is None:
            _put_folder(partial, out)
        else:
            os.replace(os.path.join(partial, single_file), out)
            _remove(partial)
        _sync_folder(_existing_parent(out))
    except OSError as error:
        _remove(partial)
        raise WriteError(f"{out} could not be written: {error.strerror or error}.") from error
    except BaseException:
        _remove(partial)
        raise


def _existing_parent(path: str) -> str:
    parent = os.path.dirname(os.path.abspath(path))
    while not os.path.isdir(parent):
        parent = os.path.dirname(parent)
    return parent


def _remove(path: str) -> None:
    if os.path.isdir(path) and not os.path.islink(path):
        shutil.rmtree(path)
    elif os.path.lexists(path):
        os.unlink(path)


def _put_folder(partial: str, out: str) -> None:
    """Rename the new folder into place, taking along what is the user's in the old one."""
    if not os.path.isdir(out):
        os.rename(partial, out)
        return
    _link_survivors(out, partial)
    replaced = f"{out}.replaced"
    _remove(replaced)
    os.rename(out, replaced)
    os.rename(partial, out)
    _remove(replaced)


def _link_survivors(old: str, new: str) -> None:
    """Give the new folder every file of the old one that is no part of a checkpoint."""
    for name in sorted(os.listdir(old)):
        source, target = os.path.join(old, name), os.path.join(new, name)
        if os.path.lexists(target) or any(fnmatch(name, glob) for glob in CHECKPOINT_FILES):
            continue
        if os.path.isdir(source) and not os.path.islink(source):
            shutil.copytree(source, target, symlinks=True, copy_function=os.link)
        else:
            os.link(source, target, follow_symlinks=False)


def _sync_tree(folder: str) -> None:
    """Make every file below the folder durable, one fsync a file, after all is written."""
    for parent, _, names in os.walk(folder):
        for name in names:
            _sync_file(os.path.join(parent, name))
        _sync_folder(parent)


def _sync_file(path: str) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _sync_folder(path: str) -> None:
    _sync_file(path)
