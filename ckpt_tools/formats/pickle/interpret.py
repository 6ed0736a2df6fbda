"""The value of a pickle, as what a table of names has for the classes that it asks for."""

from __future__ import annotations

import _compat_pickle
import gc
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache

from ckpt_tools.errors import CheckpointError, UnreadableError, UnsafePickleError, printable
from ckpt_tools.formats.pickle.limits import MAX_NAMES, is_word
from ckpt_tools.formats.pickle.machine import Machine, Replay
from ckpt_tools.formats.pickle.nodes import Global


def interpret(
    data: bytes,
    *,
    resolve: Callable[[Global], object],
    storage: Callable[[object], object],
    replay: Replay | None = None,
) -> tuple[object, int]:
    """The value of the pickle at the start of the data, and where it ends.

    ``resolve`` gives what stands for a global, ``storage`` what stands for a persistent id.
    Raises UnreadableError for any damage (`CutPickleError` where the data ends too early), and what
    the two raise.
    """

    @cache
    def named(module_name: str, global_name: str) -> object:
        """Protocol 2 has the names of Python 2, also when Python 3 writes it:
        ``__builtin__.xrange`` is ``builtins.range``. Python itself reads with these tables.
        """
        if not is_word(module_name) or not is_word(global_name):
            raise UnsafePickleError("asks for a class with a name of more than 255 characters.")
        if named.cache_info().misses > MAX_NAMES:
            raise UnreadableError(f"asks for more than {MAX_NAMES:,} classes.")
        names = (module_name, global_name)
        module, last = _compat_pickle.NAME_MAPPING.get(names, names)
        module = _compat_pickle.IMPORT_MAPPING.get(module, module)
        for old, new in _MOVED.items():
            if module.startswith(old):
                module = new + module[len(old) :]
        return resolve(Global(printable(f"{module}.{last}"), nested="." in last))

    return Machine(data, named, storage, replay).run()


# By the names that the oldest NumPy and Python load, too.
_MOVED = {"numpy.core.": "numpy._core.", "pathlib._local": "pathlib"}


@contextmanager
def placed(where: str) -> Iterator[None]:
    """Begin the message of every error with the name of the file."""
    try:
        yield
    except CheckpointError as error:
        link = " " if _VERB.match(error.message) else ": "
        raise error.at(where, link) from error


_VERB = re.compile("(asks|describes|does|gives|has|holds|is|lists|places|unfolds) ")


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
