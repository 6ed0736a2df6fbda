"""Small items of DCP files looked at together are what they are when each is looked at alone."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pickled import CHECKPOINTS

from ckpt_tools.core.index import CheckpointIndex
from ckpt_tools.errors import CheckpointError
from ckpt_tools.formats import locate, read_index
from ckpt_tools.formats.dcp import bulk as dcp_bulk
from ckpt_tools.formats.dcp import items as dcp_items
from ckpt_tools.formats.dcp.chunks import StoredChunks
from ckpt_tools.storage.reader import Files


def readable(folder: Path) -> bool:
    try:
        return bool(read_index(str(folder)).tensors)
    except CheckpointError:
        return False


DIRECTORIES = sorted(path.parent for path in CHECKPOINTS.rglob(".metadata"))
# What is unpacked lies in a new temporary file each time.
DIRECTORIES = [path for path in DIRECTORIES if readable(path) and "zstd" not in str(path)]
MANY_ITEMS = CHECKPOINTS / "fsdp2_bf16_fp32optim_dcp_4r/ckpt"
ids = {"ids": lambda path: str(path.relative_to(CHECKPOINTS))}


def located(folder: Path, *, many: int) -> CheckpointIndex:
    with pytest.MonkeyPatch.context() as patch, Files() as files:
        patch.setattr(dcp_items, "_MANY", many)
        return locate(read_index(str(folder)), files)


def plain(index: CheckpointIndex) -> object:
    problems = [(type(problem), problem.message, problem.about) for problem in index.problems]
    return [(entry.fqn, list(entry.chunks)) for entry in index.tensors], problems


def assert_same(folder: Path) -> None:
    assert plain(located(folder, many=1)) == plain(located(folder, many=1 << 40))


@pytest.mark.parametrize("folder", DIRECTORIES, **ids)
def test_real_directories_are_located_the_same(folder: Path) -> None:
    assert_same(folder)


def test_most_tensors_of_a_plain_directory_are_looked_at_together() -> None:
    tensors = located(MANY_ITEMS, many=1).tensors
    together = [entry for entry in tensors if isinstance(entry.chunks, StoredChunks)]
    assert len(together) > 0.75 * len(tensors)


@pytest.mark.parametrize("block", [1, 1 << 12, 1 << 15])
@pytest.mark.parametrize("gap", [0, 1 << 16])
def test_blocks_of_any_size_give_the_same(
    block: int, gap: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dcp_bulk, "_BLOCK", block)
    monkeypatch.setattr(dcp_bulk, "_MAX_GAP", gap)
    assert_same(MANY_ITEMS)


@settings(max_examples=30)
@given(data=st.data())
def test_damaged_items_are_told_the_same(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("damaged") / "ckpt"
    shutil.copytree(MANY_ITEMS, folder)
    for _ in range(data.draw(st.integers(1, 4))):
        path = data.draw(st.sampled_from(sorted(folder.glob("*.distcp"))))
        content = bytearray(path.read_bytes())
        at = data.draw(st.integers(0, len(content) - 1))
        content[at] ^= data.draw(st.integers(1, 255))
        path.write_bytes(content)
    assert_same(folder)
    shutil.rmtree(folder)
