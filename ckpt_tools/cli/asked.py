"""The options of the command that runs, as the dataclasses of the library.

This is the one place where an option becomes a field of such a class. `options` and `shaping`
define the options. The classes of commands that write are imported when one is made, so that
commands that only read start without them.
"""

from __future__ import annotations

import os
from dataclasses import replace
from typing import TYPE_CHECKING

import click
from click.core import ParameterSource

from ckpt_tools.cli.options import Filters, with_values
from ckpt_tools.core.index import CheckpointIndex, FileEntry
from ckpt_tools.errors import UsageError, reason_of
from ckpt_tools.formats.options import Cut, ReadOptions
from ckpt_tools.storage import paths

if TYPE_CHECKING:
    from ckpt_tools.convert.export import ExportOptions
    from ckpt_tools.convert.reshard import ReshardOptions
    from ckpt_tools.convert.write import WriteOptions
    from ckpt_tools.proof.diff import DiffOptions
    from ckpt_tools.transforms.optimizer import ParamNames

# PEFT reads one file.
_ONE_FILE = 1 << 62
_LONGEST_LIST = 64 << 20  # bytes of a list of parameters' names


# Options that may differ from rank to rank: what each reads, how much it uses, how it speaks.
_OWN = frozenset({"ckpt", "threads", "max_memory", "quiet", "verbose", "json"})


def texts() -> dict[str, str]:
    """The options of this command line that all ranks of a job must share, by their flags."""
    ctx = click.get_current_context()
    flags = {param.name: max(param.opts, key=len) for param in ctx.command.params}
    given = {name: value for name, value in ctx.params.items() if value not in (None, ())}
    return {
        flags[name]: str(getattr(value, "name", value))
        for name, value in given.items()
        if name not in _OWN
    }


def filters() -> Filters:
    """--include, --exclude and --only."""
    params = click.get_current_context().params
    only = None if params["only"] == "all" else params["only"]
    return Filters(params["include"], params["exclude"], only)


def filters_of_export() -> Filters:
    """As `filters`; with --layout, model and optimizer unless --only is given."""
    ctx = click.get_current_context()
    is_given = ctx.get_parameter_source("only") is not ParameterSource.DEFAULT
    return filters() if is_given or ctx.params["layout"] is None else replace(filters(), only=None)


def reading(cuts: tuple[Cut, ...] = ()) -> ReadOptions:
    """--allow-global, and how the parts of tensors are cut."""
    return ReadOptions(click.get_current_context().params["allow_global"], cuts)


def writing() -> WriteOptions:
    """The options of `options.writing`, and all that the command reads."""
    from ckpt_tools.cli import shaping
    from ckpt_tools.convert.write import WriteOptions

    params = click.get_current_context().params
    others = [text for name in ("like", "param_names") if (text := params.get(name))]
    read = [*shaping.files_read(params["ckpt"]), *filter(os.path.isfile, others)]
    return WriteOptions(
        force=params["force"],
        threads=params["threads"],
        max_memory=params["max_memory"],
        resume=params["resume"],
        check=params["check"],
        verify_source=params["verify_source"],
        sources=(params["ckpt"], *shaping.sources(), *others),
        watched=tuple(
            FileEntry(path, state.size, state) for path, state in paths.states_now(read).items()
        ),
    )


def export(index: CheckpointIndex, *, form: str, is_folder: bool) -> ExportOptions:
    """The options of `export`; ``is_folder`` for a folder of safetensors.

    Raises UsageError for options that exclude one another.
    """
    from ckpt_tools.cli import shaping
    from ckpt_tools.convert.export import ExportOptions

    params, chosen = click.get_current_context().params, filters_of_export()
    return ExportOptions(
        format=form,
        dtype=params["dtype"],
        dtypes=shaping.dtype_rules(),
        keep_names=params["keep_names"],
        keep_rank_states=params["keep_rank_states"],
        steps=shaping.export_steps(index, dtype=params["dtype"], is_folder=is_folder),
        include=chosen.include,
        exclude=chosen.exclude,
        only=chosen.only,
        max_shard_size=_ONE_FILE if params["adapter"] else params["max_shard_size"],
        layout=params["layout"],
        basename="adapter_model" if params["adapter"] else "model",
    )


def comparing() -> DiffOptions:
    """--clean-names, --rename, --rtol, --atol and --ignore-dtypes of `diff`."""
    from ckpt_tools.proof.diff import DiffOptions, Naming, parse_rename
    from ckpt_tools.proof.tolerance import Tolerance

    params = click.get_current_context().params
    naming = Naming(
        clean=params["clean_names"], renames=tuple(map(parse_rename, params["renames"]))
    )
    tolerance = Tolerance(params["rtol"], params["atol"])
    return DiffOptions(naming, tolerance, ignore_dtypes=params["ignore_dtypes"])


def target() -> ReshardOptions:
    """--to-mesh, --placements and --place. Raises UsageError for texts that cannot be parsed."""
    from ckpt_tools.convert.reshard import ReshardOptions
    from ckpt_tools.core.layout import Mesh
    from ckpt_tools.core.mesh_spec import parse_mesh, parse_placements, parse_rule
    from ckpt_tools.transforms.frameworks import VERL_MESH

    params = click.get_current_context().params
    mesh, placements = parse_mesh(params["to_mesh"]), params["placements"]
    if params.get("layout") == "verl" and "=" not in params["to_mesh"]:
        mesh = Mesh(mesh.shape, VERL_MESH[-len(mesh.shape) :])
    return ReshardOptions(
        mesh=mesh,
        placements=None if placements is None else parse_placements(placements, mesh),
        rules=tuple(parse_rule(text, mesh) for text in params["place"]),
    )


def reshard(*, form: str) -> ReshardOptions:
    """The options of `reshard`; reads the checkpoints that --like and --param-names name.

    Raises UsageError for options that exclude one another, and what reading raises.
    """
    from ckpt_tools.cli import shaping
    from ckpt_tools.formats import read_index

    params, chosen, read = click.get_current_context().params, filters(), reading()
    like, param_names = params["like"], params["param_names"]
    return replace(
        target(),
        like=None if like is None else read_index(like, options=read),
        format=form,
        layout=params["layout"],
        param_names=None if param_names is None else _param_names(param_names, read),
        keep_rank_states=params["keep_rank_states"],
        device_type=params["device_type"],
        torch_version=params["torch_version"],
        dtype=params["dtype"],
        dtypes=shaping.dtype_rules(),
        include=chosen.include,
        exclude=chosen.exclude,
        only=chosen.only,
        steps=shaping.reshard_steps(params["ckpt"], engine=params["engine"]),
    )


def _param_names(text: str, read: ReadOptions) -> ParamNames:
    """What --param-names means: a list in a file, a checkpoint with names, or the word stored.

    Raises UsageError when nothing is there, or when what is there has no names.
    """
    from ckpt_tools import formats
    from ckpt_tools.transforms import param_names
    from ckpt_tools.transforms.optimizer import ParamNames

    if text == "stored":
        return ParamNames()
    if os.path.isfile(text) and formats.detect(formats.frameworks.member(text)) is None:
        return ParamNames(param_names.parse_names(_text_of(text), where=text))
    if not os.path.exists(text):
        raise UsageError(f"--param-names: {text} does not exist.")
    return param_names.names_in(with_values(formats.read_index(text, options=read)))


def _text_of(path: str) -> str:
    if os.path.getsize(path) > _LONGEST_LIST:
        raise UsageError(f"--param-names: {path} is too long for a list of names.")
    try:
        with open(paths.open_file(path), encoding="utf-8") as file:
            return file.read()
    except (OSError, UnicodeDecodeError) as error:
        why = reason_of(error)
        raise UsageError(f"--param-names: {path} cannot be read as text: {why}.") from error
