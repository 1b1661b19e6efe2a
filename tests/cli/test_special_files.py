"""Pipes, devices, folders and links in the place of files: nothing hangs, nothing outside is touched."""

# ruff: noqa: PT017 - what is refused and what is not follows from the kind of file
import os
import shutil
import signal
import socket
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

import inshrink_core
from benchmarks.fuzz.runs import save_directories, save_torch_run
from inshrink_core.archive import ArchiveWriter, LocalStorage, check_archive
from inshrink_core.chain import Archive
from inshrink_core.errors import DamagedError, InshrinkError
from inshrink_core.execution.files import NotRegularError, read_regular
from inshrink_core.execution.results import load_result, write_atomic
from inshrink_core.search.trials import TrialLog
from inshrink_core.training import Saver
from inshrink_core.training.spool import Spool, spool_folder
from tests.formats.run_builders import content_of
from tests.runs import model

_MAX_S = 60


def _hangs(*_):
    raise TimeoutError("it waits for a pipe")


@pytest.fixture(autouse=True)
def in_time():
    """End a test that hangs: a handler that raises interrupts the opening of a pipe."""
    before = signal.signal(signal.SIGALRM, _hangs)
    signal.alarm(_MAX_S)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def _socket(path):
    here = Path.cwd()
    os.chdir(path.parent)  # the address of a socket is short
    try:
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(path.name)
    finally:
        os.chdir(here)


def _piped_link(path):
    pipe = path.with_name("pipe.aside")
    os.mkfifo(pipe)
    path.symlink_to(pipe)


SPECIAL: dict[str, Callable[[Path], None]] = {
    "pipe": os.mkfifo,
    "socket": _socket,
    "folder": Path.mkdir,
    "device": lambda path: path.symlink_to("/dev/zero"),
    "link to a pipe": _piped_link,
    "link to itself": lambda path: path.symlink_to(path.name),
}


def put(path, kind):
    """Put something special in the place of a file."""
    path.unlink(missing_ok=True)
    SPECIAL[kind](path)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A run, an archive of it, one whose frames lie in a segment, and a packed one."""
    root = tmp_path_factory.mktemp("made")
    save_torch_run(root / "run")
    inshrink_core.compress(root / "run", root / "a.inshrink", codec="lossless")
    with ArchiveWriter(root / "s.inshrink", create=True, grouped=True) as writer:
        for step in (1, 2):
            with writer.begin(step=step, kind="keyframe", parent_id=None, branch=step - 1) as frame:
                frame.add("w", "raw/1", bytes(8), attributes=("weight", "float32", [2], False))
                frame.commit({})
    inshrink_core.verbs.export(root / "a.inshrink", pack=root / "packed.inshrink")
    return root


@pytest.fixture
def root(made, tmp_path):
    return Path(shutil.copytree(made, tmp_path / "made"))


def everything(root, name):
    """Return every verb that reads or writes an archive, upon one."""
    path, run = root / name, root / "run"
    return {
        "inspect": lambda: inshrink_core.verbs.inspect(path),
        "verify": lambda: inshrink_core.verify(path, deep=True),
        "verify against": lambda: inshrink_core.verify(path, against=inshrink_core.open(run)),
        "restore": lambda: inshrink_core.restore(path, root / "out", force=True),
        "restore a step": lambda: inshrink_core.restore(path, root / "out", steps=[20], branch=0, force=True),
        "load": lambda: inshrink_core.verbs.load_state_dict(path),
        "export": lambda: inshrink_core.verbs.export(path, root / "one.inshrink"),
        "pack": lambda: inshrink_core.verbs.export(path, pack=root / "again.inshrink", force=True),
        "unpack": lambda: inshrink_core.verbs.export(path, unpack=root / "unpacked.inshrink"),
        "prune": lambda: inshrink_core.verbs.prune(path, keep_last=1),
        "forget": lambda: inshrink_core.verbs.prune(path, forget_missing=True),
        "compare": lambda: inshrink_core.compare(path, run),
        "compress": lambda: inshrink_core.compress(run, path),
        "watch": lambda: inshrink_core.compress(run, path, interval=0.01, idle=0.02, watch=True),
        "saver": lambda: Saver(path, model()).close(),
        "forget, applied": lambda: inshrink_core.verbs.prune(path, forget_missing=True, apply=True),
        "prune, applied": lambda: inshrink_core.verbs.prune(path, keep_last=1, apply=True),
    }


PLACES = ("manifest", "lock", "first", "last", "unlisted", "segment", "frames")


@pytest.mark.parametrize(
    ("which", "kind"),
    [
        (which, kind)
        for which in PLACES
        for kind in SPECIAL
        if which in ("manifest", "last") or kind == "pipe"
    ],
)
def test_no_verb_waits_for_what_stands_in_the_place_of_a_file_of_an_archive(root, which, kind):
    frames = sorted((root / "a.inshrink/frames").iterdir())
    path = {
        "manifest": root / "a.inshrink/inshrink-manifest",
        "lock": root / "a.inshrink/lock",
        "first": frames[0],
        "last": frames[-1],
        "unlisted": root / "a.inshrink/frames/00000009-90.frame",
        "segment": root / "a.inshrink/frames/00000009.segment",
        "frames": root / "a.inshrink/frames",
    }[which]
    if which == "frames":
        shutil.rmtree(path)
    put(path, kind)
    refused = []
    for verb, ask in everything(root, "a.inshrink").items():
        try:
            ask()
        except InshrinkError as error:
            assert len(str(error)) < 1000
            refused.append(verb)
    if which in ("manifest", "last", "frames"):
        assert {"restore", "load", "export", "pack", "compress"} <= set(refused)
    if which == "lock":
        assert {"compress", "saver", "prune, applied"} <= set(refused)
        assert not {"restore", "verify", "pack"} & set(refused)


@pytest.mark.parametrize("kind", SPECIAL)
def test_a_segment_that_is_no_file_is_a_problem_of_its_frames_alone(root, kind):
    (segment,) = (root / "s.inshrink/frames").iterdir()
    put(segment, kind)
    assert any("cannot be read" in problem.what for problem in check_archive(root / "s.inshrink"))


@pytest.mark.parametrize("kind", [kind for kind in SPECIAL if kind != "folder"])
def test_what_is_no_file_is_no_packed_archive(root, kind):
    put(root / "packed.inshrink", kind)
    for ask in everything(root, "packed.inshrink").values():
        with pytest.raises(InshrinkError):
            ask()


def test_a_damaged_manifest_that_is_no_file_is_replaced_when_asked_to(root):
    put(root / "a.inshrink/inshrink-manifest", "pipe")
    with pytest.raises(DamagedError, match="not a regular file, and only it records"):
        inshrink_core.restore(root / "a.inshrink", root / "out")
    inshrink_core.verbs.prune(root / "a.inshrink", forget_missing=True, apply=True)
    assert Archive.open(root / "a.inshrink").steps == (10, 20, 30)
    assert inshrink_core.verify(root / "a.inshrink", deep=True).ok


# ---- writers follow no link ----------------------------------------------------------------------


@pytest.fixture
def outside(tmp_path):
    """What a link may lead to: files with every name that a writer deletes or replaces."""
    folder = tmp_path / "outside"
    folder.mkdir()
    for name in (".x.tmp", ".inshrink-manifest.tmp", "precious", "lock", "inshrink-manifest"):
        (folder / name).write_bytes(b"precious")
    (folder / "frames").mkdir()
    return folder


def test_a_writer_neither_deletes_nor_writes_behind_a_link_for_frames(root, outside):
    frames = root / "a.inshrink/frames"
    for path in frames.iterdir():
        shutil.copy(path, outside)
    shutil.rmtree(frames)
    frames.symlink_to(outside)
    before = content_of(outside)
    for verb in ("compress", "watch", "saver", "prune, applied", "forget, applied"):
        with pytest.raises(DamagedError, match=r"frames is a pipe, a device, a folder or a link"):
            everything(root, "a.inshrink")[verb]()
    assert content_of(outside) == before
    assert Archive.open(root / "a.inshrink").steps == (10, 20, 30)  # readers may: some stores keep links


@pytest.mark.parametrize(
    "at", ["lock", "inshrink-manifest", ".inshrink-manifest.tmp", "frames/.00000004-40.frame.tmp"]
)
def test_a_writer_leaves_alone_what_a_link_leads_to(root, outside, at):
    path = root / "a.inshrink" / at
    target = outside / "precious"
    if at == "inshrink-manifest":
        target.write_bytes(path.read_bytes())
    path.unlink(missing_ok=True)
    path.symlink_to(target)
    before = content_of(outside)
    save_torch_run(root / "run", (40,))
    for verb in ("compress", "prune, applied", "forget, applied", "saver"):
        try:
            everything(root, "a.inshrink")[verb]()
        except InshrinkError:
            assert at == "lock"
    assert content_of(outside) == before
    assert not LocalStorage(root / "a.inshrink").is_locked()


def test_a_link_planted_while_a_writer_is_at_work_is_not_written_through(root, outside):
    before = content_of(outside)
    with ArchiveWriter(root / "a.inshrink") as writer:
        head = writer.reader.head
        assert head is not None
        number = writer.manifest.next_generation
        for name in (f"frames/.{number:08}-40.frame.tmp", ".inshrink-manifest.tmp"):
            (root / "a.inshrink" / name).symlink_to(outside / "precious")
        with writer.begin(step=40, kind="keyframe", parent_id=head.frame_id) as frame:
            frame.commit({})
    assert content_of(outside) == before
    assert Archive.open(root / "a.inshrink").reader.find(40).generation == number


@pytest.mark.parametrize("verb", ["pack", "unpack", "export"])
def test_what_is_made_beside_is_not_written_through_a_link(root, outside, verb):
    before = content_of(outside)
    for name in ("again", "unpacked", "one"):
        link = root / f".{name}.inshrink.tmp"
        link.symlink_to(outside if name == "unpacked" else outside / "precious")
    try:
        everything(root, "a.inshrink")[verb]()
    except InshrinkError:
        assert verb == "unpack"
    assert content_of(outside) == before


@pytest.mark.parametrize("name", ["00000001", ".00000001.tmp", ""])
def test_a_saver_follows_no_link_in_its_spool(tmp_path, outside, name):
    spool = spool_folder(tmp_path / "a.inshrink")
    if name:
        spool.mkdir()
    (spool / name if name else spool).symlink_to(outside)
    before = content_of(outside)
    try:
        with Saver(tmp_path / "a.inshrink", model()) as saver:
            saver.save(1)
    except InshrinkError as error:
        assert not name or "spool" in str(error)
    assert content_of(outside) == before


@pytest.mark.parametrize("kind", ["pipe", "socket", "device"])
@pytest.mark.parametrize("which", ["step_000001.pt", "save.json"])
def test_a_saver_does_not_wait_for_what_stands_in_a_spooled_save(tmp_path, which, kind):
    spool = Spool(spool_folder(tmp_path / "a.inshrink"))
    save = spool.put(1, {"checkpoint": {"model": model().state_dict()}})
    (path,) = (p for p in save.folder.iterdir() if (p.name == save.name) == (which == "step_000001.pt"))
    put(path, kind)
    try:
        Saver(tmp_path / "a.inshrink", model()).close()
    except InshrinkError as error:
        assert str(save.folder) in str(error)


# ---- runs, and what is kept of them --------------------------------------------------------------


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Runs of every layout: with logs, configurations, indices and shards."""
    root = tmp_path_factory.mktemp("runs")
    save_torch_run(root / "torch")
    (root / "torch" / "metrics.csv").write_text("step,loss\n10,1\n20,.5\n")
    (root / "torch" / "step_10.pt.sha256").write_text("0" * 64)
    (root / "torch" / "inshrink.toml").write_text('[evaluator]\nfile = "evaluator.py"\n')
    save_directories(root / "folders", (10, 20))
    (root / "folders" / "metrics.jsonl").write_text('{"step": 10, "loss": 1}\n')
    for step in (10, 20):
        state = {"model": {"w": torch.ones(3) * step}}
        dcp.save(state, checkpoint_id=root / "dcp" / f"step-{step}", no_dist=True)
    return root


def _all_of(run, out):
    opened = inshrink_core.open(run)
    for ask in (
        lambda: opened.log,
        lambda: opened.settings,
        lambda: [opened[step].state_dict() for step in opened.steps],
        lambda: inshrink_core.verbs.inspect(run),
        lambda: inshrink_core.compress(run, out),
        lambda: inshrink_core.analysis.sensitivity(opened),
    ):
        try:
            ask()
        except InshrinkError as error:
            assert len(str(error)) < 1000


@pytest.mark.parametrize("kind", ["pipe", "device", "link to a pipe"])
@pytest.mark.parametrize("layout", ["torch", "folders", "dcp"])
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_no_verb_waits_for_what_stands_in_the_place_of_a_file_of_a_run(runs, tmp_path, layout, kind):
    names = sorted(p.relative_to(runs / layout) for p in (runs / layout).rglob("*") if p.is_file())
    for number, name in enumerate(names):
        run = Path(shutil.copytree(runs / layout, tmp_path / f"run-{number}"))
        put(run / name, kind)
        try:
            _all_of(run, tmp_path / f"{number}.inshrink")
        except InshrinkError as error:
            assert len(str(error)) < 1000


@pytest.mark.parametrize("kind", SPECIAL)
def test_results_that_are_no_files_are_made_again_and_not_waited_for(tmp_path, kind):
    path = tmp_path / "result.json"
    put(path, kind)
    assert load_result(path, {}, "result", int) is None
    with pytest.raises(NotRegularError):
        read_regular(path)
    with pytest.raises(InshrinkError):
        TrialLog(path, "r")


def test_a_result_is_written_in_the_place_of_a_link(tmp_path):
    (tmp_path / "precious").write_bytes(b"precious")
    (tmp_path / "result").symlink_to(tmp_path / "precious")
    write_atomic(tmp_path / "result", "new")
    assert (tmp_path / "precious").read_bytes() == b"precious"
    assert (tmp_path / "result").read_bytes() == b"new"


@pytest.mark.parametrize("kind", ["pipe", "link"])
def test_the_note_of_a_save_quarantined_neither_hangs_nor_leads_out(tmp_path, kind):
    spool, precious = Spool(tmp_path / "run.spool"), tmp_path / "precious"
    precious.write_text("precious")
    folder = spool.folder / "00000001"
    folder.mkdir(parents=True)
    note = folder / "why.txt"
    os.mkfifo(note) if kind == "pipe" else note.symlink_to(precious)
    assert spool.quarantine(folder, DamagedError("cut off")).why == "cut off"
    assert precious.read_text() == "precious"
    (aside,) = spool.quarantined_saves
    assert aside.why == "cut off"
    note = aside.folder / "why.txt"
    note.unlink()
    os.mkfifo(note)
    assert spool.quarantined_saves[0].why == "it was not noted"
