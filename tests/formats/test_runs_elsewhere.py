"""Runs behind an address: their headers first, then what is read, of the very objects that were listed."""

import errno
import hashlib
import io
import itertools
import shutil
import signal
import subprocess
import sys
import zipfile
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch
import torch.distributed.checkpoint as dcp

import inshrink_core
from inshrink_core import verbs
from inshrink_core.archive.storage.contract import Storage
from inshrink_core.errors import (
    DamagedError,
    InputError,
    NotFoundError,
    RefusedLinkError,
    StorageError,
    UnreadableError,
    UnsafePathError,
)
from inshrink_core.execution import mirror
from inshrink_core.formats.run import NoCheckpointError, open_run
from inshrink_core.formats.torch.zip import _framed, _Record
from tests.formats.run_builders import same_bits, save_huggingface, save_run
from tests.processes import ran

NUMBERS = itertools.count()


class Bucket(Storage):
    """A folder of this machine that is asked like a bucket, and looked at before each request."""

    folders: ClassVar = {}
    rule = staticmethod(lambda kind, path: None)
    asked: ClassVar = []

    def ask(self, kind, path):
        self.asked.append((kind, path))
        self.rule(kind, path)

    @property
    def here(self):
        bucket, _, path = self.name.partition("://")[2].partition("/")
        return self.folders[bucket] / path

    def listed(self, path):
        content = path.read_bytes()
        tag, name = hashlib.md5(content).hexdigest(), path.relative_to(self.here).as_posix()
        return mirror.Listed(name, len(content), tag, 1e9)

    def objects(self, path=""):
        self.ask("list", path)
        self.counted()
        places = [self.here / path] if path else sorted(self.here.rglob("*"))
        return [self.listed(place) for place in places if place.is_file()]

    def read_listed(self, one, offset, nbytes):
        self.ask("read", one.path)
        if self.listed(self.here / one.path) != one:
            raise DamagedError("the object changed since it was listed", where=one.path)
        return self.counted((self.here / one.path).read_bytes()[offset : offset + nbytes])

    def read(self, path, offset, nbytes):
        raise NotImplementedError

    def size(self, path):
        raise FileNotFoundError(path)

    load = size

    def names(self, folder):
        return ()


@pytest.fixture
def bucket(tmp_path, monkeypatch):
    """A bucket of its own, and the folder that it is."""
    name, folder = f"b{next(NUMBERS)}", tmp_path / "bucket"
    folder.mkdir()
    monkeypatch.setitem(Bucket.folders, name, folder)
    monkeypatch.setattr(Bucket, "asked", [])
    monkeypatch.setattr(mirror, "plugin", lambda *_: SimpleNamespace(load=lambda: Bucket))
    monkeypatch.setattr("inshrink_core.archive.storage.registry.plugin", mirror.plugin)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    yield SimpleNamespace(url=f"test://{name}", folder=folder)
    for held in mirror._MIRRORS.values():
        held.close()
    mirror._MIRRORS.clear()
    mirror.REMOTE_ADDRESSES.clear()


@pytest.fixture
def piecemeal(monkeypatch):
    """Small files are fetched in pieces, as large ones are."""
    for name, nbytes in {"_SMALL_NBYTES": 0, "_AHEAD_NBYTES": 4096, "_PIECE_NBYTES": 8192}.items():
        monkeypatch.setattr(mirror, name, nbytes)
    monkeypatch.setattr("inshrink_core.formats.run._FIRST_NBYTES", 4096)


def save_distributed(root):
    for step in (1, 2):
        state = {"model": {"w": torch.randn(200, 100), "b": torch.randn(7)}, "step": torch.tensor(step)}
        dcp.save(state, checkpoint_id=root / f"step-{step}", no_dist=True)


def save_large(root, n_steps=3, n_layers=4):
    root.mkdir(exist_ok=True)
    for step in range(1, n_steps + 1):
        state = {f"layer{i}.weight": torch.randn(150, 150) for i in range(n_layers)}
        torch.save({"model": state, "step": step}, root / f"step_{step}.pt")


LAYOUTS = {
    "files": save_run,
    "large": save_large,
    "huggingface": save_huggingface,
    "sharded": lambda root: save_huggingface(root, sharded=True),
    "distributed": save_distributed,
}


@pytest.mark.parametrize("pieces", ["whole", "piecemeal"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_run_at_an_address_is_bit_for_bit_that_of_the_folder(bucket, layout, pieces, request):
    if pieces == "piecemeal":
        request.getfixturevalue("piecemeal")
    LAYOUTS[layout](bucket.folder / "run")
    here, there = open_run(bucket.folder / "run"), open_run(f"{bucket.url}/run")
    assert (there.steps, there.format, there.name) == (here.steps, here.format, here.name)
    for step in here.steps:
        assert there[step].specs == here[step].specs
        assert there[step].files == here[step].files
        for spec in here[step].specs:
            assert same_bits(there[step][spec.key], here[step][spec.key])
        for file in here[step].files:
            assert there[step].source.skeleton(file) == here[step].source.skeleton(file)


def test_opening_takes_headers_and_no_tensors(bucket, piecemeal):
    save_large(bucket.folder / "run")
    run = open_run(f"{bucket.url}/run")
    assert run.requests <= 1 + 3 * 2  # one list, and both ends of each of three files
    assert run.bytes_read < 3 * 60_000 < 3 * run.nbytes_of(1) / 6
    before = run.requests
    assert run.refresh().steps == run.steps
    assert run.requests == before + 1
    assert run[1]["layer0.weight"].shape == (150, 150)
    assert run.bytes_read < 3 * 60_000 + 110_000


def test_patterns_and_single_files_are_addresses_too(bucket):
    save_run(bucket.folder / "run")
    assert open_run(f"{bucket.url}/run/ckpt_*.pt").steps == open_run(bucket.folder / "run/ckpt_*.pt").steps
    name = next((bucket.folder / "run").iterdir()).name
    assert open_run(f"{bucket.url}/run/{name}").steps == open_run(bucket.folder / "run" / name).steps
    assert open_run(Path(f"{bucket.url}/run")).address == f"{bucket.url}/run"
    with pytest.raises(NotFoundError, match=f"^{bucket.url}/run/no.*: nothing matches"):
        open_run(f"{bucket.url}/run/no*.pt")
    with pytest.raises(NoCheckpointError, match=f"^{bucket.url}/nothing: no readable checkpoint"):
        open_run(f"{bucket.url}/nothing")
    with pytest.raises(RefusedLinkError, match="outside of the directories"):
        open_run(f"{bucket.url}/run", within=[bucket.folder])


def test_compress_gives_the_bytes_that_a_folder_gives_and_keeps_two_checkpoints_here(
    bucket, tmp_path, monkeypatch
):
    save_large(bucket.folder / "run", 5)
    most = []

    def watch(kind, path):
        held = mirror._MIRRORS.get((f"{bucket.url}/run", ""))
        most.append(0 if held is None else sum(one.nbytes_here for one in list(held._contents.values())))

    monkeypatch.setattr(Bucket, "rule", staticmethod(watch))
    there = verbs.compress(f"{bucket.url}/run", tmp_path / "there", codec="lossless")
    here = verbs.compress(bucket.folder / "run", tmp_path / "here", codec="lossless")
    assert there.size.nbytes == here.size.nbytes
    assert there.appended == here.appended
    assert max(most[len(most) // 2 :]) <= 2 * open_run(bucket.folder / "run").nbytes_of(1)
    held = mirror._MIRRORS[f"{bucket.url}/run", ""]
    assert not held._contents
    assert verbs.verify(tmp_path / "there", deep=True, against=f"{bucket.url}/run").problems == ()


def test_what_changes_after_it_was_listed_is_an_error_and_is_not_archived(bucket, tmp_path, piecemeal):
    save_large(bucket.folder / "run")
    run = open_run(f"{bucket.url}/run")
    (bucket.folder / "run/step_2.pt").write_bytes((bucket.folder / "run/step_3.pt").read_bytes())
    with pytest.raises(DamagedError, match="changed since it was listed"):
        run[2]["layer0.weight"]
    (bucket.folder / "run/step_3.pt").unlink()
    with pytest.raises((NotFoundError, FileNotFoundError)):
        run[3]["layer0.weight"]
    with pytest.raises(UnreadableError, match=r"2 of the checkpoints cannot be read: step_2\.pt"):
        verbs.compress(run, tmp_path / "a.inshrink", codec="lossless")
    assert inshrink_core.open(tmp_path / "a.inshrink").steps == (1,)
    again = run.refresh()  # step 2 is another copy of step 3 now, by its content
    assert (again.steps, again.identity(1)) == ((1, 3), run.identity(1))


def test_what_is_listed_anew_while_it_is_opened_is_no_mixture(bucket, piecemeal, monkeypatch):
    save_large(bucket.folder / "run")
    run, content = open_run(f"{bucket.url}/run"), mirror.Mirror.content

    def late(self, place):
        monkeypatch.setattr(mirror.Mirror, "content", content)
        shutil.copy(bucket.folder / "run/step_3.pt", bucket.folder / "run/step_2.pt")
        self.refresh()  # as another reader of the run does
        return content(self, place)

    monkeypatch.setattr(mirror.Mirror, "content", late)
    with pytest.raises(DamagedError, match="changed while it was opened"):
        run[2]["layer0.weight"]


def test_an_answer_that_is_short_is_an_error_and_is_not_kept(bucket, piecemeal, monkeypatch):
    save_large(bucket.folder / "run")
    run, read = open_run(f"{bucket.url}/run"), Bucket.read_listed
    monkeypatch.setattr(Bucket, "read_listed", lambda *asked: read(*asked)[:-1])
    with pytest.raises(DamagedError, match="shorter than it was when it was listed"):
        run[2]["layer0.weight"]
    monkeypatch.setattr(Bucket, "read_listed", read)
    assert same_bits(run[2]["layer0.weight"], open_run(bucket.folder / "run")[2]["layer0.weight"])


@pytest.mark.parametrize("failing", ["disk", "network"])
def test_what_fails_ends_compress_and_the_same_command_goes_on(bucket, tmp_path, monkeypatch, failing):
    save_large(bucket.folder / "run")
    run, pwrite, written = open_run(f"{bucket.url}/run"), mirror.os.pwrite, []
    nbytes = run.nbytes_of(1)
    for held in mirror._MIRRORS.values():
        held._contents.clear()

    def full(descriptor, content, offset):
        room = nbytes + nbytes // 2 - sum(written)
        if room <= 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        written.append(pwrite(descriptor, content[:room], offset))
        return written[-1]

    def down(kind, path):
        if (kind, path) == ("read", "step_2.pt"):
            raise StorageError("the store cannot be reached", where=path)

    with monkeypatch.context() as patch:
        if failing == "disk":
            patch.setattr(mirror.os, "pwrite", full)
        else:
            patch.setattr(Bucket, "rule", staticmethod(down))
        said = r"cannot be written: No space left on device.*XDG_CACHE_HOME|cannot be reached"
        with pytest.raises(StorageError, match=said):
            verbs.compress(run, tmp_path / "a.inshrink", codec="lossless")
    assert inshrink_core.open(tmp_path / "a.inshrink").steps == (1,)
    assert verbs.compress(run, tmp_path / "a.inshrink", codec="lossless").appended == (2, 3)
    assert verbs.verify(tmp_path / "a.inshrink", deep=True, against=bucket.folder / "run").problems == ()


READER = """
import signal, time
from types import SimpleNamespace as Of
from inshrink_core.execution import mirror
signal.signal(signal.SIGINT, signal.default_int_handler)
one = mirror.Listed("a/x", 9, "tag", 0)
storage = Of(
    objects=lambda only: [one],
    read_listed=lambda one, offset, nbytes: bytes(nbytes),
    together=lambda calls: [call() for call in calls],
)
mirror.plugin = lambda *_: Of(load=lambda: Of(at=lambda url: storage))
held, path = mirror.mirrored("test://b/run")
held.content(f"{path}/a/x").fill([(0, 9)])
print("here", flush=True)
time.sleep(60)
"""


def test_nothing_stays_in_the_cache_whatever_ends_a_process(bucket, tmp_path):
    save_run(bucket.folder / "run")
    cache = tmp_path / "cache/inshrink/fetched-runs"
    command = [sys.executable, "-W", "ignore", "-c", READER]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(command, **pipes) as stopped, subprocess.Popen(command, **pipes) as killed:
        assert stopped.stdout.readline() == killed.stdout.readline() == b"here\n"
        theirs = set(cache.iterdir())
        assert len(theirs) == 2
        assert open_run(f"{bucket.url}/run").steps == (10, 20, 30)
        assert theirs < set(cache.iterdir()), "those of processes that live stay"
        stopped.send_signal(signal.SIGINT)
        stopped.wait()
        assert len(theirs & set(cache.iterdir())) == 1
        killed.kill()
    mirror.Mirror("test://another", Bucket(f"{bucket.url}/run")).close()
    assert not theirs & set(cache.iterdir())


def test_no_message_has_what_may_be_a_password(bucket, monkeypatch):
    monkeypatch.undo()
    for address in ("ftp://me:hushhush@host/run", "s3://me:hushhush@b/run", "hf://me:hushhush@host/run"):
        with pytest.raises(InputError) as raised:
            open_run(address)
        assert "hushhush" not in str(raised.value)


def test_watch_waits_for_objects_and_archives_each(bucket, tmp_path, monkeypatch):
    source = save_run(tmp_path / "source")
    arrivals = sorted(source.iterdir())

    def arrive(kind, path):
        if kind == "list" and arrivals and len([one for one in Bucket.asked if one[0] == "list"]) % 3 == 0:
            (bucket.folder / "run").mkdir(exist_ok=True)
            shutil.move(arrivals.pop(0), bucket.folder / "run")

    monkeypatch.setattr(Bucket, "rule", staticmethod(arrive))
    report = verbs.compress(f"{bucket.url}/run", tmp_path / "a.inshrink", interval=0.02, until=30, watch=True)
    assert report.appended == (10, 20, 30)
    with pytest.raises(InputError, match="released from file systems only"):
        verbs.compress(f"{bucket.url}/run", tmp_path / "a.inshrink", release=True, watch=True)


def test_names_that_no_file_can_have_are_refused(bucket, monkeypatch):
    save_run(bucket.folder / "run")
    found = Bucket.objects
    for name in ("../out", "a/../../out", "/out", "a//b", "x" * 300, "ckpt_10.pt/inside"):
        more = [mirror.Listed(name, 5, "tag", 0)]
        monkeypatch.setattr(Bucket, "objects", lambda self, path="", more=more: found(self) + more)
        with pytest.raises(UnsafePathError):
            open_run(f"{bucket.url}/run")
    monkeypatch.setattr(Bucket, "objects", found)
    assert open_run(f"{bucket.url}/run").steps == (10, 20, 30)
    assert not list(bucket.folder.parent.rglob("out"))


def test_two_names_that_are_one_to_the_disk_are_refused(bucket):
    save_run(bucket.folder / "run")
    run = open_run(f"{bucket.url}/run")
    # What a disk that does not tell A from a says of the second.
    (run.path / "CKPT_10.pt").touch()
    shutil.copy(bucket.folder / "run/ckpt_10.pt", bucket.folder / "run/CKPT_10.pt")
    with pytest.raises(UnsafePathError, match="takes its name for that of another object"):
        run.refresh()
    assert run[20].raw_bytes()


def test_originals_and_evaluators_stay_where_they_are(bucket, tmp_path):
    save_run(bucket.folder / "run")
    (bucket.folder / "run/inshrink.toml").write_text('[evaluator]\nfile = "evaluate.py"\n')
    (bucket.folder / "run/evaluate.py").write_text("raise SystemExit\n")
    url = f"{bucket.url}/run"
    verbs.compress(url, tmp_path / "a.inshrink")
    with pytest.raises(InputError, match="released from file systems only"):
        verbs.release(url, tmp_path / "a.inshrink", apply=True)
    with pytest.raises(InputError, match="only from local files"):
        verbs.compare(tmp_path / "a.inshrink", against=url, trust_run=True)
    assert len(list((bucket.folder / "run").glob("*.pt"))) == 3


def test_the_mirror_of_another_process_is_not_read_as_if_it_were_empty(bucket):
    save_run(bucket.folder / "run")
    run = open_run(f"{bucket.url}/run")
    program = "import sys; from inshrink_core.formats import open_run; open_run(sys.argv[1])"
    done = ran(sys.executable, "-W", "ignore", "-c", program, run.path)
    assert "valid only in the process that made it" in done.stderr


@pytest.fixture
def layers(bucket, piecemeal):
    """Twelve tensors of a torch file in the bucket, of which none fits into what is fetched first."""
    save_large(bucket.folder, 1, 12)
    return torch.load(bucket.folder / "step_1.pt")["model"]


def test_a_file_of_pytorch_is_opened_by_its_ends_however_many_tensors_it_has(bucket, layers):
    run = open_run(bucket.url)
    assert run.requests == len(Bucket.asked) <= 1 + 3  # a list, both ends, and what its directory has beyond
    assert all(torch.equal(run[1][name], tensor) for name, tensor in layers.items())


def test_a_tensor_whose_record_is_another_than_was_foretold_is_not_given_out(bucket, layers):
    """Not even when what was fetched is let go and fetched again."""
    path = bucket.folder / "step_1.pt"
    content = bytearray(path.read_bytes())
    at = content.index(b"/data/5FB") + len("/data/5FB") + 2
    content[at] ^= 1  # in the padding, of which nothing else tells
    path.write_bytes(content)
    run = open_run(bucket.url)
    assert torch.isfinite(run[1]["layer7.weight"]).all()
    for _ in range(2):
        with pytest.raises(DamagedError, match="do not match its directory"):
            run[1]["layer5.weight"]
        mirror.mirror_of(run.path).stream(())


def test_a_zip_that_another_program_wrote_is_read_as_before(bucket, layers):
    """Its records are asked for: nothing foretells them."""
    path = bucket.folder / "step_1.pt"
    with zipfile.ZipFile(io.BytesIO(path.read_bytes())) as one, zipfile.ZipFile(path, "w") as other:
        for name in one.namelist():
            other.writestr(name, one.read(name))
    run = open_run(bucket.url)
    assert run.requests > 12
    assert all(torch.equal(run[1][name], tensor) for name, tensor in layers.items())


def test_records_of_four_gigabytes_are_foretold_as_pytorch_writes_them():
    nbytes = (1 << 32) + 20_000
    # torch.save({"a": torch.zeros(1000), "big": torch.zeros(nbytes // 4), …}), torch 2.13
    header = (
        b"PK\x03\x04\0\0\x08\x08" + bytes(18) + b"\x0e\0$\0archive/data/1"
        b"\x01\0\x10\0 N\0\0\x01\0\0\0" + bytes(8) + b"FB\x0c\0" + b"Z" * 12
    )
    limit = 4912 + len(header) + nbytes + 24
    assert _framed(_Record(4912, b"archive/data/1", 7, nbytes, 0), limit) == (
        header,
        b"PK\x07\x08\x07\0\0\0" + 2 * nbytes.to_bytes(8, "little"),
    )
    assert _framed(_Record(4912, b"archive/data/1", 7, nbytes, 0), limit + 1) is None


def test_what_is_kept_is_bounded_over_all_addresses_and_the_oldest_goes_first(bucket, piecemeal, monkeypatch):
    for name in ("a", "b"):
        save_large(bucket.folder / name)
    nbytes = open_run(bucket.folder / "a").nbytes_of(1)
    monkeypatch.setattr(mirror, "MAX_HERE_NBYTES", 2 * nbytes)
    runs = {name: open_run(f"{bucket.url}/{name}") for name in ("a", "b")}
    for name, step in [("a", 1), ("b", 1), ("b", 2), ("b", 3), ("a", 1)]:
        for spec in runs[name][step].specs:
            assert same_bits(runs[name][step][spec.key], open_run(bucket.folder / name)[step][spec.key])
        held = [one.nbytes_here for of in mirror._MIRRORS.values() for one in list(of._contents.values())]
        assert sum(held) <= 2 * nbytes + max(held)
