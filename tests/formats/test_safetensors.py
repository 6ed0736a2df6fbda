"""The safetensors reader: real folders, and every way in which bytes or files can be wrong."""

import json
import shutil
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from reader_contract import DATA, ReaderContract, RealCheckpoint
from safetensors.torch import save_file

from ckpt_tools import formats
from ckpt_tools.api import verify_quick
from ckpt_tools.core.geometry import Box
from ckpt_tools.core.index import CheckpointIndex
from ckpt_tools.errors import (
    CheckpointError,
    IncompleteError,
    UnreadableError,
    UnsupportedError,
)
from ckpt_tools.formats.safetensors import read as safetensors
from ckpt_tools.formats.safetensors.header import read_header
from ckpt_tools.proof.verify import expecting_ranks
from ckpt_tools.storage.reader import Files

REAL = DATA / "checkpoints"
SHARDED = REAL / "dcp_hf_sharded_4r" / "ckpt"
CONSOLIDATED = REAL / "dcp_hf_consolidated_4r" / "ckpt"
LISTED = REAL / "hf_sharded_safetensors" / "ckpt"


def read(path: Path) -> CheckpointIndex:
    return safetensors.read_index(str(path))


def messages(path: Path) -> str:
    return "\n".join(problem.message for problem in read(path).problems)


def tensor(shape: list[int], start: int, *, dtype: str = "F32", size: int = 4) -> dict[str, object]:
    numel = 1
    for length in shape:
        numel *= length
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, start + numel * size]}


def write(path: Path, header: Mapping[str, object] | bytes, *, data: bytes | None = None) -> Path:
    """A file with this header, and as much data as the header wants unless `data` is given."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    if data is None:
        spans = [entry["data_offsets"] for name, entry in header.items() if name != "__metadata__"]
        data = bytes(max((end for _, end in spans), default=0))
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


def write_shard(
    folder: Path, name: str, boxes: Mapping[str, tuple[list[int], list[int]]], *, dtype: str = "F32"
) -> None:
    """A file as torch's writer makes it: boxes as (offsets, sizes)."""
    info = json.dumps({fqn: {"saved_offsets": offsets} for fqn, (offsets, _) in boxes.items()})
    header: dict[str, object] = {"__metadata__": {"DCP_SHARDING_INFO": info}}
    end = 0
    for fqn, (_, sizes) in boxes.items():
        entry = tensor(sizes, end, dtype=dtype, size={"F32": 4, "BF16": 2}[dtype])
        header[fqn], end = entry, entry["data_offsets"][1]
    write(folder / name, header)


def copy(source: Path, target: Path) -> Path:
    """A copy that tests may damage; what the data holds is read-only."""
    shutil.copytree(source, target, copy_function=shutil.copyfile)
    return target


class TestContract(ReaderContract):
    checkpoints = (
        RealCheckpoint(
            "checkpoints/hf_sharded_safetensors/ckpt", "checkpoints/hf_sharded_safetensors"
        ),
        RealCheckpoint("checkpoints/dcp_hf_rank0_4r/ckpt", "checkpoints/dcp_hf_rank0_4r"),
        RealCheckpoint("checkpoints/dcp_hf_sharded_4r/ckpt", "checkpoints/dcp_hf_sharded_4r"),
        RealCheckpoint(
            "checkpoints/dcp_hf_consolidated_4r/ckpt", "checkpoints/dcp_hf_consolidated_4r"
        ),
        RealCheckpoint(
            "checkpoints/dcp_hf_consolidated_4r/ckpt/sharded", "checkpoints/dcp_hf_consolidated_4r"
        ),
        RealCheckpoint(
            "checkpoints/dcp_hf_consolidated_nomap_4r/ckpt",
            "checkpoints/dcp_hf_consolidated_nomap_4r",
        ),
        *(
            RealCheckpoint(
                f"checkpoints/torch-2.15.0-hf_consolidated_4r/{folder}",
                "checkpoints/torch-2.15.0-hf_consolidated_4r",
            )
            for folder in ("ckpt", "ckpt/sharded")
        ),
        RealCheckpoint(
            "checkpoints/torch-2.9.1-h_dcp_variants/dcp_hf",
            "checkpoints/torch-2.9.1-h_dcp_variants",
            rename="model.{}".format,
        ),
        RealCheckpoint(
            "checkpoints/fsdp2_bf16_fp32optim_dcp_4r/truth.safetensors",
            "checkpoints/fsdp2_bf16_fp32optim_dcp_4r",
        ),
    )

    def read(self, path: Path) -> CheckpointIndex:
        return read(path)


# ---------------------------------------------------------------------------------------- one file


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "is empty"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n", "Git LFS pointer"),
        (b"<!DOCTYPE html><html>Sign in</html>", "HTML"),
        (b"\n <html>", "HTML"),
        (b"PK\x03\x04" + bytes(100), "zip archive"),
        (b"\x80\x02}q\x00." + bytes(20), "pickle"),
        (b'{"weight_map": {}}', "JSON file"),
        (b"abc", "truncated"),
        (bytes(64), "begins with zeros"),
        (bytes(8) + b"x" * 56, "header of 0 bytes"),
        (b"\xff" * 64, "2 to 100,000,000"),
        ((10**8 + 1).to_bytes(8, "little") + b"{}", "2 to 100,000,000"),
        ((2).to_bytes(8, "little") + b"[]", "does not begin with"),
        ((50).to_bytes(8, "little") + b'{"a"', "truncated inside its header"),
    ],
)
def test_what_is_no_safetensors_file_is_named(tmp_path: Path, content: bytes, said: str) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    with pytest.raises(UnreadableError, match=said):
        read(path)


@pytest.mark.parametrize("magic", [b"\x1f\x8b", b"\x80\x02"], ids=["gzip", "pickle"])
def test_the_length_of_a_header_is_not_taken_for_a_magic_number(
    tmp_path: Path, magic: bytes
) -> None:
    text = json.dumps({"w": tensor([2], 0)}).encode()
    length = int.from_bytes(magic, "little")
    path = write(tmp_path / "model.safetensors", text.ljust(length), data=bytes(8))
    assert [entry.fqn for entry in formats.read_index(str(path)).tensors] == ["w"]


@pytest.mark.parametrize(
    ("header", "said"),
    [
        (b'{"a": ', "not valid JSON"),
        (b'{"a": "\xff"}', "not valid JSON"),
        (b"{" + b'"a":{' * 100_000, "not valid JSON"),
        (
            b'{"a": {"dtype": "U8", "shape": [' + b"9" * 5000 + b"]}}",
            "not valid JSON|are not valid",
        ),
        (
            b'{"w": {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]}, "w": {}}',
            "'w' is there twice",
        ),
        (b'{"__metadata__": 1}', "__metadata__ is not a JSON object"),
        (b'{"__metadata__": {"step": 1}}', "'step' is not a string"),
        (b'{"w": 1}', "'w' describes no tensor"),
        (b'{"\\ud800": {}}', "describes no tensor"),
        (b'{"w": {"dtype": 3}}', "its dtype is not a string"),
        (b'{"w": {"dtype": "U8", "shape": [-1], "data_offsets": [0, 0]}}', "are not valid"),
        (b'{"w": {"dtype": "U8", "shape": [true], "data_offsets": [0, 1]}}', "are not valid"),
        (b'{"w": {"dtype": "U8", "shape": [1.0], "data_offsets": [0, 1]}}', "are not valid"),
        (b'{"w": {"dtype": "U8", "shape": [0], "data_offsets": [1, 0]}}', "are not valid"),
        (b'{"w": {"dtype": "U8", "shape": [0], "data_offsets": [0]}}', "are not valid"),
        (b'{"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 7]}}', "takes 8 bytes.* has 7"),
    ],
)
def test_an_unsound_header_is_refused_by_name(tmp_path: Path, header: bytes, said: str) -> None:
    path = write(tmp_path / "x.safetensors", header, data=bytes(8))
    with pytest.raises(UnreadableError, match=said):
        read(path)


def test_a_shape_of_endless_dimensions_is_refused_at_once(tmp_path: Path) -> None:
    shape = json.dumps([2**62] * 200_000)
    header = f'{{"w": {{"dtype": "U8", "shape": {shape}, "data_offsets": [0, 1]}}}}'.encode()
    with pytest.raises(UnreadableError, match="200,000 dimensions"):
        read(write(tmp_path / "x.safetensors", header, data=b"1"))


@pytest.mark.parametrize(
    ("second", "said"), [(12, "a hole before it"), (4, "an overlap"), (0, "an overlap")]
)
def test_ranges_must_follow_one_another(tmp_path: Path, second: int, said: str) -> None:
    header = {"a": tensor([2], 0), "b": tensor([2], second)}
    with pytest.raises(UnreadableError, match=said):
        read(write(tmp_path / "x.safetensors", header))


def test_unknown_types_are_told_all_at_once(tmp_path: Path) -> None:
    header = {"a": {"dtype": "F5"}, "b": {"dtype": "F5"}, "c": {"dtype": "Q7"}}
    with pytest.raises(UnsupportedError, match=r"'F5': a and 1 more; 'Q7': c"):
        read(write(tmp_path / "x.safetensors", header, data=b""))


def test_a_cut_file_still_shows_its_tensors_and_names_the_hurt_ones(tmp_path: Path) -> None:
    header = {"a": tensor([2], 0), "b": tensor([2], 8)}
    index = read(write(tmp_path / "x.safetensors", header, data=bytes(10)))
    assert [entry.fqn for entry in index.tensors] == ["a", "b"]
    assert [sorted(problem.about) for problem in index.problems] == [["b"]]


def test_bytes_behind_the_data_are_a_problem(tmp_path: Path) -> None:
    write(tmp_path / "x.safetensors", {"a": tensor([2], 0)}, data=bytes(9))
    assert "1 bytes longer" in messages(tmp_path / "x.safetensors")


def test_scalars_and_empty_tensors_are_read(tmp_path: Path) -> None:
    header = {"empty": tensor([0, 3], 0), "scalar": tensor([], 0)}
    index = read(write(tmp_path / "x.safetensors", header))
    assert [(entry.shape, entry.nbytes) for entry in index.tensors] == [((0, 3), 0), ((), 4)]


def test_a_header_in_the_middle_of_a_file_counts_bytes_from_its_start(tmp_path: Path) -> None:
    inner = write(tmp_path / "x.safetensors", {"a": tensor([2], 0)}).read_bytes()
    (tmp_path / "y.distcp").write_bytes(b"before" + inner + b"behind")
    with Files() as files:
        header = read_header(files, str(tmp_path / "y.distcp"), offset=6, length=len(inner))
    assert header.tensors["a"].data[1:] == (6 + len(inner) - 8, 8)


@given(st.binary(max_size=200), st.integers(0, 40))
def test_any_bytes_end_in_our_own_error(
    tmp_path_factory: pytest.TempPathFactory, data: bytes, length: int
) -> None:
    path = tmp_path_factory.mktemp("any") / "any.safetensors"
    path.write_bytes(length.to_bytes(8, "little") + b"{" + data)
    with suppress(CheckpointError):  # anything else fails the test
        read(path)


@given(st.data())
def test_any_damage_to_a_real_file_ends_in_our_own_error(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    raw = bytearray((SHARDED / "shard-00001-model-00001-of-00001.safetensors").read_bytes())
    place = data.draw(st.integers(0, 1480))
    raw[place : place + data.draw(st.integers(0, 3))] = data.draw(st.binary(max_size=3))
    path = tmp_path_factory.mktemp("damaged") / "damaged.safetensors"
    path.write_bytes(raw)
    with suppress(CheckpointError):  # anything else fails the test
        read(path)


@pytest.mark.slow
def test_a_header_of_100_000_tensors_is_read_in_seconds(tmp_path: Path) -> None:
    header = {f"layers.{n}.weight": tensor([2, 1], 8 * n) for n in range(100_000)}
    path = write(tmp_path / "x.safetensors", header)
    start = time.process_time()
    assert len(read(path).tensors) == 100_000
    assert time.process_time() - start < 10


def test_one_of_several_shards_says_so() -> None:
    index = read(LISTED / "model-00002-of-00003.safetensors")
    assert "file 2 of 3" in index.problems[0].message


def test_one_rank_alone_is_not_whole() -> None:
    index = read(SHARDED / "shard-00001-model-00001-of-00001.safetensors")
    assert "only what rank 0 saved" in index.problems[0].message


@pytest.mark.parametrize("name", ["model.safetensors", "anything", "model.safetensors.index.json"])
def test_a_file_is_known_by_its_suffix_or_its_header(tmp_path: Path, name: str) -> None:
    write(tmp_path / name, {"a": tensor([2], 0)})
    assert safetensors.matches(str(tmp_path / name))


def test_other_files_and_folders_are_not_ours(tmp_path: Path) -> None:
    (tmp_path / "model.pt").write_bytes(b"PK\x03\x04" + bytes(30))
    (tmp_path / "._x.safetensors").write_bytes(b"")
    (tmp_path / "dir.safetensors").mkdir()
    places = (tmp_path, tmp_path / "model.pt", tmp_path / "none.safetensors")
    assert not any(safetensors.matches(str(place)) for place in places)


# ---------------------------------------------------------------------------------- with an index


def write_index(folder: Path, weight_map: object, **metadata: object) -> Path:
    path = folder / "model.safetensors.index.json"
    path.write_text(json.dumps({"metadata": metadata, "weight_map": weight_map}))
    return path


def test_a_missing_shard_is_named_with_what_it_held(tmp_path: Path) -> None:
    folder = copy(LISTED, tmp_path / "c")
    (folder / "model-00002-of-00003.safetensors").unlink()
    index = read(folder)
    assert index.missing == (str(folder / "model-00002-of-00003.safetensors"),)
    assert isinstance(index.problems[0], IncompleteError)
    assert len(index.problems[0].about) == 13


def test_a_name_that_its_shard_lacks_is_a_problem(tmp_path: Path) -> None:
    write(tmp_path / "x.safetensors", {"a": tensor([2], 0)})
    write_index(tmp_path, {"a": "x.safetensors", "b": "x.safetensors"})
    assert "x.safetensors lacks b" in messages(tmp_path)


def test_a_name_that_the_index_lacks_is_shown_and_a_problem(tmp_path: Path) -> None:
    write(tmp_path / "x.safetensors", {"a": tensor([2], 0), "b": tensor([2], 8)})
    write_index(tmp_path, {"a": "x.safetensors"})
    assert "x.safetensors holds b" in messages(tmp_path)
    assert "-x leaves out" in str(read(tmp_path).problems[0].hint)
    assert read(tmp_path).tensor("b") is not None


def test_the_index_decides_which_of_two_files_counts(tmp_path: Path) -> None:
    write(tmp_path / "x.safetensors", {"a": tensor([2], 0)})
    write(tmp_path / "y.safetensors", {"a": tensor([3], 0), "b": tensor([1], 12)})
    write_index(tmp_path, {"a": "y.safetensors", "b": "x.safetensors"})
    entry = read(tmp_path).tensor("a")
    assert entry is not None
    assert entry.shape == (3,)
    assert "x.safetensors holds a" in messages(tmp_path)


def test_a_damaged_shard_leaves_the_others_readable(tmp_path: Path) -> None:
    folder = copy(LISTED, tmp_path / "c")
    (folder / "model-00001-of-00003.safetensors").write_bytes(b"<html>")
    index = read(folder)
    assert len(index.tensors) > 5
    assert "HTML" in index.problems[0].message


def test_a_stale_file_with_the_same_names_is_a_problem_until_one_is_named(tmp_path: Path) -> None:
    folder = copy(LISTED, tmp_path / "c")
    shutil.copyfile(LISTED / "model-00003-of-00003.safetensors", folder / "model.safetensors")
    assert "two checkpoints in one folder" in messages(folder)
    assert messages(folder / "model.safetensors.index.json") == ""
    assert messages(folder / "model.safetensors") == ""


def test_an_unlisted_file_of_other_names_is_only_noted(tmp_path: Path) -> None:
    folder = copy(LISTED, tmp_path / "c")
    write(folder / "adapter_model.safetensors", {"lora": tensor([2], 0)})
    index = read(folder)
    assert index.problems == ()
    assert index.notes == ("adapter_model.safetensors is not in the index, and not read.",)


def test_a_wrong_total_size_is_noted(tmp_path: Path) -> None:
    write(tmp_path / "x.safetensors", {"a": tensor([2], 0)})
    write_index(tmp_path, {"a": "x.safetensors"}, total_size=9)
    assert "total_size of 9 bytes; the tensors have 8" in read(tmp_path).notes[0]


@pytest.mark.parametrize("total", [8, 8.0, float("inf"), "8", None, True])
def test_an_odd_total_size_does_no_harm(tmp_path: Path, total: object) -> None:
    write(tmp_path / "x.safetensors", {"a": tensor([2], 0)})
    write_index(tmp_path, {"a": "x.safetensors"}, total_size=total)
    assert read(tmp_path).problems == ()


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "is empty"),
        (b"<html>", "HTML"),
        (b"version https://git-lfs.github.com", "LFS"),
        (b'{"weight_map": {', "not valid JSON"),
        (b"[]", "has no weight_map"),
        (b'{"weight_map": 1}', "has no weight_map"),
        (b'{"weight_map": {"a": 1}}', "not a file beside it"),
        (b'{"weight_map": {"a": "/etc/passwd"}}', "not a file beside it"),
        (b'{"weight_map": {"a": "../x.safetensors"}}', "not a file beside it"),
        (b'{"weight_map": {"a": "\\ud800"}}', "not a file beside it"),
        (b'{"weight_map": {"a": "x\\u0000"}}', "not a file beside it"),
        (b'{"weight_map": {"a": "."}}', "not a file beside it"),
        (b'{"weight_map": {"a": ""}}', "not a file beside it"),
        pytest.param(
            *(b'{"weight_map": {"%s": "x.safetensors"}}' % (b"a" * 70_000), "not a file beside it"),
            id="long",
        ),
    ],
)
@pytest.mark.parametrize("suffix", ["safetensors", "bin"])
def test_an_unsound_index_is_refused(
    tmp_path: Path, content: bytes, said: str, suffix: str
) -> None:
    (tmp_path / f"model.{suffix}.index.json").write_bytes(content)
    with pytest.raises(UnreadableError, match=said):
        formats.read_index(str(tmp_path))


def test_a_folder_in_the_place_of_a_file_is_said_to_be_one(tmp_path: Path) -> None:
    (tmp_path / "inner").mkdir()
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"a": "inner"}}')
    (problem,) = read(tmp_path).problems
    assert "inner is a folder; model.safetensors.index.json has a in it" in problem.message


def test_two_indexes_are_two_checkpoints(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / f"{name}.safetensors.index.json").write_text('{"weight_map": {}}')
    with pytest.raises(CheckpointError, match="holds 2 checkpoints"):
        read(tmp_path)


# ------------------------------------------------------------------------------- without an index


def test_files_without_an_index_are_one_checkpoint(tmp_path: Path) -> None:
    write(tmp_path / "x.safetensors", {"a": tensor([2], 0)})
    write(tmp_path / "y.safetensors", {"b": tensor([2], 0)})
    index = read(tmp_path)
    assert [entry.fqn for entry in index.tensors] == ["a", "b"]
    assert "2 files are read as one" in index.notes[0]


@pytest.mark.parametrize("own", ["model.safetensors", "model-00001-of-00001.safetensors"])
@pytest.mark.parametrize("other", ["consolidated", "adapter_model", "model.fp16", "model (1)"])
def test_without_an_index_copies_beside_the_model_are_not_read(
    own: str, other: str, tmp_path: Path
) -> None:
    write(tmp_path / own, {"model.w": tensor([2], 0)})
    write(tmp_path / f"{other}.safetensors", {"w": tensor([2], 0)})
    index = read(tmp_path)
    assert [entry.fqn for entry in index.tensors] == ["model.w"]
    assert any(f"not read: {other}.safetensors" in note for note in index.notes)
    write(tmp_path / "model_1.safetensors", {"second.w": tensor([2], 0)})  # Accelerate's second
    assert [entry.fqn for entry in read(tmp_path).tensors] == ["model.w", "second.w"]


def test_a_name_in_two_files_is_a_problem_that_names_both(tmp_path: Path) -> None:
    for name in ("x", "y"):
        write(tmp_path / f"{name}.safetensors", {"a": tensor([2], 0)})
    assert "x.safetensors and y.safetensors both hold a" in messages(tmp_path)


def test_a_gap_in_the_numbers_is_a_missing_file(tmp_path: Path) -> None:
    folder = copy(LISTED, tmp_path / "c")
    (folder / "model.safetensors.index.json").unlink()
    (folder / "model-00003-of-00003.safetensors").unlink()
    assert read(folder).missing == (str(folder / "model-00003-of-00003.safetensors"),)
    assert "model-00003-of-00003.safetensors does not exist" in messages(folder)


def test_numbers_of_two_saves_are_a_problem(tmp_path: Path) -> None:
    write(tmp_path / "m-00001-of-00001.safetensors", {"a": tensor([2], 0)})
    write(tmp_path / "m-00001-of-00002.safetensors", {"b": tensor([2], 0)})
    assert "more than one save: -of-00001 and -of-00002" in messages(tmp_path)


def test_a_folder_of_unreadable_files_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.safetensors").write_bytes(b"")
    with pytest.raises(UnreadableError, match="is empty"):
        read(tmp_path)


# ------------------------------------------------------------------------ what torch's DCP writes


def test_shards_become_boxes_with_their_ranks() -> None:
    entry = read(SHARDED).tensor("emb.weight")
    assert entry is not None
    assert entry.shape == (11, 7)
    assert [(chunk.box.offsets[0], chunk.box.sizes[0], chunk.rank) for chunk in entry.chunks] == [
        (0, 3, 0),
        (3, 3, 1),
        (6, 3, 2),
        (9, 2, 3),
    ]


def test_the_number_of_ranks_is_told_with_its_limits() -> None:
    index = read(SHARDED)
    assert index.world_size == 4
    assert "if more than 4 ranks saved it" in index.notes[0]


@pytest.mark.parametrize("rank", [1, 2, 3])
def test_a_missing_rank_is_a_missing_file(tmp_path: Path, rank: int) -> None:
    folder = copy(SHARDED, tmp_path / "c")
    name = f"shard-{rank:05}-model-00001-of-00001.safetensors"
    (folder / name).unlink()
    index = read(folder)
    assert index.missing == (str(folder / name),)
    assert f"rank {rank - 1} has no file" in index.problems[0].message


def test_a_hole_between_shards_is_a_problem(tmp_path: Path) -> None:
    write_shard(tmp_path, "shard-00001-model-00001-of-00001.safetensors", {"w": ([0], [2])})
    write_shard(tmp_path, "shard-00002-model-00001-of-00001.safetensors", {"w": ([3], [2])})
    assert "w: chunks cover 4 of 5 elements" in messages(tmp_path)


def test_overlapping_shards_are_a_problem(tmp_path: Path) -> None:
    write_shard(tmp_path, "shard-00001-model-00001-of-00001.safetensors", {"w": ([0], [2])})
    write_shard(tmp_path, "shard-00002-model-00001-of-00001.safetensors", {"w": ([1], [2])})
    assert "overlap" in messages(tmp_path)


def test_equal_boxes_are_replicas(tmp_path: Path) -> None:
    for rank in (1, 2):
        name = f"shard-{rank:05}-model-00001-of-00001.safetensors"
        write_shard(tmp_path, name, {"w": ([0], [2])})
    index = read(tmp_path)
    (chunk,) = index.tensors[0].chunks
    assert chunk.box == Box((0,), (2,))
    assert len(chunk.replicas) == 1
    assert index.problems == ()


@pytest.mark.parametrize("other", [([2], [2], "BF16"), ([2, 0], [2, 1], "F32")])
def test_shards_that_disagree_on_type_or_dimensions_are_a_problem(
    tmp_path: Path, other: tuple[list[int], list[int], str]
) -> None:
    offsets, sizes, dtype = other
    write_shard(tmp_path, "shard-00001-model-00001-of-00001.safetensors", {"w": ([0], [2])})
    name = "shard-00002-model-00001-of-00001.safetensors"
    write_shard(tmp_path, name, {"w": (offsets, sizes)}, dtype=dtype)
    assert "w: " in messages(tmp_path)
    assert "has float32 [2]" in messages(tmp_path)


def test_a_last_ranks_missing_file_shows_in_uneven_pieces(tmp_path: Path) -> None:
    """Four ranks would have cut 9,000 rows into pieces of 2,250, not of 3,000."""
    for rank in range(1, 5):
        box = ([3000 * (rank - 1)], [3000])
        for number, fqn in ((1, "a"), (2, "b")):
            name = f"shard-{rank:05}-model-{number:05}-of-00002.safetensors"
            write_shard(tmp_path, name, {fqn: box})
    assert messages(tmp_path) == ""
    (tmp_path / "shard-00004-model-00002-of-00002.safetensors").unlink()
    assert "b ends early without it: [3000] is not an even piece of [9000]" in messages(tmp_path)


def test_a_last_rank_may_have_nothing_for_one_file(tmp_path: Path) -> None:
    for rank in range(1, 5):
        write_shard(
            tmp_path,
            f"shard-{rank:05}-model-00001-of-00002.safetensors",
            {"a": ([3 * (rank - 1)], [3])},
        )
    write_shard(tmp_path, "shard-00001-model-00002-of-00002.safetensors", {"b": ([0], [1])})
    write_shard(tmp_path, "shard-00002-model-00002-of-00002.safetensors", {"b": ([1], [1])})
    assert messages(tmp_path) == ""


def test_a_file_number_that_no_rank_has_is_a_problem(tmp_path: Path) -> None:
    write_shard(tmp_path, "shard-00001-model-00001-of-00002.safetensors", {"a": ([0], [2])})
    assert "no rank has its file 2 of 2" in messages(tmp_path)


def test_shards_of_two_saves_are_a_problem(tmp_path: Path) -> None:
    write_shard(tmp_path, "shard-00001-model-00001-of-00001.safetensors", {"a": ([0], [2])})
    write_shard(tmp_path, "shard-00002-model-00001-of-00002.safetensors", {"a": ([2], [2])})
    assert "more than one save" in messages(tmp_path)


@pytest.mark.parametrize(
    ("info", "said"),
    [
        ("{", "not valid JSON"),
        ("[]", "not a JSON object"),
        ("{}", "w: DCP_SHARDING_INFO should give 1 offsets"),
        ('{"w": {"saved_offsets": [0, 0]}}', "should give 1 offsets"),
        ('{"w": {"saved_offsets": [-1]}}', "should give 1 offsets"),
        ('{"w": 1}', "should give 1 offsets"),
        ('{"w": {"saved_offsets": [0]}, "v": {"saved_offsets": [0]}}', "speaks of v"),
    ],
)
def test_unsound_sharding_info_is_refused(tmp_path: Path, info: str, said: str) -> None:
    header = {"__metadata__": {"DCP_SHARDING_INFO": info}, "w": tensor([2], 0)}
    with pytest.raises(UnreadableError, match=said):
        read(write(tmp_path / "x.safetensors", header))


def test_of_a_consolidated_folder_the_top_files_are_the_checkpoint() -> None:
    index = read(CONSOLIDATED)
    assert all(Path(file.path).parent == CONSOLIDATED for file in index.files)
    assert "sharded/ holds the shards" in index.notes[0]


def test_a_consolidation_that_stopped_half_way_is_a_problem(tmp_path: Path) -> None:
    folder = copy(CONSOLIDATED, tmp_path / "c")
    (folder / "model.safetensors.index.json").unlink()
    assert "stopped half-way" in messages(folder)


@pytest.mark.parametrize("named", ["", "x.safetensors", "model.safetensors.index.json"])
@pytest.mark.parametrize(("data", "lost"), [(bytes(4), True), (b"1234", False)])
def test_a_scalar_that_consolidation_lost_is_a_problem(
    tmp_path: Path, *, named: str, data: bytes, lost: bool
) -> None:
    (tmp_path / "sharded").mkdir()
    shard = "shard-00001-model-00001-of-00001.safetensors"
    write_shard(tmp_path / "sharded", shard, {"scale": ([], [])})
    write(tmp_path / "x.safetensors", {"scale": tensor([], 0)}, data=data)
    write_index(tmp_path, {"scale": "x.safetensors"})
    assert ("leaves scalars as zero" in messages(tmp_path / named)) == lost


def test_an_index_that_is_named_is_read_alone(tmp_path: Path) -> None:
    folder = copy(LISTED, tmp_path / "c")
    shutil.copyfile(LISTED / "model-00003-of-00003.safetensors", folder / "model.safetensors")
    assert formats.read_index(str(folder)).problems
    assert not formats.read_index(str(folder / "model.safetensors.index.json")).problems


def _sharded(folder: Path, boxes: dict[int, dict[str, tuple[int, torch.Tensor]]]) -> str:
    """A folder as HuggingFaceStorageWriter leaves it: rows of tensors, by their ranks."""
    folder.mkdir()
    for rank, held in boxes.items():
        info = {name: {"saved_offsets": [row, 0]} for name, (row, _) in held.items()}
        save_file(
            {name: tensor for name, (_, tensor) in held.items()},
            folder / f"shard-{rank + 1:05}-model-00001-of-00001.safetensors",
            metadata={"DCP_SHARDING_INFO": json.dumps(info)},
        )
    return str(folder)


def test_a_middle_rank_with_nothing_to_save_leaves_no_hole(tmp_path: Path) -> None:
    rows = torch.arange(8.0).reshape(4, 2)
    path = _sharded(tmp_path / "s", {0: {"w": (0, rows[:2])}, 2: {"w": (2, rows[2:])}})
    index = formats.read_index(path)
    assert not index.problems
    assert any("No file of rank 1" in note for note in index.notes)


def test_a_middle_rank_whose_rows_are_not_there_is_missed(tmp_path: Path) -> None:
    rows = torch.arange(12.0).reshape(6, 2)
    path = _sharded(tmp_path / "s", {0: {"w": (0, rows[:2])}, 2: {"w": (4, rows[4:])}})
    told = [problem.message for problem in formats.read_index(path).problems]
    assert any("rank 1 has no file" in message for message in told)


@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_that_are_expected_must_have_a_file(ranks: int, tmp_path: Path) -> None:
    rows = torch.arange(8.0).reshape(4, 2)
    path = _sharded(tmp_path / "s", {0: {"w": (0, rows[:2])}, 2: {"w": (2, rows[2:])}})
    index = formats.read_index(path)
    assert verify_quick(index).whole
    assert not expecting_ranks(verify_quick(index), index, ranks).whole


def test_ranks_that_all_have_a_file_are_as_expected(tmp_path: Path) -> None:
    rows = torch.arange(8.0).reshape(4, 2)
    path = _sharded(tmp_path / "s", {0: {"w": (0, rows[:2])}, 1: {"w": (2, rows[2:])}})
    index = formats.read_index(path)
    assert expecting_ranks(verify_quick(index), index, 2).whole
    assert not expecting_ranks(verify_quick(index), index, 4).whole
