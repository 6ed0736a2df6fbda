"""The conversions of parity through the library, on a machine that has torch and no click.

It takes the arguments that parity gives the command line, and knows no others.
"""

from __future__ import annotations

import argparse
import sys

from ckpt_tools import api
from ckpt_tools.convert.export import ExportOptions
from ckpt_tools.convert.reshard import ReshardOptions
from ckpt_tools.convert.write import WriteOptions
from ckpt_tools.core.mesh_spec import parse_mesh, parse_rule
from ckpt_tools.formats import read_index
from ckpt_tools.transforms.optimizer import ParamNames
from ckpt_tools.transforms.param_names import parse_names


def main() -> None:
    """Do what the arguments say."""
    asked = _arguments()
    index = read_index(asked.ckpt)
    write = WriteOptions(force=True)
    if asked.verb == "export":
        options = ExportOptions(format="torch", keep_names=True, only=None)
        api.export(index, asked.out, options=options, write=write)
        return
    mesh = parse_mesh(asked.to_mesh)
    resharding = ReshardOptions(
        mesh=mesh,
        rules=tuple(parse_rule(text, mesh) for text in asked.place),
        format=asked.format,
        device_type=asked.device_type,
        layout=asked.layout,
        param_names=_names(asked.param_names),
    )
    api.reshard(index, asked.out, options=resharding, write=write)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("verb")
    parser.add_argument("ckpt")
    parser.add_argument("-o", dest="out")
    parser.add_argument("--place", action="append", default=[])
    parser.add_argument("--device-type", default="cuda")
    for flag in ("--to-mesh", "--format", "--layout", "--param-names", "--only"):
        parser.add_argument(flag)
    for flag in ("--force", "--keep-names"):
        parser.add_argument(flag, action="store_true")
    return parser.parse_args(sys.argv[1:])


def _names(path: str | None) -> ParamNames | None:
    if path is None:
        return None
    with open(path) as file:
        return ParamNames(parse_names(file.read(), where=path))


if __name__ == "__main__":
    main()
