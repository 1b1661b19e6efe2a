"""Read one weight file of any format: its content and the places of its tensors."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Final, NamedTuple

from inshrink_core.checkpoint import DTYPE_SIZES, TensorRole, ZipEntry
from inshrink_core.errors import (
    DamagedError,
    InputError,
    InshrinkError,
    NotCheckpointError,
    UnsafePickleError,
    clipped,
)
from inshrink_core.formats.checksums import PackedZip
from inshrink_core.formats.disk import Access, FileStamp, Readable, ReadableFile
from inshrink_core.formats.safetensors_file import looks_like_safetensors, read_header
from inshrink_core.formats.state_tree import EMA_KEYS, MODEL_KEYS, Named, Placed, StateTree, read_state_tree
from inshrink_core.formats.torch.legacy import MAGIC_WITHIN, is_legacy, read_torch_legacy
from inshrink_core.formats.torch.pickles import Foreign, TensorRef, read_pickle
from inshrink_core.formats.torch.zip import is_zip, read_torch_zip

_STATE_ROLES: Final = {role.value: role for role in TensorRole if role.value not in ("weight", "buffer")}

_SHARDING: Final = "DCP_SHARDING_INFO"

_TAR_AT: Final = 257
"""Offset of a tar's magic bytes. PyTorch 0.1 wrote tar files."""

_TEXT: Final = re.compile(rb"[\t\n\r -~]+")


class FileContent(NamedTuple):
    """The header content of one weight file.

    Parameters
    ----------
    stamp
        The stamp for reopening the file.
    kind
        ``torch``, ``safetensors``, or the name of a layout.
    tree
        Its tensors and step numbers.
    aliases
        Further names of tensors, mapped to their keys.
    entries
        The zip entries of storages.
    zips
        For a file that is a sequence of zips, the span of each, in order.
    """

    stamp: FileStamp
    kind: str
    tree: StateTree
    aliases: Mapping[str, str] = MappingProxyType({})
    entries: tuple[ZipEntry, ...] = ()
    zips: tuple[PackedZip, ...] = ()


def place(ref: TensorRef, entry: ZipEntry | None, where: str) -> Placed | None:
    """Return the place of a tensor in a torch file; None if it is carried unread (quantized, expanded).

    Raises
    ------
    DamagedError
        The tensor's storage is missing, or the tensor reaches past it.
    """
    itemsize = DTYPE_SIZES.get(ref.dtype)
    if itemsize is None:
        return None
    if entry is None:
        raise DamagedError(f"storage '{ref.storage.key[:40]}' is missing from the zip", where=where)
    shape, stride = ref.shape, ref.stride
    numel, extent, contiguous = 1, 1, True
    for size, step in zip(shape[::-1], stride[::-1], strict=True):
        contiguous &= size == 1 or step == numel
        numel *= size
        extent += (size - 1) * step
    if numel == 0:
        return Placed.empty(ref.dtype, shape, entry.data_offset, where)
    if (ref.offset + extent) * itemsize > entry.data_nbytes:
        what = f"a tensor of shape {clipped(str(shape))} reaches past its storage '{ref.storage.key[:40]}'"
        raise DamagedError(what, where=where, expected=f"at most {entry.data_nbytes} bytes")
    # An expanded tensor repeats one element. If the repetition far exceeds its bytes, it is a constant or an
    # attack on memory; either way it is carried unread.
    if numel > max(extent, 1 << 16) * 64:
        return None
    offset = entry.data_offset + ref.offset * itemsize
    return Placed(ref.dtype, shape, None if contiguous else stride, offset, extent * itemsize)


def _require_plain(root: object, tree: StateTree, where: str) -> None:
    """Refuse a file whose model is an object that is neither a state dict nor a module.

    Raises
    ------
    UnsafePickleError
        The model is such an object.
    """
    items = [root.get(key) for key in (*MODEL_KEYS, *EMA_KEYS)] if isinstance(root, dict) else []
    wanted = sorted({value.name for value in items if isinstance(value, Foreign) and not value})
    if wanted and not (tree.model or tree.extra):
        raise UnsafePickleError("the pickle wants to import", where=where, wanted=tuple(wanted))


class TorchFile(NamedTuple):
    """The description in a torch file: the content and size of its pickle, and the storages."""

    file: Readable
    root: object
    n_bytes: int
    storages: Mapping[str, ZipEntry]

    @property
    def where(self) -> str:
        """The file, for messages."""
        return str(self.file.path)

    @classmethod
    def read(cls, file: Readable, first: bytes = b"", *, allow_damaged: bool = False) -> TorchFile:
        """Return the description; `first` are the first bytes, which identify the legacy format."""
        if is_legacy(first):
            return cls(file, *read_torch_legacy(file))
        pickled, storages = read_torch_zip(file, allow_damaged=allow_damaged)
        return cls(file, read_pickle(pickled, str(file.path)), len(pickled), storages)

    def place(self, ref: TensorRef) -> Placed | None:
        """Return the place of a tensor (`place`)."""
        return place(ref, self.storages.get(ref.storage.key), self.where)

    def content(self, stamp: FileStamp) -> FileContent:
        """Return the content of the file."""
        tree = read_state_tree(self.root, self.place, self.where, n_bytes=self.n_bytes)
        _require_plain(self.root, tree, self.where)
        return FileContent(stamp, "torch", tree, entries=tuple(sorted(self.storages.values())))


def _is_shard(name: str, sharding: str) -> bool:
    """Return whether a tensor may be only a shard, from PyTorch's sharding metadata."""
    if not sharding:
        return False
    if name.startswith("shard-"):
        return True
    try:
        given = json.loads(sharding)
        return any(any(item["saved_offsets"]) for item in given.values())
    except (ValueError, RecursionError, AttributeError, LookupError, TypeError):
        return True


def _read_safetensors(file: ReadableFile, stamp: FileStamp) -> FileContent:
    tensors, metadata = read_header(file)
    if _is_shard(file.path.name, metadata.get(_SHARDING, "")):
        what = "shards of a distributed checkpoint in safetensors, which are not put together"
        remedy = "consolidate them: HuggingFaceStorageWriter(enable_consolidation=True)"
        raise InputError(what, where=str(file.path), remedy=remedy)
    model: list[tuple[str, Placed]] = []
    named: list[Named] = []
    for key, placed in tensors:
        name, _, role = key.rpartition("@")
        if name and role in _STATE_ROLES:
            named.append(Named(name, _STATE_ROLES[role], placed))
        else:
            model.append((key, placed))
    names = dict(tensors)
    # safetensors.torch.save_model writes a tied name as metadata: removed name -> kept name.
    aliases = {k: v for k, v in metadata.items() if v in names and k not in names}
    step = metadata.get("step", "")
    steps = (("step", int(step)),) if step.isascii() and step.isdigit() and len(step) < 19 else ()
    return FileContent(stamp, "safetensors", StateTree(model, steps=steps, named=named), aliases)


def read_content(path: Path, access: Access) -> FileContent:
    """Return the content of a weight file, from its header.

    Parameters
    ----------
    path
        The file.
    access
        Access rights, and whether damage is accepted.

    Raises
    ------
    RefusedLinkError
        The path leads out of the run.
    ChecksumError
        The description of the tensors does not match its checksum.
    DamagedError
        The file is empty, truncated or contradicts itself.
    UnsafePickleError
        It imports names outside the allowlist.
    InputError
        Its format is not supported.
    NotCheckpointError
        It was never a checkpoint.
    """
    stamp = access.admit(path)
    with ReadableFile(path, access.counter, stamp) as file:
        if file.nbytes == 0:
            raise DamagedError("the file is empty", where=str(path))
        first = file.read(0, min(file.nbytes, 16))
        if first[:1] == b"\x80":
            first = file.read(0, min(file.nbytes, MAGIC_WITHIN))
        if is_zip(first) or is_legacy(first):
            return TorchFile.read(file, first, allow_damaged=access.allow_damaged).content(stamp)
        if looks_like_safetensors(first, file.nbytes) or path.suffix == ".safetensors":
            return _read_safetensors(file, stamp)
        is_tar = file.nbytes > 2 * _TAR_AT and file.read(_TAR_AT, 5) == b"ustar" and path.suffix != ".tar"
    # Any file may be named .bin, and text may have any name; otherwise the name promises a checkpoint.
    foreign = (path.suffix == ".bin" and any(first)) or _TEXT.fullmatch(first)
    error: type[InshrinkError] = NotCheckpointError if foreign else DamagedError
    what, remedy = "no checkpoint: neither a torch file nor safetensors", ""
    if first[:1] == b"\x80":
        error, what = NotCheckpointError, "a bare pickle, which is not read"
        remedy = "if you trust it: torch.save(pickle.load(open(path, 'rb')), path)"
    elif is_tar:
        error, what = InputError, "a tar, as PyTorch 0.1 wrote its files, which is not read"
        remedy = "if you trust it: torch.save(torch.load(path, weights_only=False), path)"
    elif first == b"version https://":
        error, what = DamagedError, "a pointer of git-LFS, not the file itself"
        remedy = "fetch it: git lfs pull"
    raise error(what, where=str(path), remedy=remedy)
