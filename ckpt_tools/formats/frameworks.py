"""Framework folders: where the checkpoint sits inside one, and which framework made it.

Frameworks are not formats. They put a checkpoint of a known format under names of their own, with
side files around it; this room knows those names.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection

from ckpt_tools.core.index import CheckpointIndex
from ckpt_tools.storage import paths
from ckpt_tools.storage.unfinished import SUFFIX

SUPPORTED = (
    "Known are: DCP directories (.metadata with .distcp files), folders of per-rank .pt files of "
    "DTensors, torch.save files (.pt, .pth, .bin, .ckpt), and safetensors files and folders."
)

_MAX_DEPTH = 4
_MAX_FOLDERS = 5_000
_MAX_LINK = 1_024  # bytes of a path in a text file
# Files that torch.save wrote, and that hold no weights: not checkpoints of their own.
_SIDE_FILE = re.compile(
    r"(random_states_\d+\.pkl|rng_state.*\.pth|scheduler\.(bin|pt)|scaler\.(bin|pt)"
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


def member(path: str) -> str:
    """The checkpoint that a path means: through links, and the folder when a file is but a part."""
    path = followed(path)
    name = os.path.basename(path)
    if paths.is_file(path) and (name == ".metadata" or name.endswith(".distcp")):
        return os.path.dirname(path) or "."
    return path


def followed(path: str) -> str:
    """Where a link leads that git or an archive turned into a text file; else the path itself.

    Such a file holds nothing but the path of something that is there (``latest-rank0.pt`` of
    Composer is a link by birth). Links of the file system need no help.
    """
    if paths.is_address(path) or not os.path.isfile(path) or os.path.getsize(path) > _MAX_LINK:
        return path
    with open(paths.open_file(path), "rb") as file:
        text = file.read(_MAX_LINK)
    try:
        target = os.path.join(os.path.dirname(path), text.decode())
    except UnicodeDecodeError:
        return path
    is_path = text.strip() == text and text and b"\n" not in text and b"\0" not in text
    return target if is_path and os.path.exists(target) else path


def inside(folder: str, is_checkpoint: Callable[[str], bool]) -> list[str]:
    """Checkpoints below a folder, shallow ones first, each once however many links lead to it.

    What is inside of a checkpoint is not looked into.
    """
    by_real_path: dict[str, str] = {}
    level = [folder]
    seen = 0
    for _ in range(_MAX_DEPTH):
        below: list[str] = []
        for parent in level:
            for path in _candidates(parent):
                seen += 1
                if is_checkpoint(followed(path)):
                    _keep(by_real_path, followed(path))
                elif paths.is_dir(path) and not os.path.islink(path):
                    below.append(path)
        level = below
        if seen > _MAX_FOLDERS:
            break
    return list(by_real_path.values())


def beside(folder: str, read: Collection[str], is_checkpoint: Callable[[str], bool]) -> list[str]:
    """Checkpoints in a folder of which ``read`` are the files that were read, by their names in it.

    An index JSON by itself is none: its files are. Nothing is looked for in stores, where each
    folder would be a request.
    """
    if paths.is_address(folder) or not os.path.isdir(folder):
        return []
    known = {os.path.realpath(path) for file in read for path in (file, os.path.dirname(file))}

    def is_other(path: str) -> bool:
        is_own = path.endswith(".index.json") or os.path.realpath(path) in known
        return not is_own and is_checkpoint(path)

    return [os.path.relpath(path, folder) for path in inside(folder, is_other)]


def _keep(by_real_path: dict[str, str], path: str) -> None:
    """Remember a checkpoint once, by its own name rather than by that of a link to it."""
    real = path if paths.is_address(path) else os.path.realpath(path)
    if real not in by_real_path or os.path.islink(by_real_path[real]):
        by_real_path[real] = path


def _candidates(parent: str) -> list[str]:
    """What in a folder could be a checkpoint or lead to one."""
    try:
        names = sorted(paths.listdir(parent))
    except OSError:
        return []
    return [
        os.path.join(parent, name)
        for name in names
        if name not in _SIDE_FOLDER and not _SIDE_FILE.fullmatch(name)
    ]


# Frameworks that keep a checkpoint beside other parts of the same save.
_SPREAD = ("accelerate", "transformers", "olmo")
_PART = re.compile(r"(pytorch_model_fsdp|optimizer)(_\d+)?(\.bin)?|model_and_optim")


def sources_of(index: CheckpointIndex) -> list[str]:
    """Every file and folder that a checkpoint is read from, and what belongs to the same save."""
    return [index.root, *(file.path for file in index.files), *_beside(index)]


def _beside(index: CheckpointIndex) -> list[str]:
    """What is beside a checkpoint and of the same save: other parts of its framework's folder.

    Not what this program is making there, or is about to replace.
    """
    folder = folder_of_save(index)
    if folder is None or paths.is_address(folder):
        return []
    try:
        names = set(paths.listdir(folder))
    except OSError:
        return []
    unfinished = {name for name in names if name + SUFFIX in names}
    return [
        os.path.join(folder, name)
        for name in sorted(names - unfinished)
        if not name.endswith((SUFFIX, ".replaced"))
    ]


def folder_of_save(index: CheckpointIndex) -> str | None:
    """The folder with all parts of a save, for frameworks that keep them apart; else None."""
    if index.framework not in _SPREAD:
        return None
    root = paths.absolute(index.root)
    return os.path.dirname(root) if _is_part(root) else root


def whole_of(index: CheckpointIndex) -> str | None:
    """The folder of a save that a checkpoint is only a part of, spelled as its path is."""
    is_spread = index.framework in _SPREAD
    return (
        paths.folder_of(index.root) if is_spread and _is_part(paths.absolute(index.root)) else None
    )


def _is_part(root: str) -> bool:
    return _PART.fullmatch(os.path.basename(root)) is not None


def framework(index: CheckpointIndex) -> tuple[str | None, str | None]:
    """Which framework made a checkpoint, and what shows it; (None, None) when nothing does."""
    root = paths.absolute(index.root)
    folder, name = os.path.split(root)
    parent = os.path.basename(folder)
    for answer in (
        _by_accelerate_names(name, folder),
        _by_files(root),
        _by_folder_names(index, name, parent),
        _by_entries(index),
    ):
        if answer is not None:
            return answer
    return None, None


def _by_accelerate_names(name: str, folder: str) -> tuple[str, str] | None:
    ours = r"(pytorch_model_fsdp|optimizer)(_\d+(\.bin)?|\.bin)"
    if not re.fullmatch(ours, name):
        return None
    if paths.is_file(os.path.join(folder, "trainer_state.json")):
        return "transformers", f"trainer_state.json beside {name}"
    beside = re.compile(r"(pytorch_model_fsdp|random_states).*")
    if name.startswith("pytorch_model_fsdp") or any(map(beside.fullmatch, paths.listdir(folder))):
        return "accelerate", f"the name {name}"
    return None


def _by_files(root: str) -> tuple[str, str] | None:
    folder = root if paths.is_dir(root) else os.path.dirname(root)
    if paths.is_dir(root) and paths.is_file(os.path.join(root, "meta.pt")):
        return "lightning", "meta.pt beside .metadata"
    if paths.is_dir(root) and paths.is_file(os.path.join(folder, "fsdp_config.json")):
        return "verl", "fsdp_config.json beside the rank files"
    return None


def _by_folder_names(index: CheckpointIndex, name: str, parent: str) -> tuple[str, str] | None:
    if index.format == "ranks" and re.fullmatch(r"global_step_\d+", parent):
        return "verl", f"the folder {parent}/{name}"
    if re.match(r"(ep\d+-ba\d+|latest-rank\d+|latest-sharded)", name):
        return "composer", f"the name {name}"
    if name == "model_and_optim":
        return "olmo", "the folder name model_and_optim"
    return None


def _by_entries(index: CheckpointIndex) -> tuple[str, str] | None:
    tops = {str(entry.path[0]) for entry in index.entries}
    if "pytorch-lightning_version" in tops:
        return "lightning", "the entry pytorch-lightning_version"
    if {"train_state", "dataloader"} <= tops or {"train_state", "lr_scheduler"} <= tops:
        return "torchtitan", "the entries train_state, dataloader and lr_scheduler"
    if any(top == "state" for top in tops) and index.tensor("state.model") is None:
        beginnings = {entry.path[:2] for entry in index.objects}
        if ("state", "timestamp") in beginnings:
            return "composer", "the entry state.timestamp"
    return None
