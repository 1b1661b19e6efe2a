"""The card that writes an archive: what a run shrinks to, and one button that does the whole."""

from __future__ import annotations

import hashlib
import shlex
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from inshrink_app import services
from inshrink_app.pages.run.shrinking import Intent, Written
from inshrink_app.server import roots
from inshrink_app.server.recent import trust
from inshrink_app.services import Bound, Chosen
from inshrink_app.widgets import fmt

import inshrink_core
from tests.app.builders import SAMPLE, button, explorer, judged, linked, open_panel, primary, texts
from tests.app.job_stubs import option, work

WRITE = "Write archive"


def goals(**changes: Any) -> dict[str, Any]:
    """Return what ``inshrink estimate --each`` tells of the goals."""
    rows = []
    for codec, optimizer, nbytes, basis in (
        ("lattice", "drop", 250_000, "unknown"),
        ("lattice", "compressed", 500_000, "unknown"),
        ("lossless", "exact", 8_000_000, "exact"),
    ):
        archive = {"run_bytes": 10_000_000, "tried": [20, 30], "nbytes": nbytes, "bits_per_weight": 2.5}
        archive |= {"basis": basis, "restore_cost": None, "relative_error": 0.004} | changes
        row = {"set": {"codec": codec, "optimizer": optimizer, "settings": {}}, "archive": archive}
        rows.append(row | {"ratio_total": 4e6 / nbytes, "drop": None, "sampled": 1.0, "seconds": 3.2})
    return {**rows[0], "device": "cpu", "each": rows[1:]}


def keeping(run: Path, keep: str) -> Chosen:
    """Choose what is kept of a run."""
    return services.choose(services.load_subject(str(run)), keep=keep)


def trusted(run: Path) -> None:
    judge = services.named_evaluator(services.load_subject(str(run)))
    assert judge is not None
    trust(judge.path, judge.digest)


@pytest.mark.usefixtures("asked_for")
def test_a_bare_link_tries_nothing_until_the_button_is_pressed(archived, jobs):
    app = linked("run", run=str(archived))
    assert "A link alone starts nothing" in texts(app)
    assert jobs.started == []
    button(app, "Estimate the size").click().run()
    app.run()
    words = next(work.requests[0].words() for work in jobs.started if work.topic == "goals")
    assert words[:2] == ["estimate", str(archived)]
    assert option(words, "--try") == "2"


@pytest.mark.usefixtures("asked_for")
def test_the_run_of_the_command_line_is_tried_by_itself_and_once(archived, jobs, monkeypatch):
    monkeypatch.setattr(roots._Current, "value", None)
    roots.configure([archived.parent], str(archived))
    jobs.answers["estimate"] = goals()
    app = explorer()
    app.run()
    assert [work.topic for work in jobs.started].count("goals") == 1


@pytest.mark.usefixtures("asked_for")
def test_size_ratio_and_bits_are_said_of_what_is_kept_and_a_figure_that_is_not_known_is_not_there(
    archived, jobs
):
    jobs.answers["estimate"] = goals()
    app = explorer("run", run=str(archived))
    before = fmt.size(4 * sum(row.nbytes for row in services.load_subject(str(archived)).tensors))
    assert f"{before} → about 500 kB" in texts(app)
    assert "Estimated from steps 20 and 30" in texts(app)
    assert "Restore cost" not in texts(app)
    assert "…" not in texts(app)
    keeping(archived, "weights")
    assert "about 250 kB" in texts(app.run())
    keeping(archived, "exact")
    app.run()
    assert "about 8.00 MB" in texts(app)
    assert "**0 %**" in texts(app), "an exact restore costs nothing"
    assert primary(app) == [WRITE]


def test_one_button_writes_verifies_and_compares_within_the_bound(root, jobs):
    app = explorer("run", run=str(SAMPLE))
    button(app, WRITE).click().run()
    compress, verify, compare = jobs.words(-1)
    target = str(root / "digits-cnn.inshrink")
    assert compress[:4] == ["compress", str(SAMPLE), "--output", target]
    assert option(compress, "--codec") == "lattice"
    assert option(compress, "--optimizer") == "compressed"
    assert option(compress, "--max-restore-cost") == "0.003"
    assert verify == ["verify", target, "--deep"]
    assert compare[:4] == ["compare", target, "--against", str(SAMPLE)]
    assert not jobs.started[-1].trusted, "the sample's evaluator is ours"

    keeping(SAMPLE, "exact")
    jobs.kept.clear()
    app.run()
    button(app, WRITE).click().run()
    compress, verify = jobs.words(-1)
    assert option(compress, "--codec") == "lossless"
    assert "--max-restore-cost" not in compress
    assert sorted(verify) == sorted(["verify", target, "--against", str(SAMPLE), "--deep"])


@pytest.mark.parametrize(
    ("bound", "given"),
    [
        (Bound("drop", 0.01), {"--max-drop": "0.01"}),
        (Bound("divergence", 0.002), {"--max-divergence": "0.002"}),
        (Bound("none", 0.0), {}),
    ],
)
def test_the_bound_and_the_metric_of_the_header_hold_when_an_archive_is_written(root, jobs, bound, given):
    services.choose(services.load_subject(str(SAMPLE)), bound=bound, metric="accuracy", direction="higher")
    button(explorer("run", run=str(SAMPLE)), WRITE).click().run()
    compress, _, compare = jobs.words(-1)
    assert {name: option(compress, name) for name in given} == given
    assert [word for word in compress if word.startswith("--max-")] == list(given)
    assert option(compare, "--eval-metric") == "accuracy"


def test_bits_made_by_hand_are_written_as_they_stand(root, jobs):
    config = {
        "codec": "lattice",
        "settings": {"coarseness": 2.0},
        "override": [{"layer_type": "linear", "coarseness": 3.5}],
    }
    services.change_bits(services.load_subject(str(SAMPLE)), config, "by hand")
    button(explorer("run", run=str(SAMPLE)), WRITE).click().run()
    compress, _, compare = jobs.words(-1)
    assert "coarseness=2.0" in compress
    assert 'overrides=[{"layer_type": "linear", "coarseness": 3.5}]' in compress
    assert not [word for word in compress if word.startswith("--max-")]
    assert compare[0] == "compare"


def test_a_run_of_somebody_else_is_compared_tensor_by_tensor_until_its_code_is_trusted(archived, jobs):
    judged(archived)
    app = explorer("run", run=str(archived))
    assert "a bound takes an evaluator that you trust" in texts(app)
    button(app, WRITE).click().run()
    assert [words[0] for words in jobs.words(-1)] == ["compress", "verify"]
    assert "--max-restore-cost" not in jobs.words(-1)[0]
    assert not jobs.started[-1].trusted
    jobs.kept.clear()
    trusted(archived)
    app.run()
    button(app, WRITE).click().run()
    commands = jobs.words(-1)
    assert [words[0] for words in commands] == ["compress", "verify", "compare"]
    assert option(commands[0], "--max-restore-cost") == "0.003"
    assert "--trust-run" in commands[0]
    assert jobs.started[-1].trusted == hashlib.sha256((archived / "judge.py").read_bytes()).hexdigest()


def test_the_snippets_do_what_the_button_does_with_the_evaluator_that_may_run(archived, jobs):
    judged(archived)
    trusted(archived)
    app = explorer("run", run=str(archived), drawer="code")
    open_panel(app)
    shell = next(code.value for code in app.code if "inshrink compress" in code.value)
    python = next(code.value for code in app.code if "inshrink_core.compress(" in code.value)
    assert "max_restore_cost=0.003, trust_run=True" in python
    button(app, WRITE).click().run()
    assert all(shlex.join(words) in shell for words in jobs.words(-1))


@pytest.mark.usefixtures("asked_for")
def test_an_evaluator_that_tells_no_loss_bounds_nothing_and_that_is_said(archived, jobs):
    jobs.answers["estimate"] = goals(not_judged="it returns neither a loss nor log_probs")
    app = explorer("run", run=str(SAMPLE))
    assert "tells no cost" in texts(app)
    button(app, WRITE).click().run()
    compress, verify, compare = jobs.words(-1)
    assert "--max-restore-cost" not in compress
    assert (verify[-1], compare[0]) == ("--deep", "compare")


@pytest.mark.usefixtures("asked_for")
def test_an_evaluator_that_does_not_run_is_not_asked_again(archived, jobs):
    why = {"not_judged": "it raised ModuleNotFoundError", "evaluator_failed": True}
    jobs.answers["estimate"] = goals(**why)
    app = explorer("run", run=str(SAMPLE))
    assert "The evaluator fails" in texts(app)
    assert "it raised ModuleNotFoundError" in texts(app)
    button(app, WRITE).click().run()
    compress, verify = jobs.words(-1)
    assert "--max-restore-cost" not in compress
    assert {"--deep", "--against"} < set(verify)


@pytest.mark.usefixtures("asked_for")
def test_a_trial_that_was_interrupted_begins_again_by_itself(archived, jobs):
    shown = services.load_subject(str(archived))
    trial = jobs.put(work=Intent(shown, services.chosen(shown), None).estimate_work(), state="interrupted")
    explorer("run", run=str(archived))
    assert trial.state == "running"


def test_what_a_trial_has_told_is_known_to_whoever_asks_next(archived, jobs):
    shown = services.load_subject(str(archived))
    told = Intent(shown, services.chosen(shown), None).estimate.perform()
    app = explorer("run", run=str(archived))
    assert "goals" not in [work.topic for work in jobs.started]
    assert f"about {fmt.size(told.each[0].archive.nbytes)}" in texts(app)


def test_an_archive_that_was_written_without_a_bound_is_not_gone_on_with_under_one(archived, root):
    shown = services.load_subject(str(archived))
    judged(archived)
    judge, _ = services.named_judge(shown)
    free, bound = (Intent(shown, services.chosen(shown), by).archive for by in (None, judge))
    shutil.rmtree(root / "run.inshrink")
    inshrink_core.compress(archived, root / "run.inshrink", optimizer="compressed")
    assert services.suggested_name(shown, free) == str(root / "run.inshrink")
    assert services.suggested_name(shown, bound) == str(root / "run-2.inshrink")


def written(folder: Path, jobs: Any, run: Path, now: Chosen, target: Path, judge: Any = None) -> Any:
    """Write an archive with a real job, and leave it as the newest one of the run."""
    shown = services.load_subject(str(run))
    commands = Intent(shown, now, judge).requests(str(target))
    real = work(folder / "jobs", *commands, shown=str(run))
    assert (real.state, real.problem) == ("finished", None)
    job = jobs.put(*commands, topic="run.shrink", shown=str(run), result=real.reports()[-1])
    job.documents, job.rows = services.documents_of(real), real.told()
    return job


def test_what_a_real_job_wrote_of_the_sample_keeps_the_bound_and_is_measured(root, jobs):
    shown = services.load_subject(str(SAMPLE))
    now, target = services.chosen(shown), root / "digits.inshrink"
    job = written(root.parent, jobs, SAMPLE, now, target, services.evaluator_of(shown))
    made = Written.by(job)
    assert len(made.comparison.steps) == len(shown.steps)
    assert made.comparison.max_restore_cost <= made.written["bounds"]["restore_cost"] == 0.003
    assert made.chain.ratio_total > 22
    assert job.documents[2]["measured_at"] is not None, "nothing is measured twice"
    assert made.is_of(Intent(shown, now, None))
    assert not made.is_of(Intent(shown, replace(now, bound=Bound("drop", 0.01)), None))
    app = explorer("run", run=str(SAMPLE))
    assert f"{fmt.size(made.chain.nbytes)}, {fmt.ratio(made.chain.ratio_total)}. Decoded again" in texts(app)
    assert "measured" in texts(app)
    assert fmt.percent(made.comparison.max_restore_cost) in texts(app)
    assert services.describe(job).page == "run"


def test_progress_stands_beside_the_button(archived, jobs):
    jobs.state = "running"
    app = explorer("run", run=str(archived))
    button(app, WRITE).click().run()
    assert button(app, WRITE).disabled
    assert button(app, "Cancel")


@pytest.mark.parametrize("keep", ["exact", "resume"])
def test_what_is_not_in_the_archive_is_said_of_a_real_job(archived, jobs, keep):
    (archived / "step_000040.pt").write_bytes(b"")
    written(archived.parent.parent, jobs, archived, keeping(archived, keep), archived.parent / "m.inshrink")
    app = explorer("run", run=str(archived))
    assert any("They are not in the archive: do not delete" in error.value for error in app.error)
    assert "Decoded again and compared" in texts(app)


def test_what_is_not_sound_is_said_and_an_archive_that_went_is_no_result(archived, jobs):
    shown = services.load_subject(str(archived))
    target = archived.parent / "run.inshrink"
    commands = Intent(shown, keeping(archived, "exact"), None).requests(str(target))
    finding = {"what": "a block differs", "where": "frame 3", "remedy": "fetch it again"}
    report = {"ok": False, "problems": [finding], "errors": []}
    job = jobs.put(*commands, topic="run.shrink", shown=str(archived), result=report)
    job.documents = [{"relative_error": 0.0}, report]
    app = explorer("run", run=str(archived))
    assert "is not sound: 1 problem" in texts(app)
    assert "A block differs" in texts(app)
    shutil.rmtree(target)
    assert "is not sound" not in texts(explorer("run", run=str(archived)))
