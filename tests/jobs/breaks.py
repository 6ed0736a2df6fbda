"""The command line, of which rank 1 fails at its second file, when a first one is finished.

torchrun … tests/jobs/breaks.py reshard CKPT -o OUT …
"""

import os
import sys
import time

from ckpt_tools.cli import main
from ckpt_tools.copying.atomic_output import place_of
from ckpt_tools.copying.task_writer import TaskWriter
from ckpt_tools.errors import WriteError

OUT = place_of(sys.argv[sys.argv.index("-o") + 1])


def breaking(*_task: object) -> None:
    end = time.monotonic() + 600
    while not OUT.has_finished and time.monotonic() < end:
        time.sleep(0.05)
    raise WriteError("This rank was to fail.")


if __name__ == "__main__":
    if os.environ["RANK"] == "1":
        TaskWriter.write = breaking
    main()
