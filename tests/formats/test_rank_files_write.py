"""Rank files hold DTensors as torch itself would save them, and load without a process group."""

import logging
import pickle
import zipfile
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from math import prod
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
import torch.distributed as dist
from dtensor_files import device_mesh
from plan_writer import Source, value_object, write_plans
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor import Replicate as TorchReplicate
from torch.distributed.tensor import Shard as TorchShard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

from ckpt_tools import formats
from ckpt_tools.core.index import ObjectEntry
from ckpt_tools.core.layout import Layout, Mesh, Replicate, Shard
from ckpt_tools.core.plan import LazyPlans, Target
from ckpt_tools.errors import UsageError
from ckpt_tools.formats import rank_files
from ckpt_tools.formats.protocol import PlanOptions
from ckpt_tools.formats.torch_file.generations import (
    NEWEST,
    Generation,
    generation_of,
    parse_version,
    version_text,
)

DATA = Path(__file__).parents[1] / "data" / "checkpoints"
R, S0, S1 = Replicate(), Shard(0), Shard(1)
TORCH = parse_version(torch.__version__)  # each torch reads only its own DeviceMesh
ONE_FILE = "rank_{rank}.pt"


def torch_mesh(mesh: Mesh, rank: int, device_type: str = "cpu") -> DeviceMesh:
    return device_mesh(mesh.shape, rank=rank, names=mesh.dim_names, device_type=device_type)


def plan_files(
    targets: Sequence[Target],
    objects: Sequence[ObjectEntry],
    *,
    mesh: Mesh,
    device_type: str,
    naming: str | None = None,
    torch_version: tuple[int, int] = NEWEST.last,
) -> LazyPlans:
    version = version_text(torch_version)
    options = PlanOptions(
        mesh=mesh, device_type=device_type, rank_name=naming, torch_version=version
    )
    return rank_files.FORMAT.plan_files(targets, objects, options=options)


def written(
    targets: Sequence[Target], folder: Path, *, mesh: Mesh, device_type: str = "cpu"
) -> list[dict[str, DTensor]]:
    """What torch loads from the file of each rank."""
    plans = plan_files(
        targets, [], mesh=mesh, device_type=device_type, naming=ONE_FILE, torch_version=TORCH
    )
    write_plans(plans, folder)
    with torch.serialization.safe_globals([_StridedShard]):  # which torch 2.6 did not yet allow
        return [torch.load(folder / p.path, weights_only=True, map_location="cpu") for p in plans]


LAYOUTS = [
    Layout(Mesh((4,)), (S0,)),
    Layout(Mesh((1,), ("dp",)), (S0,)),
    Layout(Mesh((2, 3), ("replicate", "shard")), (R, S0)),
    Layout(Mesh((2, 2), ("dp", "tp")), (S0, S1)),
    Layout(Mesh((2, 2)), (S0, S0)),
    Layout(Mesh((3, 2), ("dp", "tp")), (S0, S0), (1, 0)),
    Layout(Mesh((2, 1, 2)), (R, R, R)),
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda x: f"{x.mesh} {x} {x.order}")
def test_each_rank_gets_the_spec_that_torch_would_give_it(layout: Layout, tmp_path: Path) -> None:
    values = np.arange(12 * 4, dtype=np.float32).reshape(12, 4)
    target = Source(tmp_path).target("w", values, layout=layout)
    for rank, state in enumerate(written([target], tmp_path, mesh=layout.mesh)):
        meta = TensorMeta(torch.Size((12, 4)), (4, 1), torch.float32)
        mesh = torch_mesh(layout.mesh, rank)
        spec = DTensorSpec(mesh, placements_of(layout), tensor_meta=meta)
        ours = state["w"]
        assert ours._spec == spec
        assert ours._spec.__dict__ | {"_hash": None} == spec.__dict__
        assert hash(ours._spec) == hash(spec)
        assert same_insides(ours.device_mesh, mesh)
        assert (ours.dtype, ours.shape, ours.stride()) == (torch.float32, (12, 4), (4, 1))
        assert not ours.requires_grad


def placements_of(layout: Layout) -> tuple[TorchShard | TorchReplicate | _StridedShard, ...]:
    if layout.order == (1, 0):
        return (_StridedShard(0, split_factor=layout.mesh.shape[1]), TorchShard(0))
    return tuple(TorchReplicate() if p == R else TorchShard(p.dim) for p in layout.placements)


def same_insides(ours: DeviceMesh, theirs: DeviceMesh) -> bool:
    """Whether two meshes are equal attribute by attribute, but for names of process groups."""
    states = [
        getattr(mesh, "__getstate__", lambda m=mesh: dict(vars(m))) for mesh in (ours, theirs)
    ]
    left, right = (state() for state in states)
    of_ranks = "_rank_map" if "_rank_map" in right else "mesh"  # until torch 2.9
    ranks = [state.pop(of_ranks) for state in (left, right)]
    for state in (left, right):
        state["_hash"] = None
        for names in ("_dim_group_names", "_dim_group_infos"):  # until torch 2.7 the second
            state.pop(names, None)
    return left == right and ranks[0].equal(ranks[1]) and ranks[0].dtype == ranks[1].dtype


@pytest.fixture
def fake_job() -> Iterator[None]:
    """A process group of 6 ranks, of which only this one is there; torch never communicates."""
    dist.init_process_group("fake", store=FakeStore(), rank=4, world_size=6)
    yield
    dist.destroy_process_group()


@pytest.mark.skipif(TORCH < (2, 7), reason="torch 2.6 cannot distribute without communicating")
@pytest.mark.usefixtures("fake_job")
@pytest.mark.parametrize("rows", [12, 7, 2, 0])
@pytest.mark.parametrize(
    "layout",
    [
        Layout(Mesh((6,), ("dp",)), (S0,)),
        Layout(Mesh((2, 3), ("r", "s")), (R, S0)),
        Layout(Mesh((2, 3), ("a", "b")), (S1, S0)),
    ],
    ids=str,
)
def test_a_shard_is_what_distribute_tensor_gives_that_rank(
    layout: Layout, rows: int, tmp_path: Path
) -> None:
    values = np.arange(rows * 4, dtype=np.float32).reshape(rows, 4)
    target = Source(tmp_path).target("w", values, layout=layout)
    ours = written([target], tmp_path, mesh=layout.mesh)[4]["w"]
    mesh = init_device_mesh("cpu", layout.mesh.shape, mesh_dim_names=layout.mesh.dim_names)
    whole = torch.tensor(values.tolist()).reshape(rows, 4)
    theirs = distribute_tensor(whole, mesh, placements_of(layout), src_data_rank=None)
    assert ours.to_local().equal(theirs.to_local())
    assert ours._spec == theirs._spec


@pytest.mark.usefixtures("fake_job")
def test_fsdp2_loads_a_file(tmp_path: Path) -> None:
    layout = Layout(Mesh((2, 3), ("replicate", "shard")), (R, S0))
    weight = np.arange(20.0, dtype=np.float32).reshape(5, 4)
    source = Source(tmp_path)
    targets = [
        source.target("weight", weight, layout=layout),
        source.target("bias", np.arange(5, dtype=np.float32), layout=layout),
    ]
    state = written(targets, tmp_path, mesh=layout.mesh)[4]
    mesh = init_device_mesh("cpu", (2, 3), mesh_dim_names=("replicate", "shard"))
    model = torch.nn.Linear(4, 5)
    fully_shard(model, mesh=mesh)
    model.load_state_dict(state)
    assert model.weight.to_local().tolist() == weight[2:4].tolist()
    assert model.bias.to_local().tolist() == [2, 3]


def test_a_mesh_of_gpus_loads_on_a_machine_without_any(tmp_path: Path) -> None:
    layout = Layout(Mesh((2,)), (S0,))
    target = Source(tmp_path).target("w", np.arange(4.0), layout=layout)
    state = written([target], tmp_path, mesh=layout.mesh, device_type="cuda")[1]
    assert state["w"].device_mesh.device_type == "cuda"
    assert state["w"].to_local().tolist() == [2.0, 3.0]


def test_loading_says_nothing_of_missing_groups_on_a_mesh_of_two_dimensions(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    layout = Layout(Mesh((2, 1)), (R, S0))
    target = Source(tmp_path).target("w", np.arange(4.0), layout=layout)
    with caplog.at_level(logging.WARNING):
        written([target], tmp_path, mesh=layout.mesh)
    assert caplog.records == []


@pytest.mark.skipif(TORCH < (2, 13), reason="torch 2.13 wrote the files, and no older reads them")
def test_the_files_of_a_real_job_come_out_as_they_were(tmp_path: Path) -> None:
    real = DATA / "fsdp2_torchsave_1d_4r" / "ckpt"
    index = formats.read_index(str(real))
    assert index.mesh is not None
    targets = [Target(e.fqn, e.path, e, e.dtype, e.layout) for e in index.tensors]
    plans = plan_files(
        targets,
        index.objects,
        mesh=index.mesh,
        device_type="cpu",
        naming="model_rank{rank}.pt",
        torch_version=TORCH,
    )
    write_plans(plans, tmp_path)
    for plan in plans:
        ours = torch.load(tmp_path / plan.path, weights_only=True)
        theirs = torch.load(real / plan.path, weights_only=True)
        assert ours.keys() == theirs.keys()
        for fqn, tensor in theirs.items():
            assert type(ours[fqn]) is type(tensor)
            if isinstance(tensor, DTensor):
                assert same_insides(ours[fqn].device_mesh, tensor.device_mesh)
                assert ours[fqn]._spec == tensor._spec
                assert ours[fqn].to_local().equal(tensor.to_local())
            else:
                assert ours[fqn].equal(tensor)


class Stub:
    """An object of a class that is not here: what its pickle says of it."""

    def __init__(self, *args: object) -> None:
        self.args, self.state = args, {}

    def __setstate__(self, state: object) -> None:
        self.state = state


class _Reader(pickle.Unpickler):
    """Reads the pickles of other versions of torch with stand-ins for all classes."""

    def find_class(self, module: str, name: str) -> type:
        if name == "OrderedDict":
            return OrderedDict

        def new(cls: type[Stub], *args: object) -> Stub:
            stub = object.__new__(cls)
            Stub.__init__(stub, *args)
            return stub

        return type(name, (Stub,), {"__new__": new, "__module__": module})

    def persistent_load(self, pid: tuple[object, ...]) -> object:
        return ("storage", pid[1].__name__, pid[4])


def said(stub: object) -> object:
    """What a pickle says, as plain values; hashes and the numbers of groups are of one job only."""
    if isinstance(stub, Stub):
        state = stub.state
        if isinstance(state, dict):
            state = {k: v for k, v in state.items() if k not in ("_hash", "_dim_group_names")}
        return (type(stub).__module__, type(stub).__name__, said(stub.args), said(state))
    if isinstance(stub, type):
        return (stub.__module__, stub.__name__)
    if isinstance(stub, dict):
        return [(key, said(value)) for key, value in stub.items()]
    if isinstance(stub, tuple | list):
        return (type(stub).__name__, [said(item) for item in stub])
    return stub


# Folders of tests/data/checkpoints that say their torch; the others with rank files are of 2.13.
OF_TORCH = {"torch-2.9.1-": (2, 9), "torch-2.11-": (2, 11), "torch-2.15.0-": (2, 15)}
KINDS = {"DeviceMesh", "_MeshLayout", "DTensorSpec"}


def real_rank_files() -> Iterator[tuple[tuple[int, int], Path]]:
    """Each real file of DTensors, with the torch that wrote it."""
    for path in sorted(DATA.glob("*/**/*rank*.pt")):
        folder = path.relative_to(DATA).parts[0]
        data = path.read_bytes()
        if b"DeviceMesh" in data and b"ShardedTensor" not in data and "torch-2.1." not in folder:
            known = (version for start, version in OF_TORCH.items() if folder.startswith(start))
            yield next(known, (2, 13)), path


def stubs_in(value: object, seen: set[int]) -> Iterator[Stub]:
    """Every object in a value, once."""
    if id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, Stub):
        yield value
        value = [value.args, value.state]
    items = value.values() if isinstance(value, dict) else value
    for item in items if isinstance(items, list | tuple | type({}.values())) else ():
        yield from stubs_in(item, seen)


def is_sliced(mesh: dict[str, object]) -> bool:
    """Whether a mesh was made of another one's dimensions: its attributes have another order."""
    grid = mesh.get("mesh")
    return mesh.get("_root_mesh") is not None or (
        isinstance(grid, Stub) and prod(grid.args[2]) < grid.args[0][2]
    )


def test_a_row_is_the_attributes_in_that_torchs_own_files_in_their_order() -> None:
    found: dict[Generation, dict[str, set[tuple[str, ...]]]] = {}
    for version, path in real_rank_files():
        if zipfile.is_zipfile(path):  # the pickles of the older format say the same
            of_row = found.setdefault(generation_of(version), {kind: set() for kind in KINDS})
            for stub in stubs_in(unpickled(path), set()):
                kind = type(stub).__name__
                if kind in KINDS and not (kind == "DeviceMesh" and is_sliced(stub.state)):
                    of_row[kind].add(tuple(stub.state))
    assert found == {
        row: {
            "DeviceMesh": {row.mesh},
            "_MeshLayout": {row.layout} if row.layout else set(),
            "DTensorSpec": {row.spec},
        }
        for row in map(generation_of, [(2, 9), (2, 11), (2, 13), (2, 15)])
    }


class Elder(NamedTuple):
    """A rank file of any torch: which, where, the entry to look at, its mesh and layout."""

    version: tuple[int, int]
    path: str
    fqn: str
    device_type: str
    rank: int


ELDERS = [
    Elder((2, 9), "torch-2.9.1-d_fsdp2/ranks/model_rank1.pt", "blocks.0.up.weight", "cpu", 1),
    Elder((2, 9), "torch-2.9.1-d2_fsdp2_hsdp/ranks/model_rank1.pt", "blocks.0.up.weight", "cpu", 1),
    Elder(
        (2, 11),
        "torch-2.11-cuda-fsdp2-2/ranks/model_world_size_2_rank_1.pt",
        "emb.weight",
        "cuda",
        1,
    ),
    Elder(
        (2, 11),
        "torch-2.11-cuda-fsdp2-1x2/ranks/model_world_size_2_rank_1.pt",
        "emb.weight",
        "cuda",
        1,
    ),
    Elder((2, 13), "fsdp2_torchsave_hsdp_2x4/ckpt/model_rank3.pt", "emb.weight", "cpu", 3),
    Elder(
        (2, 15),
        "torch-2.15.0-fsdp2_1d_4r/ranks/model_world_size_4_rank_1.pt",
        "emb.weight",
        "cpu",
        1,
    ),
    Elder((2, 15), "torch-2.15.0-orders_4r/ranks/rank_1.pt", "strided", "cpu", 1),
    Elder((2, 15), "torch-2.15.0-orders_4r/ranks/rank_1.pt", "plain00", "cpu", 1),
]


@pytest.mark.parametrize("elder", ELDERS, ids=lambda e: f"{e.version} {e.path.split('/')[0]}")
def test_a_file_for_another_torch_says_what_that_torch_says(elder: Elder, tmp_path: Path) -> None:
    real = DATA / elder.path
    family = real.name[: -len("1.pt")]
    index = formats.read_index(str(real.parent / f"{family}*.pt"))
    (entry,) = (e for e in index.tensors if e.fqn in (elder.fqn, f"model.{elder.fqn}"))
    assert entry.layout is not None
    target = Target(elder.fqn, (elder.fqn,), entry, entry.dtype, entry.layout)
    plans = plan_files(
        [target],
        [],
        mesh=entry.layout.mesh,
        device_type=elder.device_type,
        naming=ONE_FILE,
        torch_version=elder.version,
    )
    write_plans(plans, tmp_path)
    ours, theirs = (
        unpickled(path)[elder.fqn].args[3][1]["_spec"]
        for path in (tmp_path / f"rank_{elder.rank}.pt", real)
    )
    assert said(ours) == said(theirs)
    meshes = [spec.state["mesh"].state for spec in (ours, theirs)]
    if len(entry.layout.mesh.shape) == 1:
        assert meshes[0]["_dim_group_names"] == meshes[1]["_dim_group_names"] == ["0"]
        assert list(meshes[0]) == list(meshes[1])


def unpickled(path: Path) -> dict[str, Stub]:
    """A file's state dict, with stand-ins for all classes."""
    with zipfile.ZipFile(path) as file:
        name = next(name for name in file.namelist() if name.endswith("/data.pkl"))
        with file.open(name) as stream:
            return _Reader(stream).load()


def test_what_has_no_real_files_is_as_its_torchs_source_has_it(tmp_path: Path) -> None:
    target = Source(tmp_path).target("w", np.arange(12.0), layout=Layout(Mesh((2,)), (S0,)))
    plans = plan_files(
        [target], [], mesh=Mesh((2,)), device_type="cpu", naming=ONE_FILE, torch_version=(2, 7)
    )
    write_plans(plans, tmp_path)
    mesh = unpickled(tmp_path / "rank_1.pt")["w"].args[3][1]["_spec"].state["mesh"].state
    assert mesh["_dim_group_infos"] == [("ptd:0", [0, 1], "0")]
    assert mesh["_coordinate_on_dim"] == [1]
    strided = Layout(Mesh((3, 2), ("dp", "tp")), (S0, S0), (1, 0))
    target = Source(tmp_path).target("v", np.arange(12.0), layout=strided)
    plans = plan_files(
        [target], [], mesh=strided.mesh, device_type="cpu", naming=ONE_FILE, torch_version=(2, 10)
    )
    write_plans(plans, tmp_path)
    spec = unpickled(tmp_path / "rank_1.pt")["v"].args[3][1]["_spec"].state
    assert [entry.args for entry in spec["shard_order"]] == [(0, (1, 0))]
    assert spec["mesh"].state["_coordinate_on_dim"] == [0, 1]


def test_well_known_parts_have_files_of_their_own(tmp_path: Path) -> None:
    layout = Layout(Mesh((2,)), (S0,))
    source = Source(tmp_path)
    targets = [
        source.target("model.w", np.arange(4.0), layout=layout),
        source.target("optim.state.w.exp_avg", np.arange(4.0), layout=layout),
    ]
    objects = [value_object("extra_state.epoch", 3)]
    plans = plan_files(targets, objects, mesh=layout.mesh, device_type="cpu", torch_version=TORCH)
    write_plans(plans, tmp_path)
    assert [p.path for p in plans] == [
        f"{family}_world_size_2_rank_{rank}.pt"
        for family in ("model", "optim", "extra_state")
        for rank in (0, 1)
    ]
    assert list(torch.load(tmp_path / plans.files[0].path, weights_only=True)) == ["w"]
    assert torch.load(tmp_path / plans.files[4].path, weights_only=True) == {"epoch": 3}


def test_other_nestings_stay_whole_in_one_file_each(tmp_path: Path) -> None:
    layout = Layout(Mesh((1,)), (S0,))
    target = Source(tmp_path).target("model.w", np.arange(4.0), layout=layout)
    step = value_object("step", 3)
    plans = plan_files([target], [step], mesh=layout.mesh, device_type="cpu", torch_version=TORCH)
    write_plans(plans, tmp_path)
    state = torch.load(tmp_path / "model_world_size_1_rank_0.pt", weights_only=True)
    assert (list(state), list(state["model"])) == (["model", "step"], ["w"])


def test_our_own_reader_reads_the_same_tensors_and_layouts(tmp_path: Path) -> None:
    layout = Layout(Mesh((3, 2), ("dp", "tp")), (S0, S0), (1, 0))
    source = Source(tmp_path)
    targets = [source.target("w", np.arange(24.0).reshape(12, 2), layout=layout)]
    targets.append(source.target("b", np.arange(3.0)))
    out = tmp_path / "out"
    write_plans(plan_files(targets, [], mesh=layout.mesh, device_type="cuda"), out)
    index = formats.read_index(str(out))
    assert index.problems == ()
    assert [(e.fqn, e.shape, e.layout) for e in index.tensors] == [
        ("b", (3,), None),
        ("w", (12, 2), layout),
    ]


def test_a_mesh_of_another_size_is_refused(tmp_path: Path) -> None:
    target = Source(tmp_path).target("w", np.zeros(4), layout=Layout(Mesh((2,)), (S0,)))
    with pytest.raises(UsageError, match="w: a mesh of 2 ranks"):
        plan_files([target], [], mesh=Mesh((4,)), device_type="cpu")


@pytest.mark.parametrize("version", [(2, 4), (2, 16), (3, 0)])
def test_a_torch_whose_mesh_is_not_known_is_refused(version: tuple[int, int]) -> None:
    with pytest.raises(UsageError, match=rf"torch 2\.5 to 2\.15, not for {version[0]}"):
        plan_files([], [], mesh=Mesh((1,)), device_type="cpu", torch_version=version)


def test_a_naming_without_a_rank_is_refused() -> None:
    with pytest.raises(UsageError, match=r"has no \{rank\}"):
        plan_files([], [], mesh=Mesh((1,)), device_type="cpu", naming="model.pt")
