import pytest

from ckpt_tools.core.dtypes import BY_NAME, DType
from ckpt_tools.core.index import CheckpointIndex, TensorEntry
from ckpt_tools.errors import UsageError
from ckpt_tools.transforms.dtypes import chosen_dtypes, master_weights_note

BF16, FP32, FP8 = BY_NAME["bfloat16"], BY_NAME["float32"], BY_NAME["float8_e4m3fn"]


def entries(**types: DType) -> list[TensorEntry]:
    return [
        TensorEntry(name.replace("__", "."), (name,), "model", dtype, (2,), ())
        for name, dtype in types.items()
    ]


def test_floats_follow_and_all_else_stays() -> None:
    found, notes = chosen_dtypes(entries(w=FP32, n=BY_NAME["int64"]), BF16, ())
    assert found == {"w": BF16, "n": BY_NAME["int64"]}
    assert not notes


def test_the_last_exception_that_matches_wins() -> None:
    rules = (("*norm*", FP32), ("a.*", None))
    found, _ = chosen_dtypes(entries(a__norm=FP32, b__norm=BF16, c=FP32), BF16, rules)
    assert found == {"a.norm": FP32, "b.norm": FP32, "c": BF16}


def test_exceptions_hold_without_a_type_for_all() -> None:
    found, _ = chosen_dtypes(entries(w=BF16, norm=BF16), None, (("norm", FP32),))
    assert found == {"w": BF16, "norm": FP32}


def test_float8_and_its_scales_stay_and_are_told() -> None:
    some = entries(
        l__weight=FP8, l__weight_scale_inv=FP32, l__input_scale=FP32, m__weight=FP32, m__scale=FP32
    )
    found, notes = chosen_dtypes(some, BF16, ())
    kept = {"l.weight": FP8, "l.weight_scale_inv": FP32, "l.input_scale": FP32}
    assert found == {**kept, "m.weight": BF16, "m.scale": BF16}
    assert "3 float8 tensors and their scales keep their types" in notes[0]


def test_an_exception_by_name_casts_float8_too() -> None:
    found, notes = chosen_dtypes(entries(l__weight=FP8), BF16, (("l.*", FP32),))
    assert found == {"l.weight": FP32}
    assert not notes


def test_a_pattern_that_cannot_be_read_is_refused() -> None:
    with pytest.raises(UsageError):
        chosen_dtypes(entries(w=FP32), None, (("re:(", FP32),))


def test_master_weights_of_the_optimizer_are_told_and_not_taken() -> None:
    (model,) = entries(w=BF16)
    path = ("optim", "state", "w", "master_param")
    master = TensorEntry("optim.state.w.master_param", path, "optim", FP32, (2,), ())
    index = CheckpointIndex("run", "dcp", (master, model))
    (note,) = master_weights_note(index, [model])
    assert "1 float32 master weight " in note
    assert "the model's own, bfloat16" in note
    assert not master_weights_note(CheckpointIndex("run", "dcp", (model,)), [model])
