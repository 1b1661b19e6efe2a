"""Rewriting frames and removing others is one switch: interrupted anywhere, all of it happened or nothing."""

import errno
import os
import shutil
from pathlib import Path

import pytest

from inshrink_core.archive import ArchiveReader, ArchiveWriter, check_archive
from inshrink_core.archive.maintenance import Rewrite
from inshrink_core.errors import InputError, InshrinkError
from inshrink_core.frame import FrameKind
from tests.archive.building import META, append, blocks_of, build, contents

MANIFEST = "inshrink-manifest"
STEPS = (0, 100, 200, 300)


@pytest.fixture
def path(tmp_path):
    return build(tmp_path / "x", STEPS)


def state(path):
    """Return blocks, kind and meta of every step."""
    reader = ArchiveReader.open(path)
    return {
        frame.step: (contents(reader, frame.frame_id), frame.kind.value, reader.frame(frame.frame_id).meta)
        for frame in reader.frames
    }


def thin_out(path):
    """Drop steps 0 and 100: 200 becomes a keyframe of another codec, 300 stays a delta upon it."""
    with ArchiveWriter(path) as writer:
        frames = {frame.step: frame for frame in writer.reader.frames}
        with Rewrite(writer, [frames[300], frames[200]]) as rewrite:
            old = writer.reader.frame(frames[300].frame_id)
            frame_id = frames[300].frame_id
            with rewrite.begin(frame_id, kind=FrameKind.DELTA, parent_id=frames[200].frame_id) as frame:
                for entry in old.entries:
                    frame.add(
                        entry.key,
                        entry.codec,
                        old.read(entry),
                        attributes=entry.attributes,
                        attachment=entry.attachment,
                    )
                frame.commit(old.meta)
            with rewrite.begin(frames[200].frame_id, kind=FrameKind.KEYFRAME, parent_id=None) as frame:
                for key, payload in blocks_of(200).items():
                    frame.add(key, "other/1", payload, attributes=("weight", "float32", [1], True))
                frame.add("model.pt", "stored/1", b"skeleton", attachment=True)
                frame.commit({**META, "step": 200})
            rewrite.switch([frames[0], frames[100]])


def test_rewritten_frames_keep_their_ids_and_their_children_still_read(path):
    before = {frame.step: frame.frame_id for frame in ArchiveReader.open(path).frames}
    old = state(path)
    thin_out(path)
    reader = ArchiveReader.open(path)
    assert {frame.step: frame.frame_id for frame in reader.frames} == {
        step: before[step] for step in (200, 300)
    }
    assert state(path) == {200: (old[200][0], "keyframe", old[200][2]), 300: old[300]}
    # what the child inherited from its parent is its own now: the re-keyed parent has other codecs
    assert reader.frame(before[300]).entry("conv1.weight").codec == "raw/1"
    assert reader.frame(before[200]).entry("conv1.weight").codec == "other/1"
    assert reader.head.step == 300
    assert [frame.step for frame in reader.history()] == [200, 300]
    assert check_archive(path) == ()
    with ArchiveWriter(path) as writer:
        append(writer, 400)
    assert list(state(path)) == [200, 300, 400]
    assert check_archive(path) == ()


def test_rewrite_without_a_switch_changes_nothing(path):
    before = state(path)
    with ArchiveWriter(path) as writer:
        last = writer.reader.head
        with (
            Rewrite(writer, [last]) as rewrite,
            rewrite.begin(last.frame_id, kind=FrameKind.KEYFRAME, parent_id=None) as frame,
        ):
            frame.add("a", "raw/1", b"x")
            frame.commit({})
        assert state(path) == before
        assert append(writer, 400).generation == 6  # generation 5 was used, if in vain
    assert check_archive(path) == ()


def test_switch_refuses_to_leave_a_delta_without_its_parent(path):
    before = state(path)
    with ArchiveWriter(path) as writer:
        frames = {frame.step: frame for frame in writer.reader.frames}
        with Rewrite(writer, []) as rewrite, pytest.raises(InputError, match="step 200 would lose"):
            rewrite.switch([frames[100]])
        with Rewrite(writer, [frames[300]]) as rewrite, pytest.raises(InputError, match="not every frame"):
            rewrite.switch([frames[0]])
        with Rewrite(writer, [frames[300]]) as rewrite, pytest.raises(InputError, match="not to be"):
            rewrite.begin(frames[200].frame_id, kind=FrameKind.KEYFRAME, parent_id=None)
    assert state(path) == before
    assert check_archive(path) == ()


# ---- interruptions -------------------------------------------------------------------------------

_CALLS = ("os.fsync", "pathlib.Path.replace", "pathlib.Path.unlink")


class _Killed(BaseException):
    """Stands for the end of the process: nothing that runs afterwards may repair anything."""


def interrupted(monkeypatch, path, n_calls, error):
    """Thin out, interrupted before the n-th call to the system; tell whether it came to that."""
    calls = []

    def wrap(real):
        def call(*arguments, **options):
            calls.append(1)
            if len(calls) > n_calls:
                raise error
            return real(*arguments, **options)

        return call

    with monkeypatch.context() as system:
        for name in _CALLS:
            target, _, attribute = name.rpartition(".")
            owner = os if target == "os" else Path
            system.setattr(owner, attribute, wrap(getattr(owner, attribute)))
        try:
            thin_out(path)
        except (_Killed, InshrinkError):
            return True
    return len(calls) > n_calls


def test_interrupted_at_any_write_the_archive_is_as_before_or_thinned_out(tmp_path, monkeypatch, n_parts):
    error = _Killed() if n_parts > 1 else OSError(errno.ENOSPC, "No space left on device")
    template = build(tmp_path / "template", STEPS)
    before = state(template)
    shutil.copytree(template, tmp_path / "done")
    thin_out(tmp_path / "done")
    after = state(tmp_path / "done")
    outcomes = set()
    for n_calls in range(100):
        path = Path(shutil.copytree(template, tmp_path / f"{n_calls}"))
        came = interrupted(monkeypatch, path, n_calls, error)
        found = state(path)
        assert found in (before, after), n_calls
        outcomes.add(len(found))
        with ArchiveWriter(path) as writer:
            assert state(path) == found
            append(writer, 400)
        assert list(state(path)) == [*found, 400]
        assert check_archive(path) == ()
        assert len(list((path / "frames").iterdir())) == n_parts * (len(found) + 1)
        if not came:
            break
    else:
        pytest.fail("the interruptions never came to an end")
    assert outcomes == {len(before), len(after)}
