"""``inshrink rehearse`` from the outside."""

import pytest

from benchmarks import documents
from inshrink_lab.rehearsal import Rehearsal

TASK = """
import torch
class Line:
    name, version, metric, direction = "line", 1, "loss", "lower"
    n_steps, n_saves, n_restores, max_gradient_norm = 8, 4, 2, None
    def build(self): return torch.nn.Linear(4, 1)
    def optimizer(self, model): return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    def learning_rate_factor(self, step, n_steps): return 1.0
    def batch(self, step, generator): return torch.randn(8, 4, generator=generator)
    def loss(self, model, batch): return (model(batch) - batch.sum(1, keepdim=True)).square().mean()
    def evaluate(self, model): return float(self.loss(model, torch.eye(4)).detach())
"""


@pytest.fixture
def task(tmp_path):
    path = tmp_path / "line.py"
    path.write_text(TASK)
    return f"{path}:Line"


def test_json_has_every_figure_and_each_is_documented(cli, task, tmp_path):
    outcome = cli("rehearse", task, "-o", tmp_path / "out", "--codec", "lossless", "--seeds", 2, "--json")
    assert outcome.code == 0
    document = outcome.document
    assert document["excess"] == document["excess_half_width"] == 0.0
    assert document["uninterrupted"] == document["restored"]
    assert document["restored_at"] == [2, 6]
    assert len(document["curves"]) == 2
    documented = documents.rows_of(Rehearsal).keys()
    assert set(document) | {f"curves[].{key}" for key in document["curves"][0]} <= documented
