"""Nothing is written over, into or around what is read, nor over what no output can replace."""

import os
import shutil
import socket
from collections.abc import Callable
from pathlib import Path

import pytest
import running
from click.testing import Result
from reader_contract import DATA

from ckpt_tools import api, formats
from ckpt_tools.convert.reshard import ReshardOptions
from ckpt_tools.convert.write import WriteOptions
from ckpt_tools.copying import atomic_output, out_path
from ckpt_tools.core.mesh_spec import parse_mesh
from ckpt_tools.errors import OutputExistsError, UsageError

FSDP2 = DATA / "checkpoints" / "fsdp2_dcp_1d_4r" / "ckpt"
TRAINER = DATA / "checkpoints" / "transformers_trainer_fsdp2_4r"
FULL = DATA / "checkpoints" / "fsdp1_full_torchsave" / "ckpt"


def run(*args: object) -> Result:
    return running.run(*args, "-q")


def content(folder: Path) -> dict[str, bytes]:
    return {str(p): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A checkpoint in `tmp_path/runs/run`, and links to it."""
    (tmp_path / "runs").mkdir()
    shutil.copytree(FSDP2, tmp_path / "runs" / "run")
    (tmp_path / "link").symlink_to(tmp_path / "runs" / "run")
    (tmp_path / "up").symlink_to(tmp_path / "runs")
    return tmp_path / "runs" / "run"


WAYS = (
    *("runs/run", "runs/run/", "link", "link/", "runs/../runs/run", "up/run", "runs"),
    *("up", "runs/run/new", "link/new/deep", "runs/run/__0_0.distcp", "runs/run/new.txt"),
)
COMMANDS: dict[str, Callable[[Path, str], Result]] = {
    "export": lambda run7, out: run("export", run7, "-o", out, "--force"),
    "dry-run": lambda run7, out: run("export", run7, "-o", out, "--force", "--dry-run"),
    "reshard": lambda run7, out: run("reshard", run7, "-o", out, "--to-mesh", "2", "--force"),
    "-j": lambda run7, out: run("reshard", run7, "-o", out, "--to-mesh", 2, "--force", "-j", 2),
    "fingerprint": lambda run7, out: run("fingerprint", run7, "--write", out, "--force"),
    "html": lambda run7, out: run("layout", run7, "--html", out, "--force"),
    "inspect": lambda run7, out: run("inspect", run7, "--html", out, "--force"),
}


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("way", WAYS)
def test_no_command_writes_over_into_or_around_its_source(
    source: Path, tmp_path: Path, way: str, command: str
) -> None:
    before = content(tmp_path)
    done = COMMANDS[command](source, f"{tmp_path}/{way}")
    assert done.exit_code == 2, done.output
    assert "the source" in done.stderr
    assert content(tmp_path) == before


def test_the_library_writes_over_no_source_either(source: Path) -> None:
    index = formats.read_index(str(source))
    force = WriteOptions(force=True)
    with pytest.raises(UsageError, match="the source"):
        api.export(index, str(source), write=force)
    options = ReshardOptions(mesh=parse_mesh("2"))
    with pytest.raises(UsageError, match="the source"):
        api.reshard(index, str(source / "new"), options=options, write=force)


def test_what_is_made_beside_out_is_no_source(source: Path, tmp_path: Path) -> None:
    for name in ("out.partial", "out.replaced"):
        source = source.rename(tmp_path / name)
        before = content(source)
        done = run("export", source, "-o", tmp_path / "out", "--force")
        assert (done.exit_code, content(source)) == (2, before), done.output


def test_a_source_that_is_one_file_is_not_replaced_by_any_of_its_names(tmp_path: Path) -> None:
    file = Path(shutil.copy(next(FULL.rglob("*.pt")), tmp_path / "full.pt"))
    os.link(file, tmp_path / "same.pt")
    before = file.read_bytes()
    for out in ("full.pt", "./full.pt", "same.pt"):
        done = run("export", file, "-o", tmp_path / out, "--force")
        assert done.exit_code == 2, done.output
    assert file.read_bytes() == before
    assert run("export", file, "-o", tmp_path / "new.safetensors").exit_code == 0


def test_what_else_is_read_is_a_source(source: Path, tmp_path: Path) -> None:
    like = Path(shutil.copytree(FSDP2, tmp_path / "like"))
    before = content(tmp_path)
    args = ("reshard", source, "--to-mesh", "4", "--like", like, "--force")
    for out in (like, like / "new"):
        assert run(*args, "-o", out).exit_code == 2
    assert content(tmp_path) == before


def test_other_parts_of_the_same_save_are_sources(tmp_path: Path) -> None:
    step = Path(shutil.copytree(TRAINER, tmp_path / "save"))
    model = next(step.rglob("pytorch_model_fsdp_0"))
    optimizer = model.parent / "optimizer_0"
    before = content(tmp_path)
    done = run("export", model, "-o", optimizer, "--force")
    assert (done.exit_code, content(tmp_path)) == (2, before), done.output
    assert run("export", model, "-o", model.parent / "hf").exit_code == 0


@pytest.mark.parametrize("kind", ["FIFO", "socket"])
@pytest.mark.parametrize("force", [(), ("--force",)])
def test_an_out_that_is_no_file_and_no_folder_is_refused(
    tmp_path: Path, kind: str, force: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    out = "out"
    if kind == "FIFO":
        os.mkfifo(out)
    else:
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(out)
    for command in (("export",), ("reshard", "--to-mesh", "2"), ("export", "--dry-run")):
        done = run(*command, FSDP2, "-o", out, *force)
        assert done.exit_code == 2
        assert f"is a {kind}" in done.stderr
    assert os.path.exists(out)


@pytest.mark.parametrize("out", [".", "..", "", " ", "sub/.."])
def test_the_working_directory_and_what_is_above_it_are_refused(
    tmp_path: Path, out: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here" / "sub").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "here")
    done = run("export", FSDP2, "-o", out, "--force")
    assert done.exit_code == 2, done.output
    assert [p.name for p in tmp_path.rglob("*")] == ["here", "sub"]


@pytest.mark.parametrize(
    ("out", "what"),
    [("/proc", "mount point"), ("/dev/null", "character device"), ("/", "working directory")],
)
def test_what_belongs_to_the_system_is_refused(out: str, what: str) -> None:
    with pytest.raises(UsageError, match=what):  # no command is tried: this may be root's machine
        out_path.real(out)


@pytest.mark.parametrize("command", ["export", "reshard --to-mesh 2", "fingerprint --write -"])
def test_a_dash_is_no_output(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    word, *more = command.split()
    done = run(word, FSDP2, *more, *(() if "--write" in more else ("-o", "-")))
    assert done.exit_code == 2, done.output
    assert "'-' is not a name for an output" in done.output
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["bound", "file.pt", "with blank"])
def test_a_mount_of_the_same_file_system_is_a_mount_point(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / name
    out.write_text("mine") if out.suffix else out.mkdir()
    word = str(out).replace(" ", "\\040")
    (tmp_path / "mounts").write_text(
        f"36 25 254:0 /a / rw - ext4\n37 36 254:0 /b {word} rw - ext4\n"
    )
    monkeypatch.setattr(out_path, "_MOUNTS", str(tmp_path / "mounts"))
    with pytest.raises(UsageError, match="mount point"):
        out_path.real(str(out))
    assert out_path.real(str(out / "new" if out.is_dir() else tmp_path / "new"))


def test_a_link_to_a_folder_is_followed_and_stays_a_link(tmp_path: Path) -> None:
    (tmp_path / "scratch" / "run").mkdir(parents=True)
    (tmp_path / "out").symlink_to("scratch/run")
    (tmp_path / "far").symlink_to("scratch")
    for out in ("out", "far/new"):
        done = run("export", FSDP2, "-o", tmp_path / out, "--force")
        assert done.exit_code == 0, done.output
        assert (tmp_path / out / "model.safetensors").is_file()
    assert (tmp_path / "out").is_symlink()
    assert sorted(p.name for p in (tmp_path / "scratch").iterdir()) == ["new", "run"]


@pytest.mark.parametrize("target", ["file", "nowhere", "out.safetensors"])
def test_any_other_link_is_refused_and_stays(tmp_path: Path, target: str) -> None:
    (tmp_path / "file").write_text("mine")
    out = tmp_path / "out.safetensors"
    out.symlink_to(target)
    done = run("export", FSDP2, "-o", out, "--force")
    assert done.exit_code == 2
    assert f"is a link to {target}" in done.stderr
    assert out.is_symlink()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file", "out.safetensors"]


@pytest.mark.parametrize("command", ["fingerprint", "html", "inspect"])
def test_a_small_file_replaces_no_link_and_keeps_its_mode(tmp_path: Path, command: str) -> None:
    file = tmp_path / "file"
    file.write_text("mine")
    file.chmod(0o600)
    (tmp_path / "link").symlink_to("file")
    done = COMMANDS[command](FSDP2, str(tmp_path / "link"))
    assert (done.exit_code, file.read_text()) == (2, "mine")
    assert COMMANDS[command](FSDP2, str(file)).exit_code == 0
    assert file.read_text() != "mine"
    assert file.stat().st_mode & 0o777 == 0o600
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "link"]


def test_out_is_made_normal_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for _ in range(2):
        done = run("reshard", FSDP2, "-o", "b/../b", "--to-mesh", "2", "--force")
        assert done.exit_code == 0, done.output
    assert [p.name for p in tmp_path.iterdir()] == ["b"]


def test_a_file_is_not_replaced_by_a_folder_nor_a_folder_by_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    (tmp_path / "folder.pt").mkdir()
    for dry in ((), ("--dry-run",)):
        for out, what in (("file", "is a file"), ("folder.pt", "is a folder"), ("file/x", "file")):
            done = run("export", FSDP2, "-o", tmp_path / out, "--force", *dry)
            assert done.exit_code == 2
            assert what in done.stderr
    assert (tmp_path / "file").read_text() == "mine"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file", "folder.pt"]


def test_a_link_as_unfinished_output_is_refused(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "out.partial").symlink_to("elsewhere")
    for dry in ((), ("--dry-run",)):
        assert run("export", FSDP2, "-o", tmp_path / "out", *dry).exit_code == 2
    assert list((tmp_path / "elsewhere").iterdir()) == []


@pytest.mark.parametrize("name", ["out", "out.safetensors"])
def test_modes_of_a_replaced_output_stay(tmp_path: Path, name: str) -> None:
    out = tmp_path / name
    run("export", FSDP2, "-o", out)
    files = [*out.iterdir()] if out.is_dir() else [out]
    for file in files:
        file.chmod(0o640)
    if out.is_dir():
        out.chmod(0o2750)
    before = {path: path.stat().st_mode for path in (out, *files)}
    assert run("export", FSDP2, "-o", out, "--force", "--dtype", "bf16").exit_code == 0
    assert {path: path.stat().st_mode for path in (out, *files)} == before


def test_a_folder_of_folders_is_replaced_by_what_was_written_now(tmp_path: Path) -> None:
    def reshard(out: Path, *more: str) -> Result:
        args = ("reshard", FSDP2, "-o", out, "--to-mesh", "2", "--layout", "accelerate")
        return run(*args, *more)

    assert reshard(tmp_path / "want", "--dtype", "bf16").exit_code == 0
    assert reshard(tmp_path / "out").exit_code == 0
    (tmp_path / "out" / "pytorch_model_fsdp_0" / "mine.txt").write_text("mine")
    assert reshard(tmp_path / "out", "--dtype", "bf16", "--force").exit_code == 0
    mine = tmp_path / "out" / "pytorch_model_fsdp_0" / "mine.txt"
    assert mine.read_text() == "mine"
    mine.unlink()
    want, got = (
        {
            p.relative_to(tmp_path / name): p.read_bytes()
            for p in map(Path, content(tmp_path / name))
        }
        for name in ("want", "out")
    )
    assert got == want


def test_the_proof_of_a_replaced_output_goes_with_it(tmp_path: Path) -> None:
    args = ("reshard", FSDP2, "-o", tmp_path / "out", "--to-mesh", "2", "--force")
    proof = tmp_path / "out" / "ckpt_tools_proof.json"
    assert run(*args, "--check").exit_code == 0
    assert proof.is_file()
    assert run(*args, "--exclude", "*bias").exit_code == 0
    assert not proof.exists()


def test_a_dry_run_refuses_what_the_real_run_refuses(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    for command in (("export",), ("reshard", "--to-mesh", "2")):
        done = run(*command, FSDP2, "-o", tmp_path / "out", "--dry-run")
        assert done.exit_code == 2
        assert "already exists" in done.stderr


@pytest.mark.parametrize(
    "flags",
    [
        ("--max-memory", "1KB"),
        ("--layout", "accelerate", "--check"),
        ("--engine", "dcp", "--check"),
    ],
)
def test_a_dry_run_refuses_the_flags_that_the_real_run_refuses(
    tmp_path: Path, flags: tuple[str, ...]
) -> None:
    args = ("reshard", FSDP2, "--to-mesh", "2", "-o", tmp_path / "out", *flags)
    real, dry = run(*args), run(*args, "--dry-run")
    assert (dry.exit_code, dry.stderr) == (real.exit_code, real.stderr) == (2, real.stderr)


@pytest.mark.parametrize(
    ("flags", "expected"),
    [(("--threads", "5"), "5 threads"), (("--threads", "5", "-j", "3"), "3 workers")],
)
@pytest.mark.parametrize("command", [("export",), ("reshard", "--to-mesh", "2")])
def test_a_dry_run_says_how_many_would_write(
    tmp_path: Path, command: tuple[str, ...], flags: tuple[str, ...], expected: str
) -> None:
    done = run(*command, FSDP2, "-o", tmp_path / "out", "--dry-run", *flags)
    assert done.exit_code == 0
    assert expected in done.stdout


@pytest.mark.parametrize("command", [("export",), ("reshard", "--to-mesh", "2")])
def test_a_dry_run_needs_no_room_and_says_that_there_is_too_little(
    tmp_path: Path, command: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(atomic_output, "free_space", lambda _: 1_000)
    done = running.run(*command, FSDP2, "-o", tmp_path / "out", "--dry-run")
    assert done.exit_code == 0
    assert "not written (--dry-run)" in done.stdout
    assert "has 1,000 free" in done.stderr
    assert run(*command, FSDP2, "-o", tmp_path / "out").exit_code == 4
    assert list(tmp_path.iterdir()) == []


def test_a_dry_run_changes_nothing_that_a_killed_run_left(tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert run("export", FSDP2, "-o", out).exit_code == 0
    out.rename(tmp_path / "out.replaced")
    (tmp_path / "out.partial").mkdir()
    (tmp_path / "out.partial" / ".manifest").write_text("")
    before = content(tmp_path)
    for flags in ((), ("--force",), ("--resume",)):
        run("export", FSDP2, "-o", out, "--dry-run", *flags)
        assert content(tmp_path) == before


def test_an_address_inside_of_a_source_is_refused() -> None:
    with pytest.raises(UsageError, match="the source"):
        out_path.refuse_source("memory://bucket/run/new", ["memory://bucket/run"])
    out_path.refuse_source("memory://bucket/run-hf", ["memory://bucket/run"])


def test_a_source_by_its_file_address_is_the_same_source(source: Path) -> None:
    with pytest.raises(UsageError, match="the source"):
        out_path.refuse_source(str(source), [f"file://{source}"])
    with pytest.raises(OutputExistsError):
        api.export(formats.read_index(str(FSDP2)), f"file://{source}")
