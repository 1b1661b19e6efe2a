"""What an archive of a run takes for each of several purposes, told from two of its steps."""

import tempfile

import pytest

import inshrink_core
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
    return tried(run, steps=STEPS)[1]


def test_an_archive_is_told_from_a_keyframe_and_a_delta_in_the_middle(run, rows):
    for row, purpose in zip(rows, PURPOSES, strict=True):
        assert (row.set["codec"], row.set["optimizer"]) == purpose
        assert row.archive.tried == (1700, 1800)


@pytest.mark.parametrize("position", range(3))
def test_an_archive_is_close_to_what_compress_writes_with_its_settings(run, rows, tmp_path, position):
    (codec, optimizer), reported = PURPOSES[position], rows[position]
    written = inshrink_core.compress(
        run, tmp_path / "made.inshrink", steps=STEPS, codec=codec, optimizer=optimizer
    )
    assert reported.archive.raw_bytes == written.size.raw_total
    assert reported.archive.nbytes == pytest.approx(written.size.nbytes, rel=0.25)
    assert reported.archive.bits_per_weight == pytest.approx(written.size.bits_per_weight, rel=0.25)
    assert reported.ratio_total == pytest.approx(
        reported.archive.raw_bytes / reported.archive.nbytes, rel=1e-3
    )


def test_only_an_exact_archive_is_known_to_lose_nothing_without_trials(rows):
    *others, exact = rows
    assert (exact.archive.basis, exact.archive.restore_cost, exact.drop) == ("exact", 0.0, 0.0)
    for other in others:
        assert (other.archive.basis, other.archive.restore_cost, other.basis) == (
            "unknown",
            None,
            "rule of thumb",
        )


def test_progress_tells_each_configuration_as_its_row_of_the_document(run):
    reported = []
    report, rows = tried(run, steps=STEPS[:2], progress=reported.append, again=True)
    for now, item in zip(reported, rows, strict=True):
        document = item.to_json() | {"seconds": now.found["seconds"]}
        document.pop("each", None)
        assert now.found == document
    assert [(now.done, now.total) for now in reported] == [(2, 6), (4, 6), (6, 6)]
    known, _ = tried(run, steps=STEPS[:2])
    assert known.measured_at is not None
    assert known.each == report.each


@pytest.mark.parametrize(("bound", "figure"), [("max_restore_cost", "restore_cost"), ("max_drop", "drop")])
def test_what_loses_something_is_judged_at_the_steps_that_are_tried(run, bound, figure):
    reported, bounds = [], {bound: 0.003}
    _, rows = tried(run, steps=STEPS[:2], progress=reported.append, again=True, **bounds)
    assert [(now.found["set"]["optimizer"], now.found["archive"]["basis"]) for now in reported] == [
        ("drop", "unknown"), ("compressed", "unknown"), ("exact", "exact"),
        ("drop", "judged"), ("compressed", "judged"),
    ]  # fmt: skip
    for row in rows[:2]:
        assert row.archive.basis == "judged"
        assert (row.drop if figure == "drop" else row.archive.restore_cost) <= 0.003
        assert row.drop is not None
    written = inshrink_core.compress(run, tempfile.mkdtemp() + "/made.inshrink", steps=STEPS[:2], **bounds)
    # Both steps of the chain were tried, so that it takes what was told, optimizer state included.
    assert rows[1].ratio_total == pytest.approx(written.size.ratio_total, rel=0.05)
    assert rows[0].ratio_weights == pytest.approx(written.size.ratio_weights, rel=0.05)


def test_an_evaluator_that_does_not_run_leaves_the_estimates_as_they_are_by_default(run, rows, tmp_path):
    (tmp_path / "judge.py").write_text("import metrics_of_our_lab\n\n\ndef evaluate(state): ...\n")
    _, reported = tried(
        run, steps=STEPS[:2], evaluator=f"{tmp_path}/judge.py:evaluate", max_restore_cost=0.003
    )
    for now, before in zip(reported, rows, strict=True):
        assert now.archive.evaluator_failed
        assert "metrics_of_our_lab" in now.archive.not_evaluated
        assert now.archive.basis == before.archive.basis


def test_a_run_of_one_step_is_told_from_it(run):
    _, rows = tried(run, steps=STEPS[-1:])
    assert all(row.archive.tried == STEPS[-1:] and row.archive.nbytes > 0 for row in rows)
