"""Large `.metadata` read by columns gives what reading it entry by entry does."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pickled import DATA
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint.filesystem import _StorageInfo

from ckpt_tools.errors import CheckpointError, UnreadableError
from ckpt_tools.formats.dcp import table as dcp_table
from ckpt_tools.formats.dcp.metadata import METADATA_GLOBALS, Metadata
from ckpt_tools.formats.dcp.storage import Places
from ckpt_tools.formats.pickle import guard_stack as opcode_stack
from ckpt_tools.formats.pickle import load as pickles
from ckpt_tools.formats.pickle.guard import walked
from ckpt_tools.formats.pickle.load import load_metadata
from ckpt_tools.formats.pickle.unpickler import collector_paused

REAL = sorted(path for path in DATA.rglob(".metadata") if 1200 < path.stat().st_size < 100_000)


@pytest.fixture(autouse=True, scope="module")
def _small_files_too() -> Iterator[None]:
    """Look for runs of entries in small files as well."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(opcode_stack, "_SHAPES_FROM", 0)
        patch.setattr(pickles, "_COLUMNS_FROM", 0)
        yield


def by_columns(data: bytes) -> Metadata | None:
    end, runs = walked(data)
    with collector_paused():
        return dcp_table.load_table(data, end, runs, METADATA_GLOBALS.__getitem__)


def one_by_one(data: bytes) -> Metadata:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dcp_table, "load_table", lambda *_args: None)
        return load_metadata(data, where="x")


def plain(metadata: Metadata) -> object:
    """All of it as values that can be compared."""
    tensors = {
        fqn: (meta.dtype, meta.shape, list(meta.chunks)) for fqn, meta in metadata.tensors.items()
    }
    places = {
        key: (info.relative_path, info.offset, info.length, info.transforms)
        for key, info in metadata.storage.items()
    }
    columns = {
        fqn: _listed(metadata, fqn, [offsets for offsets, _ in meta.chunks])
        for fqn, meta in metadata.tensors.items()
    }
    paths = metadata.storage.paths, len(metadata.storage)
    return list(tensors), tensors, places, columns, paths, metadata.objects, metadata[3:]


def _listed(metadata: Metadata, fqn: str, offsets: list[tuple[int, ...]]) -> object:
    found = metadata.storage.places(fqn, offsets)
    if isinstance(found, Places):
        return tuple(map(list, found))
    return [item and (item.relative_path, item.offset, item.length) for item in found]


@pytest.mark.parametrize("path", REAL, ids=lambda path: str(path.relative_to(DATA)))
def test_real_metadata_reads_the_same(path: Path) -> None:
    data = path.read_bytes()
    assert plain(load_metadata(data, where="x")) == plain(one_by_one(data))


def test_most_real_metadata_is_read_by_columns() -> None:
    read = [by_columns(path.read_bytes()) is not None for path in REAL]
    assert sum(read) > 0.9 * len(read) > 50


def _info(rank: int, number: int, length: int = 4096) -> _StorageInfo:
    return _StorageInfo(f"__{rank}_0.distcp", number * length, length)


Shapes = dict[str, tuple[int, ...]]
MIXED: Shapes = {
    **{f"layers.{n}.weight": (8, 4 + n) for n in range(30)},
    **{f"layers.{n}.norm": (8,) for n in range(30)},
    **{f"layers.{n}.scale": () for n in range(30)},
    **{f"ébène.{n}.{'x' * 300}": (8, 2, 3) for n in range(20)},
}


def saved(shapes: Shapes, *, ranks: int, length: int = 4096, by_rank: bool = True) -> dcp.Metadata:
    """Metadata of tensors cut into rows, with the strings of each rank its own or shared."""
    entries, places = {}, {}
    for fqn, shape in shapes.items():
        cuts = ranks if shape else 1
        rows = [(shape[0] // cuts, *shape[1:])] * cuts if shape else [()]
        starts = [
            (rank * rows[0][0], *[0 for _ in shape[1:]]) if shape else () for rank in range(cuts)
        ]
        chunks = [
            dcp.ChunkStorageMetadata(torch.Size(at), torch.Size(size))
            for at, size in zip(starts, rows, strict=True)
        ]
        properties = dcp.TensorProperties(dtype=torch.bfloat16)
        entries[fqn] = dcp.TensorStorageMetadata(properties, torch.Size(shape), chunks)
    for rank in range(ranks):
        part = {}
        for number, (fqn, entry) in enumerate(entries.items()):
            if rank < len(entry.chunks):
                at = entry.chunks[rank].offsets
                part[dcp.MetadataIndex(fqn, at, rank)] = _info(rank, number, length)
        places |= pickle.loads(pickle.dumps(part)) if by_rank else part  # noqa: S301 - our own
    planned = {fqn: tuple(fqn.split(".", 1)) for fqn in shapes}
    return dcp.Metadata(entries, planner_data=planned, storage_data=places)


@pytest.mark.parametrize("by_rank", [True, False])
@pytest.mark.parametrize("ranks", [1, 2, 8])
@pytest.mark.parametrize("length", [4096, 3 << 30])
def test_made_metadata_reads_the_same(ranks: int, length: int, *, by_rank: bool) -> None:
    data = pickle.dumps(saved(MIXED, ranks=ranks, length=length, by_rank=by_rank))
    found = by_columns(data)
    assert found is not None
    assert plain(found) == plain(one_by_one(data))
    assert found.tensors["layers.7.weight"].shape == (8, 11)


def test_objects_between_tensors_keep_their_places() -> None:
    metadata = saved(MIXED, ranks=4)
    for number in range(40):
        metadata.state_dict_metadata[f"object.{number}"] = dcp.BytesStorageMetadata()
        metadata.storage_data[dcp.MetadataIndex(f"object.{number}")] = _info(0, 500 + number)
    data = pickle.dumps(metadata)
    found = by_columns(data)
    assert found is not None
    assert len(found.objects) == 40
    assert plain(found) == plain(one_by_one(data))


def test_many_frames_and_batches_read_the_same() -> None:
    shapes = {f"layers.{n}.weight": (512, 2) for n in range(8)}
    data = pickle.dumps(saved(shapes, ranks=512))
    assert data.count(b"\x95") > 8
    found = by_columns(data)
    assert found is not None
    assert plain(found) == plain(one_by_one(data))


def _negative(metadata: dcp.Metadata) -> None:
    for index in list(metadata.storage_data)[50:60]:
        metadata.storage_data[index].offset = -5


def _huge(metadata: dcp.Metadata) -> None:
    for index in list(metadata.storage_data)[50:60]:
        metadata.storage_data[index].offset = 1 << 70


def _packed(metadata: dcp.Metadata) -> None:
    for info in metadata.storage_data.values():
        info.transform_descriptors = ["stream.zstd/1"]


def _wrong_kind(metadata: dcp.Metadata) -> None:
    for index in list(metadata.storage_data)[50:60]:
        metadata.storage_data[index].relative_path = 7


def _odd_chunk(metadata: dcp.Metadata) -> None:
    for entry in list(metadata.state_dict_metadata.values())[5:9]:
        entry.chunks[-1] = dcp.ChunkStorageMetadata(torch.Size((1,)), torch.Size((1,)))


def _lists_for_sizes(metadata: dcp.Metadata) -> None:
    for index, info in list(metadata.storage_data.items())[40:80]:
        del metadata.storage_data[index]
        metadata.storage_data[dcp.MetadataIndex(index.fqn, tuple(index.offset))] = info


@pytest.mark.parametrize(
    "change", [_negative, _huge, _packed, _wrong_kind, _odd_chunk, _lists_for_sizes]
)
def test_what_is_unusual_is_left_to_reading_one_by_one(
    change: Callable[[dcp.Metadata], None],
) -> None:
    metadata = saved(MIXED, ranks=8)
    change(metadata)
    assert_same(pickle.dumps(metadata))


def test_an_item_that_is_placed_twice_is_told() -> None:
    data = pickle.dumps(saved({f"layer{n}.w": (8, 4) for n in range(30)}, ranks=8, by_rank=False))
    twice = data.replace(b"K\x01\x8c\x06offset", b"K\x00\x8c\x06offset")
    twice = twice.replace(b"K\x02K\x00\x86", b"K\x03K\x00\x86")
    with pytest.raises(UnreadableError, match="x places one item twice"):
        load_metadata(twice, where="x")
    assert by_columns(twice) is None


def outcome(read: Callable[[bytes], Metadata], data: bytes) -> object:
    try:
        return plain(read(data))
    except CheckpointError as error:
        return type(error), str(error)


def assert_same(data: bytes) -> None:
    """Reading with columns ends as reading without does, in the same values or the same error."""
    assert outcome(lambda data: load_metadata(data, where="x"), data) == outcome(one_by_one, data)


PIECES = [b"0", b"2", b"NN", b"K\x01Q", b"a", b"s", b"u(", b"b", b"\x85", b"00", b"22", b"}b"]


@st.composite
def damaged(draw: st.DrawFn) -> bytes:
    """Real metadata in which a few bytes were changed, left out, repeated or put in."""
    data = bytearray(draw(st.sampled_from(REAL)).read_bytes())
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.integers(0, len(data) - 1))
        end = at + draw(st.integers(0, 8))
        more = draw(
            st.sampled_from(PIECES)
            | st.binary(max_size=2)
            | st.integers(0, len(data) - 1).map(lambda start: bytes(data[start : start + 100]))
        )
        data[at:end] = more
    return bytes(data)


@given(data=damaged())
def test_damaged_metadata_ends_the_same(data: bytes) -> None:
    assert_same(data)
