"""The Overview page of runs and archives, in every state."""

from __future__ import annotations

from pathlib import Path

import pytest
from inshrink_app import services
from inshrink_app.widgets import fmt
from streamlit.testing.v1 import AppTest

from tests.app.builders import (
    SAMPLE,
    charts,
    explorer,
    small_chain,
    subject,
    texts,
    write_run,
)
from tests.app.job_stubs import StubJobs, archived, archived_template, jobs

__all__ = ["archived", "archived_template", "jobs"]

pytestmark = pytest.mark.usefixtures("jobs")


def test_a_partly_damaged_run_is_shown_with_what_cannot_be_read_above_the_button(root: Path) -> None:
    write_run(root / "run")
    (root / "run" / "step_000040.pt").write_bytes(b"PK\x03\x04 cut off")
    (root / "run" / "vocabulary_9.bin").write_bytes(b"other content")
    app = explorer("overview", run=str(root / "run"))
    assert not app.exception
    assert [error.value.partition("\n")[0] for error in app.error] == [
        "1 checkpoint cannot be read. "
        "The archive will hold all others: keep these files, or fetch whole ones."
    ]
    assert "000040" in app.error[0].value
    assert "1 file left out" in [expander.label for expander in app.expander]
    assert {metric.label: metric.value for metric in app.metric}["Checkpoints"] == "3"
    app = explorer("overview", run=str(root / "run"))  # from the headers that were kept
    assert len(app.error) == 1


def test_one_checkpoint_is_told_that_curves_need_two(root: Path) -> None:
    write_run(root / "one", (5,))
    app = explorer("overview", run=str(root / "one"))
    assert not app.exception
    assert "This run has one checkpoint" in texts(app)
    assert charts(app) == 0


def test_overview_of_the_sample_has_facts_curves_and_sizes(root: Path) -> None:
    app = explorer("overview", run=str(SAMPLE))
    assert not app.exception
    assert [metric.label for metric in app.metric][3:] == [
        "Checkpoints",
        "Parameters",
        "Size on disk",
        "Last checkpoint",
        "Read to open",
    ]
    assert app.metric[4].value == "44.8 k"
    assert charts(app) == 1
    assert list(app.dataframe[0].value["role"]) == ["weight", "exp_avg", "exp_avg_sq", "buffer", "step"]
    assert [s.value for s in app.header] == [
        "Shrink this run",
        "Training",
        "Size by role",
        "Weights by layer type",
        "Next",
    ]


def test_overview_reads_headers_only(root: Path) -> None:
    opened = services.load_subject(str(SAMPLE))
    assert opened.bytes_read < 0.2 * opened.total_bytes


def test_overview_of_a_huge_run_lists_and_filters_its_tensors(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(services, "load_subject", lambda _: subject(400, 200))
    app = explorer("overview", run="/runs/huge")
    assert not app.exception
    assert len(app.dataframe) == 2, "drawn once it is asked for"
    app.session_state["tensors"] = True
    app.run()
    assert len(app.dataframe[2].value) == 400
    app.text_input(key="tensor_filter").set_value("layers.39").run()
    assert len(app.dataframe[2].value) == 11


def test_overview_of_an_archive_shows_its_ratio(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shown = subject(kind="archive", archive=small_chain(), name="huge.inshrink")
    monkeypatch.setattr(services, "load_subject", lambda _: shown)
    app = explorer("overview", run="/runs/huge.inshrink")
    assert not app.exception
    assert {metric.label: metric.value for metric in app.metric}["Compression ratio"] == "3.00×"


def test_overview_of_an_archived_run_shows_the_ratio(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(services, "load_subject", lambda _: subject(archive=small_chain()))
    app = explorer("overview", run="/runs/huge")
    assert not app.exception
    assert {metric.label: metric.value for metric in app.metric}["Compression ratio"] == "3.00×"


def test_overview_tells_the_disk_saved_and_that_an_exact_archive_costs_nothing(
    archived: Path, jobs: StubJobs
) -> None:
    app = explorer("overview", run=str(archived))
    told = {metric.label: (metric.value, metric.delta) for metric in app.metric}
    assert told["Restore cost"] == ("none", "exact: every bit of the weights")
    facts = services.load_subject(str(archived)).archive
    assert facts is not None
    assert told["Archive"][1] == (
        "saves nothing"
        if facts.nbytes >= facts.raw_bytes
        else f"saves {fmt.size(facts.raw_bytes - facts.nbytes)}, "
        + fmt.share(1 - facts.nbytes / facts.raw_bytes)
    )


def test_a_run_finds_its_archive_beside_it_and_both_tell_the_same_ratio(root: Path) -> None:
    import inshrink_core

    run = write_run(root / "run")
    inshrink_core.compress(run, root / "run.inshrink", codec="lossless")
    found = [explorer("overview", run=str(root / name)) for name in ("run", "run.inshrink")]
    ratios = [{metric.label: metric.value for metric in app.metric}["Compression ratio"] for app in found]
    assert not any(app.exception for app in found)
    assert ratios[0] == ratios[1]
    assert ratios[0].endswith("×")


def test_an_archive_that_is_written_or_grows_while_its_run_is_open_is_seen(root: Path) -> None:
    import inshrink_core

    def told(app: AppTest) -> dict[str, str]:
        assert not app.exception
        return {metric.label: metric.value for metric in app.metric}

    run = write_run(root / "run", (1, 2, 3))
    app = explorer("overview", run=str(run))
    assert "Compression ratio" not in told(app)
    inshrink_core.compress(run, root / "run.inshrink", codec="lossless", steps=[1])
    first = told(app.run())["Archive"]
    inshrink_core.compress(run, root / "run.inshrink", codec="lossless")
    assert told(app.run())["Archive"] != first


def test_the_archive_of_another_run_is_not_claimed(root: Path) -> None:
    import inshrink_core

    inshrink_core.compress(write_run(root / "a" / "run", (1, 2)), root / "run.inshrink", codec="lossless")
    assert services.load_subject(str(write_run(root / "run", (10, 20)))).archive is None


def test_checkpoints_written_later_are_seen(root: Path) -> None:
    run = write_run(root / "run", (1, 2))
    assert services.load_subject(str(run)).steps == (1, 2)
    write_run(run, (3,))
    assert services.load_subject(str(run)).steps == (1, 2, 3)
