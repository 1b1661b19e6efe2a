"""How large frames would be as keyframes, before they are made."""

from __future__ import annotations

from typing import Final

from inshrink_core.chain import Archive, frame_size
from inshrink_core.chain.attributes import spec_of
from inshrink_core.checkpoint import TensorSpec
from inshrink_core.codec import codec_for_block
from inshrink_core.frame import FrameInfo
from inshrink_core.session.progress import OnProgress, Progress

__all__ = ["KeySizes"]

_SAMPLE_SHARE: Final = 1 / 8
"""Of the raw bytes of each role, what is re-keyed to tell how large a keyframe would be."""


class KeySizes:
    """How large a frame would be as a keyframe, from re-keying some of its tensors."""

    def __init__(self, archive: Archive, progress: OnProgress | None) -> None:
        self._archive, self._progress = archive.sequential(), progress
        self._sizes: dict[bytes, int] = {}

    def key_size(self, info: FrameInfo) -> int:
        """Return the estimate; decodes about an eighth of the frame the first time it is asked."""
        if info.frame_id not in self._sizes:
            self._sizes[info.frame_id] = self._measure(info)
            if self._progress is not None:
                self._progress(Progress("plan", len(self._sizes), len(self._sizes), info.step))
        return self._sizes[info.frame_id]

    def _measure(self, info: FrameInfo) -> int:
        size = frame_size(self._archive, info)
        total = float(size.parts_nbytes + size.overhead_nbytes)
        by_role: dict[str, list[TensorSpec]] = {}
        for tensor in size.tensors:
            by_role.setdefault(tensor.spec.role.value, []).append(tensor.spec)
        for specs in by_role.values():
            raw = sum(spec.nbytes for spec in specs)
            seen = rekeyed = 0
            for spec in sorted(specs, key=lambda spec: (-spec.nbytes, spec.key)):
                if seen >= _SAMPLE_SHARE * raw and seen:
                    break
                seen += spec.nbytes
                rekeyed += self._rekeyed_nbytes(info, spec)
            total += rekeyed * raw / seen if seen else rekeyed
        return round(total)

    def _rekeyed_nbytes(self, info: FrameInfo, spec: TensorSpec) -> int:
        where = self._archive.where(info)
        entry = self._archive.frame(info).entry(spec.key)
        _, reference = self._archive.decode(info, spec.key)
        return len(codec_for_block(entry.codec, where).rekey(spec_of(entry, where), reference).payload)
