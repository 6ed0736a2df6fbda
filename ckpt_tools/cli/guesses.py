"""Words and options that people guess, and what they mean here.

A guess at a command that only reads runs that command; for one that writes, the error names the
command to type. Nothing here reads a checkpoint.
"""

from __future__ import annotations

import glob
import os
import shlex
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby, pairwise

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
_WRITERS = {
    "convert": (_EXPORT, _RESHARD),
    "merge": (_EXPORT, _LORA),
    "consolidate": (_EXPORT,),
    "unshard": (_EXPORT,),
    "shard": (_RESHARD,),
    "split": (_RESHARD,),
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
    "--dryrun": "--dry-run",
}
_OUTPUT = ("-o", "--output", *(name for name, meant in _OPTIONS.items() if meant == "--output"))
_VALUES = {
    "--format": {
        "hf": "safetensors",
        "huggingface": "safetensors",
        "pt": "torch",
        "pth": "torch",
        "pytorch": "torch",
        "torch_save": "torch",
    },
    "--layout": {"torchtitan": "titan", "pytorch-lightning": "lightning"},
}
# A value that another command takes, or that nobody here writes.
_ELSEWHERE = {
    "safetensors": _EXPORT,
    "torch": _EXPORT,
    "dcp": _RESHARD,
    "gguf": "Export a folder with --hf-assets, then run llama.cpp's convert_hf_to_gguf.py on it.",
}


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
    """The arguments of a command with options and values as they are spelled here.

    The files that a shell made of an unquoted glob of rank files become that glob again. Raises
    UsageError for what is given twice, and for a value that another command takes.
    """
    options = _options(command)
    understood: list[str] = []
    waiting = ""
    for place, arg in enumerate(_reported(options, args)):
        if arg == "--":
            return [*_rejoined(understood), *args[place:]]
        name, equals, value = arg.partition("=")
        if waiting:
            understood.append(_value(options, waiting, arg))
            waiting = ""
        elif not arg.startswith("--"):
            understood.append(arg)
        else:
            meant = _option(options, name, args)
            waiting = "" if equals else meant if meant in _VALUES else ""
            understood.append(f"{meant}={_value(options, meant, value)}" if equals else meant)
    return list(_rejoined(understood))


def _reported(options: Mapping[str, click.Option], args: Sequence[str]) -> list[str]:
    """The arguments of a report with ``--json`` for ``--format json``, and so for its other forms.

    An option of that name, which other commands have, is left alone.
    """
    if "--format" in options:
        return list(args)
    left = list(args)
    for place, (arg, value) in enumerate(pairwise([*args, ""])):
        name, _, own = arg.partition("=")
        form = f"--{(own or value).lower()}"
        if name == "--format" and form in options and options[form].is_flag:
            left[place : place + (1 if own else 2)] = [form]
    return left


def no_option(
    command: click.Command, name: str, others: Mapping[str, click.Command]
) -> UsageError | None:
    """The error for an option that a command lacks, when it is known what to type instead."""
    meant = _OPTIONS.get(_dashed(name), _dashed(name))
    options = _options(command)
    if name in _OUTPUT or (name == "--svg" and "--html" in options):
        files = [f"{one} FILE" for one in ("--html", "--write") if one in options]
        hint = "It prints to stdout: `> FILE` writes that into a file."
        hint += f" Into a file itself: {' or '.join(files)}." if files else ""
        return UsageError(f"{command.name} has no {name}.", hint=hint)
    having = [one for one, other in others.items() if meant in _options(other)]
    if meant in options or not having:
        return None
    word = "an option" if meant == name else f"{meant} here, an option"
    return UsageError(
        f"{command.name} has no {name}.", hint=f"It is {word} of {', '.join(having)}."
    )


def _options(command: click.Command) -> dict[str, click.Option]:
    return {name: p for p in command.params if isinstance(p, click.Option) for name in p.opts}


def _dashed(name: str) -> str:
    """The name with dashes, where other tools have underscores: ``--max_shard_size``."""
    return name.replace("_", "-")


def _option(options: Mapping[str, click.Option], name: str, args: Sequence[str]) -> str:
    """The option that this one means. Raises UsageError when that is given, too."""
    meant = _OPTIONS.get(_dashed(name), _dashed(name))
    if name in options or meant not in options:
        return name
    others = set(options[meant].opts) & {arg.partition("=")[0] for arg in args}
    if others and not options[meant].multiple and not options[meant].is_flag:
        raise UsageError(f"{name} means {meant} here, and {min(others)} is given, too.")
    return meant


def _value(options: Mapping[str, click.Option], name: str, value: str) -> str:
    """The choice that this value means. Raises UsageError for one that another command takes."""
    kind = options[name].type if name in options else None
    if not isinstance(kind, click.Choice) or value in kind.choices:
        return value
    meant = _VALUES.get(name, {}).get(value.lower(), value.lower())
    if meant in kind.choices:
        return meant
    if meant in _ELSEWHERE:
        raise UsageError(
            f"{name} {value} is not among {', '.join(map(str, kind.choices))}.",
            hint=_ELSEWHERE[meant],
        )
    return value


def _rejoined(args: Sequence[str]) -> Iterator[str]:
    """The arguments with rank files of one folder, several in a row, replaced by their glob."""
    for folder, group in groupby(args, _folder_of_rank_file):
        files = list(group)
        # Files of one rank are of several saves: the two sides of a diff.
        if folder is None or len(files) == 1 or len(set(map(_rank_of, files))) < len(files):
            yield from files
            continue
        pattern = os.path.join(glob.escape(folder), _pattern(list(map(os.path.basename, files))))
        if set(glob.glob(pattern)) != set(files):
            raise UsageError(
                f"{len(files)} files are given where one checkpoint is expected.",
                hint="Give the folder, or quote the glob: 'model_world_size_8_rank_*.pt'.",
            )
        yield pattern


def _folder_of_rank_file(arg: str) -> str | None:
    """The folder of this file when its name says which rank saved it, else None."""
    if arg.startswith("-") or "rank" not in arg.lower() or not os.path.isfile(arg):
        return None
    return None if _rank_of(arg) is None else os.path.dirname(arg)


def _rank_of(path: str) -> int | None:
    from ckpt_tools import formats  # late: few arguments are such files

    return formats.named("ranks").rank_of(path)


def _pattern(names: Sequence[str]) -> str:
    """A glob of what the names begin and end with."""
    first = _common_start(names)
    last = _common_start([name[len(first) :][::-1] for name in names])[::-1]
    return f"{glob.escape(first)}*{glob.escape(last)}"


def _common_start(words: Sequence[str]) -> str:
    low, high = min(words), max(words)
    same = next((place for place, c in enumerate(low) if high[place : place + 1] != c), len(low))
    return low[:same]
