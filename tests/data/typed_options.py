"""Uses of options, right and wrong: mypy reports the lines that are marked, and no others."""

from dataclasses import dataclass

from ckpt_tools.cli import options
from ckpt_tools.cli.export import _Asked
from ckpt_tools.convert.write import WriteOptions
from ckpt_tools.core.mesh_spec import parse_mesh
from ckpt_tools.core.options import Option, option, repeated, required


@dataclass(frozen=True, kw_only=True)
class Mine:
    right: int | None = option(None, "--right", at_least=1)
    default: int = option("1", "--default")  # wrong
    parser: int = option(1, "--parser", parse=parse_mesh)  # wrong
    choice: bool = option(False, "--choice", choices={"yes": "yes"})  # wrong
    each: tuple[int, ...] = repeated("--each", parse=str)  # wrong
    needed: int = required("--needed", parse=str)  # wrong
    unknown: str = required("--unknown", heading="Unknown", parse=str)  # wrong


@options.command("right", _Asked, help="")
def right(asked: _Asked) -> None:
    threads: int | None = asked.writing.options.threads
    print(threads, asked.wanted.max_shard_size + 1, asked.names.maps)


@options.command("wrong", _Asked, help="")  # wrong
def wrong(asked: WriteOptions) -> None:
    print(asked.forced)  # wrong


@options.command("renamed", _Asked, help="")
def renamed(asked: _Asked) -> None:
    print(asked.writing.options.force, asked.writing.options.forced)  # wrong
    shard_size: str = asked.wanted.max_shard_size  # wrong
    print(shard_size, asked.reading.options.cuts, asked.wanted.like)  # wrong
