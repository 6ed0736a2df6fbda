"""`python -m ckpt_tools`, and `torchrun -m ckpt_tools`: the same as the `ckpt-tools` command."""

from ckpt_tools.cli import main

main()
