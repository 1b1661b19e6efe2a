"""The first card of Overview: what a run shrinks to, and one button that does the whole."""

from __future__ import annotations

import hashlib
import shlex
import shutil
from typing import Any

import pytest
from inshrink_app import services
from inshrink_app.model.measured import known_of
from inshrink_app.pages.overview import shrinking
from inshrink_app.server import roots
from inshrink_app.widgets import fmt

import inshrink_core
from tests.app.builders import SAMPLE, button, explorer, judged, linked, open_panel, primary, texts, write_run
from tests.app.job_stubs import option, work


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


@pytest.mark.usefixtures("asked_for")
def test_a_bare_link_tries_nothing_until_the_button_is_pressed(archived, jobs):
    app = linked("overview", run=str(archived))
    assert "opened by a link, so nothing was tried yet" in texts(app)
    assert jobs.started == []
    button(app, "Try two steps").click().run()
    assert jobs.last[:2] == ["estimate", str(archived)]
    assert option(jobs.last, "--try") == "2"


@pytest.mark.usefixtures("asked_for")
def test_a_run_that_was_clicked_on_is_tried_by_itself_and_once(archived, jobs):
    jobs.answers["estimate"] = goals()
    app = explorer("overview", run=str(archived))
    app.run()
    assert not app.exception
    (((verb, run, *_),),) = (jobs.words(place) for place in range(len(jobs.started)))
    assert (verb, run) == ("estimate", str(archived))


@pytest.mark.usefixtures("asked_for")
def test_the_run_of_the_command_line_is_tried_by_itself(archived, jobs, monkeypatch):
    monkeypatch.setattr(roots._Current, "value", None)
    roots.configure([archived.parent], str(archived))
    explorer()
    assert len(jobs.started) == 1


@pytest.mark.usefixtures("asked_for")
def test_each_goal_tells_before_and_after_ratio_bits_and_how_the_loss_is_known(archived, jobs):
    jobs.answers["estimate"] = goals()
    app = explorer("overview", run=str(archived))
    told = {metric.value: (metric.label, metric.delta) for metric in app.metric}
    assert told["500 kB"] == ("10.0 MB become about", "20.0× smaller")
    said = texts(app)
    assert "**2.50** bits per weight" in said
    assert "Restore cost: **none**, exact" in said
    assert "Restore cost: not known without an evaluator that runs. Weights are off by 0.40 %" in said
    assert "Estimated from steps 20 and 30, tried in 3 s on CPU" in said
    assert primary(app) == ["Shrink it"]


def test_one_button_exports_verifies_and_compares_with_the_goal_that_is_chosen(root, jobs):
    app = explorer("overview", run=str(SAMPLE))
    button(app, "Shrink it").click().run()
    compress, verify, compare = jobs.words(-1)
    target = str(root / "digits-cnn.inshrink")
    assert compress[:4] == ["compress", str(SAMPLE), "--output", target]
    assert compress[compress.index("--codec") + 1] == "lattice"
    assert compress[compress.index("--optimizer") + 1] == "compressed"
    assert compress[compress.index("--max-restore-cost") + 1] == "0.003"
    assert verify == ["verify", target, "--deep"]
    assert compare[:4] == ["compare", target, "--against", str(SAMPLE)]
    assert not jobs.started[-1].trusted, "the sample's evaluator is ours"

    app = explorer("overview", run=str(SAMPLE), goal="exact")
    jobs.kept.clear()
    app.run()
    button(app, "Shrink it").click().run()
    compress, verify = jobs.words(-1)
    assert compress[compress.index("--codec") + 1] == "lossless"
    assert "--max-restore-cost" not in compress
    assert sorted(verify) == sorted(["verify", target, "--against", str(SAMPLE), "--deep"])


def test_a_run_of_somebody_else_is_compared_tensor_by_tensor_until_its_code_is_trusted(archived, jobs):
    judged(archived)
    app = explorer("overview", run=str(archived))
    assert "becomes as small as a restore cost of 0.30 % of the loss allows" in texts(app)
    button(app, "Shrink it").click().run()
    assert [words[0] for words in jobs.words(-1)] == ["compress", "verify"]
    assert "--max-restore-cost" not in jobs.words(-1)[0]
    assert not jobs.started[-1].trusted
    jobs.kept.clear()
    app.checkbox[0].check().run()
    button(app, "Shrink it").click().run()
    commands = jobs.words(-1)
    assert [words[0] for words in commands] == ["compress", "verify", "compare"]
    assert commands[0][commands[0].index("--max-restore-cost") + 1] == "0.003"
    assert "--trust-run" in commands[0]
    assert jobs.started[-1].trusted == hashlib.sha256((archived / "judge.py").read_bytes()).hexdigest()


def test_the_snippets_do_what_the_button_does_with_the_evaluator_that_may_run(archived, jobs):
    judged(archived)
    app = explorer("overview", run=str(archived))
    open_panel(app)
    assert not any("--max-restore-cost" in code.value for code in app.code)
    app.checkbox[0].check().run()
    shell = next(code.value for code in app.code if "inshrink compress" in code.value)
    python = next(code.value for code in app.code if "inshrink_core.compress(" in code.value)
    assert "max_restore_cost=0.003, trust_run=True" in python
    button(app, "Shrink it").click().run()
    assert all(shlex.join(words) in shell for words in jobs.words(-1))


@pytest.mark.usefixtures("asked_for")
def test_an_evaluator_that_tells_no_loss_bounds_nothing_and_that_is_said(archived, jobs):
    jobs.answers["estimate"] = goals(not_judged="it returns neither a loss nor log_probs")
    app = explorer("overview", run=str(SAMPLE))
    assert "tells no restore cost" in texts(app)
    button(app, "Shrink it").click().run()
    compress, verify, compare = jobs.words(-1)
    assert "--max-restore-cost" not in compress
    assert (verify[-1], compare[0]) == ("--deep", "compare")


@pytest.mark.usefixtures("asked_for")
def test_an_evaluator_that_does_not_run_is_not_asked_again(archived, jobs):
    why = {"not_judged": "it raised ModuleNotFoundError", "evaluator_failed": True}
    jobs.answers["estimate"] = goals(**why)
    app = explorer("overview", run=str(SAMPLE))
    assert "The evaluator does not run: it raised ModuleNotFoundError" in texts(app)
    button(app, "Shrink it").click().run()
    compress, verify = jobs.words(-1)
    assert "--max-restore-cost" not in compress
    assert {"--deep", "--against"} < set(verify)


@pytest.mark.usefixtures("asked_for")
def test_a_trial_that_was_interrupted_begins_again_by_itself(archived, jobs):
    shown = services.load_subject(str(archived))
    trial = jobs.put(shrinking.goals_request(shown, None), shown=str(archived), state="interrupted",
        topic="overview.goals", of=(services.opened(str(archived)).token, ""))  # fmt: skip
    explorer("overview", run=str(archived))
    assert trial.state == "running"


def test_what_a_trial_has_told_is_known_to_whoever_asks_next(archived, jobs):
    shown = services.load_subject(str(archived))
    told = shrinking.goals_request(shown, None).perform()
    app = explorer("overview", run=str(archived))
    assert jobs.started == []
    assert fmt.size(told.each[1].archive.nbytes) in [metric.value for metric in app.metric]
    write_run(archived, (50,))
    app = linked("overview", run=str(archived))
    assert "The run has changed since." in texts(app)


def test_an_archive_that_was_written_without_a_bound_is_not_gone_on_with_under_one(archived, root):
    shown = services.load_subject(str(archived))
    free, bound = (shrinking.goal_request(shown, "resume", bound=one) for one in (False, True))
    shutil.rmtree(root / "run.inshrink")
    inshrink_core.compress(archived, root / "run.inshrink", optimizer="compressed")
    assert services.suggested_name(shown, free) == str(root / "run.inshrink")
    assert services.suggested_name(shown, bound) == str(root / "run-2.inshrink")


def test_what_a_real_job_wrote_of_the_sample_keeps_the_bound_and_says_so(root, jobs):
    shown, target = services.load_subject(str(SAMPLE)), root / "digits.inshrink"
    commands = shrinking.shrink_requests(shown, "resume", str(target), services.evaluator_of(shown))
    real = work(root.parent / "jobs", *commands, shown=str(SAMPLE))
    assert (real.state, real.problem) == ("finished", None)
    job = jobs.put(*commands, topic="overview.shrink", shown=str(SAMPLE))
    job.documents, job.rows = services.documents_of(real), real.told()
    made = shrinking.shrunk_by(job)
    known = known_of(made.chain)
    assert len(known.comparison.steps) == len(shown.steps)
    assert known.comparison.max_restore_cost <= made.written["bounds"]["restore_cost"] == 0.003
    assert made.chain.ratio_total > 22
    assert made.written["decided"]["step"] in shown.steps
    assert real.reports()[2]["measured_at"] is not None, "nothing is measured twice"
    assert "each step within a restore cost of 0.30 %" in texts(explorer("overview", run=str(SAMPLE)))


def test_progress_stands_in_the_place_of_the_button(archived, jobs):
    jobs.state = "running"
    app = explorer("overview", run=str(archived))
    button(app, "Shrink it").click().run()
    assert [found.label for found in app.button if found.label in ("Shrink it", "Cancel")] == ["Cancel"]


@pytest.mark.usefixtures("asked_for")
def test_what_a_real_job_made_is_told_with_its_proof(archived, jobs):
    jobs.answers["estimate"] = goals()
    shown = services.load_subject(str(archived))
    target = archived.parent / "made.inshrink"
    commands = shrinking.shrink_requests(shown, "exact", str(target), None)
    real = work(archived.parent.parent / "jobs", *commands, shown=str(archived))
    assert (real.state, real.problem) == ("finished", None)
    job = jobs.put(*commands, topic="overview.shrink", shown=str(archived))
    job.documents = services.documents_of(real)
    app = explorer("overview", run=str(archived))
    told = {metric.label: (metric.value, metric.delta) for metric in app.metric}
    assert told["Bit-exact"] == ("all", "tensors of all steps")
    assert "Done: written, decoded again and compared" in texts(app)
    # The card of the goal says what was written, and no longer what was estimated.
    cards = [metric.label for metric in app.metric]
    assert "10.0 MB became" in cards
    assert cards.count("10.0 MB become about") == 2
    assert real.requests[0].codec == "lossless"
    # Jobs leads to where it belongs.
    assert services.describe(job).page == "overview"


@pytest.mark.parametrize("goal", ["exact", "resume"])
def test_what_is_not_in_the_archive_is_said_of_a_real_job(archived, jobs, goal):
    (archived / "step_000040.pt").write_bytes(b"")
    shown = services.load_subject(str(archived))
    commands = shrinking.shrink_requests(shown, goal, str(archived.parent / "made.inshrink"), None)
    real = work(archived.parent.parent / "jobs", *commands, shown=str(archived))
    assert (real.state, real.problem) == ("finished", None)
    job = jobs.put(*commands, topic="overview.shrink", shown=str(archived))
    job.documents = services.documents_of(real)
    app = explorer("overview", run=str(archived))
    assert "They are not in the archive: do not delete their files." in app.error[0].value
    assert "Done: written" in texts(app)


def test_what_is_not_sound_is_said_and_an_archive_that_went_is_too(archived, jobs):
    shown = services.load_subject(str(archived))
    target = archived.parent / "run.inshrink"
    commands = shrinking.shrink_requests(shown, "exact", str(target), None)
    job = jobs.put(*commands, topic="overview.shrink", shown=str(archived))
    finding = {"what": "a block differs", "where": "frame 3", "remedy": "fetch it again"}
    job.documents = [{"relative_error": 0.0}, {"ok": False, "problems": [finding], "errors": []}]
    app = explorer("overview", run=str(archived))
    assert "Written, but not sound: 1 problem" in texts(app)
    assert "A block differs" in texts(app)
    shutil.rmtree(target)
    assert "is not there any more" in texts(explorer("overview", run=str(archived)))
