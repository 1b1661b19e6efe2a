"""Lightning and accelerate with `InshrinkWriter`, as the page on DCP tells, on two processes."""

import inspect
import os
import re
import sys
from pathlib import Path

import pytest
import torch

import inshrink_core
from tests.processes import ran

pytestmark = [pytest.mark.integration, pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(600)]

PAGE = Path(__file__).parents[2] / "docs" / "integrations" / "dcp.md"


def of_page(title, folder, old, new):
    """Write the code of a block of the page, with something changed."""
    block = re.search(rf'```python title="{title}"\n(.*?)```', PAGE.read_text(), re.DOTALL)[1]
    text = "\n".join(line[2:] for line in block.splitlines())
    assert old in text
    (folder / "page.py").write_text(text.replace(old, new))
    return folder / "page.py"


def test_a_callback_of_lightning_archives_fsdp2(tmp_path, on_two_ranks):
    pytest.importorskip("lightning", reason="needs the extra 'lightning': make test-integrations")
    exact = "InshrinkWriter(archive, codec='lossless')"
    page = of_page("lightning_callback.py", tmp_path, "InshrinkWriter(archive)", exact)
    on_two_ranks("tests.integrations.dcp_trainers:with_lightning", tmp_path, page)
    archive = inshrink_core.open(tmp_path / "a")
    assert archive.steps == (2, 4)
    assert [frame.n_parts for frame in archive.frames] == [2, 2]


def test_what_accelerate_has_prepared_goes_back_to_a_step_of_the_archive(tmp_path, on_two_ranks):
    pytest.importorskip("accelerate", reason="needs the extra 'hf': make test-integrations")
    on_two_ranks("tests.integrations.dcp_trainers:with_accelerate", tmp_path)
    assert inshrink_core.open(tmp_path / "a").frames[0].n_parts == 2


@pytest.mark.parametrize("mode", ["disabled", "async"])
def test_a_checkpoint_manager_of_torchtitan_resumes_to_the_same_bits(tmp_path, on_two_ranks, mode):
    pytest.importorskip("torchtitan", reason="needs torchtitan: make test-integrations")
    old = "self.archive, resumed_from"
    page = of_page(
        "inshrink_torchtitan.py",
        tmp_path,
        old,
        f"self.archive, codec='lossless', optimizer='exact', {old[14:]}",
    )
    on_two_ranks("tests.integrations.dcp_titan:main", tmp_path, page, mode)
    archive = inshrink_core.open(tmp_path / "checkpoint.inshrink")
    assert archive.steps == (2, 4, 6, 8)
    assert [frame.n_parts for frame in archive.frames] == [2] * 4
    roles = {(spec.name, spec.role) for spec in archive[8].specs}
    assert ("0.weight", "exp_avg_sq") in roles
    assert ("0.weight", "weight") in roles


def die_once(step, archive):
    """End the process of the second rank at a step, the first time."""
    import os
    from pathlib import Path

    import torch

    died = Path(f"{archive}-died")
    if step == 5 and torch.distributed.get_rank() == 1 and archive.endswith("broken") and not died.exists():
        died.touch()
        os._exit(9)


def test_a_training_of_ray_goes_on_from_the_reported_step_after_a_worker_dies(tmp_path):
    pytest.importorskip("ray.train.torch", reason="needs ray[train]: make test-integrations")
    step = "        optimizer.step()\n"
    page = of_page("ray_training.py", tmp_path, step, f"{step}        die_once(now, config['archive'])\n")
    text = page.read_text()
    text = text.replace(
        "InshrinkWriter(archive,", "InshrinkWriter(archive, codec='lossless', optimizer='exact',"
    )
    page.write_text(f"{text}\n\n{inspect.getsource(die_once)}")
    script = Path(__file__).with_name("dcp_ray.py")
    command = [sys.executable, "-W", "ignore", str(script), str(page), str(tmp_path)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "RAY_USAGE_STATS_ENABLED": "0"}
    done = ran(*command, timeout=500, env=environment)
    assert done.returncode == 0, (done.stdout + done.stderr)[-5000:]
    whole, broken = (inshrink_core.open(tmp_path / name) for name in ("whole", "broken"))
    assert whole.steps == broken.steps == (2, 4, 6)
    assert (tmp_path / "broken-died").exists()
    assert all(torch.equal(whole[6][spec.key], broken[6][spec.key]) for spec in whole[6].specs)
    assert [frame.n_parts for frame in broken.frames] == [2] * 3
