"""One weight file: what it holds and where, whatever its format."""

from __future__ import annotations

from pathlib import Path
from typing import Final, NamedTuple

from inshrink_core.checkpoint import FileLayout, Region, TensorRole, ZipEntry
from inshrink_core.errors import DamagedError, InputError
from inshrink_core.formats.disk import ByteCounter, FileStamp, ReadableFile, stamp_of
from inshrink_core.formats.pickle_machine import read_pickle
from inshrink_core.formats.pickle_names import TensorRef
from inshrink_core.formats.placement import Named, Placed, place
from inshrink_core.formats.roles import PlacedOptimizer
from inshrink_core.formats.safetensors_file import looks_like_safetensors, read_header
from inshrink_core.formats.state_tree import OptimizerTree, StateTree, read_state_tree
from inshrink_core.formats.torch_zip import is_zip, read_torch_zip

__all__ = ["FileContent", "layout_of", "read_content", "sniff"]

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


def sniff(path: Path, counter: ByteCounter) -> str | None:
    """Return ``torch``, ``safetensors``, ``legacy`` or None by the first bytes of a file."""
    with ReadableFile(path, counter) as file:
        first = file.read(0, min(file.nbytes, 16))
    if is_zip(first):
        return "torch"
    if looks_like_safetensors(first, file.nbytes):
        return "safetensors"
    return "legacy" if first[:1] == b"\x80" else None


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


def _read_torch(file: ReadableFile, stamp: FileStamp) -> FileContent:
    where = str(file.path)
    archive = read_torch_zip(file)
    tree: StateTree = read_state_tree(read_pickle(archive.pickle_bytes, where), where)
    entries = archive.storages
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


def read_content(path: Path, counter: ByteCounter) -> FileContent:
    """Return what a weight file holds, from its header.

    Raises
    ------
    DamagedError
        The file is empty, cut off or contradicts itself.
    UnsafePickleError
        It wants to import names outside the allowlist.
    InputError
        It is in a format that is not read.
    """
    stamp = stamp_of(path)
    with ReadableFile(path, counter, stamp) as file:
        if file.nbytes == 0:
            raise DamagedError("the file is empty", where=str(path))
        first = file.read(0, min(file.nbytes, 16))
        if is_zip(first):
            return _read_torch(file, stamp)
        if looks_like_safetensors(first, file.nbytes) or path.suffix == ".safetensors":
            return _read_safetensors(file, stamp)
        if first[:1] == b"\x80":
            raise InputError(
                "a torch file of the legacy format or a bare pickle, which is not read",
                where=str(path),
                remedy="load it with PyTorch 1.6 or later and save it again with torch.save",
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
