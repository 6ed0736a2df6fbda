"""Records the state dicts of optimizers of other packages, as torch's own functions give them.

The test data tests/data/optimizers.pt.xz is made with it, in an environment that has the packages:

    pip install pytorch_optimizer schedulefree bitsandbytes
    PYTHONPATH=. python scripts/record_optimizers.py tests/data/optimizers.pt.xz

For each optimizer, before the first step and after two: numbered (`optimizer.state_dict()`), nested
and flattened (`get_optimizer_state_dict`). What a package cannot do with a model this small, or
torch with the package's optimizer, is left out and named.
"""

from __future__ import annotations

import copy
import io
import lzma
import sys
import warnings
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from importlib.metadata import version
from pathlib import Path

import torch
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict

from tests.transforms.optimizers import (
    Make,
    Model,
    StateDict,
    flattened_by_torch,
    names_in_order,
    nested_of,
    numbered_of,
    same,
    stepped,
    two_groups,
)

PACKAGES = ("torch", "pytorch_optimizer", "schedulefree", "bitsandbytes")
# With a method of its own in place of `step`, or torch's own under another name.
_NOT_ASKED = {"lomo", "adalomo", "adadelta", "adafactor", "adam", "adamax", "adamw", "asgd"}
_NOT_ASKED |= {"lbfgs", "nadam", "radam", "rmsprop", "sgd"}


def optimizers() -> Iterator[tuple[str, Make]]:
    """The optimizers of the packages that are installed, by name."""
    import bitsandbytes
    import pytorch_optimizer
    import schedulefree

    for name in pytorch_optimizer.get_supported_optimizers():
        if name not in _NOT_ASKED:
            yield f"pytorch_optimizer.{name}", pytorch_optimizer.load_optimizer(name)
    for name in ("AdamWScheduleFree", "RAdamScheduleFree", "SGDScheduleFree"):
        yield f"schedulefree.{name}", getattr(schedulefree, name)
    for name in ("Adam8bit", "AdEMAMix8bit", "Lion8bit", "RMSprop8bit"):
        kind = getattr(bitsandbytes.optim, name)
        yield f"bitsandbytes.{name}", partial(kind, min_8bit_size=1)


def recorded(make: Make, times: int) -> StateDict:
    """One optimizer's state dicts after so many steps. Raises what the package or torch raises."""
    model = Model()
    groups = two_groups(model)
    try:
        built = make(groups)
    except TypeError:
        built = make(groups, lr=0.01)  # type: ignore[call-arg]  # bitsandbytes' asks for it
    except ValueError:  # Muon's kin ask which group has matrices
        built = make([groups[0] | {"use_muon": False}, groups[1] | {"use_muon": True}])
    getattr(built, "train", lambda: None)()
    stepped(model, built, times)
    nested, flattened = nested_of(model, built), None
    with suppress(NotImplementedError):  # of lists and of what is no tensor and no number
        flattened = flattened_by_torch(nested)
    if times:  # torch itself makes a step where none was made
        options = StateDictOptions(flatten_optimizer_state_dict=True)
        if not same(dict(get_optimizer_state_dict(model, built)), nested):
            raise ValueError("torch gives another nested state dict")
        if flattened is not None:
            flattened = dict(get_optimizer_state_dict(model, built, options=options))
    found = {
        "names": names_in_order(model, built),
        "numbered": numbered_of(built),
        "nested": nested,
        "flattened": flattened,
    }
    data = io.BytesIO()
    torch.save(found, data)
    data.seek(0)
    torch.load(data, weights_only=True)
    if any(package.encode() in data.getvalue() for package in PACKAGES[1:]):
        raise ValueError("it has tensors of a class of the package's")
    return found


def main() -> None:
    """Record all, and write them into the file that was named."""
    warnings.simplefilter("ignore")
    found: dict[str, list[StateDict]] = {}
    for name, make in optimizers():
        try:
            found[name] = [copy.deepcopy(recorded(make, times)) for times in (0, 2)]
        except Exception as error:  # noqa: BLE001 (of any package)
            print(f"left out {name}: {type(error).__name__}: {error}"[:160], file=sys.stderr)
    versions = {package: version(package) for package in PACKAGES}
    data = io.BytesIO()
    torch.save({"versions": versions, "optimizers": found}, data)
    Path(sys.argv[1]).write_bytes(lzma.compress(data.getvalue(), preset=9))
    print(f"{len(found)} optimizers")


if __name__ == "__main__":
    main()
