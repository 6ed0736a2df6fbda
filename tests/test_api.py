"""What `import ckpt_tools` offers: cheap to import, reads boxes, runs the verbs."""

import importlib
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import ckpt_tools
from ckpt_tools import Box, ReshardOptions, open_checkpoint, parse_mesh
from ckpt_tools.api import Checkpoint
from ckpt_tools.errors import (
    AnswerNo,
    IncompleteError,
    UnsupportedError,
    UsageError,
)
from ckpt_tools.storage.reader import Files

ROOT = Path(__file__).parent.parent
REAL = ROOT / "tests" / "data" / "checkpoints"
DCP = str(REAL / "fsdp2_dcp_1d_4r" / "ckpt")


@pytest.fixture
def checkpoint() -> Checkpoint:
    return open_checkpoint(DCP)


def _matrix(checkpoint: Checkpoint) -> ckpt_tools.TensorEntry:
    return next(e for e in checkpoint.tensors if len(e.shape) == 2 and len(e.chunks) > 1)


def test_importing_the_package_loads_nothing_heavy() -> None:
    code = "import sys, ckpt_tools; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = set(done.stdout.split())
    assert not loaded & {"torch", "numpy", "click", "ckpt_tools.formats", "ckpt_tools.core.index"}


@pytest.mark.parametrize("name", ckpt_tools.__all__)
def test_every_public_name_is_there(name: str) -> None:
    assert getattr(ckpt_tools, name) is not None


def test_public_names_are_those_of_their_modules() -> None:
    for module, names in ckpt_tools._HOMES.items():
        home = importlib.import_module(f"ckpt_tools.{module}")
        assert all(getattr(ckpt_tools, name) is getattr(home, name) for name in names.split())


def test_a_name_that_is_not_there_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no_such"):
        _ = ckpt_tools.no_such


def test_a_tensor_reads_the_same_by_both_ways(checkpoint: Checkpoint) -> None:
    entry = _matrix(checkpoint)
    assert np.array_equal(checkpoint.read(entry.fqn), checkpoint.read_torch(entry.fqn).numpy())


def test_a_box_is_the_slice_of_the_whole(checkpoint: Checkpoint) -> None:
    entry = _matrix(checkpoint)
    rows, columns = entry.shape
    box = Box((rows // 3, 1), (rows // 2, columns - 1))
    whole = checkpoint.read(entry.fqn)
    assert np.array_equal(checkpoint.read(entry.fqn, box), whole[rows // 3 :][: rows // 2, 1:])


def test_values_are_those_that_torch_loads() -> None:
    path = REAL / "fsdp2_full_torchsave_4r"
    found = next(p for p in sorted(path.rglob("*.pt")) if torch.load(p, weights_only=True))
    checkpoint = open_checkpoint(str(found))
    expected = torch.load(found, weights_only=True)
    for part in checkpoint.tensors[0].path:
        expected = expected[part]
    assert torch.equal(checkpoint.read_torch(checkpoint.tensors[0].fqn), expected)


def test_only_the_bytes_of_the_box_are_read(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry = _matrix(checkpoint)
    tensor_bytes = []
    real = Files.read_into

    def counted(self: Files, path: str, offset: int, buffer: memoryview) -> None:
        tensor_bytes.append(len(buffer))
        real(self, path, offset, buffer)

    monkeypatch.setattr(Files, "read_into", counted)
    checkpoint.read(entry.fqn, Box((0, 0), (1, 2)))
    assert sum(tensor_bytes) <= 2 * entry.dtype.itemsize


def test_an_empty_box_and_a_scalar_have_their_shapes(checkpoint: Checkpoint) -> None:
    entry = _matrix(checkpoint)
    assert checkpoint.read(entry.fqn, Box((0, 0), (0, 2))).shape == (0, 2)
    assert checkpoint.read_torch(entry.fqn, Box((0, 0), (0, 2))).shape == (0, 2)
    scalar = next(e for e in checkpoint.tensors if e.shape == ())
    assert checkpoint.read(scalar.fqn).shape == ()


def test_what_numpy_lacks_is_refused_with_the_way_that_works() -> None:
    checkpoint = open_checkpoint(str(REAL / "fsdp2_bf16_fp32optim_dcp_4r" / "ckpt"))
    entry = next(e for e in checkpoint.tensors if e.dtype.name == "bfloat16")
    with pytest.raises(UnsupportedError) as caught:
        checkpoint.read(entry.fqn)
    assert "read_torch" in str(caught.value.hint)
    assert checkpoint.read_torch(entry.fqn).dtype is torch.bfloat16


def test_an_unknown_name_is_refused(checkpoint: Checkpoint) -> None:
    with pytest.raises(AnswerNo, match="no tensor 'nope'"):
        checkpoint.read("nope")


@pytest.mark.parametrize("box", [Box((0,), (1,)), Box((0, 0), (10**9, 1)), Box((0, 0), (-1, 1))])
def test_a_box_outside_of_the_tensor_is_refused(checkpoint: Checkpoint, box: Box) -> None:
    with pytest.raises(UsageError):
        checkpoint.read(_matrix(checkpoint).fqn, box)


def test_a_tensor_with_a_lost_shard_is_refused(tmp_path: Path) -> None:
    shutil.copytree(DCP, tmp_path / "ckpt")
    next((tmp_path / "ckpt").glob("__1_*.distcp")).unlink()
    hurt = open_checkpoint(str(tmp_path / "ckpt"))
    with pytest.raises(IncompleteError):
        hurt.read(_matrix(hurt).fqn)


def test_reshard_from_python_gives_the_same_tensors(checkpoint: Checkpoint, tmp_path: Path) -> None:
    out = str(tmp_path / "out")
    ckpt_tools.reshard(checkpoint, out, options=ReshardOptions(parse_mesh("2x2")))
    first, second = (ckpt_tools.fingerprint(one) for one in (checkpoint, open_checkpoint(out)))
    assert first.sections == second.sections


def test_the_examples_of_the_docs_run(tmp_path: Path) -> None:
    shutil.copytree(DCP, tmp_path / "run7" / "step-1000")
    text = (ROOT / "docs" / "library.md").read_text()
    code = "\n".join(re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL))
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True, capture_output=True)
