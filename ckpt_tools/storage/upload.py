"""Outputs in a store: made whole on this machine first, then sent file by file.

A store has no rename, so the files that tell that a checkpoint is there are sent last: until then
its readers find nothing whole. What was sent by a run that is stopped is removed again; where the
store fails, it stays there and here, and the error says where.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from ckpt_tools.core.text import are, counted, some
from ckpt_tools.errors import OutputExistsError, UsageError, WriteError, unwritable
from ckpt_tools.storage import fsspec_store, paths


@contextmanager
def staged(out: str, *, force: bool, resume: bool, last: tuple[str, ...] = ()) -> Iterator[str]:
    """A path on this machine to write to; what is there when the block ends is sent to ``out``,
    files whose names end with one of ``last`` after all others.

    It lies in the folder for temporary files, which needs room for all of it, and stays there when
    the store refuses or has not kept every byte: then WriteError is raised. Raises what
    `refuse_existing` raises, and UsageError with ``resume``.
    """
    from shutil import rmtree  # late, as all that only addresses need
    from tempfile import mkdtemp

    refuse_existing(out, force=force, resume=resume)
    folder = mkdtemp(prefix="ckpt-tools-")
    try:
        here = os.path.join(folder, os.path.basename(paths.normal(out)))
        yield here
        _refuse_taken(out, force=force)  # it may have appeared meanwhile
        sent: list[str] = []
        try:
            _send(here, paths.normal(out), last, sent)
        except WriteError as error:
            folder = ""
            raise WriteError(error.message, hint=_kept(here, out, sent)) from error
        except KeyboardInterrupt as error:
            raise type(error)(*error.args, *_removed(out, sent)) from None
    finally:
        if folder:
            rmtree(folder, ignore_errors=True)


def _kept(here: str, out: str, sent: list[str]) -> str:
    files = f"{counted(len(sent), 'file')} of it {are(len(sent))} at {out}; "
    return (
        f"{files if sent else ''}all of it is in {here}. Send it from there with the store's own "
        "tool, or remove both and run the command again."
    )


def _removed(out: str, sent: list[str]) -> list[str]:
    """Remove what was sent; a sentence about it, none when nothing was."""
    left = list(sent)
    with suppress(OSError):
        while left:
            fsspec_store.remove(left[-1])
            left.pop()
    if left:
        return [f"Sent before that, and not removed: {some(left)}."]
    return [f"What had been sent to {out} was removed."] if sent else []


def refuse_existing(out: str, *, force: bool, resume: bool) -> None:
    """Raise OutputExistsError when something is at the address, and UsageError with ``resume``, or
    for a web server.

    Nothing is replaced there, not even with ``force``: old shards between new ones would be taken
    for parts of the checkpoint.
    """
    if fsspec_store.is_web(out):
        raise UsageError(f"{out}: nothing is written to a web server.", hint="Write to a folder.")
    if resume:
        raise UsageError(
            f"--resume works only on a file system; {out} is an address.",
            hint="Write to a folder of this machine, and copy it with the store's own tool.",
        )
    _refuse_taken(out, force=force)


def _refuse_taken(out: str, *, force: bool) -> None:
    try:
        fsspec_store.forget(out)  # what the store said a moment ago may be true no more
        is_taken = paths.exists(out)
    except OSError as error:
        raise unwritable(out, error, doing="looked at") from error
    if is_taken:
        hint = "Choose another output, or remove it with the store's own tool."
        more = "; --force replaces nothing in a store" if force else ""
        raise OutputExistsError(f"{out} already exists{more}.", hint=hint)


def _send(here: str, out: str, last: tuple[str, ...], sent: list[str]) -> None:
    """Send a file, or all of a folder; ``sent`` gets the addresses. Raises WriteError."""
    for path in sorted(_files(here), key=lambda path: (path.endswith(last), path)):
        inside = os.path.relpath(path, here)
        address = out if path == here else f"{out}/{inside}"
        try:
            fsspec_store.put(path, address)
            sent.append(address)
            kept = fsspec_store.facts(address).size
        except OSError as error:
            raise unwritable(address, error, doing="sent") from error
        if kept != os.path.getsize(path):
            raise WriteError(
                f"{address} has {kept:,} bytes, and {os.path.getsize(path):,} were sent."
            )


def _files(here: str) -> list[str]:
    if os.path.isfile(here):
        return [here]
    return [os.path.join(parent, name) for parent, _, names in os.walk(here) for name in names]
