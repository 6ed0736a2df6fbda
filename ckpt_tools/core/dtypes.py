"""One table of element types: torch's name, safetensors' name, size in bits.

It knows names and sizes, never values. Names are torch's without the ``torch.`` prefix.

Every element here takes whole bytes. Floats of 4 and 6 bits are packed, as torch packs them: one
element of float4_e2m1fn_x2 is two floats in a byte, and a shape counts these pairs along the last
dimension. So every cut of a tensor falls between bytes. safetensors' header counts single floats:
torch's (3, 8) of float4_e2m1fn_x2 is F4 of [3, 16] there, 24 bytes in both. torch has no 6-bit
float; here four of them in three bytes are one element, named as torch would.
"""

from __future__ import annotations

from typing import NamedTuple

from ckpt_tools.errors import UnsupportedError, UsageError


class DType(NamedTuple):
    """One element type.

    ``name`` is torch's, ``safetensors`` the format's own or None when it cannot hold the type,
    ``bits`` the size of one element, ``kind`` one of float, int, uint, bool, complex, raw.
    ``packed`` elements of safetensors are one element here.
    """

    name: str
    safetensors: str | None
    bits: int
    kind: str
    packed: int = 1

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return self.bits // 8

    @property
    def holds_weights(self) -> bool:
        """Whether weights may be cast to it: a float with a sign, which float8_e8m0fnu lacks."""
        return self.kind == "float" and self.name != "float8_e8m0fnu"

    @property
    def is_in_torch(self) -> bool:
        """Whether torch has the type, so that its own formats can hold it."""
        return not self.name.startswith("float6_")


# safetensors names: the format's README (0.8), which has C64 but no 128-bit complex number.
_ROWS = (
    DType("float64", "F64", 64, "float"),
    DType("float32", "F32", 32, "float"),
    DType("float16", "F16", 16, "float"),
    DType("bfloat16", "BF16", 16, "float"),
    DType("float8_e4m3fn", "F8_E4M3", 8, "float"),
    DType("float8_e5m2", "F8_E5M2", 8, "float"),
    DType("float8_e4m3fnuz", "F8_E4M3FNUZ", 8, "float"),
    DType("float8_e5m2fnuz", "F8_E5M2FNUZ", 8, "float"),
    DType("float8_e8m0fnu", "F8_E8M0", 8, "float"),
    DType("float4_e2m1fn_x2", "F4", 8, "raw", 2),
    DType("float6_e2m3fn_x4", "F6_E2M3", 24, "raw", 4),
    DType("float6_e3m2fn_x4", "F6_E3M2", 24, "raw", 4),
    DType("int64", "I64", 64, "int"),
    DType("int32", "I32", 32, "int"),
    DType("int16", "I16", 16, "int"),
    DType("int8", "I8", 8, "int"),
    DType("uint64", "U64", 64, "uint"),
    DType("uint32", "U32", 32, "uint"),
    DType("uint16", "U16", 16, "uint"),
    DType("uint8", "U8", 8, "uint"),
    DType("bool", "BOOL", 8, "bool"),
    DType("complex32", None, 32, "complex"),
    DType("complex64", "C64", 64, "complex"),
    DType("complex128", None, 128, "complex"),
)

BY_NAME = {row.name: row for row in _ROWS}
BY_SAFETENSORS = {row.safetensors: row for row in _ROWS if row.safetensors is not None}

_SHORT = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16", "fp64": "float64"}
_SHORT |= {"half": "float16", "float": "float32", "double": "float64"}


def dtype_named(name: str) -> DType:
    """The element type of this torch name, e.g. ``bfloat16``.

    Raises UnsupportedError when the name is not in the table.
    """
    row = BY_NAME.get(name)
    if row is None:
        raise UnsupportedError(f"The element type {name!r} is not known here.")
    return row


def parse_dtype(text: str) -> DType | None:
    """The element type that a person means by ``bf16``, ``fp32``, ``float16``…, or None."""
    name = text.lower().removeprefix("torch.")
    return BY_NAME.get(_SHORT.get(name, name))


def require_dtype(dtype: object) -> DType:
    """The element type that a name such as ``bf16`` or a ``torch.dtype`` means.

    Raises UsageError for one that is not known.
    """
    known = dtype if isinstance(dtype, DType) else parse_dtype(str(dtype))
    if known is None:
        raise UsageError(f"{dtype!r} is not an element type; use bf16, fp16 or fp32.")
    return known
