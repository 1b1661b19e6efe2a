"""Copies of a training's state, made while the training goes on."""

from __future__ import annotations

import contextlib
import copy
import threading
from collections.abc import Callable, Container, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    Place = tuple[torch.device, int]


_ASYNCHRONOUS: Final = "cuda"
"""Sort of device that copies beside what it computes."""


class Staging:
    """Copies tensors on a thread of its own, and hands the copy to a function there.

    Notes
    -----
    Storages are copied, not tensors, so that views and tied weights are written as they would be without a
    copy. Host memory for one copy is kept from save to save: fresh pages take longer than the copy. What lies
    on a CUDA device is copied into pinned memory by a stream beside the training's.
    """

    def __init__(self) -> None:
        # One thread that stays: whoever starts a thread waits until that has had the interpreter's lock.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="inshrink-staging")
        self._thread.submit(lambda: None)
        self._job: Future[None] | None = None
        self._copied = threading.Event()
        self._copied.set()
        self._kept: dict[tuple[int, str], Tensor] = {}

    @property
    def is_busy(self) -> bool:
        """Whether a copy is being made or used."""
        return self._job is not None and not self._job.done()

    def start(self, content: Any, settled: Container[int], use: Callable[[Any], None]) -> None:
        """Begin to copy; what was begun before must be finished.

        Parameters
        ----------
        content
            Containers with tensors.
        settled
            The `id` of values in its dicts that nothing changes, nor anything in them, before
            `wait_for_copy` has returned. All else is copied at once.
        use
            Called with the copy, on the thread.
        """
        copies = _Copies(settled, self._kept)
        made = copies.of(content)
        streams = _SideStreams(copies.devices)
        copied = threading.Event()
        self._job = self._thread.submit(_work, made, copies, streams, copied, use)
        self._copied = copied

    def wait_for_copy(self, *_: object) -> None:
        """Return when the copy is made: what it was made of may change now."""
        self._copied.wait()

    def finish(self) -> None:
        """Return when the copy was used.

        Raises
        ------
        Exception
            What `use` raised.
        """
        job, self._job = self._job, None
        if job is not None:
            job.result()

    def close(self) -> None:
        """End the thread, when the copy was used."""
        self._thread.shutdown()


def _work(
    made: Any,
    copies: _Copies,
    streams: _SideStreams,
    copied: threading.Event,
    use: Callable[[Any], None],
) -> None:
    try:
        copies.settle(streams)
    finally:
        copied.set()
    use(made)


def address(value: Any) -> int:
    """Return where the values of a tensor lie; 0 where that cannot be told, or it has none."""
    import torch

    plain = type(value) in (torch.Tensor, torch.nn.Parameter) and value.layout == torch.strided
    return int(value.data_ptr()) if plain else 0


def _is_plain(value: Any) -> bool:
    """Tell whether a value is a tensor that is nothing but a view of a storage."""
    import torch

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


class _SideStreams:
    """CUDA streams, one a device, that begin where the training's own are now."""

    def __init__(self, devices: Iterable[torch.device] = ()) -> None:
        import torch

        self._streams = {
            device: torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            for device in devices
        }
        for device, stream in self._streams.items():
            stream.wait_stream(torch.cuda.current_stream(device))

    def memory_for(self, nbytes: int, device: torch.device) -> Tensor:
        """Return host memory that values on a device are copied into."""
        import torch

        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=device in self._streams)

    def copy(self, source: Tensor, target: Tensor) -> None:
        """Copy into host memory; where a device has a stream, the copy is made when `current` ends."""
        target.copy_(source, non_blocking=source.device in self._streams)

    @contextlib.contextmanager
    def current(self) -> Iterator[None]:
        """Have devices work by these streams; return when all is done."""
        import torch

        with contextlib.ExitStack() as stack:
            for stream in self._streams.values():
                stack.enter_context(torch.cuda.stream(stream))
            yield
            for stream in self._streams.values():
                stream.synchronize()


class _Copies:
    """Storages that are copied into host memory, each once: settled ones by `settle`, others at once."""

    def __init__(self, settled: Container[int], kept: dict[tuple[int, str], Tensor]) -> None:
        self._settled, self._kept = settled, kept
        self._found: dict[Place, Tensor] = {}
        self._made: dict[int, Any] = {}
        """Copies of containers by the `id` of what is copied: one in two places stays one."""
        self._later: list[tuple[dict[Any, Any], Any]] = []
        self._sources: list[Tensor] = []
        """Held while a device reads them."""
        self._streams = _SideStreams()
        self.devices: set[torch.device] = set()
        """Where settled tensors lie that a device copies by itself."""

    def of(self, value: Any) -> Any:
        """Return containers like those given, with copies of the tensors in them."""
        import torch
        from torch.utils._python_dispatch import is_traceable_wrapper_subclass

        if _is_plain(value):
            held = self._storage_of(value).untyped_storage()
            made = torch.empty(0, dtype=value.dtype)
            return made.set_(held, value.storage_offset(), value.size(), value.stride())
        if is_traceable_wrapper_subclass(value):
            # Its class says what tensors it is made of; few know how to be cloned.
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
        import torch

        self._later.append((holder, key))
        value = holder[key]
        if isinstance(value, torch.Tensor) and value.device.type == _ASYNCHRONOUS:
            self.devices.add(value.device)

    def _storage_of(self, tensor: Tensor) -> Tensor:
        """Return the copy of the storage that a tensor lies in, as bytes."""
        import torch

        place = _place(tensor)
        if place in self._found:
            return self._found[place]
        storage = tensor.untyped_storage()
        whole = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
        number = len(self._found), tensor.device.type
        held = self._kept.get(number)
        if held is None or held.numel() != whole.numel():
            held = self._kept[number] = self._streams.memory_for(whole.numel(), tensor.device)
        self._found[place] = held
        self._streams.copy(whole, held)
        self._sources.append(whole)
        return held

    def settle(self, streams: _SideStreams) -> None:
        """Copy what was put off."""
        self._settled, self._streams = (), streams
        with streams.current():
            for holder, key in self._later:
                holder[key] = self.of(holder[key])
        self._sources.clear()
