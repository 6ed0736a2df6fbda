"""Saves of one rank that look whole: their plain tensors are slices of a model's, or a part of it.

What a file holds says so, else the files beside it, whose names differ from its own in one number:

    shard_metadata, flat_param_0, mp_world_size = 2, a header's unsharded_shape    slices
    sdp_00.pt, sdp_01.pt: a word for ranks and the same names                      slices
    ckpt_0.pt [3, 8], ckpt_1.pt [2, 8]: shapes as one tensor is split              slices
    hf_model_0001_0.pt, hf_model_0002_0.pt: other layers of one model              parts
    step_100.pt, step_200.pt; model_0.pt, model_1.pt: the same names and shapes    whole models
    rank_0.pt, rank_1.pt: the same names and CRCs                                  whole models

Files beside one are read where names say so, two of them at most, and only their headers.
"""

from __future__ import annotations

import os
import re
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from glob import escape
from itertools import combinations
from operator import itemgetter
from typing import Literal, NamedTuple

from ckpt_tools.core.index import CheckpointIndex, FileState
from ckpt_tools.core.plain_values import PickledValue, PlainValue
from ckpt_tools.core.state_tree import Key
from ckpt_tools.core.text import some
from ckpt_tools.errors import CheckpointError, IncompleteError, UnsupportedError, paths_instead
from ckpt_tools.formats.protocol import ReadOptions
from ckpt_tools.storage import paths
from ckpt_tools.storage.reader import Files

JOINED_BY_OWNER = (
    "Where each rank saved its own rows (slices), the program that saved them joins them, or saves "
    "again in full."
)
_OF_ALL = "joins the files of all ranks"
# By what a path or a key says: who saves so, and what joins it.
_OWNERS = {
    r"fsdp_shard|_rank-\d+-of-\d+\.pth": (
        "PyTorch/XLA FSDP saves so: python3 -m "
        f"torch_xla.distributed.fsdp.consolidate_sharded_ckpts {_OF_ALL}."
    ),
    r"flat_param_\d|shard_metadata|-shard\d+\.pt": (
        "fairscale's FSDP saves so: its FullyShardedDataParallel.consolidate_shard_weights "
        f"{_OF_ALL}, and for metaseq its scripts/consolidate_fsdp_shards.py."
    ),
    r"sdp_\d+\.pt": f"fairseq2 saves so: its ModelCheckpointLoader {_OF_ALL}.",
    r"unsharded_shape|slices_pairs|[pt]p-(?:rank-)?\d+-of-\d+_[dt]p": (
        f"nanotron saves so: its examples/llama/convert_nanotron_to_hf.py {_OF_ALL}."
    ),
    r"rank-\d+-part-\d+\.safetensors": (
        "save_sharded_state of vLLM and SGLang saves so, and only they load it, with "
        "load_format=sharded_state and as many ranks. Convert the model that it was made from."
    ),
    r"mp_rank_\d|mp_world_size|_model_parallel_size": (
        "Megatron and DeepSpeed save so: the converter of Megatron-LM, Megatron-Bridge or "
        f"Megatron-DeepSpeed {_OF_ALL}."
    ),
}

_RANK = r"(?:(?:tp|pp|dp|mp|ep|cp|sdp|fsdp)[-_]?)?(?:rank|shards?|sharded)|tp|pp|mp|sdp"
_ANY = rf"{_RANK}|part(?:ition)?"
_AT_FOLDER = rf"(?i)(?<![a-z])(?:{_RANK})[-_.=]?(?:\d+[-_])*\Z"
_AT_NUMBER = rf"(?i)(?<![a-z])(?:(?:{_ANY})[-_.=]?|consolidated\.)\Z"
_IN_NAME = rf"(?i)(?<![a-z])(?:{_ANY})(?![a-z])"
_OF = r"(?i)[-_]?of[-_]?(\d+)"
_NO_COUNT = (
    r"(?i)(?<![a-z])(?:of|world[-_]?size|global[-_]?step|steps?|iter(?:ation)?s?|epochs?|ep|ba"
    r"|seeds?|folds?|ema|v)[-_.=]?\Z"
)
_FOLDERS_ABOVE = 3

_SAYS_SHARD = r"(?:model_|local_|fsdp_)?shard(?:s|ed|ing)?_(?:meta(?:data)?|info|spec)"
_SHARD_NAME = r"(?:^|\.)_?(?:fsdp_shard|flat_param_\d+(?:\.|$))"
_GROUP_SIZE = r"(?:mp|tp|pp)_world_size|(?:tensor|pipeline)_model_parallel_size"
_HEADER = (
    r"unsharded|(?:^|_)slices|(?:^|_)shard(?:s|ed|ing)?_"
    r"(?:dims?|axis|offsets?|meta|info|spec|shape)"
)

Read = Callable[[str, ReadOptions], CheckpointIndex]
_ReadOrNone = Callable[[str], CheckpointIndex | None]
_Found = Literal["slices", "part"] | None
_WHOLE = ("safetensors", "torch")  # formats whose tensors pass for whole
_MOST_COMPARED = 3  # of one number's files
_MOST_ASKED = 64  # of several checkpoints in a folder


def checked(index: CheckpointIndex, read: Read, options: ReadOptions) -> CheckpointIndex:
    """The same checkpoint, with a problem where it is one rank's slices, or a part of a model.

    ``read`` gives the index of another path, for what is beside it.
    """
    if index.format not in (*_WHOLE, "ranks"):
        return index
    said = _said_by_entries(index)
    if said is not None:
        return replace(index, problems=(said, *index.problems))
    if index.format not in _WHOLE or any(not problem.about for problem in index.problems):
        return index
    found = _said_beside(index.root, partial(_read_beside, read, options), index)
    return index if found is None else replace(index, problems=(*index.problems, found[0]))


def whole_among(
    found: Sequence[str], read: Read, options: ReadOptions
) -> tuple[list[str], CheckpointError | None]:
    """Those of the checkpoints in a folder that are whole, and what the first other one is."""
    first: CheckpointError | None = None
    others: set[str] = set()
    left = _MOST_ASKED
    for path in found:
        if left and paths.absolute(path) not in others:
            left -= 1
            said = _said_beside(path, partial(_read_beside, read, options))
            if said is not None:
                first = first or said[0]
                others |= said[1]
    return [path for path in found if paths.absolute(path) not in others], first


def _read_beside(read: Read, options: ReadOptions, path: str) -> CheckpointIndex | None:
    """The index of a checkpoint by itself; None for what is none."""
    state = paths.states_now([path]).get(path)
    return None if state is None else _read_once(read, options, path, state)


@lru_cache(maxsize=4)  # of many files in a folder, each asks for the first and the last
def _read_once(
    read: Read, options: ReadOptions, path: str, _state: FileState
) -> CheckpointIndex | None:
    try:
        return read(path, options)
    except (CheckpointError, OSError):
        return None


# ----------------------------------------------------------------------------------------- content


def _said_by_entries(index: CheckpointIndex) -> UnsupportedError | None:
    """The error for a checkpoint with names or values that only one rank's slices have."""
    for entry in index.tensors:
        fqn = entry.fqn
        if ("fsdp_shard" in fqn or "flat_param_" in fqn) and re.search(_SHARD_NAME, fqn):
            return _said(index.root, fqn)
    if all(entry.section == "other" for entry in index.tensors):
        return None
    for item in index.objects:
        top = str(item.path[0])
        if re.fullmatch(_SAYS_SHARD, top):
            return _said(index.root, top)
        said: Mapping[Key, PlainValue] = {item.path[0]: item.value}
        if item.path == ("args",) and isinstance(item.value, PickledValue):  # Megatron's arguments
            said = item.value.fields if isinstance(item.value.fields, Mapping) else {}
        for key, size in said.items():
            if re.fullmatch(_GROUP_SIZE, str(key)) and isinstance(size, int) and size > 1:
                return _said(index.root, f"{key} = {size}")
    return None


def said_by_header(path: str, metadata: Iterable[str]) -> UnsupportedError | None:
    """The error for a safetensors file whose ``__metadata__`` has an entry of one rank's slices."""
    said = next(filter(partial(re.search, _HEADER), sorted(metadata)), None)
    return None if said is None else _said(path, said)


def _said(path: str, said: str) -> UnsupportedError:
    return UnsupportedError(
        f"{path} holds the slices of one rank, not whole tensors, as {said} says.",
        hint=_owner(path, said),
    )


def _owner(path: str, said: str = "") -> str:
    """Who saves so, and what joins it."""
    text = f"{said} {path}"
    ways = (way for sign, way in _OWNERS.items() if re.search(sign, text))
    return next(ways, JOINED_BY_OWNER)


# ----------------------------------------------------------------------------------- what is beside


class _Count(NamedTuple):
    """A number in a path, and the paths that differ from it in that number alone, by number.

    ``is_rank``: the name says that it counts ranks. ``total`` is the N of ``-of-N``, ``glob``
    chooses these paths where they are files of one folder.
    """

    paths: dict[int, str]
    is_rank: bool
    total: int = 0
    glob: str | None = None


def _said_beside(
    path: str, read: _ReadOrNone, index: CheckpointIndex | None = None
) -> tuple[CheckpointError, set[str]] | None:
    """The error for a file or folder that is not a whole model, and all that are like it.

    ``index`` is its own, where that is read already.
    """
    own = paths.absolute(path)
    counts = [count for count in _counts(own) if len(count.paths) > 1 or count.total > 1]
    if not counts:
        return None
    index = index or read(own)
    if index is None or not _shapes(index):
        return None
    part: tuple[CheckpointError, set[str]] | None = None
    for count in counts:
        others = [other for _, other in sorted(count.paths.items()) if other != own]
        shown = [os.path.relpath(other, os.path.dirname(own)) for other in others]
        found = _compared(index, count, read) if others else "part"
        if found == "slices":
            return _slices(path, shown), {own, *others}
        if found == "part" and part is None:
            part = _part(path, shown, count), {own, *others}
    return part


def both_hold(first: str, second: str, fqns: Sequence[str]) -> CheckpointError:
    """The error for two files that hold tensors of the same names."""
    one, other = (re.split(r"(\d+)", os.path.basename(path)) for path in (first, second))
    is_alike = one[::2] == other[::2]
    differing = [at for at in range(1, len(one), 2) if is_alike and one[at] != other[at]]
    if any(_is_of_ranks("".join(one[:at]), "".join(one[at + 1 :])) for at in differing):
        return _slices(first, [os.path.basename(second)])
    return CheckpointError(
        f"{first} and {os.path.basename(second)} both hold {some(fqns, 3)}.",
        hint="They are files of two saves. Give the one that you mean by its own name, or move the "
        "others away.",
        about=fqns,
    )


def numbers_of(files: Sequence[str]) -> tuple[set[int], str] | None:
    """The numbers in which alone the names of files differ, and what stands behind them; None where
    they differ in anything else.
    """
    split = [re.split(r"(\d+)", os.path.basename(path)) for path in files]
    columns = list(zip(*split, strict=False))
    varying = [at for at, words in enumerate(columns) if len(set(words)) > 1]
    if len(set(map(len, split))) > 1 or len(varying) != 1 or varying[0] % 2 == 0:
        return None
    numbers = set(map(int, columns[varying[0]]))
    return (numbers, "".join(split[0][varying[0] + 1 :])) if len(numbers) == len(files) else None


def lost_between(files: Sequence[str]) -> IncompleteError | None:
    """The error for files that are numbered with gaps, not from 0 or 1 on, or not up to N."""
    from ckpt_tools.formats.numbered import absent  # late, as below

    numbers, behind = numbers_of(files) or (set(), "")
    total = re.match(_OF, behind)
    top = int(total[1]) - (0 in numbers) if total else max(numbers, default=0)
    lost = absent(numbers, top)
    if not lost:
        return None
    return IncompleteError(
        f"{files[0]} and {len(files) - 1} more are numbered up to {top}, without "
        f"{some(list(map(str, lost)))}."
    )


def _slices(path: str, others: Sequence[str]) -> UnsupportedError:
    return UnsupportedError(
        f"{path} holds the slices of one rank, not whole tensors: {some(others)} beside it "
        f"{'have' if len(others) > 1 else 'has'} other slices of the same names.",
        hint=_owner(path),
    )


def _part(path: str, others: Sequence[str], count: _Count) -> IncompleteError:
    """The error for one of several files with other tensors; those of ``-of-N`` may be lost."""
    if not others:
        return IncompleteError(
            f"{path} is one of {count.total} files of one save; the others are not beside it.",
            hint="Bring them into the same folder.",
        )
    by_folder = path.endswith(".safetensors")
    whole = paths.folder_of(path) if by_folder else count.glob
    return IncompleteError(
        f"{path} is a part of a model: {some(others)} beside it "
        f"{'hold' if len(others) > 1 else 'holds'} other tensors.",
        hint=None if count.glob else _owner(path),
        instead=paths_instead(path, [whole]) if count.glob and whole else None,
    )


def _counts(own: str) -> Iterator[_Count]:
    """The numbers in a path that may count the files of one save: any in its own name that is not
    of a step or the like, and those of ranks in the names of folders above.
    """
    from ckpt_tools.formats.numbered import NUMBERED  # late: it loads json, and DCP needs neither

    folder, name = os.path.split(own)
    is_file = not paths.is_dir(own)
    listed: list[str] | None = None
    is_asked = is_file and not NUMBERED.fullmatch(name)  # `only_a_part` knows those
    for number in re.finditer(r"\d+", name) if is_asked else ():
        before, after = name[: number.start()], name[number.end() :]
        if re.search(_NO_COUNT, before):
            continue
        listed = paths.names_in(folder) if listed is None else listed
        found = {**_numbered(folder, before, after, listed), int(number[0]): own}
        total = re.match(_OF, after)
        is_rank = _is_of_ranks(before, after)
        if is_rank or _consecutive(found):
            yield _Count(
                found,
                is_rank=is_rank or re.search(_IN_NAME, name) is not None,
                total=int(total[1]) if total else 0,
                glob=os.path.join(escape(folder), f"{escape(before)}*{escape(after)}"),
            )
    below = name if is_file else ""
    place = folder if is_file else own
    for _ in range(_FOLDERS_ABOVE):
        folder, name = os.path.split(place)
        for number in re.finditer(r"\d+", name):
            before, after = name[: number.start()], name[number.end() :]
            if re.search(_AT_FOLDER, before):
                found = _numbered(folder, before, after, paths.names_in(folder), below)
                found[int(number[0])] = own
                if 0 in found and _consecutive(found):
                    yield _Count(found, is_rank=True)
        below = os.path.join(name, below)
        place = folder


def _is_of_ranks(before: str, after: str) -> bool:
    """Whether the number between these parts of a name is that of a rank or of a part, as words at
    it say.
    """
    return bool(re.search(_AT_NUMBER, before) or re.match(_OF, after))


def _numbered(
    folder: str, before: str, after: str, names: Iterable[str], below: str = ""
) -> dict[int, str]:
    pattern = re.compile(rf"{re.escape(before)}(\d+){re.escape(after)}")
    matches = filter(None, map(pattern.fullmatch, names))
    return {int(one[1]): paths.joined(folder, os.path.join(one[0], below)) for one in matches}


def _consecutive(numbers: Iterable[int]) -> bool:
    ordered = sorted(numbers)
    return len(ordered) > 1 and ordered[-1] - ordered[0] == len(ordered) - 1


def _compared(own: CheckpointIndex, count: _Count, read: _ReadOrNone) -> _Found:
    """What this file, the first and the last are, each two of them compared; where the first or the
    last cannot be read, one next to this file takes its place.
    """
    ordered = sorted(count.paths)
    root = paths.absolute(own.root)
    at = next(place for place, number in enumerate(ordered) if count.paths[number] == root)
    indexes = {ordered[at]: own}
    for number in (ordered[0], ordered[-1], *ordered[max(at - 1, 0) : at + 2]):
        if len(indexes) < _MOST_COMPARED and number not in indexes:
            index = read(count.paths[number])
            indexes |= {} if index is None else {number: index}
    found: _Found = None
    for (one, first), (other, second) in combinations(sorted(indexes.items()), 2):
        verdict = _verdict(first, second, (one, other), count)
        if verdict == "slices":
            return verdict
        found = found or verdict
    return found


def _verdict(
    one: CheckpointIndex, other: CheckpointIndex, numbers: tuple[int, int], count: _Count
) -> _Found:
    """What two files with these numbers are; None for two whole models."""
    first, second = _shapes(one), _shapes(other)
    if not first or not second:
        return None
    common = first.keys() & second.keys()
    own, others = first.keys() - common, second.keys() - common
    if len(common) < min(len(own), len(others)):
        is_part = count.is_rank or not _patterns(own).isdisjoint(_patterns(others))
        return "part" if is_part else None
    differing = [(first[fqn], second[fqn]) for fqn in common if first[fqn] != second[fqn]]
    if not count.is_rank:
        most = len(count.paths) - 1
        is_split = differing and all(_is_split(a, b, most) for a, b in differing)
        return "slices" if is_split else None
    # The rank of a LoRA adapter is a size of its tensors.
    is_size = differing and all(numbers in zip(a, b, strict=False) for a, b in differing)
    if is_size:
        return None
    if differing:
        return "slices"
    sums, others_sums = _sums(one), _sums(other)
    if any(sums.get(fqn) is None or sums[fqn] != others_sums.get(fqn) for fqn in common):
        return "slices"  # they are no copies
    return "part" if own and others else None


def _shapes(index: CheckpointIndex) -> dict[str, tuple[int, ...]]:
    """The shapes of plain weights and states; none where DTensors say what the file is."""
    is_plain = all(entry.layout is None for entry in index.tensors)
    if index.format not in _WHOLE or not is_plain:
        return {}
    return {entry.fqn: entry.shape for entry in index.tensors if entry.section != "other"}


def _patterns(fqns: Iterable[str]) -> set[str]:
    return {re.sub(r"\d+", "*", fqn) for fqn in fqns}


def _is_split(one: Sequence[int], other: Sequence[int], most: int) -> bool:
    """Whether these can be the shapes on a lower and a higher rank of a tensor that torch split:
    equal but for one dimension, which is shorter on the higher by ``most``, or less.
    """
    if len(one) != len(other):
        return False
    steps = [a - b for a, b in zip(one, other, strict=True) if a != b]
    return len(steps) == 1 and 0 < steps[0] <= most


def _sums(index: CheckpointIndex) -> dict[str, tuple[int, int] | None]:
    """Of each tensor the CRC of its record and its place there; nothing for other than archives."""
    from ckpt_tools.formats.zip.read import read_archive  # late: few files have others beside them

    try:
        with Files() as files:
            size = files.size(index.root)
            read = partial(files.read, index.root)
            archive = read_archive(read, offset=0, length=size, where=index.root)
            records = sorted(map(archive.record, archive.names), key=itemgetter(0))
    except CheckpointError:
        return {}
    starts = [record.offset for record in records]
    sums: dict[str, tuple[int, int] | None] = {}
    for entry in index.tensors:
        offset = entry.chunks[0].data.offset
        record = records[bisect_right(starts, offset) - 1]
        sums[entry.fqn] = None if record.crc is None else (record.crc, offset - record.offset)
    return sums
