"""A framework's folder is one checkpoint: its parts are joined under the names that each has."""

import json
import shlex
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from reader_contract import DATA, truth_of, whole
from running import run

import ckpt_tools
from ckpt_tools import api, formats
from ckpt_tools.analysis import inspection, summary
from ckpt_tools.convert.export import ExportOptions, plan_export
from ckpt_tools.convert.reshard import ReshardOptions, plan_reshard
from ckpt_tools.convert.write import WriteOptions
from ckpt_tools.core.layout import Mesh
from ckpt_tools.errors import CkptError
from ckpt_tools.proof.verify import verify
from ckpt_tools.storage.reader import Files

REAL = DATA / "checkpoints"
AS_ACCELERATE = ReshardOptions(Mesh((2,)), layout="accelerate")
TRAINER = REAL / "transformers_trainer_fsdp2_4r" / "ckpt" / "checkpoint-2"
SHARDED = REAL / "accelerate_fsdp2_sharded_llama_tied_4r" / "ckpt" / "state"
FULL = REAL / "accelerate_fsdp1_full_llama_tied_4r" / "ckpt" / "state"
LIGHTNING = REAL / "lightning_fsdp_sharded_4r" / "ckpt" / "state.ckpt"
FOLDERS = [
    (TRAINER, "pytorch_model_fsdp_0", "transformers"),
    (SHARDED, "pytorch_model_fsdp_0", "accelerate"),
    (FULL, "pytorch_model_fsdp.bin", "accelerate"),
    (LIGHTNING, ".metadata", "lightning"),
]


@pytest.mark.parametrize(("folder", "model", "framework"), FOLDERS)
def test_model_and_optimizer_of_a_folder_are_one_checkpoint(
    folder: Path, model: str, framework: str
) -> None:
    index = formats.read_index(str(folder))
    assert index.framework == framework
    assert inspection.resume_verdict(index).yes
    assert summary.sections_of(index)["other"].objects
    assert (folder / model).exists()
    assert not [note for note in index.notes if "not read" in note]


@pytest.mark.parametrize(("folder", "model", "framework"), FOLDERS[:3])
def test_a_folder_exports_what_its_model_alone_does(
    folder: Path, model: str, framework: str
) -> None:
    del framework
    both, alone = (
        plan_export(formats.read_index(str(p)), ExportOptions()) for p in (folder, folder / model)
    )
    names = [[item.fqn for file in plan.files for item in file.items] for plan in (both, alone)]
    assert names[0] == names[1]


@pytest.mark.parametrize(("folder", "model", "framework"), FOLDERS)
def test_every_tensor_of_a_folder_is_the_true_one(folder: Path, model: str, framework: str) -> None:
    del model, framework
    top = next(parent for parent in folder.parents if (parent / "truth.safetensors").exists())
    truth = truth_of(top)
    index = formats.read_index(str(folder))
    with Files() as files:
        located = formats.locate(index, files)
        found = {entry.fqn: whole(entry, files) for entry in located.tensors}
    shared = {fqn for fqn in found if fqn in truth}
    assert sum(fqn.startswith("model.") for fqn in shared) == sum(
        entry.section == "model" for entry in index.tensors
    )
    assert all(found[fqn] == truth[fqn].data for fqn in shared)


def test_a_hurt_file_of_other_state_is_found_by_its_crc(tmp_path: Path) -> None:
    folder = shutil.copytree(TRAINER, tmp_path / "checkpoint-2")
    path = folder / "rng_state_2.pth"
    data = bytearray(path.read_bytes())
    place = data.find(b"data.pkl") + 400
    data[place] ^= 1
    path.write_bytes(data)
    with Files() as files:
        report = verify(formats.read_index(str(folder)), files)
    assert not report.whole
    assert "rng_state_2.pth" in str(report.problems[0])


def test_the_step_of_a_trainers_folder_is_that_of_its_state() -> None:
    index = formats.read_index(str(TRAINER))
    step = index.object("trainer_state.global_step")
    assert step is not None
    assert step.value == json.loads((TRAINER / "trainer_state.json").read_text())["global_step"]


def test_a_half_that_cannot_be_read_is_no_reason_to_call_the_rest_whole(tmp_path: Path) -> None:
    folder = shutil.copytree(TRAINER, tmp_path / "checkpoint-2")
    (folder / "optimizer_0" / ".metadata").unlink()
    index = formats.read_index(str(folder))
    assert index.problems
    assert not inspection.resume_verdict(index).yes
    with pytest.raises(CkptError, match="optimizer_0"):
        plan_export(index, ExportOptions())


@pytest.mark.parametrize("lost", ["optimizer_0/.metadata", "trainer_state.json", "scheduler.pt"])
def test_no_reshard_leaves_out_a_part_that_cannot_be_read(lost: str, tmp_path: Path) -> None:
    folder = shutil.copytree(TRAINER, tmp_path / "checkpoint-2")
    (folder / lost).write_text("version https://git-lfs.github.com/spec/v1\n")
    words = ["reshard", str(folder), "-o", str(tmp_path / "out"), "--to-mesh", "2"]
    refused = run(*words)  # also where states of the old ranks are left out
    assert refused.exit_code == 3
    told = shlex.split(refused.stderr.splitlines()[-1])
    assert told[:-2] == ["ckpt-tools", *words]
    assert run(*told[1:]).exit_code == 0
    assert not api.verify(str(folder)).whole


def test_a_hurt_file_of_other_state_does_not_hurt_the_model(tmp_path: Path) -> None:
    folder = shutil.copytree(TRAINER, tmp_path / "checkpoint-2")
    (folder / "scheduler.pt").write_bytes(b"")
    (folder / "trainer_state.json").write_text("{")
    assert api.export(str(folder), tmp_path / "out").tensors
    problems = formats.read_index(str(folder)).problems
    assert len(problems) == 2
    assert any("scheduler.pt" in p.message and "it is empty" in p.message for p in problems)


def test_halves_of_saves_by_different_numbers_of_ranks_are_told(tmp_path: Path) -> None:
    folder = shutil.copytree(SHARDED, tmp_path / "state")
    shutil.rmtree(folder / "optimizer_0")
    shutil.copytree(REAL / "fsdp2_dcp_1d_8r" / "ckpt", folder / "optimizer_0")
    notes = formats.read_index(str(folder)).notes
    assert any("different numbers of ranks" in note for note in notes)


def test_random_states_that_are_not_there_are_noted(tmp_path: Path) -> None:
    folder = shutil.copytree(TRAINER, tmp_path / "checkpoint-2")
    assert not any("random states" in note for note in formats.read_index(str(folder)).notes)
    (folder / "rng_state_1.pth").unlink()
    notes = formats.read_index(str(folder)).notes
    assert "There are no random states of rank 1." in notes


def test_several_models_are_not_joined(tmp_path: Path) -> None:
    folder = shutil.copytree(SHARDED, tmp_path / "state")
    shutil.copytree(folder / "pytorch_model_fsdp_0", folder / "pytorch_model_fsdp_1")
    with pytest.raises(CkptError, match="are inside"):
        formats.read_index(str(folder))


def test_state_of_the_old_ranks_is_left_out_for_another_number_of_ranks() -> None:
    index = formats.read_index(str(TRAINER))
    for world, kept in ((2, False), (4, True)):
        plan = plan_reshard(index, ReshardOptions(mesh=Mesh((world,))))
        names = {item.fqn for file in plan.files for item in file.items}
        assert any(name.startswith("rng_state.") for name in names) is kept
        assert "trainer_state.global_step" in names | {entry.fqn for entry in plan.objects}


def test_a_trainers_folder_is_arranged_as_one_again_with_its_files() -> None:
    index = formats.read_index(str(TRAINER))
    plan = plan_reshard(index, ReshardOptions(mesh=Mesh((4,)), layout="accelerate"))
    tops = {file.path.partition("/")[0] for file in plan.files}
    assert tops == {path.name for path in TRAINER.iterdir()}
    assert not any("no place for" in note for note in plan.notes)


def test_a_damaged_trainer_state_is_no_empty_one(tmp_path: Path) -> None:
    folder = shutil.copytree(TRAINER, tmp_path / "checkpoint-2")
    (folder / "trainer_state.json").write_text('{"global_step": 2')
    problems = formats.read_index(str(folder)).problems
    assert any("trainer_state.json is not valid JSON" in problem.message for problem in problems)


@pytest.mark.parametrize("form", ["dcp", "ranks"])
def test_what_is_written_of_a_folder_is_proven_and_the_rest_is_named(
    form: str, tmp_path: Path
) -> None:
    index = formats.read_index(str(TRAINER))
    options = ReshardOptions(mesh=Mesh((4,)), format=form)
    write = WriteOptions(check=True)
    plan = api.reshard(index, str(tmp_path / "out"), options=options, write=write)
    left_out = [note for note in plan.notes if note.startswith("Left out")]
    assert not any("rng_state.rank_0" in note for note in left_out)
    if form == "dcp":
        packed = ckpt_tools.open_checkpoint(tmp_path / "out").index.packed
        item = next(one.item for one in packed if one.item.fqn == "rng_state.rank_0")
        with Files() as files:
            assert files.read(*item.data) == (TRAINER / "rng_state_0.pth").read_bytes()


def test_parts_of_different_formats_are_each_read_by_their_own(tmp_path: Path) -> None:
    api.reshard(str(FULL), tmp_path / "dcp", options=AS_ACCELERATE)
    folder = shutil.copytree(FULL, tmp_path / "mixed")
    (folder / "optimizer.bin").unlink()
    shutil.copytree(tmp_path / "dcp" / "optimizer_0", folder / "optimizer_0")
    for only in ("model", "optim"):  # also where no object is left to tell the other format
        assert _sections(folder, only) == _sections(FULL, only)
    assert api.verify(str(folder)).whole


def test_what_no_format_of_the_parts_can_locate_is_a_problem() -> None:
    index = formats.read_index(str(SHARDED))
    entry = index.tensors[0]
    chunks = [chunk._replace(codec="other") for chunk in entry.chunks]
    strange = replace(index, tensors=(replace(entry, chunks=chunks),), objects=(), format="torch")
    with Files() as files, pytest.raises(CkptError, match="no reader here knows 'other'"):
        formats.locate(strange, files).require_whole()


def test_an_optimizer_without_groups_is_no_save_of_a_framework(tmp_path: Path) -> None:
    folder = shutil.copytree(SHARDED, tmp_path / "state")
    states = ReshardOptions(Mesh((2,)), include=("optimizer.state.*",))
    shutil.rmtree(folder / "optimizer_0")
    api.reshard(str(SHARDED), folder / "optimizer_0", options=states)
    with pytest.raises(CkptError, match="no param_groups") as caught:
        api.fingerprint(str(folder))
    assert "pytorch_model_fsdp_0" in str(caught.value.hint)
    assert not inspection.resume_verdict(formats.read_index(str(folder))).yes
    assert api.export(str(folder), tmp_path / "out", only="model").tensors


@pytest.mark.parametrize("name", ["pytorch_model_fsdp.bin", "optimizer.bin"])
def test_two_saves_of_accelerate_in_one_folder_are_called_so(name: str, tmp_path: Path) -> None:
    folder = shutil.copytree(SHARDED, tmp_path / "run" / "state")
    shutil.copy(FULL / name, folder)
    for path in tmp_path / "run", folder:
        with pytest.raises(CkptError, match="not a checkpoint; 3 are inside") as caught:
            formats.read_index(str(path))
        assert f"{folder} holds two saves of Accelerate: {name[:-4]}" in str(caught.value)
    (folder / name).unlink()
    assert {entry.section for entry in formats.read_index(str(folder)).tensors} > {"model"}


def test_rank_files_of_accelerate_are_read_with_its_optimizer(tmp_path: Path) -> None:
    options = replace(AS_ACCELERATE, format="ranks")
    api.reshard(str(TRAINER), tmp_path / "out", options=options)
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert {f"pytorch_model_fsdp_rank{rank}.bin" for rank in range(2)} < names
    assert (tmp_path / "out" / "optimizer_0" / ".metadata").exists()
    for only in ("model", "optim"):
        assert _sections(tmp_path / "out", only) == _sections(TRAINER, only)
    assert api.verify(str(tmp_path / "out")).whole
    assert inspection.resume_verdict(formats.read_index(str(tmp_path / "out"))).yes
    (tmp_path / "out" / "pytorch_model_fsdp_rank1.bin").unlink()
    assert not api.verify(str(tmp_path / "out")).whole


def test_rank_files_of_model_and_optimizer_are_accelerates_without_dcp(tmp_path: Path) -> None:
    folder = tmp_path / "out"
    api.reshard(str(TRAINER), folder, options=ReshardOptions(Mesh((2,)), format="ranks"))
    for rank in range(2):  # as save_fsdp_model and save_fsdp_optimizer name them, use_dcp=False
        for family, name in ("model", "pytorch_model_fsdp_0"), ("optimizer", "optimizer_0"):
            path = folder / f"{family}_world_size_2_rank_{rank}.pt"
            path.rename(folder / f"{name}_rank{rank}.bin")
    for only in ("model", "optim"):
        assert _sections(folder, only) == _sections(TRAINER, only)
    index = formats.read_index(str(folder))
    assert index.framework == "accelerate"
    assert inspection.resume_verdict(index).yes
    (folder / "optimizer_0_rank1.bin").unlink()
    assert not api.verify(str(folder)).whole


@pytest.mark.parametrize("second", ["pytorch_model_fsdp_1", "optimizer_1", "both"])
def test_of_several_models_or_optimizers_each_is_listed(second: str, tmp_path: Path) -> None:
    folder = shutil.copytree(SHARDED, tmp_path / "state")
    added = ("pytorch_model_fsdp_1", "optimizer_1") if second == "both" else (second,)
    for name in added:
        shutil.copytree(folder / name.replace("_1", "_0"), folder / name)
    found = {Path(one.path).name for one in formats.checkpoints_in(str(folder))}
    assert found == {"pytorch_model_fsdp_0", "optimizer_0", *added}
    with pytest.raises(CkptError) as caught:
        formats.read_index(str(folder))
    assert all(name in str(caught.value.hint) for name in found)


def _sections(path: Path, only: str) -> object:
    """The digests of the tensors of a section."""
    index = formats.read_index(str(path))
    chosen = index.select({entry.fqn for entry in index.tensors if entry.section == only})
    return api.fingerprint(chosen).sections


def test_a_number_of_a_trainer_state_that_is_too_large_is_not_written_as_none(
    tmp_path: Path,
) -> None:
    folder = shutil.copytree(TRAINER, tmp_path / "checkpoint-3")
    state = json.loads((folder / "trainer_state.json").read_text()) | {"seen": 1 << 1200}
    (folder / "trainer_state.json").write_text(json.dumps(state))
    index = formats.read_index(str(folder))
    seen = index.object("trainer_state.seen")
    assert seen is not None
    assert (seen.opened, seen.type_name) == (False, "builtins.int")
