"""Laws that every reader keeps. A format's tests subclass `ReaderContract`, listing checkpoints.

The values are put together here by numpy alone, so that the project's own mover is not its own
judge.
"""

import json
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import ClassVar, NamedTuple

import numpy as np
import pytest

from ckpt_tools import formats
from ckpt_tools.core.coverage import uncovered
from ckpt_tools.core.dtypes import BY_SAFETENSORS
from ckpt_tools.core.index import (
    CheckpointIndex,
    Chunk,
    TensorEntry,
)
from ckpt_tools.storage.reader import Files

DATA = Path(__file__).parent / "data"


class RealCheckpoint(NamedTuple):
    """A checkpoint under tests/data, the folder of its truth, and how the truth names its entries.

    ``rename`` gives the name in the truth, or None for what the truth leaves out.
    """

    path: str
    truth: str
    rename: Callable[[str], str | None] = lambda fqn: fqn
    # Names that the truth has and this file or folder, being only a part of the save, has not.
    absent: Callable[[str], bool] = lambda _fqn: False


class TrueTensor(NamedTuple):
    """What a tensor must be: its type if the truth tells it, its shape, its row-major bytes."""

    dtype: str | None
    shape: tuple[int, ...]
    data: bytes


def truth_of(folder: Path) -> dict[str, TrueTensor]:
    """The tensors of truth.safetensors, with types and shapes of truth.json where it is there."""
    raw = (folder / "truth.safetensors").read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    header.pop("__metadata__", None)
    told = folder / "truth.json"
    entries = json.loads(told.read_text())["entries"] if told.exists() else {}
    return {
        name: _true(fields, entries.get(name), raw[8 + length :]) for name, fields in header.items()
    }


def _true(
    fields: Mapping[str, object], told: Mapping[str, object] | None, data: bytes
) -> TrueTensor:
    start, end = fields["data_offsets"]
    if told is not None:
        return TrueTensor(told["dtype"], tuple(told["shape"]), data[start:end])
    dtype = BY_SAFETENSORS[fields["dtype"]].name
    return TrueTensor(dtype, tuple(fields["shape"]), data[start:end])


def whole(entry: TensorEntry, files: Files) -> bytes:
    """The row-major bytes of a tensor, put together from its chunks."""
    element = np.dtype((np.void, entry.dtype.itemsize))
    out = np.zeros(entry.shape, element)
    for chunk in entry.chunks:
        place = tuple(slice(a, b) for a, b in zip(chunk.box.offsets, chunk.box.ends, strict=True))
        out[place] = _elements(chunk, files, element)
    return out.tobytes()


def _elements(chunk: Chunk, files: Files, element: "np.dtype[np.void]") -> "np.ndarray":
    data = np.frombuffer(files.read(*chunk.data), element)
    if chunk.strides is None or chunk.box.numel == 0:
        return data.reshape(chunk.box.sizes)
    strides = [stride * element.itemsize for stride in chunk.strides]
    return np.lib.stride_tricks.as_strided(data, chunk.box.sizes, strides, writeable=False)


class ReaderContract:
    """Subclass it, list `checkpoints`, and give `read`."""

    checkpoints: ClassVar[tuple[RealCheckpoint, ...]] = ()

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        if "checkpoint" in metafunc.fixturenames:
            metafunc.parametrize("checkpoint", self.checkpoints, ids=lambda case: case.path)

    def read(self, path: Path) -> CheckpointIndex:
        """The index of a checkpoint."""
        raise NotImplementedError

    def index(self, checkpoint: RealCheckpoint) -> CheckpointIndex:
        """The same, read once for all that only look at it."""
        return _read(type(self), DATA / checkpoint.path)

    def located(self, index: CheckpointIndex, files: Files) -> CheckpointIndex:
        """The index with raw chunks."""
        return formats.locate(index, files)

    def test_there_is_nothing_to_complain_of(self, checkpoint: RealCheckpoint) -> None:
        assert self.index(checkpoint).problems == ()

    def test_chunks_cover_every_tensor_once(self, checkpoint: RealCheckpoint) -> None:
        assert not list(uncovered(self.index(checkpoint).tensors))

    def test_every_byte_range_lies_inside_its_file(self, checkpoint: RealCheckpoint) -> None:
        with Files() as files:
            index = self.located(self.index(checkpoint), files)
            ranges = [
                data
                for entry in index.tensors
                for chunk in entry.chunks
                for data in (chunk.data, *chunk.replicas)
            ]
            ranges += [entry.data for entry in index.objects]
            assert ranges
            assert all(r.offset + r.length <= files.size(r.path) for r in ranges)

    def test_entries_are_sorted_by_name_and_named_once(self, checkpoint: RealCheckpoint) -> None:
        index = self.index(checkpoint)
        for entries in (index.tensors, index.objects):
            fqns = [entry.fqn for entry in entries]
            assert fqns == sorted(set(fqns))

    def test_reading_twice_is_equal(self, checkpoint: RealCheckpoint) -> None:
        assert self.read(DATA / checkpoint.path) == self.index(checkpoint)

    def test_every_file_is_listed_with_its_length(self, checkpoint: RealCheckpoint) -> None:
        index = self.index(checkpoint)
        assert index.files
        assert all(Path(file.path).stat().st_size == file.length for file in index.files)

    def test_tensors_equal_the_truth(self, checkpoint: RealCheckpoint) -> None:
        truth = truth_of(DATA / checkpoint.truth)
        wanted = {name for name in truth if not checkpoint.absent(name)}
        with Files() as files:
            index = self.located(self.index(checkpoint), files)
            found = set()
            for entry in index.tensors:
                name = checkpoint.rename(entry.fqn)
                if name is None:
                    continue
                found.add(name)
                assert _differs(entry, truth[name], files) == ""
        assert found == wanted


@cache
def _read(reader: type[ReaderContract], path: Path) -> CheckpointIndex:
    return reader().read(path)


def _differs(entry: TensorEntry, true: TrueTensor, files: Files) -> str:
    """What is not as it should be, for the message of a failed test."""
    if true.dtype is not None and entry.dtype.name != true.dtype:
        return f"{entry.fqn} is {entry.dtype.name}, not {true.dtype}"
    if entry.shape != true.shape:
        return f"{entry.fqn} is {entry.shape}, not {true.shape}"
    return "" if whole(entry, files) == true.data else f"{entry.fqn} has other values"
