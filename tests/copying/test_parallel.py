"""How many threads and how much memory, of what the machine and the work are."""

from __future__ import annotations

from pathlib import Path

import pytest

from ckpt_tools.copying import parallel
from ckpt_tools.copying.parallel import choose_threads, default_memory, quotas
from ckpt_tools.core.sizes import Sizes

TIB = 1 << 40


def cores(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    monkeypatch.setattr(parallel, "usable_cores", lambda: count)


@pytest.mark.parametrize(
    ("count", "nbytes", "lanes", "processes", "expected"),
    [
        (2, TIB, 100, 1, 2),
        (8, TIB, 100, 1, 8),
        (64, TIB, 100, 1, 10),
        (16, TIB, 1, 1, 2),
        (16, 1000, 100, 1, 1),
        (16, 0, 0, 1, 1),
        (16, TIB, 100, 4, 4),
        (16, TIB, 100, 64, 2),
        (1, TIB, 100, 1, 2),
    ],
)
def test_threads_follow_cores_files_bytes_and_processes(
    *,
    count: int,
    nbytes: int,
    lanes: int,
    processes: int,
    expected: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cores(monkeypatch, count)
    assert choose_threads(nbytes, Sizes(), lanes=lanes, processes=processes) == expected


@pytest.mark.parametrize(("count", "mib"), [(1, 64), (8, 64), (12, 96), (16, 128), (128, 128)])
def test_memory_grows_with_the_cores_and_is_bounded(
    count: int, mib: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    cores(monkeypatch, count)
    assert default_memory() == str(mib << 20)


def test_a_quota_of_version_2_counts_and_so_do_those_around_it(tmp_path: Path) -> None:
    inner = tmp_path / "outer/inner"
    inner.mkdir(parents=True)
    (inner / "cpu.max").write_text("max 100000\n")
    (inner.parent / "cpu.max").write_text("250000 100000\n")
    assert list(quotas(str(tmp_path), "0::/outer/inner\n")) == [2.5]


def test_a_quota_of_version_1_counts(tmp_path: Path) -> None:
    group = tmp_path / "cpu,cpuacct/job"
    group.mkdir(parents=True)
    (group / "cpu.cfs_quota_us").write_text("50000\n")
    (group / "cpu.cfs_period_us").write_text("100000\n")
    (group.parent / "cpu.cfs_quota_us").write_text("-1\n")
    listing = "4:cpu,cpuacct:/job\n3:memory:/job\n0::/\n"
    assert list(quotas(str(tmp_path), listing)) == [1.0]


def test_a_group_outside_of_what_is_mounted_is_the_root(tmp_path: Path) -> None:
    (tmp_path / "cpu.max").write_text("400000 100000\n")
    assert list(quotas(str(tmp_path), "0::/docker/abc\n")) == [4.0]


def test_nothing_is_limited_where_nothing_says_so(tmp_path: Path) -> None:
    assert list(quotas(str(tmp_path), "0::/\n")) == []
