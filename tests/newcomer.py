"""What somebody writes who knows torch, numpy and safetensors: type-checked, and run."""

import sys

import numpy as np
import torch

import ckpt_tools
from ckpt_tools import Checkpoint, LazyTensor, open_checkpoint


def largest(checkpoint: Checkpoint, count: int = 3) -> list[tuple[str, int]]:
    sizes = {name: tensor.nbytes for name, tensor in checkpoint.items()}
    return sorted(sizes.items(), key=lambda item: -item[1])[:count]


def norm(tensor: LazyTensor) -> float:
    return float(torch.linalg.vector_norm(tensor[...].float()))


def of_rank(tensor: LazyTensor, rank: int) -> torch.Tensor:
    return tensor.shard(rank)


def main(path: str, out: str) -> None:
    with open_checkpoint(path) as checkpoint:
        for name, tensor in checkpoint.model.items():
            print(name, tensor.shape, tensor.dtype, tensor.ranks)  # noqa: T201
        name, _ = largest(checkpoint.model)[0]
        weight = checkpoint[name]
        rows: torch.Tensor = weight[0:4, :3]
        array = np.asarray(weight)
        assert rows.shape == (4, 3)
        assert array.shape == weight.shape
        assert norm(weight) > 0
        assert of_rank(weight, 0).shape[1:] == weight.shape[1:]
        step: int | None = checkpoint.step
        missing = checkpoint.get("no such tensor")
        assert (step, missing) == (2, None)
        assert checkpoint.verify().whole
    plan = ckpt_tools.export(path, out, dtype=torch.bfloat16, only="model")
    state: dict[str, torch.Tensor] = ckpt_tools.load_file(out)
    nested: dict[object, object] = ckpt_tools.load(path)
    assert len(state) == plan.tensors
    assert nested["step"] == step
    with ckpt_tools.safe_open(out, framework="pt") as file:
        assert all(torch.equal(file.get_tensor(key), state[key]) for key in file)


if __name__ == "__main__":
    main(*sys.argv[1:])
