"""Ctrl-C: exit code 130 and no traceback, from the first line of ours to the last."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ckpt_tools.distributed.workers import _started

CKPT = str(Path(__file__).parents[1] / "data" / "checkpoints" / "fsdp2_dcp_1d_4r" / "ckpt")

# As the installed script does. Ctrl-C is pressed, or said to be due, where a module is looked for.
PROGRAM = """
import os, signal, sys

class Hook:
    def find_spec(self, name, path=None, target=None):
        if name == where and then == "press":
            os.kill(os.getpid(), signal.SIGINT)
        if name == where and then == "say":
            print("due", flush=True)

where, then, *sys.argv[1:] = sys.argv[1:]
sys.meta_path.insert(0, Hook())
from ckpt_tools.__main__ import main
main()
"""


def _command(where: str, then: str, *args: str) -> list[str]:
    return [sys.executable, "-c", PROGRAM, where, then, *args]


@pytest.mark.parametrize(
    "where",
    [
        "click",
        "ckpt_tools.cli.group",
        "ckpt_tools.distributed.environment",
        "ckpt_tools.cli.inspect",
        "ckpt_tools.formats.dcp.read",
        "ckpt_tools.formats.pickle.machine",
    ],
)
def test_it_ends_whatever_is_being_imported(where: str) -> None:
    command = _command(where, "press", "inspect", CKPT)
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode == 130
    assert done.stderr in ("", "Stopped.\n")


@pytest.mark.parametrize("delay", [0, 0.02, 0.05, 0.1, 0.2, 0.4])
def test_it_ends_at_any_moment(delay: float) -> None:
    command = _command("click", "say", "verify", CKPT)
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as running:
        assert running.stdout is not None
        assert running.stderr is not None
        assert running.stdout.readline() == b"due\n"
        time.sleep(delay)
        running.send_signal(signal.SIGINT)
        running.stdout.read()
        assert running.stderr.read() in (b"", b"Stopped.\n")
    # At its very end Python has put its handlers away; a shell calls death by the signal 130, too.
    assert running.returncode in (0, 130, -signal.SIGINT)


def test_it_ends_a_completion_silently() -> None:
    words = {"COMP_WORDS": f"ckpt-tools show {CKPT} ", "COMP_CWORD": "3"}
    done = subprocess.run(
        _command("ckpt_tools.formats.dcp.read", "press"),
        env={**os.environ, **words, "_CKPT_TOOLS_COMPLETE": "bash_complete"},
        check=False, capture_output=True, text=True,
    )  # fmt: skip
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_it_ends_where_python_can_only_report_it() -> None:
    program = """
import os, signal, sys
from ckpt_tools.__main__ import main
from ckpt_tools.cli import inspect

class Gone:
    def __del__(self):
        os.kill(os.getpid(), signal.SIGINT)

def failing(*args, **options):
    Gone()
    raise KeyError("went on")

inspect.read_index = failing
main()
"""
    command = [sys.executable, "-c", program, "inspect", CKPT]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (130, "")


def test_it_is_ignored_where_the_shell_says_so() -> None:
    ignoring = ["sh", "-c", 'trap "" INT; exec "$@"', "sh"]
    command = [*ignoring, *_command("ckpt_tools.cli.inspect", "press", "inspect", CKPT)]
    assert subprocess.run(command, check=False, capture_output=True).returncode == 0


def test_it_reaches_no_worker() -> None:
    connection, worker = _started()
    with worker:
        worker.send_signal(signal.SIGINT)
        time.sleep(0.1)
        worker.send_signal(signal.SIGINT)
        connection.close()
    assert worker.returncode == 1  # without a parent there is no order, and no traceback
