"""Options that fields of dataclasses describe, and the values that come back into those."""

import re
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import pytest
from click.testing import CliRunner, Result

from ckpt_tools.cli import options
from ckpt_tools.cli.reshard import _Asked as Resharding
from ckpt_tools.core.dtypes import dtype_named
from ckpt_tools.core.mesh_spec import parse_mesh
from ckpt_tools.core.options import option, repeated, required

ROOT = Path(__file__).parents[2]
TRAPS = Path(__file__).parents[1] / "data" / "typed_options.py"


def from_hex(text: str) -> int:
    return int(text, 16)


@dataclass(frozen=True, kw_only=True)
class Inner:
    least: int = option(1, "-n --least", metavar="N", at_least=1, own=True)
    beside: tuple[int, ...] = ()  # nothing on the command line


@dataclass(frozen=True, kw_only=True)
class Asked:
    ckpt: str = required("CKPT", own=True, parse=str)
    amount: int = option(255, "--amount", typed="ff", parse=from_hex)
    typed: str = required("--as-typed", parse=str)
    value: int = required("--as-typed", parse=from_hex)
    on: bool = option(True, "--off")
    many: tuple[int, ...] = repeated("--many", parse=from_hex)
    kind: Literal["a", "b"] | None = option(
        None, "--kind", choices={"a": "a", "b": "b", "none": None}
    )
    part: float | None = option(None, "--part")
    inner: Inner
    last: list[int] = field(default_factory=list)


def made(*args: str) -> Asked:
    found: list[Asked] = []
    options.command("made", Asked, help="")(found.append).main(
        [*args, "--as-typed", "0A"], standalone_mode=False
    )
    return found[0]


def run(*args: str) -> Result:
    return CliRunner().invoke(options.command("made", Asked, help="")(print), args)


def test_what_is_not_given_is_the_default_of_the_field() -> None:
    assert made("x") == Asked(ckpt="x", typed="0A", value=10, inner=Inner())


def test_what_is_given_comes_back_in_the_types_of_the_fields() -> None:
    words = "x --amount 10 --off --many 1 --many a --kind b --part 0.5 -n 3"
    wanted = Asked(
        ckpt="x",
        amount=16,
        typed="0A",
        value=10,
        on=False,
        many=(1, 10),
        kind="b",
        part=0.5,
        inner=Inner(least=3),
    )
    assert made(*words.split()) == wanted


def test_a_text_that_a_parser_refuses_is_reported_with_its_option() -> None:
    done = run("x", "--as-typed", "no")
    assert done.exit_code == 2
    assert "Invalid value for '--as-typed': invalid literal for int()" in done.stderr


def test_the_default_is_shown_as_it_is_typed() -> None:
    shown = run("--help").stdout
    assert "[default: ff]" in shown
    assert "[default: none]" in shown


def test_a_field_of_a_type_that_nothing_makes_of_a_text_is_refused_at_the_start() -> None:
    @dataclass(frozen=True)
    class Wrong:
        when: complex = option(0j, "--when")

    with pytest.raises(TypeError, match=r"--when: nothing makes <class 'complex'> of a text"):
        options.command("wrong", Wrong, help="")(print)


def test_ranks_compare_what_was_given_but_for_what_is_their_own() -> None:
    words = "x -o out --to-mesh 4x8 --dtype bf16 --dtype-for *norm*=fp32 --threads 3 --json"
    found: list[Resharding] = []
    options.command("reshard", Resharding, help="")(found.append).main(
        words.split(), standalone_mode=False
    )
    assert found[0].wanted.mesh == parse_mesh("4x8")
    assert found[0].wanted.dtype == dtype_named("bfloat16")
    said = options.texts(found[0])
    assert {"CKPT", "--threads", "--json", "--max-memory", "--include"}.isdisjoint(said)
    assert said["--dtype-for"] == "*norm*, float32"
    assert (said["--to-mesh"], said["--dtype"]) == ("4x8", "bfloat16")


@pytest.mark.slow
def test_a_renamed_field_or_a_wrong_type_at_its_use_fails_mypy() -> None:
    lines = TRAPS.read_text().splitlines()
    wanted = {number for number, line in enumerate(lines, 1) if "# wrong" in line}
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", str(TRAPS)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    found = {int(line.split(":")[1]) for line in done.stdout.splitlines() if ": error:" in line}
    assert found == wanted, done.stdout + done.stderr


def test_values_are_read_from_click_in_one_place() -> None:
    reading = [
        path.relative_to(ROOT / "ckpt_tools")
        for path in (ROOT / "ckpt_tools").rglob("*.py")
        if re.search(r"(ctx|context\(?\)?)[.]params", path.read_text())
    ]
    assert reading == [Path("cli/options.py")]
