"""The cases: what is converted or read, by us, by whom else, and what the base of comparison is.

A case makes its source when it is asked for, below the folder of a `Lab`, and gives the commands
that are to run in turn. The first is ours.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import data

HERE = Path(__file__).parent
_PEERS = str(HERE / "peers.py")


class Lab(NamedTuple):
    """Where to work, and how large everything is.

    ``nbytes`` is the size of the model, ``chunks`` tensors and ranks of the large metadata,
    ``tiny`` the number of small tensors.
    """

    folder: Path
    disk: Path
    nbytes: int
    chunks: tuple[int, int]
    tiny: int

    @property
    def source(self) -> Path:
        """Where a case makes its source."""
        return self.folder / "source"

    @property
    def out(self) -> Path:
        """What the commands of a case write, and what goes before each."""
        return self.folder / "out"

    def full(self, dtype: str = "BF16") -> Path:
        """The model as one safetensors file, made when it is not there yet."""
        path = self.folder / f"model-{dtype}.safetensors"
        if not path.exists():
            itemsize = 2 if dtype == "BF16" else 4
            data.write_full(path, data.llama(self.nbytes, itemsize), dtype)
        return path


class Contestant(NamedTuple):
    """A command with a name, and the file that takes what it prints, if that is its result.

    A peer is another library's way, and takes seconds to start.
    """

    name: str
    args: tuple[str, ...]
    stdout: Path | None = None
    is_peer: bool = False


class Case(NamedTuple):
    """Commands to run in turn: the first is ours, ``base`` names that which others are held to."""

    contestants: Sequence[Contestant]
    base: str | None

    def with_before(self, checkout: Path) -> Case:
        """The same with our command of another commit in second place."""
        ours, *others = self.contestants
        path = data.compiled(checkout)  # -m looks in the current folder first
        args = ("env", "-C", path, f"PYTHONPATH={path}", *ours.args)
        return self._replace(contestants=[ours, Contestant("before", args), *others])


def _ours(name: str, *args: str | Path) -> Contestant:
    return Contestant(name, (*data.OURS, *map(str, args), "-q"))


def _peer(name: str, source: Path, out: Path, *, peer: str) -> Contestant:
    args = (sys.executable, _PEERS, peer, str(source), str(out))
    return Contestant(name, args, is_peer=True)


def _cat(source: Path, lab: Lab) -> Contestant:
    """All bytes of the source, written to one file."""
    return Contestant("cat", ("cat", *data.files_of(source)), lab.out)


def export_rows(lab: Lab) -> Case:
    """A DCP directory of row shards to one safetensors file."""
    data.dcp_rows(lab.full(), lab.source)
    out = lab.folder / "out.safetensors"
    return Case(
        [
            _ours("ckpt-tools export", "export", lab.source, "-o", out),
            _cat(lab.source, lab),
            _peer("dcp_to_torch_save", lab.source, lab.out, peer="dcp_to_torch"),
            _peer("accelerate merge_fsdp_weights", lab.source, lab.out, peer="accelerate"),
        ],
        "cat",
    )


def export_files(lab: Lab) -> Case:
    """The same to files of 1 GB at most, which are written side by side; the peers write one."""
    data.dcp_rows(lab.full(), lab.source)
    files = ("-o", lab.out, "--max-shard-size", "1GB")
    return Case(
        [
            _ours("ckpt-tools export", "export", lab.source, *files),
            _peer("dcp_to_torch_save", lab.source, lab.out, peer="dcp_to_torch"),
            _peer("accelerate merge_fsdp_weights", lab.source, lab.out, peer="accelerate"),
        ],
        None,
    )


def export_hf_shards(lab: Lab) -> Case:
    """The safetensors shards of torch's HuggingFace writer to one safetensors file."""
    data.write_hf_shards(lab.source, data.llama(lab.nbytes, 2))
    out = lab.folder / "out.safetensors"
    every = "consolidate_on_every_rank"
    return Case(
        [
            _ours("ckpt-tools export", "export", lab.source, "-o", out),
            _cat(lab.source, lab),
            _peer("consolidate_safetensors_files", lab.source, lab.out, peer="consolidate"),
            _peer("…_on_every_rank", lab.source, lab.out, peer=every),
        ],
        "cat",
    )


def export_grid(lab: Lab) -> Case:
    """A DCP directory of shards on two dimensions to one safetensors file."""
    data.dcp_grid(lab.full(), lab.source)
    out = lab.folder / "out.safetensors"
    ours = _ours("ckpt-tools export", "export", lab.source, "-o", out)
    return Case([ours, _cat(lab.source, lab)], "cat")


def export_ranks(lab: Lab) -> Case:
    """The torch.save files of eight ranks to one safetensors file."""
    data.rank_files(lab.full(), lab.source)
    out = lab.folder / "out.safetensors"
    return Case(
        [
            _ours("ckpt-tools export", "export", lab.source, "-o", out),
            _cat(lab.source, lab),
            _peer("load all, cat, save_file", lab.source, lab.out, peer="merge_ranks"),
        ],
        "cat",
    )


def export_torch(lab: Lab) -> Case:
    """One torch.save file to one safetensors file."""
    lab.source.mkdir()
    source = lab.source / "model.pt"
    data.torch_file(lab.full(), source)
    out = lab.folder / "out.safetensors"
    ours = _ours("ckpt-tools export", "export", source, "-o", out)
    return Case([ours, _cat(source, lab), _cp(source, lab)], "cat")


def _cp(source: Path, lab: Lab) -> Contestant:
    return Contestant("cp", ("cp", str(source), str(lab.out)))


def reshard(lab: Lab) -> Case:
    """A DCP directory of 8 ranks to one of 4x8; torch's job has two ranks and writes two shards."""
    data.dcp_rows(lab.full(), lab.source)
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone")
    job = (*torchrun, "--nproc-per-node", "2", _PEERS, "reload", str(lab.source), str(lab.out))
    out = ("-o", lab.folder / "out.dcp")
    return Case(
        [
            _ours("ckpt-tools reshard", "reshard", lab.source, *out, "--to-mesh", "4x8"),
            _cat(lab.source, lab),
            Contestant("dcp.load + dcp.save, 2 ranks", job, is_peer=True),
        ],
        "cat",
    )


def torch_to_dcp(lab: Lab) -> Case:
    """One torch.save file to a DCP directory, with CRCs."""
    lab.source.mkdir()
    source = lab.source / "model.pt"
    data.torch_file(lab.full(), source)
    out = ("-o", lab.folder / "out.dcp")
    return Case(
        [
            _ours("ckpt-tools reshard", "reshard", source, *out, "--to-mesh", str(data.RANKS)),
            _cat(source, lab),
            _peer("torch_save_to_dcp", source, lab.out, peer="torch_to_dcp"),
        ],
        "cat",
    )


def durable(lab: Lab) -> Case:
    """To a disk, synced: all that a power cut must not take."""
    data.dcp_rows(lab.full(), lab.source)
    ours = _ours("ckpt-tools export", "export", lab.source, "-o", lab.disk / "out.safetensors")
    copy = ("dd", f"if={lab.full()}", f"of={lab.disk / 'out'}", "bs=4M", "oflag=direct")
    synced = (*copy, "conv=fsync")
    return Case([ours, Contestant("dd oflag=direct", synced)], "dd oflag=direct")


def cast(lab: Lab) -> Case:
    """float32 to bfloat16 on the way; cp copies the input."""
    data.dcp_rows(lab.full("F32"), lab.source)
    out = lab.folder / "out.safetensors"
    ours = _ours("ckpt-tools export", "export", lab.source, "-o", out, "--dtype", "bf16")
    return Case([ours, _cp(lab.full("F32"), lab)], "cp")


def metadata(lab: Lab) -> Case:
    """Looking at a directory of very many chunks."""
    tensors, ranks = lab.chunks
    names = (f"model.layers.{n // 10}.mlp.w{n % 10}.weight" for n in range(tensors))
    shapes = dict.fromkeys(names, (4 * ranks, 256))
    data.big_metadata(lab.source, shapes, ranks=ranks)
    bare = (sys.executable, str(HERE / "bare.py"), str(lab.source / ".metadata"))
    return Case(
        [
            _ours("ckpt-tools inspect", "inspect", lab.source),
            Contestant("bare unpickling", bare),
            _peer("torch read_metadata", lab.source, lab.out, peer="read_metadata"),
        ],
        "bare unpickling",
    )


def tiny(lab: Lab) -> Case:
    """Very many tensors of a kilobyte, eight chunks each, to one safetensors file."""
    _tiny(lab, lab.tiny)
    out = lab.folder / "out.safetensors"
    ours = _ours(f"ckpt-tools export, {lab.tiny:,} tensors", "export", lab.source, "-o", out)
    return Case([ours], None)


def tiny_peer(lab: Lab) -> Case:
    """A twentieth of them, which torch can be waited for."""
    count = max(1, lab.tiny // 20)
    _tiny(lab, count)
    out = lab.folder / "out.safetensors"
    return Case(
        [
            _ours(f"ckpt-tools export, {count:,} tensors", "export", lab.source, "-o", out),
            _peer("dcp_to_torch_save", lab.source, lab.out, peer="dcp_to_torch"),
        ],
        None,
    )


def _tiny(lab: Lab, count: int) -> None:
    full = lab.folder / "tiny.safetensors"
    data.write_full(full, data.tiny(count), "BF16")
    data.dcp_rows(full, lab.source)
    os.remove(full)


def start(lab: Lab) -> Case:
    """Looking at a small directory, against importing what any command line here imports."""
    full = lab.folder / "tiny.safetensors"
    data.write_full(full, data.tiny(8), "BF16")
    data.dcp_rows(full, lab.source)
    words = ("import click, tabulate",)
    imports = Contestant("import click, tabulate", (sys.executable, "-c", *words))
    return Case([_ours("ckpt-tools inspect", "inspect", lab.source), imports], imports.name)


def fingerprint(lab: Lab) -> Case:
    """The digest of every tensor of a DCP directory."""
    data.dcp_rows(lab.full(), lab.source)
    ours = _ours("ckpt-tools fingerprint", "fingerprint", lab.source)
    peer = Contestant("sha256sum", ("sha256sum", *data.files_of(lab.source)))
    return Case([ours, peer], peer.name)


def fingerprint_grid(lab: Lab) -> Case:
    """The same of shards on two dimensions, whose rows are put together for it."""
    data.dcp_grid(lab.full(), lab.source)
    ours = _ours("ckpt-tools fingerprint", "fingerprint", lab.source)
    peer = Contestant("sha256sum", ("sha256sum", *data.files_of(lab.source)))
    return Case([ours, peer], peer.name)


def verify(lab: Lab) -> Case:
    """Whether every byte of a torch.save file is what its CRCs say; cat reads it to nowhere."""
    lab.source.mkdir()
    source = lab.source / "model.pt"
    data.torch_file(lab.full(), source)
    ours = _ours("ckpt-tools verify", "verify", source)
    peer = Contestant("cat to /dev/null", ("sh", "-c", 'cat "$0" | cat > /dev/null', str(source)))
    return Case([ours, peer], peer.name)


CASES: dict[str, Callable[[Lab], Case]] = {
    case.__name__.replace("_", "-"): case
    for case in (
        export_rows,
        export_files,
        export_hf_shards,
        export_grid,
        export_ranks,
        export_torch,
        reshard,
        torch_to_dcp,
        durable,
        cast,
        metadata,
        tiny,
        tiny_peer,
        start,
        fingerprint,
        fingerprint_grid,
        verify,
    )
}
