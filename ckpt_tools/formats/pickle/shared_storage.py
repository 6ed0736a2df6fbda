"""Which tensors of a torch.save file share their elements: tied weights, and other overlaps."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ckpt_tools.formats.pickle.state_dict import TensorLeaf
from ckpt_tools.formats.pickle.stored import StoredStorage, StoredTensor

Ties = tuple[tuple[str, ...], ...]


def _view(leaf: TensorLeaf) -> StoredTensor | None:
    """What of which storage a tensor is, or None when it has no element."""
    stored = leaf.stored.local
    return None if 0 in stored.shape else stored


def tied(leaves: Iterable[TensorLeaf]) -> Ties:
    """Groups of two or more names that are the same view of the same storage."""
    groups: dict[StoredTensor, list[str]] = {}
    for leaf in leaves:
        view = _view(leaf)
        if view is not None:
            groups.setdefault(view, []).append(leaf.fqn)
    return _groups(groups.values())


def still_tied(ties: Ties, leaves: Iterable[TensorLeaf]) -> Ties:
    """Those ties that hold in another rank's file, too; a shard without elements says nothing."""
    wanted = {fqn for group in ties for fqn in group}
    views = {leaf.fqn: _view(leaf) for leaf in leaves if leaf.fqn in wanted}
    kept = []
    for group in ties:
        seen: dict[StoredTensor, list[str]] = {}
        neutral = [fqn for fqn in group if fqn in views and views[fqn] is None]
        for fqn in group:
            view = views.get(fqn)
            if view is not None:
                seen.setdefault(view, []).append(fqn)
        kept += [[*names_, *neutral] for names_ in seen.values()] or [neutral]
    return _groups(kept)


def overlapping(leaves: Iterable[TensorLeaf]) -> list[tuple[str, str]]:
    """Pairs of neighbours in one storage that may share elements without being the same view."""
    spans: dict[StoredStorage, list[tuple[int, StoredTensor, str]]] = {}
    for leaf in leaves:
        view = _view(leaf)
        if view is not None:
            spans.setdefault(view.storage, []).append((view.end, view, leaf.fqn))
    pairs = []
    for held in spans.values():
        held.sort(key=lambda span: (span[1].storage_offset, span[0]))
        reach, last_view, last_fqn = held[0]
        for end, view, fqn in held[1:]:
            if view.storage_offset < reach and view != last_view:
                pairs.append((last_fqn, fqn))
            if end > reach:
                reach, last_view, last_fqn = end, view, fqn
    return pairs


def _groups(groups: Iterable[Sequence[str]]) -> Ties:
    return tuple(sorted(tuple(sorted(group)) for group in groups if len(group) > 1))
