"""The demo's verdict: is every exported tensor the one that the training job had in memory?

    python scripts/demo_compare.py EXPORTED TRAINED.json

Loads the folder with safetensors alone, as any user of the weights would.
"""

import hashlib
import json
import sys
from pathlib import Path

from safetensors.torch import load_file
from torch import Tensor, uint8


def exported_tensors(folder: Path) -> dict[str, Tensor]:
    """Every tensor of every .safetensors file in `folder`."""
    tensors: dict[str, Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        tensors.update(load_file(file))
    return tensors


def described(tensor: Tensor) -> dict[str, object]:
    """A whole tensor in the words of the job's own file."""
    raw = tensor.contiguous().view(uint8).numpy().tobytes()
    return {
        "dtype": str(tensor.dtype).removeprefix("torch."),
        "shape": list(tensor.shape),
        "sha256": hashlib.sha256(raw).hexdigest(),
    }


def main(exported: str, trained: str) -> int:
    """Prints the verdict; 1 when anything differs, is absent or is too much."""
    said = json.loads(Path(trained).read_text())
    found = {fqn: described(tensor) for fqn, tensor in exported_tensors(Path(exported)).items()}
    wrong = [fqn for fqn in sorted({*said, *found}) if said.get(fqn) != found.get(fqn)]
    if wrong or not found:
        print(f"NOT the tensors that were trained: {', '.join(wrong) or 'nothing was exported'}")
        return 1
    print(f"All {len(found)} tensors are, byte for byte, what the training job had in memory.")
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
