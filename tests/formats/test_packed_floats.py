"""Floats of 4 and 6 bits: counted in packs here, singly in safetensors, bytes as they are."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import running
import torch
from running import Result
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from ckpt_tools import open_checkpoint
from ckpt_tools.core.dtypes import BY_NAME
from ckpt_tools.core.geometry import Box
from ckpt_tools.core.index import CheckpointIndex
from ckpt_tools.errors import UnreadableError, UnsupportedError
from ckpt_tools.formats.safetensors import read as safetensors

if not hasattr(torch, "float4_e2m1fn_x2"):
    pytest.skip("torch 2.8 is the first with 4-bit floats", allow_module_level=True)
F4 = torch.float4_e2m1fn_x2


def run(*args: object, code: int = 0) -> Result:
    done = running.run(*args)
    assert done.exit_code == code, done.output
    return done


def packed(*shape: int) -> torch.Tensor:
    numel = int(torch.tensor(shape).prod())
    return torch.randint(0, 256, (numel,), dtype=torch.uint8).reshape(shape).view(F4)


def write(path: Path, dtype: str, shape: list[int], nbytes: int) -> Path:
    """A file with one tensor, ``w``, whose bytes count up."""
    told = {"w": {"dtype": dtype, "shape": shape, "data_offsets": [0, nbytes]}}
    text = json.dumps(told).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(range(nbytes)))
    return path


def read(path: Path) -> CheckpointIndex:
    return safetensors.read_index(str(path))


def header(path: Path) -> dict[str, object]:
    raw = path.read_bytes()
    told: dict[str, object] = json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])
    del told["__metadata__"]
    return told


@pytest.mark.parametrize(
    ("dtype", "shape", "ours", "nbytes"),
    [
        ("F4", [3, 16], (3, 8), 24),
        ("F4", [2], (1,), 1),
        ("F4", [0, 6], (0, 3), 0),
        ("F6_E2M3", [3, 8], (3, 2), 18),
        ("F6_E3M2", [4], (1,), 3),
        ("F8_E8M0", [3, 1], (3, 1), 3),
    ],
)
def test_a_header_counts_single_floats(
    tmp_path: Path, dtype: str, shape: list[int], ours: tuple[int, ...], nbytes: int
) -> None:
    entry = read(write(tmp_path / "x.safetensors", dtype, shape, nbytes)).tensors[0]
    assert (entry.shape, entry.nbytes, entry.dtype.safetensors) == (ours, nbytes, dtype)


@pytest.mark.parametrize(
    ("dtype", "shape", "nbytes"),
    [("F4", [8, 1], 4), ("F4", [], 1), ("F4", [3, 3], 5), ("F6_E2M3", [2, 6], 9)],
)
def test_rows_that_are_no_whole_bytes_are_refused(
    tmp_path: Path, dtype: str, shape: list[int], nbytes: int
) -> None:
    with pytest.raises(UnsupportedError, match=f"w: shape .* of {dtype}: the last dimension must"):
        read(write(tmp_path / "x.safetensors", dtype, shape, nbytes))


@pytest.mark.parametrize(("dtype", "nbytes"), [("F4", 23), ("F6_E3M2", 24), ("F8_E8M0", 24)])
def test_a_range_of_another_length_is_refused(tmp_path: Path, dtype: str, nbytes: int) -> None:
    with pytest.raises(UnreadableError, match=f"its range has {nbytes}"):
        read(write(tmp_path / "x.safetensors", dtype, [3, 16], nbytes))


def test_a_torch_file_becomes_the_safetensors_file_that_torch_would_write(tmp_path: Path) -> None:
    tensors = {
        "a.scale": torch.ones(3, 2).to(torch.float8_e8m0fnu),
        "a.weight": packed(3, 8),
        "bytes": torch.arange(5, dtype=torch.uint8),
        "empty": torch.empty((0, 4), dtype=F4),
        "norm": torch.ones(3),
    }
    torch.save(tensors, tmp_path / "in.pt")
    out = tmp_path / "out.safetensors"
    run("export", tmp_path / "in.pt", "-o", out)
    save_file(tensors, tmp_path / "true.safetensors", metadata={"format": "pt"})
    true = header(tmp_path / "true.safetensors")
    assert {k: (v["dtype"], v["shape"]) for k, v in header(out).items()} == {
        k: (v["dtype"], v["shape"]) for k, v in true.items()
    }
    for name, tensor in load_file(out).items():
        assert (tensor.dtype, tensor.shape) == (tensors[name].dtype, tensors[name].shape)
        assert torch.equal(tensor.view(torch.uint8), tensors[name].view(torch.uint8))


def test_a_safetensors_file_becomes_a_torch_file_and_both_are_the_same(tmp_path: Path) -> None:
    tensors = {"w": packed(5, 6), "norm": torch.ones(3)}
    source, out = tmp_path / "in.safetensors", tmp_path / "out.pt"
    save_file(tensors, source)
    run("export", source, "-o", out, "--format", "torch")
    found = torch.load(out, weights_only=True)["w"]
    assert (found.dtype, found.shape) == (F4, (5, 6))
    assert torch.equal(found.view(torch.uint8), tensors["w"].view(torch.uint8))
    run("diff", source, out)
    one, other = (
        json.loads(run("fingerprint", path, "--json").stdout)["tensors"] for path in (source, out)
    )
    assert one == other


@pytest.mark.parametrize("form", ["dcp", "ranks"])
@pytest.mark.parametrize("dim", [0, 1])
def test_a_packed_tensor_is_cut_between_bytes(tmp_path: Path, form: str, dim: int) -> None:
    tensors = {"w": packed(5, 7)}
    save_file(tensors, tmp_path / "in.safetensors")
    args = ("--to-mesh", "2", "--placements", f"S({dim})", "--format", form)
    run("reshard", tmp_path / "in.safetensors", "-o", tmp_path / "cut", *args)
    entry = open_checkpoint(str(tmp_path / "cut")).tensors[0]
    assert len(entry.chunks) == 2
    run("export", tmp_path / "cut", "-o", tmp_path / "back.safetensors")
    found = load_file(tmp_path / "back.safetensors")["w"]
    assert torch.equal(found.view(torch.uint8), tensors["w"].view(torch.uint8))


def test_the_table_knows_which_types_torch_has() -> None:
    assert {name for name, row in BY_NAME.items() if not row.is_in_torch} == {
        name for name in BY_NAME if not hasattr(torch, name)
    }


@pytest.mark.parametrize("dtype", ["F6_E2M3", "F6_E3M2"])
def test_six_bits_stay_as_they_are_in_safetensors(tmp_path: Path, dtype: str) -> None:
    source, out = write(tmp_path / "in.safetensors", dtype, [3, 16], 36), tmp_path / "o.safetensors"
    run("export", source, "-o", out, "--check")
    assert header(out) == {"w": {"dtype": dtype, "shape": [3, 16], "data_offsets": [0, 36]}}
    assert out.read_bytes()[-36:] == bytes(range(36))
    with safe_open(out, framework="pt") as file:
        assert file.get_slice("w").get_shape() == [3, 16]
    assert run("fingerprint", source).stdout == run("fingerprint", out).stdout
    run("diff", source, out)
    run("stats", source)
    run("inspect", source)


def test_a_part_of_a_packed_tensor_is_read_in_whole_packs(tmp_path: Path) -> None:
    source = write(tmp_path / "in.safetensors", "F6_E2M3", [4, 16], 48)
    run("ls", source)
    data = open_checkpoint(str(source)).tensors[0]._bytes(Box((1, 1), (3, 1)))
    assert data == bytes([15, 16, 17, 27, 28, 29, 39, 40, 41])
    told = json.loads(run("show", source, "w", "--slice", "0,0:2", "--json").stdout)
    assert told["slice"]["values"] == [[0x020100, 0x050403]]
    assert "packed bits, as integers, of [0:4, 0:4]" in run("show", source, "w").stdout


@pytest.mark.parametrize(
    "args",
    [
        ("export", "--format", "torch"),
        ("reshard", "--to-mesh", "2", "--format", "dcp"),
        ("reshard", "--to-mesh", "2", "--format", "ranks"),
    ],
    ids=["torch", "dcp", "ranks"],
)
def test_six_bits_are_refused_where_torch_would_have_to_read_them(
    tmp_path: Path, args: tuple[str, ...]
) -> None:
    source = write(tmp_path / "in.safetensors", "F6_E2M3", [4, 16], 48)
    done = run(args[0], source, "-o", tmp_path / "out", *args[1:], code=3)
    assert "torch has no 6-bit floats, which 1 tensor would be written in: w" in done.stderr
    assert not (tmp_path / "out").exists()


def test_a_packed_tensor_is_not_cast(tmp_path: Path) -> None:
    tensors = {"fc.w": packed(4, 4), "norm.w": torch.ones(4)}
    save_file(tensors, tmp_path / "in.safetensors")
    run("export", tmp_path / "in.safetensors", "-o", tmp_path / "o.safetensors", "--dtype", "bf16")
    found = load_file(tmp_path / "o.safetensors")
    assert {name: tensor.dtype for name, tensor in found.items()} == {
        "fc.w": F4,
        "norm.w": torch.bfloat16,
    }


def test_a_single_pack_without_dimensions_is_refused(tmp_path: Path) -> None:
    torch.save({"w": packed(1).reshape(())}, tmp_path / "in.pt")
    done = run("export", tmp_path / "in.pt", "-o", tmp_path / "o.safetensors", code=3)
    assert "w (float4_e2m1fn_x2)" in done.stderr


@pytest.mark.parametrize("dtype", ["float4_e2m1fn_x2", "float6_e2m3fn_x4", "float8_e8m0fnu"])
def test_weights_are_not_cast_to_types_that_cannot_hold_them(tmp_path: Path, dtype: str) -> None:
    source = tmp_path / "in.safetensors"
    save_file({"v": torch.ones(4)}, source)
    out = tmp_path / "o.safetensors"
    assert dtype in run("export", source, "-o", out, "--dtype", dtype, code=2).stderr
    assert dtype in run("export", source, "-o", out, "--dtype-for", f"v={dtype}", code=2).stderr
