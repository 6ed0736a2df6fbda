"""What `import ckpt_tools` offers: cheap to import, reads boxes, runs the verbs."""

import ast
import html
import importlib
import json
import re
import shutil
import subprocess
import sys
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple, Protocol

import newcomer
import numpy as np
import pytest
import torch
from running import run
from safetensors import safe_open

import ckpt_tools
from ckpt_tools import Box, ReshardOptions, open_checkpoint, parse_mesh
from ckpt_tools.checkpoint import Checkpoint
from ckpt_tools.core.records import Json
from ckpt_tools.errors import (
    AnswerNo,
    IncompleteError,
    OutputExistsError,
    UnreadableError,
    UnsupportedError,
    UsageError,
)
from ckpt_tools.storage.reader import Files

ROOT = Path(__file__).parent.parent
REAL = ROOT / "tests" / "data" / "checkpoints"
DCP = str(REAL / "fsdp2_dcp_1d_4r" / "ckpt")
BF16 = str(REAL / "fsdp2_bf16_fp32optim_dcp_4r" / "ckpt")
CUT = ReshardOptions(parse_mesh("2"), (ckpt_tools.Shard(3),))


@pytest.fixture
def checkpoint() -> Checkpoint:
    return open_checkpoint(DCP)


def _matrix(checkpoint: Checkpoint) -> ckpt_tools.TensorEntry:
    return next(e for e in checkpoint.index.tensors if len(e.shape) == 2 and len(e.chunks) > 1)


def test_importing_the_package_loads_nothing_heavy() -> None:
    code = "import sys, ckpt_tools; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = set(done.stdout.split())
    assert not loaded & {"torch", "numpy", "click", "ckpt_tools.formats", "ckpt_tools.core.index"}


@pytest.mark.parametrize("name", ckpt_tools.__all__)
def test_every_public_name_is_there(name: str) -> None:
    assert getattr(ckpt_tools, name) is not None


def test_public_names_are_those_of_their_modules() -> None:
    """A type checker and a program find the same names in the same modules."""
    source = Path(ckpt_tools.__file__).read_text(encoding="utf-8")
    seen = re.findall(
        r"^    from ckpt_tools[.](\S+) import (\w+) as \2(?:  #.*)?$", source, re.MULTILINE
    )
    assert {name: module for module, name in seen} == ckpt_tools._HOME
    for module, name in seen:
        home = importlib.import_module(f"ckpt_tools.{module}")
        assert getattr(ckpt_tools, name) is getattr(home, name)


class Result(Protocol):
    def to_dict(self) -> dict[str, Json]: ...


RESULTS: dict[str, Callable[[str], Result]] = {
    "inspect": ckpt_tools.inspect,
    "verify": ckpt_tools.verify,
    "fingerprint": ckpt_tools.fingerprint,
    "stats": ckpt_tools.stats,
    "diff": lambda path: ckpt_tools.diff(path, path),
}


@pytest.mark.parametrize("command", RESULTS)
@pytest.mark.parametrize("folder", ["fsdp2_dcp_1d_4r/ckpt", "fsdp2_torchsave_hsdp_2x4/ckpt"])
def test_a_result_is_the_json_of_its_command(command: str, folder: str) -> None:
    path = str(REAL / folder)
    words = [command, path, *([path] if command == "diff" else []), "--json"]
    printed = run(*words).stdout
    assert json.dumps(RESULTS[command](path).to_dict()) == printed.strip()


def test_a_difference_is_the_json_of_diff() -> None:
    one, other = str(REAL / "fsdp2_dcp_1d_4r" / "ckpt"), str(REAL / "fsdp2_dcp_hsdp_2x4" / "ckpt")
    printed = run("diff", one, other, "--json").stdout
    assert json.dumps(ckpt_tools.diff(one, other).to_dict()) == printed.strip()


@pytest.mark.parametrize(
    ("words", "write"),
    [
        (["export"], ckpt_tools.export),
        (["reshard", "--to-mesh", "2x2"], lambda path, out: ckpt_tools.reshard(path, out, "2x2")),
    ],
)
def test_what_was_written_is_in_the_json_of_its_command(
    words: list[str], write: Callable[[str, str], Result], tmp_path: Path
) -> None:
    path, out = str(REAL / "fsdp2_dcp_1d_4r" / "ckpt"), str(tmp_path / "out")
    printed = json.loads(run(*words, path, "-o", out, "--dry-run", "--json").stdout)
    told = json.loads(json.dumps(write(path, out).to_dict()))
    assert told.pop("notes")[: len(printed["notes"])] == printed["notes"]
    files = [(one["path"], one["nbytes"]) for one in printed["files"]]
    assert [(one["path"], one["nbytes"]) for one in told.pop("files")] == files
    mesh = told.pop("mesh", {})
    assert mesh.items() <= printed.get("mesh", {}).items()
    assert told.items() <= printed.items()


def test_a_name_that_is_not_there_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no_such"):
        _ = ckpt_tools.no_such


def test_a_section_alone_takes_names_without_it() -> None:
    checkpoint = Checkpoint(ROOT / "tests" / "data" / "checkpoints" / "fsdp2_dcp_hsdp_2x4" / "ckpt")
    name = next(name for name in checkpoint if name.startswith("model."))
    inside = name.removeprefix("model.")
    assert checkpoint.model[inside].name == name
    assert inside in checkpoint.model
    assert inside not in checkpoint


def test_what_only_values_have_says_how_to_read_them(checkpoint: Checkpoint) -> None:
    tensor = checkpoint[_matrix(checkpoint).fqn]
    assert not hasattr(tensor, "__cuda_array_interface__")
    with pytest.raises(AttributeError, match=r"'mean'.*tensor\[:\]"):
        _ = tensor.mean  # type: ignore[attr-defined]


def test_a_tensor_reads_the_same_by_both_ways(checkpoint: Checkpoint) -> None:
    entry = _matrix(checkpoint)
    assert np.array_equal(checkpoint[entry.fqn].numpy(), checkpoint[entry.fqn].torch().numpy())


def test_a_box_is_the_slice_of_the_whole(checkpoint: Checkpoint) -> None:
    entry = _matrix(checkpoint)
    rows, columns = entry.shape
    box = Box((rows // 3, 1), (rows // 2, columns - 1))
    whole = checkpoint[entry.fqn].numpy()
    assert np.array_equal(checkpoint[entry.fqn].numpy(box), whole[rows // 3 :][: rows // 2, 1:])


def test_values_are_those_that_torch_loads() -> None:
    path = REAL / "fsdp2_full_torchsave_4r"
    found = next(p for p in sorted(path.rglob("*.pt")) if torch.load(p, weights_only=True))
    checkpoint = open_checkpoint(str(found))
    expected = torch.load(found, weights_only=True)
    for part in checkpoint.tensors[0].entry.path:
        expected = expected[part]
    assert torch.equal(checkpoint[checkpoint.tensors[0].fqn].torch(), expected)


def test_only_the_bytes_of_the_box_are_read(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry = _matrix(checkpoint)
    tensor_bytes = []
    real = Files.read_into

    def counted(self: Files, path: str, offset: int, buffer: memoryview) -> None:
        tensor_bytes.append(len(buffer))
        real(self, path, offset, buffer)

    monkeypatch.setattr(Files, "read_into", counted)
    checkpoint[entry.fqn].numpy(Box((0, 0), (1, 2)))
    assert sum(tensor_bytes) <= 2 * entry.dtype.itemsize


def test_an_empty_box_and_a_scalar_have_their_shapes(checkpoint: Checkpoint) -> None:
    entry = _matrix(checkpoint)
    assert checkpoint[entry.fqn].numpy(Box((0, 0), (0, 2))).shape == (0, 2)
    assert checkpoint[entry.fqn].torch(Box((0, 0), (0, 2))).shape == (0, 2)
    scalar = next(e for e in checkpoint.tensors if e.shape == ())
    assert checkpoint[scalar.fqn].numpy().shape == ()


def test_what_numpy_lacks_is_refused_with_the_way_that_works() -> None:
    checkpoint = open_checkpoint(str(REAL / "fsdp2_bf16_fp32optim_dcp_4r" / "ckpt"))
    entry = next(e for e in checkpoint.tensors if e.dtype == "bfloat16")
    with pytest.raises(UnsupportedError) as caught:
        checkpoint[entry.fqn].numpy()
    assert "`torch`" in str(caught.value.hint)
    assert checkpoint[entry.fqn].torch().dtype is torch.bfloat16


def test_an_unknown_name_is_refused(checkpoint: Checkpoint) -> None:
    with pytest.raises(AnswerNo, match="no tensor 'nope'"):
        checkpoint["nope"].numpy()


@pytest.mark.parametrize("box", [Box((0,), (1,)), Box((0, 0), (10**9, 1)), Box((0, 0), (-1, 1))])
def test_a_box_outside_of_the_tensor_is_refused(checkpoint: Checkpoint, box: Box) -> None:
    with pytest.raises(UsageError):
        checkpoint[_matrix(checkpoint).fqn].numpy(box)


def test_a_tensor_with_a_lost_shard_is_refused(tmp_path: Path) -> None:
    shutil.copytree(DCP, tmp_path / "ckpt")
    next((tmp_path / "ckpt").glob("__1_*.distcp")).unlink()
    hurt = open_checkpoint(str(tmp_path / "ckpt"))
    with pytest.raises(IncompleteError):
        hurt[_matrix(hurt).fqn].numpy()


@pytest.mark.parametrize(
    "use",
    [
        lambda old: old["w"].torch(),
        lambda old: old["w"][1:3],
        lambda old: old.value("text"),
        ckpt_tools.verify,
        ckpt_tools.verify_quick,
        ckpt_tools.fingerprint,
        ckpt_tools.stats,
        lambda old: ckpt_tools.diff(old, DCP),
    ],
)
def test_what_was_saved_anew_is_not_read_by_the_old_headers(
    use: Callable[[Checkpoint], object], tmp_path: Path
) -> None:
    """The bytes of another tensor stand there now."""
    path = tmp_path / "model.pt"
    torch.save({"w": torch.zeros(6), "text": "a" * 5000}, path)
    old = open_checkpoint(path)
    use(open_checkpoint(path))
    torch.save({"before": torch.arange(50), "w": torch.zeros(6), "text": "b" * 5000}, path)
    with pytest.raises(UnreadableError, match=r"model\.pt has changed since it was first read"):
        use(old)


def test_reshard_from_python_gives_the_same_tensors(checkpoint: Checkpoint, tmp_path: Path) -> None:
    out = str(tmp_path / "out")
    ckpt_tools.reshard(checkpoint, out, options=ReshardOptions(parse_mesh("2x2")))
    first, second = (ckpt_tools.fingerprint(one) for one in (checkpoint, open_checkpoint(out)))
    assert first.sections == second.sections


# ------------------------------------------------------------------- the library as people guess it


def test_a_newcomer_s_code_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    newcomer.main(DCP, str(tmp_path / "model.safetensors"))
    assert "app.model.emb.weight (11, 7) float32 (0, 1, 2, 3)" in capsys.readouterr().out


def test_a_rank_s_part_is_its_shard(checkpoint: Checkpoint) -> None:
    weight = checkpoint[_matrix(checkpoint).fqn]
    parts = [weight.shard(rank) for rank in weight.ranks]
    assert torch.equal(torch.cat(parts), weight.torch())
    assert checkpoint.ranks == weight.ranks == (0, 1, 2, 3)
    with pytest.raises(IndexError, match="no rank 4"):
        weight.shard(4)
    two_by_four = open_checkpoint(REAL / "fsdp2_dcp_hsdp_2x4" / "ckpt")["model.emb.weight"]
    assert two_by_four.ranks == (*range(8),)
    assert torch.equal(two_by_four.shard(1), two_by_four.shard(5))
    whole = open_checkpoint(REAL / "hf_sharded_safetensors")
    with pytest.raises(UnsupportedError, match="no layout is known"):
        whole.tensors[0].shard(0)


def test_load_gives_the_state_dict_that_was_saved(tmp_path: Path) -> None:
    saved = {"model": {"w": torch.arange(6.0)}, "steps": [1, 2], 3: (None, "x")}
    torch.save(saved, tmp_path / "state.pt")
    loaded = ckpt_tools.load(tmp_path / "state.pt")
    assert torch.equal(loaded["model"].pop("w"), saved["model"].pop("w"))  # type: ignore[attr-defined,index]
    assert loaded == saved


def test_what_was_written_for_safetensors_works() -> None:
    path = REAL / "hf_sharded_safetensors"
    file = next(path.rglob("*.safetensors"))
    theirs = safe_open(file, framework="pt")
    with ckpt_tools.safe_open(file, framework="pt", device="cpu") as ours:
        assert sorted(theirs.keys()) == list(ours.keys())
        assert ours.metadata() == (theirs.metadata() or {})
        assert all(torch.equal(ours.get_tensor(key), theirs.get_tensor(key)) for key in ours)
    with pytest.raises(UsageError, match="torch on the CPU, not of 'np'"):
        ckpt_tools.safe_open(file, framework="np")


def test_a_section_asked_for_as_a_tensor_is_named(checkpoint: Checkpoint) -> None:
    with pytest.raises(KeyError) as caught:
        checkpoint["model"]
    assert "checkpoint.model has its tensors" in str(getattr(caught.value, "hint", ""))
    if sys.version_info >= (3, 11):
        assert "checkpoint.model has its tensors" in traceback.format_exception(caught.value)[-1]


def test_a_checkpoint_is_a_mapping_of_tensors(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Files, "read_into", lambda *_: pytest.fail("reads"))
    tensors = checkpoint.tensors
    assert isinstance(checkpoint, Mapping)
    assert len(checkpoint) == len(tensors) == 48
    assert list(checkpoint) == list(checkpoint.keys()) == sorted(one.name for one in tensors)
    assert [(name, one.shape) for name, one in checkpoint.items()] == [
        (one.name, one.shape) for one in checkpoint.values()
    ]
    assert all(name in checkpoint for name in checkpoint)
    assert repr(checkpoint.keys()).startswith("KeysView(app.model.blocks.0.fc1.bias, ")
    assert repr(checkpoint.keys()).endswith(" and 38 more)")
    assert "nope" not in checkpoint
    assert 3 not in checkpoint
    assert checkpoint.get("nope") is None
    assert checkpoint != open_checkpoint(DCP)
    assert {checkpoint: 1}[checkpoint] == 1


def test_what_is_no_tensor_has_a_value(checkpoint: Checkpoint) -> None:
    assert checkpoint.value("step") == checkpoint.step == 2
    assert "step" in {entry.fqn for entry in checkpoint.objects}
    with pytest.raises(KeyError, match="no tensor 'step'") as caught:
        checkpoint["step"]
    assert "checkpoint.value('step')" in str(getattr(caught.value, "hint", ""))
    with pytest.raises(KeyError, match="no object 'nope'"):
        checkpoint.value("nope")


def test_a_section_is_a_checkpoint(checkpoint: Checkpoint) -> None:
    assert checkpoint.sections == ("model", "optim", "other")
    assert checkpoint.model.sections == ("model",)
    assert (len(checkpoint.model), len(checkpoint.optim)) == (13, 33)
    assert checkpoint.model.nbytes == sum(one.nbytes for one in checkpoint.model.values())
    with checkpoint.model as model:
        state = model.state_dict()
    assert state.keys() == checkpoint.model.keys()
    assert all(torch.equal(checkpoint.get_tensor(name), one) for name, one in state.items())


def test_names_choose_a_part(checkpoint: Checkpoint) -> None:
    assert list(checkpoint.select("*.emb.weight")) == ["app.model.emb.weight"]
    name = "app.model.lm.weight"
    assert list(checkpoint.select(["*.emb.weight", name])) == ["app.model.emb.weight", name]
    assert name not in checkpoint.select("*", exclude="*.lm.*")
    assert list(checkpoint.select({name})) == [name]
    for wanted in ("nope", "*nope*", ["*", "re:^nope"]):
        with pytest.raises(KeyError, match="nope"):
            checkpoint.select(wanted)
    with pytest.raises(KeyError) as caught:
        checkpoint.select("app.model.emb.wieght")
    assert "app.model.emb.weight" in str(getattr(caught.value, "hint", ""))


@pytest.mark.parametrize(
    ("ask", "hint"),
    [
        (lambda path: ckpt_tools.export(DCP, path), "use force=True to replace"),
        (lambda _: open_checkpoint(DCP).select("*nope*"), "`list(checkpoint)` lists"),
        (open_checkpoint, "/step-1'"),
        (open_checkpoint, "latest=True) opens the last step, step=2 that one"),
        (ckpt_tools.verify, "open_checkpoint(path, latest=True)"),
        (lambda path: ckpt_tools.average([DCP], path), "None"),
        (lambda path: ckpt_tools.average([DCP, BF16], path / "new"), "DiffOptions(clean=True)"),
        (lambda path: ckpt_tools.reshard(DCP, path / "new", options=CUT), "name: rules 'app."),
    ],
)
def test_a_hint_names_arguments(ask: Callable[[Path], object], hint: str, tmp_path: Path) -> None:
    for step in (1, 2):
        shutil.copytree(DCP, tmp_path / "run" / f"step-{step}")
    with pytest.raises(ckpt_tools.CkptError) as caught:
        ask(tmp_path / "run")
    assert hint in str(caught.value.hint)
    assert "--" not in str(caught.value.hint)
    assert "ckpt-tools" not in str(caught.value.hint)


def test_a_step_of_a_run_is_chosen(tmp_path: Path) -> None:
    for step in (1, 2):
        shutil.copytree(DCP, tmp_path / f"step-{step}")
    assert open_checkpoint(tmp_path, latest=True).path == str(tmp_path / "step-2")
    assert open_checkpoint(tmp_path, step=1).path == str(tmp_path / "step-1")
    with pytest.raises(UsageError):
        open_checkpoint(tmp_path, step=1, latest=True)


def test_nothing_there_is_a_file_not_found_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="nope does not exist"):
        open_checkpoint(tmp_path / "nope")


def test_results_are_shown_in_a_few_lines(checkpoint: Checkpoint, tmp_path: Path) -> None:
    other = REAL / "fsdp2_dcp_hsdp_2x4" / "ckpt"
    results = [
        checkpoint.verify(),
        checkpoint.stats(),
        checkpoint.fingerprint(),
        checkpoint.diff(other),
        checkpoint.export(tmp_path / "whole"),
        checkpoint.reshard(tmp_path / "shards", (2, 2)),
    ]
    for result in results:
        shown = repr(result)
        assert 1 <= len(shown.splitlines()) <= 15
        assert len(shown) < 2000
        assert result._repr_html_() == f"<pre>{html.escape(shown)}</pre>"
    assert repr(checkpoint.diff(DCP)).endswith(": equal; 48 tensors, 45 objects")


@pytest.mark.parametrize(
    "key",
    [
        (slice(0, 4), slice(None, 8)),
        (slice(0, 4),),
        slice(2, None),
        3,
        -1,
        (-1, 2),
        (..., 1),
        ...,
        (slice(None, None, 3), slice(1, 6, 2)),
        (slice(-3, None), -2),
        (slice(5, 5), 0),
        (slice(None), slice(3, 1)),
        None,
        (None, 3),
        (3, None, ..., None),
        (..., ...),
        (..., 2, ...),
        [2, 0],
        ([2, 0], slice(1, 3)),
        (slice(2), [-1, 1, 1]),
        ([0, 3], [2, 1]),
        [],
        (),
    ],
    ids=str,
)
def test_a_tensor_is_indexed_as_torch_indexes_it(checkpoint: Checkpoint, key: object) -> None:
    entry = _matrix(checkpoint)
    expected = checkpoint[entry.fqn].torch()[key]
    assert torch.equal(checkpoint[entry.fqn][key], expected)


@pytest.mark.parametrize(
    ("key", "error"),
    [
        ((0, 0, 0), IndexError),
        (10**6, IndexError),
        (-(10**6), IndexError),
        (True, TypeError),
        ([0, True], TypeError),
        ([0, 10**6], IndexError),
        ("x", TypeError),
        (slice(None, None, -1), UsageError),
    ],
)
def test_an_index_that_cannot_be_meant_is_refused(
    checkpoint: Checkpoint, key: object, error: type[Exception]
) -> None:
    with pytest.raises(error):
        checkpoint[_matrix(checkpoint).fqn][key]


def test_a_tensor_is_not_read_before_it_is_indexed(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry = _matrix(checkpoint)
    monkeypatch.setattr(Files, "read_into", lambda *_: pytest.fail("reads"))
    lazy = checkpoint[entry.fqn]
    assert (lazy.name, lazy.shape, lazy.dtype) == (entry.fqn, entry.shape, "float32")
    assert len(lazy) == entry.shape[0]
    assert lazy.placements == ("Shard(0)",)
    assert (lazy.ndim, lazy.size, lazy.numel()) == (2, entry.numel, entry.numel)
    assert (lazy.itemsize, lazy.nbytes) == (4, 4 * entry.numel)
    assert lazy.chunks == ((3, 3, 3, entry.shape[0] - 9), (entry.shape[1],))


def test_a_tensor_shows_its_first_values_and_its_last(tmp_path: Path) -> None:
    source = shutil.copytree(DCP, tmp_path / "step-2")
    checkpoint = open_checkpoint(source)
    lazy = checkpoint[_matrix(checkpoint).fqn]
    first, last = lazy.numpy()[0, :3], lazy.numpy()[-1, -1]
    facts, _, values = repr(lazy).partition("; values ")
    assert facts.startswith(f"{lazy.name}: float32 {list(lazy.shape)}, ")
    assert values == " ".join(f"{value:.4g}" for value in first) + f" … {last:.4g}"
    assert "; values " in repr(next(one for one in checkpoint.values() if not one.shape))
    for file in source.glob("*.distcp"):
        file.write_bytes(file.read_bytes()[:100])
    assert repr(lazy) == facts


def test_a_tensor_becomes_an_array_where_one_is_wanted(checkpoint: Checkpoint) -> None:
    lazy = checkpoint[_matrix(checkpoint).fqn]
    assert np.array_equal(np.asarray(lazy), lazy.numpy())
    assert np.asarray(lazy, dtype=np.float64).dtype == np.float64
    assert torch.equal(lazy.torch(), lazy[...])
    assert torch.equal(torch.as_tensor(lazy), lazy.torch())


def test_bfloat16_is_indexed_like_any_other() -> None:
    checkpoint = open_checkpoint(str(REAL / "fsdp2_bf16_fp32optim_dcp_4r" / "ckpt"))
    entry = next(e for e in checkpoint.tensors if e.dtype == "bfloat16" and e.shape)
    assert checkpoint[entry.fqn][:1].dtype is torch.bfloat16


def test_an_unknown_name_is_a_key_error_with_names_that_are_near(checkpoint: Checkpoint) -> None:
    entry = _matrix(checkpoint)
    with pytest.raises(KeyError) as caught:
        checkpoint[entry.fqn + "x"]
    assert isinstance(caught.value, AnswerNo)
    assert entry.fqn in str(caught.value.hint)
    assert str(caught.value).endswith(f"has no tensor {entry.fqn + 'x'!r}.")


def test_the_mesh_says_how_it_is_known(checkpoint: Checkpoint) -> None:
    assert checkpoint.mesh is not None
    assert (checkpoint.mesh.shape, checkpoint.mesh.status) == ((4,), "inferred")
    assert repr(checkpoint.mesh) == "4, inferred from the boxes that each rank saved"
    stated = open_checkpoint(REAL / "fsdp2_torchsave_hsdp_2x4" / "ckpt")
    assert "confirmed by the files" in repr(stated.mesh)


def test_a_checkpoint_shows_itself_in_a_few_lines(checkpoint: Checkpoint) -> None:
    shown = repr(checkpoint).splitlines()
    assert 3 <= len(shown) <= 8
    assert shown[1] == "  complete by its headers, training can resume"
    html = checkpoint._repr_html_()
    assert html.startswith("<b>")
    assert "more tensors" in html


def test_html_escapes_names(tmp_path: Path) -> None:
    torch.save({"<script>": torch.zeros(1)}, tmp_path / "c.pt")
    assert "<script>" not in open_checkpoint(tmp_path / "c.pt")._repr_html_()


def test_inspect_gives_what_the_command_says(checkpoint: Checkpoint) -> None:
    found = ckpt_tools.inspect(checkpoint)
    assert (found.whole, found.resume.yes) == (True, True)
    assert found.step == (2, "step")
    assert found.optimizer is not None
    assert found.saved is not None
    assert "step 2, files of " in repr(found)


@pytest.mark.parametrize("kind", [str, Path, open_checkpoint])
def test_each_verb_takes_a_path_or_a_checkpoint(kind: Callable[[str], object]) -> None:
    source = kind(DCP)
    assert ckpt_tools.inspect(source).whole
    assert ckpt_tools.verify(source).whole
    assert ckpt_tools.verify_quick(source).whole
    assert ckpt_tools.diff(source, DCP).equal
    assert ckpt_tools.diff_headers(DCP, source).equal
    assert ckpt_tools.fingerprint(source).sections
    assert ckpt_tools.stats(source).tensors


def test_export_takes_what_people_guess(tmp_path: Path) -> None:
    ckpt_tools.export(DCP, tmp_path / "half", dtype=torch.bfloat16, check=True)
    half = open_checkpoint(tmp_path / "half")
    assert {e.dtype for e in half.tensors if e.fqn != "seen"} == {"bfloat16"}
    ckpt_tools.export(DCP, tmp_path / "model.pt")
    assert torch.load(tmp_path / "model.pt")["emb.weight"].shape == (11, 7)
    with pytest.raises(OutputExistsError):
        ckpt_tools.export(DCP, tmp_path / "model.pt")
    ckpt_tools.export(DCP, tmp_path / "model.pt", force=True, only="all")
    with pytest.raises(UsageError, match="bf17"):
        ckpt_tools.export(DCP, tmp_path / "x", dtype="bf17")


def test_reshard_takes_a_mesh_as_text_or_a_number_of_ranks(tmp_path: Path) -> None:
    ckpt_tools.reshard(DCP, tmp_path / "out", "2x2")
    assert open_checkpoint(tmp_path / "out").mesh.shape == (2, 2)  # type: ignore[union-attr]
    ckpt_tools.reshard(DCP, tmp_path / "three", 3)
    assert open_checkpoint(tmp_path / "three").mesh.shape == (3,)  # type: ignore[union-attr]
    ckpt_tools.reshard(DCP, tmp_path / "tuple", (2, 2), layout="accelerate")
    assert (tmp_path / "tuple" / "optimizer_0").is_dir()
    with pytest.raises(UsageError, match="not a mesh"):
        ckpt_tools.reshard(DCP, tmp_path / "none", "2,2")
    with pytest.raises(UsageError, match="takes a mesh"):
        ckpt_tools.reshard(DCP, tmp_path / "none")


def test_a_checkpoint_has_the_verbs_as_methods(checkpoint: Checkpoint, tmp_path: Path) -> None:
    assert checkpoint.inspect().step == ckpt_tools.inspect(DCP).step == (2, "step")
    assert checkpoint.verify().whole
    checkpoint.export(tmp_path / "half.safetensors", dtype="bf16")
    half = ckpt_tools.load_file(tmp_path / "half.safetensors")
    assert half["emb.weight"].dtype is torch.bfloat16
    checkpoint.reshard(tmp_path / "two", "2")
    assert ckpt_tools.diff(checkpoint, tmp_path / "two").equal


# ------------------------------------------------------------------------------------------- docs


class Cell(NamedTuple):
    """A python block of the page, and the text block that stands right below it."""

    code: str
    shown: str | None


def _cells() -> list[Cell]:
    text = (ROOT / "docs" / "library.md").read_text()
    found = re.findall(
        r"^```python\n(.*?)^```(?:\n\n```text\n(.*?)^```)?", text, re.MULTILINE | re.DOTALL
    )
    return [Cell(code, shown or None) for code, shown in found]


def test_pages_and_a_newcomer_s_code_pass_a_strict_type_checker(tmp_path: Path) -> None:
    cells = [cell.code for cell in _cells()]
    readme = re.findall(
        r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL
    )
    (tmp_path / "library.py").write_text("\n".join(cells))
    (tmp_path / "readme.py").write_text("\n".join(readme))
    command = [sys.executable, "-m", "mypy", "--strict", "--config-file=", "--cache-dir"]
    cache = str(ROOT / ".mypy_cache" / "pages")  # its own: `scripts/check` has other settings
    done = subprocess.run(
        [*command, cache, "library.py", "readme.py", str(ROOT / "tests" / "newcomer.py")],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout


def test_each_cell_of_the_page_runs_and_shows_what_stands_below_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run7 = tmp_path / "run7"
    shutil.copytree(DCP, run7 / "step-1000", copy_function=shutil.copyfile)
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    for cell in _cells():
        lines = ast.parse(cell.code)
        last = lines.body.pop() if isinstance(lines.body[-1], ast.Expr) else None
        exec(compile(lines, "library.md", "exec"), names)  # noqa: S102 (our own page)
        if last is not None:
            value = eval(compile(ast.Expression(last.value), "library.md", "eval"), names)  # noqa: S307
            if value is not None:
                print(repr(value))  # noqa: T201
        shown = capsys.readouterr().out
        if cell.shown is not None:
            assert shown.rstrip() == cell.shown.rstrip()
