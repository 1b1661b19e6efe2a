"""Archives in buckets, in obstore's memory store: the suite, the uploads behind a writer, what is refused."""

import io
import logging
import shutil
import threading
import uuid
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from inshrink_core.archive import ArchiveReader, ArchiveWriter, check_archive
from inshrink_core.archive.maintenance import unpack_archive
from inshrink_core.archive.manifest import MANIFEST_NAME
from inshrink_core.archive.storage import objects, uploads
from inshrink_core.archive.storage.blocks import CACHE
from inshrink_core.archive.storage.registry import storage_at
from inshrink_core.archive.storage.uploads import queue_folder
from inshrink_core.errors import ConflictError, InputError, LockedError, StorageError
from inshrink_core.testing.archives import ArchiveMachine
from inshrink_core.testing.storages import StorageSuite
from tests.archive.building import append, build, contents

pytest.importorskip("obstore", reason="the extra 'remote' is not installed")
from obstore.exceptions import AlreadyExistsError, GenericError
from obstore.store import MemoryStore

STORES = {}


class Wrapped:
    """A store in memory that can be told to fail, to lie and to lose answers."""

    def __init__(self):
        self.inner, self.asked = MemoryStore(), []
        self.before = self.after = lambda verb, key: None
        self.blind = False

    def __getattr__(self, verb):
        act = getattr(self.inner, verb)

        def ask(key, *args, **options):
            self.asked.append((verb, key))
            self.before(verb, key)
            if self.blind and "mode" in options:
                options["mode"] = "overwrite"
            result = act(key, *args, **options)
            self.after(verb, key)
            return result

        return ask


def registered(monkeypatch, waiting):
    """Let ``s3://`` be stores in memory, one a bucket, and keep what waits in a folder."""
    monkeypatch.setattr(objects, "_store_of", lambda scheme, bucket: STORES.setdefault(bucket, Wrapped()))
    monkeypatch.setattr(objects, "_PROVEN", set())
    monkeypatch.setattr(objects.time, "sleep", lambda seconds: None)
    monkeypatch.setenv(uploads.QUEUE_VARIABLE, str(waiting))


@pytest.fixture(autouse=True)
def bucket(monkeypatch, tmp_path):
    """A bucket of the test's own."""
    registered(monkeypatch, tmp_path / "waiting")
    name = uuid.uuid4().hex
    yield name
    STORES.pop(name, None)


@pytest.fixture
def url(bucket):
    return f"s3://{bucket}/runs/a.inshrink"


@pytest.fixture
def store(bucket):
    return STORES.setdefault(bucket, Wrapped())


class TestObjects(StorageSuite):
    def place(self, folder):
        return f"s3://{folder.name}{folder.parent.name}/some runs/é?#%25+&*~'/a"


class InBucket(ArchiveMachine):
    """The archive against a dictionary, uploaded behind."""

    def new_place(self):
        self._patched = pytest.MonkeyPatch()
        self._waiting = Path("/tmp") / f"inshrink-test-{uuid.uuid4().hex}"
        registered(self._patched, self._waiting)
        return f"s3://machine/{uuid.uuid4().hex}"

    def remove_place(self):
        self._patched.undo()
        shutil.rmtree(self._waiting, ignore_errors=True)


TestArchiveInBucket = InBucket.TestCase
TestArchiveInBucket.settings = settings(
    max_examples=6,
    stateful_step_count=10,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)


def steps_of(url):
    return [frame.step for frame in ArchiveReader.open(url).frames]


def put(storage, path, content):
    with storage.create(path) as creation:
        creation.write(content)
        creation.commit()


def waits(url):
    """What lies on this machine on its way to a bucket."""
    folder = queue_folder(url)
    found = [path for path in folder.rglob("*") if path.is_file()] if folder.exists() else []
    uploaded = {} if not found else {f.path for f in ArchiveReader.open(url).frames}
    return sorted(p.name for p in found if p.name != "lock" and f"frames/{p.name}" not in uploaded)


# ---- uploads behind the writer -------------------------------------------------------------------


def test_a_commit_returns_before_its_upload_and_flush_when_others_see_it(url, store):
    gate = threading.Event()
    with ArchiveWriter(url, create=True) as writer:
        writer.flush()
        store.before = lambda verb, key: gate.wait(20) if verb == "put" else None
        append(writer, 0)
        append(writer, 100)
        assert [frame.step for frame in writer.reader.frames] == [0, 100]
        assert steps_of(url) == []
        gate.set()
        writer.flush()
        assert steps_of(url) == [0, 100]
    assert waits(url) == []
    assert check_archive(url) == ()


def test_commits_take_two_requests_each_and_none_that_lists(url, store):
    with ArchiveWriter(url, create=True) as writer:
        append(writer, 0)
        writer.flush()
        for step in range(100, 600, 100):
            store.asked.clear()
            append(writer, step)
            writer.flush()
            assert [verb for verb, _ in store.asked] == ["put", "put"]


@pytest.mark.parametrize("n", range(1, 13))
def test_a_request_that_fails_or_whose_answer_is_lost_changes_nothing(url, store, n):
    """Of every request in turn: refused once, then carried out with its answer cut off."""
    for when in ("before", "after"):
        count = 0

        def fail(verb, key):
            nonlocal count
            count += 1
            if count % n == n - 1:
                raise GenericError("HTTP error: error sending request")

        place = f"{url}-{when}"
        setattr(store, when, fail if n > 1 else lambda verb, key: None)
        build(place)
        setattr(store, when, lambda verb, key: None)
        assert steps_of(place) == [0, 100, 200]
        assert check_archive(place) == ()
        assert waits(place) == []


def test_what_was_not_uploaded_is_uploaded_by_the_next_writer(url, store):
    build(url, (0,))

    def refuse(verb, key):
        if verb == "put":
            raise GenericError("HTTP error: error sending request")

    writer = ArchiveWriter(url)
    store.before = refuse
    append(writer, 100)
    append(writer, 200)
    with pytest.raises(StorageError, match=r"not everything is uploaded yet: .* cannot be reached"):
        writer.close()
    assert len(waits(url)) == 3
    assert steps_of(url) == [0]
    store.before = lambda verb, key: None
    with ArchiveWriter(url) as writer:
        assert [frame.step for frame in writer.reader.frames] == [0, 100, 200]
        append(writer, 300)
    assert steps_of(url) == [0, 100, 200, 300]
    assert (check_archive(url), waits(url)) == ((), [])


def test_the_next_writer_reads_what_the_last_one_kept_if_it_is_the_same(url, store, monkeypatch):
    build(url)
    cached = queue_folder(url) / "frames"
    assert len(list(cached.iterdir())) == 3
    damaged = min(cached.iterdir())
    content = damaged.read_bytes()
    damaged.unlink()  # The store maps the file that was uploaded.
    damaged.write_bytes(b"x" + content[1:])
    CACHE.clear()  # The next writer is another process.
    with ArchiveWriter(url) as writer:
        store.asked.clear()
        read = [contents(writer.reader, frame.frame_id) for frame in writer.reader.frames]
        asked = {key for verb, key in store.asked if verb.startswith("get")}
    assert len(asked) == 1
    assert read == [
        contents(ArchiveReader.open(url), frame.frame_id) for frame in ArchiveReader.open(url).frames
    ]
    monkeypatch.setattr(uploads, "_CACHED_NBYTES", 5_000)
    with ArchiveWriter(url) as writer:
        append(writer, 300)
    assert sum(path.stat().st_size for path in cached.iterdir()) <= 5_000


def test_an_unknown_store_is_told():
    with pytest.raises(StorageError, match="no object storage of the name 'nowhere'"):
        ArchiveReader.open("nowhere://bucket/a")


# ---- two writers ---------------------------------------------------------------------------------


def test_a_second_writer_on_this_machine_is_refused_when_it_begins(url):
    with ArchiveWriter(url, create=True), pytest.raises(LockedError) as raised:
        ArchiveWriter(url, create=True)
    assert raised.value.where == url


def test_of_writers_on_two_machines_the_second_to_commit_stops_and_leaves_nothing(
    url, monkeypatch, tmp_path, caplog
):
    """Its next writer quarantines what was not uploaded."""
    build(url)
    first = ArchiveWriter(url)
    with monkeypatch.context() as patched:
        patched.setenv(uploads.QUEUE_VARIABLE, str(tmp_path / "other"))
        second = ArchiveWriter(url)
    append(first, 300)
    first.flush()
    append(second, 400)
    with pytest.raises(ConflictError, match="another writer"):
        second.flush()
    with pytest.raises(ConflictError):
        append(second, 500)
    with pytest.raises(ConflictError):
        second.close()
    append(first, 600)
    first.close()
    assert steps_of(url) == [0, 100, 200, 300, 600]
    assert all(problem.leftover for problem in check_archive(url))
    ArchiveWriter(url).close()
    assert check_archive(url) == ()
    assert len(storage_at(url).list("frames")) == 5
    monkeypatch.setenv(uploads.QUEUE_VARIABLE, str(tmp_path / "other"))
    with caplog.at_level(logging.WARNING), ArchiveWriter(url) as writer:
        append(writer, 700)
    assert "were not uploaded" in caplog.text
    aside = queue_folder(url).with_name(f"{queue_folder(url).name}.quarantined-1")
    assert [path.name for path in (aside / "frames").iterdir()] == ["00000004-400.frame"]
    assert steps_of(url) == [0, 100, 200, 300, 600, 700]


def test_a_frame_that_the_manifest_does_not_list_is_nobodys(url, tmp_path):
    """It may be on its way. When it cannot be listed any more, the next writer deletes it."""
    build(url)
    path = build(tmp_path / "local", (0, 100, 200, 300))
    (name,) = [p.name for p in (path / "frames").iterdir() if "-300" in p.name]
    put(storage_at(url), f"frames/{name}", (path / "frames" / name).read_bytes())
    assert steps_of(url) == [0, 100, 200]
    with ArchiveWriter(url) as writer:
        append(writer, 300)
    assert steps_of(url) == [0, 100, 200, 300]
    assert name in storage_at(url).list("frames")
    before = storage_at(url).load(MANIFEST_NAME)[1]
    ArchiveWriter(url).close()
    assert name not in storage_at(url).list("frames")
    # Whoever was at work meanwhile is refused.
    assert storage_at(url).load(MANIFEST_NAME)[1] != before
    assert check_archive(url) == ()


# ---- stores that lie, and what is refused --------------------------------------------------------


def test_a_store_that_does_not_compare_is_refused_before_anything_is_written(url, store):
    store.blind = True
    with pytest.raises(StorageError, match="does not compare") as raised:
        ArchiveWriter(url, create=True)
    assert "another store" in raised.value.remedy
    with pytest.raises(StorageError, match="does not compare"):
        put(storage_at(url), "a", b"x")
    assert store.inner.list().collect() == []


@pytest.mark.parametrize(
    "address",
    [
        "s3://AKIA:hushhush@bucket/a", "az://container/a?sv=2024&sig=hushhush",
        "s3://bucket/a?X-Amz-Signature=hushhush", "gs://bucket/a?token=hushhush",
        "s3://bad bucket/a", "s3://bück/a", "s3://a%20b/a", "s3://a?b/a", "s3://a#b/a", "s3://a\nb/a",
    ],
)  # fmt: skip
def test_an_address_with_credentials_or_of_no_bucket_is_refused_and_no_secret_repeated(address):
    what = "must not hold credentials" if "hushhush" in address else "no bucket can have this name"
    for ask in (storage_at, ArchiveReader.open, lambda url: ArchiveWriter(url, create=True)):
        with pytest.raises(InputError, match=what) as raised:
            ask(address)
        assert "hushhush" not in str(raised.value)


@pytest.mark.parametrize(
    ("answer", "what"),
    [
        ("404 <Code>NoSuchBucket</Code>", "there is no such bucket"),
        ("status code: 403 <Code>AccessDenied</Code>", "denies it"),
        ("status code: 403 <Code>InvalidAccessKeyId</Code>", "does not accept the credentials"),
        ("status code: 403 <Code>SignatureDoesNotMatch</Code>", "does not accept the credentials"),
        ("status code: 403 <Code>RequestTimeTooSkewed</Code>", "clock"),
        ("status code: 403 <Code>InvalidObjectState</Code>", "must be thawed"),
        ("status code: 409 <Code>BlobArchived</Code>", "must be thawed"),
        ("status code: 400 <Code>InvalidBucketName</Code>", "no bucket can have this name"),
        ("status code: 403 Server failed to authenticate the request", "does not accept the credentials"),
        ("Invalid Access Key: Invalid symbol 32, offset 2.", "does not accept the credentials"),
        ("status code: 301 <Code>PermanentRedirect</Code>", "another region"),
        ("PUT http://169.254.169.254/latest/api/token", "no credentials were found"),
        ("status code: 503 <Code>SlowDown</Code>", "overloaded"),
        ("HTTP error: error sending request kind: Connect", "cannot be reached"),
        ("status code: 418 <Code>Teapot</Code>", "refused: 418 Teapot"),
        ("https://account/?sig=hushhush went wrong", "… went wrong"),
    ],
)
def test_a_refusal_is_one_clear_line_without_secrets(url, store, answer, what):
    def refuse(verb, key):
        raise GenericError(f"Generic S3 error: {answer}\nDebug source: hushhush")

    store.before = refuse
    for ask in (ArchiveReader.open, lambda url: ArchiveWriter(url, create=True)):
        with pytest.raises(StorageError, match=what) as raised:
            ask(url)
        assert "\n" not in str(raised.value)
        assert "hushhush" not in str(raised.value)
        assert raised.value.__cause__ is None
        assert raised.value.remedy


@pytest.fixture
def in_pieces(monkeypatch):
    """Every frame is large."""
    monkeypatch.setattr(objects, "LARGE_NBYTES", 0)
    monkeypatch.setattr(objects, "_END_NBYTES", 64)


class Counting:
    """A store that takes files of any size by their size alone, within the limits of S3."""

    def __init__(self):
        self.objects, self.in_memory = {}, 0

    def put(self, key, file, *, mode="overwrite", chunk_size=None, max_concurrency=12, attributes=None):
        nbytes = len(file) if isinstance(file, bytes) else file.seek(0, 2)
        if mode == "create" and key in self.objects:
            raise AlreadyExistsError(key)
        if chunk_size is None or nbytes <= chunk_size:
            assert nbytes <= 5 << 30, "one request takes no more"
        else:
            assert -(-nbytes // chunk_size) <= 10_000
            assert 5 << 20 <= chunk_size <= 5 << 30
            self.in_memory = max(self.in_memory, chunk_size * max_concurrency)
        self.objects[key] = nbytes

    def delete(self, key):
        del self.objects[key]


@pytest.mark.parametrize("nbytes", [5 << 30, (5 << 30) + 1, 150 << 30, 2 << 40, 5 << 40])
@pytest.mark.parametrize("over", [False, True])
def test_objects_of_any_size_keep_to_the_limits_of_pieces_and_memory(
    url, tmp_path, monkeypatch, nbytes, over
):
    """Nothing is sent: the file is sparse, and the store counts."""
    store = Counting()
    monkeypatch.setattr(objects, "_store_of", lambda scheme, bucket: store)
    monkeypatch.setattr(objects.ObjectStorage, "require_conditions", lambda self: None)
    storage = storage_at(url)
    with (tmp_path / "large").open("w+b") as file:
        try:
            file.truncate(nbytes)
        except OSError:
            pytest.skip("this file system has no files of that size")
        storage.upload("frames/x", file, over=over)
    assert store.objects == {storage.key("frames/x"): nbytes}
    assert store.in_memory <= max(256 << 20, -(-nbytes // 9000))


def test_a_writer_that_died_after_its_claim_goes_on_and_no_other_takes_it_for_a_frame(url, store, in_pieces):
    build(url)
    n_puts = []

    def die(verb, key):
        if verb == "put" and key.endswith("-900.frame"):
            n_puts.append(key)
            if len(n_puts) > 1:
                raise GenericError("Generic S3 error: status code: 503 <Code>SlowDown</Code>")

    store.before = die
    dead = ArchiveWriter(url)
    append(dead, 900)
    with pytest.raises(StorageError, match="not everything is uploaded"):
        dead.close()
    store.before = lambda verb, key: None
    known = [frame.step for frame in ArchiveReader.open(url).frames]
    assert 900 not in known
    assert check_archive(url) == ()
    ArchiveWriter(url).close()
    assert [frame.step for frame in ArchiveReader.open(url).frames] == [*known, 900]
    assert check_archive(url) == ()


def test_a_name_that_is_claimed_is_taken_while_its_object_is_on_its_way(url, store, in_pieces):
    first, second = b"a" * 30_000, b"b" * 30_000
    puts = []

    def rival(verb, key):
        """Come when the name is taken, and its pieces are not there yet."""
        if verb == "put" and key.endswith("frames/x"):
            puts.append(key)
            if len(puts) == 1:
                with pytest.raises(FileExistsError):
                    storage_at(url).upload("frames/x", io.BytesIO(second))

    store.after = rival
    storage_at(url).upload("frames/x", io.BytesIO(first))
    assert len(puts) == 2
    assert storage_at(url).load("frames/x")[0] == first
    with pytest.raises(FileExistsError):
        storage_at(url).upload("frames/x", io.BytesIO(second))
    assert storage_at(url).load("frames/x")[0] == first


# ---- the verbs -----------------------------------------------------------------------------------


def test_a_copy_into_a_bucket_that_fails_leaves_nothing(url, store, tmp_path):
    reader = ArchiveReader.open(build(tmp_path / "local"))

    def fail(now):
        if now.done > now.total // 2:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        unpack_archive(reader, url, progress=fail)
    assert store.inner.list().collect() == []
    unpack_archive(reader, url)
    assert steps_of(url) == [0, 100, 200]
