"""Evaluators that run in the test's own process, in the place of a child's."""

import torch
from torch import nn

from inshrink_core.errors import NotFiniteError
from inshrink_core.metrics import Direction
from tests.builders import evaluation
from tests.runs import batch, model


class InProcess:
    """Loss and predictions of `tests.runs.model`, and how often it was asked."""

    which = ""
    metric: str | None = "loss"
    direction: Direction | None = Direction.LOWER

    def __init__(self, directory, *, with_log_probs=True, standard_error=None):
        file = directory / "in_process.py"
        file.write_text("# stands for the evaluator's source\n")
        self.spec = f"{file}:evaluate"
        self.with_log_probs, self.standard_error = with_log_probs, standard_error
        self.asked = 0
        self.closed = False

    def evaluate(self, state_dict):
        state = state_dict.state_dict() if hasattr(state_dict, "state_dict") else dict(state_dict)
        self.asked += 1
        network = model()
        network.load_state_dict(state)
        network.eval()
        inputs, targets = batch(10_000)
        with torch.inference_mode():
            log_probs = torch.log_softmax(network(inputs), dim=1)
        loss = self.judged(nn.functional.nll_loss(log_probs.double(), targets).item())
        if loss != loss:
            raise NotFiniteError("its 'loss' is nan", where=self.spec)
        arrays = {"log_probs": log_probs.numpy()} if self.with_log_probs else {}
        return evaluation(loss, error=self.standard_error, **arrays)

    def judged(self, loss):
        """Return what is said of a loss; a test may lie."""
        return loss

    def close(self):
        self.closed = True
