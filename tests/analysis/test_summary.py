"""What `inspect` says of an index, fact by fact."""

from dataclasses import replace
from pathlib import Path

import pytest
from builders import index, tensor, value

from ckpt_tools import formats
from ckpt_tools.analysis.inspection import optimizer_of, resume_verdict
from ckpt_tools.analysis.summary import (
    file_loads,
    mesh_of,
    placement_names,
    placements_of,
    sections_of,
    step_entries,
)
from ckpt_tools.core.index import ByteRange, FileEntry
from ckpt_tools.core.layout import Layout, Mesh, Replicate, Shard
from ckpt_tools.errors import IncompleteError, NotReadError, UnsupportedError

FOUR = Layout(Mesh((4,)), (Shard(0),))


def states(*names: str) -> list[str]:
    found = optimizer_of(
        index(*(tensor(f"optim.state.w.{name}", (3,), section="optim") for name in names))
    )
    assert found is not None
    return [found.kind, *found.states]


def test_sections_count_each_element_once_whatever_the_shards() -> None:
    whole = index(
        tensor("model.a", (8, 2), layout=FOUR),
        tensor("model.b", (2,), dtype="bfloat16"),
        value("step", 7),
    )
    sums = sections_of(whole)
    assert list(sums) == ["model", "optim", "other"]
    model = sums["model"]
    assert (model.tensors, model.numel, model.nbytes) == (2, 18, 68)
    assert model.dtypes == {"float32": 16, "bfloat16": 2}
    assert (sums["optim"].tensors, sums["other"].objects) == (0, 1)


@pytest.mark.parametrize(
    ("names", "kind"),
    [
        (("exp_avg", "exp_avg_sq", "step"), "Adam or AdamW"),
        (("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "step"), "Adam or AdamW with amsgrad"),
        (("momentum_buffer",), "SGD with momentum, or Muon"),
        (("square_avg",), "RMSprop"),
        (("something_new",), "unknown"),
    ],
)
def test_state_names_tell_the_kind_of_optimizer(names: tuple[str, ...], kind: str) -> None:
    assert states(*names)[0] == kind


def test_no_optimizer_state_is_no_optimizer() -> None:
    assert optimizer_of(index(tensor("model.a", (2,)))) is None


def test_the_step_is_looked_for_outside_of_the_optimizer() -> None:
    entries = step_entries(
        index(
            tensor("optim.state.w.step", (), section="optim"),
            tensor("train_state.step", (), section="other"),
            value("global_step", 9),
            tensor("step", (4,), section="other"),
        )
    )
    assert [entry.fqn for entry in entries] == ["global_step", "train_state.step"]


HALVES = (tensor("model.a", (2,)), tensor("optim.a.exp_avg", (2,), section="optim"))
GROUPS = replace(value("optim.param_groups", 1), section="optim", path=("optim", "param_groups"))


@pytest.mark.parametrize("path", [("optim", "param_groups"), ("optimizer", "param_groups.a.lr")])
def test_model_and_optimizer_can_be_resumed_from(path: tuple[str, ...]) -> None:
    assert resume_verdict(index(*HALVES, replace(GROUPS, path=path))).yes


def test_an_optimizer_that_keeps_no_tensors_can_be_resumed_from() -> None:
    verdict = resume_verdict(index(tensor("model.a", (2,)), GROUPS))
    assert verdict.yes
    assert "keeps no tensors" in verdict.reason


@pytest.mark.parametrize(
    "path", [("optim", "param_groups", 0, "betas", 1), ("param_groups.a.rho",)]
)
def test_an_optimizer_that_lost_its_tensors_cannot_be_resumed_from(path: tuple[str, ...]) -> None:
    verdict = resume_verdict(index(tensor("model.a", (2,)), replace(GROUPS, path=path)))
    assert not verdict.yes
    assert "none of its tensors" in verdict.reason


def test_an_optimizer_without_groups_cannot_be_resumed_from() -> None:
    verdict = resume_verdict(index(*HALVES))
    assert not verdict.yes
    assert "param_groups are missing" in verdict.reason


def test_an_optimizer_with_an_entry_that_cannot_be_read_cannot_be_resumed_from() -> None:
    flaw = UnsupportedError("a tensor of element type qint8, which is not read.")
    verdict = resume_verdict(index(*HALVES, replace(GROUPS, flaw=flaw)))
    assert not verdict.yes
    assert "optim.param_groups cannot be read: a tensor of element type qint8" in verdict.reason


def test_a_job_can_resume_from_tensors_that_only_its_own_library_reads() -> None:
    flaw = NotReadError("a tensor of class torchao.OptimState8bit, which is not read.")
    state = value("optim.a.exp_avg_sq", None, section="optim", opened=False)
    verdict = resume_verdict(index(*HALVES[:1], GROUPS, replace(state, flaw=flaw)))
    assert verdict.yes
    assert "optim.a.exp_avg_sq not read here: a tensor of class torchao" in verdict.reason


@pytest.mark.parametrize("section", ["model", "optim"])
def test_one_section_alone_cannot_be_resumed_from(section: str) -> None:
    whole = index(tensor("a", (2,), section="model" if section == "model" else "optim"))
    assert not resume_verdict(whole).yes


def test_what_is_missing_is_why_it_cannot_be_resumed_from() -> None:
    whole = index(tensor("model.a", (2,)), tensor("optim.a.exp_avg", (2,), section="optim"))
    hurt = replace(whole, problems=(IncompleteError("rank 3 does not exist.", "Hurt: all."),))
    verdict = resume_verdict(hurt)
    assert not verdict.yes
    assert verdict.reason == "rank 3 does not exist."


def test_placements_are_counted_in_words() -> None:
    whole = index(
        tensor("a", (8,), layout=FOUR),
        tensor("b", (8,), layout=FOUR),
        tensor("c", ()),
        world_size=4,
    )
    assert placements_of(whole, mesh_of(whole)) == [("Shard(0)", 2), ("in one piece", 1)]


def test_a_stated_mesh_is_confirmed_and_nothing_more_is_inferred() -> None:
    stated = replace(tensor("a", (8,), layout=FOUR), layout=FOUR)
    found = mesh_of(index(stated, tensor("b", (8,), layout=FOUR)))
    assert found is not None
    assert (found.mesh, found.status) == (FOUR.mesh, "confirmed")


def test_a_dimension_cut_after_one_to_its_right_is_a_strided_shard() -> None:
    layout = Layout(Mesh((2, 3, 4)), (Shard(1), Replicate(), Shard(1)), (2, 0, 1))
    assert placement_names(layout) == ["_StridedShard(1, 4)", "Replicate", "Shard(1)"]


def test_file_loads_count_replicas_and_files_without_tensors() -> None:
    entry = tensor("a", (8,), layout=FOUR)
    again = ByteRange("copy", 0, 8)
    first = entry.chunks[0]._replace(replicas=(again,))
    whole = replace(
        index(replace(entry, chunks=[first, *entry.chunks[1:]])),
        files=(FileEntry(".metadata", 10), FileEntry("rank3", None)),
    )
    loads = {load.path: load for load in file_loads(whole)}
    assert loads["rank0"].nbytes == loads["copy"].nbytes == 8
    assert (loads["rank3"].length, loads[".metadata"].chunks) == (None, 0)
    assert [load.rank for load in file_loads(whole)][:4] == [0, 1, 2, 3]


def test_composers_step_is_the_batch_of_its_timestamp() -> None:
    folder = Path(__file__).parents[1] / "data" / "checkpoints" / "composer-0.32.1-fsdp_sharded"
    first = step_entries(formats.read_index(str(folder / "ep0-ba1")))[0]
    assert first.fqn == "state.timestamp.Timestamp.batch"
