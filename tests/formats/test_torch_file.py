"""One torch.save file as a checkpoint: real files of real frameworks, views, ties, refusals."""

import io
import pickle
import shutil
from collections import OrderedDict
from fractions import Fraction
from http import HTTPStatus
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from reader_contract import DATA, ReaderContract, RealCheckpoint, whole

from ckpt_tools import formats
from ckpt_tools.core.geometry import Box
from ckpt_tools.core.index import CheckpointIndex
from ckpt_tools.core.plain_values import TorchValue
from ckpt_tools.errors import (
    IncompleteError,
    UnreadableError,
    UnsafePickleError,
    UnsupportedError,
)
from ckpt_tools.formats.pickle.stored import StoredStorage, StoredTensor
from ckpt_tools.formats.protocol import ReadOptions
from ckpt_tools.formats.torch_file import read as torch_file
from ckpt_tools.formats.torch_file.open import chunk_of
from ckpt_tools.formats.zip.read import Record
from ckpt_tools.storage.reader import Files

REAL = DATA / "checkpoints"


def model(fqn: str) -> str:
    """The truth's name of an entry of a file that holds the model alone."""
    return f"model.{fqn}"


def optim(fqn: str) -> str:
    return f"optim.{fqn}"


def not_model(name: str) -> bool:
    return not name.startswith("model.")


def not_optim(name: str) -> bool:
    return not name.startswith("optim")


def optimizer_is_optim(fqn: str) -> str | None:
    """The truth says ``optim`` where the file says ``optimizer``, and knows no other state."""
    name = fqn.replace("optimizer.", "optim.", 1) if fqn.startswith("optimizer.") else fqn
    return name if name.startswith(("model.", "optim.")) else None


class TestTorchFile(ReaderContract):
    checkpoints: ClassVar[tuple[RealCheckpoint, ...]] = tuple(
        RealCheckpoint(f"checkpoints/{folder}/{path}", f"checkpoints/{folder}", **names)
        for folder, path, names in (
            ("fsdp1_full_torchsave", "ckpt/model.pt", {"rename": model, "absent": not_model}),
            ("fsdp1_full_torchsave", "ckpt/optim.pt", {"rename": optim, "absent": not_optim}),
            ("fsdp1_full_torchsave", "ckpt/checkpoint.pt", {"rename": optimizer_is_optim}),
            ("fsdp2_full_torchsave_4r", "ckpt/consolidated.pt", {}),
            ("fsdp2_full_torchsave_4r", "ckpt/consolidated_legacy.pt", {}),
            ("torch-2.1.2-a_fsdp1_full", "checkpoint.pt", {"rename": optimizer_is_optim}),
            (
                "torch-2.1.2-a_fsdp1_full",
                "model_legacy_tar.pt",
                {"rename": model, "absent": not_model},
            ),
            (
                "accelerate_fsdp1_full_llama_tied_4r",
                "ckpt/state/pytorch_model_fsdp.bin",
                {"rename": model, "absent": not_model},
            ),
            (
                "accelerate_fsdp1_full_llama_tied_4r",
                "ckpt/state/optimizer.bin",
                {"rename": lambda fqn: f"optimizer.{fqn}", "absent": not_optim},
            ),
            (
                "composer-0.32.1-monolith",
                "ep0-ba1-rank0.pt",
                {"rename": lambda fqn: fqn if fqn.startswith("state.") else None},
            ),
        )
    )

    def read(self, path: Path) -> CheckpointIndex:
        assert torch_file.matches(str(path))
        return torch_file.read_index(str(path))


def saved(tmp_path: Path, value: object, *, kind: str = "zip") -> str:
    path = tmp_path / "saved.pt"
    torch.save(value, path, _use_new_zipfile_serialization=kind == "zip")
    return str(path)


def values(index: CheckpointIndex) -> dict[str, bytes]:
    with Files() as files:
        return {entry.fqn: whole(entry, files) for entry in formats.locate(index, files).tensors}


def raw(tensor: torch.Tensor) -> bytes:
    return tensor.resolve_conj().resolve_neg().contiguous().view(torch.uint8).numpy().tobytes()


BASE = torch.arange(48, dtype=torch.float32)
COMPLEX = torch.complex(BASE, BASE.flip(0) - 7)
VIEWS = {
    "a slice": BASE[5:17],
    "a transpose": BASE.view(6, 8).t(),
    "every third": BASE[2::3],
    "a column": BASE.view(6, 8)[:, 3:5],
    "expanded": BASE[:4].view(4, 1).expand(4, 5),
    "channels last": BASE.view(2, 3, 2, 4).to(memory_format=torch.channels_last),
    "a permutation": BASE.view(2, 3, 8).permute(2, 0, 1),
    "no element, at an end": BASE[48:],
    "one element": BASE[47:].view(1, 1),
    "conjugated": COMPLEX.view(6, 8).t().conj(),
    "negated": COMPLEX.conj().imag,
    "a negated double": COMPLEX.to(torch.complex128).conj().imag[3:9],
}


@pytest.mark.parametrize("kind", ["zip", "legacy"])
@pytest.mark.parametrize("name", VIEWS)
def test_a_view_has_its_logical_values(tmp_path: Path, name: str, kind: str) -> None:
    view = VIEWS[name]
    index = torch_file.read_index(saved(tmp_path, {"t": view, "whole": BASE}, kind=kind))
    assert index.tensors[0].shape == tuple(view.shape)
    if view.numel() == 0 or view.dim() == 0:
        assert values(index)["t"] == b""
    else:
        assert values(index)["t"] == raw(view)


DTYPES = [
    "float64 float32 float16 bfloat16 float8_e4m3fn float8_e5m2 float8_e4m3fnuz float8_e5m2fnuz",
    "int64 int32 int16 int8 uint64 uint32 uint16 uint8 bool complex64 complex128 complex32",
    "float8_e8m0fnu",
]


@pytest.mark.parametrize("kind", ["zip", "legacy"])
@pytest.mark.parametrize("dtype", " ".join(DTYPES).split())
def test_every_element_type_is_read(tmp_path: Path, dtype: str, kind: str) -> None:
    if not hasattr(torch, dtype):
        pytest.skip(f"this torch has no {dtype}")
    size = getattr(torch, dtype).itemsize
    data = torch.arange(3 * size, dtype=torch.uint8) % 2
    tensor = data.view(getattr(torch, dtype))
    index = torch_file.read_index(saved(tmp_path, {"t": tensor[1:]}, kind=kind))
    assert index.tensors[0].dtype.name == dtype
    assert values(index)["t"] == data.numpy().tobytes()[size:]


def test_a_parameter_is_read_as_its_tensor(tmp_path: Path) -> None:
    index = torch_file.read_index(saved(tmp_path, {"p": torch.nn.Parameter(BASE)}))
    assert values(index) == {"p": raw(BASE)}


def test_equal_views_of_one_storage_are_ties(tmp_path: Path) -> None:
    path = saved(tmp_path, {"a": BASE, "b": BASE, "part": BASE[:24], "other": BASE.clone()})
    index = torch_file.read_index(path)
    assert index.ties == (("a", "b"),)


def test_a_negated_view_is_no_tie_of_its_base(tmp_path: Path) -> None:
    imag = COMPLEX.imag
    index = torch_file.read_index(saved(tmp_path, {"a": imag, "b": torch._neg_view(imag)}))
    assert index.ties == ()


def test_overlapping_views_are_noted(tmp_path: Path) -> None:
    index = torch_file.read_index(saved(tmp_path, {"a": BASE[:9], "b": BASE[8:], "c": BASE[:8]}))
    assert [note for note in index.notes if "a and b" in note and "storage" in note]


def test_slices_that_only_touch_are_not_noted(tmp_path: Path) -> None:
    assert torch_file.read_index(saved(tmp_path, {"q": BASE[:16], "k": BASE[16:]})).notes == ()


NESTED = {
    "optimizers": [
        {"state": {0: {"exp_avg": BASE[:2]}}, "param_groups": [{"lr": 0.1, "params": [0]}]}
    ],
    "pair": (BASE[:1], 7),
    "numbers": [1, 2, 3],
    "betas": (0.9, 0.99),
    "empty": {},
    "dtype": torch.float16,
    "half": Fraction(1, 2),
}


def test_names_are_those_that_dcp_gives_to_the_same_state_dict(tmp_path: Path) -> None:
    index = torch_file.read_index(saved(tmp_path, NESTED))
    assert [entry.fqn for entry in index.tensors] == ["optimizers.0.state.0.exp_avg", "pair.0"]
    values = {entry.fqn: entry.value for entry in index.objects}
    assert str(values.pop("half")) == "(fractions.Fraction)"
    assert values == {
        "betas": (0.9, 0.99),
        "dtype": TorchValue("torch.float16"),
        "numbers": [1, 2, 3],
        "optimizers.0.param_groups.0.lr": 0.1,
        "optimizers.0.param_groups.0.params": [0],
        "pair.1": 7,
    }


def test_a_path_has_keys_as_text_and_places_as_numbers(tmp_path: Path) -> None:
    index = torch_file.read_index(saved(tmp_path, NESTED))
    assert index.tensors[0].path == ("optimizers", 0, "state", "0", "exp_avg")


def test_the_tree_keeps_the_containers_and_their_keys(tmp_path: Path) -> None:
    tree = torch_file.read_index(saved(tmp_path, NESTED)).nesting
    kinds = {path: (inner.kind, inner.keys) for path, inner in tree.branches()}
    assert kinds["optimizers",][0] == "list"
    assert kinds["optimizers", 0, "state"] == ("dict", (0,))
    assert kinds["empty",] == ("dict", ())
    assert kinds["pair",] == ("tuple", None)


def test_what_is_not_plain_is_named_and_not_opened(tmp_path: Path) -> None:
    index = torch_file.read_index(saved(tmp_path, {**NESTED, "status": HTTPStatus.OK}))
    half, status = index.object("half"), index.object("status")
    assert (half.is_writable, str(half.value)) == (True, "(fractions.Fraction)")
    assert (status.is_writable, str(status.value)) == (False, "(http.HTTPStatus)")


def test_a_bare_tensor_is_called_value(tmp_path: Path) -> None:
    assert values(torch_file.read_index(saved(tmp_path, BASE))) == {"value": raw(BASE)}


def test_a_list_of_tensors_is_numbered(tmp_path: Path) -> None:
    index = torch_file.read_index(saved(tmp_path, [BASE[:1], BASE[1:2]]))
    assert [entry.path for entry in index.tensors] == [(0,), (1,)]


def test_two_entries_of_one_name_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match=r"two entries have the name a\.b"):
        torch_file.read_index(saved(tmp_path, {"a": {"b": BASE}, "a.b": BASE}))


def test_weights_without_elements_are_named(tmp_path: Path) -> None:
    state = {"embed.weight": BASE, "norm.weight": BASE[:0], "head.weight": BASE[:0]}
    (note,) = torch_file.read_index(saved(tmp_path, state)).notes
    assert "head.weight, norm.weight" in note
    assert "embed.weight [48]" in note


@pytest.mark.parametrize("name", ["_flat_param", "_fsdp_wrapped_module._flat_param", "flat_param"])
def test_flat_parameters_are_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(UnsupportedError, match="flat_param is a flat parameter of FSDP1") as error:
        torch_file.read_index(saved(tmp_path, {"model": {name: BASE}}))
    assert "FULL_STATE_DICT" in (error.value.hint or "")


def test_a_sharded_tensor_is_refused_with_the_ways_to_save_again() -> None:
    path = REAL / "fsdp1_sharded_nomesh_torchsave/ckpt/model_rank0.pt"
    with pytest.raises(UnsupportedError, match="ShardedTensor") as error:
        torch_file.read_index(str(path))
    assert "device_mesh" in (error.value.hint or "")


def test_one_ranks_shards_are_no_whole_checkpoint() -> None:
    index = torch_file.read_index(str(REAL / "fsdp2_torchsave_1d_4r/ckpt/model_rank1.pt"))
    with pytest.raises(IncompleteError, match="shards of rank 1 of a mesh dp=4"):
        index.require_whole()


def test_what_one_rank_holds_whole_can_be_taken_from_its_file() -> None:
    index = torch_file.read_index(str(REAL / "fsdp2_torchsave_1d_4r/ckpt/model_rank1.pt"))
    index.select({"scale", "seen"}).require_whole()


@pytest.mark.parametrize("kind", ["zip", "legacy"])
def test_a_file_cut_anywhere_is_refused(tmp_path: Path, kind: str) -> None:
    path = Path(saved(tmp_path, {"t": BASE, "u": BASE.clone()}, kind=kind))
    data = path.read_bytes()
    for length in range(1, len(data), 37):
        path.write_bytes(data[:length])
        with pytest.raises(UnreadableError, match=r"saved\.pt"):
            torch_file.read_index(str(path))


def test_a_record_that_is_not_as_long_as_its_storage_is_refused() -> None:
    storage = StoredStorage("7", "float32", 48)
    tensor = StoredTensor(storage, "float32", 0, (48,), (1,))
    with pytest.raises(UnreadableError, match=r"storage '7' has 100 bytes, .* saved with 192"):
        chunk_of(Box.whole((48,)), tensor, Record(64, 100, None), "model.pt")


def test_a_view_that_leaves_its_storage_is_refused() -> None:
    storage = StoredStorage("7", "float32", 48)
    tensor = StoredTensor(storage, "float32", 40, (3, 3), (3, 1))
    with pytest.raises(UnreadableError, match="bytes 160 to 196 of storage '7', which has 192"):
        chunk_of(Box.whole((3, 3)), tensor, Record(64, 192, None), "model.pt")


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "it is empty"),
        (b"<!DOCTYPE html><html></html>", "it is a web page"),
        (b"version https://git-lfs.github.com/spec/v1\n", "Git LFS pointer"),
        (b"\x00" * 64, "begins with zeros"),
        (b"x" * 64, "does not begin like one"),
    ],
)
def test_what_is_no_checkpoint_is_named(tmp_path: Path, content: bytes, reason: str) -> None:
    path = tmp_path / "model.pt"
    path.write_bytes(content)
    assert torch_file.matches(str(path))
    with pytest.raises(UnreadableError, match=reason):
        torch_file.read_index(str(path))


def test_a_plain_pickle_is_no_file_of_torch_save(tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    path.write_bytes(pickle.dumps({"a": 1}))
    with pytest.raises(UnreadableError, match="plain pickle"):
        torch_file.read_index(str(path))


def test_a_big_endian_file_is_refused(tmp_path: Path) -> None:
    path = Path(saved(tmp_path, {"t": BASE}, kind="legacy"))
    data = path.read_bytes()
    little = b"little_endianq\x02\x88"
    assert little in data
    path.write_bytes(data.replace(little, little[:-1] + b"\x89"))
    with pytest.raises(UnsupportedError, match="big-endian"):
        torch_file.read_index(str(path))


def test_a_tar_archive_of_the_first_torch_is_refused(tmp_path: Path) -> None:
    (tmp_path / "storages").write_bytes(b"x")
    made = shutil.make_archive(str(tmp_path / "old"), "tar", tmp_path, "storages")
    path = Path(made).rename(tmp_path / "old.pt")
    with pytest.raises(UnsupportedError, match="tar archive"):
        torch_file.read_index(str(path))


def test_an_unknown_global_is_a_problem_of_its_entry_unless_it_is_allowed(tmp_path: Path) -> None:
    path = saved(tmp_path, {"t": BASE, "odd": OrderedDict(a=torch.nn.Identity)})
    with Files() as files:
        located = formats.locate(torch_file.read_index(path), files)
        with pytest.raises(UnsafePickleError, match=r"odd\.a: asks for torch\.nn\.modules"):
            located.require_whole()
        located.select({"t"}).require_whole()
        allowed = ReadOptions(allow_globals=("torch.nn.modules.linear.Identity",))
        index = formats.locate(torch_file.read_index(path, options=allowed), files)
    index.require_whole()
    assert str(index.object("odd.a").value) == "(torch.nn.modules.linear.Identity)"


def test_data_files_of_dcp_are_not_taken_for_torch_files(tmp_path: Path) -> None:
    data = io.BytesIO()
    torch.save(BASE, data)
    path = tmp_path / "__0_0.distcp"
    path.write_bytes(data.getvalue())
    assert not torch_file.matches(str(path))


@pytest.mark.parametrize("name", ["notes.txt", "tokenizer.bin", "archive.zip"])
def test_other_files_are_not_taken_for_torch_files(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.write_bytes(b"PK\x03\x04 a zip file" if name.endswith(".zip") else b"some bytes")
    assert not torch_file.matches(str(path))
