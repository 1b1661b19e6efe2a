"""Archives in buckets, through obstore."""

from __future__ import annotations

import contextlib
import errno
import functools
import hashlib
import mmap
import os
import random
import re
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from typing import IO, Any, Final, TypeVar

from inshrink_core.archive.storage.contract import Tag, checked
from inshrink_core.archive.storage.uploads import UploadedStorage
from inshrink_core.errors import (
    DamagedError,
    InputError,
    InshrinkError,
    MissingExtraError,
    StorageError,
)
from inshrink_core.execution.files import is_temporary, temporary_name
from inshrink_core.execution.mirror import OPEN_AGAIN, Listed

_T = TypeVar("_T")

LARGE_NBYTES: Final = 256 << 20
"""Larger objects are uploaded in parts; smaller ones take one request, repeated as a whole on failure."""

_PIECE_NBYTES: Final = 16 << 20
_END_NBYTES: Final = 64 << 10
_MAX_PIECES: Final = 9_000
"""The limit of S3 is 10,000."""

_N_PIECES: Final = 12
_IN_FLIGHT_NBYTES: Final = 256 << 20
"""Pieces uploaded at a time, and most bytes of them in memory, plus one piece."""

_LISTED_AT_ONCE: Final = 1000
"""The page size of all stores."""

_N_ATTEMPTS: Final = 6
_PAUSE_S: Final = 0.1
_PATIENCE_S: Final = 10.0
"""obstore itself has retried requests that took longer."""

_RETRY: Final[Any] = {
    "max_retries": 6,
    "retry_timeout": timedelta(seconds=60),
    "backoff": {"init_backoff": timedelta(seconds=0.2), "max_backoff": timedelta(seconds=10), "base": 2.0},
}
_TIMEOUTS: Final[Any] = {"connect_timeout": timedelta(seconds=10), "timeout": timedelta(minutes=10)}
_STALE: Final = timedelta(hours=2)
"""Age at which remains of an interrupted probe of the store are deleted."""

_OWNER: Final = "inshrinkwriter"
"""Metadata of an object: a unique id of its creator, which identifies a request whose response was lost."""

_SECRETS: Final = re.compile(r"(?i)[?&](x-amz-|x-goog-|sig=|sv=|se=|token|awsaccesskeyid|signature|key=)")
_BUCKET: Final = re.compile(r"[A-Za-z0-9$:._-]+")
_CODE: Final = re.compile(r"<Code>([A-Za-z]+)</Code>")
_STATUS: Final = re.compile(r"status code: (\d{3})")
_URL: Final = re.compile(r"\S+://\S+")
_CONDITIONS: Final = ("AlreadyExistsError", "PreconditionError")

_VARIABLES: Final = {
    "s3": "AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and AWS_REGION",
    "gs": "GOOGLE_APPLICATION_CREDENTIALS",
    "az": "AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY",
}
"""Credentials by scheme; `docs/buckets.md` lists the others."""

_AWS_CREDENTIALS: Final = (
    "AWS_ACCESS_KEY_ID", "AWS_WEB_IDENTITY_TOKEN_FILE", "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
    "AWS_CONTAINER_CREDENTIALS_FULL_URI", "AWS_SKIP_SIGNATURE",
)  # fmt: skip

_REFUSALS: Final = (
    (
        r"NoSuchBucket|ContainerNotFound|[Bb]ucket does not exist",
        "there is no such bucket",
        "create it, or correct the address",
    ),
    (r"InvalidBucketName|InvalidResourceName", "no bucket can have this name", "correct the address"),
    (
        r"InvalidObjectState|BlobArchived",
        "the object is in a storage class that must be thawed first",
        "restore it by the bucket's own tools, and run it again",
    ),
    (
        r"RequestTimeTooSkewed|RequestExpired|Date header.*old|not yet valid",
        "the clock of this machine differs too much from the store's",
        "set the clock",
    ),
    (
        r"169\.254\.169\.254|metadata\.google|"
        r"[Mm]issing.*([Cc]redential|[Aa]ccount)|must be specified",
        "no credentials were found",
        "set {} in the environment",
    ),
    (
        r"InvalidAccessKeyId|SignatureDoesNotMatch|InvalidToken|ExpiredToken|TokenRefreshRequired|"
        r"AuthenticationFailed|failed to authenticate|InvalidAuthenticationInfo|Unauthenticated|"
        r"status code: 401|invalid_grant|Error decoding key|InvalidKey|Invalid Access Key",
        "the store does not accept the credentials",
        "set {} in the environment to credentials that are valid",
    ),
    (
        r"PermanentRedirect|AuthorizationHeaderMalformed|IllegalLocationConstraint|status code: 301",
        "the bucket is in another region",
        "set AWS_REGION in the environment to the bucket's",
    ),
    (
        r"AccessDenied|AuthorizationPermissionMismatch|AuthorizationFailure|PermissionDenied|InvalidAccessPoint|"
        r"KMS|status code: 403",
        "the store denies it",
        "let these credentials list, read, write and delete there",
    ),
    (r"builder error", "the address of the store cannot be used", "look at the endpoint in the environment"),
    (
        r"error sending request|kind: (Connect|Timeout|Request|Interrupted)|timed out|dns error|"
        r"connection closed|error decoding response body|Http\(",
        "the store cannot be reached",
        "look at the network, and run it again: what was there before is intact",
    ),
    (
        r"SlowDown|ServerBusy|ServiceUnavailable|InternalError|status code: (429|5\d\d)",
        "the store is overloaded, or out of order",
        "run it again later: what was there before is intact",
    ),
)
"""Error patterns of stores, their meaning, and the remedy; `{}` becomes the credentials of the scheme."""
_NO_BUCKET: Final = _REFUSALS[0][0]
_PASSING: Final = frozenset(what for _, what, _ in _REFUSALS[-2:])
"""Refusals that may be temporary."""


class ObjectRefusedError(StorageError):
    """A store refused a request; `passing` is True if another attempt may succeed."""

    passing = False


def _refused(error: Exception, scheme: str, where: str) -> ObjectRefusedError:
    """Return the error for a store's response, in one line and without possible secrets."""
    text = f"{type(error).__name__}: {error}"
    for pattern, what, remedy in _REFUSALS:
        if re.search(pattern, text):
            remedy = remedy.format(_VARIABLES.get(scheme, "the credentials"))
            found = ObjectRefusedError(what, where=where, remedy=remedy)
            found.passing = what in _PASSING
            return found
    parts = [match[1] for match in (_STATUS.search(text), _CODE.search(text)) if match]
    reason = " ".join(parts) or _URL.sub("…", str(error).partition("\n")[0])[:200]
    return ObjectRefusedError(
        f"the object store refused: {reason}", where=where, remedy="check address, access and network"
    )


def _parsed(url: str) -> tuple[str, str, str]:
    """Return scheme, bucket and the literal path in the bucket.

    Raises
    ------
    InputError
        The URL has no bucket, or contains a possible secret, which the message omits.
    """
    scheme, _, rest = url.partition("://")
    bucket, _, root = rest.partition("/")
    hint = f"credentials come from the environment alone: set {_VARIABLES.get(scheme.lower(), 'them')} there"
    if "@" in bucket or _SECRETS.search(rest):
        raise InputError("an address must not hold credentials", where=f"{scheme}://…", remedy=hint)
    if not bucket:
        raise InputError("the address has no bucket", where=url, expected=f"{scheme}://BUCKET/ARCHIVE")
    if not _BUCKET.fullmatch(bucket):  # the client would panic
        raise InputError(
            "no bucket can have this name", where=url, expected="letters, digits, hyphens and dots"
        )
    return scheme.lower(), bucket, root.strip("/")


@functools.cache
def _store_of(scheme: str, bucket: str) -> Any:
    """Return obstore's client of a bucket, configured by the environment."""
    try:
        from obstore import store
    except ImportError as error:
        raise MissingExtraError("obstore", "remote") from error
    # Unencrypted only if the URL, or an endpoint in the environment, requests it.
    options: Any = {**_TIMEOUTS, "allow_http": True}
    retry: Any = _RETRY
    if scheme == "s3" and not any(map(os.environ.get, _AWS_CREDENTIALS)):
        # Other credentials come from a metadata service, which most machines lack.
        options["connect_timeout"], retry = timedelta(seconds=2), {**_RETRY, "max_retries": 1}
    kind: Any = {"s3": store.S3Store, "gs": store.GCSStore, "az": store.AzureStore}[scheme]
    return kind(bucket, client_options=options, retry_config=retry)


_MAKING: Final = threading.Lock()

_PROVEN: Final[set[tuple[int, str]]] = set()
"""Clients of this process that were verified to honour conditions, with their buckets."""


class ObjectStorage(UploadedStorage):
    """A folder of a bucket; each file is an object.

    Parameters
    ----------
    name
        Its URL; taken literally, without escapes.

    Raises
    ------
    InputError
        The URL contains credentials, or no bucket.

    Notes
    -----
    Objects are created if absent (``If-None-Match``) and replaced by tag (``If-Match``). The storage has no
    lock: of two writers, the second is refused. Before the first write, a probe detects and refuses a store
    that ignores conditions.
    """

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.scheme, self.bucket, self._root = _parsed(name)

    @functools.cached_property
    def store(self) -> Any:
        """The client, shared by all storages of a bucket."""
        with _MAKING, self._errors():
            return _store_of(self.scheme, self.bucket)

    def key(self, path: str) -> str:
        """Return the key of an object in the bucket."""
        return f"{self._root}/{checked(path)}".lstrip("/")

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        """Convert the store's errors to Inshrink's errors, without their text, which may contain secrets.

        An unmet condition becomes a FileExistsError.
        """
        refused: Exception | None = None
        try:
            yield
        except (InshrinkError, KeyboardInterrupt):
            raise
        except Exception as error:
            if type(error).__name__ in _CONDITIONS:
                refused = FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), self.name)
            elif isinstance(error, FileNotFoundError) and not re.search(_NO_BUCKET, str(error)):
                refused = FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), self.name)
            else:
                refused = _refused(error, self.scheme, self.name)
        if refused is not None:
            raise refused

    def _retrying(self, act: Callable[[], _T]) -> _T:
        """Repeat a request that failed temporarily, unless obstore has repeated it."""
        begun = time.monotonic()
        for attempt in range(_N_ATTEMPTS):
            try:
                with self._errors():
                    return act()
            except ObjectRefusedError as error:
                late = attempt == _N_ATTEMPTS - 1 or time.monotonic() - begun > _PATIENCE_S
                if late or not error.passing:
                    raise
            time.sleep(random.uniform(0.5, 1) * _PAUSE_S * 3**attempt)
        raise AssertionError

    # ---- reading ---------------------------------------------------------------------------------

    def _get(self, key: str, **options: Any) -> tuple[bytes, Any]:
        """Return an object, or the range that `options` select, and its metadata; one request."""

        def get() -> tuple[bytes, Any]:
            result = self.store.get(key, options=options)
            return bytes(result.bytes()), result.meta

        content, meta = self._retrying(get)
        return self.counted(content), meta

    def read(self, path: str, offset: int, nbytes: int) -> bytes:
        """Return `nbytes` bytes from `offset`, or fewer at the end of the object; one request."""
        key = self.key(path)
        if nbytes <= 0:
            return b""
        try:
            return self._get(key, range=(offset, offset + nbytes))[0]
        except ObjectRefusedError:
            if offset < self.size(path):
                raise
            return b""

    def size(self, path: str) -> int:
        """Return the size of an object in bytes."""
        key = self.key(path)
        try:
            return int(self._retrying(lambda: self.store.head(key))["size"])
        except ObjectRefusedError:
            # A response to HEAD has no body to explain the error.
            self._get(key, range=(0, 1))
            raise

    def names(self, folder: str) -> tuple[str, ...]:
        """Return every name in a folder."""
        at = self.key(folder) if folder else self._root
        found = self._retrying(lambda: self.store.list_with_delimiter(at))
        keys = [*found["common_prefixes"], *(listed["path"] for listed in found["objects"])]
        return tuple(key.rstrip("/").rpartition("/")[2] for key in keys)

    def objects(self, path: str = "") -> Iterator[Listed]:
        """Return every object below this address, or that of `path`; one request per thousand objects."""
        if path:
            key = f"{self._root}/{path}".lstrip("/")
            with contextlib.suppress(FileNotFoundError):
                yield self._listed(self._retrying(lambda: self.store.head(key)))
            self.counted()
            return
        # List all chunks at once: after an error between two chunks, the rest would be missing.
        for chunk in self._retrying(
            lambda: list(self.store.list(self._root or None, chunk_size=_LISTED_AT_ONCE))
        ):
            self.counted()
            yield from map(self._listed, chunk)

    def _listed(self, meta: Any) -> Listed:
        path = meta["path"].removeprefix(f"{self._root}/") if self._root else meta["path"]
        return Listed(path, meta["size"], _tag(meta), meta["last_modified"].timestamp())

    def read_listed(self, listed: Listed, offset: int, nbytes: int) -> bytes:
        """Return bytes of an object if its ETag still equals that of the listing; one request."""
        key = f"{self._root}/{listed.path}".lstrip("/")
        expected = _version(Tag(listed.tag))["e_tag"]
        with contextlib.suppress(FileExistsError):
            content, meta = self._get(key, range=(offset, offset + nbytes), if_match=expected)
            # Some stores ignore the condition silently.
            if str(meta["e_tag"]).strip('"') == expected.strip('"'):
                return content
        raise DamagedError(
            "the object changed since it was listed", where=f"{self.name}/{listed.path}", remedy=OPEN_AGAIN
        )

    def load(self, path: str) -> tuple[bytes, Tag]:
        """Return the content of an object, and its ETag."""
        content, meta = self._get(self.key(path))
        return content, _tag(meta)

    # ---- writing ---------------------------------------------------------------------------------

    def _put(self, key: str, content: Any, mode: Any, **options: Any) -> Any:
        """Write an object under a condition; one request."""
        return self._retrying(lambda: self.store.put(key, content, mode=mode, **options))

    def upload(self, path: str, file: IO[bytes], *, over: bool = False) -> None:
        """Upload a file as an object if the name is free; large files in parts.

        A multipart upload has no condition. Therefore a small object that identifies the file takes the name
        first: another writer finds the name taken, and a writer that repeats the same file after a crash
        recognizes it. An archive lists a frame only when it is complete, and uses no name twice.

        Raises
        ------
        FileExistsError
            The name belongs to another writer's object.
        """
        key = self.key(path)
        nbytes = file.seek(0, os.SEEK_END)
        if over:
            self._send(key, file, nbytes)
            return
        self.require_conditions()
        if nbytes <= LARGE_NBYTES:
            # Closed with its last reference: the client may use it a moment longer. Nothing cannot be mapped.
            self._create(key, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if nbytes else b"")
            return
        token = _token(file, nbytes)
        try:
            self._create(key, token)
        except FileExistsError:
            if self.size(path) != len(token) or self.load(path)[0] != token:
                raise
        try:
            self._send(key, file, nbytes)
        except BaseException:
            with contextlib.suppress(InshrinkError, OSError):
                self.delete(path)
            raise

    def _send(self, key: str, file: IO[bytes], nbytes: int) -> None:
        """Upload a file without a condition, a large one in parts."""
        piece = max(_PIECE_NBYTES, -(-nbytes // _MAX_PIECES))
        at_once = max(1, min(_N_PIECES, _IN_FLIGHT_NBYTES // piece))

        def send() -> None:
            file.seek(0)
            try:
                self.store.put(key, file, chunk_size=piece, max_concurrency=at_once)
            except Exception as error:
                # S3 and Azure answer so if the upload was completed, but its response lost.
                if re.search("NoSuchUpload|InvalidBlockList", str(error)):
                    raise ConnectionError("error sending request: the upload was completed") from None
                raise

        self._retrying(send)

    def _create(self, key: str, content: Any) -> None:
        """Create an object in one request; after a lost response, the owner id identifies it."""
        owner = uuid.uuid4().hex
        try:
            self._put(key, content, "create", attributes={_OWNER: owner})
        except FileExistsError:
            found = self._retrying(lambda: self.store.get(key, options={"head": True}).attributes)
            if found.get(_OWNER) != owner:
                raise

    def replace(self, path: str, content: bytes, expected: Tag | None) -> Tag:
        """Replace the content of an object if its tag is `expected`; one request."""
        key = self.key(path)
        self.require_conditions()
        content = bytes(content)
        try:
            return _tag(self._put(key, content, "create" if expected is None else _version(expected)))
        except FileNotFoundError:  # an update of an object that does not exist
            raise self.conflict(path) from None
        except FileExistsError:
            # The request may be a repetition of one that succeeded.
            with contextlib.suppress(FileNotFoundError):
                found, tag = self.load(path)
                if found == content and tag != expected:
                    return tag
        raise self.conflict(path)

    def delete(self, path: str) -> None:
        """Delete an object; does nothing if it does not exist."""
        self._delete(self.key(path))

    def _delete(self, key: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            self._retrying(lambda: self.store.delete(key))

    def recover(self, folders: tuple[str, ...]) -> None:
        """Delete the remains of interrupted probes."""
        found = self._retrying(lambda: self.store.list_with_delimiter(self._root))
        for listed in found["objects"]:
            age = datetime.now(UTC) - listed["last_modified"]
            if is_temporary(listed["path"].rpartition("/")[2]) and age > _STALE:
                self._delete(listed["path"])

    def written(self) -> Any:
        """Return the storage for a writer; refuse a store that ignores conditions."""
        self.require_conditions()
        return super().written()

    def require_conditions(self) -> None:
        """Refuse a store that ignores the conditions of writes.

        Raises
        ------
        StorageError
            The store ignores conditions, or cannot be written.
        """
        if (id(self.store), self.bucket) in _PROVEN:
            return
        key = f"{self._root}/{temporary_name(f'probe-{uuid.uuid4().hex}')}".lstrip("/")
        try:
            self._create(key, b"first")
            modes = "create", {"e_tag": "d41d8cd98f00b204e9800998ecf8427e"}
            ignores_conditions = False
            for mode in modes:
                with contextlib.suppress(FileExistsError, FileNotFoundError):
                    self._put(key, b"another", mode)
                    ignores_conditions = True
        finally:
            with contextlib.suppress(InshrinkError, OSError):
                self._delete(key)
        if ignores_conditions:
            raise StorageError(
                "the store does not compare before it writes: two writers would destroy each other's work",
                where=self.name,
                remedy="take another store",
            )
        _PROVEN.add((id(self.store), self.bucket))


def _tag(meta: Any) -> Tag:
    return Tag(f"{meta.get('version') or ''} {meta['e_tag']}")


def _version(tag: Tag) -> Any:
    version, _, e_tag = tag.rpartition(" ")
    return {"e_tag": e_tag, **({"version": version} if version else {})}


def _token(file: IO[bytes], nbytes: int) -> bytes:
    """Return an identifier of a file: a hash of its size and its ends, which hold id and checksums."""
    ends = []
    for offset in (0, max(0, nbytes - _END_NBYTES)):
        file.seek(offset)
        ends.append(file.read(_END_NBYTES))
    return b"inshrink: this is being uploaded\n" + hashlib.sha256(b"%d " % nbytes + b"".join(ends)).digest()
