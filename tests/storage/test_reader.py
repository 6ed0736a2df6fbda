"""Files by ranges: how many of them are open at a time, and what is kept of them."""

import resource
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from dtensor_files import ROWS, save_ranks

from ckpt_tools.storage.reader import Files


@pytest.mark.slow
@pytest.mark.parametrize("command", [["verify"], ["export", "-o", "out", "--check"]])
def test_no_more_files_are_open_than_the_system_allows(command: list[str], tmp_path: Path) -> None:
    save_ranks(tmp_path / "ranks", {"w": (torch.arange(300.0).view(150, 2), ROWS)}, (150,))
    words = [sys.executable, "-m", "ckpt_tools", command[0], "ranks", *command[1:]]
    limited = ["sh", "-c", 'ulimit -n 64 && exec "$@"', "sh", *words]
    done = subprocess.run(limited, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_what_the_disk_did_not_take_whole_is_unpacked_again(tmp_path: Path) -> None:
    (tmp_path / "packed").write_bytes(b"packed")
    item = str(tmp_path / "packed"), 0, 6

    def unpack(blocks: Iterator[bytes], write: Callable[[bytes], object], where: str) -> None:
        assert where == item[0]
        write(b"".join(blocks) * 10)  # it is on the disk when the file is closed

    _, most = before = resource.getrlimit(resource.RLIMIT_FSIZE)
    with Files() as files:
        resource.setrlimit(resource.RLIMIT_FSIZE, (20, most))
        try:
            with pytest.raises(OSError, match="File too large"):
                files.spill(item, unpack)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        assert files.read(*files.spill(item, unpack)) == b"packed" * 10


# VmHWM is the peak of this process alone; what it asks for and never touches does not count.
SHORTENED = """
import sys
from ckpt_tools.errors import UnreadableError
from ckpt_tools.storage.reader import Files

try:
    Files().read(sys.argv[1], 0, 1 << 30)
except UnreadableError as error:
    print(error)
with open("/proc/self/status") as status:
    print(next(line.split()[1] for line in status if line.startswith("VmHWM")))
"""


def test_what_a_shortened_file_lacks_takes_no_memory(tmp_path: Path) -> None:
    (tmp_path / "short").write_bytes(b"short")
    command = [sys.executable, "-c", SHORTENED, tmp_path / "short"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    error, kilobytes = done.stdout.splitlines()
    assert "truncated: 5 bytes" in error
    assert int(kilobytes) < 500_000
