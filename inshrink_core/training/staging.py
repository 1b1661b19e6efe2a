"""Copies of a training's state, made while the training goes on."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    Place = tuple[torch.device, int]

__all__ = ["Staging", "storages_of"]


class Staging:
    """Copies tensors on a thread of its own, and hands the copy to a function there.

    Notes
    -----
    Storages are copied, not tensors, so that views and tied weights are written as they would be without a
    copy. Host memory for one copy is kept from save to save: fresh pages take longer than the copy.
    """

    def __init__(self) -> None:
        self._copied = threading.Event()
        self._copied.set()
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._kept: dict[int, Tensor] = {}

    @property
    def is_busy(self) -> bool:
        """Whether a copy is being made or used."""
        return self._thread is not None and self._thread.is_alive()

    def start(self, content: Any, guarded: frozenset[Place], use: Callable[[Any], None]) -> None:
        """Begin to copy; what was begun before must be finished.

        Parameters
        ----------
        content
            Containers with tensors. The containers, and tensors that are not guarded, are copied at once.
        guarded
            Storages that nothing changes before `wait_for_copy` has returned (`storages_of`).
        use
            Called with the copy, on the thread.
        """
        copies = _Copies(guarded, self._kept)
        copied = copies.of(content)
        self._copied.clear()
        self._thread = threading.Thread(
            target=self._work, args=(copied, copies, use), name="inshrink-staging"
        )
        self._thread.start()

    def _work(self, copied: Any, copies: _Copies, use: Callable[[Any], None]) -> None:
        try:
            try:
                copies.fill()
            finally:
                self._copied.set()
            use(copied)
        except BaseException as error:  # raised again in the caller's thread
            self._error = error

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
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise error


def storages_of(value: Any) -> frozenset[Place]:
    """Return the storages of the plain tensors in containers."""
    found: set[Place] = set()
    pending = [value]
    while pending:
        one = pending.pop()
        if _is_plain(one):
            found.add(_place(one))
        elif isinstance(one, dict):
            pending += one.values()
        elif isinstance(one, (list, tuple, set)):
            pending += one
    return frozenset(found)


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


class _Copies:
    """Storages that are copied into host memory, each once: guarded ones by `fill`, others at once."""

    def __init__(self, guarded: frozenset[Place], kept: dict[int, Tensor]) -> None:
        self._guarded, self._kept = guarded, kept
        self._found: dict[Place, Tensor] = {}
        self._waiting: list[tuple[Tensor, Tensor]] = []

    def of(self, value: Any) -> Any:
        """Return containers like those given, with copies of the tensors in them."""
        import torch

        if _is_plain(value):
            held = self._storage_of(value).untyped_storage()
            made = torch.empty(0, dtype=value.dtype)
            return made.set_(held, value.storage_offset(), value.size(), value.stride())
        if isinstance(value, torch.Tensor):
            return value.detach().clone()
        if isinstance(value, dict):
            like = copy.copy(value)  # with its attributes: a state dict has `_metadata`
            for key, item in value.items():
                like[key] = self.of(item)
            return like
        if type(value) in (list, tuple, set):
            return type(value)(self.of(item) for item in value)
        return value

    def _storage_of(self, tensor: Tensor) -> Tensor:
        """Return the copy of the storage that a tensor lies in, as bytes."""
        import torch

        place = _place(tensor)
        if place in self._found:
            return self._found[place]
        storage = tensor.untyped_storage()
        whole = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
        number = len(self._found)
        held = self._kept.get(number)
        if held is None or held.numel() != whole.numel():
            held = self._kept[number] = torch.empty(whole.numel(), dtype=torch.uint8)
        self._found[place] = held
        if place in self._guarded:
            self._waiting.append((held, whole))
        else:
            held.copy_(whole)
        return held

    def fill(self) -> None:
        """Copy the guarded storages."""
        for held, whole in self._waiting:
            held.copy_(whole)
