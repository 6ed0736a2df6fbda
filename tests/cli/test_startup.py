"""Looking commands start at once: what they may import, and how much that costs."""

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

CKPT = str(Path(__file__).parents[1] / "data" / "checkpoints" / "fsdp2_dcp_1d_4r" / "ckpt")
RANKS = str(Path(__file__).parents[1] / "data" / "checkpoints" / "fsdp2_torchsave_1d_4r" / "ckpt")

_RUN = """
import sys
from ckpt_tools.cli import main
sys.argv = ["ckpt-tools", *sys.argv[1:]]
try:
    main()
except SystemExit as stop:
    assert not stop.code, stop.code
print(" ".join(sorted(sys.modules)), file=sys.stderr)
"""


# Which files of the package run in any thread: functions, class bodies, no module's own lines.
_WATCHED = """
import sys, threading

def watch(frame, event, _):
    if event == "call" and frame.f_code.co_name != "<module>":
        ran.add(frame.f_code.co_filename)

ran = set()
threading.setprofile(watch)
sys.setprofile(watch)
"""
_RAN = """
sys.setprofile(None)
package = sys.modules["ckpt_tools"].__path__[0] + "/"
print(*(file for file in sorted(ran) if file.startswith(package)), file=sys.stderr)
"""


def _said_last(code: str, *args: str) -> set[str]:
    """The words of the last line on stderr of this code."""
    done = subprocess.run(
        [sys.executable, "-c", code, *args], capture_output=True, text=True, check=True
    )
    return set(done.stderr.splitlines()[-1].split())


def _loaded(*args: str) -> set[str]:
    """The modules that are there when a command has ended."""
    return _said_last(_RUN, *args)


@pytest.mark.parametrize(
    "args",
    [
        ("inspect", CKPT),
        ("verify", CKPT),
        ("fingerprint", CKPT),
        ("export", CKPT, "-o", "out", "--dry-run"),
        ("reshard", CKPT, "-o", "out", "--to-mesh", "2", "--dry-run"),
    ],
    ids=lambda args: args[0],
)
def test_what_takes_milliseconds_to_load_is_loaded_when_it_is_needed(args: tuple[str, ...]) -> None:
    assert not _loaded(*args) & {
        "concurrent.futures",
        "decimal",
        "pathlib",
        "shutil",
        "socket",
        "subprocess",
        "tempfile",
        "traceback",
    }


@pytest.mark.parametrize(
    "args",
    [
        ("--help",),
        ("inspect", CKPT),
        ("inspect", RANKS),
        ("ls", CKPT),
        ("ls", "-l", RANKS),
        ("layout", CKPT),
        ("verify", "--quick", CKPT),
    ],
    ids=" ".join,
)
def test_looking_loads_neither_torch_nor_numpy_nor_tqdm(args: tuple[str, ...]) -> None:
    if args[0] == "layout":
        pytest.importorskip("ckpt_tools.cli.layout")
    assert not _loaded(*args) & {
        "torch",
        "numpy",
        "ml_dtypes",
        "tqdm",
        "safetensors",
        "zstandard",
        "textual",
    }


@pytest.mark.parametrize("command", ["export", "reshard"])
def test_planning_never_loads_torch(command: str, tmp_path: Path) -> None:
    more = ["--to-mesh", "2x2"] if command == "reshard" else []
    loaded = _loaded(command, CKPT, "-o", str(tmp_path / "out"), "--dry-run", *more)
    assert "torch" not in loaded


@pytest.mark.parametrize("command", ["export", "reshard"])
def test_planning_loads_no_step_and_no_job_that_nobody_asked_for(
    command: str, tmp_path: Path
) -> None:
    more = ["--to-mesh", "2x2"] if command == "reshard" else []
    loaded = _loaded(command, CKPT, "-o", str(tmp_path / "out"), "--dry-run", *more)
    steps = {f"ckpt_tools.transforms.{name}" for name in ("lora", "maps", "hf_folder")}
    assert not loaded & {*steps, "multiprocessing.connection"}
    if command == "export":
        assert not loaded & {"ckpt_tools.distributed.group", "ckpt_tools.convert.reshard"}


def test_one_format_is_looked_at_without_loading_the_others() -> None:
    loaded = _loaded("inspect", CKPT)
    assert "ckpt_tools.formats.dcp.read" in loaded
    assert not loaded & {"ckpt_tools.formats.rank_files.read", "ckpt_tools.convert.export"}


def test_an_export_runs_75_modules_and_no_more(tmp_path: Path) -> None:
    args = ("export", CKPT, "-o", str(tmp_path / "out"))
    ran = _said_last(_WATCHED + _RUN + _RAN, *args)
    assert len(ran) <= 75, sorted(ran)


def _cpu_seconds(*words: str, cache: Path) -> float:
    """User and system time of Python with these arguments; compiled files are kept in ``cache``."""
    kept = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    environment = {**kept, "PYTHONPYCACHEPREFIX": str(cache)}
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, *words], capture_output=True, check=True, env=environment)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


@pytest.mark.slow
def test_inspect_costs_no_more_than_twice_importing_click_and_tabulate(tmp_path: Path) -> None:
    imports, inspect = ("-c", "import click, tabulate"), ("-m", "ckpt_tools", "inspect", CKPT)
    times = [  # in turn: what else the machine does then slows both
        [_cpu_seconds(*words, cache=tmp_path) for words in (imports, inspect)] for _ in range(8)
    ]
    base, ours = map(min, zip(*times, strict=True))
    assert ours <= 2 * base + 0.02  # the clock counts in steps of up to 10 ms
