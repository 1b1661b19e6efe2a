"""Evaluators that say what they know so far, and are stopped once that is enough."""

from __future__ import annotations

import textwrap
from pathlib import Path

import numpy as np
import pytest
import torch

from inshrink_core.errors import EvaluatorError, InputError
from inshrink_core.evaluate import Evaluation, Evaluator, PartialEvaluation
from inshrink_core.metrics import Direction

STATE = {"w": torch.tensor([3.0, 4.0])}
COUNTING = """
for n in (1, 2, 3):
    Path(__file__).with_name("seen.txt").open("a").write(f"{n} ")
    yield {"loss": 10.0 * n, "n": n, "of": 4, "range": {"loss": (0, None)},
           "standard_errors": {"loss": 0.5}, "log_probs": torch.full((n, 2), 0.5).log()}
yield {"loss": 7.0, "log_probs": torch.full((6, 2), 0.5).log()}
"""


@pytest.fixture(scope="module")
def child(tmp_path_factory):
    """An evaluator that runs whatever source lies beside it: one start of torch for all tests."""
    path = tmp_path_factory.mktemp("streaming") / "evaluator.py"
    path.write_text(
        "from pathlib import Path\n"
        "def run_source(state):\n"
        "    names = {'__file__': __file__}\n"
        "    exec(Path(__file__).with_name('source.txt').read_text(), names)\n"
        "    return names['evaluate'](state)\n"
    )
    with Evaluator(f"{path}:run_source", timeout=60) as made:
        yield made


@pytest.fixture
def streaming(child):
    """Return a function that makes an evaluator from the body of a generator function."""
    folder = Path(child.spec.rpartition(":")[0]).parent

    def make(body, metric=None):
        source = "import torch\nfrom pathlib import Path\ndef evaluate(state):\n" + textwrap.indent(
            body, "    "
        )
        (folder / "source.txt").write_text(source)
        (folder / "seen.txt").write_text("")
        child.metric, child.timeout = metric, 60
        return child

    make.seen = lambda: (folder / "seen.txt").read_text().split()
    return make


def test_an_evaluator_that_nobody_stops_says_its_last_word(streaming):
    found = streaming(COUNTING).evaluate(STATE)
    assert (found.value, found.log_probs.shape) == (7.0, (6, 2))
    told = []
    whole = streaming(COUNTING).evaluate_until(STATE, lambda so_far: bool(told.append(so_far)))
    assert isinstance(whole, Evaluation)
    assert (whole.value, whole.metrics) == (7.0, {"loss": 7.0})
    assert [(one.value, one.n, one.of) for one in told] == [(10.0, 1, 4), (20.0, 2, 4), (30.0, 3, 4)]
    assert told[0].limits == (0.0, None)
    assert (told[0].metric, told[0].direction) == ("loss", Direction.LOWER)
    assert told[0].standard_error == 0.5
    assert [len(one.log_probs) for one in told] == [1, 2, 3]


def test_an_evaluator_that_is_stopped_looks_at_no_further_sample_and_serves_the_next_state(streaming):
    judge = streaming(COUNTING)
    found = judge.evaluate_until(STATE, lambda so_far: so_far.n == 2)
    assert isinstance(found, PartialEvaluation)
    assert (found.value, found.n) == (20.0, 2)
    assert streaming.seen() == ["1", "2"]
    assert judge.evaluate(STATE).value == 7.0


def test_an_evaluator_that_returns_is_measured_in_full(streaming):
    never = pytest.fail
    assert streaming("return {'loss': 2.0}").evaluate_until(STATE, never).value == 2.0


def test_a_metric_called_n_alone_makes_no_partial_result(streaming):
    found = streaming("return {'loss': 2.0, 'n': 3}").evaluate_until(STATE, pytest.fail)
    assert found.metrics == {"loss": 2.0, "n": 3.0}


def test_another_metric_than_the_one_asked_for_has_no_value(streaming):
    body = "yield {'accuracy': 0.5, 'n': 1, 'of': 2}\nyield {'loss': 1.0, 'accuracy': 0.5}"
    told = []
    streaming(body, metric="loss").evaluate_until(STATE, lambda so_far: bool(told.append(so_far)))
    assert [one.value for one in told] == [None]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("yield {'loss': 1.0, 'n': 1, 'of': 2}", "no full result"),
        ("return\nyield", "no full result"),
        ("yield {'loss': 1.0, 'n': 3, 'of': 2}\nyield {'loss': 1.0}", "3 of 2"),
        ("yield {'loss': 1.0, 'n': 0, 'of': 2}\nyield {'loss': 1.0}", "0 of 2"),
        ("yield {'loss': 1.0, 'n': 1.5, 'of': 2}\nyield {'loss': 1.0}", "1.5 of 2"),
        ("yield {'loss': 1.0, 'n': 1, 'of': 2, 'range': (0, 1)}\nyield {'loss': 1.0}", "'range'"),
        ("yield {'loss': 1.0, 'n': 1, 'of': 2, 'range': {'loss': (0,)}}\nyield {'loss': 1.0}", "'range'"),
        ("yield {'loss': 2.0, 'n': 1, 'of': 2, 'range': {'loss': (0, 1)}}\nyield {'loss': 1.0}", "outside"),
        ("yield {'loss': 1.0, 'n': 1, 'of': 2, 'log_probs': torch.zeros(3)}\nyield {'loss': 1.0}", "shape"),
        ("yield {'loss': 'low', 'n': 1, 'of': 2}\nyield {'loss': 1.0}", "not a number"),
        ("yield {'loss': 1.0, 'n': 1, 'of': 2}\nraise ValueError('no luck')", "no luck"),
    ],
)
def test_a_partial_result_of_no_use_is_one_error_and_the_next_state_is_judged(streaming, body, message):
    judge = streaming(body)
    with pytest.raises(EvaluatorError, match=message) as caught:
        judge.evaluate_until(STATE, lambda so_far: False)
    assert "\n" not in str(caught.value)
    assert streaming("return {'loss': 5.0}").evaluate(STATE).value == 5.0


def test_who_decides_may_fail_without_harm_to_the_next_evaluation(streaming):
    judge = streaming(COUNTING)

    def stop(so_far):
        raise InputError("not today")

    with pytest.raises(InputError, match="not today"):
        judge.evaluate_until(STATE, stop)
    assert np.isclose(judge.evaluate(STATE).value, 7.0)


def test_the_timeout_is_of_the_whole_evaluation_not_of_each_partial_result(streaming):
    judge = streaming(
        "import time\nfor n in range(1, 100):\n"
        "    time.sleep(0.2)\n    yield {'loss': 1.0, 'n': n, 'of': 100}\n"
        "yield {'loss': 1.0}"
    )
    judge.timeout = 0.7
    with pytest.raises(EvaluatorError, match="did not answer within"):
        judge.evaluate_until(STATE, lambda so_far: False)
