"""scripts/realsize, on next to nothing: that it runs, and sees what is wrong."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import safetensors.torch
import torch

from ckpt_tools.transforms.frameworks import layouts

SCRIPTS = Path(__file__).parents[1] / "scripts"


@pytest.mark.slow
def test_its_cases_run_and_are_right(tmp_path: Path) -> None:
    where = ["--dir", str(tmp_path), "--gib", "0.004"]
    done = subprocess.run(
        [sys.executable, SCRIPTS / "realsize.py", *where, "--only", "pt: reshard*--layout*"],
        check=False,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [line for line in done.stdout.splitlines() if line.startswith("pt: ")]
    assert len(lines) == 7
    assert all(" s  right" in line for line in lines)
    assert not list(tmp_path.iterdir())


def test_every_layout_has_a_truth(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(SCRIPTS)
    from realsize_jobs import conversions

    assert set(conversions.LAYOUTS) == set(layouts("shards"))


def _flip(tensors: dict[str, torch.Tensor]) -> None:
    tensors["a"].view(torch.uint8)[2, 5] ^= 1


def _drop(tensors: dict[str, torch.Tensor]) -> None:
    del tensors["b"]


def _add(tensors: dict[str, torch.Tensor]) -> None:
    tensors["c"] = torch.ones(1)


def _cast(tensors: dict[str, torch.Tensor]) -> None:
    tensors["b"] = tensors["b"].double()


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (_flip, "a at its start: element 7 of 9"),
        (_drop, "out.safetensors lacks b"),
        (_add, "out.safetensors has c, which it must not"),
        (_cast, "b is torch.float64 [2] and not torch.float32 [2]"),
    ],
)
def test_what_is_not_the_truth_is_wrong(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    spoil: Callable[[dict[str, torch.Tensor]], None],
    said: str,
) -> None:
    monkeypatch.syspath_prepend(SCRIPTS)
    from realsize_jobs import reading

    truth = {"a": torch.arange(9.0).reshape(3, 3), "b": torch.ones(2)}
    found = {name: value.clone() for name, value in truth.items()}
    safetensors.torch.save_file(found, tmp_path / "out.safetensors")
    reading.check(tmp_path / "out.safetensors", truth)
    spoil(found)
    safetensors.torch.save_file(found, tmp_path / "out.safetensors")
    with pytest.raises(reading.Wrong) as error:
        reading.check(tmp_path / "out.safetensors", truth)
    assert str(error.value) == said
