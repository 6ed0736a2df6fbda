"""One entry that cannot be read is that entry's problem: the rest of the checkpoint is read."""

import argparse
import collections
import datetime as dt
import enum
import pathlib
import shlex
import sys
import types
from collections.abc import Callable
from pathlib import Path
from warnings import catch_warnings, simplefilter

import pytest
import torch
import torch.distributed.checkpoint as dcp
from dtensor_files import ROWS, dtensor, mesh_of, shard
from reader_contract import DATA
from running import run

from ckpt_tools import formats, open_checkpoint
from ckpt_tools.core.index import CheckpointIndex
from ckpt_tools.errors import CheckpointError, UnsafePickleError, UnsupportedError
from ckpt_tools.storage.reader import Files

CASES = DATA / "cases"
W = torch.arange(12.0).reshape(4, 3)


class Own:
    """A class that no reader knows."""


class Color(enum.Enum):
    RED = 1


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(2, 3)


class Wrapped(torch.Tensor):
    """A weight that is converted when it is used, and saved as it is, as torchao's classes are."""

    def __new__(cls, weight: torch.Tensor, dtype: torch.dtype) -> "Wrapped":
        return torch.Tensor._make_wrapper_subclass(cls, weight.shape, dtype=dtype)

    def __init__(self, weight: torch.Tensor, _dtype: torch.dtype) -> None:
        self._tensor = weight
        self._linear_mm_config = argparse.Namespace(emulate=False)
        self._precomputed_scale = torch.ones(())

    @classmethod
    def __torch_dispatch__(
        cls, func: Callable[..., object], _types: object, args: tuple[object, ...], kwargs: object
    ) -> object:
        plain = [one._tensor if isinstance(one, Wrapped) else one for one in args]
        made = func(*plain)
        return cls(made, made.dtype) if isinstance(made, torch.Tensor) else made


@pytest.fixture
def float8_weight(monkeypatch: pytest.MonkeyPatch) -> type[Wrapped]:
    """Our class under the name of torchao's."""
    name = "WeightWithDynamicFloat8CastTensor"
    module = types.ModuleType("torchao.float8.fsdp_utils")
    kind = type(name, (Wrapped,), {"__module__": module.__name__})
    setattr(module, name, kind)
    for parent in ("torchao", "torchao.float8"):
        monkeypatch.setitem(sys.modules, parent, types.ModuleType(parent))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return kind


def save_dcp(folder: Path, state: dict[str, object], **options: object) -> Path:
    with catch_warnings():
        simplefilter("ignore")  # torch says that there is one process
        dcp.save(state, checkpoint_id=folder / "c", **options)  # type: ignore[arg-type]
    return folder / "c"


def quantized() -> torch.Tensor:
    with catch_warnings():
        simplefilter("ignore")
        return torch.quantize_per_tensor(torch.ones(4), 0.1, 0, torch.qint8)


def located(path: Path) -> CheckpointIndex:
    with Files() as files:
        return formats.locate(formats.read_index(str(path)), files)


def saved(folder: Path, value: object, **options: object) -> Path:
    torch.save(value, folder / "x.pt", **options)  # type: ignore[arg-type]  # torch's own options
    return folder / "x.pt"


def assert_only_this_is_refused(index: CheckpointIndex, fqn: str, words: str) -> None:
    with pytest.raises(CheckpointError, match=words) as caught:
        index.require_whole()
    assert fqn in caught.value.message
    rest = {entry.fqn for entry in index.entries} - {fqn}
    index.select(rest).require_whole()
    assert index.object(fqn) is not None


@pytest.mark.parametrize(
    ("odd", "words"),
    [
        (torch.eye(3).to_sparse(), "sparse tensor"),
        (quantized(), "quantized tensor"),
        (torch.empty(3, device="meta"), "meta tensor"),
        (torch.nn.Parameter(torch.eye(3).to_sparse()), "sparse tensor"),
        (Own(), r"Own, which is not on the list"),
        (Own, r"Own, which is not on the list"),
        (Color.RED, r"Color, which is not on the list"),
        ([1, Own()], r"Own, which is not on the list"),
        ({Color.RED: 1}, "a dict with a .*Color as a key"),
        ({W: 1}, "has a dict with a tensor as a key"),
        (Net(), r"whole module of class .*Net.*torch\.save\(model\)"),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
@pytest.mark.parametrize("options", [{}, {"_use_new_zipfile_serialization": False}])
def test_one_foreign_entry_does_not_close_the_file(
    odd: object, words: str, options: dict[str, bool], tmp_path: Path
) -> None:
    state = {"model": {"w": W}, "odd": {"buffer": odd}}
    path = saved(tmp_path, state, **options)
    assert_only_this_is_refused(located(path), "odd.buffer", words)


def test_a_foreign_weight_is_of_the_model(tmp_path: Path) -> None:
    index = located(saved(tmp_path, {"w": W, "odd": torch.eye(3).to_sparse()}))
    assert index.object("odd").section == "model"


def test_what_can_run_code_still_closes_the_file(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> tuple[object, ...]:
            return getattr, (dict, "get")

    with pytest.raises(UnsafePickleError, match=r"builtins\.getattr, which can run code"):
        formats.read_index(str(saved(tmp_path, {"w": W, "odd": Evil()})))


def test_a_refusal_names_all_unknown_globals_in_one_command_line(tmp_path: Path) -> None:
    index = located(saved(tmp_path, {"w": W, "a": Own(), "b": Color.RED}))
    with pytest.raises(UnsafePickleError) as caught:
        index.require_whole()
    names = sorted(f"{kind.__module__}.{kind.__name__}" for kind in (Own, Color))
    options = " ".join(f"--allow-global {name}" for name in names)
    assert str(caught.value.hint).startswith(options)


def test_the_told_command_leaves_out_the_few_entries_that_cannot_be_read(tmp_path: Path) -> None:
    source = saved(tmp_path, {"model": {"w": W}, "a[0]": Own(), "optim": {"state": {}}})
    words = ["reshard", str(source), "-o", str(tmp_path / "out"), "--to-mesh", "2", "-x", "z"]
    refused = run(*words)
    assert refused.exit_code == 3
    told = shlex.split(refused.stderr.splitlines()[-1])
    assert told == ["ckpt-tools", *words, "-x", "a[[]0]"]
    assert run(*told[1:]).exit_code == 0


def test_low_bit_optimizer_state_is_shown_as_what_it_is_and_the_model_read() -> None:
    for path in ("one.pt", "ranks"):
        index = located(CASES / "D04_lowbit_optimizer" / path)
        entry = index.object("optim.state.0.exp_avg")
        assert entry.type_name == "torchao.optim.subclass_8bit.OptimState8bit"
        assert entry.section == "optim"
        index.select({"model.weight", "model.bias"}).require_whole()


def test_a_weight_in_training_with_float8_is_read_as_it_is(
    tmp_path: Path, float8_weight: type[Wrapped]
) -> None:
    whole = {"w": float8_weight(W, W.dtype)}
    paths = [saved(tmp_path, whole), save_dcp(tmp_path, whole), tmp_path / "ranks"]
    paths[2].mkdir()
    for rank in range(2):
        mesh = mesh_of((2,), rank)
        part = float8_weight(shard(W, ROWS, mesh), W.dtype)
        torch.save({"w": dtensor(part, W.shape, ROWS, mesh)}, paths[2] / f"rank_{rank}.pt")
    for path in paths:
        assert torch.equal(open_checkpoint(path)["w"][:], W)


def test_a_weight_of_another_type_than_its_class_says_is_refused(
    tmp_path: Path, float8_weight: type[Wrapped]
) -> None:
    index = located(saved(tmp_path, {"w": float8_weight(W, torch.bfloat16)}))
    with pytest.raises(UnsupportedError, match="w: a tensor of class torchao"):
        index.require_whole()


class Quantized(Wrapped):
    """A tensor with its own way into a pickle, as Transformer Engine's."""

    def __reduce_ex__(self, _protocol: object) -> tuple[object, ...]:
        return Own, (), {"data": self._tensor}


def test_a_tensor_of_an_unknown_class_in_dcp_is_to_be_saved_again_or_left_out(
    tmp_path: Path,
) -> None:
    index = located(save_dcp(tmp_path, {"w": W, "odd": Quantized(W, W.dtype)}))
    with pytest.raises(UnsafePickleError, match=r"item of odd asks for .*\.Own") as caught:
        index.require_whole()
    assert "save it again; -x leaves" in str(caught.value.hint)
    assert "--allow-global" not in str(caught.value.hint)


def test_a_tensor_that_cannot_be_read_on_one_rank_is_named(tmp_path: Path) -> None:
    for rank in range(2):
        mesh = mesh_of((2,), rank)
        whole = dtensor(shard(W, ROWS, mesh), W.shape, ROWS, mesh)
        state = {"w": whole, "v": whole if rank == 0 else torch.eye(3).to_sparse()}
        torch.save(state, tmp_path / f"model_world_size_2_rank_{rank}.pt")
    index = located(tmp_path)
    with pytest.raises(UnsupportedError, match="v: it is read on rank 0, and on rank 1 it is a sp"):
        index.require_whole()
    index.select({"w"}).require_whole()


def test_a_quantized_item_of_dcp_is_one_entrys_problem(tmp_path: Path) -> None:
    path = save_dcp(tmp_path, {"model": {"w": W, "odd": quantized()}})
    assert_only_this_is_refused(located(path), "model.odd", "element type qint8")


def test_a_whole_model_is_named_with_the_way_out(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="whole module") as caught:
        formats.read_index(str(saved(tmp_path, Net())))
    assert "model.state_dict()" in str(caught.value.hint)


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_plain_python_closes_nothing(protocol: int, tmp_path: Path) -> None:
    state = {
        "w": W,
        "plain": [range(3), slice(1, 2), ..., type(None), int, str, bytes, ValueError("x")],
        "counts": collections.defaultdict(int, {"a": 1}),
        "when": dt.datetime(2026, 1, 1, tzinfo=dt.timezone.utc),
        "where": pathlib.PurePosixPath("/a/b"),
    }
    index = located(saved(tmp_path, state, pickle_protocol=protocol))
    index.require_whole()
    assert str(index.object("where").value) == "(pathlib.PurePosixPath)"
    assert index.object("counts.a").value == 1


def test_configs_stay_closed_and_can_be_shown(tmp_path: Path) -> None:
    inner = argparse.Namespace(x=(1, 2))
    index = located(saved(tmp_path, {"w": W, "args": argparse.Namespace(lr=0.1, sub=inner)}))
    entry = index.object("args")
    assert str(entry.value) == "(argparse.Namespace)"
    assert entry.value.fields == {"lr": 0.1, "sub": {"x": [1, 2]}}


def test_a_config_that_holds_itself_has_no_value_to_be_shown(tmp_path: Path) -> None:
    config = argparse.Namespace()
    config.own = config
    entry = located(saved(tmp_path, {"w": W, "args": config})).object("args")
    assert (entry.value.fields, str(entry.value)) == (None, "(argparse.Namespace)")


def test_omegaconf_is_shown_with_its_values() -> None:
    index = located(CASES / "D03_python2_names" / "omegaconf.ckpt")
    index.require_whole()
    found = index.object("hyper_parameters.cfg").value.fields
    assert found == {"lr": 0.001, "l": [1, 2], "n": {"x": "y"}}


def test_a_save_without_flattening_says_so(tmp_path: Path) -> None:
    planner = dcp.DefaultSavePlanner(flatten_state_dict=False)
    state = {"model": {"w": W}, "step": torch.tensor(3)}
    index = located(save_dcp(tmp_path, state, planner=planner))
    with pytest.raises(
        UnsupportedError, match=r"flatten_state_dict=False: 'model' \(1 tensors inside\)"
    ):
        index.require_whole()
    assert index.object("model").section == "model"
