"""What an archive tells as a chain: places, sizes, lines of training and damage."""

import pytest
import torch
from safetensors.torch import save_file

import inshrink_core
from inshrink_core.chain import Archive
from inshrink_core.chain.report import chain_report, original_checks
from inshrink_core.chain.sizes import archive_size


@pytest.fixture
def archive(tmp_path):
    run = inshrink_core.open(inshrink_core.sample("digits-cnn"))
    target = tmp_path / "digits.inshrink"
    inshrink_core.compress(run, target, codec="lossless", steps=run.steps[:3])
    inshrink_core.compress(run, target, codec="lossless", steps=run.steps[3:4], resumed_from=run.steps[1])
    return target


def test_a_chain_tells_parents_lines_and_the_sizes_of_the_newest(archive):
    opened = Archive.open(archive)
    found, size = chain_report(opened), archive_size(opened)
    steps = [frame.step for frame in found.frames]
    assert [frame.parent_step for frame in found.frames] == [None, steps[0], steps[1], steps[1]]
    assert [frame.on_line for frame in found.frames] == [True, True, False, True]
    assert found.frames[3].restored_step == steps[1]
    assert found.steps == opened.steps
    assert (found.n_branches, found.n_keyframes) == (2, 1)
    assert (found.ratio_total, found.ratio_weights) == (size.ratio_total, size.ratio_weights)
    assert found.nbytes == sum(frame.nbytes for frame in found.frames) + opened.reader.manifest_nbytes
    assert (found.codec, found.optimizer, found.originals) == ("lossless", "exact", "checked")


def test_a_frame_that_cannot_be_read_is_listed_with_its_damage(archive):
    before = chain_report(Archive.open(archive))
    file = archive / Archive.open(archive).reader.frames[1].path
    file.write_bytes(file.read_bytes()[:100])
    found = chain_report(Archive.open(archive))
    # The deltas upon it need it.
    assert [bool(frame.damage) for frame in found.frames] == [False, True, True, True]
    assert found.frames[1].ratio_total is None
    assert found.raw_bytes < before.raw_bytes
    assert found.originals == ""


def test_steps_whose_files_have_no_checksums_are_named(tmp_path):
    (tmp_path / "run").mkdir()
    save_file({"w": torch.ones(4)}, tmp_path / "run" / "step_1.safetensors")
    torch.save({"w": torch.ones(4)}, tmp_path / "run" / "step_2.pt")
    inshrink_core.compress(tmp_path / "run", tmp_path / "a.inshrink")
    found = original_checks(Archive.open(tmp_path / "a.inshrink"))
    assert (found.checked, found.unchecked, found.kinds) == ((2,), (1,), ("safetensors",))
