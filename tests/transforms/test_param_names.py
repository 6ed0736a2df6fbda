"""Numbered optimizer states get the names that a list gives, in the optimizer's own order."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from running import run

from ckpt_tools.core.dtypes import BY_NAME
from ckpt_tools.core.index import ByteRange, CheckpointIndex, ObjectEntry, TensorEntry
from ckpt_tools.core.names import join
from ckpt_tools.core.plain_values import PlainValue
from ckpt_tools.errors import UsageError
from ckpt_tools.formats import read_index
from ckpt_tools.transforms import (
    optimizer,
    param_names,
)
from ckpt_tools.transforms.optimizer import ParamNames

CHECKPOINTS = Path(__file__).parents[1] / "data" / "checkpoints"
FLOAT = BY_NAME["float32"]
NOWHERE = ByteRange("", 0, 0)
SHAPES = {"emb.weight": (4, 3), "fc.weight": (2, 3), "fc.bias": (2,), "frozen": (5,)}
# group 0 has the weights, group 1 the bias: not the order of the model, and one has no number
GROUPS = ((0, 1), (2,))
NAMES = ("emb.weight", "fc.weight", "fc.bias")


def tensor(*path: str | int, shape: tuple[int, ...], section: str) -> TensorEntry:
    return TensorEntry(join(path), path, section, FLOAT, shape, ())  # type: ignore[arg-type]


def option(group: int, key: str, value: PlainValue) -> ObjectEntry:
    path = ("optim", "param_groups", group, key)
    return ObjectEntry(join(path), path, "optim", NOWHERE, value=value, opened=True)


def checkpoint(
    *, names: tuple[str, ...] = NAMES, stored: bool = False, parameters: int = 3
) -> CheckpointIndex:
    """A model and its optimizer's numbered state; ``names`` are those of the numbers."""
    tensors = [
        tensor("model", name, shape=shape, section="model") for name, shape in SHAPES.items()
    ]
    objects = []
    for number, name in enumerate(names[:parameters]):
        shape = SHAPES[name]
        tensors.append(
            tensor("optim", "state", str(number), "exp_avg", shape=shape, section="optim")
        )
        tensors.append(tensor("optim", "state", str(number), "step", shape=(), section="optim"))
    for group, numbers in enumerate(GROUPS):
        objects += [option(group, "lr", 0.1 * group), option(group, "params", list(numbers))]
        if stored:
            objects.append(option(group, "param_names", [names[number] for number in numbers]))
    return CheckpointIndex(
        root="ckpt",
        format="dcp",
        tensors=tuple(sorted(tensors, key=lambda entry: entry.fqn)),
        objects=tuple(sorted(objects, key=lambda entry: entry.fqn)),
    )


def test_each_number_becomes_the_name_at_its_place_in_the_groups() -> None:
    named = param_names.with_names(checkpoint(), ParamNames(NAMES))
    for name in NAMES:
        entry = named.tensor(f"optim.state.{name}.exp_avg")
        assert entry is not None
        assert entry.shape == SHAPES[name]
        assert entry.path == ("optim", "state", name, "exp_avg")


def test_groups_list_names_instead_of_numbers() -> None:
    named = param_names.with_names(checkpoint(), ParamNames(NAMES))
    lists = [named.object(f"optim.param_groups.{group}.params") for group in (0, 1)]
    assert [one.value for one in lists if one] == [["emb.weight", "fc.weight"], ["fc.bias"]]


def test_a_frozen_parameter_gets_no_state() -> None:
    named = param_names.with_names(checkpoint(), ParamNames(NAMES))
    assert not [entry for entry in named.tensors if entry.fqn.startswith("optim.state.frozen")]


def test_names_that_the_groups_store_are_used_when_none_are_given() -> None:
    assert param_names.with_names(checkpoint(stored=True), ParamNames()) == param_names.with_names(
        checkpoint(stored=True), ParamNames(NAMES)
    )


def test_groups_without_stored_names_are_never_matched_by_place_in_the_model() -> None:
    with pytest.raises(UsageError, match="keep no names beside their numbers"):
        param_names.with_names(checkpoint(), ParamNames())


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (NAMES[:2], "number 2 is the first without a name"),
        ((*NAMES, "frozen"), "frozen is the first name without a number"),
        (("emb.weight", "fc.weight", "fc.bia"), "number 2 would be fc.bia, and the model"),
        (("fc.weight", "emb.weight", "fc.bias"), r"optim.state.0.exp_avg has shape \[4, 3\]"),
    ],
)
def test_the_first_entry_without_a_match_is_named(given: tuple[str, ...], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        param_names.with_names(checkpoint(), ParamNames(given))


def test_names_from_other_groups_are_refused_even_when_all_shapes_fit() -> None:
    with pytest.raises(
        UsageError, match=r"\[2, 1\] parameters.* group 0 is the first that differs"
    ):
        param_names.with_names(checkpoint(), ParamNames(NAMES, (1, 2)))


def test_an_optimizer_by_name_needs_no_names() -> None:
    named = param_names.with_names(checkpoint(), ParamNames(NAMES))
    with pytest.raises(UsageError, match="no optimizer state here is numbered"):
        param_names.with_names(named, ParamNames(NAMES))


def test_names_come_from_another_optimizer_state_of_the_job() -> None:
    named = param_names.with_names(checkpoint(), ParamNames(NAMES))
    assert param_names.names_in(named) == ParamNames(NAMES, (2, 1))


def test_a_list_may_have_comments_and_empty_lines() -> None:
    assert param_names.parse_names("# group 0\na.weight\n\n b \n", where="f") == (
        "a.weight",
        "b",
    )


@pytest.mark.parametrize(("text", "said"), [("", "no names in it"), ("a\nb\na\n", "a twice")])
def test_a_list_that_cannot_be_meant_is_refused(text: str, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        param_names.parse_names(text, where="names.txt")


def test_a_real_numbered_state_takes_the_names_of_its_own_job() -> None:
    index = read_index(str(CHECKPOINTS / "verl_fsdp2_4r" / "ckpt" / "global_step_1" / "actor"))
    index = replace(index, problems=())
    found = param_names.numbered(index)[("optim",)]
    count = len(optimizer.read(found).members())
    names = [f"p{number}" for number in range(count)]
    with pytest.raises(UsageError, match="number 0 would be p0, and the model"):
        param_names.with_names(index, ParamNames(tuple(names)))


def test_a_real_numbered_state_of_dcp_becomes_what_get_state_dict_names(tmp_path: Path) -> None:
    source = str(CHECKPOINTS / "fsdp2_dcp_rawoptim_4r" / "ckpt")
    block = [f"blocks.0.{n}" for n in ("norm.weight", "norm.bias", "fc1.weight", "fc1.bias")]
    heads = [f"head{n}.{kind}" for n in (3, 1) for kind in ("weight", "bias")]
    order = ["emb.weight", *block, "blocks.0.fc2.weight", *heads, "lm.weight"]
    (tmp_path / "names.txt").write_text("\n".join(order))
    out = str(tmp_path / "out")
    command = ["reshard", source, "-o", out, "--to-mesh", "2", "--layout", "plain"]
    done = run(*command, "--param-names", tmp_path / "names.txt")
    assert done.exit_code == 0, done.stderr
    named = read_index(out)
    states = {e.fqn for e in named.tensors if e.fqn.endswith("exp_avg")}
    assert states == {f"optim.state.{name}.exp_avg" for name in order}
    more = ("--param-names", tmp_path / "names.txt", "--dry-run", "--force")
    left_out = ("-x", "*.state.0.*", "-x", "*.state.emb.*")  # by the names that are given
    done = run(*command, *more, *left_out)
    assert "-x '*.state.0.*' matches nothing by the names of --param-names." in done.stderr
    assert "state.emb" not in done.stderr


def test_names_of_a_checkpoint_with_other_groups_are_refused(tmp_path: Path) -> None:
    source = str(CHECKPOINTS / "fsdp2_dcp_rawoptim_4r" / "ckpt")
    other = str(CHECKPOINTS / "fsdp2_dcp_1d_4r" / "ckpt")
    command = ["reshard", source, "-o", str(tmp_path / "out"), "--to-mesh", "2"]
    done = run(*command, "--param-names", other)
    assert done.exit_code == 2
    assert "[11] parameters, and those that the names come from [6, 5]" in done.stderr


@pytest.mark.parametrize("shape", ["nested", "flattened"])
def test_a_bare_optimizer_is_one_in_every_shape(tmp_path: Path, shape: str) -> None:
    found = {
        "nested": {"state": {"w": {"step": torch.ones(())}}, "param_groups": [{"params": ["w"]}]},
        "flattened": {"state.w.step": torch.ones(()), "param_groups.w.lr": 0.1},
    }[shape]
    torch.save(found, tmp_path / "optim.pt")
    index = read_index(str(tmp_path / "optim.pt"))
    assert {entry.section for entry in index.entries} == {"optim"}
    assert [*param_names.optimizers_of(index)] == [()]


def test_a_part_of_an_optimizer_is_exported_as_it_is(tmp_path: Path) -> None:
    groups = [{"lr": 0.1, "params": [0]}]
    torch.save({"state": {0: {"step": torch.ones(())}}, "param_groups": groups}, tmp_path / "a.pt")
    command = ["export", str(tmp_path / "a.pt"), "-o", str(tmp_path / "b.pt"), "--keep-names"]
    done = run(*command, "--only", "optim", "-x", "*.params")
    assert done.exit_code == 0, done.stderr
    found = torch.load(tmp_path / "b.pt", weights_only=True)
    assert found == {"state": {0: {"step": torch.ones(())}}, "param_groups": [{"lr": 0.1}]}


def test_numbers_of_a_dcp_directory_are_ints_in_a_pickle(tmp_path: Path) -> None:
    source, out = CHECKPOINTS / "fsdp2_dcp_rawoptim_4r" / "ckpt", tmp_path / "optim.pt"
    command = ["export", str(source), "-o", str(out), "--keep-names", "--only", "optim"]
    done = run(*command)
    assert done.exit_code == 0, done.stderr
    (found,) = torch.load(out, weights_only=True).values()
    assert list(found["state"]) == found["param_groups"][0]["params"] == list(range(11))
