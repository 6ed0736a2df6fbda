"""What a file is by its first bytes, and files and folders of other tools: what to use for them.

They are known by their names and first bytes alone; nothing of them is read.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from typing import Literal, NamedTuple

from ckpt_tools.errors import CheckpointError, UnreadableError, UnsupportedError
from ckpt_tools.storage import paths

HEAD = 512  # bytes that tell what a file is
_MAX_LOOKED_AT = 200


class _Tool(NamedTuple):
    """What something is, and what to use for it."""

    what: str
    way: str


_DEEPSPEED = _Tool(
    "a DeepSpeed ZeRO checkpoint",
    "Use zero_to_fp32.py or zero_to_torch.py (--dtype, --safe_serialization), which DeepSpeed puts "
    "beside the checkpoint, or "
    "deepspeed.utils.zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint; what they write is "
    "read here.",
)
_UNIVERSAL = _Tool(
    "a DeepSpeed universal checkpoint",
    "Load it with DeepSpeed (load_universal), or use zero_to_fp32.py or zero_to_torch.py beside "
    "the ZeRO checkpoint that it was made from.",
)
_MEGATRON = _Tool(
    "a Megatron checkpoint, whose tensors are cut, flattened and renamed by Megatron's own rules",
    "Use Megatron-LM's or Megatron-Bridge's own converter.",
)
_NANOTRON = _Tool(
    "a nanotron checkpoint, with a file for each parameter and tensor-parallel rank",
    "Use nanotron's examples/llama/convert_nanotron_to_hf.py; what that writes is read here.",
)
_ORBAX = _Tool("an Orbax checkpoint", "Use orbax-checkpoint (ocp.PyTreeCheckpointer().restore).")
_TORCHSNAPSHOT = _Tool(
    "a torchsnapshot checkpoint",
    "Use torchsnapshot.Snapshot(path).get_state_dict_for_key, and save what it gives with "
    "torch.save.",
)
_TENSORFLOW = _Tool(
    "a TensorFlow checkpoint", "Use tf.train.load_checkpoint, or transformers' from_tf=True."
)
_MSGPACK = _Tool(
    "a msgpack file of Flax",
    "Use flax.serialization.msgpack_restore, or transformers' from_flax=True.",
)
_GGUF = _Tool("a GGUF file of llama.cpp", "Use the gguf package (gguf.GGUFReader).")
_NPZ = _Tool("an npz archive of numpy", "Use numpy.load, and save its arrays as tensors.")
_NPY = _Tool("an npy array of numpy", "Use numpy.load, and save it as a tensor.")
_HDF5 = _Tool("an HDF5 file (Keras, TensorFlow)", "Use h5py.File, or Keras' load_weights.")
_ONNX = _Tool("an ONNX model", "Use onnx.load and onnx.numpy_helper.to_array.")
_KERAS = _Tool("a Keras model", "Use keras.saving.load_model.")
_NEMO = _Tool("a NeMo archive", "Unpack it with tar -xf; the weights inside are read here.")
_PACKED = _Tool("a packed archive", "Unpack it (tar -xf, unzip, gunzip), and give what was in it.")
_LITE = _Tool(
    "a model compiled for devices (TFLite, Core ML, TensorRT)",
    "Use the model that it was compiled from.",
)
_PADDLE = _Tool("a PaddlePaddle checkpoint", "Use paddle.load.")

# A folder that has one of these names is the tool's, whatever else is in it. Patterns are compiled
# when they are first needed: every command imports this.
_FOLDERS = (
    (_DEEPSPEED, r"(bf16_|fp16_)?zero_pp_rank_\d+.*states\.pt|.*[-_]model_states\.pt"),
    (_ORBAX, r"_CHECKPOINT_METADATA|_METADATA|ocdbt\.process_\d+|manifest\.ocdbt"),
    (_TORCHSNAPSHOT, r"\.snapshot_metadata"),
    # One rank alone has whole tensors, which are read.
    (_MEGATRON, r"mp_rank_(?!00$)\d+(_\d+)*"),
)
# And a folder with a JSON file that begins with this: the tool, the file, and what is said of it.
_JSON_FILES = (
    # That of torch_dist is DCP, and read.
    (_MEGATRON, "metadata.json", rb'"sharded_backend"\s*:\s*"(?!torch_dist")', "a sharded_backend"),
    (_NANOTRON, "checkpoint_metadata.json", rb'"tp"\s*:\s*\d', "a count of tp ranks"),
)
_FILES = (
    (_DEEPSPEED, r"(bf16_|fp16_)?zero_pp_rank_\d+.*states\.pt|layer_\d+-.*model_states\.pt"),
    (_ORBAX, r"_CHECKPOINT_METADATA|manifest\.ocdbt"),
    (_TORCHSNAPSHOT, r"\.snapshot_metadata"),
    (_MSGPACK, r".*\.msgpack(\.index\.json)?"),
    (_TENSORFLOW, r"saved_model\.pb(txt)?|.*\.data-\d{5}-of-\d{5}|.*\.ckpt.*\.index"),
    (_GGUF, r".*\.(gguf|ggml)"),
    (_NEMO, r".*\.nemo"),
    (_PACKED, r".*\.(tgz|tar\.(gz|bz2|xz|zst))"),
    (_LITE, r".*\.(tflite|mlmodel|engine|plan)"),
    (_NPZ, r".*\.npz"),
    (_NPY, r".*\.npy"),
    (_HDF5, r".*\.(h5|hdf5)"),
    (_ONNX, r".*\.onnx"),
    (_KERAS, r".*\.keras"),
    (_PADDLE, r".*\.(pdparams|pdopt)"),
)
_OfTool = Literal["packed", "gguf", "npy", "hdf5"]
_Lost = Literal["empty", "zeros", "lfs", "html"]
Kind = Literal["safetensors", "zip", "pickle", "tar", "json", "unknown"] | _OfTool | _Lost
_MAGICS: tuple[tuple[bytes, Kind], ...] = (
    (b"PK\x03\x04", "zip"),
    (b"PK\x05\x06", "zip"),
    (b"\x80\x02", "pickle"),
    (b"\x80\x03", "pickle"),
    (b"\x80\x04", "pickle"),
    (b"\x80\x05", "pickle"),
    (b"version https://git-lfs", "lfs"),
    (b"\x1f\x8b", "packed"),
    (b"\xfd7zXZ", "packed"),
    (b"\x28\xb5\x2f\xfd", "packed"),
    (b"GGUF", "gguf"),
    (b"\x93NUMPY", "npy"),
    (b"\x89HDF\r\n\x1a\n", "hdf5"),
)
_TOOLS: dict[Kind, _Tool] = {"packed": _PACKED, "gguf": _GGUF, "npy": _NPY, "hdf5": _HDF5}
# What is said of a file that should be another one, and what to do.
_SAID: dict[Kind, tuple[str, str | None]] = {
    "safetensors": ("is a safetensors file", None),
    "zip": ("begins with a zip archive, as torch.save writes", None),
    "pickle": ("is a pickle, as old torch.save wrote", None),
    "tar": ("is a tar archive", None),
    "empty": ("is empty", "The save or the copy stopped before it wrote anything."),
    "zeros": ("begins with zeros", "It was never written: a crash, a full disk."),
    "lfs": (
        "is a Git LFS pointer: a few lines of text, and the file itself was never fetched",
        "Fetch it in its repository: git lfs pull.",
    ),
    "html": ("is a web page (HTML or XML)", "The download went wrong; fetch the file again."),
    "json": ("is a JSON file", None),
    "unknown": ("does not begin like one", None),
    **{kind: (f"is {tool.what}", tool.way) for kind, tool in _TOOLS.items()},
}
_OLD_TORCH = (b"sys_info", b"pickle", b"storages", b"tensors")
_CHECKPOINTS = (b".pt", b".pth", b".bin", b".ckpt", b".safetensors", b".distcp", b"/.metadata")


def sniff(head: bytes) -> Kind:
    """What a file is, by its first bytes: `HEAD` of them for a tar, 64 for anything else."""
    if not any(head):
        return "zeros" if head else "empty"
    if head[8:9] == b"{" and int.from_bytes(head[:8], "little") < 1 << 32:
        return "safetensors"  # first: the length of its header may be any magic number
    for magic, kind in _MAGICS:
        if head.startswith(magic):
            return kind
    if head[257:262] == b"ustar":
        return "tar"
    text = head.lstrip()[:1]
    return "html" if text == b"<" else "json" if text == b"{" else "unknown"


def not_a(wanted: str, path: str, kind: Kind, *, hint: str | None = None) -> UnreadableError:
    """The error for a file that should be ``wanted``, and is of this kind.

    ``hint`` is what to do where the kind alone does not tell.
    """
    what, way = _SAID[kind]
    return UnreadableError(f"{path} is not a {wanted}: it {what}.", hint=hint or way)


def refuse_foreign(path: str) -> None:
    """Raise UnsupportedError, naming the tool, for a file or folder in another tool's format.

    Raises UnreadableError for a pointer of Git LFS, in whose place the file never came.
    """
    if paths.is_dir(path):
        tool_and_sign = _of_folder(path)
        if tool_and_sign is not None:
            raise _refusal(path, tool_and_sign[0], f" (it holds {tool_and_sign[1]})")
    elif paths.is_file(path):
        head = paths.head(path, HEAD)
        if sniff(head) == "lfs":
            raise lfs_pointer(path)
        tool = _of_name(os.path.basename(path)) or _of_bytes(head)
        if tool is not None:
            raise _refusal(path, tool, "")


def refuse_inside(folder: str) -> None:
    """Raise UnsupportedError for a folder without a checkpoint that has a file of another tool."""
    for name in paths.names_in(folder)[:_MAX_LOOKED_AT]:
        tool = _of_name(name)
        if tool is not None:
            raise _refusal(folder, tool, f" (it holds {name})")


def is_foreign(path: str) -> bool:
    """Whether a file or folder found beside others is of another tool, by its names alone."""
    if paths.is_dir(path):
        return _of_folder(path) is not None
    return _of_name(os.path.basename(path)) is _DEEPSPEED


def lfs_pointer(path: str) -> UnreadableError:
    """The error for a pointer of Git LFS."""
    what, way = _SAID["lfs"]
    return UnreadableError(f"{path} {what}.", hint=way)


def _refusal(path: str, tool: _Tool, seen: str) -> CheckpointError:
    return UnsupportedError(f"{path} is {tool.what}{seen}; it is not read here.", hint=tool.way)


def _of_folder(folder: str) -> tuple[_Tool, str] | None:
    """The tool that wrote a folder, and the name that says so."""
    names = paths.names_in(folder)[:_MAX_LOOKED_AT]
    for tool, name, sign, said in _JSON_FILES:
        if name in names and re.search(sign, paths.head(os.path.join(folder, name), 1024)):
            return tool, f"{said} in its {name}"
    shown = _sign_of_universal(folder, names) if names else None
    if shown is not None:
        return _UNIVERSAL, shown
    for tool, pattern in _FOLDERS:
        seen = next((name for name in names if re.fullmatch(pattern, name)), None)
        if seen is not None:
            return tool, seen
    return None


def _sign_of_universal(folder: str, names: Sequence[str]) -> str | None:
    """What shows that a folder is of DeepSpeed's universal format: the step's, or one below it.

    Its folder ``zero`` has optimizer_state.pt, and for each parameter a folder with fp32.pt,
    exp_avg.pt and such.
    """
    sign = next((name for name in ("zero", "optimizer_state.pt") if name in names), names[0])
    place = paths.absolute(folder)
    known = [os.path.join(place, "zero")] if sign == "zero" else [place, os.path.dirname(place)]
    zero = next((path for path in known if os.path.basename(path) == "zero"), None)
    is_one = zero is not None and paths.is_file(os.path.join(zero, "optimizer_state.pt"))
    return sign if is_one else None


def _of_name(name: str) -> _Tool | None:
    return next((tool for tool, pattern in _FILES if re.fullmatch(pattern, name)), None)


def _of_bytes(head: bytes) -> _Tool | None:
    """The tool that wrote a file which begins so; an npz is a zip whose first record is an npy.

    A zip that begins with a checkpoint's file is packed by hand, and so is a tar that torch 0.1
    did not write.
    """
    kind = sniff(head)
    if kind == "zip":
        name = head[30 : 30 + int.from_bytes(head[26:28], "little")]
        if name.endswith(b".npy") and b"/" not in name:
            return _NPZ
        return _PACKED if name.endswith(_CHECKPOINTS) else None
    if kind == "tar":
        return None if head[:100].rstrip(b"\0") in _OLD_TORCH else _PACKED
    return _TOOLS.get(kind)
