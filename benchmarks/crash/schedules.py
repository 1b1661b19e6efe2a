"""Schedules of writers that share an archive: parts, commits, other writers and removals, killed anywhere.

A state machine for Hypothesis. What is changed is in memory; each writer is a process that dies before any
change it makes, at which its locks are free and what it had not named is gone. Beside it stands a list of
frames as the protocol promises them: a frame is there when its last part is, once, and stays; the last one is
the head; nothing that was given up or removed comes back.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, field
from unittest import mock

from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from inshrink_core.archive import ArchiveReader, ArchiveWriter, PartWriter, commit_parts
from inshrink_core.archive.maintenance import remove_frames
from inshrink_core.archive.manifest import MANIFEST_NAME, Manifest
from inshrink_core.archive.storage.contract import Creation, Lock
from inshrink_core.errors import ConflictError, LockedError
from tests.archive.memory_storage import MemoryStorage, StoredObjects

URL = "simulated://archive"
ROOT = "archive"


class KilledError(BaseException):
    """The process is dead: nothing that it still tries does anything."""


class Place:
    """Where the archive lies: its objects, and who holds its lock."""

    def __init__(self) -> None:
        self.objects = StoredObjects()
        self.alone: Process | None = None
        self.shared: list[Process] = []

    def forget(self, process: Process) -> None:
        self.alone = None if self.alone is process else self.alone
        self.shared = [other for other in self.shared if other is not process]


class Process:
    """A writer, which dies before the change that its fuse says."""

    def __init__(self, place: Place, fuse: int | None = None) -> None:
        self.place, self.fuse, self.dead = place, fuse, False

    def acts(self) -> None:
        """Come to a change of what lasts."""
        if self.fuse is not None:
            self.fuse -= 1
        if self.fuse is not None and self.fuse < 0:
            self.die()
        self.lives()

    def lives(self) -> None:
        if self.dead:
            raise KilledError

    def die(self) -> None:
        self.dead = True
        self.place.forget(self)


class TakenLock(Lock):
    """A lock that ends with its process."""

    def __init__(self, process: Process) -> None:
        super().__init__(lambda: process.place.forget(process))


class Unnamed(Creation):
    """An object that nobody sees yet."""

    def __init__(self, process: Process, made: Creation) -> None:
        self._process, self._made = process, made

    def write(self, content: bytes | bytearray | memoryview) -> None:
        self._process.lives()
        self._made.write(content)

    def commit(self) -> None:
        self._process.acts()
        self._made.commit()

    def abort(self) -> None:
        self._made.abort()


class Simulated(MemoryStorage):
    """The archive as a process sees it."""

    def __init__(self, process: Process) -> None:
        super().__init__(URL)
        self._process, self._objects = process, process.place.objects

    def read(self, path: str, offset: int, nbytes: int) -> bytes:
        self._process.lives()
        return super().read(path, offset, nbytes)

    def names(self, folder: str) -> tuple[str, ...]:
        self._process.lives()
        return super().names(folder)

    def is_locked(self) -> bool:
        return self._process.place.alone is not None

    def lock(self) -> Lock:
        self._process.lives()
        if self._process.place.alone or self._process.place.shared:
            raise LockedError("another process writes", where=URL)
        self._process.place.alone = self._process
        return TakenLock(self._process)

    def share(self) -> Lock:
        self._process.lives()
        if self._process.place.alone:
            raise LockedError("another process writes", where=URL)
        self._process.place.shared.append(self._process)
        return TakenLock(self._process)

    def create(self, path: str, *, over: bool = False) -> Creation:
        self._process.lives()
        return Unnamed(self._process, super().create(path, over=over))

    def replace(self, path: str, content: bytes, expected: object) -> object:
        self._process.acts()
        return super().replace(path, content, expected)

    def delete(self, path: str) -> None:
        self._process.acts()
        super().delete(path)


@dataclass
class Frame:
    """What the oracle knows of a frame: content, setting and file of each part that is there."""

    step: int
    n_parts: int
    kind: str
    parts: dict[int, tuple[bytes, int, str]] = field(default_factory=dict)
    listed: bool = False

    @property
    def complete(self) -> bool:
        return len(self.parts) == self.n_parts

    @property
    def torn(self) -> bool:
        """Whether parts were written with different settings."""
        return self.complete and len({setting for _, setting, _ in self.parts.values()}) > 1


@dataclass(eq=False)
class Writer:
    """A process that writes a part, and how many frames of the list it has behind it."""

    process: Process
    part: int
    opened: PartWriter
    seen: int


FUSES = st.none() | st.none() | st.integers(0, 5)


class PartsMachine(RuleBasedStateMachine):
    """Writers of parts and of frames, and the list of what must be there."""

    def __init__(self) -> None:
        super().__init__()
        self.place = Place()
        self.process = Process(self.place)
        self.frames: list[Frame] = []
        self.writers: list[Writer] = []
        self.n_written = 0
        with ExitStack() as patches:
            patches.enter_context(mock.patch("inshrink_core.archive.storage.registry._opened", self.opened))
            patches.enter_context(mock.patch("inshrink_core.archive.parts._PATIENCE_S", -1.0))
            patches.enter_context(mock.patch("inshrink_core.archive.parts.time.sleep"))
            ArchiveWriter(URL, create=True, archive_id=b"simulated here!!").close()
            self._patches = patches.pop_all()

    def opened(self, url: str) -> Simulated:
        """Return the archive as the process at work sees it."""
        return Simulated(self.process)

    def teardown(self) -> None:
        with self._patches:
            for writer in self.writers:
                writer.opened.suspend()
            self.holds_every_byte()

    # ---- parts -----------------------------------------------------------------------------------

    @property
    def pending(self) -> list[Frame]:
        return [frame for frame in self.frames if not frame.complete]

    @rule(part=st.integers(0, 2), n_parts=st.sampled_from([2, 3]), fuse=FUSES)
    def a_part_is_begun(self, part: int, n_parts: int, fuse: int | None) -> None:
        """Open an archive for a part."""
        self.begun(part, n_parts, fuse)

    @rule(order=st.permutations(range(3)), n_parts=st.sampled_from([1, 2, 3]), n_frames=st.integers(1, 2),
          fuse=FUSES, setting=st.sampled_from([0, 0, 0, 1]))  # fmt: skip
    def parts_are_written_one_after_the_other(
        self, order: list[int], n_parts: int, n_frames: int, fuse: int | None, setting: int
    ) -> None:
        """Write some frames in all parts; the first may be killed, or be given another setting."""
        for part in order:
            writer = self.begun(part, n_parts, fuse) if part < n_parts else None
            for _ in range(n_frames):
                if writer in self.writers:
                    self.written(writer, setting)
            if writer in self.writers:
                self.ends(writer)
            fuse, setting = None, 0

    def begun(self, part: int, n_parts: int, fuse: int | None) -> Writer | None:
        """Open an archive for a part; of another number of parts only where nothing waits for some."""
        if self.writers:
            n_parts = self.writers[0].opened.n_parts
        part %= n_parts
        self.process = Process(self.place, fuse)
        strange = any(frame.n_parts != n_parts for frame in self.pending)
        try:
            opened = PartWriter(URL, part, n_parts)
        except ConflictError:
            opened = None
        assert (opened is None) == strange
        if opened is None:
            assert self.process not in self.place.shared
            return None
        present = [part in frame.parts or frame.listed or frame.complete for frame in self.frames]
        self.writers.append(Writer(self.process, part, opened, (*present, False).index(False)))
        return self.writers[-1]

    @precondition(lambda self: self.writers)
    @rule(data=st.data(), setting=st.sampled_from([0] * 9 + [1]))
    def a_part_is_written(self, data: st.DataObject, setting: int) -> None:
        """Write a part of the next frame."""
        self.written(data.draw(st.sampled_from(self.writers)), setting)

    def written(self, writer: Writer, setting: int) -> None:
        """Write a part of a frame; where another has written it meanwhile, it is refused."""
        self.process = writer.process
        head = writer.opened.reader.head
        step = head.step + 1 if head else 0
        kind = "delta" if head and step % 3 else "keyframe"
        self.n_written += 1
        content, before = b"%d" % self.n_written, self.names()
        taken = writer.seen < len(self.frames) and writer.part in self.frames[writer.seen].parts
        try:
            with writer.opened.begin(step=step, kind=kind, parent_id=head and head.frame_id) as frame:
                frame.add(f"tensor {writer.part}", "raw/1", content, place=writer.part)
                frame.commit({"config": setting, "content": self.n_written})
        except ConflictError:
            self.ends(writer)
        except KilledError:
            self.writers.remove(writer)
        assert taken == (writer not in self.writers) or writer.process.dead
        if taken:
            return
        new = [*self.names() - before]
        assert len(new) == 1 or (writer.process.dead and not new)
        if new:
            if writer.seen == len(self.frames):
                self.frames.append(Frame(step, writer.opened.n_parts, kind))
            row = self.frames[writer.seen]
            assert (row.step, row.kind) == (step, kind)
            row.parts[writer.part] = content, setting, new[0]
            writer.seen += 1

    def names(self) -> set[str]:
        """Return the files of frames that are there."""
        return {key for key in self.place.objects if "/frames/" in key}

    @precondition(lambda self: self.writers)
    @rule(data=st.data(), killed=st.booleans())
    def a_part_ends(self, data: st.DataObject, killed: bool) -> None:
        """Close a part, or kill it between two frames."""
        writer = data.draw(st.sampled_from(self.writers))
        if killed:
            writer.process.die()
            self.writers.remove(writer)
        else:
            self.ends(writer)

    def ends(self, writer: Writer) -> None:
        self.process = writer.process
        writer.opened.suspend()
        self.writers.remove(writer)

    # ---- whoever writes alone --------------------------------------------------------------------

    @rule(discard=st.booleans(), fuse=FUSES)
    def commit(self, discard: bool, fuse: int | None) -> None:
        """List what is whole; refuse where parts contradict each other, or give up what is not."""
        self.process = Process(self.place, fuse)
        bad = next((i for i, f in enumerate(self.frames) if not f.listed and (f.torn or not f.complete)),
                   len(self.frames))  # fmt: skip
        torn = any(frame.torn for frame in self.frames if not frame.listed)
        try:
            done = commit_parts(URL, discard=discard)
        except LockedError as error:
            self.may_refuse(error, torn and not discard)
            return
        except KilledError:
            self.see_what_is_left(self.frames[bad:] if discard else [])
            return
        assert not self.writers
        assert discard or not torn
        if discard:
            assert [frame.step for frame in done.discarded] == [frame.step for frame in self.frames[bad:]]
            del self.frames[bad:]
        assert [frame.step for frame in done.waiting] == [frame.step for frame in self.pending]
        left = [frame.step for frame in self.frames if frame.complete and not frame.listed]
        assert [frame.step for frame in done.listed] == left
        self.list_whole()

    @rule(fuse=FUSES)
    def a_frame_is_written_whole(self, fuse: int | None) -> None:
        """Append a frame as one process does, which nobody may while parts are written or wait."""
        self.process, before = Process(self.place, fuse), self.names()
        self.n_written += 1
        content, row = b"%d" % self.n_written, Frame(0, 1, "keyframe")
        try:
            with ArchiveWriter(URL) as writer:
                self.list_whole()
                head = writer.reader.head
                row.step = head.step + 1 if head else 0
                row.kind = "delta" if head and row.step % 3 else "keyframe"
                begun = writer.begin(step=row.step, kind=row.kind, parent_id=head and head.frame_id)
                with begun as frame:
                    frame.add("tensor 0", "raw/1", content, attributes=(1,))
                    frame.commit({"config": 0})
        except LockedError as error:
            self.may_refuse(error, self.waits)
            return
        except KilledError:
            pass
        assert not self.writers
        assert not any(frame.torn and frame.listed for frame in self.frames)
        new = [*self.names() - before]
        assert len(new) == 1 or self.process.dead
        if new:
            row.parts[0] = content, 0, new[0]
            self.frames.append(row)
        self.see_what_is_left([])

    @precondition(lambda self: self.frames)
    @rule(data=st.data(), fuse=FUSES)
    def frames_are_removed(self, data: st.DataObject, fuse: int | None) -> None:
        """Remove the last frames, or those before a keyframe."""
        ends = [(i, len(self.frames)) for i in range(len(self.frames))]
        ends += [(0, i) for i, frame in enumerate(self.frames) if i and frame.kind == "keyframe"]
        first, last = data.draw(st.sampled_from(ends))
        self.process, gone = Process(self.place, fuse), self.frames[first:last]
        try:
            with ArchiveWriter(URL) as writer:
                self.list_whole()
                remove_frames(writer, [frame.frame_id for frame in writer.reader.frames[first:last]])
        except LockedError as error:
            self.may_refuse(error, self.waits)
            return
        except KilledError:
            self.see_what_is_left(gone)
            return
        self.frames = [frame for frame in self.frames if frame not in gone]
        self.see_what_is_left([])

    @property
    def waits(self) -> bool:
        """Whether frames wait for parts, or for somebody to say what becomes of those that contradict."""
        return any(not frame.complete or (frame.torn and not frame.listed) for frame in self.frames)

    def may_refuse(self, error: LockedError, waits: bool) -> None:
        """See that there was a reason."""
        assert waits if isinstance(error, ConflictError) else self.writers

    def list_whole(self) -> None:
        for frame in self.frames:
            frame.listed |= frame.complete

    def see_what_is_left(self, gone: list[Frame]) -> None:
        """Take in what a process that was killed had done; of `gone` alone it may have taken away."""
        content, _ = self.place.objects[f"{ROOT}/{MANIFEST_NAME}"]
        manifest, there = Manifest.parse(content, URL), self.names()
        listed = {f"{ROOT}/{path}" for frame in manifest.frames for path in frame.paths}
        left = []
        for frame in self.frames:
            files = {name for _, _, name in frame.parts.values()}
            was_listed, frame.listed = frame.listed, files <= listed and frame.complete
            assert frame.listed or not was_listed or any(frame is other for other in gone)
            if was_listed and not frame.listed:
                continue
            parts = {number: row for number, row in frame.parts.items() if row[2] in there}
            assert parts == frame.parts or any(frame is other for other in gone)
            assert not frame.listed or parts == frame.parts
            frame.parts = parts
            if parts:
                left.append(frame)
        self.frames = left

    # ---- what must hold --------------------------------------------------------------------------

    @invariant()
    def holds_what_is_whole(self) -> None:
        """Readers find each whole frame once, the last one as the head, and nothing else."""
        reader = self.reader()
        complete = [frame for frame in self.frames if frame.complete]
        assert [frame.step for frame in reader.frames] == [frame.step for frame in complete]
        assert (reader.head and reader.head.step) == (complete[-1].step if complete else None)
        assert [frame.step for frame in reader.catalog.pending] == [frame.step for frame in self.pending]
        assert not reader.missing

    def holds_every_byte(self) -> None:
        """Every part of every frame has the content that was written first."""
        reader = self.reader()
        complete = [frame for frame in self.frames if frame.complete]
        for info, frame in zip(reader.frames, complete, strict=True):
            opened = reader.frame(info.frame_id)
            found = {entry.key: opened.read(entry) for entry in opened.entries}
            assert found == {f"tensor {part}": row[0] for part, row in frame.parts.items()}

    def reader(self) -> ArchiveReader:
        self.process = Process(self.place)
        return ArchiveReader.open(URL)


def run_schedules(n: int, *, derandomize: bool = False, shrink: bool = True) -> None:
    """Run so many schedules; raises AssertionError where the archive is not what the list says.

    A schedule that fails is made short, and shown, where it shall `shrink`.
    """
    run_state_machine_as_test(
        PartsMachine,
        settings=settings(
            max_examples=n,
            stateful_step_count=6,
            deadline=None,
            derandomize=derandomize,
            database=None,
            report_multiple_bugs=False,
            phases=(Phase.generate, Phase.shrink) if shrink else (Phase.generate,),
            suppress_health_check=list(HealthCheck),
        ),
    )
