"""A file is told from another one in its place, on a disk and in a store."""

from pathlib import Path

import fsspec
import pytest

from ckpt_tools import api, formats
from ckpt_tools.errors import SourceChangedError
from ckpt_tools.storage import paths

HF = Path(__file__).parents[1] / "data" / "checkpoints" / "hf_sharded_safetensors" / "ckpt"


def test_what_a_folder_says_of_its_files_is_what_they_say_now(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"1234")
    (tmp_path / "folder").mkdir()
    before = paths.states(str(tmp_path))
    assert before == paths.states_now([str(tmp_path / "a"), str(tmp_path / "none")])
    (tmp_path / "b").write_bytes(b"1234")
    (tmp_path / "b").replace(tmp_path / "a")
    assert paths.states(str(tmp_path)) != before


def test_an_object_that_is_replaced_in_its_store_fails_the_run(tmp_path: Path) -> None:
    store = fsspec.filesystem("memory")
    for file in HF.iterdir():
        store.pipe(f"/changing/{file.name}", file.read_bytes())
    index = formats.read_index("memory://changing")
    api.export(index, str(tmp_path / "same"))
    name = "/changing/model-00002-of-00003.safetensors"
    store.pipe(name, store.cat(name))
    with pytest.raises(SourceChangedError, match="model-00002-of-00003"):
        api.export(index, str(tmp_path / "out"))
    assert not (tmp_path / "out").exists()
