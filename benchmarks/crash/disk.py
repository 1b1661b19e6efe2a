"""A disk after a power loss: what an operation log leaves there, where only what was synced is certain.

The model is as unkind as POSIX allows. Data of a file are certain up to its last fsync; later writes may be
there, or a part of them cut at a sector, or the file's new size with zeros in it. Names in a folder are
certain up to the folder's last fsync; later creations, renames and deletions may be there up to any one of
them, in order, whatever other folders hold. A new folder is a name in its parent like any other.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path, PurePosixPath
from random import Random

from benchmarks.crash.shim import Kind, Operation

Tree = dict[str, bytes | None]
"""Content by path relative to the root; None is a folder."""

SECTORS = (512, 4096)


class Style(Enum):
    """How much of what is not certain is there."""

    LEAST = "nothing that was not synced"
    MOST = "everything"
    NAMES = "every name, no data"
    ZEROS = "every name and size, zeros for data"
    DATA = "all data, no name"
    RANDOM = "some of each"


@dataclass(eq=False)
class File:
    """A file's content now, as synced last, and what was written since."""

    now: bytearray = field(default_factory=bytearray)
    synced: bytes = b""
    pending: list[tuple[int, bytes | None]] = field(default_factory=list)  # offset, data; None truncates

    def write(self, offset: int, data: bytes) -> None:
        """Write, and remember that it is not synced."""
        self.pending.append((offset, data))
        _write(self.now, offset, data)

    def truncate(self, nbytes: int) -> None:
        """Cut off or extend, and remember it."""
        self.pending.append((nbytes, None))
        _truncate(self.now, nbytes)

    def sync(self) -> None:
        """Make the content certain."""
        self.synced, self.pending = bytes(self.now), []

    def after(self, style: Style, random: Random) -> bytes:
        """Return what a power loss leaves."""
        if style in (Style.LEAST, Style.NAMES) or not self.pending:
            return self.synced
        if style in (Style.MOST, Style.DATA):
            return bytes(self.now)
        if style is Style.ZEROS:
            return self.synced[: len(self.now)].ljust(len(self.now), b"\0")
        return random.choice((self._prefix, self._pages))(random)

    def _prefix(self, random: Random) -> bytes:
        """Return what is there if the writes came in order, the last one torn at a sector."""
        content, n_done = bytearray(self.synced), random.randint(0, len(self.pending))
        for offset, data in self.pending[:n_done]:
            _write(content, offset, data) if data is not None else _truncate(content, offset)
        if n_done < len(self.pending):
            offset, data = self.pending[n_done]
            if data:
                sector = random.choice(SECTORS)
                written = random.randint(0, len(data) // sector) * sector
                _write(content, offset, data[:written])
                if random.random() < 0.5:
                    content.extend(bytes(max(0, offset + len(data) - len(content))))
        return bytes(content)

    def _pages(self, random: Random) -> bytes:
        """Return the new size with some pages written and the others old, or zero where there were none."""
        sector = random.choice(SECTORS)
        content = bytearray(self.synced[: len(self.now)].ljust(len(self.now), b"\0"))
        for at in range(0, len(content), sector):
            if random.random() < 0.5:
                content[at : at + sector] = self.now[at : at + sector]
        return bytes(content)


@dataclass(eq=False)
class Folder:
    """A folder's names now, as synced last, and the changes since, each whole or not at all."""

    now: dict[str, File | Folder] = field(default_factory=dict)
    synced: dict[str, File | Folder] = field(default_factory=dict)
    pending: list[dict[str, File | Folder | None]] = field(default_factory=list)

    def change(self, names: Mapping[str, File | Folder | None]) -> None:
        """Give and take names at once."""
        self.pending.append(dict(names))
        _rename(self.now, names)

    def sync(self) -> None:
        """Make the names certain."""
        self.synced, self.pending = dict(self.now), []

    def after(self, style: Style, random: Random) -> dict[str, File | Folder]:
        """Return the names that a power loss leaves."""
        n_done = len(self.pending)
        if style in (Style.LEAST, Style.DATA):
            n_done = 0
        elif style is Style.RANDOM:
            n_done = random.randint(0, n_done)
        names = dict(self.synced)
        for change in self.pending[:n_done]:
            _rename(names, change)
        return names


def _write(content: bytearray, offset: int, data: bytes) -> None:
    content.extend(bytes(max(0, offset - len(content))))
    content[offset : offset + len(data)] = data


def _truncate(content: bytearray, nbytes: int) -> None:
    content.extend(bytes(max(0, nbytes - len(content))))
    del content[nbytes:]


def _rename(names: dict[str, File | Folder], change: Mapping[str, File | Folder | None]) -> None:
    for name, node in change.items():
        if node is None:
            names.pop(name, None)
        else:
            names[name] = node


class Disk:
    """A disk that operations are applied to, one after the other.

    Parameters
    ----------
    root
        The folder whose operations were logged.
    tree
        What lay there before, all of it certain.
    """

    def __init__(self, root: Path, tree: Tree) -> None:
        self._root = PurePosixPath(root)
        self._top = Folder()
        self._open: dict[int, File | Folder] = {}
        for path, content in sorted(tree.items()):
            folder, name = self._place(str(self._root / path))
            node = Folder() if content is None else File(bytearray(content), content)
            folder.now[name] = folder.synced[name] = node

    def _node(self, path: str) -> File | Folder:
        node: File | Folder = self._top
        for name in PurePosixPath(path).relative_to(self._root).parts:
            if not isinstance(node, Folder):
                raise NotADirectoryError(path)
            node = node.now[name]
        return node

    def _place(self, path: str) -> tuple[Folder, str]:
        parent = self._node(str(PurePosixPath(path).parent))
        if not isinstance(parent, Folder):
            raise NotADirectoryError(path)
        return parent, PurePosixPath(path).name

    def apply(self, done: Operation) -> None:
        """Do what an operation did."""
        if done.kind is Kind.CLOSE:
            self._open.pop(done.a, None)
        if done.result < 0 or done.kind in (Kind.NOTE, Kind.LOCK, Kind.CLOSE):
            return
        if done.kind is Kind.OPEN:
            self._apply_open(done)
        elif done.kind in (Kind.WRITE, Kind.TRUNCATE, Kind.FSYNC):
            self._apply_to_content(done, self._open[done.a])
        elif done.kind in (Kind.RENAME, Kind.LINK):
            self._apply_name(done)
        else:
            folder, name = self._place(done.path)
            folder.change({name: Folder() if done.kind is Kind.MKDIR else None})

    def _apply_open(self, done: Operation) -> None:
        if not done.b:
            folder, name = self._place(done.path)
            folder.change({name: File()})
        node = self._node(done.path)
        if done.a & os.O_TRUNC and isinstance(node, File) and node.now:
            node.truncate(0)
        self._open[done.result] = node

    def _apply_to_content(self, done: Operation, node: File | Folder) -> None:
        if done.kind is Kind.FSYNC:
            node.sync()
        elif isinstance(node, Folder):
            raise IsADirectoryError(done.path)
        elif done.kind is Kind.WRITE:
            node.write(done.b, done.data)
        elif done.b != len(node.now):
            node.truncate(done.b)

    def _apply_name(self, done: Operation) -> None:
        (old, old_name), (new, new_name) = self._place(done.path), self._place(done.other)
        node = old.now[old_name]
        gone = {} if done.kind is Kind.LINK else {old_name: None}
        if old is new:
            new.change({**gone, new_name: node})
            return
        new.change({new_name: node})
        old.change(gone)

    def end_process(self) -> None:
        """Close what is open; what was not synced is no more certain by that."""
        self._open = {}

    def after(self, style: Style, random: Random) -> Tree:
        """Return what a power loss leaves now."""
        tree: Tree = {}
        self._gather(self._top, "", style, random, tree, {})
        return tree

    def _gather(
        self, folder: Folder, at: str, style: Style, random: Random, tree: Tree, seen: dict[int, bytes]
    ) -> None:
        for name, node in folder.after(style, random).items():
            path = f"{at}{name}"
            if isinstance(node, Folder):
                tree[path] = None
                self._gather(node, f"{path}/", style, random, tree, seen)
            else:
                # One file under two names has one content.
                tree[path] = seen.setdefault(id(node), node.after(style, random))


def read_tree(root: Path) -> Tree:
    """Return what lies below a folder."""
    tree: Tree = {}
    for path in sorted(root.rglob("*")):
        tree[path.relative_to(root).as_posix()] = None if path.is_dir() else path.read_bytes()
    return tree


def write_tree(root: Path, tree: Tree) -> None:
    """Make a folder hold a tree."""
    root.mkdir(parents=True)
    for path, content in sorted(tree.items()):
        if content is None:
            (root / path).mkdir()
        else:
            (root / path).write_bytes(content)
