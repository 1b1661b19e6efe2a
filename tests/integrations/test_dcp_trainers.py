"""Lightning and accelerate with `InshrinkWriter`, as the page on DCP tells, on two processes."""

import re
from pathlib import Path

import pytest
import torch

import inshrink_core

pytestmark = [pytest.mark.integration, pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(600)]

SCRIPT = Path(__file__).with_name("dcp_trainers.py")
PAGE = Path(__file__).parents[2] / "docs" / "integrations" / "dcp.md"


def same(path: Path) -> bool:
    expected, found = torch.load(path)
    return expected.keys() == found.keys() and all(torch.equal(expected[n], found[n]) for n in expected)


def test_a_callback_of_lightning_archives_fsdp2(tmp_path, on_two_ranks):
    pytest.importorskip("lightning", reason="needs the extra 'lightning': make test-integrations")
    block = re.search(r'```python title="lightning_callback.py"\n(.*?)```', PAGE.read_text(), re.DOTALL)[1]
    page = tmp_path / "page.py"
    exact = "InshrinkWriter(archive, codec='lossless')"
    page.write_text(
        "\n".join(line[2:] for line in block.splitlines()).replace("InshrinkWriter(archive)", exact)
    )
    on_two_ranks(SCRIPT, "lightning", tmp_path, page)
    archive = inshrink_core.open(tmp_path / "a")
    assert archive.steps == (2, 4)
    assert [frame.n_parts for frame in archive.frames] == [2, 2]
    assert same(tmp_path / "0.pt")
    assert same(tmp_path / "1.pt")


def test_what_accelerate_has_prepared_goes_back_to_a_step_of_the_archive(tmp_path, on_two_ranks):
    pytest.importorskip("accelerate", reason="needs the extra 'hf': make test-integrations")
    on_two_ranks(SCRIPT, "accelerate", tmp_path)
    assert same(tmp_path / "0.pt")
    assert same(tmp_path / "1.pt")
    assert inshrink_core.open(tmp_path / "a").frames[0].n_parts == 2
