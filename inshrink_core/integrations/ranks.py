"""The ranks of a training: which one archives, and where all of them meet."""

from __future__ import annotations

import os

__all__ = ["barrier", "is_first_rank"]


def is_first_rank() -> bool:
    """Tell whether this process is the one that archives, also before the processes are joined."""
    from torch import distributed

    if distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank() == 0
    if "RANK" in os.environ:
        return os.environ["RANK"] == "0"
    return os.environ.get("LOCAL_RANK", "0") == os.environ.get("NODE_RANK", "0") == "0"


def barrier() -> None:
    """Wait until all ranks have come here; with one rank, go on."""
    from torch import distributed

    if distributed.is_available() and distributed.is_initialized():
        distributed.barrier()
