"""The interpreter of pickles: real pickles of torch 2.1 to 2.15, and hostile ones of our own."""

import copyreg
import doctest
import io
import os
import pickle
import sys
import tracemalloc
import zipfile
from argparse import Namespace
from collections.abc import Callable
from contextlib import suppress
from datetime import date
from pathlib import Path

import numpy as np
import pytest
import torch
from pickled import (
    CASES,
    CHECKPOINTS,
    calls,
    data_pickle,
    name,
    plain,
    saved_files,
    shared_tuples,
    storage,
    tensor,
    text,
)
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint.filesystem import _StorageInfo

from ckpt_tools.core.geometry import Box
from ckpt_tools.core.plain_values import PickledValue
from ckpt_tools.errors import (
    CheckpointError,
    UnreadableError,
    UnsafePickleError,
    UnsupportedError,
)
from ckpt_tools.formats.dcp.metadata import METADATA_GLOBALS, load_metadata
from ckpt_tools.formats.pickle.containers import CONTAINER_FUNCTIONS
from ckpt_tools.formats.pickle.dtensor_spec import SPEC_CLASSES
from ckpt_tools.formats.pickle.load import load_plain, load_stream, load_tensors
from ckpt_tools.formats.pickle.machine import Machine
from ckpt_tools.formats.pickle.nodes import Instance, Opaque
from ckpt_tools.formats.pickle.rebuild import TENSOR_CLASSES, TENSOR_FUNCTIONS
from ckpt_tools.formats.pickle.stored import (
    StoredDTensor,
    StoredPlacement,
    StoredStorage,
    StoredTensor,
)

METADATA = sorted(CHECKPOINTS.rglob(".metadata"))
END = b"\x80\x02"


def load(data: bytes, *allow: str) -> object:
    return load_tensors(data, where="x.pt", allow=allow)


def entry(path: str, fqn: str) -> object:
    """One value of a real state dict."""
    value = load(data_pickle(CASES / path))
    assert isinstance(value, dict)
    return value[fqn]


_PARTIAL = name("torch.distributed.tensor.placement_types.Partial") + b")\x81"
_PARTIAL += b"}" + text("reduce_op") + text("sum") + b"sb"


def dtensor_on_one_rank(placement: bytes, grid: bytes = b"K\x01\x85") -> bytes:
    """A pickle of a DTensor of shape (2, 3) on a mesh of one rank."""
    mesh = name("torch.distributed.device_mesh.DeviceMesh") + b")\x81}"
    mesh += text("mesh") + tensor(grid, b"K\x01\x85") + b"sb"
    spec = name("torch.distributed.tensor._dtensor_spec.DTensorSpec") + b")\x81}("
    spec += text("mesh") + mesh + text("placements") + placement + b"\x85ub"
    kind = name("torch.distributed.tensor.DTensor")
    made = b"(" + kind + name("torch.float32") + b"K\x02K\x03\x86K\x03K\x01\x86K\x00NN\x89t"
    state = b"N}(" + text("_local_tensor") + tensor() + text("_spec") + spec + b"u\x86"
    wrapper = name("torch._utils._rebuild_wrapper_subclass")
    return calls("torch._tensor._rebuild_from_type_v2", wrapper, kind, made, state)


def test_the_worked_examples_of_the_docs_give_what_they_show() -> None:
    page = Path(__file__).parents[2] / "docs" / "adding-a-format.md"
    done = doctest.testfile(str(page), module_relative=False)
    assert (done.attempted > 10, done.failed) == (True, 0)


# ----------------------------------------------------------------------------------- DCP metadata


@pytest.mark.parametrize("path", METADATA, ids=lambda path: str(path.relative_to(CHECKPOINTS)))
def test_real_metadata_places_every_tensor_and_object(path: Path) -> None:
    found = load_metadata(path.read_bytes(), where="m")
    assert set(found.storage) == found.tensors.keys() | found.objects


def test_metadata_says_shapes_types_chunks_and_places() -> None:
    found = load_metadata(
        (CASES / "C54_other_metadata_versions/good/.metadata").read_bytes(), where="m"
    )
    weight = found.tensors["model.w"]
    assert (weight.dtype, weight.shape) == ("float32", (4, 2))
    assert weight.boxes == (Box((0, 0), (4, 2)),)
    assert found.storage["model.w"][0, 0].relative_path == "__0_0.distcp"


def test_metadata_without_the_newer_attributes_is_read() -> None:
    found = load_metadata(
        (CASES / "C54_other_metadata_versions/bare/.metadata").read_bytes(), where="m"
    )
    assert found.planner_data is None
    assert found.storage["model.w"][0, 0].transforms == ()


def test_a_class_of_another_library_in_metadata_is_named() -> None:
    data = (CASES / "C54_other_metadata_versions/foreign/.metadata").read_bytes()
    with pytest.raises(UnsafePickleError, match=r"^m asks for fake_olmo_storage\._StorageInfo"):
        load_metadata(data, where="m")


def test_metadata_that_would_run_code_is_refused() -> None:
    data = (CASES / "C38_malicious_pickle/dcp/.metadata").read_bytes()
    with pytest.raises(UnsafePickleError, match=r"os\.makedirs"):
        load_metadata(data, where="m")


def test_the_compressor_of_an_item_is_told() -> None:
    path = next(path for path in METADATA if "zstd" in str(path))
    found = load_metadata(path.read_bytes(), where="m")
    assert {info.transforms for items in found.storage.values() for info in items.values()} == {
        ("stream.zstd/1",)
    }


# ------------------------------------------------------------------------------- tensors of torch


def test_a_shard_knows_its_global_shape_mesh_and_place() -> None:
    shard = entry("C08_hsdp/ckpt/model_world_size_4_rank_3.pt", "0.weight")
    assert isinstance(shard, StoredDTensor)
    assert shard.placements == (StoredPlacement("R"), StoredPlacement("S", 0))
    assert (shard.mesh.shape, shard.mesh.coordinate) == ((2, 2), (1, 1))
    assert shard.mesh.ranks() == (0, 1, 2, 3)


@pytest.mark.parametrize("folder", ["new", "old_paths"])
def test_modules_that_moved_give_the_same_tensors(folder: str) -> None:
    shard = entry(f"C53_moved_modules/{folder}/model_world_size_2_rank_1.pt", "w")
    assert isinstance(shard, StoredDTensor)
    assert (shard.shape, shard.local.shape, shard.placements) == (
        (7, 2),
        (3, 2),
        (StoredPlacement("S", 0),),
    )


def test_strided_shards_keep_their_split_factor() -> None:
    found = load(data_pickle(CHECKPOINTS / "torch-2.9.1-e2_2d_manual/ranks/rank1.pt"))
    kinds = {
        shard.placements
        for shard in found["model"].values()  # type: ignore[index]
        if isinstance(shard, StoredDTensor)
    }
    assert (StoredPlacement("SS", 0, 2), StoredPlacement("S", 0)) in kinds


@pytest.mark.parametrize("other", [storage("torch.IntStorage"), storage(numel=7)])
def test_a_storage_of_two_types_or_sizes_is_refused(other: bytes) -> None:
    assert load(b"\x80\x02" + storage() + storage() + b"\x86.") is not None
    with pytest.raises(UnreadableError, match="with two types or sizes"):
        load(b"\x80\x02" + storage() + other + b"\x86.")


def test_views_of_other_types_that_torch_saves_are_read() -> None:
    empty, some = torch.empty(0), torch.arange(6, dtype=torch.uint8)
    saved = {"e": empty, "i": empty.view(torch.int32), "u": some, "f": some.view(torch.float8_e5m2)}
    torch.save(saved, stream := io.BytesIO())
    found = load(zipfile.ZipFile(stream).read("archive/data.pkl"))
    assert isinstance(found, dict)
    kinds = [(t.dtype, t.storage.dtype, t.storage.key) for t in found.values()]
    assert kinds[:2] == [("float32", "float32", "0"), ("int32", "int32", "0")]
    assert kinds[2:] == [("uint8", "uint8", "1"), ("float8_e5m2", None, "1")]


def test_closed_values_are_equal_whether_or_not_they_share_small_values() -> None:
    one, other = ([np.float64(0.1), np.int8(7), torch.device("cuda", 1)] for _ in range(2))
    shared = load_plain(pickle.dumps(Namespace(x=one, y=[*one])), where="x")
    assert isinstance(shared, PickledValue)
    assert shared == load_plain(pickle.dumps(Namespace(x=one, y=other)), where="x")


def test_tied_tensors_share_a_storage() -> None:
    path = next(saved_files(CASES / "C20_tied_shared_storage"))
    found = load(data_pickle(path))
    assert isinstance(found, dict)
    keys = [leaf.storage.key for leaf in found.values() if isinstance(leaf, StoredTensor)]
    assert len(set(keys)) < len(keys)


def test_a_parameter_is_its_tensor() -> None:
    data = calls("torch._utils._rebuild_parameter", tensor(), b"\x88", b"}")
    assert load(data) == load(END + tensor() + b".")


def test_a_storage_on_another_device_is_read_like_any() -> None:
    found = entry("C47_cuda_npu_tagged/full_npu.pt", "w")
    assert isinstance(found, StoredTensor)
    assert found.storage == StoredStorage("0", "float32", 8)


def test_a_sharded_tensor_is_named_before_the_getattr_beside_it() -> None:
    data = END + b"(" + name("__builtin__.getattr")
    data += name("torch.distributed._shard.sharded_tensor.api.ShardedTensor") + b"t."
    with pytest.raises(UnsupportedError, match="ShardedTensor"):
        load(data)


@pytest.mark.parametrize("case", ["C16_flat_param_local/local", "C17_sharded_tensor/ckpt"])
def test_real_sharded_tensors_are_refused_by_name(case: str) -> None:
    for path in saved_files(CASES / case):
        with pytest.raises(UnsupportedError, match="ShardedTensor"):
            load(data_pickle(path))


def test_a_partial_sum_is_kept_as_one() -> None:
    found = load(dtensor_on_one_rank(_PARTIAL))
    assert isinstance(found, StoredDTensor)
    assert found.placements == (StoredPlacement("P", op="sum"),)


def test_a_tensor_that_ends_behind_its_storage_is_refused() -> None:
    with pytest.raises(UnreadableError, match="ends at element 12 of storage '0', which has 6"):
        load(END + tensor(shape=b"K\x04K\x03\x86") + b".")


@pytest.mark.parametrize(
    "made_by",
    [
        "torch._utils._rebuild_sparse_tensor",
        "torch._utils._rebuild_nested_tensor",
        "torch._utils._rebuild_qtensor",
        "torch._utils._rebuild_meta_tensor_no_storage",
        "torch._utils._rebuild_device_tensor_from_numpy",
    ],
)
def test_tensors_that_cannot_be_read_right_are_refused_by_name(made_by: str) -> None:
    with pytest.raises(UnsupportedError, match=made_by):
        load(calls(made_by, b"N"))


def test_a_quantized_storage_is_refused_by_its_type() -> None:
    parts = storage("torch.QInt8Storage"), b"K\x00", b"K\x06\x85", b"K\x01\x85", b"\x89", b"}"
    with pytest.raises(UnsupportedError, match="qint8"):
        load(calls("torch._utils._rebuild_tensor_v2", *parts))


def test_a_whole_module_is_refused_with_the_way_out() -> None:
    with pytest.raises(UnsupportedError, match="module") as caught:
        load(END + b"(" + text("module") + b"NNNtQ.")
    assert "state_dict" in str(caught.value.hint)


def test_a_persistent_id_that_is_no_storage_is_refused() -> None:
    with pytest.raises(UnreadableError, match="persistent id"):
        load(END + b"K\x01Q.")


def test_several_pickles_are_read_from_one_stream() -> None:
    with (CASES / "C48_legacy_nonzip/old.pt").open("rb") as file:
        values = [load_stream(file, where="old.pt") for _ in range(5)]
    assert values[0] == 0x1950A86A20F9469CFC6C
    assert values[1] == 1001
    assert values[4] == sorted(values[4])  # type: ignore[type-var,arg-type]


# ------------------------------------------------------------- what is not opened, or never allowed


@pytest.mark.parametrize(
    ("path", "key", "qualname"),
    [
        ("namespace.pt", "args", "argparse.Namespace"),
        ("rng.pt", "rng", None),
        ("counter.pt", "sched", None),
    ],
)
def test_training_state_of_python_and_numpy_is_read_around(
    path: str, key: str, qualname: str | None
) -> None:
    found = entry(f"C37_python_objects_in_full/{path}", key)
    weight = entry(f"C37_python_objects_in_full/{path}", "model")
    assert isinstance(weight, dict)
    assert isinstance(weight["w"], StoredTensor)
    assert (found.qualname if isinstance(found, PickledValue) else None) == qualname


def test_an_unknown_global_is_refused_with_its_name_and_the_way_to_allow_it() -> None:
    with pytest.raises(UnsafePickleError, match=r"^x\.pt asks for mine\.Config,") as caught:
        load(calls("mine.Config"))
    assert "--allow-global mine.Config" in str(caught.value.hint)


@pytest.mark.parametrize("allowed", ["mine.sub.Config", "mine.*", "mine.sub.*"])
def test_an_allowed_global_is_a_closed_value(allowed: str) -> None:
    found = load(calls("mine.sub.Config", b"N"), allowed)
    assert isinstance(found, PickledValue)
    assert (found.qualname, found.is_allowed) == ("mine.sub.Config", True)


@pytest.mark.parametrize(
    "qualname",
    [
        "os.system",
        "posix.system",
        "nt.system",
        "subprocess.Popen",
        "__builtin__.eval",
        "builtins.exec",
        "builtins.getattr",
        "builtins.__import__",
        "importlib.import_module",
        "functools.partial",
        "operator.attrgetter",
        "torch.hub.load",
        "torch.storage._load_from_bytes",
        "numpy.testing._private.utils.runstring",
    ],
)
def test_what_runs_code_is_refused_even_when_it_is_allowed(qualname: str) -> None:
    shown = qualname.replace("__builtin__", "builtins")
    for loads in (
        lambda data: load(data, qualname, shown, "os.*"),
        lambda data: load_plain(data, where="x"),
    ):
        with pytest.raises(UnsafePickleError, match=shown):
            loads(calls(qualname, text("echo")))


def test_a_tensor_of_an_ascend_npu_is_its_copy_on_the_cpu() -> None:
    """torch_npu pickles that copy, and the format to give it in the memory of the NPU."""
    format_2 = name("torch_npu.npu._format.Format") + b"K\x02\x85R"
    parts = storage(), b"K\x00", b"K\x02K\x03\x86", b"K\x03K\x01\x86", b"\x89", b"}", format_2
    found = load(calls("torch_npu.utils.storage._rebuild_npu_tensor", *parts))
    assert found == load(calls("torch._utils._rebuild_tensor_v2", *parts[:6]))
    assert isinstance(found, StoredTensor)


def test_a_pickle_dump_of_tensors_is_told_with_the_way_out() -> None:
    with pytest.raises(UnsafePickleError, match="can run code") as caught:
        load(pickle.dumps({"w": torch.ones(2)}))
    assert "save its state dict with torch.save" in str(caught.value.hint)


def test_nothing_named_by_a_pickle_is_imported_or_run(tmp_path: Path) -> None:
    marker = tmp_path / "made"
    before = set(sys.modules)
    with pytest.raises(UnsafePickleError):
        load(calls("os.mkdir", text(str(marker))))
    load(calls("antigravity.Thing"), "antigravity.*")
    assert not marker.exists()
    assert "antigravity" not in set(sys.modules) - before


def test_a_global_with_control_characters_is_shown_on_one_line() -> None:
    with pytest.raises(UnsafePickleError) as caught:
        load(calls("evil.\x1b[2J\rname"))
    assert str(caught.value).isprintable()


# ------------------------------------------------------------------------------------ plain values


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
@pytest.mark.parametrize(
    "value",
    [None, True, 7, -(2**40), 1.5, "text ü", [1, [2.0]], (1, "a"), {"a": {1: None}}],
    ids=repr,
)
def test_plain_values_come_back(value: object, protocol: int) -> None:
    assert load_plain(plain(value, protocol), where="x") == value


@pytest.mark.parametrize(
    ("data", "qualname"),
    [
        (END + tensor() + b".", "torch.Tensor"),
        (plain({b"key": 3}), "builtins.dict"),
        (END + b"\x8c\x03\xed\xa0\x80.", "builtins.str"),
        (END + b"\x8f(\x8c\x03\xed\xa0\x80\x90.", "builtins.set"),
        (END + b"\x8a\xff" + b"\x7f" * 255 + b".", "builtins.int"),
    ],
)
def test_what_is_not_plain_is_opaque(data: bytes, qualname: str) -> None:
    found = load_plain(data, where="x")
    assert isinstance(found, Opaque)
    assert found.qualname == qualname


# ----------------------------------------------------------------------------------------- hostile

HEAVY_KEY = b"(" + b"K\x00" * 1000 + b"tq\x00"
LOOP = b"]q\x00h\x00a."
HOSTILE = {
    "key of tuples that share": END + b"}" + shared_tuples(60) + b"Ns.",
    "key that is nested deep": END + b"}N" + b"\x85" * 100_000 + b"Ns.",
    "long key again and again": END + b"}" + HEAVY_KEY + b"N" + b"sh\x00N" * 10 + b"s.",
    "set of tuples that share": b"\x80\x04\x8f(" + shared_tuples(60) + b"\x90.",
    "frozenset of tuples that share": b"\x80\x04(" + shared_tuples(60) + b"\x91.",
    "value that contains itself": END + LOOP,
    "lists that share": END + b"]" + b"q\x00](h\x00h\x00e" * 60 + b".",
    "a name that is no text": END + b"}\x8c\x03\xed\xa0\x80K\x01s.",
    "a class again and again, and many": END
    + (b"](" + b"ca\nb\n" * 200_000 + b"".join(b"ca\nb%d\n" % n for n in range(1000)) + b"e."),
    "objects of a class without end": END
    + (b"](" + name("a.b") + b"q\x00" + b"h\x00)\x81" * 200_000 + b"e."),
    "objects of a class that is known": END
    + (b"](" + name("argparse.Namespace") + b"q\x00" + b"h\x00)\x81" * 200_000 + b"e."),
    "calls without end": END
    + (b"](" + name("collections.OrderedDict") + b"q\x00" + b"h\x00)R" * 200_000 + b"e."),
    "tuples without end": END + b"](" + b"N\x85" * 200_000 + b"e.",
    "marks without end": END + b"(" * 200_000 + b"1" * 200_000 + b"N.",
    "lists nested deep": END + b"]" * 60_000 + b"a" * 59_999 + b".",
    "sets without end": b"\x80\x04](" + b"\x8f" * 400_000 + b"e.",
    "text of 2**62 bytes": b"\x80\x04\x8d\x00\x00\x00\x00\x00\x00\x00\x40.",
    "bytes of 2**62 bytes": b"\x80\x04\x8e\x00\x00\x00\x00\x00\x00\x00\x40.",
    "bytearray of 2**62 bytes": b"\x80\x05\x96\x00\x00\x00\x00\x00\x00\x00\x40.",
    "frame of 2**62 bytes": b"\x80\x04\x95\x00\x00\x00\x00\x00\x00\x00\x40.",
    "bytes copied again and again": END
    + (b"](" + name("_codecs.encode") + b"q\x01" + text("a" * 100_000))
    + (text("latin1") + b"\x86q\x02R" + b"h\x01h\x02R" * 2000 + b"e."),
    "sets copied again and again": END
    + (b"](" + name("builtins.set") + b"q\x01](" + b"K\x01" * 100_000 + b"e\x85q\x02R")
    + (b"h\x01h\x02R" * 2000 + b"e."),
    "extension code": b"\x80\x02\x82\x01.",
    "out-of-band buffer": b"\x80\x05\x97.",
    "no opcode": b"\x80\x02\xff.",
    "nothing": b"",
    "no end": b"\x80\x02}",
    "empty stack": b"\x80\x02.",
}


@pytest.mark.parametrize("data", HOSTILE.values(), ids=HOSTILE.keys())
@pytest.mark.parametrize("load_one", [load_tensors, load_plain, load_metadata])
def test_hostile_pickles_end_in_our_error_and_little_memory(load_one: object, data: bytes) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(UnreadableError, match=r"^x "):
            load_one(data, where="x")  # type: ignore[operator]
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 100_000_000


def test_a_memo_that_leaves_out_numbers_is_bounded() -> None:
    gap, many = b"r\x00\x00\x00\x40", b"\x94" * 1_000_000
    assert load(b"\x80\x04N" + many[:1000] + gap + many[:1000] + b"j\x00\x00\x00\x40.") is None
    for memo in (many + gap, gap + many):
        tracemalloc.start()
        try:
            with pytest.raises(UnreadableError, match="the numbers of its memo leave some out"):
                load(b"\x80\x04N" + memo + b".")
            assert tracemalloc.get_traced_memory()[1] < 100_000_000
        finally:
            tracemalloc.stop()


def test_python_2_began_its_memo_at_1() -> None:
    puts = b"".join(b"r" + number.to_bytes(4, "little") for number in range(1, 400_000))
    assert load(b"\x80\x02K\x05" + puts + b"h\x01\x86.") == (5, 5)


def test_a_memo_number_of_a_billion_costs_nothing() -> None:
    tracemalloc.start()
    try:
        assert load(END + b"]Nr\x00\x00\x00\x400j\x00\x00\x00\x40a.") == [None]
        assert tracemalloc.get_traced_memory()[1] < 1_000_000
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("protocol", [2, 4])
def test_many_real_objects_are_no_attack(protocol: int) -> None:
    days = [(date.fromordinal(number), {}) for number in range(1, 40_000)]
    assert len(load(pickle.dumps(days, protocol))) == len(days)


@pytest.mark.parametrize("data", [b"(S'id'\nios\nsystem\n.", pickle.dumps({"a": 1}, 0)])
def test_the_oldest_protocols_are_refused_by_name(data: bytes) -> None:
    with pytest.raises(UnreadableError, match="pickle protocol 0 or 1"):
        load(data)


NAMES = sorted(
    {*SPEC_CLASSES, *TENSOR_CLASSES, *TENSOR_FUNCTIONS, *METADATA_GLOBALS, *CONTAINER_FUNCTIONS}
)


@pytest.mark.parametrize("qualname", NAMES)
def test_no_pickle_changes_what_it_is_given(qualname: str) -> None:
    """BUILD sets attributes of whatever it is given, classes and functions included."""
    found = METADATA_GLOBALS.get(qualname, TENSOR_FUNCTIONS.get(qualname, Instance))
    kind = found if isinstance(found, type) else type(found)
    before = dict(vars(kind))
    state = b"N}" + text("args") + b"N" + b"s\x86"
    for loads in (load_tensors, load_metadata, load_plain):
        with pytest.raises(CheckpointError):
            loads(END + b"(" + name(qualname) + state + b"b" + b"K\x01Qt.", where="x")
    assert dict(vars(kind)) == before


CALLS = {
    "REDUCE": b"NR",
    "REDUCE without arguments": b")R",
    "NEWOBJ": b")\x81",
    "NEWOBJ_EX": b")}\x92",
    "BUILD": b"}b",
    "APPEND": b"Na",
    "SETITEM": b"NNs",
    "ADDITEMS": b"(N\x90",
}


class Foreign:
    """An object with every method that an opcode of a pickle asks for: none may be called."""

    def __call__(self, *_args: object) -> None:
        pytest.fail("it was called")

    __setstate__ = __setitem__ = append = extend = add = __call__


@pytest.mark.parametrize("opcodes", CALLS.values(), ids=CALLS.keys())
@pytest.mark.parametrize(
    "foreign",
    [os.system, print, dict, type, Foreign, Foreign(), sys],
    ids=["os.system", "print", "dict", "type", "a class", "an object", "a module"],
)
def test_nothing_is_called_that_is_not_of_ours(foreign: object, opcodes: bytes) -> None:
    """Whatever a table of names gave by mistake."""
    with pytest.raises(UnreadableError, match="is damaged"):
        Machine(END + name("a.b") + opcodes + b".", resolve=lambda _: foreign, storage=repr).run()


@pytest.mark.parametrize("qualname", NAMES)
def test_each_name_of_the_tables_makes_a_value_or_our_error(qualname: str) -> None:
    modules = set(sys.modules)
    for opcodes in CALLS.values():
        for arguments in (b"", b"N", b"K\x01", text("a"), b"]", b"}", b"))", b"NNNNNNN"):
            data = END + name(qualname) + opcodes.replace(b")", b"(" + arguments + b"t") + b"."
            for loads in (load_tensors, load_metadata, load_plain):
                with suppress(CheckpointError):
                    loads(data, where="x")
    assert set(sys.modules) == modules


def test_a_damaged_pickle_says_where_and_never_what_python_said_at_length() -> None:
    with pytest.raises(UnreadableError) as caught:
        load_tensors(END + b"K\x01K\x02a.", where="dir/x.pt")
    assert str(caught.value).startswith("dir/x.pt is damaged")
    assert len(str(caught.value)) < 400


def test_the_loader_imports_neither_torch_nor_numpy() -> None:
    code = (
        "import sys, ckpt_tools.formats.pickle.load, ckpt_tools.formats.zip.read; "
        "sys.exit(any(m in sys.modules for m in ('torch', 'numpy')))"
    )
    assert os.spawnv(os.P_WAIT, sys.executable, [sys.executable, "-c", code]) == 0  # noqa: S606


@pytest.mark.parametrize(
    "kind", [dcp.TensorProperties, dcp.MetadataIndex, dcp.ChunkStorageMetadata, _StorageInfo]
)
def test_metadata_with_an_object_that_was_never_filled_is_damaged(kind: type) -> None:
    size = torch.Size((4,))
    chunk = dcp.ChunkStorageMetadata(torch.Size((0,)), size)
    entry = dcp.TensorStorageMetadata(dcp.TensorProperties(dtype=torch.float32), size, [chunk])
    places = {dcp.MetadataIndex("w", torch.Size((0,))): _StorageInfo("__0_0.distcp", 0, 16)}
    file = io.BytesIO()
    pickler = pickle.Pickler(file, 4)
    unfilled = {kind: lambda _value: (copyreg.__newobj__, (kind,))}  # type: ignore[attr-defined]
    pickler.dispatch_table = {**copyreg.dispatch_table, **unfilled}
    pickler.dump(dcp.Metadata({"w": entry}, storage_data=places))
    with pytest.raises(UnreadableError, match="m is damaged: an object in it has no state"):
        load_metadata(file.getvalue(), where="m")


def test_a_layout_that_is_no_text_is_refused() -> None:
    data = (CASES / "C54_other_metadata_versions/good/.metadata").read_bytes()
    assert b"\x8c\rtorch.strided\x94" in data
    with pytest.raises(CheckpointError):
        load_metadata(data.replace(b"\x8c\rtorch.strided\x94", b"}\x94"), where="m")


@pytest.mark.parametrize("load", [load_plain, load_tensors])
def test_only_a_saved_model_is_called_one(load: Callable[..., object]) -> None:
    data = pickle.dumps(torch.nn.Linear(2, 2).forward)  # an object of DCP may be a bound method
    with pytest.raises(UnsafePickleError) as error:
        load(data, where="x")
    is_called_one = "It looks like a whole model" in (error.value.advice or "")
    assert is_called_one == (load is load_tensors)
