"""Values of classes that are not opened here, as pickles that make them again.

A date, an array of NumPy or a config is not looked into, but what its pickle said is known: it is
written again, in one way for all protocols, so that equal pickles are equal values. Of classes and
functions only those of a short list are written, which hold data and do nothing else, and those
that the user allows by name: what would run code in a loader is not passed on.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

from ckpt_tools.core.plain_values import PickledValue, PlainValue
from ckpt_tools.core.state_tree import Key
from ckpt_tools.formats.pickle.configs import CONFIG_CLASSES, Configs, is_config
from ckpt_tools.formats.pickle.dump import Global, Instance, Node, dumps
from ckpt_tools.formats.pickle.limits import (
    MAX_CLOSED_DEPTH,
    TextBound,
)
from ckpt_tools.formats.pickle.torch_stubs import (
    Opaque,
    OpaqueObject,
    PickledOrderedDict,
    Stored,
    is_key,
    of_bytearray,
    opaque_class,
)

_SCALARS = "bool bool_ int8 int16 int32 int64 uint8 uint16 uint32 uint64 float16 float32 float64"
_PATHS = "Path PosixPath PurePath PurePosixPath PureWindowsPath WindowsPath"
_DATA: dict[str, str] = {
    "_io": "BytesIO",
    "builtins": "NoneType bool bytearray bytes complex dict float frozenset int list object range "
    "set slice str tuple",
    "collections": "Counter OrderedDict defaultdict deque",
    "copyreg": "__newobj__",
    "datetime": "date datetime time timedelta timezone",
    "decimal": "Decimal",
    "fractions": "Fraction",
    "numpy": f"{_SCALARS} dtype ndarray",
    "numpy._core.multiarray": "_reconstruct scalar",
    "numpy._core.numeric": "_frombuffer",
    "numpy.random._mt19937": "MT19937",
    "numpy.random._pcg64": "PCG64 PCG64DXSM",
    "numpy.random._philox": "Philox",
    "numpy.random._pickle": "__bit_generator_ctor __generator_ctor __randomstate_ctor",
    "numpy.random._sfc64": "SFC64",
    "numpy.random.bit_generator": "SeedSequence __pyx_unpickle_SeedSequence",
    "omegaconf.base": "ContainerMetadata Metadata",
    "omegaconf.dictconfig": "DictConfig",
    "omegaconf.listconfig": "ListConfig",
    "omegaconf.nodes": "AnyNode BooleanNode BytesNode EnumNode FloatNode IntegerNode PathNode "
    "StringNode",
    "pathlib": _PATHS,
    "random": "Random",
    "typing": "Any Dict List Optional Tuple Union",
    "uuid": "SafeUUID UUID",
}
_NAMES = CONFIG_CLASSES | {
    f"{module}.{name}" for module, names in _DATA.items() for name in names.split()
}

_OF_BUFFERS = ("numpy._core.numeric._frombuffer", "numpy.core.numeric._frombuffer")
_RECONSTRUCT = opaque_class("numpy._core.multiarray._reconstruct")
_ARRAY = opaque_class("numpy.ndarray")

# By the names that the oldest NumPy and Python load, too.
_RENAMED = {"numpy.core.": "numpy._core.", "pathlib._local.": "pathlib."}


class NotPicklableError(Exception):
    """A value that has no pickle of its own; ``holds_tensor`` says that a tensor is in it."""

    def __init__(self, *, holds_tensor: bool = False) -> None:
        super().__init__()
        self.holds_tensor = holds_tensor


class ClosedValues:
    """Writes the closed values of one pickle, up to ``max_bytes`` in all.

    ``leaf`` is what a value that is no container and no closed object is; ``is_allowed`` says of a
    global that is not listed whether the user allows it. ``text`` counts what is met.
    """

    def __init__(
        self,
        leaf: Callable[[object], object],
        is_allowed: Callable[[str], bool],
        text: TextBound,
        max_bytes: int,
    ) -> None:
        self._leaf = leaf
        self._is_allowed = is_allowed
        self._text = text
        self._left = max_bytes
        self._configs = Configs(text)

    def pickled(self, closed: OpaqueObject | type[OpaqueObject]) -> PickledValue:
        """The closed value with its pickle. Raises NotPicklableError."""
        if self._left <= 0:
            raise NotPicklableError
        walk = _Walk(self._leaf, self._text)
        try:
            data = dumps(walk.node(closed, 0))
        finally:
            self._left -= walk.count
        self._left -= len(data)
        unlisted = sorted(walk.names - _NAMES)
        fields: PlainValue = None
        if isinstance(closed, OpaqueObject) and is_config(closed.name):
            fields = self._configs.fields(closed)
        is_allowed = all(map(self._is_allowed, unlisted))
        return PickledValue(closed.qualname, data, tuple(unlisted), is_allowed, fields)


class _Walk:
    """The nodes of one value; what is met again, also inside of itself, is the same node."""

    def __init__(self, leaf: Callable[[object], object], text: TextBound) -> None:
        self.names: set[str] = set()
        self.count = 0
        self._leaf = leaf
        self._text = text
        self._nodes: dict[int, Node] = {}
        self._made: list[OpaqueObject] = []  # an id stays taken for as long as its object lives

    def node(self, value: object, depth: int) -> Node:
        """What is written for a value. Raises NotPicklableError."""
        self.count += 1
        if depth > MAX_CLOSED_DEPTH:
            raise NotPicklableError
        if id(value) not in self._nodes:
            return self._new(value, depth + 1)
        return self._nodes[id(value)]

    def _new(self, value: object, depth: int) -> Node:
        self._text.meet(value)
        if type(value) is bytearray:
            self._made.append(of_bytearray(value))
            return self._object(self._made[-1], depth)
        if isinstance(value, OpaqueObject):
            return self._object(value, depth)
        if isinstance(value, type) and issubclass(value, OpaqueObject):
            return self._global(value)
        if isinstance(value, dict):
            mapping = OrderedDict[Key, Node]() if isinstance(value, PickledOrderedDict) else {}
            self._nodes[id(value)] = mapping
            for key, item in value.items():
                if not is_key(key):
                    raise NotPicklableError
                mapping[key] = self.node(item, depth)
            return mapping
        if isinstance(value, list):
            items: list[Node] = []
            self._nodes[id(value)] = items
            items += [self.node(item, depth) for item in value]
            return items
        if type(value) is tuple:
            node = tuple(self.node(item, depth) for item in value)
            self._nodes[id(value)] = node
            return node
        return self._plain(value)

    def _object(self, value: OpaqueObject, depth: int) -> Instance:
        if value.kwargs:
            raise NotPicklableError
        if value.name in _OF_BUFFERS and len(value.args) == 4 and value.state is None:
            return self._of_buffer(value, depth)
        args = tuple(self.node(arg, depth) for arg in value.args)
        made = Instance(self._global(type(value)), args, called=value.called)
        self._nodes[id(value)] = made
        made.items = [self.node(item, depth) for item in value.items]
        made.pairs = [(self.node(k, depth), self.node(i, depth)) for k, i in value.pairs]
        made.state = self.node(value.state, depth)
        return made

    def _of_buffer(self, value: OpaqueObject, depth: int) -> Instance:
        """An array of protocol 5 as protocol 2 says it: every NumPy loads that."""
        buffer, dtype, shape, order = value.args
        if not isinstance(buffer, bytes | bytearray) or order not in ("C", "F"):
            raise NotPicklableError
        state = (1, shape, dtype, order == "F", bytes(buffer))
        made = Instance(self._global(_RECONSTRUCT), (self._global(_ARRAY), (0,), b"b"), called=True)
        self._nodes[id(value)] = made
        made.state = tuple(self.node(item, depth) for item in state)
        return made

    def _global(self, kind: type[OpaqueObject]) -> Global:
        if kind.is_nested:
            raise NotPicklableError
        name = kind.name
        for old, new in _RENAMED.items():
            name = name.replace(old, new)
        self.names.add(name)
        module, _, last = name.rpartition(".")
        return Global(module, last)

    def _plain(self, value: object) -> Node:
        if isinstance(value, set | frozenset) and all(map(is_key, value)):
            return value
        made = self._leaf(value)
        if isinstance(made, Stored):
            raise NotPicklableError(holds_tensor=True)
        if isinstance(made, Opaque):
            raise NotPicklableError(holds_tensor=made.is_tensor or made.qualname == "torch.Tensor")
        return made  # type: ignore[return-value]  # plain, as `leaf` says
