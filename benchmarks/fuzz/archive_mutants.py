"""Mutants of archives: whole sets of files, with what a sound reading of them would give."""

from __future__ import annotations

import dataclasses
import random
import zlib
from typing import Any, Final

import msgpack
import zstandard

from benchmarks.fuzz import sealing
from benchmarks.fuzz.mutations import EXTREMES, TEXTS, hostile_value, mutate_bytes, mutate_value
from benchmarks.fuzz.runs import Files, special
from benchmarks.fuzz.sealing import OpenFrame, bounded, packed
from inshrink_core.archive.layout import segment_path
from inshrink_core.archive.manifest import MANIFEST_NAME
from inshrink_core.frame import FrameKind

Truth = dict[str, Any]
"""What the untouched archive gives: ``steps``, ``head``, and digests of what each step restores."""

_TENSORS: Final = 0
_ATTACHMENTS: Final = 1
_META: Final = 5
"""Where these stand in an index."""


@dataclasses.dataclass(frozen=True)
class Mutant:
    """The files of an archive, and what the archive it was made from gives.

    Parameters
    ----------
    base
        Name of the archive it was made from.
    sealed
        Whether its checksums were repaired: it may then say something else, and say so consistently.
    """

    base: str
    sealed: bool
    files: Files
    truth: Truth

    def pack(self) -> bytes:
        """Return the mutant as one input."""
        return zlib.compress(packed([self.base, self.sealed, self.files, self.truth]))

    @classmethod
    def unpack(cls, data: bytes) -> Mutant:
        """Return the mutant that an input holds."""
        base, sealed, files, truth = msgpack.unpackb(zlib.decompress(data), raw=False, strict_map_key=False)
        return cls(base, sealed, files, truth)


def blind(rng: random.Random, files: Files, donors: tuple[Files, ...]) -> Files:
    """Return the files after one or two accidents: to bytes, or to whole files."""
    changed = dict(files)
    for _ in range(rng.choice((1, 1, 1, 2))):
        name = rng.choice(sorted(changed))
        other = rng.choice(donors)
        kind = rng.randrange(20)
        if kind >= 6 or len(changed) == 1:
            lent = tuple(data for _, data in sorted(other.items()))
            changed[name] = mutate_bytes(rng, changed[name], lent)
        elif kind == 0:
            del changed[name]
        elif kind == 1:
            changed[_other_name(rng, name)] = changed.pop(name)
        elif kind == 2:
            second = rng.choice(sorted(changed))
            changed[name], changed[second] = changed[second], changed[name]
        elif kind == 3:
            changed[_other_name(rng, name)] = changed[name]
        elif kind == 4:
            changed[rng.choice(sorted(other))] = other[rng.choice(sorted(other))]
        else:
            changed[name] = b""
    return changed


def beheaded(rng: random.Random, files: Files) -> Files:
    """Return the files without a manifest that can be used and, mostly, without a frame or part of it."""
    changed = dict(files)
    manifest = changed.pop(MANIFEST_NAME)
    if rng.random() < 0.7:
        changed[MANIFEST_NAME] = rng.choice((b"", manifest[:-1], mutate_bytes(rng, manifest)))
    frames = sorted(set(changed) - {MANIFEST_NAME})
    # The last one most often: which it was, nothing tells then.
    lost = rng.choice((frames[-1], frames[-1], rng.choice(frames)))
    kind = rng.randrange(4)
    if kind == 1:
        changed[lost] = changed[lost][: rng.randrange(len(changed[lost]))]
    elif kind == 2:
        changed[lost] = mutate_bytes(rng, changed[lost])
    elif kind == 3 and len(frames) > 1:
        del changed[lost]
    return changed


def with_special(rng: random.Random, files: Files) -> Files:
    """Return the files with a pipe, a folder, a device or a link where an archive has a file, or may have."""
    places = [*files, "frames", "lock", f".{MANIFEST_NAME}.tmp", "frames/.00000004-40.frame.tmp"]
    places += [_other_name(rng, rng.choice(sorted(files))), "frames/00000009-90.frame"]
    return special(rng, rng.choice(places), files)


def _other_name(rng: random.Random, name: str) -> str:
    generation, step = rng.choice((1, 2, 3, 4, 9)), rng.choice((10, 20, 30, 40))
    return rng.choice(
        (
            f"frames/{generation:08d}-{step}.frame",
            segment_path(generation),
            f"{name}.bak",
            f"frames/.{name[-8:]}.tmp",
            "lock",
        )
    )


def repaired(rng: random.Random, files: Files) -> Files:
    """Return the files with something hostile behind checksums that are all right."""
    if sealing.is_packed_name(files):
        return _repaired_pack(rng, files)
    if sealing.has_segments(files):
        return _repaired_segments(rng, files)
    kind = rng.randrange(20)
    if kind:
        return _with_hostile_frame(rng, files, kind)
    archive_id, columns = sealing.open_manifest(files[MANIFEST_NAME])
    return files | {MANIFEST_NAME: sealing.seal_manifest(archive_id, bounded(mutate_value(rng, columns)))}


def _with_hostile_frame(rng: random.Random, files: Files, kind: int) -> Files:
    """Return the files with another frame in the place of one, and a manifest that fits it."""
    changed = dict(files)
    name = rng.choice(sorted(name for name in files if name != MANIFEST_NAME))
    frame = OpenFrame.parse(files[name])
    if kind <= 8:
        _hostile_block(rng, frame)
        frame.fit_index()
    elif kind <= 12:
        _hostile_spec(rng, frame)
    elif kind == 13:
        frame.index = bounded(mutate_value(rng, frame.index))
    elif kind <= 15:
        frame.index[_META] = _hostile_meta(rng, frame.index[_META])
    elif kind == 16:
        frame.header = _hostile_header(rng, frame)
    else:
        _hostile_attachment(rng, frame)
        frame.fit_index()
    changed[name] = frame.seal()
    changed[MANIFEST_NAME] = sealing.refit_manifest(files[MANIFEST_NAME], changed)
    return changed


def _repaired_segments(rng: random.Random, files: Files) -> Files:
    if rng.random() < 0.8:
        return sealing.joined(_with_hostile_frame(rng, sealing.loosened(files), rng.randrange(1, 20)), files)
    archive_id, columns = sealing.open_manifest(files[MANIFEST_NAME])
    places = rng.randrange(10, 12)
    columns[places] = mutate_value(rng, columns[places])
    return files | {MANIFEST_NAME: sealing.seal_manifest(archive_id, bounded(columns), has_segments=True)}


def _repaired_pack(rng: random.Random, files: Files) -> Files:
    (name,) = files
    inside = sealing.unpacked(files[name])
    if rng.random() < 0.8:
        return {name: sealing.repacked(repaired(rng, inside))}
    directory = [list(inside), [len(data) for data in inside.values()]]
    return {name: sealing.repacked(inside, bounded(mutate_value(rng, directory)))}


def _hostile_block(rng: random.Random, frame: OpenFrame) -> None:
    """Change the bytes of a block, or let two change places."""
    full = [i for i, block in enumerate(frame.blocks) if block] or [0]
    at = rng.choice(full)
    if rng.random() < 0.1:
        other = rng.choice(full)
        frame.blocks[at], frame.blocks[other] = frame.blocks[other], frame.blocks[at]
    else:
        frame.blocks[at] = mutate_bytes(rng, frame.blocks[at], tuple(frame.blocks))


def _hostile_spec(rng: random.Random, frame: OpenFrame) -> None:
    """Change what the index says of blocks: keys, codecs, roles, dtypes, shapes."""
    columns = frame.index[rng.choice((_TENSORS, _TENSORS, _TENSORS, _ATTACHMENTS))]
    present = [i for i, column in enumerate(columns) if column]
    if not present:
        frame.index = bounded(mutate_value(rng, frame.index))
        return
    column = rng.choice(present)
    if column == 2 and rng.random() < 0.7 and len(columns[2][1]) > 2:
        _widths, attributes = columns[2]
        shapes = attributes[2]
        row = rng.randrange(len(shapes))
        shapes[row] = rng.choice(
            (
                [rng.choice(EXTREMES)],
                [*shapes[row], rng.choice((0, 1, 2, 1 << 20, 1 << 36))],
                shapes[row][::-1],
                [1] * rng.choice((9, 33, 64, 65)),
                [max(n + rng.choice((-1, 1)), 0) for n in shapes[row]],
                [1 << 31, 1 << 31, 0],
                hostile_value(rng),
            )
        )
        frame.index = bounded(frame.index)
        return
    columns[column] = bounded(mutate_value(rng, columns[column]))


def _hostile_meta(rng: random.Random, meta: dict[str, bytes]) -> Any:
    if not meta or rng.random() < 0.2:
        return {rng.choice(TEXTS): packed(bounded(hostile_value(rng)))}
    key = rng.choice(sorted(meta))
    value = msgpack.unpackb(meta[key], raw=False, strict_map_key=False)
    if rng.random() < 0.3:
        return meta | {
            key: packed(rng.choice((b"\xff", [b"bytes"], {"x": b""}, 1 << 63, -1, None, "x", 0.5)))
        }
    changed = bounded(mutate_value(rng, [value]))
    return meta | {key: packed(changed[0] if isinstance(changed, list) and changed else changed)}


def _hostile_header(rng: random.Random, frame: OpenFrame) -> Any:
    header, info = frame.header, frame.header.frame
    return rng.choice(
        (
            header._replace(frame=dataclasses.replace(info, parent_id=info.frame_id[::-1])),
            header._replace(frame=dataclasses.replace(info, parent_id=None, kind=FrameKind.KEYFRAME)),
            header._replace(frame=dataclasses.replace(info, kind=FrameKind.KEYFRAME)),
            header._replace(frame=dataclasses.replace(info, branch=rng.choice((1, 2, (1 << 32) - 1)))),
            header._replace(frame=dataclasses.replace(info, frame_id=info.parent_id or info.frame_id[::-1])),
            header._replace(archive_id=info.frame_id),
            header._replace(frame=dataclasses.replace(info, generation=rng.choice((1, 2, 3, (1 << 63) - 1)))),
        )
    )


def _hostile_attachment(rng: random.Random, frame: OpenFrame) -> None:
    """Change an attachment behind its compression: the layout of the files, or a file's bytes."""
    columns = frame.index[_ATTACHMENTS]
    if not columns[0] or not columns[1]:
        _hostile_block(rng, frame)
        return
    keys, (names, numbers) = columns[0], columns[1]
    first = len(frame.blocks) - len(keys)
    at = rng.randrange(len(keys)) if rng.random() < 0.2 else keys.index("") if "" in keys else 0
    content = _attachment_content(names[numbers[at]], frame.blocks[first + at])
    if content is None:
        _hostile_block(rng, frame)
        return
    if keys[at] == "":
        document = msgpack.unpackb(content, raw=False, strict_map_key=False)
        if rng.random() < 0.3 and document["files"]:
            _stretch(rng, rng.choice(document["files"]))
        else:
            document = mutate_value(rng, document)
        content = packed(bounded(document))
    else:
        content = mutate_bytes(rng, content)
    # As it was packed, or a frame that says what it will, or nothing at all, about its size.
    kind = rng.randrange(4)
    squeezed = zstandard.ZstdCompressor(write_content_size=kind == 1).compress(content)
    claimed = rng.choice(EXTREMES) & ((1 << 40) - 1) if kind == 2 else len(content)
    if kind == 3:
        squeezed = _bomb(rng)
        claimed = rng.choice((len(content), 1 << 20, 1 << 31))
    names.append(rng.choice(("zstd/1", "zstd/1", "renamed/1")))
    numbers[at] = len(names) - 1
    frame.blocks[first + at] = claimed.to_bytes(5, "little") + squeezed


def _stretch(rng: random.Random, file: list[Any]) -> None:
    """Have a file claim to be large, and a region of it too: consistently, from a few bytes."""
    more = rng.choice((1, 1 << 20, 3 << 30, 1 << 40, 1 << 62))
    file[1] += more
    regions = file[3]
    if regions and rng.random() < 0.8:
        regions[-1][1] += more
    elif rng.random() < 0.5:
        regions.append([file[1] - more, more, []])


def _bomb(rng: random.Random) -> bytes:
    """Return a zstd frame that gives far more than it is: honestly, or claiming even more."""
    zeros = zstandard.ZstdCompressor(level=3, write_content_size=True).compress(
        bytes(rng.choice((1, 8)) << 20)
    )
    if rng.random() < 0.5:
        return zeros
    # A single segment frame whose 8-byte content size is a terabyte, over one block of zeros.
    return (
        b"\x28\xb5\x2f\xfd\xe0" + (1 << rng.choice((31, 36, 40))).to_bytes(8, "little") + b"\x03\x00\x10\x00"
    )


def _attachment_content(codec: str, payload: bytes) -> bytes | None:
    """Return what a keyframe's attachment holds; None for what refers to the frame before."""
    if codec == "stored/1":
        return payload
    try:
        return (
            zstandard.ZstdDecompressor().decompress(payload[5:], max_output_size=1 << 20) if payload else None
        )
    except zstandard.ZstdError:
        return None
