"""Plans of files are made when it is their turn: memory does not grow with the mesh."""

import tracemalloc
from collections import Counter
from dataclasses import replace
from itertools import chain
from pathlib import Path

import pytest
from reader_contract import DATA
from running import run
from size_records import DEFAULT, use

from ckpt_tools import formats
from ckpt_tools.convert import forecast
from ckpt_tools.convert.export import ExportOptions, plan_export
from ckpt_tools.convert.reshard import ReshardOptions, plan_reshard
from ckpt_tools.convert.write import WriteOptions
from ckpt_tools.copying.tasks import ALL, Share, cut, groups_of
from ckpt_tools.core.dtypes import BY_NAME
from ckpt_tools.core.geometry import Box
from ckpt_tools.core.index import ByteRange, CheckpointIndex, Chunk, TensorEntry
from ckpt_tools.core.mesh_spec import parse_mesh
from ckpt_tools.core.plan import FilePlan, LazyPlans, PlannedFile
from ckpt_tools.core.sizes import Sizes

SOURCE = str(DATA / "checkpoints" / "fsdp2_dcp_1d_4r" / "ckpt")
VERL = str(DATA / "checkpoints" / "verl_fsdp2_4r" / "ckpt")


@pytest.fixture(scope="module", params=["ranks", "dcp", "safetensors"])
def many(request: pytest.FixtureRequest) -> LazyPlans:
    """The plans of many files of a real checkpoint."""
    index = formats.read_index(SOURCE)
    if request.param == "safetensors":
        return plan_export(index, ExportOptions(only=None, max_shard_size=1)).files
    return plan_reshard(index, ReshardOptions(mesh=parse_mesh("12x8"), format=request.param)).files


def test_what_is_said_of_a_file_before_it_is_planned_holds(many: LazyPlans) -> None:
    assert many.length == sum(plan.length for plan in many)
    for file, plan in zip(many.files, many, strict=True):
        assert (plan.path, plan.length) == (file.path, file.length)
        assert plan == file.make()
        assert file.reads() == file._replace(read=None).reads()


def test_planning_very_many_boxes_keeps_none_of_them() -> None:
    shape, dtype = (64, 2), BY_NAME["bfloat16"]
    chunk = Chunk(Box.whole(shape), ByteRange("source", 0, 256))
    names = [f"layers.{number}.weight" for number in range(1_000)]
    tensors = [TensorEntry(fqn, (fqn,), "model", dtype, shape, (chunk,)) for fqn in sorted(names)]
    index = CheckpointIndex("source", "safetensors", tuple(tensors))
    options = ReshardOptions(mesh=parse_mesh("64"))
    small = plan_reshard(index, ReshardOptions(mesh=parse_mesh("2")))
    forecast.of(small, WriteOptions(), "copy", 1)  # imports what it needs
    tracemalloc.start()
    plan = plan_reshard(index, options)
    found, *_ = forecast.of(plan, WriteOptions(), "copy", 1)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert sum(file.boxes for file in found) == 64_000
    assert peak < 64_000 * 100, "one box of .metadata has that many bytes"


def test_plans_that_were_made_are_not_kept(many: LazyPlans) -> None:
    sizes = replace(DEFAULT, plans=100_000, plan_files=1)
    many = many.without([".metadata"])  # one file, as large as it is
    one = sum(len(data) for _, data in many.files[0].make().literals)
    next(iter(groups_of(many, ALL, sizes)))  # imports what it needs
    tracemalloc.start()
    for _ in groups_of(many, ALL, sizes):
        pass
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < max(60_000, len(many) * one / 2)
    assert next(iter(many)) is not next(iter(many))


@pytest.fixture(scope="module")
def tasks(many: LazyPlans) -> Counter[tuple[str, int]]:
    """Each task of those plans, once."""
    return Counter((task.file.path, task.number) for plan in many for task in cut(plan, 4_000))


@pytest.mark.parametrize("limits", [(100_000, 4, 1 << 30), (1, 1 << 20, 100_000)])
@pytest.mark.parametrize("count", [1, 2, 3, 7, 60])
def test_workers_do_every_task_of_lazy_plans_once(
    many: LazyPlans, tasks: Counter[tuple[str, int]], count: int, limits: tuple[int, int, int]
) -> None:
    plans, plan_files, most_plans = limits
    sizes = Sizes(plans=plans, plan_files=plan_files, most_plans=most_plans, task=4_000)
    shares = [
        [task for _, mine in groups_of(many, Share(n, count), sizes) for task in mine]
        for n in range(count)
    ]
    found = chain.from_iterable(shares)
    assert Counter((task.file.path, task.number) for task in found) == tasks
    assert sum(map(bool, shares)) > count / 2


def test_lazy_plans_stay_lazy_in_a_folder_and_beside_others(many: LazyPlans) -> None:
    few = LazyPlans(many.files[:2])
    other = LazyPlans.of([next(iter(few))._replace(path="other")])
    whole = few.inside("a/b") + other
    assert [plan.path for plan in whole] == [f"a/b/{p.path}" for p in few] + ["other"]
    assert [file.path for file in whole.files] == [plan.path for plan in whole]
    _, second, _ = whole
    assert {item.path for item in second.items} == {second.path}


def test_lazy_plans_write_the_same_bytes_by_any_number_of_workers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(Sizes(plans=100_000), monkeypatch)
    for out in ("one", "two"):
        flags = ("-j", "2") if out == "two" else ("--check",)
        args = ("reshard", VERL, "-o", str(tmp_path / out), "--to-mesh", "3x2", "--format", "ranks")
        done = run(*args, *flags)
        assert done.exit_code == 0, done.output
    (tmp_path / "one" / "ckpt_tools_proof.json").unlink()
    one, two = (
        {path.name: path.read_bytes() for path in (tmp_path / out).iterdir()}
        for out in ("one", "two")
    )
    assert one == two


def test_a_framework_folder_of_rank_files_is_lazy_and_whole(tmp_path: Path) -> None:
    args = ("reshard", VERL, "-o", str(tmp_path / "out"), "--to-mesh", "3", "--layout", "verl")
    assert run(*args).exit_code == 0
    done = run("diff", VERL, tmp_path / "out", "-x", "*.rng.*")
    assert done.exit_code == 0, done.output


@pytest.mark.parametrize("form", ["ranks", "dcp", "safetensors"])
def test_a_worker_plans_no_file_that_its_share_is_not_in(form: str) -> None:
    index, made = formats.read_index(SOURCE), Counter[str]()

    def watched(file: PlannedFile) -> PlannedFile:
        def make() -> FilePlan:
            made[file.path] += 1
            return file.make()

        return file._replace(make=make)

    if form == "safetensors":
        plans = plan_export(index, ExportOptions(only=None, max_shard_size=1)).files
    else:
        plans = plan_reshard(index, ReshardOptions(mesh=parse_mesh("8"), format=form)).files
    plans = LazyPlans(map(watched, plans.files))
    assert (len(plans.digest), plans.length > 0) == (32, True)
    for number in range(4):
        made.clear()
        for _ in groups_of(plans, Share(number, 4), Sizes()):
            pass
        assert set(made.values()) == {1}
        assert len(made) <= len(plans) / 2
