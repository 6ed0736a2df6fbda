"""docs/json.md has the fields that commands print, with their types: no more and no fewer."""

import json
import math
import re
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

import click
import pytest
import torch
from running import run

from ckpt_tools.cli import cli
from ckpt_tools.cli.render import ERROR
from ckpt_tools.core.records import Json

ROOT = Path(__file__).parent.parent
REAL = ROOT / "tests" / "data" / "checkpoints"
PAGE = (ROOT / "docs" / "json.md").read_text()
KINDS = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "object": (dict,),
}
TITAN = "titan/checkpoint_full/step-2"
COMMANDS = (
    "inspect run7/step-1000 --shards --all",
    "inspect tied",
    "inspect cut --shards",
    "inspect run7/step-1000 nothere",
    "inspect run7",
    "ls run7/step-1000",
    "ls cut",
    "show run7/step-1000 model.emb.weight",
    "show run7/step-1000 step",
    "show odd.pt w",
    "layout run7/step-1000 --to-mesh 2x2",
    "verify run7/step-1000 --quick",
    "verify cut --against run7/step-1000",
    "verify other --against run7/step-1000 --only model",
    f"verify two-ranks --against {TITAN}",
    "verify run7 nothere",
    "fingerprint run7/step-1000",
    "diff run7/step-1000 other --clean-names",
    "stats zeros",
    "export run7/step-1000 -o out-export",
    "reshard run7/step-1000 -o out-reshard --to-mesh 2x2",
    "average run7/step-1000 run7/ranks -o out-average",
    "average run7/step-1000 run7/ranks -o out-average-4 --to-mesh 4",
    "ls nothere",
    "ls run7/step-1000 -i nothing",
)


def _tables() -> dict[str, dict[str, str]]:
    """Each heading's fields and their types, those of the shared object that it names included."""
    tables: dict[str, dict[str, str]] = {}
    for part in re.split(r"^###? ", PAGE, flags=re.MULTILINE)[1:]:
        shared = re.search(r"^The fields of an \[\w+\]\(#(\w+)\)", part, re.MULTILINE)
        fields = dict(re.findall(r"^\| `(\S+)` \| (.+?) \|", part, re.MULTILINE))
        tables[part.partition("\n")[0]] = {**(tables[shared[1]] if shared else {}), **fields}
    return tables


TABLES = _tables()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints that between them have everything to say."""
    here = tmp_path_factory.mktemp("json")
    names = {
        "run7/step-1000": "fsdp2_dcp_hsdp_2x4",
        "run7/ranks": "fsdp2_torchsave_hsdp_2x4",
        "cut": "fsdp2_dcp_hsdp_2x4",
        "zeros": "fsdp2_dcp_hsdp_2x4",
        "other": "fsdp2_dcp_1d_4r",
        "titan": "torchtitan_llama3_4r",
        "tied": "fsdp2_tied_dcp_4r",
    }
    for name, saved in names.items():
        shutil.copytree(REAL / saved / "ckpt", here / name)
    torch.save({"w": torch.tensor([math.nan, -math.inf])}, here / "odd.pt")
    (here / "cut" / "__2_0.distcp").unlink()
    run("reshard", here / TITAN, "-o", here / "two-ranks", "--to-mesh", 2)
    shown = json.loads(run("show", here / "zeros", "model.emb.weight", "--json").stdout)
    chunk = shown["chunks"][1]
    data = bytearray(Path(chunk["path"]).read_bytes())
    data[chunk["offset"] : chunk["offset"] + chunk["length"]] = bytes(chunk["length"])
    Path(chunk["path"]).write_bytes(data)
    return here


def _unfolded(value: Json, table: str, path: str) -> Iterator[tuple[str, str]]:
    """Every field of a value that is printed, as the page calls it. Raises for one it has not."""
    documented = TABLES[table]
    kind = documented.get(path)
    if kind is not None:
        yield table, path
    is_deeper = any(field.startswith((f"{path}.", f"{path}[]")) for field in documented)
    if kind is not None and not (is_deeper and isinstance(value, (Mapping, list))):
        yield from _typed(value, kind, f"{table}: {path}")
    elif isinstance(value, Mapping):
        wild = any(field.startswith((f"{path}.*", "*.")) for field in documented)
        for key, inner in value.items():
            yield from _unfolded(inner, table, f"{path}.{'*' if wild else key}".lstrip("."))
    elif isinstance(value, list):
        assert is_deeper, f"docs/json.md, {table}: no field {path}"
        for inner in value:
            yield from _unfolded(inner, table, f"{path}[]")
    else:
        pytest.fail(f"docs/json.md, {table}: no field {path}")


def _typed(value: Json, kind: str, where: str) -> Iterator[tuple[str, str]]:
    """The fields of the shared object that the type names. Raises for a value of another type."""
    shared = re.search(r"\(#(\w+)\)", kind)
    several = isinstance(value, list) and kind.startswith("list of")
    if kind.endswith("any"):
        return
    for one in value if isinstance(value, list) and several else [value]:
        if shared:
            yield from _unfolded(one, shared[1], "")
        elif one is None:
            assert "or null" in kind, where
        elif not isinstance(one, Mapping) or "object" not in kind:
            fitting = [KINDS[word] for word in KINDS if word in kind]
            assert any(type(one) in types for types in fitting), f"{where}: {one!r} is no {kind}"


def test_every_command_with_json_is_looked_at() -> None:
    context = click.Context(cli)
    named = {name: cli.get_command(context, name) for name in cli.list_commands(context)}
    with_json = {
        name for name, one in named.items() if one and any(p.name == "json" for p in one.params)
    }
    assert with_json == {command.split()[0] for command in COMMANDS}


def test_the_page_has_the_fields_that_are_printed(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    seen: set[tuple[str, str]] = set()
    for command in COMMANDS:
        done = run(*command.split(), "--json")
        told = json.loads(done.stdout, parse_constant=pytest.fail)  # NaN is no JSON
        assert ('"error"' in done.stdout) == (done.exit_code >= 3 or told["schema"] == ERROR), (
            command
        )
        listed = [one for one in told.get("checkpoints", ()) if "schema" in one]
        seen |= {field for one in (told, *listed) for field in _unfolded(one, one["schema"], "")}
    assert {(table, field) for table in TABLES for field in TABLES[table]} - seen == set()
