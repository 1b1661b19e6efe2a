"""How kernels are compiled by numba: for a short first call, which is what a user waits for.

Kernels get arrays and give none: without reference counts, C entry points and tests for division by zero
the code to compile is half as long. What only kernels call (`part`) has no entry point for Python either,
and loops need none of numba's rewriting of array expressions. Nothing is parallel inside, threads scale,
and `fastmath` is never used: the same bits everywhere.
"""

from __future__ import annotations

from typing import Any

from numba import njit

_njit: Any = njit

_OPTIONS: dict[str, Any] = {
    "nogil": True,
    "cache": True,
    "error_model": "numpy",
    "no_cfunc_wrapper": True,
    "_nrt": False,
}

kernel = _njit(**_OPTIONS)
"""Decorates a function that makes no arrays."""

brief = _njit(**{**_OPTIONS, "nogil": False}, no_rewrites=True)
"""Decorates a kernel that works on tables: it keeps the GIL, because handing that to another thread and
waiting for it again takes longer than most of its calls."""

part = _njit(**_OPTIONS, no_cpython_wrapper=True, no_rewrites=True)
"""Decorates a function that kernels call."""

inlined = _njit(**_OPTIONS, inline="always")
"""Decorates a function that one kernel calls at one place."""
