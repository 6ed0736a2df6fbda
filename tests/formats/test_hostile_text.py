"""Text that a few bytes repeat: what it costs to read is bounded, and large configs still pass."""

import argparse
import pickle
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
from pickled import CHECKPOINTS, archive_of, name, plain, storage, tensor, text

from ckpt_tools.core.text import MAX_NAME
from ckpt_tools.errors import UnreadableError
from ckpt_tools.formats.dcp.metadata import load_metadata
from ckpt_tools.formats.pickle.load import load_plain, load_tensors
from ckpt_tools.formats.pickle.state_dict import flatten

LONG = "x" * 1_000_000
MANY = 100_000


def put(number: int) -> bytes:
    return b"q" + bytes([number])


def get(number: int) -> bytes:
    return b"h" + bytes([number])


def pickled(*body: bytes) -> bytes:
    return b"\x80\x02" + b"".join(body) + b"."


def levels(key: str, count: int, inside: bytes) -> bytes:
    """Dicts in one another, each with the same key."""
    return b"}" + text(key) + put(1) + (b"}" + get(1)) * (count - 1) + inside + b"s" * count


def config(state: bytes) -> bytes:
    return name("argparse.Namespace") + b")\x81}" + text("a") + state + b"sb"


BYTES = name("_codecs.encode") + b"(" + text(LONG) + text("latin1") + b"tR"
TEXT_BY_REFERENCE = pickled(b"](", text(LONG), put(1), get(1) * MANY, b"e")
REPEATED = {
    "a text": TEXT_BY_REFERENCE,
    "bytes": pickled(b"](", BYTES, put(1), get(1) * MANY, b"e"),
    "a list of texts": pickled(
        b"](]", put(2), b"(", text("y" * 60_000), put(1), get(1) * 300, b"e", get(2) * 20_000, b"e"
    ),
    "in a config": pickled(config(b"](" + text(LONG) + put(1) + get(1) * MANY + b"e")),
    "in many configs": pickled(b"](", text(LONG), put(1), config(get(1)) * 999, b"e"),
    "a key": pickled(b"}" + text(LONG) + b"K\x01s"),
    "a key of keys": pickled(b"}(", text(LONG), put(1), get(1) * 99, b"tK\x01s"),
    "a key on 50 levels": pickled(levels(LONG, 50, b"K\x01")),
    "the name of a class": pickled(b"\x8c\x01m" + text(LONG) + b"\x93"),
    "the key of a storage": pickled(
        name("torch._utils._rebuild_tensor_v2"), b"(", storage(key=LONG), b"K\0)K\x01\x85\x89}tR"
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", list(REPEATED))
@pytest.mark.parametrize("load", [load_tensors, load_plain])
def test_text_that_is_repeated_is_refused(load: Callable[..., object], kind: str) -> None:
    if load is load_plain and kind == "the key of a storage":
        return  # no storage is looked at there
    with pytest.raises(UnreadableError) as caught:
        load(REPEATED[kind], where="x.pt")
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize("shared", [b"K\x01", b"}"], ids=["values", "empty dicts"])
def test_a_long_name_of_many_entries_is_refused(shared: bytes) -> None:
    items = shared + put(9) + b"".join(text(f"a{number}") + get(9) for number in range(20_000))
    value = load_tensors(
        pickled(levels("k" * 60_000, 1, b"}(" + text("a") + items + b"u")), where="x"
    )
    with pytest.raises(UnreadableError, match="names of 60,006 bytes"):
        flatten(value, where="x.pt")


def test_keys_that_are_one_long_name_together_are_refused() -> None:
    value = load_tensors(pickled(levels("k" * 40_000, 2, tensor())), where="x.pt")
    with pytest.raises(UnreadableError, match="names of 80,001 bytes"):
        flatten(value, where="x.pt")


@pytest.mark.parametrize(
    "value",
    [
        {"tokenizer": "t" * 20_000_000},
        {"note": ["n" * 1000] * 50_000},
        {"k" * MAX_NAME: 1},
        {"names": [f"model.layers.{n // 10}.weight" for n in range(100_000)] * 2},
        {
            f"model.layers.{n}.self_attn.q_proj.weight": {"step": 1, "exp_avg": 2}
            for n in range(5000)
        },
        argparse.Namespace(text="c" * 5_000_000, names=["d" * 1000] * 10_000),
    ],
    ids=["long", "repeated", "longest key", "listed twice", "optimizer", "config"],
)
def test_a_large_config_passes(value: object) -> None:
    loaded = load_tensors(plain(value), where="x.pt")
    assert loaded == value or isinstance(value, argparse.Namespace)
    flatten({"a": loaded} if isinstance(value, argparse.Namespace) else loaded, where="x.pt")


METADATA = (CHECKPOINTS / "fsdp2_dcp_1d_4r" / "ckpt" / ".metadata").read_bytes()


@cache
def metadata(change: Callable[..., None]) -> bytes:
    """The metadata of a real directory, changed by torch's own classes."""
    loaded = pickle.loads(METADATA)  # noqa: S301 - our own file
    change(loaded)
    return pickle.dumps(loaded, 4)


def share_chunks(loaded: object, tensors: int = 3000) -> None:
    from torch import Size
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, TensorStorageMetadata

    entries = loaded.state_dict_metadata
    kind = next(e.properties for e in entries.values() if isinstance(e, TensorStorageMetadata))
    chunks = [ChunkStorageMetadata(Size([at]), Size([1])) for at in range(8000)]
    for number in range(tensors):
        entries[f"t{number}"] = TensorStorageMetadata(kind, Size([8000]), chunks)
        loaded.planner_data[f"t{number}"] = (f"t{number}",)


def share_paths(loaded: object, part: str = "k" * 60_000) -> None:
    path = (part,) * 90
    loaded.planner_data |= {f"q{number}": path for number in range(20_000)}


def long_name(loaded: object) -> None:
    loaded.planner_data[LONG] = (LONG,)


def long_file(loaded: object) -> None:
    for info in loaded.storage_data.values():
        info.relative_path = LONG


def no_path(loaded: object) -> None:
    loaded.planner_data = dict.fromkeys(loaded.planner_data, ())


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (share_chunks, "share lists of very many chunks"),
        (share_paths, "bytes of text"),
        (long_name, "a name of 1,000,000 bytes"),
        (long_file, "a file name that is not possible"),
        (no_path, "where a path should be"),
    ],
    ids=lambda one: getattr(one, "__name__", ""),
)
def test_metadata_that_repeats_text_or_has_no_path_is_refused(
    change: Callable[..., None], why: str
) -> None:
    with pytest.raises(UnreadableError, match=why):
        load_metadata(metadata(change), where="m")


def _archive(path: Path, data: bytes) -> str:
    path.write_bytes(archive_of({"data.pkl": data, "version": b"3\n", "data/0": bytes(24)}))
    return str(path)


def _of_text(folder: Path) -> str:
    body = b"}(" + text("w") + tensor() + text("n") + TEXT_BY_REFERENCE[2:-1] + b"u"
    return _archive(folder / "text.pt", pickled(body))


def _of_keys(folder: Path) -> str:
    return _archive(folder / "keys.pt", pickled(levels(LONG, 50, tensor())))


def _of_chunks(folder: Path) -> str:
    path = folder / "chunks"
    path.mkdir()
    (path / ".metadata").write_bytes(metadata(share_chunks))
    return str(path)


COMMANDS = (
    *("inspect", "ls", "verify", "verify --quick", "fingerprint", "layout"),
    *("export -o out --dry-run", "show NAME", "diff OTHER"),
)


# The system counts for a new process what the one that made it had in memory; VmHWM is its own.
MEASURED = """
import atexit, resource
from ckpt_tools.__main__ import main

def record():
    used = resource.getrusage(resource.RUSAGE_SELF)
    with open("/proc/self/status") as status, open("used", "w") as file:
        peak = next(line.split()[1] for line in status if line.startswith("VmHWM"))
        print(used.ru_utime + used.ru_stime, peak, file=file)

atexit.register(record)
main()
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc")
@pytest.mark.parametrize("make", [_of_text, _of_keys, _of_chunks])
@pytest.mark.parametrize("command", COMMANDS)
def test_no_command_takes_two_seconds_or_200_mb(
    make: Callable[[Path], str], command: str, tmp_path: Path
) -> None:
    path = make(tmp_path)
    word, *more = command.replace("OTHER", path).replace("NAME", "w").split()
    done = subprocess.run(
        [sys.executable, "-c", MEASURED, word, path, *more],
        cwd=tmp_path, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr[:7]) == (3, "Error: ")
    seconds, kilobytes = map(float, (tmp_path / "used").read_text().split())
    assert seconds < 2
    assert kilobytes < 200_000
