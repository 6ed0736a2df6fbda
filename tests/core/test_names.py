"""Sections: which part of a state dict is the model, and which an optimizer's."""

import pytest

from ckpt_tools.core.index import Path
from ckpt_tools.core.names import classify, is_in_param_groups

GROUP = ("param_groups", 0, "lr")
STATE = ("state", "w", "exp_avg")


def sections(*paths: Path) -> list[str]:
    """The section of each path; those that end in ``lr`` or ``step`` are objects."""
    objects = {path for path in paths if path[-1] in ("lr", "step")}
    return [section for section, _ in classify(paths, objects=objects)]


@pytest.mark.parametrize("above", [("opt_g",), ("opts", 0), ("app", "adam"), ("state",), ("app",)])
def test_what_holds_param_groups_is_an_optimizer_under_any_name(above: Path) -> None:
    assert sections((*above, *STATE), (*above, *GROUP)) == ["optim", "optim"]
    paths = ("app", "model", "w"), ("state", "model", "w"), (*above, *STATE), (*above, *GROUP)
    assert sections(*paths) == ["model", "model", "optim", "optim"]


def test_a_flattened_optimizer_is_one_under_any_name() -> None:
    assert sections(("adam", "state.w.exp_avg"), ("adam", "param_groups.w.lr")) == ["optim"] * 2


@pytest.mark.parametrize("above", ["optim", "optimizer", "app.optim", "optimizers.AdamW"])
def test_an_optimizer_in_a_dict_without_nesting_is_known_by_its_names(above: str) -> None:
    paths = ("model.w",), (f"{above}.state.w.exp_avg",), (f"{above}.param_groups.w.lr",)
    assert sections(*paths) == ["model", "optim", "optim"]
    assert [is_in_param_groups(path) for path in paths] == [False, False, True]
    assert sections(("optim.w",), ("optimizer.state",)) == ["model", "model"]
    assert sections(("encoder.w",), (f"{above}.state.lstm.weight",)) == ["model", "model"]


@pytest.mark.parametrize("container", ["", "model.", "app.model."])
def test_a_state_of_any_kind_is_known_by_its_parameter_or_by_what_is_beside_it(
    container: str,
) -> None:
    paths = (f"{container}a.w",), ("optim.state.a.w.master",), ("optim.state.b.w.v_mean",)
    assert sections(*paths) == ["model", "optim", "optim"]
    assert sections(("optim.state.0.qmap",), ("optim.state.0.step.",)) == ["model", "model"]
    assert sections(("optim.state.0.absmax1",), ("optim.state.1.state1",)) == ["optim", "optim"]


def test_optimizers_of_any_name_are_no_part_of_models_of_any_name() -> None:
    paths = ("generator", "w"), ("opt_g", *STATE), ("opt_g", *GROUP), ("opt_d", *GROUP), ("step",)
    assert sections(*paths) == ["model", "optim", "optim", "optim", "other"]


def test_weights_below_a_model_are_its_own_whatever_their_names() -> None:
    assert sections(("model", "state", "w"), ("model", *GROUP)) == ["model", "model"]


def test_an_optimizer_at_the_top_is_one_beside_a_model_too() -> None:
    assert sections(("net", "w"), STATE, GROUP) == ["model", "optim", "optim"]


def test_states_of_a_trainer_are_no_weights_beside_a_model_of_any_name() -> None:
    paths = ("policy", "w"), ("cuda_rng_state",), ("torch_rng_states", 0)
    assert sections(*paths) == ["model", "other", "other"]


def test_a_part_of_a_bare_model_may_be_called_scaler() -> None:
    assert sections(("scaler", "scale"), ("encoder", "w")) == ["model", "model"]


def containers(*paths: Path) -> list[Path]:
    return [container for _, container in classify(paths)]


def test_a_container_of_weights_in_another_is_a_part_of_it_if_all_is_in_it() -> None:
    assert containers(("model_state", "model", "model.w")) == [("model_state", "model")]
    assert containers(("models", "net", "w"), ("models", "ema", "w")) == [("models",)] * 2
    assert containers(("model", "w"), ("model", "module", "w")) == [("model",)] * 2


def test_a_trainer_may_hold_the_model() -> None:
    paths = ("trainer", "model", "w"), ("trainer", "optimizer", *GROUP), ("trainer", "step")
    assert sections(*paths) == ["model", "optim", "other"]
