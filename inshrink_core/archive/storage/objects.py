"""Archives in buckets: S3, Google Cloud Storage and Azure, read and written through obstore."""

from __future__ import annotations

import contextlib
import errno
import functools
import hashlib
import mmap
import os
import random
import re
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from typing import IO, TYPE_CHECKING, Any, Final, NamedTuple, TypeVar

from inshrink_core.archive.storage.behind import UploadedStorage
from inshrink_core.archive.storage.contract import Creation, Lock, Storage, Tag, checked
from inshrink_core.errors import DamagedError, InputError, InshrinkError, MissingExtraError, StorageError
from inshrink_core.execution import is_temporary, temporary_name
from inshrink_core.execution.mirror import OPEN_AGAIN, Listed

if TYPE_CHECKING:
    from obstore.store import AzureStore, GCSStore, S3Store

    Store = S3Store | GCSStore | AzureStore

_T = TypeVar("_T")

LARGE_NBYTES: Final = 256 << 20
"""Larger objects are uploaded in pieces; what is smaller is one request, which is made again as a whole."""

_PIECE_NBYTES: Final = 16 << 20
_MOST_COPIED_NBYTES: Final = 5 << 30
"""S3 copies no more in one request."""

_END_NBYTES: Final = 64 << 10
_MAX_PIECES: Final = 9_000
"""S3 takes 10,000."""

_N_PIECES: Final = 12
_IN_FLIGHT_NBYTES: Final = 256 << 20
"""So many pieces are on their way at a time, and no more than this in memory, but for one piece."""

_LISTED_AT_ONCE: Final = 1000
"""No store lists more."""

_HELD_NBYTES: Final = 8 << 20
"""What is being written is held in memory up to here, and on the disk beyond."""

_N_ATTEMPTS: Final = 6
_PAUSE_S: Final = 0.1
_PATIENCE_S: Final = 10.0
"""What took longer, obstore has repeated."""

_RETRY: Final[Any] = {
    "max_retries": 6,
    "retry_timeout": timedelta(seconds=60),
    "backoff": {"init_backoff": timedelta(seconds=0.2), "max_backoff": timedelta(seconds=10), "base": 2.0},
}
_TIMEOUTS: Final[Any] = {"connect_timeout": timedelta(seconds=10), "timeout": timedelta(minutes=10)}
_STALE: Final = timedelta(days=7)
"""No upload takes longer: what is unfinished and older was left by somebody who died."""

_OWNER: Final = "inshrinkwriter"
"""Metadata of an object: who created it, so that a request whose answer was lost is known again."""

_SECRETS: Final = re.compile(r"(?i)[?&](x-amz-|x-goog-|sig=|sv=|se=|token|awsaccesskeyid|signature|key=)")
_BUCKET: Final = re.compile(r"[A-Za-z0-9$:._-]+")
_CODE: Final = re.compile(r"<Code>([A-Za-z]+)</Code>")
_STATUS: Final = re.compile(r"status code: (\d{3})")
_URL: Final = re.compile(r"\S+://\S+")

_VARIABLES: Final = {
    "s3": "AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and AWS_REGION",
    "gs": "GOOGLE_APPLICATION_CREDENTIALS",
    "az": "AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY",
}
"""What tells who one is, by scheme; `docs/buckets.md` has the others."""


class _Refusal(NamedTuple):
    """What a store says, and what it means; `{}` is what tells who one is."""

    said: str
    what: str
    remedy: str


_REFUSALS: Final = (
    _Refusal(
        r"NoSuchBucket|ContainerNotFound|[Bb]ucket does not exist",
        "there is no such bucket",
        "make it, or mend the address",
    ),
    _Refusal(r"InvalidBucketName|InvalidResourceName", "no bucket can have this name", "mend the address"),
    _Refusal(
        r"InvalidObjectState|BlobArchived",
        "the object is in a storage class that must be thawed first",
        "restore it by the bucket's own tools, and run it again",
    ),
    _Refusal(
        r"RequestTimeTooSkewed|RequestExpired|Date header.*old|not yet valid",
        "the clock of this machine differs too much from the store's",
        "set the clock",
    ),
    _Refusal(
        r"169\.254\.169\.254|metadata\.google|"
        r"[Mm]issing.*([Cc]redential|[Aa]ccount)|must be specified",
        "no credentials were found",
        "set {} in the environment",
    ),
    _Refusal(
        r"InvalidAccessKeyId|SignatureDoesNotMatch|InvalidToken|ExpiredToken|TokenRefreshRequired|"
        r"AuthenticationFailed|failed to authenticate|InvalidAuthenticationInfo|Unauthenticated|"
        r"status code: 401|invalid_grant|Error decoding key|InvalidKey|Invalid Access Key",
        "the store does not accept the credentials",
        "set {} in the environment to credentials that are valid",
    ),
    _Refusal(
        r"PermanentRedirect|AuthorizationHeaderMalformed|IllegalLocationConstraint|status code: 301",
        "the bucket lies in another region",
        "set AWS_REGION in the environment to the bucket's",
    ),
    _Refusal(
        r"AccessDenied|AuthorizationPermissionMismatch|AuthorizationFailure|PermissionDenied|InvalidAccessPoint|"
        r"KMS|status code: 403",
        "the store denies it",
        "let these credentials list, read, write and delete there",
    ),
    _Refusal(
        r"builder error",
        "the address of the store cannot be used",
        "look at the endpoint in the environment",
    ),
    _Refusal(
        r"error sending request|kind: (Connect|Timeout|Request|Interrupted)|timed out|dns error|"
        r"connection closed|error decoding response body|Http\(",
        "the store cannot be reached",
        "look at the network, and run it again: what was there before is intact",
    ),
    _Refusal(
        r"SlowDown|ServerBusy|ServiceUnavailable|InternalError|status code: (429|5\d\d)",
        "the store is overloaded, or out of order",
        "run it again later: what was there before is intact",
    ),
)
_PASSING: Final = frozenset(refusal.what for refusal in _REFUSALS[-2:])
"""Refusals that another attempt may not meet."""


class ObjectRefusedError(StorageError):
    """What a store refused; `passing` tells whether it may do it when it is asked again."""

    passing = False


def _refused(error: Exception, scheme: str, where: str) -> ObjectRefusedError:
    """Return what a store's answer means, in one line and without what may be secret in it."""
    text = f"{type(error).__name__}: {error}"
    for said, what, remedy in _REFUSALS:
        if re.search(said, text):
            found = ObjectRefusedError(
                what, where=where, remedy=remedy.format(_VARIABLES.get(scheme, "the credentials"))
            )
            found.passing = what in _PASSING
            return found
    code, status = _CODE.search(text), _STATUS.search(text)
    told = [match[1] for match in (status, code) if match]
    reason = " ".join(told) or _URL.sub("…", str(error).partition("\n")[0])[:200]
    return ObjectRefusedError(
        f"the object store refused: {reason}", where=where, remedy="check address, access and network"
    )


def _parsed(url: str) -> tuple[str, str, str]:
    """Return scheme, bucket and the path in it: all of the rest, as it is spelled.

    Raises
    ------
    InputError
        There is no bucket, or something in it that may be secret; the message does not have it.
    """
    scheme, _, rest = url.partition("://")
    bucket, _, root = rest.partition("/")
    hint = f"credentials come from the environment alone: set {_VARIABLES.get(scheme.lower(), 'them')} there"
    if "@" in bucket or _SECRETS.search(rest):
        raise InputError("an address must not hold credentials", where=f"{scheme}://…", remedy=hint)
    if not bucket:
        raise InputError("the address names no bucket", where=url, expected=f"{scheme}://BUCKET/ARCHIVE")
    if not _BUCKET.fullmatch(bucket):  # the client panics
        raise InputError(
            "no bucket can have this name", where=url, expected="letters, digits, hyphens and dots"
        )
    return scheme.lower(), bucket, root.strip("/")


def make_store(scheme: str, bucket: str) -> Store:
    """Return obstore's client of a bucket, which takes all else from the environment."""
    try:
        from obstore import store
    except ImportError as error:
        raise MissingExtraError("obstore", "remote") from error
    endpoint = next((value for name in _ENDPOINTS[scheme] if (value := os.environ.get(name))), "")
    plain = endpoint.startswith("http://") or os.environ.get("AZURE_STORAGE_USE_EMULATOR", "") in (
        "1",
        "true",
    )
    options: Any = {**_TIMEOUTS, "allow_http": plain}
    if scheme == "s3":
        retry = _RETRY
        if not any(map(os.environ.get, _AWS_CREDENTIALS)):
            # Whatever else the machine may give is asked of a service that is not there on most.
            options["connect_timeout"], retry = timedelta(seconds=2), {**_RETRY, "max_retries": 1}
        return store.S3Store(
            bucket, client_options=options, retry_config=retry, copy_if_not_exists="multipart"
        )
    kind: Any = {"gs": store.GCSStore, "az": store.AzureStore}[scheme]
    made: Store = kind(bucket, client_options=options, retry_config=_RETRY)
    return made


_AWS_CREDENTIALS: Final = (
    "AWS_ACCESS_KEY_ID", "AWS_WEB_IDENTITY_TOKEN_FILE", "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
    "AWS_CONTAINER_CREDENTIALS_FULL_URI", "AWS_SKIP_SIGNATURE",
)  # fmt: skip


_ENDPOINTS: Final = {
    "s3": ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT"),
    "gs": ("GOOGLE_BASE_URL",),
    "az": ("AZURE_STORAGE_ENDPOINT", "AZURE_ENDPOINT"),
}
_MAKING: Final = threading.Lock()


@functools.cache
def _store_of(scheme: str, bucket: str) -> Store:
    return make_store(scheme, bucket)


_PROVEN: Final[set[tuple[int, str]]] = set()
"""Stores of this process that were seen to compare before they write, and the buckets."""

_ALONE: Final[set[str]] = set()


def declare_single_writer(name: str) -> None:
    """Say that nobody but this process writes at an address: its store need not compare before it writes."""
    _ALONE.add(name.rstrip("/"))


class ObjectStorage(UploadedStorage):
    """A folder of a bucket, each file an object.

    Parameters
    ----------
    name
        Its URL; taken literally, without escapes.

    Raises
    ------
    InputError
        There are credentials in it, or no bucket.

    Notes
    -----
    Objects are created if there are none (``If-None-Match``) and replaced by their tag (``If-Match``). There
    is no lock: of two writers, the second is refused. A store that does not compare is found out before the
    first object is written to it, and refused.
    """

    gathers = True

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.scheme, self.bucket, self._root = _parsed(name)

    @functools.cached_property
    def store(self) -> Any:
        """The client, which is shared by all storages of a bucket."""
        with _MAKING, self._told():
            return _store_of(self.scheme, self.bucket)

    def key(self, path: str) -> str:
        """Return what an object is called in the bucket."""
        return f"{self._root}/{checked(path)}".lstrip("/")

    @property
    def is_alone(self) -> bool:
        """Whether this process was said to be the only one that writes here."""
        name = self.name.rstrip("/")
        return any(name == one or name.startswith(f"{one}/") for one in _ALONE)

    @contextlib.contextmanager
    def _told(self) -> Iterator[None]:
        """Turn what the store refuses into our own errors; what it says may hold secrets and is not kept."""
        refused: Exception | None = None
        try:
            yield
        except FileNotFoundError as error:
            if not re.search(_REFUSALS[0].said, str(error)):
                refused = FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), self.name)
            else:
                refused = _refused(error, self.scheme, self.name)
        except (InshrinkError, KeyboardInterrupt):
            raise
        except Exception as error:
            if type(error).__name__ in ("AlreadyExistsError", "PreconditionError"):
                raise
            refused = _refused(error, self.scheme, self.name)
        if refused is not None:
            raise refused

    def _patiently(self, act: Callable[[], _T]) -> _T:
        """Do what may be repeated, again after what may pass: what obstore has not repeated by itself."""
        begun = time.monotonic()
        for attempt in range(_N_ATTEMPTS):
            try:
                with self._told():
                    return act()
            except ObjectRefusedError as error:
                late = attempt == _N_ATTEMPTS - 1 or time.monotonic() - begun > _PATIENCE_S
                if late or not error.passing:
                    raise
            time.sleep(random.uniform(0.5, 1) * _PAUSE_S * 3**attempt)
        raise AssertionError

    # ---- reading ---------------------------------------------------------------------------------

    def read(self, path: str, offset: int, nbytes: int) -> bytes:
        """Return `nbytes` bytes from `offset`, fewer only where the object ends; one request."""
        key = self.key(path)
        if nbytes <= 0:
            return b""
        try:
            content = self._patiently(lambda: bytes(self.store.get_range(key, start=offset, length=nbytes)))
        except ObjectRefusedError:
            if offset < self.size(path):
                raise
            return b""
        return self.counted(content)

    def suffix(self, path: str, nbytes: int) -> tuple[bytes, int]:
        """Return the last bytes of an object, and its size; one request where the store has such ranges."""
        key = self.key(path)
        if self.scheme == "az" or nbytes <= 0:
            return super().suffix(path, nbytes)

        def ask() -> tuple[bytes, int]:
            result = self.store.get(key, options={"range": {"suffix": nbytes}})
            return bytes(result.bytes()), result.meta["size"]

        try:
            content, size = self._patiently(ask)
        except ObjectRefusedError:
            if self.size(path):
                raise
            return b"", 0
        return self.counted(content), size

    def size(self, path: str) -> int:
        """Return the size of an object in bytes."""
        key = self.key(path)
        try:
            return int(self._patiently(lambda: self.store.head(key))["size"])
        except ObjectRefusedError:
            # An answer to HEAD has no body, which would say why.
            self._patiently(lambda: self.store.get_range(key, start=0, length=1))
            raise

    def names(self, folder: str) -> tuple[str, ...]:
        """Return every name in a folder."""
        at = self.key(folder) if folder else self._root
        found = self._patiently(lambda: self.store.list_with_delimiter(at))
        keys = [*found["common_prefixes"], *(one["path"] for one in found["objects"])]
        return tuple(key.rstrip("/").rpartition("/")[2] for key in keys)

    def whole(self, path: str) -> bytes:
        """Return all of an object, of one state."""
        return self.load(path)[0]

    def objects(self, path: str = "") -> Iterator[Listed]:
        """Return every object below this address, or the one that a path names; a request for a thousand."""
        if path:
            key = f"{self._root}/{path}".lstrip("/")
            with contextlib.suppress(FileNotFoundError):
                yield self._listed(self._patiently(lambda: self.store.head(key)))
            self.counted()
            return
        # As a whole: after an error in the middle, what follows would be missing.
        for chunk in self._patiently(
            lambda: list(self.store.list(self._root or None, chunk_size=_LISTED_AT_ONCE))
        ):
            self.counted()
            yield from map(self._listed, chunk)

    def _listed(self, meta: Any) -> Listed:
        path = meta["path"].removeprefix(f"{self._root}/") if self._root else meta["path"]
        return Listed(path, meta["size"], _tag(meta), meta["last_modified"].timestamp())

    def read_listed(self, one: Listed, offset: int, nbytes: int) -> bytes:
        """Return bytes of an object if its ETag is still that of the listing; one request."""
        key = f"{self._root}/{one.path}".lstrip("/")
        expected = _version(Tag(one.tag))["e_tag"]
        options = {"range": (offset, offset + nbytes), "if_match": expected}

        def ask() -> tuple[bytes, str]:
            result = self.store.get(key, options=options)
            return bytes(result.bytes()), str(result.meta["e_tag"])

        try:
            content, found = self._patiently(ask)
        except FileNotFoundError:
            raise
        except Exception as error:
            if type(error).__name__ != "PreconditionError":
                raise
        else:
            self.counted(content)
            # Some stores ignore the condition without a word.
            if found.strip('"') == expected.strip('"'):
                return content
        raise DamagedError(
            "the object changed since it was listed", where=f"{self.name}/{one.path}", remedy=OPEN_AGAIN
        )

    # ---- writing ---------------------------------------------------------------------------------

    def lock(self) -> Lock:
        """Return a right to write that keeps nobody out."""
        return Lock()

    def load(self, path: str) -> tuple[bytes, Tag]:
        """Return the content of an object, and its ETag."""
        key = self.key(path)

        def ask() -> tuple[bytes, Tag]:
            result = self.store.get(key)
            return bytes(result.bytes()), _tag(result.meta)

        content, tag = self._patiently(ask)
        return self.counted(content), tag

    def create(self, path: str, *, over: bool = False) -> Creation:
        """Begin an object, which is held here and uploaded when it is committed."""
        self.key(path)
        return _NewObject(self, path, over=over)

    def upload(self, path: str, file: IO[bytes], *, over: bool = False) -> None:
        """Make an object of a file: whole, or not at all.

        Raises
        ------
        FileExistsError
            There is one of another writer.
        """
        key = self.key(path)
        nbytes = file.seek(0, os.SEEK_END)
        if not over:
            self.require_conditions()
        if over or self.is_alone:
            if not over and self._is_there(path):
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path)
            self._send(key, file, nbytes)
        elif nbytes > LARGE_NBYTES:
            self._create_large(path, file, nbytes)
        else:
            self._create(key, _as_buffer(file, nbytes))

    def _is_there(self, path: str) -> bool:
        try:
            self.size(path)
        except FileNotFoundError:
            return False
        return True

    def _send(self, key: str, file: IO[bytes], nbytes: int) -> None:
        """Upload a file over what is there, large ones in pieces."""
        piece = max(_PIECE_NBYTES, -(-nbytes // _MAX_PIECES))
        at_once = max(1, min(_N_PIECES, _IN_FLIGHT_NBYTES // piece))

        def send() -> None:
            file.seek(0)
            self.store.put(key, file, chunk_size=piece, max_concurrency=at_once)

        self._patiently(lambda: _completed(send))

    def _create(self, key: str, content: Any) -> None:
        """Create an object by one request; one whose answer was lost is known by its owner."""
        owner = uuid.uuid4().hex
        try:
            self._patiently(lambda: self.store.put(key, content, mode="create", attributes={_OWNER: owner}))
        except Exception as error:
            if type(error).__name__ != "AlreadyExistsError":
                raise
        else:
            return
        found = self._patiently(lambda: self.store.get(key, options={"head": True}).attributes)
        if found.get(_OWNER) != owner:
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), key)

    def claim(self, path: str, file: IO[bytes]) -> None:
        """Make an object of a file whose name no other writer uses again; large ones go there in pieces.

        An upload in pieces has no condition. So the name is taken first, by a small object that says whose it
        is: another writer finds it taken, and whoever goes on with the same file after a crash knows it
        again. An archive lists a frame only when it is whole, and gives no name twice.

        Raises
        ------
        FileExistsError
            There is one of another writer.
        """
        nbytes = file.seek(0, os.SEEK_END)
        if nbytes <= LARGE_NBYTES or self.is_alone:
            self.upload(path, file)
            return
        self.require_conditions()
        token = _token(file, nbytes)
        try:
            self._create(self.key(path), token)
        except FileExistsError:
            if self.size(path) != len(token) or self.load(path)[0] != token:
                raise
        self._send(self.key(path), file, nbytes)

    def _create_large(self, path: str, file: IO[bytes], nbytes: int) -> None:
        """Upload in pieces under an unfinished name, and let the store copy it to its own if that is free."""
        if nbytes > _MOST_COPIED_NBYTES and self.scheme == "s3":
            try:
                self.claim(path, file)
            except FileExistsError:
                raise
            except BaseException:
                self.delete(path)  # here no writer goes on
                raise
            return
        folder, _, name = path.rpartition("/")
        unfinished = self.key("x")[:-1] + f"{folder}/{temporary_name(f'{name}.{uuid.uuid4().hex}')}".lstrip(
            "/"
        )
        try:
            self._send(unfinished, file, nbytes)
            self._patiently(
                lambda: _completed(lambda: self.store.copy(unfinished, self.key(path), overwrite=False))
            )
        except Exception as error:
            if type(error).__name__ != "AlreadyExistsError":
                raise
            if not self.holds(path, file):  # or its answer was lost
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path) from None
        finally:
            with contextlib.suppress(InshrinkError, OSError):
                self._patiently(lambda: self.store.delete(unfinished))

    def replace(self, path: str, content: bytes, expected: Tag | None) -> Tag:
        """Give an object new content, if its tag is the one expected; one request."""
        key = self.key(path)
        self.require_conditions()
        content = bytes(content)
        mode: Any = "create" if expected is None else _version(expected)
        if self.is_alone:
            try:
                found: Tag | None = self.load(path)[1]
            except FileNotFoundError:
                found = None
            if found != expected:
                raise self.overtaken(path)
            mode = "overwrite"
        try:
            return _tag(self._patiently(lambda: self.store.put(key, content, mode=mode)))
        except FileNotFoundError:  # of an update: there is none
            raise self.overtaken(path) from None
        except Exception as error:
            if type(error).__name__ not in ("AlreadyExistsError", "PreconditionError"):
                raise
        # Of a request that was repeated, the first may have been carried out.
        with contextlib.suppress(FileNotFoundError):
            there, tag = self.load(path)
            if there == content and tag != expected:
                return tag
        raise self.overtaken(path)

    def delete(self, path: str) -> None:
        """Remove an object; harmless where there is none."""
        key = self.key(path)
        with contextlib.suppress(FileNotFoundError):
            self._patiently(lambda: self.store.delete(key))

    def recover(self, folders: tuple[str, ...]) -> None:
        """Remove what was left unfinished a week ago; what is younger, somebody may be uploading."""
        for folder in folders:
            at = self.key(folder) if folder else self._root
            found = self._patiently(lambda at=at: self.store.list_with_delimiter(at))  # type: ignore[misc]
            for one in found["objects"]:
                name, age = one["path"].rpartition("/")[2], datetime.now(UTC) - one["last_modified"]
                if is_temporary(name) and age > (_STALE / 100 if name.startswith(".probe-") else _STALE):
                    self._patiently(lambda key=one["path"]: self.store.delete(key))  # type: ignore[misc]

    def written(self) -> Storage:
        """Return what a writer uses; refuse a store that does not compare."""
        self.require_conditions()
        return super().written()

    def require_conditions(self) -> None:
        """Refuse a store that does not compare before it writes.

        Raises
        ------
        StorageError
            It does not, or it cannot be written.
        """
        if self.is_alone or (id(self.store), self.bucket) in _PROVEN:
            return
        key = f"{self._root}/{temporary_name(f'probe-{uuid.uuid4().hex}')}".lstrip("/")
        try:
            self._create(key, b"first")
            compares = not self._takes(key, b"second", "create") and not self._takes(
                key, b"third", _version(Tag(' "d41d8cd98f00b204e9800998ecf8427e"'))
            )
        finally:
            with contextlib.suppress(InshrinkError, OSError):
                self._patiently(lambda: self.store.delete(key))
        if not compares:
            raise StorageError(
                "the store does not compare before it writes: two writers would destroy each other's work",
                where=self.name,
                remedy="take another store, or say that nobody else writes there: --single-writer",
            )
        _PROVEN.add((id(self.store), self.bucket))

    def _takes(self, key: str, content: bytes, mode: Any) -> bool:
        """Tell whether the store writes an object under a condition."""
        try:
            self._patiently(lambda: self.store.put(key, content, mode=mode))
        except FileNotFoundError:
            return False
        except Exception as error:
            if type(error).__name__ not in ("AlreadyExistsError", "PreconditionError"):
                raise
            return False
        return True


def _completed(upload: Callable[[], None]) -> None:
    """Upload in pieces; where it was completed and the answer lost, the store does not know them any more."""
    try:
        upload()
    except Exception as error:
        if re.search("NoSuchUpload|InvalidBlockList", str(error)):  # of S3, of Azure
            raise ConnectionError("error sending request: the upload was completed already") from None
        raise


def _tag(meta: Any) -> Tag:
    return Tag(f"{meta.get('version') or ''} {meta['e_tag']}")


def _version(tag: Tag) -> Any:
    version, _, e_tag = tag.rpartition(" ")
    return {"e_tag": e_tag, **({"version": version} if version else {})}


def _token(file: IO[bytes], nbytes: int) -> bytes:
    """Return what stands for a file: its ends, where a frame has its id and its checksums, and its size."""
    ends = []
    for offset in (0, max(0, nbytes - _END_NBYTES)):
        file.seek(offset)
        ends.append(file.read(_END_NBYTES))
    return b"inshrink: this is being uploaded\n" + hashlib.sha256(b"%d " % nbytes + b"".join(ends)).digest()


def _as_buffer(file: IO[bytes], nbytes: int) -> Any:
    """Return the content of a file to send; a larger one is on the disk, and is not read into memory."""
    file.seek(0)
    if nbytes <= _HELD_NBYTES:
        return file.read()
    # Closed by whoever has it last: the client may hold it for a moment longer.
    return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)


class _NewObject(Creation):
    """Bytes that become an object."""

    def __init__(self, storage: ObjectStorage, path: str, *, over: bool) -> None:
        self._storage, self._path, self._over = storage, path, over
        self._file: IO[bytes] | None = tempfile.SpooledTemporaryFile(_HELD_NBYTES)  # noqa: SIM115

    def write(self, content: bytes | bytearray | memoryview) -> None:
        """Append bytes."""
        if self._file is not None:
            self._file.write(content)

    def commit(self) -> None:
        """Upload the object."""
        try:
            if self._file is not None:
                self._storage.upload(self._path, self._file, over=self._over)
        finally:
            self.abort()

    def abort(self) -> None:
        """Let the bytes go."""
        file, self._file = self._file, None
        if file is not None:
            file.close()
