"""Everything a measured point depends on: what has to be the same for it to be used again."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from inshrink_core.bench.rows import REPEAT
from inshrink_core.bench.variants import Variant
from inshrink_core.codec import get_codec

if TYPE_CHECKING:
    from inshrink_core.bench.measure import Bench
    from inshrink_core.evaluate import Evaluator

__all__ = ["point_key"]

_VERSION = 1
"""Of the key, and of what is measured."""


def point_key(bench: Bench, variant: Variant | None, value: float | None) -> dict[str, Any]:
    """Return the key of a point as JSON values.

    Parameters
    ----------
    bench
        What all points have in common.
    variant, value
        The codec and where its knob stands; None for the stale copy.

    Notes
    -----
    Device and threads are not in it, as they do not change the bytes. The speeds of a point used again are
    those of the day it was measured.
    """
    key: dict[str, Any] = {
        "version": _VERSION,
        "run": [bench.run.identity(step) for step in bench.steps],
        "steps": list(bench.steps),
        "evaluator": _evaluator_digest(bench.evaluator),
        "codec": REPEAT,
    }
    if variant is not None:
        key |= {
            "codec": variant.label,
            "bitstream": get_codec(variant.codec).bitstream,
            "config": variant.config(value).settings(),
            "knob": value,
            "optimizer": variant.optimizer(bench.optimizer),
            "keyframe_every": bench.keyframe_every,
        }
    return key


def _evaluator_digest(evaluator: Evaluator) -> str:
    """Digest the evaluator's file, and which of its figures counts; what the file reads is not in it."""
    path, _, function = evaluator.spec.rpartition(":")
    digest = hashlib.sha256(Path(path).read_bytes())
    direction = evaluator.direction.value if evaluator.direction is not None else ""
    digest.update(f"\0{function}\0{evaluator.metric or ''}\0{direction}".encode())
    return digest.hexdigest()
