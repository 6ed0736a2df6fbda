"""Values of classes that are not opened here, as pickles that make them again.

A date, an array of NumPy or a config is not looked into, but what its pickle said is known: it is
written again, in one way for all protocols, so that equal pickles are equal values. Of classes and
functions only those of a short list are written, which hold data and do nothing else, and those
that the user allows by name: what would run code in a loader is not passed on.

Configs (those of argparse, OmegaConf and Lightning) are opened to be shown, and stay closed values.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection

from ckpt_tools.core.plain_values import PickledValue, PlainValue, TorchValue
from ckpt_tools.core.text import is_text
from ckpt_tools.formats.pickle.allowed_globals import (
    CONFIG_CLASSES,
    is_config,
    module_error,
    unknown_error,
)
from ckpt_tools.formats.pickle.dump import NotPicklableError, PickleWriter
from ckpt_tools.formats.pickle.limits import (
    FREE_OPCODES,
    MAX_CLOSED_DEPTH,
    MAX_CONFIG_VALUES,
    MAX_COPIED,
    MAX_KEY_BITS,
    TextBound,
)
from ckpt_tools.formats.pickle.nodes import Global, Instance, Opaque, shown
from ckpt_tools.formats.pickle.stored import Stored, is_dtype

_SCALARS = "bool bool_ int8 int16 int32 int64 uint8 uint16 uint32 uint64 float16 float32 float64"
_PATHS = "Path PosixPath PurePath PurePosixPath PureWindowsPath WindowsPath"
# fmt: off
_DATA = {
    "__builtin__": "complex frozenset set", "_codecs": "encode", "_io": "BytesIO",
    "builtins": "NoneType bool bytearray bytes complex dict float frozenset int list object range "
    "set slice str tuple",
    "collections": "Counter OrderedDict defaultdict deque", "copyreg": "__newobj__",
    "datetime": "date datetime time timedelta timezone", "decimal": "Decimal",
    "fractions": "Fraction", "pathlib": _PATHS, "random": "Random", "uuid": "SafeUUID UUID",
    "typing": "Any Dict List Optional Tuple Union",
    "numpy": f"{_SCALARS} dtype ndarray", "numpy._core.multiarray": "_reconstruct scalar",
    "numpy._core.numeric": "_frombuffer", "numpy.random._mt19937": "MT19937",
    "numpy.random._pcg64": "PCG64 PCG64DXSM", "numpy.random._philox": "Philox",
    "numpy.random._pickle": "__bit_generator_ctor __generator_ctor __randomstate_ctor",
    "numpy.random._sfc64": "SFC64",
    "numpy.random.bit_generator": "SeedSequence __pyx_unpickle_SeedSequence",
    "omegaconf.base": "ContainerMetadata Metadata", "omegaconf.dictconfig": "DictConfig",
    "omegaconf.listconfig": "ListConfig",
    "omegaconf.nodes": "AnyNode BooleanNode BytesNode EnumNode FloatNode IntegerNode PathNode "
    "StringNode",
    "torch": "Size device", "torch.serialization": "_get_layout",
}
# fmt: on
_NAMES = CONFIG_CLASSES | {
    f"{module}.{name}" for module, names in _DATA.items() for name in names.split()
}
_TENSOR = "torch.Tensor"
_TORCH_VERSION = Global("torch.torch_version.TorchVersion")
_VERSION = re.compile(r"[0-9A-Za-z.+-]{1,80}")


class ClosedValues:
    """The closed values of a pickle of ``length`` bytes, up to so many opcodes and bytes in all.

    ``is_allowed`` says of a global that is not listed whether the user allows it; a value of a
    class that is ``unknown`` is opaque.
    """

    def __init__(
        self,
        length: int,
        text: TextBound,
        is_allowed: Callable[[str], bool],
        unknown: Collection[str],
    ) -> None:
        self._text = text
        self._is_allowed = is_allowed
        self._bytes_left = MAX_COPIED + 2 * length
        self._opcodes_left = FREE_OPCODES + 2 * length
        self._configs_left = MAX_CONFIG_VALUES
        flaw = unknown_error(unknown) if unknown else None
        self._unknown = {name: Opaque(Global(name).qualname, flaw=flaw) for name in unknown}
        self._modules: dict[str, Opaque] = {}
        self._known: dict[int, Opaque | TorchValue | PickledValue] = {}

    def of(self, value: Instance | Global | bytearray) -> Opaque | TorchValue | PickledValue:
        """The value as its pickle, or as one that is not opened, and why it cannot be used; or a
        version of torch, which can.
        """
        if id(value) not in self._known:
            self._known[id(value)] = self._of(value)
        return self._known[id(value)]

    def _of(self, value: Instance | Global | bytearray) -> Opaque | TorchValue | PickledValue:
        if isinstance(value, bytearray):
            return self._pickled(value, "builtins.bytearray")
        cls = value.cls if isinstance(value, Instance) else value
        if isinstance(value, Instance):
            text = value.args[0] if len(value.args) == 1 else None
            if cls == _TORCH_VERSION and type(text) is str and _VERSION.fullmatch(text):
                return TorchValue(f"{cls.qualname}({text!r})")
            if type(value.state) is dict and {"_parameters", "_modules"} <= value.state.keys():
                if cls.name not in self._modules:
                    flaw = module_error(cls.qualname)
                    self._modules[cls.name] = Opaque(cls.qualname, flaw=flaw)
                return self._modules[cls.name]
        return self._unknown.get(cls.name) or self._pickled(value, cls.qualname)

    def _pickled(
        self, value: Instance | Global | bytearray, qualname: str
    ) -> Opaque | PickledValue:
        if self._bytes_left <= 0 or self._opcodes_left <= 0:
            return Opaque(qualname)
        writer = PickleWriter(MAX_CLOSED_DEPTH)
        try:
            data = writer.draft(value).filled(())
        except NotPicklableError as error:
            odd = error.value
            is_tensor = isinstance(odd, Opaque) and (odd.is_tensor or odd.qualname == _TENSOR)
            holds_tensor = (is_tensor or isinstance(odd, Stored)) and qualname != _TENSOR
            return Opaque(f"{qualname} with tensors" if holds_tensor else qualname)
        finally:
            self._opcodes_left -= len(writer.parts)
        self._bytes_left -= len(data)
        unlisted = sorted(name for name in writer.names if not (name in _NAMES or is_dtype(name)))
        fields: PlainValue = None
        if isinstance(value, Instance) and is_config(qualname):
            try:
                fields = self._shown(value, 0)
            except _EndlessError:
                fields = None
        is_allowed = all(map(self._is_allowed, unlisted))
        return PickledValue(qualname, data, tuple(unlisted), is_allowed, fields)

    def _shown(self, value: object, depth: int) -> PlainValue:
        """What is in a config: configs, dicts and lists as such, other values as texts."""
        self._configs_left -= 1
        if self._configs_left < 0 or depth > MAX_CLOSED_DEPTH:
            raise _EndlessError
        if isinstance(value, Instance) and is_config(value.qualname):
            state = value.state if type(value.state) is dict else {}
            # OmegaConf's containers and nodes keep what they hold in an attribute.
            held = [state[name] for name in ("_content", "_val") if name in state]
            items = {self._key(key): item for key, item in value.pairs or ()}
            return self._shown(held[0] if held else items or state, depth + 1)
        if isinstance(value, dict):
            return {self._key(key): self._shown(item, depth + 1) for key, item in value.items()}
        if isinstance(value, list | tuple | set | frozenset):
            return [self._shown(item, depth + 1) for item in value]
        return self._leaf(value)

    def _key(self, key: object) -> str | int:
        leaf = self._leaf(key)
        return leaf if type(leaf) is str or type(leaf) is int else str(leaf)

    def _leaf(self, value: object) -> PlainValue:
        """A value as it is, or what stands there in angle brackets."""
        self._text.meet(value)
        if type(value) is str:
            return value if is_text(value) else value.encode("utf-8", "backslashreplace").decode()
        if type(value) is int and value.bit_length() <= MAX_KEY_BITS:
            return value
        if value is None or isinstance(value, bool | float):
            return value
        return f"<{shown(value).removeprefix('a ')}>"


class _EndlessError(Exception):
    """A config that holds too much, or itself."""
