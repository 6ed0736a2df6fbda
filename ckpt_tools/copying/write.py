"""Writes the files of a plan: the only writer of tensor bytes, threaded, in bounded memory.

Threads take tasks from one list, so that several work inside one file. `tasks` says what a task is,
`task_writer` makes its bytes; this module knows threads, open outputs, and which tasks are done.
"""

from __future__ import annotations

import os
import signal
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import contextmanager

from ckpt_tools.copying.parallel import Tally, choose_threads, ignore_note
from ckpt_tools.copying.read import OnRun
from ckpt_tools.copying.task_writer import BLOCK, SLOT, Output, Stopped, TaskWriter
from ckpt_tools.copying.tasks import ALL, Share, Task, check_memory, groups_of, share_of
from ckpt_tools.core.crc import combine
from ckpt_tools.core.plan import FilePlan, LazyPlans
from ckpt_tools.core.sizes import Sizes
from ckpt_tools.errors import unwritable
from ckpt_tools.storage.paths import is_address
from ckpt_tools.storage.reader import Files


def write_files(  # noqa: PLR0913 (limits, and who hears of what)
    plans: LazyPlans,
    *,
    root: str,
    files: Files,
    threads: int | None,
    max_memory: int,
    on_bytes: Callable[[int], None],
    share: Share = ALL,
    locate: Callable[[list[Task]], Iterable[list[Task]]] | None = None,
    on_file: Callable[[str, bool], None] | None = None,
    on_run: OnRun | None = None,
    on_overflow: Callable[[str], None] = ignore_note,
) -> int:
    """Write every file of the plans below the folder ``root``; gives the bytes of all tasks done.

    Buffers take ``max_memory`` bytes (1 MiB at least) over all threads together; without a number
    of ``threads`` it is chosen for the cores and the files. ``locate`` gives tasks whose chunks are
    raw elements, some at a time. For people, ``on_bytes`` gets the number of bytes written since
    its last call; ``on_file`` gets each file of which this worker's part is written, and whether
    that is all of it, ``on_run`` the CRC-32 of each run of the source that is written in its order,
    ``on_overflow`` the name of a tensor of which a cast made finite values infinite. A file that
    exists is written into. With a ``share``, one of several workers does its part: together they
    write every byte once, in any order. The result counts whole tasks of this part.

    Raises UsageError for too little memory, WriteError when an output cannot be written,
    UnreadableError when a source cannot be read, and KeyboardInterrupt as it comes; what was
    written so far stays.
    """
    check_memory(threads, max_memory)
    sizes = files.sizes
    outputs, done = _Outputs(root, sizes), 0
    try:
        for group, tasks in groups_of(plans, share, sizes):
            work = _Work(tasks, outputs, on_bytes, on_file, on_run=on_run, on_overflow=on_overflow)
            for plan in group:
                if not plan.literals and not plan.items:  # no task writes to it
                    outputs.create(plan).close()
            for batch in [tasks] if locate is None else locate(tasks):
                count = min(
                    threads or _useful_threads(batch, sizes, processes=share.count),
                    max_memory // min(sizes.thread_memory, max_memory),
                    max(1, len(batch)),
                )
                work.run(batch, files, threads=count, memory=max_memory // count)
            done += work.done
    finally:
        outputs.close()
    return done


class _Outputs:
    """The open output files: each is open from its first task to its last."""

    def __init__(self, root: str, sizes: Sizes) -> None:
        self._root, self._sizes = root, sizes
        self._open: dict[str, Output] = {}
        self._left: Counter[str] = Counter()
        self._whole: set[str] = set()

    def expect(self, tasks: Sequence[Task]) -> None:
        """Say which tasks will be opened and closed; all that this worker has of each file."""
        self._left.update(task.file.path for task in tasks)
        self._whole = {t.file.path for t in tasks if self._left[t.file.path] == t.of}

    def open(self, plan: FilePlan) -> Output:
        """The file of a plan, created if need be. Raises WriteError."""
        output = self._open.get(plan.path)
        if output is None:
            output = self._open[plan.path] = self.create(plan)
        return output

    def done_with(self, plan: FilePlan) -> bool:
        """Close the file of a plan when this was its last task, and say so."""
        self._left[plan.path] -= 1
        if self._left[plan.path]:
            return False
        self._open.pop(plan.path).close()
        return True

    def is_whole(self, plan: FilePlan) -> bool:
        """Whether this worker writes all of the file of a plan."""
        return plan.path in self._whole

    def close(self) -> None:
        """Close all that are still open."""
        for output in self._open.values():
            output.close()
        self._open.clear()

    def create(self, plan: FilePlan) -> Output:
        """Open the file of a plan, and set it to its length. Raises WriteError."""
        path, least = os.path.join(self._root, plan.path), self._sizes.direct_from
        try:
            os.makedirs(os.path.dirname(path), exist_ok=True)
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            try:
                status = os.fstat(fd)
                if status.st_size != plan.length:
                    os.ftruncate(fd, plan.length)
                direct = _open_direct(path, status) if plan.length >= least else None
            except BaseException:
                os.close(fd)
                raise
        except OSError as error:
            raise unwritable(path, error) from error
        return Output(path, fd, direct, self._sizes.direct_least)


def _open_direct(path: str, status: os.stat_result) -> int | None:
    """A file on a block device, for writing past the page cache where the system can do that.

    File systems in memory or on a server have a major number of 0: direct I/O is not for them, nor
    for those whose blocks are larger than ours.
    """
    is_on_device = os.major(status.st_dev) != 0 and status.st_blksize <= BLOCK
    if not is_on_device:
        return None
    try:
        return os.open(path, os.O_WRONLY | os.O_DIRECT | os.O_CLOEXEC)
    except (OSError, AttributeError):
        return None


class _Work:
    """The tasks that are left, shared between threads; everything public takes the lock itself."""

    def __init__(
        self,
        tasks: Sequence[Task],
        outputs: _Outputs,
        on_bytes: Callable[[int], None],
        on_file: Callable[[str, bool], None] | None,
        *,
        on_run: OnRun | None,
        on_overflow: Callable[[str], None],
    ) -> None:
        self._outputs, self._tally, self._on_file = outputs, Tally(on_bytes), on_file
        self._on_run, self._on_overflow = on_run, on_overflow
        self._crc_parts = Counter(
            (task.file.path, task.checked.offset) for task in tasks if task.checked is not None
        )
        self._crcs: dict[tuple[str, int], list[tuple[int, int, int]]] = {}
        self._left: list[list[Task]] = []
        outputs.expect(tasks)
        self._lock = threading.Lock()
        self._in_kernel = True
        self.done = 0  # bytes of the tasks that are done

    def run(self, tasks: list[Task], files: Files, *, threads: int, memory: int) -> None:
        """Do some of them, located; the first error of a thread stops the others and is raised."""
        self._stop = threading.Event()
        # Threads begin far apart: two that write one file wait for each other's writes.
        parts = [share_of(tasks, Share(number, threads)) for number in range(threads)]
        self._left = [part[::-1] for part in parts]
        # The system reads the source under the lock of the file that it copies to: that is best
        # where each thread has its own file. On one file, one thread can write and another read.
        self._in_kernel = threads <= len({task.file.path for part in parts for task in part})
        pool = ThreadPoolExecutor(threads, thread_name_prefix="copy")
        try:
            with _interrupts_held():
                futures = [pool.submit(self._work, files, memory, part) for part in self._left]
            done, _ = wait(futures, return_when=FIRST_EXCEPTION)
        finally:
            with _interrupts_held():
                self._stop.set()  # all is done, a thread failed, or Ctrl-C came
                pool.shutdown()  # no thread may write when the files are closed
        for future in done:
            future.result()

    def _work(self, files: Files, memory: int, part: list[Task]) -> None:
        """One thread's work: its own part of the tasks, then what other threads have left."""
        writer = TaskWriter(
            files,
            memory=memory,
            moved=self._tally.add,
            stop=self._stop,
            in_kernel=self._in_kernel,
            on_run=self._on_run,
            on_overflow=self._on_overflow,
        )
        try:
            while (task := self._next(part)) is not None:
                with self._lock:
                    output = self._outputs.open(task.file)
                value = writer.write(task, output)
                output.send(*task.span)
                with self._lock:
                    self._check(task, value)
                    is_last = self._outputs.done_with(task.file)
                    self.done += task.nbytes
                if is_last and self._on_file is not None:
                    self._on_file(task.file.path, self._outputs.is_whole(task.file))
        except Stopped:
            return

    def _next(self, part: list[Task]) -> Task | None:
        with self._lock:
            if part:
                return part.pop()
            longest = max(self._left, key=len)
            return longest.pop(0) if longest else None

    def _check(self, task: Task, value: int) -> None:
        """Write the CRC-32 of an item, of those of its parts, when this was the last task of it."""
        if task.checked is None:
            return
        key = task.file.path, task.checked.offset
        crcs = self._crcs.setdefault(key, [])
        crcs.append((task.number, task.nbytes, value))
        if len(crcs) < self._crc_parts[key]:
            return
        whole = 0
        for _, nbytes, crc in sorted(self._crcs.pop(key)):
            whole = combine(whole, crc, length=nbytes)
        output = self._outputs.open(task.file)
        for slot in task.checked.crc_at:
            output.write(slot, SLOT.pack(whole))


def _useful_threads(tasks: Sequence[Task], sizes: Sizes, *, processes: int) -> int:
    """How many threads this process should start, when ``processes`` share the machine."""
    files = {task.file.path for task in tasks}
    nbytes = sum(task.nbytes for task in tasks)
    first = next((task.pieces[0].item.reads for task in tasks if task.pieces), ())
    far = any(is_address(read.chunk.data.path) for read in first[:1])
    return choose_threads(nbytes, sizes, lanes=len(files), processes=processes, far=far)


@contextmanager
def _interrupts_held() -> Iterator[None]:
    """Delay Ctrl-C and SIGTERM until the block ends: an executor interrupted while it starts or
    awaits a thread loses it, and that thread would go on writing after the files are closed.

    The handler is exchanged rather than the signal blocked: any other thread may receive a signal
    that this one blocks, and Python then raises here all the same.
    """
    if threading.current_thread() is not threading.main_thread():
        yield  # Python interrupts the main thread alone
        return
    received: list[int] = []
    before = {
        number: signal.signal(number, lambda number, _frame: received.append(number))
        for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
    if received:
        signal.raise_signal(received[0])
