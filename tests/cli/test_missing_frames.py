"""A frame that is listed and missing is never passed over in silence."""

import json
import shutil
from pathlib import Path

import pytest
import torch

import inshrink_core
from inshrink_core.archive.manifest import MANIFEST_NAME
from inshrink_core.chain import Archive
from inshrink_core.errors import DamagedError, MissingFrameError
from tests.runs import model


@pytest.fixture(scope="module")
def branched(run_path, tmp_path_factory):
    """Steps 5 to 20 on branch 0, and step 15 on branch 1, which goes on from 10 and has other values."""
    folder = tmp_path_factory.mktemp("archives")
    inshrink_core.compress(run_path, folder / "a.inshrink", keyframe_every=2)
    (folder / "again").mkdir()
    state = torch.load(run_path / "step_15.pt", weights_only=True)
    state["model"]["0.weight"] += 0.5
    torch.save(state, folder / "again" / "step_15.pt")
    inshrink_core.compress(folder / "again", folder / "a.inshrink", resumed_from=10)
    return folder / "a.inshrink"


@pytest.fixture
def beheaded(branched, tmp_path):
    """Without the only frame of branch 1."""
    shutil.copytree(branched, tmp_path / "a.inshrink")
    archive = Archive.open(tmp_path / "a.inshrink")
    (tmp_path / "a.inshrink" / archive.last.path).unlink()
    return tmp_path / "a.inshrink"


def reading(path, out):
    """Return what reads the last step, or all that was archived."""
    return [
        lambda: Archive.open(path)[15],
        lambda: inshrink_core.restore(path, out / "out"),
        lambda: inshrink_core.restore(path, out / "out", steps=[15]),
        lambda: inshrink_core.verbs.load_state_dict(path),
        lambda: inshrink_core.verbs.export(path, out / "one.inshrink"),
        lambda: inshrink_core.verbs.export(path, pack=out / "packed.inshrink"),
        lambda: inshrink_core.verbs.export(path, unpack=out / "unpacked.inshrink"),
        lambda: inshrink_core.verbs.prune(path, keep_last=1, apply=True),
    ]


def test_a_restore_does_not_give_the_abandoned_branch_where_the_head_is_missing(beheaded, tmp_path):
    for ask in reading(beheaded, tmp_path):
        with pytest.raises(MissingFrameError, match="step 15"):
            ask()
    assert not list(tmp_path.glob("out/*")) + list(tmp_path.glob("*packed.inshrink"))


def test_steps_that_are_named_restore_without_the_head(beheaded, branched, tmp_path):
    """Step 20 stands on the abandoned branch alone, and step 10 before both."""
    assert Archive.open(beheaded).steps == (5, 10)
    assert Archive.open(beheaded).listed_steps == (5, 10, 15)
    for step in (10, 20):
        inshrink_core.restore(beheaded, tmp_path / "found", steps=[step])
        inshrink_core.restore(branched, tmp_path / "wanted", steps=[step])
        name = f"step_{step}.pt"
        assert (tmp_path / "found" / name).read_bytes() == (tmp_path / "wanted" / name).read_bytes()


def test_nothing_is_appended_behind_a_missing_head_but_a_new_branch(beheaded, run_path, tmp_path):
    before = sorted(path.name for path in (beheaded / "frames").iterdir())
    with pytest.raises(MissingFrameError, match="step 15"):
        inshrink_core.compress(run_path, beheaded)
    with pytest.raises(MissingFrameError, match="step 15"):
        inshrink_core.compress(run_path, beheaded, interval=0.01, idle=5, watch=True)
    assert sorted(path.name for path in (beheaded / "frames").iterdir()) == before
    again = tmp_path / "again"
    again.mkdir()
    shutil.copy(run_path / "step_20.pt", again / "step_20.pt")
    inshrink_core.compress(again, beheaded, resumed_from=10)
    head = Archive.open(beheaded).last
    assert (head.step, head.branch) == (20, 2)


def test_a_frame_missing_in_the_middle_is_not_written_again_behind_the_last(run_path, tmp_path):
    """With `keyframe_every=1` the frames after it are whole."""
    path = tmp_path / "a.inshrink"
    inshrink_core.compress(run_path, path, keyframe_every=1)
    (path / Archive.open(path).reader.frames[1].path).unlink()
    assert Archive.open(path).steps == (5, 15, 20)
    inshrink_core.restore(path, tmp_path / "out")
    with pytest.raises(MissingFrameError, match="step 10"):
        inshrink_core.compress(run_path, path, keyframe_every=1)
    with pytest.raises(MissingFrameError, match="step 10"):
        inshrink_core.restore(path, tmp_path / "all", steps=Archive.open(path).listed_steps)


def test_forgetting_shows_a_plan_then_gives_up_what_is_lost(beheaded, cli):
    plan = cli("prune", str(beheaded), "--forget-missing")
    assert plan.code == 0
    assert "--apply gives these frames up" in plan.out
    assert Archive.open(beheaded).reader.missing
    assert cli("prune", str(beheaded), "--forget-missing", "--apply").code == 0
    assert Archive.open(beheaded).last.step == 20
    assert cli("inspect", str(beheaded)).code == 0
    assert inshrink_core.verify(beheaded, deep=True).ok


@pytest.mark.parametrize(
    "rule", [("--keep-last", "1"), ("--keep", "25"), ("--stand-alone",), ("--base", "x")]
)
def test_forgetting_goes_without_rules(beheaded, cli, rule):
    before = sorted(beheaded.rglob("*"))
    outcome = cli("prune", str(beheaded), "--forget-missing", *rule, "--apply")
    assert outcome.code == 2
    assert f"--forget-missing and {rule[0]} exclude each other" in outcome.err
    assert sorted(beheaded.rglob("*")) == before


def test_forgetting_takes_the_frames_along_that_need_what_is_lost(branched, tmp_path):
    path = tmp_path / "b.inshrink"
    shutil.copytree(branched, path)
    (path / Archive.open(path).reader.frames[2].path).unlink()  # the keyframe of step 15, branch 0
    planned = inshrink_core.verbs.prune(path, forget_missing=True)
    assert [frame.step for frame in planned.useless] == [20]
    done = inshrink_core.verbs.prune(path, forget_missing=True, apply=True)
    assert (done.missing, done.useless, done.head) == (planned.missing, planned.useless, planned.head)
    assert inshrink_core.verify(path, deep=True).ok


@pytest.fixture(params=["missing", "torn", "changed"])
def unlisted(request, branched, tmp_path):
    """Without a manifest that can be used; every frame is there."""
    archive = Path(shutil.copytree(branched, tmp_path / "a.inshrink"))
    manifest = archive / MANIFEST_NAME
    content = manifest.read_bytes()
    manifest.unlink()
    if request.param != "missing":
        manifest.write_bytes(b"torn" if request.param == "torn" else content[:-1] + bytes([content[-1] ^ 1]))
    return archive


def _contents(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file() and path.name != "lock"}


@pytest.mark.parametrize(
    ("unlisted", "lost"),
    [("missing", "the head"), ("torn", "part of the head"), ("changed", "nothing")],
    indirect=["unlisted"],
)
def test_without_a_manifest_nothing_is_taken_for_the_last_step(unlisted, run_path, tmp_path, lost):
    """With branch 1 gone, the abandoned branch 0 looks like the whole archive."""
    head = unlisted / "frames" / "00000005-15.frame"
    content = head.read_bytes()
    if lost != "nothing":
        head.unlink()
    if lost == "part of the head":
        head.write_bytes(content[:-1])
    before = _contents(unlisted)
    for ask in (
        lambda: Archive.open(unlisted).steps,
        lambda: Archive.open(unlisted).frames,
        lambda: Archive.open(unlisted).last,
        *reading(unlisted, tmp_path),
        lambda: inshrink_core.restore(unlisted, tmp_path / "out", branch=0),
        lambda: inshrink_core.compare(unlisted, against=run_path),
        lambda: inshrink_core.compress(run_path, unlisted),
        lambda: inshrink_core.compress(run_path, unlisted, steps=[20], resumed_from=10),
        lambda: inshrink_core.compress(run_path, unlisted, interval=0.01, idle=5, watch=True),
        lambda: inshrink_core.Saver(unlisted, model()),
    ):
        with pytest.raises(DamagedError, match=r"which frame is the last one.*--forget-missing"):
            ask()
    assert _contents(unlisted) == before


def test_without_a_manifest_a_step_named_with_its_branch_is_given(unlisted, branched, tmp_path, cli):
    (unlisted / "frames" / "00000005-15.frame").unlink()
    outcome = cli("restore", str(unlisted), "--step", "15", "--branch", "0", "-o", str(tmp_path / "found"))
    assert outcome.code == 0
    inshrink_core.restore(branched, tmp_path / "wanted", steps=[15], branch=0)
    assert (tmp_path / "found/step_15.pt").read_bytes() == (tmp_path / "wanted/step_15.pt").read_bytes()
    for words in (("--step", "15"), ("--all", "--branch", "0"), ("--step", "5:20", "--branch", "0"), ()):
        outcome = cli("restore", str(unlisted), *words, "-o", str(tmp_path / "out"))
        assert (outcome.code, "which frame is the last one" in outcome.err) == (3, True)


def test_inspect_and_verify_show_what_is_there_without_a_manifest(unlisted, run_path, cli):
    outcome = cli("inspect", str(unlisted), "--json")
    document = json.loads(outcome.out)
    assert outcome.code == 1
    assert document["manifest_problem"]
    assert document["steps"] == [5, 10, 15, 20]
    found = inshrink_core.verify(unlisted, deep=True, against=inshrink_core.open(run_path))
    assert not found.ok
    assert found.n_frames == 5


def test_the_frames_that_are_there_are_taken_for_all_when_the_user_says_so(unlisted, cli):
    (unlisted / "frames" / "00000005-15.frame").unlink()
    plan = cli("prune", str(unlisted), "--forget-missing")
    assert (plan.code, "manifest  " in plan.out) == (0, True)
    with pytest.raises(DamagedError):
        _ = Archive.open(unlisted).steps
    document = json.loads(cli("prune", str(unlisted), "--forget-missing", "--apply", "--json").out)
    assert (bool(document["manifest"]), document["last"]["step"]) == (True, 20)
    assert Archive.open(unlisted).steps == (5, 10, 15, 20)
    assert inshrink_core.verify(unlisted, deep=True).ok


def test_a_packed_archive_needs_no_manifest_to_know_its_last_step(branched, tmp_path):
    """Its directory names every frame under a checksum; a frame that cannot be read may be the last."""
    packed = tmp_path / "packed.inshrink"
    inshrink_core.verbs.export(branched, pack=packed)
    content = packed.read_bytes()
    torn = content.replace(b"INSHRNKM", b"INSHRNKm")
    packed.write_bytes(torn)
    assert Archive.open(packed).last.branch == 1
    at = torn.rindex(b"INSHRNKF")
    packed.write_bytes(torn[:at] + b"x" + torn[at + 1 :])
    with pytest.raises(DamagedError, match="which frame is the last one"):
        inshrink_core.restore(packed, tmp_path / "out")
