"""The process of `ckpt-tools`, `python -m ckpt_tools` and `torchrun -m ckpt_tools`.

Before anything else is imported, Ctrl-C is made the silent end of the process; a command that runs
raises KeyboardInterrupt instead, to leave things tidy (`cli.options.Command`).
"""

import os
import signal

if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # nohup ignores it: so do we
    signal.signal(signal.SIGINT, lambda *_: os._exit(130))


def main() -> None:
    """Run the command line of this process, and exit with its code."""
    from ckpt_tools.cli import main as run

    run()


if __name__ == "__main__":
    main()
