"""An archive in every state: its frames, soundness, pruning."""

from __future__ import annotations

from dataclasses import replace

import pytest
from inshrink_app import services
from inshrink_app.model.problem import Problem
from inshrink_app.pages.archives.figures import frames_figure

import inshrink_core
from inshrink_core.verbs.export import export
from inshrink_core.verbs.prune import Prune
from tests.app.builders import archives, button, charts, explorer, texts, write_run
from tests.app.builders import chain_frame as frame
from tests.app.job_stubs import STEPS, work

SOUND = {
    "ok": True,
    "deep": True,
    "frames": 4,
    "problems": [],
    "notes": [],
    "missing_steps": [],
    "errors": [],
}
PLAN = {
    "removed": [10],
    "rekeyed": [20],
    "frames": [
        {"step": 10, "branch": 0, "fate": "removed", "written": None},
        {"step": 20, "branch": 0, "fate": "kept", "written": "rekeyed"},
    ],
    "bytes_before": 4000,
    "bytes_after": 3000,
    "bytes_freed": 1000,
}


def test_the_archive_of_a_run_is_found_and_its_chain_drawn(archived, jobs):
    app = archives("frames", archived)
    assert {metric.label: metric.value for metric in app.metric}["Frames"] == "4"
    assert charts(app) == 1
    table = app.dataframe[1].value
    assert list(table["step"]) == list(STEPS)
    assert list(table["kind"]) == ["keyframe", "delta", "keyframe", "delta"]
    assert table["parent step"].isna().tolist() == [True, False, False, False]


def test_the_ratio_of_an_archive_upon_a_base_model_is_called_so(root, jobs):
    run = write_run(root / "run", (1, 2))
    inshrink_core.compress(run, root / "run.inshrink", steps=[2], base=f"{run}@1")
    app = archives("frames", run)
    assert "Ratio with base" in {metric.label for metric in app.metric}
    assert any("relative to the base model" in caption.value for caption in app.caption)


def test_of_several_archives_the_one_of_the_link_is_shown(archived, jobs):
    other = archived.parent / "other.inshrink"
    inshrink_core.compress(archived, other, codec="lossless", steps=STEPS[:2])
    app = archives("frames", archived, archive=str(other))
    assert {metric.label: metric.value for metric in app.metric}["Frames"] == "2"
    app = archives("frames", archived, archive="/etc/passwd")
    assert {metric.label: metric.value for metric in app.metric}["Frames"] == "4"


def test_a_frame_that_is_gone_is_told_and_the_rest_shown(archived, jobs):
    archive = archived.with_name("run.inshrink")
    files = sorted((archive / "frames").iterdir())
    files[-1].unlink()
    app = archives("frames", archive)
    assert "1 frame missing, of step 40" in texts(app)
    assert {metric.label: metric.value for metric in app.metric}["Frames"] == "3"


def test_an_archive_that_cannot_be_opened_as_a_whole_still_shows_what_is_left(archived, jobs):
    archive = archived.with_name("run.inshrink")
    frame = sorted((archive / "frames").iterdir())[1]
    frame.write_bytes(frame.read_bytes()[:100])
    app = explorer("run", run=str(archive))
    assert "Open another run" in [one.label for one in app.button]
    button(app, "See what is left").click().run()
    assert app.title[0].value == "Archives"
    assert len(app.error) == 2
    told = {metric.label: (metric.value, metric.delta) for metric in app.metric}
    assert told["Frames"][0] == "4"
    assert told["Size"][1] == "with unreadable frames"
    assert "Verify" in [one.label for one in app.button]


def test_a_damaged_frame_is_listed_as_such(archived):
    archive = archived.with_name("run.inshrink")
    last = sorted((archive / "frames").iterdir())[-1]
    content = bytearray(last.read_bytes())
    content[-40:] = bytes(40)
    last.write_bytes(content)
    found = services.chain_of(str(archive))
    assert [bool(one.damage) for one in found.frames] == [False, False, False, True]
    assert found.frames[-1].ratio_weights is None


def test_verifying_starts_a_job_and_says_what_it_found(archived, jobs):
    jobs.answers["verify"] = SOUND
    app = archives("verify", archived)
    button(app, "Verify and decode").click().run()
    assert jobs.last == ["verify", str(archived.with_name("run.inshrink")), "--deep"]
    assert "Sound: 4 frames checked, every tensor decoded" in texts(app)


def test_problems_are_listed_as_text(archived, jobs):
    problem = {"where": "frames/<b>", "what": "the checksum differs", "remedy": "restore a backup"}
    jobs.answers["verify"] = SOUND | {"ok": False, "problems": [problem], "notes": [problem]}
    app = archives("verify", archived)
    button(app, "Verify").click().run()
    assert "1 problem; 4 frames" in texts(app)
    assert app.dataframe[1].value["where"][0] == "frames/<b>"


@pytest.mark.parametrize("state", ["running", "failed", "cancelled", "interrupted"])
def test_a_verification_that_is_not_finished_is_told(archived, jobs, state):
    jobs.state, jobs.problem = state, Problem("the archive is locked")
    app = archives("verify", archived)
    button(app, "Verify").click().run()
    said = {"failed": "The archive is locked", "cancelled": "Cancelled", "interrupted": "Resume"}
    assert said.get(state, "") in texts(app)
    assert any(b.label in ("Cancel", "Resume", "Try again") for b in app.button)


def test_pruning_is_planned_first_and_done_only_with_a_word(archived, jobs):
    jobs.answers["prune"] = PLAN
    app = archives("prune", archived)
    assert button(app, "Show what would be removed").disabled
    app.number_input(key="prune.last").set_value(2).run()
    button(app, "Show what would be removed").click().run()
    assert jobs.last == ["prune", str(archived.with_name("run.inshrink")), "--keep-last", "2"]
    assert {metric.label: metric.value for metric in app.metric}["Removed"] == "1"
    assert list(app.dataframe[1].value["result"]) == ["removed", "stays, becomes a keyframe"]
    assert button(app, "Prune").disabled
    next(box for box in app.checkbox if box.label.startswith("Remove")).check().run()
    button(app, "Prune").click().run()
    assert "--apply" in jobs.last
    assert "Removed 1 step; 1.00 kB freed" in texts(app)


def test_a_packed_archive_is_shown_and_not_pruned(archived, jobs):
    packed = archived.with_name("packed.inshrink")
    export(archived.with_name("run.inshrink"), pack=packed)
    app = archives("prune", packed)
    assert "cannot be changed" in texts(app)
    assert not any(b.label == "Show what would be removed" for b in app.button)


def test_frames_are_bars_by_kind():
    frames = (frame(10, kind="keyframe", nbytes=3000), frame(20), frame(30, branch=1))
    figure = frames_figure(frames)
    assert [(bar.name, list(bar.x), list(bar.y)) for bar in figure.data] == [
        ("Keyframe", [10], [3000]),
        ("Delta frame", [20, 30], [1000, 1000]),
    ]


def test_pruning_and_verifying_do_what_the_page_says(archived, tmp_path):
    archive = archived.with_name("run.inshrink")
    rules = Prune(str(archive), keep_last=2)
    assert work(tmp_path / "a", rules).result["removed"] == [10, 20]
    assert inshrink_core.open(archive).steps == STEPS
    assert work(tmp_path / "b", replace(rules, apply=True)).result["applied"]
    assert inshrink_core.open(archive).steps == (30, 40)
    assert work(tmp_path / "c", ["verify", str(archive), "--deep"]).result["ok"]
    (archive / "inshrink-manifest").write_bytes(b"damaged")
    job = work(tmp_path / "d", ["verify", str(archive)])
    assert job.state == "finished" or job.problem is not None


def test_a_verb_that_no_page_asks_for_is_refused(tmp_path):
    job = work(tmp_path, ["ui", str(tmp_path)], topic="archives.ui")
    assert job.state == "failed"
    assert "no request is of the verb 'ui'" in job.problem.what


def test_a_plan_by_which_nothing_goes_says_so(archived, jobs):
    jobs.answers["prune"] = PLAN | {"removed": []}
    app = archives("prune", archived)
    app.number_input(key="prune.last").set_value(4).run()
    button(app, "Show what would be removed").click().run()
    assert "These rules keep every step" in texts(app)
