"""A whole bench on a tiny training: what is measured, kept, reported and refused."""

import json
import shutil

import pytest
import torch

from inshrink_core.errors import EvaluatorError, InputError, NotFoundError
from inshrink_core.evaluate import Evaluator, EvaluatorRequest
from inshrink_core.formats import open_run
from inshrink_lab.bench.benchmark import bench
from inshrink_lab.bench.measure import Measurer
from tests.builders import evaluation
from tests.runs import write_run

KEYS = [
    *("codec", "bound_kind", "bound", "kept", "ratio_weights", "ratio_total", "max_drop", "mean_divergence"),
    "config",
]


def figures(state):
    """A loss and predictions that mind every error of the last layer."""
    weight = state["4.weight"].double()
    return {
        "loss": float(weight.square().mean()),
        "log_probs": torch.log_softmax(weight[:, :40].T * 3, 1).numpy(),
    }


class InProcess(Evaluator):
    """An evaluator without a process of its own, which takes seconds to start, that counts questions."""

    judge, asked = staticmethod(figures), 0

    def evaluate(self, state):
        InProcess.asked += 1
        found = dict(InProcess.judge(state))
        return evaluation(found.pop("loss"), **found)


class Evaluated:
    """A run, and the file that its evaluator claims to be."""

    def __init__(self, folder):
        self.file, self.run = folder / "judge.py", open_run(folder / "run")
        self.file.write_text("first version")

    def bench(self, codecs, **options):
        return bench(self.run, codecs=codecs, evaluator=f"{self.file}:evaluate", **options)

    @property
    def asked(self):
        return InProcess.asked


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    return write_run(tmp_path_factory.mktemp("trained"), n_steps=3)


@pytest.fixture
def judged(trained, tmp_path, monkeypatch):
    monkeypatch.setattr(InProcess, "judge", staticmethod(figures))
    monkeypatch.setattr(InProcess, "asked", 0)
    monkeypatch.setattr(EvaluatorRequest, "resolve", lambda asked, *_: InProcess(asked.evaluator))
    shutil.copytree(trained, tmp_path / "run")
    return Evaluated(tmp_path)


def test_a_row_for_each_codec_and_bound_the_stale_copy_among_them(judged):
    report = judged.bench("lossless,uniform:bits=8", bounds="drop=0.01,divergence=0.01")
    rows = report.to_json()["rows"]
    assert [(row["codec"], row["bound_kind"], row["bound"]) for row in rows] == [
        (codec, kind, 0.01)
        for codec in ("repeat", "lossless", "uniform:bits=8")
        for kind in ("drop", "divergence")
    ]
    assert all(list(row) == KEYS for row in rows)
    repeat, lossless, uniform = rows[1], rows[3], rows[5]
    assert repeat["ratio_weights"] is None
    assert repeat["mean_divergence"] > uniform["mean_divergence"] > 0 == lossless["mean_divergence"]
    assert lossless["max_drop"] == 0
    assert uniform["ratio_weights"] > lossless["ratio_weights"] > 1
    for row in (lossless, uniform):
        assert row["config"]


def test_each_original_is_evaluated_once_and_each_restored_step_once_a_point(judged):
    # And the first original once more, to see that the evaluator says the same again.
    report = judged.bench("lossless,uniform:bits=8,uniform:bits=4")
    assert report.measured == 4
    assert judged.asked == 1 + 3 + 3 * 3


def test_the_same_folder_measures_nothing_again(judged, tmp_path):
    first = judged.bench("lossless,uniform:bits=8", output=tmp_path / "out")
    asked = judged.asked
    again = judged.bench("uniform:bits=8,lossless", output=tmp_path / "out")
    assert (again.measured, again.resumed, judged.asked) == (0, 3, asked)
    assert {row.codec: row.point for row in again.rows} == {row.codec: row.point for row in first.rows}
    more = judged.bench("uniform:bits=7", output=tmp_path / "out")
    assert (more.measured, more.resumed) == (1, 1)


@pytest.mark.parametrize("what", ["evaluator", "run", "steps", "optimizer", "keyframes"])
def test_what_a_point_depends_on_makes_it_another(judged, tmp_path, what):
    judged.bench("uniform:bits=8", output=tmp_path / "out")
    options = {}
    if what == "evaluator":
        judged.file.write_text("second version")
    elif what == "run":
        state = torch.load(tmp_path / "run" / "step_15.pt", weights_only=True)
        torch.save(state | {"note": 1}, tmp_path / "run" / "step_15.pt")
        judged.run = judged.run.refresh()
    else:
        options = {
            "steps": {"steps": [5, 10]},
            "optimizer": {"optimizer": "compressed"},
            "keyframes": {"keyframe_every": 2},
        }[what]
    again = judged.bench("uniform:bits=8", output=tmp_path / "out", **options)
    assert again.measured == (1 if what in ("optimizer", "keyframes") else 2)


def test_what_was_measured_before_ctrl_c_is_kept_and_shown(judged, tmp_path, monkeypatch):
    measure, done = Measurer.measure, []

    def interrupted(self, variant, value, evaluated):
        if len(done) == 2:
            raise KeyboardInterrupt
        done.append(value)
        return measure(self, variant, value, evaluated)

    monkeypatch.setattr(Measurer, "measure", interrupted)
    with pytest.raises(KeyboardInterrupt):
        judged.bench("uniform", output=tmp_path / "out", steps=[5, 10])
    points = json.loads((tmp_path / "out" / "points.json").read_text())["points"]
    assert [point["tunable"] for point in points] == [None, 8, 7]
    monkeypatch.setattr(Measurer, "measure", measure)
    report = judged.bench("uniform", output=tmp_path / "out", steps=[5, 10], bounds="divergence=0")
    assert report.resumed == 3
    rows = json.loads((tmp_path / "out" / "points.json").read_text())["rows"]
    assert rows == json.loads(json.dumps([row.to_json() for row in report.rows]))


def test_a_restored_state_that_the_evaluator_refuses_keeps_no_bound(judged, monkeypatch):
    def refuse(state):
        if state["4.weight"].unique().numel() < 9:
            raise EvaluatorError("too few values")
        return figures(state)

    monkeypatch.setattr(InProcess, "judge", staticmethod(refuse))
    report = judged.bench("uniform:bits=8,uniform:bits=2")
    kept = {row.codec for row in report.rows if row.kept}
    assert "uniform:bits=8" in kept
    assert "uniform:bits=2" not in kept
    assert any("too few values" in note for note in report.notes)


@pytest.mark.parametrize(
    ("judge", "bounded", "refused", "message"),
    [
        (lambda state: {"loss": figures(state)["loss"]}, "drop", "divergence=0.01", "log_probs"),
        (lambda state: figures(state) | {"loss": 0.0}, "divergence", "drop=0.01", "metric of zero"),
    ],
)
def test_what_an_evaluator_does_not_return_is_not_bounded(
    judged, monkeypatch, judge, bounded, refused, message
):
    monkeypatch.setattr(InProcess, "judge", staticmethod(judge))
    assert {row.bound.kind for row in judged.bench("lossless").rows} == {bounded}
    with pytest.raises(InputError, match=message):
        judged.bench("lossless", bounds=refused)


def test_excp_keeps_its_own_rule_for_moments_where_others_drop_them(judged):
    report = judged.bench("excp:alpha=0.001,uniform:bits=8")
    excp, uniform = report.points["excp:alpha=0.001"][0], report.points["uniform:bits=8"][0]
    assert excp.ratio_total > 1.03 * excp.ratio_weights
    assert uniform.ratio_total == pytest.approx(uniform.ratio_weights, rel=0.02)
    assert any("excp" in note and "own rule" in note for note in report.notes)


def test_nothing_is_left_behind_and_the_run_is_untouched(judged, tmp_path, monkeypatch):
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(scratch))
    before = {path: path.read_bytes() for path in (tmp_path / "run").iterdir()}
    judged.bench("uniform:bits=8")
    assert list(scratch.iterdir()) == []
    assert {path: path.read_bytes() for path in (tmp_path / "run").iterdir()} == before


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"steps": [5]}, InputError),
        ({"steps": [5, 6]}, NotFoundError),
        ({"optimizer": "half"}, InputError),
        ({"refine": -1}, InputError),
        ({"keyframe_every": 0}, InputError),
        ({"bounds": "drop=x"}, InputError),
        ({"device": "nonsense"}, InputError),
    ],
)
def test_bad_input_is_refused_before_anything_is_evaluated(judged, options, error):
    with pytest.raises(error):
        judged.bench("lossless", **options)
    assert judged.asked == 0
