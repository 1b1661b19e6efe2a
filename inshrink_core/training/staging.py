"""Copies of a training's state, made while the training continues."""

from __future__ import annotations

import contextlib
import copy
import threading
from collections.abc import Callable, Container
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

if TYPE_CHECKING:
    Place = tuple[torch.device, int]


_ASYNCHRONOUS: Final = "cuda"
"""Type of devices that copy asynchronously."""


class Staging:
    """Copies tensors on a background thread, and passes the copy to a function there.

    Notes
    -----
    Storages are copied, not tensors, so that views and tied weights are written as without a copy. Host
    memory for one copy is reused by later saves, since fresh pages take longer than the copy. Tensors on a
    CUDA device are copied into pinned memory by a stream beside the training's.
    """

    def __init__(self) -> None:
        # One lasting thread: starting a thread waits until it has had the interpreter's lock.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="inshrink-staging")
        self._thread.submit(lambda: None)
        self._job: Future[None] | None = None
        self._copied = threading.Event()
        self._copied.set()
        self._buffers: dict[tuple[int, str], Tensor] = {}

    def start(self, content: Any, settled: Container[int], use: Callable[[Any], None]) -> None:
        """Start a copy; the previous one must be finished.

        Parameters
        ----------
        content
            Containers with tensors.
        settled
            The `id` of values in its dicts that do not change before `wait_for_copy` returns. Other values
            are copied at once.
        use
            Called with the copy, on the thread.
        """
        copies = _Copies(settled, self._buffers)
        made = copies.of(content)
        self._copied = threading.Event()
        self._job = self._thread.submit(_work, made, copies, self._copied, use)

    def wait_for_copy(self, *_: object) -> None:
        """Wait for the copy; afterwards its sources may change."""
        self._copied.wait()

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


def _work(made: Any, copies: _Copies, copied: threading.Event, use: Callable[[Any], None]) -> None:
    try:
        copies.settle()
    finally:
        copied.set()
    use(made)


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
    """Copies of storages in host memory, each made once: settled ones by `settle`, others at once.

    Settled tensors on a CUDA device are copied by a stream that follows the training's current one.
    """

    def __init__(self, settled: Container[int], buffers: dict[tuple[int, str], Tensor]) -> None:
        self._settled, self._buffers = settled, buffers
        self._found: dict[Place, Tensor] = {}
        self._made: dict[int, Any] = {}
        """Copies of containers by the `id` of the original; shared containers stay shared."""
        self._later: list[tuple[dict[Any, Any], Any]] = []
        self._sources: list[Tensor] = []
        """References that keep sources alive while a device reads them."""
        self._streams: dict[torch.device, Any] = {}
        self._is_settling = False

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
                if id(item) in self._settled:
                    self._put_off(like, key)
                else:
                    like[key] = self.of(item)
            return like
        if type(value) in (list, tuple, set):
            made = self._made[id(value)] = type(value)(self.of(item) for item in value)
            return made
        return value

    def _put_off(self, holder: dict[Any, Any], key: Any) -> None:
        self._later.append((holder, key))
        device = holder[key].device if isinstance(holder[key], torch.Tensor) else None
        if device is not None and device.type == _ASYNCHRONOUS and device not in self._streams:
            stream: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            stream.wait_stream(torch.cuda.current_stream(device))
            self._streams[device] = stream

    def _storage_of(self, tensor: Tensor) -> Tensor:
        """Return the copy of a tensor's storage, as bytes."""
        place = _place(tensor)
        if place in self._found:
            return self._found[place]
        storage = tensor.untyped_storage()
        full = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
        number = len(self._found), tensor.device.type
        copied = self._buffers.get(number)
        beside = self._is_settling and tensor.device in self._streams
        if copied is None or copied.numel() != full.numel():
            copied = torch.empty(full.numel(), dtype=torch.uint8, pin_memory=beside)
            self._buffers[number] = copied
        self._found[place] = copied
        copied.copy_(full, non_blocking=beside)
        self._sources.append(full)
        return copied

    def settle(self) -> None:
        """Copy the settled values."""
        self._settled, self._is_settling = (), True
        with contextlib.ExitStack() as stack:
            for stream in self._streams.values():
                stack.enter_context(torch.cuda.stream(stream))
            for holder, key in self._later:
                holder[key] = self.of(holder[key])
            for stream in self._streams.values():
                stream.synchronize()
        self._sources.clear()
