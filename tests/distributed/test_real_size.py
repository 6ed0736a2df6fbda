"""torchrun on a tensor of 48 MiB: larger than every size that decides which way its bytes go.

One a case: all else of torchrun is tested on kilobytes, with sizes as small.
"""

from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from dtensor_files import ROWS, save_ranks
from launching import JOBS, torchrun

pytestmark = [
    pytest.mark.torchrun,
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning"),
]

SHAPE = (4096, 3072)
LARGE = torch.arange(SHAPE[0] * SHAPE[1], dtype=torch.int32).view(torch.float32).view(SHAPE)
SMALL = torch.arange(6.0).view(2, 3)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rank files on 2 ranks."""
    folder = tmp_path_factory.mktemp("real") / "ranks"
    save_ranks(folder, {"large": (LARGE, ROWS), "small": (SMALL, ROWS)}, (2,))
    return folder


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A DCP directory."""
    folder = tmp_path_factory.mktemp("real") / "dcp"
    dcp.save({"large": LARGE, "small": SMALL}, checkpoint_id=folder, no_dist=True)
    return folder


def reshard(source: Path, out: Path, *options: str, job: tuple[str | Path, ...] = ()) -> str:
    """What a job of 2 ranks says on stderr, whose OUT is what torch then loads."""
    words = ("reshard", source, "-o", out, "--to-mesh", "2", *options)
    done = torchrun(2, *(job or ("-m", "ckpt_tools")), *words)
    assert (done.returncode == 0) != bool(job), done.stderr[-4000:]
    return done.stderr


def require_loads(folder: Path) -> None:
    """Have torch itself load a DCP directory."""
    state = {"large": torch.empty(SHAPE), "small": torch.empty(2, 3)}
    dcp.load(state, checkpoint_id=folder, no_dist=True)
    assert torch.equal(state["large"].view(torch.int32), LARGE.view(torch.int32))
    assert torch.equal(state["small"], SMALL)


@pytest.mark.parametrize("source", ["ranks", "saved"])
def test_the_engine_copy(source: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    reshard(request.getfixturevalue(source), tmp_path / "out", "--engine", "copy")
    require_loads(tmp_path / "out")


def test_the_engine_dcp(saved: Path, tmp_path: Path) -> None:
    reshard(saved, tmp_path / "out", "--engine", "dcp")
    require_loads(tmp_path / "out")


def test_the_engine_gather(ranks: Path, tmp_path: Path) -> None:
    reshard(ranks, tmp_path / "out", "--engine", "gather")
    require_loads(tmp_path / "out")


def test_rank_files(saved: Path, tmp_path: Path) -> None:
    reshard(saved, tmp_path / "out", "--format", "ranks")
    files = sorted((tmp_path / "out").iterdir())
    parts = [
        torch.load(file, map_location="cpu", weights_only=False)["large"].to_local()
        for file in files
    ]
    assert torch.equal(torch.cat(parts).view(torch.int32), LARGE.view(torch.int32))


def test_the_folder_of_a_framework(saved: Path, tmp_path: Path) -> None:
    reshard(saved, tmp_path / "out", "--layout", "accelerate")
    (folder,) = (path.parent for path in (tmp_path / "out").rglob(".metadata"))
    state = {"model": {"large": torch.empty(SHAPE), "small": torch.empty(2, 3)}}
    dcp.load(state, checkpoint_id=folder, no_dist=True)
    assert torch.equal(state["model"]["large"].view(torch.int32), LARGE.view(torch.int32))


def test_a_job_that_failed_is_resumed(saved: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert "This rank was to fail." in reshard(saved, out, job=(JOBS / "breaks.py",))
    assert not out.exists()
    assert "Resuming: 1 of 3 files" in reshard(saved, out, "--resume")
    require_loads(out)
