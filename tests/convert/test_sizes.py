"""Whatever the sizes, the bytes that come out are the same; the tiny ones take every way."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from dtensor_files import ROWS, save_ranks
from hypothesis import given, settings
from hypothesis import strategies as st
from launching import contents
from size_records import DIRECT, TINY, any_sizes

from ckpt_tools import api
from ckpt_tools.convert.export import ExportOptions
from ckpt_tools.convert.reshard import ReshardOptions
from ckpt_tools.convert.write import WriteOptions
from ckpt_tools.copying import task_writer, tasks
from ckpt_tools.copying.read import ChunkReader
from ckpt_tools.copying.task_writer import Output, TaskWriter
from ckpt_tools.core.dtypes import BY_NAME
from ckpt_tools.core.geometry import BoxFinder
from ckpt_tools.core.mesh_spec import parse_mesh, parse_placements
from ckpt_tools.core.sizes import Sizes
from ckpt_tools.formats import read_index


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rank files of four ranks with a tensor of 1 KB, a larger one, and small ones."""
    folder = tmp_path_factory.mktemp("sizes") / "ranks"
    tensors = {"kilobyte": torch.randn(16, 16), "wide": torch.randn(40, 100)}
    tensors |= {f"small{n}": torch.randn(5, 3) for n in range(6)}
    save_ranks(folder, {name: (value, ROWS) for name, value in tensors.items()}, (4,))
    return folder


def _mesh(text: str, placements: str | None = None, **more: object) -> ReshardOptions:
    mesh = parse_mesh(text)
    return ReshardOptions(
        mesh, placements=placements and parse_placements(placements, mesh), **more
    )


CONVERSIONS: dict[str, ReshardOptions | ExportOptions] = {
    "rows": _mesh("3x2"),
    "columns": _mesh("3", "S(1)"),
    "rank files": _mesh("3", format="ranks"),
    "cast": _mesh("2", dtype=BY_NAME["bfloat16"]),
    "export": ExportOptions(max_shard_size=9000),
    "one file": ExportOptions(format="torch"),
}


def written(
    source: Path, folder: Path, kind: str, sizes: Sizes, **write: object
) -> dict[str, bytes]:
    """All that a conversion writes into a folder, under one name."""
    folder.mkdir()
    out = folder / ("out.pt" if kind == "one file" else "out")
    options, index = CONVERSIONS[kind], read_index(str(source))
    how = WriteOptions(sizes=sizes, **{"threads": 2, **write})
    if isinstance(options, ReshardOptions):
        api.reshard(index, out, options=options, write=how)
    else:
        api.export(index, out, options=options, write=how)
    return contents(folder)


@settings(max_examples=20)
@given(kind=st.sampled_from(sorted(CONVERSIONS)), sizes=any_sizes(), check=st.booleans())
def test_any_sizes_give_the_same_bytes(
    source: Path, kind: str, sizes: Sizes, *, check: bool
) -> None:
    with TemporaryDirectory() as folder:
        one = written(source, Path(folder, "one"), kind, Sizes(), check=check)
        assert written(source, Path(folder, "two"), kind, sizes, check=check) == one


def counted(patch: pytest.MonkeyPatch, seen: Counter[str]) -> None:
    """Count the calls of what each way goes through."""

    def watch(holder: type | object, name: str) -> None:
        real: Callable[..., object] = getattr(holder, name)

        def counting(*words: object, **named: object) -> object:
            seen[name] += 1
            return real(*words, **named)

        patch.setattr(holder, name, counting)

    watch(Output, "copy_from")
    for name in ("_copy", "_through_buffer", "_write_piece", "_put_crcs"):
        watch(TaskWriter, name)
    watch(ChunkReader, "_spread")
    watch(BoxFinder, "near")
    watch(tasks, "without_slots")
    watch(task_writer, "add_jobs")


def test_tiny_sizes_send_a_tensor_of_1_kb_every_way(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: Counter[str] = Counter()
    counted(monkeypatch, seen)
    for kind in ("rows", "columns", "export"):
        written(source, tmp_path / kind, kind, TINY, check=True, threads=1)
    ways = ["copy_from", "_copy", "_through_buffer", "_write_piece", "_put_crcs", "_spread"]
    assert {way for way in [*ways, "near", "without_slots", "add_jobs"] if not seen[way]} == set()


def test_blocks_go_past_the_page_cache(source: Path, tmp_path: Path) -> None:
    for kind in sorted(CONVERSIONS):
        one = written(source, tmp_path / f"{kind}-1", kind, Sizes())
        assert written(source, tmp_path / f"{kind}-2", kind, DIRECT) == one
