"""Runs and archives at addresses: which may be opened, and what pages do with them."""

import pytest
from inshrink_app import launch, services
from inshrink_app.jobs.job import Job
from inshrink_app.jobs.work import Work
from inshrink_app.model.problem import ServiceError
from inshrink_app.server import roots
from inshrink_app.server.roots import Address, OutsideRootsError, path_of
from inshrink_app.services import jobs as job_services

from inshrink_core import verbs
from inshrink_core.archive.storage import objects, uploads
from inshrink_core.errors import InputError
from inshrink_core.execution import mirror
from inshrink_core.execution.process import minimal_environment
from inshrink_core.verbs.inspect import Inspect
from tests.app.builders import explorer, texts, write_run

pytest.importorskip("obstore", reason="the extra 'remote' is not installed")
from obstore.store import MemoryStore

RUN, ARCHIVE = "s3://bucket/runs/digits", "s3://bucket/runs/digits.inshrink"


@pytest.fixture
def bucket(root, monkeypatch, tmp_path) -> MemoryStore:
    """Keep a run of three steps and its archive in a bucket in memory, of which ``runs/`` may be opened."""
    store = MemoryStore()
    monkeypatch.setattr(objects, "_store_of", lambda scheme, bucket: store)
    monkeypatch.setattr(objects, "_PROVEN", set())
    monkeypatch.setattr(mirror, "_MIRRORS", {})
    monkeypatch.setenv(uploads.QUEUE_VARIABLE, str(tmp_path / "waiting"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for path in write_run(tmp_path / "made", (10, 20, 30, 40)).glob("*.pt"):
        store.put(f"{'later' if '40' in path.name else 'runs/digits'}/{path.name}", path)
    store.put("runs/digits/metrics.csv", b"step,loss\n10,2.5\n20,1.5\n30,1.0\n")
    store.put("secret/run/step_1.pt", b"")
    roots.configure([root, "s3://bucket/runs"])
    return store


@pytest.fixture
def archived(bucket) -> str:
    verbs.compress(RUN, ARCHIVE)
    return ARCHIVE


@pytest.mark.parametrize(
    "text",
    [
        *(
            "s3://bucket",
            "s3://bucket/secret/run",
            "s3://bucket/runs-too",
            "s3://other/runs",
            "gs://bucket/runs",
        ),
        *("s3://bucket/runs/../secret/run", "s3:/bucket/secret/run", "https://bucket/runs", "file:///etc"),
        "s3://key:hushhush@bucket/runs",
    ],
)
def test_an_address_that_was_not_allowed_is_refused_with_the_command_that_allows_it(bucket, text):
    with pytest.raises(OutsideRootsError):
        roots.settings().resolve(text)
    with pytest.raises(ServiceError) as refused:
        services.load_subject(text)
    told = refused.value.problem
    assert "inshrink ui --root" in told.remedy
    assert "hushhush" not in repr(told)
    assert "s3://bucket/runs" in told.detail


def test_an_address_under_an_allowed_one_is_a_path_that_reads_as_it(bucket):
    for text in (RUN, "s3:/bucket/runs/digits", f" {RUN}/ "):
        assert str(roots.settings().resolve(text)) == RUN
    address = path_of(RUN)
    assert isinstance(address.parent / "x", Address)
    assert str(address.with_name("x")) == "s3://bucket/runs/x"
    assert not roots.settings().may_write(address)


def test_the_address_that_is_started_with_is_allowed_and_nothing_beside_it(root, monkeypatch, capsys):
    monkeypatch.chdir(root)
    found = launch.allow("s3://bucket/runs/a/ep{step}.pt", "127.0.0.1", [])
    assert (found.roots, list(map(str, found.addresses))) == ((root,), ["s3://bucket/runs/a"])
    with pytest.raises(InputError, match="open to others"):
        launch.allow(None, "0.0.0.0", ["s3://bucket/runs"])
    with pytest.raises(InputError, match="must not hold credentials") as refused:
        launch.allow("s3://key:hushhush@bucket/run", "127.0.0.1", [])
    assert "hushhush" not in str(refused.value)
    with pytest.raises(InputError, match="can be opened"):
        launch.allow(None, "127.0.0.1", ["file:///etc"])


def test_a_run_at_an_address_opens_with_its_log_and_is_linked_to_its_archive(archived):
    shown = services.load_subject(RUN)
    assert (str(shown.path), shown.name, shown.steps) == (RUN, "digits", (10, 20, 30))
    assert shown.log["loss"] == ((10, 2.5), (20, 1.5), (30, 1.0))
    assert str(shown.archive.path) == ARCHIVE
    found = services.load_subject(archived)
    assert (found.kind, str(found.path), found.steps) == ("archive", ARCHIVE, (10, 20, 30))
    original = services.original_of(found)
    assert str(original.path) == RUN
    with pytest.raises(ServiceError, match="nothing at this path"):
        services.load_subject("s3://bucket/runs/none")


def test_refresh_sees_a_checkpoint_that_came(bucket):
    assert services.load_subject(RUN).steps == (10, 20, 30)
    name = bucket.list("later").collect()[0]["path"].removeprefix("later/")
    bucket.rename(f"later/{name}", f"runs/digits/{name}")
    assert services.load_subject(RUN).steps == (10, 20, 30)
    services.refresh(path_of(RUN))
    assert services.load_subject(RUN).steps == (10, 20, 30, 40)


@pytest.mark.parametrize("page", ["run", "archives"])
@pytest.mark.parametrize("address", [RUN, ARCHIVE])
def test_every_page_draws_what_lies_at_an_address(archived, page, address):
    app = explorer(page, run=address, panel="pack")
    app.session_state["header.run"] = True
    app.run()
    told = texts(app).replace("\\", "").replace("\u2060", "")
    assert address in told
    assert "s3:/b" not in told
    if page == "archives":
        (target,) = (one for one in app.text_input if one.label == "Write to")
        assert target.value.startswith(str(roots.settings().roots[0]))


def test_what_may_be_opened_is_offered_by_name(archived):
    app = explorer("open")
    offered = {one.key for one in app.button if str(one.key).startswith("at.")}
    assert offered == {f"at.{one}" for one in ("s3://bucket/runs", RUN, ARCHIVE)}
    app.button(key=f"at.{ARCHIVE}").click().run()
    assert app.session_state["inshrink.run"] == ARCHIVE


def test_nothing_is_written_to_an_address(bucket):
    with pytest.raises(ServiceError) as refused:
        services.writable("s3://bucket/runs/new.inshrink", "an export goes into a folder", ".inshrink")
    assert "writes no files to addresses" in refused.value.problem.what
    assert "inshrink compress" in refused.value.problem.remedy


def test_a_job_about_an_address_that_is_not_allowed_any_more_is_not_shown(bucket, root):
    job = services.start_job(Work.asking([Inspect(RUN)], shown=RUN, page="run"))
    services.stop_job(job)
    assert services.find_job(job.job_id) is not None
    roots.configure([root])
    assert services.find_job(job.job_id) is None


def test_keys_of_stores_are_given_only_to_jobs_that_name_an_allowed_address(bucket, root, monkeypatch):
    started: list[dict[str, str]] = []
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hushhush")
    monkeypatch.setenv("https_proxy", "http://proxy")
    monkeypatch.setattr(
        job_services, "start_python", lambda *words, environment, **more: started.append(environment)
    )
    for path, is_given in {
        RUN: True,
        f"{RUN}/é": True,
        "s3://bucket/runs-too": False,
        str(root): False,
    }.items():
        services.start_process(Job(Work(documents=({"verb": "inspect", "fields": {"path": path}},), page="")))
        assert [name in started[-1].values() for name in ("hushhush", "http://proxy")] == [is_given] * 2
    assert "AWS_SECRET_ACCESS_KEY" not in minimal_environment()
