"""The built-in layouts: a torch or safetensors file, and directories of files or shards."""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import ClassVar, Final, NamedTuple

from inshrink_core.checkpoint import is_average_name
from inshrink_core.errors import (
    DamagedError,
    InputError,
    InshrinkError,
    NotCheckpointError,
    UnsafePickleError,
)
from inshrink_core.formats.assembly import ParsedCheckpoint, assemble
from inshrink_core.formats.content import FileContent, read_content
from inshrink_core.formats.discovery import (
    METADATA,
    SHARDED_PART,
    STEP_FOLDER,
    TRAINER_STATE,
    has_weight_suffix,
    is_weight_file,
)
from inshrink_core.formats.disk import (
    Access,
    ReadableFile,
    Skipped,
    is_dir,
    is_file,
    missing,
    natural_key,
    scan,
)
from inshrink_core.formats.distributed import SHARDS, read_distributed
from inshrink_core.formats.names import RANK, read_name
from inshrink_core.formats.readers import Reader
from inshrink_core.formats.safetensors_file import looks_like_safetensors
from inshrink_core.formats.torch.zip import is_zip

_CANONICAL: Final = re.compile(
    r"^(model|pytorch_model|adapter_model|consolidated|diffusion_pytorch_model)"
    r"(-\d{5}-of-\d{5}|\.\d+)?\.(safetensors|bin|pt|pth|ckpt)$|"
    r"^(optim(izer)?|grad(ient)?s?)(_states?)?\.(safetensors|bin|pt|pth|ckpt)$"
)
"""Names in a checkpoint directory, and of the last model beside numbered files."""

_DIRECTORY_ONLY: Final = re.compile(r"^trainer_state\.json$|\.index\.json$|^random_states_\d+\.pkl$")
"""Names that occur only in checkpoint directories."""

_OTHER_FILE: Final = re.compile(
    r"^\.|\.(json|jsonl|csv|tsv|txt|md|html|log|py|ipynb|toml|yaml|yml|npz|npy|h5|onnx|msgpack|inshrink|whl|svg|pdf|"
    r"gz|zst|png|jpe?g|gif|webp|bmp|wav|mp3|flac|mp4|parquet|arrow|out|err|sh)$",
    re.IGNORECASE,
)
"""Files that are never opened: no torch or safetensors file has such a name."""

_OPTIMIZER_FILE: Final = re.compile(r"^optim(izer)?(_states?)?([._-]\d+)?\.(pt|pth|bin|ckpt|safetensors)$")
_GRADIENT_FILE: Final = re.compile(r"^grad(ient)?s?\.(pt|pth|bin|safetensors)$")
_SHARD: Final = re.compile(r"^(.+)-(\d{5})-of-(\d{5})\.(safetensors|bin)$")
_INDEX: Final = re.compile(r"[^/]*(\.\w+)\.index\.json")
_MODEL_FILE: Final = re.compile(
    r"^(model|pytorch_model|adapter_model|diffusion_pytorch_model)(-\d{5}-of-\d{5})?\.(safetensors|bin)$"
)
# The number of a "model_5.pt" is a step.
_NUMBERED: Final = re.compile(r"^((?:pytorch_)?model(?!.*pt$)|optimizer)_(\d{1,3})\.(safetensors|bin|pt)$")
_MAX_FOLDERS_DEEP: Final = 2
_MAX_FILES: Final = 100_000
_HEAD_NBYTES: Final = 512


def _holds_tensors(name: str) -> bool:
    """Return whether a file is read for tensors or is an index of such files, by its name."""
    if "/" in name:
        return bool(model_folders([name]))
    return is_weight_file(name) or name.endswith(".index.json")


def _index_shards(root: Path, index: str, access: Access) -> dict[str, set[str]]:
    """Return the shard files that an index lists, each with its tensors."""
    where = str(root / index)
    table = access.read_json(root / index)
    weight_map = table.get("weight_map") if isinstance(table, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise DamagedError("the index has no weight_map", where=where)
    shards: dict[str, set[str]] = {}
    for name, shard in weight_map.items():
        if not isinstance(shard, str) or not shard or set("/\\\0") & set(shard) or shard in (".", ".."):
            what = "the index names a file outside its directory"
            raise DamagedError(what, where=where, found=repr(shard)[:80])
        shards.setdefault(shard, set()).add(name)
    for shard in shards:
        if not is_file(root / shard):
            raise missing(root, shard)
    return shards


def _require_all_shards(root: Path, names: Collection[str]) -> None:
    for found in filter(None, map(_SHARD.match, sorted(names))):
        stem, _, n_shards, suffix = found.groups()
        for i in range(1, min(int(n_shards), _MAX_FILES) + 1):
            wanted = f"{stem}-{i:05d}-of-{n_shards}.{suffix}"
            if wanted not in names:
                raise missing(root, wanted)


def trainer_step(path: Path | None, access: Access) -> tuple[tuple[str, int], ...]:
    """Return the step in the state of Hugging Face's trainer, as a step key."""
    if path is None:
        return ()
    state = access.read_json(path)
    step = state.get("global_step") if isinstance(state, dict) else None
    return (("global_step", step),) if type(step) is int and 0 <= step < 1 << 62 else ()


def model_folders(names: Iterable[str]) -> list[str]:
    """Return the folders of a checkpoint that each hold a model, given its files' names.

    Folders that are named like a step, or hold a trainer's state, are separate checkpoints.

    Examples
    --------
    >>> model_folders(["optimizer.bin", "unet/diffusion_pytorch_model.safetensors", "logs/a.txt"])
    ['unet']
    """
    items: dict[str, set[str]] = {}
    for name in names:
        folder, _, file = name.rpartition("/")
        if folder and folder.count("/") < _MAX_FOLDERS_DEEP and not STEP_FOLDER.search(folder):
            items.setdefault(folder, set()).add(file)
    models = ((folder, files) for folder, files in items.items() if any(map(_MODEL_FILE.match, files)))
    return [folder for folder, files in models if TRAINER_STATE not in files]


def named_apart(content: FileContent, model: str) -> FileContent:
    """Return the content of a file as that of a further model, with prefixed names."""
    prefix = f"{model}."
    tree = content.tree.prefixed(prefix)
    tree = tree._replace(model=(), extra=[*tree.model, *tree.extra], models=(model, *tree.models))
    aliases = {prefix + alias: prefix + key for alias, key in content.aliases.items()}
    return content._replace(tree=tree, aliases=aliases)


def _models_named(contents: dict[str, FileContent]) -> dict[str, FileContent]:
    """Prefix the names of further models; drop copies, which are carried unread.

    A further model is named like an average, or numbered by accelerate. If files share some names but not
    all, each is a separate model, except one with the usual name of a folder's only model.
    """
    names = {name: {tensor for tensor, _ in content.tree.model} for name, content in contents.items()}
    further = {name for name in contents if is_average_name(name.partition(".")[0])}
    further |= {name for name in contents if _is_numbered(name, contents)}
    rest = [name for name in contents if names[name] and name not in further and not _SHARD.match(name)]
    if any(names[item] & names[other] and names[other] - names[item] for item, other in pairwise(rest)):
        further |= {name for name in rest if not _MODEL_FILE.match(name)}
    if not any(names[name] for name in contents if name not in further) and len(further) == 1:
        further = set()
    known: set[str] = set()
    remaining = {}
    for name, content in contents.items():
        if name in further and names[name]:
            remaining[name] = named_apart(content, name.partition(".")[0])
        elif not names[name] or names[name] - known:
            remaining[name] = content
            known |= names[name]
    return remaining


def _is_numbered(name: str, names: Collection[str]) -> bool:
    """Return whether a file is a further model of accelerate, such as ``model_1.safetensors``."""
    found = _NUMBERED.match(name)
    if found is None or int(found[2]) > len(names):
        return False
    stem, number, suffix = found[1], int(found[2]), found[3]
    return all(f"{stem}{f'_{i}' if i else ''}.{suffix}" in names for i in range(number))


class Contents(NamedTuple):
    """The content of a checkpoint's files with tensors, the format, and step keys beside them."""

    files: dict[str, FileContent]
    format: str
    steps: tuple[tuple[str, int], ...] = ()


def read_weight_files(root: Path, paths: Mapping[str, Path], access: Access) -> Contents:
    """Return the content of the weight, state and gradient files in a directory, and the format.

    Parameters
    ----------
    root
        The directory.
    paths
        Its files by relative path; models in folders inside it are read too (`model_folders`).
    access
        Access rights for links.

    Raises
    ------
    InshrinkError
        As for `DirectoryReader.contents`.
    """
    remaining, fmt, _ = _read_folder(root, paths, access)
    folders = model_folders(paths)
    has_main = any(content.tree.model for content in remaining.values())
    trained = [folder for folder in folders if not is_average_name(folder)]
    for folder in folders:
        inner = {n.removeprefix(f"{folder}/"): p for n, p in paths.items() if n.startswith(f"{folder}/")}
        try:
            items, inner_fmt, _ = _read_folder(root / folder, inner, access)
        except (UnsafePickleError, NotCheckpointError):
            if not has_main:
                raise
            continue  # carried unread
        is_main = not has_main and [folder] == trained
        for name, content in items.items():
            model = folder.replace("/", ".")
            remaining[f"{folder}/{name}"] = content if is_main else named_apart(content, model)
        fmt = inner_fmt if is_main or not has_main else fmt
    return Contents(remaining, fmt)


def _read_folder(root: Path, paths: Mapping[str, Path], access: Access) -> Contents:
    """Return the content of one folder like `read_weight_files`, without inner folders."""
    items = [name for name in paths if "/" not in name and is_weight_file(name)]
    gradients = list(filter(_GRADIENT_FILE.match, items))
    optimizers = list(filter(_OPTIMIZER_FILE.match, items))
    weights = [name for name in items if name not in (*optimizers, *gradients)]
    if any(name.endswith(".safetensors") for name in weights):
        # With both formats of one model, read the safer one and carry the other unread.
        weights = [name for name in weights if name.endswith(".safetensors") or is_average_name(name)]
    weights.sort(key=is_average_name)
    _require_all_shards(root, weights)
    kinds = {Path(weight).suffix for weight in weights}
    shards: dict[str, set[str]] = {}
    for name in paths:
        if (index := _INDEX.fullmatch(name)) and index[1] in kinds:
            shards |= _index_shards(root, name, access)
    weights = [name for name in weights if name in shards] or weights
    contents: dict[str, FileContent] = {}
    for name in [*weights, *optimizers, *gradients]:
        try:
            content = contents[name] = read_content(paths[name], access)
        except NotCheckpointError:
            if name in shards or len(weights) < 2:
                raise
            continue  # a file of another program
        there = {tensor for tensor, _ in content.tree.model} | {tensor.name for tensor in content.tree.named}
        if missing := shards.get(name, set()) - there:
            what = f"shard '{name}' lacks tensor '{min(missing)[:80]}' that the index puts there"
            raise DamagedError(what, where=str(root))
    remaining = _models_named({name: items for name, items in contents.items() if name not in gradients})
    remaining |= {name: contents[name] for name in gradients if name in contents}
    fmt = next(iter(remaining.values())).kind if remaining else "directory"
    is_sharded = len(weights) > 1 and fmt == "safetensors"
    return Contents(remaining, "sharded-safetensors" if is_sharded else fmt)


def _is_torch_zip(first: bytes) -> bool:
    """Return whether a zip comes from `torch.save`: its first entry is then the pickle."""
    length = int.from_bytes(first[26:28], "little")
    return is_zip(first) and first[30 : 30 + length].endswith(b"data.pkl")


class FilesReader(Reader):
    """A reader of several files: some hold tensors (`contents`), all others are carried unread."""

    needs_weights: ClassVar[bool] = True
    """Whether a checkpoint without weights is an error."""

    def paths(self, path: Path, access: Access, skipped: list[Skipped]) -> dict[str, Path]:
        """Return the regular files of a checkpoint by relative path, in natural order, and record the others.

        Raises
        ------
        RefusedLinkError
            A file that must hold tensors is a link out of the run; other such files are listed as skipped.
        DamagedError
            A file that must hold tensors is a dangling link.
        """
        found: dict[str, Path] = {}
        for item in access.walk(path, skipped):
            name = item.relative_to(path).as_posix()
            if not is_file(item):
                if item.is_symlink() and _holds_tensors(name):
                    raise DamagedError("a link that leads nowhere", where=str(item), remedy="fetch the file")
                skipped += [Skipped(str(item), "a link that leads nowhere")] * item.is_symlink()
            elif access.admits(item):
                found[name] = item
            elif _holds_tensors(name):
                access.admit(item)
            else:
                skipped.append(access.skipped(item))
            if len(found) > _MAX_FILES:
                raise InputError(f"more than {_MAX_FILES} files in one checkpoint", where=str(path))
        return dict(sorted(found.items(), key=lambda row: natural_key(row[0])))

    @abstractmethod
    def contents(self, path: Path, paths: dict[str, Path], access: Access) -> Contents:
        """Return the content of the files with tensors."""

    def open(self, path: Path, access: Access) -> ParsedCheckpoint:
        """Return the checkpoint in the files.

        Raises
        ------
        RefusedLinkError
            A file of tensors is a link out of the run.
        DamagedError
            A file is missing or truncated, or files contradict each other.
        UnsafePathError
            A named file is outside the directory.
        UnsafePickleError
            A file imports names outside the allowlist.
        InputError
            No file holds a weight, or tensors are in an unsupported form.
        """
        skipped: list[Skipped] = []
        paths = self.paths(path, access, skipped)
        contents, fmt, steps = self.contents(path, paths, access)
        for name in filter(_GRADIENT_FILE.match, contents) if path not in paths.values() else ():
            tree = contents[name].tree
            contents[name] = contents[name]._replace(tree=tree._replace(model=(), gradients=tree.model))
        return assemble(
            path,
            "huggingface" if TRAINER_STATE in paths else fmt,
            contents,
            paths=paths,
            opaque={name: access.admit(item) for name, item in paths.items() if name not in contents},
            steps=(*trainer_step(paths.get(TRAINER_STATE), access), *steps),
            needs_weights=self.needs_weights,
            skipped=skipped,
        )


class FileReader(FilesReader):
    """Reads a file of `torch.save` or of safetensors."""

    name: ClassVar[str] = "file"

    def detect(self, path: Path, access: Access) -> bool:
        """Return whether a file may hold tensors."""
        name = path.name
        if not is_file(path):
            return False
        if has_weight_suffix(name):
            return is_weight_file(name)
        if _OTHER_FILE.search(name):
            return False
        # If the suffix is inconclusive, check the first bytes.
        try:
            with ReadableFile(path, access.counter, access.admit(path)) as file:
                first = file.read(0, min(file.nbytes, _HEAD_NBYTES))
                return _is_torch_zip(first) or looks_like_safetensors(first, file.nbytes)
        except InshrinkError:
            return False

    def paths(self, path: Path, access: Access, skipped: list[Skipped]) -> dict[str, Path]:
        """Return the file by its name."""
        return {path.name: path}

    def contents(self, path: Path, paths: dict[str, Path], access: Access) -> Contents:
        """Return the content of the file (`read_content`)."""
        content = read_content(path, access)
        return Contents({path.name: content}, content.kind)


class DirectoryReader(FilesReader):
    """Reads a directory of one or more weight files, such as those of Hugging Face's trainer.

    Only the headers of weight, optimizer and gradient files are read. Every other file is carried unread and
    never opened, even if it is a pickle.
    """

    name: ClassVar[str] = "directory"

    def detect(self, path: Path, access: Access) -> bool:
        """Return whether a directory is one checkpoint, not a directory of several.

        It is one if a file has a name that occurs only in checkpoint directories, if its weight files have no
        step numbers, or if it is named like a step and has folders with one model each.
        """
        names = [entry.name for entry in scan(path) if is_file(entry)] if is_dir(path) else []
        weights = list(filter(is_weight_file, names))
        if weights and any(map(_DIRECTORY_ONLY.search, names)):
            return True
        if RANK.fullmatch(path.name):
            return False
        if weights:
            others = [name for name in weights if not _CANONICAL.search(name)]
            if any(read_name(name).numbers and not _is_numbered(name, names) for name in others):
                return False  # the number of a step, beside files of other steps
            return len(weights) == 1 or len(others) < len(weights)
        is_step = STEP_FOLDER.search(path.name) is not None or path.name.isdigit()
        return is_step and len(_folders_of_models(path)) > 1

    def contents(self, path: Path, paths: dict[str, Path], access: Access) -> Contents:
        """Return the content of weight, optimizer and gradient files."""
        return read_weight_files(path, paths, access)


def _folders_of_models(path: Path) -> list[str]:
    folders = [Path(entry.path) for entry in scan(path) if is_dir(entry)] if is_dir(path) else []
    return model_folders(f"{folder.name}/{entry.name}" for folder in folders for entry in scan(folder))


class DistributedReader(FilesReader):
    """Reads a directory of `torch.distributed.checkpoint`, or one with such directories as its parts.

    Tensors are complete, regardless of how many ranks wrote their shards. accelerate and Hugging Face's
    trainer write parts with FSDP: ``pytorch_model_fsdp_0/`` and ``optimizer_0/``. Other files are carried
    unread.
    """

    name: ClassVar[str] = "dcp"

    def detect(self, path: Path, access: Access) -> bool:
        """Return whether a directory has ``.metadata`` or shards, or a model in such a directory."""
        if not is_dir(path):
            return False
        parts = _parts(path)
        return parts == [path] or any(part.name.startswith("pytorch_model") for part in parts)

    def contents(self, path: Path, paths: dict[str, Path], access: Access) -> Contents:
        """Return the content of the shard files (`read_distributed`)."""
        contents: dict[str, FileContent] = {}
        for part in _parts(path):
            if not is_file(part / METADATA):
                raise missing(part, METADATA)
            items = read_distributed(part, access, len(contents))
            prefix = "" if part == path else f"{part.name}/"
            contents |= {prefix + name: content for name, content in items.items()}
        steps: tuple[tuple[str, int], ...] = ()
        for name in ("meta.pt", "common.pt"):
            # Files of Lightning and Megatron-LM with the step; their other objects are ignored.
            if name in paths:
                with suppress(InshrinkError):
                    steps += read_content(paths[name], access).tree.steps
        paths |= {name: path / name for name in contents}
        return Contents(contents, self.name, steps)


def _parts(path: Path) -> list[Path]:
    """Return the shard directories of a checkpoint: itself, or those inside."""
    if _has_shards(path):
        return [path]
    inner = [Path(entry.path) for entry in scan(path) if SHARDED_PART.match(entry.name) and is_dir(entry)]
    return [part for part in inner if _has_shards(part)]


def _has_shards(folder: Path) -> bool:
    """Return whether a directory is a distributed checkpoint, finished or not."""
    names = [entry.name for entry in scan(folder) if is_file(entry)]
    return METADATA in names or any(name.endswith(SHARDS) for name in names)


read_directory = DirectoryReader().open
