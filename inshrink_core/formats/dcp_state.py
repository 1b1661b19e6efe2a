"""Name and write states of `torch.distributed.checkpoint` that have no files in the archive.

A frame written by the ranks of a training has no files. Instead it carries a `SavedState`, as the skeleton of
a file of the kind `STATE`. From it `write_state` makes a directory for ``dcp.load``.
"""

from __future__ import annotations

import io
import pathlib
import pickle
import threading
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Final, NamedTuple

import msgspec

from inshrink_core.checkpoint import (
    DTYPE_SIZES,
    MODEL_ROLES,
    OPTIMIZER_ROLES,
    Checkpoint,
    TensorRole,
    TensorSpec,
)
from inshrink_core.errors import DamagedError, InputError, UnsafePickleError, clipped
from inshrink_core.formats.assembly import assemble
from inshrink_core.formats.content import FileContent
from inshrink_core.formats.disk import FileStamp
from inshrink_core.formats.distributed import METADATA, SHARDS, split_name, state_tree
from inshrink_core.formats.state_tree import MODEL_KEYS, OPTIMIZER_KEYS, Placed

if TYPE_CHECKING:
    from collections.abc import Callable

STATE: Final = "dcp-state"
"""Kind of the file layout that carries a `SavedState`."""

_FILE: Final = f"__0_0{SHARDS}"
STATE_WORDS: Final = {TensorRole.MOMENTUM: "momentum_buffer", TensorRole.MASTER: "master_param"}
"""Names of optimizer state in PyTorch that differ from the role's name."""

_PLAIN: Final = [
    (io.BytesIO, "_io.BytesIO"),
    *(
        (getattr(pathlib, kind), f"{module}.{kind}")
        for kind in ("PosixPath", "PurePosixPath", "PureWindowsPath", "WindowsPath")
        for module in ("pathlib", "pathlib._local")
    ),
]
"""Types outside PyTorch that only hold values, and their names in pickles."""

_LOADING: Final = threading.Lock()
"""Guards the list of types that PyTorch loads."""

StatePath = tuple[str | int, ...]


class SavedState(NamedTuple):
    """The state passed to ``dcp.save``, by its names.

    Parameters
    ----------
    tensors
        Key of each tensor.
    objects
        Objects that are no tensors, as pickled by DCP.
    paths
        The keys that lead to each entry in the state.
    """

    tensors: Mapping[str, str]
    objects: Mapping[str, bytes]
    paths: Mapping[str, StatePath]

    def packed(self) -> bytes:
        """Return the state as msgpack."""
        return msgspec.msgpack.encode([self.tensors, self.objects, [*self.paths.items()]])


_Packed = tuple[dict[str, str], dict[str, bytes], list[tuple[str, StatePath]]]


def unpack_state(content: bytes, where: str) -> SavedState:
    """Return a packed state.

    Raises
    ------
    DamagedError
        The content is no packed state.
    """
    try:
        tensors, objects, paths = msgspec.msgpack.decode(content, type=_Packed)
    except ValueError as error:
        raise DamagedError(f"the saved state is damaged ({error})", where=where) from error
    return SavedState(tensors, objects, dict(paths))


def saved_state(checkpoint: Checkpoint) -> SavedState:
    """Return the state that a checkpoint was saved as; for other checkpoints, a state made from its specs.

    Tensors that are not stored, such as omitted optimizer state, are not in it.
    """
    for layout in checkpoint.files:
        if layout.kind == STATE:
            state = unpack_state(checkpoint.source.skeleton(layout), checkpoint.origin)
            remaining = {name: key for name, key in state.tensors.items() if key in checkpoint}
            return state._replace(tensors=remaining)
    import torch

    tensors: dict[str, str] = {}
    paths: dict[str, StatePath] = {}
    for spec in checkpoint.specs:
        path = _path_of(spec)
        name = ".".join(map(str, path))
        tensors[name], paths[name] = spec.key, path
    for alias, key in checkpoint.aliases.items():
        if checkpoint.spec(key).role in MODEL_ROLES:
            tensors[f"model.{alias}"], paths[f"model.{alias}"] = key, ("model", alias)
    step = io.BytesIO()
    torch.save(checkpoint.step, step)
    return SavedState(tensors, {"step": step.getvalue()}, {**paths, "step": ("step",)})


def _path_of(spec: TensorSpec) -> StatePath:
    if spec.role in MODEL_ROLES:
        return ("model", spec.name)
    if spec.role is TensorRole.STATE:
        return ("optimizer", "state", spec.parameter, spec.name.rpartition(":")[2])
    if spec.role in OPTIMIZER_ROLES:
        word = STATE_WORDS.get(spec.role, spec.role.value)
        return ("optimizer", "state", spec.name, word)
    return (spec.role.value, spec.name)


def loaded(name: str, content: bytes, where: str) -> object:
    """Return an object of a state.

    The allowed types are those of ``torch.load(weights_only=True)``, `io.BytesIO` and the paths of `pathlib`.

    Raises
    ------
    UnsafePickleError
        The object has another type, or the content is no pickle.
    """
    import torch

    types = torch.serialization
    # The list is global to the process: leave existing entries in it.
    with _LOADING, types.safe_globals([kind for kind in _PLAIN if kind not in types.get_safe_globals()]):
        try:
            return torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
        except (pickle.UnpicklingError, RuntimeError, ValueError, EOFError) as error:
            wanted: list[str] = []
            with suppress(Exception):
                wanted = types.get_unsafe_globals_in_checkpoint(io.BytesIO(content))
            reason = str(error).rpartition("error: ")[2].strip().partition("\n")[0]
            why = "" if wanted else f" ({clipped(reason)})"
            what = f"'{clipped(name)}' is of a type that is not loaded{why}"
            remedy = "turn it into numbers, texts and tensors before it is saved, or, if you trust the"
            remedy += " archive, allow the type: torch.serialization.add_safe_globals([...])"
            kinds = tuple(sorted(wanted))
            raise UnsafePickleError(what, where=where, wanted=kinds, remedy=remedy) from error


class NamedState(NamedTuple):
    """The specs of a state's tensors by name, and the hyperparameters of optimizer groups by parameter."""

    specs: Mapping[str, TensorSpec]
    hyperparameters: Mapping[str, Mapping[str, float]]


def named_state(
    tensors: Mapping[str, tuple[str, tuple[int, ...]]],
    objects: Mapping[str, bytes],
    paths: Mapping[Any, Any],
    where: str,
) -> NamedState:
    """Return names and roles of a state's tensors, as for a directory of the same content.

    Parameters
    ----------
    tensors
        Dtype and shape by name.
    objects, paths
        As in `SavedState`.
    where
        The checkpoint, for messages.

    Notes
    -----
    Tensors outside the model and its optimizer are stored exactly, under their own names.
    """
    names = list(tensors)
    rows = enumerate(tensors.items())
    # The place only identifies the tensor.
    places = {name: Placed(*about, None, at, 1) for at, (name, about) in rows if about[0] in DTYPE_SIZES}

    def value(name: str) -> object:
        if name in places:
            return 0
        with suppress(UnsafePickleError):
            return loaded(name, objects[name], where)
        return None

    specs: dict[str, TensorSpec] = {}
    hyperparameters: Mapping[str, Mapping[str, float]] = {}
    with suppress(InputError):  # a state without a model is stored exactly
        tree = state_tree(places, objects, paths, value, where)
        content = FileContent(FileStamp("", 0, 0), "dcp", tree)
        parsed = assemble(Path(where), "dcp", {METADATA: content}, paths={METADATA: Path(METADATA)})
        hyperparameters = parsed.hyperparameters
        specs = {names[parsed.places[spec.key].offset]: spec for spec in parsed.specs}
    tops = {name: split_name(name, paths)[0] for name in names}
    apart = not {*MODEL_KEYS}.isdisjoint(tops.values())
    beside = {name for name in names if apart and tops[name] not in (*MODEL_KEYS, *OPTIMIZER_KEYS)}
    for name, (dtype, shape) in tensors.items():
        if name not in specs or name in beside:
            specs[name] = TensorSpec(name=name, role=TensorRole.EXTRA, dtype=dtype, shape=shape)
    return NamedState(specs, hyperparameters)


def write_state(
    checkpoint: Checkpoint, progress: Callable[[str], None]
) -> dict[str, Callable[[IO[bytes]], None]]:
    """Return the writers of a directory for ``dcp.load``, by path; they must run in this order.

    Notes
    -----
    One file holds all tensors, unsplit: DCP slices them for the ranks that load. Memory is bounded by two
    copies of the largest tensor. Layout: torch/distributed/checkpoint/filesystem.py of PyTorch 2.13.
    """
    state = saved_state(checkpoint)
    lengths: dict[str, tuple[int, int]] = {}

    def shards(file: IO[bytes]) -> None:
        import torch

        for name, key in state.tensors.items():
            buffer = io.BytesIO()
            torch.save(checkpoint[key], buffer)
            lengths[name] = (file.tell(), file.write(buffer.getbuffer()))
            progress(key)
        for name, content in state.objects.items():
            lengths[name] = (file.tell(), file.write(content))

    def metadata(file: IO[bytes]) -> None:
        import torch
        from torch.distributed.checkpoint import metadata as dcp
        from torch.distributed.checkpoint.filesystem import _StorageInfo

        described: dict[str, Any] = {}
        stored = {}
        for name, key in state.tensors.items():
            described[name] = storage_metadata([checkpoint.spec(key)])
            index = dcp.MetadataIndex(name, torch.Size([0] * len(checkpoint.spec(key).shape)))
            stored[index] = _StorageInfo(_FILE, *lengths[name])
        for name in state.objects:
            described[name] = dcp.BytesStorageMetadata()
            stored[dcp.MetadataIndex(name)] = _StorageInfo(_FILE, *lengths[name])
        paths = {name: path for name, path in state.paths.items() if name in described}
        file.write(pickle.dumps(dcp.Metadata(described, paths, stored)))

    return {_FILE: shards, METADATA: metadata}


def storage_metadata(specs: Iterable[TensorSpec]) -> Any:
    """Return DCP's metadata of a tensor, given the specs of its stored cells, or its own spec."""
    import torch
    from torch.distributed.checkpoint import metadata as dcp

    rows = list(specs)
    full = rows[0].full_spec
    offsets = [row.cell.offsets if row.cell else (0,) * len(row.shape) for row in rows]
    spans = [(torch.Size(at), torch.Size(row.shape)) for at, row in zip(offsets, rows, strict=True)]
    chunks = [dcp.ChunkStorageMetadata(*span) for span in spans]
    properties = dcp.TensorProperties(dtype=getattr(torch, full.dtype))
    return dcp.TensorStorageMetadata(properties, torch.Size(full.shape), chunks)
