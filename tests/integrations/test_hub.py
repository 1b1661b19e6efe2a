"""Archives on the Hugging Face Hub: the real library, and a server that speaks what they need of its API."""

import itertools

import pytest
import torch

import inshrink_core
from inshrink_core import verbs
from inshrink_core.archive import ArchiveReader, ArchiveWriter, check_archive
from inshrink_core.archive.maintenance import unpack_archive
from inshrink_core.archive.storage.blocks import CACHE
from inshrink_core.archive.storage.hub import HubStorage
from inshrink_core.chain import Archive
from inshrink_core.errors import ConflictError, ExistsError, InshrinkError, NotFoundError, StorageError
from inshrink_core.testing.storages import StorageSuite
from tests.archive.building import append
from tests.integrations.hub import TOKEN
from tests.integrations.servers import inshrink
from tests.processes import until

pytest.importorskip("huggingface_hub", reason="the extra 'hub' is not installed")

pytestmark = [
    pytest.mark.integration,
    # How the library uploads a file, in its own words.
    pytest.mark.filterwarnings("ignore:Use 'content=<...>' to upload:DeprecationWarning"),
]

_NUMBERS = itertools.count()


@pytest.fixture
def address(hub, waiting):
    """A repository that is not there yet."""
    return f"hf://me/run-{next(_NUMBERS)}"


class TestHubStorage(StorageSuite):
    @pytest.fixture(autouse=True)
    def _server(self, hub, waiting):
        self.numbers = {}

    def place(self, folder):
        number = self.numbers.setdefault(folder, next(_NUMBERS))
        return f"hf://me/suite-{number}/a"


@pytest.fixture(scope="module")
def archive(tmp_path_factory):
    """An archive of six steps."""
    path = tmp_path_factory.mktemp("hub") / "digits.inshrink"
    run = inshrink_core.open(inshrink_core.sample("digits-cnn"))
    inshrink_core.compress(run, path, steps=run.steps[:6], threads=1)
    return path


def upload(archive, address):
    """Copy a local archive to the Hub."""
    unpack_archive(ArchiveReader.open(archive), address)


def files_of(hub, address):
    return hub.repository(address.removeprefix("hf://")).at_head


def commits_of(hub, address):
    return hub.repository(address.removeprefix("hf://")).commits


def steps(n, first=0):
    run = inshrink_core.open(inshrink_core.sample("digits-cnn"))
    return run, run.steps[first:n]


def test_a_compress_is_one_commit_and_the_next_one_adds_what_is_new(hub, address):
    run, chosen = steps(6)
    inshrink_core.compress(run, address, steps=chosen, threads=1)
    repository = hub.repository(address.removeprefix("hf://"))
    assert repository.private
    assert len(repository.commits) == 2
    frames = {frame.path for frame in Archive.open(address).frames}
    assert len(frames) == 6
    assert set(files_of(hub, address)) == frames | {".gitattributes", "README.md", "inshrink-manifest"}
    inshrink_core.compress(run, address, steps=chosen, threads=1)
    assert len(repository.commits) == 2
    inshrink_core.compress(run, address, steps=run.steps[6:8], threads=1)
    assert len(repository.commits) == 3
    assert Archive.open(address).steps == run.steps[:8]
    assert check_archive(address) == ()


def test_nothing_is_seen_before_the_archive_is_flushed(hub, address):
    with ArchiveWriter(address, create=True) as writer:
        append(writer, 0)
        append(writer, 100)
        assert len(commits_of(hub, address)) == 1
        writer.flush()
        assert len(commits_of(hub, address)) == 2
        append(writer, 200)
    assert len(commits_of(hub, address)) == 3
    assert [frame.step for frame in ArchiveReader.open(address).frames] == [0, 100, 200]


def test_a_long_training_commits_now_and_then(hub, address, monkeypatch):
    monkeypatch.setattr(HubStorage, "batch_s", 0.2)
    with ArchiveWriter(address, create=True) as writer:
        append(writer, 0)
        until(lambda: len(commits_of(hub, address)) > 1)
        assert [frame.step for frame in ArchiveReader.open(address).frames] == [0]


def test_reading_a_step_asks_a_request_a_frame_and_three_more(hub, address, archive, tmp_path):
    upload(archive, address)
    CACHE.clear()
    before = len(hub.asked)
    inshrink_core.restore(address, tmp_path / "out")
    asked = [path for _, path in hub.asked[before:] if not path.startswith("/cdn/")]
    assert len(asked) <= 6 + 3


def test_the_card_says_how_to_load_and_leaves_what_others_wrote(hub, address):
    run, chosen = steps(6)
    inshrink_core.compress(run, address, steps=chosen, threads=1)
    card = files_of(hub, address)["README.md"].decode()
    assert card.startswith("---\nlibrary_name: inshrink\n")
    assert f"inshrink restore {address} -o" in card
    repository = hub.repository(address.removeprefix("hf://"))
    repository.commit({"README.md": b"of mine alone"}, (), "by hand")
    inshrink_core.compress(run, address, steps=run.steps[6:7], threads=1)
    assert files_of(hub, address)["README.md"] == b"of mine alone"


def test_what_is_pruned_goes_in_one_commit_with_the_manifest(hub, address, archive):
    upload(archive, address)
    before = len(commits_of(hub, address))
    inshrink_core.verbs.prune(address, keep_last=2, apply=True)
    assert len(commits_of(hub, address)) == before + 1
    assert Archive.open(address).steps == Archive.open(archive).steps[-2:]
    listed = {frame.path for frame in Archive.open(address).frames}
    assert {path for path in files_of(hub, address) if path.startswith("frames/")} == listed
    assert check_archive(address) == ()


def test_another_archive_is_not_overwritten(hub, address, archive, tmp_path):
    upload(archive, address)
    before = dict(files_of(hub, address))
    with pytest.raises(ExistsError):
        upload(archive, address)
    writer = ArchiveWriter(f"{address}/elsewhere", create=True)
    append(writer, 0)
    other = {"elsewhere/inshrink-manifest": before["inshrink-manifest"]}
    hub.repository(address.removeprefix("hf://")).commit(other, (), "another archive")
    with pytest.raises(ConflictError, match="another writer changed the archive"):
        writer.close()
    assert files_of(hub, address) == before | other


def test_somebody_who_commits_meanwhile_is_not_overwritten(hub, address, archive, monkeypatch):
    upload(archive, address)
    run, chosen = steps(7, 6)

    def beside(repository):
        monkeypatch.setattr(hub, "before_commit", lambda one: None)
        repository.commit({"x": b"x"}, (), "beside the archive")

    monkeypatch.setattr(hub, "before_commit", beside)
    inshrink_core.compress(run, address, steps=chosen, threads=1)
    assert files_of(hub, address)["x"] == b"x"
    assert Archive.open(address).steps == run.steps[:7]

    def over(repository):
        monkeypatch.setattr(hub, "before_commit", lambda one: None)
        repository.commit({"inshrink-manifest": b"of somebody else"}, (), "over the archive")

    monkeypatch.setattr(hub, "before_commit", over)
    with pytest.raises(ConflictError, match="another writer changed the archive"):
        inshrink_core.compress(run, address, steps=run.steps[7:8], threads=1)
    assert files_of(hub, address)["inshrink-manifest"] == b"of somebody else"


def test_a_server_that_fails_now_and_then_is_asked_again(hub, address, archive, monkeypatch):
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    upload(archive, address)
    monkeypatch.setattr(
        hub, "rule", lambda n, _, path: "refuse" if n % 3 == 1 and "/api/" not in path else None
    )
    CACHE.clear()
    assert Archive.open(address)[10].state_dict()


@pytest.mark.parametrize("token", ["hf_of_somebody_else", None])
def test_who_may_not_is_told_so_and_no_secret_is_said(hub, address, archive, monkeypatch, token):
    upload(archive, address)
    if token is None:
        monkeypatch.delenv("HF_TOKEN")
    else:
        monkeypatch.setenv("HF_TOKEN", token)
    for ask in (
        lambda: Archive.open(address),
        lambda: ArchiveWriter(address, create=True),
        lambda: upload(archive, f"{address}-new"),
    ):
        with pytest.raises(InshrinkError) as error:
            ask()
        assert "HF_TOKEN" in str(error.value)
        assert "signature" not in str(error.value)
        assert token is None or token not in str(error.value)


def test_what_is_no_address_is_refused(archive, tmp_path):
    for target in ("hf://me", "hf://"):
        with pytest.raises(StorageError, match="hf://OWNER/NAME"):
            upload(archive, target)
    with pytest.raises(NotFoundError, match="hf auth login"):
        Archive.open("hf://me/nothing-here")
    with pytest.raises(NotFoundError):
        Archive.open("hf://me")


def test_commands_write_and_restore_with_the_token_of_the_environment(
    hub, address, archive, tmp_path, monkeypatch
):
    monkeypatch.setenv("HF_ENDPOINT", hub.url)
    monkeypatch.setenv("HF_HUB_DISABLE_XET", "1")
    inshrink("export", archive, "--unpack", address, apart=True)
    done = inshrink("restore", address, "--step", 25, "-o", tmp_path / "out", apart=True)
    inshrink_core.restore(archive, tmp_path / "near", steps=[25])
    assert next((tmp_path / "out").iterdir()).read_bytes() == next((tmp_path / "near").iterdir()).read_bytes()
    assert TOKEN not in done.stdout + done.stderr


def test_a_run_on_the_hub_is_read_at_the_commit_that_was_listed(address, tmp_path):
    sample, storage = inshrink_core.sample("digits-cnn"), HubStorage(address)
    storage.made().__enter__()
    files = {f"runs/a/{step}.pt": sample / f"step_{step:06d}.pt" for step in (10, 25, 50)}
    storage.put(files, (), storage.head(), "a run")
    run, here = inshrink_core.open(f"{address}/runs/a"), inshrink_core.open(sample)
    assert run.steps == (10, 25, 50)
    assert run.requests == 2 + 3
    storage.put({"runs/a/25.pt": files["runs/a/50.pt"]}, ("runs/a/50.pt",), storage.head(), "another")
    for step in run.steps:
        assert all(torch.equal(run[step][spec.key], here[step][spec.key]) for spec in here[step].specs)
    assert run.refresh().steps == (10, 50)  # which the file called 25 says that it is
    assert inshrink_core.open(f"{address}/runs/a/10.pt").steps == (10,)
    assert verbs.compress(f"{address}/runs/a", tmp_path / "a.inshrink").appended


def test_a_reader_of_a_listing_stays_at_its_commit_when_the_repository_is_listed_again(address, tmp_path):
    storage = HubStorage(address)
    storage.made().__enter__()
    for name, content in (("old", b"old"), ("new", b"new")):
        (tmp_path / name).write_bytes(content)
    storage.put({"a/x": tmp_path / "old"}, (), storage.head(), "one")
    run = HubStorage(f"{address}/a")
    (old,) = run.objects()
    storage.put({"a/x": tmp_path / "new"}, (), storage.head(), "two")
    next(iter(run.objects()))  # as far as a network went
    assert run.read_listed(old, 0, 3) == b"old"
    (new,) = run.objects()
    assert (run.read_listed(new, 0, 3), run.read_listed(old, 0, 3)) == (b"new", b"old")
