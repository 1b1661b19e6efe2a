"""A chain knows where training was restored: said, remembered, or seen in the values themselves."""

import shutil
from dataclasses import dataclass, field

import torch

import inshrink_core
from inshrink_core.archive import ArchiveWriter
from inshrink_core.chain import Archive, ChainConfig, ChainWriter
from inshrink_core.codec import EncoderState
from inshrink_core.codecs.inshrinkerator.codec import InshrinkeratorCodec


def nudge(source, target):
    """Write a checkpoint whose weights moved a little."""
    state = torch.load(source, weights_only=True)
    first = next(iter(state["model"]))
    state["model"][first] += 0.125
    torch.save(state, target)


def test_steps_after_a_restored_checkpoint_continue_from_its_frame(run_path, archive_path, tmp_path):
    inshrink_core.restore(archive_path, tmp_path / "again", steps=[10])
    nudge(run_path / "step_15.pt", tmp_path / "again" / "step_15.pt")
    report = inshrink_core.compress(tmp_path / "again", archive_path)
    assert (report.skipped, report.appended) == ((10,), (15,))
    archive = Archive.open(archive_path)
    head, restored = archive.reader.head, archive.reader.find(10)
    assert head is not None
    assert (head.step, head.branch, head.parent_id) == (15, 1, restored.frame_id)
    assert archive.frame(head).meta["restored"] == restored.frame_id


def test_a_continuation_of_the_last_step_stays_on_its_branch(run_path, archive_path, tmp_path):
    inshrink_core.restore(archive_path, tmp_path / "again", steps=[20])
    nudge(run_path / "step_20.pt", tmp_path / "again" / "step_25.pt")
    inshrink_core.compress(tmp_path / "again", archive_path)
    head = Archive.open(archive_path).reader.head
    assert head is not None
    assert (head.step, head.branch) == (25, 0)


def test_a_restored_step_among_original_ones_changes_nothing(run_path, archive_path, tmp_path):
    shutil.copytree(run_path, tmp_path / "again")
    inshrink_core.restore(archive_path, tmp_path / "out", steps=[10])
    shutil.copy(tmp_path / "out" / "step_10.pt", tmp_path / "again" / "step_10.pt")
    report = inshrink_core.compress(tmp_path / "again", archive_path)
    assert report.appended == ()


@dataclass(frozen=True, kw_only=True)
class _Watching(EncoderState, InshrinkeratorCodec):
    """Notes what an encoder is told, and remembers a count."""

    restored: list = field(default_factory=list)
    contexts: list = field(default_factory=list)

    def settings(self):
        return InshrinkeratorCodec().settings()

    def plan(self, specs, statistics, context=None):
        self.contexts.append(context)
        return super().plan(specs, statistics, context)

    def remember(self, plan):
        return (self.contexts[-1].memory or 0) + 1

    def encode(self, item, plan, reference):
        if item.spec.key == "0.weight":
            self.restored.append(item.restored)
        return super().encode(item, plan, reference)


def test_an_encoder_is_told_learning_rates_memory_and_restored_values(run_path, tmp_path):
    watching = _Watching()
    path, run = tmp_path / "b.inshrink", inshrink_core.open(run_path)
    config = ChainConfig(config=watching)
    with ArchiveWriter(path, create=True) as writer:
        chain = ChainWriter(writer, config)
        first = chain.append(run[5]).info
        chain.append(run[10])
    with ArchiveWriter(path) as writer:
        chain = ChainWriter(writer, config, parent=first, branch=1, restored=first)
        chain.append(run[15])
    with ArchiveWriter(path) as writer:
        ChainWriter(writer, config).append(run[20])
    assert [context.memory for context in watching.contexts] == [None, 1, 1, 2]
    assert [context.after_restore for context in watching.contexts] == [False, False, True, False]
    assert all(context.learning_rates["0.weight"] > 0 for context in watching.contexts)
    assert watching.restored[:2] == [None, None]
    decoded = Archive.open(path).checkpoint(first)["0.weight"]
    for values in watching.restored[2:]:
        assert values is not None
        assert torch.equal(values, decoded)


def test_second_moments_guide_the_encoder_even_where_they_are_not_stored(run_path, tmp_path):
    blocks = []
    for optimizer in ("exact", "drop"):
        path = tmp_path / f"{optimizer}.inshrink"
        # Shaped rounding follows first moments as the archive has them; step sizes do not.
        plain = {"shaping": "off"}
        inshrink_core.compress(run_path, path, codec="lattice", config=plain, optimizer=optimizer)
        archive = Archive.open(path)
        frame = archive.frame(archive.reader.find(20))
        blocks.append(bytes(frame.read(frame.entry("4.weight"))))
    assert blocks[0] == blocks[1]
