"""Archives in a repository of the Hugging Face Hub, ``hf://OWNER/NAME``, through `huggingface_hub`."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import random
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple, NoReturn

from inshrink_core.archive.storage.contract import Creation, Lock, Storage, Tag, checked
from inshrink_core.errors import InputError, InshrinkError, MissingExtraError, StorageError
from inshrink_core.execution.mirror import Listed

_KINDS: Final = {"models": "model", "datasets": "dataset", "spaces": "space"}
_OF_THE_REPOSITORY: Final = frozenset({"README.md", ".gitattributes"})
"""Files of the Hub's own at the top of a repository, which are no part of an archive."""

_N_ATTEMPTS: Final = 12
"""Commits that may come before ours: each is looked at whether it changed what ours is about."""

_GONE: Final = 404
_BEYOND: Final = 416
_CONFLICTS: Final = (409, 412)


class MovedError(Exception):
    """Somebody committed to the repository since it was looked at."""


class Repository(NamedTuple):
    """What an address names.

    Parameters
    ----------
    repo_id, kind, revision
        The repository, ``model``, ``dataset`` or ``space``, and its branch, tag or commit.
    folder
        Where in it the archive lies; empty at its top.
    """

    repo_id: str
    kind: str
    revision: str
    folder: str

    @classmethod
    def parse(cls, url: str) -> Repository | None:
        """Read ``hf://[datasets/]OWNER/NAME[@REVISION][/FOLDER]``; None where it names no repository.

        Raises
        ------
        InputError
            There is something in it that may be secret; the message does not have it.

        Examples
        --------
        >>> Repository.parse("hf://datasets/me/runs@v1/digits")
        Repository(repo_id='me/runs', kind='dataset', revision='v1', folder='digits')
        """
        parts = [part for part in url.partition("://")[2].split("/") if part]
        kind = _KINDS[parts.pop(0)] if parts and parts[0] in _KINDS else "model"
        if len(parts) < 2:
            return None
        if "@" in parts[0]:
            raise InputError(
                "an address must not hold credentials",
                where="hf://…",
                remedy="set HF_TOKEN in the environment",
            )
        name, _, revision = parts[1].partition("@")
        return cls(f"{parts[0]}/{name}", kind, revision or "main", "/".join(parts[2:]))


class HubStorage(Storage):
    """A folder of a repository on the Hub; nothing is asked of it before it is read.

    Parameters
    ----------
    name
        Its URL, ``hf://[datasets/]OWNER/NAME[@REVISION][/FOLDER]``.

    Notes
    -----
    The Hub compares nothing but the last commit (`create_commit(parent_commit=)`), so whatever is compared
    here is read at that commit first; where another was faster, it is looked at again. Every object that is
    created, replaced or deleted is a commit of its own: `put` makes one of many.

    Who may read and write, `huggingface_hub` knows: by HF_TOKEN, or a login.
    """

    exclusive = False
    """Its lock keeps nobody out."""

    gathers = True

    absent = "check the name; a private repository needs `hf auth login`, or HF_TOKEN"

    @functools.cached_property
    def repository(self) -> Repository:
        """What the address names.

        Raises
        ------
        FileNotFoundError
            It names no repository.
        """
        found = Repository.parse(self.name)
        if found is None:
            raise FileNotFoundError(self.name)
        return found

    @functools.cached_property
    def _api(self) -> Any:
        try:
            from huggingface_hub import HfApi  # type: ignore[import-not-found,unused-ignore]
        except ImportError as error:
            raise MissingExtraError("huggingface_hub", "hub") from error
        return HfApi(library_name="inshrink")

    @functools.cached_property
    def _about(self) -> dict[str, str]:
        """The repository, as keywords of the library."""
        return {"repo_id": self.repository.repo_id, "repo_type": self.repository.kind}

    def _place(self, path: str) -> str:
        """Return what an object is called in the repository; of an empty path, the folder."""
        return "/".join(filter(None, (self.repository.folder, path and checked(path))))

    # ---- reading ---------------------------------------------------------------------------------

    def _get(self, path: str, revision: str | None = None, span: str | None = None) -> bytes:
        """Return an object, or a range of it; one request."""
        api, place = self._api, self._place(path)
        with _hub_errors(self.name, place):
            from huggingface_hub import hf_hub_url
            from huggingface_hub.utils import build_hf_headers, hf_raise_for_status, http_backoff

            url = hf_hub_url(
                **self._about,
                filename=place,
                revision=revision or self.repository.revision,
                endpoint=api.endpoint,
            )
            # Compressed on its way, a range would be one of something else.
            headers = build_hf_headers(library_name="inshrink") | {"Accept-Encoding": "identity"}
            response = http_backoff("GET", url, headers=headers | ({"Range": span} if span else {}))
            if span and response.status_code == _BEYOND:
                return self.counted()
            hf_raise_for_status(response)
            content: bytes = response.content
        if span and response.status_code != 206:
            first, _, last = span.removeprefix("bytes=").partition("-")
            content = content[int(first) : int(last) + 1]
        return self.counted(content)

    def read(self, path: str, offset: int, nbytes: int) -> bytes:
        """Return `nbytes` bytes from `offset`, fewer only where the object ends."""
        checked(path)
        return self._get(path, span=f"bytes={offset}-{offset + nbytes - 1}") if nbytes > 0 else b""

    def whole(self, path: str) -> bytes:
        """Return all of an object; one request."""
        return self._get(checked(path))

    def size(self, path: str) -> int:
        """Return the size of an object in bytes."""
        found = self._found(checked(path), self.repository.revision)
        if found is None:
            raise FileNotFoundError(f"{self.name}/{path}")
        return found

    def _found(self, path: str, revision: str) -> int | None:
        """Return the size of an object at a revision; None where there is none."""
        self.counted()
        with _hub_errors(self.name, path):
            rows = self._api.get_paths_info(**self._about, paths=[self._place(path)], revision=revision)
        return next((int(row.size) for row in rows if getattr(row, "size", None) is not None), None)

    def names(self, folder: str) -> tuple[str, ...]:
        """Return every name in a folder; not those of the repository's own files."""
        names = (path.rpartition("/")[2] for path in self._tree(folder))
        return tuple(name for name in names if folder or name not in _OF_THE_REPOSITORY)

    def sizes(self, folder: str, revision: str) -> dict[str, int]:
        """Return the names of the objects in a folder with their sizes, at a revision."""
        found = self._tree(folder, revision)
        return {path.rpartition("/")[2]: size for path, size in found.items() if size is not None}

    def _tree(self, folder: str, revision: str | None = None) -> dict[str, int | None]:
        """Return the paths in a folder, and sizes of those that are objects."""
        self.counted()
        at = revision or self.repository.revision
        with contextlib.suppress(FileNotFoundError), _hub_errors(self.name, folder):
            rows = self._api.list_repo_tree(
                **self._about, path_in_repo=self._place(folder) or None, revision=at
            )
            return {row.path: getattr(row, "size", None) for row in rows}
        return {}

    def objects(self, path: str = "") -> Iterator[Listed]:
        """Return every object below this address, or the one that a path names, at the last commit."""
        commit = self.head()
        self.counted()
        with contextlib.suppress(FileNotFoundError), _hub_errors(self.name, path):
            about = {**self._about, "revision": commit}
            at = "/".join(filter(None, (self.repository.folder, path)))
            if path:
                rows = self._api.get_paths_info(paths=[at], **about)
            else:
                rows = self._api.list_repo_tree(path_in_repo=at or None, recursive=True, **about)
            for row in rows:
                if (size := getattr(row, "size", None)) is not None:
                    folder = self.repository.folder
                    below = row.path.removeprefix(f"{folder}/") if folder else row.path
                    self._commits[below, row.blob_id] = commit
                    yield Listed(below, int(size), row.blob_id, 0)

    def read_listed(self, one: Listed, offset: int, nbytes: int) -> bytes:
        """Return bytes of an object at the commit that was listed, where it stays what it was."""
        return self._get(one.path, self._commits[one.path, one.tag], f"bytes={offset}-{offset + nbytes - 1}")

    @functools.cached_property
    def _commits(self) -> dict[tuple[str, str], str]:
        """By path and content, the last commit where that was listed: readers of older ones go on there."""
        return {}

    # ---- writing ---------------------------------------------------------------------------------

    def lock(self) -> Lock:
        """Return a lock that keeps nobody out: of two writers, the second to commit is refused."""
        return Lock()

    def load(self, path: str) -> tuple[bytes, Tag]:
        """Return the content of an object, and its digest as its tag."""
        content = self.whole(path)
        return content, _tag(content)

    def create(self, path: str, *, over: bool = False) -> Creation:
        """Begin an object, on this machine's disk; its commit is one of the repository's."""
        return _NewObject(self, checked(path), over=over)

    def create_once(self, path: str) -> Creation:
        """Begin an object that is uploaded when it is committed, and seen when `gather` has listed it."""
        return _Staged(self, checked(path), over=False)

    def stage(self, path: str, place: Path) -> None:
        """Upload a file that a later commit, of anybody who is told of it, makes an object."""
        with _hub_errors(self.name, path), _quietly():
            from huggingface_hub import CommitOperationAdd

            addition = CommitOperationAdd(self._place(path), str(place))
            self._api.preupload_lfs_files(
                **self._about, additions=[addition], revision=self.repository.revision
            )
            if addition.path_or_fileobj != b"":  # what the Hub keeps in git is a part of the commit
                addition.path_or_fileobj = place.read_bytes()
            self._staged[path] = addition

    @functools.cached_property
    def _staged(self) -> dict[str, Any]:
        """Operations of the library, by path, whose bytes are uploaded."""
        return {}

    def told(self, path: str) -> Any:
        """Return the operation that makes an object of what was uploaded."""
        return self._staged.pop(path, None)

    def gather(self, told: Mapping[str, Any], path: str, content: bytes, expected: Tag | None) -> None:
        """Replace an object together with those that it lists: in one commit."""
        self.replace(path, content, expected, told)

    def replace(
        self, path: str, content: bytes, expected: Tag | None, beside: Mapping[str, Any] | None = None
    ) -> Tag:
        """Give an object new content, if it has the one expected at the commit before."""

        def is_expected(head: str) -> None:
            try:
                found = _tag(self._get(path, head))
            except FileNotFoundError:
                found = None
            if found != expected:
                raise self.overtaken(path)

        checked(path)
        self._settle(is_expected, {**(beside or {}), path: bytes(content)}, (), f"Write {path}")
        return _tag(content)

    def delete(self, path: str) -> None:
        """Remove an object; harmless where there is none."""
        checked(path)

        def is_there(head: str) -> None:
            if self._found(path, head) is None:
                raise FileNotFoundError(path)

        with contextlib.suppress(FileNotFoundError):
            self._settle(is_there, {}, (path,), f"Delete {path}")

    @contextlib.contextmanager
    def made(self) -> Iterator[None]:
        """Make the repository where there is none, for its owner alone to see; it stays, whatever happens."""
        self.make(public=False)
        yield

    def make(self, *, public: bool) -> None:
        """Make the repository where there is none."""
        if Repository.parse(self.name) is None:
            self._refuse_address()
        with _hub_errors(self.name):
            self._api.create_repo(**self._about, private=not public, exist_ok=True)

    def _refuse_address(self) -> NoReturn:
        raise StorageError("this names no repository of the Hub", where=self.name, expected="hf://OWNER/NAME")

    def at_commit(self, commit: str) -> HubStorage:
        """Return the same at a commit, to read from."""
        about = self.repository
        prefix = next(name for name, kind in _KINDS.items() if kind == about.kind)
        folder = f"/{about.folder}" if about.folder else ""
        return HubStorage(f"hf://{prefix}/{about.repo_id}@{commit}{folder}")

    def head(self) -> str:
        """Return the last commit of the repository."""
        self.counted()
        with _hub_errors(self.name):
            return str(self._api.repo_info(**self._about, revision=self.repository.revision).sha)

    def put(self, contents: Mapping[str, Any], gone: Iterable[str], head: str, message: str) -> str:
        """Write and remove objects in one commit, if the last one is still `head`; return the new one.

        Contents are bytes, paths of files, or what `told` returned.

        Raises
        ------
        MovedError
            It is not.
        """
        with _hub_errors(self.name), _quietly():
            from huggingface_hub import CommitOperationAdd, CommitOperationDelete

            operations: list[Any] = [
                CommitOperationDelete(self._place(path), is_folder=False) for path in gone
            ]
            for path, content in contents.items():
                if not isinstance(content, CommitOperationAdd):
                    source = content if isinstance(content, bytes) else str(content)
                    content = CommitOperationAdd(self._place(path), source)
                operations.append(content)
            return str(
                self._api.create_commit(
                    **self._about,
                    operations=operations,
                    commit_message=message,
                    revision=self.repository.revision,
                    parent_commit=head,
                ).oid
            )

    def _settle(
        self,
        check: Callable[[str], None],
        contents: Mapping[str, Any],
        gone: Iterable[str],
        message: str,
    ) -> None:
        """Commit upon the last commit, if `check` raises no error at it; again where another was faster."""
        for attempt in range(_N_ATTEMPTS):
            head = self.head()
            check(head)
            with contextlib.suppress(MovedError):
                self.put(contents, gone, head, message)
                return
            time.sleep(random.uniform(0, 0.05 * 2 ** min(attempt, 6)))
        raise StorageError(
            "others commit to the repository all the time", where=self.name, remedy="run it again later"
        )


class _NewObject(Creation):
    """A file on this machine that becomes an object."""

    def __init__(self, storage: HubStorage, path: str, *, over: bool) -> None:
        self._storage, self._path, self._over = storage, path, over
        self._folder = tempfile.TemporaryDirectory(prefix="inshrink-")
        self._place = Path(self._folder.name) / "object"
        self._file = self._place.open("wb")

    def write(self, content: bytes | bytearray | memoryview) -> None:
        """Append bytes."""
        self._file.write(content)

    def commit(self) -> None:
        """Upload the file, if there is no object of its name."""

        def is_free(head: str) -> None:
            if not self._over and self._storage._found(self._path, head) is not None:
                raise FileExistsError(self._path)

        try:
            self._file.close()
            self._storage._settle(is_free, {self._path: self._place}, (), f"Add {self._path}")
        finally:
            self.abort()

    def abort(self) -> None:
        """Remove the file."""
        self._file.close()
        self._folder.cleanup()


class _Staged(_NewObject):
    """A file on this machine that is uploaded, for a commit that others make."""

    def commit(self) -> None:
        """Upload the file."""
        try:
            self._file.close()
            self._storage.stage(self._path, self._place)
        finally:
            self.abort()


def _tag(content: bytes) -> Tag:
    return Tag(hashlib.sha256(content).hexdigest())


@contextlib.contextmanager
def _quietly() -> Iterator[None]:
    """Let the library draw no progress of its own, which is one bar a file."""
    from huggingface_hub import utils

    shown = not utils.are_progress_bars_disabled()
    if shown:
        utils.disable_progress_bars()
    try:
        yield
    finally:
        if shown:
            utils.enable_progress_bars()


@contextlib.contextmanager
def _hub_errors(url: str, path: str = "") -> Iterator[None]:
    """Turn what the library raises into our own errors; of addresses they say no more than their path."""
    try:
        yield
    except (FileNotFoundError, InshrinkError):
        raise
    except ImportError as error:
        raise MissingExtraError("huggingface_hub", "hub") from error
    except Exception as error:
        response, kind = getattr(error, "response", None), type(error).__name__
        status = getattr(response, "status_code", None)
        if kind == "GatedRepoError":
            what, remedy = "this repository is gated", "ask for access on its page"
        elif status == _GONE or kind == "RepositoryNotFoundError":
            raise FileNotFoundError(f"{url}/{path}") from error
        elif status in _CONFLICTS:
            raise MovedError(url) from error
        else:
            what = f"the Hub refused: {str(error).partition('://')[0].partition(' for url')[0][:200] or kind}"
            denied = status in (401, 403)
            remedy = "check that HF_TOKEN or the login may do this" if denied else "check the network"
        raise StorageError(what.partition("\n")[0], where=url, remedy=remedy) from error
