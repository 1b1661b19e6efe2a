"""The explorer's jobs about a run and an archive in a bucket of a real server."""

from pathlib import Path

import pytest

pytest.importorskip("streamlit", reason="the extra 'app' is not installed")
pytest.importorskip("obstore", reason="the extra 'remote' is not installed")

import streamlit as st
from inshrink_app import services
from inshrink_app.jobs.work import Work
from inshrink_app.server import roots

import inshrink_core
from inshrink_core.archive.storage.registry import storage_at
from inshrink_core.verbs.verify import Verify
from tests.processes import until

pytestmark = [pytest.mark.integration, pytest.mark.usefixtures("waiting")]

SAMPLE = Path(__file__).parents[2] / "sample_checkpoints" / "digits-cnn"


@pytest.fixture
def run(url, tmp_path, monkeypatch):
    """A run of three steps in a bucket, under what the explorer may open, and a folder that it may see."""
    monkeypatch.setattr(roots._Current, "value", None)
    st.cache_resource.clear()
    st.cache_data.clear()
    (tmp_path / "root").mkdir()
    address = f"{url.rpartition('/')[0]}/digits"
    roots.configure([tmp_path / "root", url.rpartition("/")[0]])
    storage = storage_at(address)
    for path in sorted(SAMPLE.glob("*.pt"))[:3]:
        storage.store.put(storage.key(path.name), path)
    return address


def ended(job):
    until(lambda: not services.find_job(job.job_id).is_running)
    job = services.find_job(job.job_id)
    assert job.state == "finished", (job.state, job.problem)
    return job


def test_jobs_measure_archive_and_verify_what_lies_at_addresses(run, url, tmp_path):
    shown = services.load_subject(run)
    job = ended(services.start_job(services.sensitivity_work(services.load_subject(run), "magnitude")))
    assert services.earlier_measurement(shown, "magnitude").steps == shown.steps
    target = tmp_path / "root" / "digits.inshrink"
    ended(services.start_export(shown, services.chain_export(shown, shown.steps), target))
    inshrink_core.verbs.compress(run, url)
    ended(services.start_job(Work.asking([Verify(url, deep=True, against=run)], shown=url, page="archive")))
    assert services.load_subject(url).steps == services.load_subject(str(target)).steps == shown.steps
    stored = [path.read_bytes() for path in job.folder.parent.rglob("*") if path.is_file()]
    assert stored
    assert not any(b"hushhush" in content for content in stored)
