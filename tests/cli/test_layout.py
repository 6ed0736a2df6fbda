"""`ckpt-tools layout`: what it prints, writes and refuses."""

import json
from pathlib import Path

from click.testing import Result
from running import run

REAL = Path(__file__).parents[1] / "data" / "checkpoints"
HSDP = str(REAL / "fsdp2_dcp_hsdp_2x4" / "ckpt")
TP = str(REAL / "fsdp2_tp_torchsave_2x2" / "ckpt")


def _run(*args: str) -> Result:
    return run("layout", *args)


def test_a_bar_names_the_ranks_of_each_piece() -> None:
    done = _run(HSDP, "--quiet")
    line = next(x for x in done.stdout.splitlines() if x.startswith("model.blocks.0.fc1.bias"))
    assert "│0,4        │1,5        │2,6        │3,7│ 2 replicas" in line
    assert "inferred from the boxes" in done.stdout


def test_bytes_per_rank_stand_above_with_their_skew() -> None:
    done = _run(TP, "--quiet")
    assert "Bytes per rank" in done.stdout
    assert "times the average" in done.stdout


def test_one_name_is_a_grid_with_its_pieces() -> None:
    done = _run(TP, "blocks.0.fc1.weight", "--quiet")
    assert "┌ 2 ───" in done.stdout
    assert "[3:5, 0:7]" in done.stdout
    assert "model_rank2.pt" in done.stdout


def test_every_real_checkpoint_is_drawn() -> None:
    for name in ("hf_sharded_safetensors", "fsdp2_full_torchsave_4r", "fsdp2_ep_torchsave_2x2"):
        done = _run(str(REAL / name), "--quiet")
        assert done.exit_code in (0, 3), done.output
        assert "ckpt-tools itself failed" not in done.output


def test_to_mesh_shows_both_and_what_moves() -> None:
    done = _run(HSDP, "--to-mesh", "4", "--quiet")
    assert done.exit_code == 0
    assert "After reshard --to-mesh dp_shard=4" in done.stdout
    assert "264 B move, 6% of what the new ranks hold" in done.stdout


def test_json_has_every_piece_and_its_holders() -> None:
    found = json.loads(_run(HSDP, "--json", "--to-mesh", "2x2", "--quiet").stdout)
    assert found["schema"] == "ckpt-tools/layout/1"
    first = found["tensors"][0]
    assert first["pieces"][0]["holders"] == [0, 4]
    assert found["files"][first["pieces"][0]["file"]].endswith(".distcp")
    assert found["moved"]["nbytes"] == sum(found["moved"]["by_rank"])


def test_a_page_is_written_once_and_replaced_with_force_only(tmp_path: Path) -> None:
    out = tmp_path / "layout.html"
    assert _run(TP, "--html", str(out), "--quiet").exit_code == 0
    before = out.read_bytes()
    again = _run(TP, "--html", str(out), "--quiet")
    assert again.exit_code == 2
    assert "--force replaces it" in again.stderr
    assert _run(TP, "--html", str(out), "--quiet", "--force").exit_code == 0
    assert out.read_bytes() == before


def test_a_page_can_go_to_stdout() -> None:
    assert _run(TP, "--html", "-", "--quiet").stdout.startswith("<!doctype html>")


def test_a_picture_file_is_answered_with_the_page_and_the_terminal() -> None:
    done = _run(TP, "--svg", "a.svg")
    assert done.exit_code == 2
    assert "layout has no --svg." in done.stderr
    assert "--html FILE" in done.stderr


def test_an_unknown_name_gets_names_that_are_near() -> None:
    done = _run(HSDP, "fc1.weight", "--quiet")
    assert done.exit_code == 1
    assert "model.blocks.0.fc1.weight" in done.stderr


def test_two_forms_at_once_are_refused() -> None:
    assert _run(HSDP, "--html", "a", "--json").exit_code == 2
