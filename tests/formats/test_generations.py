"""Which torch rank files are written for, and which one wrote those that are read."""

from importlib.metadata import PackageNotFoundError
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import Result
from dtensor_files import ROWS, dtensor, mesh_of, shard
from plan_writer import Source, write_plans
from running import ran, run

from ckpt_tools import formats
from ckpt_tools.core.layout import Layout, Mesh, Shard
from ckpt_tools.errors import UsageError
from ckpt_tools.formats import rank_files
from ckpt_tools.formats.protocol import PlanOptions
from ckpt_tools.formats.torch_file.generations import (
    GENERATIONS,
    NEWEST,
    Generation,
    parse_version,
    version_text,
    written_by,
)

REAL = Path(__file__).parents[1] / "data" / "checkpoints"
DCP = REAL / "fsdp2_dcp_1d_4r" / "ckpt"


def reshard(source: Path, out: Path, *more: str) -> Result:
    words = ("reshard", str(source), "-o", str(out), "--to-mesh", "2", "--only", "model")
    return run(*words, *more)


def torch_of(folder: Path) -> str | None:
    return formats.read_index(str(folder)).torch_version


def test_the_version_of_a_torch_is_its_first_two_numbers() -> None:
    assert parse_version("2.11.0+cu130") == (2, 11)
    with pytest.raises(UsageError, match="'newest' is not a version of torch"):
        parse_version("newest")


def test_the_rows_follow_one_another_without_a_gap() -> None:
    for row, following in pairwise(GENERATIONS):
        assert following.first == (row.last[0], row.last[1] + 1)


@pytest.mark.parametrize("row", GENERATIONS, ids=str)
def test_what_is_written_for_a_torch_is_read_as_written_by_it(
    row: Generation, tmp_path: Path
) -> None:
    target = Source(tmp_path).target("w", np.arange(4.0), layout=Layout(Mesh((2,)), (Shard(0),)))
    options = PlanOptions(mesh=Mesh((2,)), device_type="cpu", torch_version=version_text(row.last))
    plans = rank_files.FORMAT.plan_files([target], [], options=options)
    write_plans(plans, tmp_path / "out")
    assert torch_of(tmp_path / "out") == str(row)


@pytest.mark.parametrize(
    ("folder", "version"),
    [
        ("torch-2.1.2-d_fsdp2/ranks", None),
        ("torch-2.9.1-d_fsdp2/ranks", "2.8 or 2.9"),
        ("torch-2.9.1-e_2d_tp_fsdp/ranks", "2.8 or 2.9"),
        ("torch-2.11-cuda-fsdp2-2/ranks", "2.11 or 2.12"),
        ("fsdp2_torchsave_1d_4r/ckpt", "2.13 or 2.14"),
        ("fsdp2_tp_torchsave_2x2/ckpt", "2.13 or 2.14"),
        ("torch-2.15.0-orders_4r/ranks", "2.15"),
    ],
)
def test_rank_files_tell_which_torch_wrote_them(folder: str, version: str | None) -> None:
    pattern = "/rank*.pt" if folder.startswith(("torch-2.1.2", "torch-2.9")) else ""
    assert torch_of(REAL / f"{folder}{pattern}") == version


def test_a_mesh_with_more_than_the_newest_has_is_of_a_newer_torch() -> None:
    newest = {*NEWEST.mesh, *NEWEST.layout}
    assert written_by(newest | {"_of_the_future"}) == "2.16 or newer"
    assert written_by({"device_type", "mesh", "_of_the_past"}) is None


# ------------------------------------------------------------------------------ which one is chosen


def test_rank_files_are_written_for_the_torch_that_wrote_the_source(tmp_path: Path) -> None:
    done = reshard(REAL / "torch-2.11-cuda-fsdp2-2/ranks", tmp_path / "out", "--format", "ranks")
    said = "The rank files are for torch 2.11 or 2.12, which wrote the source; --torch-version"
    assert (said in done.stderr, torch_of(tmp_path / "out")) == (True, "2.11 or 2.12")


def install(torch: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have this torch installed, or none."""

    def version(name: str) -> str:
        if torch is None:
            raise PackageNotFoundError(name)
        return torch

    monkeypatch.setattr("importlib.metadata.version", version)


@pytest.mark.parametrize("installed", ["2.9.1+cu128", "2.15.0", None])
def test_else_for_the_installed_torch_or_the_newest_known(
    installed: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(installed, monkeypatch)
    done = reshard(DCP, tmp_path / "out", "--format", "ranks")
    version, why = {
        "2.9.1+cu128": ("2.8 or 2.9", "which is installed here"),
        "2.15.0": ("2.15", "which is installed here"),
        None: ("2.15", "the newest known (no torch is installed here)"),
    }[installed]
    assert f"The rank files are for torch {version}, {why}; " in done.stderr
    assert torch_of(tmp_path / "out") == version


@pytest.mark.parametrize("more", [("--format", "ranks"), ("--layout", "verl")])
def test_the_torch_that_is_asked_for_comes_first(more: tuple[str, ...], tmp_path: Path) -> None:
    source = REAL / "torch-2.11-cuda-fsdp2-2/ranks"
    done = reshard(source, tmp_path / "out", *more, "--torch-version", "2.15.0")
    assert "The rank files are for torch 2.15, as --torch-version says; " in done.stderr
    assert torch_of(tmp_path / "out") == "2.15"


def test_the_dry_run_says_which(tmp_path: Path) -> None:
    words = ("--format", "ranks", "--torch-version", "2.10", "--dry-run")
    done = reshard(DCP, tmp_path / "out", *words)
    assert "The rank files are for torch 2.10, as --torch-version says; " in done.stderr
    assert not (tmp_path / "out").exists()


def test_for_a_torch_newer_than_the_newest_nothing_is_written_and_all_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install("2.16.0", monkeypatch)
    done = reshard(DCP, tmp_path / "out", "--format", "ranks")
    assert done.exit_code == 2
    assert "torch 2.5 to 2.15, not for 2.16, which is installed here: each torch" in done.stderr
    assert "--torch-version names the torch that will load them" in done.stderr
    assert not (tmp_path / "out").exists()
    assert reshard(DCP, tmp_path / "dcp").exit_code == 0
    asked = reshard(DCP, tmp_path / "asked", "--format", "ranks", "--torch-version", "2.15")
    assert (asked.exit_code, torch_of(tmp_path / "asked")) == (0, "2.15")


@pytest.mark.skipif(parse_version(torch.__version__) < (2, 13), reason="its mesh lacks too much")
def test_rank_files_of_a_newer_torch_are_read_and_not_written_for_it(tmp_path: Path) -> None:
    whole = torch.arange(8.0).view(4, 2)
    for rank in range(2):
        mesh = mesh_of((2,), rank)
        mesh._preserve_rank_order, mesh._of_the_future = False, 1
        state = {"w": dtensor(shard(whole, ROWS, mesh), whole.shape, ROWS, mesh)}
        (tmp_path / "newer").mkdir(exist_ok=True)
        torch.save(state, tmp_path / "newer" / f"rank_{rank}.pt")
    assert torch_of(tmp_path / "newer") == "2.16 or newer"
    done = reshard(tmp_path / "newer", tmp_path / "out", "--format", "ranks")
    assert done.exit_code == 2
    assert "not for 2.16, which wrote the source" in done.stderr
    words = ("--format", "ranks", "--torch-version", "2.15")
    asked = reshard(tmp_path / "newer", tmp_path / "out", *words)
    assert (asked.exit_code, torch_of(tmp_path / "out")) == (0, "2.15")


def test_dcp_directories_are_of_no_torch(tmp_path: Path) -> None:
    done = reshard(DCP, tmp_path / "out", "--torch-version", "2.15")
    assert done.exit_code == 2
    assert "--torch-version is for rank files; every torch loads the format dcp." in done.stderr


def test_the_names_of_the_mesh_are_said_and_can_be_left_out(tmp_path: Path) -> None:
    said = (
        "Torch loads them only into a mesh of the same names (dp_shard); --to-mesh '=2' gives none"
    )
    assert said in reshard(DCP, tmp_path / "named", "--format", "ranks").stderr
    words = (
        "-o",
        tmp_path / "bare",
        "--to-mesh",
        "=2",
        "--format",
        "ranks",
        "--device-type",
        "cpu",
    )
    assert "of the same names" not in ran("reshard", DCP, *words).stderr
    assert formats.read_index(str(tmp_path / "bare")).mesh == Mesh((2,))
    again = reshard(tmp_path / "named", tmp_path / "again", "--format", "ranks")
    assert "of the same names" not in again.stderr
    assert run("reshard", DCP, "-o", tmp_path / "x", "--to-mesh", "a=2,=2").exit_code == 2
    refused = run("reshard", DCP, "-o", tmp_path / "x", "--to-mesh", "=2", "--layout", "verl")
    assert "--layout verl names the mesh: write --to-mesh 2." in refused.stderr
