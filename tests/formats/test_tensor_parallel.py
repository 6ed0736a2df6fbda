"""Meta's tensor-parallel parts: joined where a map says how they are cut, else refused."""

from pathlib import Path

import pytest
import torch
from running import run
from safetensors.torch import load_file

from ckpt_tools.transforms import maps

HIDDEN, HEADS, KV_HEADS, FFN, VOCAB = 8, 4, 2, 12, 20
HEAD_DIM = HIDDEN // HEADS
COLUMNS = ("attention.wo", "feed_forward.w2")
ARGUMENTS = ["--map", "meta-llama-to-hf", "--map-value", f"head_dim={HEAD_DIM}"]


def whole_model() -> dict[str, torch.Tensor]:
    torch.manual_seed(5)
    shapes: dict[str, tuple[int, ...]] = {
        "tok_embeddings.weight": (VOCAB, HIDDEN),
        "norm.weight": (HIDDEN,),
        "output.weight": (VOCAB, HIDDEN),
        "rope.freqs": (HEAD_DIM // 2,),
    }
    for layer in range(2):
        of_layer = {
            "attention.wq": (HIDDEN, HIDDEN),
            "attention.wk": (KV_HEADS * HEAD_DIM, HIDDEN),
            "attention.wv": (KV_HEADS * HEAD_DIM, HIDDEN),
            "attention.wo": (HIDDEN, HIDDEN),
            "feed_forward.w1": (FFN, HIDDEN),
            "feed_forward.w2": (HIDDEN, FFN),
            "feed_forward.w3": (FFN, HIDDEN),
            "attention_norm": (HIDDEN,),
            "ffn_norm": (HIDDEN,),
        }
        shapes |= {f"layers.{layer}.{name}.weight": shape for name, shape in of_layer.items()}
    return {name: torch.randn(shape).to(torch.bfloat16) for name, shape in shapes.items()}


def write_parts(folder: Path, model: dict[str, torch.Tensor], *, embedding_dim: int) -> None:
    """The model as two tensor-parallel parts, as Meta's own layers cut it."""
    folder.mkdir()
    for part in range(2):
        state = {}
        for name, tensor in model.items():
            dim = 1 if any(column in name for column in COLUMNS) else 0
            if name == "tok_embeddings.weight":
                dim = embedding_dim
            is_cut = tensor.ndim > 1
            state[name] = tensor.chunk(2, dim)[part].clone() if is_cut else tensor.clone()
        torch.save(state, folder / f"consolidated.{part:02}.pth")


@pytest.mark.parametrize("embedding_dim", [0, 1], ids=["llama3", "llama2"])
def test_parts_are_joined_to_what_the_whole_file_gives(embedding_dim: int, tmp_path: Path) -> None:
    model = whole_model()
    write_parts(tmp_path / "parts", model, embedding_dim=embedding_dim)
    torch.save(model, tmp_path / "whole.pth")
    for source in ("parts", "whole.pth"):
        out = tmp_path / f"{source}.safetensors"
        assert run("export", tmp_path / source, "-o", out, *ARGUMENTS).exit_code == 0
    parts = load_file(tmp_path / "parts.safetensors")
    whole = load_file(tmp_path / "whole.pth.safetensors")
    assert parts.keys() == whole.keys()
    assert all(torch.equal(parts[name], whole[name]) for name in whole)


def test_reshard_joins_them_too(tmp_path: Path) -> None:
    write_parts(tmp_path / "parts", whole_model(), embedding_dim=1)
    out = tmp_path / "out"
    result = run("reshard", tmp_path / "parts", "-o", out, "--to-mesh", "2", *ARGUMENTS, "--check")
    assert result.exit_code == 0
    assert "Joined 2 tensor-parallel parts" in result.stderr


def test_without_a_map_they_are_refused_with_the_command_that_joins(tmp_path: Path) -> None:
    write_parts(tmp_path / "parts", whole_model(), embedding_dim=1)
    part = tmp_path / "parts" / "consolidated.01.pth"
    for source in (tmp_path / "parts", part):
        result = run("export", source, "-o", tmp_path / "out")
        assert result.exit_code == 3
        assert "2 tensor-parallel parts" in result.stderr
        told = f"export {tmp_path / 'parts'} -o {tmp_path / 'out'} --map meta-llama-to-hf"
        assert told in result.stderr
    assert "--map meta-llama-to-hf" not in run("verify", tmp_path / "parts").stderr


def test_a_map_that_knows_no_cut_does_not_join(tmp_path: Path) -> None:
    write_parts(tmp_path / "parts", whole_model(), embedding_dim=1)
    mine = tmp_path / "mine.toml"
    mine.write_text('[[rule]]\nfrom = "{m*}"\nto = "x.{m*}"\n')
    result = run("export", tmp_path / "parts", "-o", tmp_path / "out", "--map", mine)
    assert result.exit_code == 3
    assert "says which rows or columns" in result.stderr


def _other_norm(folder: Path) -> None:
    path = folder / "consolidated.01.pth"
    state = torch.load(path)
    state["norm.weight"][3] += 1
    torch.save(state, path)


def _without_a_name(folder: Path) -> None:
    path = folder / "consolidated.01.pth"
    state = torch.load(path)
    del state["output.weight"]
    torch.save(state, path)


def _gap(folder: Path) -> None:
    (folder / "consolidated.01.pth").rename(folder / "consolidated.02.pth")


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (_other_norm, "norm.weight: it should be equal in every part, but differs"),
        (_without_a_name, "output.weight: only 1 of 2 parts have it"),
        (_gap, "lacks the tensor-parallel parts 01; it has 02"),
    ],
)
def test_parts_that_do_not_fit_are_refused(damage: object, told: str, tmp_path: Path) -> None:
    assert callable(damage)
    write_parts(tmp_path / "parts", whole_model(), embedding_dim=0)
    damage(tmp_path / "parts")
    result = run("export", tmp_path / "parts", "-o", tmp_path / "out", *ARGUMENTS)
    assert result.exit_code == 3
    assert told in result.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("embedding_dim", [0, 1])
def test_a_lost_last_part_is_seen_by_the_length_of_the_norm(
    embedding_dim: int, tmp_path: Path
) -> None:
    model = whole_model()
    write_parts(tmp_path / "parts", model, embedding_dim=embedding_dim)
    part = tmp_path / "parts" / "consolidated.01.pth"
    state = torch.load(part)
    for name, tensor in state.items():  # as if there had been three, and the last is not there
        dim = 1 if any(column in name for column in COLUMNS) else 0
        if tensor.ndim > 1 and tensor.shape[dim] > 2:
            state[name] = tensor.narrow(dim, 0, tensor.shape[dim] - 1).clone()
    torch.save(state, part)
    result = run("export", tmp_path / "parts", "-o", tmp_path / "out", *ARGUMENTS)
    assert result.exit_code == 3
    assert "Is a part missing?" in result.stderr


def test_a_map_read_backwards_knows_nothing_of_parts() -> None:
    there = maps.find("meta-llama-to-hf")
    assert there.cuts
    assert not there.back.cuts
    assert set(there.back.back.cuts) < set(there.cuts)  # what it drops does not come back
