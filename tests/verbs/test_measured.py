"""What was measured once is an answer from then on: to whom, how long, and to nobody else."""

import json
import os

import pytest
import torch

import inshrink_core
from inshrink_core import Archive
from inshrink_core.errors import InputError
from inshrink_core.verbs import compare, compare_archives, prune, verify
from inshrink_core.verbs.shared.measured import Measurements, known_by_metric
from tests.builders import flip

JUDGE = """
import pathlib
def evaluate(state):
    with open(pathlib.Path(__file__).with_name("calls"), "a") as file:
        file.write("x")
    return {"loss": 1 + float(state["w"].norm()), "log_probs": (-state["w"].abs()).log_softmax(1)}
"""


def known_comparison(archive):
    """Return what was measured last."""
    return next(iter(known_by_metric(archive).values()), None)


@pytest.fixture
def judged(tmp_path, monkeypatch):
    """Return a run, its archive, an evaluator, and what counts how often that was asked."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    run = tmp_path / "runs" / "run"
    run.mkdir(parents=True)
    generator = torch.Generator().manual_seed(0)
    for step in (10, 20, 30):
        torch.save({"model": {"w": torch.randn(8, 8, generator=generator)}}, run / f"step_{step}.pt")
    (tmp_path / "judge.py").write_text(JUDGE)
    archive = tmp_path / "archives" / "mine.inshrink"
    archive.parent.mkdir()
    inshrink_core.compress(run, archive)
    calls = tmp_path / "calls"
    calls.write_text("")
    return run, archive, f"{tmp_path}/judge.py:evaluate", lambda: len(calls.read_text())


def test_a_comparison_is_answered_from_what_is_known_until_it_is_asked_for_again(judged):
    run, archive, judge, calls = judged
    first = compare(archive, run, evaluator=judge)
    asked = calls()
    known = compare(archive, run, evaluator=judge)
    assert calls() == asked
    assert known.measured_at is not None
    assert (known.steps, known.max_drop, known.device) == (first.steps, first.max_drop, first.device)
    assert compare(archive, run, evaluator=judge, steps=[20]).steps == first.steps[1:2]
    assert calls() == asked
    assert compare(archive, run, evaluator=judge, again=True).measured_at is None
    assert calls() == 2 * asked


def test_what_was_measured_before_an_interruption_is_not_measured_again(judged):
    run, archive, judge, calls = judged

    def interrupt(now):
        if now.done == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        compare(archive, run, evaluator=judge, progress=interrupt)
    before = calls()
    reported = []
    found = compare(archive, run, evaluator=judge, progress=reported.append)
    assert [row.step for row in found.steps] == [10, 20, 30]
    told = [(now.done, now.total, now.found["step"]) for now in reported]
    assert told == [(number, 3, 10 * number) for number in (1, 2, 3)]
    assert calls() - before == 3, "the step, the one before it, and what is restored"
    again = compare(archive, run, evaluator=judge, again=True)
    assert again.steps == found.steps


def test_another_evaluator_original_or_archive_is_another_question(judged, tmp_path):
    run, archive, judge, calls = judged
    compare(archive, run, evaluator=judge)
    asked = calls()
    (tmp_path / "judge.py").write_text(JUDGE + "# another\n")
    assert compare(archive, run, evaluator=judge).measured_at is None
    assert calls() == 2 * asked
    os.utime(run / "step_10.pt", ns=(1, 1))
    assert compare(archive, run, evaluator=judge, steps=[30]).measured_at is not None
    assert compare(archive, run, evaluator=judge, steps=[20]).measured_at is None, "its previous changed"
    prune(archive, keep_last=2, apply=True)
    assert compare(archive, run, evaluator=judge, steps=[30]).measured_at is None


def test_an_archive_that_shares_no_step_with_what_it_is_compared_with_is_refused(judged):
    run, archive, judge, _ = judged
    with pytest.raises(InputError, match="no step in common"):
        compare(archive, run, evaluator=judge, steps=[9999])


def test_what_was_measured_before_the_last_change_is_known_as_that(judged):
    run, archive, judge, _ = judged
    found = compare(archive, run, evaluator=judge)
    known = known_comparison(Archive.open(archive))
    assert known.is_current
    assert known.comparison.max_restore_cost == found.max_restore_cost
    prune(archive, keep_last=1, apply=True)
    known = known_comparison(Archive.open(archive))
    assert (known.is_current, len(known.comparison.steps)) == (False, 3)
    compare(archive, run, evaluator=judge)
    known = known_comparison(Archive.open(archive))
    assert (known.is_current, len(known.comparison.steps)) == (True, 1)


def test_writing_under_a_bound_is_a_comparison_of_every_step(judged):
    run, archive, judge, calls = judged
    bounded = archive.with_name("bounded.inshrink")
    written = inshrink_core.compress(run, bounded, max_restore_cost=0.01, evaluator=judge)
    asked = calls()
    known = compare(bounded, run, evaluator=judge)
    assert calls() == asked
    assert known.max_restore_cost == written.bound_record.to_json()["max_restore_cost"]
    fresh = compare(bounded, run, evaluator=judge, again=True)
    for was, row in zip(known.steps, fresh.steps, strict=True):
        assert was.restored == pytest.approx(row.restored, rel=1e-12)
        assert (was.drop, was.divergence, was.restore_cost) == (row.drop, row.divergence, row.restore_cost)
        assert (was.previous_drop, was.previous_divergence) == (row.previous_drop, row.previous_divergence)


def test_it_lies_with_the_user_a_log_for_each_archive(judged, tmp_path):
    run, archive, judge, _ = judged
    other = archive.with_name("other.inshrink")
    inshrink_core.compress(run, other, codec="lossless")
    compare_archives([archive, other], run, evaluator=judge)
    assert len(list((tmp_path / "cache" / "inshrink" / "measured").iterdir())) == 2
    assert not (run / ".inshrink").exists()
    moved = archive.rename(archive.with_name("moved.inshrink"))
    assert known_comparison(Archive.open(moved)) is not None


@pytest.mark.parametrize(
    ("field", "value"), [("steps", [{}]), ("steps", 3), ("at", 1e300), ("at", "x"), ("direction", "up")]
)
def test_a_kept_comparison_that_is_malformed_is_passed_over(judged, tmp_path, field, value):
    run, archive, judge, _ = judged
    compare(archive, run, evaluator=judge)
    (remaining,) = (tmp_path / "cache").rglob("*.jsonl")
    row = json.loads(remaining.read_text())
    (row if field == "at" else row["document"])[field] = value
    remaining.write_text(json.dumps(row) + "\nno JSON\n")
    assert known_comparison(Archive.open(archive)) is None


def test_a_cache_that_cannot_be_written_is_no_error(judged, tmp_path):
    run, archive, judge, _ = judged
    (tmp_path / "cache").write_text("a file in its place")
    assert compare(archive, run, evaluator=judge) == compare(archive, run, evaluator=judge)


def test_a_verification_reads_every_byte_each_time_and_is_known_afterwards(judged):
    run, archive, _, _ = judged
    assert verify(archive, deep=True, against=run).ok
    (frame, *_) = sorted((archive / "frames").iterdir())
    flip(frame)
    assert not verify(archive).ok
    newest, before = Measurements.of_archive(Archive.open(archive)).rows("verify")
    assert (newest.document["ok"], before.document["ok"]) == (False, True)
    assert before.document["tensors"] == {"all": 3, "exact": 0}
