"""Files by ranges: sizes and positioned reads, with few files open at a time.

It knows nothing of what the bytes mean. A path is a string, and `Files` is safe to share between
threads.
"""

from __future__ import annotations

import atexit
import os
import threading
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from functools import cache
from resource import RLIM_INFINITY, RLIMIT_NOFILE, getrlimit
from typing import TypeVar

from ckpt_tools.core.crc import KnownCrcs
from ckpt_tools.core.sizes import Sizes
from ckpt_tools.errors import CheckpointError, IncompleteError, UnreadableError, unreadable
from ckpt_tools.storage import fsspec_store, paths

_MAX_OPEN = 128
_LEAST_OPEN = 8
_BLOCK = 1 << 20
_AHEAD = 8  # blocks of a window that one request of a store asks for, where they follow
_REQUEST = 8 << 20  # bytes of a store: more are several requests, which are answered side by side

_Item = TypeVar("_Item")
Unpack = Callable[[Iterator[bytes], Callable[[bytes], object], str], None]


class _Handle:
    """An open descriptor and how many readers are using it now."""

    __slots__ = ("fd", "users")

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self.users = 0


class Files:
    """Open files, read by ranges; the least recently used is closed when too many are open.

    ``sizes`` are those that all who read them go by. ``crcs`` get the CRC-32s that are found beside
    what is read, where they are wanted.
    """

    def __init__(
        self, *, max_open: int | None = None, sizes: Sizes = Sizes(), crcs: KnownCrcs | None = None
    ) -> None:
        self.sizes = sizes
        self.crcs = crcs
        # What an item of a store is like, as it was found when all of it was read.
        self.kinds: dict[tuple[str, int, int], Hashable] = {}
        self._open: OrderedDict[str, _Handle] = OrderedDict()
        self._lock = threading.Lock()
        self._max_open = _most_open() if max_open is None else max_open
        self._lent: dict[str, memoryview] = {}
        self._own = threading.local()
        self._between = _NOTHING  # what was last fetched for all threads
        self._spill_lock = threading.Lock()
        self._spilled: dict[tuple[tuple[str, int, int], Unpack], tuple[str, int, int]] = {}

    def __enter__(self) -> Files:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    def close(self) -> None:
        """Close every file; the object can be used again afterwards."""
        with self._lock:
            for handle in self._open.values():
                os.close(handle.fd)
            self._open.clear()

    def lend(self, path: str, data: memoryview) -> None:
        """Have `read_into` take these bytes for the file of this name, which need not be there."""
        self._lent[path] = data

    def has_descriptor(self, path: str) -> bool:
        """Whether this is a file of this machine, neither in a store nor in memory."""
        return path not in self._lent and not paths.is_address(path)

    @contextmanager
    def descriptor(self, path: str) -> Iterator[int]:
        """A descriptor of this file, open for reading for as long as the block lasts.

        What the system refuses inside of the block is raised as UnreadableError of this file.
        """
        with self._lock:
            handle = self._open.get(path)
            if handle is None:
                with _faults_of(path, doing="opened"):
                    handle = self._open[path] = _Handle(paths.open_file(path))
            self._open.move_to_end(path)
            handle.users += 1
            if len(self._open) > self._max_open:  # idle ones are closed, oldest first
                idle = [other for other, one in self._open.items() if one.users == 0]
                for other in idle[: len(self._open) - self._max_open]:
                    os.close(self._open.pop(other).fd)
        try:
            yield handle.fd
        except OSError as error:
            raise unreadable(path, error) from error
        finally:
            with self._lock:
                handle.users -= 1

    def spill(self, item: tuple[str, int, int], unpack: Unpack) -> tuple[str, int, int]:
        """Unpack a byte range (path, offset, length) into a temporary file, once; gives its range.

        ``unpack(blocks, write, where)`` is handed the blocks of the range in order. The file goes
        when the process ends: a plan that names it outlives the object that it was made with.
        """
        from tempfile import NamedTemporaryFile  # late: few unpack, and it loads much

        path, offset, length = item
        blocks = (
            self.read(path, start, min(_BLOCK, offset + length - start))
            for start in range(offset, offset + length, _BLOCK)
        )
        with self._spill_lock:
            if (item, unpack) not in self._spilled:
                with NamedTemporaryFile(dir=temporary_folder(), delete=False) as file:
                    unpack(blocks, file.write, path)
                    unpacked = file.name, 0, file.tell()
                self._spilled[item, unpack] = unpacked  # now that all of it is written
            return self._spilled[item, unpack]

    def size(self, path: str) -> int:
        """Length of the file in bytes. Raises IncompleteError when it does not exist."""
        if paths.is_address(path):
            with _faults_of(path):
                return fsspec_store.facts(path).size
        with self.descriptor(path) as fd:
            return os.fstat(fd).st_size

    def _fetch(self, address: str, offset: int, length: int) -> memoryview:
        """These bytes of an object in a store, fetched before or in one request."""
        held = self._held(address, offset, length)
        if held is not None:
            return held
        data = _answer(address, offset, length)
        if len(data) < length:
            raise _too_short(address, length=offset + len(data), needed=offset + length)
        return data

    def read(self, path: str, offset: int, length: int) -> bytes:
        """These bytes of the file.

        Raises UnreadableError when the file ends before them.
        """
        if paths.is_address(path):
            return bytes(self._fetch(path, offset, length))
        with self.descriptor(path) as fd:
            data = os.pread(fd, length, offset)
        if len(data) < length:  # more than the system reads in one go, or than there is
            if offset + length > self.size(path):
                raise _too_short(path, length=self.size(path), needed=offset + length)
            rest = bytearray(length - len(data))
            self.read_into(path, offset + len(data), memoryview(rest))
            data += rest
        return data

    def fetch(self, ranges: Iterable[tuple[str, int, int]], *, most: int | None = None) -> None:
        """Ask for these ranges (path, offset, length) of stores, many at a time, near ones as one.

        Until its next call, this thread reads them from memory: with what lies between them they
        take at most twice as many bytes, or those of four slabs. With ``most`` they take as many,
        and all threads read them, until the next such call: ends of items are fetched so, and small
        items lie between them. What lies on this machine is left out, and so is the part of a range
        that lies behind the end of its file. Raises UnreadableError.
        """
        self._own.between = self._between  # for this thread they stay until then
        wanted = [one for one in ranges if paths.is_address(one[0])]
        if all(self._held(*one) is not None for one in wanted):
            return
        wanted = [one for one in wanted if self._between.find(*one) is None]
        is_shared = most is not None
        most = max(most or 4 * self.sizes.slab, 2 * _nbytes(wanted))
        gap = self.sizes.fetched_gap
        joined = _joined(wanted, gap=gap)
        while gap and _nbytes(joined) > most:
            gap //= 4
            joined = _joined(wanted, gap=gap)
        self._own.fetched = held = _Fetched()
        if is_shared:
            self._between = held
        for (path, offset, _), data in zip(
            joined, fsspec_store.pool().map(lambda one: _answer(*one), joined), strict=True
        ):
            held.add(path, offset, data)

    def _held(self, address: str, offset: int, length: int) -> memoryview | None:
        """These bytes, if they were fetched by this thread, or lay between what others fetched."""
        fetched: _Fetched = getattr(self._own, "fetched", _NOTHING)
        between: _Fetched = getattr(self._own, "between", _NOTHING)
        found = fetched.find(address, offset, length)
        return between.find(address, offset, length) if found is None else found

    def has(self, path: str, offset: int, length: int) -> bool:
        """Whether these bytes cost no request: they are here, or were fetched."""
        return not paths.is_address(path) or self._held(path, offset, length) is not None

    def read_into(self, path: str, offset: int, buffer: memoryview) -> None:
        """Fill a byte buffer from this place of the file on.

        Raises UnreadableError when the file ends before the buffer is full.
        """
        self.read_some(path, offset, buffer, least=len(buffer))

    def views(
        self, path: str, offset: int, length: int, buffer: memoryview
    ) -> Iterator[memoryview]:
        """These bytes of the file in pieces, each of which is in ``buffer`` until the next.

        A piece takes few steps of the interpreter: for many threads that only look at bytes.
        Raises UnreadableError when the file ends before them.
        """
        local = self.descriptor(path) if self.has_descriptor(path) else nullcontext(None)
        with local as fd:
            for done in range(0, length, len(buffer)):
                view = buffer[: length - done]
                if fd is None or os.preadv(fd, [view], offset + done) != len(view):
                    self.read_into(path, offset + done, view)  # goes on, or says why not
                yield view

    def read_some(self, path: str, offset: int, buffer: memoryview, *, least: int) -> int:
        """Fill a byte buffer as far as the file goes; gives the number of bytes.

        Raises UnreadableError when they are not at least so many, of a store when it is not full.
        """
        if path in self._lent:
            buffer[:] = self._lent[path][offset : offset + len(buffer)]
            return len(buffer)
        if paths.is_address(path):
            buffer[:] = self._fetch(path, offset, len(buffer))
            return len(buffer)
        done = 0
        with self.descriptor(path) as fd:
            while done < len(buffer):
                count = os.preadv(fd, [buffer[done:]], offset + done)
                if count == 0:
                    break
                done += count
        if done < least:
            raise _too_short(path, length=self.size(path), needed=offset + least)
        return done


def batches(
    items: Iterable[_Item], nbytes: Callable[[_Item], int], most: int
) -> Iterator[list[_Item]]:
    """The items in their order, so many at a time as have at most so many bytes, or one."""
    batch: list[_Item] = []
    left = most
    for item in items:
        count = nbytes(item)
        if batch and count > left:
            yield batch
            batch, left = [], most
        batch.append(item)
        left -= count
    if batch:
        yield batch


class _Fetched:
    """Blocks of objects in stores, in ascending order in each."""

    __slots__ = ("_blocks", "_starts")

    def __init__(self) -> None:
        self._starts: dict[str, list[int]] = {}
        self._blocks: dict[str, list[memoryview]] = {}

    def add(self, path: str, offset: int, data: memoryview) -> None:
        """Keep a block that lies behind all others of its object."""
        self._blocks.setdefault(path, []).append(data)  # first: other threads look by starts
        self._starts.setdefault(path, []).append(offset)

    def find(self, path: str, offset: int, length: int) -> memoryview | None:
        """These bytes; None where a block does not hold all of them."""
        starts = self._starts.get(path, ())
        place = bisect_right(starts, offset) - 1
        if place < 0:
            return None
        at, block = offset - starts[place], self._blocks[path][place]
        return block[at : at + length] if at + length <= len(block) else None


_NOTHING = _Fetched()


def _joined(ranges: Iterable[tuple[str, int, int]], *, gap: int) -> list[tuple[str, int, int]]:
    """The same bytes in few ranges: those of a file that are at most ``gap`` apart are one, up to
    about what one request is to ask for.
    """
    joined: list[tuple[str, int, int]] = []
    for path, offset, length in sorted(ranges):
        last, start, size = joined[-1] if joined else ("", 0, 0)
        if path == last and offset <= start + size + gap and offset < start + _REQUEST:
            joined[-1] = path, start, max(size, offset + length - start)
        else:
            joined.append((path, offset, length))
    return joined


def _nbytes(ranges: Iterable[tuple[str, int, int]]) -> int:
    return sum(length for _, _, length in ranges)


def _answer(address: str, offset: int, length: int) -> memoryview:
    """What a store says these bytes are: fewer where the object ends. Raises UnreadableError."""
    with _faults_of(address):
        data = fsspec_store.read(address, offset, length)
    if len(data) > length:
        raise UnreadableError(
            f"{address}: its server was asked for {length:,} bytes and sent {len(data):,}.",
            hint="It does not support range requests. Download the file and read it from disk.",
        )
    return data


@cache
def _most_open() -> int:
    """How many files to keep open: a quarter of what the system allows this process.

    There are outputs, libraries and other readers, too; a file in use stays open beyond that.
    """
    allowed, _ = getrlimit(RLIMIT_NOFILE)
    return _MAX_OPEN if allowed == RLIM_INFINITY else max(_LEAST_OPEN, min(_MAX_OPEN, allowed // 4))


class Window:
    """The block of a file that one thread read last, in a buffer of its own.

    What lies in the block costs no read, and reading ahead makes few large reads of many small
    ones: with 16 threads each read is a turn to wait for at the interpreter's lock.
    """

    __slots__ = ("_block", "_end", "_files", "_path", "_start", "_view", "nbytes")

    def __init__(self, files: Files, nbytes: int) -> None:
        self.nbytes = nbytes
        self._files = files
        self._block = bytearray(nbytes)
        self._view = memoryview(self._block)
        self._path, self._start, self._end = "", 0, 0

    def block(self, path: str, offset: int, length: int, *, until: int) -> tuple[bytearray, int]:
        """The buffer with these bytes of the file in it, and where they begin.

        If they are to be read, so is what follows up to ``until``, as far as the buffer goes.
        They are there until the next call. Raises UnreadableError when the file ends before them.
        """
        if length > len(self._block):
            self._path, self._block = "", bytearray(length)
            self._view = memoryview(self._block)
        if path != self._path or offset < self._start or offset + length > self._end:
            self._fill(path, offset, length, until)
        return self._block, offset - self._start

    def views(self, path: str, offset: int, length: int) -> Iterator[memoryview]:
        """These bytes of the file in pieces, each of which is there until the next call."""
        if path == self._path and self._start <= offset < self._end:
            at = offset - self._start
            piece = self._view[at : min(at + length, self._end - self._start)]
            yield piece
            offset, length = offset + len(piece), length - len(piece)
        if length:
            self._path = ""
            most = min(_AHEAD * self.nbytes, _REQUEST) if paths.is_address(path) else length
            for start in range(offset, offset + length, most):
                wanted = min(most, offset + length - start)
                self._files.fetch([(path, start, wanted)])
                yield from self._files.views(path, start, wanted, self._view[: self.nbytes])

    def read(self, path: str, offset: int, length: int, *, until: int) -> bytes:
        """These bytes of the file, as `block` finds them."""
        if length > self.nbytes:
            return self._files.read(path, offset, length)
        _, at = self.block(path, offset, length, until=until)
        return bytes(self._view[at : at + length])

    def _fill(self, path: str, offset: int, length: int, until: int) -> None:
        self._path, wanted = "", max(length, min(until - offset, self.nbytes))
        try:
            if not self._files.has(path, offset, length):
                most = max(length, min(until - offset, _AHEAD * self.nbytes, _REQUEST))
                self._files.fetch([(path, offset, most)])
            if not self._files.has(path, offset, wanted):
                wanted = length
            found = self._files.read_some(path, offset, self._view[:wanted], least=length)
        except CheckpointError:
            if wanted == length:
                raise
            # What was only to be read ahead cannot be read.
            found = self._files.read_some(path, offset, self._view[:length], least=length)
        self._path, self._start, self._end = path, offset, offset + found


@cache
def temporary_folder() -> str:
    """A folder for temporary files that is removed when this process ends, and by no other one."""
    from shutil import rmtree
    from tempfile import mkdtemp

    folder = mkdtemp(prefix="ckpt-tools-")
    owner = os.getpid()

    def remove() -> None:
        if os.getpid() == owner:
            rmtree(folder, ignore_errors=True)

    atexit.register(remove)
    return folder


@contextmanager
def _faults_of(path: str, *, doing: str = "read") -> Iterator[None]:
    """Raise what the system or a store refuses inside of the block as an error of this file."""
    try:
        yield
    except FileNotFoundError as error:
        if os.path.islink(path):
            raise IncompleteError(
                f"{path} is a link to {os.readlink(path)}, which does not exist.",
                hint="Copy the files that links lead to (cp -L, rsync -L), or fetch them again.",
            ) from error
        raise IncompleteError(f"{path} does not exist.") from error
    except OSError as error:
        raise unreadable(path, error, doing=doing) from error


def refuse_special(files: Iterable[str]) -> None:
    """Raise UnreadableError for a FIFO, device or socket where a checkpoint has a file.

    It is not opened: that could wait for ever.
    """
    for path in files:
        kind = paths.special(path)
        if kind is not None:
            raise UnreadableError(f"{path} is {kind}, not a regular file; it was not opened.")


def _too_short(path: str, *, length: int, needed: int) -> UnreadableError:
    return UnreadableError(
        f"{path} is truncated: {length:,} bytes, the index needs {needed:,}.",
        hint="It may still be copying, or the disk was full; compare its size with the original.",
    )
