"""A torch.save file of whole tensors is what torch itself would write, and torch loads it."""

import io
import pickle
import re
import zipfile
from collections import OrderedDict
from pathlib import Path
from zlib import crc32

import numpy as np
import pytest
import torch
from plan_writer import Source, value_object, write_plans

from ckpt_tools.core.index import ByteRange, ObjectEntry
from ckpt_tools.core.plain_values import PlainValue, Size
from ckpt_tools.core.state_tree import Branch, list_of, nested
from ckpt_tools.errors import IncompleteError, UnsupportedError
from ckpt_tools.formats.pickle.dump import dumps
from ckpt_tools.formats.pickle.load import load_plain
from ckpt_tools.formats.protocol import PlanOptions
from ckpt_tools.formats.torch_file.write import plan_files
from ckpt_tools.formats.zip.layout import lay_out

W = PlanOptions(single_file="w.pt")


def without_id(archive: bytes) -> bytes:
    """The archive with its serialization id, and the id's CRC, blanked out."""
    with zipfile.ZipFile(io.BytesIO(archive)) as file:
        name = next(name for name in file.namelist() if name.endswith("serialization_id"))
        identity = file.read(name)
    crc = re.escape(crc32(identity).to_bytes(4, "little"))
    return re.sub(crc, bytes(4), archive.replace(identity, bytes(40)))


@pytest.mark.skipif(
    torch.__version__.startswith("2.6."), reason="torch 2.6 writes no .storage_alignment"
)
@pytest.mark.parametrize("filename", ["model.pt", "a.b.bin", "no_ending", "sub/gewichte_ä.pt"])
def test_the_file_is_torchs_own_but_for_the_serialization_id(filename: str, tmp_path: Path) -> None:
    source = Source(tmp_path)
    values = {
        "model.w": np.arange(12.0, dtype=np.float32).reshape(4, 3),
        "model.b": np.arange(4, dtype=np.int64),
        "model.s": np.array(3.5),
        "model.none": np.zeros((0, 5), np.float32),
        "model.u": np.arange(4, dtype=np.uint16),
    }
    targets = [source.target(fqn, array) for fqn, array in values.items()]
    objects = [value_object("step", 7), value_object("args.lr", 0.5)]
    write_plans(
        plan_files(targets, objects, options=PlanOptions(single_file=filename)), tmp_path / "ours"
    )
    tensors = {
        fqn.split(".")[1]: torch.tensor(
            array.tolist(), dtype=getattr(torch, array.dtype.name)
        ).reshape(array.shape)
        for fqn, array in values.items()
    }
    theirs = tmp_path / "theirs" / filename
    theirs.parent.mkdir(parents=True)
    torch.save({"model": tensors, "step": 7, "args": {"lr": 0.5}}, theirs)
    assert without_id((tmp_path / "ours" / filename).read_bytes()) == without_id(
        theirs.read_bytes()
    )


@pytest.mark.parametrize("mmap", [False, True])
@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e5m2", "uint32", "complex128"])
def test_torch_loads_every_kind_of_tensor(dtype: str, mmap: bool, tmp_path: Path) -> None:  # noqa: FBT001
    kind = getattr(torch, dtype)
    raw = np.arange(6 * kind.itemsize, dtype=np.uint8)
    array = raw.view(np.dtype((np.void, kind.itemsize))).reshape(2, 3)
    target = Source(tmp_path).target("w", array, dtype=dtype)
    write_plans(plan_files([target], [], options=W), tmp_path)
    loaded = torch.load(tmp_path / "w.pt", weights_only=True, mmap=mmap)["w"]
    assert (loaded.dtype, loaded.shape) == (kind, (2, 3))
    assert loaded.flatten().view(torch.uint8).tolist() == raw.tolist()


def test_a_tensor_that_the_source_does_not_cover_is_refused(tmp_path: Path) -> None:
    target = Source(tmp_path).target("w", np.zeros(4))
    hollow = target._replace(entry=_without_chunks(target.entry))
    with pytest.raises(IncompleteError, match="w: chunks hold 0 of the 4 elements"):
        plan_files([hollow], [], options=W)


def _without_chunks(entry: object) -> object:
    from dataclasses import replace

    return replace(entry, chunks=())


def test_an_object_that_was_not_opened_is_refused() -> None:
    opaque = ObjectEntry("rng", ("rng",), "other", ByteRange("x", 0, 9), codec="torch.save")
    with pytest.raises(UnsupportedError, match="rng: an object of type unknown"):
        plan_files([], [opaque], options=W)


def test_each_container_is_pickled_as_its_own_kind() -> None:
    tree: Branch[str] = Branch(
        "dict",
        ("state", 1.5, (1, 2)),
        (
            Branch("OrderedDict", (0, True), ("a", "b")),
            list_of(["c", None]),
            Branch("tuple", None, (None, Branch("dict", (), ()))),
        ),
    )
    found = pickle.loads(dumps(nested(tree, str.upper)))  # noqa: S301 (our own)
    assert found == {"state": {0: "A", True: "B"}, 1.5: ["C", None], (1, 2): (None, {})}
    assert type(found["state"]) is OrderedDict
    assert list(map(type, found["state"])) == [int, bool]


@pytest.mark.parametrize(
    "value",
    [
        Size((2, 3)),
        Size(()),
        OrderedDict(a=1),
        b"",
        b"\xff",
        1 - 2j,
        {1, 2},
        frozenset({"a"}),
        {(1, None): ()},
    ],
)
def test_a_plain_value_is_pickled_as_its_own_kind(value: PlainValue) -> None:
    data = dumps(value)
    found = torch.load(io.BytesIO(_archive(data)), weights_only=not isinstance(value, frozenset))
    assert found == value
    assert type(found).__name__ == type(value).__name__
    assert load_plain(data, where="x") == value
    assert type(load_plain(data, where="x")) is type(value)


def _archive(pickled: bytes) -> bytes:
    layout = lay_out(pickled, ())
    return b"".join(data for _, data in layout.literals)


def test_an_entry_that_is_also_a_container_is_refused() -> None:
    objects = [value_object("a", 1), value_object("a.b", 1, path=("a", "b"))]
    with pytest.raises(UnsupportedError, match="both an entry and a container"):
        plan_files([], objects, options=W)
