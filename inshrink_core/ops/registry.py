"""Finds the implementation of an op for a device; importing it compiles nothing.

To add an op:

1. Write its typed front in ``ops/<family>.py``: signature and documentation under `op`, no body.
2. Write the reference in ``ops/reference/<family>.py`` under the same name, in plain torch: the norm.
3. Write kernels under the same name in ``ops/cpu/<family>.py`` (numba) and, where a GPU should run it,
   ``ops/triton/<family>.py``. Kernels for numba are ``@njit(nogil=True, cache=True)``: threads scale, nothing
   is parallel inside, and never `fastmath`.

All implementations return the same bits; a test compares them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from enum import StrEnum
from functools import wraps
from importlib import import_module
from importlib.util import find_spec
from typing import Any, TypeVar, cast


class Backend(StrEnum):
    """Where an op runs: `reference` anywhere (plain torch), the others on their device."""

    REFERENCE = "reference"
    CPU = "cpu"
    CUDA = "cuda"


_Front = TypeVar("_Front", bound=Callable[..., Any])

OPS: dict[str, Callable[..., Any]] = {}
"""The front of every op whose family was imported, by name."""

_forced: ContextVar[Backend | None] = ContextVar("_forced", default=None)

_FOLDER = {Backend.REFERENCE: "reference", Backend.CPU: "cpu", Backend.CUDA: "triton"}

_BACKEND_OF_DEVICE = {"cpu": Backend.CPU, "cuda": Backend.CUDA}
"""By what torch names the kind of a device."""


def op(front: _Front) -> _Front:
    """Make a documented signature an op: a call goes to the implementation for its first argument's device.

    A device without a kernel gets the reference. The first argument is a tensor, an array in host memory, or
    an object with a `device`.
    """
    signature = inspect.signature(front)
    n_arguments = len(signature.parameters)
    found: dict[Backend, Callable[..., Any]] = {}

    @wraps(front)
    def call(*arguments: Any, **named: Any) -> Any:
        if named or len(arguments) < n_arguments:
            bound = signature.bind(*arguments, **named)
            bound.apply_defaults()
            arguments = bound.args
        device = arguments[0].device  # a word where it is numpy's
        kind = getattr(device, "type", device)
        backend = _forced.get() or _BACKEND_OF_DEVICE.get(kind, Backend.REFERENCE)
        if backend not in found:
            found[backend] = implementation(call, backend)
        return found[backend](*arguments)

    OPS[front.__name__] = call
    return cast("_Front", call)


def implementation(front: Callable[..., Any], backend: Backend) -> Callable[..., Any]:
    """Return the implementation of an op on a back end, or the reference where that has none."""
    family = front.__module__.rpartition(".")[2]
    module = f"inshrink_core.ops.{_FOLDER[backend]}.{family}"
    needed = (module, "triton") if backend is Backend.CUDA else (module,)
    is_there = all(find_spec(name) is not None for name in needed)
    found = getattr(import_module(module), front.__name__, None) if is_there else None
    if found is None and backend is not Backend.REFERENCE:
        return implementation(front, Backend.REFERENCE)
    if found is None:
        raise LookupError(f"the op '{front.__name__}' has no reference")
    return _on_its_device(found) if backend is Backend.CUDA else cast("Callable[..., Any]", found)


def _on_its_device(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """Triton launches on the current device, so that of the tensors is made current."""
    import torch

    @wraps(kernel)
    def call(*arguments: Any) -> Any:
        device = arguments[0].device
        with torch.cuda.device(device.index if device.type == "cuda" else -1):
            return kernel(*arguments)

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
