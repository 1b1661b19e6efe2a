"""Select the device for computation, and overlap copies with kernels on it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from inshrink_core.errors import InputError

if TYPE_CHECKING:
    from torch import Tensor

_idle_streams: dict[str, list[Any]] = {}
"""CUDA streams that no thread uses, by device. The allocator holds memory for each stream."""


def resolve_device(device: str) -> str:
    """Return a torch device name; ``auto`` selects CUDA if available.

    Raises
    ------
    InputError
        The device is not available.
    """
    if device == "cpu":
        return device
    import torch

    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if device.partition(":")[0] == "cuda" and not torch.cuda.is_available():
        raise InputError("there is no CUDA device here", remedy="use --device cpu or --device auto")
    try:
        return str(torch.device(device))
    except RuntimeError as error:
        raise InputError(f"--device {device} is not a device", remedy="use cpu, cuda or auto") from error


def upload(values: Tensor, device: str) -> Tensor:
    """Copy a tensor to a device.

    A copy to CUDA starts from page-locked memory, and the function returns before the copy ends. PyTorch
    reuses this memory only after the copy has ended.
    """
    if not device.startswith("cuda"):
        return values.to(device)
    return values.pin_memory().to(device, non_blocking=True)


@contextlib.contextmanager
def separate_stream(device: str) -> Iterator[None]:
    """Run the thread's CUDA operations in a separate stream, and wait for them at the end.

    The copies of one thread then overlap with the kernels of others. Tensors made inside are complete
    afterwards, so other streams may read them. Tensors from outside must exist until the end.
    """
    if not device.startswith("cuda"):
        yield
        return
    import torch

    idle = _idle_streams.setdefault(device, [])
    stream: Any = idle.pop() if idle else torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream(device))
    try:
        with torch.cuda.stream(stream):
            yield
    finally:
        stream.synchronize()
        idle.append(stream)
