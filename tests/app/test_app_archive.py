"""An archive in every state: frames, soundness, pruning and restoring."""

import hashlib
from pathlib import Path

import pytest
from inshrink_app import services
from inshrink_app.model.problem import ServiceError
from inshrink_app.services import jobs as job_services
from streamlit.testing.v1 import AppTest

import inshrink_core
from inshrink_core.verbs.export import export
from tests.app.builders import archives, button, charts, explorer, texts, write_run
from tests.app.job_stubs import STEPS, wait

SOUND = {"ok": True, "deep": True, "frames": 4, "problems": [], "notes": [], "missing_steps": []}
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


def test_an_archive_named_after_another_run_is_not_offered_for_a_run_of_the_same_steps(archived):
    other = write_run(archived.parent / "other", STEPS)
    for name in ("other", "copy"):
        inshrink_core.compress(other, archived.parent / f"{name}.inshrink", codec="lossless")
    offered = services.archives_of(services.load_subject(str(archived)))
    assert [chain.path.stem for chain in offered] == ["run", "copy"]


def test_the_archive_of_a_run_or_of_the_link_is_found_and_its_chain_drawn(archived, jobs):
    other = archived.parent / "other.inshrink"
    inshrink_core.compress(archived, other, codec="lossless", steps=STEPS[:2])
    app = archives("frames", archived, archive=str(other))
    assert {metric.label: metric.value for metric in app.metric}["Frames"] == "2"
    app = archives("frames", archived, archive="/etc/passwd")
    assert {metric.label: metric.value for metric in app.metric}["Frames"] == "4"
    assert charts(app) == 1
    table = next(found.value for found in app.dataframe if "parent step" in found.value)
    assert list(table["step"]) == list(STEPS)
    assert list(table["kind"]) == ["keyframe", "delta", "keyframe", "delta"]
    assert table["parent step"].isna().tolist() == [True, False, False, False]


def test_the_ratio_of_an_archive_upon_a_base_model_is_called_so(root, jobs):
    run = write_run(root / "run", (1, 2))
    inshrink_core.compress(run, root / "run.inshrink", steps=[2], base=f"{run}@1")
    app = archives("frames", run)
    assert "Ratio with base" in {metric.label for metric in app.metric}
    assert any("relative to the base model" in caption.value for caption in app.caption)


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
    assert {metric.label: metric.value for metric in app.metric}["Frames"] == "4"
    assert "Verify" in [one.label for one in app.button]


def test_verifying_starts_a_job_and_says_what_it_found_as_text(archived, jobs):
    jobs.answers["verify"] = SOUND
    app = archives("verify", archived)
    button(app, "Verify and decode").click().run()
    assert jobs.last == ["verify", str(archived.with_name("run.inshrink")), "--deep"]
    assert "Sound: 4 frames checked, every tensor decoded" in texts(app)
    problem = {"where": "frames/<b>", "what": "the checksum differs", "remedy": "restore a backup"}
    jobs.answers["verify"] = SOUND | {"ok": False, "problems": [problem], "notes": [problem]}
    button(app, "Verify").click().run()
    assert "1 problem; 4 frames" in texts(app)
    assert app.dataframe[1].value["where"][0] == "frames/<b>"


def test_pruning_is_planned_first_and_done_only_with_a_word(archived, jobs):
    app = archives("prune", archived)
    assert button(app, "Show what would be removed").disabled
    jobs.answers["prune"] = PLAN | {"removed": []}
    app.number_input(key="prune.last").set_value(4).run()
    button(app, "Show what would be removed").click().run()
    assert "These rules keep every step" in texts(app)
    jobs.answers["prune"] = PLAN
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


def folder_of(app: AppTest) -> Path:
    return Path(next(box for box in app.text_input if box.label == "Folder").value)


def test_a_step_is_restored_to_a_folder_and_its_digests_are_shown(archived):
    app = archives("restore", archived)
    app.selectbox(key="restore.step").set_value(20).run()
    target = folder_of(app)
    assert target == archived.parent / "run-step-20"
    button(app, "Restore").click().run()
    (job,) = job_services.registry().jobs()
    wait(job)
    app.run()
    original = (archived / "step_000020.pt").read_bytes()
    assert (target / "step_000020.pt").read_bytes() == original
    assert "Step 20 restored: 1 file" in texts(app)
    table = next(one.value for one in app.dataframe if "SHA-256" in one.value.columns)
    assert list(table["SHA-256"]) == [hashlib.sha256(original).hexdigest()]
    # The next one goes elsewhere: nothing is overwritten.
    assert folder_of(app) == archived.parent / "run-step-20-2"


def test_nothing_is_restored_over_what_is_there_or_outside_of_the_roots(archived):
    for name in ("run", "run.inshrink", "nowhere/deep", "../outside"):
        with pytest.raises(ServiceError):
            services.restore_target(str(archived.parent / name))
    (archived.parent / "empty").mkdir()
    assert services.restore_target("empty") == archived.parent / "empty"
