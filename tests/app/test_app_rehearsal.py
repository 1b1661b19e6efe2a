"""Failure rehearsals on the page: really trained, shown seed by seed, and opened where they were saved."""

from __future__ import annotations

import json
from typing import Any

import pytest
from inshrink_app import services
from inshrink_app.model.problem import ServiceError
from inshrink_app.services import jobs as job_services
from inshrink_app.services.rehearsing import rehearsal_so_far

from tests.app.builders import SAMPLE, archives, button, charts, texts
from tests.app.job_stubs import wait


def document(**changes: Any) -> dict[str, Any]:
    """Return a rehearsal as the command line prints it."""
    curves = [
        {"seed": seed, "steps": [10, 20], "uninterrupted": [2.0 + seed, 1.0], "restored": [2.1, 1.01]}
        for seed in (0, 1)
    ]
    values = {"task": "<b>mine</b>", "metric": "loss", "direction": "lower", "codec": "lattice"}
    values |= {"restored_at": [10], "curves": curves, "excess": 0.004, "excess_half_width": None}
    return values | {"noise": 0.03, "ratio_weights": 18.0, "ratio_total": 2.0} | changes


def test_a_rehearsal_on_the_page_really_trains_and_restores_every_bit_losslessly(root):
    pytest.importorskip("sklearn", reason="install it with: pip install 'inshrink[dev]'")
    app = archives("rehearse", SAMPLE)
    app.selectbox(key="rehearse.codec").set_value("lossless")
    app.number_input(key="rehearse.seeds").set_value(2)
    app.number_input(key="rehearse.digits-cnn.restores").set_value(1)
    app.number_input(key="rehearse.digits-cnn.steps").set_value(20)
    app.run()
    button(app, "Rehearse").click().run()
    (job,) = job_services.registry().jobs()
    assert job.verb == "rehearse"
    assert wait(job).state == "finished", job.log_text()

    # The pairs of trainings that are done are there while others run.
    so_far = rehearsal_so_far(job)
    assert [curve["seed"] for curve in so_far["curves"]] == [0, 1]
    found = services.read_result(job)
    assert found["restored_at"] == [10]
    assert all(curve["uninterrupted"] == curve["restored"] for curve in found["curves"])
    assert found["curves"][0]["uninterrupted"] != found["curves"][1]["uninterrupted"]
    assert found["excess"] == 0.0

    app.run()
    assert charts(app) == 1
    assert {metric.label: metric.value for metric in app.metric}["Excess at the end"] == "0 %"

    # What it reported opens as a saved rehearsal, with the same curves.
    folder = services.rehearsals_folder()
    (root / "kept").symlink_to(folder)
    copied = root / "copied"
    (copied / "reports").mkdir(parents=True)
    for path in (folder / "reports").iterdir():
        (copied / "reports" / path.name).write_bytes(path.read_bytes())
    (again,) = services.saved_rehearsals(str(copied))
    assert again == found
    with pytest.raises(ServiceError, match="outside"):
        services.saved_rehearsals(str(root / "kept"))


def test_a_saved_rehearsal_of_any_training_is_plotted(root):
    (root / "saved.json").write_text(json.dumps(document()))
    app = archives("rehearse", SAMPLE)
    app.text_input(key="rehearsal.saved").set_value("saved.json").run()
    assert charts(app) == 1
    (title,) = app.selectbox(key="rehearsal.which").options
    assert title.startswith("<b>mine</b> · lattice · ")  # options are no markdown
    assert "<b>mine" not in texts(app)


@pytest.mark.parametrize(
    "content",
    [
        "[]",
        "{",
        json.dumps(
            document(curves=[{"seed": 0, "steps": [1], "uninterrupted": [1.0, 2.0], "restored": [1.0]}])
        ),
        json.dumps(document(excess="much")),
    ],
)
def test_what_is_no_rehearsal_is_refused_in_words(root, content):
    (root / "saved.json").write_text(content)
    with pytest.raises(ServiceError, match="no rehearsal"):
        services.saved_rehearsals("saved.json")


def test_nothing_outside_of_the_roots_is_read_as_a_rehearsal(root, tmp_path):
    (tmp_path / "secret.json").write_text(json.dumps(document()))
    with pytest.raises(ServiceError, match="outside"):
        services.saved_rehearsals(str(tmp_path / "secret.json"))
    with pytest.raises(ServiceError, match="no finished pair"):
        services.saved_rehearsals(str(root))
