"""Plans safetensors files: which tensor goes into which shard, at which byte, and the index JSON.

Nothing is opened here. The bytes depend on the targets and the metadata alone: tensors are put
into shards in the order of their names, and into a file by falling element size, then by name, as
the format's own serializer does, so that every tensor is aligned to its element size.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from hashlib import blake2b
from itertools import pairwise

from ckpt_tools.core.geometry import Box
from ckpt_tools.core.index import Path
from ckpt_tools.core.plan import FilePlan, Finder, LazyPlans, PlannedFile, Target, WriteItem
from ckpt_tools.core.text import counted, is_text
from ckpt_tools.errors import UnsupportedError, UsageError
from ckpt_tools.formats.protocol import PlanOptions
from ckpt_tools.formats.safetensors.header import (
    MAX_HEADER,
    PREFIX,
    SECTIONS_KEY,
    USUAL_HOME,
    Home,
    homes_by_prefix,
)
from ckpt_tools.storage.reader import batches

_ALIGNMENT = 8
_RESERVED = "__metadata__"


def plan_files(targets: Iterable[Target], *, options: PlanOptions) -> LazyPlans:
    """The files that hold these tensors whole: one, or numbered shards with an index JSON.

    A shard holds at most ``max_shard_size`` bytes of tensors, or one tensor that is larger.
    ``metadata`` goes into the header of each file, beside ``format: pt`` and the sections; a
    target's path is the container that it stands in, and its name there. Paths are relative to the
    output folder.

    Raises UnsupportedError, with all their names, for types that safetensors cannot hold, and
    UsageError for two tensors of one name.
    """
    ordered = sorted(targets, key=lambda target: target.fqn)
    _check_targets(ordered)
    basename, most = options.basename, options.max_shard_size
    if most < 1 or not basename or "/" in basename:
        raise UsageError(f"Shards {basename!r} of at most {most} bytes are not possible.")
    homes = {t.fqn: Home(t.path[:-1], t.entry.section) for t in ordered}
    metadata = {**options.metadata, **stated_homes(homes)}
    shards = [] if options.single_file else [*batches(ordered, lambda one: one.nbytes, most)]
    count = len(shards)
    if count < 2:
        name = options.single_file or f"{basename}.safetensors"
        return LazyPlans([_planned(name, ordered, metadata)])
    names = [f"{basename}-{n:05}-of-{count:05}.safetensors" for n in range(1, count + 1)]
    named = list(zip(names, shards, strict=True))
    files = [_planned(name, shard, metadata) for name, shard in named]
    # The index JSON, as Hugging Face's loaders read it; total_size counts bytes of tensors.
    weight_map = {target.fqn: name for name, shard in named for target in shard}
    index = {
        "metadata": {"total_size": sum(one.nbytes for one in ordered)},
        "weight_map": weight_map,
    }
    data = json.dumps(index, ensure_ascii=False, indent=2, sort_keys=True).encode() + b"\n"
    path = f"{basename}.safetensors.index.json"
    return LazyPlans(files) + LazyPlans.of([FilePlan(path, len(data), ((0, data),), ())])


def stated_homes(homes: Mapping[str, Home]) -> dict[str, str]:
    """What goes into ``__metadata__`` for these tensors: one value, as `header` reads it. Nothing
    for weights alone without a container, as every other tool writes them.
    """
    if set(homes.values()) <= {USUAL_HOME}:
        return {}
    usual: dict[Path, Home] = {}
    for home, _ in sorted(Counter(homes.values()).items(), key=lambda item: (-item[1], item[0])):
        usual.setdefault(home.container, home)
    containers = sorted(usual.values())
    by_prefix = homes_by_prefix(containers, homes)
    value = {
        "containers": [[list(home.container), home.section] for home in containers],
        "names": {
            fqn: [list(home.container), home.section]
            for fqn, home in sorted(homes.items())
            if by_prefix[fqn] != home
        },
    }
    return {SECTIONS_KEY: json.dumps(value, ensure_ascii=False, separators=(",", ":"))}


def _check_targets(ordered: Sequence[Target]) -> None:
    for first, second in pairwise(ordered):
        if first.fqn == second.fqn:
            raise UsageError(
                f"{first.entry.fqn} and {second.entry.fqn} would both be written as {first.fqn}."
            )
    for target in ordered:
        if target.fqn == _RESERVED or not is_text(target.fqn):
            raise UnsupportedError(
                f"A tensor cannot be named {target.fqn!r} in a safetensors file."
            )
    wrong = [target for target in ordered if target.dtype.safetensors is None]
    # A header counts the single floats along the last dimension; without one it cannot.
    wrong += [t for t in ordered if t.dtype.packed > 1 and not t.entry.shape]
    if wrong:
        shown = ", ".join(f"{target.fqn} ({target.dtype.name})" for target in wrong)
        tensors = counted(len(wrong), "tensor")
        raise UnsupportedError(
            f"safetensors cannot hold the element type of {tensors}: {shown}.",
            hint="Leave them out with --exclude, or write another format with --format torch.",
        )


def _planned(path: str, shard: Sequence[Target], metadata: Mapping[str, str]) -> PlannedFile:
    """One file: its header as bytes that are known, and a box to fill for each tensor."""
    # By falling bits of the format's own elements, then by name.
    placed = sorted(shard, key=lambda one: (-one.dtype.bits // one.dtype.packed, one.fqn))
    described: dict[str, object] = {_RESERVED: {"format": "pt", **dict(sorted(metadata.items()))}}
    end = 0
    for target in placed:
        start, end = end, end + target.nbytes
        shape = list(target.entry.shape)
        if shape:  # in the format's own elements, of which several may be packed in one of ours
            shape[-1] *= target.dtype.packed
        described[target.fqn] = {
            "dtype": target.dtype.safetensors,
            "shape": shape,
            "data_offsets": [start, end],
        }
    text = json.dumps(described, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)  # so that the data begins aligned
    if len(text) > MAX_HEADER:
        raise UsageError(
            f"{path}: a header of {len(text):,} bytes, safetensors reads at most {MAX_HEADER:,}.",
            hint="Spread the tensors over more files with a smaller --max-shard-size.",
        )
    head = len(text).to_bytes(PREFIX, "little") + text
    # Now, and not when files are half written, it is seen that the chunks are all there.
    filled = [(one, Finder(one.entry).require_whole()) for one in placed if one.entry.numel]
    make = partial(_plan_file, path, head, filled)
    return PlannedFile(path, len(head) + end, blake2b(head).digest(), make)


def _plan_file(path: str, head: bytes, filled: Sequence[tuple[Target, Finder]]) -> FilePlan:
    """The file with this header, behind which the tensors lie without a gap."""
    items: list[WriteItem] = []
    end = len(head)
    for target, finder in filled:
        box = Box.whole(target.entry.shape)
        source, dtype = target.entry.dtype, target.dtype
        items.append(WriteItem(target.fqn, path, end, box, source, dtype, finder))
        end += target.nbytes
    return FilePlan(path, end, ((0, head),), tuple(items))
