"""Stateful test of the archive against a dictionary: appends, branches, crashes, removals, reopening.

Use it to test changes of the archive writer, or a new storage: subclass `ArchiveMachine`, and override
`new_place`. Hypothesis searches a sequence of actions after which the archive and the dictionary differ. The
module needs ``hypothesis``.

Examples
--------
In a test file::

    class Mine(ArchiveMachine):
        def new_place(self) -> str:
            return f"bucket://tests/{uuid4().hex}"

    TestMine = Mine.TestCase
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from inshrink_core.archive import ArchiveReader, ArchiveWriter, check_archive
from inshrink_core.archive.maintenance import remove_frames
from inshrink_core.archive.manifest import MANIFEST_NAME
from inshrink_core.archive.reader import open_storage
from inshrink_core.errors import DamagedError, NotFoundError

__all__ = ["ArchiveMachine"]

_KEYS = ("a", "b.weight", "é")
_PAYLOADS = st.binary(max_size=40) | st.sampled_from([bytes(4096), b"x" * 5000])
_BLOCKS = st.dictionaries(st.sampled_from(_KEYS), _PAYLOADS)
_METAS = st.dictionaries(
    st.sampled_from(["p", "q", "r"]),
    st.none()
    | st.booleans()
    | st.integers(-1, 2)
    | st.text(max_size=3)
    | st.lists(st.floats(0, 1), max_size=2),
)


class _Committed(NamedTuple):
    """A frame in the model; its key is the frame's id."""

    parent: bytes | None
    step: int
    branch: int
    kind: str
    codec: str
    blocks: dict[str, bytes]
    meta: dict[str, Any]


class ArchiveMachine(RuleBasedStateMachine):
    """State machine that applies each action to an archive and to a dictionary, and compares them."""

    def __init__(self) -> None:
        super().__init__()
        self.path = self.new_place()
        self.model: dict[bytes, _Committed] = {}
        self.ever: set[bytes] = set()

    def new_place(self) -> str | Path:
        """Return the path or URL of a new archive."""
        return Path(tempfile.mkdtemp()) / "x"

    def remove_place(self) -> None:
        """Remove the archive; by default a path, with its parent folder."""
        shutil.rmtree(Path(self.path).parent)

    @initialize()
    def create(self) -> None:
        """Begin an archive without frames."""
        self.writer = ArchiveWriter(self.path, create=True)

    def teardown(self) -> None:
        """Close and remove the archive."""
        self.writer.close()
        self.remove_place()

    def head(self) -> bytes | None:
        """Return the id of the newest frame of the newest branch."""
        newest = max((frame.branch for frame in self.model.values()), default=0)
        return next((i for i in reversed(self.model) if self.model[i].branch == newest), None)

    def append(
        self,
        parent: bytes | None,
        branch: int,
        kind: str,
        codec: str,
        blocks: dict[str, bytes],
        meta: dict[str, Any],
    ) -> None:
        """Append a frame to the archive and to the dictionary."""
        step = max((frame.step for frame in self.model.values()), default=-1) + 1
        if parent is None:
            kind = "keyframe"
        with self.writer.begin(step=step, kind=kind, parent_id=parent, branch=branch) as frame:
            for key, payload in blocks.items():
                frame.add(key, codec, payload, attributes=(len(key), [key]), attachment=key == "b.weight")
            info = frame.commit(meta)
        assert info.frame_id not in self.ever
        self.ever.add(info.frame_id)
        self.model[info.frame_id] = _Committed(parent, step, branch, kind, codec, blocks, meta)

    @rule(kind=st.sampled_from(["delta", "delta", "keyframe"]), codec=st.sampled_from(["raw/1", "zstd/1"]),
          blocks=_BLOCKS, meta=_METAS)  # fmt: skip
    def append_to_head(self, kind: str, codec: str, blocks: dict[str, bytes], meta: dict[str, Any]) -> None:
        """Append to the last frame of the newest branch."""
        head = self.head()
        branch = self.model[head].branch if head else 0
        self.append(head, branch, kind, codec, blocks, meta)

    @precondition(lambda self: self.model)
    @rule(data=st.data(), blocks=_BLOCKS, meta=_METAS)
    def open_a_branch(self, data: st.DataObject, blocks: dict[str, bytes], meta: dict[str, Any]) -> None:
        """Append to any frame, on a new branch."""
        parent = data.draw(st.sampled_from(list(self.model)))
        branch = max(frame.branch for frame in self.model.values()) + 1
        self.append(parent, branch, "delta", "raw/1", blocks, meta)

    @rule(blocks=_BLOCKS)
    def crash_before_the_manifest_is_written(self, blocks: dict[str, bytes]) -> None:
        """Commit a frame, and restore the manifest from before."""
        storage = open_storage(self.path)
        before, _ = storage.load(MANIFEST_NAME)
        self.append_to_head(kind="delta", codec="raw/1", blocks=blocks, meta={"crash": True})
        self.writer.close()
        storage.replace(MANIFEST_NAME, before, storage.load(MANIFEST_NAME)[1])
        if not storage.exclusive:
            # Without a lock the file may belong to another writer: it is not part of the archive.
            self.ever.discard(self.model.popitem()[0])
            self.writer = ArchiveWriter(self.path)
            self.agrees()
            listed = {path for frame in self.writer.reader.frames for path in frame.paths}
            for name in storage.list("frames"):
                if f"frames/{name}" not in listed:
                    storage.delete(f"frames/{name}")
            return
        with storage.create("frames/00000099-1.frame") as left:
            left.write(b"half a frame")
            self.agrees()
            self.writer = ArchiveWriter(self.path)

    @rule(blocks=_BLOCKS)
    def abort_a_frame(self, blocks: dict[str, bytes]) -> None:
        """Begin a frame and never commit it."""
        with self.writer.begin(step=10**6, kind="keyframe", parent_id=None) as frame:
            for key, payload in blocks.items():
                frame.add(key, "raw/1", payload)

    @rule(grouped=st.booleans())
    def reopen(self, grouped: bool) -> None:
        """Close the archive and open it again, to commit frames one by one or in groups."""
        self.writer.close()
        self.writer = ArchiveWriter(self.path, grouped=grouped)

    @precondition(lambda self: self.model)
    @rule(data=st.data(), n_frames=st.integers(1, 5))
    def append_a_group(self, data: st.DataObject, n_frames: int) -> None:
        """Append several frames, and compare only after the last one."""
        for _ in range(n_frames):
            self.append_to_head("delta", "raw/1", data.draw(_BLOCKS), {"n": n_frames})

    @precondition(lambda self: self.model)
    @rule()
    def lose_the_manifest(self) -> None:
        """Delete the manifest: frames stay readable, no frame counts as the last; then rebuild it."""
        # The lost manifest recorded the generations of removed frames, so that their ids may recur.
        self.writer.close()
        open_storage(self.path).delete(MANIFEST_NAME)
        self.ever = set(self.model)
        reader = ArchiveReader.open(self.path)
        self._reads(reader)
        for tip in reader.frames:
            if all(
                tip.generation >= other.generation for other in reader.frames if other.branch == tip.branch
            ):
                line = reader.listed_history(tip)
                assert all(reader.find(info.step, tip.branch) == info for info in line)
        for needs_the_head in (lambda: reader.head, reader.history, lambda: ArchiveWriter(self.path)):
            try:
                needs_the_head()
            except DamagedError:
                continue
            raise AssertionError("a frame was taken for the last one")
        ArchiveWriter(self.path, rebuild=True).close()
        self.writer = ArchiveWriter(self.path)

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def remove_a_frame_and_its_descendants(self, data: st.DataObject) -> None:
        """Remove a frame and all frames that need it."""
        gone = {data.draw(st.sampled_from(list(self.model)))}
        for frame_id, frame in self.model.items():
            if frame.parent in gone and frame.kind == "delta":
                gone.add(frame_id)
        remove_frames(self.writer, gone)
        for frame_id in gone:
            del self.model[frame_id]

    @invariant()
    def agrees(self) -> None:
        """Compare every frame, and the reader's lists of frames, with the dictionary."""
        for reader in (self.writer.reader, self._flushed()):
            self._agrees(reader)

    def _flushed(self) -> ArchiveReader:
        self.writer.flush()
        return ArchiveReader.open(self.path)

    def _reads(self, reader: ArchiveReader) -> None:
        assert [frame.frame_id for frame in reader.frames] == list(self.model)
        for info in reader.frames:
            frame, expected = reader.frame(info.frame_id), self.model[info.frame_id]
            assert (info.parent_id, info.step, info.branch, info.kind.value) == expected[:4]
            payloads = [frame.read(entry) for entry in frame.entries]
            assert dict(zip((entry.key for entry in frame.entries), payloads, strict=True)) == expected.blocks
            assert all(entry.codec == expected.codec for entry in frame.entries)
            assert all(entry.attributes == (len(entry.key), (entry.key,)) for entry in frame.entries)
            assert all(entry.attachment == (entry.key == "b.weight") for entry in frame.entries)
            assert frame.meta == expected.meta

    def _agrees(self, reader: ArchiveReader) -> None:
        self._reads(reader)
        assert (reader.head and reader.head.frame_id) == self.head()
        assert all(reader.find(info.step) == info for info in reader.frames)
        line, frame_id = [], self.head()
        while frame_id in self.model:
            line.append(frame_id)
            frame_id = self.model[frame_id].parent
        assert [frame.frame_id for frame in reader.history()] == line[::-1]

    @invariant()
    def is_sound(self) -> None:
        """Check every structure and checksum."""
        assert check_archive(self.path) == ()

    @invariant()
    def knows_no_other_step(self) -> None:
        """Check that the aborted frame is not found."""
        try:
            ArchiveReader.open(self.path).find(10**6)
        except NotFoundError:
            return
        raise AssertionError("an aborted step was found")
