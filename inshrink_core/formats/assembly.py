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
from typing import Final, NamedTuple

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
    is_average_name,
)
from inshrink_core.errors import InputError, NotCheckpointError
from inshrink_core.formats.attribution.laws import (
    Attribution,
    Claims,
    Slot,
    in_order,
    is_sorted,
    told_by_headers,
)
from inshrink_core.formats.checksums import PackedZip
from inshrink_core.formats.content import FileContent
from inshrink_core.formats.disk import ByteCounter, FileStamp, Skipped, check_names, unsafe_names
from inshrink_core.formats.source import FileSource
from inshrink_core.formats.state_tree import Named, Placed, StateTree, assign_roles, parameters_of, told_role

NO_WEIGHTS: Final = "no weights in it"


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
    slots
        The parameters that optimizers know by number alone.
    owners
        Whose they are, as far as it follows from headers, or as was given.
    free
        The weights that they may be, by shape, in the model's order as far as that is known.
    ordered
        Whether it is: the weights are not sorted by name.
    zips
        Of the files that are a row of zips, where each of them lies.
    skipped
        Files beside the tensors that were left out, and why.
    models
        Names of the models beside the main one, with which the names of their tensors begin.
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
    slots: tuple[Slot, ...]
    owners: Claims
    free: Mapping[str, tuple[int, ...]]
    ordered: bool
    parts: _Parts
    assembled: _Assembled
    zips: Mapping[str, tuple[PackedZip, ...]] = MappingProxyType({})
    skipped: tuple[Skipped, ...] = ()
    models: tuple[str, ...] = ()

    @property
    def nbytes(self) -> int:
        """Size of all files on disk."""
        return sum(stamp.nbytes for stamp in self.stamps.values())

    def attributed(self, told: Attribution) -> ParsedCheckpoint:
        """Return the same checkpoint with the given owners of state and order of tensors."""
        again = self.parts.parsed(self.assembled.again(told))
        return again._replace(skipped=self.skipped)

    @property
    def order(self) -> tuple[str, ...]:
        """Names of weights and buffers, in the order in which they are listed."""
        return tuple(spec.name for spec in self.specs if spec.role in MODEL_ROLES)

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
            folder="" if self.path in self.paths.values() else self.path.name,
            models=self.models,
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
    slots: tuple[Slot, ...]
    owners: Claims
    free: Mapping[str, tuple[int, ...]]
    ordered: bool
    models: tuple[str, ...]
    again: _Again


class _Again:
    """Assembles the same contents again, as given; remembers what it returned last for those alike."""

    def __init__(self, contents: Sequence[FileContent], has_gradients: Sequence[bool]) -> None:
        self._contents, self._has_gradients = contents, has_gradients
        self._last: tuple[Attribution, _Assembled] | None = None

    def __call__(self, told: Attribution) -> _Assembled:
        if self._last is None or self._last[0] != told:
            self._last = told, _assembled(self._contents, self._has_gradients, told)
        return self._last[1]

    def __eq__(self, other: object) -> bool:
        # It says nothing that the rest of a checkpoint does not say.
        return isinstance(other, _Again)

    __hash__ = None  # type: ignore[assignment]


class Recall:
    """The checkpoint that was read last: one whose tensors lie in the same way needs no new analysis."""

    sketch: object = None
    assembled: _Assembled | None = None


def _sketch(content: FileContent) -> object:
    """Return all of a file that its checkpoint follows from, but for its name, its steps and its numbers."""
    tree = content.tree
    optimizers = [
        (
            list(optimizer.state.items()),
            [(group.params, group.names, bool(group.numbers)) for group in optimizer.groups],
        )
        for optimizer in tree.optimizers
    ]
    return tree[:3], optimizers, tree.kept, tree.buffers, tree.models, content[3:]


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


def _named_averages(
    tree: StateTree, model: Sequence[tuple[int, str, Placed]], *, ordered: bool
) -> Sequence[tuple[str, Placed]]:
    """Return tensors of further models; each of a list of averages has the name of what it averages."""
    lists: dict[str, list[Slot]] = {}
    for name, placed in tree.extra:
        prefix, _, number = name.rpartition(".")
        if number.isdigit() and prefix in tree.models and is_average_name(prefix):
            lists.setdefault(prefix, []).append(Slot(name, 0, 0, placed.shape))
    weights = parameters_of(model) if lists else {}
    called: dict[str, str] = {}
    for prefix, slots in lists.items():
        has_buffers = len(slots) > len(weights)
        averaged = {name: placed.shape for _, name, placed in model} if has_buffers else weights
        owners = told_by_headers(slots, averaged, ordered=ordered)
        called |= {key: f"{prefix}.{name}" for key, name in owners.items()}
    return [(called.get(name, name), placed) for name, placed in tree.extra]


def _assembled(
    contents: Sequence[FileContent], has_gradients: Sequence[bool], told: Attribution | None = None
) -> _Assembled:
    model: list[tuple[int, str, Placed]] = []
    owner: dict[str, int] = {}
    for number, content in enumerate(contents):
        for name, placed in content.tree.model if not has_gradients[number] else ():
            if owner.setdefault(name, number) == number:
                model.append((number, name, placed))
    names = [name for _, name, _ in model]
    sides = [(number, name) for number, content in enumerate(contents) for name, _ in content.tree.extra]
    of_files = [(number, name) for number, name, _ in model] or sides
    is_ordered = not is_sorted([name for _, name in of_files]) and all(
        contents[number].kind != "safetensors" for number, _ in of_files
    )
    if told is not None or not is_ordered:
        rank = {name: at for at, name in enumerate(in_order(names, () if told is None else told.order))}
        model.sort(key=lambda one: rank[one[1]])
    models = tuple(dict.fromkeys(name for content in contents for name in content.tree.models))
    for number, content in enumerate(contents):
        for name, placed in _named_averages(content.tree, model, ordered=is_ordered):
            if owner.setdefault(name, number) == number:
                model.append((number, name, placed))
    roles = assign_roles(
        model,
        [content.tree.optimizers for content in contents],
        ordered=is_ordered,
        owners=None if told is None else told.owners,
        models=models,
    )
    buffers = [content.tree.buffers for content in contents]
    specs: list[TensorSpec] = []
    regions: list[tuple[Region, ...]] = []
    pieces: list[list[Region]] = [[] for _ in contents]
    places: dict[str, tuple[int, Placed]] = {}
    aliases: dict[str, str] = {}
    seen: set[str] = set()
    for number, content in enumerate(contents):
        main = {name for name, _ in content.tree.model}
        held = [
            told_role(tensor, buffers[number]) if tensor.name in main else tensor
            for tensor in roles.model
            if tensor.file == number
        ]
        gradients = content.tree.model if has_gradients[number] else content.tree.gradients
        held += [Named(name, TensorRole.GRADIENT, placed) for name, placed in gradients]
        held += [tensor for tensor in roles.state if tensor.file == number]
        held += content.named
        held += [Named(name, TensorRole.EXTRA, placed) for name, placed in content.tree.kept]
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
    place_of = {tensor.name: at for at, tensor in enumerate(roles.model)}
    of_model = sorted(
        (spec for spec in specs if spec.role in MODEL_ROLES and spec.name in place_of),
        key=lambda spec: place_of[spec.name],
    )
    return _Assembled(
        (*of_model, *(spec for spec in specs if spec.role not in MODEL_ROLES or spec.name not in place_of)),
        files,
        places,
        aliases,
        roles.groups,
        roles.slots,
        roles.owners,
        roles.free,
        is_ordered,
        models,
        _Again(contents, has_gradients),
    )


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
    needs_weights: bool = True,
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
    needs_weights
        Whether a checkpoint without weights is an error.

    Raises
    ------
    InputError
        No file holds a weight; NotCheckpointError where none holds any tensor.
    UnsafePathError
        A file with tensors has a name that a restore would not write; others are left out.
    """
    names, held, opaque = list(contents), list(contents.values()), dict(opaque or {})
    unsafe = unsafe_names([*names, *opaque])
    check_names(names, str(path))
    for name in unsafe:
        del opaque[name]
    has_gradients = [name in gradient_files for name in names]
    sketch = (has_gradients, list(map(_sketch, held)))
    if recall is not None and recall.assembled is not None and recall.sketch == sketch:
        found = recall.assembled
    else:
        found = _assembled(held, has_gradients)
    if recall is not None:
        recall.sketch, recall.assembled = sketch, found
    if needs_weights and not any(spec.role in MODEL_ROLES for spec in found.specs):
        # State without its weights is a part of a checkpoint: left out, it would be lost.
        part = found.specs or any(one.state for content in held for one in content.tree.optimizers)
        raise (InputError if part else NotCheckpointError)(NO_WEIGHTS, where=str(path))
    parts = _Parts(
        path,
        fmt,
        {name: (one.stamp, one.kind) for name, one in contents.items()},
        opaque,
        paths,
        [[[group.numbers for group in o.groups] for o in one.tree.optimizers] for one in held],
        sum((content.tree.steps for content in held), steps),
        {name: content.zips for name, content in contents.items() if content.zips},
    )
    left_out = (
        Skipped(str(paths[name]), f"a restore would not write that name: {reason}")
        for name, reason in unsafe.items()
    )
    return parts.parsed(found)._replace(skipped=tuple(left_out))


class _Parts(NamedTuple):
    """What of a checkpoint does not follow from where its tensors lie."""

    path: Path
    format: str
    files: Mapping[str, tuple[FileStamp, str]]
    opaque: Mapping[str, FileStamp]
    paths: Mapping[str, Path]
    numbers: list[list[list[dict[str, float]]]]
    steps: tuple[tuple[str, int], ...]
    zips: Mapping[str, tuple[PackedZip, ...]]

    def parsed(self, found: _Assembled) -> ParsedCheckpoint:
        """Return the checkpoint."""
        names = list(self.files)
        layouts = [
            FileLayout(path=name, nbytes=stamp.nbytes, kind=kind, regions=regions, zip_entries=entries)
            for (name, (stamp, kind)), (regions, entries) in zip(self.files.items(), found.files, strict=True)
        ]
        layouts += [
            FileLayout(path=name, nbytes=stamp.nbytes, kind="opaque") for name, stamp in self.opaque.items()
        ]
        return ParsedCheckpoint(
            path=self.path,
            format=self.format,
            paths=self.paths,
            stamps={name: stamp for name, (stamp, _) in self.files.items()} | dict(self.opaque),
            specs=found.specs,
            layouts=tuple(sorted(layouts, key=lambda layout: layout.path)),
            places={key: (names[number], placed) for key, (number, placed) in found.places.items()},
            aliases=found.aliases,
            hyperparameters={
                name: self.numbers[file][optimizer][group]
                for name, (file, optimizer, group) in found.groups.items()
            },
            steps=self.steps,
            slots=found.slots,
            owners=found.owners,
            free=found.free,
            ordered=found.ordered,
            parts=self,
            assembled=found,
            zips=self.zips,
            models=found.models,
        )
