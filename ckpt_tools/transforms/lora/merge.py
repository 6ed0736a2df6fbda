"""Merges LoRA factors into base weights: W + scale · B·A in float32, then cast, slab by slab.

The merged tensors go to temporary files, which the output is then copied from; only a slab of rows
and the smaller factor are in memory.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from tempfile import mkdtemp
from typing import TYPE_CHECKING

from ckpt_tools import formats
from ckpt_tools.copying.read import read_array
from ckpt_tools.core.dtypes import BY_NAME, DType
from ckpt_tools.core.geometry import Box
from ckpt_tools.core.index import ByteRange, CheckpointIndex, Chunk, TensorEntry
from ckpt_tools.core.text import counted
from ckpt_tools.errors import IncompleteError, UnsupportedError, unwritable
from ckpt_tools.storage.reader import Files, temporary_folder
from ckpt_tools.transforms.base import TransformedTensor, TransformResult
from ckpt_tools.transforms.dtypes import DtypePolicy
from ckpt_tools.transforms.lora.config import LoraConfig, check_ranks
from ckpt_tools.transforms.lora.orientation import transposed
from ckpt_tools.transforms.lora.parts import AdapterParts, Factors, parts_of
from ckpt_tools.transforms.maps import views

if TYPE_CHECKING:
    import numpy as np

    Floats = np.ndarray[tuple[int, ...], np.dtype[np.float32]]

_SLAB_NUMEL = 1 << 20
_FLOATS = frozenset({"float64", "float32", "float16", "bfloat16"})


@dataclass(frozen=True, slots=True)
class _Merge:
    """One weight to make: ``base`` + ``scale`` · ``left`` · ``right``, written to ``path``.

    ``left`` is (rows, r) and ``right`` (r, columns) of a base of (rows, columns).
    """

    base: TensorEntry
    left: TensorEntry
    right: TensorEntry
    scale: float
    dtype: DType
    path: str

    def __call__(self, files: Files, source: CheckpointIndex) -> set[str]:
        """Write all rows; gives the name if the cast made finite values infinite.

        Raises WriteError, and what reading raises.
        """
        operands = formats.located_in(source, (self.base, self.left, self.right), files)
        rows, columns = self.base.shape
        step, overflows = max(1, _SLAB_NUMEL // max(1, columns)), False
        try:
            with open(self.path, "wb") as out:
                for start in range(0, rows, step):
                    count = min(step, rows - start)
                    merged, more = self._rows(operands, files, start=start, count=count)
                    out.write(merged)
                    overflows |= more
        except OSError as error:
            hint = "Merged weights go to temporary files first; TMPDIR says where those are."
            raise unwritable(self.path, error, hint=hint) from error
        return {self.base.fqn} if overflows else set()

    def _rows(
        self, operands: Sequence[TensorEntry], files: Files, *, start: int, count: int
    ) -> tuple[bytes | bytearray, bool]:
        """These rows of the merged weight, as raw bytes of its type, and what `_cast` says."""
        import numpy as np  # late, as torch: a dry run needs none of it

        base, left = (_floats(one, files, start=start, count=count) for one in operands[:2])
        right = _floats(operands[2], files, start=0, count=self.right.shape[0])
        merged = base + np.float32(self.scale) * (left @ right)
        return _cast(merged.tobytes(), BY_NAME["float32"], self.dtype)


def _floats(entry: TensorEntry, files: Files, *, start: int, count: int) -> Floats:
    """Rows of a matrix as float32, in memory."""
    import numpy as np

    shape = (count, entry.shape[1])
    raw = read_array(entry, Box((start, 0), shape), files=files)
    return np.frombuffer(_cast(raw, entry.dtype, BY_NAME["float32"])[0], "<f4").reshape(shape)


def _cast(raw: bytes | bytearray, source: DType, target: DType) -> tuple[bytes | bytearray, bool]:
    """Raw elements of one type as those of another, and whether a finite one became infinite."""
    if source == target:
        return raw, False
    from ckpt_tools.copying.cast import Caster

    out = bytearray(len(raw) // source.itemsize * target.itemsize)
    return out, Caster(source, target).cast(memoryview(raw), memoryview(out))


@dataclass(frozen=True, slots=True)
class MergeTransform:
    """Gives the base model's weights, with one adapter in them, under the base model's names.

    A sum is rounded once, to the type that is written.
    """

    config: LoraConfig
    adapter: str | None = None

    def __call__(
        self, made: tuple[TransformedTensor, ...], _files: Files, types: DtypePolicy
    ) -> TransformResult:
        """Plan the merge; nothing is read.

        Raises what `parts_of`, `check_ranks` and `transposed` raise, IncompleteError for a base
        weight that is not there, and UnsupportedError for one that is quantized.
        """
        parts = parts_of(made, self.adapter)
        check_ranks(self.config, parts)
        turned = transposed(parts, said=self.config.transposed, asked=self.config.asked)
        packed = types.quantized.members
        folder = mkdtemp(dir=temporary_folder())
        merged: dict[str, TransformedTensor] = {}
        works: dict[str, _Merge] = {}
        for number, factors in enumerate(parts.factors):
            name = f"{factors.module}.weight"
            path = os.path.join(folder, f"{number:06}.bin")
            for origin in parts.base[name].origins if name in parts.base else ():
                if origin in packed:
                    raise _is_quantized(name, packed[origin].family)
            work = self._merge(parts, factors, types, path=path, turned=factors.module in turned)
            works[path] = work
            origins = (*parts.base[name].origins, *factors.a.origins, *factors.b.origins)
            written = ByteRange(path, 0, work.base.numel * work.dtype.itemsize)
            chunk = Chunk(Box.whole(work.base.shape), written)
            entry = replace(work.base, dtype=work.dtype, chunks=(chunk,), layout=None)
            merged[name] = TransformedTensor(entry, origins)
        every = parts.base | parts.saved | merged
        out = tuple(made.named(name) for name, made in sorted(every.items()))
        return TransformResult(out, tuple(self._notes(parts)), works=works)

    def _merge(
        self, parts: AdapterParts, factors: Factors, types: DtypePolicy, *, path: str, turned: bool
    ) -> _Merge:
        name = f"{factors.module}.weight"
        if name not in parts.base:
            raise IncompleteError(
                f"{name}: its LoRA factors are here, and the base weight is not.",
                hint="Merge into a checkpoint that holds the base, or write the adapter alone with "
                "--adapter.",
            )
        base = parts.base[name].named(name).entry
        left, right = factors.b.entry, factors.a.entry
        if factors.embedding or turned:
            left, right = (views.transpose(views.view_of(one)) for one in (right, left))
        wanted = (left.shape[0], right.shape[1])
        if base.shape != wanted:
            raise UnsupportedError(
                f"{name} has shape {list(base.shape)}, its LoRA factors make {list(wanted)}."
            )
        if not {base.dtype.name, left.dtype.name, right.dtype.name} <= _FLOATS:
            raise _is_quantized(name, base.dtype.name)
        scale = self.config.scale(factors.module, factors.rank)
        return _Merge(base, left, right, scale, types.of_plain(base), path)

    def _notes(self, parts: AdapterParts) -> Iterator[str]:
        ranks = sorted({one.rank for one in parts.factors})
        yield (
            f"Merges {counted(len(parts.factors), 'module')} of rank "
            f"{', '.join(map(str, ranks))} with alpha "
            f"{self.config.alpha:g}: W + scale · B·A in float32, then cast."
        )
        if parts.saved:
            taken = counted(len(parts.saved), "tensor")
            yield f"Takes {taken} from modules that were trained whole."


def _is_quantized(name: str, what: str) -> UnsupportedError:
    return UnsupportedError(
        f"{name} is {what}: LoRA cannot be merged into quantized weights.",
        hint="Write the adapter alone with --adapter.",
    )
