"""What a `.metadata` says is what torch put into it, or an error of ours."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pickled import DATA
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint.filesystem import _StorageInfo

from ckpt_tools.errors import CheckpointError, UnreadableError
from ckpt_tools.formats.dcp.metadata import Metadata, load_metadata
from ckpt_tools.formats.pickle.machine import Machine
from ckpt_tools.formats.pickle.replay import Repetition

REAL = sorted(path for path in DATA.rglob(".metadata") if 1200 < path.stat().st_size < 100_000)


def _info(rank: int, number: int, length: int = 4096) -> _StorageInfo:
    return _StorageInfo(f"__{rank}_0.distcp", number * length, length)


Shapes = dict[str, tuple[int, ...]]
MIXED: Shapes = {
    **{f"layers.{n}.weight": (8, 4 + n) for n in range(30)},
    **{f"layers.{n}.norm": (8,) for n in range(30)},
    **{f"layers.{n}.scale": () for n in range(30)},
    **{f"Ŕh\u0094h.{n}.Ŕ": (8, 2) for n in range(20)},
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


def said_by_torch(metadata: dcp.Metadata) -> object:
    """All that torch's own objects say, as values that can be compared."""
    tensors = {
        fqn: (
            str(entry.properties.dtype).removeprefix("torch."),
            tuple(entry.size),
            [(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in entry.chunks],
        )
        for fqn, entry in metadata.state_dict_metadata.items()
        if isinstance(entry, dcp.TensorStorageMetadata)
    }
    places = {
        (index.fqn, index.offset and tuple(index.offset)): (
            info.relative_path,
            info.offset,
            info.length,
        )
        for index, info in metadata.storage_data.items()
    }
    return tensors, metadata.state_dict_metadata.keys() - tensors.keys(), places


def plain(metadata: Metadata) -> object:
    """The same of what we read."""
    tensors = {
        fqn: (meta.dtype, meta.shape, list(map(tuple, meta.boxes)))
        for fqn, meta in metadata.tensors.items()
    }
    places = {
        (fqn, at): (info.relative_path, info.offset, info.length)
        for fqn, items in metadata.storage.items()
        for at, info in items.items()
    }
    return tensors, metadata.objects, places


@pytest.mark.parametrize("by_rank", [True, False])
@pytest.mark.parametrize("ranks", [1, 2, 8])
@pytest.mark.parametrize("length", [4096, 3 << 30])
def test_metadata_says_what_torch_put_into_it(ranks: int, length: int, *, by_rank: bool) -> None:
    metadata = saved(MIXED, ranks=ranks, length=length, by_rank=by_rank)
    found = load_metadata(pickle.dumps(metadata), where="x")
    assert plain(found) == said_by_torch(metadata)
    assert found.planner_data == metadata.planner_data


def test_objects_between_tensors_are_named() -> None:
    metadata = saved(MIXED, ranks=4)
    for number in range(40):
        metadata.state_dict_metadata[f"object.{number}"] = dcp.BytesStorageMetadata()
        metadata.storage_data[dcp.MetadataIndex(f"object.{number}")] = _info(0, 500 + number)
    found = load_metadata(pickle.dumps(metadata), where="x")
    assert len(found.objects) == 40
    assert plain(found) == said_by_torch(metadata)


def test_many_frames_and_batches_are_read() -> None:
    metadata = saved({f"layers.{n}.weight": (512, 2) for n in range(8)}, ranks=512)
    data = pickle.dumps(metadata)
    assert data.count(b"\x95") > 8
    assert plain(load_metadata(data, where="x")) == said_by_torch(metadata)


def test_tensors_that_are_cut_alike_share_their_boxes() -> None:
    data = pickle.dumps(saved({f"layers.{n}.weight": (8, 2) for n in range(4)}, ranks=4))
    found = load_metadata(data, where="x")
    assert len({id(meta.boxes) for meta in found.tensors.values()}) == 1


def _negative(metadata: dcp.Metadata) -> None:
    for index in list(metadata.storage_data)[50:60]:
        metadata.storage_data[index].offset = -5


def _wrong_kind(metadata: dcp.Metadata) -> None:
    for index in list(metadata.storage_data)[50:60]:
        metadata.storage_data[index].relative_path = 7


def _odd_chunk(metadata: dcp.Metadata) -> None:
    for entry in list(metadata.state_dict_metadata.values())[5:9]:
        entry.chunks[-1] = dcp.ChunkStorageMetadata(torch.Size((1,)), torch.Size((1,)))


def _floats_for_offsets(metadata: dcp.Metadata) -> None:
    for index in list(metadata.storage_data)[40:80]:
        object.__setattr__(index, "offset", (0.5, *index.offset[1:]))  # torch's own is frozen


def _odd_transforms(metadata: dcp.Metadata) -> None:
    for info in metadata.storage_data.values():
        info.transform_descriptors = "stream.zstd/1"


@pytest.mark.parametrize(
    "change", [_negative, _wrong_kind, _odd_chunk, _floats_for_offsets, _odd_transforms]
)
def test_places_and_boxes_that_are_none_are_refused(
    change: Callable[[dcp.Metadata], None],
) -> None:
    metadata = saved(MIXED, ranks=8)
    change(metadata)
    with pytest.raises(UnreadableError, match=r"^x "):
        load_metadata(pickle.dumps(metadata), where="x")


def test_an_item_that_is_placed_twice_is_refused() -> None:
    data = pickle.dumps(saved({f"layer{n}.w": (8, 4) for n in range(30)}, ranks=8, by_rank=False))
    twice = data.replace(b"K\x01\x8c\x06offset", b"K\x00\x8c\x06offset")
    twice = twice.replace(b"K\x02K\x00\x86", b"K\x03K\x00\x86")
    with pytest.raises(UnreadableError, match="x places one item twice"):
        load_metadata(twice, where="x")


def test_offsets_of_too_many_dimensions_are_refused_before_they_are_hashed() -> None:
    metadata = saved({"w": (64, 4)}, ranks=64)
    long = tuple(range(10_000))  # once in the pickle, and shared by as many items as it likes
    for index in metadata.storage_data:
        object.__setattr__(index, "offset", long)
    with pytest.raises(UnreadableError, match="x is damaged"):
        load_metadata(pickle.dumps(metadata), where="x")


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


def outcome(data: bytes, *, replay_from: int) -> object:
    try:
        return plain(load_metadata(data, where="x", replay_from=replay_from))
    except CheckpointError as error:
        return f"{type(error).__name__}: {error}"


def replayed(metadata: dcp.Metadata, monkeypatch: pytest.MonkeyPatch) -> int:
    """How many entries of this metadata were not interpreted, when it is read right."""
    data, count = pickle.dumps(metadata), [0]
    entries_after = Repetition.entries_after

    def counted(self: Repetition, machine: Machine, at: int) -> int:
        before = len(machine.items)
        at = entries_after(self, machine, at)
        count[0] += (len(machine.items) - before) // 2
        return at

    monkeypatch.setattr(Repetition, "entries_after", counted)
    found = load_metadata(data, where="x", replay_from=0)
    assert plain(found) == said_by_torch(metadata)
    assert found.planner_data == metadata.planner_data
    return count[0]


@pytest.mark.parametrize("path", REAL, ids=lambda path: str(path.relative_to(DATA)))
def test_replay_changes_nothing(path: Path) -> None:
    data = path.read_bytes()
    assert outcome(data, replay_from=0) == outcome(data, replay_from=1 << 40)


@given(data=damaged())
def test_damaged_metadata_ends_the_same_with_replay(data: bytes) -> None:
    assert outcome(data, replay_from=0) == outcome(data, replay_from=1 << 40)


@pytest.mark.parametrize("by_rank", [True, False])
@pytest.mark.parametrize("length", [4096, 3 << 30])
def test_most_entries_are_replayed(
    length: int, *, by_rank: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tensors of one cut, and places that refer to names, paths and offsets of entries before."""
    shapes = {f"layers.{n}.{name}": (8, 4) for n in range(40) for name in ("up", "down")}
    metadata = saved(shapes, ranks=8, length=length, by_rank=by_rank)
    for rank in range(8):  # as torch: one text for all items of a file
        path = f"__{rank}_0.distcp"
        for info in metadata.storage_data.values():
            if info.relative_path == path:
                info.relative_path = path
    assert replayed(metadata, monkeypatch) > 0.9 * (80 + 640)
