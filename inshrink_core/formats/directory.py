"""A checkpoint that is a directory: which of its files hold tensors, which only travel along."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any, Final

from inshrink_core.errors import DamagedError, InputError
from inshrink_core.formats.assembly import ParsedCheckpoint, assemble, renamed
from inshrink_core.formats.content import ContentRecall, FileContent, read_content, sniff
from inshrink_core.formats.disk import ByteCounter, FileStamp, ReadableFile, stamp_of
from inshrink_core.formats.steps import natural_key

__all__ = ["WEIGHT_SUFFIXES", "Recall", "is_side_file", "read_directory", "read_json", "read_single_file"]

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


def read_json(path: Path, counter: ByteCounter) -> Any:
    """Return the content of a JSON file.

    Raises
    ------
    DamagedError
        It is larger than 256 MB, or no JSON.
    """
    with ReadableFile(path, counter) as file:
        if file.nbytes > MAX_JSON_BYTES:
            raise DamagedError("the file is too large", where=str(path), found=f"{file.nbytes} bytes")
        text = file.read(0, file.nbytes)
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DamagedError(f"no valid JSON ({str(error)[:80]})", where=str(path)) from error


def _all_files(root: Path) -> dict[str, Path]:
    """Return the regular files below a directory by relative path, in natural order."""
    found: dict[str, Path] = {}
    for folder, folders, names in os.walk(root):
        folders.sort()
        for name in names:
            path = Path(folder, name)
            if path.is_file():
                found[path.relative_to(root).as_posix()] = path
        if len(found) > _MAX_FILES:
            raise InputError(f"more than {_MAX_FILES} files in one checkpoint", where=str(root))
    return dict(sorted(found.items(), key=lambda item: natural_key(item[0])))


def _index_shards(root: Path, index: str, counter: ByteCounter) -> dict[str, set[str]]:
    """Return the shard files an index names, each with the tensors it must hold."""
    table = read_json(root / index, counter)
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
        if not (root / shard).is_file():
            raise DamagedError(
                f"shard '{shard}' is missing",
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


def _trainer_step(root: Path, counter: ByteCounter) -> tuple[tuple[str, int], ...]:
    path = root / "trainer_state.json"
    if not path.is_file():
        return ()
    state = read_json(path, counter)
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


def read_directory(root: Path, counter: ByteCounter, recall: Recall | None = None) -> ParsedCheckpoint:
    """Return the checkpoint that a directory is.

    Parameters
    ----------
    root
        Directory with one or more weight files.
    counter
        Told of every byte read.
    recall
        What the checkpoints before were like; the answer does not depend on it.

    Raises
    ------
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
    if (root / ".metadata").is_file():
        raise InputError(
            "a distributed checkpoint (DCP), which is not read",
            where=str(root),
            remedy="convert it: python -m torch.distributed.checkpoint.format_utils dcp_to_torch SRC DST",
        )
    paths = _all_files(root)
    weights, optimizers, gradients = _tensor_files(root, list(paths))
    indexes = [n for n in paths if "/" not in n and n.endswith(".index.json")]
    indexes = [n for n in indexes if any(w.endswith(n.split(".")[-3]) for w in weights if n.count(".") >= 3)]
    shards: dict[str, set[str]] = {}
    for index in indexes:
        shards |= _index_shards(root, index, counter)
    weights = [w for w in weights if w in shards] or weights
    contents: dict[str, FileContent] = {}
    for name in [*weights, *optimizers, *gradients]:
        contents[name] = read_content(paths[name], counter, recall.of(name) if recall else None)
        _check_shard(root, name, contents[name], shards.get(name, set()))
    kept = _without_names_known({n: c for n, c in contents.items() if n not in gradients})
    kept |= {n: contents[n] for n in gradients}
    opaque: dict[str, FileStamp] = {name: stamp_of(path) for name, path in paths.items() if name not in kept}
    steps = _trainer_step(root, counter)
    fmt = next(iter(kept.values())).kind if kept else "directory"
    if "trainer_state.json" in paths:
        fmt = "huggingface"
    elif len(weights) > 1 and fmt == "safetensors":
        fmt = "sharded-safetensors"
    return assemble(
        root, fmt, list(kept.items()), opaque, paths=paths, steps=steps, gradient_files=frozenset(gradients)
    )


def read_single_file(path: Path, counter: ByteCounter, recall: Recall | None = None) -> ParsedCheckpoint:
    """Return the checkpoint that one file is.

    Parameters
    ----------
    path
        The file.
    counter
        Told of every byte read.
    recall
        What the checkpoints before were like; the answer does not depend on it.

    Raises
    ------
    InshrinkError
        As `read_content`; InputError where the file holds no weight.
    """
    recall = recall or Recall()
    content = read_content(path, counter, recall.of(""))
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


def has_weight_file(root: Path, counter: ByteCounter) -> bool:
    """Tell whether a directory holds a weight file itself, by the first bytes of its files."""
    for path in sorted(root.iterdir()):
        if path.name.endswith(WEIGHT_SUFFIXES) and not is_side_file(path.name) and path.is_file():
            return sniff(path, counter) is not None
    return False
