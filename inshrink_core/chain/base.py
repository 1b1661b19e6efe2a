"""Base models of fine-tuning runs, against which the first frame of an archive is encoded.

An archive stores no tensor of the base model. It stores a record: one digest over the tensors used, the first
bytes of each tensor's digest, the model's name, and its path. The path is an untrusted hint. A model found
there is read like any checkpoint and used only if its tensors match the record.
"""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from inshrink_core.archive.layout import damaged
from inshrink_core.chain.attachments import add_tensor, tensor_digest
from inshrink_core.checkpoint import MODEL_ROLES, Checkpoint, TensorSpec
from inshrink_core.codec import AnyCodec, BaseReference, codec_names, get_codec
from inshrink_core.errors import BaseModelError, ConfigError, InshrinkError, TooLargeError, named
from inshrink_core.text import was_url

if TYPE_CHECKING:
    from torch import Tensor

    from inshrink_core.frame import BlockEntry


BASE: Final = "base"
"""Meta key for the record of the base model of a keyframe."""

_SHORT: Final = 8
"""Stored bytes of a tensor's digest: two different tensors match with probability 2^-64."""

_NONE: Final = bytes(_SHORT)
"""Digest field of a tensor that is stored without the base."""

BaseLike: TypeAlias = "BaseModel | Checkpoint | Mapping[str, Tensor] | str | os.PathLike[str]"
"""Accepted forms of a base model (`inshrink_core.chain.open_base`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BaseRecord:
    """A keyframe's record of the base model it is encoded against.

    Parameters
    ----------
    digest
        SHA-256 over key, dtype, shape and digest of the tensors used, in the frame's order. It does not
        depend on the files that store the model.
    tensors
        The first bytes of each of these tensors' digests, by key.
    n_without
        Number of weights and buffers of the frame that are stored without the base.
    name
        Name of the base model.
    path, step
        Hints: its path relative to the folder that contains the archive, and its step there.
    """

    digest: bytes
    tensors: Mapping[str, bytes] = field(repr=False)
    n_without: int
    name: str
    path: str | None
    step: int | None

    @classmethod
    def of(cls, value: Mapping[str, Any], rows: Sequence[BlockEntry], where: str) -> BaseRecord:
        """Return the record of a frame, parsed against the blocks of its tensors.

        Raises
        ------
        DamagedError
            The record does not match the blocks.
        """
        digests: bytes = value["tensors"]
        if len(digests) != _SHORT * len(rows):
            raise damaged("the frame's meta 'base' does not fit its tensors", where)
        short = [digests[i : i + _SHORT] for i in range(0, len(digests), _SHORT)]
        tensors = {row.key: digest for row, digest in zip(rows, short, strict=True) if digest != _NONE}
        roles = {role.value for role in MODEL_ROLES}
        n_model = sum(bool(row.attributes) and row.attributes[0] in roles for row in rows)
        return cls(
            digest=value["digest"],
            tensors=tensors,
            n_without=n_model - len(tensors),
            name=value["name"],
            path=value.get("path"),
            step=value.get("step"),
        )

    @staticmethod
    def without(value: Mapping[str, Any], staying: Sequence[bool]) -> dict[str, Any]:
        """Return the record for a frame that loses some of the tensors stored without the base."""
        digests: bytes = value["tensors"]
        rows = [digests[_SHORT * at : _SHORT * (at + 1)] for at, stays in enumerate(staying) if stays]
        return {**value, "tensors": b"".join(rows)}

    def to_json(self) -> dict[str, Any]:
        """Return the ``base`` object of a JSON document.

        Returns
        -------
        name : str
            Name of the base model.
        digest : str
            Digest of the tensors used.
        path : str?
            Path, relative to the folder that contains the archive.
        step : int?
            Step; None for a single checkpoint.
        tensors : int
            Number of tensors encoded relative to it.
        tensors_without : int
            Number of weights and buffers without a counterpart of the same shape and dtype.
        """
        return {
            "name": self.name,
            "digest": self.digest.hex(),
            "path": self.path,
            "step": self.step,
            "tensors": len(self.tensors),
            "tensors_without": self.n_without,
        }


class BaseModel:
    """An open base model; `inshrink_core.chain.open_base` makes it.

    Parameters
    ----------
    checkpoint
        The tensors.
    name
        The name in records and messages.
    path, step
        Location of the checkpoint; None if it is in memory.
    """

    def __init__(
        self, checkpoint: Checkpoint, name: str, path: Path | None = None, step: int | None = None
    ) -> None:
        self.checkpoint, self.name, self.path, self.step = checkpoint, name, path, step
        self._digests: dict[str, bytes] = {}

    def __repr__(self) -> str:
        return f"BaseModel({self.name!r}, {len(self.checkpoint)} tensors)"

    def spec(self, spec: TensorSpec) -> TensorSpec | None:
        """Return the base's spec for a tensor of a fine-tuning; None if dtype or shape differ."""
        if spec.role not in MODEL_ROLES or spec.numel == 0 or spec.key not in self.checkpoint:
            return None
        base_spec = self.checkpoint.spec(spec.key)
        is_alike = (base_spec.dtype, base_spec.shape) == (spec.dtype, spec.shape)
        return base_spec if is_alike and base_spec.role in MODEL_ROLES else None

    def read(self, base_spec: TensorSpec) -> Tensor:
        """Return a tensor, given a spec from `spec`.

        Raises
        ------
        InshrinkError
            The tensor cannot be read.
        """
        return self.checkpoint.source.read(base_spec)

    def references(self, specs: Iterable[TensorSpec]) -> dict[str, BaseReference]:
        """Return the references for the first frame of a fine-tuning, by key.

        Raises
        ------
        BaseModelError
            No tensor has a counterpart in the base: it is a different model.
        """
        model = [spec for spec in specs if spec.role in MODEL_ROLES]
        pairs = {spec.key: base_spec for spec in model if (base_spec := self.spec(spec)) is not None}
        if model and not pairs:
            raise self._another(model)
        return {key: BaseReference(partial(self.read, base_spec)) for key, base_spec in pairs.items()}

    def _another(self, model: list[TensorSpec]) -> BaseModelError:
        """Return the error for a run without any tensor in the base."""
        return BaseModelError(
            "no tensor of the run is in the base model: it is another one, or in another dtype",
            where=self.name,
            expected=named([f"{spec.key} {spec.dtype} {spec.shape}" for spec in model], 3),
            found=named([f"{spec.key} {spec.dtype} {spec.shape}" for spec in self.checkpoint.specs], 3),
            remedy="give the model that the training began from, its tensors named as in the run; compress "
            "adapters without --base",
        )

    def digest_of(self, base_spec: TensorSpec) -> bytes:
        """Return the digest of a tensor, which is read once."""
        if base_spec.key not in self._digests:
            self._digests[base_spec.key] = tensor_digest(self.read(base_spec))
        return self._digests[base_spec.key]

    def record(self, specs: Iterable[TensorSpec], used: Iterable[str], archive: Path) -> dict[str, Any]:
        """Return the base record for the meta of a keyframe.

        Parameters
        ----------
        specs
            The frame's tensors, in frame order.
        used
            Keys of the tensors encoded against the base.
        archive
            Path of the archive.
        """
        keys = frozenset(used)
        total, short = hashlib.sha256(), bytearray()
        for spec in specs:
            base_spec = self.spec(spec) if spec.key in keys else None
            if base_spec is None:
                short += _NONE
                continue
            digest = self.digest_of(base_spec)
            add_tensor(total, spec.key, base_spec, digest)
            short += digest[:_SHORT]
        return {
            "digest": total.digest(),
            "tensors": bytes(short),
            "name": self.name,
            "path": self._hint(archive),
            "step": self.step,
        }

    def _hint(self, archive: Path) -> str | None:
        """Return the path of the base, relative to the folder that contains the archive."""
        if self.path is None or was_url(self.path) or was_url(archive):
            return None
        try:
            return Path(os.path.relpath(self.path.absolute(), archive.absolute().parent)).as_posix()
        except ValueError:  # different drives
            return None

    def digest_like(self, record: BaseRecord) -> str:
        """Return the digest of the tensors in a record, or why it has none; reads all of them."""
        total = hashlib.sha256()
        for key in record.tensors:
            if key not in self.checkpoint:
                return f"no tensor '{key}'"
            base_spec = self.checkpoint.spec(key)
            try:
                digest = self.digest_of(base_spec)
            except TooLargeError:
                raise
            except InshrinkError as error:
                return error.what
            add_tensor(total, key, base_spec, digest)
        return total.hexdigest()

    def require(self, record: BaseRecord, where: str) -> None:
        """Check that this is the recorded base model; reads each recorded tensor once.

        Raises
        ------
        BaseModelError
            This is a different model.
        """
        found = self.digest_like(record)
        if found != record.digest.hex():
            raise _wrong(record, where, f"{found} in {self.name}")


def _wrong(record: BaseRecord, where: str, found: str) -> BaseModelError:
    """Return the error for a base model that is missing or does not match the record."""
    return BaseModelError(
        f"the step is encoded relative to the base model '{record.name}', which is needed to decode it",
        where=where,
        expected=f"SHA-256 {record.digest.hex()}",
        found=found,
        remedy="give it with --base FILE; `inshrink prune ARCHIVE --stand-alone` makes the archive "
        "independent of it",
    )


OpenBase: TypeAlias = Callable[[Path, int | None], BaseModel]
"""Opens one checkpoint at a path; by default the only one of a run, or the last of an archive."""


class BaseFinder:
    """Finds base models and reads their tensors for decoding.

    Parameters
    ----------
    archive
        Path or URL of the archive.
    given
        The base model, if the user gave one.
    open_at
        Opens a step at a path. Without `given`, it opens the path recorded in the archive. None disables
        this, as for an archive that serves as a base model itself.

    Attributes
    ----------
    allows
        Predicate for the resolved paths that may be opened; by default it allows all.
    """

    def __init__(self, archive: str, given: BaseModel | None = None, open_at: OpenBase | None = None) -> None:
        self.given = given
        self.allows: Callable[[Path], bool] = lambda real: True
        self._archive, self._open_at = archive, open_at
        self._tried: dict[tuple[str | None, int | None], BaseModel | str] = {}
        self._lock = threading.Lock()

    def reference(self, record: BaseRecord, spec: TensorSpec, where: str) -> BaseReference:
        """Return the reference of a block, which is read and checked against the record on first use."""
        return BaseReference(partial(self._tensor, record, spec, where))

    def _tensor(self, record: BaseRecord, spec: TensorSpec, where: str) -> Tensor:
        model = self.given if self.given is not None else self._recorded(record)
        if isinstance(model, str):
            raise _wrong(record, where, model)
        base_spec = model.spec(spec)
        if base_spec is None:
            raise _wrong(
                record, where, f"no tensor '{spec.key}' of {spec.dtype} {spec.shape} in {model.name}"
            )
        try:
            tensor = model.read(base_spec)
        except TooLargeError:
            raise
        except InshrinkError as error:
            raise _wrong(record, where, f"{model.name} cannot be read: {error.what}") from error
        if tensor_digest(tensor)[:_SHORT] != record.tensors[spec.key]:
            raise _wrong(record, where, f"{model.digest_like(record)} in {model.name}")
        return tensor

    def _recorded(self, record: BaseRecord) -> BaseModel | str:
        """Return the model at the recorded path, or a text that explains its absence."""
        place = (record.path, record.step)
        with self._lock:
            if place not in self._tried:
                self._tried[place] = self._opened(record)
            return self._tried[place]

    def _opened(self, record: BaseRecord) -> BaseModel | str:
        if self._open_at is None:
            return "an archive that needs a base model as a base model"
        if record.path is None or was_url(Path(self._archive)):
            return "none"
        path = Path(self._archive).absolute().parent / record.path
        try:
            if not self.allows(Path(os.path.realpath(path))):
                return f"'{record.path}', outside of the directories that may be opened"
            if not (path.is_file() or path.is_dir()):
                return f"nothing at '{record.path}'"
            return self._open_at(path, record.step)
        except (InshrinkError, OSError, ValueError) as error:
            return f"'{record.path}' cannot be opened: {error}"


def require_base_codec(codec: AnyCodec) -> None:
    """Refuse a codec that cannot encode a first frame against a base model.

    Raises
    ------
    ConfigError
        The codec does not support it (`Codec.uses_base`).
    """
    if not codec.uses_base:
        able = [name for name in codec_names() if get_codec(name).uses_base]
        raise ConfigError(
            f"the codec '{codec.name}' cannot encode against a base model",
            expected=" or ".join(able),
            found=codec.name,
            remedy="choose one of them with --codec, or leave out --base",
        )
