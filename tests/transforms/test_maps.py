import hashlib
import json
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from reader_contract import DATA
from running import Result, run
from safetensors.numpy import load_file, save_file

from ckpt_tools import api, formats
from ckpt_tools.convert import export as convert
from ckpt_tools.convert.export import ExportOptions
from ckpt_tools.convert.write import WriteOptions
from ckpt_tools.copying.read import read_array
from ckpt_tools.core.dtypes import BY_NAME, dtype_named
from ckpt_tools.core.geometry import Box
from ckpt_tools.core.index import ByteRange, Chunk, TensorEntry
from ckpt_tools.errors import UsageError
from ckpt_tools.storage.reader import Files
from ckpt_tools.transforms import maps
from ckpt_tools.transforms.base import Transform, TransformedTensor
from ckpt_tools.transforms.maps import views
from ckpt_tools.transforms.maps.renaming import UnderTransform
from ckpt_tools.transforms.maps.toml import builtins_to_hf

REAL = DATA / "checkpoints"
TITAN = REAL / "torchtitan_llama3_4r" / "ckpt"
HEADS = {"head_dim": 4}


def export(source: Path, out: Path, *steps: Transform, **options: object) -> convert.ExportPlan:
    return api.export(
        formats.read_index(str(source)),
        str(out),
        options=ExportOptions(steps=steps, **options),
        write=WriteOptions(),
        on_bytes=lambda _: None,
    )


def stored(folder: Path, array: np.ndarray, cuts: tuple[tuple[slice, ...], ...]) -> TensorEntry:
    """The array on disk in these pieces, packed one behind the other."""
    path = folder / f"pieces{len(list(folder.iterdir()))}.bin"
    chunks, data = [], b""
    for cut in cuts:
        piece = np.ascontiguousarray(array[cut])
        spans = [s.indices(n) for s, n in zip(cut, array.shape, strict=True)]
        box = Box(tuple(s[0] for s in spans), piece.shape)
        chunks.append(Chunk(box, ByteRange(str(path), len(data), piece.nbytes)))
        data += piece.tobytes()
    path.write_bytes(data)
    return TensorEntry("x", ("x",), "model", BY_NAME["int32"], array.shape, tuple(chunks))


def values(view: TensorEntry) -> np.ndarray:
    with Files() as files:
        raw = read_array(view, Box.whole(view.shape), files=files)
    return np.frombuffer(raw, np.int32).reshape(view.shape)


def in_rows(count: int, step: int) -> tuple[tuple[slice, ...], ...]:
    return tuple((slice(a, min(a + step, count)), slice(None)) for a in range(0, count, step))


ROWS = np.arange(24 * 5, dtype=np.int32).reshape(24, 5)
COLUMNS = ((slice(None), slice(0, 2)), (slice(None), slice(2, 5)))


@pytest.mark.parametrize("cuts", [in_rows(24, 24), in_rows(24, 5), in_rows(24, 1), COLUMNS])
@pytest.mark.parametrize("head_dim", [2, 4, 6, 12])
def test_rotary_rows_are_those_of_a_reshape_and_come_back(
    tmp_path: Path, cuts: tuple[tuple[slice, ...], ...], head_dim: int
) -> None:
    view = stored(tmp_path, ROWS, cuts)
    halves = views.rotary_to_halves(view, head_dim)
    wanted = ROWS.reshape(-1, head_dim // 2, 2, 5).transpose(0, 2, 1, 3).reshape(24, 5)
    assert np.array_equal(values(halves), wanted)
    assert np.array_equal(values(views.rotary_to_pairs(halves, head_dim)), ROWS)
    again = views.rotary_to_pairs(stored(tmp_path, wanted, cuts), head_dim)
    assert np.array_equal(values(again), ROWS)


@pytest.mark.parametrize("cuts", [in_rows(24, 24), in_rows(24, 7), COLUMNS])
def test_views_are_those_of_numpy(tmp_path: Path, cuts: tuple[tuple[slice, ...], ...]) -> None:
    view = stored(tmp_path, ROWS, cuts)
    assert np.array_equal(values(views.transpose(view)), ROWS.T)
    turned = views.narrow(views.transpose(view), 1, start=3, size=15)
    assert np.array_equal(values(turned), ROWS.T[:, 3:18])
    both = views.concat([view, views.narrow(view, 1, start=1, size=2)], 1)
    assert np.array_equal(values(both), np.concatenate([ROWS, ROWS[:, 1:3]], 1))
    stacked = views.stack([view, view])
    assert np.array_equal(values(stacked), np.stack([ROWS, ROWS]))
    assert np.array_equal(values(views.transpose(views.unstack(stacked, 1))), ROWS.T)
    assert np.array_equal(values(views.stack([views.transpose(view)] * 2))[1], ROWS.T)


def test_a_view_of_a_bias_and_of_an_empty_tensor(tmp_path: Path) -> None:
    bias = np.arange(8, dtype=np.int32)
    view = stored(tmp_path, bias, ((slice(0, 3),), (slice(3, 8),)))
    assert values(views.rotary_to_halves(view, 4)).tolist() == [0, 2, 1, 3, 4, 6, 5, 7]
    empty = stored(tmp_path, np.zeros((0, 5), np.int32), ((slice(0, 0), slice(None)),))
    assert values(views.transpose(empty)).shape == (5, 0)


def turned(array: np.ndarray, head_dim: int, *, to_halves: bool) -> np.ndarray:
    heads, half = array.shape[0] // head_dim, head_dim // 2
    inner = (half, 2) if to_halves else (2, half)
    shape = (heads, *inner, *array.shape[1:])
    return array.reshape(shape).swapaxes(1, 2).reshape(array.shape)


def stepped(
    view: TensorEntry, array: np.ndarray, data: st.DataObject
) -> tuple[TensorEntry, np.ndarray]:
    """One view of a view, and what numpy makes of the same."""
    way = data.draw(st.sampled_from(["turn", "cut", "join", "stack", "halves", "pairs"]))
    if way == "turn":
        return views.transpose(view), array.T
    if way == "cut":
        dim = data.draw(st.integers(0, 1))
        start = data.draw(st.integers(0, array.shape[dim] - 1))
        size = data.draw(st.integers(1, array.shape[dim] - start))
        wanted = np.take(array, range(start, start + size), dim)
        return views.narrow(view, dim, start=start, size=size), wanted
    if way == "join":
        dim = data.draw(st.integers(0, 1))
        return views.concat([view, view], dim), np.concatenate([array, array], dim)
    if way == "stack":
        both = views.stack([view, views.narrow(view, 0, start=0, size=array.shape[0])])
        return views.unstack(both, data.draw(st.integers(0, 1))), array
    return rotated(view, array, data, to_halves=way == "halves")


def rotated(
    view: TensorEntry, array: np.ndarray, data: st.DataObject, *, to_halves: bool
) -> tuple[TensorEntry, np.ndarray]:
    fitting = [n for n in (2, 4, 6) if array.shape[0] % n == 0]
    if not fitting:
        return view, array
    head_dim = data.draw(st.sampled_from(fitting))
    turn = views.rotary_to_halves if to_halves else views.rotary_to_pairs
    return turn(view, head_dim), turned(array, head_dim, to_halves=to_halves)


@given(st.data())
@settings(max_examples=60)
def test_views_of_views_are_those_of_numpy(data: st.DataObject) -> None:
    rows, columns = data.draw(st.integers(1, 12)), data.draw(st.integers(1, 5))
    array = np.arange(rows * columns, dtype=np.int32).reshape(rows, columns)
    step = data.draw(st.integers(1, rows))
    at = data.draw(st.integers(0, columns))
    sides = [(a, b) for a, b in ((0, at), (at, columns)) if a < b]
    cuts = tuple(
        (slice(a, min(a + step, rows)), slice(*side))
        for a in range(0, rows, step)
        for side in sides
    )
    with TemporaryDirectory() as folder:
        view = stored(Path(folder), array, cuts)
        for _ in range(data.draw(st.integers(1, 4))):
            view, array = stepped(view, array, data)
        assert np.array_equal(values(view), array)


def by_columns(folder: Path, array: np.ndarray, cuts: tuple[slice, ...]) -> Chunk:
    """A piece of the array on disk, column behind column, after 12 bytes of something else."""
    box = Box(tuple(s.start for s in cuts), array[cuts].shape)
    path = folder / f"columns{len(list(folder.iterdir()))}.bin"
    path.write_bytes(bytes(12) + array[cuts].T.tobytes())
    return Chunk(box, ByteRange(str(path), 12, 4 * box.numel), (1, box.sizes[0]))


@given(st.data())
@settings(max_examples=60)
def test_views_of_chunks_are_the_same_when_these_are_located_afterwards(
    data: st.DataObject,
) -> None:
    rows, columns = data.draw(st.integers(1, 12)), data.draw(st.integers(1, 5))
    array = np.arange(rows * columns, dtype=np.int32).reshape(rows, columns)
    step = data.draw(st.integers(1, rows))
    cuts = [(slice(a, min(a + step, rows)), slice(0, columns)) for a in range(0, rows, step)]
    with TemporaryDirectory() as folder:
        kinds = st.sampled_from(["rows", "columns"])
        located = [
            by_columns(Path(folder), array, cut)
            if data.draw(kinds) == "columns"
            else stored(Path(folder), array, (cut,)).chunks[0]
            for cut in cuts
        ]
        data_range, strides = ByteRange("item", 7, 999), (1, 1)  # what these are is not known yet
        items = [Chunk(one.box, data_range, strides, codec="torch.save") for one in located]
        entry = TensorEntry("x", ("x",), "model", BY_NAME["int32"], array.shape, items)
        view = views.view_of(entry)
        for _ in range(data.draw(st.integers(1, 4))):
            view, array = stepped(view, array, data)
        found = {id(item): one for item, one in zip(items, located, strict=True)}
        seen = [chunk.seen_in(found[id(chunk.of)], itemsize=4) for chunk in view.chunks]
        assert np.array_equal(values(replace(view, chunks=tuple(seen))), array)


def test_heads_that_do_not_divide_the_rows_are_refused(tmp_path: Path) -> None:
    view = stored(tmp_path, ROWS, in_rows(24, 24))
    for head_dim in (3, 5, 16, 0, 1 << 40):
        for turn in (views.rotary_to_halves, views.rotary_to_pairs):
            with pytest.raises(UsageError, match="heads of"):
                turn(view, head_dim)


# ------------------------------------------------------------------------------------------- maps


def saved(folder: Path, arrays: dict[str, np.ndarray]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    save_file(arrays, folder / "model.safetensors")
    return folder


def mapped(
    tmp_path: Path, text: str, arrays: dict[str, np.ndarray], *, back: bool = False, **sizes: int
) -> dict[str, np.ndarray]:
    number = len(list(tmp_path.iterdir()))
    found = maps.parse(text, name="test")
    step = maps.MapTransform(found.back if back else found, sizes)
    export(saved(tmp_path / f"in{number}", arrays), tmp_path / f"out{number}", step)
    return load_file(tmp_path / f"out{number}" / "model.safetensors")


def same(found: dict[str, np.ndarray], wanted: dict[str, np.ndarray]) -> bool:
    return found.keys() == wanted.keys() and all(
        np.array_equal(found[name], wanted[name]) for name in wanted
    )


FUSED = """
[[rule]]
from = ["l.{n}.q.weight", "l.{n}.k.weight", "l.{n}.v.weight"]
to = "h.{n}.qkv.weight"
sizes = ["heads*d", "d", "d"]
rotary = ["halves-to-pairs", "halves-to-pairs", ""]
head_dim = "d"
"""


def test_a_fused_projection_joins_and_splits_back(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    parts = {f"l.7.{p}.weight": rng.random((n, 3)) for p, n in (("q", 8), ("k", 4), ("v", 4))}
    one = mapped(tmp_path, FUSED, parts, heads=2, d=4)
    q, k, v = parts.values()
    assert one.keys() == {"h.7.qkv.weight"}
    rows = one["h.7.qkv.weight"]
    order = [0, 2, 1, 3]
    assert np.array_equal(rows[:4], q[:4][order])
    assert np.array_equal(rows[8:12], k[order])
    assert np.array_equal(rows[12:], v)
    assert same(mapped(tmp_path, FUSED, one, back=True, heads=2, d=4), parts)


GROUPED = """
[[rule]]
from = "qkv"
to = ["q", "k", "v"]
sizes = ["4*d", "2*d", "2*d"]
groups = "kv"
"""


def test_parts_that_alternate_in_groups_come_apart_and_together(tmp_path: Path) -> None:
    whole = np.arange(16 * 2.0).reshape(16, 2)
    parts = mapped(tmp_path, GROUPED, {"qkv": whole}, kv=2, d=2)
    groups = whole.reshape(2, 8, 2)
    assert np.array_equal(parts["q"], groups[:, :4].reshape(8, 2))
    assert np.array_equal(parts["v"], groups[:, 6:].reshape(4, 2))
    assert same(mapped(tmp_path, GROUPED, parts, back=True, kv=2, d=2), {"qkv": whole})


EXPERTS = """
[[rule]]
from = ["m.{n}.experts.{e}.gate.weight", "m.{n}.experts.{e}.up.weight"]
to = "m.{n}.experts.gate_up"
stack = "e"
transpose = true
dim = 1
"""


def test_experts_stack_in_their_numbers_order_and_unstack(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    parts = {
        f"m.0.experts.{e}.{p}.weight": rng.random((5, 3)) for e in range(11) for p in ("gate", "up")
    }
    one = mapped(tmp_path, EXPERTS, parts)
    assert one["m.0.experts.gate_up"].shape == (11, 3, 10)
    wanted = np.concatenate([parts[f"m.0.experts.10.{p}.weight"].T for p in ("gate", "up")], 1)
    assert np.array_equal(one["m.0.experts.gate_up"][10], wanted)
    assert same(mapped(tmp_path, EXPERTS, one, back=True), parts)


def test_an_expert_that_is_not_there_is_named(tmp_path: Path) -> None:
    parts = {
        f"m.0.experts.{e}.{p}.weight": np.ones((2, 2)) for e in (0, 1, 3) for p in ("gate", "up")
    }
    with pytest.raises(UsageError, match=r"m\.0\.experts\.2\.gate\.weight"):
        mapped(tmp_path, EXPERTS, parts)


def test_a_name_that_the_map_does_not_know_is_refused(tmp_path: Path) -> None:
    text = '[[rule]]\nfrom = "a"\nto = "b"\n'
    with pytest.raises(UsageError, match="no rule for 1 name: more"):
        mapped(tmp_path, text, {"a": np.ones(1), "more": np.ones(1)})
    kept = mapped(tmp_path, "keep_rest = true\n" + text, {"a": np.ones(1), "more": np.ones(1)})
    assert kept.keys() == {"b", "more"}


def test_a_name_that_is_made_twice_is_refused(tmp_path: Path) -> None:
    text = 'keep_rest = true\n[[rule]]\nfrom = "a"\nto = "b"\n'
    with pytest.raises(UsageError, match="would both be called b"):
        mapped(tmp_path, text, {"a": np.ones(1), "b": np.ones(1)})


def test_a_name_that_two_rules_claim_is_refused(tmp_path: Path) -> None:
    text = '[[rule]]\nfrom = "a.{n}"\nto = "b.{n}"\n[[rule]]\nfrom = "a.{m*}"\nto = "c.{m*}"\n'
    with pytest.raises(UsageError, match="2 rules of the map test claim it"):
        mapped(tmp_path, text, {"a.1": np.ones(1)})


def test_what_a_map_drops_is_said(tmp_path: Path) -> None:
    text = 'drop = ["rope.{m*}"]\n[[rule]]\nfrom = "a"\nto = "b"\n'
    source = saved(tmp_path / "in", {"a": np.ones(1), "rope.freqs": np.ones(1)})
    plan = export(source, tmp_path / "out", maps.MapTransform(maps.parse(text, name="t"), {}))
    assert any("rope.freqs" in note for note in plan.notes)


def test_a_shape_that_is_not_the_declared_one_is_refused(tmp_path: Path) -> None:
    text = '[[rule]]\nfrom = "a"\nto = "b"\nto_shape = ["rows", "_"]\n'
    assert mapped(tmp_path, text, {"a": np.ones((3, 2))}, rows=3).keys() == {"b"}
    with pytest.raises(UsageError, match=r"shape \[3, 2\], the map says \[rows, _\]"):
        mapped(tmp_path, text, {"a": np.ones((3, 2))}, rows=4)


def test_parts_of_two_types_do_not_become_one_tensor(tmp_path: Path) -> None:
    text = '[[rule]]\nfrom = ["a", "b"]\nto = "c"\n'
    with pytest.raises(UsageError, match="cannot become one tensor"):
        mapped(tmp_path, text, {"a": np.ones(2, np.float32), "b": np.ones(2, np.float16)})


def test_a_value_that_nobody_told_is_asked_for(tmp_path: Path) -> None:
    text = '[[rule]]\nfrom = "a"\nto = "b"\nrotary = "pairs-to-halves"\n'
    with pytest.raises(UsageError, match="needs the value of 'head_dim'") as caught:
        mapped(tmp_path, text, {"a": np.ones((4, 2))})
    assert "--map-value head_dim=N" in str(caught.value.hint)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("x = 1", "unknown keys: x"),
        ("name = 'a'", r"no \[\[rule\]\]"),
        ("[[rule]]\nfrom = 'a'", "one name on one side"),
        ("[[rule]]\nfrom = ['a', 'b']\nto = ['c', 'd']", "one name on one side"),
        ("[[rule]]\nfrom = 'a'\nto = 'b'\nrotari = 'x'", "rule 1 has unknown keys: rotari"),
        ("[[rule]]\nfrom = 'a'\nto = 'b'\nrotary = 'sideways'", "`rotary` is to be one of"),
        ("[[rule]]\nfrom = 'a.{n}'\nto = 'b'", "same placeholders"),
        ("[[rule]]\nfrom = 'a.{e}'\nto = 'b.{e}'\nstack = 'e'", "in every name of one side"),
        ("[[rule]]\nfrom = 'a'\nto = ['b', 'c']\nsizes = [1]", "1 sizes for 2 parts"),
        ("[[rule]]\nfrom = 'a'\nto = 'b'\ndim = -1", "`dim` is to be"),
        ("[[rule]", "cannot be read"),
    ],
)
def test_a_map_that_cannot_be_meant_is_refused_with_its_rule(text: str, told: str) -> None:
    with pytest.raises(UsageError, match=told):
        maps.parse(text, name="test")


def test_the_map_in_the_documentation_is_one() -> None:
    text = (DATA.parents[1] / "docs" / "maps.md").read_text()
    found = maps.parse(text.split("```toml\n")[1].split("```")[0], name="docs")
    assert len(found.rules) == 4
    named = {name for name in maps.builtin_names() if name.endswith("-to-hf")}
    assert all(f"`{name}`" in text for name in named)


def test_every_builtin_map_can_be_found_by_both_names() -> None:
    for name in maps.builtin_names():
        assert maps.find(name).name == name
    with pytest.raises(UsageError, match="no map 'nonsense'") as caught:
        maps.find("nonsense")
    assert "torchtitan-llama3-to-hf" in str(caught.value.hint)


@pytest.mark.parametrize("name", [one.name for one in builtins_to_hf()])
def test_a_builtin_maps_rules_undo_themselves(name: str) -> None:
    there = maps.find(name)
    assert there.back.back.rules == there.rules


# -------------------------------------------------------------------------------- real checkpoints


def digests(path: Path) -> dict[str, str]:
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    header.pop("__metadata__", None)
    return {
        name: hashlib.sha256(raw[8 + length :][slice(*one["data_offsets"])]).hexdigest()
        for name, one in header.items()
    }


def test_a_torchtitan_llama_is_what_torchtitan_itself_exports(tmp_path: Path) -> None:
    plan = export(
        TITAN / "checkpoint_full",
        tmp_path / "out",
        maps.MapTransform(None, HEADS),
        dtype=dtype_named("bfloat16"),
    )
    theirs = TITAN / "checkpoint_hf" / "step-2" / "model-00001-of-00001.safetensors"
    assert digests(tmp_path / "out" / "model.safetensors") == digests(theirs)
    assert any("chose torchtitan-llama3-to-hf" in note for note in plan.notes)
    assert "Rotary rows are reordered for 2 tensors, in heads of 4." in plan.notes


def test_a_torchtitan_llama_comes_back_bit_for_bit(tmp_path: Path) -> None:
    source = TITAN / "checkpoint_full"
    export(source, tmp_path / "plain")
    export(source, tmp_path / "hf", maps.MapTransform(maps.find("torchtitan-llama3-to-hf"), HEADS))
    back = maps.MapTransform(maps.find("hf-to-torchtitan-llama3"), HEADS)
    export(tmp_path / "hf", tmp_path / "back", back)
    there, plain = (digests(tmp_path / name / "model.safetensors") for name in ("back", "plain"))
    assert there == plain


def test_metas_names_become_the_same_tensors_as_torchtitans(tmp_path: Path) -> None:
    old = maps.RenameTransform(((r"qkv_linear\.", ""), ("^lm_head", "output")))
    meta = maps.MapTransform(maps.find("meta-llama-to-hf"), HEADS)
    export(TITAN / "checkpoint_full", tmp_path / "meta", old)
    plan = export(tmp_path / "meta", tmp_path / "hf", maps.MapTransform(None, HEADS))
    assert any("chose meta-llama-to-hf" in note for note in plan.notes)
    export(TITAN / "checkpoint_full", tmp_path / "titan", maps.MapTransform(None, HEADS))
    export(tmp_path / "meta", tmp_path / "named", meta)
    by_auto, of_titan, by_name = (
        digests(tmp_path / name / "model.safetensors") for name in ("hf", "titan", "named")
    )
    assert by_auto == of_titan == by_name


def test_an_adapters_names_become_pefts_own(tmp_path: Path) -> None:
    step = maps.MapTransform(maps.find("peft-adapter-to-hf"), {})
    source = REAL / "peft_fsdp2_dcp_4r" / "ckpt"
    export(source, tmp_path / "out", step, include=("*lora_*",))
    theirs = REAL / "peft_fsdp2_adapter_4r" / "ckpt" / "adapter" / "adapter_model.safetensors"
    found, wanted = digests(tmp_path / "out" / "model.safetensors"), digests(theirs)
    assert found == {name: wanted[name] for name in wanted if "lora_" in name}


def test_auto_leaves_the_hubs_names_and_refuses_unknown_ones(tmp_path: Path) -> None:
    plan = export(
        REAL / "hf_sharded_safetensors" / "ckpt", tmp_path / "a", maps.MapTransform(None, {})
    )
    assert any("Hugging Face's already" in note for note in plan.notes)
    with pytest.raises(UsageError, match="auto is not certain: no built-in map"):
        export(REAL / "fsdp2_dcp_1d_4r" / "ckpt", tmp_path / "b", maps.MapTransform(None, {}))


# ------------------------------------------------------------------------ is the map for this model


LLAMA = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj", "self_attn.v_proj", "self_attn.o_proj")
LLAMA += ("self_attn.q_proj", "self_attn.k_proj", "input_layernorm", "post_attention_layernorm")


def hub(folder: Path, *more: str, model_type: str | None = None) -> Path:
    """A model with the names of a Llama, which many others have too."""
    names = ["model.embed_tokens", "model.norm", "lm_head"]
    names += [f"model.layers.0.{name}" for name in (*LLAMA, *more)]
    config = {"head_dim": 4} | ({"model_type": model_type} if model_type else {})
    shapes = {name: (4,) if "norm" in name else (4, 4) for name in names}
    saved(folder, {f"{name}.weight": np.ones(shape) for name, shape in shapes.items()})
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def reshard(source: Path, out: Path, *words: object) -> Result:
    return run("reshard", source, "-o", out, "--to-mesh", 1, *words)


def test_a_map_that_is_named_is_refused_for_a_model_that_it_is_not_for(tmp_path: Path) -> None:
    source, named = TITAN / "checkpoint_full", maps.find("torchtitan-qwen3-to-hf")
    with pytest.raises(UsageError, match=r"not for this model: there is no .*q_norm") as caught:
        export(source, tmp_path / "out", maps.MapTransform(named, HEADS))
    assert "--force-map" in str(caught.value.hint)
    assert not (tmp_path / "out").exists()
    plan = export(source, tmp_path / "out", maps.MapTransform(named.forced, HEADS))
    assert any("torchtitan-qwen3-to-hf, forced" in note for note in plan.notes)


@pytest.mark.parametrize("model_type", [None, "llama", "mistral", "gemma", "granite", "qwen3"])
def test_a_llama_of_any_name_is_no_qwen(tmp_path: Path, model_type: str | None) -> None:
    source = hub(tmp_path / "hub", model_type=model_type)
    result = reshard(source, tmp_path / "out", "--map", "hf-to-torchtitan-qwen3")
    assert result.exit_code == 2
    assert "there is no model.layers.{n}.self_attn.q_norm.weight" in result.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("model_type", "code"), [(None, 0), ("llama", 0), ("mistral", 0), ("gemma", 2), ("granite", 2)]
)
@pytest.mark.parametrize("file", ["", "model.safetensors"])
def test_what_config_json_says_counts(
    tmp_path: Path, model_type: str | None, code: int, file: str
) -> None:
    source = hub(tmp_path / "hub", model_type=model_type) / file
    words = ("--map", "hf-to-torchtitan-llama3")
    result = reshard(source, tmp_path / "out", *words)
    assert result.exit_code == code, result.stderr
    if code:
        assert f"model_type {model_type!r}, and the map is for llama, mistral" in result.stderr
        assert reshard(source, tmp_path / "out", *words, "--force-map").exit_code == 0


@pytest.mark.parametrize(("model_type", "code"), [("qwen3", 0), ("hunyuan_v1_dense", 2)])
def test_a_model_with_qwens_names_may_be_another(
    tmp_path: Path, model_type: str, code: int
) -> None:
    norms = ("self_attn.q_norm", "self_attn.k_norm")
    source = hub(tmp_path / "hub", *norms, model_type=model_type)
    result = reshard(source, tmp_path / "out", "--map", "hf-to-torchtitan-qwen3")
    assert result.exit_code == code, result.stderr
    assert not code or model_type in result.stderr


MIXTRAL = ("block_sparse_moe.experts.0.w1", "block_sparse_moe.experts.0.w2")
MIXTRAL += ("block_sparse_moe.experts.0.w3", "block_sparse_moe.gate")


@pytest.mark.parametrize(
    ("name", "other"),
    [("moe-mixtral-to-hf", "moe-qwen3-to-hf"), ("hf-to-moe-mixtral", "hf-to-moe-qwen3")],
)
def test_the_maps_of_experts_are_not_for_each_others_models(
    tmp_path: Path, name: str, other: str
) -> None:
    layer, one = "model.layers.0.", np.ones((2, 4, 2), np.float32)
    mixtral = {f"{layer}mlp.experts.{p}": one for p in ("gate_up_proj", "down_proj")}
    qwen = mixtral | {f"{layer}self_attn.q_norm.weight": one[0]}
    if name.startswith("hf-"):
        mixtral = {f"{layer}{part}.weight": one[0] for part in MIXTRAL}
        parts = ("gate_proj", "up_proj", "down_proj")
        qwen = {f"{layer}mlp.experts.0.{p}.weight": one[0] for p in parts}
        qwen |= {f"{layer}self_attn.q_norm.weight": one[0]}
    saved(tmp_path / "mixtral", mixtral), saved(tmp_path / "qwen", qwen)
    for kind, right, wrong in (("mixtral", name, other), ("qwen", other, name)):
        step = maps.MapTransform(maps.find(wrong), {})
        with pytest.raises(UsageError, match="not for this model"):
            export(tmp_path / kind, tmp_path / "no", step)
        export(tmp_path / kind, tmp_path / f"{kind}-out", maps.MapTransform(maps.find(right), {}))


def test_force_map_needs_a_map(tmp_path: Path) -> None:
    for words in ((), ("--map", "auto")):
        result = reshard(hub(tmp_path / "hub"), tmp_path / "out", "--force-map", *words)
        assert result.exit_code == 2
        assert "--force-map takes a map that --map names" in result.stderr


# ----------------------------------------------------------------------------- names and vocabulary


def made(*names: str) -> tuple[TransformedTensor, ...]:
    one = BY_NAME["float32"]
    return tuple(TransformedTensor(TensorEntry(n, (n,), "model", one, (), ()), (n,)) for n in names)


def renamed(names: tuple[str, ...], *rules: str) -> list[str]:
    step = maps.RenameTransform(tuple(map(maps.parse_rename, rules)))
    return [one.entry.fqn for one in step(made(*names), Files()).made]


def test_renames_are_applied_in_turn() -> None:
    assert renamed(("a.w", "b.w"), r"^a\.=c.", r"\.w$=.weight") == ["c.weight", "b.weight"]
    assert renamed(("layers.3.w",), r"^layers\.(\d+)=h.\1") == ["h.3.w"]


def test_a_rename_that_changes_nothing_or_cannot_be_read_is_refused() -> None:
    with pytest.raises(UsageError, match="changes no name"):
        renamed(("a",), "zz=y")
    for text in ("nothing", "=x", "(=x"):
        with pytest.raises(UsageError):
            maps.parse_rename(text)
    with pytest.raises(UsageError, match="is not valid"):
        renamed(("a",), r"a=\7")


def test_a_rename_onto_another_name_is_refused_with_both(tmp_path: Path) -> None:
    source = saved(tmp_path / "in", {"a": np.ones(1), "b": np.ones(1)})
    with pytest.raises(UsageError, match="a and b would both be called b"):
        export(source, tmp_path / "out", maps.RenameTransform((("^a$", "b"),)))
    assert not (tmp_path / "out").exists()


def test_the_vocabularys_padding_goes_only_where_it_is(tmp_path: Path) -> None:
    table = np.arange(12.0).reshape(6, 2)
    arrays = {"model.embed_tokens.weight": table, "lm_head.weight": table, "other": table}
    arrays["model.layers.0.output.weight"] = table
    source = saved(tmp_path / "in", arrays)
    plan = export(source, tmp_path / "out", maps.VocabularyTransform(5))
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert {name: len(array) for name, array in found.items()} == {
        "model.embed_tokens.weight": 5,
        "lm_head.weight": 5,
        "model.layers.0.output.weight": 6,
        "other": 6,
    }
    assert np.array_equal(found["lm_head.weight"], table[:5])
    assert sum("kept the first 5 of 6 rows" in note for note in plan.notes) == 2
    with pytest.raises(UsageError, match="fewer than --vocab-size 7"):
        export(source, tmp_path / "more", maps.VocabularyTransform(7))


def test_under_puts_names_into_a_container() -> None:
    (one,) = UnderTransform("app.model")(made("w"), Files()).made
    assert (one.entry.fqn, one.entry.path) == ("app.model.w", ("app", "model", "w"))


def test_untie_gives_the_head_the_embeddings_bytes() -> None:
    names = ("model.embed_tokens.weight", "model.norm.weight")
    outcome = maps.untie(made(*names), Files())
    assert [one.entry.fqn for one in outcome.made] == [*names, "lm_head.weight"]
    assert outcome.made[2].origins == (names[0],)
    with pytest.raises(UsageError, match=r"no model\.embed_tokens\.weight"):
        maps.untie(made("norm.weight"), Files())


def test_origins_tell_where_each_tensor_comes_from(tmp_path: Path) -> None:
    text = '[[rule]]\nfrom = ["a", "b"]\nto = "c"\n'
    source = saved(tmp_path / "in", {"a": np.ones(1), "b": np.ones(1)})
    plan = export(source, tmp_path / "out", maps.MapTransform(maps.parse(text, name="t"), {}))
    assert plan.origins == {"c": ("a", "b")}
    assert plan.tensors == 1
