"""The head of one safetensors file: eight bytes of length, JSON, and data ranges without holes.

Everything in the header is checked here. Other files are not known, and no values are read. The
rules are those of the format's own README: the data ranges tile the rest of the file,
``__metadata__`` maps strings to strings, no name is there twice.

Two of these strings are read. torch's says where each box begins. Ours says which containers there
are and what section each is of, since a flat file of tensors has none; a name is in the longest of
them that it begins with, and where that is wrong it is listed. For example, of a model, its
optimizer and one random state::

    {"containers":[[["model"],"model"],[["optim"],"optim"],[[],"other"]],"names":{}}
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

from ckpt_tools.core import names
from ckpt_tools.core.dtypes import BY_SAFETENSORS, DType
from ckpt_tools.core.index import SECTIONS, ByteRange, Path, Section
from ckpt_tools.core.text import are, is_name, some
from ckpt_tools.errors import UnreadableError, UnsupportedError
from ckpt_tools.formats.foreign import Kind, not_a, sniff
from ckpt_tools.storage.reader import Files

PREFIX = 8  # bytes of the header's length
MAX_HEADER = 100_000_000  # bytes; the format's own limit
SHARDING_INFO = "DCP_SHARDING_INFO"
SECTIONS_KEY = "ckpt_tools_sections"
_MAX_NDIM = 1024  # far more than any tensor has; keeps a hostile shape from costing minutes

_ZIP_HINT = (
    "Give it the suffix .pt; or, if torch's HuggingFaceStorageWriter wrote it, save again with "
    "tensors only: plain values in the state dict go in front of the header and break the file."
)
_HINTS: dict[Kind, str] = {"zip": _ZIP_HINT, "pickle": "Give it the suffix .pt."}


class Stored(NamedTuple):
    """What a header says of one tensor: its type, its shape, and where its bytes are."""

    dtype: DType
    shape: tuple[int, ...]
    data: ByteRange


class Home(NamedTuple):
    """The container that a tensor stands in, and the section that this is of."""

    container: Path
    section: Section


USUAL_HOME = Home((), "model")


@dataclass(frozen=True, slots=True)
class Header:
    """Everything before the data: free strings, the tensors by name, and where the data ends.

    ``end`` is a byte offset in the file; a sound file is exactly that long.
    """

    path: str
    metadata: dict[str, str]
    tensors: dict[str, Stored]
    end: int


@dataclass(frozen=True, slots=True)
class PlacedHeader(Header):
    """That of a part of a checkpoint, with what its strings say: ``offsets`` are where each
    tensor's box begins, in elements, None when the file holds whole tensors; ``homes`` are the
    containers and sections that it states, if any.
    """

    offsets: Mapping[str, tuple[int, ...]] | None
    homes: Mapping[str, Home] | None


def read_header(files: Files, path: str, *, offset: int = 0, length: int | None = None) -> Header:
    """The header of the safetensors data in bytes ``offset`` to ``offset + length`` of a file.

    Without ``length`` the data reaches to the end of the file. Byte ranges count from the start of
    the file.

    Raises UnreadableError when the header is not sound or the data is shorter or longer than it
    says, UnsupportedError when it names an element type that is not known here.
    """
    if length is None:
        length = files.size(path) - offset
    header = parse_header(files, path, offset=offset, length=length)
    problem = length_problem(header, end=offset + length)
    if problem is not None:
        raise problem
    return header


def parse_header(files: Files, path: str, *, offset: int, length: int) -> Header:
    """The header alone, whether or not all of its data is there; see `length_problem`.

    Raises UnreadableError when the header is not sound, UnsupportedError as `read_header`.
    """
    text = _header_text(files, path, offset=offset, length=length)
    try:
        parsed: object = json.loads(text.decode(), object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise UnreadableError(f"{path}: its header is not valid JSON: {error}.") from error
    if not isinstance(parsed, dict):
        raise UnreadableError(f"{path}: its header is not a JSON object.")
    metadata: object = parsed.pop("__metadata__", {})
    if not isinstance(metadata, dict):
        raise UnreadableError(f"{path}: its __metadata__ is not a JSON object.")
    for name, value in metadata.items():
        if not isinstance(value, str):
            found = f"{value!r:.40}"
            raise UnreadableError(f"{path}: __metadata__ {name!r} is not a string but {found}.")
    start = offset + PREFIX + len(text)
    tensors = _tensors(parsed, path=path, start=start)
    return Header(path, metadata, tensors, _check_tiling(tensors, path=path, start=start))


def placed(header: Header) -> PlacedHeader:
    """The header with what its strings say of boxes and sections, as both are written.

    Raises UnreadableError when that is unsound.
    """
    path, metadata, tensors = header.path, header.metadata, header.tensors
    offsets, homes = offsets_in(header), homes_in(metadata, tensors, path)
    return PlacedHeader(path, metadata, tensors, header.end, offsets, homes)


def length_problem(header: Header, *, end: int) -> UnreadableError | None:
    """What is wrong when the data really ends at byte ``end`` of the file, None if nothing is."""
    path = header.path
    if end == header.end:
        return None
    if end > header.end:
        return UnreadableError(
            f"{path} is {end - header.end:,} bytes longer than its header says: "
            f"{end:,} bytes, expected {header.end:,}.",
            hint="Something wrote past its end, or it is not the file that was saved.",
        )
    damaged = [
        fqn
        for fqn, stored in header.tensors.items()
        if stored.data.offset + stored.data.length > end
    ]
    return UnreadableError(
        f"{path} is truncated: {end:,} bytes, its header needs {header.end:,}; "
        f"{len(damaged):,} of {len(header.tensors):,} tensors {are(len(damaged))} damaged.",
        hint="It may still be copying, or the disk was full; compare its size with the original.",
        about=damaged,
    )


def _header_text(files: Files, path: str, *, offset: int, length: int) -> bytes:
    """The bytes of the JSON, after the checks that need no parsing."""
    start = files.read(path, offset, min(length, 64))
    kind = sniff(start)
    if kind not in ("safetensors", "unknown"):
        raise not_a("safetensors file", path, kind, hint=_HINTS.get(kind))
    if length < PREFIX + 2:
        raise UnreadableError(f"{path} is truncated: {length:,} bytes hold no safetensors header.")
    size = int.from_bytes(start[:PREFIX], "little")
    if not 2 <= size <= MAX_HEADER:
        raise UnreadableError(
            f"{path} is not a safetensors file: its first 8 bytes give a header of {size:,} bytes, "
            f"2 to {MAX_HEADER:,} expected."
        )
    if start[PREFIX : PREFIX + 1] != b"{":
        raise UnreadableError(
            f"{path} is not a safetensors file: its header does not begin with '{{'."
        )
    if PREFIX + size > length:
        raise UnreadableError(
            f"{path} is truncated inside its header: {length:,} bytes, "
            f"the header alone needs {PREFIX + size:,}.",
            hint="It may still be copying; compare its size with the original.",
        )
    return files.read(path, offset + PREFIX, size)


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """A JSON object, whose names must differ: which of two would win is anyone's guess."""
    unique = dict(pairs)
    if len(unique) == len(pairs):
        return unique
    counts = Counter(name for name, _ in pairs)
    raise ValueError(f"the name {counts.most_common(1)[0][0]!r} is there twice")


def _tensors(raw: dict[str, object], *, path: str, start: int) -> dict[str, Stored]:
    """All tensors by name. Unknown types are reported all at once."""
    tensors: dict[str, Stored] = {}
    unknown: dict[str, list[str]] = {}
    for name, entry in raw.items():
        if not is_name(name) or not isinstance(entry, dict):
            raise UnreadableError(f"{path}: the header entry {name!r:.80} describes no tensor.")
        dtype = entry.get("dtype")
        if not isinstance(dtype, str):
            raise UnreadableError(f"{path}: {name}: its dtype is not a string but {dtype!r:.40}.")
        known = BY_SAFETENSORS.get(dtype)
        if known is None:
            unknown.setdefault(dtype, []).append(name)
            continue
        tensors[name] = _stored(name, entry, dtype=known, path=path, start=start)
    if unknown:
        shown = "; ".join(f"{dtype!r}: {some(names, 1)}" for dtype, names in unknown.items())
        raise UnsupportedError(
            f"{path} has element types that are not known here: {shown}.",
            hint=f"Known are {', '.join(BY_SAFETENSORS)}.",
        )
    return tensors


def _stored(name: str, entry: dict[str, object], *, dtype: DType, path: str, start: int) -> Stored:
    """One tensor, with its shape and its byte range held against each other.

    The shape is in our elements, of which the header's may be parts: F4 of [3, 16] is (3, 8).
    """
    shape = natural_numbers(entry.get("shape"))
    if shape is not None and len(shape) > _MAX_NDIM:
        raise UnreadableError(f"{path}: {name}: a shape of {len(shape):,} dimensions.")
    span = natural_numbers(entry.get("data_offsets"))
    if shape is None or span is None or len(span) != 2 or span[0] > span[1]:
        raise UnreadableError(
            f"{path}: {name}: its shape {entry.get('shape')!r:.60} or its data_offsets "
            f"{entry.get('data_offsets')!r:.60} are not valid."
        )
    if dtype.packed > 1:
        if not shape or shape[-1] % dtype.packed:
            raise UnsupportedError(
                f"{path}: {name}: shape {list(shape)} of {dtype.safetensors}: the last dimension "
                f"must be a multiple of {dtype.packed}, so that each row is whole bytes.",
                hint="Save it with padded rows, or as uint8; torch cannot load it as it is either.",
            )
        shape = (*shape[:-1], shape[-1] // dtype.packed)
    length, needed = span[1] - span[0], prod(shape) * dtype.itemsize
    if length != needed:
        raise UnreadableError(
            f"{path}: {name}: shape {list(shape)} of {dtype.name} takes {needed:,} bytes, "
            f"its range has {length:,}."
        )
    return Stored(dtype, shape, ByteRange(path, start + span[0], length))


def natural_numbers(raw: object) -> tuple[int, ...] | None:
    """The integers of a JSON list, or None when it is anything else or has negative ones."""
    if not isinstance(raw, list) or any(type(value) is not int or value < 0 for value in raw):
        return None
    return tuple(raw)


def _check_tiling(tensors: dict[str, Stored], *, path: str, start: int) -> int:
    """Check that the ranges follow one another without hole or overlap; where the last one ends."""
    end = start
    for name, stored in sorted(
        tensors.items(), key=lambda item: (item[1].data.offset, item[1].data.length)
    ):
        if stored.data.offset != end:
            fault = "a hole before it" if stored.data.offset > end else "an overlap"
            raise UnreadableError(
                f"{path}: {name} begins at byte {stored.data.offset - start:,} of the data, "
                f"{end - start:,} expected: {fault}."
            )
        end += stored.data.length
    return end


def offsets_in(header: Header) -> dict[str, tuple[int, ...]] | None:
    """Where the box of each tensor begins, None where torch has not said it.

    Raises UnreadableError when that is unsound.
    """
    path, text = header.path, header.metadata.get(SHARDING_INFO)
    if text is None:
        return None
    try:
        info: object = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UnreadableError(f"{path}: {SHARDING_INFO} is not valid JSON: {error}.") from error
    if not isinstance(info, dict):
        raise UnreadableError(f"{path}: {SHARDING_INFO} is not a JSON object.")
    absent = sorted(name for name in info if name not in header.tensors)
    if absent:
        raise UnreadableError(
            f"{path}: {SHARDING_INFO} speaks of {some(absent, 3)}, which the file does not hold."
        )
    offsets = {}
    for fqn, stored in header.tensors.items():
        raw, ndim = info.get(fqn), len(stored.shape)
        found = natural_numbers(raw.get("saved_offsets")) if isinstance(raw, dict) else None
        if found is None or len(found) != ndim:
            raise UnreadableError(
                f"{path}: {fqn}: {SHARDING_INFO} should give {ndim} offsets, found {raw!r:.60}."
            )
        offsets[fqn] = found
    return offsets


def homes_in(metadata: Mapping[str, str], fqns: Iterable[str], path: str) -> dict[str, Home] | None:
    """The homes that ``__metadata__`` of a file gives its tensors, None when it says nothing.

    Raises UnreadableError when that cannot be read.
    """
    text = metadata.get(SECTIONS_KEY)
    if text is None:
        return None
    try:
        raw = json.loads(text)
        containers = [_home(one) for one in raw["containers"]]
        listed = {str(fqn): _home(one) for fqn, one in raw["names"].items()}
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise UnreadableError(f"{path}: its {SECTIONS_KEY} cannot be read: {error}.") from error
    usual = homes_by_prefix(containers, fqns)
    return {fqn: listed.get(fqn, home) for fqn, home in usual.items()}


def homes_by_prefix(containers: Sequence[Home], fqns: Iterable[str]) -> dict[str, Home]:
    """Each name with the longest of the containers that it begins with."""
    by_prefix = {names.join((*home.container, "")): home for home in containers}
    by_prefix[""] = next((home for home in containers if not home.container), USUAL_HOME)
    return {fqn: by_prefix[max(filter(fqn.startswith, by_prefix), key=len)] for fqn in fqns}


def _home(raw: object) -> Home:
    if not isinstance(raw, list) or len(raw) != 2 or not isinstance(raw[0], list):
        raise TypeError(f"{raw!r:.60} is not a container with its section")
    section = next((one for one in SECTIONS if one == raw[1]), None)
    if section is None or not all(type(part) in (str, int) for part in raw[0]):
        raise TypeError(f"{raw!r:.60} is not a container with its section")
    return Home(tuple(raw[0]), section)
