"""Small files that a command writes beside its answer: a picture, a page, a fingerprint.

Each is checked like every output, and written atomically.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable
from contextlib import suppress

from ckpt_tools.copying.out_path import partial_of, real, refuse_source
from ckpt_tools.errors import OutputExistsError, UsageError, WriteError
from ckpt_tools.storage.paths import is_address


def admit(path: str, *, sources: Iterable[str], force: bool) -> str:
    """The absolute path of a file that may be written; nothing is.

    Raises what `out_path.real` and `out_path.refuse_source` raise, UsageError for an address, and
    OutputExistsError when something is there and may not be replaced; a folder never may.
    """
    out = real(path)
    if is_address(out):
        raise UsageError(f"{path} is an address; this file can only be written to a local disk.")
    refuse_source(out, sources)
    if os.path.isdir(out):
        raise OutputExistsError(f"{path} is a folder, and one file is to be written.")
    if os.path.lexists(out) and not force:
        raise OutputExistsError(f"{path} already exists.", hint="--force replaces it.")
    return out


def write(path: str, data: bytes, *, sources: Iterable[str], force: bool) -> None:
    """Write a file, whole or not at all; one that is replaced keeps its mode.

    Raises what `admit` raises, and WriteError for what the system does not allow.
    """
    out = admit(path, sources=sources, force=force)
    partial = partial_of(out)
    try:
        fd = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    except FileExistsError as error:
        raise OutputExistsError(
            f"{partial} already exists: the same file is being written, or that was interrupted.",
            hint=f"Remove {partial} if nothing is writing it.",
        ) from error
    except OSError as error:
        raise WriteError(f"{path} cannot be written: {error.strerror or error}.") from error
    try:
        with open(fd, "wb") as file:
            with suppress(FileNotFoundError):
                os.fchmod(fd, stat.S_IMODE(os.stat(out).st_mode))
            file.write(data)
            file.flush()
            os.fsync(fd)
        os.replace(partial, out)
    except BaseException as error:
        os.unlink(partial)
        if isinstance(error, OSError):
            raise WriteError(f"{path} cannot be written: {error.strerror or error}.") from error
        raise
