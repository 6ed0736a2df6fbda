"""What a safetensors header says beside its tensors goes along where it is true, or is named."""

from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import save_file

from ckpt_tools import api, formats
from ckpt_tools.convert.export import ExportOptions, ExportPlan
from ckpt_tools.convert.reshard import ReshardOptions, plan_reshard
from ckpt_tools.convert.write import WriteOptions
from ckpt_tools.core.dtypes import dtype_named
from ckpt_tools.core.mesh_spec import parse_mesh
from ckpt_tools.transforms.maps import RenameTransform

ALPHA = {"ss_network_alpha": "2.0", "producer": "x"}
TENSORS = {"a.weight": np.ones((2, 3), np.float32), "b.weight": np.ones(4, np.float32)}
DCP = Path(__file__).parents[1] / "data" / "checkpoints" / "fsdp2_dcp_1d_4r" / "ckpt"


def source(path: Path, **strings: str) -> str:
    save_file(TENSORS, path, metadata={**ALPHA, **strings})
    return str(path)


def export(path: str, out: Path, *, check: bool = False, **options: object) -> ExportPlan:
    return api.export(
        path, str(out), options=ExportOptions(**options), write=WriteOptions(check=check)
    )


def said(path: Path) -> dict[str, str]:
    with safe_open(path, "np") as file:
        return file.metadata()


def test_it_goes_along_with_tensors_that_stay_what_they_were(tmp_path: Path) -> None:
    plan = export(source(tmp_path / "a.safetensors"), tmp_path / "out.safetensors")
    assert said(tmp_path / "out.safetensors").items() >= ALPHA.items()
    assert not any("__metadata__" in note for note in plan.notes)


def test_each_of_several_files_has_it(tmp_path: Path) -> None:
    export(source(tmp_path / "a.safetensors"), tmp_path / "out", max_shard_size=24)
    files = list((tmp_path / "out").glob("*.safetensors"))
    assert len(files) == 2
    assert all(said(file).items() >= ALPHA.items() for file in files)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"dtype": dtype_named("bfloat16")}, "element types were changed"),
        ({"exclude": ("b.*",)}, "tensors were left out"),
        ({"steps": (RenameTransform((("^a", "c"),)),)}, "tensors were changed or renamed"),
        ({"format": "torch"}, "no place"),
    ],
    ids=["cast", "chosen", "renamed", "torch"],
)
def test_what_may_be_untrue_is_left_out_and_named(
    options: dict[str, object], why: str, tmp_path: Path
) -> None:
    plan = export(source(tmp_path / "a.safetensors"), tmp_path / "out", **options)
    (note,) = [note for note in plan.notes if "__metadata__" in note]
    assert why in note
    assert "producer, ss_network_alpha" in note
    for file in (tmp_path / "out").glob("*.safetensors"):
        assert said(file).keys().isdisjoint(ALPHA)


def test_a_cast_that_changes_no_tensor_keeps_it(tmp_path: Path) -> None:
    path = source(tmp_path / "a.safetensors")
    export(path, tmp_path / "out.safetensors", dtype=dtype_named("float32"))
    assert said(tmp_path / "out.safetensors").items() >= ALPHA.items()


def test_a_reshard_names_it(tmp_path: Path) -> None:
    index = formats.read_index(source(tmp_path / "a.safetensors"))
    plan = plan_reshard(index, ReshardOptions(parse_mesh("2")))
    assert any("producer, ss_network_alpha" in note for note in plan.notes)


def test_what_differs_between_files_is_left_out_and_named(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    for number, (name, tensor) in enumerate(TENSORS.items(), start=1):
        strings = {**ALPHA, "part": str(number), **({"one": "1"} if number == 1 else {})}
        save_file({name: tensor}, folder / f"m-0000{number}-of-00002.safetensors", strings)
    plan = export(str(folder), tmp_path / "out.safetensors")
    kept = said(tmp_path / "out.safetensors")
    assert kept.items() >= ALPHA.items()
    assert kept.keys().isdisjoint({"part", "one"})
    assert any("(one, part): it is not the same in all files" in note for note in plan.notes)


def test_what_an_export_says_of_its_source_is_not_said_of_the_next_one(tmp_path: Path) -> None:
    export(str(DCP), tmp_path / "first.safetensors", check=True)
    plan = export(str(tmp_path / "first.safetensors"), tmp_path / "second.safetensors")
    second = said(tmp_path / "second.safetensors")
    assert second["source_format"] == "safetensors"
    assert second.keys().isdisjoint({"source_world_size", "proof"})
    assert not any("__metadata__" in note for note in plan.notes)


def test_the_proof_is_written_into_its_own_field(tmp_path: Path) -> None:
    line = "-" * 1000
    path = source(tmp_path / "a.safetensors", a=line)
    export(path, tmp_path / "out.safetensors", check=True)
    kept = said(tmp_path / "out.safetensors")
    assert kept["a"] == line
    assert "2 tensors" in kept["proof"]
