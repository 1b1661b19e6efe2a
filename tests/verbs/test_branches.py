"""Checkpoints with a name of their own are archived beside the steps, and nothing is left out in silence."""

import shutil

import pytest

import inshrink_core
from inshrink_core.errors import NotFoundError, StepConflictError, UnreadableError
from inshrink_core.verbs import prune
from tests.formats.test_runs import save


@pytest.fixture
def run(tmp_path):
    """Three epochs, with a best one of other values, and a last one that is a copy."""
    folder = tmp_path / "run"
    for epoch in (1, 2, 3):
        save(folder / f"epoch_{epoch}.pth", epoch)
    save(folder / "best.pth", 9)
    shutil.copy(folder / "epoch_3.pth", folder / "last.pth")
    return folder


def compress(run, archive, **options):
    return inshrink_core.compress(run, archive, codec="lossless", **options)


def test_a_branch_is_archived_once_and_is_never_the_last_step(run, tmp_path):
    archive = tmp_path / "a.inshrink"
    report = compress(run, archive)
    assert (report.appended, report.branches) == ((1, 2, 3), ("best",))
    assert report.fates == {"step": 3, "branch": 1, "duplicate": 1}
    assert compress(run, archive).branches == ()
    opened = inshrink_core.open(archive)
    assert opened.steps == (1, 2, 3)
    assert opened.last.step == 3
    assert not opened.last.is_named


def test_a_branch_is_restored_by_its_name_and_with_all(run, tmp_path):
    archive = tmp_path / "a.inshrink"
    compress(run, archive)
    inshrink_core.restore(archive, tmp_path / "one", branch="best")
    assert (tmp_path / "one" / "best.pth").read_bytes() == (run / "best.pth").read_bytes()
    inshrink_core.restore(archive, tmp_path / "all", every=True)
    epochs = {f"epoch_{epoch}.pth" for epoch in (1, 2, 3)}
    assert {path.name for path in (tmp_path / "all").iterdir()} == {"best.pth"} | epochs
    inshrink_core.restore(archive, tmp_path / "last")
    assert [path.name for path in (tmp_path / "last").iterdir()] == ["epoch_3.pth"]
    with pytest.raises(NotFoundError, match="best"):
        inshrink_core.restore(archive, tmp_path / "none", branch="worst")


def test_steps_go_on_after_a_branch_and_a_branch_is_replaced(run, tmp_path):
    archive = tmp_path / "a.inshrink"
    compress(run, archive)
    save(run / "epoch_4.pth", 4)
    save(run / "best.pth", 10)
    report = compress(run, archive)
    assert (report.appended, report.branches) == ((4,), ("best",))
    opened = inshrink_core.open(archive)
    assert opened.steps == (1, 2, 3, 4)
    inshrink_core.restore(archive, tmp_path / "out", branch="best")
    assert (tmp_path / "out" / "best.pth").read_bytes() == (run / "best.pth").read_bytes()
    assert inshrink_core.verify(archive, deep=True, against=run).ok


def test_verify_misses_a_branch_that_is_not_archived(run, tmp_path):
    archive = tmp_path / "a.inshrink"
    compress(run, archive, steps=":")
    assert any(
        "branch 'best'" in problem.what for problem in inshrink_core.verify(archive, against=run).problems
    )
    compress(run, archive)
    assert inshrink_core.verify(archive, against=run).ok


def test_pruning_keeps_a_branch(run, tmp_path):
    archive = tmp_path / "a.inshrink"
    compress(run, archive)
    prune(archive, keep_last=1, apply=True)
    opened = inshrink_core.open(archive)
    assert opened.steps == (3,)
    assert list(opened.branches) == ["best"]
    assert inshrink_core.verify(archive, deep=True).ok


@pytest.mark.parametrize("how", ["damaged", "deep"])
def test_what_is_lost_ends_compress_and_verify_with_an_error(run, tmp_path, how, monkeypatch):
    archive = tmp_path / "a.inshrink"
    if how == "damaged":
        (run / "epoch_4.pth").write_bytes((run / "epoch_3.pth").read_bytes()[:300])
    else:
        monkeypatch.setattr("inshrink_core.formats.discovery.MAX_ENTRIES", 10)
        for epoch in range(4, 14):
            save(run / "later" / f"epoch_{epoch}.pth", epoch)
    with pytest.raises(UnreadableError) as caught:
        compress(run, archive)
    assert caught.value.report.appended == (1, 2, 3)
    assert not inshrink_core.verify(archive, against=run).ok
    assert compress(run, archive, skip_damaged=True).fates["excluded"] > 0


def test_a_step_that_is_archived_late_is_not_the_last(run, tmp_path):
    archive = tmp_path / "a.inshrink"
    compress(run, archive, steps=[2, 3])
    assert compress(run, archive).appended == (1,)
    assert inshrink_core.open(archive).last.step == 3
    inshrink_core.restore(archive, tmp_path / "out")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["epoch_3.pth"]
    prune(archive, keep_last=2, apply=True)
    assert {2, 3} <= set(inshrink_core.open(archive).steps)
    assert inshrink_core.verify(archive, deep=True).ok


def test_a_file_that_changes_while_it_is_read_is_pending(run, tmp_path):
    opened = inshrink_core.open(run)
    save(run / "epoch_3.pth", 33)
    report = compress(opened, tmp_path / "a.inshrink")
    assert report.appended == (1, 2)
    assert report.fates["pending"] == 1


def test_a_file_that_changes_the_order_of_archived_steps_is_refused(tmp_path):
    run, archive = tmp_path / "run", tmp_path / "a.inshrink"
    for name in ("b", "c"):
        save(run / f"{name}.pt", ord(name))
    compress(run, archive)
    save(run / "a.pt", 1)
    with pytest.raises(StepConflictError, match="as another file"):
        compress(run, archive)
