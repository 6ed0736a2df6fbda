"""A random optimizer's state, in each shape that torch gives it, through `reshard --layout plain`.

Afterwards torch's own `dcp.load` and `set_optimizer_state_dict` put it into a fresh optimizer.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from fuzz_cases import states
from fuzz_cases.commands import Commands, Fault
from fuzz_cases.sources import Source, save_dcp
from fuzz_cases.states import State
from torch import nn, optim
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

_Groups = list[dict[str, object]]
_KINDS: tuple[Callable[[_Groups], optim.Optimizer], ...] = (
    *(optim.Adadelta, optim.Adafactor, optim.Adagrad, optim.Adam, optim.Adamax, optim.AdamW),
    *(optim.ASGD, optim.NAdam, optim.RAdam, optim.RMSprop, optim.Rprop),
    lambda groups: optim.SGD(groups, lr=0.1),
    lambda groups: optim.SGD(groups, lr=0.1, momentum=0.9),
    lambda groups: optim.Adam(groups, amsgrad=True),
    lambda groups: optim.AdamW([one | {"lr": torch.tensor(one["lr"])} for one in groups]),
)
_FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


def convert(rng: random.Random, folder: Path, commands: Commands) -> None:
    """Save an optimizer in a random shape, convert it, and load it as torch does."""
    torch.manual_seed(rng.randrange(1 << 32))
    shape, kind = rng.choice(("nested", "flattened", "numbered")), rng.choice(_KINDS)
    cut, seed = rng.random(), rng.random()
    model, saved = _built(random.Random(seed), kind, cut, rng.choice((1, 2)))  # noqa: S311
    source = _save(rng, folder / "source", model, saved, shape)
    layout = rng.choice(("plain", "titan"))
    words: list[str | Path] = ["reshard", source.path, "-o", folder / "out", "--layout", layout]
    words += ["--to-mesh", rng.choice(("1", "2", "3", "2x2"))]
    if shape == "numbered":
        (folder / "names.txt").write_text("\n".join(_names(model, saved)))
        words += ["--param-names", folder / "names.txt"]
    commands.write(source, folder / "out", *words, reasons=())
    other, fresh = _built(random.Random(seed), kind, cut, 1)  # noqa: S311
    asked, wanted = _asked(other, fresh, layout), _asked(model, saved, layout)
    place = next((folder / "out").glob("step-*")) if layout == "titan" else folder / "out"
    dcp.load(asked, checkpoint_id=place)
    if states.spelled(asked) != states.spelled(wanted):
        raise Fault(f"dcp.load gives {asked} and not {wanted}"[:2000])
    options = _FLAT if layout == "titan" else None
    loaded = asked["optimizer" if layout == "titan" else "optim"]
    set_optimizer_state_dict(other, fresh, loaded, options=options)  # type: ignore[arg-type]
    ours, theirs = _states(fresh), _states(saved)
    if states.spelled(ours) != states.spelled(theirs):
        raise Fault(f"loaded: {ours} and not {theirs}"[:2000])


def _states(optimizer: optim.Optimizer) -> dict[int, State]:
    """The state of each parameter that has any; torch says of the others what it likes."""
    return {key: value for key, value in optimizer.state_dict()["state"].items() if value}


def _asked(model: nn.Module, optimizer: optim.Optimizer, layout: str) -> State:
    """What the loader of a layout asks for: TorchTitan has the model beside a flat optimizer."""
    if layout == "titan":
        found = get_optimizer_state_dict(model, optimizer, options=_FLAT)
        return {**get_model_state_dict(model), "optimizer": found}
    found = get_optimizer_state_dict(model, optimizer)
    return {"model": get_model_state_dict(model), "optim": found}


def _built(
    rng: random.Random, kind: Callable[[_Groups], optim.Optimizer], cut: float, times: int
) -> tuple[nn.Module, optim.Optimizer]:
    """A model of a few layers, some of it frozen, and an optimizer of one group or of two."""
    sizes = [rng.choice((1, 2, 3, 4, 5)) for _ in range(rng.choice((2, 3, 4)))]
    layers = [nn.Linear(a, b, bias=rng.random() < 0.7) for a, b in pairwise(sizes)]
    model = nn.Sequential(*layers)
    params = list(model.parameters())
    for param in params[1:]:
        param.requires_grad_(rng.random() < 0.8)
    params = [param for param in params if param.requires_grad]
    rng.shuffle(params)
    at = 1 + int(cut * (len(params) - 1))
    groups = [{"params": params[:at], "lr": 0.01}, {"params": params[at:], "lr": 0.02}]
    built = kind([group for group in groups if group["params"]])
    for _ in range(times):
        built.zero_grad()
        model(torch.randn(6, sizes[0])).square().sum().backward()
        built.step()
    return model, built


def _names(model: nn.Module, optimizer: optim.Optimizer) -> list[str]:
    names = {id(param): name for name, param in model.named_parameters()}
    return [names[id(param)] for group in optimizer.param_groups for param in group["params"]]


def _save(
    rng: random.Random, folder: Path, model: nn.Module, optimizer: optim.Optimizer, shape: str
) -> Source:
    """The model and its optimizer, as a torch file or as torch's own DCP directory."""
    if shape == "numbered":
        found = copy.deepcopy(optimizer.state_dict())
    else:
        options = _FLAT if shape == "flattened" else None
        found = get_optimizer_state_dict(model, optimizer, options=options)
    state: State = {"model": model.state_dict(), "optim": found, "step": 7}
    folder.mkdir()
    if rng.random() < 0.5:
        torch.save(state, folder / "a.pt")
        return Source(folder / "a.pt", "pt", state)
    save_dcp(state, folder / "dcp")
    return Source(folder / "dcp", "dcp", state)
