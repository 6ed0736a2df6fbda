"""The command line: a thin coat. A command parses, makes one library call, and renders.

This room knows the list of commands, and how an end looks: exit codes, errors in one line. A
command's module is imported when the command is run, so that `--help` pays for none of them.
"""

from __future__ import annotations

import atexit
import gc
import sys

from ckpt_tools.cli.group import CommandGroup, end_if_interrupted, report_crash
from ckpt_tools.cli.guesses import command_line
from ckpt_tools.distributed import environment

GROUPS = {
    "Inspect": {
        "inspect": "Format, sizes, mesh, and whether training can resume from it.",
        "ls": "One line for each tensor and object.",
        "show": "One entry: its chunks, placements and values.",
        "browse": "Browse it on the screen.",
        "layout": "A picture of which rank holds what; also as SVG or HTML.",
    },
    "Verify": {
        "verify": "Check that it is complete (every file, CRC and row) and unchanged.",
        "fingerprint": "A digest that does not depend on format, nesting or sharding.",
        "diff": "The differences between two checkpoints, including values.",
        "stats": "Mean, spread, norm and NaN of each tensor, and signs of a missing rank.",
    },
    "Convert": {
        "export": "Full tensors, as safetensors or as one torch file.",
        "reshard": "Shards for training on another mesh.",
        "average": "One model of the weights of several checkpoints.",
    },
    "Shell": {"completion": "Complete commands and tensor names in bash, zsh and fish."},
}

cli = CommandGroup(
    groups=GROUPS,
    package="ckpt_tools.cli",
    help="""Inspect, verify and convert sharded PyTorch FSDP checkpoints.

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
    sys.excepthook, sys.unraisablehook = report_crash, end_if_interrupted
    environment.silence_followers(command_line(sys.argv[1:]))
    # A name in the checkpoint may hold characters that the terminal's encoding lacks.
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
    cli(prog_name="ckpt-tools")
