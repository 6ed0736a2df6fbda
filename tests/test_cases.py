"""Every public fault report among the cases behaves as its expect.json says."""

import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from reader_contract import DATA, whole

from ckpt_tools import formats
from ckpt_tools.core import names
from ckpt_tools.core.index import CheckpointIndex
from ckpt_tools.errors import CkptError
from ckpt_tools.storage.reader import Files

CASES = DATA / "cases"


def _inputs(*kinds: str) -> list[object]:
    return list(_each_input(kinds))


def _each_input(kinds: tuple[str, ...]) -> Iterator[object]:
    for told in sorted(CASES.glob("*/expect.json")):
        expect = json.loads(told.read_text())
        for case in expect["inputs"]:
            # What safetensors cannot hold concerns the export alone: see test_convert.
            is_of_export = case.get("error_kind") == "dtype_not_in_safetensors"
            if case["kind"] in kinds and not is_of_export:
                yield pytest.param(told.parent, case, id=f"{expect['case']}-{case['path']}")


def _read(path: str) -> CheckpointIndex:
    """The whole way of a converter up to the bytes, with every problem raised."""
    with Files() as files:
        index = formats.locate(formats.read_index(path), files)
        index.require_whole()
        return formats.open_objects(index, files)


def _text(error: CkptError) -> str:
    return f"{error.message}\n{error.hint or ''}"


def _assert_tensors(index: CheckpointIndex, wanted: Mapping[str, Mapping[str, object]]) -> None:
    with Files() as files:
        for fqn, true in wanted.items():
            entry = index.tensor(fqn)
            assert entry is not None, f"{fqn} is not there"
            assert (list(entry.shape), entry.dtype.name) == (true["shape"], true["dtype"])
            assert hashlib.sha256(whole(entry, files)).hexdigest() == true["sha256"]


@pytest.mark.parametrize(("folder", "case"), _inputs("ok"))
def test_what_is_sound_is_read_exactly(folder: Path, case: dict[str, object]) -> None:
    path = str(folder / str(case["path"])) + ("/" if str(case["path"]).endswith("/") else "")
    index = _read(path)
    _assert_tensors(index, case["tensors"])
    assert set(case.get("byte_entries", ())) <= {entry.fqn for entry in index.objects}


@pytest.mark.parametrize(("folder", "case"), _inputs("error"))
def test_what_is_wrong_is_refused_in_its_own_words(
    folder: Path, case: dict[str, object], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CkptError) as caught:
        _read(str(folder / str(case["path"])))
    assert all(word in _text(caught.value) for word in case["must_mention"])
    assert "process group" not in _text(caught.value)
    assert not list(tmp_path.iterdir())
    assert not list(folder.rglob("PWNED*"))


@pytest.mark.parametrize(("folder", "case"), _inputs("warn", "warn_or_error"))
def test_what_is_odd_is_told_by_name(folder: Path, case: dict[str, object]) -> None:
    index = formats.read_index(str(folder / str(case["path"])))
    told = "\n".join([*index.notes, *map(_text, index.problems)])
    assert all(word in told for word in case["must_mention"])
    _assert_tensors(index, case["tensors"])
    for fqn, shape in case.get("forbidden_shape", {}).items():
        entry = index.tensor(fqn)
        assert entry is None or list(entry.shape) != shape


@pytest.mark.parametrize(("folder", "case"), _inputs("ok_or_error"))
def test_what_may_be_refused_is_exact_here(folder: Path, case: dict[str, object]) -> None:
    _assert_tensors(_read(str(folder / str(case["path"]))), case["tensors"])


def test_wrapper_components_are_removed_whole() -> None:
    expect = json.loads((CASES / "C18_wrapper_prefixes" / "expect.json").read_text())
    for raw, cleaned in expect["inputs"][0]["clean_names"].items():
        assert names.clean(raw) == cleaned
