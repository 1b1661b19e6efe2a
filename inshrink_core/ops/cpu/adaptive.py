"""The adaptive range coder in numba: the reference, compiled.

Every index is proved in range: nodes are below ``2**n_bits``, contexts below `n_contexts` by the caller's
check, and the stream is read and written behind comparisons with its size. A carry never runs past the
first byte, because the code of a prefix and its range stay below one.
"""

from __future__ import annotations

from numba import njit

from inshrink_core.ops.reference.adaptive import adaptive_decode as _reference_decode
from inshrink_core.ops.reference.adaptive import adaptive_encode as _reference_encode
from inshrink_core.ops.registry import register
from inshrink_core.ops.schema import Backend

__all__: list[str] = []

register("adaptive_encode", Backend.CPU)(njit(nogil=True, cache=True)(_reference_encode))
register("adaptive_decode", Backend.CPU)(njit(nogil=True, cache=True)(_reference_decode))
