"""Real optimizers, their state dicts as trees of entries, and what torch's own functions give."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from hashlib import sha256

import torch
from torch import nn
from torch.distributed.checkpoint import state_dict as torch_state_dict

from ckpt_tools.core.dtypes import BY_NAME
from ckpt_tools.core.index import ByteRange, Entry, ObjectEntry, TensorEntry
from ckpt_tools.core.names import join
from ckpt_tools.core.plain_values import PlainValue
from ckpt_tools.core.state_tree import Branch, Path, Tree

NOWHERE = ByteRange("", 0, 0)
StateDict = dict[str, object]


class Model(nn.Module):
    """Two layers, an embedding of names with dots, and a parameter that is frozen."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 3, bias=False))
        self.last = nn.Linear(3, 2)
        self.frozen = nn.Parameter(torch.ones(5), requires_grad=False)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """The last layer of the first."""
        out: torch.Tensor = self.last(self.first(rows))
        return out


Make = Callable[[list[dict[str, object]]], torch.optim.Optimizer]


def two_groups(model: nn.Module, *, matrices_only: bool = False) -> list[dict[str, object]]:
    """Two groups, not in the order of the model, with rates of their own."""
    params = [p for p in model.parameters() if p.requires_grad]
    if matrices_only:
        params = [p for p in params if p.ndim == 2]
    return [{"params": params[1:], "lr": 0.02}, {"params": params[:1], "lr": 0.01}]


def stepped(model: nn.Module, optimizer: torch.optim.Optimizer, times: int) -> None:
    """So many steps on random rows."""
    for _ in range(times):

        def loss() -> torch.Tensor:
            optimizer.zero_grad()
            value: torch.Tensor = model(torch.randn(6, 4)).square().sum()
            value.backward()
            return value

        loss()
        optimizer.step(loss)  # type: ignore[arg-type]  # returns a tensor, as torch's examples do


def numbered_of(optimizer: torch.optim.Optimizer) -> StateDict:
    """What the optimizer itself gives."""
    return copy.deepcopy(optimizer.state_dict())


def names_in_order(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[str]:
    """The parameters' names in the optimizer's own order."""
    names = {id(param): name for name, param in model.named_parameters()}
    return [names[id(param)] for group in optimizer.param_groups for param in group["params"]]


def nested_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> StateDict:
    """The same by names, as `get_optimizer_state_dict` does it, but without a first step."""
    names = names_in_order(model, optimizer)
    found = numbered_of(optimizer)
    state, groups = found["state"], found["param_groups"]
    assert isinstance(state, dict)
    assert isinstance(groups, list)
    found["state"] = {names[key]: value for key, value in state.items()}
    for group in groups:
        group["params"] = [names[number] for number in group["params"]]
    return found


def flattened_by_torch(nested: StateDict) -> StateDict:
    """What torch makes of a nested state dict; it raises NotImplementedError for lists."""
    return dict(torch_state_dict._flatten_optim_state_dict(copy.deepcopy(nested)))  # type: ignore[arg-type]


def unflattened_by_torch(
    model: nn.Module, optimizer: torch.optim.Optimizer, flattened: StateDict
) -> StateDict:
    """What torch makes of a flattened state dict for this very optimizer."""
    options = torch_state_dict.StateDictOptions(flatten_optimizer_state_dict=True)
    info = torch_state_dict._verify_options(model, (optimizer,), optim_only=True, options=options)
    return dict(torch_state_dict._unflatten_optim_state_dict(optimizer, flattened, info))  # type: ignore[arg-type]


@dataclass(slots=True)
class Forest:
    """State dicts as trees of entries, which keep their values here."""

    values: dict[int, object] = field(default_factory=dict)
    kept: list[Entry] = field(default_factory=list)

    def grow(self, value: object, path: Path = ()) -> Tree[Entry]:
        """The tree of a value, as the readers make it: a list without tensors and dicts is one."""
        if isinstance(value, torch.Tensor):
            dtype = BY_NAME[str(value.dtype).removeprefix("torch.")]
            tensor = TensorEntry(join(path), path, "optim", dtype, tuple(value.shape), ())
            return self._kept(tensor, value)
        if isinstance(value, dict):
            items = [self.grow(item, (*path, str(key))) for key, item in value.items()]
            return Branch("dict", tuple(value), tuple(items))
        if isinstance(value, list | tuple) and _is_walked(value):
            items = [self.grow(item, (*path, place)) for place, item in enumerate(value)]
            return Branch("list" if isinstance(value, list) else "tuple", None, tuple(items))
        entry = ObjectEntry(join(path), path, "optim", NOWHERE, value=value, opened=True)  # type: ignore[arg-type]
        return self._kept(entry, value)

    def tree(self, value: Mapping[str, object]) -> Branch[Entry]:
        """The tree of a state dict."""
        found = self.grow(dict(value))
        assert isinstance(found, Branch)
        return found

    def _kept(self, entry: Entry, value: object) -> Entry:
        self.values[id(entry)] = value
        self.kept.append(entry)
        return entry

    def value(self, tree: Tree[Entry]) -> object:
        """What a tree holds."""
        if isinstance(tree, Branch):
            items = [self.value(item) for item in tree.items]
            if tree.keys is not None:
                return dict(zip(tree.keys, items, strict=True))
            return tuple(items) if tree.kind == "tuple" else items
        made: PlainValue = tree.value if isinstance(tree, ObjectEntry) else None
        return self.values.get(id(tree), made)

    def digest(self, entry: Entry) -> str:
        """The bytes of a tensor."""
        value = self.values[id(entry)]
        assert isinstance(value, torch.Tensor)
        return sha256(value.contiguous().view(-1).view(torch.uint8).numpy().tobytes()).hexdigest()


def _is_walked(value: object) -> bool:
    if isinstance(value, dict | torch.Tensor):
        return True
    return isinstance(value, list | tuple) and any(map(_is_walked, value))


def same(one: object, other: object) -> bool:
    """Whether two values are equal in kind and bit for bit."""
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if (
        isinstance(one, list | tuple)
        and type(one) is type(other)
        and isinstance(other, list | tuple)
    ):
        return len(one) == len(other) and all(map(same, one, other))
    return type(one) is type(other) and (one == other or repr(one) == repr(other) == "nan")


def without_empty(found: StateDict) -> StateDict:
    """A nested state dict without parameters that have no state: torch says so in two ways."""
    state = found["state"]
    assert isinstance(state, dict)
    return found | {"state": {name: held for name, held in state.items() if held}}
