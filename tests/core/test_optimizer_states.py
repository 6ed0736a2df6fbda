"""An optimizer is known by what it keeps for a parameter."""

from __future__ import annotations

import pytest
from torch import optim

from ckpt_tools.core.optimizer_states import kind_of
from tests.transforms.optimizers import Make, Model, numbered_of, stepped, two_groups

KINDS: dict[str, Make] = {
    "Adam or AdamW": optim.AdamW,
    "Adam or AdamW with amsgrad": lambda groups: optim.Adam(groups, amsgrad=True),
    "NAdam": optim.NAdam,
    "Adamax": optim.Adamax,
    "Adafactor": optim.Adafactor,
    "Adadelta": optim.Adadelta,
    "RMSprop": optim.RMSprop,
    "Rprop": optim.Rprop,
    "ASGD": optim.ASGD,
    "Adagrad": optim.Adagrad,
    "SGD with momentum, or Muon": lambda groups: optim.SGD(groups, lr=0.1, momentum=0.9),
}


@pytest.mark.parametrize("name", KINDS)
def test_each_optimizer_of_torch_is_known_by_its_state(name: str) -> None:
    model = Model()
    built = KINDS[name](two_groups(model))
    stepped(model, built, 1)
    state = numbered_of(built)["state"]
    assert isinstance(state, dict)
    assert kind_of({key for held in state.values() for key in held}) == name


def test_keys_that_no_optimizer_is_known_for_say_nothing() -> None:
    assert kind_of({"foo"}) is None
