"""Small pickles for tests, hostile ones among them, and where the real ones lie."""

from __future__ import annotations

import io
import pickle
import struct
import zipfile
from collections.abc import Iterator
from pathlib import Path

DATA = Path(__file__).parent / "data"
CASES = DATA / "cases"
CHECKPOINTS = DATA / "checkpoints"


def text(value: str) -> bytes:
    """The opcode that pushes a text."""
    return b"X" + struct.pack("<I", len(value.encode())) + value.encode()


def name(qualname: str) -> bytes:
    """The opcode that pushes a global."""
    module, _, last = qualname.rpartition(".")
    return f"c{module}\n{last}\n".encode()


def calls(qualname: str, *args: bytes) -> bytes:
    """A pickle that calls a global with these arguments, each an opcode."""
    return b"\x80\x02" + name(qualname) + b"(" + b"".join(args) + b"tR."


def storage(kind: str = "torch.FloatStorage", *, numel: int = 6, key: str = "0") -> bytes:
    """The opcodes of a storage."""
    size = b"J" + struct.pack("<i", numel)
    return b"(" + text("storage") + name(kind) + text(key) + text("cpu") + size + b"tQ"


def tensor(shape: bytes = b"K\x02K\x03\x86", strides: bytes = b"K\x03K\x01\x86") -> bytes:
    """The opcodes of a tensor of six floats."""
    parts = storage(), b"K\x00", shape, strides, b"\x89", b"}"
    return name("torch._utils._rebuild_tensor_v2") + b"(" + b"".join(parts) + b"tR"


def shared_tuples(levels: int) -> bytes:
    """The opcodes of tuples that each hold the one before twice."""
    return b")" + b"".join(b"q\x00h\x00\x86" for _ in range(levels))


def data_pickle(path: Path) -> bytes:
    """The pickle inside a torch.save file."""
    with zipfile.ZipFile(path) as archive:
        return archive.read(next(n for n in archive.namelist() if n.endswith("/data.pkl")))


def saved_files(folder: Path) -> Iterator[Path]:
    """The torch.save zip files below a folder, in a fixed order."""
    return (path for path in sorted(folder.rglob("*.pt")) if path.read_bytes()[:2] == b"PK")


def archive_of(records: dict[str, bytes], *, top: str = "archive") -> bytes:
    """A zip file of stored records below one folder."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_STORED) as archive:
        for record, data in records.items():
            archive.writestr(zipfile.ZipInfo(f"{top}/{record}"), data)
    return buffer.getvalue()


def plain(value: object, protocol: int = 2) -> bytes:
    """A pickle of a plain value."""
    return pickle.dumps(value, protocol)
