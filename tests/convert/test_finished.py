"""--resume of an output that is finished already, and of one that another command began."""

import shutil
from pathlib import Path

import pytest
import running
import torch
from click.testing import Result
from dtensor_files import ROWS, save_ranks
from size_records import DEFAULT, use

from ckpt_tools.copying.task_writer import TaskWriter
from ckpt_tools.errors import WriteError

COMMANDS = {
    "dcp": ("reshard", "--to-mesh", "3x2"),
    "cast": ("reshard", "--to-mesh", "2", "--dtype", "bf16"),
    "rank files": ("reshard", "--to-mesh", "2", "--format", "ranks"),
    "layout": ("reshard", "--to-mesh", "2", "--layout", "titan"),
    "export": ("export",),
    "one file": ("export", "--format", "safetensors"),
}


def save(folder: Path, *, step: int) -> Path:
    torch.manual_seed(step)
    tensors = {"w": torch.randn(8, 40), "b": torch.randn(40)}
    save_ranks(folder, {name: (value, ROWS) for name, value in tensors.items()}, (2,))
    return folder


def run(kind: str, source: Path, out: Path, *options: str) -> Result:
    command, *more = COMMANDS[kind]
    return running.run(command, source, "-o", out, *more, *options)


@pytest.fixture
def out(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    return tmp_path / ("out.safetensors" if "one file" in request.node.name else "out")


@pytest.mark.parametrize("kind", COMMANDS)
def test_a_finished_output_of_the_same_command_is_done(
    kind: str, tmp_path: Path, out: Path
) -> None:
    source = save(tmp_path / "source", step=1)
    assert run(kind, source, out).exit_code == 0
    files = [path for path in (out, *out.rglob("*")) if path.is_file()]
    before = [path.stat().st_mtime_ns for path in files]
    again = run(kind, source, out, "--resume")
    assert again.exit_code == 0, again.output
    assert f"{out} is already complete." in again.stderr
    assert [path.stat().st_mtime_ns for path in files] == before


@pytest.mark.parametrize("kind", COMMANDS)
def test_the_output_of_another_save_is_not(kind: str, tmp_path: Path, out: Path) -> None:
    assert run(kind, save(tmp_path / "source", step=1), out).exit_code == 0
    shutil.rmtree(tmp_path / "source")
    again = run(kind, save(tmp_path / "source", step=2), out, "--resume")
    assert again.exit_code == 2
    assert "is not what this command writes from this source" in again.stderr


def test_what_is_discarded_is_said_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use(DEFAULT, monkeypatch)  # a file is finished after three tasks
    source, out = save(tmp_path / "source", step=1), tmp_path / "out"

    def fail(*_: object) -> int:
        raise WriteError("The disk is full.")

    with monkeypatch.context() as patch:
        write, calls = TaskWriter.write, []
        patch.setattr(
            TaskWriter,
            "write",
            lambda *words: fail() if calls.append(1) or len(calls) > 3 else write(*words),
        )
        assert run("dcp", source, out, "--threads", "1").exit_code == 4
    again = run("dcp", source, out)
    assert again.exit_code == 0
    said = again.stderr.index("out.partial of an earlier run is removed (")
    assert "--resume would go on with what is finished." in again.stderr[said:]
