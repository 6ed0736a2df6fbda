"""--check reads the output back before it gets its name, and the proof stands in the output."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from reader_contract import DATA
from safetensors import safe_open

from ckpt_tools.cli import cli
from ckpt_tools.copying import write as copy

DCP = str(DATA / "checkpoints" / "fsdp2_dcp_hsdp_2x4" / "ckpt")


def run(*args: str) -> Result:
    return CliRunner().invoke(cli, list(args))


@pytest.mark.parametrize("dtype", ["keep", "bf16"])
def test_an_export_says_and_keeps_what_was_proven(dtype: str, tmp_path: Path) -> None:
    result = run("export", DCP, "-o", str(tmp_path / "out"), "--check", "--dtype", dtype)
    assert result.exit_code == 0
    words = result.stderr.splitlines()[-1]
    assert words.startswith("Proven by SHA-256: the 13 tensors written")
    with safe_open(tmp_path / "out" / "model.safetensors", "np") as file:
        assert file.metadata()["proof"].rstrip() == words


def test_a_reshard_keeps_the_proof_beside_the_shards(tmp_path: Path) -> None:
    assert (
        run("reshard", DCP, "-o", str(tmp_path / "out"), "--to-mesh", "3", "--check").exit_code == 0
    )
    told = json.loads((tmp_path / "out" / "ckpt_tools_proof.json").read_text())
    assert "are the source's: 46 bit for bit." in told["proof"]
    assert told["proof"].endswith("So are its 14 objects and 17 containers, by value.")


@pytest.mark.parametrize("command", ["export", "reshard"])
def test_an_output_with_a_wrong_value_never_gets_its_name(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = copy.write_files

    def faulty(plans: object, **options: object) -> None:
        real(plans, **options)
        for path in Path(str(options["root"])).rglob("*"):
            if path.suffix in (".safetensors", ".distcp") and path.stat().st_size:
                data = bytearray(path.read_bytes())
                data[-900 if path.suffix == ".distcp" else -1] ^= 1
                path.write_bytes(data)

    monkeypatch.setattr(copy, "write_files", faulty)
    more = ["--to-mesh", "2"] if command == "reshard" else []
    result = run(command, DCP, "-o", str(tmp_path / "out"), "--check", *more)
    assert result.exit_code in (3, 4)
    assert not (tmp_path / "out").exists()


def test_the_check_of_several_folders_is_refused(tmp_path: Path) -> None:
    result = run(
        "reshard", DCP, "-o", str(tmp_path / "o"), "--to-mesh", "2", "--check",
        "--layout", "accelerate",
    )  # fmt: skip
    assert result.exit_code == 2
