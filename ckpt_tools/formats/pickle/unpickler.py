"""The C unpickler with the two ways out of it closed: globals and persistent ids.

Whoever loads says what each global gives; here it is made sure that a pickle can do nothing else,
that it costs what its length says, and that every damage is an error of ours.
"""

from __future__ import annotations

import _compat_pickle
import gc
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from io import BufferedReader, BytesIO
from typing import BinaryIO

from ckpt_tools.errors import CheckpointError, UnreadableError, UnsafePickleError, printable
from ckpt_tools.formats.pickle.guard import CutPickleError, end_of_pickle
from ckpt_tools.formats.pickle.text_bound import is_word
from ckpt_tools.formats.pickle.torch_stubs import OpaqueObject

Resolve = Callable[[str], object]

# Everything that the C unpickler raises for bytes that are no good pickle.
_DAMAGE = (
    pickle.UnpicklingError,
    EOFError,
    TypeError,
    ValueError,
    AttributeError,
    LookupError,
    ArithmeticError,
    MemoryError,
    RecursionError,
)
_MAX_SHOWN = 160
_FIRST_READ = 64 * 1024
_MAX_PICKLE = 1 << 30


class _Unpickler(pickle.Unpickler):
    """The C unpickler, with the two ways out of it closed."""

    def __init__(self, stream: BinaryIO, resolve: Resolve, storage: Callable[[object], object]):
        # As torch.load decodes the byte strings of Python 2; only names and plain texts are used.
        super().__init__(stream, encoding="utf-8", errors="backslashreplace")
        self._resolve = resolve
        self._storage = storage

    def find_class(self, module_name: str, global_name: str, /) -> object:
        """The stand-in for a global.

        Protocol 2 has the names of Python 2, also when Python 3 writes it: ``__builtin__.xrange``
        is ``builtins.range``. These are the tables that Python itself reads such pickles with.
        """
        if not is_word(module_name) or not is_word(global_name):
            raise UnsafePickleError("asks for a class with a name of more than 255 characters.")
        names = (module_name, global_name)
        module, last = _compat_pickle.NAME_MAPPING.get(names, names)
        module = _compat_pickle.IMPORT_MAPPING.get(module, module)
        found = self._resolve(_short(f"{module}.{last}"))
        if "." in last and isinstance(found, type) and issubclass(found, OpaqueObject):
            found.is_nested = True
        return found

    def persistent_load(self, pid: object) -> object:
        """The stand-in for a storage."""
        return self._storage(pid)


def unpickle(data: bytes, *, resolve: Resolve, storage: Callable[[object], object]) -> object:
    """What a pickle makes of what ``resolve`` gives for globals and ``storage`` for storages.

    Raises UnreadableError for any damage, and what the two raise.
    """
    end_of_pickle(data)
    try:
        # The buffer saves a call for each opcode of a pickle without frames.
        return _Unpickler(BufferedReader(BytesIO(data)), resolve, storage).load()
    except _DAMAGE as error:
        reason = _short(str(error)) or type(error).__name__
        raise UnreadableError(f"is damaged: its pickle cannot be read ({reason}).") from error


def _short(text: str) -> str:
    """One short line, whatever the text is."""
    text = printable(text)
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}…"


def pickle_at(file: BinaryIO) -> bytes:
    """The bytes of the pickle that begins here in a seekable file, which is left right after it.

    Raises UnreadableError when it is cut, or longer than 1 GiB.
    """
    start, wanted = file.tell(), _FIRST_READ
    while True:
        file.seek(start)
        data = file.read(wanted)
        try:
            end = end_of_pickle(data)
        except CutPickleError:
            if len(data) < wanted or wanted >= _MAX_PICKLE:
                raise
            wanted *= 8
            continue
        file.seek(start + end)
        return data[:end]


@contextmanager
def placed(where: str) -> Iterator[None]:
    """Begin the message of every error with the name of the file."""
    try:
        yield
    except CheckpointError as error:
        link = " " if error.message.startswith(_VERBS) else ": "
        raise error.at(where, link) from error


_VERBS: tuple[str, ...] = (
    "asks ",
    "describes ",
    "does ",
    "gives ",
    "has ",
    "holds ",
    "is ",
    "lists ",
    "places ",
    "unfolds ",
)


@contextmanager
def collector_paused() -> Iterator[None]:
    """Keep the collector from looking through millions of new objects again and again."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
