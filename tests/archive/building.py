"""Small archives for these tests; ``python -m tests.archive.building`` writes the golden ones."""

import contextlib
import os
from pathlib import Path
from unittest.mock import Mock

from inshrink_core.archive import ArchiveReader, ArchiveWriter
from inshrink_core.archive.maintenance import pack_archive
from inshrink_core.errors import InshrinkError

ARCHIVE_ID = bytes(range(16))

GOLDEN = Path(__file__).parent / "golden"
"""The same three frames as files of their own, as a segment, and packed."""

META = {"format": "torch", "roles": ["weight", "exp_avg"], "groups": {"lr": 1e-3, "betas": [0.9, 0.999]}}

Blocks = dict[str, bytes]


def blocks_of(step):
    """Three tensors of one step: a small one, an empty one, and one above the alignment's threshold."""
    return {
        "conv1.weight": bytes((step + i) % 251 for i in range(77)),
        "conv1.bias": b"",
        "head.weight": bytes((step * i) % 256 for i in range(4100)) if step == 0 else b"delta" * 30,
    }


def append(writer, step, *, kind=None, parent_id=None, branch=0, blocks=None, meta=None, codec="raw/1"):
    """Commit a frame on the head (or a given parent), a keyframe if it is the first."""
    head = writer.reader.head
    parent = parent_id if parent_id is not None or head is None else head.frame_id
    kind = kind or ("delta" if parent else "keyframe")
    with writer.begin(step=step, kind=kind, parent_id=parent, branch=branch) as frame:
        for key, payload in (blocks if blocks is not None else blocks_of(step)).items():
            frame.add(key, codec, payload, attributes=("weight", "float32", [len(payload)], False))
        frame.add("model.pt", "zstd/1", b"skeleton", attachment=True)
        return frame.commit({**META, "step": step} if meta is None else meta)


def build(path, steps=(0, 100, 200), *, grouped=False):
    """Make an archive with one keyframe and deltas."""
    with ArchiveWriter(path, create=True, archive_id=ARCHIVE_ID, grouped=grouped) as writer:
        for step in steps:
            append(writer, step)
    return path


def contents(reader, frame_id):
    """Read every tensor of a frame."""
    frame = reader.frame(frame_id)
    return {entry.key: frame.read(entry) for entry in frame.entries if not entry.attachment}


def read_all(path):
    """Read every tensor of every frame, by step."""
    reader = ArchiveReader.open(path)
    return {frame.step: contents(reader, frame.frame_id) for frame in reader.frames}


def read_what_is_there(path):
    """Read everything: each value is right, or a typed error says why there is none."""
    with contextlib.suppress(InshrinkError):
        reader = ArchiveReader.open(path)
        for frame in reader.frames:
            with contextlib.suppress(InshrinkError):
                assert contents(reader, frame.frame_id) == blocks_of(frame.step)
                assert reader.frame(frame.frame_id).meta == {**META, "step": frame.step}


def flipped(content, start=0, stride=97):
    """Yield some bytes with every 97th bit flipped in turn."""
    for bit in range(start, len(content) * 8, stride):
        changed = bytearray(content)
        changed[bit // 8] ^= 1 << bit % 8
        yield bytes(changed)


def refuse(number):
    """Return a call that the system refuses with an error's number."""

    return Mock(side_effect=OSError(number, os.strerror(number)))


def make_golden(folder):
    """Write the golden archives."""
    for name, grouped in (("folder", False), ("segment", True)):
        (build(folder / name, grouped=grouped) / "lock").unlink()
    pack_archive(ArchiveReader.open(folder / "folder"), folder / "packed")


if __name__ == "__main__":
    make_golden(GOLDEN)
