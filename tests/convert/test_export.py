import hashlib
import json
import os
import shutil
from collections import Counter
from pathlib import Path

import pytest
from reader_contract import DATA, truth_of
from safetensors import safe_open

from ckpt_tools import api, formats
from ckpt_tools.convert import export as convert
from ckpt_tools.convert.export import ExportOptions
from ckpt_tools.convert.write import WriteOptions
from ckpt_tools.copying import atomic_output
from ckpt_tools.copying import write as copy
from ckpt_tools.core.dtypes import dtype_named
from ckpt_tools.errors import (
    AnswerNo,
    CkptError,
    IncompleteError,
    OutputExistsError,
    UnsupportedError,
    UsageError,
    WriteError,
)
from ckpt_tools.formats.safetensors.header import read_header
from ckpt_tools.proof.diff_options import DiffOptions
from ckpt_tools.storage.reader import Files
from ckpt_tools.transforms.base import Transform, TransformResult

REAL = DATA / "checkpoints"
CASES = DATA / "cases"
FSDP2 = str(REAL / "fsdp2_dcp_1d_4r" / "ckpt")


def export(
    source: str | Path, out: Path, *, write: WriteOptions | None = None, **options: object
) -> convert.ExportPlan:
    index = formats.read_index(str(source))
    return api.export(
        index,
        str(out),
        options=ExportOptions(**options),
        write=write or WriteOptions(),
        on_bytes=lambda _: None,
    )


def digests(path: Path) -> dict[str, str]:
    """sha256 of each tensor of a safetensors file or folder, without a library's help."""
    files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
    found = {}
    for file in files:
        raw = file.read_bytes()
        length = int.from_bytes(raw[:8], "little")
        header = json.loads(raw[8 : 8 + length])
        header.pop("__metadata__", None)
        for name, told in header.items():
            start, end = told["data_offsets"]
            data = raw[8 + length + start : 8 + length + end]
            assert name not in found
            found[name] = hashlib.sha256(data).hexdigest()
    return found


def test_an_export_holds_the_true_weights_under_the_models_own_names(tmp_path: Path) -> None:
    plan = export(FSDP2, tmp_path / "out")
    truth = truth_of(REAL / "fsdp2_dcp_1d_4r")
    prefix = "app.model."
    wanted = {
        name.removeprefix(prefix): hashlib.sha256(true.data).hexdigest()
        for name, true in truth.items()
        if name.startswith(prefix)
    }
    assert digests(tmp_path / "out") == wanted
    assert any("'app.model'" in note for note in plan.notes)


def test_the_same_input_gives_the_same_bytes(tmp_path: Path) -> None:
    for name in ("one", "two"):
        export(FSDP2, tmp_path / name)
    one, two = ((tmp_path / n / "model.safetensors").read_bytes() for n in ("one", "two"))
    assert one == two


def test_wrapper_components_come_off_unless_kept(tmp_path: Path) -> None:
    source = CASES / "C18_wrapper_prefixes" / "ckpt.pt"
    expect = json.loads((source.parent / "expect.json").read_text())["inputs"][0]
    export(source, tmp_path / "clean")
    assert set(digests(tmp_path / "clean")) == set(expect["clean_names"].values())
    export(source, tmp_path / "raw", keep_names=True)
    assert set(digests(tmp_path / "raw")) == set(expect["clean_names"])


def test_two_names_that_become_one_are_refused_with_both(tmp_path: Path) -> None:
    import torch

    torch.save({"a.w": torch.ones(1), "_orig_mod.a.w": torch.ones(1)}, tmp_path / "twice.pt")
    with pytest.raises(UsageError, match=r"_orig_mod\.a\.w.* and a\.w|a\.w and _orig_mod\.a\.w"):
        export(tmp_path / "twice.pt", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_cast_rounds_as_torch_does(tmp_path: Path) -> None:
    import torch

    export(FSDP2, tmp_path / "out", dtype=dtype_named("bfloat16"))
    truth = truth_of(REAL / "fsdp2_dcp_1d_4r")["app.model.emb.weight"]
    wanted = torch.frombuffer(bytearray(truth.data), dtype=torch.float32).to(torch.bfloat16)
    with safe_open(tmp_path / "out" / "model.safetensors", "pt") as file:
        assert torch.equal(file.get_tensor("emb.weight").flatten(), wanted)
        assert file.get_tensor("seen").dtype == torch.int64


def test_shards_keep_each_name_once_and_the_index_counts_tensor_bytes(tmp_path: Path) -> None:
    source = CASES / "C28_shard_index" / "ckpt.pt"
    told = json.loads((source.parent / "expect.json").read_text())["inputs"][0]
    export(source, tmp_path / "out", max_shard_size=told["export"]["max_shard_bytes"])
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == told["export"]["total_size"]
    assert set(index["weight_map"]) == set(told["tensors"])
    assert digests(tmp_path / "out") == {n: t["sha256"] for n, t in told["tensors"].items()}


def test_types_that_safetensors_cannot_hold_are_named_before_anything_is_written(
    tmp_path: Path,
) -> None:
    with pytest.raises(UnsupportedError, match=r"freqs.*complex128"):
        export(CASES / "C25_complex" / "c128.pt", tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_an_output_that_is_there_is_refused_untouched(tmp_path: Path) -> None:
    case = CASES / "C29_stale_output"
    out = shutil.copytree(case / "prefilled_out", tmp_path / "out")
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    with pytest.raises(OutputExistsError, match="already exists"):
        export(case / "ckpt.pt", out)
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before


def test_force_replaces_the_checkpoint_and_keeps_the_users_files(tmp_path: Path) -> None:
    case = CASES / "C29_stale_output"
    out = shutil.copytree(case / "prefilled_out", tmp_path / "out")
    readme = (out / "README.md").read_bytes()
    (out / "notes").mkdir()
    (out / "notes" / "mine.txt").write_text("mine")
    export(case / "ckpt.pt", out, write=WriteOptions(force=True))
    assert set(digests(out)) == {"a.weight", "b.weight"}
    assert (out / "README.md").read_bytes() == readme
    assert (out / "notes" / "mine.txt").read_text() == "mine"
    assert not (out / "model.safetensors.index.json").exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"]


def test_a_file_name_asks_for_one_file(tmp_path: Path) -> None:
    export(FSDP2, tmp_path / "model.safetensors", max_shard_size=100)
    assert len(digests(tmp_path / "model.safetensors")) == 13
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]


def test_nothing_chosen_is_an_answer_and_not_a_success(tmp_path: Path) -> None:
    with pytest.raises(AnswerNo, match="filters choose no entry"):
        export(FSDP2, tmp_path / "out", include=("nothing.*",))
    assert not list(tmp_path.iterdir())


def test_what_is_whole_can_be_exported_from_a_hurt_checkpoint(tmp_path: Path) -> None:
    hurt = shutil.copytree(FSDP2, tmp_path / "hurt")
    (hurt / "__3_0.distcp").unlink()
    with pytest.raises(IncompleteError, match=r"__3_0\.distcp"):
        export(hurt, tmp_path / "out")
    export(hurt, tmp_path / "out", include=("*.head1.weight",))
    assert set(digests(tmp_path / "out")) == {"head1.weight"}


def test_a_full_disk_is_told_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(atomic_output, "free_space", lambda _: 10)
    with pytest.raises(WriteError, match="10 free; nothing was written"):
        export(FSDP2, tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_ctrl_c_leaves_no_output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_args: object, **_options: object) -> None:
        (tmp_path / "out.partial" / "model.safetensors").write_bytes(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr(copy, "write_files", interrupted)
    with pytest.raises(KeyboardInterrupt):
        export(FSDP2, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_that_may_not_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "locked").mkdir(mode=0o500)
    with pytest.raises(CkptError, match="cannot be written"):
        export(FSDP2, tmp_path / "locked" / "out")


# --------------------------------------------------------------------------------------- sections


@pytest.mark.parametrize("shard_size", [5_000_000_000, 2_000])
@pytest.mark.parametrize("keep_names", [True, False])
@pytest.mark.parametrize(
    "name",
    [
        "fsdp2_dcp_1d_4r/ckpt",
        "fsdp2_dcp_rawoptim_4r/ckpt",
        "fsdp2_dcp_flatoptim_2r/ckpt",
        "fsdp2_wrapped_getsd_dcp_2r/ckpt",
        "torchtitan_llama3_4r/ckpt/checkpoint_full/step-2",
        "composer-0.32.1-monolith",
        "lightning_fsdp_sharded_4r/ckpt",
        "verl_fsdp2_4r/ckpt",
    ],
)
def test_sections_survive_in_safetensors(
    tmp_path: Path, name: str, shard_size: int, *, keep_names: bool
) -> None:
    source = formats.read_index(str(DATA / "checkpoints" / name))
    options = ExportOptions(only=None, keep_names=keep_names, max_shard_size=shard_size)
    api.export(source, str(tmp_path / "out"), options=options)
    copy = formats.read_index(str(tmp_path / "out"))
    assert api.fingerprint(copy).sections == api.fingerprint(source).sections
    held = Counter(entry.section for entry in source.tensors)
    assert Counter(entry.section for entry in copy.tensors) == held
    if keep_names:
        compared = api.diff_headers(copy, source, options=DiffOptions(clean=True))
        assert compared.tensors == len(copy.tensors)


def test_weights_alone_have_no_sections_in_their_header(tmp_path: Path) -> None:
    api.export(formats.read_index(FSDP2), str(tmp_path / "out"))
    with Files() as files:
        metadata = read_header(files, str(tmp_path / "out" / "model.safetensors")).metadata
    assert "ckpt_tools_sections" not in metadata


def test_an_export_of_the_optimizer_is_still_an_optimizer(tmp_path: Path) -> None:
    source = formats.read_index(FSDP2)
    api.export(source, str(tmp_path / "out"), options=ExportOptions(only="optim"))
    copy = formats.read_index(str(tmp_path / "out"))
    sections = api.fingerprint(copy).sections
    assert sections == {"optim": api.fingerprint(source).sections["optim"]}


def test_an_unfinished_export_by_a_function_that_makes_something_else_is_another_order(
    tmp_path: Path,
) -> None:
    index = formats.read_index(str(DATA / "checkpoints" / "fsdp2_dcp_1d_4r" / "ckpt"))

    def settings(step: Transform) -> object:
        options = ExportOptions(only="model", steps=(step,))
        order = convert.export_of(index, str(tmp_path / "out"), WriteOptions(), options)
        return order.plan(formats.locate).settings["what the names map does"]

    same = settings(lambda made, *_: TransformResult(tuple(made)))
    assert settings(lambda made, *_: TransformResult((*made,))) == same
    assert settings(lambda made, *_: TransformResult(tuple(made[1:]))) != same
