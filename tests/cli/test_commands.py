"""The commands inspect, ls, show and export: what they print, and how they end."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from dtensor_files import ROWS, save_ranks
from running import run
from safetensors.torch import save_file

from ckpt_tools import __version__
from ckpt_tools.cli import cli
from ckpt_tools.copying import write as copy

DATA = Path(__file__).parents[1] / "data"
REAL = DATA / "checkpoints"
DCP = str(REAL / "fsdp2_dcp_1d_4r" / "ckpt")
HSDP = str(REAL / "fsdp2_dcp_hsdp_2x4" / "ckpt")
RANKS = str(REAL / "fsdp2_torchsave_hsdp_2x4" / "ckpt")


@pytest.fixture
def hurt(tmp_path: Path) -> Path:
    """A DCP directory that lacks the data file of rank 2."""
    folder = shutil.copytree(DCP, tmp_path / "hurt")
    (folder / "__2_0.distcp").unlink()
    return folder


# ---------------------------------------------------------------------------------------- inspect


def test_inspect_json_has_exactly_the_fields_of_its_schema() -> None:
    told = json.loads(run("inspect", "--json", DCP).stdout)
    assert list(told) == (
        [
            "schema",
            "path",
            "format",
            "framework",
            "torch",
            "world_size",
            "mesh",
            "placements",
            "sections",
            "optimizer",
            "step",
            "resume",
            "saved",
            "files",
            "complete",
            "problems",
            "ties",
            "notes",
        ]
    )
    assert told["schema"] == "ckpt-tools/inspect/1"
    assert told["mesh"] == {"shape": [4], "dim_names": None, "status": "inferred"}
    assert set(told["sections"]) == {"model", "optim", "other"}
    model = told["sections"]["model"]
    assert set(model) == {"tensors", "objects", "numel", "nbytes", "dtypes"}
    assert (model["tensors"], model["numel"], model["nbytes"]) == (13, 354, 1420)
    assert model["dtypes"] == {"float32": 353, "int64": 1}
    assert set(told["files"]) == {"count", "nbytes", "missing"}
    assert told["complete"] is True
    assert told["problems"] == []
    assert told["step"] == {"value": 2, "fqn": "step"}
    assert told["resume"]["possible"] is True
    assert told["optimizer"]["states"] == ["exp_avg", "exp_avg_sq", "step"]
    assert sum(one["tensors"] for one in told["placements"]) == 48


def test_the_file_of_a_checkpoint_of_one_file_has_its_name(tmp_path: Path) -> None:
    file = tmp_path / "one.safetensors"
    save_file({"w": torch.ones(3)}, file)
    assert "  one.safetensors  " in run("show", str(file), "w").stdout
    assert "  one.safetensors  " in run("inspect", "--shards", str(file)).stdout


def test_what_inspect_adds_to_its_text_it_adds_to_its_json() -> None:
    told = json.loads(run("inspect", "--json", "--all", "--shards", DCP).stdout)
    assert len(told["entries"]) == 93
    assert len(told["shards"]) == told["files"]["count"]


def test_the_verdict_comes_first() -> None:
    lines = run("inspect", DCP).stdout.splitlines()
    assert lines[1].startswith("  complete by its headers, training can resume, step 2, files of ")


def test_the_verdict_on_a_hurt_checkpoint_is_no(hurt: Path) -> None:
    verdict = run("inspect", str(hurt)).stdout.splitlines()[1]
    assert verdict.startswith("  NOT COMPLETE, training cannot resume, ")


def test_what_is_wrong_is_in_the_json_too(hurt: Path) -> None:
    done = run("inspect", "--json", str(hurt))
    told = json.loads(done.stdout)
    assert done.exit_code == 3
    assert [f"Error: {one['message']}" for one in told["problems"]] == done.stderr.splitlines()[:1]
    assert told["files"]["missing"]
    assert told["resume"]["reason"] in told["problems"][0]["message"]


def test_a_verdict_has_its_colour_on_a_terminal() -> None:
    shown = run("inspect", DCP, color=True).stdout
    assert "\x1b[32mcomplete by its headers\x1b[0m" in shown


@pytest.mark.parametrize("step", [float("nan"), float("inf"), 2.5, "x"])
def test_inspect_tells_no_step_where_it_is_no_whole_number(step: object, tmp_path: Path) -> None:
    torch.save({"model": {"w": torch.ones(2)}, "step": step}, tmp_path / "a.pt")
    done = run("inspect", str(tmp_path / "a.pt"))
    assert (done.exit_code, "step   " in done.stdout) == (0, False), done.exception


def test_inspect_infers_hsdp_from_boxes_and_says_so() -> None:
    mesh = json.loads(run("inspect", "--json", HSDP).stdout)["mesh"]
    assert (mesh["shape"], mesh["status"]) == ([2, 4], "inferred")


def test_inspect_confirms_the_mesh_that_rank_files_state() -> None:
    mesh = json.loads(run("inspect", "--json", RANKS).stdout)["mesh"]
    assert (mesh["shape"], mesh["status"]) == ([2, 4], "confirmed")


def test_an_incomplete_checkpoint_is_shown_and_then_refused(hurt: Path) -> None:
    result = run("inspect", "--json", str(hurt))
    told = json.loads(result.stdout)
    assert result.exit_code == 3
    assert told["complete"] is False
    assert [Path(path).name for path in told["files"]["missing"]] == ["__2_0.distcp"]
    assert "__2_0.distcp" in result.stderr
    assert "Ranks 0, 1, 3 are intact" in result.stderr


def test_shards_that_no_mesh_gives_are_not_called_whole(tmp_path: Path) -> None:
    pieces = {"0": torch.ones(5, 2), "5": torch.ones(1, 2), "6": torch.ones(3, 2)}
    for rank, (start, piece) in enumerate(pieces.items()):
        path = tmp_path / f"shard-{rank + 1:05}-model-00001-of-00001.safetensors"
        sharding = json.dumps({"w": {"saved_offsets": [int(start), 0]}})
        save_file({"w": piece}, path, {"DCP_SHARDING_INFO": sharding})
    done = run("inspect", str(tmp_path))
    assert done.exit_code == 0, done.output
    assert "nothing sharded" not in done.stdout
    assert "none stated, and none gives these shards" in done.stdout
    assert "1 tensor: uneven over 3 ranks" in done.stdout


@pytest.fixture
def several(tmp_path: Path) -> Path:
    """A run of two steps, of which the later is interrupted, in a folder with a space."""
    folder = tmp_path / "run 7"
    for step in (9, 10):
        shutil.copytree(DCP, folder / f"step-{step}")
    (folder / "step-10" / ".metadata").rename(folder / "step-10" / ".metadata.tmp")
    return folder


def test_a_refusal_repeats_the_command_that_was_typed_with_each_right_path(several: Path) -> None:
    result = run("export", str(several), "-o", "out 1", "--dtype", "bf16")
    assert result.exit_code == 3
    assert result.stdout == ""
    for step in (9, 10):
        command = f"ckpt-tools export '{several}/step-{step}' -o 'out 1' --dtype bf16"
        assert command in result.stderr


def test_a_parent_of_one_checkpoint_is_followed_and_told(tmp_path: Path) -> None:
    inside = shutil.copytree(DCP, tmp_path / "run 7" / "step-2")
    result = run("inspect", str(tmp_path))
    assert result.exit_code == 0
    assert f"Reading {inside}." in result.stderr + result.stdout


def test_a_path_that_is_not_there_is_one_line() -> None:
    result = run("inspect", "/nowhere/at/all")
    assert result.exit_code == 3
    assert result.stderr.startswith("Error: /nowhere/at/all does not exist.")


# --------------------------------------------------------------------------------------------- ls


def test_ls_json_has_exactly_the_fields_of_its_schema() -> None:
    told = json.loads(run("ls", "--json", DCP).stdout)
    assert list(told) == ["schema", "entries"]
    assert told["schema"] == "ckpt-tools/ls/1"
    fields = [
        "fqn",
        "path",
        "kind",
        "section",
        "dtype",
        "shape",
        "nbytes",
        "placements",
        "mesh",
        "chunks",
        "value",
    ]
    assert all(list(entry) == fields for entry in told["entries"])
    by_name = {entry["fqn"]: entry for entry in told["entries"]}
    emb = by_name["app.model.emb.weight"]
    assert emb["path"] == ["app", "model", "emb.weight"]
    assert (emb["kind"], emb["section"], emb["dtype"]) == ("tensor", "model", "float32")
    assert (emb["shape"], emb["nbytes"]) == ([11, 7], 308)
    assert by_name["step"]["value"] == 2
    assert len(told["entries"]) == 93


def test_ls_prints_one_line_for_each_entry() -> None:
    result = run("ls", "--only", "model", DCP)
    lines = [line for line in result.stdout.splitlines() if line.startswith("app.model.")]
    assert len(lines) == 13


def _listed(*words: str) -> list[str]:
    return [line.split()[0] for line in run("ls", DCP, *words).stdout.splitlines()[1:]]


def test_ls_lists_the_largest_first() -> None:
    by_name = _listed("--only", "model")
    assert by_name == sorted(by_name)
    assert _listed("--only", "model", "--reverse") == by_name[::-1]
    told = json.loads(run("ls", "--json", DCP, "--sort", "size", "--only", "model").stdout)
    sizes = [entry["nbytes"] for entry in told["entries"]]
    assert sizes == sorted(sizes, reverse=True)
    assert _listed("--sort", "size", "-n", "2") == _listed("--sort", "size")[:2]
    told = json.loads(run("ls", "--json", DCP, "--sort", "rows").stdout)
    rows = [entry["shape"][0] for entry in told["entries"] if entry["shape"]]
    assert rows == sorted(rows, reverse=True)
    shown = run("ls", DCP, "-n", "5")
    assert "; 5 shown." in shown.stderr
    assert run("ls", DCP, "--tree", "-n", "5").exit_code == 2


def test_a_filter_without_a_star_is_offered_with_them() -> None:
    result = run("ls", DCP, "-i", "emb")
    assert result.exit_code == 1
    assert f"ckpt-tools ls {DCP} -i '*emb*'" in result.stderr


def test_a_long_value_is_cut_in_ls_and_whole_in_show_and_json(tmp_path: Path) -> None:
    import torch

    value = list(range(1000))
    torch.save({"w": torch.zeros(2), "seen": value}, tmp_path / "c.pt")
    path = str(tmp_path / "c.pt")
    line = next(line for line in run("ls", path).stdout.splitlines() if line.startswith("seen"))
    assert len(line) < 160
    assert line.endswith("…")
    assert json.loads(run("show", "--raw", path, "seen").stdout) == value
    assert "998, 999]" in run("show", path, "seen").stdout
    listed = json.loads(run("ls", "--json", path).stdout)["entries"]
    assert next(entry["value"] for entry in listed if entry["fqn"] == "seen") == value


def test_a_filter_that_fits_nothing_is_no_success() -> None:
    result = run("ls", "-i", "*.emb.wieght", DCP)
    assert result.exit_code == 1
    assert "app.model.emb.weight" in result.stderr


def test_a_closed_pipe_ends_silently() -> None:
    command = f"{sys.executable} -m ckpt_tools ls {DCP} | head -n 1"
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, check=True)
    assert done.stderr.count("\n") <= 1
    assert "Traceback" not in done.stderr


# ------------------------------------------------------------------------------------------- show


def test_show_raw_prints_a_plain_object_bare() -> None:
    assert run("show", "--raw", DCP, "step").stdout == "2\n"


def test_show_names_what_is_near_a_wrong_name() -> None:
    result = run("show", DCP, "app.model.emb.wight")
    assert result.exit_code == 1
    assert "app.model.emb.weight" in result.stderr


def test_show_takes_the_end_of_one_name_alone() -> None:
    whole, end = (run("show", DCP, name) for name in ("app.model.emb.weight", "model.emb.weight"))
    assert end.stdout == whole.stdout
    assert end.stderr == "Showing app.model.emb.weight.\n"
    assert run("show", DCP, "weight").exit_code == 1  # of many
    assert run("show", DCP, "mb.weight").exit_code == 1  # no part of a name


def test_show_lists_each_chunk_and_the_values_of_a_slice() -> None:
    result = run("show", DCP, "app.model.emb.weight", "--slice", "0:1,:2")
    assert result.exit_code == 0
    assert "__3_0.distcp" in result.stdout


# ----------------------------------------------------------------------------------------- export


def test_show_names_the_files_of_chunks_that_were_unpacked_to_be_read() -> None:
    result = run("show", str(REAL / "dcp_zstd_4r" / "ckpt"), "model.blocks.0.fc1.bias")
    assert "  __3_0.distcp      6,330      636 " in result.stdout


def test_export_says_on_stdout_what_it_wrote_and_on_stderr_what_it_did(tmp_path: Path) -> None:
    result = run("export", DCP, "-o", str(tmp_path / "out"))
    assert result.exit_code == 0
    assert result.stdout.startswith(f"{tmp_path / 'out'}: 13 tensors")
    assert "'app.model'" in result.stderr
    assert (tmp_path / "out" / "model.safetensors").exists()


def test_the_ending_of_the_output_says_its_format(tmp_path: Path) -> None:
    import torch

    assert run("export", DCP, "-o", str(tmp_path / "model.pt")).exit_code == 0
    assert torch.load(tmp_path / "model.pt")["emb.weight"].shape == (11, 7)
    result = run("export", DCP, "-o", str(tmp_path / "o.pt"), "--format", "safetensors")
    assert result.exit_code == 2
    assert "ending of a torch file" in result.stderr


def test_a_dry_run_writes_nothing(tmp_path: Path) -> None:
    result = run("export", DCP, "-o", str(tmp_path / "out"), "--dry-run", "--json")
    assert result.exit_code == 0
    assert json.loads(result.stdout)["written"] is False
    assert not list(tmp_path.iterdir())


def test_an_output_that_exists_is_a_usage_error(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    result = run("export", DCP, "-o", str(tmp_path / "out"))
    assert result.exit_code == 2
    assert "--force" in result.stderr
    assert not list((tmp_path / "out").iterdir())


def test_a_dtype_that_is_none_is_a_usage_error(tmp_path: Path) -> None:
    assert run("export", DCP, "-o", str(tmp_path / "o"), "--dtype", "bf17").exit_code == 2


@pytest.mark.parametrize("case", ["hurt", "no_metadata", "html"])
def test_bad_input_is_one_error_and_leaves_nothing(case: str, tmp_path: Path, hurt: Path) -> None:
    if case == "no_metadata":
        (hurt / ".metadata").unlink()
    source = str(DATA / "cases" / "C35_truncated_pt" / "html.pt") if case == "html" else str(hurt)
    result = run("export", source, "-o", str(tmp_path / "out"))
    assert result.exit_code == 3
    assert result.stdout == ""
    assert sum(line.startswith("Error:") for line in result.stderr.splitlines()) == 1
    assert "Traceback" not in result.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hurt"]


def test_a_disk_that_fills_up_is_exit_code_4(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_args: object, **_options: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(copy, "write_files", full)
    result = run("export", DCP, "-o", str(tmp_path / "out"))
    assert result.exit_code == 4
    assert "No space left on device" in result.stderr
    assert not (tmp_path / "out").exists()


def test_ctrl_c_is_exit_code_130(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stopped(*_args: object, **_options: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(copy, "write_files", stopped)
    result = run("export", DCP, "-o", str(tmp_path / "out"))
    assert result.exit_code == 130
    assert not (tmp_path / "out").exists()


# ---------------------------------------------------------------------------------------- general


def test_every_command_has_help_with_examples() -> None:
    for name in cli.list_commands(None):
        result = run(name, "--help")
        assert result.exit_code == 0
        assert f"ckpt-tools {name}" in result.stdout


def test_the_version_is_told() -> None:
    assert run("--version").stdout.strip().endswith(__version__)


def test_python_dash_m_is_the_command() -> None:
    environment = {**os.environ, "NO_COLOR": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "ckpt_tools", "show", "--raw", DCP, "step"],
        capture_output=True, text=True, check=True, env=environment,
    )  # fmt: skip
    assert done.stdout == "2\n"


def test_inspect_tells_no_step_where_the_shard_with_it_is_lost(tmp_path: Path) -> None:
    entries = {"w": (torch.ones(4), ROWS), "step": (torch.ones(1), ROWS)}
    first, _ = save_ranks(tmp_path, entries, (2,))
    first.unlink()
    done = run("inspect", str(tmp_path))
    assert done.exit_code == 3, done.output
    assert "NOT COMPLETE" in done.stdout
