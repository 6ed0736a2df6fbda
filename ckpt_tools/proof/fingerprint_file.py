"""Fingerprints as JSON: what `fingerprint --json` prints and `verify --against` reads back."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence

from ckpt_tools.core import names
from ckpt_tools.core.index import SECTIONS, Path, Section
from ckpt_tools.errors import UnreadableError, unreadable
from ckpt_tools.proof.fingerprint import Fingerprint, TensorDigest, section_digest
from ckpt_tools.proof.inside import Inside, clean_name
from ckpt_tools.storage.paths import open_file

SCHEMA = "ckpt-tools/fingerprint/1"
_SHA256 = re.compile(r"[0-9a-f]{64}")
_LARGEST = 1 << 30

JsonTensor = dict[str, str | list[int]]
JsonFingerprint = dict[str, str | dict[str, str] | dict[str, JsonTensor] | None]


def to_json(found: Fingerprint) -> JsonFingerprint:
    """A fingerprint as one JSON object of schema ``ckpt-tools/fingerprint/1``."""
    tensors: dict[str, JsonTensor] = {
        tensor.fqn: {
            "sha256": tensor.sha256,
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "section": tensor.inside.section,
        }
        for tensor in found.tensors
    }
    sections = {str(section): digest for section, digest in found.sections.items()}
    return {"schema": SCHEMA, "digest": found.digest, "sections": sections, "tensors": tensors}


def is_fingerprint(path: str) -> bool:
    """Whether this file looks like a fingerprint rather than like a checkpoint."""
    if not os.path.isfile(path):
        return False
    with open(open_file(path), "rb") as file:
        head = file.read(64)
    return head.lstrip()[:1] == b"{"


def load(path: str) -> Fingerprint:
    """Read back what `to_json` gave.

    Names inside sections are not in the file; they are worked out from the raw names, and proven
    right by the digests of the sections. Raises UnreadableError for a file that is no fingerprint,
    or one whose digests do not fit its tensors.
    """
    try:
        if os.path.getsize(path) > _LARGEST:
            raise UnreadableError(f"{path} is too large to be a fingerprint.")
        with open(open_file(path), encoding="utf-8") as file:
            value: object = json.load(file)
    except (ValueError, RecursionError) as error:
        raise UnreadableError(f"{path} is no JSON: {error}.") from error
    except OSError as error:
        raise unreadable(path, error) from error
    if not isinstance(value, dict) or value.get("schema") != SCHEMA:
        raise UnreadableError(
            f"{path} is no fingerprint: it has no schema {SCHEMA}.",
            hint=f"`ckpt-tools fingerprint CKPT --write {path}` writes one.",
        )
    sections = _sections(value.get("sections"), path)
    tensors = _tensors(value.get("tensors"), path)
    return Fingerprint(_named(tensors, sections, path), sections)


def _sections(value: object, path: str) -> dict[Section, str]:
    if not isinstance(value, dict):
        raise UnreadableError(f"{path}: its sections cannot be read.")
    found: dict[Section, str] = {}
    for section in SECTIONS:
        digest = value.get(section)
        if isinstance(digest, str) and _SHA256.fullmatch(digest):
            found[section] = digest
    if len(found) != len(value):
        raise UnreadableError(f"{path}: its sections cannot be read.")
    return found


def _tensors(value: object, path: str) -> list[TensorDigest]:
    if not isinstance(value, dict):
        raise UnreadableError(f"{path}: its tensors cannot be read.")
    return [_tensor(fqn, fields, path) for fqn, fields in sorted(value.items())]


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


def _named(
    tensors: Sequence[TensorDigest], sections: Mapping[Section, str], path: str
) -> tuple[TensorDigest, ...]:
    """The tensors with their names inside the sections."""
    found: list[TensorDigest] = []
    for section in SECTIONS:
        inside = [tensor for tensor in tensors if tensor.inside.section == section]
        if not inside and section not in sections:
            continue
        found += _named_section(inside, sections.get(section), path)
    return tuple(sorted(found, key=lambda tensor: tensor.fqn))


def _named_section(
    tensors: Sequence[TensorDigest], digest: str | None, path: str
) -> list[TensorDigest]:
    """The names below one container for all, or each below its own, that give the digest."""
    own = [_depth(tensor) for tensor in tensors]
    same = ([depth] * len(tensors) for depth in sorted({0, *own}))
    for depths in (own, *same):
        named = [_below(tensor, depth) for tensor, depth in zip(tensors, depths, strict=True)]
        if section_digest(named) == digest:
            return named
    section = tensors[0].inside.section if tensors else "a section"
    raise UnreadableError(
        f"{path}: the digest of {section} does not fit its tensors.",
        hint="The file was edited or damaged; write it again.",
    )


def _depth(tensor: TensorDigest) -> int:
    """How many components the container has, by the words that frameworks use."""
    parts: Path = tuple(tensor.fqn.split("."))
    return max(map(len, names.container_of([parts])), default=0)


def _below(tensor: TensorDigest, depth: int) -> TensorDigest:
    section = tensor.inside.section
    name = clean_name(".".join(tensor.fqn.split(".")[depth:]), section)
    return tensor._replace(inside=Inside(section, name))
