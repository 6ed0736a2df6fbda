"""What an interrupted run of this program leaves is never read as a checkpoint."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import ckpt_tools
from ckpt_tools import formats
from ckpt_tools.copying import resume
from ckpt_tools.copying.origin import Origin
from ckpt_tools.copying.out_path import partial_of
from ckpt_tools.errors import IncompleteError


@pytest.fixture
def partial(tmp_path: Path) -> Path:
    """An output of one file in its full length, of which not all tensors are written."""
    folder = Path(partial_of(str(tmp_path / "run/step-200")))
    with resume.held(str(folder)) as manifest:
        manifest.begin(Origin("0.1.0", {}, {}, ""), single_file=None)
    save_file({"w": torch.zeros(4)}, folder / "new/model.safetensors")
    return folder


@pytest.mark.parametrize("given", ["..", ".", "new", "new/model.safetensors", "new/*.safetensors"])
def test_an_unfinished_output_is_refused_wherever_it_is_found(partial: Path, given: str) -> None:
    with pytest.raises(IncompleteError, match="an output of ckpt-tools that is not finished"):
        ckpt_tools.open_checkpoint(f"{partial}/{given}" if given != ".." else partial.parent)


def test_a_link_to_an_unfinished_output_is_refused(partial: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(partial / "new")
    with pytest.raises(IncompleteError, match="link is an output of ckpt-tools that is not"):
        ckpt_tools.open_checkpoint(tmp_path / "link")


def test_an_unfinished_output_is_listed_with_the_checkpoints_of_a_run(partial: Path) -> None:
    save_file({"w": torch.zeros(4)}, partial.parent / "step-100.safetensors")
    saves = formats.checkpoints_in(str(partial.parent))
    assert [(Path(one.path).name, one.step) for one in saves] == [
        ("step-100.safetensors", 100),
        ("step-200.partial", 200),
    ]


def test_a_folder_that_only_has_the_name_is_read(tmp_path: Path) -> None:
    (tmp_path / "mine.partial").mkdir()
    save_file({"w": torch.zeros(4)}, tmp_path / "mine.partial/model.safetensors")
    assert ckpt_tools.open_checkpoint(tmp_path / "mine.partial")["w"].shape == (4,)
