"""The commands verify, fingerprint, diff and stats: what they print, and how they end."""

import csv
import json
import os
import re
import shlex
import shutil
from pathlib import Path

import pytest
import torch
from running import run

from ckpt_tools import formats
from ckpt_tools.core.index import CheckpointIndex, LocatedIndex
from ckpt_tools.core.text import format_size
from ckpt_tools.storage.reader import Files

DATA = Path(__file__).parents[1] / "data"
CHECKPOINTS = DATA / "checkpoints"
DCP = str(CHECKPOINTS / "fsdp2_dcp_hsdp_2x4" / "ckpt")
ZSTD = str(CHECKPOINTS / "dcp_zstd_4r" / "ckpt")
FULL = str(CHECKPOINTS / "fsdp2_full_torchsave_4r" / "ckpt" / "consolidated.pt")
RANKS = str(CHECKPOINTS / "fsdp2_torchsave_hsdp_2x4" / "ckpt")
SAFE = str(CHECKPOINTS / "dcp_hf_sharded_4r" / "ckpt")
OTHER = str(CHECKPOINTS / "fsdp2_dcp_1d_4r" / "ckpt")
HOLE = str(DATA / "cases" / "C33_missing_ranks" / "hole")
DTYPES = str(CHECKPOINTS / "dtensor_dtypes_dcp_4r" / "ckpt")


@pytest.fixture
def damaged(tmp_path: Path) -> str:
    """A DCP directory with one flipped bit in a tensor, near the end of rank 0's file."""
    path = tmp_path / "ckpt"
    shutil.copytree(CHECKPOINTS / "fsdp2_shard1_dcp_4r" / "ckpt", path)
    (path / "__3_0.distcp").chmod(0o644)
    os.truncate(path / "__3_0.distcp", (path / "__3_0.distcp").stat().st_size - 10)
    return str(path)


# --------------------------------------------------------------------------------------------- help


@pytest.mark.parametrize("name", ["verify", "fingerprint", "diff", "stats"])
def test_help_ends_with_examples(name: str) -> None:
    result = run(name, "--help")
    assert result.exit_code == 0
    assert f"ckpt-tools {name}" in result.stdout


# ------------------------------------------------------------------------------------------- verify


def test_a_whole_checkpoint_ends_with_0() -> None:
    result = run("verify", DCP)
    assert result.exit_code == 0, result.output
    assert ": complete\n" in result.stdout
    assert "all 46 are complete" in result.stdout
    size = format_size(formats.read_index(DCP).file_bytes)
    assert f"CRC-32s; the rest of {size} is headers and padding\n" in result.stdout
    assert " of .metadata have no checksum" in result.stdout


def test_quick_says_that_values_were_not_read() -> None:
    result = run("verify", DCP, "--quick")
    assert result.exit_code == 0
    assert "only headers were read" in result.stdout


def test_a_damaged_checkpoint_ends_with_1_and_says_what_is_whole(damaged: str) -> None:
    result = run("verify", damaged)
    assert result.exit_code == 1
    assert ": DAMAGED\n" in result.stdout
    assert "is truncated" in result.stdout
    assert "headers and padding" not in result.stdout  # what was lost is no such thing
    assert "0-2 intact; 3 damaged" in result.stdout


def test_a_file_that_a_crash_left_as_zeros_is_told_once(damaged: str) -> None:
    path = Path(damaged, "__0_0.distcp")
    path.chmod(0o644)
    path.write_bytes(bytes(path.stat().st_size))
    result = run("verify", damaged)
    assert result.exit_code == 1
    assert result.stdout.count("it begins with zeros") == 1


def test_a_hole_is_told_by_rows_and_rank() -> None:
    result = run("verify", HOLE)
    assert result.exit_code == 1
    assert "w: rows 6:8 of 16 (rank 3)" in result.stdout


def test_what_cannot_be_read_at_all_ends_with_3(tmp_path: Path) -> None:
    (tmp_path / "x.pt").write_bytes(b"PK\3\4 no more")
    result = run("verify", str(tmp_path / "x.pt"))
    assert result.exit_code == 3
    assert result.stdout == ""


def test_verify_json(damaged: str) -> None:
    told = json.loads(run("verify", damaged, "--json").stdout)
    assert told["schema"] == "ckpt-tools/verify/1"
    assert told["whole"] is False
    assert told["mode"] == "full"
    assert told["tensors"]["total"] == 18
    assert told["tensors"]["whole"] + len(told["tensors"]["hurt"]) == 18
    assert told["problems"][0]["about"] == [hurt["fqn"] for hurt in told["tensors"]["hurt"]]
    assert told["against"] is None


@pytest.mark.parametrize("verb", ["verify", "verify --quick", "fingerprint", "stats", "diff"])
def test_a_checkpoint_that_is_saved_while_it_is_read_has_no_answer(
    verb: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = shutil.copytree(DCP, tmp_path / "ckpt")
    locate = formats.locate

    def locate_late(index: CheckpointIndex, files: Files) -> LocatedIndex:
        os.utime(path / "__0_0.distcp", (0, 0))
        return locate(index, files)

    monkeypatch.setattr(formats, "locate", locate_late)
    result = run(*verb.split(), str(path), *([DCP] if verb == "diff" else []))
    assert (result.exit_code, result.stdout) == (3, "")
    assert "__0_0.distcp has changed since it was first read" in result.stderr


def test_filters_without_against_mean_nothing() -> None:
    assert run("verify", DCP, "--only", "model").exit_code == 2


def test_the_same_tensors_in_another_format_are_the_same() -> None:
    result = run("verify", FULL, "--against", DCP)
    assert result.exit_code == 0, result.output
    assert "the same, bit for bit (model, optim)" in result.stdout


def test_sections_that_the_reference_lacks_are_told() -> None:
    result = run("verify", DCP, "--against", SAFE)
    assert result.exit_code == 0
    assert "not compared, because the other side has none: optim" in result.stdout


def test_sections_that_the_checkpoint_lacks_are_a_difference() -> None:
    assert run("verify", SAFE, "--against", DCP).exit_code == 1
    assert run("verify", SAFE, "--against", DCP, "--only", "model").exit_code == 0


def test_a_cast_export_is_proven_later(tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert run("export", DCP, "-o", str(out), "--dtype", "bf16").exit_code == 0
    against = ("verify", str(out), "--against", DCP, "--only", "model")
    without = run(*against)
    assert without.exit_code == 1
    assert f"verify {out} --against … --cast" in without.stderr
    proven = run(*against, "--cast")
    assert proven.exit_code == 0, proven.output
    assert re.search(r"the same, bit for bit, \d+ cast from float32 to bfloat16", proven.stdout)
    other = run("verify", str(out), "--against", OTHER, "--only", "model", "--cast", "--json")
    assert other.exit_code == 1
    assert {one["what"] for one in json.loads(other.stdout)["against"]["differences"]} >= {"values"}


def test_a_cast_needs_a_checkpoint_to_compare_with(tmp_path: Path) -> None:
    kept = str(tmp_path / "kept.json")
    assert run("fingerprint", DCP, "--write", kept).exit_code == 0
    assert run("verify", DCP, "--against", kept, "--cast").exit_code == 2
    assert run("verify", DCP, "--cast").exit_code == 2


def test_another_run_is_not_the_same() -> None:
    result = run("verify", OTHER, "--against", DCP, "--json")
    assert result.exit_code == 1
    told = json.loads(result.stdout)
    assert told["whole"] is True
    assert told["against"]["same"] is False
    assert {one["what"] for one in told["against"]["differences"]} >= {"values"}


def test_a_checkpoint_is_compared_with_its_kept_fingerprint(tmp_path: Path) -> None:
    kept = str(tmp_path / "kept.json")
    assert run("fingerprint", DCP, "--write", kept).exit_code == 0
    assert run("verify", ZSTD, "--against", kept).exit_code == 0
    assert run("verify", SAFE, "--against", kept, "--only", "model").exit_code == 0
    assert run("verify", SAFE, "--against", kept).exit_code == 1


def test_hurt_tensors_are_not_compared(damaged: str) -> None:
    result = run("verify", damaged, "--against", damaged)
    assert result.exit_code == 1
    assert "not compared, because tensors are damaged" in result.stdout
    told, whole = (
        json.loads(run("verify", path, "--against", path, "--json").stdout)["against"]
        for path in (damaged, DCP)
    )
    assert told.keys() == whole.keys()


def test_verify_names_the_command_that_rescues_what_is_complete(
    damaged: str, tmp_path: Path
) -> None:
    told = run("verify", damaged).stdout
    found = re.search(r"rescue +ckpt-tools (export .*)", told)
    assert found is not None, told
    out = tmp_path / "out"
    words = shlex.split(found[1].replace(" OUT", f" {out}"))
    assert run(*words).exit_code == 0
    assert run("verify", out).exit_code == 0


def test_the_rescue_of_a_name_with_brackets_leaves_out_that_one_alone(tmp_path: Path) -> None:
    path, zeros = tmp_path / "state.pt", torch.zeros(64)
    torch.save({"model": {"w[0]": torch.ones(64), "w0": zeros, "v": zeros}}, path)
    data = path.read_bytes()
    path.write_bytes(data.replace(b"\0\0\x80\x3f" * 2, b"\0\0\x80\x40" * 2, 1))
    told = run("verify", path).stdout
    found = re.search(r"rescue +ckpt-tools (export .*) -o OUT (-x 'model.w\[\[\]0\]')", told)
    assert found is not None, told
    assert run(*shlex.split(f"{found[1]} -o {tmp_path}/out {found[2]}")).exit_code == 0
    assert "2 tensors" in run("ls", tmp_path / "out").stderr


def test_a_lost_file_of_replicas_keeps_nothing_from_being_compared(tmp_path: Path) -> None:
    path = tmp_path / "ckpt"
    shutil.copytree(RANKS, path)
    (path / "model_rank5.pt").unlink()
    result = run("verify", str(path), "--against", RANKS)
    assert result.exit_code == 1
    assert "the same, bit for bit (model)" in result.stdout


# -------------------------------------------------------------------------------------- fingerprint


def test_a_fingerprint_is_one_line_a_section() -> None:
    lines = run("fingerprint", DCP).stdout.splitlines()
    assert [line.split()[0] for line in lines] == ["model", "optim"]
    assert lines == run("fingerprint", FULL).stdout.splitlines()


def test_long_adds_every_tensor() -> None:
    lines = run("fingerprint", SAFE, "--long").stdout.splitlines()
    assert len(lines) == 1 + 13
    assert all(len(line.split()[0]) == 64 for line in lines[1:])


def test_fingerprint_json() -> None:
    told = json.loads(run("fingerprint", SAFE, "--json").stdout)
    assert list(told) == ["schema", "digest", "sections", "tensors"]
    assert told["tensors"]["scale"]["dtype"] == "float32"


def test_a_fingerprint_never_replaces_a_file_unasked(tmp_path: Path) -> None:
    kept = tmp_path / "kept.json"
    kept.write_text("mine")
    assert run("fingerprint", SAFE, "--write", str(kept)).exit_code == 2
    assert kept.read_text() == "mine"
    assert run("fingerprint", SAFE, "--write", str(kept), "--force").exit_code == 0
    assert json.loads(kept.read_text())["schema"] == "ckpt-tools/fingerprint/1"


def test_a_fingerprint_that_cannot_be_kept_ends_with_4(tmp_path: Path) -> None:
    result = run("fingerprint", SAFE, "--write", str(tmp_path / "no" / "kept.json"))
    assert result.exit_code == 4


def test_no_tensors_are_no_fingerprint() -> None:
    path = CHECKPOINTS / "transformers_trainer_fsdp2_4r" / "ckpt" / "checkpoint-2" / "scheduler.pt"
    assert run("fingerprint", str(path)).exit_code == 1


def test_filters_choose_what_is_digested() -> None:
    lines = run("fingerprint", DCP, "--only", "optim", "-i", "*.exp_avg", "-l").stdout.splitlines()
    assert {line.split()[0] for line in lines[:1]} == {"optim"}
    assert all(line.endswith(".exp_avg") for line in lines[1:])


# --------------------------------------------------------------------------------------------- diff


def test_equal_checkpoints_end_with_0() -> None:
    result = run("diff", DCP, ZSTD)
    assert result.exit_code == 0, result.output
    assert result.stdout.endswith("All are the same.\n")


def test_different_checkpoints_end_with_1_and_a_table() -> None:
    result = run("diff", DCP, OTHER)
    assert result.exit_code == 1
    assert result.stdout.startswith("NAME")
    assert "only in B" in result.stdout


def test_header_only_says_that_values_were_not_compared() -> None:
    result = run("diff", DCP, ZSTD, "--header-only")
    assert result.exit_code == 0
    assert "VALUES WERE NOT COMPARED" in result.stdout


def test_the_largest_difference_comes_first(tmp_path: Path) -> None:
    one = {"a": torch.zeros(2), "b": torch.zeros(2), "c": torch.zeros(2), "d": torch.zeros(3)}
    other = {"a": torch.ones(2), "b": torch.full((2,), 5.0), "c": torch.tensor([0, float("nan")])}
    torch.save(one, tmp_path / "one.pt")
    torch.save(other, tmp_path / "other.pt")
    done = run("diff", tmp_path / "one.pt", tmp_path / "other.pt", "--sort", "size")
    assert [line[0] for line in done.stdout.splitlines()[1:5]] == ["c", "d", "b", "a"]
    done = run("diff", tmp_path / "one.pt", tmp_path / "other.pt", "--sort", "size", "-n", "2")
    assert [line[:5] for line in done.stdout.splitlines()[3:5]] == ["and 2", ""]


def test_tolerances_need_values() -> None:
    assert run("diff", DCP, ZSTD, "--header-only", "--rtol", "1e-3").exit_code == 2


def test_where_no_name_is_common_they_are_compared_without_containers() -> None:
    result = run("diff", DCP, SAFE, "--only", "model")
    assert result.exit_code == 0
    assert "compared without containers (--clean-names)" in result.stderr
    assert "--clean-names" in run("diff", DCP, OTHER).stderr  # both have an object `step`


def test_names_that_clean_ones_would_mix_up_are_compared_as_they_are(tmp_path: Path) -> None:
    both = {"model": {"w": torch.ones(2)}, "state_dict": {"w": torch.ones(2)}}
    torch.save(both, tmp_path / "a.pt")
    torch.save({"q": torch.ones(2)}, tmp_path / "b.pt")
    done = run("diff", tmp_path / "a.pt", tmp_path / "b.pt")
    assert (done.exit_code, done.stderr) == (1, "")
    assert "only in A" in done.stdout


def test_other_values_of_another_type_are_called_values(tmp_path: Path) -> None:
    torch.save({"a": torch.ones(2), "b": torch.ones(2)}, tmp_path / "a.pt")
    torch.save({"a": torch.full((2,), 2.0).half(), "b": torch.ones(2).half()}, tmp_path / "b.pt")
    files = tmp_path / "a.pt", tmp_path / "b.pt"
    told = json.loads(run("diff", *files, "--ignore-dtypes", "--json").stdout)
    assert [(one["name"], one["what"]) for one in told["differences"]] == [("a", "values")]
    told = json.loads(run("diff", *files, "--json").stdout)
    assert {one["what"] for one in told["differences"]} == {"dtype"}


def test_diff_json() -> None:
    told = json.loads(run("diff", SAFE, OTHER, "--json", "--clean-names", "--only", "model").stdout)
    assert told["schema"] == "ckpt-tools/diff/1"
    assert told["equal"] is False
    assert told["tensors"] == 13
    first = told["differences"][0]
    assert first["what"] == "values"
    assert first["values"]["differing"] <= first["values"]["numel"]
    assert first["values"]["max_abs"] > 0


def test_an_incomplete_side_ends_with_3() -> None:
    assert run("diff", HOLE, HOLE).exit_code == 3


# -------------------------------------------------------------------------------------------- stats


def test_stats_prints_a_row_for_each_tensor() -> None:
    result = run("stats", SAFE)
    assert result.exit_code == 0, result.output
    assert len(result.stdout.splitlines()) == 1 + 13


def test_values_that_are_not_finite_fail_when_asked() -> None:
    assert run("stats", DTYPES).exit_code == 0
    result = run("stats", DTYPES, "--fail-nonfinite")
    assert result.exit_code == 1
    assert "3 values are NaN or infinite" in result.stderr
    assert run("stats", SAFE, "--fail-nonfinite").exit_code == 0


def test_stats_json() -> None:
    told = json.loads(run("stats", DTYPES, "--json").stdout)
    assert told["schema"] == "ckpt-tools/stats/1"
    assert told["nonfinite"] == 3
    assert all(
        len(facts["mean"]) == 2
        for facts in told["tensors"].values()
        if facts["dtype"] == "complex64" and facts["numel"]
    )


def test_stats_csv() -> None:
    rows = list(csv.DictReader(run("stats", SAFE, "--csv").stdout.splitlines()))
    assert len(rows) == 13
    assert rows[0].keys() >= {"name", "section", "numel", "mean", "zeros"}
    assert float(rows[0]["std"]) > 0


def test_csv_and_json_cannot_be_had_at_once() -> None:
    assert run("stats", SAFE, "--csv", "--json").exit_code == 2


def test_anomalies_stand_below_the_table() -> None:
    path = CHECKPOINTS / "torch-2.9.1-e2_2d_manual" / "full.pt"
    result = run("stats", str(path), "--only", "model")
    assert "zero rows: model.blocks.0.up.weight [5:6, 0:3], rank 5" in result.stdout


def test_verify_against_a_checkpoint_of_the_same_names_compares_its_objects(
    tmp_path: Path,
) -> None:
    import torch

    for name, step in (("good", 7), ("bad", 8)):
        torch.save({"model": {"w": torch.ones(2)}, "step": step}, tmp_path / f"{name}.pt")
    good, bad = str(tmp_path / "good.pt"), str(tmp_path / "bad.pt")
    assert run("verify", good, "--against", good).exit_code == 0
    result = run("verify", bad, "--against", good)
    assert result.exit_code == 1
    assert "step" in result.stdout
    assert "8, not 7" in result.stdout
