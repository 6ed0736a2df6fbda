"""The tree of a state dict: its dicts, lists and tuples with their keys as they were.

A leaf is whatever the caller puts there: a name, an entry, a pickle's node. A path is derived from
the tree: the text of a key in a dict, the place (an int) in a list or tuple. So

    {"groups": [{"betas": (t0, 0.9)}], 0: t1}

is, with names for leaves,

    Branch("dict", ("groups", 0), (
        Branch("list", None, (Branch("dict", ("betas",), (
            Branch("tuple", None, ("groups.0.betas.0", "groups.0.betas.1")),)),)),
        "0",
    ))

with the paths ``("groups", 0, "betas", 0)``, ``("groups", 0, "betas", 1)`` and ``("0",)``.

This room knows nothing of entries, files and formats. Walks call themselves once for each container
inside of another: readers refuse what is nested deeper than `MAX_DEPTH`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, Literal, TypeAlias, TypeVar, Union

from ckpt_tools.errors import UnsupportedError

L = TypeVar("L")
M = TypeVar("M")

Path: TypeAlias = "tuple[str | int, ...]"
Kind = Literal["dict", "OrderedDict", "list", "tuple"]
# A tuple of keys is a key, too.
Key = Union[str, int, float, bool, None, tuple["Key", ...]]  # noqa: UP007 (names itself)

# More than any real state dict has; a pickle of a few KB can refer to itself without end.
MAX_DEPTH = 100
# So many places may be empty in a list that is known from paths alone.
_MAX_HOLES = 100_000


@dataclass(frozen=True, slots=True)
class Branch(Generic[L]):
    """A container: its kind, its keys (None for a list or a tuple), and what it holds, in order.

    An item that is None is a place whose value does not exist; a dict has no such items. The texts
    of a dict's keys are all different.
    """

    kind: Kind
    keys: tuple[Key, ...] | None
    items: tuple[Tree[L], ...]

    def __post_init__(self) -> None:
        """Refuse keys that do not go with the kind or the items."""
        if (self.keys is None) != (self.kind in ("list", "tuple")):
            raise ValueError(f"a {self.kind} with keys {self.keys}")
        if self.keys is not None and len(self.keys) != len(self.items):
            raise ValueError(f"{len(self.keys)} keys for {len(self.items)} items")

    def parts(self) -> Sequence[str | int]:
        """The part of a path that each item has: the text of its key, or its place."""
        if self.keys is None:
            return range(len(self.items))
        return [key if type(key) is str else str(key) for key in self.keys]

    def pairs(self) -> Iterator[tuple[str | int, Tree[L]]]:
        """Each item after its part of the path."""
        return zip(self.parts(), self.items, strict=True)

    def get(self, *path: str | int) -> Tree[L]:
        """What is at this path, None when nothing is. Keys are found by their text.

        One call looks through all keys on its way; who asks for many makes a dict of `pairs`.
        """
        item_at: Tree[L] = self
        for part in path:
            pairs = item_at.pairs() if isinstance(item_at, Branch) else iter(())
            item_at = next((item for other, item in pairs if other == part), None)
        return item_at

    def walk(self) -> Iterator[tuple[Path, L]]:
        """Each leaf after its path, in the order of the state dict."""
        every: Iterator[tuple[Path, L | Branch[L]]] = self.walk_to(lambda _: False)
        return every  # type: ignore[return-value]  # no branch is an end of it

    def walk_to(
        self, is_end: Callable[[Branch[L]], bool], *, above: Path = ()
    ) -> Iterator[tuple[Path, L | Branch[L]]]:
        """The same, but that a branch below this one may be an end as it is.

        ``above`` is the path of this container itself.
        """
        for part, item in self.pairs():
            if isinstance(item, Branch) and not is_end(item):
                yield from item.walk_to(is_end, above=(*above, part))
            elif item is not None:
                yield (*above, part), item

    def leaves(self) -> Iterator[L]:
        """Each leaf, in the order of the state dict."""
        for item in self.items:
            if isinstance(item, Branch):
                yield from item.leaves()
            elif item is not None:
                yield item

    def branches(self, *, above: Path = ()) -> Iterator[tuple[Path, Branch[L]]]:
        """Each container after its path, the outer ones before those inside."""
        yield above, self
        for part, item in self.pairs():
            if isinstance(item, Branch):
                yield from item.branches(above=(*above, part))

    def fold(self, leaf: Callable[[L], M], branch: Callable[[Branch[L], list[M | None]], M]) -> M:
        """What ``branch`` makes of this container, out of what was made of its items.

        Items are done in order, each before its container; a place without a value gives None.
        """
        made: list[M | None] = []
        for item in self.items:
            if isinstance(item, Branch):
                made.append(item.fold(leaf, branch))
            else:
                made.append(None if item is None else leaf(item))
        return branch(self, made)

    def holding(self, items: Sequence[Tree[M]]) -> Branch[M]:
        """The same container with other items, as many; a dict loses those that are None."""
        if self.keys is None or None not in items:
            return Branch(self.kind, self.keys, tuple(items))
        kept = [(k, i) for k, i in zip(self.keys, items, strict=True) if i is not None]
        return Branch(self.kind, tuple(k for k, _ in kept), tuple(i for _, i in kept))

    def map(self, change: Callable[[L], Tree[M]]) -> Branch[M]:
        """The same containers with other leaves; a leaf may become a container, too.

        What becomes None leaves a dict with its key, and its place in a list or tuple empty.
        """

        def branch(old: Branch[L], items: list[Tree[M]]) -> Tree[M]:
            return old.holding(items)

        return _root(self.fold(change, branch), self)

    def map_places(self, change: Callable[[Path, L], Tree[M]]) -> Branch[M]:
        """As `map`; ``change`` is given the path of each leaf, too."""
        places = self.walk()
        return self.map(lambda _: change(*next(places)))

    def with_leaves(self, leaves: Mapping[Path, L]) -> Branch[L]:
        """The same tree with a leaf in place of the container at each of these paths."""
        placed = {id(inner): leaves[path] for path, inner in self.branches() if path in leaves}

        def leaf(value: L) -> Tree[L]:
            return value

        def branch(old: Branch[L], items: list[Tree[L]]) -> Tree[L]:
            return placed[id(old)] if id(old) in placed else old.holding(items)

        return _root(self.fold(leaf, branch), self)

    def filter(self, keep: Callable[[L], bool]) -> Branch[L]:
        """What is left when leaves go.

        A dict loses the key; a list or tuple keeps the place, which is then empty. A container that
        loses all its leaves goes; one that had none before stays for as long as its container does.
        """

        def leaf(value: L) -> Tree[L]:
            return value if keep(value) else None

        def branch(old: Branch[L], items: list[Tree[L]]) -> Tree[L]:
            smaller = old.holding(items)
            return None if old.has_leaves and not smaller.has_leaves else smaller

        return _root(self.fold(leaf, branch), self)

    @property
    def has_leaves(self) -> bool:
        """Whether there is a leaf anywhere inside."""
        return next(self.leaves(), None) is not None


# None is a place without a value.
Tree = Union[L, Branch[L], None]  # noqa: UP007 (generic, and needed at run time)


def _root(made: Tree[M], old: Branch[L]) -> Branch[M]:
    """The outermost container, which stays when it is empty."""
    if isinstance(made, Branch):
        return made
    return Branch(old.kind, None if old.keys is None else (), ())


def dict_of(items: Mapping[str, Tree[L]]) -> Branch[L]:
    """A dict of these items; those that are None are left out."""
    kept = {key: item for key, item in items.items() if item is not None}
    return Branch("dict", tuple(kept), tuple(kept.values()))


def list_of(items: Iterable[Tree[L]]) -> Branch[L]:
    """A list of these items."""
    return Branch("list", None, tuple(items))


def nested(tree: Branch[L], value_of: Callable[[L], M]) -> M:
    """The nested dicts, lists and tuples of a tree, with the value of each leaf at its place.

    A place without a value becomes None.
    """

    def branch(old: Branch[L], values: list[M | None]) -> M:
        if old.keys is None:
            return tuple(values) if old.kind == "tuple" else values  # type: ignore[return-value]
        pairs = zip(old.keys, values, strict=True)  # containers of values are values, too
        return OrderedDict(pairs) if old.kind == "OrderedDict" else dict(pairs)  # type: ignore[return-value]

    return tree.fold(value_of, branch)


def of_paths(placed: Iterable[tuple[Path, L]]) -> Branch[L]:
    """The tree that paths tell: where all parts are ints is a list, anything else is a dict.

    Items of a dict keep the order given. A list has empty places where no path leads; one with
    very many of them is a dict.

    Raises UnsupportedError for a path that is a leaf and a container at once, that is there twice,
    or that has more than `MAX_DEPTH` parts.
    """
    root: dict[str | int, object] = {}
    for path, leaf in placed:
        if not path:
            raise UnsupportedError("An entry has an empty path.")
        if len(path) > MAX_DEPTH:
            raise UnsupportedError(
                f"{_shown(path)} is nested {len(path)} deep; up to {MAX_DEPTH} is supported.",
                hint="No state dict of a model or an optimizer is nested like this.",
            )
        container = root
        for part in path[:-1]:
            inner = container.setdefault(part, _Inner())
            if type(inner) is not _Inner:
                raise _twice(path)
            container = inner
        if path[-1] in container:
            raise _twice(path)
        container[path[-1]] = leaf
    return _settled((), root)


class _Inner(dict[str | int, object]):
    """A container whose kind is not known yet."""

    __slots__ = ()


def _settled(path: Path, container: dict[str | int, object]) -> Branch[L]:
    """The container at a path, and those inside of it, each by the parts in it."""
    held: dict[str | int, Tree[L]] = {
        part: _settled((*path, part), item) if isinstance(item, _Inner) else item  # type: ignore[misc]
        for part, item in container.items()
    }
    places = [part for part in held if isinstance(part, int)]
    if places and len(places) == len(held) and min(places) >= 0:
        last = max(places)
        if last <= len(places) + _MAX_HOLES:
            return list_of(held.get(place) for place in range(last + 1))
    for place in places:
        if str(place) in held:
            raise _twice((*path, place))
    return Branch("dict", tuple(held), tuple(held.values()))


def merge(one: Branch[L], other: Branch[L], *, at: Path = ()) -> Branch[L]:
    """Both in one: dicts by the text of their keys, lists and tuples place by place.

    Where both have a leaf, that of ``one`` stays. Raises UnsupportedError where one side has a leaf
    and the other a container, or containers of different kinds.
    """
    if one is other:
        return one
    if (one.keys is None or other.keys is None) and one.kind != other.kind:
        raise UnsupportedError(
            f"{_shown(at) or 'The whole'} is a {one.kind} and a {other.kind} at once.",
            hint="Leave it out with --exclude.",
        )
    keys = dict(zip(one.parts(), one.keys or (), strict=False))
    held: dict[str | int, Tree[L]] = dict(one.pairs())
    for part, key in zip(other.parts(), other.keys or (), strict=False):
        keys.setdefault(part, key)
    for part, item in other.pairs():
        here = held.get(part)
        if here is None:
            held[part] = item
        elif isinstance(here, Branch) and isinstance(item, Branch):
            held[part] = merge(here, item, at=(*at, part))
        elif isinstance(here, Branch) or isinstance(item, Branch):
            raise _twice((*at, part))
    merged_keys = None if one.keys is None else tuple(keys[part] for part in held)
    return Branch(one.kind, merged_keys, tuple(held.values()))


def _shown(path: Path) -> str:
    return ".".join(map(str, path[:20])) + ("…" if len(path) > 20 else "")


def _twice(path: Path) -> UnsupportedError:
    return UnsupportedError(
        f"{_shown(path)} is there twice, or is both an entry and a container of others.",
        hint="Leave one of them out with --exclude.",
    )


def completed(tree: Branch[str], placed: Sequence[tuple[str, Path]]) -> Branch[str]:
    """The tree without names that are not placed, and with all that are, at their paths.

    Raises UnsupportedError for paths that exclude one another.
    """
    fqns = {fqn for fqn, _ in placed}
    held = set(tree.leaves())
    kept = tree if held <= fqns else tree.filter(fqns.__contains__)
    rest = of_paths((path, fqn) for fqn, path in placed if fqn not in held)
    if not kept.items:
        return rest if rest.items else kept
    return merge(kept, rest) if rest.items else kept
