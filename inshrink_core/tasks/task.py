"""What a task is: a model, its data and its metric, each step the same whenever it is asked for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

__all__ = ["Task"]


@runtime_checkable
class Task(Protocol):
    """A training that can be interrupted and taken up again at any step.

    Attributes
    ----------
    name
        One word, used in file names.
    version
        Raised whenever the training changes, so that results of an earlier one are not reused.
    metric
        Name of what `evaluate` returns.
    direction
        ``lower`` or ``higher``: which way the metric is better.
    n_steps, n_saves, n_restores
        Defaults of a rehearsal.
    max_gradient_norm
        Gradients are clipped to this norm; None for no clipping.

    Notes
    -----
    `build` and `loss` may draw from torch's global generator: it is seeded before `build`, and saved
    and restored with the training. Data must come from the generator that `batch` is given, so that a
    step sees the same batch however training came there.
    """

    name: str
    version: int
    metric: str
    direction: str
    n_steps: int
    n_saves: int
    n_restores: int
    max_gradient_norm: float | None

    def build(self) -> nn.Module:
        """Return a freshly initialised model, in training mode, on the CPU."""
        ...

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """Return the optimizer; its parameter groups hold the peak learning rate."""
        ...

    def learning_rate_factor(self, step: int, n_steps: int) -> float:
        """Return the share of the peak learning rate at a step from 1 to `n_steps`."""
        ...

    def batch(self, step: int, generator: torch.Generator) -> Any:
        """Return the batch of a step: a tensor, or a tuple of them, on the CPU.

        `generator` is seeded by the run's seed and the step.
        """
        ...

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        """Return the training loss of a batch, a scalar."""
        ...

    def evaluate(self, model: nn.Module) -> float:
        """Return the metric on held-out data; the same ones always. Leaves the model as it was."""
        ...
