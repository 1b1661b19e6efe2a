"""How what archives a training ends: with its ``with`` statement, and with or without an error."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Self

from inshrink_core.errors import StorageError

__all__ = ["Closing", "Forgiving"]


class Closing(ABC):
    """What is closed at the end of a ``with`` statement."""

    @abstractmethod
    def close(self) -> None:
        """Release what is held; harmless when repeated."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class Forgiving(Closing):
    """What never stops a training: saves that are not in the archive are counted, and told at the end.

    Attributes
    ----------
    path
        The archive.
    """

    path: Path

    @property
    @abstractmethod
    def failures(self) -> Mapping[int, str]:
        """Why saves are not in the archive, by step."""

    @abstractmethod
    def _release(self) -> None:
        """Archive what is pending and release the archive."""

    def close(self, *, strict: bool = False) -> None:
        """Archive what is pending and release the archive; harmless when repeated.

        Parameters
        ----------
        strict
            Whether to raise where a save is not in the archive.

        Raises
        ------
        StorageError
            Saves are not in the archive, with `strict`. Those that the disk refused are archived by the
            next process that opens the archive for saving.
        """
        self._release()
        if strict:
            self._require_none()

    def _require_none(self) -> None:
        """Raise where there are failures."""
        if self.failures:
            step, why = next(iter(self.failures.items()))
            raise StorageError(
                f"{len(self.failures)} saves are not in the archive; step {step}: {why}",
                where=str(self.path),
                remedy="see `failures` for each",
            )
