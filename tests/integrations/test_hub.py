"""Archives on the Hugging Face Hub: the real library, and a server that speaks what they need of its API."""

import itertools
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import inshrink_core
from inshrink_core import verbs
from inshrink_core.archive import ArchiveReader, check_archive, pack_archive
from inshrink_core.archive.storage import ahead, storage_at
from inshrink_core.archive.storage.hub import HubStorage
from inshrink_core.chain import Archive
from inshrink_core.errors import ConflictError, InputError, InshrinkError, NotFoundError
from inshrink_core.testing.storages import StorageSuite
from inshrink_core.text import ratio
from inshrink_core.verbs.history.push import push
from inshrink_core.verbs.shared.measured import Measurements
from tests.integrations.hub import TOKEN

pytest.importorskip("huggingface_hub", reason="the extra 'hub' is not installed")

pytestmark = [
    pytest.mark.integration,
    # How the library uploads a file, in its own words.
    pytest.mark.filterwarnings("ignore:Use 'content=<...>' to upload:DeprecationWarning"),
]

_NUMBERS = itertools.count()


@pytest.fixture
def address(hub):
    """A repository that is not there yet."""
    return f"hf://me/run-{next(_NUMBERS)}"


class TestHubStorage(StorageSuite):
    @pytest.fixture(autouse=True)
    def _server(self, hub):
        self.numbers = {}

    def place(self, folder):
        number = self.numbers.setdefault(folder, next(_NUMBERS))
        return f"hf://me/suite-{number}/a"


def test_addresses_name_a_repository_and_a_folder(hub):
    assert isinstance(storage_at("hf://me/run"), HubStorage)


@pytest.fixture(scope="module")
def archive(tmp_path_factory):
    """An archive of six steps."""
    path = tmp_path_factory.mktemp("hub") / "digits.inshrink"
    run = inshrink_core.open(inshrink_core.sample("digits-cnn"))
    inshrink_core.compress(run, path, steps=run.steps[:6], threads=1)
    return path


def files_of(hub, address):
    return hub.repository(address.removeprefix("hf://")).at_head


def test_pushing_uploads_all_in_one_commit_and_then_what_is_new(hub, address, archive, tmp_path):
    copy = shutil.copytree(archive, tmp_path / "digits.inshrink")
    first = push(copy, address)
    repository = hub.repository(address.removeprefix("hf://"))
    assert repository.private
    assert len(repository.commits) == 2
    assert len(first.uploaded) == 6
    assert first.nbytes == sum(frame.nbytes for frame in Archive.open(copy).frames)
    others = {".gitattributes", "README.md", "inshrink-manifest"}
    assert set(files_of(hub, address)) == others.union(frame.path for frame in Archive.open(copy).frames)
    assert not push(copy, address).changed
    assert len(repository.commits) == 2
    run = inshrink_core.open(inshrink_core.sample("digits-cnn"))
    inshrink_core.compress(run, copy, steps=run.steps[6:8], threads=1)
    second = push(copy, address)
    assert len(second.uploaded) == 2
    assert len(repository.commits) == 3
    assert second.commit == repository.head
    there = Archive.open(address)
    assert there.steps == run.steps[:8]
    assert check_archive(address) == ()


def test_steps_and_tensors_are_restored_from_an_address(address, archive, tmp_path):
    push(archive, address)
    near = Archive.open(archive)
    step = near.steps[4]
    for place, name in ((address, "far"), (archive, "near")):
        inshrink_core.restore(place, tmp_path / name, steps=[step])
        inshrink_core.restore(place, tmp_path / f"{name}-some", steps=[step], tensors="conv*")
    for kind in ("", "-some"):
        far, here = (sorted((tmp_path / f"{name}{kind}").iterdir()) for name in ("far", "near"))
        assert [file.read_bytes() for file in far] == [file.read_bytes() for file in here]
    state = inshrink_core.open(address)[step].state_dict()
    assert all(torch.equal(state[name], value) for name, value in near[step].state_dict().items())


def test_reading_a_step_asks_a_request_a_frame_and_three_more(hub, address, archive, tmp_path):
    push(archive, address)
    with ahead.nothing_held():
        before = len(hub.asked)
        inshrink_core.restore(address, tmp_path / "out")
        asked = [path for _, path in hub.asked[before:] if not path.startswith("/cdn/")]
    assert len(asked) <= 6 + 3


def test_the_card_says_what_it_is_and_leaves_what_others_wrote(hub, address, archive, tmp_path):
    assert push(archive, address).card == "written"
    card = files_of(hub, address)["README.md"].decode()
    sizes = inshrink_core.verbs.inspect(archive).facts
    assert card.startswith("---\nlibrary_name: inshrink\n")
    for said in (
        f"| ratio of everything | {ratio(sizes['ratio_total'])} |",
        "| steps | 6: ",
        "not measured",
        address,
    ):
        assert said in card
    repository = hub.repository(address.removeprefix("hf://"))
    around = card.replace("tags:", "license: mit\ntags:") + "\n## Of mine\n"
    repository.commit({"README.md": around.replace("| steps | 6", "| steps | 5").encode()}, (), "by hand")
    assert push(archive, address).card == "written"
    assert files_of(hub, address)["README.md"].decode() == around
    repository.commit({"README.md": b"of mine alone"}, (), "by hand")
    report = push(archive, address)
    assert (report.card, report.changed) == ("kept", False)
    assert files_of(hub, address)["README.md"] == b"of mine alone"


def test_the_card_says_what_a_restore_costs_where_it_was_measured(hub, address, archive, tmp_path):
    copy = shutil.copytree(archive, tmp_path / "digits.inshrink")
    opened = Archive.open(copy)
    step = {
        "step": opened.steps[1],
        "original": 1.0,
        "restored": 1.001,
        "drop": 0.001,
        "restore_cost": 0.0012,
    }
    step |= dict.fromkeys(("divergence", "stale_drop", "stale_divergence"))
    measurements = Measurements.of_archive(opened, make=True)
    question = {"evaluator": "digest", "name": "mine.py", "run": {}, "before": {}}
    document = {"metric": "loss", "direction": "lower", "device": "cpu", "steps": [step]}
    measurements.add("compare", question, document)
    push(copy, address)
    said = f"| at most +0.12 % of the loss (step {step['step']}; measured at 1 step) |"
    assert said in files_of(hub, address)["README.md"].decode()


def test_what_was_pruned_goes_there_too(hub, address, archive, tmp_path):
    copy = shutil.copytree(archive, tmp_path / "digits.inshrink")
    push(copy, address)
    inshrink_core.verbs.prune(copy, keep_last=2, apply=True)
    report = push(copy, address)
    assert len(report.removed) >= 4
    assert Archive.open(address).steps == Archive.open(copy).steps
    assert check_archive(address) == ()


def test_another_archive_or_another_copy_is_refused(hub, address, archive, tmp_path):
    push(archive, address)
    before = dict(files_of(hub, address))
    run = inshrink_core.open(inshrink_core.sample("digits-cnn"))
    inshrink_core.compress(run, tmp_path / "other", steps=run.steps[:1], threads=1)
    with pytest.raises(ConflictError, match="another archive is there"):
        push(tmp_path / "other", address)
    copy = shutil.copytree(archive, tmp_path / "copy")
    inshrink_core.compress(run, copy, steps=run.steps[6:7], threads=1)
    push(copy, address)
    with pytest.raises(ConflictError, match=f"lacks: of step {run.steps[6]}"):
        push(archive, address)
    assert files_of(hub, address).keys() > before.keys()
    assert push(archive, f"{address}/elsewhere").changed


def test_somebody_who_commits_meanwhile_is_not_overwritten(hub, address, archive, monkeypatch):
    push(archive, address)
    repository = hub.repository(address.removeprefix("hf://"))
    repository.commit({}, ["inshrink-manifest"], "by hand")
    monkeypatch.setattr(hub, "before_commit", lambda one: one.commit({"x": b"x"}, (), "meanwhile"))
    with pytest.raises(ConflictError, match="meanwhile"):
        push(archive, address)
    assert "inshrink-manifest" not in files_of(hub, address)
    monkeypatch.undo()
    assert push(archive, address).changed


def test_a_server_that_fails_now_and_then_is_asked_again(hub, address, archive, monkeypatch):
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    push(archive, address)
    hub.fails["/resolve/|/cdn/"] = 3
    with ahead.nothing_held():
        assert Archive.open(address)[10].state_dict()
    assert hub.fails.pop("/resolve/|/cdn/") == 0


@pytest.mark.parametrize("token", ["hf_of_somebody_else", None])
def test_who_may_not_is_told_so_and_no_secret_is_said(hub, address, archive, monkeypatch, token):
    push(archive, address)
    if token is None:
        monkeypatch.delenv("HF_TOKEN")
    else:
        monkeypatch.setenv("HF_TOKEN", token)
    for ask in (
        lambda: Archive.open(address),
        lambda: push(archive, address),
        lambda: push(archive, f"{address}-new"),
    ):
        with pytest.raises(InshrinkError) as error:
            ask()
        assert "HF_TOKEN" in str(error.value)
        assert "signature" not in str(error.value)
        assert token is None or token not in str(error.value)


def test_what_is_no_address_is_refused(archive, tmp_path):
    for target in ("hf://me", "s3://bucket/a", str(tmp_path / "a"), "hf://"):
        with pytest.raises(InputError, match="hf://OWNER/NAME"):
            push(archive, target)
    with pytest.raises(NotFoundError, match="hf auth login"):
        Archive.open("hf://me/nothing-here")
    with pytest.raises(NotFoundError):
        Archive.open("hf://me")


def test_a_packed_archive_is_pushed_and_one_on_the_hub_is_read(hub, address, archive, tmp_path):
    pack_archive(ArchiveReader.open(archive), tmp_path / "p")
    push(tmp_path / "p", address)
    assert check_archive(address) == ()
    packed = (tmp_path / "p").read_bytes()
    hub.repository(address.removeprefix("hf://")).commit({"packed/p": packed}, (), "by hand")
    assert Archive.open(f"{address}/packed/p").steps == Archive.open(archive).steps


def test_an_archive_is_written_there_step_by_step(address, tmp_path):
    run = inshrink_core.open(inshrink_core.sample("digits-cnn"))
    for place, steps in itertools.product((address, tmp_path / "near"), (run.steps[:2], run.steps[2:3])):
        inshrink_core.compress(run, place, steps=steps, threads=1)
    far, near = Archive.open(address), Archive.open(tmp_path / "near")
    assert far.steps == near.steps == run.steps[:3]
    for step in far.steps:
        assert torch.equal(far[step]["fc1.weight"], near[step]["fc1.weight"])


def test_commands_push_and_restore_with_the_token_of_the_environment(hub, address, archive, tmp_path):
    surroundings = os.environ | {"HF_ENDPOINT": hub.url, "HF_TOKEN": TOKEN, "HF_HUB_DISABLE_XET": "1"}

    def run(*arguments):
        command = [sys.executable, "-m", "inshrink_core", *map(str, arguments)]
        return subprocess.run(command, capture_output=True, text=True, env=surroundings, timeout=120)

    done = run("push", archive, address, "--json")
    assert (done.returncode, done.stderr) == (0, "")
    document = json.loads(done.stdout)
    assert document["commit"] == hub.repository(address.removeprefix("hf://")).head
    page = (Path(__file__).parents[2] / "docs" / "json.md").read_text().split("\n## push\n")[1]
    assert set(document) == set(re.findall(r"^\| `(.+?)` \|", page.split("\n## ")[0], re.MULTILINE))
    done = run("restore", address, "--step", 25, "-o", tmp_path / "out")
    assert done.returncode == 0, done.stderr
    inshrink_core.restore(archive, tmp_path / "near", steps=[25])
    assert next((tmp_path / "out").iterdir()).read_bytes() == next((tmp_path / "near").iterdir()).read_bytes()
    assert TOKEN not in done.stdout + done.stderr


def test_a_run_on_the_hub_is_read_at_the_commit_that_was_listed(hub, address, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    sample, storage = inshrink_core.sample("digits-cnn"), HubStorage(address)
    storage.make(public=False)
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
    storage.make(public=False)
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
