"""The files of one checkpoint, put together: every tensor with one key, every byte accounted for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from inshrink_core.checkpoint import MODEL_ROLES, Checkpoint, FileLayout, TensorRole, TensorSpec
from inshrink_core.errors import InputError
from inshrink_core.formats.content import FileContent, layout_of
from inshrink_core.formats.disk import ByteCounter, FileStamp
from inshrink_core.formats.links import Skipped
from inshrink_core.formats.placement import Named, Placed, place_in_regions
from inshrink_core.formats.roles import assign_roles
from inshrink_core.formats.source import FileSource

__all__ = ["ParsedCheckpoint", "assemble", "renamed"]


class ParsedCheckpoint(NamedTuple):
    """A checkpoint's headers, step still to be decided.

    Parameters
    ----------
    path
        The file or directory.
    format
        ``torch``, ``safetensors``, ``huggingface``, ``sharded-safetensors``.
    paths, stamps
        Of every file, by its path relative to the root.
    places
        Tensor key to file and place.
    steps
        Step keys found inside, with values.
    guessed
        Optimizer state was matched to parameters by shape.
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
            source=FileSource(self.paths, self.stamps, self.places, counter),
            files=self.layouts,
            aliases=self.aliases,
            hyperparameters=self.hyperparameters,
            origin=str(self.path),
        )


def _tensors_by_file(
    contents: Sequence[tuple[str, FileContent]], gradient_files: frozenset[str]
) -> tuple[list[list[Named]], dict[str, dict[str, float]], bool]:
    """Return every file's tensors under distinct keys, hyperparameters, and whether names are guessed."""
    model: list[tuple[str, Placed]] = []
    owner: dict[str, int] = {}
    by_file: list[list[Named]] = [[] for _ in contents]
    for number, (path, content) in enumerate(contents):
        for name, placed in content.model if path not in gradient_files else ():
            if owner.setdefault(name, number) == number:
                model.append((name, _apart(placed, number)))
    roles = assign_roles(model, [content.optimizers for _, content in contents])
    for tensor in roles.model:
        by_file[owner[tensor.name]].append(tensor)
    for number, (path, content) in enumerate(contents):
        held = by_file[number]
        held += [Named(name, TensorRole.WEIGHT, placed) for name, placed in content.extra]
        gradients = content.model if path in gradient_files else content.gradients
        held += [Named(name, TensorRole.GRADIENT, placed) for name, placed in gradients]
        held += roles.state[number]
        held += content.named
    seen: set[str] = set()
    for number, held in enumerate(by_file):
        distinct = []
        for tensor in held:
            key = tensor.key
            if key not in seen:
                seen.add(key)
                if tensor.placed.offset >= _FILE_SHIFT:
                    tensor = tensor._replace(placed=_together(tensor.placed))
                distinct.append(tensor)
        by_file[number] = distinct
    return by_file, roles.hyperparameters, roles.guessed


# Places in different files must not look tied to `assign_roles`: the file's number rides in the offset.
_FILE_SHIFT = 1 << 62


def _apart(placed: Placed, number: int) -> Placed:
    return placed._replace(offset=placed.offset + number * _FILE_SHIFT) if number else placed


def _together(placed: Placed) -> Placed:
    return placed._replace(offset=placed.offset % _FILE_SHIFT)


def assemble(
    path: Path,
    fmt: str,
    contents: Sequence[tuple[str, FileContent]],
    opaque: Mapping[str, FileStamp],
    *,
    paths: Mapping[str, Path],
    steps: tuple[tuple[str, int], ...] = (),
    gradient_files: frozenset[str] = frozenset(),
) -> ParsedCheckpoint:
    """Return one checkpoint from the content of its files.

    Parameters
    ----------
    path
        The checkpoint, a file or a directory.
    contents
        Weight and optimizer files by relative path; earlier ones win where names repeat.
    opaque
        Files that travel as they are.
    steps
        Step keys found beside the files, before those inside.
    gradient_files
        Those of `contents` whose tensors are gradients.

    Raises
    ------
    InputError
        No file holds a weight.
    """
    by_file, hyperparameters, guessed = _tensors_by_file(contents, gradient_files)
    specs: list[TensorSpec] = []
    layouts: list[FileLayout] = []
    places: dict[str, tuple[str, Placed]] = {}
    aliases: dict[str, str] = {}
    for (name, content), tensors in zip(contents, by_file, strict=True):
        placed = place_in_regions(tensors)
        specs += placed.specs
        aliases |= placed.aliases
        aliases |= content.aliases
        layouts.append(layout_of(name, content, placed.regions))
        for tensor in tensors:
            key = tensor.key
            if key not in placed.aliases:
                places[key] = (name, tensor.placed)
        steps += content.steps
    if not any(spec.role in MODEL_ROLES for spec in specs):
        raise InputError("no weights in it", where=str(path))
    layouts += [FileLayout(path=name, nbytes=stamp.nbytes, kind="opaque") for name, stamp in opaque.items()]
    return ParsedCheckpoint(
        path=path,
        format=fmt,
        paths=paths,
        stamps={name: content.stamp for name, content in contents} | dict(opaque),
        specs=tuple(specs),
        layouts=tuple(sorted(layouts, key=lambda layout: layout.path)),
        places=places,
        aliases={alias: key for alias, key in aliases.items() if key in places and alias not in places},
        hyperparameters=hyperparameters,
        steps=steps,
        guessed=guessed,
    )


def renamed(known: ParsedCheckpoint, path: Path, content: FileContent) -> ParsedCheckpoint:
    """Return the checkpoint of one file that differs from another in name, stamp and step alone.

    Parameters
    ----------
    known
        The other, of one file too.
    path, content
        The file. Its content must equal that of `known` in all but `stamp` and `steps`, and its size too.
    """
    name = path.name
    return known._replace(
        path=path,
        paths={name: path},
        stamps={name: content.stamp},
        layouts=tuple(replace(layout, path=name) for layout in known.layouts),
        places={key: (name, placed) for key, (_, placed) in known.places.items()},
        steps=content.steps,
    )
