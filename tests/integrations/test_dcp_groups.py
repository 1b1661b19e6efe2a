"""`torch.distributed.checkpoint` where ranks differ in groups, writers and saves, and one is missing."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))  # as the ranks have it

import dcp_groups as groups
from dcp_ranks import on_ranks

from inshrink_core.chain import Archive

pytestmark = [pytest.mark.integration, pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(300)]


def test_saves_do_not_depend_on_what_a_rank_did_without_the_others(tmp_path):
    on_ranks(4, tmp_path, groups.save_among_groups, tmp_path)
    expected = {
        "every": (9, 4),
        "second": (2, 4),
        "behind all": (2, 4),
        "first row": (1, 2),
        **dict.fromkeys(("alone", "alone too"), (2, 1)),
        **dict.fromkeys(("ends", "columns 0", "columns 2", "rows 0", "rows 1", "behind pair"), (2, 2)),
    }
    for name, (n_saves, n_ranks) in expected.items():
        archive = Archive.open(tmp_path / name)
        assert archive.steps == tuple(range(1, n_saves + 1)), name
        assert {frame.n_parts for frame in archive.frames} == {n_ranks}, name
        for step in archive.steps:
            assert torch.equal(archive[step]["w"], groups.VALUES * step), name


def test_an_error_names_the_rank_that_is_missing_and_the_next_save_is_made(tmp_path):
    on_ranks(3, tmp_path, groups.miss_a_rank, tmp_path)
    for name, steps in (("b", (1, 3, 5)), ("c", (2,))):
        assert Archive.open(tmp_path / name).steps == steps, name


def test_the_log_names_a_rank_that_ends_within_an_exchange(tmp_path):
    on_ranks(3, tmp_path, groups.end_within_a_save, tmp_path)
    assert Archive.open(tmp_path / "a").steps == (1,)


def test_a_rank_outside_of_the_process_group_is_refused(tmp_path):
    on_ranks(2, tmp_path, groups.save_outside_of_the_group, tmp_path)
