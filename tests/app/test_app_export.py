"""The Export page in every state, and that what it writes is what was asked for."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
from inshrink_app import services
from inshrink_app.pages.export.form import ExportRequest
from inshrink_app.server import downloads as downloads_module
from inshrink_app.widgets.tables import Problem, ServiceError

from tests.app.builders import button, charts, explorer, open_panel, texts, write_run
from tests.app.job_stubs import STEPS, StubJobs, archived, archived_template, jobs

__all__ = ["archived", "archived_template", "jobs"]


def made(target: Path, **changes: Any) -> dict[str, Any]:
    """Return the result of an export."""
    return {
        "kind": "chain",
        "target": str(target),
        "is_packed": True,
        "nbytes": 1_234_567,
        "digest": "cd" * 32,
        "steps": [10, 20],
        "raw_bytes": 9_000_000,
        "ratio_weights": 14.2,
        "ratio_total": 7.3,
        "relative_error": 0.0,
        "weights_only": False,
        "left_out": [],
        "frames": [
            {"step": 10, "kind": "keyframe", "bytes": 800},
            {"step": 20, "kind": "delta", "bytes": 300},
        ],
        **changes,
    }


def metrics(app: Any) -> dict[str, str]:
    return {metric.label: metric.value for metric in app.metric}


def test_the_chain_is_shown_as_it_will_be_written(archived: Path, jobs: StubJobs) -> None:
    app = explorer("export", run=str(archived), codec="lossless")
    assert not app.exception
    assert metrics(app)["Frames"] == "4"
    assert charts(app) == 1
    assert list(app.dataframe[0].value["kind"]) == ["keyframe", "delta", "delta", "delta"]
    assert sum(b.proto.type == "primary" for b in app.button) == 1
    app.number_input(key="export.keyframe_every").set_value(2).run()
    assert list(app.dataframe[0].value["kind"]) == ["keyframe", "delta", "keyframe", "delta"]


def test_sizes_are_those_of_an_archive_with_the_same_settings(archived: Path) -> None:
    subject = services.load_subject(str(archived))
    request = ExportRequest(
        kind="chain", steps=STEPS, codec="lossless", optimizer="lossless", keyframe_every=2
    )
    plan = services.export_plan(subject, request)
    chain = services.chain_of(str(archived.with_name("run.inshrink")))
    assert [frame.nbytes for frame in plan.frames] == [frame.nbytes for frame in chain.frames]
    assert plan.basis.startswith("run.inshrink")


def test_without_anything_to_go_by_no_size_is_made_up_and_two_steps_can_be_tried(
    root: Path, jobs: StubJobs
) -> None:
    app = explorer("export", run=str(write_run(root / "run", STEPS)))
    assert not app.exception
    assert metrics(app)["Archive"] == "–"
    jobs.answers["export"] = made(root / "trial", kind="trial")
    button(app, "Try two steps").click().run()
    assert not app.exception
    assert jobs.started[0]["kind"] == "trial"
    assert jobs.started[0]["steps"] == [20, 30]
    assert metrics(app)["Archive"] == "1.70 kB"
    assert "tried with these settings" in texts(app)


def test_a_range_takes_every_nth_step(archived: Path, jobs: StubJobs) -> None:
    app = explorer("export", run=str(archived), what="range")
    app.select_slider(key="export.range").set_value((20, 40)).run()
    app.number_input(key="export.stride").set_value(2).run()
    assert not app.exception
    assert list(app.dataframe[0].value["step"]) == [20, 40]


def test_a_run_of_one_checkpoint_is_exported_too(root: Path, jobs: StubJobs) -> None:
    run = str(write_run(root / "one", (5,)))
    for what in ("all", "range", "step"):
        app = explorer("export", run=run, what=what)
        assert not app.exception
        assert not button(app, "Export").disabled


def test_a_huge_run_is_planned_with_a_bounded_chart(
    root: Path, jobs: StubJobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    from inshrink_app.services import planning

    from tests.app.builders import subject

    huge = subject(400, 1000, path=root / "huge")
    monkeypatch.setattr(services, "load_subject", lambda _: huge)
    monkeypatch.setattr(planning, "_trial_key", lambda *_: ("trial",))
    app = explorer("export", run=str(huge.path))
    assert not app.exception
    assert "The last 120 frames are drawn" in texts(app)
    assert len(app.dataframe[0].value) == 1000


def test_an_export_is_written_as_compress_writes_by_default(root: Path, jobs: StubJobs) -> None:
    from inshrink_core.chain import default_optimizer
    from inshrink_core.codecs.lattice.codec import LatticeCodec
    from tests.training import write_run as write_training

    run = str(write_training(root / "run"))
    for codec in ("lattice", "lossless"):
        app = explorer("export", run=run, codec=codec)
        button(app, "Export").click().run()
        assert not app.exception
    lattice, lossless = jobs.started
    assert lattice["config"] == {"coarseness": LatticeCodec().coarseness}
    assert lattice["optimizer"] == default_optimizer("lattice", {}) == "lattice"
    assert lossless["optimizer"] == "lossless"


def test_an_export_begins_with_what_is_on_screen(archived: Path, jobs: StubJobs) -> None:
    jobs.state = "running"
    app = explorer("export", run=str(archived))
    app.slider(key="export.coarseness").set_value(4.0).run()
    app.toggle(key="export.packed").set_value(True).run()
    button(app, "Export").click().run()
    assert not app.exception
    (request,) = jobs.started
    assert request["config"] == {"coarseness": 4.0}
    assert request["steps"] == list(STEPS)
    assert (request["kind"], request["codec"], request["packed"]) == ("chain", "lattice", True)
    assert request["target"] == str(archived.with_name("run-weights.inshrink"))
    assert app.query_params["job"] == "0" * 16
    assert "Exporting" in texts(app)
    assert button(app, "Export").disabled


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        ("/etc/evil.inshrink", "outside of the folders"),
        ("../evil.inshrink", "outside of the folders"),
        ("run.zip", "ends in"),
        (".hidden.inshrink", "ends in"),
        ("missing/run.inshrink", "does not exist"),
        ("a\0b.inshrink", "not a path"),
    ],
)
def test_a_target_that_cannot_be_written_is_answered_here(
    archived: Path, jobs: StubJobs, typed: str, said: str
) -> None:
    with pytest.raises(ServiceError) as refused:
        services.export_target(typed)
    assert said in refused.value.problem.what
    app = explorer("export", run=str(archived))
    next(box for box in app.text_input if box.label == "Write to").set_value(typed).run()
    button(app, "Export").click().run()
    assert not app.exception
    assert jobs.started == []


def test_samples_are_not_written_into(root: Path) -> None:
    import inshrink_core

    with pytest.raises(ServiceError):
        services.export_target(str(inshrink_core.sample("digits-cnn") / "x.inshrink"))


def test_one_step_is_weights_only_unless_told_otherwise(archived: Path, jobs: StubJobs) -> None:
    app = explorer("export", run=str(archived), what="step")
    assert not app.exception
    open_panel(app)
    assert any("--weights-only --ratio 8" in code.value for code in app.code)
    app.select_slider(key="export.step").set_value(20).run()
    app.toggle(key="export.exact").set_value(True).run()
    button(app, "Export").click().run()
    (request,) = jobs.started
    assert (request["kind"], request["steps"]) == ("step", [20])
    assert request["weights_only"]
    assert request["exact"]


def test_an_archive_is_copied_as_one_file(archived: Path, jobs: StubJobs) -> None:
    app = explorer("export", run=str(archived.with_name("run.inshrink")))
    assert not app.exception
    assert "One file with all 4 steps" in texts(app)
    button(app, "Export").click().run()
    (request,) = jobs.started
    assert (request["kind"], Path(request["target"]).name) == ("pack", "run-packed.inshrink")


def test_the_result_has_ratio_digest_restore_command_and_a_link(archived: Path, jobs: StubJobs) -> None:
    target = archived.with_name("it's.inshrink")
    target.write_bytes(b"x" * 2_500_000)
    jobs.answers["export"] = made(target)
    app = explorer("export", run=str(archived))
    button(app, "Export").click().run()
    assert not app.exception
    assert metrics(app)["Ratio, weights"] == "14.2×"
    assert "cd" * 32 in texts(app)
    assert any(code.value.startswith("inshrink restore '") for code in app.code)
    (link,) = app.get("link_button")
    assert link.proto.label.endswith("(2.50 MB)")
    assert link.proto.url.startswith(downloads_module.DOWNLOAD_PREFIX)


def test_a_folder_is_offered_to_be_packed(archived: Path, jobs: StubJobs) -> None:
    folder = archived.with_name("run.inshrink")
    jobs.answers["export"] = made(folder, is_packed=False)
    app = explorer("export", run=str(archived))
    button(app, "Export").click().run()
    button(app, "Copy as one packed file").click().run()
    assert not app.exception
    assert jobs.started[-1]["kind"] == "pack"
    assert jobs.started[-1]["path"] == str(folder)
    assert jobs.started[-1]["target"].endswith("run-packed.inshrink")


def test_a_file_that_is_gone_is_told(archived: Path, jobs: StubJobs) -> None:
    jobs.answers["export"] = made(archived.with_name("gone.inshrink"))
    app = explorer("export", run=str(archived))
    button(app, "Export").click().run()
    assert not app.exception
    assert "not there any more" in texts(app)


@pytest.mark.parametrize("state", ["failed", "cancelled", "interrupted"])
def test_an_export_that_did_not_finish_can_go_on(archived: Path, jobs: StubJobs, state: str) -> None:
    jobs.state, jobs.problem = state, Problem("the disk is full")
    app = explorer("export", run=str(archived))
    button(app, "Export").click().run()
    assert not app.exception
    assert "did not finish" in texts(app)
    assert any(b.label in ("Resume", "Try again") for b in app.button)
    assert sum(b.proto.type == "primary" for b in app.button) == 1


def export(archived: Path, output: Path, **changes: Any) -> dict[str, Any]:
    """Export as the worker does."""
    from dataclasses import asdict

    from inshrink_app.actions import action
    from inshrink_app.jobs.report import Report

    request = asdict(ExportRequest(kind="chain", steps=STEPS, codec="lossless", keyframe_every=2))
    request |= {"path": str(archived), "output": str(output), **changes}
    action("export")(request, Report())
    document: dict[str, Any] = json.loads(output.read_text())
    return document


def test_a_packed_chain_is_what_was_asked_and_leaves_nothing_else(archived: Path, tmp_path: Path) -> None:
    import inshrink_core

    target = archived.with_name("out.inshrink")
    before = set(archived.parent.iterdir())
    document = export(archived, tmp_path / "result", target=str(target), packed=True)
    assert set(archived.parent.iterdir()) - before == {target}
    assert document["digest"] == hashlib.sha256(target.read_bytes()).hexdigest()
    assert document["nbytes"] == target.stat().st_size
    assert inshrink_core.open(target).steps == STEPS
    with pytest.raises(inshrink_core.errors.ExistsError):
        export(archived, tmp_path / "result", target=str(target), packed=True)
    export(archived, tmp_path / "result", target=str(target), packed=True, replace=True)


def test_a_packed_chain_that_was_cut_off_goes_on(archived: Path, tmp_path: Path) -> None:
    from inshrink_app.actions.export import building_path

    import inshrink_core

    target = archived.with_name("out.inshrink")
    request = {
        "path": str(archived),
        "steps": STEPS,
        "codec": "lossless",
        "config": {},
        "optimizer": None,
        "keyframe_every": 2,
        "target": str(target),
    }
    building = building_path(request)
    inshrink_core.compress(archived, building, codec="lossless", keyframe_every=2, steps=STEPS[:2])
    before = [frame.digest for frame in inshrink_core.open(building).frames]
    export(archived, tmp_path / "result", target=str(target), packed=True)
    assert [frame.digest for frame in inshrink_core.open(target).frames][:2] == before
    assert not building.exists()


def test_an_unfinished_file_goes_with_its_job(archived: Path, jobs: StubJobs) -> None:
    from inshrink_app.actions.export import building_path

    request = {"path": str(archived), "target": str(archived.parent / "out.inshrink"), "kind": "chain"}
    job = jobs.put("export", "cancelled", packed=True, **request)
    building = building_path(job.request)
    building.mkdir()
    services.forget_job(job)
    assert not building.exists()
    assert jobs.kept == []


def test_one_step_restores_to_what_a_module_loads(archived: Path, tmp_path: Path) -> None:
    import torch

    import inshrink_core

    target = archived.with_name("weights.inshrink")
    request = {"kind": "step", "target": str(target), "steps": [20], "weights_only": True, "exact": True}
    document = export(archived, tmp_path / "result", **request)
    assert document["steps"] == [20]
    state = inshrink_core.load_state_dict(target)
    original = torch.load(archived / "step_000020.pt", weights_only=True)["model"]
    assert all(torch.equal(state[name], value) for name, value in original.items())
