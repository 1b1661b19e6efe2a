"""Remote folders as local folders: listed once, their bytes fetched on demand.

A mirror has a sparse local file for each remote object, with its size and a time but without its bytes, so
names, sizes and times are those of an ordinary folder. Bytes are read from a `Content`, the block cache of
one object. It fetches missing bytes of the listed version of the object, or raises an error.
"""

from __future__ import annotations

import atexit
import bisect
import contextlib
import glob
import hashlib
import os
import shutil
import tempfile
import threading
import weakref
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import count, islice
from operator import itemgetter
from pathlib import Path
from typing import Any, Final, NamedTuple

from inshrink_core.errors import (
    REMOTE_ADDRESSES,
    DamagedError,
    InputError,
    NotFoundError,
    StorageError,
    UnsafePathError,
)
from inshrink_core.execution.files import new_locked
from inshrink_core.execution.prefetch import Prefetcher
from inshrink_core.execution.results import user_cache_folder
from inshrink_core.plugins import plugin

STORAGES: Final = "inshrink.storages"
"""Entry point group of storages, one for each URL scheme."""

_FOLDER: Final = "fetched-runs"
"""Folder in the user's cache, with a folder for each mirror of each process, removed when it ends."""

_MARK: Final = f"{os.sep}{_FOLDER}{os.sep}.inshrink-"

MAX_HERE_NBYTES: Final = 16 << 30
"""Most fetched bytes to keep; beyond this, the least recently used contents are evicted."""

_BLOCK: Final = 4 << 10
_AHEAD_NBYTES: Final = 64 << 10
"""Transferring this much takes as long as a request: smaller reads and smaller gaps are extended to it."""

_SMALL_NBYTES: Final = 1 << 20
"""Smaller objects are fetched whole."""

_PIECE_NBYTES: Final = 8 << 20
_N_PIECES: Final = 8
"""Pieces fetched at the same time for one reader."""

OPEN_AGAIN: Final = "open the run again"

_MAX_OBJECTS: Final = 1_000_000
_MAX_NAME_BYTES: Final = 255


class Listed(NamedTuple):
    """An object of a listing.

    Parameters
    ----------
    path
        Path below the listed folder.
    nbytes
        Its size in bytes.
    tag
        Identifies its content; different contents have different tags.
    modified
        Modification time in seconds.
    """

    path: str
    nbytes: int
    tag: str
    modified: float


Assumed = tuple[int, bytes, int]
"""Assumed bytes of an object: their offset, the bytes, and the end of the region that they describe."""


class Content:
    """The block cache of one object, in an unnamed local file; any thread may read.

    Parameters
    ----------
    storage
        The object's storage (`inshrink_core.archive.storage.contract.Storage`).
    listed
        The object.
    where
        Its URL, for messages.
    folder
        Local folder for the bytes.
    assumed
        Assumptions in ascending order, which are compared before a read of their bytes or of their region.
    """

    def __init__(
        self, storage: Any, listed: Listed, where: str, folder: Path, assumed: list[Assumed]
    ) -> None:
        self._storage, self.listed, self._where, self.assumed = storage, listed, where, assumed
        self._have = bytearray(-(-listed.nbytes // _BLOCK))
        self._lock = threading.Lock()
        self.descriptor, name = tempfile.mkstemp(dir=folder)
        weakref.finalize(self, os.close, self.descriptor)
        Path(name).unlink()
        os.truncate(self.descriptor, listed.nbytes)
        """Open file to read from, after `fill` returned."""
        self.nbytes_here = self.used = 0
        """Number of cached bytes, and time of the last use by `_CLOCK`."""

    def fill(self, spans: Iterable[tuple[int, int]], *, compared: bool = True) -> None:
        """Fetch spans that are not cached, each an offset and a size; compare the bytes assumed there.

        Without `compared` nothing is compared; use it if no tensor is read.

        Raises
        ------
        DamagedError
            The object has changed, or an assumption is wrong.
        NotFoundError
            The object no longer exists.
        StorageError
            The store, or the local disk, refused.
        """
        spans = [span for span in spans if span[1] > 0]
        due = [found for span in spans for found in self._assumed_about(*span)] if compared else []
        asked = [self._blocks(*span) for span in [*spans, *((at, len(expected)) for at, expected, _ in due)]]
        if not self._has(asked):
            with self._lock:
                pieces = self._missing(asked)
                while batch := list(islice(pieces, _N_PIECES)):
                    for answer in self._storage.together([partial(self._fetch, *piece) for piece in batch]):
                        if isinstance(answer, FileNotFoundError):
                            what = "there is no such object any more"
                            raise NotFoundError(what, where=self._where) from answer
                        if isinstance(answer, Exception):
                            raise answer
        for at, expected, _ in due:
            if os.pread(self.descriptor, len(expected), at) != expected:
                what = f"the zip's records at byte {at} do not match its directory"
                remedy = "it may be damaged: fetch it again from where it came from"
                raise DamagedError(what, where=self._where, remedy=remedy)

    def _assumed_about(self, offset: int, nbytes: int) -> Iterator[Assumed]:
        """Yield the assumptions that concern a span."""
        first = max(0, bisect.bisect_right(self.assumed, offset, key=itemgetter(0)) - 1)
        for found in islice(self.assumed, first, None):
            if found[0] >= offset + nbytes:
                break
            if found[2] > offset:
                yield found

    def is_here(self, offset: int, nbytes: int) -> bool:
        """Return whether bytes are cached."""
        return self._has([self._blocks(offset, nbytes)])

    def _has(self, asked: Iterable[tuple[int, int]]) -> bool:
        return all(self._have.find(0, first, end) < 0 for first, end in asked)

    def _blocks(self, offset: int, nbytes: int) -> tuple[int, int]:
        """Return the first block of a span, and the end of its last."""
        end = min(offset + nbytes, self.listed.nbytes)
        return offset // _BLOCK, -(-end // _BLOCK)

    def _missing(self, asked: Iterable[tuple[int, int]]) -> Iterator[tuple[int, int]]:
        """Yield the pieces to fetch for blocks, as first block and end, each worth a request."""
        n_blocks, least = len(self._have), _AHEAD_NBYTES // _BLOCK
        lacking = [(first, end) for first, end in sorted(asked) if self._have.find(0, first, end) >= 0]
        if self.listed.nbytes <= _SMALL_NBYTES:
            lacking = [(0, n_blocks)]
        runs: list[list[int]] = []
        for first, end in lacking:
            if end - first < least:
                # Aligned, so that data read backwards, such as a directory at the end, arrive together.
                first -= first % least
                end = min(n_blocks, max(end, first + least))
            if runs and first - runs[-1][1] <= least:
                runs[-1][1] = max(end, runs[-1][1])
            else:
                runs.append([first, end])
        for first, end in runs:
            at = first
            while (at := self._have.find(0, at, end)) >= 0:
                stop = self._have.find(1, at, min(end, at + _PIECE_NBYTES // _BLOCK))
                stop = min(end, at + _PIECE_NBYTES // _BLOCK) if stop < 0 else stop
                yield at, stop
                at = stop

    def _fetch(self, first: int, end: int) -> None:
        offset = first * _BLOCK
        nbytes = min(end * _BLOCK, self.listed.nbytes) - offset
        content = self._storage.read_listed(self.listed, offset, nbytes)
        if len(content) != nbytes:
            raise DamagedError("the object is shorter than it was when it was listed", where=self._where)
        with _cache_errors(self._where):
            done = 0
            while done < nbytes:
                done += os.pwrite(self.descriptor, memoryview(content)[done:], offset + done)
        self._have[first:end] = b"\1" * (end - first)
        self.nbytes_here += nbytes


class Mirror:
    """A local folder that mirrors a remote one; it lasts as long as the process.

    Parameters
    ----------
    url
        Its URL.
    storage
        Its storage.
    only
        Name of the single object to mirror; empty for all.
    """

    def __init__(self, url: str, storage: Any, only: str = "") -> None:
        self.url, self.storage, self._only = url, storage, only
        cache = user_cache_folder()
        parent = (Path(tempfile.gettempdir()) if cache is None else cache) / _FOLDER
        self._pid = os.getpid()
        with _cache_errors(str(parent)):
            parent.mkdir(parents=True, exist_ok=True)
            home, self._home_lock = new_locked(parent)
            self._home = home.resolve()
            name = url.rstrip("/").rpartition("/")[2]
            fits = name not in ("", ".", "..") and len(name.encode()) <= _MAX_NAME_BYTES
            self.root = self._home / (name if fits else "run")
            self.root.mkdir()
        REMOTE_ADDRESSES[str(self.root)] = url
        self._listed: dict[str, Listed] = {}
        self._contents: dict[str, Content] = {}
        self._assumed: defaultdict[str, list[Assumed]] = defaultdict(list)
        self._lock = threading.RLock()
        self._wanted: Sequence[str] = ()
        self._prefetcher = Prefetcher(self._fetch_object, (), 0)

    def refresh(self) -> None:
        """List the folder again.

        Raises
        ------
        UnsafePathError
            An object's name is not a valid file name.
        InshrinkError
            The store refused.
        """
        found: dict[str, Listed] = {}
        for listed in self.storage.objects(self._only):
            if listed.path.endswith("/") and not listed.nbytes:
                continue  # consoles create such objects for folders
            found[listed.path] = listed
            if len(found) > _MAX_OBJECTS:
                raise InputError(f"more than {_MAX_OBJECTS:,} objects are there", where=self.url)
        with self._lock:
            # One at a time: after an error, every file still matches its listed object.
            for path in [path for path, listed in self._listed.items() if found.get(path) != listed]:
                del self._listed[path]
                self._remove(path)
            for path in found.keys() - self._listed.keys():
                self._place(found[path])
                self._listed[path] = found[path]

    def _remove(self, path: str) -> None:
        self._contents.pop(path, None)
        self._assumed.pop(path, None)
        place = self.root / path
        with contextlib.suppress(OSError):
            place.unlink()
            for folder in place.parents:
                if folder == self.root:
                    break
                folder.rmdir()

    def _place(self, listed: Listed) -> None:
        """Create a file with the name and size of an object; its time depends on the content's tag."""
        parts, where = listed.path.split("/"), f"{self.url}/{listed.path}"
        long = max(len(part.encode(errors="surrogateescape")) for part in parts) > _MAX_NAME_BYTES
        if long or "\0" in listed.path or not {"", ".", ".."}.isdisjoint(parts):
            raise UnsafePathError("no file can have this object's name", where=f"{self.url}/{listed.path!r}")
        place = self.root / listed.path
        second = int.from_bytes(hashlib.blake2b(listed.tag.encode(), digest_size=8).digest()) % 10**9
        at = int(listed.modified) * 10**9 + second
        with _cache_errors(where):
            try:
                place.parent.mkdir(parents=True, exist_ok=True)
                with place.open("xb") as file:
                    file.truncate(listed.nbytes)
                os.utime(place, ns=(at, at))
            except (FileExistsError, NotADirectoryError, IsADirectoryError) as error:
                what = "an object is below another one, as if that were a folder"
                if place.is_file():
                    what = "this disk takes its name for that of another object"
                raise UnsafePathError(what, where=where) from error

    def content(self, place: str) -> Content:
        """Return the content of an object, by the path of its file.

        Raises
        ------
        NotFoundError
            The object was missing in the last listing.
        """
        path = os.path.relpath(place, self.root).replace(os.sep, "/")
        with self._lock:
            content = self._contents.get(path)
            if content is None:
                listed = self._listed.get(path)
                if listed is None:
                    raise NotFoundError("there is no such object any more", where=place)
                # Assumptions about an object outlast its cached bytes.
                about = f"{self.url}/{path}", self._home, self._assumed[path]
                with _cache_errors(place):
                    content = Content(self.storage, listed, *about)
                self._contents[path] = content
            content.used = next(_CLOCK)
        _let_go(content)
        return content

    def expect(self, places: Iterable[tuple[Path, int, int]]) -> None:
        """Prefetch the first and last bytes of files at the same time; later reads repeat failed requests."""
        asked = []
        for place, first, last in places:
            with contextlib.suppress(NotFoundError):
                content = self.content(str(place))
                nbytes = content.listed.nbytes
                spans = [(0, min(first, nbytes)), (max(0, nbytes - last), min(last, nbytes))]
                asked += [partial(content.fill, [span]) for span in spans if span[1]]
        self.storage.together(asked)

    def stream(self, places: Iterable[Path]) -> None:
        """Prefetch whole files in this order, in the background; drop the cached bytes of all others."""
        paths = [os.path.relpath(place, self.root).replace(os.sep, "/") for place in places]
        with self._lock:
            for path in self._contents.keys() - set(paths):
                del self._contents[path]
            self._wanted = paths
        self._prefetcher.stop()
        self._prefetcher = Prefetcher(self._fetch_object, [(path, 0) for path in paths], 0)

    def _fetch_object(self, path: str) -> None:
        """Fetch an object while it is wanted, with lower priority than its readers."""
        content, step = self.content(str(self.root / path)), _N_PIECES * _PIECE_NBYTES
        for at in range(0, content.listed.nbytes, step):
            if path in self._wanted:
                content.fill([(at, min(step, content.listed.nbytes - at))])

    def close(self) -> None:
        """Remove the mirror, if this process created it."""
        if os.getpid() == self._pid:
            self._wanted = ()
            self._prefetcher.stop()
            shutil.rmtree(self._home, ignore_errors=True)
            self._home_lock.close()


_MIRRORS: Final[dict[tuple[str, str], Mirror]] = {}
_MAKING: Final = threading.Lock()
_CLOCK: Final = count(1)


def _let_go(wanted: Content) -> None:
    """Evict the least recently used contents, of all mirrors, above `MAX_HERE_NBYTES`."""
    groups = [mirror._contents for mirror in tuple(_MIRRORS.values())]
    rows = [(content, path, group) for group in groups for path, content in tuple(group.items())]
    n_here = sum(content.nbytes_here for content, _, _ in rows)
    for content, path, group in sorted(rows, key=lambda row: row[0].used):
        if n_here <= MAX_HERE_NBYTES or content is wanted:
            break
        group.pop(path, None)
        n_here -= content.nbytes_here


@contextlib.contextmanager
def _cache_errors(where: str) -> Iterator[None]:
    """Convert errors of the local disk."""
    try:
        yield
    except OSError as error:
        what = f"the user's cache cannot be written: {error.strerror}"
        remedy = "free some space in the user's cache, or set XDG_CACHE_HOME to another disk"
        raise StorageError(what, where=where, remedy=remedy) from error


def _split(url: str) -> tuple[str, str]:
    """Split a URL into the folder and the pattern after it.

    Examples
    --------
    >>> _split("s3://bucket/runs/a/step_*.pt"), _split("s3://bucket/runs/a")
    (('s3://bucket/runs/a', 'step_*.pt'), ('s3://bucket/runs/a', ''))
    """
    scheme, _, rest = url.partition("://")
    bucket, *parts = rest.rstrip("/").split("/")
    n_fixed = next((i for i, part in enumerate(parts) if "*" in part), len(parts))
    if n_fixed == len(parts) and parts and "{step}" in parts[-1]:
        n_fixed -= 1
    return f"{scheme}://{'/'.join([bucket, *parts[:n_fixed]])}", "/".join(parts[n_fixed:])


def mirrored(url: str) -> tuple[Mirror, str]:
    """Return the mirror of a URL, freshly listed, and the local path or pattern to open.

    Raises
    ------
    InshrinkError
        As `Mirror.refresh`.
    InputError
        URLs of this kind cannot be listed.
    """
    folder, pattern = _split(url)
    mirror = _mirror_at(folder)
    if pattern:
        return mirror, f"{glob.escape(str(mirror.root))}/{pattern}"
    around, _, name = folder.rpartition("/")
    if not mirror._listed and not around.endswith("/"):
        single = _mirror_at(around, name)
        if single._listed:
            return single, str(single.root / name)
    return mirror, str(mirror.root)


def _mirror_at(url: str, only: str = "") -> Mirror:
    """Return the process's mirror of a URL, freshly listed."""
    with _MAKING:
        mirror = _MIRRORS.get((url, only))
        if mirror is None:
            point = plugin(STORAGES, url.partition(":")[0].lower())
            if point is None:
                what = "runs are read from file systems, and from addresses of s3, gs, az and hf"
                where = f"{url.partition(':')[0]}://…"  # the URL may contain a password
                raise InputError(what, where=where, remedy="copy the run here")
            mirror = Mirror(url, point.load().at(url), only)
            _MIRRORS[url, only] = mirror
            atexit.register(mirror.close)
    mirror.refresh()
    return mirror


def mirror_of(path: str | os.PathLike[str]) -> Mirror | None:
    """Return the mirror of a path; None for an ordinary local path.

    Raises
    ------
    StorageError
        The path belongs to another process's mirror, whose files are empty here.
    """
    text = os.fspath(path)
    if _MARK not in text:
        return None
    for mirror in tuple(_MIRRORS.values()):
        if text == str(mirror.root) or text.startswith(f"{mirror.root}{os.sep}"):
            return mirror
    what = "this placeholder of a remote file is valid only in the process that made it"
    raise StorageError(what, where=text)
