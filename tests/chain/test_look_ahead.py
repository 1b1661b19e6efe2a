"""Which archives begin with a look at the whole run, and that they go on with what was seen."""

import inshrink_core
from inshrink_core.chain import Archive


def memories(path):
    archive = Archive.open(path)
    return [archive.frame(info).meta["memory"] for info in archive.reader.frames]


def test_compress_plans_on_the_whole_run_on_any_number_of_threads(run_path, tmp_path):
    for threads in (1, 3):
        inshrink_core.compress(run_path, tmp_path / f"{threads}", threads=threads)
    found = memories(tmp_path / "1")
    assert found[0]["movement"] > 0
    assert all(memory == found[0] for memory in [*found, *memories(tmp_path / "3")])


def test_steps_that_come_later_and_branches_go_on_with_the_plan(run_path, tmp_path):
    run = inshrink_core.open(run_path)
    inshrink_core.compress(run, tmp_path / "a", steps=run.steps[:2])
    inshrink_core.compress(run, tmp_path / "a")
    inshrink_core.compress(run, tmp_path / "a", resumed_from=run.steps[1])
    found = memories(tmp_path / "a")
    assert len(found) > len(run.steps)
    assert all(memory == found[0] for memory in found)


def test_a_single_step_has_no_course_to_plan_on(run_path, tmp_path):
    run = inshrink_core.open(run_path)
    inshrink_core.compress(run, tmp_path / "a", steps=run.steps[:1])
    assert "movement" not in memories(tmp_path / "a")[0]
    inshrink_core.compress(run, tmp_path / "a")
    assert memories(tmp_path / "a")[1]["movement"] > 0
