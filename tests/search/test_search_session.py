"""`search`, `estimate` and bounded `compress` on a small run, with an evaluator in this process."""

import io
import json
import math
import re
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from rich.console import Console

from inshrink_core.chain import Archive, ChainState
from inshrink_core.chain.defaults import make_chain_config
from inshrink_core.checkpoint import MODEL_ROLES
from inshrink_core.codecs.lattice.codec import LatticeCodec
from inshrink_core.errors import ConfigError, EvaluatorError, InputError
from inshrink_core.evaluate import EvaluatorRequest
from inshrink_core.execution.results import results_folder
from inshrink_core.formats import open_run
from inshrink_core.search import search as searching
from inshrink_core.search.bounds import DEFAULT_MAX_RESTORE_COST, Bounds
from inshrink_core.search.quadratic import DROP_PER_NAT
from inshrink_core.search.trials import BoundEvaluator, Measurer
from inshrink_core.verbs.compress import compress
from inshrink_core.verbs.estimate import estimate
from inshrink_core.verbs.search import ByStep, Search, search
from inshrink_core.verbs.shared.values import read_config_file
from tests.runs import write_run
from tests.search.evaluators import InProcess


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return open_run(write_run(tmp_path_factory.mktemp("search") / "run", n_steps=5))


@pytest.fixture(autouse=True)
def trials_apart(tmp_path, monkeypatch):
    """The trials of each test are its own, although the tests share a run."""
    monkeypatch.setattr(searching, "results_folder", lambda *_, **__: tmp_path)


@pytest.fixture
def evaluator(tmp_path, monkeypatch):
    """The evaluator that both ways of searching ask, in this process."""
    made = InProcess(tmp_path)
    monkeypatch.setattr(EvaluatorRequest, "resolve", lambda *_: made)
    return made


@pytest.fixture(scope="module")
def searched(run, tmp_path_factory):
    """A search under one bound, and the file that it wrote; its trials are beside it."""
    folder = tmp_path_factory.mktemp("searched")
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(searching, "results_folder", lambda *_, **__: folder)
        patched.setattr(EvaluatorRequest, "resolve", lambda *_: InProcess(folder))
        return search(run, max_divergence=1e-3, output=folder / "search.json"), folder / "search.json"


def shown(report):
    """Return what a person reads."""
    console = Console(file=io.StringIO(), width=200)
    report.show(console)
    return console.file.getvalue()


def figures(run, archive, evaluator, step):
    first, second = evaluator.evaluate(run[step]), evaluator.evaluate(archive[step])
    return (second.value - first.value) / first.value, first.divergence(second)


@pytest.mark.parametrize("codec", ["lattice", "inshrinkerator", "qd"])
def test_every_restored_step_keeps_the_bounds_and_the_report_says_how(run, tmp_path, evaluator, codec):
    report = compress(run, tmp_path / "a.inshrink", codec=codec, max_drop=0.01, max_divergence=1e-3)
    archive = Archive.open(tmp_path / "a.inshrink")
    document = report.to_json()
    assert report.failure is None
    assert document["max_drop"] <= 0.01
    assert document["max_divergence"] <= 1e-3
    assert document["evaluations"] >= len(run.steps)
    for frame in document["frames"]:
        drop, divergence = figures(run, archive, evaluator, frame["step"])
        assert drop <= 0.01
        assert divergence <= 1e-3
        assert (frame["drop"], frame["divergence"]) == (pytest.approx(drop), pytest.approx(divergence))
        assert frame["discriminative"] in (True, False)
        assert frame["config"]["codec"] in (codec, "lossless")


@pytest.mark.parametrize("codec", ["lattice", "qd"])
def test_where_nothing_keeps_the_bounds_a_step_is_stored_exactly_and_the_chain_goes_on(
    run, tmp_path, evaluator, codec
):
    target = tmp_path / "a.inshrink"
    report = compress(run, target, codec=codec, max_divergence=0.0, steps=run.steps[:3])
    frames = report.to_json()["frames"]
    assert [frame["exact"] for frame in frames] == [True] * 3
    assert report.failure is None
    archive = Archive.open(target)
    for step in run.steps[:3]:
        for spec in run[step].specs:
            if spec.role in MODEL_ROLES:
                assert torch.equal(archive[step][spec.key], run[step][spec.key]), spec.key
    again = compress(run, target, steps=run.steps)
    assert again.codec == codec if codec == "lattice" else again.codec in (codec, "lossless")
    assert again.appended == run.steps[3:]


def test_where_the_previous_checkpoint_passes_too_a_coarser_step_comes_nearer_than_it_does(
    run, tmp_path, evaluator
):
    report = compress(run, tmp_path / "a.inshrink", max_drop=0.5, max_divergence=10.0)
    archive = Archive.open(tmp_path / "a.inshrink")
    frames = report.to_json()["frames"]
    # In place of the first, which has no stale copy, stands the second.
    assert [frame["discriminative"] for frame in frames] == [False] * 5
    step_sizes = [frame["config"]["settings"]["coarseness"] for frame in frames]
    assert step_sizes[0] == LatticeCodec().coarseness < step_sizes[1]
    for before, frame in pairwise(frames):
        baseline = evaluator.evaluate(run[frame["step"]]).divergence(evaluator.evaluate(run[before["step"]]))
        assert figures(run, archive, evaluator, frame["step"])[1] <= baseline / 2


def test_the_first_step_is_as_coarse_as_its_bounds_allow_where_the_next_one_in_its_place_breaks_them(
    run, tmp_path, evaluator
):
    def first_coarseness(steps):
        report = compress(run, tmp_path / f"{len(steps)}.inshrink", max_divergence=1e-3, steps=steps)
        frame = report.to_json()["frames"][0]
        assert frame["discriminative"] is True
        return frame["config"]["settings"]["coarseness"]

    start = LatticeCodec().coarseness
    assert first_coarseness(run.steps[:1]) <= start < first_coarseness(run.steps[:2])


def test_the_same_restored_state_is_evaluated_once(run, evaluator):
    step = run.steps[0]
    base = make_chain_config("", "lattice", None, None, 32, "cpu", 1)
    with BoundEvaluator(evaluator, run.__getitem__, Bounds(max_divergence=1e-3)) as judge:
        measurer = Measurer(base=base, evaluator=judge)
        # So near to each other that every step size is the same.
        candidates = [{"coarseness": at} for at in (2.5, 2.500001)]
        item, other = (measurer.measured(each, run[step], ChainState(), None)[0] for each in candidates)
    assert judge.evaluations == 1
    assert (item.drop, item.divergence) == (other.drop, other.divergence)


@pytest.mark.parametrize("error", [KeyboardInterrupt, EvaluatorError])
def test_bounded_compressing_goes_on_where_it_ended(run, tmp_path, evaluator, error):
    target = tmp_path / "a.inshrink"

    def interrupt(now):
        if now.step == run.steps[2] and error is KeyboardInterrupt:
            raise error

    def judged(loss):
        if error is EvaluatorError and target.exists() and len(Archive.open(target).steps) == 2:
            raise error("it raised", where=evaluator.spec)
        return loss

    evaluator.judged = judged
    with pytest.raises(error):
        compress(run, target, max_divergence=1e-3, progress=interrupt)
    assert Archive.open(target).steps == run.steps[:2]
    evaluator.judged = lambda loss: loss
    report = compress(run, target, max_divergence=1e-3)
    assert (report.skipped, report.failure) == (run.steps[:2], None)
    assert all(frame["divergence"] <= 1e-3 for frame in report.to_json()["frames"])


def test_steps_archived_without_the_bounds_are_judged_too(run, tmp_path, evaluator):
    target = tmp_path / "a.inshrink"
    compress(run, target, config={"coarseness": 20.0}, steps=run.steps[:3])
    report = compress(run, target, max_divergence=1e-6, steps=run.steps[:4])
    assert report.appended == run.steps[3:4]
    assert report.bound_record.broken
    assert "break the bounds" in str(report.failure)


def test_a_search_finds_a_configuration_that_compress_takes_and_that_keeps_the_bounds(
    run, searched, tmp_path, evaluator
):
    report, file = searched
    document = json.loads(file.read_text())
    best = document["best"]
    assert {"config", "ratio_weights", "drop", "divergence"} <= set(best)
    assert best["divergence"] <= 1e-3
    assert report.evaluations == len(report.trials)
    assert {"config", "ratio_weights", "drop", "divergence", "step"} <= set(document["trials"][0])
    settings = {**best["config"]["settings"], "overrides": best["config"].get("override", [])}
    written = compress(run, tmp_path / "a.inshrink", codec=best["config"]["codec"], config=settings)
    frames = sum(frame.weights_nbytes for frame in written.size.frames)
    assert best["ratio_weights"] == pytest.approx(written.size.raw_weights / frames, rel=0.05)
    archive = Archive.open(tmp_path / "a.inshrink")
    assert max(figures(run, archive, evaluator, step)[1] for step in run.steps) == pytest.approx(
        best["divergence"]
    )


def test_what_all_candidates_have_in_common_is_part_of_the_configuration_that_is_found(
    run, tmp_path, evaluator
):
    common = {"sensitivity": 0.0, "overrides": [{"match": "0.*", "exact": True}]}
    options = {"config": common, "output": tmp_path / "s.json"}
    found = search(run, max_divergence=1e-3, **options)
    config = found.to_json()["best"]["config"]
    assert config["settings"]["sensitivity"] == 0.0
    assert config["override"] == common["overrides"]
    assert all(trial.config["settings"]["sensitivity"] == 0.0 for trial in found.trials)
    settings = {**config["settings"], "overrides": config["override"]}
    size = compress(run, tmp_path / "a.inshrink", config=settings).size
    frames = sum(frame.weights_nbytes for frame in size.frames)
    assert found.best.ratio_weights == pytest.approx(size.raw_weights / frames, rel=0.03)
    again = search(run, max_divergence=1e-3, **options)
    assert (again.evaluations, again.to_json()["best"]["config"]) == (0, config)


def test_a_search_says_what_settings_by_step_store_under_the_same_bounds_and_measures_it_once(
    run, tmp_path, evaluator
):
    options = {"max_divergence": 1e-3, "output": tmp_path / "s.json"}
    found = search(run, **options)
    written = compress(run, tmp_path / "a.inshrink", max_divergence=1e-3)
    assert found.by_step.ratio_weights == written.size.ratio_weights
    assert found.by_step.divergence == written.to_json()["max_divergence"]
    larger = found.by_step.ratio_weights > found.best.ratio_weights
    assert (
        larger
        is found.is_best_by_step
        is any("by step" in item or "each step" in item for item in found.notes)
    )
    assert larger is ("--max-divergence 0.001" in shown(found))
    assert larger is ("--config" not in shown(found))
    before = evaluator.asked
    assert search(run, **options).by_step == found.by_step
    assert evaluator.asked - before <= len(run.steps) + 1, "the originals alone, the first of them twice"
    assert search(run, **options | {"budget": 1}).by_step is None


def test_a_search_that_settings_by_step_win_says_that_its_file_does_not_hold_them(
    tmp_path, evaluator, monkeypatch
):
    run = open_run(write_run(tmp_path / "run", n_steps=2))  # Of its own: trials are kept with a run.
    figures = {"drop": 0.0, "divergence": 0.0, "restore_cost": 0.0, "evaluations": 1}
    won = ByStep(ratio_weights=1e6, ratio_total=1e6, **figures)
    monkeypatch.setattr(Search, "_by_step", lambda *_: won)
    target = tmp_path / "s.json"
    found = search(run, max_divergence=1e-3, output=target)
    document = json.loads(target.read_text())
    assert any("can hold only one configuration for all steps" in note for note in document["notes"])
    assert "--config" not in shown(found)
    target.write_text(json.dumps(document | {"best": None}))
    with pytest.raises(ConfigError, match="give compress the bounds"):
        read_config_file(target)


def test_an_interrupted_search_goes_on_from_its_log(run, searched, tmp_path, evaluator):
    (full, _), seen = searched, []

    def interrupt(now):
        seen.append(now)
        if len(seen) == 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        search(run, max_divergence=1e-3, output=tmp_path / "part.json", progress=interrupt)
    assert evaluator.closed
    rest = search(run, max_divergence=1e-3, output=tmp_path / "part.json")
    assert rest.evaluations == full.evaluations - 4
    assert rest.best.to_json() == full.best.to_json()
    assert seen[-1].done == 4 < seen[-1].total


def test_where_no_configuration_keeps_the_bounds_the_search_says_so(run, tmp_path, evaluator):
    found = search(run, max_divergence=0.0, codec="qd", output=tmp_path / "s.json", steps=run.steps[:2])
    assert found.best is None
    assert found.to_json()["best"] is None
    assert "keeps the bounds at every step" in str(found.failure)


def test_where_bounds_say_nothing_at_any_step_nothing_is_coarsened(run, tmp_path, evaluator):
    found = search(run, max_divergence=10.0, output=tmp_path / "s.json")
    assert found.not_discriminative == run.steps[1:]
    assert found.best.settings["coarseness"] == LatticeCodec().coarseness
    assert "prove nothing" in found.notes[0]


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"max_divergence": math.inf}, "nothing to search for"),
        ({"max_drop": -0.01}, "--max-drop -0.01"),
        ({"max_drop": 0.01, "codec": "lossless"}, "nothing to search"),
        ({"max_drop": 0.01, "budget": 0}, "--budget"),
        ({"max_drop": 0.01, "config": {"overrides": [{"match": "no.*", "coarseness": 1}]}}, "no tensor"),
        ({"max_drop": 0.01, "config": {"bins": 3}}, "no setting 'bins'"),
        ({"max_drop": 0.01, "steps": [7]}, "no step 7"),
    ],
)
def test_what_cannot_be_searched_for_is_refused(run, tmp_path, evaluator, asked, message):
    with pytest.raises(InputError, match=message):
        search(run, output=tmp_path / "s.json", **asked)


def test_an_estimate_is_within_five_percent_and_predicts_drops_from_trials(
    run, searched, tmp_path, evaluator, monkeypatch
):
    bare = estimate(run, config={"coarseness": 3.0})
    assert (bare.basis, bare.n_trials) == ("rule of thumb", 0)
    assert "uncalibrated" in bare.notes[0]
    found, file = searched
    monkeypatch.setattr(searching, "results_folder", lambda *_, **__: file.parent)
    reported = estimate(run, config={"coarseness": 3.0})
    assert (reported.basis, reported.notes) == ("trials", ())
    assert reported.n_trials == len(found.trials)
    best = estimate(run, config=found.best.settings)
    assert best.divergence == pytest.approx(found.to_json()["best"]["divergence"])
    assert best.ratio_weights == pytest.approx(found.best.ratio_weights)
    real = compress(run, tmp_path / "a.inshrink", config={"coarseness": 3.0}).size
    frames = sum(frame.weights_nbytes for frame in real.frames)
    assert reported.ratio_weights == pytest.approx(real.raw_weights / frames, rel=0.05)
    asked = evaluator.asked
    archive = estimate(run, config={"coarseness": 3.0}, tried=2).archive
    assert archive.basis == "predicted"
    estimate(run, config={"coarseness": 4.0})
    assert evaluator.asked == asked


def test_without_trials_an_estimate_goes_by_rules_of_thumb_that_order_configurations(run):
    reported = [estimate(run, config={"coarseness": coarseness}) for coarseness in (1.0, 3.0)]
    assert reported[1].divergence == pytest.approx(9 * reported[0].divergence)
    assert [item.drop for item in reported] == pytest.approx(
        [DROP_PER_NAT * item.divergence for item in reported]
    )
    bits = [estimate(run, codec="qd", config={"bits": bits}) for bits in (6, 3)]
    assert 0 < bits[0].divergence < bits[1].divergence
    exact = estimate(run, codec="lossless")
    assert (exact.drop, exact.divergence) == (0.0, 0.0)
    assert exact.to_json()["basis"] == "rule of thumb"


def test_each_of_several_is_the_estimate_of_its_configuration(run):
    report = estimate(run, codec="uniform", config={"bits": 8}, each=["bits=4", "codec=lossless"], again=True)
    assert [row.set for row in report.each] == [
        {"codec": "uniform", "settings": {"bits": 4}},
        {"codec": "lossless", "settings": {}},
    ]
    alone = [estimate(run, codec="uniform", config={"bits": bits}) for bits in (8, 4)]
    for item, row in zip(alone, (report, *report.each), strict=False):
        assert replace(item, seconds=0.0, measured_at=None) == replace(row, seconds=0.0, each=(), set={})
    with pytest.raises(InputError, match="no setting 'bits'"):
        estimate(run, codec="uniform", each=["codec=lattice,bits=4"])


def test_trials_are_kept_inside_of_the_run(tmp_path, evaluator, monkeypatch):
    monkeypatch.setattr(searching, "results_folder", results_folder)
    separate = open_run(write_run(tmp_path / "run", n_steps=2))
    found = search(separate, max_divergence=1e-3)
    assert (tmp_path / "run" / ".inshrink" / "search.jsonl").is_file()
    assert search(separate, max_divergence=1e-3).evaluations == 0
    assert estimate(separate).n_trials == len(found.trials)


def test_without_bounds_a_search_promises_what_compress_does(run, tmp_path, evaluator):
    found = search(run, output=tmp_path / "s.json")
    assert found.bounds.limits == {"restore_cost": DEFAULT_MAX_RESTORE_COST}
    assert found.best.to_json()["restore_cost"] <= DEFAULT_MAX_RESTORE_COST


def test_what_is_found_is_never_larger_than_the_default_that_keeps_the_bounds(run, tmp_path, evaluator):
    free = search(run, max_divergence=10, budget=1, output=tmp_path / "s.json")
    assert free.default_keeps
    assert free.best.ratio_weights >= free.default.ratio_weights
    fine = search(run, max_divergence=10, config={"coarseness": 1e-3}, output=tmp_path / "f.json")
    assert fine.default.ratio_weights < free.default.ratio_weights
    tight = search(run, max_divergence=1e-9, output=tmp_path / "t.json")
    assert not tight.default_keeps
    assert re.search(r"default keeps the bounds +no", shown(tight))
