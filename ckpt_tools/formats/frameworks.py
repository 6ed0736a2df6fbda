"""Framework folders: where the checkpoint sits inside one, and which framework made it.

Frameworks are not formats. They put a checkpoint of a known format under names of their own, with
side files around it, or in parts; this room knows those names.

    checkpoint-500/   Accelerate, Trainer   pytorch_model_fsdp_0/ or .bin, optimizer_0/ or .bin,
                                            or files of ranks (pytorch_model_fsdp_0_rank3.bin …),
                                            scheduler, trainer_state.json, states of random numbers
    step100/          OLMo                  model_and_optim/, train/rank0.pt …
    state.ckpt/       Lightning             .metadata with .distcp files, and all else in meta.pt
    epoch_0_step_2/   Automodel             model/ of safetensors, optim/ of DCP; and so any folder
                                            of one model and one optimizer in two formats
    Llama-2-13b/      Meta                  consolidated.00.pth, consolidated.01.pth: parts of each
                                            tensor, which `tensor_parallel` joins
"""

from __future__ import annotations

import fnmatch
import os
import re
from collections.abc import Callable, Collection
from dataclasses import dataclass
from glob import escape

from ckpt_tools.core.index import CheckpointIndex, Path
from ckpt_tools.storage import paths

# A model or an optimizer of Accelerate, its number, and the rank of a file of one.
_ACCELERATE = re.compile(r"(pytorch_model_fsdp|optimizer)(?:_(\d+))?(?:_rank(?:\d+|\*))?(?:\.bin)?")
_TRAINER_STATE = "trainer_state.json"
RANDOM_STATES = re.compile(r"(random_states|rng_state)_(\d+)\.(?:pkl|pth)")
_SCHEDULERS = re.compile(r"(scheduler|scaler)\.(?:bin|pt)")
_OLMO = "model_and_optim"
# Files of ranks come from LOCAL_STATE_DICT, and with ``_0`` from ``use_dcp=False``.
_MODEL = (
    *("pytorch_model_fsdp_0", "pytorch_model_fsdp.bin"),
    *("pytorch_model_fsdp_rank*.bin", "pytorch_model_fsdp_0_rank*.bin"),
)
_OPTIM = ("optimizer_0", "optimizer.bin", "optimizer_0_rank*.bin")
_RANK_OF_OLMO = re.compile(r"rank(\d+)\.pt")
_OF_AUTOMODEL = re.compile(r"epoch_\d+_step_\d+")
_STEPS_OF_AUTOMODEL = "step_scheduler.pt"
_TENSOR_PARALLEL = re.compile(r"consolidated\.(\d+)\.pth")
# Files that torch.save wrote, and that hold no weights.
_SIDE_FILE = re.compile(
    rf"({RANDOM_STATES.pattern}|rng_state.*\.pth|{_SCHEDULERS.pattern}"
    r"|training_args\.bin|meta\.pt|common\.pt|sampler.*\.bin|dl_state_dict.*\.bin"
    r"|data(_\d+)?\.pt|(train_)?dataloader\.pt"
    r"|(trainer_state|progress|recipe_state|step_scheduler)\.pt)"
)
# The folder of config and tokenizer that verl keeps beside its rank files, as on the hub.
HUB_FOLDER = "huggingface"
# The format of whole tensors that the loaders of Hugging Face and PEFT read from a folder.
HUB_FORMAT = "safetensors"
# Folders beside the checkpoint that hold the same weights again, or none.
_SIDE_FOLDER = frozenset({"sharded", HUB_FOLDER, "dataloader", "rng", ".git", "__pycache__"})


def is_side(name: str) -> bool:
    """Whether a file or folder of this name beside a checkpoint is none of its own."""
    return name in _SIDE_FOLDER or _SIDE_FILE.fullmatch(name) is not None


# Frameworks that keep a checkpoint beside other parts of the same save.
_SPREAD = ("accelerate", "transformers", "olmo")


def sources_of(index: CheckpointIndex) -> list[str]:
    """Every file and folder that a checkpoint is read from, and what is beside it and of the same
    save: other parts of its framework's folder.

    Not what this program is making there, or is about to replace.
    """
    sources = [index.root, *(file.path for file in index.files)]
    folder = folder_of_save(index)
    if folder is None or paths.is_address(folder):
        return sources
    names = set(paths.names_in(folder))
    for name in sorted(names):
        is_own = name + paths.UNFINISHED in names or name.endswith((paths.UNFINISHED, ".replaced"))
        sources += [] if is_own else [os.path.join(folder, name)]
    return sources


def folder_of_save(index: CheckpointIndex) -> str | None:
    """The folder with all parts of a save, for frameworks that keep them apart; else None."""
    if index.framework not in _SPREAD:
        return None
    root = paths.absolute(index.root)
    return os.path.dirname(root) if _is_part(root) else root


def whole_of(index: CheckpointIndex) -> str | None:
    """The folder of a save that a checkpoint is only a part of, spelled as its path is."""
    is_spread = index.framework in _SPREAD
    return paths.folder_of(index.root) if is_spread and _is_part(index.root) else None


def _is_part(root: str) -> bool:
    name = os.path.basename(paths.absolute(root))
    return name == _OLMO or _ACCELERATE.fullmatch(name) is not None


def framework(index: CheckpointIndex) -> tuple[str, str] | tuple[None, None]:
    """Which framework made a checkpoint, and what shows it; (None, None) when nothing does."""
    root = paths.absolute(index.root)
    folder, name = os.path.split(root)
    parent = os.path.basename(folder)
    said = _of_part(folder, name)
    if said is not None:
        return said
    if paths.is_dir(root) and paths.is_file(os.path.join(root, "fsdp_config.json")):
        return "verl", "fsdp_config.json beside the rank files"
    if index.format == "ranks" and re.fullmatch(r"global_step_\d+", parent):
        return "verl", f"the folder {parent}/{name}"
    if re.match(r"(ep\d+-ba\d+|latest-rank\d+|latest-sharded)", name):
        return "composer", f"the name {name}"
    tops = {str(entry.path[0]) for entry in index.entries}
    if "pytorch-lightning_version" in tops:
        return "lightning", "the entry pytorch-lightning_version"
    if {"train_state", "dataloader"} <= tops or {"train_state", "lr_scheduler"} <= tops:
        return "torchtitan", "the entries train_state, dataloader and lr_scheduler"
    is_state = "state" in tops and index.tensor("state.model") is None
    if is_state and any(entry.path[:2] == ("state", "timestamp") for entry in index.objects):
        return "composer", "the entry state.timestamp"
    return None, None


def saved_twice(inside: Collection[str]) -> str | None:
    """What is said of checkpoints among which are two models, or two optimizers, that Accelerate
    saved into one folder in two ways; None where there are none.
    """
    for folder in dict.fromkeys(map(os.path.dirname, inside)):
        for names in (_MODEL[:2], _OPTIM[:2]):
            if all(os.path.join(folder, name) in inside for name in names):
                sharded, full = names
                return (
                    f"{folder or '.'} holds two saves of Accelerate: {sharded} of a sharded state "
                    f"dict, {full} of a full one. Move one away, and it is one checkpoint."
                )
    return None


def _of_part(folder: str, name: str) -> tuple[str, str] | None:
    """The framework that calls a part of a checkpoint so, and what shows it."""
    if name == _OLMO:
        return "olmo", f"the folder name {name}"
    match = _ACCELERATE.fullmatch(name)
    if match is None or name == match[1]:
        return None
    if paths.is_file(os.path.join(folder, _TRAINER_STATE)):
        return "transformers", f"{_TRAINER_STATE} beside {name}"
    beside = re.compile(r"(pytorch_model_fsdp|random_states).*")
    if name.startswith("pytorch_model_fsdp") or any(map(beside.fullmatch, paths.listdir(folder))):
        return "accelerate", f"the name {name}"
    return None


def tensor_parallel_parts(path: str) -> list[str]:
    """All of Meta's parts (``consolidated.00.pth`` …) of the model that a file or folder is of, by
    number; none where one is the whole, as a lone first one is.
    """
    is_folder = paths.is_dir(path)
    if not is_folder and not _TENSOR_PARALLEL.fullmatch(os.path.basename(path)):
        return []
    folder = path if is_folder else os.path.dirname(path)
    names = [name for name in paths.names_in(folder or ".") if _TENSOR_PARALLEL.fullmatch(name)]
    if len(names) == 1 and number_of_part(names[0]) == 0:
        return []
    return [os.path.join(folder, name) for name in sorted(names, key=number_of_part)]


def number_of_part(path: str) -> int:
    """The number of a tensor-parallel part; -1 for any other file."""
    match = _TENSOR_PARALLEL.fullmatch(os.path.basename(path))
    return int(match[1]) if match else -1


@dataclass(frozen=True, slots=True)
class FolderParts:
    """The parts of a checkpoint in a folder.

    ``main`` are paths of checkpoints, or globs of rank files, with the container of the entries of
    each, None for those that have their own. ``flat`` are torch.save files of other state with
    their containers, ``closed`` files that become one object each with the places of these.
    """

    root: str
    framework: str | None
    shown_by: str | None
    main: tuple[tuple[str, str | None], ...]
    flat: tuple[tuple[str, str | None], ...] = ()
    closed: tuple[tuple[str, Path], ...] = ()

    @property
    def paths(self) -> list[str]:
        """Every file and folder that is read."""
        return [path for path, _ in (*self.main, *self.flat, *self.closed)]


def parts_of(folder: str, format_of: Callable[[str], str | None]) -> FolderParts | None:
    """The parts that a framework left in a folder, None for any other folder.

    ``format_of`` gives the name of the format of a checkpoint, None for anything else.
    """
    if not paths.is_dir(folder):
        return None
    held = paths.names_in(folder)
    parts = _accelerate(folder, held) or _olmo(folder, held)
    if parts is None and ".metadata" in held and "meta.pt" in held:
        main, meta = (folder, None), (os.path.join(folder, "meta.pt"), None)
        return FolderParts(folder, "lightning", "meta.pt beside .metadata", (main,), (meta,))
    return parts or _two_formats(folder, held, format_of)


def _accelerate(folder: str, held: Collection[str]) -> FolderParts | None:
    model = [name for name in _MODEL if fnmatch.filter(held, name)]
    optim = [name for name in _OPTIM if fnmatch.filter(held, name)]
    # Several models or optimizers are several checkpoints.
    numbers = (match[2] or "0" for match in filter(None, map(_ACCELERATE.fullmatch, held)))
    said = _of_part(folder, model[0]) if len(model) == 1 else None
    if said is None or len(optim) > 1 or any(map(int, numbers)):
        return None
    if "*" in model[0] and not optim:
        return None  # rank files like any others
    main = [
        (os.path.join(escape(folder) if "*" in name else folder, name), container)
        for name, container in zip(model + optim, ("model", "optimizer"), strict=False)
    ]
    closed: list[tuple[str, Path]] = [
        (os.path.join(folder, name), (match[1], f"rank_{match[2]}"))
        for name in sorted(held, key=_by_number)
        if (match := RANDOM_STATES.fullmatch(name))
    ]
    flat = {m[1]: name for name in sorted(held) if (m := _SCHEDULERS.fullmatch(name))}
    if _TRAINER_STATE in held:
        closed.append((os.path.join(folder, _TRAINER_STATE), ("trainer_state",)))
    return FolderParts(
        folder,
        *said,
        main=tuple(main),
        flat=tuple((os.path.join(folder, name), container) for container, name in flat.items()),
        closed=tuple(closed),
    )


def _olmo(folder: str, held: Collection[str]) -> FolderParts | None:
    inner, said = os.path.join(folder, _OLMO), _of_part(folder, _OLMO) if _OLMO in held else None
    if said is None or not paths.is_dir(inner):
        return None
    train = os.path.join(folder, "train")
    ranks = paths.listdir(train) if "train" in held and paths.is_dir(train) else []
    closed = tuple(
        (os.path.join(train, name), ("train", f"rank_{match[1]}"))
        for name in sorted(ranks, key=_by_number)
        if (match := _RANK_OF_OLMO.fullmatch(name))
    )
    return FolderParts(folder, *said, ((inner, None),), closed=closed)


def _two_formats(
    folder: str, held: Collection[str], format_of: Callable[[str], str | None]
) -> FolderParts | None:
    """A model and an optimizer in two folders, each in a format of its own."""
    optim = sorted({"optim", "optimizer"} & set(held))
    if "model" not in held or len(optim) != 1:
        return None
    main = tuple((os.path.join(folder, name), name) for name in ("model", *optim))
    found = [format_of(path) for path, _ in main if paths.is_dir(path)]
    if len(found) != 2 or None in found or found[0] == found[1]:
        return None
    name = os.path.basename(paths.absolute(folder))
    is_automodels = _OF_AUTOMODEL.fullmatch(name) is not None
    shown_by = f"the folder name {name}" if is_automodels else None
    flat = [(os.path.join(folder, one), None) for one in {_STEPS_OF_AUTOMODEL} & set(held)]
    return FolderParts(folder, "automodel" if is_automodels else None, shown_by, main, (*flat,))


def _by_number(name: str) -> tuple[int, str]:
    digits = re.search(r"\d+", name)
    return (int(digits[0]) if digits else -1), name
