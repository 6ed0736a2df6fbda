"""Commands and options that people guess, and what they mean here.

A guess at a command that only reads runs that command; for one that writes, the error names the
command to type. Nothing here reads a checkpoint.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence

import click

from ckpt_tools.errors import UsageError

_COMMANDS = {
    "info": ("inspect",),
    "describe": ("inspect",),
    "summary": ("inspect",),
    "list": ("ls",),
    "tree": ("ls", "--tree"),
    "cat": ("show",),
    "get": ("show",),
    "check": ("verify",),
    "validate": ("verify",),
    "fsck": ("verify",),
    "compare": ("diff",),
    "checksum": ("fingerprint",),
    "hash": ("fingerprint",),
    "version": ("--version",),
}
_EXPORT = (
    "`ckpt-tools export CKPT -o OUT` writes full tensors, as safetensors or as one torch file."
)
_RESHARD = (
    "`ckpt-tools reshard CKPT -o OUT --to-mesh 8` writes shards for training on another mesh."
)
_LORA = "`ckpt-tools export CKPT -o OUT --merge-lora` merges LoRA weights into the base model."
_RESCUE = (
    "`ckpt-tools verify CKPT` names what is damaged, and what is complete.",
    "`ckpt-tools export CKPT -o OUT -x NAME` leaves out the one, and writes the other.",
)
_WRITERS = {
    "convert": (_EXPORT, _RESHARD),
    "merge": (_EXPORT, _LORA),
    "consolidate": (_EXPORT,),
    "unshard": (_EXPORT,),
    "shard": (_RESHARD,),
    "split": (_RESHARD,),
    "rescue": _RESCUE,
    "recover": _RESCUE,
    "repair": _RESCUE,
    "salvage": _RESCUE,
}
_OPTIONS = {
    "--out": "--output",
    "--out-dir": "--output",
    "--outdir": "--output",
    "--output-dir": "--output",
    "--output-path": "--output",
    "--overwrite": "--force",
    "--world-size": "--to-mesh",
    "--mesh": "--to-mesh",
    "--workers": "--jobs",
    "--num-workers": "--jobs",
    "--torch-dtype": "--dtype",
    "--shard-size": "--max-shard-size",
    "--filter": "--include",
    "--skip": "--exclude",
    "--top": "--first",
    "--limit": "--first",
    "--rows": "--slice",
    "--dryrun": "--dry-run",
}
# What to say of a --format that the command does not write.
FORMATS = f"""{_EXPORT}
{_RESHARD}
For GGUF, export a folder with --hf-assets; llama.cpp's convert_hf_to_gguf.py reads it."""
_OUTPUT = ("-o", "--output", *(name for name, meant in _OPTIONS.items() if meant == "--output"))


def command_line(args: Sequence[str]) -> list[str]:
    """The arguments with a guessed first word replaced by the command that it means."""
    if not args or args[0].startswith("-"):
        return list(args)
    if args[0] == "help":
        return [*command_line(args[1:2])[:1], "--help"]
    return [*_COMMANDS.get(args[0], args[:1]), *args[1:]]


def no_command(word: str, names: Sequence[str]) -> UsageError:
    """The error for a word that is no command: what to type instead."""
    from difflib import get_close_matches  # late: it is for errors only

    hint = _WRITERS.get(word)
    if hint is None and os.path.exists(word):
        hint = (f"Give a command first: `ckpt-tools inspect {shlex.quote(word)}`.",)
    if hint is None:
        near = get_close_matches(word, [*names, *_COMMANDS], n=1)
        meant = command_line(near)[0] if near else None
        hint = (f"Did you mean `ckpt-tools {meant}`?",) if meant else ()
    every = f"Commands: {', '.join(names)}."
    return UsageError(f"Unknown command {word!r}.", hint="\n".join(hint) or every)


def arguments(command: click.Command, args: Sequence[str]) -> list[str]:
    """The arguments of a command with options as they are spelled here.

    Raises UsageError for what is given twice.
    """
    options = _options(command)
    understood: list[str] = []
    for place, arg in enumerate(args):
        if arg == "--":
            return [*understood, *args[place:]]
        name, equals, value = arg.partition("=")
        meant = _meant(name) if arg.startswith("--") else name
        if name in options or meant not in options:
            meant = name
        else:
            others = set(options[meant].opts) & {other.partition("=")[0] for other in args}
            if others and not options[meant].multiple and not options[meant].is_flag:
                raise UsageError(f"{name} means {meant} here, and {min(others)} is given, too.")
        understood.append(f"{meant}{equals}{value}")
    return understood


def no_option(command: click.Command, name: str, ctx: click.Context) -> UsageError | None:
    """The error for an option that a command lacks, when it is known what to type instead."""
    meant = _meant(name)
    options = _options(command)
    if name in _OUTPUT or (name == "--svg" and "--html" in options):
        files = [f"{one} FILE" for one in ("--html", "--write") if one in options]
        hint = "It prints to stdout: `> FILE` writes that into a file."
        hint += f" Into a file itself: {' or '.join(files)}." if files else ""
        return UsageError(f"{command.name} has no {name}.", hint=hint)
    if name == "--format" and "--json" in options:
        forms = " and ".join(one for one in ("--json", "--csv") if one in options)
        return UsageError(f"{command.name} has no {name}.", hint=f"There is {forms}.")
    having, parent = list[str](), ctx.parent
    if parent is not None and isinstance(parent.command, click.Group):
        for one in parent.command.list_commands(parent):
            other = parent.command.get_command(parent, one)
            if other is not None and meant in _options(other):
                having.append(one)
    if meant in options or not having:
        return None
    word = "an option" if meant == name else f"{meant} here, an option"
    return UsageError(
        f"{command.name} has no {name}.", hint=f"It is {word} of {', '.join(having)}."
    )


def _options(command: click.Command) -> dict[str, click.Option]:
    return {name: p for p in command.params if isinstance(p, click.Option) for name in p.opts}


def _meant(name: str) -> str:
    """The option's name here, where other tools have another, or underscores."""
    dashed = name.replace("_", "-")
    return _OPTIONS.get(dashed, dashed)
