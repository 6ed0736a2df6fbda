"""What programs show on a terminal."""

import os
import pty
import struct
import subprocess
import sys
import termios
from fcntl import ioctl


def shown_by(*args: str, columns: int = 80, **variables: str) -> str:
    """All that Python with these arguments shows, stdout and stderr together, byte for byte."""
    ours, theirs = pty.openpty()
    ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
    environment = {**os.environ, "TERM": "xterm", **variables}
    environment.pop("COLUMNS", None)  # pytest-xdist's; it would count before the terminal's own
    command = [sys.executable, *args]
    running = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment)
    os.close(theirs)
    shown = b""
    while part := _read(ours):
        shown += part
    os.close(ours)
    running.wait()
    return shown.decode()


def _read(terminal: int) -> bytes:
    try:
        return os.read(terminal, 1 << 16)
    except OSError:  # Linux says so when the other end is closed
        return b""
