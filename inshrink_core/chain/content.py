"""What of a checkpoint is stored, and whether two of them are bit-equal."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from inshrink_core.chain.parts import LAYOUT_KEY, pack_layout
from inshrink_core.checkpoint import MODEL_ROLES, Checkpoint, FileLayout

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["content_digest", "parts_of", "stored_view", "tensor_digest"]


def tensor_digest(tensor: Tensor) -> bytes:
    """Return the SHA-256 of a tensor's bytes in the stored dtype."""
    import torch

    flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return hashlib.sha256(flat.numpy().data).digest()


def content_digest(
    checkpoint: Checkpoint,
    digests: Mapping[str, bytes] | None = None,
    parts: Mapping[str, bytes] | None = None,
) -> bytes:
    """Return 16 bytes that tell whether two checkpoints are bit-equal: tensors, layout and the rest.

    Parameters
    ----------
    checkpoint
        What to digest, as stored (`stored_view`).
    digests
        SHA-256 of tensors that are known already, by key.
    parts
        The parts, where they have been read already.
    """
    known = digests or {}
    total = hashlib.sha256()
    for spec in checkpoint.specs:
        digest = known.get(spec.key) or tensor_digest(checkpoint.source.read(spec))
        total.update(f"{spec.key}\0{spec.dtype}\0{spec.shape}\0".encode())
        total.update(digest)
    for key, content in dict(parts_of(checkpoint)).items() if parts is None else parts.items():
        total.update(f"{key}\0{len(content)}\0".encode())
        total.update(content)
    return total.digest()[:16]


def parts_of(checkpoint: Checkpoint) -> Iterator[tuple[str, bytes]]:
    """Yield (key, bytes) of every part: the layout, then each file's skeleton."""
    keys = tuple(spec.key for spec in checkpoint.specs)
    yield LAYOUT_KEY, pack_layout(checkpoint.files, checkpoint.aliases, keys)
    for file in checkpoint.files:
        yield file.path, checkpoint.source.skeleton(file)


def stored_view(checkpoint: Checkpoint, optimizer: str) -> Checkpoint:
    """Return the checkpoint without what is not stored.

    Parameters
    ----------
    checkpoint
        The whole checkpoint.
    optimizer
        ``lossless`` stores everything; ``drop`` leaves out every tensor that is not of the model, and
        with them the files whose regions held any: their skeleton alone would restore a file with
        holes.
    """
    if optimizer != "drop":
        return checkpoint
    specs = tuple(spec for spec in checkpoint.specs if spec.role in MODEL_ROLES)
    kept = {spec.key for spec in specs}

    def whole(file: FileLayout) -> bool:
        return all(member.key in kept for region in file.regions for member in region.members)

    return dataclasses.replace(
        checkpoint,
        specs=specs,
        files=tuple(file for file in checkpoint.files if whole(file)),
        aliases={alias: key for alias, key in checkpoint.aliases.items() if key in kept},
    )
