"""What `export` and `reshard` share: options on names and types of the output (--map, --rename,
LoRA …), the steps that they stand for, and how to write.

The modules of steps are imported when one is asked for.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ckpt_tools.cli.group import say
from ckpt_tools.convert.write import Plan, WriteOptions
from ckpt_tools.copying.parallel import choose_threads
from ckpt_tools.core.index import CheckpointIndex, FileEntry
from ckpt_tools.core.options import option, repeated
from ckpt_tools.core.text import counted
from ckpt_tools.errors import UsageError
from ckpt_tools.storage import paths
from ckpt_tools.transforms.base import Transform

if TYPE_CHECKING:
    from ckpt_tools.formats.options import Cut
    from ckpt_tools.transforms.hf_folder import Assets


def _map_help() -> str:
    """What --map does, with the names of the built-in maps."""
    from ckpt_tools.transforms import maps

    return (
        "Convert names and tensors to another framework's, by a built-in map or a TOML file: "
        f"auto, or one of {', '.join(maps.builtin_names())}. back:FILE applies it in reverse."
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class NewNames:
    """Maps and renames, as they are typed."""

    maps: tuple[str, ...] = repeated(
        "--map", _map_help, metavar="NAME|FILE", heading="Names", parse=str
    )
    values: tuple[str, ...] = repeated(
        "--map-value",
        "A size that a map needs, such as head_dim, if config.json does not have it.",
        metavar="NAME=N",
        heading="Names",
        parse=str,
    )
    force: bool = option(
        False,
        "--force-map",
        "Use the map even if it is for another kind of model.",
        heading="Names",
    )
    renames: tuple[str, ...] = repeated(
        "--rename",
        "Replace what matches in every name, after --map. Repeatable, in order.",
        metavar="RE=REPL",
        heading="Names",
        parse=str,
    )

    @property
    def sources(self) -> tuple[str, ...]:
        """The maps that are named: files, or built-in ones."""
        return tuple(text.removeprefix("back:") for text in self.maps)

    def cuts(self) -> tuple[Cut, ...]:
        """How tensor-parallel parts are cut, as the first map that is named says it."""
        given = [text for text in self.maps if text != "auto"]
        if not given:
            return ()
        from ckpt_tools.transforms import maps

        return maps.find(given[0]).cuts

    def steps(self, ckpt: str, assets: Assets | None = None) -> Sequence[Transform]:
        """The steps; the config beside the checkpoint, or that of the assets, says sizes.

        Raises UsageError for options that do not fit.
        """
        if self == NewNames():
            return ()
        from ckpt_tools.transforms import hf_folder, maps

        config = hf_folder.config_beside(ckpt) if assets is None else assets.config
        values = hf_folder.values_of(config) | maps.parse_values(self.values)
        model_type = hf_folder.model_type_of(config)
        steps: list[Transform] = []
        for text in self.maps:
            if text == "auto":
                steps.append(maps.AutoMapTransform(values, model_type))
            else:
                name_map = maps.find(text)
                name_map = name_map.forced if self.force else name_map
                steps.append(maps.MapTransform(name_map, values, model_type))
        if self.force and set(self.maps) <= {"auto"}:
            raise UsageError("--force-map takes a map that --map names; here none is named.")
        renames = tuple(map(maps.parse_rename, self.renames))
        return [*steps, maps.RenameTransform(renames)] if renames else steps


@dataclass(frozen=True, slots=True, kw_only=True)
class Folder:
    """What makes an export a Hugging Face folder."""

    vocab_size: int | None = option(
        None,
        "--vocab-size",
        "Keep N rows of embeddings and output layers: removes Megatron's padding.",
        metavar="N",
        heading="Types and sizes",
        at_least=1,
    )
    assets: str | None = option(
        None,
        "--hf-assets",
        "Copy config, tokenizer and chat template from this folder, and refuse tensors that do "
        "not fit its config. auto: the folder that was saved with the checkpoint (verl's "
        "huggingface/, or one with config.json).",
        metavar="DIR|auto",
        heading="Hugging Face folder",
    )
    allow_mismatch: bool = option(
        False,
        "--allow-mismatch",
        "With --hf-assets, write the folder even if tensors are missing or extra.",
        heading="Hugging Face folder",
    )

    def files_read(self, ckpt: str) -> Sequence[str]:
        """The files that are copied, or looked at, beside the checkpoint."""
        if self.assets is None:
            return ()
        from ckpt_tools.transforms import hf_folder

        assets = self.assets
        if assets == "auto":
            with suppress(UsageError):  # it is raised again, where the checkpoint is read
                assets = hf_folder.assets_beside(ckpt)
        return hf_folder.files_read(assets)


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapters:
    """What becomes of LoRA weights, and what no tensor says of them."""

    alone: bool = option(
        False,
        "--adapter",
        "Write only the LoRA weights, as an adapter folder for PEFT.",
        heading="LoRA",
    )
    merge: bool = option(
        False,
        "--merge-lora",
        "Write the base weights with LoRA merged into them, in float32, then cast.",
        heading="LoRA",
    )
    alpha: float | None = option(
        None,
        "--lora-alpha",
        "LoRA's alpha; the LoRA rank is read from the tensors.",
        metavar="ALPHA",
        heading="LoRA",
    )
    config: str | None = option(
        None,
        "--adapter-config",
        "The adapter_config.json (or verl's lora_train_meta.json) with alpha.",
        metavar="FILE",
        heading="LoRA",
    )
    transposed: bool | None = option(
        None,
        "--lora-fan-in-fan-out",
        "Whether square weights with LoRA are transformers' Conv1D (GPT-2), stored as (in, "
        "out). Needed only if the checkpoint does not say.",
        heading="LoRA",
        choices={"yes": True, "no": False},
    )
    name: str | None = option(
        None,
        "--adapter-name",
        "Which adapter, if there are several.",
        metavar="NAME",
        heading="LoRA",
    )

    def steps(self, ckpt: str) -> Sequence[Transform]:
        """The step of --adapter or --merge-lora, if one is asked for. Raises UsageError."""
        if not self.alone and not self.merge:
            if self != Adapters():
                raise UsageError("LoRA options need --adapter or --merge-lora.")
            return ()
        if self.alone and self.merge:
            raise UsageError("--adapter and --merge-lora cannot be used together.")
        if (self.config is None) == (self.alpha is None):
            raise UsageError(
                "LoRA's alpha is in no tensor: give it with --lora-alpha or with --adapter-config, "
                "one of the two.",
                hint="The job's adapter_config.json has it; verl writes lora_train_meta.json.",
            )
        from ckpt_tools.transforms import lora

        if self.config is None:
            config = lora.LoraConfig(self.alpha or 0.0)
            lora.check_beside(config, ckpt)
        else:
            config = lora.read_config(self.config)
        if self.transposed is not None:
            config = replace(config, transposed=self.transposed, asked=True)
        if self.alone:
            return [lora.AdapterTransform(config, self.name)]
        return [lora.MergeTransform(config, self.name)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Writing:
    """Whether anything is written, how, and by how many processes."""

    dry_run: bool = option(
        False, "--dry-run", "Plan and check, but write nothing.", heading="Writing"
    )
    options: WriteOptions
    jobs: int = option(
        1,
        "-j --jobs",
        "Worker processes on this machine.",
        metavar="N",
        heading="Writing",
        after="--check",
        at_least=1,
    )

    def beside(self, ckpt: str, others: Sequence[str], copied: Sequence[str] = ()) -> WriteOptions:
        """How to write what is made of ``ckpt`` and of ``others``; files must stay as they are.

        ``copied`` are files in folders among the others.
        """
        states = paths.states_now([*copied, *filter(os.path.isfile, others)])
        watched = tuple(FileEntry(path, state.size, state) for path, state in states.items())
        return replace(self.options, sources=(ckpt, *others), watched=watched)

    def threads_of(self, plan: Plan, *, processes: int) -> str:
        """How many threads each of so many processes would write a plan with."""
        given, sizes, files = self.options.threads, self.options.sizes, len(plan.files)
        nbytes, lanes = plan.nbytes // processes, -(-files // processes)
        chosen = given or choose_threads(nbytes, sizes, lanes=lanes, processes=processes)
        return counted(chosen, "thread")


def export_steps(
    index: CheckpointIndex,
    *,
    names: NewNames,
    folder: Folder,
    adapters: Adapters,
    is_folder: bool,
) -> tuple[Transform, ...]:
    """The steps of an export, in their order. Raises UsageError for options that do not fit."""
    if folder.assets is not None and not is_folder:
        raise UsageError("--hf-assets completes a folder of safetensors; OUT is one file.")
    if adapters.alone and (folder.assets is not None or not is_folder):
        raise UsageError(
            "--adapter writes a PEFT folder: OUT cannot be a file, and --hf-assets does not apply."
        )
    if folder.assets is None and folder.allow_mismatch:
        raise UsageError("--allow-mismatch says how to take --hf-assets, which is not given.")
    if folder.assets is None and folder.vocab_size is None:
        return (*adapters.steps(index.root), *names.steps(index.root))
    from ckpt_tools.transforms import hf_folder, maps

    path = folder.assets
    if path == "auto":
        path = hf_folder.assets_beside(index.root)
        say(f"--hf-assets: taking {path}.")
    assets = None if path is None else hf_folder.read_assets(path)
    steps = [*adapters.steps(index.root), *names.steps(index.root, assets)]
    if folder.vocab_size is not None:
        steps.append(maps.VocabularyTransform(folder.vocab_size))
    if assets is not None:
        steps.append(hf_folder.AssetsTransform(assets, index, folder.allow_mismatch))
    return tuple(steps)
