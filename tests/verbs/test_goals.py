"""What a run shrinks to for each goal, told from two of its steps."""

import tempfile

import pytest

import inshrink_core
from inshrink_core.verbs import estimate_goals
from inshrink_core.verbs.estimate import GOALS

STEPS = (1500, 1600, 1700, 1800, 1900, 2000)


@pytest.fixture(scope="module")
def run():
    return inshrink_core.open(inshrink_core.sample("digits-cnn"))


@pytest.fixture(scope="module")
def report(run):
    return estimate_goals(run, steps=STEPS, trials=None)


def test_goals_are_told_from_a_keyframe_and_a_delta_in_the_middle(run, report):
    assert report.tried == (1700, 1800)
    assert report.steps == STEPS
    assert report.run_bytes == sum(run[step].raw_bytes() for step in STEPS)
    assert [one.goal for one in report.goals] == [goal.name for goal in GOALS]


@pytest.mark.parametrize("position", range(3))
def test_a_goal_is_close_to_what_compress_writes_with_its_settings(run, report, tmp_path, position):
    goal, told = GOALS[position], report.goals[position]
    written = inshrink_core.compress(
        run, tmp_path / "made.inshrink", steps=STEPS, codec=goal.codec, optimizer=goal.optimizer
    )
    assert told.raw_bytes == written.size.raw_total
    assert told.archive_bytes == pytest.approx(written.size.nbytes, rel=0.25)
    assert told.bits_per_weight == pytest.approx(written.size.bits_per_weight, rel=0.25)
    assert told.ratio_total == pytest.approx(told.raw_bytes / told.archive_bytes, rel=1e-3)


def test_only_an_exact_goal_is_known_to_lose_nothing_without_trials(report):
    exact, *others = report.goals
    assert (exact.basis, exact.restore_cost, exact.drop, exact.relative_error) == ("exact", 0.0, 0.0, 0.0)
    for one in others:
        assert (one.basis, one.restore_cost, one.drop, one.divergence) == ("unknown", None, None, None)
        assert one.relative_error > 0


def test_progress_tells_each_goal_as_its_row_of_the_document(run):
    told = []
    report = estimate_goals(run, steps=STEPS[:2], progress=told.append, again=True)
    assert [now.found for now in told] == [one.to_json() for one in reversed(report.goals)]
    assert [(now.done, now.total) for now in told] == [(1, 3), (2, 3), (3, 3)]
    known = estimate_goals(run, steps=STEPS[:2])
    assert known.measured_at is not None
    assert known.goals == report.goals


def test_goals_that_lose_something_are_judged_at_the_steps_that_are_tried(run):
    told = []
    report = estimate_goals(run, steps=STEPS[:2], max_restore_cost=0.003, progress=told.append, again=True)
    assert [(now.found["goal"], now.found["basis"]) for now in told] == [
        ("weights", "unknown"), ("resume", "unknown"), ("exact", "exact"),
        ("weights", "judged"), ("resume", "judged"),
    ]  # fmt: skip
    for one in report.goals[1:]:
        assert (one.basis, report.bound) == ("judged", 0.003)
        assert 0 < one.restore_cost <= 0.003
        assert one.drop is not None
    written = inshrink_core.compress(
        run, tempfile.mkdtemp() + "/made.inshrink", steps=STEPS[:2], max_restore_cost=0.003
    )
    # Both steps of the chain were tried, so that it takes what was told, optimizer state included.
    assert report.goals[1].ratio_total == pytest.approx(written.size.ratio_total, rel=0.05)
    assert report.goals[2].ratio_weights == pytest.approx(written.size.ratio_weights, rel=0.05)
    assert written.to_json()["decided"]["step"] == STEPS[1]


def test_an_evaluator_that_does_not_run_leaves_the_goals_as_they_are_by_default(run, report, tmp_path):
    (tmp_path / "judge.py").write_text("import metrics_of_our_lab\n\n\ndef evaluate(state): ...\n")
    told = estimate_goals(
        run, steps=STEPS[:2], evaluator=f"{tmp_path}/judge.py:evaluate", max_restore_cost=0.003
    )
    assert told.evaluator_failed
    assert "metrics_of_our_lab" in told.not_judged
    assert told.bound is None
    assert [one.basis for one in told.goals] == [one.basis for one in report.goals]


def test_a_run_of_one_step_is_told_from_it(run):
    report = estimate_goals(run, steps=STEPS[-1:])
    assert report.tried == STEPS[-1:]
    assert all(one.archive_bytes > 0 for one in report.goals)
