"""Verify: what is hurt, what is whole, who holds the lost rows, and what cannot be known."""

import gc
import os
import random
import shutil
import subprocess
import sys
import zlib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from damages import Victim, Zip, make_stale, zips
from hypothesis import given, settings
from hypothesis import strategies as st
from size_records import DEFAULT

from ckpt_tools import formats
from ckpt_tools.copying.parallel import ignore_bytes
from ckpt_tools.core.crc import KnownCrcs
from ckpt_tools.core.dtypes import BY_NAME
from ckpt_tools.core.geometry import Box
from ckpt_tools.core.index import ByteRange, CheckpointIndex, Chunk, TensorEntry
from ckpt_tools.core.sizes import Sizes
from ckpt_tools.errors import CheckpointError
from ckpt_tools.formats.zip.archives import Archives
from ckpt_tools.formats.zip.read import Archive
from ckpt_tools.proof import damage
from ckpt_tools.proof.canonical_names import Inside, canonical_names
from ckpt_tools.proof.consistency import compare_model_and_optimizer
from ckpt_tools.proof.damage import IntervalMap, read_everything
from ckpt_tools.proof.verify import (
    VerifyReport,
    bytes_to_read,
    describe,
    holes,
    verify,
    verify_quick,
)
from ckpt_tools.storage.reader import Files, Window

DATA = Path(__file__).parents[1] / "data"
CHECKPOINTS = DATA / "checkpoints"

WHOLE = [
    "fsdp2_dcp_1d_4r/ckpt",
    "fsdp2_dcp_hsdp_2x4/ckpt",
    "fsdp2_shard1_dcp_4r/ckpt",
    "fsdp2_tp_dcp_2x2/ckpt",
    "fsdp2_tied_dcp_4r/ckpt",
    "dcp_zstd_4r/ckpt",
    "dcp_serialization_safetensors_4r/ckpt",
    "fsdp2_torchsave_hsdp_2x4/ckpt",
    "fsdp1_sharded_hsdp2x2_torchsave/ckpt",
    "fsdp2_full_torchsave_4r/ckpt/consolidated.pt",
    "fsdp2_full_torchsave_4r/ckpt/consolidated_legacy.pt",
    "hf_sharded_safetensors/ckpt",
    "dcp_hf_sharded_4r/ckpt",
    "torchtitan_llama3_4r/ckpt/checkpoint_full/step-2",
    "composer-0.32.1-fsdp_sharded/ep0-ba1",
    "verl_fsdp2_4r/ckpt/global_step_1/actor",
    "torch-2.11-cpu-fsdp2-4x8/ranks",
    "torch-2.9.1-c2_fsdp1_hsdp/dcp",
]


def full(path: Path | str, *, threads: int = 2) -> VerifyReport:
    with Files() as files:
        return verify(formats.read_index(str(path)), files, threads=threads)


def quick(path: Path | str) -> VerifyReport:
    with Files() as files:
        return verify_quick(formats.read_index(str(path)), files)


def copied(name: str, folder: Path) -> Path:
    target = folder / "ckpt"
    shutil.copytree(CHECKPOINTS / name, target)
    for path in target.iterdir():
        path.chmod(0o644)
    return target


def flip(path: str | Path, place: int) -> None:
    content = bytearray(Path(path).read_bytes())
    content[place] ^= 1
    Path(path).write_bytes(content)


def located(path: Path) -> CheckpointIndex:
    with Files() as files:
        return formats.locate(formats.read_index(str(path)), files)


# -------------------------------------------------------------------------------------------- whole


@pytest.mark.parametrize("name", WHOLE)
def test_real_checkpoints_are_whole(name: str) -> None:
    report = full(CHECKPOINTS / name)
    assert (report.problems, report.damaged, report.damaged_objects) == ((), (), ())


@pytest.mark.parametrize("name", WHOLE)
def test_real_checkpoints_are_whole_by_their_headers(name: str) -> None:
    assert quick(CHECKPOINTS / name).problems == ()


def test_every_record_of_an_archive_is_checked() -> None:
    path = CHECKPOINTS / "fsdp2_full_torchsave_4r" / "ckpt" / "consolidated.pt"
    reading = full(path).reading
    assert reading is not None
    assert reading.crcs == 52
    assert reading.plain_bytes == 0


@pytest.mark.parametrize(
    "name", ["fsdp2_dcp_1d_4r/ckpt", "fsdp2_full_torchsave_4r/ckpt/consolidated.pt"]
)
def test_a_record_read_in_parts_has_the_same_checksum(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = full(CHECKPOINTS / name).reading
    monkeypatch.setattr("ckpt_tools.formats.zip.archives._PART_BYTES", 100)
    parts = full(CHECKPOINTS / name, threads=3).reading
    assert whole is not None
    assert parts is not None
    assert parts.parts
    assert parts.damages == []
    assert (parts.crcs, parts.checked_bytes) == (whole.crcs, whole.checked_bytes)


def test_a_damage_is_found_in_a_record_read_in_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = copied("fsdp2_shard1_dcp_4r/ckpt", tmp_path)
    chunks = [chunk.data for entry in located(path).tensors for chunk in entry.chunks]
    data = max(chunks, key=lambda data: data.length)
    monkeypatch.setattr("ckpt_tools.formats.zip.archives._PART_BYTES", 20)
    assert data.length > 40
    flip(data.path, data.offset + 30)
    (problem,) = full(path).problems
    assert "record 'data/0'" in problem.message
    assert "the archive says" in problem.message


def test_a_wrong_crc_is_damage_and_only_what_is_missing_is_not_complete(tmp_path: Path) -> None:
    path = copied("fsdp2_shard1_dcp_4r/ckpt", tmp_path)
    data = located(path).tensors[0].chunks[0].data
    flip(data.path, data.offset)
    assert full(path).verdict == "DAMAGED"
    (path / "__3_0.distcp").unlink()
    assert full(path).verdict == "NOT COMPLETE"


@pytest.mark.parametrize("name", ["ranks", "one.pt"])
def test_what_only_another_library_reads_is_named_and_is_whole(name: str) -> None:
    path = DATA / "cases" / "D04_lowbit_optimizer" / name
    for report in (full(path), quick(path)):
        assert (report.verdict, report.damaged, report.damaged_objects) == ("complete", (), ())
        assert "optim.state.0.exp_avg_sq: a tensor of class torchao" in report.unread[0].message
        assert {"optim.state.0.exp_avg", "optim.state.0.exp_avg_sq"} <= report.unread[0].about


def test_no_archive_that_was_checked_stays_in_memory() -> None:
    gc.collect()
    gc.disable()  # as on the command line
    try:
        full(CHECKPOINTS / "fsdp2_dcp_1d_4r" / "ckpt")
        assert not [one for one in gc.get_objects() if type(one) is Archive]
    finally:
        gc.enable()


def test_bytes_without_checksums_are_counted() -> None:
    path = CHECKPOINTS / "hf_sharded_safetensors" / "ckpt"
    reading = full(path).reading
    assert reading is not None
    assert (reading.crcs, reading.plain_bytes) == (
        0,
        sum(p.stat().st_size for p in path.glob("model-*")),
    )


def test_progress_tells_every_byte() -> None:
    seen: list[int] = []
    index = formats.read_index(str(CHECKPOINTS / "hf_sharded_safetensors" / "ckpt"))
    with Files() as files:
        verify(index, files, on_bytes=seen.append)
    assert sum(seen) == bytes_to_read(index)


def test_quick_loads_neither_torch_nor_numpy() -> None:
    path = CHECKPOINTS / "fsdp2_dcp_1d_4r" / "ckpt"
    code = (
        "import sys\nfrom ckpt_tools import formats\n"
        "from ckpt_tools.proof.verify import verify_quick\n"
        "from ckpt_tools.storage.reader import Files\n"
        f"assert verify_quick(formats.read_index({str(path)!r}), Files()).whole\n"
        "print([name for name in ('torch', 'numpy') if name in sys.modules])"
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-c", code]
    run = subprocess.run(command, check=False, capture_output=True, text=True, env=env)
    assert run.stdout == "[]\n"


# ------------------------------------------------------------------------------------- what is lost


def test_a_missing_dcp_file_costs_the_rows_of_its_rank(tmp_path: Path) -> None:
    path = copied("fsdp2_shard1_dcp_4r/ckpt", tmp_path)
    (path / "__2_0.distcp").unlink()
    report = quick(path)
    lost = {hurt.fqn: (hurt.lost, hurt.ranks) for hurt in report.damaged}
    assert lost["model.a.weight"] == ((Box((0, 4), (6, 2)),), (2,))
    assert [state.rank for state in report.ranks if not state.whole] == [2]


def test_what_no_damage_touches_is_whole(tmp_path: Path) -> None:
    path = copied("fsdp2_shard1_dcp_4r/ckpt", tmp_path)
    entry = located(path).tensor("model.a.weight")
    assert entry is not None
    flip(entry.chunks[1].data.path, entry.chunks[1].data.offset)
    report = full(path)
    assert [hurt.fqn for hurt in report.damaged] == ["model.a.weight"]
    assert report.damaged[0].lost == (entry.chunks[1].box,)


def test_a_damage_is_told_with_its_record_and_both_crcs(tmp_path: Path) -> None:
    path = copied("fsdp2_shard1_dcp_4r/ckpt", tmp_path)
    data = located(path).tensors[0].chunks[0].data
    flip(data.path, data.offset)
    (problem,) = full(path).problems
    assert "record 'data/0'" in problem.message
    assert "the archive says" in problem.message


def test_a_damaged_pickle_is_told_once(tmp_path: Path) -> None:
    path = copied("fsdp2_shard1_dcp_4r/ckpt", tmp_path)
    victim = Victim.__new__(Victim)
    victim.base, victim.path = "dcp", path
    archive: Zip = zips(victim)[0]
    flip(archive.data.path, archive.records["data.pkl"].offset + 30)
    report = full(path)
    assert len(report.problems) == 1
    assert len(report.damaged) == 1


def test_a_damaged_object_is_named(tmp_path: Path) -> None:
    path = copied("fsdp2_dcp_hsdp_2x4/ckpt", tmp_path)
    victim = Victim.__new__(Victim)
    victim.base, victim.path = "dcp", path
    index = formats.read_index(str(path))
    entry = index.objects[3]
    (archive,) = [found for found in zips(victim) if found.data == entry.data]
    flip(entry.data.path, archive.records["data.pkl"].offset + 3)
    report = full(path)
    assert report.damaged_objects == (entry.fqn,)
    assert report.damaged == ()


def test_a_missing_rank_file_costs_its_rows() -> None:
    report = quick(DATA / "cases" / "C33_missing_ranks" / "half")
    hurt = {one.fqn: (one.lost, one.ranks) for one in report.damaged}
    assert hurt["w"] == ((Box((0, 0), (8, 2)),), (0, 1, 2, 3))


@pytest.mark.parametrize("length", [0, 2_000])
@pytest.mark.parametrize("name", ["fsdp2_torchsave_1d_4r", "fsdp2_torchsave_legacy_4r"])
def test_a_rank_file_of_which_nothing_can_be_read_is_one_problem_of_its_rank(
    tmp_path: Path, name: str, length: int
) -> None:
    path = copied(f"{name}/ckpt", tmp_path)
    os.truncate(path / "model_rank2.pt", length)
    report = full(path)
    (problem,) = report.problems
    assert "model_rank2.pt is " in problem.message
    assert [state.rank for state in report.ranks if not state.whole] == [2]


def test_a_cut_file_costs_what_lies_behind_the_cut(tmp_path: Path) -> None:
    path = copied("fsdp2_shard1_dcp_4r/ckpt", tmp_path)
    index = formats.read_index(str(path))
    in_file = sorted(
        (chunk.data.offset, entry.fqn)
        for entry in index.tensors
        for chunk in entry.chunks
        if chunk.data.path.endswith("__1_0.distcp")
    )
    cut = in_file[len(in_file) // 2][0]
    os.truncate(path / "__1_0.distcp", cut)
    assert {hurt.fqn for hurt in quick(path).damaged} == {fqn for at, fqn in in_file if at >= cut}


# ----------------------------------------------------------------------------------------- replicas


def test_a_missing_rank_whose_rows_are_in_a_replica_loses_nothing(tmp_path: Path) -> None:
    path = copied("fsdp2_torchsave_hsdp_2x4/ckpt", tmp_path)
    (path / "model_rank6.pt").unlink()
    report = full(path)
    assert not report.whole
    assert report.damaged == ()
    assert "Every row of every tensor is still present" in report.notes[-1]


def unwatched(index: CheckpointIndex) -> CheckpointIndex:
    """The index of before the damage, as if the files had been as they are now."""
    return replace(index, files=tuple(file._replace(state=None) for file in index.files))


def test_a_damaged_chunk_that_a_replica_holds_is_told(tmp_path: Path) -> None:
    path = copied("fsdp2_torchsave_hsdp_2x4/ckpt", tmp_path)
    index = located(path)
    entry = next(e for e in index.tensors if len(e.chunks) == 4)
    chunk = entry.chunks[0]
    flip(chunk.data.path, chunk.data.offset)
    with Files() as files:
        report = verify(unwatched(index), files)  # reading now would see the CRC
    rescue = [one for one in report.rescued if one.fqn == entry.fqn]
    assert [(one.box, one.held_by) for one in rescue] == [(chunk.box, chunk.replicas[0].path)]


def test_replicas_that_differ_are_a_problem(tmp_path: Path) -> None:
    path = copied("fsdp2_torchsave_hsdp_2x4/ckpt", tmp_path)
    index = located(path)
    entry = next(e for e in index.tensors if len(e.chunks) == 4)
    other = entry.chunks[0].replicas[0]
    flip(other.path, other.offset)
    victim = Victim.__new__(Victim)
    victim.base, victim.path = "ranks-hsdp", path
    for archive in zips(victim):
        if archive.data.path == other.path:
            _forge(archive)
    with Files() as files:
        report = verify(unwatched(index), files)
    assert [problem.about for problem in report.problems] == [{entry.fqn}]
    assert "hold different ones" in report.problems[0].message


def _forge(archive: Zip) -> None:
    """Make the CRCs of an archive fit its bytes again."""
    content = bytearray(Path(archive.data.path).read_bytes())
    for record in archive.records.values():
        crc = zlib.crc32(content[record.offset : record.offset + record.length])
        if record.crc is not None and crc != record.crc:
            at = content.index(record.crc.to_bytes(4, "little"), archive.directory)
            content[at : at + 4] = crc.to_bytes(4, "little")
    Path(archive.data.path).write_bytes(content)


# ------------------------------------------------------------------------------------------- halves


def tensor(fqn: str, section: str) -> TensorEntry:
    chunk = Chunk(Box((0,), (1,)), ByteRange("f", 0, 4))
    path = tuple(fqn.split("/"))
    return TensorEntry(".".join(path), path, section, BY_NAME["float32"], (1,), (chunk,))  # type: ignore[arg-type]


def halves(*names: str) -> tuple[int, list[str]]:
    tensors = [tensor(name, "optim" if name.startswith("optim") else "model") for name in names]
    tensors.sort(key=lambda entry: entry.fqn)
    index = CheckpointIndex("ckpt", "dcp", tuple(tensors))
    problems, notes = compare_model_and_optimizer(index, canonical_names(index))
    return len(problems), notes


def test_a_frozen_parameter_is_a_note() -> None:
    problems, notes = halves("model/w", "model/frozen", "optim/state/w/exp_avg")
    assert problems == 0
    assert "frozen" in notes[0]


def test_state_for_another_model_is_a_problem() -> None:
    problems, _ = halves("model/w", "optim/state/x/exp_avg", "optim/state/y/exp_avg")
    assert problems == 1


@pytest.mark.parametrize("optim", ["optim", "optim_a"])
def test_a_model_and_an_optimizer_of_any_names_belong_together(optim: str) -> None:
    names = ("policy/w", f"{optim}/state/w/exp_avg", f"{optim}/param_groups/0/lr")
    assert halves(*names) == (0, [])
    assert halves("policy.w", *names[1:]) == (0, [])  # as safetensors has it
    problems, _ = halves("policy/w", f"{optim}/state/x/exp_avg", f"{optim}/state/y/exp_avg")
    assert problems == 1


def test_state_for_a_fused_parameter_is_a_note() -> None:
    names = [
        f"{half}{i}{end}"
        for i in range(5)
        for half, end in (("model/", ""), ("optim/state/", "/m"))
    ]
    problems, notes = halves(*names, "optim/state/fused/m")
    assert problems == 0
    assert "fused" in notes[-1]


def test_one_state_for_what_the_model_splits_is_said_to_be_that() -> None:
    notes = full(CHECKPOINTS / "torchtitan_llama3_4r" / "ckpt" / "checkpoint_full" / "step-2").notes
    (note,) = [note for note in notes if "optimizer" in note]
    assert note.startswith("The optimizer has one state for what is split in the model: ")
    assert all(f"qkv_linear.{part}.weight" in note for part in ("wqkv", "wq", "wk", "wv"))


def test_wrapped_names_belong_to_bare_ones() -> None:
    assert halves("model/_orig_mod.w", "optim/state/w/exp_avg") == (0, [])


def test_state_by_number_is_left_alone() -> None:
    problems, notes = halves("model/w", "optim/state/0/exp_avg")
    assert problems == 0
    assert "by number" in notes[0]


def test_a_parameter_with_less_state_than_others_is_a_note() -> None:
    names = ("model/v", "model/w", "optim/state/v/a", "optim/state/v/b", "optim/state/w/a")
    assert "No b for" in halves(*names)[1][0]


def test_no_optimizer_is_no_fault() -> None:
    assert halves("model/w") == (0, [])


def test_the_class_that_composer_puts_above_the_state_is_seen_through() -> None:
    index = formats.read_index(str(CHECKPOINTS / "composer-0.32.1-fsdp_sharded" / "ep0-ba1"))
    inside = canonical_names(index)
    name = inside["state.optimizers.AdamW.state.module.0.down.bias.exp_avg"]
    assert name == Inside("optim", "AdamW.state.0.down.bias.exp_avg")


# -------------------------------------------------------------------------------------------- holes


@pytest.mark.parametrize(
    ("shape", "boxes", "expected"),
    [
        ((4, 2), [], [Box((0, 0), (4, 2))]),
        ((4, 2), [Box((0, 0), (4, 2))], []),
        ((6,), [Box((0,), (2,)), Box((4,), (2,))], [Box((2,), (2,))]),
        ((6, 2), [Box((2, 0), (2, 2))], [Box((0, 0), (2, 2)), Box((4, 0), (2, 2))]),
        ((2, 6), [Box((0, 0), (2, 2)), Box((0, 4), (2, 2))], [Box((0, 2), (2, 2))]),
        (
            (4, 4),
            [Box((0, 0), (2, 2)), Box((2, 2), (2, 2))],
            [Box((0, 2), (2, 2)), Box((2, 0), (2, 2))],
        ),
        ((), [], [Box((), ())]),
        ((), [Box((), ())], []),
        ((0, 3), [], []),
    ],
)
def test_holes_are_what_no_box_holds(
    shape: tuple[int, ...], boxes: list[Box], expected: list[Box]
) -> None:
    assert holes(shape, boxes) == expected


@pytest.mark.parametrize(
    ("box", "shape", "expected"),
    [
        (Box((2, 0), (2, 3)), (6, 3), "rows 2:4 of 6"),
        (Box((0, 1), (6, 1)), (6, 3), "[0:6, 1:2] of [6, 3]"),
        (Box((0,), (6,)), (6,), "all of [6]"),
        (Box((), ()), (), "its one value"),
    ],
)
def test_holes_are_told_as_rows(box: Box, shape: tuple[int, ...], expected: str) -> None:
    assert describe(box, shape) == expected


def test_two_names_that_become_one_do_not_keep_verify_from_its_work() -> None:
    index = formats.read_index(str(CHECKPOINTS / "hf_sharded_safetensors" / "ckpt"))
    first, second, *_ = index.tensors
    twin = replace(second, path=(f"_orig_mod.{first.fqn}",))
    with Files() as files:
        report = verify_quick(replace(index, tensors=(first, twin)), files)
    assert report.whole
    assert "are both" in report.notes[0]


# ------------------------------------------------------------------------------------------- spans

ranges = st.builds(ByteRange, st.sampled_from("ab"), st.integers(0, 30), st.integers(1, 9))


@given(st.lists(ranges, max_size=12), ranges)
def test_spans_find_every_range_that_meets_another(held: list[ByteRange], asked: ByteRange) -> None:
    def bytes_of(data: ByteRange) -> set[tuple[str, int]]:
        return {(data.path, data.offset + i) for i in range(data.length)}

    expected = [i for i, data in enumerate(held) if bytes_of(data) & bytes_of(asked)]
    assert sorted(IntervalMap(held).meeting(asked)) == expected


def test_nothing_meets_no_bytes() -> None:
    assert IntervalMap([ByteRange("a", 0, 9)]).meeting(ByteRange("a", 4, 0)) == []


boxes_in_4x5 = st.builds(
    lambda a, b, c, d: Box((min(a, b), min(c, d)), (abs(a - b), abs(c - d))),
    st.integers(0, 4),
    st.integers(0, 4),
    st.integers(0, 5),
    st.integers(0, 5),
)


@given(st.lists(boxes_in_4x5, max_size=6))
def test_holes_are_held_once_and_boxes_never(boxes: list[Box]) -> None:
    times = np.zeros((4, 5), int)
    covered = np.zeros((4, 5), bool)
    for box in holes((4, 5), boxes):
        times[_slices(box)] += 1
    for box in boxes:
        covered[_slices(box)] = True
    assert (times == ~covered).all()


def _slices(box: Box) -> tuple[slice, ...]:
    return tuple(slice(a, b) for a, b in zip(box.offsets, box.ends, strict=True))


def reported(folder: Path, *, alike: bool) -> object:
    """What verify says, with or without telling archives by those opened before."""
    with pytest.MonkeyPatch.context() as patch, Files() as files:
        if not alike:
            patch.setattr(Archives, "_known", lambda *_args: None)
        report = verify(formats.read_index(str(folder)), files, threads=2)
    assert report.reading is not None
    reading = report.reading.crcs, report.reading.checked_bytes, report.reading.plain_bytes
    problems = [(type(problem), problem.message, problem.about) for problem in report.problems]
    return problems, report.damaged, report.damaged_objects, report.ranks, reading


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fsdp2_dcp_1d_4r/ckpt", "fsdp2_bf16_fp32optim_dcp_4r/ckpt"])
@settings(max_examples=20)
@given(data=st.data())
def test_archives_like_good_ones_are_checked_as_when_each_is_opened(
    name: str, data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("damaged") / "ckpt"
    shutil.copytree(CHECKPOINTS / name, folder)
    for _ in range(data.draw(st.integers(0, 4))):
        path = data.draw(st.sampled_from(sorted(folder.glob("*.distcp"))))
        content = bytearray(path.read_bytes())
        content[data.draw(st.integers(0, len(content) - 1))] ^= data.draw(st.integers(1, 255))
        path.write_bytes(content)
    assert reported(folder, alike=True) == reported(folder, alike=False)
    shutil.rmtree(folder)


def test_few_archives_of_a_directory_are_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[Archive] = []
    real = Archives._learn

    def learn(archives: Archives, archive: Archive) -> None:
        opened.append(archive)
        real(archives, archive)

    monkeypatch.setattr(Archives, "_learn", learn)
    folder = CHECKPOINTS / "fsdp2_bf16_fp32optim_dcp_4r/ckpt"
    index = formats.read_index(str(folder))
    with Files() as files:
        assert verify(index, files, threads=1).whole
    items = sum(len(entry.chunks) for entry in index.tensors)
    assert len(opened) < items / 3


def test_small_items_that_follow_one_another_are_read_together(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reads: list[int] = []
    real = Files.read_some

    def read_some(files: Files, path: str, offset: int, buffer: memoryview, *, least: int) -> int:
        reads.append(real(files, path, offset, buffer, least=least))
        return reads[-1]

    index = formats.read_index(str(CHECKPOINTS / "fsdp2_bf16_fp32optim_dcp_4r/ckpt"))
    monkeypatch.setattr(Files, "read_some", read_some)
    with Files(sizes=DEFAULT) as files:
        read = read_everything(
            index, files, seen=KnownCrcs(), threads=1, on_bytes=lambda _count: None
        )
    assert not read.damages
    items = sum(len(entry.chunks) for entry in index.tensors)
    assert len(reads) < items / 10
    assert sum(reads) < 2 * bytes_to_read(index)


def test_one_thread_looks_up_what_a_copy_has_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    index = formats.read_index(str(CHECKPOINTS / WHOLE[0]))
    chosen: list[int] = []
    real = damage.choose_threads

    def choose(nbytes: int, sizes: Sizes, *, lanes: int) -> int:
        chosen.append(real(nbytes, sizes, lanes=lanes))
        return chosen[-1]

    monkeypatch.setattr(damage, "choose_threads", choose)
    nothing, everything = KnownCrcs(), KnownCrcs()
    for file in index.files:
        everything.add(ByteRange(file.path, 0, file.length or 0), 0)
    for seen in (nothing, everything):
        with Files(sizes=Sizes(thread_work=1)) as files:
            read_everything(index, files, seen=seen, threads=None, on_bytes=ignore_bytes)
    assert chosen[0] > 1 == chosen[1]


def test_what_was_to_be_read_ahead_and_is_not_there_keeps_nothing_from_being_read(
    tmp_path: Path,
) -> None:
    path = str(tmp_path / "f")
    Path(path).write_bytes(bytes(range(100)))
    with Files() as files:
        window = Window(files, 64)
        block, at = window.block(path, 90, 5, until=1000)
        assert block[at : at + 5] == bytes(range(90, 95))
        assert b"".join(map(bytes, window.views(path, 10, 90))) == bytes(range(10, 100))
        with pytest.raises(CheckpointError, match="100 bytes, the index needs 101"):
            list(window.views(path, 60, 41))


def test_a_file_of_another_save_is_noted_if_the_optimizer_counts_steps_in_several(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    victim = Victim("dcp-hsdp", tmp_path, random.Random(0))  # noqa: S311 (no secret)
    steps = [e for e in victim.index().tensors if e.fqn.endswith(".step")]
    assert len({entry.chunks[0].data.path for entry in steps}) > 1
    assert not any("different steps" in note for note in full(victim.path).notes)
    stale = Path(steps[0].chunks[0].data.path)
    monkeypatch.setattr(victim, "data_files", lambda: [stale])
    make_stale(victim)
    report = full(victim.path)
    (note,) = (note for note in report.notes if "different steps" in note)
    assert report.whole
    assert stale.name in note
    assert "of 2 saves" in note
