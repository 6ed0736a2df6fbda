"""The command line: a thin coat. A command parses, makes one library call, and renders.

This room knows the list of commands, and how an end looks: exit codes, errors in one line. A
command's module is imported when the command is run, so that `--help` pays for none of them.
"""

from __future__ import annotations

import atexit
import gc
import sys

from ckpt_tools.cli.group import CommandGroup, report_crash
from ckpt_tools.cli.guesses import command_line
from ckpt_tools.distributed import environment

GROUPS = {
    "Look": {
        "inspect": "What it is, its sizes and mesh, and whether training can resume from it.",
        "ls": "One line for each tensor and object.",
        "show": "One entry: its chunks, placements and values.",
        "browse": "Walk through it on the screen, or through two side by side.",
        "layout": "A picture of who holds what; also as SVG or as a page.",
    },
    "Prove": {
        "verify": "Check that it is whole: every file, CRC and row; and that it is unchanged.",
        "fingerprint": "A digest that no format, nesting or sharding changes.",
        "diff": "What is different between two checkpoints, values included.",
        "stats": "Mean, spread, norm, NaN of each tensor, and signs of a lost rank.",
    },
    "Write": {
        "export": "Whole tensors, as safetensors or as one torch file.",
        "reshard": "Shards for training on another mesh.",
    },
    "Shell": {
        "completion": "Complete commands and tensor names in bash, zsh and fish.",
    },
}

cli = CommandGroup(
    groups=GROUPS,
    package="ckpt_tools.cli",
    help="""Look into sharded PyTorch FSDP checkpoints, prove them whole, and convert them.

    CKPT is a file, a directory, a parent folder with one checkpoint inside, or a quoted glob of
    rank files.

    Exit codes: 0 done, 1 the answer is no, 2 usage, 3 the checkpoint cannot be read, 4 writing
    failed, 130 stopped by Ctrl-C.
    """,
)


def main() -> None:
    """Run the command line of this process, and exit with its code."""
    gc.disable()  # an index is a tree of small objects, millions at times, and nothing leaks cycles
    atexit.register(gc.freeze)  # Python collects once more when it ends, even so
    sys.excepthook = report_crash
    environment.silence_followers(command_line(sys.argv[1:]))
    # A name in the checkpoint may hold characters that the terminal's encoding lacks.
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
    cli(prog_name="ckpt-tools")
