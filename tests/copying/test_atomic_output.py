"""Outputs appear whole or not at all, wherever the process that makes them is killed."""

import errno
import math
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
from reader_contract import DATA
from running import run
from size_records import use

from ckpt_tools import api, formats
from ckpt_tools.convert import export as convert
from ckpt_tools.convert.export import ExportOptions
from ckpt_tools.convert.write import WriteOptions
from ckpt_tools.copying import atomic_output, resume
from ckpt_tools.copying import write as copy
from ckpt_tools.core.index import CheckpointIndex
from ckpt_tools.core.plan import FilePlan, LazyPlans
from ckpt_tools.core.sizes import Sizes
from ckpt_tools.distributed import run as conversions
from ckpt_tools.errors import (
    OutputExistsError,
    UnreadableError,
    UsageError,
    WriteError,
)

HF_SHARDED = DATA / "checkpoints" / "hf_sharded_safetensors" / "ckpt"
FSDP2 = str(DATA / "checkpoints" / "fsdp2_dcp_1d_4r" / "ckpt")
# What changes files and folders: a process may die right before any call of these.
STEPS = (
    *("fsync", "ftruncate", "link", "makedirs", "mkdir", "open"),
    *("pwrite", "rename", "replace", "rmdir", "unlink", "write"),
)


# Several files, and the small one of their index.
OPTIONS = ExportOptions(max_shard_size=500)


@pytest.fixture(autouse=True)
def small_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many tasks in a small checkpoint, each file noted at once, and none waits for a disk."""
    monkeypatch.setattr(os, "fsync", _nothing)
    use(Sizes(task=512), monkeypatch)
    monkeypatch.setattr(resume, "SYNC_PAUSE", 0.0)


@cache
def _fsdp2() -> CheckpointIndex:
    """Read once, and not again before each of hundreds of kills."""
    return formats.read_index(FSDP2)


def export(out: Path, *, source: str = FSDP2, told: list[int] | None = None, **write: bool) -> None:
    index = _fsdp2() if source == FSDP2 else formats.read_index(source)
    api.export(
        index,
        str(out),
        options=OPTIONS,
        write=WriteOptions(threads=1, **write),
        on_bytes=(told if told is not None else []).append,
    )


def content(path: Path) -> dict[str, bytes]:
    files = [path] if path.is_file() else sorted(p for p in path.rglob("*") if p.is_file())
    return {str(file.relative_to(path)): file.read_bytes() for file in files}


def killed_before(step: int, run: Callable[[], None]) -> bool:
    """Run it in a process that dies before this file operation; whether it did not get there."""
    child = os.fork()
    if child == 0:
        _count_down(step)
        run()
        os._exit(0)
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        assert os.WTERMSIG(status) == signal.SIGKILL
        return False
    assert os.waitstatus_to_exitcode(status) == 0
    return True


def _count_down(step: int) -> None:
    left = iter(range(step, -1, -1))

    def counted(call: Callable[..., object]) -> Callable[..., object]:
        def counting(*args: object, **kwargs: object) -> object:
            if next(left, 1) == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return call(*args, **kwargs)

        return counting

    for name in STEPS:
        setattr(os, name, counted(getattr(os, name)))
    os.fsync = counted(_nothing)


def _nothing(*_: object) -> None:
    """What fsync changes, a killed process does not show."""


def every_kill(run: Callable[[], None], prepare: Callable[[], None]) -> Iterator[int]:
    """Kill a run before its first, second, … file operation, until one run ends by itself."""
    for step in range(10_000):
        prepare()
        if killed_before(step, run):
            return
        yield step


@pytest.mark.slow
@pytest.mark.parametrize("name", ["out", "model.safetensors"])
def test_a_run_killed_at_any_step_is_gone_on_with(tmp_path: Path, name: str) -> None:
    export(tmp_path / "undisturbed" / name)
    want = content(tmp_path / "undisturbed" / name)
    folder = tmp_path / "folder"

    def prepare() -> None:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()

    steps = 0
    for step in every_kill(lambda: export(folder / name), prepare):
        is_there = (folder / name).exists()
        assert not is_there or content(folder / name) == want
        try:
            export(folder / name, resume=True)
        except OutputExistsError:
            assert is_there, step  # the killed run had ended but for its exit
        assert content(folder / name) == want, step
        assert [path.name for path in folder.iterdir()] == [name], step
        steps += 1
    assert steps > 20


@pytest.mark.slow
@pytest.mark.parametrize("resume", [True, False])
def test_the_old_output_is_never_lost(tmp_path: Path, *, resume: bool) -> None:
    old = tmp_path / "old"
    shutil.copytree(DATA / "cases" / "C29_stale_output" / "prefilled_out", old)
    (old / "notes").mkdir()
    (old / "notes" / "mine.txt").write_text("mine")
    export(shutil.copytree(old, tmp_path / "undisturbed" / "out"), force=True)
    before, want = content(old), content(tmp_path / "undisturbed" / "out")
    folder = tmp_path / "folder"
    out = folder / "out"

    def prepare() -> None:
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(old, out)

    for step in every_kill(lambda: export(out, force=True), prepare):
        places = [content(p) for p in (out, folder / "out.replaced") if p.exists()]
        assert before in places or want in places, step
        export(out, force=True, resume=resume)
        assert content(out) == want, step
        assert [path.name for path in folder.iterdir()] == ["out"], step


def test_an_old_output_that_cannot_be_removed_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of another user, in a folder that everyone may write."""
    out = tmp_path / "out"
    export(out)
    want = content(out)

    def refuse(path: str) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", path)

    monkeypatch.setattr(atomic_output, "remove", refuse)
    match = "out is written, but what it replaces cannot be removed: Permission denied"
    for again in (False, True):
        with pytest.raises(WriteError, match=match) as caught:
            export(out, force=True, resume=again)
        assert str(caught.value.advice) == f"Remove {out}.replaced and {out}.partial."
        assert content(out) == want


def test_without_force_the_old_output_comes_back(tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "mine.txt").write_text("mine")

    def die() -> None:
        real = os.rename

        def rename(source: str, target: str) -> None:
            if target == str(out):
                os.kill(os.getpid(), signal.SIGKILL)
            real(source, target)

        os.rename = rename
        export(out, force=True)

    assert not killed_before(9999, die)
    assert not out.exists()
    with pytest.raises(OutputExistsError, match="already exists"):
        export(out)
    assert content(out) == {"mine.txt": b"mine"}


@contextmanager
def failing_disk(error: OSError, *, after: int) -> Iterator[None]:
    """A disk that fails after this many writes of tensor bytes."""
    real, left = os.pwrite, iter(range(after))

    def pwrite(fd: int, data: bytes, offset: int) -> int:
        if next(left, None) is None:
            raise error
        return real(fd, data, offset)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "pwrite", pwrite)
        yield


def failing(tmp_path: Path, error: OSError, *, after: int) -> WriteError:
    """The error of an export whose disk fails after this many writes."""
    with pytest.raises(WriteError) as caught, failing_disk(error, after=after):
        export(tmp_path / "out")
    return caught.value


# Writes after which some files are finished, and not all.
SOME = 4
FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_full_disk_keeps_what_is_finished_and_says_how_to_go_on(tmp_path: Path) -> None:
    error = failing(tmp_path, FULL, after=SOME)
    assert error.exit_code == 4
    assert "No space left" in error.message
    assert "resume=True continues" in (error.hint or "")
    assert [path.name for path in tmp_path.iterdir()] == ["out.partial"]
    told: list[int] = []
    export(tmp_path / "out", resume=True, told=told)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_full_disk_with_nothing_finished_leaves_nothing(tmp_path: Path) -> None:
    error = failing(tmp_path, FULL, after=0)
    assert "--resume" not in (error.hint or "")
    assert not list(tmp_path.iterdir())


def test_finished_files_are_not_written_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing(tmp_path, FULL, after=SOME)
    finished = atomic_output.place_of(str(tmp_path / "out")).finished(plans_of())
    written: set[str] = set()
    real = os.pwrite

    def pwrite(fd: int, data: bytes, offset: int) -> int:
        written.add(os.path.basename(os.readlink(f"/proc/self/fd/{fd}")))
        return real(fd, data, offset)

    monkeypatch.setattr(os, "pwrite", pwrite)
    export(tmp_path / "out", resume=True)
    assert finished
    assert written == {plan.path for plan in plans_of()} - finished
    export(tmp_path / "whole")
    assert content(tmp_path / "out") == content(tmp_path / "whole")


def test_a_single_file_begins_again(tmp_path: Path) -> None:
    with pytest.raises(WriteError) as caught, failing_disk(FULL, after=SOME):
        export(tmp_path / "model.safetensors")
    assert "--resume" not in (caught.value.hint or "")
    assert not list(tmp_path.iterdir())


def test_a_file_gets_its_name_when_all_of_it_is_written_and_synced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = resume.OutputPlace(str(tmp_path))
    plans = LazyPlans.of([FilePlan(name, 4, (), ()) for name in ("a/whole", "a/part")])
    (tmp_path / "unfinished" / "a").mkdir(parents=True)
    for file in plans.files:
        (tmp_path / "unfinished" / file.path).write_bytes(b"data")
    synced: list[str] = []

    def fsync(fd: int) -> None:
        assert not place.has_finished
        synced.append(os.path.relpath(os.readlink(f"/proc/self/fd/{fd}"), place.unfinished))

    monkeypatch.setattr(os, "fsync", fsync)
    with resume.finishing(place) as finisher:
        finisher.written("a/whole", is_whole=True)
        assert place.finished(plans) == {"a/whole"}
        monkeypatch.setattr(place.__class__, "has_finished", False)
        finisher.written("a/part", is_whole=False)
    assert synced == ["a/whole", "a/part"]
    assert place.finished(plans) == {"a/whole"}
    place.finish_all(plans)
    assert place.finished(plans) == {"a/whole", "a/part"}
    with pytest.raises(FileNotFoundError):
        place.finish("a/lost")


@pytest.mark.parametrize(
    ("error", "kept"), [(KeyboardInterrupt(), 3), (OSError(errno.EIO, "lost"), 0)]
)
def test_what_was_being_synced_is_finished_after_a_signal_and_not_after_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException, kept: int
) -> None:
    place = resume.OutputPlace(str(tmp_path))
    (tmp_path / "unfinished").mkdir()
    (tmp_path / "new").mkdir()
    names = ("a", "b", "c")
    for name in names:
        (tmp_path / "unfinished" / name).write_bytes(b"data")
    errors = [error]

    def fsync(fd: int) -> None:  # noqa: ARG001 (its signature)
        if errors:
            raise errors.pop()

    monkeypatch.setattr(os, "fsync", fsync)

    def finish() -> None:
        with resume.finishing(place) as finisher:
            finisher._next_sync = math.inf  # all of them when it ends
            for name in names:
                finisher.written(name, is_whole=True)

    with pytest.raises((KeyboardInterrupt, WriteError)):
        finish()
    assert len(list((tmp_path / "new").iterdir())) == kept


def test_what_the_disk_did_not_take_is_written_again(tmp_path: Path) -> None:
    def fsync(fd: int) -> None:
        if "unfinished" in os.readlink(f"/proc/self/fd/{fd}"):
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", fsync)
        with pytest.raises(WriteError, match="Input/output"):
            export(tmp_path / "out")
    assert not list(tmp_path.iterdir())


def plans_of() -> tuple[FilePlan, ...]:
    return convert.plan_export(formats.read_index(FSDP2), OPTIONS).files


def stop_before_the_end(out: Path, source: str = FSDP2) -> str:
    """What Ctrl-C says when all files are finished, but for the end."""
    real = resume.Finisher.close

    def interrupted(finisher: resume.Finisher) -> None:
        real(finisher)
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(resume.Finisher, "close", interrupted)
        with pytest.raises(KeyboardInterrupt) as caught:
            export(out, source=source)
    return str(caught.value)


def test_ctrl_c_keeps_what_is_finished_and_says_so(tmp_path: Path) -> None:
    assert "--resume continues" in stop_before_the_end(tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["out.partial"]


def test_a_source_that_has_changed_is_refused_by_name(tmp_path: Path) -> None:
    source = shutil.copytree(FSDP2, tmp_path / "source")
    stop_before_the_end(tmp_path / "out", source=str(source))
    os.utime(source / "__2_0.distcp")
    with pytest.raises(UsageError, match=r"__2_0\.distcp of the source has changed"):
        export(tmp_path / "out", source=str(source), resume=True)
    assert (tmp_path / "out.partial").exists()
    export(tmp_path / "out", source=str(source))
    assert (tmp_path / "out").exists()


def test_a_source_that_has_moved_is_the_same(tmp_path: Path) -> None:
    source = shutil.copytree(FSDP2, tmp_path / "source")
    stop_before_the_end(tmp_path / "out", source=str(source))
    source.rename(tmp_path / "moved")
    export(tmp_path / "out", source=str(tmp_path / "moved"), resume=True)


def test_other_options_are_refused_by_name(tmp_path: Path) -> None:
    stop_before_the_end(tmp_path / "out")
    with pytest.raises(UsageError, match="keep_names was False and is True"):
        api.export(
            formats.read_index(FSDP2),
            str(tmp_path / "out"),
            options=replace(OPTIONS, keep_names=True),
            write=WriteOptions(resume=True),
            on_bytes=lambda _: None,
        )


def test_nothing_to_resume_is_a_fresh_start_with_a_note(tmp_path: Path) -> None:
    plan = api.export(
        formats.read_index(FSDP2),
        str(tmp_path / "out"),
        options=OPTIONS,
        write=WriteOptions(resume=True),
        on_bytes=lambda _: None,
    )
    assert "Nothing to resume: started from the beginning." in plan.notes


def test_a_folder_of_that_name_that_is_not_ours_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "out.partial").mkdir()
    (tmp_path / "out.partial" / "thesis.tex").write_text("all of it")
    for going_on in (True, False):
        with pytest.raises(OutputExistsError, match="not an unfinished output"):
            export(tmp_path / "out", resume=going_on)
    assert (tmp_path / "out.partial" / "thesis.tex").read_text() == "all of it"


def test_a_second_writer_of_the_same_output_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = copy.write_files

    def meanwhile(*args: object, **options: object) -> None:
        with pytest.raises(OutputExistsError, match="Another process is writing"):
            export(tmp_path / "out", resume=True)
        real(*args, **options)

    monkeypatch.setattr(copy, "write_files", meanwhile)
    monkeypatch.setattr("ckpt_tools.copying.resume._PATIENCE", 0.0)
    export(tmp_path / "out")
    assert (tmp_path / "out").exists()


def test_damage_in_the_source_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def damaged(*_args: object, **_options: object) -> None:
        raise UnreadableError("cut short")

    monkeypatch.setattr(copy, "write_files", damaged)
    with pytest.raises(UnreadableError):
        export(tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_a_read_that_the_system_refuses_names_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    index = formats.read_index(FSDP2)

    def broken(*_args: object) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "preadv", broken)
    with pytest.raises(UnreadableError, match=r"_0\.distcp cannot be read: Input/output"):
        api.export(
            index,
            str(tmp_path / "out"),
            options=OPTIONS,
            write=WriteOptions(),
            on_bytes=lambda _: None,
        )


def test_what_is_written_already_counts_for_the_free_space(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stop_before_the_end(tmp_path / "out")
    monkeypatch.setattr(atomic_output, "free_space", lambda _: 10)
    export(tmp_path / "out", resume=True)
    assert (tmp_path / "out").exists()


def test_a_torn_line_says_nothing(tmp_path: Path) -> None:
    stop_before_the_end(tmp_path / "out")
    manifest = tmp_path / "out.partial" / ".manifest"
    manifest.write_bytes(manifest.read_bytes() + b"00000000 complete\n")
    with resume.held(str(tmp_path / "out.partial")) as held:
        assert held.origin is not None
        assert not held.has("complete")


def test_a_file_that_was_cut_meanwhile_is_written_again(tmp_path: Path) -> None:
    stop_before_the_end(tmp_path / "out")
    first = next(iter(plans_of()))
    os.truncate(tmp_path / "out.partial" / "new" / first.path, 100)
    export(tmp_path / "out", resume=True)
    export(tmp_path / "whole")
    assert content(tmp_path / "out") == content(tmp_path / "whole")


# --------------------------------------------------------------------------------------- the source


def touched(path: Path) -> None:
    os.utime(path, ns=(1, 1))


def replaced(path: Path) -> None:
    """Another file in its place, of the same length and time."""
    status = path.stat()
    other = path.with_suffix(".other")
    other.write_bytes(bytes(status.st_size))
    os.utime(other, ns=(status.st_atime_ns, status.st_mtime_ns))
    other.replace(path)


def grown(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b"more")


def lost(path: Path) -> None:
    path.unlink()


@pytest.mark.parametrize("change", [touched, replaced, grown, lost])
@pytest.mark.parametrize("name", [".metadata", "__2_0.distcp"])
def test_a_source_that_changes_before_the_end_fails_the_run(
    tmp_path: Path, change: Callable[[Path], None], name: str
) -> None:
    source, out = tmp_path / "source", tmp_path / "out"
    shutil.copytree(FSDP2, source)
    index = formats.read_index(str(source))
    done: list[int] = []

    def on_bytes(nbytes: int) -> None:
        if nbytes and not done:
            done.append(nbytes)
            change(source / name)

    with pytest.raises(WriteError, match=f"{name} has changed since it was first read"):
        api.export(index, str(out), write=WriteOptions(threads=1), on_bytes=on_bytes)
    assert os.listdir(tmp_path) == ["source"]


def test_a_source_that_changed_since_it_was_opened_is_not_written(tmp_path: Path) -> None:
    source, out = tmp_path / "source", tmp_path / "out"
    shutil.copytree(FSDP2, source)
    index = formats.read_index(str(source))
    touched(source / "__0_0.distcp")
    with pytest.raises(WriteError, match="has changed since it was first read"):
        api.export(index, str(out))
    assert os.listdir(tmp_path) == ["source"]


@pytest.mark.parametrize("change", [touched, replaced, lost])
@pytest.mark.parametrize("name", ["model.safetensors.index.json", "config.json"])
def test_a_file_that_says_what_the_source_means_must_stay_as_it_was(
    tmp_path: Path, change: Callable[[Path], None], name: str
) -> None:
    source, out = tmp_path / "source", tmp_path / "out"
    shutil.copytree(HF_SHARDED, source)
    index = formats.read_index(str(source))
    change(source / name)
    with pytest.raises(WriteError, match=f"{name} has changed since it was first read"):
        api.export(index, str(out))
    assert os.listdir(tmp_path) == ["source"]


@pytest.mark.parametrize(
    ("words", "name"),
    [
        (["--hf-assets", "assets"], "assets/config.json"),
        (["--hf-assets", "assets"], "assets/tokenizer.json"),
        (["--hf-assets", "auto"], "source/config.json"),
        (["--map", "names.toml"], "names.toml"),
    ],
)
def test_a_file_that_an_option_names_must_stay_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(HF_SHARDED, "source")
    shutil.copytree(HF_SHARDED, "assets")
    Path("assets", "tokenizer.json").write_text("{}")
    Path("names.toml").write_text(
        'name = "mine"\nkeep_rest = true\n[[rule]]\nfrom = "model.{m*}"\nto = "model.{m*}"\n'
    )
    real = conversions.write_by

    def changed_meanwhile(*args: object) -> object:
        touched(Path(name))
        return real(*args)

    monkeypatch.setattr(conversions, "write_by", changed_meanwhile)
    result = run("export", "source", "-o", "out", *words)
    assert (result.exit_code, f"{name} has changed since" in result.stderr) == (4, True)
    assert not os.path.exists("out")
