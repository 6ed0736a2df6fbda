"""Rank files of CheckpointableTensor: local tensors whose attributes say where pieces belong."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
import torch
from dtensor_files import read_by_ranks
from reader_contract import DATA, truth_of, whole

import ckpt_tools
from ckpt_tools import formats
from ckpt_tools.core.index import CheckpointIndex
from ckpt_tools.errors import CheckpointError, IncompleteError, UnreadableError, UnsupportedError
from ckpt_tools.storage.reader import Files

REAL = DATA / "checkpoints"
W = torch.arange(52, dtype=torch.float32).view(13, 4)
Piece = tuple[Sequence[int], Sequence[int], Sequence[int]]


def held(local: torch.Tensor, *pieces: Piece, shape: Sequence[int] = (13, 4)) -> torch.Tensor:
    """The tensor with the attributes of the protocol: a piece is where it belongs in the whole,
    where it begins in the local tensor, and its sizes.
    """
    starts, begins, sizes = zip(*pieces, strict=True) if pieces else ((), (), ())
    local.global_shape = torch.Size(shape)
    local.global_offsets, local.local_offsets, local.local_sizes = starts, begins, sizes
    return local


def save(folder: Path, states: Sequence[Mapping[str, object]]) -> Path:
    for rank, state in enumerate(states):
        torch.save(dict(state), folder / f"rank_{rank}.pt")
    return folder


def read(folder: Path) -> CheckpointIndex:
    return formats.read_index(str(folder))


def rows(first: int, last: int) -> torch.Tensor:
    """A tensor that is those rows of W."""
    return held(W[first:last].clone(), ((first, 0), (0, 0), (last - first, 4)))


def values(index: CheckpointIndex) -> dict[str, bytes]:
    index.require_whole()
    with Files() as files:
        return {entry.fqn: whole(entry, files) for entry in index.tensors}


def test_pieces_from_padded_strided_and_empty_tensors_make_the_whole(tmp_path: Path) -> None:
    padded = torch.full((4, 8), -1.0)
    padded[1:3, 2:6] = W[4:6]
    twice = torch.cat([W[:4], W[6:8]])
    turned = W[8:].T.contiguous().T
    states = [
        {"w": held(twice, ((0, 0), (0, 0), (4, 4)), ((6, 0), (4, 0), (2, 4)))},
        {"w": held(padded, ((4, 0), (1, 2), (2, 4)))},
        {"w": held(torch.nn.Parameter(turned), ((8, 0), (0, 0), (5, 4)))},
        {"w": held(torch.empty(0, 4))},
        {"w": held(torch.empty(3, 4), ((13, 0), (3, 0), (0, 4)))},
    ]
    index = read(save(tmp_path, states))
    assert [(entry.fqn, entry.shape) for entry in index.tensors] == [("w", (13, 4))]
    assert values(index) == {"w": W.numpy().tobytes()}
    assert values(read_by_ranks(tmp_path)) == values(index)


def test_a_scalar_is_whole_on_each_rank(tmp_path: Path) -> None:
    step = held(torch.tensor(3.0), ((), (), ()), shape=())
    assert values(read(save(tmp_path, [{"step": step}] * 2))) == {"step": step.numpy().tobytes()}


@pytest.mark.parametrize("drift", [0.0, 1.0])
def test_equal_pieces_of_several_ranks_are_replicas(tmp_path: Path, drift: float) -> None:
    states = [{"w": rows(0, 13)}, {"w": held(W + drift, ((0, 0), (0, 0), (13, 4)))}]
    index = read(save(tmp_path, states))
    if drift:
        with pytest.raises(CheckpointError, match=r"w \[0:13, 0:4\] \(ranks 0 and 1\)"):
            index.require_whole()
    else:
        assert values(index) == {"w": W.numpy().tobytes()}


def test_rows_that_no_rank_holds_are_missed(tmp_path: Path) -> None:
    index = read(save(tmp_path, [{"w": rows(0, 4)}, {"w": rows(6, 13)}]))
    with pytest.raises(IncompleteError, match=r"w: chunks cover 44 of 52 .* \[4:6, 0:4\]"):
        index.require_whole()


@pytest.mark.parametrize(
    ("piece", "said"),
    [
        (((10, 0), (0, 0), (4, 4)), r"its piece of \[4, 4\] at \[10, 0\] of \[13, 4\] is not"),
        (((0, 0), (1, 0), (4, 4)), r"or of its local tensor \[4, 4\] at \[1, 0\]"),
        (((0,), (0, 0), (4, 4)), r"its piece of \[4, 4\] at \[0\] of"),
    ],
)
def test_a_piece_that_is_outside_is_refused(tmp_path: Path, piece: Piece, said: str) -> None:
    index = read(save(tmp_path, [{"w": held(W[:4].clone(), piece)}, {"w": rows(4, 13)}]))
    with pytest.raises(UnsupportedError, match=said):
        index.require_whole()


def test_offsets_and_sizes_must_be_equal_in_number(tmp_path: Path) -> None:
    odd = rows(0, 13)
    odd.local_sizes = ()
    with pytest.raises(UnsupportedError, match="w: its pieces have 1 offsets and 0 sizes"):
        read(save(tmp_path, [{"w": odd}])).require_whole()


def test_what_is_no_list_of_pieces_is_damage(tmp_path: Path) -> None:
    odd = rows(0, 13)
    odd.local_sizes = "13"
    with pytest.raises(UnreadableError, match="a CheckpointableTensor with '13' in place of"):
        read(save(tmp_path, [{"w": odd}])).require_whole()


@pytest.mark.parametrize(
    ("other", "said"),
    [
        (
            held(W[4:].clone(), ((4, 0), (0, 0), (9, 4)), shape=(14, 4)),
            r"global shape is \[13, 4\]",
        ),
        (W[4:].clone(), "a CheckpointableTensor on rank 0 and a plain tensor on rank 1"),
    ],
    ids=["shape", "kind"],
)
def test_ranks_that_disagree_are_refused(tmp_path: Path, other: torch.Tensor, said: str) -> None:
    with pytest.raises(UnsupportedError, match=said):
        read(save(tmp_path, [{"w": rows(0, 4)}, {"w": other}])).require_whole()


def test_the_file_of_one_rank_is_not_whole(tmp_path: Path) -> None:
    save(tmp_path, [{"w": rows(0, 4), "b": torch.ones(3)}, {"w": rows(4, 13)}])
    index = formats.read_index(str(tmp_path / "rank_0.pt"))
    with pytest.raises(IncompleteError, match="w: chunks cover 16 of 52"):
        index.require_whole()
    with pytest.raises(UnsupportedError, match="holds the slices of one rank"):
        index.select({"b"}).require_whole()


def test_other_attributes_mean_nothing(tmp_path: Path) -> None:
    tensor = W.clone()
    tensor.global_shape = (1, 2)
    assert values(read(save(tmp_path, [{"w": tensor}]))) == {"w": W.numpy().tobytes()}


def test_pieces_that_are_said_again_and_again_are_hostile(tmp_path: Path) -> None:
    first = held(torch.zeros(1), *([((0,), (0,), (1,))] * 5000), shape=(1,))
    state = {"w": first}
    for number in range(200):
        state[f"w{number}"] = torch.zeros(1)
        vars(state[f"w{number}"]).update(vars(first))
    with pytest.raises(UnreadableError, match="unfolds to more than"):
        read(save(tmp_path, [state]))


@pytest.mark.parametrize("folder", ["checkpointable_4r", "checkpointable-equal_2r"])
def test_real_files_are_resharded_and_exported(folder: str, tmp_path: Path) -> None:
    real = REAL / f"torch-2.15.0-{folder}"
    checkpoint = ckpt_tools.open_checkpoint(real / "ranks")
    checkpoint.reshard(tmp_path / "dcp", 3)
    checkpoint.export(tmp_path / "hf", check=True)
    truth = {name: true.data for name, true in truth_of(real).items()}
    with Files() as files:
        index = formats.locate(formats.read_index(str(tmp_path / "dcp")), files)
        assert values(index) == truth
    exported = values(formats.read_index(str(tmp_path / "hf")))
    assert exported == {name.removeprefix("model."): data for name, data in truth.items()}
