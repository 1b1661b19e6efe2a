"""Metrics: ratio, bits per parameter, drop, divergence, error norms.

All functions are pure, and import numpy and torch only when needed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from enum import StrEnum
from typing import TYPE_CHECKING, Any, NamedTuple

from inshrink_core.errors import InputError
from inshrink_core.values import real_numbers

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor


NORMALISATION_TOLERANCE = 1e-2
"""Largest abs(log Σ p) of a row of log-probabilities, nats: above the rounding error of bfloat16, and far
below the value for logits or plain probabilities."""

LOG_SMALLEST = math.log(5e-324)
"""Log of the smallest positive float64, which replaces the log of a zero probability and keeps KL finite."""

CHUNK_ELEMENTS = 1 << 20
"""Elements converted to float64 at a time: 8 MB, little beside a large tensor."""


class Direction(StrEnum):
    """Better direction of a metric."""

    HIGHER = "higher"
    LOWER = "lower"

    def cost(self, value: float) -> float:
        """Return a value with the sign for which lower is better."""
        return value if self is Direction.LOWER else -value


_DIRECTIONS = {
    **dict.fromkeys(("loss", "nll", "perplexity", "ppl", "error", "mse", "mae", "rmse"), Direction.LOWER),
    **dict.fromkeys(("accuracy", "acc", "f1", "auc", "bleu"), Direction.HIGHER),
}
_LOSSES = ("loss", "nll", "mse")
_SPLITS = ("val_", "valid_", "validation_", "eval_", "test_", "train_")


def known_direction(metric: str) -> Direction | None:
    """Return the better direction of a metric with a well-known name, or None.

    Examples
    --------
    >>> known_direction("val_loss").value
    'lower'
    >>> known_direction("my_score") is None
    True
    """
    return _DIRECTIONS.get(_without_split(metric))


def is_loss(metric: str) -> bool:
    """Return whether a name is that of a mean cross-entropy (nats) or of a mean squared error.

    Examples
    --------
    >>> is_loss("val_loss"), is_loss("perplexity")
    (True, False)
    """
    return _without_split(metric) in _LOSSES


def _without_split(metric: str) -> str:
    name = metric.lower()
    for prefix in _SPLITS:
        name = name.removeprefix(prefix)
    return name


def ratio(raw_bytes: int, archive_bytes: int) -> float | None:
    """Return raw bytes / archive bytes; None if nothing was stored.

    Examples
    --------
    >>> ratio(1200, 100)
    12.0
    """
    return raw_bytes / archive_bytes if archive_bytes > 0 else None


def bits_per_parameter(archive_bytes: int, n_parameters: int) -> float | None:
    """Return archived bits per parameter; None without parameters."""
    return 8 * archive_bytes / n_parameters if n_parameters > 0 else None


def drop(original: float, restored: float, direction: Direction) -> float | None:
    """Return the relative change of a metric for the worse, signed.

    The drop from the original value m₀ to the restored m is σ·(m₀ − m)/abs(m₀), with σ = +1 if higher is
    better and −1 if lower is: 0.01 is one percent worse, negative is better. It is undefined, and None, if m₀
    = 0 or either value is not finite.

    Examples
    --------
    >>> drop(0.5, 0.25, Direction.HIGHER), drop(0.5, 0.25, Direction.LOWER)
    (0.5, -0.5)
    """
    if original == 0 or not (math.isfinite(original) and math.isfinite(restored)):
        return None
    sign = 1.0 if direction is Direction.HIGHER else -1.0
    # Adding zero turns −0.0 into 0.0 for display.
    return sign * (original - restored) / abs(original) + 0.0


def worse_by(original: float, drop: float, direction: Direction) -> float:
    """Return the metric that is worse than the original one by this drop.

    Examples
    --------
    >>> worse_by(0.5, 0.5, Direction.HIGHER), worse_by(0.5, -0.5, Direction.LOWER)
    (0.25, 0.25)
    """
    sign = 1.0 if direction is Direction.HIGHER else -1.0
    return original - sign * drop * abs(original)


def _float64(values: Any) -> NDArray[Any]:
    """Return a tensor or array from an evaluator as float64."""
    import numpy as np

    if hasattr(values, "detach"):
        import torch

        values = values.detach().to(device="cpu", dtype=torch.float64).numpy()
    return np.asarray(values, dtype=np.float64)


def _alike(original: Any, restored: Any, what: str) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return two outputs as float64; refuse other shapes."""
    first, second = _float64(original), _float64(restored)
    if first.shape != second.shape or first.size == 0:
        raise InputError(
            f"{what} must be two equal, non-empty shapes", expected=f"{first.shape}", found=f"{second.shape}"
        )
    return first, second


def _log_normalised(rows: NDArray[Any], which: str) -> NDArray[Any]:
    """Return rows of log-probabilities that sum to one exactly, so that no divergence is negative."""
    import numpy as np

    if np.isnan(rows).any() or np.isposinf(rows).any():
        raise InputError(f"the log_probs of the {which} state hold NaN or +inf")
    top = rows.max(axis=1, keepdims=True)
    if np.isneginf(top).any():
        raise InputError(f"all log_probs of a row of the {which} state are −inf")
    log_total = top + np.log(np.exp(rows - top).sum(axis=1, keepdims=True))
    worst = float(np.abs(log_total).max())
    if worst > NORMALISATION_TOLERANCE:
        raise InputError(
            f"the log_probs of the {which} state are not normalised",
            expected="rows whose exp sums to 1",
            found=f"a row with log-sum {worst:.3g}",
            remedy="return torch.log_softmax(logits, dim=-1)",
        )
    normalised: NDArray[Any] = rows - log_total
    return normalised


def divergence(log_probs_original: Any, log_probs_restored: Any) -> float:
    """Return the mean Kullback-Leibler divergence of the restored from the original predictions, nats.

    With n rows and probabilities p (original) and q (restored), it is (1/n) Σ p · (log p − log q) over all
    rows and classes.

    Parameters
    ----------
    log_probs_original, log_probs_restored
        Natural logarithms of class probabilities, shape (n, classes), tensors or arrays. −inf is a
        probability of zero: in the original it adds nothing; in the restored it counts as the smallest
        positive float64, so that the result is finite.

    Returns
    -------
    float
        Not negative; 0.0 if both are equal. Computed in float64.

    Raises
    ------
    InputError
        Shapes differ, are not (n, classes) or are empty; values are NaN or +inf; rows do not sum to one
        within `NORMALISATION_TOLERANCE`.

    Notes
    -----
    O(n · classes) time, O(`CHUNK_ELEMENTS`) memory beside the float64 views.

    Examples
    --------
    >>> import math
    >>> half = math.log(0.5)
    >>> round(divergence([[half, half]], [[math.log(0.25), math.log(0.75)]]), 6)
    0.143841
    """
    import numpy as np

    original, restored = _alike(log_probs_original, log_probs_restored, "log_probs")
    if original.ndim != 2:
        raise InputError("log_probs have the shape (n, classes)", found=f"{original.shape}")
    n_rows, n_classes = original.shape
    total = 0.0
    for rows in _chunks(n_rows, max(1, CHUNK_ELEMENTS // n_classes)):
        log_p = _log_normalised(original[rows], "original")
        log_q = np.maximum(_log_normalised(restored[rows], "restored"), LOG_SMALLEST)
        p = np.exp(log_p)
        # A class of probability zero adds nothing; its −inf must not be subtracted.
        total += float((p * (np.where(p > 0, log_p, log_q) - log_q)).sum())
    return max(float(total / n_rows), 0.0)


def mean_entropy(log_probs: Any) -> float:
    """Return the mean entropy of predictions, shape (n, classes), nats: their expected cross-entropy.

    Examples
    --------
    >>> import math
    >>> round(mean_entropy([[math.log(0.5), math.log(0.5)]]), 6)
    0.693147
    """
    import numpy as np

    rows = _float64(log_probs)
    total = 0.0
    for part in _chunks(len(rows), max(1, CHUNK_ELEMENTS // max(1, rows.shape[1]))):
        log_p = _log_normalised(rows[part], "original")
        total -= float((np.exp(log_p) * np.maximum(log_p, LOG_SMALLEST)).sum())
    return total / max(1, len(rows))


def mean_squared_difference(original: Any, restored: Any) -> float:
    """Return the mean squared difference of two outputs of the same shape.

    Raises
    ------
    InputError
        Shapes differ or are empty, or a value is not finite.
    """
    import numpy as np

    first, second = _alike(original, restored, "predictions")
    if not (np.isfinite(first).all() and np.isfinite(second).all()):
        raise InputError("the predictions hold NaN or inf")
    return float(np.square(first - second).mean())


def output_error(original: Any, restored: Any) -> float | None:
    """Return mean squared difference / variance of the original output: the divergence of a regression.

    None if the original output is constant and the restored one differs from it.

    Raises
    ------
    InputError
        As `mean_squared_difference`.
    """
    squared, variance = mean_squared_difference(original, restored), float(_float64(original).var())
    if squared == 0:
        return 0.0
    return squared / variance if variance > 0 else None


class TensorError(NamedTuple):
    """Error norms of a restored tensor against the original.

    Parameters
    ----------
    max_abs
        Largest absolute error; inf if one value is NaN or inf and the other is not the same.
    relative_rms
        Root mean square of the error over that of the original's finite values; None if that is 0.
    bit_exact
        Whether every bit is the same (−0.0 differs from 0.0, NaN payloads count).
    """

    max_abs: float
    relative_rms: float | None
    bit_exact: bool


def _chunks(total: int, size: int) -> Iterator[slice]:
    """Yield slices of `size` elements, so that float64 copies stay small."""
    for start in range(0, total, size):
        yield slice(start, min(start + size, total))


def _flat_bytes(tensor: Tensor) -> Tensor:
    """Return the bytes of a tensor: a comparison of floats would miss −0.0 and NaN payloads."""
    import torch

    return tensor.reshape(-1).contiguous().view(torch.uint8)


def tensor_error(original: Tensor, restored: Tensor) -> TensorError:
    """Return the error norms of a restored tensor; NaN in both is no error.

    Parameters
    ----------
    original, restored
        Tensors of equal shape and dtype, on any device, with any strides.

    Raises
    ------
    InputError
        Shape or dtype differ.

    Notes
    -----
    O(n) time; memory of at most a contiguous copy, and float64 chunks of `CHUNK_ELEMENTS`.

    Examples
    --------
    >>> import torch
    >>> tensor_error(torch.tensor([3.0, 4.0]), torch.tensor([3.0, 4.5])).max_abs
    0.5
    """
    import torch

    if original.shape != restored.shape or original.dtype != restored.dtype:
        raise InputError(
            "error norms need tensors of one shape and dtype",
            expected=f"{original.dtype} {tuple(original.shape)}",
            found=f"{restored.dtype} {tuple(restored.shape)}",
        )
    first, second = original.detach().cpu().reshape(-1), restored.detach().cpu().reshape(-1)
    bit_exact = torch.equal(_flat_bytes(first), _flat_bytes(second))
    largest = squared_error = squared = 0.0
    n = 0
    for part in _chunks(first.numel(), CHUNK_ELEMENTS):
        a, b = real_numbers(first[part], torch.float64), real_numbers(second[part], torch.float64)
        n += a.numel()
        squared += float(torch.where(a.isfinite(), a, 0.0).square().sum())
        if bit_exact:
            continue
        same = (a == b) | (a.isnan() & b.isnan())
        error = torch.where(same, 0.0, (a - b).abs())
        error = torch.where(error.isnan(), math.inf, error)
        largest = max(largest, float(error.max()))
        squared_error += float(error.square().sum())
    n = max(n, 1)
    rms, reference = math.sqrt(squared_error / n), math.sqrt(squared / n)
    return TensorError(largest, rms / reference if reference > 0 else None, bit_exact)
