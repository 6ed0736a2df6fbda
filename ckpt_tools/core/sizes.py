"""Every size that decides which way bytes go.

They are one value, handed down from `WriteOptions` and carried by `Files` to all that reads, so
that a test can send a tensor of 1 KB every way that one of 1 TB takes. Whatever they are, the bytes
that come out are the same.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes in bytes, unless a line says otherwise, each with its reason.

    An element has up to 16 bytes: ``task``, ``slab`` and ``stream`` are no less.
    """

    # What is written. Larger items are cut into tasks of this, which several threads, workers and
    # ranks share; what is smaller and lies together is one task.
    task: int = 16 << 20
    # Of a task that is read, cast and written in one step by one thread, in a buffer of this.
    slab: int = 2 << 20
    # Looked at, or copied by way of a buffer, in one step: stays in the cache of a core. With 2 MiB
    # of L2, 1 MiB takes a fifth less than 4; SHA-256 in 16 threads 15 % less.
    stream: int = 1 << 20
    # Runs of bytes in files that are as long are copied one by one, past the slab.
    long_run: int = 256 << 10
    # Copied inside of the system in one step, after which a thread sees that it is to stop.
    kernel_copy: int = 8 << 20
    # Longer files on a disk are written past the page cache, which shorter ones may be read from.
    direct_from: int = 64 << 20
    # What is less goes through the page cache, also of those.
    direct_least: int = 128 << 10
    # A thread of a conversion needs buffers of this.
    thread_memory: int = 256 << 10
    # Less work than this is not worth one more thread.
    thread_work: int = 4 << 20

    # Plans are made when it is their turn, so much of them at a time, and up to ``most_plans``
    # while there are fewer files (a number) than threads may write.
    plans: int = 16 << 20
    plan_files: int = 16
    most_plans: int = 64 << 20

    # What is read. Rows shorter than this are spread by NumPy, longer ones one by one without
    # importing it.
    long_row: int = 1 << 10
    # Small reads that lie this close are one read: the bytes between cost less than a system call.
    near: int = 8 << 10
    # Ranges of a store this close are one request: an answer takes as long as so many bytes.
    fetched_gap: int = 256 << 10
    # Of a store in memory at a time, for all threads to read.
    fetched: int = 64 << 20
    # The same for the rows of a strided read, each of which costs a step of Python as well.
    gap: int = 16 << 10
    # A small item in more pieces (a number) than this is gathered on its own.
    pieces: int = 64

    # What is proven. Smaller tensors are worked on in groups of this.
    proof_group: int = 4 << 20
    # Checksummed in one step, between which many threads wait for Python: on 16 cores, ten of them
    # verify 15 GB in 0.9 of the time that steps of 1 MiB take, and longer ones leave the cache.
    checked: int = 2 << 20
    # The same where most bytes were seen before, and only what stands around them is read.
    checked_edge: int = 64 << 10
    # Elements (a number) that become numbers in one step: 512 KiB of float64 stay in the cache.
    numbers: int = 64 << 10

    # Between processes. A worker says how much it has written after so much.
    reported: int = 16 << 20
    # Ranks that gather exchange errors after so much: one that fails takes part until then.
    met: int = 1 << 30
    # Of each file of the source, ranks compare eight samples of this.
    sample: int = 4 << 10
