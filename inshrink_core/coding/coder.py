"""What every coder of byte values keeps."""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

__all__ = ["Coder"]


class Coder(Protocol):
    """A lossless code for byte values whose number the decoder knows."""

    name: str
    """Name in documents and benchmarks; it is not stored."""

    def encode(self, values: NDArray[np.uint8]) -> bytes:
        """Return the code of some values."""
        ...

    def decode(self, payload: bytes | memoryview, n: int) -> NDArray[np.uint8]:
        """Return the `n` values that a payload codes.

        Raises
        ------
        DamagedError
            The payload is not the code of `n` values.
        """
        ...

    def worst_case_bytes(self, n: int) -> int:
        """Return the largest payload `encode` produces for `n` values."""
        ...
