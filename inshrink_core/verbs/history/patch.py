"""Patches of weights: what turns those of one step into those of another, bit for bit."""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Final, NamedTuple

from inshrink_core.errors import DamagedError, IncompatibleError, InputError, StorageError, clipped
from inshrink_core.execution.files import read_regular, require_free
from inshrink_core.execution.progress import Progress
from inshrink_core.report import Report
from inshrink_core.request import Option, Request, python_call
from inshrink_core.text import count, duration, size
from inshrink_core.verbs.shared.groups import (
    AnyBase,
    ArchiveLike,
    Based,
    Limiting,
    MemoryLimit,
    PathLike,
)
from inshrink_core.verbs.shared.showing import show_facts

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from rich.console import Console
    from torch import Tensor

    from inshrink_core.chain.base import BaseModel
    from inshrink_core.checkpoint import Checkpoint, FileLayout, TensorSpec

FORMAT: Final = "inshrink-patch/1"

_SPARSE_BELOW: Final = 0.4
"""Share of changed values from which on differences of all take less than places and differences of some."""

_LEVEL: Final = 1
"""Differences are nearly random: higher levels find matches that cost more than they save."""

_MAX_INDEX_NBYTES: Final = 1 << 28

SAME, SPARSE, DENSE, NEW, GONE = "same", "sparse", "dense", "new", "gone"


@dataclass(frozen=True, slots=True, kw_only=True)
class PatchReport(Report):
    """What a patch holds.

    Parameters
    ----------
    archive, output
        Of which archive, and the file that was made.
    base, result
        From which step to which one.
    dtype
        What floats were cast to before they were compared; ``same`` for nothing.
    nbytes, raw_nbytes
        Bytes of the file, and of the weights of `result`.
    n_tensors, n_changed
        Tensors, and those of them that differ.
    changed
        Share of the values that differ.
    seconds
        Wall time.
    """

    archive: str
    output: Path
    base: int
    result: int
    dtype: str
    nbytes: int
    raw_nbytes: int
    n_tensors: int
    n_changed: int
    changed: float
    seconds: float

    SAYS: ClassVar = (
        "archive output from=base to=result dtype bytes=nbytes raw_bytes=raw_nbytes tensors=n_tensors "
        "tensors_changed=n_changed changed seconds"
    )

    def show(self, console: Console) -> None:
        """Print what it is, and how large."""
        facts = [
            ("patch", f"{self.output}  ({size(self.nbytes)})"),
            ("turns", f"step {self.base} into step {self.result}, bit for bit"),
            ("the weights", f"{size(self.raw_nbytes)}, {count(self.n_tensors)} tensors"),
            ("changed", f"{100 * self.changed:.1f} % of the values, in {count(self.n_changed)} tensors"),
            ("time", duration(self.seconds)),
        ]
        show_facts(console, facts)


@dataclass(frozen=True, slots=True, kw_only=True)
class ApplyReport(Report):
    """What `apply` wrote.

    Parameters
    ----------
    patch, base, output
        What was applied to what, and the file that was made.
    step
        Of which step its weights are.
    digest
        Their SHA-256, as the patch has it.
    n_tensors, nbytes
        Tensors in it, and its size.
    seconds
        Wall time.
    """

    patch: str
    base: str
    output: Path
    step: int
    digest: str
    n_tensors: int
    nbytes: int
    seconds: float

    SAYS: ClassVar = "patch base output step digest tensors=n_tensors bytes=nbytes seconds"

    def show(self, console: Console) -> None:
        """Print what was made, and that it is what it should be."""
        facts = [
            ("weights", f"{self.output}  ({size(self.nbytes)}, {count(self.n_tensors)} tensors)"),
            ("step", f"{self.step}, every bit as in the archive: SHA-256 {self.digest[:16]}…"),
            ("time", duration(self.seconds)),
        ]
        show_facts(console, facts)


@dataclass(frozen=True)
class ExportPatch(Limiting, Based, Request[PatchReport]):
    """Write what turns the weights of one step into those of another, bit for bit, as one file.

    Parameters
    ----------
    archive
        The archive: a folder, a packed file or a URL.
    output
        The patch, a safetensors file.
    patch
        From which step to which one.
    dtype
        What floats are before they are compared: same, fp32, bf16 or fp16, as the server has them.
    force
        Replace a file that exists.

    Raises
    ------
    NotFoundError
        The archive has no such step.
    ExistsError
        The file exists and `force` is not set.
    InputError
        No two steps are named, or a value does not fit `dtype`.
    DamagedError, MissingFrameError
        A step cannot be decoded.

    Notes
    -----
    Weights and buffers alone. Memory is that of the patch and of two tensors.

    Examples
    --------
    >>> import inshrink_core, tempfile, pathlib
    >>> folder = pathlib.Path(tempfile.mkdtemp())
    >>> run = inshrink_core.open(inshrink_core.sample("digits-cnn"))
    >>> report = inshrink_core.compress(run, folder / "digits.inshrink", steps=[200, 400])
    >>> report = inshrink_core.verbs.export_patch(
    ...     folder / "digits.inshrink", folder / "patch.safetensors", patch="200:400", dtype="bf16"
    ... )
    >>> report.nbytes < report.raw_nbytes
    True
    """

    archive: ArchiveLike
    output: Annotated[PathLike, Option(("--output", "-o"), metavar="FILE")]
    _: KW_ONLY
    patch: Annotated[str, Option(metavar="FROM:TO")]
    dtype: Annotated[str, Option(metavar="same|fp32|bf16|fp16")] = "same"
    force: bool = False

    COMMAND: ClassVar = "export --patch"
    EXAMPLES: ClassVar = (
        "inshrink export digits.inshrink --patch 200:400 --dtype bf16 -o patch.safetensors",
    )

    def perform(self) -> PatchReport:
        """Write the file."""
        from safetensors.numpy import save

        from inshrink_core.formats.write import write_files

        begun, target = time.perf_counter(), Path(self.output)
        require_free(target, self.force)
        opened = self.opened_archive(self.archive)
        first, last = self._steps()
        infos = opened.reader.find(first), opened.reader.find(last)
        view = opened.limited(self.limits()).sequential()
        sides = [_Weights(view.checkpoint(info), _torch_dtype(self.dtype)) for info in infos]
        made = _Made()
        names = sorted({*sides[0].specs, *sides[1].specs})
        for position, name in enumerate(names):
            made.add(name, *(side.tensor(name) for side in sides))
            if self.progress is not None:
                self.progress(Progress("patch", position + 1, len(names), last, name))
        content = save(made.tensors(), metadata=made.metadata(first, last))
        write_files(
            target.parent,
            {target.name: lambda file: _written(file, content)},
            force=self.force,
            origin=str(target),
        )
        return PatchReport(
            archive=opened.reader.path,
            output=target,
            base=first,
            result=last,
            dtype=self.dtype,
            nbytes=len(content),
            raw_nbytes=made.raw_nbytes,
            n_tensors=sum(row.form != GONE for row in made.rows),
            n_changed=sum(row.form != SAME for row in made.rows),
            changed=made.n_different / max(1, made.n_values),
            seconds=time.perf_counter() - begun,
        )

    def _steps(self) -> tuple[int, int]:
        """Return the two steps."""
        first, sign, last = self.patch.partition(":")
        if not (sign and first.strip().isdecimal() and last.strip().isdecimal()):
            raise InputError(
                "--patch says from which step to which",
                expected="FROM:TO, as 200:400",
                found=clipped(self.patch),
            )
        return int(first), int(last)


export_patch = python_call(ExportPatch)


@dataclass(frozen=True)
class Apply(MemoryLimit, Request[ApplyReport]):
    """Apply a patch to the weights it was made from; writes those it leads to, bit for bit.

    Parameters
    ----------
    patch
        The patch, a file that `inshrink export` made of two steps.
    base
        The weights before: a checkpoint file or folder, or a step of a run or an archive.
    output
        The safetensors file to make.
    force
        Replace a file that exists.

    Raises
    ------
    InputError
        The base is not what the patch was made from.
    DamagedError, IncompatibleError
        The patch is damaged, or of a newer version; nothing is written.
    TooLargeError
        It would take more memory than that.
    ExistsError
        The file exists and `force` is not set.

    Notes
    -----
    Base and result are compared with the SHA-256 that the patch has of each.

    Examples
    --------
    >>> import inshrink_core, tempfile, pathlib
    >>> folder = pathlib.Path(tempfile.mkdtemp())
    >>> run = inshrink_core.open(inshrink_core.sample("digits-cnn"))
    >>> archive = folder / "digits.inshrink"
    >>> report = inshrink_core.compress(run, archive, steps=[200, 400])
    >>> patch = folder / "patch.safetensors"
    >>> report = inshrink_core.verbs.export_patch(archive, patch, patch="200:400")
    >>> inshrink_core.verbs.apply(patch, f"{archive}@200", folder / "new.safetensors").step
    400
    """

    patch: Annotated[PathLike, Option(metavar="PATCH")]
    base: Annotated[AnyBase, Option(metavar="BASE")]
    output: Annotated[PathLike, Option(("--output", "-o"), metavar="FILE")]
    _: KW_ONLY
    force: bool = False

    INTERRUPTED: ClassVar = "nothing was written"
    EXAMPLES: ClassVar = ("inshrink apply patch.safetensors model.safetensors -o new.safetensors",)

    def perform(self) -> ApplyReport:
        """Write the file."""
        from inshrink_core.chain import open_base
        from inshrink_core.checkpoint import Checkpoint, TensorRole, TensorSpec
        from inshrink_core.formats.write import write_safetensors

        begun, target = time.perf_counter(), Path(self.output)
        require_free(target, self.force)
        patch = _Patch.read(Path(self.patch))
        model = open_base(self.base)
        where = str(self.patch)
        self.limits().require_memory(patch.nbytes, "applying the patch", where)
        patch.require_base(model)
        specs = tuple(
            TensorSpec(name=row.name, role=TensorRole.WEIGHT, dtype=row.dtype, shape=row.shape)
            for row in patch.rows
            if row.form != GONE
        )
        source = _Patched(patch, model)
        checkpoint = Checkpoint(step=patch.step, specs=specs, source=source, origin=where)
        done = 0

        def advance(key: str) -> None:
            nonlocal done
            done += 1
            if done == len(specs):  # before the file gets its name
                source.require_result()
            if self.progress is not None:
                self.progress(Progress("apply", done, len(specs), patch.step, key))

        write_safetensors(checkpoint, target, force=self.force, progress=advance)
        return ApplyReport(
            patch=where,
            base=model.name,
            output=target,
            step=patch.step,
            digest=patch.result,
            n_tensors=len(specs),
            nbytes=target.stat().st_size,
            seconds=time.perf_counter() - begun,
        )


apply = python_call(Apply)


def _written(file: Any, content: bytes) -> None:
    file.write(content)


def _torch_dtype(word: str) -> str:
    """Return a dtype by the word for it; nothing for none."""
    from inshrink_core.verbs.export import DTYPES

    if word not in DTYPES:
        raise InputError("an unknown dtype", expected=", ".join(DTYPES), found=clipped(word))
    return DTYPES[word]


class _Weights:
    """Weights and buffers of a checkpoint, floats in another dtype where that is said."""

    def __init__(self, checkpoint: Checkpoint, dtype: str) -> None:
        from inshrink_core.checkpoint import MODEL_ROLES

        self.specs: Mapping[str, TensorSpec] = {
            spec.name: spec for spec in checkpoint.specs if spec.role in MODEL_ROLES
        }
        self._checkpoint, self._dtype = checkpoint, dtype

    def tensor(self, name: str) -> Tensor | None:
        """Return a tensor; None where there is no such."""
        import torch

        from inshrink_core.verbs.export import CASTABLE

        if name not in self.specs:
            return None
        tensor = self._checkpoint.source.read(self.specs[name])
        if not self._dtype or self.specs[name].dtype not in CASTABLE:
            return tensor
        made = tensor.to(getattr(torch, self._dtype))
        if bool((tensor.isfinite() & ~made.isfinite()).any()):
            raise InputError(
                f"a value is too large for {self._dtype}",
                where=f"{self._checkpoint.origin}, tensor '{name}'",
                remedy="choose bf16 or fp32",
            )
        return made


class _Row(NamedTuple):
    """One tensor of a patch: what it is afterwards, in which form, and how many differences there are."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    form: str
    n: int


def _words(tensor: Tensor) -> NDArray[np.unsignedinteger[Any]]:
    """Return the bits of a tensor as unsigned numbers, as wide as an element or eight bytes."""
    import numpy as np
    import torch

    flat = tensor.detach().cpu().contiguous().reshape(-1)
    width = min(flat.element_size(), 8)
    return np.ascontiguousarray(flat.view(torch.uint8).numpy()).view(f"<u{width}")


def _folded(now: NDArray[Any], before: NDArray[Any]) -> NDArray[Any]:
    """Return differences of words, modulo their range, those near zero of either sign as small numbers."""
    difference = now - before
    one, top = now.dtype.type(1), now.dtype.type(8 * now.itemsize - 1)
    folded: NDArray[Any] = (difference << one) ^ (now.dtype.type(0) - (difference >> top))
    return folded


def _unfolded(folded: NDArray[Any]) -> NDArray[Any]:
    """Undo `_folded`, but for adding what was before."""
    one = folded.dtype.type(1)
    difference: NDArray[Any] = (folded >> one) ^ (folded.dtype.type(0) - (folded & one))
    return difference


def _varints(values: NDArray[Any]) -> NDArray[np.uint8]:
    """Return numbers in bytes of seven bits, the lowest first, all but the last with the top bit set."""
    import numpy as np

    rows = values.astype(np.uint64)
    n_bytes = np.ones(rows.size, np.int64)
    for shift in range(7, 64, 7):
        n_bytes += rows >= np.uint64(1) << np.uint64(shift)
    ends = np.cumsum(n_bytes)
    coded = np.zeros(int(ends[-1]) if rows.size else 0, np.uint8)
    for place in range(int(n_bytes.max(initial=0))):
        has = n_bytes > place
        part = (rows[has] >> np.uint64(7 * place)) & np.uint64(127)
        coded[(ends - n_bytes)[has] + place] = part + np.where(n_bytes[has] > place + 1, 128, 0)
    return coded


def _gaps(coded: NDArray[np.uint8]) -> NDArray[np.int64]:
    """Undo `_varints`."""
    import numpy as np

    starts = np.flatnonzero(np.concatenate(([True], coded[:-1] < 128)))[: coded.size]
    if not starts.size:
        return np.zeros(0, np.int64)
    within = np.arange(coded.size) - np.repeat(starts, np.diff(starts, append=coded.size))
    return np.add.reduceat((coded & 127).astype(np.int64) << 7 * np.minimum(within, 8), starts)


def _tensor_digest(name: str, dtype: str, shape: Iterable[int], words: NDArray[Any]) -> bytes:
    """Return what a digest of many tensors is made of."""
    head = f"{name}\0{dtype}\0{','.join(map(str, shape))}\0".encode()
    return hashlib.sha256(head + hashlib.sha256(words.tobytes()).digest()).digest()


def _total(digests: Mapping[str, bytes]) -> str:
    """Return the SHA-256 of tensors, by name."""
    return hashlib.sha256(b"".join(digests[name] for name in sorted(digests))).hexdigest()


class _Made:
    """A patch that is being made."""

    def __init__(self) -> None:
        self.rows: list[_Row] = []
        self.raw_nbytes = self.n_values = self.n_different = 0
        self._streams: dict[str, tuple[Any, list[bytes]]] = {}
        self._digests: tuple[dict[str, bytes], dict[str, bytes]] = ({}, {})

    def add(self, name: str, before: Tensor | None, now: Tensor | None) -> None:
        """Take a tensor as it was and as it is; None where it is not there."""
        import numpy as np

        for side, tensor in zip(self._digests, (before, now), strict=True):
            if tensor is not None:
                side[name] = _tensor_digest(name, _name_of(tensor), tensor.shape, _words(tensor))
        if now is None:
            self.rows.append(_Row(name, "", (), GONE, 0))
            return
        words, shape, dtype = _words(now), tuple(now.shape), _name_of(now)
        self.raw_nbytes += words.nbytes
        self.n_values += words.size
        if before is None or (_name_of(before), before.shape) != (dtype, now.shape):
            self.n_different += words.size
            self._differ(name, dtype, shape, NEW, _folded(words, np.zeros_like(words)))
            return
        old = _words(before)
        places = np.flatnonzero(words != old)
        self.n_different += places.size
        if not places.size:
            self.rows.append(_Row(name, dtype, shape, SAME, 0))
        elif places.size < _SPARSE_BELOW * words.size:
            self._put("gaps", _varints(np.diff(places, prepend=-1) - 1))
            self._differ(name, dtype, shape, SPARSE, _folded(words[places], old[places]))
        else:
            self._differ(name, dtype, shape, DENSE, _folded(words, old))

    def _differ(self, name: str, dtype: str, shape: tuple[int, ...], form: str, folded: NDArray[Any]) -> None:
        """Take the differences of a tensor, a plane for each of their bytes."""
        self.rows.append(_Row(name, dtype, shape, form, folded.size))
        planes = folded.view("u1").reshape(folded.size, folded.itemsize)
        for place in range(folded.itemsize):
            self._put(f"plane{place}", planes[:, place])

    def _put(self, stream: str, values: NDArray[np.uint8]) -> None:
        import zstandard

        if stream not in self._streams:
            self._streams[stream] = zstandard.ZstdCompressor(level=_LEVEL).compressobj(), []
        coder, pieces = self._streams[stream]
        pieces.append(coder.compress(values.tobytes()))

    def tensors(self) -> dict[str, NDArray[np.uint8]]:
        """Return what the file holds."""
        import numpy as np
        import zstandard

        rows = [[row.name, row.dtype, list(row.shape), row.form, row.n] for row in self.rows]
        document = json.dumps(rows, separators=(",", ":")).encode()
        held = {"index": zstandard.ZstdCompressor(level=19).compress(document)}
        for stream, (coder, pieces) in self._streams.items():
            held[stream] = b"".join((*pieces, coder.flush()))
        return {name: np.frombuffer(content, np.uint8) for name, content in held.items()}

    def metadata(self, first: int, last: int) -> dict[str, str]:
        """Return what the header says."""
        base, result = map(_total, self._digests)
        return {"format": FORMAT, "base": base, "result": result, "from": str(first), "to": str(last)}


def _name_of(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


@dataclass(frozen=True)
class _Patch:
    """A patch that was read; its index is believed as far as it fits the streams."""

    where: str
    rows: tuple[_Row, ...]
    streams: Mapping[str, bytes]
    base: str
    result: str
    step: int

    @classmethod
    def read(cls, path: Path) -> _Patch:
        """Read a patch.

        Raises
        ------
        DamagedError, IncompatibleError
            It is none, or of a version that is not known here.
        StorageError
            It cannot be read.
        """
        import zstandard
        from safetensors import SafetensorError
        from safetensors.numpy import load

        where = str(path)
        try:
            content = read_regular(path)
        except OSError as error:
            raise StorageError(f"the patch cannot be read: {error.strerror}", where=where) from error
        try:
            held = {name: row.tobytes() for name, row in load(content).items()}
            size_of = int.from_bytes(content[:8], "little")
            said = json.loads(content[8 : 8 + size_of]).get("__metadata__", {})
        except (SafetensorError, KeyError, ValueError, RecursionError) as error:
            raise DamagedError("this is no safetensors file", where=where) from error
        version = str(said.get("format", ""))
        if version != FORMAT:
            kind = IncompatibleError if version.startswith(FORMAT.partition("/")[0]) else DamagedError
            raise kind("this is no patch known here", where=where, expected=FORMAT, found=clipped(version))
        try:
            index = zstandard.ZstdDecompressor().decompress(
                held.pop("index"), max_output_size=_MAX_INDEX_NBYTES
            )
            rows = tuple(map(_row_of, json.loads(index)))
            step = int(said["to"])
        except (KeyError, ValueError, TypeError, zstandard.ZstdError, RecursionError) as error:
            raise DamagedError("the index of the patch is damaged", where=where) from error
        return cls(where, rows, held, str(said.get("base")), str(said.get("result")), step)

    @property
    def nbytes(self) -> int:
        """What its streams take at most, decompressed; gaps below 2**63 take nine bytes."""
        return sum(row.n * (_width(row.dtype) + 9) for row in self.rows)

    def require_base(self, model: BaseModel) -> None:
        """Refuse another base than the one that it was made from; reads all of it."""
        from inshrink_core.checkpoint import MODEL_ROLES

        own = {row.name for row in self.rows if row.form != NEW}
        known = {spec.name: spec for spec in model.checkpoint.specs if spec.role in MODEL_ROLES}
        taken = own | {row.name for row in self.rows if row.name in known}
        digests = {}
        for name in sorted(taken & known.keys()):
            spec = known[name]
            words = _words(model.checkpoint.source.read(spec))
            digests[name] = _tensor_digest(name, spec.dtype, spec.shape, words)
        extra, lost = sorted(known.keys() - taken), sorted(own - known.keys())
        if extra or lost or _total(digests) != self.base:
            about = f"tensor '{clipped((*lost, *extra)[0])}' " if extra or lost else ""
            raise InputError(
                "this is not the base that the patch was made from",
                where=model.name,
                expected=f"SHA-256 {self.base[:16]}…",
                found=f"{about}{'is missing' if lost else 'is not in the patch'}"
                if about
                else _total(digests)[:16] + "…",
                remedy="give the weights of the step that it begins at, in the same dtype",
            )

    def opened(self) -> _Streams:
        """Return its streams from their beginning."""
        return _Streams(self)


def _row_of(row: Any) -> _Row:
    """Return a row of an index that makes sense."""
    name, dtype, shape, form, n = row
    found = _Row(str(name), str(dtype), tuple(map(int, shape)), str(form), int(n))
    if form not in (SAME, SPARSE, DENSE, NEW, GONE) or min((*found.shape, found.n)) < 0:
        raise ValueError(form)
    n_words = math.prod(found.shape) * -(-_width(found.dtype) // 8) if form != GONE else 0
    fits = found.n == (n_words if form in (DENSE, NEW) else 0) or (form == SPARSE and found.n <= n_words)
    if not fits:
        raise ValueError(found.n)
    return found


def _width(dtype: str) -> int:
    """Return the bytes of an element."""
    from inshrink_core.checkpoint import DTYPE_SIZES

    return DTYPE_SIZES[dtype] if dtype else 0


class _Streams:
    """Reads the streams of a patch, decompressed no further than its index says."""

    def __init__(self, patch: _Patch) -> None:
        self._patch = patch
        self._readers: dict[str, Any] = {}

    def take(self, stream: str, nbytes: int) -> bytes:
        """Return the next bytes of a stream."""
        import zstandard

        if stream not in self._readers:
            content = self._patch.streams.get(stream, b"")
            self._readers[stream] = zstandard.ZstdDecompressor().stream_reader(content)
        try:
            found: bytes = self._readers[stream].read(nbytes)
        except zstandard.ZstdError as error:
            raise DamagedError(f"the stream '{stream}' is damaged", where=self._patch.where) from error
        if len(found) != nbytes:
            raise DamagedError(f"the stream '{stream}' ends early", where=self._patch.where)
        return found

    def places(self, n: int) -> NDArray[np.int64]:
        """Return the places of `n` values, from the gaps between them."""
        import numpy as np

        pieces: list[bytes] = []
        found = 0
        while found < n:
            pieces.append(self.take("gaps", n - found))
            found += int(np.count_nonzero(np.frombuffer(pieces[-1], np.uint8) < 128))
        coded = np.frombuffer(b"".join(pieces), np.uint8)
        return np.cumsum(_gaps(coded) + 1) - 1

    def differences(self, n: int, width: int) -> NDArray[Any]:
        """Return `n` differences."""
        import numpy as np

        planes = [np.frombuffer(self.take(f"plane{place}", n), np.uint8) for place in range(width)]
        folded = np.ascontiguousarray(np.stack(planes, axis=1)).reshape(-1).view(f"<u{width}")
        return _unfolded(folded)


class _Patched:
    """A `TensorSource` of what a patch leads to."""

    def __init__(self, patch: _Patch, model: BaseModel) -> None:
        from inshrink_core.checkpoint import MODEL_ROLES

        self._patch = patch
        self._rows = {row.name: row for row in patch.rows}
        self._source = model.checkpoint.source
        self._specs = {spec.name: spec for spec in model.checkpoint.specs if spec.role in MODEL_ROLES}
        self._digests: dict[str, bytes] = {}
        self._held = dict(self._differences())

    def _differences(self) -> Iterator[tuple[str, tuple[Any, Any]]]:
        """Yield places and differences of each tensor, in the order of the index."""
        streams = self._patch.opened()
        for row in self._patch.rows:
            width = min(_width(row.dtype), 8)
            if row.form not in (SAME, GONE):
                places = streams.places(row.n) if row.form == SPARSE else None
                yield row.name, (places, streams.differences(row.n, width))

    def read(self, spec: TensorSpec) -> Tensor:
        """Return a tensor."""
        import numpy as np
        import torch

        row = self._rows[spec.name]
        dtype = getattr(torch, spec.dtype)
        if row.form == NEW:
            words = np.zeros(row.n, f"<u{min(_width(spec.dtype), 8)}")
        else:
            known = self._specs[spec.name]
            if (known.dtype, known.shape) != (spec.dtype, spec.shape):
                raise DamagedError(f"the patch of '{spec.name}' does not fit it", where=self._patch.where)
            words = _words(self._source.read(known)).copy()
        places, differences = self._held.pop(spec.name, (None, None))
        try:
            if places is not None:
                words[places] += differences
            elif differences is not None:
                words += differences
        except (IndexError, ValueError) as error:
            raise DamagedError(
                f"the patch of '{spec.name}' does not fit it", where=self._patch.where
            ) from error
        self._digests[spec.name] = _tensor_digest(spec.name, spec.dtype, spec.shape, words)
        return torch.from_numpy(words.view(np.uint8)).view(dtype).reshape(spec.shape)

    def skeleton(self, layout: FileLayout) -> bytes:
        """Return nothing: there are no files."""
        return b""

    def require_result(self) -> None:
        """Refuse a result that is not what it should be."""
        if _total(self._digests) != self._patch.result:
            raise DamagedError(
                "the patch does not lead to the weights that it was made from",
                where=self._patch.where,
                expected=f"SHA-256 {self._patch.result[:16]}…",
                found=f"{_total(self._digests)[:16]}…",
                remedy="fetch the patch again",
            )
