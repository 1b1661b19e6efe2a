"""What an archive of a run takes for each of several purposes, told from two of its steps."""

import tempfile

import pytest

import inshrink_core
from inshrink_core.errors import InputError
from inshrink_core.verbs import estimate

STEPS = (1500, 1600, 1700, 1800, 1900, 2000)
WEIGHTS = {"codec": "lattice", "optimizer": "drop"}
EACH = ("optimizer=compressed", "codec=lossless,optimizer=exact")
PURPOSES = (("lattice", "drop"), ("lattice", "compressed"), ("lossless", "exact"))


def tried(run, **asked):
    """Return the report, and the estimates of weights alone, of all, and of every bit."""
    report = estimate(run, **WEIGHTS, each=EACH, tried=2, **asked)
    return report, (report, *report.each)


@pytest.fixture(scope="module")
def run():
    return inshrink_core.open(inshrink_core.sample("digits-cnn"))


@pytest.fixture(scope="module")
def rows(run):
    return tried(run, steps=STEPS, trials=None)[1]


def test_an_archive_is_told_from_a_keyframe_and_a_delta_in_the_middle(run, rows):
    for one, purpose in zip(rows, PURPOSES, strict=True):
        assert (one.set["codec"], one.set["optimizer"]) == purpose
        assert one.archive.tried == (1700, 1800)
        assert one.archive.run_bytes == sum(run[step].raw_bytes() for step in STEPS)


@pytest.mark.parametrize("position", range(3))
def test_an_archive_is_close_to_what_compress_writes_with_its_settings(run, rows, tmp_path, position):
    (codec, optimizer), told = PURPOSES[position], rows[position]
    written = inshrink_core.compress(
        run, tmp_path / "made.inshrink", steps=STEPS, codec=codec, optimizer=optimizer
    )
    assert told.archive.raw_bytes == written.size.raw_total
    assert told.archive.nbytes == pytest.approx(written.size.nbytes, rel=0.25)
    assert told.archive.bits_per_weight == pytest.approx(written.size.bits_per_weight, rel=0.25)
    assert told.ratio_total == pytest.approx(told.archive.raw_bytes / told.archive.nbytes, rel=1e-3)


def test_only_an_exact_archive_is_known_to_lose_nothing_without_trials(rows):
    *others, exact = rows
    assert (exact.archive.basis, exact.archive.restore_cost, exact.drop) == ("exact", 0.0, 0.0)
    assert exact.archive.relative_error == 0.0
    for one in others:
        assert (one.archive.basis, one.archive.restore_cost, one.basis) == ("unknown", None, "rule of thumb")
        assert one.archive.relative_error > 0


def test_progress_tells_each_configuration_as_its_row_of_the_document(run):
    told = []
    report, rows = tried(run, steps=STEPS[:2], progress=told.append, again=True)
    for now, one in zip(told, rows, strict=True):
        document = one.to_json() | {"seconds": now.found["seconds"]}
        document.pop("each", None)
        assert now.found == document
    assert [(now.done, now.total) for now in told] == [(2, 6), (4, 6), (6, 6)]
    known, _ = tried(run, steps=STEPS[:2])
    assert known.measured_at is not None
    assert known.each == report.each


def test_what_loses_something_is_judged_at_the_steps_that_are_tried(run):
    told = []
    _, rows = tried(run, steps=STEPS[:2], max_restore_cost=0.003, progress=told.append, again=True)
    assert [(now.found["set"]["optimizer"], now.found["archive"]["basis"]) for now in told] == [
        ("drop", "unknown"), ("compressed", "unknown"), ("exact", "exact"),
        ("drop", "judged"), ("compressed", "judged"),
    ]  # fmt: skip
    for one in rows[:2]:
        assert (one.archive.basis, one.archive.bound) == ("judged", 0.003)
        assert 0 < one.archive.restore_cost <= 0.003
        assert one.drop is not None
    written = inshrink_core.compress(
        run, tempfile.mkdtemp() + "/made.inshrink", steps=STEPS[:2], max_restore_cost=0.003
    )
    # Both steps of the chain were tried, so that it takes what was told, optimizer state included.
    assert rows[1].ratio_total == pytest.approx(written.size.ratio_total, rel=0.05)
    assert rows[0].ratio_weights == pytest.approx(written.size.ratio_weights, rel=0.05)
    assert written.to_json()["decided"]["step"] == STEPS[1]


def test_an_evaluator_that_does_not_run_leaves_the_estimates_as_they_are_by_default(run, rows, tmp_path):
    (tmp_path / "judge.py").write_text("import metrics_of_our_lab\n\n\ndef evaluate(state): ...\n")
    _, told = tried(run, steps=STEPS[:2], evaluator=f"{tmp_path}/judge.py:evaluate", max_restore_cost=0.003)
    for now, before in zip(told, rows, strict=True):
        assert now.archive.evaluator_failed
        assert "metrics_of_our_lab" in now.archive.not_judged
        assert now.archive.bound is None
        assert now.archive.basis == before.archive.basis


def test_a_run_of_one_step_is_told_from_it(run):
    _, rows = tried(run, steps=STEPS[-1:])
    assert all(one.archive.tried == STEPS[-1:] and one.archive.nbytes > 0 for one in rows)


def test_a_bound_without_steps_to_try_is_refused(run):
    with pytest.raises(InputError, match="--max-restore-cost goes with --try"):
        estimate(run, max_restore_cost=0.003)
