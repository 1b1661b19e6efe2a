"""Archives in a repository of the Hugging Face Hub, ``hf://OWNER/NAME``, through `huggingface_hub`."""

from __future__ import annotations

import contextlib
import functools
import random
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Final, NamedTuple

from inshrink_core.archive.storage.contract import Creation, Tag, checked, digest_of
from inshrink_core.archive.storage.uploads import Listing, NewObject, UploadedStorage
from inshrink_core.errors import InputError, InshrinkError, MissingExtraError, StorageError
from inshrink_core.execution.mirror import Listed
from inshrink_core.text import printable

_KINDS: Final = {"models": "model", "datasets": "dataset", "spaces": "space"}
_CARD_NAME: Final = "README.md"
_OF_THE_REPOSITORY: Final = frozenset({_CARD_NAME, ".gitattributes"})
"""Files that the Hub keeps at the top of a repository, outside of an archive."""

_CARD: Final = """---
library_name: inshrink
tags:
- inshrink
- checkpoints
---

# {name}

Checkpoints of a training as an Inshrink archive: each step stores what changed since the previous one.

    pip install 'inshrink[hub]'
    inshrink inspect {address}
    inshrink restore {address} -o restored/

The last command writes the last step, or another one with `--step N`, as files of the run's own format. It
downloads only what it needs. In Python:

```python
import inshrink_core

archive = inshrink_core.open("{address}")
model.load_state_dict(archive[archive.last.step].state_dict())
```
"""

_N_ATTEMPTS: Final = 12
"""Attempts to commit: other commits may come first, as long as they do not touch the same objects."""

_BATCH_S: Final = 600.0
"""The Hub limits commits per hour: a writer commits when it flushes, or after this time."""

_GONE: Final = 404
_BEYOND: Final = 416
_CONFLICTS: Final = (409, 412)


class MovedError(Exception):
    """The repository has a newer commit than the one read."""


class Repository(NamedTuple):
    """The repository and folder of an address.

    Parameters
    ----------
    repo_id, kind, revision
        The repository, ``model``, ``dataset`` or ``space``, and its branch, tag or commit.
    folder
        The archive's folder in it; empty for the top.
    """

    repo_id: str
    kind: str
    revision: str
    folder: str

    @classmethod
    def parse(cls, url: str) -> Repository | None:
        """Parse ``hf://[datasets/]OWNER/NAME[@REVISION][/FOLDER]``; return None if it names no repository.

        Raises
        ------
        InputError
            The URL contains a possible secret, which the message omits.

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


_Plan = tuple[Mapping[str, Any], Iterable[str]]
"""Objects to write, by path, and objects to delete."""


class HubStorage(UploadedStorage):
    """A folder of a repository on the Hub; requests begin with the first read.

    Parameters
    ----------
    name
        Its URL, ``hf://[datasets/]OWNER/NAME[@REVISION][/FOLDER]``.

    Notes
    -----
    The Hub compares only the last commit (`create_commit(parent_commit=)`), so contents are read at that
    commit and compared here; after another commit they are read again. The changes of a writer up to a
    flush form one commit: frames, manifest and deletions.

    `huggingface_hub` authenticates by HF_TOKEN or a login.
    """

    batch_s = _BATCH_S
    absent = "check the name; a private repository needs `hf auth login`, or HF_TOKEN"

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self._commits: dict[tuple[str, str], str] = {}
        """The last commit that listed a path with a content: reads of older listings use that commit."""

    @functools.cached_property
    def repository(self) -> Repository:
        """The repository and folder of the address.

        Raises
        ------
        FileNotFoundError
            The address names no repository.
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
        """The repository, as keyword arguments of the library."""
        return {"repo_id": self.repository.repo_id, "repo_type": self.repository.kind}

    def _place(self, path: str) -> str:
        """Return the path of an object in the repository; for an empty path, that of the folder."""
        return "/".join(filter(None, (self.repository.folder, path and checked(path))))

    # ---- reading ---------------------------------------------------------------------------------

    def _get(self, path: str, revision: str | None = None, span: tuple[int, int] | None = None) -> bytes:
        """Return an object, or its bytes from an offset to an end; one request."""
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
            # With compression, a range would refer to the compressed bytes.
            headers = build_hf_headers(library_name="inshrink") | {"Accept-Encoding": "identity"}
            if span:
                headers |= {"Range": f"bytes={span[0]}-{span[1] - 1}"}
            response = http_backoff("GET", url, headers=headers)
            if span and response.status_code == _BEYOND:
                return self.counted()
            hf_raise_for_status(response)
            content: bytes = response.content
        if span and response.status_code != 206:
            content = content[slice(*span)]
        return self.counted(content)

    def read(self, path: str, offset: int, nbytes: int) -> bytes:
        """Return `nbytes` bytes from `offset`, or fewer at the end of the object."""
        checked(path)
        return self._get(path, span=(offset, offset + nbytes)) if nbytes > 0 else b""

    def size(self, path: str) -> int:
        """Return the size of an object in bytes."""
        for nbytes in self._found([checked(path)], self.repository.revision).values():
            return nbytes
        raise FileNotFoundError(f"{self.name}/{path}")

    def _found(self, paths: Collection[str], revision: str) -> dict[str, int]:
        """Return the sizes of the objects that exist at a revision."""
        places = {self._place(path): path for path in paths}
        rows = self._info(list(places), revision) if places else ()
        sizes = ((places[row.path], getattr(row, "size", None)) for row in rows)
        return {path: int(nbytes) for path, nbytes in sizes if nbytes is not None}

    def _info(self, places: list[str], revision: str) -> list[Any]:
        self.counted()
        with _hub_errors(self.name):
            return list(self._api.get_paths_info(**self._about, paths=places, revision=revision))

    def names(self, folder: str) -> tuple[str, ...]:
        """Return every name in a folder, except the Hub's own files."""
        with contextlib.suppress(FileNotFoundError):
            found = self._rows(self._place(folder), self.repository.revision, recursive=False)
            names = (row.path.rpartition("/")[2] for row in found)
            return tuple(name for name in names if folder or name not in _OF_THE_REPOSITORY)
        return ()

    def _rows(self, place: str, revision: str, *, recursive: bool) -> list[Any]:
        """Return the entries of a folder of the repository."""
        self.counted()
        about = {**self._about, "revision": revision, "recursive": recursive}
        with _hub_errors(self.name, place):
            return list(self._api.list_repo_tree(path_in_repo=place or None, **about))

    def objects(self, path: str = "") -> Iterator[Listed]:
        """Return every object below this address, or the object of `path`, at the last commit."""
        commit, folder = self.head(), self.repository.folder
        with contextlib.suppress(FileNotFoundError):
            if path:
                rows = self._info([f"{folder}/{path}".lstrip("/")], commit)
            else:
                rows = self._rows(folder, commit, recursive=True)
            for row in rows:
                if (size := getattr(row, "size", None)) is not None:
                    below = row.path.removeprefix(f"{folder}/") if folder else row.path
                    self._commits[below, row.blob_id] = commit
                    yield Listed(below, int(size), row.blob_id, 0)

    def read_listed(self, listed: Listed, offset: int, nbytes: int) -> bytes:
        """Return bytes of an object at the commit of its listing, where it cannot change."""
        commit = self._commits[listed.path, listed.tag]
        return self._get(listed.path, commit, (offset, offset + nbytes))

    # ---- writing ---------------------------------------------------------------------------------

    def load(self, path: str) -> tuple[bytes, Tag]:
        """Return the content of an object and, as its tag, its digest."""
        content = self._get(checked(path))
        return content, digest_of(content)

    def upload(self, path: str, file: IO[bytes], *, over: bool = False) -> None:
        """Upload a file as an object, in one commit."""

        def plan(head: str) -> _Plan:
            if not over and self._found([path], head):
                raise FileExistsError(path)
            return {path: file}, ()

        self._settle(plan, f"Add {path}")

    def create_once(self, path: str) -> Creation:
        """Begin an object that `commit` uploads; it becomes visible when `gather` lists it."""
        checked(path)
        return NewObject.beside(self, lambda file: self._stage(path, file))

    def _stage(self, path: str, file: IO[bytes]) -> Any:
        """Upload a file; return the operation by which a commit, of any process, makes it an object."""
        with _hub_errors(self.name, path), _quietly():
            from huggingface_hub import CommitOperationAdd

            file.seek(0)
            addition = CommitOperationAdd(self._place(path), file)
            self._api.preupload_lfs_files(
                **self._about, additions=[addition], revision=self.repository.revision
            )
            if addition.path_or_fileobj != b"":  # the Hub stores small files in git, as part of the commit
                file.seek(0)
                addition.path_or_fileobj = file.read()
            return addition

    def gather(self, staged: Mapping[str, Any], path: str, content: bytes, expected: Tag | None) -> None:
        """Replace an object together with the objects it lists, in one commit."""
        self.publish(dict(staged), Listing(path, bytes(content)), expected, ())

    def replace(self, path: str, content: bytes, expected: Tag | None) -> Tag:
        """Replace the content of an object if the preceding commit has the expected content."""
        self.gather({}, checked(path), content, expected)
        return digest_of(bytes(content))

    def publish(
        self, files: dict[str, Any], listing: Listing | None, tag: Tag | None, gone: Sequence[str]
    ) -> Tag | None:
        """Write and delete objects in one commit; the first one of an archive also writes a card."""
        new = None if listing is None else digest_of(listing.content)

        def plan(head: str) -> _Plan | None:
            contents = dict(files)
            if listing is not None:
                try:
                    found: Tag | None = digest_of(self._get(listing.path, head))
                except FileNotFoundError:
                    found = None
                if found == new:
                    return None  # the response to an earlier attempt was lost
                if found != tag:
                    raise self.conflict(listing.path)
                contents[listing.path] = listing.content
                if found is None and not self._found([_CARD_NAME], head):
                    address = printable(self.name)
                    name = address.rstrip("/").rpartition("/")[2]
                    contents[_CARD_NAME] = _CARD.format(name=name, address=address).encode()
            return contents, self._found(gone, head)

        self._settle(plan, "Delete objects" if listing is None else f"Write {listing.path}")
        files.clear()
        return new

    def delete(self, path: str) -> None:
        """Delete an object; does nothing if it does not exist."""
        self.publish({}, None, None, [checked(path)])

    @contextlib.contextmanager
    def made(self) -> Iterator[None]:
        """Create the repository if it does not exist, as a private one; it remains after an error."""
        if Repository.parse(self.name) is None:
            raise StorageError(
                "this is not a repository of the Hub", where=self.name, expected="hf://OWNER/NAME"
            )
        with _hub_errors(self.name):
            self._api.create_repo(**self._about, private=True, exist_ok=True)
        yield

    def head(self) -> str:
        """Return the last commit of the repository."""
        self.counted()
        with _hub_errors(self.name):
            return str(self._api.repo_info(**self._about, revision=self.repository.revision).sha)

    def put(self, contents: Mapping[str, Any], gone: Iterable[str], head: str, message: str) -> str:
        """Write and delete objects in one commit, if the last commit is still `head`; return the new commit.

        Contents are bytes, files, paths of files, or operations of the library.

        Raises
        ------
        MovedError
            The last commit is not `head`.
        """
        with _hub_errors(self.name), _quietly():
            from huggingface_hub import CommitOperationAdd, CommitOperationDelete

            operations: list[Any] = [
                CommitOperationDelete(self._place(path), is_folder=False) for path in gone
            ]
            for path, content in contents.items():
                if not isinstance(content, CommitOperationAdd):
                    source = str(content) if isinstance(content, Path) else content
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

    def _settle(self, plan: Callable[[str], _Plan | None], message: str) -> None:
        """Commit a plan on top of the last commit; make a new plan if another commit was faster."""
        for attempt in range(_N_ATTEMPTS):
            head = self.head()
            planned = plan(head)
            if planned is None or not any(planned):
                return
            with contextlib.suppress(MovedError):
                self.put(*planned, head, message)
                return
            time.sleep(random.uniform(0, 0.05 * 2 ** min(attempt, 6)))
        raise StorageError(
            "others commit to the repository all the time", where=self.name, remedy="run it again later"
        )


@contextlib.contextmanager
def _quietly() -> Iterator[None]:
    """Disable the library's progress bars, one per file."""
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
    """Convert the library's exceptions to Inshrink's errors; messages contain no URLs of the Hub."""
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
