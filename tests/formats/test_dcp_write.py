"""A DCP directory is what a real job of the mesh would write, and torch loads it."""

import io
import pickle
import warnings
import zipfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from alone import ALONE
from plan_writer import Source, told, value_object, write_plans
from torch.distributed.checkpoint._dedup_save_plans import dedup_save_plans
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.metadata import Metadata

from ckpt_tools import formats
from ckpt_tools.core.index import ByteRange, ObjectEntry
from ckpt_tools.core.layout import Layout, Mesh, Placement, Replicate, Shard
from ckpt_tools.core.plan import FilePlan, Target
from ckpt_tools.core.state_tree import Branch, dict_of, list_of
from ckpt_tools.errors import UnsupportedError, UsageError
from ckpt_tools.formats.dcp import write as dcp_write
from ckpt_tools.formats.protocol import PlanOptions
from ckpt_tools.storage.reader import Files

DATA = Path(__file__).parents[1] / "data" / "checkpoints"
ROWS = (Shard(0),)
HSDP = (Replicate(), Shard(0))


class Twin:
    """A real directory, and the one that is planned for the same mesh from its own tensors."""

    def __init__(
        self,
        name: str,
        mesh: Mesh,
        placements: tuple[Placement, ...],
        out: Path,
        whole: Sequence[str],
    ) -> None:
        self.real, self.ours = DATA / name / "ckpt", out
        with Files() as files:
            index = formats.locate(formats.read_index(str(self.real)), files)
        layout = Layout(mesh, placements)
        targets = [
            Target(e.fqn, e.path, e, e.dtype, layout if e.shape and e.fqn not in whole else None)
            for e in index.tensors
        ]
        self.real_metadata = metadata(self.real)
        self.plans = dcp_write.plan_files(
            targets,
            index.objects,
            options=PlanOptions(mesh=mesh, tree=index.nesting),
        )
        write_plans(self.plans, out)
        self.our_metadata = metadata(out)

    def items(self) -> list[tuple[bytes, bytes]]:
        """Each item of the real directory with the same bytes of ours."""
        found = []
        for info in self.real_metadata.storage_data.values():
            span = slice(info.offset, info.offset + info.length)
            name = info.relative_path
            found.append(
                ((self.real / name).read_bytes()[span], (self.ours / name).read_bytes()[span])
            )
        return found


def metadata(folder: Path) -> Metadata:
    return pickle.loads((folder / ".metadata").read_bytes())  # noqa: S301 (our own file)


def load(state: dict[str, torch.Tensor], folder: Path) -> None:
    """Load in place, in this one process; torch warns that it is alone."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        dcp.load(state, storage_reader=dcp.FileSystemReader(folder), **ALONE)


@pytest.fixture(
    scope="module",
    params=[
        ("fsdp2_dcp_1d_4r", Mesh((4,)), ROWS, ("app.model.scale", "rng.torch")),
        ("fsdp2_dcp_hsdp_2x4", Mesh((2, 4)), HSDP, ("model.scale",)),
    ],
    ids=["1-D", "HSDP"],
)
def twin(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Twin:
    name, mesh, placements, whole = request.param
    return Twin(name, mesh, placements, tmp_path_factory.mktemp("twin"), whole)


def test_the_files_are_those_of_a_real_job(twin: Twin) -> None:
    def sizes(folder: Path) -> dict[str, int]:
        return {p.name: p.stat().st_size for p in folder.iterdir() if p.name != ".metadata"}

    assert sizes(twin.ours) == sizes(twin.real)


def test_each_file_holds_the_same_items_in_the_same_order_as_a_real_jobs(twin: Twin) -> None:
    assert list(twin.our_metadata.storage_data.items()) == list(
        twin.real_metadata.storage_data.items()
    )


def test_the_metadata_says_the_same_as_a_real_jobs(twin: Twin) -> None:
    ours, theirs = twin.our_metadata, twin.real_metadata
    assert ours.state_dict_metadata == theirs.state_dict_metadata
    assert list(ours.planner_data.items()) == list(theirs.planner_data.items())
    assert [i.index for i in ours.storage_data] == [i.index for i in theirs.storage_data]
    assert ours.version == theirs.version


def test_items_are_those_of_a_real_job_but_for_the_serialization_id(twin: Twin) -> None:
    for theirs, ours in twin.items():
        old, new = zipfile.ZipFile(io.BytesIO(theirs)), zipfile.ZipFile(io.BytesIO(ours))
        assert new.namelist() == old.namelist()
        assert all(
            new.read(name) == old.read(name)
            for name in old.namelist()
            if not name.endswith("serialization_id")
        )


def test_the_metadata_tells_no_path_of_the_machine(twin: Twin) -> None:
    assert twin.our_metadata.storage_meta.checkpoint_id is None
    assert str(twin.real).encode() not in (twin.ours / ".metadata").read_bytes()


def test_torch_loads_what_it_loads_from_the_real_directory(twin: Twin) -> None:
    state = {
        fqn: torch.zeros(record.size, dtype=record.properties.dtype)
        for fqn, record in twin.real_metadata.state_dict_metadata.items()
        if hasattr(record, "size")
    }
    theirs = {fqn: torch.zeros_like(tensor) for fqn, tensor in state.items()}
    for tensors, folder in ((state, twin.ours), (theirs, twin.real)):
        load(tensors, folder)
    assert all(torch.equal(state[fqn], tensor) for fqn, tensor in theirs.items())


def test_the_same_input_gives_the_same_plans(tmp_path: Path) -> None:
    source = Source(tmp_path)
    targets = [source.target("w", np.arange(12.0).reshape(4, 3), layout=Layout(Mesh((3,)), ROWS))]
    assert told(plan(targets, world_size=3)) == told(plan(targets, world_size=3))


def plan(
    targets: Sequence[Target], objects: Sequence[ObjectEntry] = (), *, world_size: int
) -> list[FilePlan]:
    return dcp_write.plan_files(targets, objects, options=PlanOptions(mesh=Mesh((world_size,))))


@pytest.mark.parametrize("dtype", ["bfloat16", "uint16", "uint64", "float8_e4m3fn", "complex64"])
def test_torch_reads_every_kind_of_item(dtype: str, tmp_path: Path) -> None:
    kind = getattr(torch, dtype)
    values = torch.arange(24, dtype=torch.uint8).repeat(kind.itemsize).view(kind).reshape(4, 6)
    raw = values.view(torch.uint8).numpy().reshape(4, 6, kind.itemsize)
    element = raw.view(np.dtype((np.void, kind.itemsize)))[..., 0]
    layout = Layout(Mesh((3,)), ROWS)
    target = Source(tmp_path).target("w", element, dtype=dtype, layout=layout)
    write_plans(plan([target], world_size=3), tmp_path / "out")
    first = (tmp_path / "out" / "__0_0.distcp").read_bytes()
    loaded = torch.load(io.BytesIO(first), weights_only=True)
    assert loaded.view(torch.uint8).equal(values[:2].view(torch.uint8))


@pytest.mark.parametrize("shape", [(1,), (2,), (3,), (2, 2)], ids=str)
def test_torch_rebuilds_the_order_of_the_state_dict_whatever_the_mesh(
    shape: tuple[int, ...], tmp_path: Path
) -> None:
    cut = Layout(Mesh(shape), (*[Replicate()] * (len(shape) - 1), Shard(0)))
    source = Source(tmp_path)
    layouts = {"m.c": cut, "m.a": None, "m.b": cut}
    targets = [source.target(fqn, np.arange(5.0), layout=cut) for fqn, cut in layouts.items()]
    write_plans(plan(targets, world_size=cut.mesh.size), tmp_path / "out")
    dcp_to_torch_save(tmp_path / "out", tmp_path / "back.pt")
    assert list(torch.load(tmp_path / "back.pt")["m"]) == ["c", "a", "b"]


def test_a_rank_that_holds_nothing_has_an_empty_file(tmp_path: Path) -> None:
    plans = plan([Source(tmp_path).target("w", np.zeros(3))], world_size=2)
    assert [(p.path, p.length > 0) for p in plans] == [
        ("__0_0.distcp", True),
        ("__1_0.distcp", False),
        (".metadata", True),
    ]


def test_empty_shards_are_written_once_and_lie_at_the_end(tmp_path: Path) -> None:
    target = Source(tmp_path).target("w", np.zeros((3, 2)), layout=Layout(Mesh((5,)), ROWS))
    write_plans(plan([target], world_size=5), tmp_path / "out")
    chunks = metadata(tmp_path / "out").state_dict_metadata["w"].chunks
    assert [(tuple(c.offsets), tuple(c.sizes)) for c in chunks] == [
        ((0, 0), (1, 2)),
        ((1, 0), (1, 2)),
        ((2, 0), (1, 2)),
        ((3, 0), (0, 2)),
    ]


def test_an_empty_shard_never_displaces_one_with_elements(tmp_path: Path) -> None:
    # 5 rows over 2 and then over 4: the last of the first half would lie where the second begins.
    layout = Layout(Mesh((2, 4)), (Shard(0), Shard(0)))
    values = np.arange(5.0)
    target = Source(tmp_path).target("w", values, layout=layout)
    write_plans(plan([target], world_size=8), tmp_path / "out")
    state = {"w": torch.zeros(5, dtype=torch.float64)}
    load(state, tmp_path / "out")
    assert state["w"].tolist() == values.tolist()


def test_replicas_go_where_torchs_planner_puts_them(tmp_path: Path) -> None:
    mesh = Mesh((4, 3))
    source = Source(tmp_path)
    shapes = {"a": (7, 2), "b": (100,), "c": (1,), "d": (6, 6), "e": (2,)}
    targets = [
        source.target(fqn, np.zeros(shape), layout=Layout(mesh, HSDP))
        for fqn, shape in shapes.items()
    ]
    write_plans(plan(targets, [value_object("n", 1)], world_size=12), tmp_path / "out")
    found = metadata(tmp_path / "out")
    chosen = dedup_save_plans([_torch_plan(targets, rank, found) for rank in range(12)])
    expected = {item.index: rank for rank, p in enumerate(chosen) for item in p.items}
    ours = {i: int(s.relative_path.split("_")[2]) for i, s in found.storage_data.items()}
    assert ours == expected


def _torch_plan(targets: Sequence[Target], rank: int, found: Metadata) -> object:
    """The plan that a rank of a real job makes of these targets and one object ``n``."""
    from torch.distributed.checkpoint.planner import (
        SavePlan,
        TensorWriteData,
        WriteItem,
        WriteItemType,
    )

    items = []
    for target in targets:
        record = found.state_dict_metadata[target.fqn]
        box = target.layout.box(target.entry.shape, target.layout.mesh.coordinate(rank))
        chunk = next(c for c in record.chunks if tuple(c.offsets) == box.offsets)
        data = TensorWriteData(chunk, record.properties, record.size)
        index = next(
            i for i in found.storage_data if i.fqn == target.fqn and i.offset == chunk.offsets
        )
        items.append(WriteItem(index, WriteItemType.SHARD, tensor_data=data))
    index = next(i for i in found.storage_data if i.fqn == "n")
    return SavePlan([*items, WriteItem(index, WriteItemType.BYTE_IO)])


def test_a_value_becomes_an_item_that_torch_reads(tmp_path: Path) -> None:
    value = {"lr": 1e-3, "betas": (0.9, 0.95), "tags": ["a", "ü"], "n": -(1 << 40), "none": None}
    plans = plan([], [value_object("args", value)], world_size=1)
    write_plans(plans, tmp_path)
    assert torch.load(tmp_path / "__0_0.distcp", weights_only=True) == value


def test_the_bytes_of_an_archive_are_kept_though_its_value_is_known(tmp_path: Path) -> None:
    stream = io.BytesIO()
    torch.save((1, 2), stream)
    entry = Source(tmp_path).bytes_object("pair", stream.getvalue())
    write_plans(plan([], [entry], world_size=1), tmp_path / "out")
    assert (tmp_path / "out" / "__0_0.distcp").read_bytes() == stream.getvalue()


def test_keys_are_text_in_the_paths_and_places_are_numbers_as_torch_flattens_them(
    tmp_path: Path,
) -> None:
    state: Branch[str] = Branch("dict", (0,), (dict_of({"step": "state.0.step"}),))
    groups = list_of([dict_of({"lr": "param_groups.0.lr"})])
    paths = {"state.0.step": ("state", "0", "step"), "param_groups.0.lr": ("param_groups", 0, "lr")}
    objects = [value_object(fqn, 1, path=path) for fqn, path in paths.items()]
    tree = dict_of({"state": state, "param_groups": groups})
    write_plans(dcp_write.plan_files([], objects, options=PlanOptions(tree=tree)), tmp_path)
    assert list(metadata(tmp_path).planner_data.items()) == list(paths.items())


def test_an_object_without_bytes_and_value_is_refused() -> None:
    opaque = ObjectEntry("args", ("args",), "other", ByteRange("x", 0, 9), type_name="a.B")
    with pytest.raises(UnsupportedError, match=r"args: an object of type a\.B"):
        plan([], [opaque], world_size=1)


def test_a_mesh_of_another_size_is_refused(tmp_path: Path) -> None:
    target = Source(tmp_path).target("w", np.zeros(4), layout=Layout(Mesh((2,)), ROWS))
    with pytest.raises(UsageError, match="w: a mesh of 2 ranks"):
        plan([target], world_size=4)
