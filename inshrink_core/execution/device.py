"""Select the device for computation."""

from __future__ import annotations

import sys
from importlib.metadata import version
from pathlib import Path

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


def why_no_cuda() -> str:
    """Return why CUDA is unavailable, and what would change that; an empty string if it is available.

    Notes
    -----
    torch takes seconds to import, so it is imported only if nothing else decides.
    """
    if version("torch").endswith("+cpu"):
        return "this torch was built without CUDA; install one that has it"
    if sys.platform == "linux" and not any(list(Path("/dev").glob(name)) for name in ("nvidia[0-9]*", "dxg")):
        return "there is no NVIDIA GPU, or none with a driver; `nvidia-smi` lists them"
    import torch

    if torch.version.cuda is None:
        return "this torch was built without CUDA; install one that has it"
    return "" if torch.cuda.is_available() else "torch finds no NVIDIA GPU; `nvidia-smi` lists them"
