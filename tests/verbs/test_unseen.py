"""What no reader sees into is said, with its share and its largest files."""

import json
import os

import pytest
import torch
from safetensors.torch import save_file

from inshrink_core.cli import main
from inshrink_core.formats import open_run


@pytest.fixture
def bulky(tmp_path):
    """A run whose folders hold more bytes in files of an unknown layout than in tensors."""
    for step in (1, 2):
        folder = tmp_path / "run" / f"checkpoint-{step}"
        (folder / "state").mkdir(parents=True)
        save_file({"fc.weight": torch.full((64, 64), float(step))}, folder / "model.safetensors")
        for rank, nbytes in enumerate((3 << 20, 2 << 20, 1000)):
            (folder / "state" / f"rank{rank}.bin").write_bytes(os.urandom(nbytes))
    return tmp_path / "run"


LINE = "of the bytes (10.5 MB) are opaque and stored unchanged: state/rank0.bin (3.15 MB), state/rank1"


@pytest.mark.parametrize("verb", ["inspect", "estimate", "compress"])
def test_a_verb_says_what_share_of_the_bytes_it_cannot_see_into(verb, bulky, tmp_path, capsys):
    target = ["-o", str(tmp_path / "a.inshrink")] if verb == "compress" else []
    assert main([verb, str(bulky), *target]) == 0
    assert LINE in " ".join(capsys.readouterr().out.split())
    target = ["-o", str(tmp_path / "b.inshrink")] if verb == "compress" else []
    assert main([verb, str(bulky), *target, "--json"]) == 0
    unseen = json.loads(capsys.readouterr().out)["unseen"]
    outside = sum(p.stat().st_size for p in bulky.glob("checkpoint-*/**/*") if p.is_file()) - 2 * 64 * 64 * 4
    assert unseen["bytes"] == outside
    assert unseen["share"] == pytest.approx(outside / (outside + 2 * 64 * 64 * 4))
    assert unseen["files"][:2] == [
        {"path": "state/rank0.bin", "bytes": 3 << 20},
        {"path": "state/rank1.bin", "bytes": 2 << 20},
    ]


def test_a_run_that_is_all_tensors_says_nothing_of_it(tmp_path):
    torch.save({"model": {"fc.weight": torch.ones(64, 64)}, "step": 1}, tmp_path / "step_1.pt")
    assert open_run(tmp_path).notes == ("steps come from the key 'step'",)
