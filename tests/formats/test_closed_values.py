"""Values of classes that are not opened: they go along into every format, as they were."""

import argparse
import collections
import datetime as dt
import decimal
import enum
import fractions
import io
import pathlib
import pickle
import random
import types
import uuid
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from running import run

import ckpt_tools
from ckpt_tools import ExportOptions, ReadOptions, ReshardOptions, WriteOptions, api
from ckpt_tools.core.layout import Mesh
from ckpt_tools.core.plain_values import PickledValue
from ckpt_tools.errors import UnreadableError
from ckpt_tools.formats.pickle.dump import dumps
from ckpt_tools.formats.pickle.load import load_plain, load_tensors

T = torch.arange(6.0)
CHECKED = WriteOptions(check=True)


class Color(enum.Enum):
    RED = 1


Pair = collections.namedtuple("Pair", "a b")  # noqa: PYI024 - as users have them


def looped() -> argparse.Namespace:
    made = argparse.Namespace(lr=0.1)
    made.parent, made.held = made, {"again": [made]}
    return made


CLOSED = {
    "array": lambda: np.arange(6, dtype=">i4").reshape(2, 3),
    "array by columns": lambda: np.asfortranarray(np.arange(6.0).reshape(2, 3)),
    "array with turned axes": lambda: np.arange(24.0).reshape(2, 3, 4).transpose(1, 0, 2),
    "array of objects": lambda: np.array([1, "x", None], dtype=object),
    "structured array": lambda: np.zeros(2, dtype=[("a", "f4"), ("b", "i8")]),
    "random state": np.random.get_state,
    "generator": lambda: np.random.default_rng(3).bit_generator.state,
    "dtype": lambda: np.dtype("f8"),
    "complex of numpy": lambda: np.complex64(1j),
    "text of numpy": lambda: np.str_("a"),
    "time of numpy": lambda: np.datetime64(1, "s"),
    "date": lambda: dt.datetime(2026, 11, 29, 2, 3, tzinfo=dt.timezone(dt.timedelta(hours=1))),
    "deque": lambda: collections.deque([1, [2.5]], maxlen=4),
    "namespace": lambda: argparse.Namespace(lr=0.1, sub=types.SimpleNamespace(x={"a": (1, 2)})),
    "path": lambda: pathlib.PosixPath("runs/7"),
    "decimal": lambda: decimal.Decimal("1.10"),
    "fraction": lambda: fractions.Fraction(1, 3),
    "uuid": lambda: uuid.UUID(int=7),
    "bytearray": lambda: bytearray(b"ab"),
    "random of python": lambda: random.Random(3),  # noqa: S311 - its state is what is kept
    "in a list": lambda: [1, np.arange(2), {"at": dt.date(2026, 1, 2)}],
    "type": lambda: np.float32,
    "many strings": lambda: argparse.Namespace(**{f"field_{n}": f"value {n}" for n in range(400)}),
}


def loads(data: bytes) -> object:
    """What Python makes of a pickle of ours."""
    return pickle.loads(data)  # noqa: S301 - made here


def spelled(value: object) -> bytes:
    """The value's pickle: equal for equal values of equal types."""
    return pickle.dumps(loads(pickle.dumps(value, 2)), 2)


def there_and_back(path: Path, folder: Path) -> dict[str, object]:
    """What torch loads after a .pt became a DCP directory, rank files and a .pt again."""
    for form in ("dcp", "ranks"):
        index = ckpt_tools.open_checkpoint(str(path))
        wanted = ReshardOptions(Mesh((2,)), format=form)
        api.reshard(index, str(folder / form), options=wanted, write=CHECKED)
        path = folder / form
    return as_torch_file(path, folder / "b.pt")


def as_torch_file(path: Path, out: Path, *, allow: tuple[str, ...] = ()) -> dict[str, object]:
    """What torch loads of it, written as one torch file."""
    index = ckpt_tools.open_checkpoint(str(path), options=ReadOptions(allow))
    wanted = ExportOptions(format="torch", keep_names=True, only=None)
    api.export(index, str(out), options=wanted, write=CHECKED)
    return torch.load(out, weights_only=False)  # type: ignore[no-any-return]


@pytest.mark.parametrize("protocol", [2, 4, 5])
def test_a_closed_value_goes_along(protocol: int, tmp_path: Path) -> None:
    values = {kind: make() for kind, make in CLOSED.items()}
    state = {"w": T, "odd": values, "more": values}
    torch.save(state, tmp_path / "a.pt", pickle_protocol=protocol)
    found = there_and_back(tmp_path / "a.pt", tmp_path)
    wanted = {kind: spelled(value) for kind, value in values.items()}
    for place in (found["odd"], found["more"]):
        assert isinstance(place, dict)
        assert {kind: spelled(value) for kind, value in place.items()} == wanted


@pytest.mark.parametrize("kind", ["array", "array by columns", "random state"])
def test_an_array_is_the_same_value_in_every_protocol(kind: str, tmp_path: Path) -> None:
    written = []
    for protocol in (2, 5):
        path = tmp_path / f"{protocol}.pt"
        torch.save({"w": T, "odd": CLOSED[kind]()}, path, pickle_protocol=protocol)
        written.append([one.value for one in ckpt_tools.open_checkpoint(str(path)).objects])
    assert written[0] == written[1]


def test_a_set_of_tuples_goes_along(tmp_path: Path) -> None:
    torch.save({"w": T, "odd": {(1, 2), (3, 4)}}, tmp_path / "a.pt")
    assert there_and_back(tmp_path / "a.pt", tmp_path)["odd"] == {(1, 2), (3, 4)}


def test_a_value_that_holds_itself_goes_along(tmp_path: Path) -> None:
    torch.save({"w": T, "args": looped(), "list": [looped()]}, tmp_path / "a.pt")
    found = there_and_back(tmp_path / "a.pt", tmp_path)
    args = found["args"]
    assert isinstance(args, argparse.Namespace)
    assert args.parent is args
    assert args.held["again"][0] is args


def test_what_is_allowed_by_name_goes_along(tmp_path: Path) -> None:
    state = {"w": T, "color": Color.RED, "pair": Pair(1, Color.RED)}
    torch.save(state, tmp_path / "a.pt")
    allow = (f"{__name__}.*",)
    found = as_torch_file(tmp_path / "a.pt", tmp_path / "b.pt", allow=allow)
    index = ckpt_tools.open_checkpoint(str(tmp_path / "a.pt"), options=ReadOptions(allow))
    api.reshard(index, str(tmp_path / "o"), options=ReshardOptions(Mesh((2,))), write=CHECKED)
    loaded: dict[str, object] = {"color": None, "pair": None}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that it runs in one process
        dcp.load(loaded, checkpoint_id=tmp_path / "o")
    for one in (found, loaded):
        assert one["color"] is Color.RED
        assert one["pair"] == Pair(1, Color.RED)
        assert type(one["pair"]) is Pair


class _Writes:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return np.save, (str(self.path), np.arange(3))


@pytest.mark.parametrize("hidden", [False, True])
def test_a_function_that_does_more_than_hold_data_is_not_passed_on(
    *, hidden: bool, tmp_path: Path
) -> None:
    writes: object = _Writes(tmp_path / "made.npy")
    torch.save(
        {"w": T, "odd": argparse.Namespace(x=writes) if hidden else writes}, tmp_path / "a.pt"
    )
    words = [str(tmp_path / "a.pt"), "-o", str(tmp_path / "o"), "--to-mesh", "2"]
    done = run("reshard", *words)
    assert done.exit_code == 0, done.stderr
    assert "Left out 1 object that cannot be written: odd" in done.stderr
    assert not any(b"numpy\nsave" in path.read_bytes() for path in (tmp_path / "o").iterdir())
    assert not (tmp_path / "made.npy").exists()


def test_an_object_of_an_unknown_class_stays_what_it_is_from_dcp_to_dcp(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that it runs in one process
        dcp.save({"w": T, "color": Color.RED}, checkpoint_id=tmp_path / "a")
    index = ckpt_tools.open_checkpoint(str(tmp_path / "a"))
    api.reshard(index, str(tmp_path / "b"), options=ReshardOptions(Mesh((2,))), write=CHECKED)
    state: dict[str, object] = {"color": None}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        dcp.load(state, checkpoint_id=tmp_path / "b")
    assert state["color"] is Color.RED
    wanted = ExportOptions(format="torch", keep_names=True, only=None)
    plan = api.export(index, str(tmp_path / "b.pt"), options=wanted, write=WriteOptions())
    assert any(f"cannot be written: color ({__name__}.Color)" in note for note in plan.notes)


def test_what_is_allowed_by_name_goes_along_from_dcp_too(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that it runs in one process
        dcp.save({"w": T, "color": Color.RED, "pair": (T, Color.RED)}, checkpoint_id=tmp_path / "a")
    words = ["-o", tmp_path / "b.pt", "--only", "all", "--keep-names", "--check"]
    done = run("export", tmp_path / "a", *words, "--allow-global", f"{__name__}.Color")
    assert done.exit_code == 0, done.stderr
    assert "Left out" not in done.stderr
    found = torch.load(tmp_path / "b.pt", weights_only=False)
    assert found["color"] is Color.RED
    assert torch.equal(found["pair"][0], T)
    assert found["pair"][1] is Color.RED
    words = ["-o", tmp_path / "c", "--to-mesh", "2", "--check"]
    done = run("reshard", tmp_path / "a", *words, "--allow-global", f"{__name__}.Color")
    assert done.exit_code == 0, done.stderr


def test_tensors_in_a_closed_value_are_said_to_go(tmp_path: Path) -> None:
    torch.save({"w": T, "odd": collections.deque([1, T])}, tmp_path / "a.pt")
    words = [str(tmp_path / "a.pt"), "-o", str(tmp_path / "o"), "--to-mesh", "2"]
    done = run("reshard", *words)
    assert done.exit_code == 0, done.stderr
    assert "cannot be written: odd (collections.deque with tensors)" in done.stderr


def test_values_that_differ_are_told_apart(tmp_path: Path) -> None:
    torch.save({"w": T, "at": dt.date(2026, 1, 1)}, tmp_path / "a.pt")
    torch.save({"w": T, "at": dt.date(2026, 1, 2)}, tmp_path / "b.pt")
    done = run("diff", tmp_path / "a.pt", tmp_path / "b.pt")
    assert done.exit_code == 1
    assert "(datetime.date, " in done.stdout


@pytest.mark.slow
def test_an_array_of_a_hundred_megabytes_goes_along(tmp_path: Path) -> None:
    torch.save({"w": T, "order": np.arange(9_000_000)}, tmp_path / "a.pt")
    index = ckpt_tools.open_checkpoint(str(tmp_path / "a.pt"))
    api.reshard(index, str(tmp_path / "o"), options=ReshardOptions(Mesh((2,))), write=CHECKED)


def test_equal_values_have_equal_pickles_whatever_the_protocol() -> None:
    value = CLOSED["namespace"]()
    made = {load_plain(pickle.dumps(value, protocol), where="x") for protocol in range(2, 6)}
    assert len(made) == 1
    (one,) = made
    assert isinstance(one, PickledValue)
    assert loads(one.pickle) == value


def test_a_pickle_in_a_pickle_keeps_its_memo() -> None:
    text = "x" * 300
    inner = load_plain(pickle.dumps(argparse.Namespace(a=text, b=text, c=[text]), 2), where="x")
    assert isinstance(inner, PickledValue)
    outer = loads(dumps([{f"key {n}": f"value {n}" for n in range(300)}, inner, inner, text]))
    assert isinstance(outer, list)
    assert outer[1:] == [argparse.Namespace(a=text, b=text, c=[text])] * 2 + [text]


@pytest.mark.slow
def test_many_closed_values_that_share_one_do_not_cost_its_size_each() -> None:
    shared = list(range(20_000))
    data = io.BytesIO()
    pickle.dump([argparse.Namespace(x=shared) for _ in range(20_000)], data, 2)
    found = load_tensors(data.getvalue(), where="x.pt")
    assert isinstance(found, list)
    carried = [one for one in found if isinstance(one, PickledValue)]
    assert 0 < sum(len(one.pickle) for one in carried) < 100 << 20


def test_very_many_short_closed_values_leave_room_for_more() -> None:
    dates = [dt.date(2026, 1 + n % 12, 1 + n % 28) for n in range(12_000)]
    found = load_plain(pickle.dumps([dates, argparse.Namespace(lr=0.1)], 5), where="x")
    assert {type(one) for one in (*found[0], found[1])} == {PickledValue}


def test_text_that_is_made_bytes_again_and_again_is_hostile() -> None:
    text = b"X" + (1 << 20).to_bytes(4, "little") + b"a" * (1 << 20) + b"q\x00"
    encode = b"c_codecs\nencode\nq\x01"
    call = b"h\x01h\x00X\x06\x00\x00\x00latin1\x86R"
    data = b"\x80\x02](" + text + encode + call * 100 + b"e."
    with pytest.raises(UnreadableError, match="copies values again and again"):
        load_plain(data, where="x")


def test_a_large_object_stays_closed_where_it_is_only_looked_at(tmp_path: Path) -> None:
    torch.save({"w": T, "text": "x" * (2 << 20), "step": 3}, tmp_path / "a.pt")
    index = ckpt_tools.open_checkpoint(str(tmp_path / "a.pt"))
    api.reshard(index, str(tmp_path / "o"), options=ReshardOptions(Mesh((2,))), write=CHECKED)
    listed = run("ls", tmp_path / "o", "-l").stdout
    assert "= (not opened)" in listed
    assert "= 3" in listed
    pairs = (("o", "o"), ("a.pt", "o"))
    for pair in pairs:
        same = run("diff", *(tmp_path / name for name in pair))
        assert same.exit_code == 0, same.output
    assert as_torch_file(tmp_path / "o", tmp_path / "b.pt")["text"] == "x" * (2 << 20)


def test_bytearrays_of_protocol_5_are_told_apart() -> None:
    value = argparse.Namespace(x=[bytearray(b"%d" % n) for n in range(100)])
    found = load_plain(pickle.dumps(value, 5), where="x")
    assert isinstance(found, PickledValue)
    assert loads(found.pickle) == value


class Outer:
    class Inner(enum.Enum):
        ONE = 1


def test_a_class_in_a_class_is_left_out_for_it_could_not_be_loaded(tmp_path: Path) -> None:
    torch.save({"w": T, "odd": Outer.Inner.ONE}, tmp_path / "a.pt", pickle_protocol=4)
    allow = (f"{__name__}.*",)
    assert as_torch_file(tmp_path / "a.pt", tmp_path / "b.pt", allow=allow).keys() == {"w"}


class Held(dict[str, int]):
    """A dict of its own class."""


@pytest.mark.parametrize("protocol", range(2, 6))
def test_a_dict_of_its_own_class_keeps_its_items(protocol: int) -> None:
    found = load_plain(pickle.dumps(Held(a=1), protocol), where="x")
    assert isinstance(found, PickledValue)
    assert loads(found.pickle) == Held(a=1)
