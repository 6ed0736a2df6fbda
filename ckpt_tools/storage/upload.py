"""Outputs in a store: made whole on this machine first, then sent file by file.

A store has no rename, so the files that tell that a checkpoint is there are sent last: until then
its readers find nothing whole. What a failed run has made stays in its folder for temporary files,
with a record of what was sent, and the next run of the same command goes on there.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from hashlib import sha256

from ckpt_tools.core.text import some
from ckpt_tools.errors import CkptError, OutputExistsError, UsageError, WriteError, unwritable
from ckpt_tools.storage import fsspec_store, paths

# Beside the output: a line for each object, before it is sent and, with its version, after that.
_RECORD = "sent"


@contextmanager
def staged(out: str, *, force: bool, resume: bool, last: tuple[str, ...] = ()) -> Iterator[str]:
    """A path on this machine to write to; what is there when the block ends is sent to ``out``,
    files whose names end with one of ``last`` after all others.

    It lies in the folder for temporary files, which needs room for all of it; after a failure what
    is finished stays there, and the error says so. With ``resume`` it is that of the earlier run.
    Raises what `refuse_existing` raises, and WriteError when the store refuses or has not kept
    every byte.
    """
    from shutil import rmtree  # late, as all that only addresses need
    from tempfile import mkdtemp

    refuse_existing(out, force=force, resume=resume)
    folder = (_unfinished(out) if resume else None) or mkdtemp(prefix=_prefix(out))
    here = os.path.join(folder, os.path.basename(paths.normal(out)))
    with _held(folder, out):
        try:
            yield here
            with _kept_on_failure(here, out):
                _refuse_taken(out, folder, force=force)  # it may have appeared meanwhile
                _send(here, paths.normal(out), last)
        except BaseException:
            if not set(os.listdir(folder)) - {_RECORD}:
                rmtree(folder, ignore_errors=True)
            raise
        rmtree(folder, ignore_errors=True)


def _prefix(out: str) -> str:
    return f"ckpt-tools-{sha256(paths.normal(out).encode()).hexdigest()[:12]}-"


def _unfinished(out: str) -> str | None:
    """The folder of the last run for this output that did not come to its end; None for none."""
    from tempfile import gettempdir

    with os.scandir(gettempdir()) as entries:
        found = [one for one in entries if one.name.startswith(_prefix(out))]
    own = [one for one in found if one.is_dir() and one.stat().st_uid == os.getuid()]
    return max(own, key=lambda one: one.stat().st_mtime_ns).path if own else None


@contextmanager
def _held(folder: str, out: str) -> Iterator[None]:
    """Keep other processes out of the folder. Raises OutputExistsError when one is in it."""
    fd = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError as error:
        raise OutputExistsError(f"Another process is writing {out} now.") from error
    finally:
        os.close(fd)


@contextmanager
def _kept_on_failure(here: str, out: str) -> Iterator[None]:
    """Let what ends the sending say what is where. What Ctrl-C ends is removed from the store."""
    go_on = f"All of it is in {here}: the same command with --resume sends what is missing."
    try:
        yield
    except CkptError as error:
        error.advice = " ".join(filter(None, [error.advice, go_on]))
        raise
    except KeyboardInterrupt as error:
        raise type(error)(*error.args, *_removed(here, out), go_on) from None


def _removed(here: str, out: str) -> list[str]:
    """Remove what was sent; a sentence about it, none when nothing was."""
    sent = [address for address, version in _noted(os.path.dirname(here)).items() if version]
    left = list(sent)
    with suppress(OSError):
        while left:
            fsspec_store.remove(left[-1])
            left.pop()
    if left:
        return [f"Sent before that, and not removed: {some(left)}."]
    return [f"What had been sent to {out} was removed."] if sent else []


def refuse_existing(out: str, *, force: bool, resume: bool) -> None:
    """Raise OutputExistsError when something is at the address that the run to ``resume`` has not
    sent, and UsageError for a web server.

    Nothing is replaced there, not even with ``force``: old shards between new ones would be taken
    for parts of the checkpoint.
    """
    if fsspec_store.is_web(out):
        raise UsageError(f"{out}: nothing is written to a web server.", hint="Write to a folder.")
    _refuse_taken(out, _unfinished(out) if resume else None, force=force)


def _refuse_taken(out: str, folder: str | None, *, force: bool) -> None:
    """Raise OutputExistsError for what is at ``out`` and not in the record of this folder."""
    noted = {} if folder is None else _noted(folder)
    own = {os.path.relpath(address, out).partition("/")[0] for address in noted}
    try:
        fsspec_store.forget(out)  # what the store said a moment ago may be true no more
        if paths.is_dir(out):
            others = sorted({*paths.listdir(out)} - own) if own else [out]
        else:
            others = [out] if "." not in own and paths.is_file(out) else []
    except OSError as error:
        raise unwritable(out, error, doing="looked at") from error
    if others:
        hint = "Choose another output, or remove it with the store's own tool."
        what = f"{out} already exists" if others == [out] else f"{out} has {some(others)}, too"
        more = "; --force replaces nothing in a store" if force else ""
        raise OutputExistsError(f"{what}{more}.", hint=hint)


def _noted(folder: str) -> dict[str, str]:
    """The objects that were sent from here, and the version that the store then told of each; it is
    empty where it was not sent to its end. A torn last line says nothing.
    """
    noted: dict[str, str] = {}
    with suppress(FileNotFoundError, ValueError), open(os.path.join(folder, _RECORD), "rb") as file:
        for line in file:
            noted |= json.loads(line)
    return noted


def _send(here: str, out: str, last: tuple[str, ...]) -> None:
    """Send a file, or all of a folder, but for what was sent before and is still there.

    Raises WriteError, and OutputExistsError where another object is in the place of one.
    """
    folder = os.path.dirname(here)
    noted = _noted(folder)
    inside = [os.path.join(parent, name) for parent, _, names in os.walk(here) for name in names]
    for path in sorted(
        [here] if os.path.isfile(here) else inside, key=lambda path: (path.endswith(last), path)
    ):
        address = out if path == here else f"{out}/{os.path.relpath(path, here)}"
        size = os.path.getsize(path)
        try:
            if noted.get(address) and _is_at(address, size, noted[address]):
                continue
            _note(folder, address, "")
            fsspec_store.put(path, address)
            kept = fsspec_store.facts(address)
        except OSError as error:
            raise unwritable(address, error, doing="sent") from error
        if kept.size != size:
            raise WriteError(f"{address} has {kept.size:,} bytes, and {size:,} were sent.")
        _note(folder, address, kept.version)


def _is_at(address: str, size: int, version: str) -> bool:
    """Whether the object that was sent is there. Raises OSError, and OutputExistsError for another
    one in its place.
    """
    try:
        there = fsspec_store.facts(address)
    except FileNotFoundError:
        return False
    if (there.size, there.version) == (size, version):
        return True
    raise OutputExistsError(
        f"{address} is not the object that was sent: it has been replaced since.",
        hint="Remove it with the store's own tool to have it sent again.",
    )


def _note(folder: str, address: str, version: str) -> None:
    with open(os.path.join(folder, _RECORD), "a", encoding="utf-8") as file:
        file.write(json.dumps({address: version}) + "\n")
