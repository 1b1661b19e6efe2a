"""Rebuild tensors that a torch file carries unread, for writing them to another format.

The skeleton stores a file's pickle, and with it every tensor whose values differ from the bytes of one
storage: conjugated and negated views, sparse, quantized and meta tensors, expanded constants. The pickle is
not executed. Its checked contents become the arguments of PyTorch's constructors.
"""

from __future__ import annotations

import bisect
import functools
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from inshrink_core.checkpoint import (
    DTYPE_SIZES,
    Checkpoint,
    FileLayout,
    OverlaidSource,
    TensorRole,
    TensorSpec,
)
from inshrink_core.errors import DamagedError, InputError, clipped
from inshrink_core.execution.resources import Limits
from inshrink_core.formats.content import TorchFile
from inshrink_core.formats.discovery import METADATA
from inshrink_core.formats.disk import Window
from inshrink_core.formats.distributed import DistributedMetadata
from inshrink_core.formats.source import DEFAULT_LIMITS, RestoredFile
from inshrink_core.formats.state_tree import MODEL_KEYS, Named, Optimizer, Placed, extent, read_state_tree
from inshrink_core.formats.torch.legacy import MAGIC_WITHIN
from inshrink_core.formats.torch.pickles import OddTensor, StorageRef, TensorRef

if TYPE_CHECKING:
    from torch import Tensor

_MAX_NESTED: Final = 4
"""Maximum nesting of tensors made of tensors, such as negated and conjugated values of a sparse one."""


class CarriedTensor:
    """A tensor without a spec, carried unread in a file.

    Parameters
    ----------
    name, role
        As in a spec.
    ref
        Its description in the pickle.
    opened
        The file that contains it.
    limits
        Limits on memory.
    """

    def __init__(
        self, name: str, role: TensorRole, ref: TensorRef, opened: TorchFile, limits: Limits
    ) -> None:
        self.name, self.role, self.file = name, role, opened.where
        self.key = Named(name, role, Placed("", (), None, 0, 0)).key
        self._ref, self._opened, self._limits = ref, opened, limits

    @property
    def kind(self) -> str:
        """Its kind, for messages."""
        ref = self._ref
        if not isinstance(ref, OddTensor):
            return "expanded" if ref.dtype in DTYPE_SIZES else ref.dtype
        layout = ref.args[0] if ref.kind == "sparse" and ref.args else None
        return layout.removeprefix("torch.") if isinstance(layout, str) else ref.kind

    def restored(self) -> Tensor:
        """Return the tensor as PyTorch would load it."""
        try:
            made: Tensor = self._rebuilt(self._ref)
        except InputError:
            raise
        except (AttributeError, LookupError, OverflowError, RuntimeError, TypeError, ValueError) as error:
            text = clipped(str(error).partition("\n")[0])
            raise DamagedError(f"no tensor '{clipped(self.name)}' ({text})", where=self.file) from error
        return made

    def _rebuilt(self, ref: TensorRef, depth: int = 0) -> Any:
        import torch

        build: Any = torch  # torch's functions for sparse tensors lack type hints
        if depth > _MAX_NESTED:
            raise ValueError("it is made of itself")
        if not isinstance(ref, OddTensor):
            return self._strided(ref.storage, ref.offset, ref.shape, ref.stride, ref.dtype)
        args: Any = ref.args
        inner = functools.partial(self._rebuilt, depth=depth + 1)
        if ref.kind == "conjugate":
            return inner(args[0]).conj()
        if ref.kind == "negative":
            return torch._neg_view(inner(args[0]))
        if ref.kind == "meta":
            return torch.empty_strided(args[1], args[2], dtype=getattr(torch, args[0].name), device="meta")
        if ref.kind == "sparse":
            n_parts = 2 if args[0] == "torch.sparse_coo" else 3
            parts, (size, *given) = map(inner, args[1][:n_parts]), args[1][n_parts:]
            if n_parts == 2:
                coalesced = given == [True]
                return build.sparse_coo_tensor(*parts, size, is_coalesced=coalesced, check_invariants=True)
            layout = getattr(torch, args[0].removeprefix("torch."))
            return build.sparse_compressed_tensor(*parts, size, layout=layout, check_invariants=True)
        raise self._without_values(ref.kind)

    def plain(self, _: TensorSpec | None = None) -> Tensor:
        """Return the values as a plain tensor."""
        import torch

        full = self.restored()
        if full.is_meta or full.layout is not torch.strided:
            raise self._without_values(self.kind)
        self._limits.require_memory(full.nbytes, f"writing '{clipped(self.name)}' in full", self.file)
        if str(full.dtype).removeprefix("torch.") not in DTYPE_SIZES:
            full = full.contiguous().view(torch.uint8)
        return full.resolve_conj().resolve_neg().contiguous()

    def _strided(self, storage: StorageRef, offset: int, shape: Any, stride: Any, dtype: str) -> Tensor:
        import torch

        kind = getattr(torch, dtype)
        if not math.prod(shape):
            return torch.empty(shape, dtype=kind)
        entry = self._opened.storages[storage.key]
        at, nbytes = offset * kind.itemsize, extent(shape, stride) * kind.itemsize
        if min(at, nbytes) < 0 or at + nbytes > entry.data_nbytes:
            raise ValueError("it reaches past its storage")
        content = bytearray(self._opened.file.read(entry.data_offset + at, nbytes))
        data = torch.frombuffer(content, dtype=torch.uint8)
        return (data.ne(0) if dtype == "bool" else data.view(kind)).as_strided(shape, stride)

    def _without_values(self, kind: str) -> InputError:
        what = f"tensor '{clipped(self.name)}' ({kind}) has no values that this format can hold"
        remedy = "use the layout 'same', or leave the tensor out; 'torch' takes sparse ones and those on meta"
        return InputError(what, where=self.file, remedy=remedy)


def carried_tensors(checkpoint: Checkpoint, limits: Limits = DEFAULT_LIMITS) -> tuple[CarriedTensor, ...]:
    """Return the tensors of models, optimizers and gradients that torch files carry unread.

    Parameters
    ----------
    checkpoint
        From a run, or decoded from an archive.
    limits
        Limits on the memory for a tensor.

    Raises
    ------
    DamagedError
        A file contradicts itself.
    """
    found: list[CarriedTensor] = []
    for layout in checkpoint.files:
        if layout.kind == "torch":
            found += _carried_in(checkpoint, layout, limits)
        elif layout.kind == "opaque" and layout.path.rpartition("/")[2] == METADATA:
            found += _carried_shards(checkpoint, layout, limits)
    return tuple(found)


def _carried_shards(checkpoint: Checkpoint, metadata: FileLayout, limits: Limits) -> Iterator[CarriedTensor]:
    """Yield the carried tensors of a distributed checkpoint; a shard's name ends with its offsets."""
    folder = metadata.path.removesuffix(METADATA)
    shards = (item for item in checkpoint.files if item.kind == "dcp")
    files = {item.path: item for item in shards if item.path.startswith(folder)}
    if not files:
        return
    pickled = RestoredFile(checkpoint, metadata).read(0, metadata.nbytes)
    starts = {path: [region.offset for region in item.regions] for path, item in files.items()}
    opened: dict[str, RestoredFile] = {}
    for (name, at), payload in DistributedMetadata(pickled, metadata.path).payloads.items():
        layout, first, nbytes = files.get(f"{folder}{payload.file}"), payload.offset, payload.nbytes
        if at is None or layout is None:
            continue
        read = starts[layout.path]
        if bisect.bisect_left(read, first) < bisect.bisect_left(read, first + nbytes):
            continue
        if layout.path not in opened:
            opened[layout.path] = RestoredFile(checkpoint, layout)
        shard = TorchFile.read(Window(opened[layout.path], first, nbytes), allow_damaged=True)
        if isinstance(shard.root, TensorRef) and shard.place(shard.root) is None:
            top, _, rest = name.partition(".")
            is_model = top in MODEL_KEYS and bool(rest)
            name = (rest if is_model else name) + (str(list(at)) if any(at) else "")
            role = TensorRole.WEIGHT if is_model else TensorRole.EXTRA
            yield CarriedTensor(name, role, shard.root, shard, limits)


def _carried_in(checkpoint: Checkpoint, layout: FileLayout, limits: Limits) -> Iterator[CarriedTensor]:
    file = RestoredFile(checkpoint, layout)
    opened = TorchFile.read(file, file.read(0, min(file.nbytes, MAGIC_WITHIN)), allow_damaged=True)
    refs: list[TensorRef] = []

    def placed(ref: TensorRef) -> Placed:
        if (known := opened.place(ref)) is not None:
            return known
        refs.append(ref)
        # It has no place in the file: encode its number as a negative offset.
        return Placed("float32", (1,), None, -len(refs), 1 << 20)

    tree = read_state_tree(opened.root, placed, opened.where, n_bytes=opened.n_bytes)
    named = [Named(name, TensorRole.WEIGHT, item) for name, item in (*tree.model, *tree.extra)]
    named += [Named(name, TensorRole.GRADIENT, item) for name, item in tree.gradients]
    named += tree.named
    for number, optimizer in enumerate(tree.optimizers):
        named += _named_state(checkpoint, layout, optimizer, number)
    for name, role, found, _ in named:
        if found.offset < 0:
            yield CarriedTensor(name, role, refs[-found.offset - 1], opened, limits)


def _named_state(
    checkpoint: Checkpoint, layout: FileLayout, optimizer: Optimizer, number: int
) -> Iterator[Named]:
    """Yield an optimizer's tensors of each parameter, under the parameter names used in the checkpoint."""
    keys = {region.offset + m.start: m.key for region in layout.regions for m in region.members}
    prefix = f"optimizer.{number}.state" if number else "optimizer.state"
    for param, tensors in optimizer.state.items():
        beside = [keys.get(tensor.placed.offset) for tensor in tensors if tensor.role is not TensorRole.STATE]
        name = next((checkpoint.spec(key).parameter for key in beside if key), "")
        name = name or (param if isinstance(param, str) else f"{prefix}.{param}")
        yield from (tensor.of(name) for tensor in tensors)


def with_plain_values(checkpoint: Checkpoint, carried: Iterable[CarriedTensor]) -> Checkpoint:
    """Return a checkpoint with specs for carried tensors, read as plain values.

    Parameters
    ----------
    checkpoint
        The checkpoint.
    carried
        The tensors to add, a selection from `carried_tensors`.

    Raises
    ------
    InputError
        A tensor has no values, or its name is taken.
    """
    made: dict[str, Callable[[TensorSpec], Tensor]] = {}
    specs = {spec.key: spec for spec in checkpoint.specs}
    for item in carried:
        tensor = item.plain()
        dtype, shape = str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)
        if item.key in specs:
            what = f"two tensors are named '{clipped(item.key)}'"
            raise InputError(what, where=checkpoint.origin, remedy="use the layout 'same'")
        specs[item.key] = TensorSpec(name=item.name, role=item.role, dtype=dtype, shape=shape, exact=True)
        made[item.key] = item.plain
    if not made:
        return checkpoint
    return replace(checkpoint, specs=tuple(specs.values()), source=OverlaidSource(checkpoint.source, made))
