"""A digest of what a checkpoint holds, independent of format, nesting and sharding, and its file.

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

Objects (numbers, pickled state) are left out: formats keep them differently.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import NamedTuple

from ckpt_tools.copying.origin import reads_one_save
from ckpt_tools.copying.parallel import Tally, ignore_bytes, in_threads, usable_cores
from ckpt_tools.copying.read import fetching, stream_box
from ckpt_tools.core import names
from ckpt_tools.core.geometry import Box
from ckpt_tools.core.index import SECTIONS, CheckpointIndex, Path, Section, TensorEntry
from ckpt_tools.core.records import Json, as_json
from ckpt_tools.core.text import Shown
from ckpt_tools.errors import UnreadableError, unreadable
from ckpt_tools.proof.canonical_names import Inside, canonical_names, clean_name
from ckpt_tools.proof.pairs import located_batches
from ckpt_tools.storage.paths import is_address, open_file
from ckpt_tools.storage.reader import Files

SCHEMA = "ckpt-tools/fingerprint/1"
# SHA-256 of a piece takes longer than a turn of the interpreter: more of them than of other work.
_MOST_THREADS = 16


class TensorDigest(NamedTuple):
    """One tensor's digest, under its raw name and its name inside its section."""

    fqn: str
    inside: Inside
    dtype: str
    shape: tuple[int, ...]
    sha256: str


@dataclass(frozen=True, slots=True, repr=False)
class Fingerprint(Shown):
    """The digests of a checkpoint's tensors, sorted by raw name, and of its sections."""

    tensors: tuple[TensorDigest, ...]
    sections: Mapping[Section, str]

    @property
    def digest(self) -> str | None:
        """The digest of the model, None when there is none."""
        return self.sections.get("model")

    def __str__(self) -> str:
        """The digest of each section, as `fingerprint` prints them."""
        return "\n".join(f"{section:<6} {digest}" for section, digest in self.sections.items())

    def to_dict(self) -> dict[str, Json]:
        """The object of schema ckpt-tools/fingerprint/1: `fingerprint --json` prints it, and
        `load` reads it back.
        """
        return {
            "schema": SCHEMA,
            "digest": self.digest,
            "sections": as_json(self.sections),
            "tensors": {
                tensor.fqn: {
                    "sha256": tensor.sha256,
                    "dtype": tensor.dtype,
                    "shape": [*tensor.shape],
                    "section": tensor.inside.section,
                }
                for tensor in self.tensors
            },
        }

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


@reads_one_save
def fingerprint(
    index: CheckpointIndex,
    files: Files,
    *,
    threads: int | None = None,
    on_bytes: Callable[[int], None] = ignore_bytes,
) -> Fingerprint:
    """The fingerprint of a whole checkpoint, or of the tensors selected in it.

    Reads every tensor once, several at a time, a few MiB in memory for each of ``threads``.
    ``on_bytes`` gets the number of bytes done since its last call.

    Raises what keeps the checkpoint from being whole, and UnsupportedError when two names are one.
    """
    inside: dict[str, Inside] = {}
    tally = Tally(on_bytes)
    if threads is None and not is_address(index.root):
        threads = min(_MOST_THREADS, usable_cores())

    def digest(entry: TensorEntry) -> TensorDigest:
        value = digest_of(entry, files, on_bytes=tally.add)
        return TensorDigest(entry.fqn, inside[entry.fqn], entry.dtype.name, entry.shape, value)

    digests: list[TensorDigest] = []
    for located in located_batches(index, files):
        inside = inside or canonical_names(index, index.tensors)
        digests += in_threads(
            digest,
            located.tensors,
            files.sizes,
            threads=threads,
            nbytes=lambda e: e.nbytes,
            ahead=fetching(files, index.root),
        )
    return of_tensors(digests)


def digest_of(
    entry: TensorEntry, files: Files, *, on_bytes: Callable[[int], None] = ignore_bytes
) -> str:
    """The SHA-256 of one tensor's elements, as hexadecimal digits; its chunks must be located."""
    state = sha256()
    for piece in stream_box(entry, Box.whole(entry.shape), files=files):
        state.update(piece)
        on_bytes(len(piece))
    return state.hexdigest()


def of_tensors(digests: Iterable[TensorDigest]) -> Fingerprint:
    """The fingerprint that these tensors have together."""
    tensors = tuple(sorted(digests, key=lambda tensor: tensor.fqn))
    sections: dict[Section, str] = {}
    for section in SECTIONS:
        inside = [tensor for tensor in tensors if tensor.inside.section == section]
        if inside:
            sections[section] = section_digest(inside)
    return Fingerprint(tensors, sections)


def section_digest(tensors: Iterable[TensorDigest]) -> str:
    """The SHA-256 over the lines of a section's tensors, as hexadecimal digits."""
    lines = (
        f"{one.inside.name}\0{one.dtype}\0{','.join(map(str, one.shape))}\0{one.sha256}\n"
        for one in tensors
    )
    sorted_lines = sorted(line.encode("utf-8", "surrogatepass") for line in lines)
    return sha256(b"".join(sorted_lines)).hexdigest()


# -------------------------------------------------------------------------------------------------
# Reading a fingerprint's file, which is what `to_dict` gave.
# -------------------------------------------------------------------------------------------------


_SHA256 = re.compile(r"[0-9a-f]{64}")
_LARGEST = 1 << 30


def is_fingerprint(path: str) -> bool:
    """Whether this file looks like a fingerprint rather than like a checkpoint."""
    if not os.path.isfile(path):
        return False
    with open(open_file(path), "rb") as file:
        head = file.read(64)
    return head.lstrip()[:1] == b"{"


def load(path: str) -> Fingerprint:
    """Read back what `to_dict` gave.

    Names inside sections are not in the file; they are worked out from the raw names, and proven
    right by the digests of the sections. Raises UnreadableError for what is not a fingerprint, or
    one whose digests do not fit its tensors.
    """
    try:
        if os.path.getsize(path) > _LARGEST:
            raise UnreadableError(f"{path} is too large to be a fingerprint.")
        with open(open_file(path), encoding="utf-8") as file:
            value: object = json.load(file)
    except (ValueError, RecursionError) as error:
        raise UnreadableError(f"{path} is not JSON: {error}.") from error
    except OSError as error:
        raise unreadable(path, error) from error
    if not isinstance(value, dict) or value.get("schema") != SCHEMA:
        raise UnreadableError(
            f"{path} is not a fingerprint: it has no schema {SCHEMA}.",
            hint=f"`ckpt-tools fingerprint CKPT --write {path}` writes one.",
        )
    said = value.get("sections")
    digests = {section: said.get(section) for section in SECTIONS} if isinstance(said, dict) else {}
    sections = {s: d for s, d in digests.items() if isinstance(d, str) and _SHA256.fullmatch(d)}
    if not isinstance(said, dict) or len(sections) != len(said):
        raise UnreadableError(f"{path}: its sections cannot be read.")
    kept = value.get("tensors")
    if not isinstance(kept, dict):
        raise UnreadableError(f"{path}: its tensors cannot be read.")
    tensors = [_tensor(fqn, facts, path) for fqn, facts in sorted(kept.items())]
    named: list[TensorDigest] = []
    for section in SECTIONS:
        inside = [tensor for tensor in tensors if tensor.inside.section == section]
        if inside or section in sections:
            named += _named(inside, sections.get(section), path)
    return Fingerprint(tuple(sorted(named, key=lambda tensor: tensor.fqn)), sections)


def _tensor(fqn: str, fields: object, path: str) -> TensorDigest:
    facts: Mapping[str, object] = fields if isinstance(fields, dict) else {}
    digest, dtype, shape = facts.get("sha256"), facts.get("dtype"), facts.get("shape")
    section = next((name for name in SECTIONS if name == facts.get("section")), None)
    if (
        section is None
        or not (isinstance(digest, str) and _SHA256.fullmatch(digest))
        or not isinstance(dtype, str)
        or not isinstance(shape, list)
        or not all(type(size) is int for size in shape)
    ):
        raise UnreadableError(f"{path}: its tensor {fqn!r} cannot be read.")
    return TensorDigest(fqn, Inside(section, fqn), dtype, tuple(shape), digest)


def _named(tensors: Sequence[TensorDigest], digest: str | None, path: str) -> list[TensorDigest]:
    """The tensors of a section with their names inside it: those that give its digest.

    They are below the container that the words of frameworks say, or all below one as deep.
    """
    parts: list[Path] = [tuple(tensor.fqn.split(".")) for tensor in tensors]
    own = [max(map(len, names.container_of([one])), default=0) for one in parts]
    same = ([depth] * len(tensors) for depth in range(max(own, default=0) + 1))
    for depths in (own, *same):
        named = []
        for tensor, path_of, depth in zip(tensors, parts, depths, strict=True):
            section = tensor.inside.section
            name = clean_name(names.join(path_of[depth:]), section)
            named.append(tensor._replace(inside=Inside(section, name)))
        if section_digest(named) == digest:
            return named
    whose = tensors[0].inside.section if tensors else "a section"
    raise UnreadableError(
        f"{path}: the digest of {whose} does not fit its tensors.",
        hint="The file was edited or damaged; write it again.",
    )
