"""Numba options of the kernels, chosen for a short first call.

Kernels take arrays and return none. Without reference counts, C entry points and tests for division by zero
the code to compile is half as long. A function that only kernels call (`part`) has no Python entry point.
Loops do without numba's rewriting of array expressions. Kernels never use numba's parallel loops, because
threads already work on different tensors, and never `fastmath`, so results are bit-identical on every
processor.
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
"""Array types of the kernels' arguments."""

choose_level()


def compiled(**options: Any) -> Any:
    """Return a decorator that compiles a function at its first call or loads machine code built earlier."""

    def decorate(function: Any) -> Any:
        kernel: Any = njit(**options)(function)
        if not hasattr(kernel, "enable_caching"):  # NUMBA_DISABLE_JIT is set
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
"""Decorate a kernel that allocates no arrays."""

brief = compiled(**{**_OPTIONS, "nogil": False}, no_rewrites=True)
"""Decorate a kernel that works on tables. It keeps the GIL, because releasing and reacquiring the GIL takes
longer than most of its calls."""

part = compiled(**_OPTIONS, no_cpython_wrapper=True, no_rewrites=True)
"""Decorate a function that only kernels call."""

inlined = compiled(**_OPTIONS, inline="always")
"""Decorate a function that one kernel calls at one place."""


@part
def any_large(tokens: UInt8s, least: np.uint8) -> np.bool:  # pragma: no cover - compiled
    """Return whether any token is at least `least`, a power of two."""
    joined = np.uint8(0)
    for i in range(tokens.size):
        joined = np.uint8(joined | tokens[i])
    return joined >= least


def given(values: Tensor | None, absent: NDArray[Any]) -> NDArray[Any]:
    """Return the array of `values`, or a stand-in of one chunk, which kernels read again for each chunk."""
    return absent if values is None else values.numpy()


def unsigned(words: Tensor) -> NDArray[Any]:
    """Return the words as unsigned integers, so that right shifts insert zeros and differences wrap."""
    values: NDArray[Any] = words.numpy()
    return values.view(f"u{values.itemsize}")


def load(b: Any, array: Any, place: Any, kind: Any) -> Any:
    """Load a vector from an array in LLVM IR, because numba has no vectors."""
    return b.load(b.bitcast(b.gep(array, [place]), kind.as_pointer()), align=1)


def store(b: Any, value: Any, array: Any, place: Any) -> None:
    """Store a vector to an array in LLVM IR."""
    b.store(value, b.bitcast(b.gep(array, [place]), value.type.as_pointer()), align=1)


def call(b: Any, name: str, kind: Any, *arguments: Any) -> Any:
    """Call an LLVM intrinsic that returns a value of type `kind`."""
    signature = ir.FunctionType(kind, [argument.type for argument in arguments])
    insert: Any = cgutils.get_or_insert_function
    return b.call(insert(b.module, signature, name), arguments)


_REPORT_AFTER = 1.0
"""Seconds of compilation after which a log message explains the wait."""


class _Compiling(event.Listener):  # type: ignore[misc, unused-ignore]
    """Log once that kernels are being compiled, if the compilation takes longer than `_REPORT_AFTER`."""

    def __init__(self) -> None:
        self._began, self._reported = 0.0, False

    def on_start(self, _event: Any) -> None:
        """Note the start of a compilation."""
        self._began = self._began or time.perf_counter()

    def on_end(self, _event: Any) -> None:
        """Note the end of a compilation."""
        if not self._reported and time.perf_counter() - self._began > _REPORT_AFTER:
            self._reported = True
            logging.getLogger(__name__).info("compiling kernels, once after an installation")


_event: Any = event
_event.register("numba:compile", _Compiling())
