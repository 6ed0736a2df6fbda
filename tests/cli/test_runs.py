"""A run is a folder of several checkpoints: listed, chosen from, and verified as one."""

import csv
import io
import json
import shutil
from pathlib import Path

import fsspec
import pytest
import torch
from dtensor_files import ROWS, save_ranks
from running import run

import ckpt_tools

DATA = Path(__file__).parents[1] / "data"
DCP = DATA / "checkpoints" / "fsdp2_dcp_toplevel_multifile_4r" / "ckpt"


@pytest.fixture
def steps(tmp_path: Path) -> Path:
    """A run of steps 9, 100 and 20, of which the last was interrupted."""
    folder = tmp_path / "run 7"
    for step in (9, 100, 20):
        shutil.copytree(DCP, folder / f"step-{step}")
    (folder / "step-100" / ".metadata").rename(folder / "step-100" / ".metadata.tmp")
    (folder / "latest").symlink_to("step-100")
    return folder


def test_inspect_lists_every_checkpoint_of_a_run_the_newest_last(steps: Path) -> None:
    result = run("inspect", steps)
    assert result.exit_code == 0
    rows = [line.split() for line in result.stdout.splitlines() if "step-" in line][:3]
    assert [row[0] for row in rows] == ["9", "20", "100"]
    assert ["yes" in row for row in rows] == [True, True, False]


def test_the_json_of_a_run_has_exactly_the_fields_of_its_schema(steps: Path) -> None:
    told = json.loads(run("inspect", steps, "--json").stdout)
    assert list(told) == ["schema", "path", "checkpoints"]
    assert told["schema"] == "ckpt-tools/run/1"
    fields = ["path", "step", "format", "framework", "sections", "nbytes", "modified", "whole"]
    fields += ["problem"]
    assert [list(one) for one in told["checkpoints"]] == [fields] * 3
    assert [one["step"] for one in told["checkpoints"]] == [9, 20, 100]
    assert "interrupted" in told["checkpoints"][2]["problem"]


def test_against_takes_the_step_that_is_asked_for_too(steps: Path) -> None:
    done = run(
        "verify", steps / "step-9", "--against", steps, "--latest-complete", "--only", "model"
    )
    assert done.exit_code == 0, done.output
    assert f"{steps / 'step-20'}: the same, bit for bit" in done.stdout


@pytest.mark.parametrize("command", ["ls", "verify", "stats", "fingerprint", "inspect"])
def test_a_step_is_chosen_in_every_command(command: str, steps: Path) -> None:
    chosen = run(command, steps, "--step", "20", "--json")
    named = run(command, steps / "step-20", "--json")
    assert chosen.exit_code == named.exit_code == 0
    assert chosen.stdout == named.stdout


def test_export_takes_the_step_too(steps: Path, tmp_path: Path) -> None:
    assert run("export", steps, "--step", "9", "-o", tmp_path / "out").exit_code == 0
    assert run("diff", steps, tmp_path / "out", "--step", "9").exit_code == 1  # out is no run


def test_the_latest_is_that_of_the_last_step_whole_or_not(steps: Path) -> None:
    result = run("ls", steps, "--latest")
    assert result.exit_code == 3
    assert "step-100" in result.stderr
    shutil.rmtree(steps / "step-100")
    assert run("ls", steps, "--latest").stdout == run("ls", steps / "step-20").stdout


def test_the_statistics_of_every_step_are_rows_of_groups(steps: Path) -> None:
    result = run("stats", steps, "--steps", "--csv", "--only", "model")
    assert result.exit_code == 1  # step 100 was interrupted
    rows = list(csv.DictReader(io.StringIO(result.stdout)))
    assert [*dict.fromkeys(row["step"] for row in rows)] == ["9", "20", "100"]
    assert "interrupted" in rows[-1]["error"]
    assert all(value == "" for value in [*rows[-1].values()][1:-1])
    [group] = [r for r in rows if r["step"] == "20" and r["group"].endswith("*.fc1.weight")]
    source = ckpt_tools.open_checkpoint(DCP)
    held = [one.torch() for name, one in source.model.items() if name.endswith("fc1.weight")]
    every = torch.cat([one.flatten() for one in held])
    assert float(group["l2"]) == pytest.approx(float(every.double().norm()))
    assert float(group["abs_max"]) == float(every.abs().max())
    assert (int(group["numel"]), group["nonfinite"]) == (every.numel(), "0")
    assert run("stats", steps, "--steps").exit_code == 2


def test_the_latest_complete_skips_what_a_job_could_not_resume_from(steps: Path) -> None:
    shutil.copytree(DCP, steps / "step-30")
    (steps / "step-30" / "__1_0.distcp").unlink()
    result = run("inspect", steps, "--latest-complete", "--path-only")
    assert (result.exit_code, result.stdout) == (0, f"{steps}/step-20\n")
    skipped = [line.split(": ")[0] for line in result.stderr.splitlines()]
    assert skipped == [f"Skipping {steps}/step-100", f"Skipping {steps}/step-30"]
    assert run("ls", steps, "--latest-complete").stdout == run("ls", steps / "step-20").stdout
    assert ckpt_tools.latest(steps, complete=True) == f"{steps}/step-20"
    assert ckpt_tools.latest(steps) == f"{steps}/step-100"


def test_a_run_in_a_store_has_a_latest_complete_step(steps: Path) -> None:
    store = fsspec.filesystem("memory")
    store.put(str(steps), "/of-latest", recursive=True)
    result = run("inspect", "memory://of-latest", "--latest-complete", "--path-only")
    assert (result.exit_code, result.stdout) == (0, "memory://of-latest/step-20\n")


def test_a_run_without_a_complete_step_is_answered_with_1_and_no_path(steps: Path) -> None:
    for step in (9, 20):
        (steps / f"step-{step}" / "__1_0.distcp").unlink()
    result = run("inspect", steps, "--latest-complete", "--path-only")
    assert (result.exit_code, result.stdout) == (1, "")
    assert "has no complete checkpoint" in result.stderr
    lone = run("inspect", steps / "step-20", "--latest-complete", "--path-only")
    assert (lone.exit_code, lone.stdout) == (1, "")


@pytest.mark.parametrize(
    ("command", "chosen", "code"),
    [("ls", "--latest", 3), ("inspect", "--step=9", 3), ("verify", "--step=9", 1)],
)
def test_the_error_of_a_step_that_is_not_complete_names_one_that_is(
    command: str, chosen: str, code: int, steps: Path
) -> None:
    (steps / "step-9" / "__1_0.distcp").unlink()
    result = run(command, steps, chosen)
    assert result.exit_code == code
    assert "--step 20 is the newest complete one." in result.stderr


def test_no_other_step_is_named_where_the_chosen_one_is_complete(steps: Path) -> None:
    result = run("verify", steps, "--step", "9", "--against", "nothing")
    assert (result.exit_code, "newest" in result.stderr) == (3, False)


def test_the_latest_is_no_output_of_ours_that_is_being_written(steps: Path) -> None:
    shutil.rmtree(steps / "step-100")
    shutil.copytree(DCP, steps / "step-20-hf.partial")
    (steps / "step-20-hf.partial" / ".manifest").touch()
    for chosen in (("--latest",), ("--step", "20")):
        assert run("ls", steps, *chosen).stdout == run("ls", steps / "step-20").stdout


def test_a_step_that_is_not_there_is_answered_with_those_that_are(steps: Path) -> None:
    result = run("ls", steps, "--step", "10")
    assert result.exit_code == 1
    assert "9, 20, 100" in result.stderr


def test_two_checkpoints_of_one_step_are_not_chosen_between(tmp_path: Path) -> None:
    for part in ("actor", "critic"):
        shutil.copytree(DCP, tmp_path / "global_step_5" / part)
    result = run("ls", tmp_path, "--latest", "-l")
    assert result.exit_code == 3
    for part in ("actor", "critic"):
        assert f"ckpt-tools ls {tmp_path}/global_step_5/{part} -l" in result.stderr
    assert run("ls", tmp_path / "global_step_5" / "critic", "--latest", "-l").exit_code == 0


@pytest.mark.parametrize("name", ["ep0-ba{step}-rank{{rank}}.pt", "step_{step}/rank_{{rank}}/m.pt"])
def test_rank_files_of_a_step_are_one_checkpoint_of_it(name: str, tmp_path: Path) -> None:
    for step in (7, 20):
        for rank in range(2):
            (tmp_path / f"step_{step}" / f"rank_{rank}").mkdir(parents=True)
        entries = {"w": (torch.full((3, 2), float(step)), ROWS)}
        save_ranks(tmp_path, entries, (2,), name=name.format(step=step))
    with ckpt_tools.open_checkpoint(tmp_path, latest=True) as checkpoint:
        assert checkpoint["w"].numpy().min() == 20
    found = run("inspect", tmp_path, "--step", "7", "--path-only").output.strip()
    assert run("ls", found).exit_code == 0
    torch.save({"w": torch.zeros(3, 2)}, tmp_path / "ep1-ba7.pt")
    assert "3 checkpoints of step 7" in run("ls", tmp_path, "--step", "7").output


def test_verify_of_a_run_has_a_line_for_each_and_the_worst_exit_code(steps: Path) -> None:
    result = run("verify", steps)
    assert result.exit_code == 3
    assert [line.split(": ")[1] for line in result.stdout.splitlines()] == [
        *("complete", "complete", "UNREADABLE")
    ]
    (steps / "step-20" / "__1_0.distcp").unlink()
    result = run("verify", steps / "step-9", steps / "step-20", "--quick")
    assert result.exit_code == 1
    assert "NOT COMPLETE" in result.stdout.splitlines()[1]
    told = json.loads(run("verify", steps / "step-9", steps / "step-20", "--json").stdout)
    assert told["schema"] == "ckpt-tools/verify-list/1"
    assert [one["whole"] for one in told["checkpoints"]] == [True, False]


def test_steps_are_read_from_the_names_that_frameworks_give() -> None:
    from ckpt_tools.formats.find import step_of

    told = {
        "ep3-ba200": 200,
        "epoch=1-step=30.ckpt": 30,
        "global_step_7/actor": 7,
        "checkpoint-500": 500,
        "iter_0000020": 20,
        "step-1000-unsharded": 1000,
        "epoch_2": 2,
        "eid_x-seen_steps_5-seen_tokens_50-target_steps_20-target_tokens_200": 5,
        "1500": 1500,
        "pytorch_model_fsdp_0": None,
        "llama-3-8b": None,
    }
    assert {name: step_of(name) for name in told} == told


def test_hf_assets_auto_takes_the_folder_that_verl_saved(tmp_path: Path) -> None:
    saved = DATA / "checkpoints" / "verl_fsdp2_4r" / "ckpt" / "global_step_1"
    result = run("export", saved, "-o", tmp_path / "out", "--hf-assets", "auto")
    assert result.exit_code == 0, result.stderr
    assert f"{saved}/actor/huggingface" in result.stderr
    for name in ("config.json", "tokenizer.json"):
        assert (tmp_path / "out" / name).exists()


def test_hf_assets_auto_without_any_is_refused(steps: Path, tmp_path: Path) -> None:
    result = run("export", steps / "step-9", "-o", tmp_path / "out", "--hf-assets", "auto")
    assert result.exit_code == 2
    assert not (tmp_path / "out").exists()
