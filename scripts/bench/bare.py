"""Unpickling .metadata into stand-ins and nothing more: a floor, not a reader (it checks nothing).

Run by itself it imports nothing else: python bare.py FILE.
"""

from __future__ import annotations

import gc
import pickle
import sys


class _Chunk:
    __slots__ = ("offsets", "sizes")

    def __setstate__(self, state: dict[str, object]) -> None:
        self.offsets, self.sizes = state["offsets"], state["sizes"]


class _Index:
    __slots__ = ("fqn", "offset")

    def __setstate__(self, state: dict[str, object]) -> None:
        self.fqn, self.offset = state["fqn"], state.get("offset")


class _Info:
    __slots__ = ("length", "offset", "path")

    def __setstate__(self, state: dict[str, object]) -> None:
        self.path, self.offset = state["relative_path"], state["offset"]
        self.length = state["length"]


class _Any:
    def __setstate__(self, state: object) -> None:
        self.state = state


_NAMES = {"ChunkStorageMetadata": _Chunk, "MetadataIndex": _Index, "_StorageInfo": _Info}


class _Unpickler(pickle.Unpickler):
    def find_class(self, _module: str, name: str, /) -> object:
        if name == "Size":
            return tuple
        return _NAMES.get(name) or (_Any if name[0].isupper() else lambda *_args: None)


def load(path: str) -> object:
    """The stand-ins that this pickle makes."""
    gc.disable()
    with open(path, "rb") as file:
        return _Unpickler(file).load()


if __name__ == "__main__":
    load(sys.argv[1])
