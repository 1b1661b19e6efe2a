"""Machine code of kernels that is built ahead of time and runs on other machines too.

numba's cache is bound to the exact processor that built it. This module compiles kernels for a level of
x86-64 instead, if the processor reaches one. ``python -m inshrink_core.ops`` writes the machine code of every
level into `folder`. The folder's name is a digest of the sources and versions that the code depends on, so
code of other sources or versions is never loaded. Kernels without prebuilt code are compiled at first use
into numba's cache.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import llvmlite  # type: ignore[import-untyped, unused-ignore]
import numba
import numpy as np
from llvmlite import binding
from numba.core import caching, registry
from numba.core.compiler_lock import global_compiler_lock

from inshrink_core.execution.files import locked

LEVELS: Final = {
    "x86-64-v4": ("avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl", "avx512vnni"),
    "x86-64-v3": ("avx2", "bmi", "bmi2", "f16c", "fma", "lzcnt", "movbe"),
}
"""Levels of x86-64 and the processor features that each requires, highest level first."""

FEATURES: Final = {"x86-64-v4": "+avx512vnni,-prefer-256-bit"}
"""LLVM features that a level's kernels use beyond the level: AVX-512 with VNNI and full vectors."""

WRITE: Final = "INSHRINK_WRITE_KERNELS"
"""Environment variable; a process that has it set writes its kernels into `folder`."""

_caching: Any = caching
_registry: Any = registry

_OPS: Final = Path(__file__).parent.parent
_SOURCES: Final = ("ops", "coding", "quantization")


@functools.cache
def folder() -> Path:
    """Return the folder with the machine code for these sources and versions."""
    digest = hashlib.blake2b(digest_size=8)
    versions = (sys.version_info[:2], numba.__version__, llvmlite.__version__, np.__version__)
    digest.update(repr(versions).encode())
    for path in sorted(path for name in _SOURCES for path in (_OPS.parent / name).rglob("*.py")):
        digest.update(path.read_bytes() + b"\0")
    return _OPS / "machine" / digest.hexdigest()


def choose_level() -> str:
    """Set numba's target to this processor's level if machine code exists; return the level, or ''.

    numba has one target per process: functions that other packages compile later use this level too. An
    explicit target (``NUMBA_CPU_NAME``) takes precedence. A process that has already compiled keeps its
    target.
    """
    config: Any = numba.config
    is_open = config.CPU_NAME is None and config.CPU_FEATURES is None and config.ENABLE_AVX
    if is_open and (folder().is_dir() or WRITE in os.environ):
        features: Any = binding.get_host_cpu_features()
        levels = (name for name, needed in LEVELS.items() if all(map(features.get, needed)))
        level = next(levels, None)
        if level is not None and "_toplevel_target_context" not in vars(_registry.cpu_target):
            config.CPU_NAME, config.CPU_FEATURES = level, FEATURES.get(level, "")
    return config.CPU_NAME if config.CPU_NAME in LEVELS else ""


class KernelCache(_caching.FunctionCache):  # type: ignore[misc]
    """numba's function cache, consulted after the prebuilt machine code."""

    def __init__(self, function: Any) -> None:
        super().__init__(function)
        impl: Any = self._impl
        place = folder() / Path(function.__code__.co_filename).parent.name
        self._made = _caching.IndexDataCacheFile(str(place), impl.filename_base, folder().name)
        if WRITE in os.environ:
            place.mkdir(parents=True, exist_ok=True)
            self._cache_file = self._made

    def _load_overload(self, signature: Any, context: Any) -> Any:
        made = self._made.load(self._index_key(signature, context.codegen()))
        if made is not None:
            return self._impl.rebuild(context, made)
        return super()._load_overload(signature, context)

    def signatures(self) -> set[Any]:
        """Return the signatures with machine code of any level."""
        return {key[0] for key in self._made._load_index()}


_compiling = False


@contextlib.contextmanager
def turn(cache: Any) -> Iterator[None]:
    """Hold the compilation lock.

    Processes that start together wait for the first one and load its machine code. A kernel compiles the
    functions that it calls while it already holds the lock. On a file system without locks each process
    compiles for itself.
    """
    global _compiling
    with global_compiler_lock, contextlib.ExitStack() as stack:
        if not _compiling:
            with contextlib.suppress(OSError):
                cache._impl.locator.ensure_cache_path()
                stack.enter_context(locked(Path(cache.cache_path)))
            stack.callback(globals().update, _compiling=False)
            _compiling = True
        yield
