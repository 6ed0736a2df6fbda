"""Options on names and types of the output (--map, --rename, LoRA …), and the steps they stand for.

Their values are read from click's context: no command names them among its arguments. The modules
of steps are imported when one is asked for.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

import click

from ckpt_tools.cli.group import say
from ckpt_tools.core.dtypes import DType, parse_dtype
from ckpt_tools.core.index import CheckpointIndex
from ckpt_tools.errors import UsageError
from ckpt_tools.transforms.base import Transform

if TYPE_CHECKING:
    from ckpt_tools.formats.options import Cut
    from ckpt_tools.transforms.hf_folder import Assets


def for_export() -> list[click.Parameter]:
    """The options of `export`."""
    return [
        *_names(),
        click.Option(
            ["--vocab-size"],
            type=click.IntRange(min=1),
            metavar="N",
            help="Keep N rows of embeddings and output layers: removes Megatron's padding.",
        ),
        click.Option(
            ["--hf-assets"],
            metavar="DIR|auto",
            help="Copy config, tokenizer and chat template from this folder, and refuse "
            "tensors that do not fit its config. auto: the folder that was "
            "saved with the checkpoint (verl's huggingface/, or one with config.json).",
        ),
        click.Option(
            ["--allow-mismatch"],
            is_flag=True,
            help="With --hf-assets, write the folder even if tensors are missing or extra.",
        ),
        *_adapters(),
    ]


def _adapters() -> list[click.Parameter]:
    return [
        click.Option(
            ["--adapter"],
            is_flag=True,
            help="Write only the LoRA weights, as an adapter folder for PEFT.",
        ),
        click.Option(
            ["--merge-lora"],
            is_flag=True,
            help="Write the base weights with LoRA merged into them, in float32, then cast.",
        ),
        click.Option(
            ["--lora-alpha"],
            type=float,
            metavar="ALPHA",
            help="LoRA's alpha; the LoRA rank is read from the tensors.",
        ),
        click.Option(
            ["--adapter-config"],
            metavar="FILE",
            help="The adapter_config.json (or verl's lora_train_meta.json) with alpha.",
        ),
        click.Option(
            ["--lora-fan-in-fan-out"],
            type=click.Choice(["yes", "no"]),
            help="Whether square weights with LoRA are transformers' Conv1D (GPT-2), stored as "
            "(in, out). Needed only if the checkpoint does not say.",
        ),
        click.Option(
            ["--adapter-name"],
            metavar="NAME",
            help="Which adapter, if there are several.",
        ),
    ]


def for_reshard() -> list[click.Parameter]:
    """The options of `reshard`."""
    return [
        *_names(),
        click.Option(
            ["--untie"],
            is_flag=True,
            help="Also write lm_head if the source has only the embedding that it is tied "
            "to, for a job that loads both. Applied before --map.",
        ),
        click.Option(
            ["--under"],
            metavar="NAME",
            help="Put all names into this container, for a job that loads {NAME: …}.",
        ),
    ]


class _MapOption(click.Option):
    """--map, whose help names the built-in maps."""

    def get_help_record(self, ctx: click.Context) -> tuple[str, str] | None:
        """The option's lines in the help."""
        from ckpt_tools.transforms import maps

        self.help = (
            "Convert names and tensors to another framework's, by a built-in map or a TOML file: "
            f"auto, or one of {', '.join(maps.builtin_names())}. back:FILE applies it in reverse."
        )
        return super().get_help_record(ctx)


def _names() -> list[click.Parameter]:
    return [
        click.Option(
            ["--dtype-for"],
            multiple=True,
            metavar="GLOB=TYPE",
            help="Another --dtype for names that match: '*norm*=fp32', '*.gate.*=keep'.",
        ),
        _MapOption(["--map"], multiple=True, metavar="NAME|FILE"),
        click.Option(
            ["--map-value"],
            multiple=True,
            metavar="NAME=N",
            help="A size that a map needs, such as head_dim, if config.json does not have it.",
        ),
        click.Option(
            ["--force-map"],
            is_flag=True,
            help="Use the map even if it is for another kind of model.",
        ),
        click.Option(
            ["--rename"],
            multiple=True,
            metavar="RE=REPL",
            help="Replace what matches in every name, after --map. Repeatable, in order.",
        ),
    ]


def export_steps(
    index: CheckpointIndex, *, dtype: DType | None, is_folder: bool
) -> tuple[Transform, ...]:
    """The steps of an export, in their order. Raises UsageError for options that do not fit."""
    params = click.get_current_context().params
    folder: str | None = params["hf_assets"]
    size: int | None = params["vocab_size"]
    if folder is not None and not is_folder:
        raise UsageError("--hf-assets completes a folder of safetensors; OUT is one file.")
    if params["adapter"] and (folder is not None or not is_folder):
        raise UsageError(
            "--adapter writes a PEFT folder: OUT cannot be a file, and --hf-assets does not apply."
        )
    if folder is None and params["allow_mismatch"]:
        raise UsageError("--allow-mismatch says how to take --hf-assets, which is not given.")
    if folder is None and size is None:
        return (*_lora_steps(index.root, dtype), *_name_steps(index.root))
    from ckpt_tools.transforms import hf_folder, maps

    if folder == "auto":
        folder = hf_folder.assets_beside(index.root)
        say(f"--hf-assets: taking {folder}.")
    assets = None if folder is None else hf_folder.read_assets(folder)
    steps = [*_lora_steps(index.root, dtype), *_name_steps(index.root, assets)]
    if size is not None:
        steps.append(maps.VocabularyTransform(size))
    if assets is not None:
        allowed = params["allow_mismatch"]
        steps.append(hf_folder.AssetsTransform(assets, index, allowed, dtype, dtype_rules()))
    return tuple(steps)


def _lora_steps(ckpt: str, dtype: DType | None) -> list[Transform]:
    """The step of --adapter or --merge-lora, if one is asked for. Raises UsageError."""
    params = click.get_current_context().params
    alone, merged = params["adapter"], params["merge_lora"]
    file, alpha, name = params["adapter_config"], params["lora_alpha"], params["adapter_name"]
    square = params["lora_fan_in_fan_out"]
    if not alone and not merged:
        if file or name or square or alpha is not None:
            raise UsageError("LoRA options need --adapter or --merge-lora.")
        return []
    if alone and merged:
        raise UsageError("--adapter and --merge-lora cannot be used together.")
    if (file is None) == (alpha is None):
        raise UsageError(
            "LoRA's alpha is in no tensor: give it with --lora-alpha or with --adapter-config, one "
            "of the two.",
            hint="The job's adapter_config.json has it; verl writes lora_train_meta.json.",
        )
    from ckpt_tools.transforms import lora

    config = lora.LoraConfig(alpha or 0.0) if file is None else lora.read_config(file)
    if file is None:
        lora.check_beside(config, ckpt)
    if square is not None:
        config = replace(config, transposed=square == "yes", asked=True)
    if alone:
        return [lora.AdapterTransform(config, name)]
    return [lora.MergeTransform(config, name, dtype, dtype_rules())]


def sources() -> tuple[str, ...]:
    """Files and folders that these options name; also names of maps, which are no files."""
    params = click.get_current_context().params
    maps_given = [text.removeprefix("back:") for text in params["map"]]
    one = (params.get("hf_assets"), params.get("adapter_config"), *maps_given)
    return tuple(text for text in one if text)


def files_read(ckpt: str) -> list[str]:
    """The files that these options have read beside the checkpoint."""
    assets: str | None = click.get_current_context().params.get("hf_assets")
    if assets is None:
        return [*filter(os.path.isfile, sources())]
    from ckpt_tools.transforms import hf_folder

    if assets == "auto":
        with suppress(UsageError):  # it is raised again, where the checkpoint is read
            assets = hf_folder.assets_beside(ckpt)
    taken = hf_folder.files_read(assets)
    return [*taken, *filter(os.path.isfile, sources())]


def reshard_steps(ckpt: str, *, engine: str) -> tuple[Transform, ...]:
    """The steps of a reshard, in their order. Raises UsageError for options that do not fit."""
    steps = [*_name_steps(ckpt)]
    params = click.get_current_context().params
    container: str | None = params["under"]
    if container is not None or params["untie"]:
        from ckpt_tools.transforms import maps

        untie = [maps.UntieTransform()] if params["untie"] else []
        under = [] if container is None else [maps.UnderTransform(container)]
        steps = [*untie, *steps, *under]
    if steps and engine != "copy":
        raise UsageError(f"Other names and --untie need --engine copy, not {engine}.")
    return tuple(steps)


def _name_steps(ckpt: str, assets: Assets | None = None) -> Sequence[Transform]:
    """The steps of --map and --rename; the config beside the checkpoint, or that of the assets,
    says sizes.
    """
    params = click.get_current_context().params
    if not any(params[name] for name in ("map", "map_value", "rename", "force_map")):
        return ()
    from ckpt_tools.transforms import hf_folder, maps

    config = hf_folder.config_beside(ckpt) if assets is None else assets.config
    values = hf_folder.values_of(config) | maps.parse_values(params["map_value"])
    model_type, force = hf_folder.model_type_of(config), params["force_map"]
    steps: list[Transform] = []
    for text in params["map"]:
        if text == "auto":
            steps.append(maps.AutoMapTransform(values, model_type))
        else:
            name_map = maps.find(text)
            steps.append(
                maps.MapTransform(name_map.forced if force else name_map, values, model_type)
            )
    if force and set(params["map"]) <= {"auto"}:
        raise UsageError("--force-map takes a map that --map names; here none is named.")
    renames = tuple(map(maps.parse_rename, params["rename"]))
    return [*steps, maps.RenameTransform(renames)] if renames else steps


def cuts() -> tuple[Cut, ...]:
    """How tensor-parallel parts are cut, as the first map that is named says it."""
    given = [text for text in click.get_current_context().params["map"] if text != "auto"]
    if not given:
        return ()
    from ckpt_tools.transforms import maps

    return maps.find(given[0]).cuts


def dtype_rules() -> tuple[tuple[str, DType | None], ...]:
    """The exceptions from --dtype: patterns and types. Raises UsageError."""
    rules = []
    for text in click.get_current_context().params["dtype_for"]:
        pattern, equals, name = text.rpartition("=")
        dtype = parse_dtype(name)
        is_known = name == "keep" or (dtype is not None and dtype.holds_weights)
        if not equals or not pattern or not is_known:
            raise UsageError(
                f"--dtype-for is written GLOB=TYPE with a floating type, not {text!r}."
            )
        rules.append((pattern, dtype))
    return tuple(rules)
