"""`torch.distributed.checkpoint` with FSDP2 on gloo: ranks write their parts, and read what they hold."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))  # as the ranks have it

import dcp_ranks as ranks
from dcp_ranks import on_ranks

import inshrink_core
from inshrink_core.chain import Archive

pytestmark = [pytest.mark.integration, pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(300)]


def blocks(path, step):
    """Return the bytes of every block of a step, by key."""
    archive = Archive.open(path)
    frame = archive.frame(archive.reader.find(step))
    return {entry.key: frame.read(entry) for entry in frame.entries if not entry.attachment}


@pytest.fixture(scope="module")
def resharded(tmp_path_factory):
    """An archive that 2, 4, 1 and 2 × 2 ranks have written, one after the other, and what they held."""
    folder = tmp_path_factory.mktemp("resharded")
    archive, load = folder / "a.inshrink", None
    for world, steps, grid in ((2, (1, 2), False), (4, (3, 4), False), (1, (5,), False), (4, (6, 7), True)):
        on_ranks(world, folder, ranks.train, archive, steps, load, grid, folder)
        load = steps[-1]
    return archive, folder


def test_every_number_of_ranks_reads_what_another_wrote_bit_for_bit(resharded, tmp_path):
    archive, kept = resharded
    assert [frame.n_parts for frame in Archive.open(archive).frames] == [2, 2, 4, 4, 1, 4, 4]
    for world in (3, 2, 1):  # ragged shards, too: three rows of the last layer on two ranks
        on_ranks(world, tmp_path, ranks.train, archive, (), 7, False, kept)
    on_ranks(2, tmp_path, ranks.train, archive, (), 2, False, kept)


def test_deltas_survive_another_number_of_ranks(resharded):
    archive, _ = resharded
    kinds = [frame.kind for frame in Archive.open(archive).frames]
    assert kinds == ["keyframe", *["delta"] * 6]
    # Two ranks have the weight's two cells; one rank has them again.
    assert {"0.weight[0:512,0:512]", "0.weight[512:1024,0:512]"} <= blocks(archive, 2).keys() & blocks(
        archive, 5
    ).keys()


def test_every_step_is_restored_as_a_folder_for_any_number_of_ranks(resharded, tmp_path):
    archive, kept = resharded
    inshrink_core.restore(archive, tmp_path / "all", steps=list(range(1, 8)))
    on_ranks(1, tmp_path, ranks.load_folders, tmp_path / "all", kept, tuple(range(1, 8)))
    on_ranks(3, tmp_path, ranks.load_folders, tmp_path / "all", kept, (7,))


def test_what_cannot_be_one_save_is_refused_and_leaves_all_as_it_was(tmp_path):
    on_ranks(2, tmp_path, ranks.differ, tmp_path)
    archive = Archive.open(tmp_path / "a")
    assert archive.steps == (1, 2, 3)
    assert not inshrink_core.verify(tmp_path / "a", deep=True).problems


def test_a_save_on_a_thread_or_in_a_process_is_the_same(tmp_path):
    on_ranks(2, tmp_path, ranks.save_aside, tmp_path)
    for step in (1, 2, 3):
        expected = blocks(tmp_path / "sync", step)
        assert blocks(tmp_path / "thread", step) == expected
        assert blocks(tmp_path / "process", step) == expected
        kept = {key for key in expected if "@" not in key}
        assert blocks(tmp_path / "dropped", step) == {key: expected[key] for key in kept}
    kinds = [frame.kind for frame in Archive.open(tmp_path / "process").frames]
    assert kinds == ["keyframe", "delta", "delta"]


def test_blocks_do_not_depend_on_the_number_of_ranks_where_cells_agree(tmp_path):
    settings = {
        "plain": {"codec": "lattice", "config": {"shaping": "off"}},
        "shaped": {"codec": "lattice"},
        "clustered": {"codec": "inshrinkerator"},
    }
    for world in (1, 2, 4):
        (tmp_path / f"{world}").mkdir()
        on_ranks(world, tmp_path, ranks.save_aligned, tmp_path / f"{world}", settings)
    for name in settings:
        for step in (1, 2, 3):
            expected = blocks(tmp_path / "1" / name, step)
            assert "one.weight[512:1024,0:512]@exp_avg" in expected
            for world in (2, 4):
                assert blocks(tmp_path / f"{world}" / name, step) == expected
    shaped, plain = (blocks(tmp_path / "1" / name, 3) for name in ("shaped", "plain"))
    assert all(shaped[key] != plain[key] for key in shaped if key.endswith("]"))


PARTS, COMMIT = list(ranks.POINTS)[:5], list(ranks.POINTS)[5:9]
KILLS = [*((point, rank) for point in PARTS for rank in (0, 1)), *((point, 0) for point in COMMIT)]
KILLS.remove(("planned", 1))  # rank 0 alone plans


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    folder = tmp_path_factory.mktemp("uninterrupted")
    on_ranks(2, folder, ranks.train_on, folder / "a", 3, folder / "whole.pt")
    return torch.load(folder / "whole.pt")


@pytest.mark.parametrize(("point", "rank"), KILLS)
def test_after_a_kill_training_goes_on_from_the_last_commit_to_the_same_bits(
    tmp_path, uninterrupted, point, rank
):
    archive = tmp_path / "a"
    with pytest.raises(torch.multiprocessing.ProcessExitedException, match="SIGKILL"):
        on_ranks(2, tmp_path, ranks.train_on, archive, 3, tmp_path / "none.pt", (point, rank))
    listed = Archive.open(archive).steps
    assert listed[0] == 1
    assert listed == ((1, 2) if point in COMMIT else (1,)) or "after its part" in point
    on_ranks(2, tmp_path, ranks.train_on, archive, 3, tmp_path / "whole.pt")
    assert ranks.same(torch.load(tmp_path / "whole.pt"), uninterrupted)
    assert Archive.open(archive).steps == (1, 2, 3)
    assert not inshrink_core.verify(archive, deep=True).problems
