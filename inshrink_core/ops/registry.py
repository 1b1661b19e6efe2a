"""Finds the implementation of an op for a device; importing it compiles nothing.

To add an op:

1. Declare it in `inshrink_core.ops.schema`: name, family, back ends beside the reference.
2. Write the reference in ``ops/reference/<family>.py``, in plain torch::

       @register("histogram", Backend.REFERENCE)
       def histogram(values: Tensor) -> Tensor: ...

3. Write the kernel in ``ops/cpu/<family>.py`` under the same name with ``Backend.CPU``. Kernels are
   ``@njit(nogil=True, cache=True)``: threads scale, nothing is parallel inside, and never `fastmath`.
4. Give it a typed front in ``ops/<family>.py``, documented there, and export it from `inshrink_core.ops`::

       def histogram(values: Tensor) -> Tensor:
           return dispatch("histogram", values.device)(values)

Both implementations return the same bits; a test compares them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from importlib import import_module
from typing import TYPE_CHECKING, Any, TypeVar

from inshrink_core.ops.schema import SCHEMA, Backend

if TYPE_CHECKING:
    import torch

__all__ = ["dispatch", "force_backend", "register"]

_Implementation = TypeVar("_Implementation", bound=Callable[..., Any])

_implementations: dict[tuple[str, Backend], Callable[..., Any]] = {}

_found: dict[tuple[str, str], Callable[..., Any]] = {}
"""What `dispatch` returned, by op and kind of device, while no back end was forced: encoding a tensor asks
for ten ops, after kernels that left nothing of this module in a cache."""

_forced: ContextVar[Backend | None] = ContextVar("_forced", default=None)

_FOLDER = {Backend.REFERENCE: "reference", Backend.CPU: "cpu", Backend.CUDA: "triton"}

_BACKEND_OF_DEVICE = {"cpu": Backend.CPU, "cuda": Backend.CUDA}


def register(op: str, backend: Backend) -> Callable[[_Implementation], _Implementation]:
    """Return a decorator that makes a function the implementation of a declared op on a back end.

    Raises
    ------
    KeyError
        The op is not declared in the schema.
    """
    declared = SCHEMA[op]

    def keep(implementation: _Implementation) -> _Implementation:
        _implementations[declared.name, backend] = implementation
        return implementation

    return keep


def dispatch(op: str, device: torch.device) -> Callable[..., Any]:
    """Return the implementation of an op for a device: its own kernel if there is one, else the reference.

    Parameters
    ----------
    op
        Name of a declared op.
    device
        Where the arguments are.
    """
    forced = _forced.get()
    if forced is not None:
        return _implementation(op, forced)
    found = _found.get((op, device.type))
    if found is None:
        found = _implementation(op, _BACKEND_OF_DEVICE.get(device.type, Backend.REFERENCE))
        _found[op, device.type] = found
    return found


def _implementation(op: str, backend: Backend) -> Callable[..., Any]:
    """Return the implementation on a back end, or the reference where that has none."""
    declared = SCHEMA[op]
    if backend not in declared.backends:
        backend = Backend.REFERENCE
    if (op, backend) not in _implementations:
        import_module(f"inshrink_core.ops.{_FOLDER[backend]}.{declared.family}")
    return _implementations[op, backend]


@contextmanager
def force_backend(backend: Backend) -> Iterator[None]:
    """Run every op of this thread on one back end while the context is open.

    Examples
    --------
    >>> import torch
    >>> from inshrink_core.ops import Backend, force_backend
    >>> with force_backend(Backend.REFERENCE):
    ...     pass  # ops called here run in plain torch
    """
    token = _forced.set(backend)
    try:
        yield
    finally:
        _forced.reset(token)
