"""Assemble the files of one checkpoint: each tensor gets one key, and every byte is accounted for.

Tensors with the same place and strides are one tensor with several names. Tensors that share only some bytes
form one region together and are stored exactly, since a change to one would change the other.
"""

from __future__ import annotations

import functools
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

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
from inshrink_core.errors import DamagedError, InputError, NotCheckpointError, clipped
from inshrink_core.formats.content import FileContent
from inshrink_core.formats.disk import ByteCounter, FileStamp, Skipped, check_names, unsafe_names
from inshrink_core.formats.matching.laws import Claims, Matching, Slot, claims_of_headers, in_order, is_sorted
from inshrink_core.formats.source import FileSource
from inshrink_core.formats.state_tree import (
    Named,
    Piece,
    Placed,
    StateTree,
    assign_roles,
    is_shared,
    parameters_of,
)

NO_WEIGHTS: Final = "no weights in it"


@dataclass(frozen=True, kw_only=True)
class ParsedCheckpoint:
    """The headers of a checkpoint whose step is not decided yet.

    Parameters
    ----------
    path
        The file or directory.
    format
        ``torch``, ``safetensors``, ``huggingface``, ``sharded-safetensors``, ``dcp``, or the name given by
        its reader.
    paths, stamps
        Path and stamp of every file, by relative path; files with tensors first.
    steps
        Step keys found inside, with values.
    numbers
        Hyperparameters by file, optimizer and group.
    skipped
        Files beside the tensors that were left out, with reasons.
    contents
        Content of the files with tensors; without steps and hyperparameters, as checkpoints of equal layout
        share it. The fields below follow from it.
    regions
        Regions and zip entries of the files with tensors.
    places
        Tensor key to file number and place.
    groups
        File, optimizer and group with the hyperparameters of a parameter.
    slots
        The parameters that optimizers know by number only.
    owners
        Parameter names of the slots, as far as headers or a given matching determine them.
    free
        Shapes of the candidate weights for the slots, in the model's order if known.
    ordered
        Whether `free` is in the model's order: its weights are not sorted by name.
    models
        Names of the models beside the main one, which prefix the names of their tensors.
    weight_shapes
        Name and shape of weights and buffers.
    """

    path: Path
    format: str
    paths: Mapping[str, Path]
    stamps: Mapping[str, FileStamp]
    steps: tuple[tuple[str, int], ...]
    numbers: Sequence[Sequence[Sequence[Mapping[str, float]]]]
    skipped: tuple[Skipped, ...]
    contents: Sequence[FileContent] = field(compare=False)
    specs: tuple[TensorSpec, ...]
    regions: Sequence[tuple[tuple[Region, ...], tuple[ZipEntry, ...]]]
    places: Mapping[str, Placed]
    aliases: Mapping[str, str]
    groups: Mapping[str, tuple[int, int, int]]
    slots: tuple[Slot, ...]
    owners: Claims
    free: Mapping[str, tuple[int, ...]]
    ordered: bool
    models: tuple[str, ...]
    weight_shapes: Mapping[str, tuple[int, ...]]

    @property
    def nbytes(self) -> int:
        """Total size of all files in bytes."""
        return sum(stamp.nbytes for stamp in self.stamps.values())

    @functools.cached_property
    def layouts(self) -> tuple[FileLayout, ...]:
        """The file layouts, sorted by path."""
        found = [FileLayout(path=n, nbytes=stamp.nbytes, kind="opaque") for n, stamp in self.stamps.items()]
        for number, (content, (regions, entries)) in enumerate(zip(self.contents, self.regions, strict=True)):
            of_tensors: Any = {"kind": content.kind, "regions": regions, "zip_entries": entries}
            found[number] = replace(found[number], **of_tensors)
        return tuple(sorted(found, key=lambda layout: layout.path))

    @functools.cached_property
    def hyperparameters(self) -> Mapping[str, Mapping[str, float]]:
        """The hyperparameters of each parameter's group."""
        return {name: self.numbers[file][item][group] for name, (file, item, group) in self.groups.items()}

    @property
    def order(self) -> tuple[str, ...]:
        """Names of weights and buffers, in listing order."""
        return tuple(self.weight_shapes)

    def matched(self, matching: Matching) -> ParsedCheckpoint:
        """Return the same checkpoint with the given owners of state and order of tensors."""
        return replace(self, **_arranged(self.contents, matching))

    def checkpoint(self, step: int, counter: ByteCounter, *, allow_damaged: bool = False) -> Checkpoint:
        """Return the checkpoint; values are read on access.

        If damage is allowed, every file is read once, and its bytes are accepted as they are.
        """
        zips = {name: content.zips for name, content in zip(self.stamps, self.contents, strict=False)}
        source = FileSource(self.paths, self.stamps, self.places, counter, zips=zips)
        return Checkpoint(
            step=step,
            specs=self.specs,
            source=source,
            files=source.accept_damage(self.layouts) if allow_damaged else self.layouts,
            aliases=self.aliases,
            hyperparameters=self.hyperparameters,
            origin=str(self.path),
            folder="" if self.path in self.paths.values() else self.path.name,
            models=self.models,
        )


_last: tuple[object, dict[str, Any]] = None, {}
"""The sketches and the fields of the files that were analysed last: checkpoints of a run are alike."""


def _arranged(contents: Sequence[FileContent], matching: Matching | None = None) -> dict[str, Any]:
    """Return the fields of a `ParsedCheckpoint` that follow from the content of its files."""
    global _last
    key, found = _last
    if key != (sketches := [[_sketch(content) for content in contents], matching]):
        found = _analysed(contents, matching)
        _last = sketches, found
    return found


def _sketch(content: FileContent) -> object:
    """Return all that determines a file's analysis: everything but stamp, steps and hyperparameters."""
    tree = content.tree
    groups = [[(g.params, g.names, bool(g.numbers)) for g in item.groups] for item in tree.optimizers]
    optimizers = [list(optimizer.state.items()) for optimizer in tree.optimizers], groups
    return content.kind, tree._replace(optimizers=(), steps=()), optimizers, content[3:]


# Cached because names repeat at every step; classifying them dominates the time to open a run.
_layer: Final = functools.lru_cache(maxsize=1 << 16)(classify_layer)

# Specs hold no values, so the checkpoints of a run share them, which saves time and memory.
_spec: Final = functools.lru_cache(maxsize=1 << 16)(TensorSpec)


def _regions(tensors: Iterable[Named]) -> tuple[list[Region], set[str]]:
    """Return the regions of tensors, and the keys of tensors that share bytes with another."""
    # Empty tensors become regions without bytes, so that layouts list all tensors of a file.
    groups: list[tuple[int, int, list[Named]]] = []
    for tensor in sorted(tensors, key=lambda t: (t.placed.offset, t.placed.span)):
        start, end = tensor.placed.offset, tensor.placed.offset + tensor.placed.span
        if groups and start < groups[-1][1]:
            begun, reached, members = groups[-1]
            members.append(tensor)
            groups[-1] = (begun, max(reached, end), members)
        else:
            groups.append((start, end, [tensor]))
    regions = []
    for start, end, items in groups:
        rows = tuple([Member(t.key, t.placed.offset - start, t.placed.stride) for t in items])
        regions.append(Region(start, end - start, rows))
    return regions, {tensor.key for *_, items in groups if len(items) > 1 for tensor in items}


def _place_in_regions(tensors: Mapping[str, Named]) -> tuple[list[Region], list[TensorSpec], dict[str, str]]:
    """Return regions, specs and aliases of one file's tensors, given by key.

    A tensor tied to an embedding is classified as an embedding, regardless of the order of the two names.
    """
    first_at: dict[Placed, str] = {}
    aliases: dict[str, str] = {}
    layers: dict[str, LayerType] = {}
    for key, tensor in tensors.items():
        owner = first_at.setdefault(tensor.placed, key) if tensor.placed.span else key
        if owner != key:
            aliases[key] = owner
            if _layer(tensor.name, tensor.placed.shape) is LayerType.EMBEDDING:
                layers[owner] = LayerType.EMBEDDING
    remaining = {key: tensor for key, tensor in tensors.items() if key not in aliases}
    regions, shared = _regions(tensor for tensor in remaining.values() if not tensor.placed.pieces)
    specs = []
    for key, (name, role, placed, _) in remaining.items():
        layer = layers.get(key) or _layer(name, placed.shape)
        exact = key in shared or is_shared(placed.shape, placed.stride)
        about: Any = {"role": role, "dtype": placed.dtype, "shape": placed.shape, "layer": layer}
        specs.append(_spec(name=name, exact=exact, **about))
    return regions, specs, aliases


def _with_entries(
    content: FileContent, regions: list[Region]
) -> tuple[tuple[Region, ...], tuple[ZipEntry, ...]]:
    """Return the regions of a file in order, and the zip entries that contain any; each region is in one.

    Raises
    ------
    DamagedError
        Two regions share bytes.
    """
    ordered = tuple(sorted(regions, key=lambda region: region[:2]))
    for first, second in pairwise(ordered):
        if first.offset + first.nbytes > second.offset:
            what = f"tensors '{clipped(first.members[0].key)}' and '{clipped(second.members[0].key)}' overlap"
            raise DamagedError(what, where=content.stamp.real_path)
    starts = [region.offset for region in ordered]
    rows = ((e, e.data_offset, e.data_offset + e.data_nbytes) for e in content.entries if e.crc_offsets)
    holding = (entry for entry, *span in rows if bisect_left(starts, span[0]) < bisect_left(starts, span[1]))
    return ordered, tuple(holding)


def _named_averages(
    tree: StateTree, model: Mapping[str, tuple[int, Placed]], *, ordered: bool
) -> Sequence[tuple[str, Placed]]:
    """Return the tensors of further models; tensors in lists of averages get their originals' names."""
    lists: dict[str, list[Slot]] = {}
    for name, placed in tree.extra:
        prefix, _, number = name.rpartition(".")
        if number.isdigit() and prefix in tree.models and is_average_name(prefix):
            lists.setdefault(prefix, []).append(Slot(name, 0, 0, placed.shape))
    weights = parameters_of(model) if lists else {}
    called: dict[str, str] = {}
    for prefix, slots in lists.items():
        has_buffers = len(slots) > len(weights)
        averaged = {name: placed.shape for name, (_, placed) in model.items()} if has_buffers else weights
        owners = claims_of_headers(slots, averaged, ordered=ordered)
        called |= {key: f"{prefix}.{name}" for key, name in owners.items()}
    return [(called.get(name, name), placed) for name, placed in tree.extra]


_Model = dict[str, tuple[int, Placed]]
"""Tensors of a model by name: number of the file, and place."""


def _model_of(contents: Sequence[FileContent], matching: Matching | None) -> tuple[_Model, bool]:
    """Return the model's tensors, in its own order if it is known, and whether the files have that order."""
    model: _Model = {}
    for number, content in enumerate(contents):
        for name, placed in content.tree.model:
            model.setdefault(name, (number, placed))
    of_files = [(number, name) for name, (number, _) in model.items()] or [
        (number, name) for number, content in enumerate(contents) for name, _ in content.tree.extra
    ]
    from_safetensors = any(contents[number].kind == "safetensors" for number, _ in of_files)
    ordered = not (from_safetensors or is_sorted([name for _, name in of_files]))
    if matching is not None or not ordered:
        order = in_order(model, () if matching is None else matching.order)
        model = {name: model[name] for name in order}
    return model, ordered


def _analysed(contents: Sequence[FileContent], matching: Matching | None) -> dict[str, Any]:
    model, ordered = _model_of(contents, matching)
    models = tuple(dict.fromkeys(name for content in contents for name in content.tree.models))
    for number, content in enumerate(contents):
        for name, placed in _named_averages(content.tree, model, ordered=ordered):
            model.setdefault(name, (number, placed))
    optimizers, owners = [content.tree.optimizers for content in contents], matching and matching.owners
    roles = assign_roles(model, optimizers, ordered=ordered, owners=owners, models=models)
    specs: list[TensorSpec] = []
    regions: list[list[Region]] = [[] for _ in contents]
    places: dict[str, Placed] = {}
    aliases: dict[str, str] = {}
    seen: set[str] = set()
    for number, content in enumerate(contents):
        tree = content.tree
        main = {name for name, _ in tree.model}
        members = [
            *(tree.with_role(t) if t.name in main else t for t in roles.model if t.file == number),
            *(Named(name, TensorRole.GRADIENT, placed) for name, placed in tree.gradients),
            *(tensor for tensor in roles.state if tensor.file == number),
            *tree.named,
        ]
        tensors: dict[str, Named] = {}
        for tensor in members:
            if (key := tensor.key) not in seen:
                tensors.setdefault(key, tensor)
        seen |= tensors.keys()
        found_regions, found, tied = _place_in_regions(tensors)
        regions[number] += found_regions
        specs += found
        aliases |= tied | dict(content.aliases)
        for key, (*_, placed, _) in tensors.items():
            if key not in tied:
                places[key] = placed._replace(pieces=placed.pieces or (Piece(None, number, placed),))
            for box, file, part in placed.pieces if key not in tied else ():
                member = Member(key, 0, part.stride, box)
                regions[file].append(Region(part.offset, part.span, (member,)))
    rank = {name: at for at, name in enumerate(model)}
    ranks = [rank.get(spec.name, len(rank)) if spec.role in MODEL_ROLES else len(rank) for spec in specs]
    # Tensors of the model come first, in its order.
    ranked = tuple(specs[at] for at in sorted(range(len(specs)), key=ranks.__getitem__))
    return {
        "contents": contents,
        "specs": ranked,
        "regions": [_with_entries(*row) for row in zip(contents, regions, strict=True)],
        "places": places,
        "aliases": {a: key for a, key in aliases.items() if key in places and a not in places},
        "ordered": ordered,
        "models": models,
        "weight_shapes": {spec.name: spec.shape for spec in ranked if spec.role in MODEL_ROLES},
        **{name: getattr(roles, name) for name in ("groups", "slots", "owners", "free")},
    }


def assemble(
    path: Path,
    fmt: str,
    contents: Mapping[str, FileContent],
    *,
    paths: Mapping[str, Path],
    opaque: Mapping[str, FileStamp] | None = None,
    steps: tuple[tuple[str, int], ...] = (),
    needs_weights: bool = True,
    skipped: Iterable[Skipped] = (),
) -> ParsedCheckpoint:
    """Return one checkpoint from the content of its files.

    Parameters
    ----------
    path
        The checkpoint, a file or a directory.
    fmt
        Name of its format.
    contents
        Weight and optimizer files by relative path; earlier ones win if names repeat.
    paths
        Every file by relative path.
    opaque
        Files that are carried unread.
    steps
        Step keys found beside the files; they precede those inside.
    needs_weights
        Whether a checkpoint without weights is an error.
    skipped
        Files that were left out, with reasons.

    Raises
    ------
    InputError
        No file holds a weight; NotCheckpointError if none holds any tensor.
    UnsafePathError
        A file with tensors has a name that is unsafe to write; other such files are left out.
    DamagedError
        A piece of a tensor shares bytes with another tensor.
    """
    file_contents = list(contents.values())
    unsafe = unsafe_names([*contents, *(opaque or {})])
    check_names(contents, str(path))
    arranged = _arranged(file_contents)
    if needs_weights and not arranged["weight_shapes"]:
        # State without weights is an incomplete checkpoint; skipping it silently would lose it.
        states = [item.state for content in file_contents for item in content.tree.optimizers]
        is_part = arranged["specs"] or any(states)
        raise (InputError if is_part else NotCheckpointError)(NO_WEIGHTS, where=str(path))
    why = "a restore would not write that name"
    left_out = (Skipped(str(paths[name]), f"{why}: {reason}") for name, reason in unsafe.items())
    opaque_stamps = {name: stamp for name, stamp in (opaque or {}).items() if name not in unsafe}
    return ParsedCheckpoint(
        path=path,
        format=fmt,
        paths=paths,
        stamps={name: item.stamp for name, item in contents.items()} | opaque_stamps,
        steps=sum((content.tree.steps for content in file_contents), steps),
        numbers=[[[g.numbers for g in o.groups] for o in item.tree.optimizers] for item in file_contents],
        skipped=(*left_out, *skipped),
        **arranged,
    )
