"""`inshrink search`, `estimate` and `compress --max-drop`: one clear line for everything that goes wrong."""

import io
import json
import re
import sys
import textwrap

import pytest

from inshrink_core.cli.output import shown_progress
from inshrink_core.execution.progress import Progress
from inshrink_core.verbs.search import Search
from tests.cli.conftest import one_line

GOOD = """
import torch

def evaluate(state):
    {body}
    value = sum(float(t.double().square().sum()) for k, t in state.items() if k.endswith("weight"))
    return {{"{metric}": 1 + value / 1e3, "standard_errors": {{"{metric}": 1e-9}}}}
"""


@pytest.fixture
def judge(tmp_path):
    """Return a function that writes an evaluator which first runs `body`."""

    def write(body="pass", metric="loss"):
        path = tmp_path / "judge.py"
        path.write_text(textwrap.dedent(GOOD).format(body=body, metric=metric))
        return f"{path}:evaluate"

    return write


def test_a_search_writes_a_result_that_compress_and_estimate_take(
    cli, small_run, tmp_path, judge, monkeypatch
):
    monkeypatch.setenv("COLUMNS", "120")
    result = tmp_path / "search.json"
    found = cli("search", small_run, "--max-drop", "0.02", "-o", result, "--evaluator", judge(),
                "--eval-metric", "loss",
                "--budget", 4, "--json")  # fmt: skip
    assert found.code == 0, found.err
    document = found.document
    assert document["best"]["drop"] <= 0.02
    assert json.loads(result.read_text())["best"] == document["best"]
    written = cli("compress", small_run, "-o", tmp_path / "a.inshrink", "--config", result, "--json")
    assert written.code == 0
    settings = document["best"]["config"]["settings"]
    assert written.document["config"]["coarseness"] == settings["coarseness"]
    estimated = cli("estimate", small_run, "--config", result, "--json")
    assert estimated.document["ratio_weights"] == pytest.approx(written.document["ratio_weights"], rel=0.05)
    assert estimated.document["drop"] is not None
    again = cli("search", small_run, "--max-drop", "0.02", "-o", result, "--evaluator", judge(),
                "--eval-metric", "loss",
                "--budget", 4)  # fmt: skip
    assert re.search(r"^evaluations +0$", again.out, re.MULTILINE)
    shown = cli("estimate", small_run, "--config", result)
    assert "estimated" in shown.out
    each = cli("estimate", small_run, "--codec", "uniform", "--set", "bits=8", "--each", "bits=1", "--try", 2)
    assert [line.split()[0] for line in each.out.splitlines()[3:5]] == ["uniform", "uniform"]
    assert "bits=1" in each.out
    assert "tried" in each.out


@pytest.mark.parametrize(
    ("body", "metric", "message"),
    [
        ("raise ValueError('no such luck')", "loss", "no such luck"),
        ("return {'loss': 0.0}", "loss", "metric of zero"),
    ],
    ids=["raises", "zero"],
)
def test_an_evaluator_of_no_use_is_one_line_and_leaves_nothing_behind(
    cli, small_run, tmp_path, judge, body, metric, message
):
    outcome = cli("compress", small_run, "-o", tmp_path / "a.inshrink", "--max-drop", "0.01",
                  "--evaluator", judge(body, metric), "--eval-metric", metric, "--steps", 10)  # fmt: skip
    assert message in one_line(outcome)
    assert not (tmp_path / "a.inshrink").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("search", "--max-drop", "nan"), "--max-drop nan"),
        (("search", "--max-drop", "0.01", "--config", "none.json"), "found no configuration"),
        (("estimate", "--max-restore-cost", 0.1), "bounds go with --try"),
        (("estimate", "--each", "bits"), "--set bits"),
        (("estimate", "--try", 0), "--try 0 (expected ≥ 1"),
    ],
)
def test_a_request_that_cannot_be_met_is_one_line(cli, small_run, tmp_path, words, message):
    (tmp_path / "none.json").write_text('{"best": null, "trials": []}')
    verb, *rest = (tmp_path / word if word == "none.json" else word for word in words)
    outcome = cli(verb, small_run, *rest)
    assert message in one_line(outcome)


def test_a_bar_is_shown_where_somebody_watches(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    monkeypatch.setattr(sys, "stderr", Terminal())
    now = Progress("search", 3, 8, 100, "best so far 7.00×")
    with shown_progress(Search("run", max_drop=0.1), "bar", hidden=False) as tell:
        tell(now)
    shown = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", sys.stderr.getvalue())
    assert "search step 100" in shown
    assert "evaluation 3 of at most 8, 0" in shown
    assert "best so far 7.00×" in shown
    with shown_progress(Search("run", max_drop=0.1), "bar", hidden=True) as tell:
        assert tell is None
