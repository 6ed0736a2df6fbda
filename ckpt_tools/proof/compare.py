"""Two fingerprints side by side: what is not the same, by section and by name inside it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from ckpt_tools import formats
from ckpt_tools.core.index import SECTIONS, CheckpointIndex, Section
from ckpt_tools.proof.canonical_names import Inside
from ckpt_tools.proof.containers import compare_objects
from ckpt_tools.proof.fingerprint import Fingerprint, TensorDigest
from ckpt_tools.storage.reader import Files

_SHOWN = 60  # characters of an object's value

Kind = Literal["missing", "extra", "dtype", "shape", "values", "object"]


class Difference(NamedTuple):
    """What is not the same about a tensor; a ``missing`` one is only in the reference.

    Of kind ``object`` it is about an object, whose value is another one or on one side only.
    """

    section: Section
    name: str
    kind: Kind
    found: str
    expected: str


@dataclass(frozen=True, slots=True)
class Comparison:
    """Which sections were compared, and what differs; ``extra`` sections the reference lacks."""

    compared: tuple[Section, ...]
    extra: tuple[Section, ...]
    differences: tuple[Difference, ...]

    @property
    def same(self) -> bool:
        """Whether something was compared and all of it is the same."""
        return bool(self.compared) and not self.differences


def compare(actual: Fingerprint, reference: Fingerprint) -> Comparison:
    """Compare a fingerprint with what it should be.

    A section that only ``actual`` has is listed and is no difference: a file of the model's weights
    can be the reference of a whole checkpoint.
    """
    compared = tuple(section for section in SECTIONS if section in reference.sections)
    extra = tuple(section for section in SECTIONS if section in actual.sections)
    extra = tuple(section for section in extra if section not in compared)
    differences = [
        difference
        for section in compared
        if actual.sections.get(section) != reference.sections[section]
        for difference in _in_section(section, actual, reference)
    ]
    return Comparison(compared, extra, tuple(differences))


def with_objects(
    compared: Comparison, index: CheckpointIndex, reference: CheckpointIndex, files: Files
) -> Comparison:
    """The comparison with what differs among the objects of two checkpoints with equal names.

    Formats and nestings keep objects differently: only checkpoints of one format, whose tensors
    have the same raw names, are compared. Objects that are not opened count when their names
    differ; their bytes may differ for equal values.
    """
    names = [[entry.fqn for entry in one.tensors] for one in (index, reference)]
    if index.format != reference.format or names[0] != names[1]:
        return compared
    here, there = (
        {
            entry.fqn: entry
            for entry in formats.open_objects(one, files, largest=formats.SMALL_OBJECT).objects
        }
        for one in (index, reference)
    )
    differences = list(compared.differences)
    for fqn in sorted(here.keys() | there.keys()):
        one, other = here.get(fqn), there.get(fqn)
        if one is None or other is None:
            section = (one or there[fqn]).section
            facts = ("there", "") if other is None else ("", "there")
            differences.append(Difference(section, fqn, "object", *facts))
        elif compare_objects(one, other, files)[0] is False:
            facts = (repr(one.value)[:_SHOWN], repr(other.value)[:_SHOWN])
            differences.append(Difference(one.section, fqn, "object", *facts))
    return replace(compared, differences=tuple(differences))


def _in_section(
    section: Section, actual: Fingerprint, reference: Fingerprint
) -> Iterator[Difference]:
    here, there = _by_name(actual, section), _by_name(reference, section)
    for place in sorted(here.keys() | there.keys()):
        one, other = here.get(place), there.get(place)
        if one is None and other is not None:
            yield Difference(section, place.name, "missing", "", _type_and_shape(other))
        elif other is None and one is not None:
            yield Difference(section, place.name, "extra", _type_and_shape(one), "")
        elif one is not None and other is not None:
            kind = _kind(one, other)
            if kind == "values":
                yield Difference(section, place.name, kind, one.sha256, other.sha256)
            elif kind is not None:
                facts = _type_and_shape(one), _type_and_shape(other)
                yield Difference(section, place.name, kind, *facts)


def _by_name(fingerprint: Fingerprint, section: Section) -> dict[Inside, TensorDigest]:
    return {
        tensor.inside: tensor for tensor in fingerprint.tensors if tensor.inside.section == section
    }


def _kind(one: TensorDigest, other: TensorDigest) -> Kind | None:
    if one.dtype != other.dtype:
        return "dtype"
    if one.shape != other.shape:
        return "shape"
    return None if one.sha256 == other.sha256 else "values"


def _type_and_shape(tensor: TensorDigest) -> str:
    return f"{tensor.dtype} {list(tensor.shape)}"
