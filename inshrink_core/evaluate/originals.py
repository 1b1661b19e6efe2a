"""What an evaluator says of each original step, asked once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from inshrink_core.errors import StorageError
from inshrink_core.evaluate.evaluation import Evaluation

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["OriginalEvaluations"]


class OriginalEvaluations:
    """What the evaluator says of each original step, asked once; predictions are kept in files.

    Parameters
    ----------
    ask
        Evaluates the original of a step.
    folder
        Where predictions are kept; the caller removes it.
    """

    def __init__(self, ask: Callable[[int], Evaluation], folder: Path) -> None:
        self._ask, self._folder = ask, folder
        self._known: dict[int, Evaluation] = {}

    def __contains__(self, step: object) -> bool:
        return step in self._known

    def __len__(self) -> int:
        return len(self._known)

    def __call__(self, step: int) -> Evaluation:
        """Return the evaluation of a step.

        Raises
        ------
        StorageError
            There is no room for its predictions.
        EvaluatorError, InputError
            As `Evaluator.evaluate`.
        """
        if step not in self._known:
            found = self._ask(step)
            self._known[step] = replace(
                found,
                log_probs=self._mapped(f"{step}-log_probs.npy", found.log_probs),
                predictions=self._mapped(f"{step}-predictions.npy", found.predictions),
            )
        return self._known[step]

    def clear(self) -> None:
        """Forget everything, so that the files can be removed."""
        self._known.clear()

    def _mapped(self, name: str, values: NDArray[Any] | None) -> NDArray[Any] | None:
        """Move an array to a file: of a language model's predictions, a run's worth fills a memory."""
        if values is None:
            return None
        import numpy as np

        path = self._folder / name
        try:
            np.save(path, values)
            mapped: NDArray[Any] = np.load(path, mmap_mode="r")
        except OSError as error:
            raise StorageError(
                f"predictions cannot be kept: {error}", where=str(path.parent), remedy="free space there"
            ) from error
        return mapped
