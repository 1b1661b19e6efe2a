"""One weight file: what it holds and where, whatever its format."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Final, NamedTuple

from inshrink_core.checkpoint import FileLayout, Region, TensorRole, ZipEntry
from inshrink_core.errors import DamagedError, InputError
from inshrink_core.formats.disk import ByteCounter, FileStamp, ReadableFile, stamp_of
from inshrink_core.formats.paths import Access
from inshrink_core.formats.pickles.names import TensorRef
from inshrink_core.formats.pickles.recall import PickleRecall
from inshrink_core.formats.placement import Named, Placed, place
from inshrink_core.formats.roles import PlacedOptimizer
from inshrink_core.formats.safetensors_file import looks_like_safetensors, read_header
from inshrink_core.formats.state_tree import OptimizerTree, StateTree, read_state_tree
from inshrink_core.formats.torch_zip import is_zip, read_torch_zip

__all__ = ["ContentRecall", "FileContent", "layout_of", "read_content"]

_STATE_ROLES: Final = {role.value: role for role in TensorRole if role.value not in ("weight", "buffer")}


class FileContent(NamedTuple):
    """Everything the header of one weight file tells.

    Parameters
    ----------
    kind
        ``torch`` or ``safetensors``.
    model, extra, gradients
        Name and place, in the file's order; `extra` are weights beside the model (EMA).
    optimizers
        State that still has to be matched to names.
    named
        State whose names are known already (``conv1.weight@exp_avg``).
    aliases
        Further names of tensors, to their keys.
    entries
        The zip entries of storages, by data offset.
    steps
        Step keys and their values, in order of precedence.
    """

    stamp: FileStamp
    kind: str
    model: list[tuple[str, Placed]]
    extra: list[tuple[str, Placed]]
    gradients: list[tuple[str, Placed]]
    optimizers: tuple[PlacedOptimizer, ...]
    named: list[Named]
    aliases: dict[str, str]
    entries: tuple[ZipEntry, ...]
    steps: tuple[tuple[str, int], ...]


class ContentRecall:
    """What the torch file read last was like: places in the next one that is alike are known already."""

    def __init__(self) -> None:
        self.pickle = PickleRecall()
        self.tree: StateTree | None = None
        self.storages: dict[str, ZipEntry] = {}
        self.content: FileContent | None = None

    def known(self, tree: StateTree, storages: dict[str, ZipEntry], stamp: FileStamp) -> FileContent | None:
        """Return the content of a file whose tensors lie as those of the last one; None of any other."""
        if self.tree is None or self.content is None or storages != self.storages:
            return None
        if not _same_tensors(tree, self.tree):
            return None
        optimizers = tuple(
            PlacedOptimizer(placed.state, found.groups)
            for placed, found in zip(self.content.optimizers, tree.optimizers, strict=True)
        )
        return self.content._replace(stamp=stamp, optimizers=optimizers, steps=tree.steps)


def _same_tensors(one: StateTree, other: StateTree) -> bool:
    """Tell whether two files hold tensors of the same names, at the same places of the same storages."""
    if len(one.optimizers) != len(other.optimizers):
        return False
    for mine, theirs in (
        (one.model, other.model),
        (one.extra, other.extra),
        (one.gradients, other.gradients),
    ):
        if len(mine) != len(theirs):
            return False
        if not all(a == b and _same_place(x, y) for (a, x), (b, y) in zip(mine, theirs, strict=True)):
            return False
    return all(_same_state(a.state, b.state) for a, b in zip(one.optimizers, other.optimizers, strict=True))


_State = Mapping[int | str, Mapping[TensorRole, TensorRef]]


def _same_state(one: _State, other: _State) -> bool:
    """Tell whether two optimizers hold the same state, in the same order."""
    if list(one) != list(other):
        return False
    pairs = ((one[param], other[param]) for param in one)
    return all(list(a) == list(b) and all(_same_place(a[role], b[role]) for role in a) for a, b in pairs)


def _same_place(one: TensorRef, other: TensorRef) -> bool:
    """Tell whether two files describe a tensor in the same way; of shared values this is one look."""
    return one is other or (
        (one.storage, one.dtype, one.offset, one.shape, one.stride)
        == (other.storage, other.dtype, other.offset, other.shape, other.stride)
    )


def _place_all(
    pairs: list[tuple[str, TensorRef]], entries: dict[str, ZipEntry], where: str
) -> list[tuple[str, Placed]]:
    found = ((name, _place_one(ref, entries, where)) for name, ref in pairs)
    return [(name, placed) for name, placed in found if placed is not None]


def _place_one(ref: TensorRef, entries: dict[str, ZipEntry], where: str) -> Placed | None:
    entry = entries.get(ref.storage.key)
    if entry is None:
        raise DamagedError(f"storage '{ref.storage.key[:40]}' is missing from the zip", where=where)
    return place(ref, entry, where)


def _place_optimizer(tree: OptimizerTree, entries: dict[str, ZipEntry], where: str) -> PlacedOptimizer:
    state: dict[int | str, dict[TensorRole, Placed]] = {}
    for param, tensors in tree.state.items():
        found = ((role, _place_one(ref, entries, where)) for role, ref in tensors.items())
        state[param] = {role: placed for role, placed in found if placed is not None}
    return PlacedOptimizer(state, tree.groups)


def _read_torch(
    file: ReadableFile, stamp: FileStamp, recall: ContentRecall, allow_damaged: bool
) -> FileContent:
    where = str(file.path)
    archive = read_torch_zip(file, allow_damaged=allow_damaged)
    root = recall.pickle.read(archive.pickle_bytes, where)
    tree = read_state_tree(root, where, n_bytes=len(archive.pickle_bytes))
    entries = archive.storages
    content = recall.known(tree, entries, stamp) or _placed(tree, entries, stamp, where)
    recall.tree, recall.storages, recall.content = tree, entries, content
    return content


def _placed(tree: StateTree, entries: dict[str, ZipEntry], stamp: FileStamp, where: str) -> FileContent:
    return FileContent(
        stamp=stamp,
        kind="torch",
        model=_place_all(tree.model, entries, where),
        extra=_place_all(tree.extra, entries, where),
        gradients=_place_all(tree.gradients, entries, where),
        optimizers=tuple(_place_optimizer(o, entries, where) for o in tree.optimizers),
        named=[],
        aliases={},
        entries=tuple(entries.values()),
        steps=tree.steps,
    )


def _read_safetensors(file: ReadableFile, stamp: FileStamp) -> FileContent:
    header = read_header(file)
    model: list[tuple[str, Placed]] = []
    named: list[Named] = []
    for tensor in header.tensors:
        placed = Placed(tensor.dtype, tensor.shape, None, tensor.offset, tensor.nbytes)
        name, _, role = tensor.name.rpartition("@")
        if name and role in _STATE_ROLES:
            named.append(Named(name, _STATE_ROLES[role], placed))
        else:
            model.append((tensor.name, placed))
    names = {tensor.name for tensor in header.tensors}
    # safetensors.torch.save_model writes a tied name as metadata: removed name -> kept name.
    aliases = {k: v for k, v in header.metadata.items() if v in names and k not in names}
    step = header.metadata.get("step", "")
    steps = (("step", int(step)),) if step.isascii() and step.isdigit() and len(step) < 19 else ()
    return FileContent(stamp, "safetensors", model, [], [], (), named, aliases, (), steps)


def read_content(
    path: Path,
    counter: ByteCounter,
    recall: ContentRecall | None = None,
    access: Access | None = None,
) -> FileContent:
    """Return what a weight file holds, from its header.

    Parameters
    ----------
    path
        The file.
    counter
        Told of every byte read.
    recall
        What the file read before was like; by default nothing is known. The answer does not depend on it.
    access
        Where links may lead, and whether damage is accepted; by default the path is followed.

    Raises
    ------
    RefusedLinkError
        The path leads where it may not.
    RottenError
        What describes the tensors does not match its checksum.
    DamagedError
        The file is empty, cut off or contradicts itself.
    UnsafePickleError
        It wants to import names outside the allowlist.
    InputError
        It is in a format that is not read.
    """
    stamp = stamp_of(path) if access is None else access.admit(path)
    with ReadableFile(path, counter, stamp) as file:
        if file.nbytes == 0:
            raise DamagedError("the file is empty", where=str(path))
        first = file.read(0, min(file.nbytes, 16))
        if is_zip(first):
            allow_damaged = access is not None and access.allow_damaged
            return _read_torch(file, stamp, recall or ContentRecall(), allow_damaged)
        if looks_like_safetensors(first, file.nbytes) or path.suffix == ".safetensors":
            return _read_safetensors(file, stamp)
        if first[:1] == b"\x80":
            raise InputError(
                "a torch file of the legacy format or a bare pickle, which is not read",
                where=str(path),
                remedy="load it with PyTorch 1.6 or later and save it again with torch.save",
            )
        if first.startswith(b"version https://"[:16]):
            raise DamagedError(
                "a pointer of git-LFS, not the file itself", where=str(path), remedy="fetch it: git lfs pull"
            )
    raise DamagedError("no checkpoint: neither a torch file nor safetensors", where=str(path))


def layout_of(path: str, content: FileContent, regions: tuple[Region, ...]) -> FileLayout:
    """Return the layout of a weight file whose regions are known.

    Parameters
    ----------
    path
        Relative to the checkpoint's root.
    regions
        Ascending; each lies in one zip entry where there are any.
    """
    starts = sorted(region.offset for region in regions)
    entries, at = [], 0
    for entry in sorted(content.entries):
        while at < len(starts) and starts[at] < entry.data_offset:
            at += 1
        holds = at < len(starts) and starts[at] < entry.data_offset + entry.data_nbytes
        if holds and entry.crc_offsets:
            entries.append(entry)
    return FileLayout(
        path=path, nbytes=content.stamp.nbytes, kind=content.kind, regions=regions, zip_entries=tuple(entries)
    )
