"""States that are not held between frames, because the file they were read from still has them."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from inshrink_core.chain.attachments import tensor_digest
from inshrink_core.checkpoint import TensorSource, TensorSpec
from inshrink_core.codec import TensorReference
from inshrink_core.errors import InshrinkError
from inshrink_core.formats.source import peek

if TYPE_CHECKING:
    from torch import Tensor


HELD_NBYTES = 1 << 16
"""Up to this size a state is held: opening a file to read it again would take longer than coding it."""

_logger = logging.getLogger(__name__)


class Origin(NamedTuple):
    """Where a tensor was read, and the SHA-256 of what was read there."""

    source: TensorSource
    spec: TensorSpec
    digest: bytes


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RecalledReference(TensorReference):
    """The state of a tensor stored bit for bit; its values are read again whenever they are asked for.

    Parameters
    ----------
    origin
        Where they may still be; None where only the archive has them.
    decode
        Decodes the state from the archive. Called where the origin is gone, or has other values now.
    history
        What else of the state the next delta is coded relative to (`TensorReference.exact_state`), held
        because no file has it.

    Notes
    -----
    The digest makes sure that the values are bit for bit those a reader of the archive decodes: a delta
    against any others would be lost.
    """

    origin: Origin | None
    decode: Callable[[], TensorReference]
    history: Tensor | None = None

    def decoded(self) -> Tensor:
        """Return the values; see `exact_state`."""
        return self.exact_state()[0]

    def exact_state(self) -> tuple[Tensor, Tensor | None]:
        """Return the values, in memory of their own, and the history.

        Raises
        ------
        DamagedError, MissingFrameError, IncompatibleError
            They are not where they were read, and cannot be decoded either.
        """
        tensor = None if self.origin is None else _read_again(self.origin)
        return self.decode().exact_state() if tensor is None else (tensor, self.history)

    @property
    def nbytes(self) -> int:
        """Bytes of the history: nothing else is held."""
        return 0 if self.history is None else self.history.nbytes


def _read_again(origin: Origin) -> Tensor | None:
    """Return a tensor from where it was read; None if it is not there any more."""
    try:
        # The digest below is a stronger check than the file's own.
        tensor = peek(origin.source, origin.spec)
    except InshrinkError as error:
        _logger.info("tensor '%s' is decoded from the archive: %s", origin.spec.key, error)
        return None
    if tensor_digest(tensor) != origin.digest:
        _logger.info("tensor '%s' is decoded from the archive: its file changed", origin.spec.key)
        return None
    return tensor
