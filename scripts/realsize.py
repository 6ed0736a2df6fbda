"""Every way of bytes on a model as large as people's, with torch's own reading as the truth."""

from __future__ import annotations

import argparse
import logging
import os
import resource
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from fnmatch import fnmatchcase
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent)]

import torch  # noqa: E402
from realsize_jobs import conversions, model, proofs, reading, sources  # noqa: E402
from realsize_jobs.conversions import Source  # noqa: E402
from realsize_jobs.model import Flat  # noqa: E402
from realsize_jobs.reading import Wrong  # noqa: E402

LANES = 2  # sources whose cases run side by side, each in a folder of its own
OUTPUTS = ("out", "out.pt", "out.safetensors", "other-out", "out.json")


class Maker(NamedTuple):
    """A source: what it is called, its format, how many ranks save it, and of which model."""

    name: str
    form: str
    ranks: int
    size: model.Size


def _always(form: str, ranks: int) -> bool:  # noqa: ARG001 (what others ask)
    return True


class Case(NamedTuple):
    """What is done with a source; it may say something, and raises Wrong.

    ``fits`` says of a format and the number of ranks that saved it whether it can be done.
    """

    name: str
    do: Callable[[Source], str | None]
    fits: Callable[[str, int], bool] = _always


class Row(NamedTuple):
    """How a case ended: ``wrong`` is the reason, None when all was right."""

    source: str
    case: str
    seconds: float
    wrong: str | None = None
    said: str | None = None

    def __str__(self) -> str:
        ended = f"WRONG: {self.wrong}" if self.wrong else f"right  {self.said or ''}"
        return f"{f'{self.source}: {self.case}':<70} {self.seconds:6.1f} s  {ended}".rstrip()


def main() -> int:
    """Run the cases that were asked for, and print the table; 1 when one was wrong."""
    asked = _arguments()
    logging.disable(logging.WARNING)  # torch's own
    begun = time.monotonic()
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="realsize-", dir=asked.dir) as folder:
        for size, makers in groupby(_makers(asked), key=lambda maker: maker.size):
            rows += _of_model(size, list(makers), Path(folder), asked.only)
    wrong = [row for row in rows if row.wrong]
    print(f"\n{_table(rows)}\n")
    for row in wrong:
        print(row)
    used = resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = sum(one.ru_utime + one.ru_stime for one in used)
    took = f"{time.monotonic() - begun:.0f} s, {cpu:.0f} s of CPU"
    print(f"{len(rows) - len(wrong)} of {len(rows)} right, {took}")
    return 1 if wrong or not rows else 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scripts/realsize", description=__doc__)
    parser.add_argument("--gib", type=float, default=1.25, help="size of the model")
    parser.add_argument("--huge", action="store_true", help="add a tensor above 4 GiB")
    many = "20,000 tensors and 600 rank files instead"
    parser.add_argument("--many", action="store_true", help=many)
    parser.add_argument("--only", default="*", metavar="GLOB", help="only cases of such a name")
    place = os.environ.get("REALSIZE_DIR")
    where = "work in a new folder in this one (else REALSIZE_DIR, else that for temporary files)"
    parser.add_argument("--dir", default=place, help=where)
    return parser.parse_args()


def _makers(asked: argparse.Namespace) -> list[Maker]:
    size = model.MANY_TENSORS if asked.many else model.of_gib(asked.gib, huge=asked.huge)
    forms = (("pt", 1), ("dcp", 2), ("ranks", 3), ("safetensors", 1))
    found = [Maker(form, form, ranks, size) for form, ranks in forms]
    return [*found, Maker("600 ranks", "ranks", 600, model.MANY_RANKS)] if asked.many else found


def _of_model(size: model.Size, makers: list[Maker], folder: Path, only: str) -> list[Row]:
    """All sources of one model, one after another, each with its cases."""
    cases = _cases()
    if not any(_chosen(cases, maker, only) for maker in makers):
        return []
    truth = folder / "model.pt"
    torch.save(model.made(size), truth)
    leaves = {
        name: leaf.contiguous() if isinstance(leaf, torch.Tensor) else leaf
        for name, leaf in model.flat(sources.loaded(truth)).items()
    }

    def rows_of(maker: Maker) -> list[Row]:
        source = _source(maker, truth, leaves)
        return _of_source(source, maker.name, truth, _chosen(cases, maker, only))

    longest_first = sorted(makers, key=lambda maker: -maker.ranks)
    with ThreadPoolExecutor(LANES) as lanes:
        rows = [row for found in lanes.map(rows_of, longest_first) for row in found]
    truth.unlink()
    return rows


def _chosen(cases: Sequence[Case], maker: Maker, only: str) -> list[Case]:
    return [
        case
        for case in cases
        if case.fits(maker.form, maker.ranks) and fnmatchcase(f"{maker.name}: {case.name}", only)
    ]


def _source(maker: Maker, truth: Path, leaves: Flat) -> Source:
    """What a source is to hold, in a folder with what its commands need: safetensors have no
    objects, and these only the model.
    """
    folder = truth.with_name(maker.name)
    folder.mkdir()
    (folder / "map.toml").write_text(model.MAP)
    (folder / "names.txt").write_text("\n".join(model.TRAINED))
    named = ((name.removeprefix("model."), name) for name in leaves if name.startswith("model."))
    tensors = {bare: leaves[name] for bare, name in named}
    path = truth if maker.form == "pt" else folder / "source"
    held = tensors if maker.form == "safetensors" else leaves
    return Source(maker.form, path, folder, maker.ranks, held, tensors)


def _of_source(source: Source, name: str, truth: Path, cases: Sequence[Case]) -> list[Row]:
    """Have torch save a source, do its cases, and remove it."""
    if not cases:
        return []
    rows = [_row(name, "saved by torch", partial(_save, source, truth))]
    if rows[0].wrong is None:
        rows += [_row(name, case.name, partial(_do, case, source)) for case in cases]
    source.remove("source")
    return rows


def _save(source: Source, truth: Path) -> None:
    """Have torch save it, and read it back."""
    sources.save(source.form, source.ranks, truth=truth, out=source.path)
    reading.check(source.path, source.leaves)


def _do(case: Case, source: Source) -> str | None:
    """Do a case; what it wrote is removed, and the source must be as it was."""
    before = _stamps(source.path)
    try:
        said = case.do(source)
    finally:
        source.remove(*OUTPUTS)
    if _stamps(source.path) != before:
        raise Wrong("the source is not as it was")
    return said


def _stamps(path: Path) -> list[tuple[str, int, int, int]]:
    found = [(file, file.stat()) for file in sorted([path, *path.rglob("*")])]
    return [(str(file), stat.st_ino, stat.st_size, stat.st_mtime_ns) for file, stat in found]


def _row(source: str, case: str, do: Callable[[], str | None]) -> Row:
    """Do it, and print how it ended."""
    begun = time.monotonic()
    wrong = said = None
    try:
        said = do()
    except Wrong as error:
        wrong = str(error)
    except Exception as error:  # noqa: BLE001 (torch's, of what it cannot read; the next case runs)
        wrong = f"{type(error).__name__}: {error}"[:300].replace("\n", " ")
    row = Row(source, case, time.monotonic() - begun, wrong, said)
    print(row, flush=True)
    return row


def _cases() -> list[Case]:
    """All cases; each says which sources it is for."""
    found = [
        Case(one.name, partial(conversions.convert, one), one.fits)
        for one in conversions.conversions()
    ]
    for one in (conversions.HSDP, conversions.HSDP._replace(ranks=2)):
        do = partial(conversions.resumed, one)
        found.append(Case(f"{one.name}, killed, --resume", do, one.fits))
    two = partial(conversions.two_at_once, conversions.FOLDER, conversions.COLUMNS)
    found.append(Case("two conversions at once", two))
    return [*found, *(Case(name, do) for name, do in proofs.PROOFS.items())]


def _table(rows: Sequence[Row]) -> str:
    """Cases down, sources across: seconds, or WRONG."""
    columns = list(dict.fromkeys(row.source for row in rows))
    cells: dict[str, dict[str, str]] = {}
    for row in rows:
        told = "WRONG" if row.wrong else f"{row.seconds:.1f}"
        cells.setdefault(row.case, {})[row.source] = told
    lines = [
        ["seconds, each right unless it says WRONG", *columns],
        ["---"] + ["--:"] * len(columns),
    ]
    lines += [[case, *(known.get(one, "") for one in columns)] for case, known in cells.items()]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


if __name__ == "__main__":
    sys.exit(main())
