"""What is opened as part of a checkpoint is a regular file: nothing waits for a FIFO's writer."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import running
from launching import PATIENCE

from ckpt_tools.errors import IncompleteError, UnreadableError
from ckpt_tools.storage import paths
from ckpt_tools.storage.reader import Files

DATA = Path(__file__).parents[1] / "data" / "checkpoints"
CASES = (
    ("fsdp2_dcp_1d_4r/ckpt", "__1_0.distcp"),
    ("fsdp2_dcp_1d_4r/ckpt", ".metadata"),
    ("fsdp2_torchsave_1d_4r/ckpt", "model_rank1.pt"),
    ("hf_sharded_safetensors/ckpt", "model-00001-of-00003.safetensors"),
    ("hf_sharded_safetensors/ckpt", "model.safetensors.index.json"),
    ("hf_sharded_safetensors/ckpt", "config.json"),
)


def run(*args: object) -> subprocess.CompletedProcess[str]:
    """The command in a process of its own: one that hangs is ended."""
    words = [sys.executable, "-m", "ckpt_tools", *map(str, args)]
    return subprocess.run(words, capture_output=True, text=True, timeout=PATIENCE, check=False)


def exchange(file: Path) -> None:
    file.unlink(missing_ok=True)
    os.mkfifo(file)


@pytest.mark.parametrize(("kind", "name"), CASES)
def test_a_fifo_in_the_place_of_a_file_is_named_and_not_waited_for(
    tmp_path: Path, kind: str, name: str
) -> None:
    folder = Path(shutil.copytree(DATA / kind, tmp_path / "run"))
    exchange(next(folder.rglob(name), folder / name))
    more = ("--map", "auto") if name == "config.json" else ()  # else nobody reads it
    done = run("export", folder, "-o", tmp_path / "out", *more)
    assert done.returncode in (2, 3), done.stderr
    assert name in done.stderr
    assert "is a FIFO" in done.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["run.pt", "run.safetensors", "run", ".metadata"])
def test_a_checkpoint_that_is_a_fifo_is_refused(tmp_path: Path, name: str) -> None:
    exchange(tmp_path / name)
    done = run("inspect", tmp_path / name)
    assert done.returncode == 3
    assert "is a FIFO" in done.stderr


def test_a_fifo_beside_a_checkpoint_does_no_harm(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(DATA / CASES[0][0], tmp_path / "run"))
    exchange(folder / "control")
    assert run("verify", folder).returncode == 0


def test_a_link_that_leads_nowhere_is_told_with_its_target(tmp_path: Path) -> None:
    link = tmp_path / "model.safetensors"
    link.symlink_to("../blobs/1f2e")
    with Files() as files, pytest.raises(IncompleteError, match=r"is a link to \.\./blobs/1f2e"):
        files.size(str(link))


def test_a_device_is_not_opened() -> None:
    with Files() as files, pytest.raises(UnreadableError, match="is a character device"):
        files.read("/dev/zero", 0, 8)
    with pytest.raises(OSError, match="is a character device"):
        paths.size("/dev/zero")


@pytest.mark.parametrize(
    ("relative", "path"),
    [("__0_0.distcp", "__0_0.distcp"), ("./a", "a"), ("x/../a", "a"), ("x//a", "x/a")],
)
def test_a_path_in_a_folder_has_one_form(relative: str, path: str) -> None:
    assert paths.inside(relative) == path


@pytest.mark.parametrize("relative", ["../a", "/a", "x/../../a", "..", "."])
def test_a_path_that_leaves_its_folder_is_refused(relative: str) -> None:
    with pytest.raises(UnreadableError, match="outside of its folder"):
        paths.inside(relative)


@pytest.mark.parametrize("relative", ["", "a\0b", "\ud800", "x" * 5000])
def test_a_path_that_no_file_can_have_is_refused(relative: str) -> None:
    with pytest.raises(UnreadableError, match="not possible"):
        paths.inside(relative)


@pytest.mark.parametrize("before", ["./", "x/../"])
def test_dcp_items_are_found_by_any_form_of_their_path(tmp_path: Path, before: str) -> None:
    folder = _renamed(tmp_path / "run", before)
    for quick in ((), ("--quick",)):
        done = running.run("verify", folder, *quick)
        assert done.exit_code == 0, done.stderr
        assert "all 48 are complete" in done.stdout
        assert "0-3 intact" in done.stdout


def test_a_dcp_item_outside_of_the_directory_is_refused(tmp_path: Path) -> None:
    folder = _renamed(tmp_path / "run", "../run/")
    done = running.run("verify", folder)
    assert done.exit_code == 3
    assert "outside of its folder: '../run/__0_0.distcp'" in done.stderr


def _renamed(folder: Path, before: str) -> Path:
    """A DCP directory whose .metadata has this before each name of a file."""
    import pickle

    shutil.copytree(DATA / CASES[0][0], folder)
    file = folder / ".metadata"
    metadata = pickle.loads(file.read_bytes())  # noqa: S301 - our own test data
    for info in metadata.storage_data.values():
        info.relative_path = before + info.relative_path
    file.write_bytes(pickle.dumps(metadata, protocol=4))
    return folder
