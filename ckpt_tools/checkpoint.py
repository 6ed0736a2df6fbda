"""A checkpoint that can be read from, and what opens one.

It is a mapping of tensors, none of which is read before it is asked for its values.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, KeysView, Mapping
from functools import cached_property
from typing import TYPE_CHECKING

from ckpt_tools import api, formats
from ckpt_tools.analysis import inspection, summary
from ckpt_tools.analysis.infer_mesh import FoundMesh
from ckpt_tools.api import Patterns, Source, index_of
from ckpt_tools.copying.origin import reading
from ckpt_tools.core.index import SECTIONS, Entry, ObjectEntry, Section, TensorEntry
from ckpt_tools.core.names import no_such_entry, selector
from ckpt_tools.core.options import only_one_of
from ckpt_tools.core.plain_values import PickledValue, PlainValue
from ckpt_tools.core.records import Json
from ckpt_tools.core.state_tree import nested
from ckpt_tools.core.text import some
from ckpt_tools.errors import CheckpointError, NoSuchEntry, UnsupportedError, UsageError, in_python
from ckpt_tools.formats.protocol import ReadOptions
from ckpt_tools.lazy_tensor import LazyTensor
from ckpt_tools.proof.look import look
from ckpt_tools.storage.reader import Files

if TYPE_CHECKING:
    import torch

_MOST_NAMES = 10  # that are shown of all


class _Names(KeysView[str]):
    def __repr__(self) -> str:
        """The first names, and how many more there are."""
        return f"KeysView({some(list(self), _MOST_NAMES)})"


class Checkpoint(Mapping[str, LazyTensor]):
    """A checkpoint whose headers were read: its tensors by name, as in a dict.

    ``index`` is all that headers say. Of a tensor only the bytes that are asked for are read, and
    no file is held open. What is no tensor is in ``objects``, and `value` reads it. Equal is only
    the same object: `diff` compares two checkpoints.
    """

    def __init__(self, source: Source, *, options: ReadOptions = ReadOptions()) -> None:
        self.index = index_of(source, options)

    @property
    def path(self) -> str:
        """Its path or address."""
        return self.index.root

    @property
    def format(self) -> str:
        """``dcp``, ``ranks``, ``safetensors`` or ``torch``."""
        return self.index.format

    @property
    def framework(self) -> str | None:
        """The framework whose folder it is, None for any other."""
        return self.index.framework

    @property
    def files(self) -> tuple[str, ...]:
        """The paths of the files that it is read from."""
        return tuple(file.path for file in self.index.files)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(entry.nbytes for entry in self.index.tensors)

    @property
    def tensors(self) -> tuple[LazyTensor, ...]:
        """Every tensor, by name."""
        return tuple(map(self._lazy, self.index.tensors))

    @property
    def objects(self) -> tuple[ObjectEntry, ...]:
        """Everything that is no tensor, by name."""
        return self.index.objects

    @property
    def problems(self) -> tuple[CheckpointError, ...]:
        """What keeps it from being whole, as far as headers tell."""
        return self.index.problems

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes for people on how it was read."""
        return self.index.notes

    @property
    def world_size(self) -> int | None:
        """How many ranks saved it, where that is known."""
        return self.index.world_size

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that saved something of its tensors, where that is known."""
        chunks = (chunk for entry in self.index.tensors for chunk in entry.chunks)
        return tuple(sorted({chunk.rank for chunk in chunks if chunk.rank is not None}))

    @cached_property
    def mesh(self) -> FoundMesh | None:
        """The mesh and how it is known: its ``status`` is ``confirmed`` or ``inferred``."""
        return summary.mesh_of(self.index)

    @cached_property
    def step(self) -> int | None:
        """The step of the training at which it was saved; None where it does not say."""
        found = look(self.index).step
        return None if found is None else found.value

    @property
    def can_resume(self) -> bool:
        """Whether headers tell of all that training needs to go on; `inspect` says why not."""
        return inspection.resume_verdict(self.index).yes

    @cached_property
    def sections(self) -> tuple[Section, ...]:
        """Those of ``model``, ``optim`` and ``other`` that are not empty."""
        held = {entry.section for entry in self.index.entries}
        return tuple(section for section in SECTIONS if section in held)

    @property
    def model(self) -> Checkpoint:
        """The same checkpoint with the model alone, under the same names.

        There ``["emb.weight"]`` is ``["model.emb.weight"]``, too, where no other has that name.
        """
        return self._only("model")

    @property
    def optim(self) -> Checkpoint:
        """The same with the optimizer alone."""
        return self._only("optim")

    def _only(self, section: Section) -> Checkpoint:
        held = {entry.fqn for entry in self.index.entries if entry.section == section}
        return Checkpoint(self.index.select(held))

    @in_python()
    def require_whole(self) -> None:
        """Raise what keeps the checkpoint from being whole; do nothing when it is."""
        self.index.require_whole()

    @in_python()
    def select(self, include: Patterns, *, exclude: Patterns = ()) -> Checkpoint:
        """The same checkpoint with the tensors and objects of these names.

        Names are as they stand, globs (``"*.fc1.*"``) or regular expressions after ``re:``. Raises
        NoSuchEntry, which is a KeyError, for one that chooses nothing.
        """
        chosen = set(self._named(include)) - set(self._named(exclude))
        return Checkpoint(self.index.select(chosen))

    def _named(self, patterns: Patterns) -> Iterator[str]:
        every = [entry.fqn for entry in self.index.entries]
        known = {*every, *self.index.lost}
        for pattern in [patterns] if isinstance(patterns, str) else patterns:
            found = [pattern] if pattern in known else list(filter(selector([pattern], []), every))
            if not found:
                raise self._unknown(pattern, "entry")
            yield from found

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Every tensor by its name, read whole: the memory for all of them is needed at once."""
        return {name: tensor.torch() for name, tensor in self.items()}

    @in_python()
    def value(self, name: str) -> PlainValue:
        """The value of an object: numbers, strings, bools, lists and dicts of them, or None.

        In a list or a dict, a value of another class is a `PickledValue`. Raises NoSuchEntry for an
        unknown name and UnsupportedError for what is no plain value.
        """
        entry = self.index.object(name)
        if entry is None:
            raise self._unknown(name, "object")
        index = self.index.select({name})
        index.require_whole()
        unchanged = reading(file for file in index.files if file.path == entry.data.path)
        with unchanged, Files() as files:
            opened = formats.open_object(self.index, entry, files)
        closed = opened.value if isinstance(opened.value, PickledValue) else None
        if not opened.opened or closed is not None:
            what = opened.type_name or "too large" if closed is None else closed.qualname
            raise UnsupportedError(f"{name} is not a plain value and was not opened: {what}.")
        return opened.value

    def get_tensor(self, name: str) -> torch.Tensor:
        """A whole tensor: the name that safetensors' ``safe_open`` has for it."""
        return self[name].torch()

    def get_slice(self, name: str) -> LazyTensor:
        """A tensor to be indexed: the name that safetensors' ``safe_open`` has for it."""
        return self[name]

    def metadata(self) -> dict[str, str]:
        """What headers say beside tensors: safetensors' ``__metadata__``; else it is empty."""
        return {name: said for name, said in self.index.strings.items() if said is not None}

    def keys(self) -> KeysView[str]:
        """The names of all tensors, sorted."""
        return _Names(self)

    # The functions of `api`, with this checkpoint as their first argument.
    inspect = api.inspect
    info = inspect  # as pandas, xarray and zarr call it
    verify = api.verify
    verify_quick = api.verify_quick
    fingerprint = api.fingerprint
    stats = api.stats
    diff = api.diff
    export = api.export
    reshard = api.reshard

    def __len__(self) -> int:
        """The number of tensors."""
        return len(self.index.tensors)

    def __iter__(self) -> Iterator[str]:
        """The names of all tensors, sorted."""
        return (entry.fqn for entry in self.index.tensors)

    def __contains__(self, name: object) -> bool:
        """Whether there is a tensor of this name."""
        return isinstance(name, str) and self._tensor(name) is not None

    @in_python()
    def __getitem__(self, name: str) -> LazyTensor:
        """A tensor that is read when it is indexed. Raises NoSuchEntry, which is a KeyError."""
        entry = self._tensor(name)
        if entry is None:
            raise self._unknown(name, "tensor")
        return self._lazy(entry)

    def _tensor(self, name: str) -> TensorEntry | None:
        """The tensor of a name; where one section is alone, that may come without the section."""
        found = self.index.tensor(name)
        if found is None and len(self.sections) == 1:
            found = self.index.tensor(f"{self.sections[0]}.{name}")
        return found

    def _lazy(self, entry: TensorEntry) -> LazyTensor:
        return LazyTensor(self.index, entry, lambda: self.mesh)

    def __eq__(self, other: object) -> bool:
        """Whether it is the same object."""
        return self is other

    def __hash__(self) -> int:
        """That of the object."""
        return id(self)

    def __enter__(self) -> Checkpoint:
        """Itself: no file is held open."""
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing: no file is held open."""

    def to_dict(self) -> dict[str, Json]:
        """What `inspect` says, as its command prints it with ``--json``."""
        return self.inspect().to_dict()

    def close(self) -> None:
        """Nothing: no file is held open."""

    def __repr__(self) -> str:
        """A few lines: what it is and what it holds."""
        return str(inspection.inspect(self.index, step=None, saved=None))

    def _repr_html_(self) -> str:
        """The same for a notebook, with the first tensors."""
        return inspection.html_of(self.index, repr(self))

    def _unknown(self, fqn: str, noun: str) -> NoSuchEntry:
        """The error for a name that does not exist. Raises what is wrong when the name is lost."""
        self.index.select({fqn}).require_whole()
        if noun == "tensor" and fqn in self.sections:
            hint = f"It is a section: checkpoint.{fqn} has its tensors, under their full names."
        elif noun == "tensor" and self.index.object(fqn) is not None:
            hint = f"It is an object: checkpoint.value({fqn!r}) gives its value."
        else:
            return no_such_entry(self.index, fqn, noun)
        return NoSuchEntry(f"{self.path} has no tensor {fqn!r}.", hint=hint)


@in_python()
def open_checkpoint(
    path: str | os.PathLike[str],
    *,
    latest: bool = False,
    step: int | None = None,
    options: ReadOptions = ReadOptions(),
) -> Checkpoint:
    """The checkpoint that ``path`` means: a file, a directory, or a glob of rank files.

    In a folder of several, ``latest`` or ``step`` choose one. Only headers are read. What keeps it
    from being whole is in ``problems``, and raised by ``require_whole()``. Raises a CheckpointError
    for what is no checkpoint at all; for what is not there it is a FileNotFoundError, too.
    """
    place = os.fspath(path)
    only_one_of({"latest": latest, "step": step is not None})
    if latest or step is not None:
        place = formats.of_step(place, step)
    return Checkpoint(place, options=options)


open = open_checkpoint  # noqa: A001 (as gzip, zarr and PIL.Image call it)


@in_python()
def safe_open(
    filename: str | os.PathLike[str], framework: str = "pt", device: str = "cpu"
) -> Checkpoint:
    """A checkpoint of any format for code that uses safetensors' function of this name.

    Raises UsageError for another framework than torch and another device than the CPU.
    """
    if framework != "pt" or device != "cpu":
        raise UsageError(
            f"safe_open gives tensors of torch on the CPU, not of {framework!r} on {device!r}.",
            hint="`open_checkpoint(path)[name].numpy()` gives an array.",
        )
    return open_checkpoint(filename)


@in_python()
def load(path: str | os.PathLike[str]) -> dict[object, object]:
    """The state dict as it was saved: nested, every tensor read whole, objects as `value` has them.

    As ``torch.load`` of one file, for a checkpoint of any format; no pickle is run. The memory for
    all of it is needed at once. Raises what `value` raises, and what keeps it from being whole.
    """
    checkpoint = open_checkpoint(path)
    checkpoint.require_whole()

    def read(entry: Entry) -> object:
        return (
            checkpoint.value(entry.fqn)
            if isinstance(entry, ObjectEntry)
            else checkpoint[entry.fqn].torch()
        )

    state: object = nested(checkpoint.index.entry_tree(), read)
    if not isinstance(state, dict):
        raise UnsupportedError(f"{checkpoint.path} holds a {type(state).__name__}, not a dict.")
    return state


def load_file(path: str | os.PathLike[str]) -> dict[str, torch.Tensor]:
    """Every tensor of a checkpoint of any format, by its name, read whole.

    As safetensors' function of this name; `open_checkpoint` reads them one by one.
    """
    return open_checkpoint(path).state_dict()
