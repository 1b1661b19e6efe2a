"""Restoring files of a step from the page: into a new folder of the reader's, with digests."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
from inshrink_app import services
from inshrink_app.model.problem import ServiceError
from inshrink_app.services import jobs as job_services

from tests.app.builders import archives, button, texts
from tests.app.job_stubs import wait


def test_a_step_is_restored_to_a_folder_and_its_digests_are_shown(archived):
    app = archives("restore", archived)
    app.selectbox(key="restore.step").set_value(20).run()
    target = Path(app.text_input(key="restore.target").value)
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
    assert app.text_input(key="restore.target").value.endswith("run-step-20-2")


@pytest.mark.parametrize("name", ["run", "run.inshrink", "nowhere/deep", "../outside"])
def test_nothing_is_restored_over_what_is_there_or_outside_of_the_roots(archived, name):
    with pytest.raises(ServiceError):
        services.restore_target(str(archived.parent / name))


def test_an_empty_folder_is_as_good_as_a_new_one(archived):
    (archived.parent / "empty").mkdir()
    assert services.restore_target("empty") == archived.parent / "empty"
