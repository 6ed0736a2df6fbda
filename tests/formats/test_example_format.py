"""The format that docs/adding-a-format.md shows works: one package and one line are enough."""

import importlib
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import running
from click.testing import Result

import ckpt_tools.cli
from ckpt_tools import formats

ROOT = Path(__file__).parents[2]
DCP = str(ROOT / "tests" / "data" / "checkpoints" / "fsdp2_dcp_hsdp_2x4" / "ckpt")


def run(*args: str, exit_code: int = 0) -> Result:
    done = running.run(*args)
    assert done.exit_code == exit_code, (args, done.output, done.exception)
    return done


def told(*args: str, exit_code: int = 0) -> dict:
    return json.loads(run(*args, "--json", exit_code=exit_code).stdout)


@pytest.fixture
def _registered(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """The page's format as a package of its own, and its line in FORMATS."""
    page = (ROOT / "docs" / "adding-a-format.md").read_text()
    (text,) = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)
    package = tmp_path / "path" / "raw_tensors"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(text)
    monkeypatch.syspath_prepend(str(package.parent))
    raw = importlib.import_module("raw_tensors")
    for name in ("export", "reshard"):  # what other tests get back
        importlib.import_module(f"ckpt_tools.cli.{name}")
    formats.FORMATS.append(raw.FORMAT)
    for name in ("export", "reshard"):  # their choices are those of the formats at their import
        monkeypatch.delitem(sys.modules, f"ckpt_tools.cli.{name}")
        monkeypatch.delattr(ckpt_tools.cli, name)
    monkeypatch.delitem(sys.modules, "raw_tensors")
    yield
    formats.FORMATS.remove(raw.FORMAT)


@pytest.fixture
def raw(_registered: None, tmp_path: Path) -> str:
    out = str(tmp_path / "raw")
    run("export", DCP, "-o", out, "--format", "raw")
    return out


def test_inspect_and_ls_show_what_export_wrote(raw: str) -> None:
    assert told("inspect", raw)["format"] == "raw"
    assert "folder of raw tensors" in run("inspect", raw).stdout
    here = run("ls", raw, "--jsonl").stdout.splitlines()
    there = run("ls", DCP, "--only", "model", "--jsonl").stdout.splitlines()
    shapes = [[json.loads(line)["shape"] for line in lines] for lines in (here, there)]
    assert shapes[0] == shapes[1]


def test_its_fingerprint_is_that_of_the_source(raw: str) -> None:
    sections = told("fingerprint", DCP)["sections"]
    assert told("fingerprint", raw)["sections"] == {"model": sections["model"]}


def test_verify_checks_its_checksums_and_names_the_damaged_tensor(raw: str) -> None:
    found = told("verify", raw)
    assert (found["whole"], found["crcs"]) == (True, found["tensors"]["total"])
    first = json.loads((Path(raw) / "tensors.json").read_text())[0]["name"]
    file = Path(raw) / "0.raw"
    data = bytearray(file.read_bytes())
    data[3] ^= 1
    file.write_bytes(data)
    assert first in run("verify", raw, exit_code=1).stdout


def test_verify_names_a_lost_file(raw: str) -> None:
    (Path(raw) / "0.raw").unlink()
    assert "0.raw does not exist" in run("verify", "--quick", raw, exit_code=1).output


def test_it_is_resharded_and_exported_without_a_difference(raw: str, tmp_path: Path) -> None:
    dcp, safe = str(tmp_path / "dcp"), str(tmp_path / "x.safetensors")
    run("reshard", raw, "-o", dcp, "--to-mesh", "2x2", "--check")
    run("export", raw, "-o", safe, "--check")
    assert not run("diff", raw, dcp).exception
    assert not run("diff", raw, safe).exception


def test_force_replaces_its_files_and_nothing_else(raw: str) -> None:
    (Path(raw) / "99.raw").write_bytes(b"of an older save")
    (Path(raw) / "notes.txt").write_text("the user's")
    run("export", DCP, "-o", raw, "--format", "raw", "--force")
    names = {path.name for path in Path(raw).iterdir()}
    assert "notes.txt" in names
    assert "99.raw" not in names


def test_the_page_shows_a_reader_and_a_writer_in_sixty_lines() -> None:
    page = (ROOT / "docs" / "adding-a-format.md").read_text()
    (text,) = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)
    assert len([line for line in text.split("class Raw")[1].splitlines() if line]) <= 60
