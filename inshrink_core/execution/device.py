"""Select the device for computation."""

from __future__ import annotations

from inshrink_core.errors import InputError


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
