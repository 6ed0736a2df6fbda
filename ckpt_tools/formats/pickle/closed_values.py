"""Values of classes that are not opened here, as pickles that make them again.

A date, an array of NumPy or a config is not looked into, but what its pickle said is known: it is
written again, in one way for all protocols, so that equal pickles are equal values. Of classes and
functions only those of a short list are written, which hold data and do nothing else, and those
that the user allows by name: what would run code in a loader is not passed on.
"""

from __future__ import annotations

from collections.abc import Callable

from ckpt_tools.core.plain_values import PickledValue, PlainValue
from ckpt_tools.formats.pickle.configs import CONFIG_CLASSES, Configs, is_config
from ckpt_tools.formats.pickle.dump import NotPicklableError, PickleWriter
from ckpt_tools.formats.pickle.limits import FREE_OPCODES, MAX_CLOSED_DEPTH, MAX_COPIED, TextBound
from ckpt_tools.formats.pickle.nodes import Global, Instance
from ckpt_tools.formats.pickle.stored import is_dtype

_SCALARS = "bool bool_ int8 int16 int32 int64 uint8 uint16 uint32 uint64 float16 float32 float64"
_PATHS = "Path PosixPath PurePath PurePosixPath PureWindowsPath WindowsPath"
_DATA: dict[str, str] = {
    "__builtin__": "complex frozenset set",
    "_codecs": "encode",
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
    "torch": "Size device",
    "torch.serialization": "_get_layout",
    "typing": "Any Dict List Optional Tuple Union",
    "uuid": "SafeUUID UUID",
}
_NAMES = CONFIG_CLASSES | {
    f"{module}.{name}" for module, names in _DATA.items() for name in names.split()
}


class ClosedValues:
    """Pickles the closed values of a pickle of ``length`` bytes again, up to a length in all.

    ``is_allowed`` says of a global that is not listed whether the user allows it.
    """

    def __init__(self, is_allowed: Callable[[str], bool], text: TextBound, length: int) -> None:
        self._is_allowed = is_allowed
        self._bytes_left = MAX_COPIED + 2 * length
        self._opcodes_left = FREE_OPCODES + 2 * length
        self._configs = Configs(text)

    def pickled(self, closed: Instance | Global | bytearray, qualname: str) -> PickledValue:
        """The closed value with its pickle. Raises NotPicklableError."""
        if self._bytes_left <= 0 or self._opcodes_left <= 0:
            raise NotPicklableError(closed)
        writer = PickleWriter(MAX_CLOSED_DEPTH)
        try:
            data = writer.draft(closed).filled(())
        finally:
            self._opcodes_left -= len(writer.parts)
        self._bytes_left -= len(data)
        unlisted = sorted(name for name in writer.names if not (name in _NAMES or is_dtype(name)))
        fields: PlainValue = None
        if isinstance(closed, Instance) and is_config(closed.qualname):
            fields = self._configs.fields(closed)
        is_allowed = all(map(self._is_allowed, unlisted))
        return PickledValue(qualname, data, tuple(unlisted), is_allowed, fields)
