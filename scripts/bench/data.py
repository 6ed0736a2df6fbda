"""Checkpoints to measure with: Llama-shaped tensors of any total size, stored in every way.

One safetensors file is written here, byte by byte; ckpt-tools makes the others out of it, in the
layouts that torch's own loaders read (the test suite loads them). Values are normal random numbers
from one block that repeats, so that making the data takes no longer than copying it.
"""

from __future__ import annotations

import compileall
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import prod
from pathlib import Path

import numpy as np

RANKS = 8
_BLOCK = 4 << 20
_SMALL = 256 << 20
_AROUND = 1024  # bytes of an archive around a tensor, about
OURS = (sys.executable, "-m", "ckpt_tools")
# Every dimension divides by eight; norms have one dimension only, which tp cannot cut.
_TP = ("--to-mesh", "dp=4,tp=2", "--placements", "S(0),S(1)", "--place", "*norm*=S(0),R")

Shapes = dict[str, tuple[int, ...]]


def compiled(checkout: Path) -> str:
    """The PYTHONPATH of a checkout whose modules are compiled, as an installed package's are."""
    compileall.compile_dir(checkout / "ckpt_tools", quiet=1)
    return str(checkout)


def llama(nbytes: int, itemsize: int) -> Shapes:
    """Names and shapes of a model of about so many bytes."""
    dim, ffn, vocab = (2048, 5632, 32_000) if nbytes >= _SMALL else (64, 176, 1000)
    layer = {f"attention.{name}.weight": (dim, dim) for name in ("wq", "wk", "wv", "wo")}
    layer |= {"feed_forward.w1.weight": (ffn, dim), "feed_forward.w3.weight": (ffn, dim)}
    layer |= {"feed_forward.w2.weight": (dim, ffn)}
    layer |= {"attention_norm.weight": (dim,), "ffn_norm.weight": (dim,)}
    numel = sum(int(np.prod(shape)) for shape in layer.values())
    layers = max(1, (nbytes // itemsize - 2 * vocab * dim) // numel)
    shapes = {f"layers.{n}.{name}": shape for n in range(layers) for name, shape in layer.items()}
    ends = {"tok_embeddings.weight": (vocab, dim), "output.weight": (vocab, dim)}
    return shapes | ends | {"norm.weight": (dim,)}


def tiny(count: int) -> Shapes:
    """So many tensors of a kilobyte."""
    return {f"layers.{n // 10}.expert{n % 10}.weight": (RANKS, 64) for n in range(count)}


def deepseek_v3() -> Shapes:
    """Names and shapes of DeepSeek-V3 in bfloat16: 45,395 tensors, most of them experts'."""
    dim, rank, heads, experts = 7168, 512, 128, 256
    attention = {"q_a_proj": (1536, dim), "q_b_proj": (192 * heads, 1536), "o_proj": (dim, 16384)}
    attention |= {"kv_a_proj_with_mqa": (rank + 64, dim), "kv_b_proj": (256 * heads, rank)}
    attention |= {"q_a_layernorm": (1536,), "kv_a_layernorm": (rank,)}
    layer = {f"self_attn.{name}.weight": shape for name, shape in attention.items()}
    layer |= {"input_layernorm.weight": (dim,), "post_attention_layernorm.weight": (dim,)}

    def mlp(name: str, width: int) -> Shapes:
        into = {f"{name}.{part}_proj.weight": (width, dim) for part in ("gate", "up")}
        return into | {f"{name}.down_proj.weight": (dim, width)}

    sparse = {"mlp.gate.weight": (experts, dim), "mlp.gate.e_score_correction_bias": (experts,)}
    sparse |= mlp("mlp.shared_experts", 2048)
    for expert in range(experts):
        sparse |= mlp(f"mlp.experts.{expert}", 2048)
    layers = [layer | (mlp("mlp", 18432) if number < 3 else sparse) for number in range(61)]
    shapes: Shapes = {"model.embed_tokens.weight": (129_280, dim)}
    for number, one in enumerate(layers):
        shapes |= {f"model.layers.{number}.{name}": shape for name, shape in one.items()}
    return shapes | {"model.norm.weight": (dim,), "lm_head.weight": (129_280, dim)}


def with_optimizer(shapes: Shapes) -> Shapes:
    """The same tensors as a model's, and for each of them Adam's two moments and its step."""
    state: Shapes = {f"model.{fqn}": shape for fqn, shape in shapes.items()}
    for fqn, shape in shapes.items():
        state |= {f"optim.state.{fqn}.{name}": shape for name in ("exp_avg", "exp_avg_sq")}
        state[f"optim.state.{fqn}.step"] = ()
    return state


def write_sparse(folder: Path, shapes: Shapes, *, shards: int) -> None:
    """A Hugging Face folder of bfloat16 whose files have headers, lengths, and holes for values."""
    folder.mkdir()
    names, weight_map = list(shapes), {}
    for shard in range(shards):
        file = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        first, last = (len(names) * n // shards for n in (shard, shard + 1))
        header, at = {}, 0
        for fqn in names[first:last]:
            end = at + 2 * prod(shapes[fqn])
            header[fqn] = {"dtype": "BF16", "shape": shapes[fqn], "data_offsets": [at, end]}
            at, weight_map[fqn] = end, file
        _write(folder / file, header, ())
        os.truncate(folder / file, (folder / file).stat().st_size + at)
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def write_full(path: Path, shapes: Shapes, dtype: str) -> None:
    """One safetensors file with these tensors, of type BF16 or F32."""
    itemsize = {"BF16": 2, "F32": 4}[dtype]
    header, at = {}, 0
    for fqn, shape in shapes.items():
        end = at + int(np.prod(shape)) * itemsize
        header[fqn] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, end]}
        at = end
    _write(path, header, _repeated(at, itemsize))


def write_hf_shards(folder: Path, shapes: Shapes) -> None:
    """What torch's HuggingFaceStorageWriter leaves of eight ranks: a row block of each tensor."""
    folder.mkdir()
    for rank in range(RANKS):
        saved, header, at = {}, {}, 0
        for fqn, (rows, *rest) in shapes.items():
            shape = [rows // RANKS, *rest]
            end = at + int(np.prod(shape)) * 2
            header[fqn] = {"dtype": "BF16", "shape": shape, "data_offsets": [at, end]}
            saved[fqn] = {"saved_offsets": [rank * shape[0], *[0 for _ in rest]]}
            at = end
        notes = {"__metadata__": {"format": "pt", "DCP_SHARDING_INFO": json.dumps(saved)}}
        name = f"shard-{rank + 1:05d}-model-00001-of-00001.safetensors"
        _write(folder / name, notes | header, _repeated(at, 2))


def _write(path: Path, header: Mapping[str, object], data: Iterable[bytes]) -> None:
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.writelines(data)


def _repeated(nbytes: int, itemsize: int) -> Iterator[bytes]:
    """So many bytes of normal random numbers."""
    block = np.random.default_rng(0).standard_normal(_BLOCK, dtype=np.float32)
    if itemsize == 2:  # bfloat16 is the upper half of a float32
        block = (block.view(np.uint32) >> 16).astype(np.uint16)
    data = block.tobytes()
    for start in range(0, nbytes, len(data)):
        yield data[: nbytes - start]


def _run(*args: str | Path) -> None:
    command = [*OURS, *map(str, args), "-q"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)  # noqa: S603 - our own


def dcp_rows(source: Path, out: Path, *, ranks: int = RANKS) -> None:
    """A DCP directory of so many ranks, each with a row block of every tensor."""
    _run("reshard", source, "-o", out, "--to-mesh", str(ranks))


def dcp_grid(source: Path, out: Path) -> None:
    """A DCP directory of eight ranks that cut rows in four and columns in two."""
    _run("reshard", source, "-o", out, *_TP)


def rank_files(source: Path, out: Path) -> None:
    """Eight torch.save files of DTensors, one of each rank."""
    cpu = ("--format", "ranks", "--device-type", "cpu")
    _run("reshard", source, "-o", out, "--to-mesh", str(RANKS), *cpu)


def torch_file(source: Path, out: Path) -> None:
    """One torch.save file."""
    _run("export", source, "-o", out, "--format", "torch")


def big_metadata(folder: Path, shapes: Shapes, *, ranks: int) -> None:
    """A DCP directory of the shards of bfloat16 tensors on ``ranks`` ranks, split by rows; its data
    files are of the right length, and holes.

    The pickle is torch's own, of torch's own classes.
    """
    import pickle

    import torch
    from torch.distributed.checkpoint import metadata as dcp
    from torch.distributed.checkpoint.filesystem import _StorageInfo

    entries, places, planned = {}, {}, {}
    lengths = [0] * ranks
    for fqn, shape in shapes.items():
        step = -(-shape[0] // ranks) if shape else 1
        starts = range(0, shape[0], step) if shape else [0]
        kind = dcp.TensorProperties(dtype=torch.bfloat16)
        chunks = []
        for rank, start in enumerate(starts):
            sizes = torch.Size((min(step, shape[0] - start), *shape[1:]) if shape else ())
            at = torch.Size((start, *[0 for _ in shape[1:]]) if shape else ())
            chunks.append(dcp.ChunkStorageMetadata(offsets=at, sizes=sizes))
            length = 2 * sizes.numel() + _AROUND
            info = _StorageInfo(f"__{rank}_0.distcp", lengths[rank], length)
            places[dcp.MetadataIndex(fqn, at, rank)] = info
            lengths[rank] += length
        entries[fqn] = dcp.TensorStorageMetadata(kind, torch.Size(shape), chunks)
        planned[fqn] = tuple(fqn.split(".", 1))
    folder.mkdir()
    all_of_it = dcp.Metadata(entries, planner_data=planned, storage_data=places)
    (folder / ".metadata").write_bytes(pickle.dumps(all_of_it))
    for rank, length in enumerate(lengths):
        with (folder / f"__{rank}_0.distcp").open("wb") as file:
            file.truncate(length)


def files_of(path: Path) -> Sequence[str]:
    """The files of a checkpoint, in order: what cat and sha256sum read."""
    if path.is_file():
        return [str(path)]
    return sorted(str(file) for file in path.rglob("*") if file.is_file())


def remove(*paths: Path) -> None:
    """Remove files and folders, as far as they are there."""
    for path in paths:
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
