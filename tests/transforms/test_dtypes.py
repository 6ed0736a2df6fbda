from dataclasses import replace

import pytest

from ckpt_tools.core.dtypes import BY_NAME, DType
from ckpt_tools.core.index import CheckpointIndex, TensorEntry
from ckpt_tools.errors import UsageError
from ckpt_tools.transforms.base import TransformedTensor
from ckpt_tools.transforms.dtypes import DtypePolicy, master_weights_note

BF16, FP32, FP8 = BY_NAME["bfloat16"], BY_NAME["float32"], BY_NAME["float8_e4m3fn"]


def entries(**types: DType) -> list[TensorEntry]:
    return [
        TensorEntry(name.replace("__", "."), (name,), "model", dtype, (2,), ())
        for name, dtype in types.items()
    ]


def chosen_dtypes(
    tensors: list[TensorEntry], dtype: DType | None, rules: tuple[tuple[str, DType | None], ...]
) -> tuple[dict[str, DType], list[str]]:
    made = [TransformedTensor(entry, (entry.fqn,)) for entry in tensors]
    index = CheckpointIndex("run", "dcp", tuple(tensors))
    return DtypePolicy(dtype, rules, index).types_of(made)


def test_floats_follow_and_all_else_stays() -> None:
    found, notes = chosen_dtypes(entries(w=FP32, n=BY_NAME["int64"]), BF16, ())
    assert found == {"w": BF16, "n": BY_NAME["int64"]}
    assert not notes


def test_scalars_outside_of_the_model_keep_their_type_unless_they_are_named() -> None:
    weight, scale, step, lr = entries(w=FP32, scale=FP32, w__step=FP32, lr=FP32)
    outside = [replace(one, section="optim", shape=()) for one in (step, lr)]
    tensors = [weight, replace(scale, shape=()), *outside]
    found, notes = chosen_dtypes(tensors, BF16, (("lr", BF16),))
    assert found == {"w": BF16, "scale": BF16, "w.step": FP32, "lr": BF16}
    assert notes == ["Not cast: 1 scalar outside of the model, such as step counters (w.step)."]
    narrow = [replace(one, dtype=BF16) for one in outside]
    assert set(chosen_dtypes(narrow, FP32, ())[0].values()) == {FP32}


def test_the_last_exception_that_matches_wins() -> None:
    rules = (("*norm*", FP32), ("a.*", None))
    found, _ = chosen_dtypes(entries(a__norm=FP32, b__norm=BF16, c=FP32), BF16, rules)
    assert found == {"a.norm": FP32, "b.norm": FP32, "c": BF16}


def test_exceptions_hold_without_a_type_for_all() -> None:
    found, _ = chosen_dtypes(entries(w=BF16, norm=BF16), None, (("norm", FP32),))
    assert found == {"w": BF16, "norm": FP32}


def test_a_quantized_weight_stays_whole_and_is_named() -> None:
    some = entries(
        l__weight=FP8, l__weight_scale_inv=FP32, l__input_scale=FP32, m__weight=FP32, m__scale=FP32
    )
    found, notes = chosen_dtypes(some, BF16, ())
    kept = {"l.weight": FP8, "l.weight_scale_inv": FP32, "l.input_scale": FP32}
    assert found == {**kept, "m.weight": BF16, "m.scale": BF16}
    assert notes == ["Kept exact: 3 tensors of 1 FP8 weight (l.weight)."]


def test_an_exception_by_name_casts_a_quantized_weight_and_says_so() -> None:
    found, notes = chosen_dtypes(entries(l__weight=FP8), BF16, (("l.*", FP32),))
    assert found == {"l.weight": FP32}
    assert notes == ["--dtype-for casts 1 tensor of quantized weights: l.weight."]


def test_packed_codes_in_a_floating_type_are_never_cast() -> None:
    some = entries(l__weight=BF16, l__weight__quant_map=FP32)
    assert chosen_dtypes(some, FP32, (("*norm*", FP32),))[0]["l.weight"] == BF16
    with pytest.raises(UsageError, match="packed 4-bit codes"):
        chosen_dtypes(some, None, (("*weight", FP32),))


def test_a_cast_of_what_may_belong_to_a_quantized_weight_is_refused_with_ways_out() -> None:
    some = entries(l__weight=BY_NAME["int8"], l__other=FP32)
    with pytest.raises(UsageError, match=r"l\.other is beside l\.weight") as caught:
        chosen_dtypes(some, BF16, ())
    hint = str(caught.value.hint)
    assert all(way in hint for way in ("Leave --dtype out", "--dtype-for", "--exclude"))
    assert chosen_dtypes(some, FP32, ())[0]["l.other"] == FP32
    for way in (BF16, None):
        found, _ = chosen_dtypes(some, BF16, (("l.other", way),))
        assert found["l.other"] == (way or FP32)


def test_a_quantized_weight_is_known_by_its_names_in_the_source() -> None:
    some = entries(l__weight=FP8, l__weight_scale=FP32)
    made = [TransformedTensor(replace(e, fqn=f"x{n}"), (e.fqn,)) for n, e in enumerate(some)]
    index = CheckpointIndex("run", "dcp", tuple(some))
    assert DtypePolicy(BF16, (), index).types_of(made)[0] == {"x0": FP8, "x1": FP32}


def test_a_pattern_that_cannot_be_read_is_refused() -> None:
    for some in ([], entries(w=FP32)):
        with pytest.raises(UsageError):
            chosen_dtypes(some, None, (("re:(", FP32),))


def test_master_weights_of_the_optimizer_are_told_and_not_taken() -> None:
    (model,) = entries(w=BF16)
    path = ("optim", "state", "w", "master_param")
    master = TensorEntry("optim.state.w.master_param", path, "optim", FP32, (2,), ())
    index = CheckpointIndex("run", "dcp", (master, model))
    (note,) = master_weights_note(index, [model])
    assert "1 float32 master weight " in note
    assert "the model's own weights are written, in bfloat16" in note
    assert not master_weights_note(CheckpointIndex("run", "dcp", (model,)), [model])


def test_a_narrow_float_stays_though_nothing_stands_beside_it() -> None:
    found, _ = chosen_dtypes(entries(l__weight_scale=FP8, m__weight=FP32), BF16, ())
    assert found == {"l.weight_scale": FP8, "m.weight": BF16}
