"""More than a hundred random damages, and what each kind is caught by; `damages` makes them."""

from functools import cache

import pytest
from damages import AS_IT_IS, CATCHERS, KINDS, REFUSED, Damaged, Kind, do_kind

from ckpt_tools.core.sizes import Sizes

QUICK, VERIFY, FINGERPRINT, DIFF, NOTHING = CATCHERS
BY_NAME = {kind.name: kind for kind in KINDS}

CHECKSUMMED = [
    "bit flipped in a tensor (torch.save, DCP)",
    "bit flipped in a pickle (torch.save, DCP)",
    "tensor overwritten with zeros (torch.save, DCP)",
    "file cut short",
    "one rank's file again under a new name",
    "bit flipped in an index.json",
]
WITHOUT_CHECKSUMS = [
    "bit flipped in a tensor (safetensors, old torch.save)",
    "tensor overwritten with zeros (safetensors, old)",
    "file of an older save (safetensors, old)",
]
MISPLACED = [
    "file lost",
    "one rank's file copied over another's",
    "file of an older save (torch.save, DCP)",
]
THE_REST = sorted(BY_NAME.keys() - {*CHECKSUMMED, *WITHOUT_CHECKSUMS, *MISPLACED})


def done(name: str) -> list[Damaged]:
    return _done(BY_NAME[name], Sizes())


@cache
def _done(kind: Kind, _sizes: Sizes) -> list[Damaged]:
    """What was done of a kind, once with each of the sizes that are the default ones of a test."""
    return list(do_kind(kind))


def others(found: list[Damaged], *expected: str) -> list[Damaged]:
    return [damaged for damaged in found if damaged.caught_by not in expected]


def test_there_are_a_hundred_damages_and_more() -> None:
    assert sum(kind.count for kind in KINDS) > 100


@pytest.mark.parametrize("name", CHECKSUMMED)
def test_what_has_a_checksum_or_a_place_is_caught_by_verify(name: str) -> None:
    assert others(done(name), QUICK, VERIFY) == []


@pytest.mark.parametrize("name", WITHOUT_CHECKSUMS)
def test_values_without_checksums_are_caught_by_the_fingerprint(name: str) -> None:
    assert others(done(name), FINGERPRINT) == []


@pytest.mark.parametrize("name", MISPLACED)
def test_other_values_are_caught_by_the_fingerprint_where_verify_cannot(name: str) -> None:
    assert others(done(name), QUICK, VERIFY, FINGERPRINT) == []


@pytest.mark.slow
@pytest.mark.parametrize("name", THE_REST)
def test_what_nothing_catches_has_changed_nothing(name: str) -> None:
    """The catcher calls nothing changed only after a diff of all names, values and objects."""
    assert others(done(name), *CATCHERS) == []


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(BY_NAME))
def test_damage_that_verify_sees_is_never_copied_and_proven(name: str) -> None:
    """A copy is made only where the damage is in what is not read: a replica, say."""
    known = [damaged for damaged in done(name) if damaged.caught_by in (QUICK, VERIFY)]
    assert [damaged for damaged in known if damaged.copied == AS_IT_IS] == []


@pytest.mark.parametrize("name", ["bit flipped in a pickle (torch.save, DCP)", "file cut short"])
def test_damage_of_what_is_read_ends_a_checked_export(name: str) -> None:
    assert {damaged.copied for damaged in done(name)} == {REFUSED}
