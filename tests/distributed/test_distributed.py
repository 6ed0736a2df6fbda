"""What several processes agree on, without any torchrun job: that is `test_torchrun`'s."""

import json
import os
import re
import shutil
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from launching import PATIENCE, contents
from running import run
from size_records import TINY

from ckpt_tools import formats
from ckpt_tools.convert import check as checking
from ckpt_tools.convert.export import ExportOptions, export_of, plan_export
from ckpt_tools.convert.plan import Plan
from ckpt_tools.convert.reshard import ReshardOptions, ReshardPlan, plan_reshard, reshard_of
from ckpt_tools.convert.write import Conversion, Read, ShareOrder, WriteOptions, write_share
from ckpt_tools.copying.parallel import Listener
from ckpt_tools.copying.resume import OutputPlace
from ckpt_tools.copying.tasks import Share, cut
from ckpt_tools.copying.write import write_files
from ckpt_tools.core.crc import KnownCrcs
from ckpt_tools.core.dtypes import dtype_named
from ckpt_tools.core.geometry import Box
from ckpt_tools.core.index import ByteRange, CheckpointIndex, LocatedIndex, Section, TensorEntry
from ckpt_tools.core.layout import (
    Layout,
    Mesh,
    Replicate,
    Shard,
    on_mesh,
    strided_order,
)
from ckpt_tools.core.mesh_spec import parse_mesh
from ckpt_tools.core.plan import FilePlan, KnownReads, LazyPlans, WriteItem
from ckpt_tools.core.sizes import Sizes
from ckpt_tools.distributed import agreement, dcp_engine, environment, gathering, meeting, messages
from ckpt_tools.distributed import group as group_module
from ckpt_tools.distributed.agreement import identity
from ckpt_tools.distributed.environment import RankPlace
from ckpt_tools.distributed.group import Group
from ckpt_tools.distributed.heartbeat import Heartbeat
from ckpt_tools.distributed.meeting import meet
from ckpt_tools.distributed.run import dry_run, write_here
from ckpt_tools.distributed.run import run as run_conversion
from ckpt_tools.distributed.workers import write_with_workers
from ckpt_tools.errors import (
    AnswerNo,
    CkptError,
    OutputExistsError,
    PeerFailedError,
    UnreadableError,
    UnsupportedError,
    UsageError,
    WriteError,
)
from ckpt_tools.formats import locate, read_index, registry
from ckpt_tools.formats.protocol import ReadOptions
from ckpt_tools.formats.rank_files import exchange as rank_exchange
from ckpt_tools.storage.reader import Files
from ckpt_tools.transforms.base import Transform
from ckpt_tools.transforms.frameworks import FrameworkLayout
from ckpt_tools.transforms.lora import LoraConfig, MergeTransform
from ckpt_tools.transforms.maps import MapTransform, VocabularyTransform
from ckpt_tools.transforms.maps import find as find_map

DATA = Path(__file__).parents[1] / "data" / "checkpoints"
DCP = DATA / "fsdp2_dcp_1d_4r" / "ckpt"
TORCHRUN = {
    "RANK": "0",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "0",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "localhost",
    "MASTER_PORT": "29500",
}


def nothing(_: int) -> None:
    """Take the news and do nothing."""


def resharding(
    out: Path, *, mesh: str = "4x8", ckpt: Path = DCP, only: Section | None = None
) -> Conversion[ReshardPlan]:
    options = ReshardOptions(parse_mesh(mesh), only=only)
    return reshard_of(read_index(str(ckpt)), str(out), WriteOptions(), options)


# --------------------------------------------------------------------------------- environment


@pytest.fixture
def under_torchrun(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Makes this process look like a rank of a job."""

    def become(rank: int) -> None:
        for name, value in {**TORCHRUN, "RANK": str(rank)}.items():
            monkeypatch.setenv(name, value)

    return become


def test_torchrun_is_known_by_its_environment(under_torchrun: Callable[[int], None]) -> None:
    under_torchrun(3)
    assert environment.place() == RankPlace(3, 4, 0, 2)


def test_a_rank_alone_is_no_torchrun_job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "3")
    assert environment.place() is None


def test_rank_0_runs_every_command(under_torchrun: Callable[[int], None]) -> None:
    under_torchrun(0)
    environment.silence_followers(["ls", "ckpt"])


@pytest.mark.parametrize("arguments", [["ls", "ckpt"], ["--version"], ["verify", "x"], []])
def test_other_ranks_leave_what_is_not_shared_to_rank_0(
    under_torchrun: Callable[[int], None], arguments: list[str]
) -> None:
    under_torchrun(2)
    with pytest.raises(SystemExit) as end:
        environment.silence_followers(arguments)
    assert end.value.code == 0


def test_asking_for_torchrun_loads_no_torch() -> None:
    code = (
        "import sys, ckpt_tools.cli.reshard; print('torch' in sys.modules, 'numpy' in sys.modules)"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout == "False False\n"


# ------------------------------------------------------------------------------------ messages


def test_an_error_comes_back_with_its_class_message_and_hint() -> None:
    error = messages.decode(messages.encode(OutputExistsError("out is there", hint="Use --force.")))
    assert (type(error), error.message, error.hint) == (
        OutputExistsError,
        "out is there",
        "Use --force.",
    )


def test_an_error_of_the_system_is_told_in_its_words() -> None:
    error = messages.decode(messages.encode(OSError(28, "No space left on device", "/data/x")))
    assert error.message == "/data/x: No space left on device."


def test_a_fault_of_our_own_is_told_as_one() -> None:
    error = messages.decode(messages.encode(KeyError("x")))
    assert error.message == "ckpt-tools itself failed: KeyError: 'x'"


# --------------------------------------------------------------------------------------- group


class MemoryStore:
    """A key-value store as torch's, within one process."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._lock = threading.Lock()

    def set(self, key: str, value: str) -> None:
        with self._lock:
            self._values[key] = value.encode()

    def get(self, key: str) -> bytes:
        return self._values[key]

    def add(self, key: str, value: int) -> int:
        with self._lock:
            now = int(self._values.get(key, b"0")) + value
            self._values[key] = str(now).encode()
            return now

    def multi_get(self, keys: list[str]) -> list[bytes]:
        return [self._values[key] for key in keys]

    def check(self, keys: list[str]) -> bool:
        return all(key in self._values for key in keys)


class Stopped(Exception):
    """A rank is killed."""


class Ending(MemoryStore):
    """A store whose rank is killed as it waits for the others."""

    def __init__(self, store: MemoryStore) -> None:
        self.__dict__ = store.__dict__

    def add(self, key: str, value: int) -> int:
        if value == 0:
            raise Stopped
        return super().add(key, value)


def run_ranks(count: int, work: Callable[[Group], object]) -> list[object]:
    """What each rank gave or raised, all ranks being threads of this process."""
    store = MemoryStore()
    for rank in range(count):
        store.set(f"beat/{rank}", "0")
    found: list[object] = [None] * count

    def run(rank: int) -> None:
        try:
            place = RankPlace(rank, count, rank, count)
            heartbeat = Heartbeat(store, place)
            with heartbeat.running():
                found[rank] = work(Group(store, place, heartbeat=heartbeat))
        except CkptError as error:
            found[rank] = error

    threads = [threading.Thread(target=run, args=(n,), daemon=True) for n in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
        assert not thread.is_alive(), "the ranks wait for each other forever"
    return found


def test_every_rank_hears_what_rank_0_says() -> None:
    assert run_ranks(4, lambda group: group.broadcast(f"from {group.rank}")) == ["from 0"] * 4


@pytest.mark.parametrize(
    ("dtype", "source", "seen"), [("bf16", "a", True), ("fp16", "a", False), ("bf16", "b", False)]
)
def test_what_an_earlier_attempt_has_written_is_that_of_its_own_command(
    tmp_path: Path, dtype: str, source: str, *, seen: bool
) -> None:
    out = tmp_path / "out"
    out.mkdir()

    def work(group: Group) -> bool:
        agreement.require_same_options(group, {"--dtype": "bf16"})
        if group.rank == 0:
            group.note_written(str(out), "a")
        agreement.require_same_options(group, {"--dtype": dtype})
        return group.has_written(str(out), source)

    assert run_ranks(2, work) == [seen, seen]


def test_what_one_rank_raises_all_raise() -> None:
    def work(group: Group) -> None:
        with group.collective():
            group.barrier()
            if group.rank == 2:
                raise WriteError("the disk is full", hint="Free some.")
            group.barrier()

    for error in run_ranks(4, work):
        assert isinstance(error, WriteError)
        assert (error.message, error.hint) == ("Rank 2: the disk is full", "Free some.")


def test_the_lowest_rank_that_fails_is_told_of() -> None:
    def work(group: Group) -> None:
        with group.collective():
            raise UsageError(f"no, says {group.rank}")

    assert {str(error) for error in run_ranks(3, work)} == {"no, says 0"}


def test_a_fault_at_the_very_end_is_everybodys() -> None:
    def work(group: Group) -> None:
        with group.collective():
            group.barrier()
            if group.rank == 0:
                raise WriteError("cannot rename")

    assert [str(error) for error in run_ranks(3, work)] == ["cannot rename"] * 3


def test_a_rank_that_looks_around_stops_when_another_has_failed() -> None:
    def work(group: Group) -> None:
        with group.collective():
            if group.rank == 1:
                raise WriteError("the disk is full")
            while True:
                group.check_peers()
                time.sleep(0.05)

    assert {str(error) for error in run_ranks(3, work)} == {"Rank 1: the disk is full"}


def test_having_failed_elsewhere_is_never_what_is_told() -> None:
    def work(group: Group) -> None:
        with group.collective():
            if group.rank == 1:
                raise WriteError("the disk is full")
            raise PeerFailedError("Another rank has failed.")

    assert {str(error) for error in run_ranks(3, work)} == {"Rank 1: the disk is full"}


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that count as gone after three seconds, for which no busy machine keeps one waiting."""
    monkeypatch.setenv("CKPT_TOOLS_PEER_TIMEOUT", "3")


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("gone", [0, 2])
def test_a_rank_that_is_gone_ends_the_others_and_is_named(gone: int) -> None:
    def work(group: Group) -> None:
        with group.collective():
            group.barrier()
            if group.rank == gone:
                group._is_over = True
                raise AnswerNo("killed")  # it says nothing to anybody
            group.barrier()

    found = run_ranks(4, work)
    for error in found[:gone] + found[gone + 1 :]:
        assert isinstance(error, PeerFailedError)
        assert error.message.startswith(f"Rank {gone} on ")
        assert error.exit_code == 4


@pytest.mark.parametrize(("here", "absent"), [(0, "1, 2"), (1, "0, 2")])
def test_ranks_that_never_join_end_the_one_that_waits_and_are_named(
    monkeypatch: pytest.MonkeyPatch, here: int, absent: str
) -> None:
    monkeypatch.setenv("CKPT_TOOLS_PEER_TIMEOUT", "1")  # it counts looks, not seconds
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    monkeypatch.setattr(meeting, "_SECOND_LOOK", 0.2)
    with pytest.raises(PeerFailedError) as lost:
        meet(MemoryStore(), RankPlace(here, 3, 0, 1), "job")
    assert f"3 ranks of this torchrun job, {absent} did not join within 2 s" in lost.value.message
    assert "env -u RANK" in (lost.value.hint or "")


@pytest.mark.parametrize("killed", [[0], [1], [0, 1], [0, 1, 2], []])
def test_ranks_meet_those_of_their_own_attempt_alone(killed: list[int]) -> None:
    """``killed`` are the ranks of the first attempt that had come as it ended."""
    store = MemoryStore()
    for rank in killed:
        with pytest.raises(Stopped):
            meet(Ending(store), RankPlace(rank, 3, rank, 3), "job")
    met: dict[int, tuple[str, int]] = {}

    def come(rank: int) -> None:
        time.sleep(0.1 * (2 - rank))  # rank 0 last
        met[rank] = meet(store, RankPlace(rank, 3, rank, 3), "job")

    threads = [threading.Thread(target=come, args=(rank,)) for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    assert len(met) == 3
    assert set(met.values()) == {(met[0][0], int(0 in killed))}


@pytest.mark.usefixtures("impatient")
def test_an_error_that_a_rank_brought_is_told_although_another_is_gone() -> None:
    def work(group: Group) -> None:
        with group.collective():
            group.barrier()
            if group.rank == 2:
                group._is_over = True
                raise AnswerNo("killed")  # it says nothing to anybody
            if group.rank == 1:
                raise WriteError("the disk is full")
            group.barrier()

    found = run_ranks(3, work)
    assert [str(error) for error in found[:2]] == ["Rank 1: the disk is full"] * 2


@pytest.mark.usefixtures("impatient")
def test_a_rank_that_hangs_in_a_collective_with_one_that_is_gone_is_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(group_module, "_LAST_WRITES", 0.5)

    def work(group: Group) -> None:
        group.barrier()
        if group.rank == 1:
            return
        group.guarded(lambda: time.sleep(PATIENCE))

    (error, _) = run_ranks(2, work)
    assert isinstance(error, PeerFailedError)


def test_a_store_that_is_gone_is_told_as_such() -> None:
    class Gone(MemoryStore):
        def add(self, key: str, value: int) -> int:  # noqa: ARG002
            raise RuntimeError("Connection reset by peer")

    with pytest.raises(PeerFailedError, match=r"store at .* is gone \(Connection reset by peer\)"):
        Group(Gone(), here := RankPlace(1, 2, 1, 2), heartbeat=Heartbeat(Gone(), here)).barrier()


# ----------------------------------------------------------------------------------- agreement


_MANY_GROUPS = """
import os
import torch
from torch import distributed as dist
from ckpt_tools.distributed.devices import process_group
from ckpt_tools.distributed.environment import RankPlace
from ckpt_tools.distributed.group import Group
from ckpt_tools.distributed.heartbeat import Heartbeat

os.sched_setaffinity(0, list(os.sched_getaffinity(0))[:1])
store, place = dist.HashStore(), RankPlace(0, 1, 0, 1)
heartbeat = Heartbeat(store, place)
with heartbeat.running():
    group = Group(store, place, heartbeat=heartbeat)
    for _ in range(300):
        with process_group(group):
            dist.all_gather([torch.empty(1)], torch.ones(1))
"""


@pytest.mark.slow
def test_torchs_groups_end_while_gloos_threads_drop_tensors() -> None:
    """On torch 2.6 and one core a plain destroy_process_group hangs within some fifty rounds."""
    subprocess.run([sys.executable, "-c", _MANY_GROUPS], check=True, timeout=PATIENCE)


@pytest.mark.parametrize("leftover", [True, False])
def test_an_output_folder_on_a_nodes_own_disk_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, leftover: bool
) -> None:
    monkeypatch.setattr(agreement, "_PATIENCE", 0.2)
    folders = [tmp_path / "shared", tmp_path / "own"]
    for folder in folders if leftover else folders[:1]:
        (folder / "new").mkdir(parents=True)

    def work(group: Group) -> None:
        folder = str(folders[group.rank])
        agreement.require_same_folder(group, OutputPlace(folder))

    for error in run_ranks(2, work):
        assert isinstance(error, UsageError)
        assert f"Rank 1: {folders[1]} on " in error.message
    assert [path.name for path in folders[0].iterdir()] == ["new"]


@pytest.mark.parametrize(
    ("harm", "words"),
    [
        ("missing", "b cannot be seen"),
        ("short", "b has 3 bytes, and 4 were planned"),
        ("unwritten", "the ranks wrote 7 bytes of 8"),
    ],
)
def test_what_was_written_is_counted_before_the_output_appears(
    tmp_path: Path, harm: str, words: str
) -> None:
    plans = LazyPlans.of([FilePlan(name, 4, ((0, b"data"),), ()) for name in "ab"])
    place = OutputPlace(str(tmp_path))
    for folder in (tmp_path / "new", tmp_path / "unfinished"):
        folder.mkdir()
    (tmp_path / "new" / "a").write_bytes(b"data")
    if harm != "missing":
        (tmp_path / "unfinished" / "b").write_bytes(b"dat" if harm == "short" else b"data")

    def work(group: Group) -> None:
        mine = 4 if group.rank or harm != "unwritten" else 3
        agreement.require_all_written(group, plans, place, nbytes=mine)

    for error in run_ranks(2, work):
        assert isinstance(error, WriteError)
        assert words in error.message
    assert not place.finished(plans) & {"b"}


def test_what_dcp_saved_is_counted_by_its_own_metadata(tmp_path: Path) -> None:
    plan = write_here(resharding(tmp_path / "out", mesh="2"))
    dcp_engine._require_saved(plan, str(tmp_path / "out"))
    write_here(resharding(tmp_path / "less", mesh="2", only="model"))
    with pytest.raises(WriteError, match=r"tensors are not in its \.metadata"):
        dcp_engine._require_saved(plan, str(tmp_path / "less"))
    (tmp_path / "out" / "__1_0.distcp").unlink()
    with pytest.raises(WriteError, match=r"is incomplete: .*__1_0\.distcp"):
        dcp_engine._require_saved(plan, str(tmp_path / "out"))


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_finds_a_wrong_value_in_the_rows_that_it_alone_can_read(
    tmp_path: Path, rank: int
) -> None:
    ranks = DATA / "fsdp2_torchsave_1d_4r" / "ckpt"
    conversion = resharding(tmp_path / "out", mesh="1", ckpt=ranks)
    plan, index = write_here(conversion), conversion.index
    result = read_index(str(tmp_path / "out"))
    target = next(t for t in plan.targets if len(t.entry.chunks) == 4)
    path, offset, _ = _raw(result, target.fqn)
    with Path(path).open("r+b") as file:  # the first element is of rank 0's rows
        file.seek(offset)
        first = file.read(1)
        file.seek(offset)
        file.write(bytes([first[0] ^ 1]))
    chunks = [chunk for e in index.tensors for chunk in e.chunks if 0 not in chunk.box.sizes]
    own = {chunk.data.path for chunk in chunks if chunk.rank == rank}
    assert own
    asked = str(tmp_path / "out"), plan, Files()
    named = {"threads": 1, "own": own}
    if rank == 0:
        with pytest.raises(WriteError, match=re.escape(target.fqn)):
            checking.check(*asked, **named)
    else:
        words = checking.check(*asked, **named)
        assert "comparison on every rank" in words


def _raw(index: CheckpointIndex, fqn: str) -> ByteRange:
    with Files() as files:
        entry = locate(index, files).tensor(fqn)
    assert entry is not None
    return entry.chunks[0].data


# ------------------------------------------------------------------------------------- workers


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """What one process writes for 4x8."""
    out = tmp_path_factory.mktemp("alone") / "out"
    write_here(resharding(out))
    return contents(out)


@pytest.mark.parametrize("workers", [2, 3])
def test_any_number_of_workers_writes_the_same_bytes(
    alone: dict[str, bytes], tmp_path: Path, workers: int
) -> None:
    write_here(resharding(tmp_path / "out"), workers=workers)
    assert contents(tmp_path / "out") == alone


def test_workers_tell_how_many_bytes_they_wrote(alone: dict[str, bytes], tmp_path: Path) -> None:
    told: list[int] = []
    write_here(resharding(tmp_path / "out"), workers=2, listener=Listener(told.append))
    assert sum(told) == sum(map(len, alone.values()))


@pytest.mark.parametrize("workers", [1, 2])
def test_an_export_tells_how_many_bytes_there_will_be(tmp_path: Path, workers: int) -> None:
    told: list[int] = []
    totals: list[int] = []
    out = str(tmp_path / "out")
    conversion = export_of(read_index(str(DCP)), out, WriteOptions(), ExportOptions())
    listener = Listener(told.append, totals.append)
    write_here(conversion, workers=workers, listener=listener)
    written = sum(map(len, contents(tmp_path / "out").values()))
    assert totals == [written]
    assert sum(told) == written


@pytest.mark.parametrize("command", [["export"], ["reshard", "--to-mesh", "2"]])
def test_an_output_that_is_there_is_refused_before_anything_is_read(
    command: list[str], tmp_path: Path
) -> None:
    arguments = [*command, str(tmp_path / "nowhere"), "-o", str(tmp_path)]
    done = run(*arguments)
    assert done.exit_code == 2
    assert "already exists; nothing was read or written" in done.stderr


@pytest.fixture
def orders(tmp_path: Path) -> list[ShareOrder]:
    """What two workers are given, of a source that may be harmed."""
    source, out = tmp_path / "source", tmp_path / "out"
    shutil.copytree(DCP, source)
    out.mkdir()
    plan = plan_reshard(read_index(str(source)), ReshardOptions(parse_mesh("4x8")))
    place, one = OutputPlace(str(out)), WriteOptions(threads=1)
    return [ShareOrder(plan.files, Share(n, 2), place, one, plan.source) for n in range(2)]


def test_what_one_worker_raises_is_raised(orders: list[ShareOrder], tmp_path: Path) -> None:
    os.truncate(tmp_path / "source" / "__2_0.distcp", 100)
    with pytest.raises(UnreadableError, match=r"__2_0\.distcp is truncated"):
        write_with_workers(orders, on_bytes=nothing, seen=KnownCrcs())


@pytest.mark.parametrize(("sizes", "most"), [(Sizes(), 2), (TINY, 1 << 60)])
def test_workers_say_now_and_then_how_much_they_have_written(
    orders: list[ShareOrder], sizes: Sizes, most: int
) -> None:
    told: list[int] = []
    orders = [order._replace(options=WriteOptions(threads=1, sizes=sizes)) for order in orders]
    write_with_workers(orders, on_bytes=told.append, seen=KnownCrcs())
    assert 0 < sum(told) <= orders[0].plans.length
    said = [nbytes for nbytes in told if nbytes]
    assert (2 if sizes == TINY else 0) < len(said) <= most


def test_a_worker_that_dies_is_an_error_that_says_how(orders: list[ShareOrder]) -> None:
    first = next(iter(orders[0].plans))
    broken = first._replace(path="\0")  # no file can have this name: our fault
    plans = LazyPlans.of([broken])
    orders = [order._replace(plans=plans) for order in orders]
    with pytest.raises(WriteError, match=r"Worker \d of 2 died \(exit code 1\)"):
        write_with_workers(orders, on_bytes=nothing, seen=KnownCrcs())


def test_a_worker_that_dies_before_it_has_read_a_large_order_is_the_same_error(
    orders: list[ShareOrder], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", "false")
    large = LazyPlans.of([FilePlan("x", 1 << 22, ((0, bytes(1 << 22)),), ())])
    orders = [order._replace(plans=large) for order in orders]
    with pytest.raises(WriteError, match=r"Worker \d of 2 died \(exit code 1\)"):
        write_with_workers(orders, on_bytes=nothing, seen=KnownCrcs())


# ------------------------------------------------------------------------------------- engines


@pytest.mark.parametrize("engine", ["dcp", "gather"])
@pytest.mark.parametrize("more", [[], ["--dry-run"]])
def test_an_engine_of_a_job_says_how_to_start_one(
    tmp_path: Path, engine: str, more: list[str]
) -> None:
    words = ["reshard", str(DCP), "-o", str(tmp_path / "out"), "--to-mesh", "4x8"]
    done = run(*words, "--engine", engine, *more)
    assert done.exit_code == 2
    assert f"--engine {engine} needs a torchrun job" in done.stderr
    assert "torchrun --nproc-per-node" in done.stderr


@pytest.mark.parametrize("engine", ["dcp", "gather"])
@pytest.mark.parametrize(
    ("more", "why"),
    [
        (["--param-names", "stored"], "takes neither --layout nor --param-names"),
        (["--layout", "plain"], "takes neither --layout nor --param-names"),
        (["--rename", "a=b"], "need --engine copy"),
        (["--untie"], "need --engine copy"),
    ],
)
def test_only_copy_rearranges_what_it_moves(
    tmp_path: Path, engine: str, more: list[str], why: str
) -> None:
    words = ["reshard", str(DCP), "-o", str(tmp_path / "out"), "--to-mesh", "4x8"]
    done = run(*words, "--engine", engine, *more)
    assert done.exit_code == 2
    assert why in done.stderr


def test_workers_of_workers_are_refused(
    tmp_path: Path, under_torchrun: Callable[[int], None]
) -> None:
    under_torchrun(0)

    def make(read: Read) -> Conversion[ReshardPlan]:
        raise AssertionError(read)

    with pytest.raises(UsageError, match="-j 2 starts workers of its own"):
        run_conversion(make, str(tmp_path / "out"), WriteOptions(), workers=2)


@pytest.mark.parametrize("plan", [run_conversion, dry_run])
def test_an_output_in_what_was_read_is_refused_when_that_is_known(
    tmp_path: Path, plan: Callable[..., ReshardPlan]
) -> None:
    source = shutil.copytree(DCP, tmp_path / "source")
    out, asked, options = source / "out", [], ReshardOptions(parse_mesh("2"))

    def make(read: Read) -> Conversion[ReshardPlan]:
        asked.append(read)
        index = read(str(source), ReadOptions())
        return reshard_of(index, str(out), WriteOptions(), options)

    with pytest.raises(UsageError, match="lies inside"):
        plan(make, str(out), WriteOptions())
    with pytest.raises(UsageError, match="lies inside"):
        plan(make, str(out), WriteOptions(sources=(str(source),)))
    assert asked == [read_index]  # the second was refused before
    assert not out.exists()


def test_plans_of_another_checkpoint_have_another_digest() -> None:
    options = ReshardOptions(parse_mesh("2"))
    one = plan_reshard(read_index(str(DCP)), options)
    other = plan_reshard(read_index(str(DCP)), replace(options, only="model"))
    assert one.files.digest == plan_reshard(read_index(str(DCP)), options).files.digest
    assert one.files.digest != other.files.digest


def test_copies_of_one_checkpoint_have_one_identity_and_two_saves_have_two(tmp_path: Path) -> None:
    shutil.copytree(DCP, tmp_path / "copy", copy_function=shutil.copyfile)
    theirs = identity(read_index(str(DCP)), 4096)
    assert identity(read_index(str(tmp_path / "copy")), 4096) == theirs
    with (tmp_path / "copy" / "__3_0.distcp").open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"?")
    assert identity(read_index(str(tmp_path / "copy")), 4096) != theirs


# -------------------------------------------------------------------------------------- layout


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    """Layouts whose mesh dimensions may cut one dimension in any order."""
    shape = tuple(draw(st.lists(st.integers(2, 4), min_size=1, max_size=3)))
    placed = st.sampled_from([Replicate(), Shard(0), Shard(1)])
    placements = tuple(draw(placed) for _ in shape)
    order = tuple(draw(st.permutations(range(len(shape)))))
    return Layout(Mesh(shape), placements, order)


@given(layouts())
def test_torchs_placements_mean_the_layouts_boxes(layout: Layout) -> None:
    from torch.distributed.tensor.placement_types import _StridedShard

    from ckpt_tools.distributed.devices import placements_of

    found = placements_of(layout)
    factors = [p.split_factor if isinstance(p, _StridedShard) else 1 for p in found]
    dims = [p.dim if isinstance(p, Shard) else None for p in layout.placements]
    order = strided_order(layout.mesh.shape, dims, factors)
    again = Layout(layout.mesh, layout.placements, order)
    assert again.boxes((24, 48)) == layout.boxes((24, 48))


def test_a_part_of_a_mesh_replicates_along_the_rest() -> None:
    part = Layout(Mesh((2,), ("dp",)), (Shard(0),))
    whole = on_mesh(part, Mesh((2, 3), ("dp", "tp")))
    assert whole is not None
    assert whole.placements == (Shard(0), Replicate())


def test_a_part_of_a_mesh_without_names_is_nowhere() -> None:
    assert on_mesh(Layout(Mesh((2,)), (Shard(0),)), Mesh((2, 3))) is None


# -------------------------------------------------------------------------------------- gather


@pytest.mark.parametrize(
    "name",
    [
        "fsdp2_torchsave_1d_4r/ckpt",
        "fsdp2_torchsave_hsdp_2x4/ckpt",
        "fsdp2_tp_torchsave_2x2/ckpt",
        "fsdp2_ep_torchsave_2x2/ckpt",
        "dtensor_dtypes_torchsave_4r/ckpt",
        "verl_fsdp2_4r/ckpt/global_step_1/actor",
        "verl_lora_4r/ckpt/global_step_1/actor",
        "torch-2.11-cuda-fsdp2-2/ranks",
    ],
)
def test_headers_of_each_rank_alone_give_the_index_of_all_files(name: str) -> None:
    path = str(DATA / name)
    whole = read_index(path)
    listing = rank_exchange.listing(path)
    world = whole.world_size or 0
    alone = [[file for file in listing if file.rank == rank] for rank in range(world)]
    families = rank_exchange.families_of(alone, where=path)
    headers = [
        rank_exchange.read_headers(families, rank=rank, where=path, options=ReadOptions())
        for rank in range(world)
    ]
    found = rank_exchange.joined_index(path, headers, families)
    assert (found.tensors, found.objects) == (whole.tensors, whole.objects)
    assert (found.mesh, found.world_size, found.problems) == (
        whole.mesh,
        whole.world_size,
        whole.problems,
    )


def in_memory(
    folder: Path,
    item: WriteItem,
    values: np.ndarray,
    *,
    length: int,
    sizes: Sizes | None = None,
) -> bytes:
    """What is in a file of this length when an item of these values is written into it."""

    def write(plans: Sequence[FilePlan], files: Files) -> None:
        write_files(
            LazyPlans.of(plans),
            root=str(folder),
            files=files,
            threads=2,
            max_memory=1 << 20,
            on_bytes=nothing,
        )

    whole = values.view(np.uint8).reshape(*values.shape, values.itemsize)
    plans = [FilePlan("file", length, (), (item,))]
    gathering.write_from_memory(plans, whole, write, sizes or Sizes())
    return (folder / "file").read_bytes()


@pytest.mark.parametrize("long_run", [1, 1 << 18])
@pytest.mark.parametrize("task", [16, 1 << 24])
def test_a_box_of_a_tensor_in_memory_is_written_with_its_crc(
    tmp_path: Path, task: int, long_run: int
) -> None:
    sizes = Sizes(task=task, long_run=long_run)
    values = np.arange(24, dtype=np.float32).reshape(4, 6)
    float32 = dtype_named("float32")
    item = WriteItem(
        "w", "file", 8, Box((1, 2), (2, 3)), float32, float32, KnownReads(()), crc_at=(40,)
    )
    written = in_memory(tmp_path, item, values, length=64, sizes=sizes)
    expected = values[1:3, 2:5].tobytes()
    assert written[8:32] == expected
    assert int.from_bytes(written[40:44], "little") == zlib.crc32(expected)


def test_a_tensor_in_memory_is_cast_as_the_plan_says(tmp_path: Path) -> None:
    values = np.array([1.0, -2.5], dtype=np.float32)
    types = dtype_named("float32"), dtype_named("float16")
    item = WriteItem("w", "file", 0, Box((0,), (2,)), *types, KnownReads(()))
    assert in_memory(tmp_path, item, values, length=4) == values.astype(np.float16).tobytes()


def test_shards_that_torch_cannot_put_together_are_one_clear_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Uneven:
        def full_tensor(self) -> None:
            raise AssertionError("_StridedShard requires even sharding")

    cut = Layout(Mesh((2,)), (Shard(0),))
    float32 = dtype_named("float32")
    entry = TensorEntry("w", ("w",), "model", float32, (3,), (), layout=cut)
    monkeypatch.setattr("torch.distributed.tensor.DTensor.from_local", lambda *_, **__: Uneven())
    monkeypatch.setattr(gathering.Gathering, "_mesh_of", lambda *_: None)
    gather = gathering.Gathering(None, "cpu", None, {}, None, None)
    with pytest.raises(UnsupportedError, match=r"w: torch .* cannot gather it: _StridedShard"):
        gather._whole(entry, cut, Box((0,), (2,)), bytearray(8))


# ------------------------------------------------------------------------------------- command


def test_a_rehearsal_says_what_each_file_will_hold_and_writes_nothing(tmp_path: Path) -> None:
    arguments = ["reshard", str(DCP), "-o", str(tmp_path / "out"), "--to-mesh", "2x2", "--dry-run"]
    done = run(*arguments)
    assert done.exit_code == 0, done.stderr
    assert "not written (--dry-run)" in done.stdout
    assert "__3_0.distcp" in done.stdout
    assert not list(tmp_path.iterdir())


def test_a_rehearsal_of_many_files_is_a_summary_and_its_json_has_them_all(tmp_path: Path) -> None:
    arguments = ["reshard", str(DCP), "-o", str(tmp_path / "out"), "--to-mesh", "64", "--dry-run"]
    lines = run(*arguments).stdout.splitlines()
    assert "The smallest, the middle and the largest of 65 files (--json has all):" in lines
    assert len(lines) < 16
    done = run(*arguments, "--json")
    assert len(json.loads(done.stdout)["files"]) == 65


def test_a_rehearsal_refuses_what_would_be_refused(tmp_path: Path) -> None:
    arguments = ["reshard", str(DCP), "-o", str(tmp_path), "--to-mesh", "2", "--dry-run"]
    done = run(*arguments)
    assert done.exit_code == 2
    assert "already exists" in done.stderr


def test_the_mesh_is_told_in_words(tmp_path: Path) -> None:
    arguments = ["reshard", str(DCP), "-o", str(tmp_path / "out"), "--to-mesh", "4x8"]
    done = run(*arguments)
    assert "4x8 = dp_replicate=4 × dp_shard=8: Replicate, Shard(0)" in done.stderr
    assert done.stdout.count("\n") == 1


# -------------------------------------------------------------------------------------- own share


def shares_of(plan: Plan, out: Path, count: int) -> list[ShareOrder]:
    (out / "new").mkdir(parents=True)
    place, one = OutputPlace(str(out)), WriteOptions(threads=1)
    return [ShareOrder(plan.files, Share(n, count), place, one, plan.source) for n in range(count)]


def test_a_worker_looks_into_no_file_that_its_share_does_not_read(tmp_path: Path) -> None:
    source = tmp_path / "source"
    shutil.copytree(DCP, source)
    mesh = parse_mesh("4")  # that of the source: a worker of four reads one file of four
    plan = plan_reshard(read_index(str(source)), ReshardOptions(mesh), locate=formats.locate_later)
    whole = plan_reshard(read_index(str(DCP)), ReshardOptions(mesh))
    (source / "__3_0.distcp").unlink()
    for order in shares_of(plan, tmp_path / "out", 4)[:3]:
        write_share(order, on_bytes=nothing, seen=KnownCrcs())
    for order in shares_of(whole, tmp_path / "whole", 4)[:3]:
        write_share(order._replace(source=None), on_bytes=nothing, seen=KnownCrcs())
    written = {path.name: path.read_bytes() for path in (tmp_path / "out" / "new").iterdir()}
    assert {"__0_0.distcp", "__1_0.distcp", "__2_0.distcp"} <= written.keys()
    for name, data in written.items():
        assert data == (tmp_path / "whole" / "new" / name).read_bytes()


@pytest.fixture
def looked_at(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The chunks that are located from now on, by their places."""
    looked_at: list[str] = []
    real = registry.locate

    def watched(index: CheckpointIndex, files: Files) -> LocatedIndex:
        chunks = {str(c.stored.data) for e in index.tensors for c in e.chunks if c.codec}
        looked_at.extend(chunks)
        return real(index, files)

    monkeypatch.setattr(registry, "locate", watched)
    return looked_at


def test_workers_locate_each_chunk_once_and_never_the_plans_of_others(
    tmp_path: Path, looked_at: list[str]
) -> None:
    index = read_index(str(DCP))
    plan = plan_reshard(index, ReshardOptions(parse_mesh("4")), locate=formats.locate_later)
    assert not looked_at
    for order in shares_of(plan, tmp_path / "out", 4):
        write_share(order, on_bytes=nothing, seen=KnownCrcs())
    chunks = [chunk for e in index.tensors for chunk in e.chunks if 0 not in chunk.box.sizes]
    assert len(looked_at) == len(set(looked_at)) == len(chunks)


STEPS: dict[str, tuple[str, Transform]] = {
    "map": (
        "torchtitan_llama3_4r/ckpt/checkpoint_full/step-2",
        MapTransform(find_map("torchtitan-llama3-to-hf"), {"head_dim": 4}),
    ),
    "vocabulary": ("torchtitan_llama3_4r/ckpt/checkpoint_full/step-2", VocabularyTransform(30)),
    "lora": ("peft_fsdp2_dcp_4r/ckpt", MergeTransform(LoraConfig(6))),
}


@pytest.mark.parametrize("name", STEPS)
def test_what_a_step_changes_is_located_by_those_who_read_it(
    name: str, tmp_path: Path, looked_at: list[str]
) -> None:
    source, step = STEPS[name]
    index = read_index(str(DATA / source))
    options = ExportOptions(steps=(step,), max_shard_size=2000)
    plan = plan_export(index, options, locate=formats.locate_later)
    assert not looked_at
    whole = plan_export(index, options)
    stored = {str(c.data) for e in index.tensors for c in e.chunks}
    with Files() as files:
        for work in (*plan.works.values(), *whole.works.values()):
            work(files, index)
    seen = []
    for order in shares_of(plan, tmp_path / "out", 3):
        looked_at.clear()
        write_share(order, on_bytes=nothing, seen=KnownCrcs())
        assert len(looked_at) == len(set(looked_at))
        seen.append(set(looked_at))
    assert all(0 < len(one) < len(stored) * 2 / 3 for one in seen)
    for order in shares_of(whole, tmp_path / "whole", 3):
        write_share(order._replace(source=None), on_bytes=nothing, seen=KnownCrcs())
    assert contents(tmp_path / "out" / "new") == contents(tmp_path / "whole" / "new")


@pytest.mark.parametrize("layout", ["plain", "titan", "accelerate", "composer"])
def test_a_layout_is_planned_before_any_chunk_is_located(
    layout: FrameworkLayout, tmp_path: Path, looked_at: list[str]
) -> None:
    options = ReshardOptions(parse_mesh("3"), layout=layout)
    plan = plan_reshard(read_index(str(DCP)), options, locate=formats.locate_later)
    assert not looked_at
    for order in shares_of(plan, tmp_path / "out", 3):
        write_share(order, on_bytes=nothing, seen=KnownCrcs())
    whole = plan_reshard(read_index(str(DCP)), options)
    for order in shares_of(whole, tmp_path / "whole", 3):
        write_share(order._replace(source=None), on_bytes=nothing, seen=KnownCrcs())
    assert contents(tmp_path / "out" / "new") == contents(tmp_path / "whole" / "new")


@pytest.mark.parametrize("jobs", ["1", "2"])
@pytest.mark.parametrize("command", [["export"], ["reshard", "--to-mesh", "2"]])
def test_an_item_that_is_damaged_is_refused_by_whoever_reads_it(
    command: list[str], jobs: str, tmp_path: Path
) -> None:
    source, out = tmp_path / "source", tmp_path / "out"
    shutil.copytree(DCP, source)
    entry = next(e for e in read_index(str(DCP)).tensors if e.section == "model")
    item = entry.chunks[1].data
    with open(source / Path(item.path).name, "r+b") as file:
        file.seek(item.offset)
        file.write(bytes(item.length))
    done = run(*command, source, "-o", out, "-j", jobs)
    assert done.exit_code == 3
    assert Path(item.path).name in done.stderr
    assert not out.exists()


def test_what_workers_wrote_of_chunks_they_located_is_checked(tmp_path: Path) -> None:
    arguments = ["reshard", str(DCP), "-o", str(tmp_path / "out"), "--to-mesh", "2x2", "-j", "2"]
    done = run(*arguments, "--check")
    assert done.exit_code == 0, done.stderr
    assert (tmp_path / "out" / "ckpt_tools_proof.json").exists()


@pytest.mark.parametrize("name", ["fsdp2_dcp_1d_4r", "hf_sharded_safetensors"])
@pytest.mark.parametrize("form", ["dcp", "ranks", "safetensors", "torch"])
def test_a_plan_leaves_no_byte_of_its_files_out(name: str, form: str) -> None:
    index = read_index(str(DATA / name / "ckpt"))
    plan: Plan
    if form in ("dcp", "ranks"):
        plan = plan_reshard(index, ReshardOptions(parse_mesh("3"), format=form))
    else:
        options = ExportOptions(format=form, only=None, max_shard_size=2000)
        plan = plan_export(index, options, single_file="x.pt" if form == "torch" else None)
    for file in plan.files:
        assert sum(task.nbytes for task in cut(file, 4096)) == file.length


# ------------------------------------------------------------------- what was started by others


@pytest.mark.parametrize(
    ("given", "is_refused"),
    [
        ({"SLURM_PROCID": "1"}, True),
        ({"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "4"}, True),
        ({"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"}, False),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "4"}, False),  # a batch script itself
        ({"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2"}, True),
        ({"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1"}, False),
    ],
)
@pytest.mark.parametrize("command", [["export"], ["reshard", "--to-mesh", "2"]])
def test_one_task_of_several_without_torchrun_is_refused(
    given: dict[str, str], command: list[str], tmp_path: Path, *, is_refused: bool
) -> None:
    words = [command[0], str(tmp_path / "nothing"), "-o", str(tmp_path / "out"), *command[1:]]
    done = run(*words, env=given)
    assert ("as task" in done.stderr) == is_refused
    assert done.exit_code == (2 if is_refused else 3)


def test_an_option_that_differs_on_one_rank_is_named() -> None:
    def work(group: Group) -> None:
        texts = {"--to-mesh": "2", "--dtype": "bfloat16" if group.rank == 2 else "float16"}
        agreement.require_same_options(group, texts)

    for error in run_ranks(3, work):
        assert isinstance(error, UsageError)
        assert error.message == "Rank 2: --dtype differs: bfloat16 here, and float16 on rank 0."


def test_rank_0_gets_what_all_ranks_bring() -> None:
    brought: list[list[bytes]] = []

    def work(group: Group) -> None:
        brought.append(group.gather(bytes([group.rank]) * (3 << 20)))

    assert not any(run_ranks(2, work))
    assert sorted(map(len, brought)) == [0, 2]
    assert max(brought, key=len) == [bytes([rank]) * (3 << 20) for rank in range(2)]
