"""Copies of a training's state, which are used while the training continues."""

from __future__ import annotations

import copy
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

if TYPE_CHECKING:
    Place = tuple[torch.device, int]


class Staging:
    """Copies tensors, and passes the copy to a function on a background thread.

    Notes
    -----
    Storages are copied, not tensors, so that views and tied weights are written as without a copy. Host
    memory for one copy is reused by later saves, since fresh pages take longer than the copy. Tensors on a
    CUDA device are copied into pinned memory.
    """

    def __init__(self) -> None:
        # One lasting thread: starting a thread waits until it has had the interpreter's lock.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="inshrink-staging")
        self._thread.submit(lambda: None)
        self._job: Future[None] | None = None
        self._buffers: dict[tuple[int, str], Tensor] = {}

    def start(self, content: Any, use: Callable[[Any], None]) -> None:
        """Copy containers with tensors, and use the copy on the thread; the previous one must be finished."""
        self._job = self._thread.submit(use, _Copies(self._buffers).of(content))

    def finish(self) -> None:
        """Wait until the copy was used.

        Raises
        ------
        Exception
            What `use` raised.
        """
        job, self._job = self._job, None
        if job is not None:
            job.result()

    def close(self) -> None:
        """End the thread after the copy was used."""
        self._thread.shutdown()


def address(value: Any) -> int:
    """Return the address of a tensor's values; 0 if it is unknown or the tensor is empty."""
    plain = type(value) in (torch.Tensor, torch.nn.Parameter) and value.layout == torch.strided
    return int(value.data_ptr()) if plain else 0


def _is_plain(value: Any) -> bool:
    """Tell whether a value is a tensor that is a plain view of a storage."""
    return (
        type(value) in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
        and value.layout == torch.strided
        and not value.is_quantized
        and not value.is_conj()
        and not value.is_neg()
        and value.untyped_storage().nbytes() > 0
    )


def _place(tensor: Tensor) -> Place:
    return tensor.device, tensor.untyped_storage().data_ptr()


class _Copies:
    """Copies of storages in host memory, each made once."""

    def __init__(self, buffers: dict[tuple[int, str], Tensor]) -> None:
        self._buffers = buffers
        self._found: dict[Place, Tensor] = {}
        self._made: dict[int, Any] = {}
        """Copies of containers by the `id` of the original; shared containers stay shared."""

    def of(self, value: Any) -> Any:
        """Return equal containers with copies of their tensors."""
        if _is_plain(value):
            storage = self._storage_of(value).untyped_storage()
            made = torch.empty(0, dtype=value.dtype)
            return made.set_(storage, value.storage_offset(), value.size(), value.stride())
        if is_traceable_wrapper_subclass(value):
            # Few such classes can be cloned.
            names, context = value.__tensor_flatten__()
            parts = {name: self.of(getattr(value, name)) for name in names}
            return type(value).__tensor_unflatten__(parts, context, value.size(), value.stride())
        if isinstance(value, torch.Tensor):
            return value.detach().clone()
        if id(value) in self._made:
            return self._made[id(value)]
        if isinstance(value, dict):
            like = self._made[id(value)] = copy.copy(value)  # with its attributes: `_metadata`, for one
            for key, item in value.items():
                like[key] = self.of(item)
            return like
        if type(value) in (list, tuple, set):
            made = self._made[id(value)] = type(value)(self.of(item) for item in value)
            return made
        return value

    def _storage_of(self, tensor: Tensor) -> Tensor:
        """Return the copy of a tensor's storage, as bytes."""
        place = _place(tensor)
        if place in self._found:
            return self._found[place]
        storage = tensor.untyped_storage()
        full = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
        number = len(self._found), tensor.device.type
        copied = self._buffers.get(number)
        if copied is None or copied.numel() != full.numel():
            is_pinned = tensor.device.type == "cuda"
            copied = torch.empty(full.numel(), dtype=torch.uint8, pin_memory=is_pinned)
            self._buffers[number] = copied
        self._found[place] = copied.copy_(full)
        return copied
