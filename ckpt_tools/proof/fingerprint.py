"""A digest of what a checkpoint holds, whatever its format, nesting and sharding.

Byte for byte:

- A tensor's digest is the SHA-256 of its elements, little-endian, packed row-major, and of nothing
  else.
- A section's digest is the SHA-256 of one line for each of its tensors, sorted as bytes::

      name NUL dtype NUL shape NUL sha256 LF

  ``name`` is the name inside the section in UTF-8: without the container that the section stands in
  (``app.model``), and without wrapper components (``_orig_mod``). ``dtype`` is torch's name
  (``bfloat16``), ``shape`` the sizes joined by commas (empty for a scalar), ``sha256`` the tensor's
  digest as 64 hexadecimal digits.
- A checkpoint's digest is that of its section ``model``.

Objects (numbers, pickled state) take no part: formats keep them differently.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from hashlib import sha256
from typing import NamedTuple

from ckpt_tools.core import names
from ckpt_tools.core.geometry import Box
from ckpt_tools.core.index import (
    SECTIONS,
    ByteRange,
    CheckpointIndex,
    Section,
    TensorEntry,
)
from ckpt_tools.errors import CheckpointError
from ckpt_tools.proof.inside import Inside, names_inside
from ckpt_tools.proof.threads import Tally, ignore_bytes, in_threads
from ckpt_tools.storage.paths import is_address
from ckpt_tools.storage.reader import Files


class TensorDigest(NamedTuple):
    """One tensor's digest, under its raw name and its name inside its section."""

    fqn: str
    inside: Inside
    dtype: str
    shape: tuple[int, ...]
    sha256: str


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """The digests of a checkpoint's tensors, sorted by raw name, and of its sections."""

    tensors: tuple[TensorDigest, ...]
    sections: Mapping[Section, str]

    @property
    def digest(self) -> str | None:
        """The digest of the model, None when there is none."""
        return self.sections.get("model")

    def select(
        self, include: Sequence[str], exclude: Sequence[str], only: Section | None
    ) -> Fingerprint:
        """The fingerprint of those tensors that name patterns and a section choose."""
        chosen = names.selector(include, exclude)
        return of_tensors(
            tensor
            for tensor in self.tensors
            if chosen(tensor.fqn) and only in (None, tensor.inside.section)
        )


def fingerprint(
    index: CheckpointIndex,
    files: Files,
    *,
    threads: int | None = None,
    on_bytes: Callable[[int], None] = ignore_bytes,
) -> Fingerprint:
    """The fingerprint of a whole checkpoint, or of the tensors selected in it.

    Reads every tensor once, several at a time, a few MiB in memory for each of ``threads``.
    ``on_bytes`` is told how many bytes were done since it was last called.

    Raises what keeps the checkpoint from being whole, and UnsupportedError when two names are one.
    """
    from ckpt_tools import formats  # the readers: whoever loads a fingerprint does not need them

    located = formats.locate(index, files)
    located.require_chosen()
    with suppress(CheckpointError):  # tensors of tuples; what else objects are is not asked here
        located = formats.open_objects(located, files)
    inside = names_inside(located)
    tally = Tally(on_bytes)

    def digest(entry: TensorEntry) -> TensorDigest:
        told = digest_of(entry, files, on_bytes=tally.add)
        return TensorDigest(entry.fqn, inside[entry.fqn], entry.dtype.name, entry.shape, told)

    far = is_address(index.root)
    found = in_threads(digest, located.tensors, threads=threads, nbytes=_nbytes, far=far)
    return of_tensors(found)


def digest_of(
    entry: TensorEntry,
    files: Files,
    *,
    on_bytes: Callable[[int], None] = ignore_bytes,
    on_run: Callable[[ByteRange, int], None] | None = None,
) -> str:
    """The SHA-256 of one tensor's elements, as hexadecimal digits; its chunks must be located.

    ``on_run`` is that of `stream_box`.
    """
    from ckpt_tools.copying.read import (
        stream_box,  # late: looking commands go without
    )

    state = sha256()
    for piece in stream_box(entry, Box.whole(entry.shape), files=files, on_run=on_run):
        state.update(piece)
        on_bytes(len(piece))
    return state.hexdigest()


def of_tensors(found: Iterable[TensorDigest]) -> Fingerprint:
    """The fingerprint that these tensors have together."""
    tensors = tuple(sorted(found, key=_fqn))
    sections: dict[Section, str] = {}
    for section in SECTIONS:
        inside = [tensor for tensor in tensors if tensor.inside.section == section]
        if inside:
            sections[section] = section_digest(inside)
    return Fingerprint(tensors, sections)


def section_digest(tensors: Iterable[TensorDigest]) -> str:
    """The SHA-256 over the lines of a section's tensors, as hexadecimal digits."""
    return sha256(b"".join(sorted(map(_line, tensors)))).hexdigest()


def _line(tensor: TensorDigest) -> bytes:
    shape = ",".join(map(str, tensor.shape))
    text = f"{tensor.inside.name}\0{tensor.dtype}\0{shape}\0{tensor.sha256}\n"
    return text.encode("utf-8", "surrogatepass")


def _nbytes(entry: TensorEntry) -> int:
    return entry.nbytes


def _fqn(tensor: TensorDigest) -> str:
    return tensor.fqn
