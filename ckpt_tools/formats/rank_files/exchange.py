"""The rank files of one rank alone, as a value that can be sent, and the index of all such values.

A rank may see no file but its own. What it finds there is joined with what the others found, and
gives the index that a reader of all files would give. Who sends the values is not known here.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from glob import escape, glob

from ckpt_tools.core import names
from ckpt_tools.core.crc import crc32
from ckpt_tools.core.index import CheckpointIndex
from ckpt_tools.errors import IncompleteError, UnsupportedError
from ckpt_tools.formats.protocol import ReadOptions
from ckpt_tools.formats.rank_files import checks, file_names
from ckpt_tools.formats.rank_files.entries import MAX_COMPARED, RankTensor, elements
from ckpt_tools.formats.rank_files.file_names import Family, RankFile
from ckpt_tools.formats.rank_files.read import RankHeaders
from ckpt_tools.storage.reader import Files


def listing(path: str) -> list[RankFile]:
    """The rank files that a folder holds or a glob chooses; none when there are none."""
    if os.path.isdir(path):
        paths = [os.path.join(path, name) for name in sorted(os.listdir(path))]
    else:
        paths = sorted(glob(path))
    return list(filter(None, map(file_names.parse, paths)))


def families_of(listings: Sequence[Sequence[RankFile]], *, where: str) -> tuple[Family, ...]:
    """The families of the files that all ranks found, each rank's own as that rank sees it.

    Raises IncompleteError when no rank found any, and what `file_names.joined` raises.
    """
    by_rank: dict[tuple[str, int], RankFile] = {}
    for rank, files in enumerate(listings):
        for file in files:
            place = file.pattern, file.rank
            if file.rank == rank or place not in by_rank:
                by_rank[place] = file
    if not by_rank:
        raise IncompleteError(
            f"{where} holds no file of any rank.",
            hint="--engine gather reads a folder of per-rank files, or a quoted glob of them; "
            "--engine copy reads every format.",
        )
    paths = [file.path for file in by_rank.values()]
    return file_names.joined(file_names.families(paths), where=escape(where))


def world_size(families: Sequence[Family]) -> int:
    """How many ranks saved the files: as their names say, else by the highest rank."""
    return checks.Ranks().world_size(families)


def read_headers(
    families: Sequence[Family], *, rank: int, where: str, options: ReadOptions
) -> RankHeaders:
    """The headers of the files of one rank, which are the only ones that are opened.

    Raises IncompleteError when there are none, and what reading a file raises.
    """
    with Files() as files:
        headers, is_one_of = RankHeaders(), len(families) > 1
        for family in families:
            own = tuple(file for file in family if file.rank == rank)
            headers.read(own, files, options, contained=is_one_of)
        if headers.broken:
            raise headers.broken[0][1]
        if not headers.sizes:
            raise IncompleteError(
                f"{where} holds no file of rank {rank} on the machine of that rank.",
                hint=f"It should be {families[0][0].path_of(rank)}.",
            )
        for parts in headers.tensors.values():
            for at, part in enumerate(parts):
                # The CRC of its own elements, where others would read them to compare.
                is_known = part.crc is not None and part.fills_record
                if not is_known and part.chunk.data.length <= MAX_COMPARED:
                    crc = crc32(elements(part, files))
                    parts[at] = part._replace(crc=crc, fills_record=True)
    return headers


def parts_in(headers: RankHeaders) -> dict[str, RankTensor]:
    """One rank's part of each tensor, by name."""
    return {names.join(path): parts[0] for path, parts in headers.tensors.items()}


def joined_index(
    root: str, headers: Sequence[RankHeaders], families: Sequence[Family]
) -> CheckpointIndex:
    """The index of all ranks' files, from the headers of every rank in order.

    Raises UnsupportedError when a name is in the files of two families. Ties are not looked for.
    """
    with Files() as files:
        every = RankHeaders()
        for rank, one in enumerate(headers):
            every.add(one, f"The file of rank {rank}")
        try:
            return every.index(root, families, files)
        except IncompleteError as error:
            raise UnsupportedError(
                f"{root}: two ranks hold tensors that can only be compared side by side: {error}",
                hint="Bring all rank files into one folder, and use --engine copy.",
            ) from error
