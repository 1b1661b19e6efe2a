"""Documents that say anything, under checksums that are right: refused in Inshrink's own words, or read."""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgpack
import pytest
import torch

import inshrink_core
from inshrink_core.archive import ArchiveReader, ArchiveWriter
from inshrink_core.archive.document import compress_document, decompress_document
from inshrink_core.archive.frame_reader import FrameFile, read_envelope
from inshrink_core.archive.index import INDEX_DICTIONARY
from inshrink_core.archive.layout import (
    FRAME,
    FRAME_HEADER_NBYTES,
    MANIFEST_HEADER_NBYTES,
    TRAILER_NBYTES,
    ManifestHeader,
    Trailer,
)
from inshrink_core.chain import Archive
from inshrink_core.chain.attachments import LAYOUT_KEY
from inshrink_core.errors import InshrinkError
from inshrink_core.report import plain_value
from inshrink_core.verbs.inspect import inspect

CASES = int(os.environ.get("INSHRINK_FUZZ_CASES", "120"))
FIRST = int(os.environ.get("INSHRINK_FUZZ_FIRST", "0"))
MB = 10**6


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two steps of a tiny model, a keyframe and a delta."""
    folder = tmp_path_factory.mktemp("sound")
    (folder / "run").mkdir()
    torch.manual_seed(0)
    weight = torch.randn(12, 10)
    for step in (1, 2):
        weight = weight + torch.randn_like(weight) * 1e-3
        state = {"fc.weight": weight, "fc.bias": weight[0].clone(), "column": weight[:, 3]}
        torch.save({"model": state, "step": step}, folder / "run" / f"step_{step}.pt")
    inshrink_core.compress(folder / "run", folder / "a.inshrink", codec="lattice")
    return folder / "a.inshrink"


def anything(rng: random.Random, depth: int = 0) -> Any:
    """Return some value that msgpack can hold."""
    plain = [None, True, False, 0, 1, -1, 2**31, 2**63 - 1, 2**64 - 1, -(2**63), 1.5, float("nan"), "", "x"]
    plain += [
        "../x",
        "a\0b",
        "é" * 300,
        "lossless/1",
        "same/1",
        "zstd/1",
        "weight",
        "float64",
        b"",
        bytes(16),
    ]
    if depth < 3 and rng.random() < 0.4:
        items = [anything(rng, depth + 1) for _ in range(rng.randrange(5))]
        return items if rng.random() < 0.6 else {f"k{i}": item for i, item in enumerate(items)}
    return rng.choice(plain)


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield from places(item, (*path, key))


def mutated(rng: random.Random, value: Any) -> Any:
    """Return the value with one to three places changed."""
    for _ in range(rng.choice((1, 1, 2, 3))):
        path = rng.choice(list(places(value)))
        if not path:
            return anything(rng) if rng.random() < 0.1 else value
        parent = value
        for key in path[:-1]:
            parent = parent[key]
        key, old = path[-1], parent[path[-1]]
        change = rng.randrange(6)
        if change == 0 and isinstance(old, int):
            parent[key] = old + rng.choice((-1, 1, 7, 255, 2**32))
        elif change == 1:
            del parent[key]
        elif change == 2 and isinstance(parent, list):
            parent.insert(key, old)
        elif change == 3:
            parent[key] = [old]
        elif change == 4 and isinstance(parent, list):
            rng.shuffle(parent)
        else:
            parent[key] = anything(rng)
    return value


def repack(raw: bytes, rng: random.Random) -> bytes:
    packed: bytes = msgpack.packb(mutated(rng, msgpack.unpackb(raw, strict_map_key=False)))
    return packed


def mutate_index(path: Path, rng: random.Random) -> None:
    """Change the index of a frame, and every length and checksum with it."""
    reader = ArchiveReader.open(path)
    info = rng.choice(reader.frames)
    envelope = read_envelope(FrameFile.of(reader.storage, info))
    document, nbytes = envelope.document, envelope.trailer.raw_nbytes
    raw = repack(decompress_document(document, nbytes, "", INDEX_DICTIONARY), rng)
    content = (path / info.path).read_bytes()
    index = compress_document(raw, INDEX_DICTIONARY)
    offset, tail = envelope.trailer.offset, (envelope.small or b"") + index
    trailer = Trailer(offset, offset + len(tail) + TRAILER_NBYTES, len(index), len(raw))
    head = content[:FRAME_HEADER_NBYTES]
    (path / info.path).write_bytes(content[:offset] + tail + trailer.pack(FRAME, head, tail))
    (path / "inshrink-manifest").unlink()  # else its sizes would have to agree


def mutate_manifest(path: Path, rng: random.Random) -> None:
    content = (path / "inshrink-manifest").read_bytes()
    header = ManifestHeader.parse(content, "")
    raw = repack(decompress_document(content[MANIFEST_HEADER_NBYTES:], header.payload_raw_nbytes, ""), rng)
    payload = compress_document(raw)
    fields = ManifestHeader(header.archive_id, len(payload), len(raw)).pack(payload)
    (path / "inshrink-manifest").write_bytes(fields + payload)


def mutate_contents(path: Path, rng: random.Random) -> None:
    """Write both frames anew, with another layout, meta, attributes or part."""
    archive = Archive.open(path)
    what = rng.choice(("layout", "meta", "attributes", "codec", "part"))
    which = rng.randrange(len(archive.frames))
    with ArchiveWriter(path.with_name("new.inshrink"), create=True) as writer:
        for position, info in enumerate(archive.frames):
            frame, now = archive.frame(info), position == which
            head = writer.reader.head
            with writer.begin(step=info.step, kind=info.kind, parent_id=head and head.frame_id) as target:
                chosen = rng.randrange(len(frame.entries))
                for place, entry in enumerate(frame.entries):
                    codec, payload = entry.codec, frame.read(entry)
                    attributes: Any = msgpack.unpackb(msgpack.packb(entry.attributes))
                    if now and what == "layout" and entry.attachment and entry.key == LAYOUT_KEY:
                        codec, payload = "stored/1", repack(archive.attachment(info, LAYOUT_KEY), rng)
                    elif now and what == "attributes" and not entry.attachment:
                        attributes = mutated(rng, attributes)
                        attributes = attributes if isinstance(attributes, list) else [attributes]
                    elif now and what == "codec" and place == chosen:
                        codec = rng.choice(
                            ("stored/1", "same/1", "zstd/1", "renamed/1", "lossless/1", "moments/1", "x")
                        )
                    elif now and what == "part" and entry.attachment:
                        payload = bytes(rng.randrange(256) for _ in range(rng.randrange(12)))
                    target.add(
                        entry.key, codec, payload, attributes=tuple(attributes), attachment=entry.attachment
                    )
                meta = mutated(rng, frame.meta) if now and what == "meta" else frame.meta
                target.commit(meta if isinstance(meta, dict) else {})
    shutil.rmtree(path)
    path.with_name("new.inshrink").rename(path)


MUTATIONS: list[Callable[[Path, random.Random], None]] = [
    mutate_index,
    mutate_manifest,
    mutate_contents,
    mutate_contents,
    mutate_contents,
]


def tried(path: Path) -> tuple[bool, bool]:
    """Do everything with an archive; tell whether it verified, and whether every step restored."""
    out = path.parent / "out"
    limits = {"max_memory": 200 * MB, "max_disk": 100 * MB}
    asks: list[Callable[[], Any]] = [
        lambda: json.dumps(plain_value(inspect(Archive.open(path)).to_json(), strict=True), allow_nan=False),
        lambda: inshrink_core.verbs.load_state_dict(path),
        lambda: inshrink_core.verbs.export(path, out / "x", weights_only=True, force=True, **limits),
        lambda: inshrink_core.verbs.prune(path, keep_last=1),
        lambda: inshrink_core.verbs.prune(path, forget_missing=True),
    ]
    for ask in asks:
        try:
            ask()
        except InshrinkError:
            continue
    try:
        verified = inshrink_core.verify(path, deep=True, **limits).ok
    except InshrinkError:
        verified = False
    restored = True
    try:
        for info in ArchiveReader.open(path).frames:
            target = out / f"{info.branch}-{info.step}"
            inshrink_core.restore(path, target, steps=[info.step], branch=info.branch, force=True, **limits)
    except InshrinkError:
        restored = False
    return verified, restored


def test_hostile_documents_raise_typed_errors_alone_and_what_verifies_restores(
    sound: Path, tmp_path: Path
) -> None:
    assert tried(sound) == (True, True)
    outcomes = []
    for seed in range(FIRST, FIRST + CASES):
        rng = random.Random(seed)
        path = tmp_path / str(seed) / "a.inshrink"
        shutil.copytree(sound, path)
        try:
            rng.choice(MUTATIONS)(path, rng)
        except InshrinkError:  # what the writer refuses, no archive holds
            continue
        try:
            outcome = tried(path)
        except Exception as error:
            raise AssertionError(f"seed {seed}: {type(error).__name__}: {error}") from error
        assert outcome != (True, False), f"seed {seed} verifies and does not restore"
        outcomes.append(outcome)
        shutil.rmtree(tmp_path / str(seed))
    assert len(set(outcomes)) > 1
