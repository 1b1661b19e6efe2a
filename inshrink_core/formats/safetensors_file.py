"""Read the header of a safetensors file and check it against the specification."""

from __future__ import annotations

import math
import re
from functools import lru_cache
from typing import Any, Final

from inshrink_core.checkpoint import DTYPE_SIZES
from inshrink_core.errors import DamagedError, InputError, clipped
from inshrink_core.formats.disk import ReadableFile, damaged, parse_json
from inshrink_core.formats.state_tree import MAX_EXTENT, Placed

MAX_HEADER_BYTES: Final = 100_000_000
"""The specification's own bound (safetensors README, "Format")."""

MAX_TENSORS: Final = 1 << 17
"""Maximum number of tensors in one file. The largest models have fewer in total; 100,000 open in seconds."""

_DTYPE_PAIRS: Final = """BOOL:bool U8:uint8 I8:int8 I16:int16 U16:uint16 I32:int32 U32:uint32 I64:int64
    U64:uint64 F8_E4M3:float8_e4m3fn F8_E5M2:float8_e5m2 F8_E4M3FNUZ:float8_e4m3fnuz
    F8_E5M2FNUZ:float8_e5m2fnuz F8_E8M0:float8_e8m0fnu F16:float16 BF16:bfloat16 F32:float32 F64:float64
    C64:complex64 F4:float4_e2m1fn_x2"""

_MAX_CACHED_BYTES: Final = 1 << 20
"""Largest header that is kept for the next checkpoint: about 10,000 tensors."""

SAFETENSORS_DTYPES: Final[dict[str, str]] = dict(re.findall(r"(\w+):(\w+)", _DTYPE_PAIRS))
"""The format's dtype names mapped to ours; complex128 has none."""

_BITS: Final = {"F4": 4, "F6_E2M3": 6, "F6_E3M2": 6}
"""Bits per element of dtypes below one byte. PyTorch has no 6-bit dtype, so these are read as bytes."""


def packed_shape(dtype: str, shape: tuple[int, ...]) -> tuple[int, ...] | None:
    """Return the shape in bytes for elements smaller than a byte; None if the last byte is not full.

    The last dimension counts bytes. If rows do not end at a byte, the shape is one row.
    """
    bits = _BITS[dtype]
    if shape and shape[-1] * bits % 8 == 0:
        return (*shape[:-1], shape[-1] * bits // 8)
    n_bits = math.prod(shape) * bits
    return None if n_bits % 8 else (n_bits // 8,)


def looks_like_safetensors(first_bytes: bytes, file_nbytes: int) -> bool:
    """Return whether a file of a given size with these first bytes may be a safetensors file."""
    if len(first_bytes) < 9:
        return False
    n_header = int.from_bytes(first_bytes[:8], "little")
    return first_bytes[8:9] == b"{" and 2 <= n_header <= max(file_nbytes, MAX_HEADER_BYTES)


def _refuse_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) != len(pairs):
        raise ValueError("a name appears twice")
    return made


def _placed(name: str, entry: object, data_offset: int) -> Placed:
    named = f"tensor '{name[:80]}'"
    if not isinstance(entry, dict):
        raise DamagedError(f"the header's entry '{name[:80]}' is no object")
    theirs = str(entry.get("dtype"))
    dtype = SAFETENSORS_DTYPES.get(theirs, "uint8" if theirs in _BITS else None)
    if dtype is None:
        facts = {"found": clipped(theirs), "expected": ", ".join([*SAFETENSORS_DTYPES, *list(_BITS)[1:]])}
        remedy = "a newer Inshrink may know it; or save the tensor in one of these"
        raise InputError(f"{named} has a dtype that is not known", remedy=remedy, **facts)
    shape, span = entry.get("shape"), entry.get("data_offsets")
    if not isinstance(shape, list) or len(shape) > 64 or not all(type(n) is int and n >= 0 for n in shape):
        raise DamagedError(f"{named} has no valid shape")
    if not isinstance(span, list) or len(span) != 2 or not all(type(n) is int and n >= 0 for n in span):
        raise DamagedError(f"{named} has no valid offsets")
    if theirs in _BITS and (shape := packed_shape(theirs, tuple(shape))) is None:
        raise DamagedError(f"{named} does not fill its last byte")
    nbytes = reach = DTYPE_SIZES[dtype]
    for extent in shape:
        nbytes *= extent
        # An extent of 0 must not hide an extent too large for PyTorch.
        reach *= max(extent, 1)
        if reach > MAX_EXTENT:
            raise DamagedError(f"{named} is larger than any file")
    if span[1] - span[0] != nbytes:
        facts = {"found": f"{span[1] - span[0]}", "expected": f"{nbytes} bytes"}
        raise DamagedError(f"{named} does not fill its span", **facts)
    return Placed(dtype, tuple(shape), None, data_offset + span[0], nbytes)


def read_header(file: ReadableFile) -> tuple[list[tuple[str, Placed]], dict[str, str]]:
    """Return names and places in header order, and the metadata, without reading tensor bytes.

    Parameters
    ----------
    file
        The open file.

    Raises
    ------
    DamagedError
        The header is truncated, larger than 100 MB or invalid JSON; or a tensor is outside the file, overlaps
        another or leaves a gap.
    InputError
        A tensor has an unknown dtype.
    """
    n_header = int.from_bytes(file.read(0, 8), "little")
    if n_header > MAX_HEADER_BYTES or 8 + n_header > file.nbytes:
        expected = f"at most {min(MAX_HEADER_BYTES, file.nbytes - 8)}"
        what = "the header is larger than allowed"
        raise damaged(file, what, expected=expected, found=f"{n_header} bytes")
    read = _parse if n_header <= _MAX_CACHED_BYTES else _parse.__wrapped__
    text = file.read(8, n_header)
    try:
        return read(text, file.nbytes)
    except (DamagedError, InputError) as error:
        what = f"{error.where}: {error.what}" if error.where else error.what
        facts = {"expected": error.expected, "found": error.found}
        if isinstance(error, DamagedError):
            raise damaged(file, what, **facts) from error
        raise InputError(what, where=str(file.path), remedy=error.remedy, **facts) from error


# The checkpoints of a run have equal headers.
@lru_cache(maxsize=64)
def _parse(text: bytes, file_nbytes: int) -> tuple[list[tuple[str, Placed]], dict[str, str]]:
    """Return the content of a header; errors do not name the file."""
    header, end = parse_json(text, "the header", _refuse_duplicates), 8 + len(text)
    if not isinstance(header, dict):
        raise DamagedError("the header is no JSON object")
    if len(header) > MAX_TENSORS:
        expected, found = f"at most {MAX_TENSORS:,}", f"{len(header):,}"
        raise DamagedError("it has more tensors than are read", expected=expected, found=found)
    metadata = header.pop("__metadata__", None) or {}
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise DamagedError("the header's __metadata__ is no table of strings")
    tensors = [(name, _placed(name, entry, end)) for name, entry in header.items()]
    for name, placed in sorted(tensors, key=lambda item: (item[1].offset, item[1].span)):
        if placed.offset != end:
            what = f"tensor '{name[:80]}' overlaps another or leaves a gap"
            raise DamagedError(what, found=f"offset {placed.offset}", expected=f"{end}")
        end += placed.span
    if end != file_nbytes:
        what, found = "the file does not end with its last tensor", f"{file_nbytes} bytes"
        raise DamagedError(what, found=found, expected=f"{end}")
    return tensors, metadata
