"""Distributed checkpoints: directories written by `torch.distributed.checkpoint`.

``.metadata`` is a pickle that lists every tensor, the boxes it is split into, and the file and byte offset
of each box. The bytes there are a `torch.save` file with one tensor. The pickle is read as a description,
without executing it, and everything in it is compared with the files before use.
Layout: torch/distributed/checkpoint/{metadata,filesystem}.py of PyTorch 2.13.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack, suppress
from itertools import groupby, pairwise
from pathlib import Path
from typing import Annotated, Any, Final, NamedTuple, TypeVar

import msgspec

from inshrink_core.checkpoint import DTYPE_SIZES, Box, ZipEntry
from inshrink_core.errors import DamagedError, InputError, InshrinkError, NotFoundError, clipped
from inshrink_core.formats.checksums import PackedZip
from inshrink_core.formats.content import FileContent, place
from inshrink_core.formats.discovery import METADATA as METADATA
from inshrink_core.formats.disk import Access, FileStamp, ReadableFile, Window, check_names, missing
from inshrink_core.formats.state_tree import (
    MAX_EXTENT,
    MODEL_KEYS,
    OPTIMIZER_KEYS,
    STATE_ROLES,
    STEP_KEYS,
    Placed,
    StateTree,
    read_state_tree,
)
from inshrink_core.formats.torch.pickles import (
    MAX_PICKLE_BYTES,
    DTypeRef,
    Record,
    StorageRef,
    TensorRef,
    mapping,
    read_pickle,
)
from inshrink_core.formats.torch.zip import is_zip, read_torch_zip

SHARDS: Final = ".distcp"
"""Suffix of the files that hold tensors."""

_T = TypeVar("_T")

_MAX_DEPTH: Final = 8
_MAX_ITEMS: Final = 1 << 20
_INTEGERS: Final = ("int64", "int32")
_MAX_OBJECTS: Final = 1024
"""Maximum number of objects that are opened: optimizers stored flat have ten for each parameter."""

_SHARD_NBYTES: Final = 16
"""Minimum pickle bytes per shard: a pickle can list the same object repeatedly at two bytes each."""

_END_NBYTES: Final = 4 << 10
"""Bytes requested at both ends of a remote shard before it is read."""

_MEGATRON: Final = re.compile(rf"(?:chained_\d+\.)?optimizer\.state\.({'|'.join(STATE_ROLES)})\.(.+)")
"""Megatron-LM's flat names start with the role: ``optimizer.state.exp_avg.decoder.layers.…``."""

_MAX_COMPARISONS: Final = 1 << 24
"""Maximum number of comparisons between shards of one tensor; a device grid needs about one per shard."""


_Size = Annotated[int, msgspec.Meta(ge=0, lt=MAX_EXTENT)]
Sizes = Annotated[tuple[_Size, ...], msgspec.Meta(max_length=64)]
"""A checked shape, or the offsets in one."""


class _Index(msgspec.Struct):
    """The key of a stored shard; for an object, `offset` is None."""

    fqn: str
    offset: Sizes | None = None


class _Payload(msgspec.Struct, frozen=True):
    """The location of a shard or an object: file, byte offset and size."""

    file: str = msgspec.field(name="relative_path")
    offset: _Size
    nbytes: _Size = msgspec.field(name="length")
    transforms: Any = msgspec.field(name="transform_descriptors", default=None)


class _Chunk(msgspec.Struct):
    offsets: Sizes
    sizes: Sizes


class _Storage(msgspec.Struct):
    size: Sizes
    properties: Any
    chunks: list[Any]


class _Fields(msgspec.Struct):
    state_dict_metadata: dict[str, Any]
    storage_data: dict[Any, Any]
    planner_data: Any = None


class _Tensor(NamedTuple):
    dtype: str
    shape: tuple[int, ...]
    shards: tuple[tuple[Box, _Payload], ...]


class DistributedMetadata:
    """The checked content of ``.metadata``: tensors and objects by name, and the key path of each.

    `payloads` has the location of each shard, by name and offsets, and of each object.
    """

    def __init__(self, pickled: bytes, where: str) -> None:
        self._where = where
        self.payloads: dict[tuple[str, tuple[int, ...] | None], _Payload] = {}
        fields = self._read(read_pickle(pickled, self._where), "Metadata", _Fields)
        self._n_shards_left = len(pickled) // _SHARD_NBYTES
        for key, value in fields.storage_data.items():
            index = self._read(key, "MetadataIndex", _Index)
            payload = self._read(value, "_StorageInfo", _Payload)
            if payload.transforms:
                what = f"shards are stored as {clipped(str(payload.transforms))}, which is not read"
                remedy = "save without extensions of FileSystemWriter"
                raise InputError(what, where=self._where, remedy=remedy)
            self.payloads[index.fqn, index.offset] = payload
        check_names({payload.file for payload in self.payloads.values()}, self._where)
        self.tensors: dict[str, _Tensor] = {}
        self.objects: dict[str, _Payload] = {}
        for name, value in fields.state_dict_metadata.items():
            if isinstance(value, Record) and value.kind == "BytesStorageMetadata":
                self.objects[name] = self._find(name, None)
            else:
                self.tensors[name] = self._tensor(name, self._read(value, "TensorStorageMetadata", _Storage))
        self.paths = fields.planner_data if isinstance(fields.planner_data, dict) else {}

    def _damaged(self, what: str) -> DamagedError:
        remedy = "the checkpoint is damaged: restore it from a backup"
        return DamagedError(what, where=self._where, remedy=remedy)

    def _read(self, value: object, kind: str, fields: type[_T]) -> _T:
        if not isinstance(value, Record) or value.kind != kind:
            raise self._damaged(f"no {kind} where one must be")
        try:
            return msgspec.convert(value.state, fields)
        except msgspec.ValidationError as error:
            raise self._damaged(f"no valid {kind}: {error}") from error

    def _find(self, name: str, offsets: tuple[int, ...] | None) -> _Payload:
        found = self.payloads.get((name, offsets))
        if found is None:
            raise self._damaged(f"it lists no file and offset for '{clipped(name)}'")
        return found

    def _tensor(self, name: str, fields: _Storage) -> _Tensor:
        state = fields.properties.state if isinstance(fields.properties, Record) else None
        dtype = state[0] if isinstance(state, tuple) and state else None
        if not isinstance(dtype, DTypeRef):
            raise self._damaged(f"'{clipped(name)}' has no dtype")
        shards = []
        self._n_shards_left -= len(fields.chunks)
        if self._n_shards_left < 0:
            raise self._damaged("it names more shards than it describes")
        for chunk in fields.chunks:
            part = self._read(chunk, "ChunkStorageMetadata", _Chunk)
            box = Box(part.offsets, part.sizes)
            if not len(box.offsets) == len(box.sizes) == len(fields.size):
                raise self._damaged(f"a shard of '{clipped(name)}' has another number of dimensions")
            if math.prod(box.sizes):
                shards.append((box, self._find(name, box.offsets)))
        if flaw := coverage_error([box for box, _ in shards], fields.size):
            raise self._damaged(f"the shards of '{clipped(name)}' {flaw}")
        return _Tensor(dtype.name, fields.size, tuple(shards))


def coverage_error(boxes: list[Box], shape: tuple[int, ...]) -> str:
    """Return the error of boxes that must cover a tensor exactly once; an empty string if they do.

    Parameters
    ----------
    boxes
        The non-empty boxes.
    shape
        Shape of the tensor.
    """
    for box in boxes:
        if any(at + size > n for at, size, n in zip(*box, shape, strict=True)):
            return "reach past it"
    if len(boxes) > 1 and not shape:
        return "overlap"
    if len(boxes) > 1:
        axis = max(range(len(shape)), key=lambda d: len({box.offsets[d] for box in boxes}))
        n_compared, active = 0, list[Box]()
        for box in sorted(boxes, key=lambda box: box.offsets[axis]):
            start = box.offsets[axis]
            active = [other for other in active if other.offsets[axis] + other.sizes[axis] > start]
            n_compared += len(active)
            if n_compared > _MAX_COMPARISONS:
                return "are more than a checkpoint has"
            if any(_overlap(other, box) for other in active):
                return "overlap"
            active.append(box)
    return "leave a hole" if sum(math.prod(box.sizes) for box in boxes) != math.prod(shape) else ""


def _overlap(first: Box, second: Box) -> bool:
    return all(a < b + m and b < a + n for a, n, b, m in zip(*first, *second, strict=True))


class _Files:
    """The open shard files, with reads that compare their content with the metadata."""

    def __init__(self, root: Path, payloads: Iterable[_Payload], access: Access, stack: ExitStack) -> None:
        self._allow_damaged = access.allow_damaged
        self._files: dict[str, ReadableFile] = {}
        self._refs: dict[bytes, object] = {}
        self.stamps: dict[str, FileStamp] = {}
        self.entries: dict[str, list[ZipEntry]] = {}
        in_order = sorted(payloads, key=lambda payload: (payload.file, payload.offset))
        for name, row in groupby(in_order, key=lambda payload: payload.file):
            path = root / name
            try:
                self.stamps[name] = access.admit(path)
            except NotFoundError as error:
                raise missing(root, name) from error
            self._files[name] = stack.enter_context(ReadableFile(path, access.counter, self.stamps[name]))
            self.entries[name] = []
            ends = [(item.offset, item.offset + item.nbytes) for item in row]
            if any(end > start for (_, end), (start, _) in pairwise(ends)):
                raise DamagedError("two shards overlap", where=str(path))
            if ends[-1][1] > self._files[name].nbytes:
                facts = {"expected": f"at least {ends[-1][1]} bytes", "found": f"{self._files[name].nbytes}"}
                raise DamagedError("the file is shorter than '.metadata' requires", where=str(path), **facts)
            places = ((at, end) for start, end in ends for at in (start, max(start, end - _END_NBYTES)))
            self._files[name].expect((at, min(end - at, _END_NBYTES)) for at, end in places)

    def window(self, payload: _Payload) -> Window:
        return Window(self._files[payload.file], payload.offset, payload.nbytes)

    def number(self, payload: _Payload, placed: Placed) -> int:
        """Return the value of an integer tensor with one element."""
        at = placed.pieces[0].placed
        return int.from_bytes(self._files[payload.file].read(at.offset, at.span), "little", signed=True)

    def value(self, payload: _Payload) -> object:
        """Return the value of an object; None if it is carried unread."""
        with suppress(InshrinkError):
            return read_pickle(read_torch_zip(self.window(payload))[0], payload.file)
        return None

    def placed(self, payload: _Payload) -> Placed | None:
        """Return the place of a shard's single tensor in its file; None if it is carried unread."""
        window = self.window(payload)
        where = f"{window.path}, the shard at {payload.offset}"
        if not is_zip(window.read(0, min(4, window.nbytes))):
            raise DamagedError("a shard is not a file of torch.save", where=where)
        pickled, storages = read_torch_zip(window, allow_damaged=self._allow_damaged)
        if pickled not in self._refs:
            self._refs[pickled] = read_pickle(pickled, where)
        ref = self._refs[pickled]
        if not isinstance(ref, TensorRef):
            return None
        entry = storages.get(ref.storage.key)
        if entry is not None:
            crcs = tuple(at + payload.offset for at in entry.crc_offsets)
            entry = ZipEntry(entry.data_offset + payload.offset, entry.data_nbytes, crcs)
            self.entries[payload.file].append(entry)
        return place(ref, entry, where)


def split_name(name: str, paths: Mapping[Any, Any]) -> tuple[str | int, ...]:
    """Return the keys that lead to a tensor in the saved state."""
    path = paths.get(name)
    given = _MEGATRON.fullmatch(name) if path in (None, (name,)) else None
    if given and given[2].rpartition(".")[2] not in STATE_ROLES:
        return "optimizer", "state", given[2], given[1]
    if (
        isinstance(path, tuple)
        and 0 < len(path) <= _MAX_DEPTH
        and all(type(k) is str or (type(k) is int and 0 <= k < _MAX_ITEMS) for k in path)
    ):
        return path
    top, _, rest = name.partition(".")
    return (top, rest) if rest and top in (*MODEL_KEYS, *OPTIMIZER_KEYS) else (name,)


def _insert(root: dict[Any, Any], path: tuple[str | int, ...], value: object) -> None:
    for key in path[:-1]:
        inner = root.setdefault(key, {})
        if not isinstance(inner, dict):
            return
        root = inner
    root.setdefault(path[-1], value)


def _optimizer_of(value: object) -> object:
    """Return an optimizer in PyTorch's layout; flat storage uses dotted names for state and groups."""
    if not isinstance(value, dict):
        return value
    state: dict[Any, Any] = {}
    for key, item in value.items():
        inner = key.removeprefix("state.") if isinstance(key, str) else ""
        name, _, role = inner.rpartition(".")
        if isinstance(item, TensorRef) and name and key.startswith("state."):
            state.setdefault(name, {})[role] = item
    if state:
        return {"state": state, "param_groups": []}
    items, groups = value.get("state"), value.get("param_groups")
    if not isinstance(items, dict):
        return value
    groups = list(groups.values()) if isinstance(groups, dict) else groups
    groups = groups if isinstance(groups, list) else []
    # PyTorch stores the numbers of parameters as text.
    lists = [group.get("params") for group in groups if isinstance(group, dict)]
    known = (n for params in lists if isinstance(params, list) for n in params if type(n) is int)
    numbers = {str(n): n for n in known if 0 <= n < _MAX_ITEMS}
    state = {numbers.get(key, key): item for key, item in items.items()}
    return {**value, "state": state, "param_groups": groups}


def _tree_root(nested: dict[Any, Any]) -> dict[Any, Any]:
    """Return a state in the layout of a torch file: the model under one key, optimizers beside it."""
    known = (*MODEL_KEYS, *OPTIMIZER_KEYS)
    for _ in range(_MAX_DEPTH):
        # A state of the whole application: {"app": {"model": …, "optim": …}}.
        ((top, inner),) = nested.items() if len(nested) == 1 else [("", None)]
        if not isinstance(inner, dict) or top in known or not set(known) & set(inner):
            break
        nested = inner
    root = {key: value if key in MODEL_KEYS else _optimizer_of(value) for key, value in nested.items()}
    if not any(isinstance(root.get(key), dict) for key in MODEL_KEYS):
        # torchtitan puts the names of the model's tensors at the top level.
        loose = {key: value for key, value in root.items() if isinstance(value, TensorRef)}
        rest = {key: value for key, value in root.items() if key not in loose}
        root = rest | {"model": _as_state(loose, root)}
    return root


def _as_state(loose: dict[Any, Any], root: Mapping[Any, Any]) -> dict[Any, Any]:
    """Return weights under their names in the optimizer's state: Megatron-LM adds a prefix ``model.``."""
    names = mapping(mapping(root.get("optimizer")).get("state"))
    stripped = {key.removeprefix("model."): value for key, value in loose.items() if isinstance(key, str)}
    is_other = len(stripped) == len(loose) and any(name in names and name not in loose for name in stripped)
    return stripped if is_other else loose


def state_tree(
    places: Mapping[str, Placed],
    objects: Iterable[str],
    paths: Mapping[Any, Any],
    value: Callable[[str], object],
    where: str,
) -> StateTree:
    """Return the parts of a state, with names and roles as in a torch file of the same content.

    Parameters
    ----------
    places
        Tensors by name.
    objects
        Names of the entries that are no tensors.
    paths
        The key path of each entry by name, where known.
    value
        Returns an object, or the integer in a tensor of one element; None if it cannot be read.
    where
        The checkpoint, for messages.
    """
    nested: dict[Any, Any] = {}
    steps: dict[str, int] = {}
    n_opened = 0
    for name in (*places, *objects):
        path, placed = split_name(name, paths), places.get(name)
        is_number = placed is None or (placed.dtype in _INTEGERS and math.prod(placed.shape) == 1)
        if is_number and _is_step(path):
            if type(found := value(name)) is int:
                steps[str(path[-1])] = found
        elif placed is not None:
            ref = TensorRef(StorageRef(name, placed.dtype, 0), placed.dtype, 0, placed.shape, ())
            _insert(nested, path, ref)
        elif "param_groups" in path and n_opened < _MAX_OBJECTS:
            n_opened += 1
            _insert(nested, path, value(name))
    root = _tree_root(nested) | {key: steps[key] for key in STEP_KEYS if key in steps}
    return read_state_tree(root, lambda ref: places[ref.storage.key], where)


def _is_step(path: tuple[str | int, ...]) -> bool:
    """Return whether keys lead to the training step: at the top level, or in a part such as train_state."""
    return path[-1] in STEP_KEYS and len(path) <= 2 and path[0] not in (*MODEL_KEYS, *OPTIMIZER_KEYS)


def _place(name: str, tensor: _Tensor, files: _Files, numbers: Mapping[str, int]) -> Placed | None:
    """Return the place of a tensor with all its pieces; None if it is carried unread.

    Raises
    ------
    DamagedError
        A shard differs from its description in ``.metadata``.
    """
    if tensor.dtype not in DTYPE_SIZES:
        return None
    if not tensor.shards:
        return Placed.empty(tensor.dtype, tensor.shape, 0, f"'{clipped(name)}' in '.metadata'")
    parts = []
    for box, payload in tensor.shards:
        placed = files.placed(payload)
        if placed is None:
            return None
        if (placed.dtype, placed.shape) != (tensor.dtype, box.sizes):
            what = f"a shard of '{clipped(name)}' differs from its description in '.metadata'"
            expected = f"{tensor.dtype} {clipped(str(box.sizes))}"
            found = f"{placed.dtype} {clipped(str(placed.shape))}"
            raise DamagedError(what, where=payload.file, expected=expected, found=found)
        parts.append((box, numbers[payload.file], placed))
    return Placed.joined(tensor.dtype, tensor.shape, parts)


def read_distributed(root: Path, access: Access, first: int = 0) -> dict[str, FileContent]:
    """Return the content of each file of a distributed checkpoint, by its path below the root.

    Parameters
    ----------
    root
        The directory with ``.metadata``.
    access
        Access rights, and whether damage is accepted.
    first
        Number of its first file among those of the checkpoint.

    Returns
    -------
    dict
        The content by path. The first file lists all tensors; their pieces give the files that contain them.

    Raises
    ------
    DamagedError
        A file is missing or truncated, ``.metadata`` contradicts itself or the files, or the shards of a
        tensor overlap or leave a hole.
    UnsafePathError
        ``.metadata`` names a file outside the directory.
    UnsafePickleError
        A pickle imports names outside the allowlist.
    InputError
        Shards were transformed when they were written.

    Notes
    -----
    Takes two reads of at most 4 kB per shard.
    """
    pickled = access.read_text(root / METADATA, MAX_PICKLE_BYTES)
    described = DistributedMetadata(pickled, str(root / METADATA))
    shards = [payload for tensor in described.tensors.values() for _, payload in tensor.shards]
    payloads = [*shards, *described.objects.values()]
    with ExitStack() as stack:
        files = _Files(root, payloads, access, stack)
        numbers = {name: first + i for i, name in enumerate(files.stamps)}
        placed = {name: _place(name, item, files, numbers) for name, item in described.tensors.items()}
        places = {name: item for name, item in placed.items() if item is not None}

        def value(name: str) -> object:
            if name in described.objects:
                return files.value(described.objects[name])
            return files.number(described.tensors[name].shards[0][1], places[name])

        tree = state_tree(places, described.objects, described.paths, value, str(root))
    zips: dict[str, list[PackedZip]] = {name: [] for name in files.stamps}
    objects = set(described.objects.values())
    for payload in payloads:
        zips[payload.file].append(PackedZip(payload.offset, payload.nbytes, payload in objects))
    found: dict[str, FileContent] = {}
    for name, stamp in files.stamps.items():
        rows: Any = {"entries": tuple(sorted(files.entries[name])), "zips": tuple(sorted(zips[name]))}
        found[name] = FileContent(stamp, "dcp", StateTree() if found else tree, **rows)
    return found
