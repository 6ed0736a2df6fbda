"""`ckpt-tools export`: whole tensors, as safetensors or as one torch file.

The modules of steps are imported when one is asked for.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar, Literal

from ckpt_tools import formats
from ckpt_tools.cli import choosing, options, shaping
from ckpt_tools.cli.group import say, saying
from ckpt_tools.convert import export as convert
from ckpt_tools.convert.write import Conversion, Read, WriteOptions
from ckpt_tools.core.index import SECTIONS, CheckpointIndex, Section
from ckpt_tools.core.options import Heading, only_one_of, option
from ckpt_tools.core.text import counted
from ckpt_tools.distributed import environment
from ckpt_tools.errors import UsageError
from ckpt_tools.formats.frameworks import HUB_FORMAT
from ckpt_tools.transforms import frameworks
from ckpt_tools.transforms.base import Transform

_HELP = """Write full tensors from a sharded checkpoint, for loading elsewhere.

OUT is a folder (shards with an index), or one file if it ends in .safetensors or .pt. It appears
only when it is complete. By default the model is written, and the container of its names and
wrapper components (_orig_mod, _fsdp_wrapped_module, _checkpoint_wrapped_module, a leading module)
are removed; notes on stderr say what was changed.

""" + options.examples(
    "ckpt-tools export run7/step-1000 -o run7-hf",
    "ckpt-tools export run7/step-1000 -o model.safetensors --dtype bf16",
    "ckpt-tools export run7/step-1000 -o optim.pt --only optim --keep-names",
    "ckpt-tools export run7/step-1000 -o run7-hf --map auto --hf-assets Llama-3.1-8B",
    "ckpt-tools export run7/step-1000 -o run7-full --layout accelerate",
    "ckpt-tools export run7/step-1000 -o run7-hf --dry-run",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Folder:
    """What makes an export a Hugging Face folder."""

    heading: ClassVar[Heading] = "Hugging Face folder"

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
    )
    allow_mismatch: bool = option(
        False,
        "--allow-mismatch",
        "With --hf-assets, write the folder even if tensors are missing or extra.",
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
class _Adapters:
    """What becomes of LoRA weights, and what no tensor says of them."""

    heading: ClassVar[Heading] = "LoRA"

    alone: bool = option(
        False, "--adapter", "Write only the LoRA weights, as an adapter folder for PEFT."
    )
    merge: bool = option(
        False,
        "--merge-lora",
        "Write the base weights with LoRA merged into them, in float32, then cast.",
    )
    alpha: float | None = option(
        None,
        "--lora-alpha",
        "LoRA's alpha; the LoRA rank is read from the tensors.",
        metavar="ALPHA",
    )
    config: str | None = option(
        None,
        "--adapter-config",
        "The adapter_config.json (or verl's lora_train_meta.json) with alpha.",
        metavar="FILE",
    )
    transposed: bool | None = option(
        None,
        "--lora-fan-in-fan-out",
        "Whether square weights with LoRA are transformers' Conv1D (GPT-2), stored as (in, "
        "out). Needed only if the checkpoint does not say.",
        choices={"yes": True, "no": False},
    )
    name: str | None = option(
        None, "--adapter-name", "Which adapter, if there are several.", metavar="NAME"
    )

    def steps(self, ckpt: str) -> Sequence[Transform]:
        """The step of --adapter or --merge-lora, if one is asked for. Raises UsageError."""
        if not self.alone and not self.merge:
            if self != _Adapters():
                raise UsageError("LoRA options need --adapter or --merge-lora.")
            return ()
        only_one_of({"--adapter": self.alone, "--merge-lora": self.merge})
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
class _Asked:
    """What the command line asks for."""

    ckpt: str = options.ckpt()
    out: str = options.output("export")
    form: str | None = option(
        None,
        "--format",
        "Format of the output.  [default: by the suffix of OUT, else safetensors]",
        heading="Output",
        choices=[one.name for one in formats.targets("whole")],
    )
    wanted: convert.ExportOptions
    names: shaping.NewNames
    folder: _Folder
    adapters: _Adapters
    writing: shaping.Writing
    json: bool = options.as_json()
    only: Section | Literal["all"] | None = option(
        None,
        "--only",
        "Only this section.  [default: model]",
        heading="Which entries",
        after="--exclude",
        choices=(*SECTIONS, "all"),
    )
    reading: choosing.Reading


@options.command("export", _Asked, help=_HELP)
def command(asked: _Asked) -> None:
    """Plan and write the output, then say on stdout what it is."""
    environment.refuse_lone_task()
    started = time.monotonic()
    dry_run, out = asked.writing.dry_run, asked.out
    own = frameworks.row_of(asked.wanted.layout).formats("whole")
    form, by_suffix = asked.form or next(iter(own), None), convert.format_of(out)
    if form is not None and by_suffix is not None and form != by_suffix:
        raise UsageError(
            f"{out} has the ending of a {by_suffix} file, but --format says {form}.",
            hint="Name the output as its format is named, or leave --format out.",
        )
    form = form or by_suffix or formats.targets("whole")[0].name
    if dry_run and environment.is_follower():
        return  # rank 0 plans alone
    asked = replace(asked, ckpt=asked.reading.find(asked.ckpt))
    given = (asked.folder.assets, asked.adapters.config, *asked.names.sources)
    copied = asked.folder.files_read(asked.ckpt)
    write = asked.writing.beside(asked.ckpt, given, copied)
    make = partial(_conversion, asked, form, write)
    writing, texts = asked.writing, options.texts(asked)
    plan = shaping.carried_out(make, out, write, writing, texts=texts)
    json, what = plan.to_dict() if asked.json else None, shaping.what(plan, out)
    if dry_run:
        each = writing.threads_of(plan, processes=writing.jobs)
        who = each if writing.jobs == 1 else f"{counted(writing.jobs, 'worker')} of {each}"
        line = f"{what}; not written (--dry-run); {who} would write it"
    else:
        line = f"{what}, {shaping.took(plan, started)}"
    shaping.tell(plan, out, writing, "export", lines=[line], json=json)


def _conversion(
    asked: _Asked, form: str, write: WriteOptions, read: Read
) -> Conversion[convert.ExportPlan]:
    """The export with all its options. Raises AnswerNo when filters choose nothing."""
    index = read(asked.ckpt, replace(asked.reading.options, cuts=asked.names.cuts()))
    usual: Section | None = None if asked.wanted.layout else "model"
    only = None if asked.only == "all" else asked.only or usual
    wanted = replace(asked.wanted, format=form, only=only)
    choosing.choose(index, wanted)
    is_folder = form == HUB_FORMAT and not convert.is_single_file(asked.out, form)
    wanted = replace(wanted, steps=_steps(index, asked, is_folder=is_folder))
    if asked.adapters.alone:  # PEFT reads one file
        wanted = replace(wanted, basename="adapter_model", max_shard_size=1 << 62)
    return convert.export_of(index, asked.out, write, wanted)


def _steps(index: CheckpointIndex, asked: _Asked, *, is_folder: bool) -> tuple[Transform, ...]:
    """The steps of an export, in their order. Raises UsageError for options that do not fit."""
    folder, adapters = asked.folder, asked.adapters
    has_shards = is_folder and not adapters.alone
    if asked.wanted.max_shard_size != convert.ExportOptions().max_shard_size and not has_shards:
        raise UsageError("--max-shard-size is for a folder of safetensors in shards; OUT is none.")
    if folder.assets is not None and not is_folder:
        raise UsageError("--hf-assets completes a folder of safetensors; OUT is one file.")
    if adapters.alone and (folder.assets is not None or not is_folder):
        raise UsageError(
            "--adapter writes a PEFT folder: OUT cannot be a file, and --hf-assets does not apply."
        )
    if folder.assets is None and folder.allow_mismatch:
        raise UsageError("--allow-mismatch says how to take --hf-assets, which is not given.")
    if folder.assets is None and folder.vocab_size is None:
        return (*adapters.steps(index.root), *asked.names.steps(index.root))
    from ckpt_tools.transforms import hf_folder, maps

    path = folder.assets
    if path == "auto":
        path = hf_folder.assets_beside(index.root)
        say(f"--hf-assets: taking {path}.")
    config = None if path is None else hf_folder.asset_config(path)
    steps = [*adapters.steps(index.root), *asked.names.steps(index.root, config)]
    if folder.vocab_size is not None:
        steps.append(maps.VocabularyTransform(folder.vocab_size))
    if path is not None and config is not None:
        allow = folder.allow_mismatch
        steps.append(hf_folder.AssetsTransform(path, config, index, allow, saying()))
    return tuple(steps)
