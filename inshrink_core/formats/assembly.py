"""The files of one checkpoint, put together: every tensor with one key, every byte accounted for.

Tensors that lie at the same place in the same way are one tensor under several names; tensors that share
only some bytes become one region together and must survive exactly, since a change to one would change the
other.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from inshrink_core.checkpoint import (
    MODEL_ROLES,
    Checkpoint,
    FileLayout,
    LayerType,
    Member,
    Region,
    TensorRole,
    TensorSpec,
    ZipEntry,
    classify_layer,
)
from inshrink_core.errors import InputError
from inshrink_core.formats.checksums import PackedZip
from inshrink_core.formats.content import FileContent
from inshrink_core.formats.disk import ByteCounter, FileStamp, Skipped
from inshrink_core.formats.source import FileSource
from inshrink_core.formats.state_tree import Named, Placed, assign_roles

__all__ = ["ParsedCheckpoint", "Recall", "assemble"]


class ParsedCheckpoint(NamedTuple):
    """A checkpoint's headers, step still to be decided.

    Parameters
    ----------
    path
        The file or directory.
    format
        ``torch``, ``safetensors``, ``huggingface``, ``sharded-safetensors``, ``dcp``, or as its reader says.
    paths, stamps
        Of every file, by its path relative to the root.
    places
        Tensor key to file and place.
    steps
        Step keys found inside, with values.
    guessed
        Optimizer state was matched to parameters by shape.
    zips
        Of the files that are a row of zips, where each of them lies.
    skipped
        Files beside the tensors that were left out, and why.
    """

    path: Path
    format: str
    paths: Mapping[str, Path]
    stamps: Mapping[str, FileStamp]
    specs: tuple[TensorSpec, ...]
    layouts: tuple[FileLayout, ...]
    places: Mapping[str, tuple[str, Placed]]
    aliases: Mapping[str, str]
    hyperparameters: Mapping[str, Mapping[str, float]]
    steps: tuple[tuple[str, int], ...]
    guessed: bool
    zips: Mapping[str, tuple[PackedZip, ...]] = MappingProxyType({})
    skipped: tuple[Skipped, ...] = ()

    @property
    def nbytes(self) -> int:
        """Size of all files on disk."""
        return sum(stamp.nbytes for stamp in self.stamps.values())

    def weight_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return name and shape of weights and buffers."""
        return {s.name: s.shape for s in self.specs if s.role in MODEL_ROLES}

    def checkpoint(self, step: int, counter: ByteCounter) -> Checkpoint:
        """Return the checkpoint; values are read when asked for."""
        return Checkpoint(
            step=step,
            specs=self.specs,
            source=FileSource(self.paths, self.stamps, self.places, counter, zips=self.zips),
            files=self.layouts,
            aliases=self.aliases,
            hyperparameters=self.hyperparameters,
            origin=str(self.path),
        )


class _Assembled(NamedTuple):
    """What follows from where tensors lie alone; files by number.

    `groups` says of a parameter which group of which optimizer of which file has its hyperparameters.
    """

    specs: tuple[TensorSpec, ...]
    files: list[tuple[tuple[Region, ...], tuple[ZipEntry, ...]]]
    places: dict[str, tuple[int, Placed]]
    aliases: dict[str, str]
    groups: dict[str, tuple[int, int, int]]
    guessed: bool


class Recall:
    """What the checkpoint read last was like: of one whose tensors lie in the same way all is known."""

    sketch: object = None
    assembled: _Assembled | None = None


def _sketch(content: FileContent) -> object:
    """Return all of a file that its checkpoint is made of, but for its name, its steps and its numbers."""
    tree = content.tree
    optimizers = [
        (
            list(optimizer.state.items()),
            [(group.params, group.names, bool(group.numbers)) for group in optimizer.groups],
        )
        for optimizer in tree.optimizers
    ]
    return tree[:3], optimizers, content[3:]


def _is_shared(placed: Placed) -> bool:
    """Tell whether two elements of a strided tensor may be the same bytes."""
    if placed.stride is None:
        return False
    reach = 1
    for step, size in sorted(zip(placed.stride, placed.shape, strict=True)):
        if size == 1:
            continue
        if step < reach:
            return True
        reach = step * size
    return False


@functools.lru_cache(maxsize=1 << 16)
def _layer(name: str, shape: tuple[int, ...]) -> LayerType:
    # The names of a run are the same at every step; classifying them again is most of opening it.
    return classify_layer(name, shape)


@functools.lru_cache(maxsize=1 << 16)
def _spec(
    name: str, role: TensorRole, dtype: str, shape: tuple[int, ...], exact: bool, layer: LayerType
) -> TensorSpec:
    # Specs hold no values: the checkpoints of a run share theirs, which saves time and most of the memory.
    return TensorSpec(name=name, role=role, dtype=dtype, shape=shape, exact=exact, layer=layer)


def _regions(tensors: Iterable[Named]) -> tuple[tuple[Region, ...], set[str]]:
    """Return the regions that tensors make, and the keys of those that share bytes with another."""
    # Empty tensors too, as regions of no bytes: whoever asks which tensors a file holds finds them.
    ordered = sorted(
        ((t.placed.offset, t.placed.offset + t.placed.span, t) for t in tensors), key=lambda one: one[:2]
    )
    groups: list[tuple[int, int, list[Named]]] = []
    for start, end, tensor in ordered:
        if groups and start < groups[-1][1]:
            begun, reached, members = groups[-1]
            members.append(tensor)
            groups[-1] = (begun, max(reached, end), members)
        else:
            groups.append((start, end, [tensor]))
    regions = tuple(
        Region(
            start, end - start, tuple([Member(t.key, t.placed.offset - start, t.placed.stride) for t in held])
        )
        for start, end, held in groups
    )
    return regions, {tensor.key for *_, held in groups if len(held) > 1 for tensor in held}


def _place_in_regions(
    tensors: Iterable[Named],
) -> tuple[tuple[Region, ...], list[TensorSpec], dict[str, str]]:
    """Return regions, specs and aliases of the tensors of one file, whose keys are distinct.

    A tensor tied to an embedding is an embedding, whichever of the two names comes first.
    """
    first_at: dict[Placed, str] = {}
    kept: dict[str, Named] = {}
    aliases: dict[str, str] = {}
    layers: dict[str, LayerType] = {}
    for tensor in tensors:
        key, placed = tensor.key, tensor.placed
        owner = first_at.setdefault(placed, key) if placed.span else key
        if owner != key:
            aliases[key] = owner
            if _layer(tensor.name, placed.shape) is LayerType.EMBEDDING:
                layers[owner] = LayerType.EMBEDDING
        else:
            kept[key] = tensor
    regions, shared = _regions(tensor for tensor in kept.values() if not tensor.placed.pieces)
    specs = [
        _spec(
            t.name,
            t.role,
            t.placed.dtype,
            t.placed.shape,
            key in shared or _is_shared(t.placed),
            layers.get(key) or _layer(t.name, t.placed.shape),
        )
        for key, t in kept.items()
    ]
    return regions, specs, aliases


def _entries_of(content: FileContent, regions: tuple[Region, ...]) -> tuple[ZipEntry, ...]:
    """Return the zip entries that hold regions, each of which lies in one."""
    entries, at = [], 0
    for entry in content.entries:
        while at < len(regions) and regions[at].offset < entry.data_offset:
            at += 1
        holds = at < len(regions) and regions[at].offset < entry.data_offset + entry.data_nbytes
        if holds and entry.crc_offsets:
            entries.append(entry)
    return tuple(entries)


def _assembled(contents: Sequence[FileContent], has_gradients: Sequence[bool]) -> _Assembled:
    model: list[tuple[int, str, Placed]] = []
    owner: dict[str, int] = {}
    for number, content in enumerate(contents):
        for name, placed in content.tree.model if not has_gradients[number] else ():
            if owner.setdefault(name, number) == number:
                model.append((number, name, placed))
    roles = assign_roles(model, [content.tree.optimizers for content in contents])
    specs: list[TensorSpec] = []
    regions: list[tuple[Region, ...]] = []
    pieces: list[list[Region]] = [[] for _ in contents]
    places: dict[str, tuple[int, Placed]] = {}
    aliases: dict[str, str] = {}
    seen: set[str] = set()
    for number, content in enumerate(contents):
        held = [tensor for tensor in roles.model if tensor.file == number]
        held += [Named(name, TensorRole.WEIGHT, placed) for name, placed in content.tree.extra]
        gradients = content.tree.model if has_gradients[number] else content.tree.gradients
        held += [Named(name, TensorRole.GRADIENT, placed) for name, placed in gradients]
        held += [tensor for tensor in roles.state if tensor.file == number]
        held += content.named
        tensors: list[Named] = []
        for tensor in held:
            if tensor.key not in seen:
                seen.add(tensor.key)
                tensors.append(tensor)
        found_regions, found, tied = _place_in_regions(tensors)
        specs += found
        aliases |= tied | dict(content.aliases)
        regions.append(found_regions)
        places |= {t.key: (number, t.placed) for t in tensors if t.key not in tied}
    for key, (_, placed) in places.items():
        for piece in placed.pieces:
            member = Member(key, 0, piece.placed.stride, piece.box)
            pieces[piece.file].append(Region(piece.placed.offset, piece.placed.span, (member,)))
    files = [
        (ordered := tuple(sorted([*whole, *parts], key=lambda r: r[:2])), _entries_of(content, ordered))
        for content, whole, parts in zip(contents, regions, pieces, strict=True)
    ]
    aliases = {alias: key for alias, key in aliases.items() if key in places and alias not in places}
    return _Assembled(tuple(specs), files, places, aliases, roles.groups, roles.guessed)


def assemble(
    path: Path,
    fmt: str,
    contents: Mapping[str, FileContent],
    *,
    paths: Mapping[str, Path],
    opaque: Mapping[str, FileStamp] | None = None,
    steps: tuple[tuple[str, int], ...] = (),
    gradient_files: Iterable[str] = (),
    recall: Recall | None = None,
) -> ParsedCheckpoint:
    """Return one checkpoint from the content of its files.

    Parameters
    ----------
    path
        The checkpoint, a file or a directory.
    fmt
        What it is called.
    contents
        Weight and optimizer files by relative path; earlier ones win where names repeat.
    paths
        Every file by relative path.
    opaque
        Files that travel as they are.
    steps
        Step keys found beside the files, before those inside.
    gradient_files
        Those of `contents` whose tensors are gradients.
    recall
        What the checkpoint before was like; the answer does not depend on it.

    Raises
    ------
    InputError
        No file holds a weight.
    """
    names, held, opaque = list(contents), list(contents.values()), opaque or {}
    has_gradients = [name in gradient_files for name in names]
    sketch = (has_gradients, list(map(_sketch, held)))
    if recall is not None and recall.assembled is not None and recall.sketch == sketch:
        found = recall.assembled
    else:
        found = _assembled(held, has_gradients)
    if recall is not None:
        recall.sketch, recall.assembled = sketch, found
    if not any(spec.role in MODEL_ROLES for spec in found.specs):
        raise InputError("no weights in it", where=str(path))
    layouts = [
        FileLayout(path=name, nbytes=one.stamp.nbytes, kind=one.kind, regions=regions, zip_entries=entries)
        for (name, one), (regions, entries) in zip(contents.items(), found.files, strict=True)
    ]
    layouts += [FileLayout(path=name, nbytes=stamp.nbytes, kind="opaque") for name, stamp in opaque.items()]
    return ParsedCheckpoint(
        path=path,
        format=fmt,
        paths=paths,
        stamps={name: content.stamp for name, content in contents.items()} | dict(opaque),
        specs=found.specs,
        layouts=tuple(sorted(layouts, key=lambda layout: layout.path)),
        places={key: (names[number], placed) for key, (number, placed) in found.places.items()},
        aliases=found.aliases,
        hyperparameters={
            name: held[file].tree.optimizers[optimizer].groups[group].numbers
            for name, (file, optimizer, group) in found.groups.items()
        },
        steps=sum((content.tree.steps for content in held), steps),
        guessed=found.guessed,
        zips={name: content.zips for name, content in contents.items() if content.zips},
    )
