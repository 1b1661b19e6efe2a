"""The card that writes an archive: what a run shrinks to, and one button that does the whole."""

import hashlib
import shlex
import shutil
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from inshrink_app import services
from inshrink_app.model import ServiceError
from inshrink_app.pages.run.shrinking import Intent, Written
from inshrink_app.services import Bound, Chosen
from inshrink_app.widgets.choices import codec_labels

from inshrink_core.codec import get_codec
from inshrink_core.plugins import plugins
from inshrink_core.text import percentage, ratio, size
from tests.app.builders import (
    SAMPLE,
    archives,
    button,
    explorer,
    judged,
    linked,
    open_panel,
    primary,
    texts,
    trusted,
    write_run,
)
from tests.app.job_stubs import option, performed
from tests.codecs.test_codec_guide import package

WRITE = "Write archive"


def goals(**changes: Any) -> dict[str, Any]:
    """Return what ``inshrink estimate --each`` tells of the goals."""
    rows = []
    for codec, optimizer, nbytes, basis in (
        ("lattice", "drop", 250_000, "unknown"),
        ("lattice", "compressed", 500_000, "unknown"),
        ("lossless", "exact", 8_000_000, "exact"),
    ):
        archive = {"tried": [20, 30], "nbytes": nbytes, "bits_per_weight": 2.5}
        archive |= {"basis": basis, "restore_cost": None} | changes
        row = {"set": {"codec": codec, "optimizer": optimizer, "settings": {}}, "archive": archive}
        row["ratio_weights"] = None
        rows.append(row | {"ratio_total": 4e6 / nbytes, "drop": None, "sampled": 1.0, "seconds": 3.2})
    return {**rows[0], "device": "cpu", "each": rows[1:]}


def keeping(run: Path, keep: str) -> Chosen:
    """Choose what is kept of a run."""
    return services.choose(services.load_subject(str(run)), keep=keep)


@pytest.mark.usefixtures("asked_for")
def test_a_bare_link_measures_and_estimates_nothing_until_the_button_is_pressed(archived, jobs):
    app = linked("run", run=str(archived))
    assert "A link alone starts nothing" in texts(app)
    assert jobs.started == []
    button(app, "Estimate the size").click().run()
    app.run()
    assert [work.topic for work in jobs.started] == ["update", "goals", "estimates"]
    assert [len(work.documents) for work in jobs.started] == [1, 1, 1], "one process each"
    words = jobs.words(1)[0]
    assert words[:2] == ["estimate", str(archived)]
    assert option(words, "--try") == "2"
    assert jobs.last.count("--each") == 6
    assert not {"--evaluator", "--trust-run"} & set(jobs.last)


def test_a_panel_of_the_header_stays_open_while_its_choices_change_its_label(archived, jobs):
    judged(archived)
    app = explorer("run", run=str(archived))
    app.session_state["header.bound"] = True
    app.run()
    app.radio[0].set_value("drop").run()
    assert "Bound: drop ≤ 1.00 %" in texts(app)
    assert app.session_state["header.bound"]
    assert [one.label for one in app.number_input if "At most" in one.label] == ["At most, %"]
    app.checkbox[0].check().run()
    assert services.trusted_evaluator(services.load_subject(str(archived))), "asked where it is needed"


@pytest.mark.usefixtures("asked_for")
def test_size_ratio_and_bits_are_said_of_what_is_kept_and_a_figure_that_is_not_known_is_not_there(
    archived, jobs
):
    jobs.answers["estimate"] = goals()
    app = explorer("run", run=str(archived))
    before = size(4 * sum(row.nbytes for row in services.load_subject(str(archived)).tensors))
    assert f"{before} → about 500 kB" in texts(app)
    assert "Estimated from steps 20 and 30" in texts(app)
    assert "Restore cost" not in texts(app)
    assert "…" not in texts(app)
    keeping(archived, "weights")
    assert "about 250 kB" in texts(app.run())
    keeping(archived, "exact")
    app.run()
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


def test_a_run_of_somebody_else_is_compared_tensor_by_tensor_until_its_code_is_trusted(archived, jobs):
    judged(archived)
    app = explorer("run", run=str(archived))
    assert "a bound needs an evaluator that you trust" in texts(app)
    button(app, WRITE).click().run()
    assert [words[0] for words in jobs.words(-1)] == ["compress", "verify"]
    assert "--max-restore-cost" not in jobs.words(-1)[0]
    assert not jobs.started[-1].trusted
    jobs.kept.clear()
    judge = trusted(archived)
    app = explorer("run", run=str(archived), drawer="code")
    open_panel(app)
    shell = next(code.value for code in app.code if "inshrink compress" in code.value)
    python = next(code.value for code in app.code if "inshrink_core.compress(" in code.value)
    assert "max_restore_cost=0.003, trust_run=True" in python
    jobs.state = "running"
    button(app, WRITE).click().run()
    assert button(app, WRITE).disabled
    assert button(app, "Cancel")
    commands = jobs.words(-1)
    assert all(shlex.join(words) in shell for words in commands)
    assert [words[0] for words in commands] == ["compress", "verify", "compare"]
    assert option(commands[0], "--max-restore-cost") == "0.003"
    assert "--trust-run" in commands[0]
    assert jobs.started[-1].trusted == hashlib.sha256(judge.read_bytes()).hexdigest()


@pytest.mark.usefixtures("asked_for")
@pytest.mark.parametrize("fails", [False, True])
def test_an_evaluator_that_fails_or_tells_no_loss_bounds_nothing_and_that_is_said(archived, jobs, fails):
    jobs.answers["estimate"] = goals(not_evaluated="it raised ModuleNotFoundError", evaluator_failed=fails)
    app = explorer("run", run=str(SAMPLE))
    assert ("The evaluator fails" if fails else "gives no restore cost") in texts(app)
    assert "it raised ModuleNotFoundError" in texts(app)
    button(app, WRITE).click().run()
    compress, verify, *compare = jobs.words(-1)
    assert "--max-restore-cost" not in compress
    assert ("--against" in verify, len(compare)) == ((True, 0) if fails else (False, 1))


def test_an_archive_is_gone_on_with_only_under_the_bound_and_metric_of_its_steps(archived, jobs):
    trusted(archived)
    shown, target = services.load_subject(str(archived)), archived.with_name("run.inshrink")

    def export(kind: str, value: float = 0.0, metric: str = "loss") -> services.ExportRequest:
        now = services.choose(shown, bound=Bound(kind, value), metric=metric, direction="higher")
        return Intent(shown=shown, now=now, evaluator=services.trusted_evaluator(shown)).archive

    free, loss, loose = export("none"), export("drop", 0.01), export("drop", 0.02)
    acc, cost = export("drop", 0.01, "acc"), export("divergence", 0.003)
    shutil.rmtree(target)
    performed(*free.placed(str(target)))
    for written in (None, free, loss):  # None is an archive of the command line.
        if written is not None:
            jobs.put(*written.placed(str(target)))
        for asked in (free, loss, loose, acc, cost):
            other = "" if asked is (written or free) else "-2"
            assert services.suggested_name(shown, asked) == str(archived.with_name(f"run{other}.inshrink"))
            with pytest.raises(ServiceError, match="same settings") if other else nullcontext():
                services.export_target(str(target), asked)


def test_what_the_button_writes_of_the_sample_keeps_the_bound_and_is_measured(root, jobs):
    run = root / "run"
    shutil.copytree(SAMPLE, run, ignore=shutil.ignore_patterns(".inshrink", "step_000*", "step_001[0-5]*"))
    shown = services.load_subject(str(run))
    now, target = services.chosen(shown), root / "digits.inshrink"
    intent = Intent(shown=shown, now=now, evaluator=services.evaluator_of(shown))
    commands = intent.requests(str(target))
    real = performed(*commands, shown=str(run))
    job = jobs.put(*commands, topic="run.shrink", shown=str(run), result=real.result)
    job.documents, job.rows = real.documents, real.rows
    made = Written.by(job)
    assert len(made.comparison.steps) == len(shown.steps) == 5
    assert made.comparison.max_restore_cost <= made.asked["fields"]["max_restore_cost"] == 0.003
    assert made.chain.ratio_total > 10
    assert job.documents[2]["measured_at"] is not None, "nothing is measured twice"
    assert made.is_of(intent)
    assert not made.is_of(replace(intent, now=replace(now, bound=Bound("drop", 0.01))))
    app = explorer("run", run=str(run))
    assert "It held every step" not in texts(app)
    assert f"{size(made.chain.nbytes)}, {ratio(made.chain.ratio_total)}. Decoded" in texts(app)
    assert "measured" in texts(app)
    assert percentage(made.comparison.max_restore_cost) in texts(app)
    assert services.describe(job).page == "run"
    job.documents[0]["appended"] = []
    assert "It held every step already" in texts(app.run())


def test_what_is_not_sound_is_said_and_an_archive_that_went_is_no_result(archived, jobs):
    shown = services.load_subject(str(archived))
    target = archived.parent / "run.inshrink"
    commands = Intent(shown=shown, now=keeping(archived, "exact"), evaluator=None).requests(str(target))
    finding = {"what": "a block differs", "where": "frame 3", "remedy": "fetch it again"}
    report = {"ok": False, "problems": [finding], "errors": []}
    report["unreadable"] = [{"path": str(archived / "step_000040.pt"), "reason": "cut off"}]
    job = jobs.put(*commands, topic="run.shrink", shown=str(archived), result=report)
    job.documents = [{"relative_error": 0.0}, report]
    app = explorer("run", run=str(archived))
    assert "is damaged: 1 problem" in texts(app)
    assert "A block differs" in texts(app)
    assert any("The archive does not hold them: keep" in error.value for error in app.error)
    # A finding about a checkpoint that could not be read is no problem of the archive.
    finding["where"] = str(archived / "step_000040.pt")
    assert "Decoded and compared" in texts(app.run())
    shutil.rmtree(target)
    assert "is damaged" not in texts(explorer("run", run=str(archived)))


__all__ = ["package"]


@pytest.fixture
def installed(package, monkeypatch) -> Iterator[None]:
    """The codec of the guide, found through its entry point in this process."""
    monkeypatch.syspath_prepend(str(package))
    plugins.cache_clear()
    yield
    plugins.cache_clear()
    get_codec.cache_clear()


def test_a_codec_from_elsewhere_is_exported_with_its_tunable(installed, root, jobs):
    app = archives("write", write_run(root / "run"))
    app.selectbox(key="export.codec").set_value("cut").run()
    app.select_slider(key="export.cut.bits").set_value(4).run()
    button(app, "Write archive").click().run()
    words = jobs.words(0)[0]
    assert (option(words, "--codec"), option(words, "--set")) == ("cut", "bits=4")


def test_every_codec_of_weights_has_a_label_and_the_default_comes_first():
    assert next(iter(codec_labels())) == "lattice"
    assert "moments" not in codec_labels()
    assert set(codec_labels()) - set(codec_labels(searched=True)) == {"lossless"}
    assert all(label != name for name, label in codec_labels().items())
