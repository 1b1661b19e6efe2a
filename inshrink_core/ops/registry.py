"""Dispatch of an op to the kernel for a device. Importing this module compiles nothing.

To add an op:

1. Write the PyTorch version in ``ops/<family>.py`` with a docstring, and decorate it with `op`. It is the
   reference and runs on any device.
2. Write a kernel of the same name and arguments in ``ops/cpu/<family>.py`` (numba). Kernels are
   ``@njit(nogil=True, cache=True)``, because threads scale. They use no parallel loops and no `fastmath`.
3. Write a kernel in ``ops/triton/<family>.py`` only if `compress` or `restore` call the op on a GPU.

All versions return the same bits; a test compares them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from enum import StrEnum
from functools import wraps
from importlib import import_module
from importlib.util import find_spec
from typing import Any, TypeVar, cast


class Backend(StrEnum):
    """Back end of an op: `REFERENCE` (plain PyTorch) runs on any device, the others on theirs."""

    REFERENCE = "reference"
    CPU = "cpu"
    CUDA = "cuda"


_Op = TypeVar("_Op", bound=Callable[..., Any])

_forced: ContextVar[Backend | None] = ContextVar("_forced", default=None)


def op(norm: _Op) -> _Op:
    """Turn a plain PyTorch function into an op that dispatches on the device of its first argument.

    A device without a kernel runs the function itself. The first argument is positional: a tensor, an array
    in host memory, or an object with a `device`.
    """
    kernels: dict[str, Callable[..., Any]] = {Backend.REFERENCE: norm}

    @wraps(norm)
    def call(*arguments: Any, **named: Any) -> Any:
        device = arguments[0].device  # numpy arrays have a string here
        backend = _forced.get() or getattr(device, "type", device)
        if backend not in kernels:
            kernels[backend] = kernel_of(norm, backend)
        return kernels[backend](*arguments, **named)

    return cast("_Op", call)


def kernel_of(norm: Callable[..., Any], backend: str) -> Callable[..., Any]:
    """Return the kernel of an op for a back end, or the PyTorch version if the back end has none."""
    folder = {"cpu": "cpu", "cuda": "triton"}.get(backend)
    module = f"inshrink_core.ops.{folder}.{norm.__module__.rpartition('.')[2]}"
    needed = (module, "triton") if folder == "triton" else (module,)
    if folder is None or any(find_spec(name) is None for name in needed):
        return norm
    kernel = getattr(import_module(module), norm.__name__, norm)
    return _on_its_device(kernel, norm) if folder == "triton" and kernel is not norm else kernel


def _on_its_device(kernel: Callable[..., Any], norm: Callable[..., Any]) -> Callable[..., Any]:
    """Make the tensors' device current for Triton's launch; skip the launch if the tensor is empty."""
    import torch

    @wraps(kernel)
    def call(*arguments: Any, **named: Any) -> Any:
        first = arguments[0]
        if isinstance(first, torch.Tensor) and not first.numel():
            return norm(*arguments, **named)
        with torch.cuda.device(first.device.index if first.device.type == "cuda" else -1):
            return kernel(*arguments, **named)

    return call


@contextmanager
def force_backend(backend: Backend) -> Iterator[None]:
    """Run every op of this thread on one back end while the context is open.

    Examples
    --------
    >>> from inshrink_core.ops import Backend, force_backend
    >>> with force_backend(Backend.REFERENCE):
    ...     pass  # ops called here run in plain torch
    """
    token = _forced.set(backend)
    try:
        yield
    finally:
        _forced.reset(token)
