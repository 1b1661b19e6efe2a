"""How kernels are compiled by numba: for a short first call, which is what a user waits for.

Kernels get arrays and give none: without reference counts, C entry points and tests for division by zero
the code to compile is half as long. What only kernels call (`part`) has no entry point for Python either,
and loops need none of numba's rewriting of array expressions. Nothing is parallel inside, threads scale,
and `fastmath` is never used: the same bits everywhere.
"""

from __future__ import annotations

import logging
import time
from typing import Any

import numpy as np
from llvmlite import ir  # type: ignore[import-untyped, unused-ignore]
from numba import njit
from numba.core import cgutils, event
from numpy.typing import NDArray
from torch import Tensor

from inshrink_core.ops.cpu.machine import KernelCache, choose_level, turn

UInt8s = NDArray[np.uint8]
UInt16s = NDArray[np.uint16]
UInt32s = NDArray[np.uint32]
Int16s = NDArray[np.int16]
Int32s = NDArray[np.int32]
Int64s = NDArray[np.int64]
Float32s = NDArray[np.float32]
Float64s = NDArray[np.float64]
"""Arrays as kernels take them."""

choose_level()


def compiled(**options: Any) -> Any:
    """Return what compiles a function at its first call, or takes machine code that was made before."""

    def decorate(function: Any) -> Any:
        kernel: Any = njit(**options)(function)
        if not hasattr(kernel, "enable_caching"):  # compiling is switched off
            return kernel
        compile_now, kernel._cache = kernel.compile, KernelCache(function)

        def compile_in_turn(signature: Any) -> Any:
            with turn(kernel._cache):
                return compile_now(signature)

        kernel.compile = compile_in_turn
        return kernel

    return decorate


_OPTIONS: dict[str, Any] = {
    "nogil": True,
    "error_model": "numpy",
    "no_cfunc_wrapper": True,
    "_nrt": False,
}

kernel = compiled(**_OPTIONS)
"""Decorates a function that makes no arrays."""

brief = compiled(**{**_OPTIONS, "nogil": False}, no_rewrites=True)
"""Decorates a kernel that works on tables: it keeps the GIL, because handing that to another thread and
waiting for it again takes longer than most of its calls."""

part = compiled(**_OPTIONS, no_cpython_wrapper=True, no_rewrites=True)
"""Decorates a function that kernels call."""

inlined = compiled(**_OPTIONS, inline="always")
"""Decorates a function that one kernel calls at one place."""


@part
def any_large(tokens: UInt8s, least: np.uint8) -> np.bool:  # pragma: no cover - compiled
    """Whether one of some tokens is large: those alone have a bit from that of the least on."""
    joined = np.uint8(0)
    for i in range(tokens.size):
        joined = np.uint8(joined | tokens[i])
    return joined >= least


def given(values: Tensor | None, absent: NDArray[Any]) -> tuple[NDArray[Any], int]:
    """Return an array and 1; or values for one chunk, which are read again and again, and 0."""
    return (absent, 0) if values is None else (values.numpy(), 1)


def unsigned(words: Tensor) -> NDArray[Any]:
    """Return unsigned words, so that right shifts bring in zeros and differences wrap."""
    values: NDArray[Any] = words.numpy()
    return values.view(f"u{values.itemsize}")


def load(b: Any, array: Any, place: Any, kind: Any) -> Any:
    """Read a vector of a kind from a place of an array, in LLVM's language: numba has no vectors."""
    return b.load(b.bitcast(b.gep(array, [place]), kind.as_pointer()), align=1)


def store(b: Any, value: Any, array: Any, place: Any) -> None:
    """Write a vector to a place of an array."""
    b.store(value, b.bitcast(b.gep(array, [place]), value.type.as_pointer()), align=1)


def call(b: Any, name: str, kind: Any, *arguments: Any) -> Any:
    """Call a function of LLVM's own that returns a kind."""
    signature = ir.FunctionType(kind, [argument.type for argument in arguments])
    insert: Any = cgutils.get_or_insert_function
    return b.call(insert(b.module, signature, name), arguments)


_REPORT_AFTER = 1.0
"""Seconds after which a user wonders what is going on."""


class _Compiling(event.Listener):  # type: ignore[misc, unused-ignore]
    """Says once, in the log, that kernels are being compiled, where that takes a second: the first use."""

    def __init__(self) -> None:
        self._began, self._reported = 0.0, False

    def on_start(self, _event: Any) -> None:
        """Begin with a kernel."""
        self._began = self._began or time.perf_counter()

    def on_end(self, _event: Any) -> None:
        """Be done with one."""
        if not self._reported and time.perf_counter() - self._began > _REPORT_AFTER:
            self._reported = True
            logging.getLogger(__name__).info("compiling kernels, once after an installation")


_event: Any = event
_event.register("numba:compile", _Compiling())
