"""Writing archives and packs in every state, and that what is written is what was asked for."""

import hashlib
from pathlib import Path
from typing import Any

import pytest
import torch
from inshrink_app import services
from inshrink_app.model.problem import ServiceError
from inshrink_app.server import downloads as downloads_module
from inshrink_app.server import roots
from inshrink_app.services import ExportRequest
from inshrink_app.services.exporting import default_folder

import inshrink_core
from inshrink_core.chain.config import default_optimizer
from inshrink_core.codecs.lattice.codec import LatticeCodec
from inshrink_core.verbs.export import export as export_now
from tests.app.builders import SAMPLE, archives, button, open_panel, texts, trusted, write_run
from tests.app.job_stubs import STEPS, StubJobs, option, work
from tests.runs import write_run as write_training


def exported(jobs: StubJobs, archived: Path, target: Path, relative_error: float) -> None:
    """Put a finished export of a run."""
    words = ["compress", str(archived), "-o", str(target)]
    jobs.put(words, result={"relative_error": relative_error}, shown=str(archived))


def test_an_export_is_written_as_compress_writes_by_default(root, jobs):
    run = str(write_training(root / "run"))
    for codec in ("lattice", "lossless"):
        app = archives("write", run, codec=codec)
        button(app, "Write archive").click().run()
    lattice, lossless = (jobs.words(place)[0] for place in (0, 1))
    assert option(lattice, "--set") == f"coarseness={LatticeCodec().coarseness}"
    assert option(lattice, "--optimizer") == default_optimizer("lattice", {}) == "compressed"
    assert option(lossless, "--optimizer") == "exact"


def test_an_export_begins_with_what_is_on_screen(archived, jobs):
    jobs.state = "running"
    app = archives("write", archived)
    app.select_slider(key="export.lattice.coarseness").set_value(4.0).run()
    app.toggle(key="export.packed").set_value(True).run()
    button(app, "Write archive").click().run()
    first, second = jobs.words(0)
    assert first[:2] == ["compress", str(archived)]
    assert option(first, "--set") == "coarseness=4.0"
    assert option(first, "--steps") is None, "all of them"
    assert option(first, "--codec") == "lattice"
    assert option(second, "--pack") == str(archived.with_name("run-weights.inshrink"))
    assert jobs.started[0].scratch == (second[1],) == (option(first, "--output"),)
    assert app.query_params["job"] == "0" * 16
    assert "Cancel" in [found.label for found in app.button]
    assert button(app, "Write archive").disabled


def test_an_export_keeps_the_bound_of_the_header_with_an_evaluator_that_may_run(archived, jobs):
    shown = services.load_subject(str(archived))
    services.choose(shown, bound=services.Bound("drop", 0.02))
    button(archives("write", archived), "Write archive").click().run()
    assert option(jobs.last, "--max-drop") is None
    judge = trusted(archived)
    app = archives("write", archived)
    assert "drop ≤ 2" in texts(app)
    button(app, "Write archive").click().run()
    assert option(jobs.last, "--max-drop") == "0.02"
    assert jobs.started[-1].trusted == hashlib.sha256(judge.read_bytes()).hexdigest()


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
def test_a_target_that_cannot_be_written_is_refused(archived, typed, said):
    with pytest.raises(ServiceError) as refused:
        services.export_target(typed, lossless(archived))
    assert said in refused.value.problem.what


def test_samples_are_written_neither_into_nor_beside_even_where_the_explorer_sees_their_folder(root):
    with pytest.raises(ServiceError):
        services.export_target(str(SAMPLE / "x.inshrink"), lossless(SAMPLE))
    roots.configure([root, SAMPLE.parent])  # As `make run` does.
    assert default_folder(services.load_subject(str(SAMPLE))) == root


def test_one_step_of_an_archive_is_packed_from_it(archived, jobs):
    app = archives("pack", archived)
    open_panel(app)
    assert any("--weights-only --ratio 8" in code.value for code in app.code)
    app.select_slider(key="export.step").set_value(20).run()
    app.session_state["export.values_packed"] = "exact"
    app.run()
    button(app, "Write file").click().run()
    (words,) = jobs.words(0)
    assert words[:2] == ["export", str(archived.with_name("run.inshrink"))]
    assert words[-2:] == ["--weights-only", "--exact"]
    assert option(words, "--step") == "20"


def test_one_step_of_a_run_without_an_archive_is_packed_by_a_lossless_one(root, jobs):
    app = archives("pack", write_run(root / "run", STEPS))
    button(app, "Write file").click().run()
    first, second = jobs.words(0)
    names = ("--codec", "--optimizer", "--steps")
    assert [option(first, name) for name in names] == ["lossless", "drop", "40"]
    assert second[1] == option(first, "--output")


def test_all_that_a_pattern_leaves_out_is_told_before_it_is_written(archived, jobs):
    app = archives("pack", archived)

    def leave_out(*patterns: str) -> str:
        app.session_state["pack.without"] = list(patterns)
        app.run()
        return texts(app).replace("\\", "").replace("\u2060", "")

    assert "regular expression cannot be read" in leave_out("/(/")
    assert "fcb leaves out 0 tensors." in leave_out("fcb")
    assert "IAS leaves out 1 tensor: fc1.bias." in leave_out("IAS")
    assert "leaves out 1 tensor: fc1.weight" in leave_out("/weight$/")
    assert "leaves out 1 tensor: fc1.bias" in leave_out("*.bias")
    assert "Written: 1 of 2 tensors" in texts(app)
    button(app, "Write file").click().run()
    assert option(jobs.last, "--without") == "*.bias"
    assert "No tensor is left" in leave_out("fc1")
    assert button(app, "Write file").disabled


def averaged(root: Path) -> Path:
    """Write a run of a model with a moving average, and its archive; return the run."""
    run = root / "averaged"
    run.mkdir()
    layers = {"fc1.weight": torch.ones(4, 3), "fc1.bias": torch.ones(4), "head.weight": torch.ones(2, 4)}
    average = {name: value / 2 for name, value in layers.items()}
    torch.save({"model": layers, "ema": average, "step": 10}, run / "step_10.pt")
    inshrink_core.compress(run, root / "averaged.inshrink", codec="lossless")
    return run


@pytest.mark.parametrize(
    ("which", "value", "layout"), [("main", 1.0, "packed"), ("average", 0.5, "safetensors")]
)
def test_the_model_that_is_packed_is_named_and_loads_strictly(root, jobs, which, value, layout):
    run = averaged(root)
    app = archives("pack", run, model=which, form=layout)
    assert "Written: 3 of 6 tensors" in texts(app)
    app.session_state["pack.without"] = ["head"]
    app.session_state[f"export.values_{layout}"] = "exact"
    app.run()
    assert "Written: 2 of 6 tensors" in texts(app)
    app.multiselect(key="pack.without").set_value([]).run()
    button(app, "Write file").click().run()
    job = jobs.kept[-1]
    job.documents = [request.perform().to_json() for request in job.requests]
    made = services.made_by(job)
    assert "strict=False" not in made.loading
    model = torch.nn.ModuleDict({"fc1": torch.nn.Linear(3, 4), "head": torch.nn.Linear(4, 2, bias=False)})
    exec(made.loading.replace("...  # yours", "given"), {"given": model, "model": model})
    assert {float(one.detach().unique()) for one in model.parameters()} == {value}


def test_a_plain_file_is_asked_for_as_the_command_line_has_it(archived, jobs):
    app = archives("pack", archived, form="safetensors", dtype="bf16")
    open_panel(app)
    assert "layout='safetensors', dtype='bf16'" in texts(app)
    button(app, "Write file").click().run()
    target = str(archived.with_name("run-step-40-weights.safetensors"))
    assert option(jobs.last, "--output") == target
    assert jobs.last[-6:] == ["--weights-only", "--exact", "--format", "safetensors", "--dtype", "bf16"]


def test_the_result_has_ratio_digest_restore_command_and_a_link_and_leads_on_to_compare(archived, jobs):
    target = archived.with_name("it's.inshrink")
    export_now(archived.with_name("run.inshrink"), pack=target)
    exported(jobs, archived, target, 0.0125)
    app = archives("write", archived)
    told = {metric.label: metric.value for metric in app.metric}
    assert told["Compression ratio"].endswith("×")
    assert told["Relative error"] == "1.25\xa0%"
    assert hashlib.sha256(target.read_bytes()).hexdigest() in texts(app)
    assert any(code.value.startswith("inshrink restore '") for code in app.code)
    (link,) = app.get("link_button")
    assert link.proto.label.endswith("kB)")
    assert link.proto.url.startswith(downloads_module.DOWNLOAD_PREFIX)
    target = archived.with_name("run.inshrink")
    exported(jobs, archived, target, 0.0)
    app = archives("write", archived)
    told = {metric.label: (metric.value, metric.delta) for metric in app.metric}
    assert told["Restore cost"] == ("none", "exact: every bit of the weights")
    button(app, "Compare with the run").click().run()
    assert app.session_state["archives.chosen"] == [str(target)]
    assert app.session_state["archives.panel"] == "compare"


def test_a_copy_of_an_archive_has_no_error_of_its_own(archived, jobs):
    folder, copy = (archived.with_name(f"run{name}.inshrink") for name in ("", "-packed"))
    jobs.answers["export"] = {"archive": str(folder)}
    button(archives("pack", archived, pack="pack"), "Write file").click().run()
    assert jobs.last == ["export", str(folder), "--pack", str(copy)]
    export_now(folder, pack=copy)
    app = archives("pack", archived)
    told = {metric.label: (metric.value, metric.delta) for metric in app.metric}
    assert told["Relative error"] == ("none", "against the archive it copies")


def lossless(run: Path, **more: Any) -> ExportRequest:
    """Return the export of a run, bit for bit."""
    return services.chain_export(
        services.load_subject(str(run)), STEPS, codec="lossless", **{"keyframe_every": 2, **more}
    )


def test_a_packed_chain_is_what_was_asked_goes_on_after_a_cut_and_leaves_nothing_else(archived, tmp_path):
    target = archived.with_name("out.inshrink")
    before = set(archived.parent.iterdir())
    building = target.with_name(".between.building")
    inshrink_core.compress(archived, building, codec="lossless", keyframe_every=2, steps=STEPS[:2])
    done = [frame.digest for frame in inshrink_core.open(building).frames]
    packed = lossless(archived, packed=True)
    job = work(tmp_path / "jobs", *packed.placed(str(target), str(building)), scratch=(str(building),))
    assert set(archived.parent.iterdir()) - before == {target}
    made = services.made_by(job)
    assert made.digest == hashlib.sha256(target.read_bytes()).hexdigest()
    assert (made.request.kind, made.chain.steps, made.chain.is_packed) == ("chain", STEPS, True)
    assert [frame.digest for frame in inshrink_core.open(target).frames][:2] == done
    with pytest.raises(ServiceError, match="already exists"):
        services.export_target(str(target), packed)


def test_another_export_does_not_go_on_with_what_this_one_left(archived, jobs):
    shown, target = services.load_subject(str(archived)), archived.with_name("out.inshrink")
    for keyframe_every in (2, 4, 4):
        request = lossless(archived, packed=True, keyframe_every=keyframe_every)
        services.start_export(shown, request, target)
    first, second, third = (work.scratch for work in jobs.started)
    assert first != second == third


@pytest.mark.parametrize("layout", ["packed", "safetensors"])
def test_the_lines_that_load_a_part_refuse_what_lacks_but_was_not_left_out(archived, jobs, layout):
    target, archive = archived.with_name("part"), archived.with_name("run.inshrink")
    weights = {"exact": True, "layout": layout, "without": ("*.bias",)}
    report = inshrink_core.verbs.export(archive, target, step=20, weights_only=True, **weights)
    request = services.step_export(services.load_subject(str(archive)), 20, **weights)
    made = services.made_by(jobs.put(*request.placed(str(target)), result=report.to_json()))
    assert "left_out = ('fc1.bias.',)" in made.loading

    def loaded(**layers: torch.nn.Module) -> None:
        model = torch.nn.Module()
        for name, layer in layers.items():
            model.add_module(name, layer)
        exec(made.loading.replace("...  # yours", "given"), {"given": model, "model": model})

    loaded(fc1=torch.nn.Linear(48, 64))
    loaded(fc1=torch.nn.Linear(48, 64, bias=False))
    with pytest.raises(AssertionError):
        loaded(fc1=torch.nn.Linear(48, 64), fc2=torch.nn.Linear(2, 2))
    with pytest.raises(AssertionError):
        loaded(fc2=torch.nn.Linear(48, 64))
