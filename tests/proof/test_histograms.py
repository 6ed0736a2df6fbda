"""Histograms count every finite value once, between the least and the greatest."""

from pathlib import Path

import numpy as np
import pytest

from ckpt_tools.formats import read_index
from ckpt_tools.proof.stats import BINS, histograms, stats
from ckpt_tools.storage.reader import Files

safetensors_numpy = pytest.importorskip("safetensors.numpy")


def _counts(tmp_path: Path, values: np.ndarray) -> tuple[int, ...] | None:
    path = str(tmp_path / "model.safetensors")
    safetensors_numpy.save_file({"w": values}, path)
    index = read_index(path)
    with Files() as files:
        return histograms(index, files, stats(index, files)).get("w")


def test_counts_are_those_of_numpy(tmp_path: Path) -> None:
    values = np.random.default_rng(0).normal(size=(300, 70))
    expected, _ = np.histogram(values, BINS)
    counts = _counts(tmp_path, values)
    assert counts is not None
    assert np.abs(np.subtract(counts, expected)).sum() <= 2  # of values on an edge


def test_values_that_are_not_finite_are_left_out(tmp_path: Path) -> None:
    counts = _counts(tmp_path, np.array([0, 1, np.nan, np.inf, -np.inf], np.float32))
    assert counts == (1, *(0,) * (BINS - 2), 1)


def test_integers_and_extremes_of_float64_are_counted(tmp_path: Path) -> None:
    assert sum(_counts(tmp_path, np.arange(100, dtype=np.int16)) or ()) == 100
    far = np.array([-1.7e308, 0, 1.7e308])
    assert sum(_counts(tmp_path, far) or ()) == 3


@pytest.mark.parametrize("values", [np.ones(4, np.float32), np.zeros((0, 3), np.float32)])
def test_what_has_no_spread_has_no_histogram(tmp_path: Path, values: np.ndarray) -> None:
    assert _counts(tmp_path, values) is None
