"""What of a source finds no place in an output, and a note on each; for --layout, which
hyper-parameters are equal.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from hashlib import sha256
from typing import TYPE_CHECKING

from ckpt_tools import formats
from ckpt_tools.core.index import CheckpointIndex, Entry, ObjectEntry
from ckpt_tools.core.plain_values import closed_in
from ckpt_tools.core.text import counted, some
from ckpt_tools.errors import UnsupportedError
from ckpt_tools.formats.protocol import Index
from ckpt_tools.storage.reader import Files

if TYPE_CHECKING:
    from ckpt_tools.transforms.optimizer import Digest

# What an export says of its own source.
OWN_STRINGS = frozenset({"ckpt_tools", "source_format", "source_world_size", "proof"})


def digest_in(source: CheckpointIndex, files: Files) -> Digest:
    """A function that gives the digest of a hyper-parameter's bytes, and reads each once."""
    known: dict[object, str] = {}

    def digest(entry: Entry) -> str:
        place = entry.data if isinstance(entry, ObjectEntry) else tuple(entry.chunks)
        if place in known:
            return known[place]
        if isinstance(entry, ObjectEntry):
            known[place] = sha256(files.read(*entry.data)).hexdigest()
        else:
            from ckpt_tools.proof.fingerprint import digest_of  # most plans compare nothing

            (located,) = formats.located_in(source, [entry], files)
            known[place] = digest_of(located, files)
        return known[place]

    return digest


def without_unopened(index: Index, copied: str | None) -> tuple[Index, list[str]]:
    """The index without objects that the target cannot take, and a note that names them.

    Objects of the codec ``copied`` it takes byte for byte. Everything else is written from its
    value, of which what is closed may hold tensors or ask for classes that are not known. Raises
    UnsupportedError where nothing else is there.
    """
    lost = [
        entry
        for entry in index.objects
        if not entry.is_writable and (entry.codec is None or entry.codec != copied)
    ]
    if not lost:
        return index, []
    kept = tuple(entry for entry in index.objects if entry not in lost)
    if not kept and not index.tensors:
        raise UnsupportedError(
            f"{index.root}: nothing of it can be written. {note_on_unopened(lost)}"
        )
    return replace(index, objects=kept), [note_on_unopened(lost)]


def note_on_unopened(lost: Sequence[ObjectEntry]) -> str:
    """A note that names objects which are left out, and what each is."""
    named = []
    for entry in lost:
        closed = (one.qualname for one in closed_in(entry.value) if not one.is_allowed)
        named.append(f"{entry.fqn} ({entry.type_name or next(closed, 'not opened')})")
    return f"Left out {counted(len(lost), 'object')} that cannot be written: {some(named)}."


def left_out_strings(
    names: Iterable[str], why: str = "this format has no place for it"
) -> list[str]:
    """A note on what headers say beside their tensors, which is left out; none for nothing."""
    shown = some([name for name in names if name not in OWN_STRINGS])
    return [f"Left out what the header's __metadata__ says ({shown}): {why}."] if shown else []
