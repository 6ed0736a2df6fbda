"""Errors that are placed, named and made from the system's."""

import errno
import os
import re

import pytest

import ckpt_tools
from ckpt_tools.errors import (
    CheckpointError,
    CkptError,
    UnreadableError,
    WriteError,
    from_system,
    unreadable,
    unwritable,
)


class _Counted(UnreadableError):
    """A subclass that is made in its own way and carries more than its parents."""

    def __init__(self, count: int) -> None:
        super().__init__(f"{count} bytes are wrong.", hint="Copy it again.", about=("a",))
        self.count = count


def test_an_error_that_is_placed_or_named_keeps_all_that_it_carries() -> None:
    first = _Counted(3)
    placed = first.at("x.pt").concerning(["b", "c"])
    assert str(placed) == placed.message == "x.pt: 3 bytes are wrong."
    assert type(placed) is _Counted
    assert (placed.count, placed.hint, placed.about) == (3, "Copy it again.", frozenset("bc"))
    assert (str(first), first.about) == ("3 bytes are wrong.", frozenset("a"))
    assert first.at("x.pt", " ").about == {"a"}


def _failed(number: int) -> OSError:
    return OSError(number, os.strerror(number), "x")


def test_the_systems_errors_have_one_wording_and_the_class_of_what_was_done() -> None:
    read = unreadable("x", _failed(errno.EIO), doing="listed")
    assert (type(read), str(read)) == (UnreadableError, "x cannot be listed: Input/output error.")
    written = unwritable("x", _failed(errno.EACCES))
    assert (type(written), str(written), written.hint) == (
        WriteError,
        "x cannot be written: Permission denied.",
        None,
    )
    assert str(from_system(_failed(errno.EIO))) == "x: Input/output error."


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_has_a_hint(number: int) -> None:
    assert "Free some space" in str(unwritable("x", _failed(number)).hint)


def test_an_error_of_a_store_without_a_number_tells_its_text() -> None:
    assert str(unreadable("s3://x", OSError("timed out"))) == "s3://x cannot be read: timed out."


@pytest.mark.parametrize("kind", [CkptError, CheckpointError])
def test_a_placed_error_is_a_new_one(kind: type[CkptError]) -> None:
    first = kind("y")
    assert first.at("x") is not first


EVIL = "a\x1b[2J\x9b\n\u202e\udcff"


@pytest.mark.parametrize(
    "error",
    [
        UnreadableError(f"{EVIL} is wrong."),
        UnreadableError("It is wrong.").at(EVIL),
        UnreadableError("It is wrong.").reworded(f"{EVIL} is."),
        UnreadableError(f"{EVIL} is wrong.").concerning([EVIL]).losing(EVIL),
        from_system(OSError(errno.EIO, "odd", EVIL)),
    ],
)
def test_what_an_error_quotes_is_printable_and_no_line_of_its_own(error: CkptError) -> None:
    assert error.message.isprintable()
    assert str(error) == error.message
    assert r"a\x1b[2J\x9b\n\u202e\udcff" in error.message


def test_the_lines_of_an_error_stay_lines() -> None:
    error = UnreadableError("Two are wrong:", f"  {EVIL}", "  b").at("x.pt")
    assert error.message.split("\n")[::2] == ["x.pt: Two are wrong:", "  b"]
    assert len(error.concerning(["b"]).message.split("\n")) == 3


@pytest.mark.parametrize(
    ("hint", "said"),
    [
        (
            "Give that order by --param-names FILE, one name a line; or --only model.",
            "Give that order by ReshardOptions(param_names=ParamNames(names)); or only model.",
        ),
        (
            "Leave them out with -x, or write another format with --format torch.",
            "Leave them out with exclude, or write to a path that ends in .pt.",
        ),
    ],
)
def test_hints_of_the_library_name_what_it_has(hint: str, said: str) -> None:
    error = CkptError("a/-x/b cannot be written.", hint=hint)
    error.speak_python()
    assert (error.message, error.advice) == ("a/-x/b cannot be written.", said)
    assert all(hasattr(ckpt_tools, name) for name in re.findall(r"\b[A-Z][a-z]+[A-Z]\w+", said))
