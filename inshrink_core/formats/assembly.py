"""The files of one checkpoint, put together: every tensor with one key, every byte accounted for."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, NamedTuple

from inshrink_core.checkpoint import MODEL_ROLES, Checkpoint, FileLayout, TensorRole, TensorSpec
from inshrink_core.errors import DamagedError, InputError, clipped
from inshrink_core.formats.content import ContentRecall, FileContent, layout_of, read_content
from inshrink_core.formats.disk import ByteCounter, FileStamp
from inshrink_core.formats.paths import Access, Skipped, is_file, natural_key
from inshrink_core.formats.placement import Named, Placed, place_in_regions
from inshrink_core.formats.roles import assign_roles
from inshrink_core.formats.source import FileSource

__all__ = [
    "WEIGHT_SUFFIXES",
    "ParsedCheckpoint",
    "Recall",
    "assemble",
    "is_side_file",
    "read_directory",
    "read_json",
    "read_single_file",
    "renamed",
]


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


WEIGHT_SUFFIXES: Final = (".safetensors", ".pt", ".pth", ".bin", ".ckpt")

MAX_JSON_BYTES: Final = 256 << 20
"""A trainer_state.json of a million logged steps is about 150 MB."""

_SIDE_FILE: Final = re.compile(
    r"^(training_args|scheduler|lr_scheduler|scaler|sampler|dl_state_dict|random_states|rng_state|"
    r"custom_checkpoint|tokenizer|spiece|meta)([._-].*)?$",
    re.IGNORECASE,
)
"""Never opened: pickles of schedulers, random-number generators and arguments, and tokenizers."""

_OPTIMIZER_FILE: Final = re.compile(r"^optim(izer)?(_states?)?([._-]\d+)?\.(pt|pth|bin|ckpt|safetensors)$")
_GRADIENT_FILE: Final = re.compile(r"^grad(ient)?s?\.(pt|pth|bin|safetensors)$")
_SHARD: Final = re.compile(r"^(.+)-(\d{5})-of-(\d{5})\.(safetensors|bin)$")
_MAX_FILES: Final = 100_000
_MOST_NAMES: Final = 64
"""Files of a checkpoint to which those of the next are compared; each holds the headers of one file."""


class Recall:
    """What the checkpoints of a run that were read so far are like; only the last one counts."""

    def __init__(self) -> None:
        self.contents: dict[str, ContentRecall] = {}
        self.file: tuple[FileContent, ParsedCheckpoint] | None = None

    def of(self, name: str) -> ContentRecall:
        """Return what is known of files of a name, as ``optimizer.pt`` of every step."""
        if len(self.contents) > _MOST_NAMES:
            self.contents.clear()
        return self.contents.setdefault(name, ContentRecall())


def is_side_file(name: str) -> bool:
    """Tell whether a file beside the weights is carried without being opened."""
    return _SIDE_FILE.match(name) is not None


def read_json(path: Path, access: Access) -> Any:
    """Return the content of a JSON file.

    Raises
    ------
    DamagedError
        It is larger than 256 MB, or no JSON.
    RefusedLinkError
        It lies outside of the run.
    """
    text = access.read_text(path, MAX_JSON_BYTES)
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DamagedError(f"no valid JSON ({str(error)[:80]})", where=str(path)) from error


def _all_files(root: Path, access: Access, skipped: list[Skipped]) -> dict[str, Path]:
    """Return the regular files below a directory by relative path, in natural order.

    Raises
    ------
    RefusedLinkError
        A file that must hold tensors is a link out of the run; of others it is told.
    DamagedError
        One is a link that leads nowhere.
    """
    found: dict[str, Path] = {}
    for path in access.walk(root, skipped):
        name = path.relative_to(root).as_posix()
        if not is_file(path):
            if path.is_symlink():
                if _holds_tensors(name):
                    raise DamagedError("a link that leads nowhere", where=str(path), remedy="fetch the file")
                skipped.append(Skipped(str(path), "a link that leads nowhere"))
            continue
        if access.admits(path):
            found[name] = path
        elif _holds_tensors(name):
            access.admit(path)
        else:
            skipped.append(access.skipped(path))
        if len(found) > _MAX_FILES:
            raise InputError(f"more than {_MAX_FILES} files in one checkpoint", where=str(root))
    return dict(sorted(found.items(), key=lambda item: natural_key(item[0])))


def _holds_tensors(name: str) -> bool:
    """Tell from its name that a file is read for tensors, or says which files are."""
    if "/" in name:
        return False
    return (name.endswith(WEIGHT_SUFFIXES) and not is_side_file(name)) or name.endswith(".index.json")


def _index_shards(root: Path, index: str, access: Access) -> dict[str, set[str]]:
    """Return the shard files an index names, each with the tensors it must hold."""
    table = read_json(root / index, access)
    weight_map = table.get("weight_map") if isinstance(table, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise DamagedError("the index has no weight_map", where=str(root / index))
    shards: dict[str, set[str]] = {}
    for name, shard in weight_map.items():
        if not isinstance(shard, str) or not shard or set("/\\\0") & set(shard) or shard in (".", ".."):
            raise DamagedError(
                "the index names a file outside its directory",
                where=str(root / index),
                found=repr(shard)[:80],
            )
        shards.setdefault(shard, set()).add(name)
    for shard in shards:
        if not is_file(root / shard):
            raise DamagedError(
                f"shard '{clipped(shard)}' is missing",
                where=str(root),
                remedy="the checkpoint may be half-written: wait, or fetch the rest",
            )
    return shards


def _require_all_shards(root: Path, names: set[str]) -> None:
    for name in sorted(names):
        if found := _SHARD.match(name):
            stem, _, n_shards, suffix = found.groups()
            for i in range(1, min(int(n_shards), _MAX_FILES) + 1):
                wanted = f"{stem}-{i:05d}-of-{n_shards}.{suffix}"
                if wanted not in names:
                    raise DamagedError(
                        f"shard '{wanted}' is missing",
                        where=str(root),
                        remedy="the checkpoint may be half-written: wait, or fetch the rest",
                    )


def _tensor_files(root: Path, names: list[str]) -> tuple[list[str], list[str], list[str]]:
    """Return the names of weight, optimizer and gradient files in a directory."""
    held = [n for n in names if "/" not in n and n.endswith(WEIGHT_SUFFIXES) and not is_side_file(n)]
    optimizers = [n for n in held if _OPTIMIZER_FILE.match(n)]
    gradients = [n for n in held if _GRADIENT_FILE.match(n)]
    weights = [n for n in held if n not in optimizers and n not in gradients]
    if any(n.endswith(".safetensors") for n in weights):
        # Both formats of one model: the safer is read, the other travels along.
        weights = [n for n in weights if n.endswith(".safetensors")]
    _require_all_shards(root, set(weights))
    return weights, optimizers, gradients


def _check_shard(root: Path, name: str, content: FileContent, wanted: set[str]) -> None:
    held = {tensor for tensor, _ in content.model} | {tensor.name for tensor in content.named}
    missing = wanted - held
    if missing:
        raise DamagedError(
            f"shard '{name}' lacks tensor '{min(missing)[:80]}' that the index puts there", where=str(root)
        )


def _trainer_step(path: Path | None, access: Access) -> tuple[tuple[str, int], ...]:
    if path is None:
        return ()
    state = read_json(path, access)
    step = state.get("global_step") if isinstance(state, dict) else None
    return (("global_step", step),) if type(step) is int and 0 <= step < 1 << 62 else ()


def _without_names_known(contents: dict[str, FileContent]) -> dict[str, FileContent]:
    """Drop files all of whose weights an earlier file holds: copies, which travel as they are."""
    known: set[str] = set()
    kept = {}
    for name, content in contents.items():
        names = {tensor for tensor, _ in content.model}
        if not names or names - known:
            kept[name] = content
        known |= names
    return kept


def read_directory(
    root: Path, counter: ByteCounter, recall: Recall | None = None, access: Access | None = None
) -> ParsedCheckpoint:
    """Return the checkpoint that a directory is.

    Parameters
    ----------
    root
        Directory with one or more weight files.
    counter
        Told of every byte read.
    recall
        What the checkpoints before were like; the answer does not depend on it.
    access
        Where links may lead, and whether damage is accepted; by default into this directory.

    Raises
    ------
    RefusedLinkError
        A file of tensors is a link that leads elsewhere.
    DamagedError
        A file is cut off, or a shard is missing.
    UnsafePickleError
        A weight or optimizer file wants to import names outside the allowlist.
    InputError
        No file holds a weight.

    Notes
    -----
    Weight, optimizer and gradient files are read by their headers. Every other file travels as it is
    and is never opened, whatever pickles it holds.
    """
    access = access or Access.of(root, counter)
    if is_file(root / ".metadata"):
        raise InputError(
            "a distributed checkpoint (DCP), which is not read",
            where=str(root),
            remedy="convert it: python -m torch.distributed.checkpoint.format_utils dcp_to_torch SRC DST",
        )
    skipped: list[Skipped] = []
    paths = _all_files(root, access, skipped)
    weights, optimizers, gradients = _tensor_files(root, list(paths))
    indexes = [n for n in paths if "/" not in n and n.endswith(".index.json")]
    indexes = [n for n in indexes if any(w.endswith(n.split(".")[-3]) for w in weights if n.count(".") >= 3)]
    shards: dict[str, set[str]] = {}
    for index in indexes:
        shards |= _index_shards(root, index, access)
    weights = [w for w in weights if w in shards] or weights
    contents: dict[str, FileContent] = {}
    for name in [*weights, *optimizers, *gradients]:
        contents[name] = read_content(paths[name], counter, recall.of(name) if recall else None, access)
        _check_shard(root, name, contents[name], shards.get(name, set()))
    kept = _without_names_known({n: c for n, c in contents.items() if n not in gradients})
    kept |= {n: contents[n] for n in gradients}
    opaque = {name: access.admit(path) for name, path in paths.items() if name not in kept}
    steps = _trainer_step(paths.get("trainer_state.json"), access)
    fmt = next(iter(kept.values())).kind if kept else "directory"
    if "trainer_state.json" in paths:
        fmt = "huggingface"
    elif len(weights) > 1 and fmt == "safetensors":
        fmt = "sharded-safetensors"
    parsed = assemble(
        root, fmt, list(kept.items()), opaque, paths=paths, steps=steps, gradient_files=frozenset(gradients)
    )
    return parsed._replace(skipped=tuple(skipped))


def read_single_file(
    path: Path, counter: ByteCounter, recall: Recall | None = None, access: Access | None = None
) -> ParsedCheckpoint:
    """Return the checkpoint that one file is.

    Parameters
    ----------
    path
        The file.
    counter
        Told of every byte read.
    recall
        What the checkpoints before were like; the answer does not depend on it.
    access
        As for `read_content`.

    Raises
    ------
    InshrinkError
        As `read_content`; InputError where the file holds no weight.
    """
    recall = recall or Recall()
    content = read_content(path, counter, recall.of(""), access)
    if recall.file is not None and _differ_in_step_alone(content, recall.file[0]):
        parsed = renamed(recall.file[1], path, content)
    else:
        parsed = assemble(path, content.kind, [(path.name, content)], {}, paths={path.name: path})
    recall.file = (content, parsed)
    return parsed


def _differ_in_step_alone(one: FileContent, other: FileContent) -> bool:
    if one.model is not other.model:
        return False  # Equal lists are one list (`ContentRecall`); of others nothing is known.
    same_size = one.stamp.nbytes == other.stamp.nbytes
    return same_size and one._replace(stamp=other.stamp, steps=other.steps) == other
