"""The archive against a dictionary, through appends, branches, crashes, removals and reopenings."""

import shutil
import tempfile
from pathlib import Path
from typing import NamedTuple

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from inshrink_core.archive import (
    ArchiveReader,
    ArchiveWriter,
    check_archive,
    rebuild_manifest,
    remove_frames,
)
from inshrink_core.errors import NotFoundError

KEYS = ("a", "b.weight", "é")
PAYLOADS = st.binary(max_size=40) | st.sampled_from([bytes(4096), b"x" * 5000])
BLOCKS = st.dictionaries(st.sampled_from(KEYS), PAYLOADS)
METAS = st.dictionaries(
    st.sampled_from(["p", "q", "r"]),
    st.none()
    | st.booleans()
    | st.integers(-1, 2)
    | st.text(max_size=3)
    | st.lists(st.floats(0, 1), max_size=2),
)


class Committed(NamedTuple):
    """What the oracle knows of a frame; its key is the frame's id."""

    parent: bytes | None
    step: int
    branch: int
    kind: str
    codec: str
    blocks: dict[str, bytes]
    meta: dict


class ArchiveMachine(RuleBasedStateMachine):
    """Frames in the order of their commits, in a plain dictionary."""

    def __init__(self):
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())
        self.path = self.folder / "x"
        self.model: dict[bytes, Committed] = {}
        self.ever: set[bytes] = set()

    @initialize()
    def create(self):
        self.writer = ArchiveWriter(self.path, create=True)

    def teardown(self):
        self.writer.close()
        shutil.rmtree(self.folder)

    def head(self) -> bytes | None:
        newest = max((frame.branch for frame in self.model.values()), default=0)
        return next((i for i in reversed(self.model) if self.model[i].branch == newest), None)

    def append(self, parent, branch, kind, codec, blocks, meta):
        step = max((frame.step for frame in self.model.values()), default=-1) + 1
        if parent is None:
            kind = "keyframe"
        with self.writer.begin(step=step, kind=kind, parent_id=parent, branch=branch) as frame:
            for key, payload in blocks.items():
                frame.add(key, codec, payload, attributes=(len(key), [key]), part=key == "b.weight")
            info = frame.commit(meta)
        assert info.frame_id not in self.ever
        self.ever.add(info.frame_id)
        self.model[info.frame_id] = Committed(parent, step, branch, kind, codec, blocks, meta)

    @rule(kind=st.sampled_from(["delta", "delta", "keyframe"]), codec=st.sampled_from(["raw/1", "zstd/1"]),
          blocks=BLOCKS, meta=METAS)  # fmt: skip
    def append_to_head(self, kind, codec, blocks, meta):
        head = self.head()
        branch = self.model[head].branch if head else 0
        self.append(head, branch, kind, codec, blocks, meta)

    @precondition(lambda self: self.model)
    @rule(data=st.data(), blocks=BLOCKS, meta=METAS)
    def open_a_branch(self, data, blocks, meta):
        parent = data.draw(st.sampled_from(list(self.model)))
        branch = max(frame.branch for frame in self.model.values()) + 1
        self.append(parent, branch, "delta", "raw/1", blocks, meta)

    @rule(blocks=BLOCKS)
    def crash_before_the_manifest_is_written(self, blocks):
        manifest = self.path / "inshrink-manifest"
        before = manifest.read_bytes()
        self.append_to_head(kind="delta", codec="raw/1", blocks=blocks, meta={"crash": True})
        self.writer.close()
        manifest.write_bytes(before)
        (self.path / "frames" / ".00000099-1.frame.tmp").write_bytes(b"half a frame")
        self.agrees()
        self.writer = ArchiveWriter(self.path)

    @rule(blocks=BLOCKS)
    def abort_a_frame(self, blocks):
        with self.writer.begin(step=10**6, kind="keyframe", parent_id=None) as frame:
            for key, payload in blocks.items():
                frame.add(key, "raw/1", payload)

    @rule()
    def reopen(self):
        self.writer.close()
        self.writer = ArchiveWriter(self.path)

    @precondition(lambda self: self.model)
    @rule(rebuild=st.booleans())
    def lose_the_manifest(self, rebuild):
        # Of a manifest that is lost, the generations of removed frames are lost too: ids may recur.
        self.writer.close()
        (self.path / "inshrink-manifest").unlink()
        self.ever = set(self.model)
        self.agrees()
        if rebuild:
            rebuild_manifest(self.path)
        self.writer = ArchiveWriter(self.path)

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def remove_a_frame_and_its_descendants(self, data):
        gone = {data.draw(st.sampled_from(list(self.model)))}
        for frame_id, frame in self.model.items():
            if frame.parent in gone and frame.kind == "delta":
                gone.add(frame_id)
        remove_frames(self.writer, gone)
        for frame_id in gone:
            del self.model[frame_id]

    @invariant()
    def agrees(self):
        reader = ArchiveReader.open(self.path)
        assert [frame.frame_id for frame in reader.frames] == list(self.model)
        assert (reader.head and reader.head.frame_id) == self.head()
        for info in reader.frames:
            frame, expected = reader.frame(info.frame_id), self.model[info.frame_id]
            assert (info.parent_id, info.step, info.branch, info.kind.value) == expected[:4]
            payloads = [frame.read(entry) for entry in frame.entries]
            assert dict(zip((entry.key for entry in frame.entries), payloads, strict=True)) == expected.blocks
            assert all(entry.codec == expected.codec for entry in frame.entries)
            assert all(entry.attributes == (len(entry.key), (entry.key,)) for entry in frame.entries)
            assert all(entry.part == (entry.key == "b.weight") for entry in frame.entries)
            assert frame.meta == expected.meta
            assert reader.find(info.step) == info
        line, frame_id = [], self.head()
        while frame_id in self.model:
            line.append(frame_id)
            frame_id = self.model[frame_id].parent
        assert [frame.frame_id for frame in reader.history()] == line[::-1]

    @invariant()
    def is_sound(self):
        assert check_archive(self.path) == ()

    @invariant()
    def knows_no_other_step(self):
        try:
            ArchiveReader.open(self.path).find(10**6)
        except NotFoundError:
            return
        raise AssertionError("an aborted step was found")


TestArchive = ArchiveMachine.TestCase
TestArchive.settings = settings(
    max_examples=30,
    stateful_step_count=15,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
