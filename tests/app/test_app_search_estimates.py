"""Estimates on the scatter before anything is measured, and a drop bound together with a divergence."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from inshrink_app import services
from inshrink_app.actions.estimates import ladder
from inshrink_app.actions.search import run as run_search
from inshrink_app.jobs.report import Report
from inshrink_app.pages.search import figure as search_figure
from inshrink_app.pages.search import form as search_snippets
from inshrink_app.pages.search.tables import CODECS, Searched, SearchPoint, SearchRequest, front

from inshrink_core.chain.defaults import make_configs
from inshrink_core.formats import open_run
from tests.app.builders import SAMPLE, button, charts, explorer, open_panel, subject, texts
from tests.app.job_stubs import STEPS, StubJobs, archived, archived_template, jobs

__all__ = ["archived", "archived_template", "jobs"]


def rows() -> list[dict[str, Any]]:
    return [
        {
            "config": {"codec": "lattice", "settings": {"coarseness": 2.0**i}},
            "ratio": 10.0 + i,
            "drop": 0.001 * i,
            "divergence": None,
            "n_steps": 4,
            "n_trials": 0,
        }
        for i in range(3)
    ]


def point(ratio: float, drop: float, **changes: Any) -> SearchPoint:
    values = {
        "label": f"{ratio}",
        "config": {},
        "divergence": None,
        "n_steps": 4,
        "whole": True,
        "keeps": True,
    }
    return SearchPoint(ratio=ratio, drop=drop, **(values | changes))


def test_estimates_are_drawn_without_an_evaluator_before_anything_is_measured(
    archived: Path, jobs: StubJobs
) -> None:
    jobs.answers["search"] = {"rows": rows()}
    app = explorer("search", run=str(archived))
    assert charts(app) == 0
    button(app, "Estimate without measuring").click().run()
    assert not app.exception
    (request,) = jobs.started
    assert (request["kind"], request["codec"], tuple(request["steps"])) == ("estimates", "lattice", STEPS)
    assert "evaluator" not in request
    assert charts(app) == 1
    assert "Hollow diamonds are estimates" in texts(app)
    listed = next(one.value for one in app.dataframe if "figures" in one.value.columns)
    assert set(listed["figures"]) == {"estimated"}
    assert set(listed["is"]) == {"not measured"}


def test_estimates_are_hollow_labelled_and_never_on_the_front() -> None:
    guessed = point(100.0, 0.0, is_estimated=True)
    measured = point(10.0, 0.01)
    assert front([guessed, measured], "drop") == (1,)
    figure = search_figure.search_figure(Searched(points=(measured,)), (guessed,), "drop")
    (trace,) = [one for one in figure.data if one.name == "Estimated"]
    assert trace.marker.symbol == "diamond-open"
    assert trace.customdata[0][0] == 1
    assert "estimated, nothing of it was measured" in trace.customdata[0][1]
    assert Searched(points=(measured,)).best == measured


def test_the_worker_estimates_from_fine_to_coarse_and_tells_each(
    archived: Path, jobs: StubJobs, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "result"
    asked = {"kind": "estimates", "path": str(archived), "codec": "uniform", "steps": list(STEPS)}
    run_search({**asked, "output": str(output)}, Report())
    told = [json.loads(line)["row"] for line in capsys.readouterr().out.splitlines() if '"row"' in line]
    assert told == json.loads(output.read_text())["rows"]
    ratios = [row["ratio"] for row in told]
    assert len(ratios) >= 5
    assert ratios == sorted(ratios)
    job = jobs.put("search", "finished", result=json.loads(output.read_text()), **asked)
    points = services.estimates(job)
    assert all(one.is_estimated and one.whole for one in points)
    assert [one.ratio for one in points] == ratios


@pytest.mark.parametrize("codec", CODECS)
def test_every_codec_has_settings_from_fine_to_coarse(codec: str) -> None:
    found = ladder(open_run(SAMPLE), codec)
    assert 2 <= len(found) <= 8
    assert len({one.digest for one in found}) == len(found)
    for one in found:
        make_configs(one.codec, dict(one.settings))


@pytest.mark.parametrize(
    ("beside", "asked", "said"),
    [
        ("none", "inf", "--max-divergence inf"),
        ("own", 0.003, "--max-divergence 0.003"),
        ("default", None, ""),
    ],
)
def test_a_drop_is_bound_together_with_a_divergence_of_ones_own(
    root: Path, jobs: StubJobs, beside: str, asked: Any, said: str
) -> None:
    app = explorer("search", run=str(SAMPLE), beside=beside)
    assert not app.exception
    button(app, "Search").click().run()
    assert not app.exception
    request = jobs.started[-1]
    assert request["max_drop"] == 0.01
    assert request.get("max_divergence") == asked
    json.dumps(request, allow_nan=False)
    open_panel(app)
    assert said in texts(app)


def test_the_lines_of_a_waived_divergence_are_python() -> None:
    request = SearchRequest(beside=math.inf, steps=(10,))
    assert request.limits() == {"max_drop": 0.01, "max_divergence": math.inf}
    command, lines = search_snippets.of(subject(), request, None)
    assert "--max-drop 0.01 --max-divergence inf" in command
    assert "max_divergence=float('inf')" in lines
    compile(lines, "snippet", "exec")


def test_a_waived_divergence_is_no_line_in_the_figure(jobs: StubJobs) -> None:
    job = jobs.put("search", "running", max_drop=0.01, max_divergence="inf", steps=[10])
    assert services.searched(job).max_divergence is None
