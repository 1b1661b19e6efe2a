"""Archives in buckets of real servers: rivals, lies, lost answers, and deaths between requests."""

import io
import os
import subprocess
import sys

import pytest

pytest.importorskip("obstore", reason="the extra 'remote' is not installed")
pytest.importorskip("moto", reason="moto[server] is not installed")

import inshrink_core
from inshrink_core.archive import ArchiveReader, ArchiveWriter, check_archive
from inshrink_core.archive.storage import objects, storage_at, uploads
from inshrink_core.errors import InputError, InshrinkError, StorageError
from inshrink_core.testing.storages import StorageSuite
from tests.integrations.servers import Proxy, Refusing, connect, inshrink

pytestmark = [pytest.mark.integration, pytest.mark.usefixtures("waiting")]


class TestS3(StorageSuite):
    @pytest.fixture(autouse=True)
    def bucket(self, url):
        self.bucket_name = url.split("/")[2]

    def place(self, folder):
        return f"s3://{self.bucket_name}/some runs/é?#%25+&*~'(1)/a"


def append(writer, step):
    head = writer.reader.head
    parent = None if head is None else head.frame_id
    kind = "keyframe" if parent is None else "delta"
    with writer.begin(step=step, kind=kind, parent_id=parent) as frame:
        frame.add("w", "raw/1", bytes([step % 256]) * 5000, attributes=("weight", "uint8", [5000], False))
        frame.commit({"step": step})


def steps_of(url):
    return [frame.step for frame in ArchiveReader.open(url).frames]


def is_sound(url):
    """Every frame says what it should, and nothing is wrong that the next writer does not mend."""
    reader = ArchiveReader.open(url)
    for info in reader.frames:
        frame = reader.frame(info.frame_id)
        assert frame.read(frame.entry("w")) == bytes([info.step % 256]) * 5000
    assert [problem for problem in check_archive(url) if not problem.leftover] == []
    return True


# ---- answers that are lost, cut off, refused -----------------------------------------------------


@pytest.mark.parametrize("fate", ["refuse", "drop", "lose", "cut"])
@pytest.mark.parametrize("every", [2, 3, 5])
def test_requests_that_fail_change_nothing_of_what_is_written(server, url, monkeypatch, fate, every):
    with Proxy(server, lambda n, method, path: fate if n % every == every - 1 else None) as proxy:
        connect(monkeypatch, proxy.address)
        with ArchiveWriter(url, create=True) as writer:
            for step in range(4):
                append(writer, step)
        assert steps_of(url) == [0, 1, 2, 3]
        assert is_sound(url)
        assert len(proxy.requests) > 10
    connect(monkeypatch, server)
    assert len(storage_at(url).list("frames")) == 4
    assert storage_at(url).remains("frames") == ()


@pytest.mark.parametrize("fate", ["refuse", "drop", "lose", "cut"])
def test_large_frames_arrive_whole_through_failures(server, url, monkeypatch, fate):
    monkeypatch.setattr(objects, "LARGE_NBYTES", 6 << 20)
    monkeypatch.setattr(objects, "_PIECE_NBYTES", 5 << 20)
    content = os.urandom(12 << 20)
    with Proxy(server, lambda n, method, path: fate if n % 11 in (3, 8) else None) as proxy:
        connect(monkeypatch, proxy.address)
        with storage_at(url).create("frames/large") as creation:
            creation.write(content)
            creation.commit()
        storage_at(url).upload("frames/behind", io.BytesIO(content))
        with pytest.raises(FileExistsError):
            storage_at(url).upload("frames/behind", io.BytesIO(content[::-1]))
        assert any("uploadId" in path for _, path in proxy.requests)
    connect(monkeypatch, server)
    assert storage_at(url).load("frames/large")[0] == content
    assert storage_at(url).load("frames/behind")[0] == content
    assert storage_at(url).remains("frames") == ()


def test_a_server_that_ignores_conditions_is_refused(server, url, monkeypatch, tmp_path):
    with Proxy(server, lambda n, method, path: "blind") as proxy:
        connect(monkeypatch, proxy.address)
        run = inshrink_core.sample("digits-cnn")
        with pytest.raises(StorageError, match="does not compare before it writes"):
            inshrink_core.compress(run, url, steps=[10])
        assert storage_at(url).names("") == ()


# ---- what is refused -----------------------------------------------------------------------------


def said(act):
    with pytest.raises(InshrinkError) as raised:
        act()
    text = str(raised.value)
    assert "\n" not in text
    assert "hushhush" not in text
    return text


def test_what_cannot_be_done_is_said_in_one_clear_line(server, url, monkeypatch):
    def write():
        ArchiveWriter(url, create=True)

    nowhere = url.replace("s3://b", "s3://none")
    assert "there is no such bucket" in said(lambda: ArchiveWriter(nowhere, create=True))
    assert "there is no such bucket" in said(lambda: ArchiveReader.open(nowhere))
    for code, status, words in (
        ("AccessDenied", 403, "denies it"),
        ("InvalidAccessKeyId", 403, "does not accept the credentials"),
        ("RequestTimeTooSkewed", 403, "the clock of this machine"),
    ):
        with Refusing(code, status) as address:
            connect(monkeypatch, address)
            assert words in said(write)
    connect(monkeypatch, "http://127.0.0.1:9")
    monkeypatch.setattr(objects, "_RETRY", {**objects._RETRY, "max_retries": 0})
    assert "cannot be reached" in said(write)
    with pytest.raises(InputError, match="must not hold credentials"):
        ArchiveReader.open("s3://me:hushhush@bucket/a")


# ---- rivals --------------------------------------------------------------------------------------

RIVAL = """
import os, sys
from inshrink_core.archive import ArchiveWriter
from inshrink_core.errors import LockedError
url, first, n = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
done = 0
while done < n:
    try:
        with ArchiveWriter(url) as writer:
            with writer.begin(step=first + done, kind="keyframe", parent_id=None) as frame:
                content = bytes([(first + done) % 256]) * 5000
                frame.add("w", "raw/1", content, attributes=("weight", "uint8", [5000], False))
                frame.commit({})
            writer.flush()
            done += 1
            print(first + done - 1, flush=True)
    except LockedError:
        pass
"""


def test_racing_processes_on_machines_of_their_own_lose_nothing_that_was_committed(url, tmp_path):
    ArchiveWriter(url, create=True).close()
    rivals = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", RIVAL, url, str(1000 * (i + 1)), "4"],
            env={**os.environ, uploads.QUEUE_VARIABLE: str(tmp_path / f"machine{i}")},
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        for i in range(3)
    ]
    committed = [int(line) for rival in rivals for line in rival.communicate(timeout=240)[0].split()]
    assert len(committed) == 12
    assert set(committed) <= set(steps_of(url))
    assert is_sound(url)


# ---- deaths --------------------------------------------------------------------------------------

MORTAL = """
import sys
from inshrink_core.archive import ArchiveWriter, remove_frames
url = sys.argv[1]
def append(writer, step):
    head = writer.reader.head
    with writer.begin(step=step, kind="delta" if head else "keyframe",
                      parent_id=head.frame_id if head else None) as frame:
        frame.add("w", "raw/1", bytes([step]) * 5000, attributes=("weight", "uint8", [5000], False))
        frame.commit({})
with ArchiveWriter(url, create=True) as writer:
    last = writer.reader.head.step if writer.reader.head else -1
    for step in range(last + 1, 4):
        append(writer, step)
        print(step, flush=True)
    writer.flush()
    if len(writer.reader.frames) == 4:
        remove_frames(writer, [writer.reader.find(3).frame_id])
print("done", flush=True)
"""


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_writer_killed_at_any_request_loses_nothing_and_shows_nothing_half(
    server, url, monkeypatch, tmp_path, when
):
    """Whoever goes on where it died uploads what it had made; readers see whole steps at every moment."""
    for n in range(1, 40):
        place, victims = f"{url}-{n}", []

        def kill(number, method, path, n=n, victims=victims):
            if number == n and victims:
                victims[0].kill()
                return "drop" if when == "before" else "lose"
            return None

        with Proxy(server, kill) as proxy:
            environment = {**os.environ, "AWS_ENDPOINT_URL": proxy.address}
            victims.append(
                subprocess.Popen(
                    [sys.executable, "-W", "ignore", "-c", MORTAL, place],
                    env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
                )
            )  # fmt: skip
            made = victims[0].communicate(timeout=120)[0].split()
        if inshrink_core.archive.is_archive(place):
            seen = steps_of(place)
            assert seen == list(range(len(seen)))
            assert is_sound(place)
        if made[-1:] == ["done"]:
            break
        again = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", MORTAL, place],
            capture_output=True,
            text=True,
            timeout=120,
            check=True,
        )
        # What it had made is not made again, but for the step that it may have removed already.
        assert not (set(made) & set(again.stdout.split())) - {"3"}
        assert steps_of(place) == [0, 1, 2]
        assert is_sound(place)
        with ArchiveWriter(place) as writer:
            append(writer, 9)
        assert is_sound(place)
    else:
        pytest.fail("it never came to its end")


def test_what_died_on_one_machine_does_not_keep_another_from_writing(server, url, monkeypatch, tmp_path):
    """Its frame lies in the bucket, under the very name that comes next, and is nobody's."""
    with ArchiveWriter(url, create=True) as writer:
        append(writer, 0)
        append(writer, 1)
    with Proxy(
        server, lambda n, method, path: "refuse" if "manifest" in path and method == "PUT" else None
    ) as proxy:
        connect(monkeypatch, proxy.address)
        monkeypatch.setattr(objects, "_RETRY", {**objects._RETRY, "max_retries": 0})
        monkeypatch.setattr(objects, "_N_ATTEMPTS", 1)
        dead = ArchiveWriter(url)
        append(dead, 2)
        with pytest.raises(StorageError, match="not everything is uploaded"):
            dead.close()
    connect(monkeypatch, server)
    assert len(storage_at(url).list("frames")) == 3
    monkeypatch.setenv(uploads.QUEUE_VARIABLE, str(tmp_path / "other"))
    with ArchiveWriter(url) as writer:
        append(writer, 2)
    assert steps_of(url) == [0, 1, 2]
    ArchiveWriter(url).close()
    assert check_archive(url) == ()


# ---- the whole -----------------------------------------------------------------------------------


def test_the_command_line_works_with_a_bucket(url, tmp_path):
    run = inshrink_core.sample("digits-cnn")

    inshrink("compress", run, "-o", url, "--steps", "10,25")
    inshrink("compress", run, "-o", url, "--watch", "--poll", "0.1", "--until", "50")
    assert url in inshrink("inspect", url).stdout
    inshrink("verify", url, "--deep")
    inshrink("prune", url, "--keep-last", "2", "--apply")
    inshrink("export", url, "--pack", f"{url}.packed")
    inshrink("export", f"{url}.packed", "--unpack", f"{url}.again")
    inshrink("restore", f"{url}.again", "--step", "50", "-o", tmp_path / "out")
    inshrink("restore", url, "-o", "s3://bucket/out", status=2)
    assert inshrink_core.open(f"{url}.again").steps == (25, 50)
    assert any((tmp_path / "out").iterdir())
