"""Which tensors of a torch.save file share their elements: tied weights, and other overlaps."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ckpt_tools.formats.pickle.state_dict import TensorLeaf
from ckpt_tools.formats.pickle.stored import StoredStorage

View = tuple[str, int, tuple[int, ...], tuple[int, ...], str, str | None]
Ties = tuple[tuple[str, ...], ...]


def view_of(leaf: TensorLeaf) -> View | None:
    """What of which storage a tensor is, or None when it has no element."""
    stored = leaf.stored.local
    if 0 in stored.shape:
        return None
    return (
        stored.storage.key,
        stored.storage_offset,
        stored.shape,
        stored.strides,
        stored.dtype,
        stored.sign,
    )


def tied(leaves: Iterable[TensorLeaf]) -> Ties:
    """Groups of two or more names that are the same view of the same storage."""
    groups: dict[View, list[str]] = {}
    for leaf in leaves:
        view = view_of(leaf)
        if view is not None:
            groups.setdefault(view, []).append(leaf.fqn)
    return _groups(groups.values())


def still_tied(ties: Ties, leaves: Iterable[TensorLeaf]) -> Ties:
    """Those ties that hold in another rank's file, too; a shard without elements says nothing."""
    wanted = {fqn for group in ties for fqn in group}
    views = {leaf.fqn: view_of(leaf) for leaf in leaves if leaf.fqn in wanted}
    kept = []
    for group in ties:
        seen: dict[View, list[str]] = {}
        neutral = [fqn for fqn in group if fqn in views and views[fqn] is None]
        for fqn in group:
            view = views.get(fqn)
            if view is not None:
                seen.setdefault(view, []).append(fqn)
        kept += [[*names_, *neutral] for names_ in seen.values()] or [neutral]
    return _groups(kept)


def overlapping(leaves: Iterable[TensorLeaf]) -> list[tuple[str, str]]:
    """Pairs of neighbours in one storage that may share elements without being the same view."""
    spans: dict[StoredStorage, list[tuple[int, int, View, str]]] = {}
    for leaf in leaves:
        stored = leaf.stored.local
        view = view_of(leaf)
        if view is not None:
            spans.setdefault(stored.storage, []).append(
                (stored.storage_offset, stored.end, view, leaf.fqn)
            )
    pairs = []
    for held in spans.values():
        held.sort(key=lambda span: span[:2])
        reach, last_view, last_fqn = held[0][1:]
        for start, end, view, fqn in held[1:]:
            if start < reach and view != last_view:
                pairs.append((last_fqn, fqn))
            if end > reach:
                reach, last_view, last_fqn = end, view, fqn
    return pairs


def _groups(groups: Iterable[Sequence[str]]) -> Ties:
    return tuple(sorted(tuple(sorted(group)) for group in groups if len(group) > 1))
