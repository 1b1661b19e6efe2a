"""Failure rehearsals on the page are really trained; every other run has none."""

from __future__ import annotations

import pytest
from inshrink_app import services
from inshrink_app.services import jobs as job_services

from tests.app.builders import SAMPLE, archives, button, charts
from tests.app.job_stubs import wait


def test_a_rehearsal_on_the_page_really_trains_and_restores_every_bit_losslessly(root):
    pytest.importorskip("sklearn", reason="install it with: pip install 'inshrink[dev]'")
    app = archives("rehearse", SAMPLE)
    app.selectbox(key="rehearse.codec").set_value("lossless")
    app.number_input(key="rehearse.seeds").set_value(2)
    app.number_input(key="rehearse.restores").set_value(1)
    app.number_input(key="rehearse.steps").set_value(20)
    app.run()
    button(app, "Rehearse").click().run()
    (job,) = job_services.registry().jobs()
    assert job.verb == "rehearse"
    assert wait(job).state == "finished", job.log_text()
    found = services.read_result(job)
    assert found["restored_at"] == [10]
    assert all(curve["uninterrupted"] == curve["restored"] for curve in found["curves"])
    assert found["curves"][0]["uninterrupted"] != found["curves"][1]["uninterrupted"]
    assert found["excess"] == 0.0

    app.run()
    assert charts(app) == 1
    assert {metric.label: metric.value for metric in app.metric}["Excess at the end"] == "0 %"


def test_only_the_training_of_a_bundled_sample_is_offered(archived, jobs):
    archived.rename(archived.with_name("digits-cnn"))
    app = archives("rehearse", archived.with_name("digits-cnn"))
    assert app.session_state["archives.panel"] != "rehearse"
