"""An output never replaces what appeared at its place while it was made."""

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from ckpt_tools import api
from ckpt_tools.convert.write import WriteOptions
from ckpt_tools.copying.out_path import place_file
from ckpt_tools.errors import OutputExistsError
from ckpt_tools.formats import read_index

SOURCE = Path(__file__).parents[1] / "data" / "checkpoints" / "fsdp2_dcp_1d_4r" / "ckpt"


def file_at(out: Path) -> None:
    out.write_bytes(b"another save")


def folder_at(out: Path) -> None:
    out.mkdir()
    (out / "model.safetensors").write_bytes(b"another save")


def link_at(out: Path) -> None:
    out.symlink_to("elsewhere")


APPEARING = {"file": file_at, "folder": folder_at, "empty folder": Path.mkdir, "link": link_at}


def convert(out: Path, then: Callable[[], None], *, force: bool = False) -> None:
    """Export or reshard to OUT; ``then`` is done while it is written."""
    seen: list[int] = []

    def on_bytes(_: int) -> None:
        if not seen:
            seen.append(1)
            then()

    write = WriteOptions(force=force, threads=1)
    if out.suffix:
        api.export(read_index(str(SOURCE)), out, write=write, on_bytes=on_bytes)
    else:
        api.reshard(read_index(str(SOURCE)), out, "2", write=write, on_bytes=on_bytes)


@pytest.mark.parametrize("force", [False, True])
@pytest.mark.parametrize("kind", APPEARING)
@pytest.mark.parametrize("name", ["out", "out.pt"])
def test_what_appears_is_kept_and_so_is_what_is_finished(
    name: str, kind: str, tmp_path: Path, *, force: bool
) -> None:
    out = tmp_path / name
    with pytest.raises(OutputExistsError, match="appeared, or was changed"):
        convert(out, lambda: APPEARING[kind](out), force=force)
    there = os.lstat(out)
    out.rename(tmp_path / "theirs")
    assert os.lstat(tmp_path / "theirs").st_ino == there.st_ino
    write = WriteOptions(resume=True)
    done = api.reshard(SOURCE, out, "2", write=write) if name == "out" else None
    if done is not None:
        assert "An earlier run had already written everything." in done.notes


@pytest.mark.parametrize("name", ["out", "out.pt"])
def test_force_replaces_what_was_there_and_nothing_newer(name: str, tmp_path: Path) -> None:
    out = tmp_path / name
    convert(out, lambda: None)
    convert(out, lambda: None, force=True)
    changed = out / ".metadata" if out.is_dir() else out
    with pytest.raises(OutputExistsError, match="appeared, or was changed"):
        convert(out, lambda: changed.write_bytes(b"newer"), force=True)
    assert changed.read_bytes() == b"newer"


def test_force_keeps_what_others_add_beside_the_checkpoint(tmp_path: Path) -> None:
    out = tmp_path / "out"
    convert(out, lambda: None)
    convert(out, lambda: (out / "notes.txt").write_text("mine") and None, force=True)
    assert (out / "notes.txt").read_text() == "mine"


@pytest.mark.parametrize("appears", [False, True])
def test_a_file_system_without_links_is_looked_at_before_the_rename(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, appears: bool
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EPERM, "no links here")

    monkeypatch.setattr(os, "link", refuse)
    made, out = tmp_path / "made", tmp_path / "out"
    made.write_bytes(b"new")
    if appears:
        out.write_bytes(b"theirs")
        with pytest.raises(OutputExistsError):
            place_file(str(made), str(out))
    else:
        place_file(str(made), str(out))
    assert out.read_bytes() == (b"theirs" if appears else b"new")
