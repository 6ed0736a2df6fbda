"""Which formats there are, and in which order they are asked.

Each format's own package knows the rest, and imports its modules when it is first asked.
"""

from __future__ import annotations

from ckpt_tools.errors import UsageError
from ckpt_tools.formats import dcp, rank_files, safetensors, torch_file
from ckpt_tools.formats.protocol import Format, Writes

# In the order in which they are asked: a DCP directory may have .pt side files beside it.
FORMATS: list[Format] = [
    dcp.FORMAT,
    dcp.SAFETENSORS,
    rank_files.FORMAT,
    safetensors.FORMAT,
    torch_file.FORMAT,
    torch_file.FOLDER,
]


def named(name: str) -> Format:
    """The format of this name, the first one of it. Raises UsageError when there is none."""
    for form in FORMATS:
        if form.name == name:
            return form
    known = ", ".join(dict.fromkeys(form.name for form in FORMATS))
    raise UsageError(f"Unknown format {name!r}.", hint=f"Formats are {known}.")


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


def detect(path: str) -> Format | None:
    """The format of exactly this file or directory, or None; folders inside are not looked into."""
    return next((form for form in FORMATS if form.matches(path)), None)
