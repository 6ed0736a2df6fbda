"""The three shapes of an optimizer's state dict are what torch's own functions make of it."""

from __future__ import annotations

import copy
import io
import lzma
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from alone import ALONE
from running import ran, run
from torch import optim
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from ckpt_tools.errors import UnsupportedError, UsageError
from ckpt_tools.formats import read_index
from ckpt_tools.transforms import optimizer
from ckpt_tools.transforms.optimizer import ParamNames
from tests.transforms.optimizers import (
    Forest,
    Make,
    Model,
    StateDict,
    flattened_by_torch,
    names_in_order,
    nested_of,
    numbered_of,
    same,
    stepped,
    two_groups,
    unflattened_by_torch,
    without_empty,
)


def _tensor_lr(groups: list[dict[str, object]]) -> optim.Optimizer:
    return optim.AdamW([group | {"lr": torch.tensor(group["lr"])} for group in groups])


def _named(groups: list[dict[str, object]]) -> optim.Optimizer:
    """With ``param_names`` in its groups."""
    named = [
        group | {"params": [(f"{number}.{place}", p) for place, p in enumerate(group["params"])]}  # type: ignore[arg-type]
        for number, group in enumerate(groups)
    ]
    return optim.Adam(named, amsgrad=True)


MATRICES = {"Muon": optim.Muon} if hasattr(optim, "Muon") else {}  # torch 2.9 is the first with it
OPTIMIZERS: dict[str, Make] = {
    **{
        kind.__name__: kind
        for kind in (
            *(optim.Adadelta, optim.Adafactor, optim.Adagrad, optim.Adam, optim.Adamax),
            *(optim.AdamW, optim.ASGD, optim.NAdam, optim.RAdam, optim.RMSprop, optim.Rprop),
        )
    },
    **MATRICES,
    "SGD": lambda groups: optim.SGD(groups, lr=0.1),
    "SGD with momentum": lambda groups: optim.SGD(groups, lr=0.1, momentum=0.9),
    "AdamW with tensors for lr": _tensor_lr,
    "Adam with names in its groups": _named,
    "LBFGS": lambda groups: optim.LBFGS([p for group in groups for p in group["params"]]),  # type: ignore[attr-defined]
}


@pytest.mark.parametrize("times", [0, 2], ids=["before the first step", "after two steps"])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_every_optimizer_of_torch_has_the_shapes_that_torch_gives(kind: str, times: int) -> None:
    model = Model()
    built = OPTIMIZERS[kind](two_groups(model, matrices_only=kind in MATRICES))
    stepped(model, built, times)
    nested, numbered = nested_of(model, built), numbered_of(built)
    order = names_in_order(model, built)
    forest = Forest()
    tree = forest.tree(nested)

    def check(found: optimizer.Branch[optimizer.Entry], expected: StateDict) -> None:
        assert same(forest.value(found), expected)

    check(optimizer.nested(tree, digest=forest.digest), nested)
    sizes = tuple(len(group["params"]) for group in built.param_groups)
    for names in (ParamNames(tuple(order)), ParamNames(tuple(order), sizes)):
        check(optimizer.numbered(tree, names, digest=forest.digest), numbered)
    named = optimizer.read(forest.tree(numbered)).renamed(lambda param: order[int(param)])
    check(optimizer.written(named), nested)
    if kind == "LBFGS" and times:
        with pytest.raises(UnsupportedError, match="torch flattens state of tensors, numbers"):
            optimizer.flattened(tree)
        return
    flattened = flattened_by_torch(nested)
    check(optimizer.flattened(tree), flattened)
    again = optimizer.nested(forest.tree(flattened), digest=forest.digest)
    check(again, unflattened_by_torch(model, built, copy.deepcopy(flattened)))
    check(optimizer.flattened(again), flattened)


def _of_packages() -> dict[str, StateDict]:
    """State dicts of optimizers of several packages, by torch, before and after two steps."""
    data = lzma.decompress(Path("tests/data/optimizers.pt.xz").read_bytes())
    found = torch.load(io.BytesIO(data), weights_only=True)["optimizers"]
    return {
        f"{kind} after {times} steps": each[place]
        for kind, each in found.items()
        for place, times in enumerate((0, 2))
    }


PACKAGES = _of_packages()


def test_at_least_fifty_real_optimizers_are_recorded() -> None:
    assert len(PACKAGES) // 2 >= 50


@pytest.mark.parametrize("kind", PACKAGES)
def test_the_optimizers_of_packages_have_the_shapes_that_torch_gives(kind: str) -> None:
    nested, numbered = PACKAGES[kind]["nested"], PACKAGES[kind]["numbered"]
    order, flattened = PACKAGES[kind]["names"], PACKAGES[kind]["flattened"]
    forest = Forest()
    tree = forest.tree(nested)
    found = optimizer.numbered(tree, ParamNames(tuple(order)), digest=forest.digest)
    assert same(forest.value(found), numbered)
    named = optimizer.read(forest.tree(numbered)).renamed(lambda param: order[int(param)])
    assert same(forest.value(optimizer.written(named)), nested)
    if flattened is None:
        return  # torch refuses to
    assert same(forest.value(optimizer.flattened(tree)), flattened)
    if kind == "pytorch_optimizer.aggmo after 2 steps":
        with pytest.raises(UnsupportedError, match=r"0\.\d+ is a number, or the key"):
            optimizer.nested(forest.tree(flattened), digest=forest.digest)
        return
    again = optimizer.nested(forest.tree(flattened), digest=forest.digest)
    assert same(without_empty(forest.value(again)), without_empty(nested))  # type: ignore[arg-type]


LAYOUTS = ("plain", "accelerate", "titan", "verl", "lightning", "composer")


@pytest.mark.slow
@pytest.mark.parametrize(("place", "kind"), list(enumerate(PACKAGES)))
def test_the_optimizers_of_packages_come_back_from_a_layout(
    tmp_path: Path, place: int, kind: str
) -> None:
    """Each through one of the layouts, in one of its three shapes: all of both in turn."""
    found = PACKAGES[kind]
    shapes = [shape for shape in ("numbered", "nested", "flattened") if found[shape] is not None]
    layouts = [one for one in LAYOUTS if one != "titan" or found["flattened"] is not None]
    shape, layout = shapes[place // 2 % len(shapes)], layouts[place % len(layouts)]
    state = {"model": Model().state_dict(), "optim": found[shape]}
    loaded = there_and_back(tmp_path, state, found["names"], layout)
    assert same(loaded, with_texts(without_empty(found["nested"])))


@pytest.mark.parametrize("kind", ["amos", "nero", "sara"])
def test_a_state_smaller_than_its_parameter_is_no_sign_of_another_order(
    tmp_path: Path, kind: str
) -> None:
    found = PACKAGES[f"pytorch_optimizer.{kind} after 2 steps"]
    state = {"model": Model().state_dict(), "optim": found["numbered"]}
    loaded = there_and_back(tmp_path, state, found["names"], "plain")
    assert same(loaded, with_texts(without_empty(found["nested"])))


def with_texts(value: object) -> object:
    """The same with the texts of keys, which is all that DCP keeps of them."""
    if isinstance(value, list | tuple):
        return type(value)(map(with_texts, value))
    if not isinstance(value, dict):
        return value
    return {str(key): with_texts(item) for key, item in value.items()}


SHAPES: dict[str, StateDict] = {
    "lists of tensors, as Shampoo has them": {
        "state": {"a.w": {"step": 3, "preconditioners": [torch.eye(2), torch.eye(3)]}},
        "param_groups": [{"lr": 0.1, "betas": (0.9, 0.99), "params": ["a.w"]}],
    },
    "dicts of dicts, as distributed Shampoo has them": {
        "state": {"a.w": {"block_0": {"shampoo": {"0": torch.eye(2), "1": torch.eye(3)}}}},
        "param_groups": [{"lr": 0.1, "params": ["a.w"]}],
    },
    "blocks of 8 bits with maps": {
        "state": {
            name: {
                "state1": torch.zeros(4, dtype=torch.uint8),
                "qmap1": torch.linspace(0, 1, 256),
                "absmax1": torch.ones(1),
            }
            for name in ("w", "w.bias")
        },
        "param_groups": [{"lr": 0.1, "params": ["w", "w.bias"]}],
    },
    "keys of schedule-free groups": {
        "state": {"w": {"z": torch.ones(2)}},
        "param_groups": [
            {"lr": 0.1, "k": 2, "train_mode": True, "weight_sum": 0.25, "params": ["w"]}
        ],
    },
    "hyper-parameters of every kind": {
        "state": {},
        "param_groups": [
            {
                "lr": torch.tensor(0.5),
                "schedule": {"warmup": {"steps": 3}, "names": ["a", "b"], "empty": {}},
                "scales": [torch.ones(1), 2.0],
                "pair": (None, 0.5),
                "nothing": None,
                "odd": float("nan"),
                "params": ["w"],
            }
        ],
    },
    "a group without parameters": {
        "state": {"w": {"step": 1.0}},
        "param_groups": [{"lr": 0.1, "params": ["w"]}, {"lr": 0.2, "params": []}],
    },
    "no groups": {"state": {}, "param_groups": []},
    "a key beside": {
        "state": {},
        "param_groups": [{"lr": 0.1, "params": ["w"]}],
        "loss_scale": 1024.0,
    },
}


@pytest.mark.parametrize("shape", SHAPES)
def test_every_shape_of_state_comes_back_from_numbers(shape: str) -> None:
    forest = Forest()
    tree = forest.tree(SHAPES[shape])
    order = [str(param) for param in optimizer.read(tree).members()]
    numbered = optimizer.numbered(tree, ParamNames(tuple(order)), digest=forest.digest)
    named = optimizer.read(numbered).renamed(lambda param: order[int(param)])
    assert same(forest.value(optimizer.written(named)), SHAPES[shape])


@pytest.mark.parametrize("shape", [shape for shape in SHAPES if "lists" not in shape])
def test_every_shape_of_state_is_flattened_as_torch_does_it(shape: str) -> None:
    if "dicts of dicts" in shape and torch.__version__.startswith("2.6."):
        pytest.skip("torch 2.6 flattens tensors and numbers only")
    forest = Forest()
    flattened = optimizer.flattened(forest.tree(SHAPES[shape]))
    beside = {key: value for key, value in SHAPES[shape].items() if key == "loss_scale"}
    assert same(forest.value(flattened), flattened_by_torch(SHAPES[shape]) | beside)
    if shape in ("a group without parameters", "no groups"):
        return  # flattened, these are not there
    again = forest.value(
        optimizer.nested(forest.tree(forest.value(flattened)), digest=forest.digest)
    )  # type: ignore[arg-type]
    assert isinstance(again, dict)
    assert same(without_empty(again), SHAPES[shape])


def test_lists_in_a_flattened_state_are_kept() -> None:
    forest = Forest()
    flattened = {"state.w.factors": [torch.ones(1), torch.ones(2)], "param_groups.w.lr": 0.1}
    nested = forest.value(optimizer.nested(forest.tree(flattened), digest=forest.digest))
    expected = {
        "state": {"w": {"factors": flattened["state.w.factors"]}},
        "param_groups": [{"lr": 0.1, "params": ["w"]}],
    }
    assert same(nested, expected)


@pytest.mark.parametrize(
    ("one", "other", "groups"),
    [
        (0.1, 0.1, 1),
        (0.1, 0.2, 2),
        (1, 1.0, 2),
        (True, 1, 2),
        (float("nan"), float("nan"), 1),
        (None, None, 1),
        ([0.1], (0.1,), 2),
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}, 1),
        ({"a": {"b": 1}}, {"a": {"b": 2}}, 2),
        (torch.tensor(0.1), torch.tensor(0.1), 1),
        (torch.tensor(0.1), torch.tensor(0.2), 2),
        (torch.tensor(0.1), torch.tensor(0.1, dtype=torch.float64), 2),
        (torch.tensor(0.1), 0.1, 2),
        ([torch.ones(2)], [torch.ones(2)], 1),
    ],
)
def test_parameters_of_equal_options_are_one_group(one: object, other: object, groups: int) -> None:
    forest = Forest()
    tree = forest.tree({"param_groups.a.x": one, "param_groups.b.x": other})
    found = optimizer.read(optimizer.nested(tree, digest=forest.digest)).held()
    assert len(found) == groups


def test_a_state_belongs_to_the_longest_name_that_it_begins_with() -> None:
    forest = Forest()
    flattened = {
        "state.a.b.step": 1,
        "state.a.step": 2,
        "param_groups.a.lr": 0.1,
        "param_groups.a.b.lr": 0.1,
    }
    nested = optimizer.nested(forest.tree(flattened), digest=forest.digest)
    assert same(forest.value(nested.get("state")), {"a": {"step": 2}, "a.b": {"step": 1}})


@pytest.mark.parametrize(
    ("found", "said"),
    [
        ({"state": {}, "param_groups.w.lr": 0.1}, "nested and flattened at once"),
        ({"state": [{"a": torch.ones(1)}], "param_groups": []}, "state is not a dict"),
        ({"state": {}, "param_groups": {"a": {"params": []}}}, "not a list of groups"),
        ({"state": {}, "param_groups": [{"lr": 0.1}]}, "Group 0 .* does not list its parameters"),
        ({"state": {}, "param_groups": [{"params": ["a", 1]}]}, "names and numbers at once"),
        ({"state": {}, "param_groups": [{"params": ["a", "a"]}]}, "list parameter a twice"),
        ({"state.b.step": 1, "param_groups.a.lr": 0.1}, "state.b.step is of a parameter that no"),
    ],
)
def test_what_is_no_state_dict_of_an_optimizer_is_refused(found: StateDict, said: str) -> None:
    forest = Forest()
    with pytest.raises(UnsupportedError, match=said):
        optimizer.nested(forest.tree(found), digest=forest.digest)


@pytest.mark.parametrize("where", ["state", "param_groups"])
def test_two_names_that_become_one_are_refused(where: str) -> None:
    twins = ["w", "_orig_mod.w"]
    found = {
        "state": {name: {"step": 1} for name in twins} if where == "state" else {},
        "param_groups": [{"params": twins if where == "param_groups" else []}],
    }
    forest = Forest()
    with pytest.raises(UsageError, match=r"w and _orig_mod\.w of the optimizer would both be"):
        optimizer.nested(forest.tree(found), digest=forest.digest)


def test_two_entries_of_one_flattened_name_are_refused() -> None:
    state = {"a": {"b": {"step": 1}}, "a.b": {"step": 2}}
    found = {"state": state, "param_groups": [{"lr": 0.1, "params": ["a", "a.b"]}]}
    with pytest.raises(UnsupportedError, match=r"Two entries .* state\.a\.b\.step"):
        optimizer.flattened(Forest().tree(found))


def test_numbers_with_text_keys_become_numbers_again() -> None:
    forest = Forest()
    found = {"state": {"0": {"step": 1}}, "param_groups": [{"lr": 0.1, "params": [0]}]}
    written = optimizer.written(optimizer.read(forest.tree(found)))
    assert same(forest.value(written), found | {"state": {0: {"step": 1}}})


def test_numbers_before_the_first_step_are_seen_in_the_groups() -> None:
    found = Forest().tree({"state": {}, "param_groups": [{"lr": 0.1, "params": [0, 1]}]})
    assert optimizer.shape_of(found) == "numbered"


GROUPS: StateDict = {
    "state": {name: {"step": place} for place, name in enumerate("abc")},
    "param_groups": [{"lr": 0.1, "params": ["a", "b"]}, {"lr": 0.2, "params": ["c"]}],
}


def test_groups_follow_the_order_of_the_loading_optimizer() -> None:
    """torch pairs parameters by their places in the groups, whatever numbers these list."""
    forest = Forest()
    found = optimizer.numbered(
        forest.tree(GROUPS), ParamNames(("c", "b", "a")), digest=forest.digest
    )
    expected = {
        "state": {2: {"step": 0}, 1: {"step": 1}, 0: {"step": 2}},
        "param_groups": [{"lr": 0.2, "params": [0]}, {"lr": 0.1, "params": [1, 2]}],
    }
    assert same(forest.value(found), expected)


def test_one_group_is_cut_into_those_of_the_loading_optimizer() -> None:
    forest = Forest()
    names = ParamNames(("a", "b", "c"), (1, 1, 1))
    found = optimizer.numbered(forest.tree(GROUPS), names, digest=forest.digest)
    rates = [(group["lr"], group["params"]) for group in forest.value(found.get("param_groups"))]  # type: ignore[attr-defined]
    assert rates == [(0.1, [0]), (0.1, [1]), (0.2, [2])]


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (ParamNames(("a", "c", "b")), "would put a and c into one group|a group into pieces"),
        (ParamNames(("a", "b", "c"), (1, 2)), "would put b and c into one group"),
        (ParamNames(("a", "b")), "c has optimizer state, and --param-names does not list it"),
        (ParamNames(("a", "b", "c", "d")), "lists d, which is in no group"),
    ],
)
def test_an_order_that_the_groups_cannot_have_is_refused(names: ParamNames, said: str) -> None:
    forest = Forest()
    with pytest.raises(UsageError, match=said):
        optimizer.numbered(forest.tree(GROUPS), names, digest=forest.digest)


@pytest.mark.parametrize(
    "layout", ["plain", "accelerate", "titan", "verl", "lightning", "composer"]
)
@pytest.mark.parametrize("shape", ["nested", "flattened", "numbered"])
@pytest.mark.parametrize(
    ("kind", "times"), [("SGD", 0), ("AdamW with tensors for lr", 2)], ids=["empty", "tensors"]
)
def test_an_optimizer_comes_back_from_every_layout(
    tmp_path: Path, layout: str, shape: str, kind: str, times: int
) -> None:
    model = Model()
    built = OPTIMIZERS[kind](two_groups(model))
    stepped(model, built, times)
    nested = nested_of(model, built)
    saved = {
        "nested": nested,
        "flattened": flattened_by_torch(nested),
        "numbered": numbered_of(built),
    }[shape]
    state = {"model": model.state_dict(), "optim": saved}
    loaded = there_and_back(tmp_path, state, names_in_order(model, built), layout)
    assert same(loaded, without_empty(nested))


def there_and_back(tmp_path: Path, state: StateDict, order: list[str], layout: str) -> object:
    """The optimizer of a state dict after it went through a layout, nested again."""
    torch.save(state, tmp_path / "source.pt")
    (tmp_path / "names.txt").write_text("\n".join(order))
    names = ("--param-names", str(tmp_path / "names.txt"))
    there, back, whole = (str(tmp_path / name) for name in ("there", "back", "whole.pt"))
    groups = state["optim"].get("param_groups", [])  # type: ignore[attr-defined]
    is_numbered = any(isinstance(param, int) for group in groups for param in group["params"])
    given = names if is_numbered or layout == "verl" else ()
    source = str(tmp_path / "source.pt")
    ran("reshard", source, "-o", there, "--to-mesh", "2", "--layout", layout, *given)
    found = {
        "accelerate": f"{there}/optimizer_0",
        "titan": f"{there}/step-1",
        "verl": f"{there}/global_step_1/actor",
        "composer": f"{there}/ep0-ba1",
    }.get(layout, there)
    given = names if layout == "verl" else ()
    ran("reshard", found, "-o", back, "--to-mesh", "1", "--layout", "plain", *given)
    ran("export", back, "-o", whole, "--only", "all", "--keep-names")
    return torch.load(whole, weights_only=True)["optim"]


@pytest.mark.filterwarnings("ignore::UserWarning")  # torch's: nothing is distributed here
@pytest.mark.parametrize(("layout", "flat"), [("plain", False), ("titan", True)])
def test_torch_loads_a_layout_as_its_own_state_dict(
    tmp_path: Path, layout: str, *, flat: bool
) -> None:
    def built(times: int) -> tuple[Model, optim.Optimizer]:
        model = Model()
        made = _tensor_lr(two_groups(model))
        stepped(model, made, times)
        return model, made

    model, saved = built(2)
    torch.save(nested_of(model, saved), tmp_path / "optim.pt")
    source, out = str(tmp_path / "optim.pt"), str(tmp_path / "out")
    ran("reshard", source, "-o", out, "--to-mesh", "2", "--layout", layout)
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    other, loading = built(1)
    asked = {
        "optimizer" if flat else "optim": get_optimizer_state_dict(other, loading, options=options)
    }
    dcp.load(asked, checkpoint_id=f"{out}/step-1" if flat else out, **ALONE)
    found = next(iter(asked.values()))
    assert same(found, get_optimizer_state_dict(model, saved, options=options))
    set_optimizer_state_dict(other, loading, found, options=options)
    assert same(loading.state_dict()["state"], saved.state_dict()["state"])


def test_an_optimizer_without_anything_is_written_or_refused(tmp_path: Path) -> None:
    torch.save({"state": {}, "param_groups": []}, tmp_path / "none.pt")
    command = ["reshard", str(tmp_path / "none.pt"), "--to-mesh", "2", "--layout"]
    ran(*command, "plain", "-o", str(tmp_path / "plain"))
    assert [entry.fqn for entry in read_index(str(tmp_path / "plain")).objects] == [
        "optim.param_groups"
    ]
    done = run(*command, "titan", "-o", tmp_path / "titan")
    assert done.exit_code == 1
    assert "nothing that is chosen has a place in --layout titan" in done.stderr
    assert not (tmp_path / "titan").exists()
