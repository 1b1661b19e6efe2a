"""What tests of savers have in common: options, folders of trainers, an adapter, an append that fails."""

import json

import pytest
import torch

from inshrink_core.chain import ChainWriter
from inshrink_core.errors import StorageError
from inshrink_core.integrations.ranks import FirstRankSaver
from inshrink_core.training.archiver import Archiver

EXACT = {"codec": "lossless", "optimizer_state": "exact"}


def write_folder(root, step):
    """Write a checkpoint as a trainer does, with a file that is stored as it is."""
    made = root / f"checkpoint-{step}"
    (made / "code").mkdir(parents=True)
    torch.save({"w": torch.full((8, 8), float(step))}, made / "pytorch_model.bin")
    (made / "trainer_state.json").write_text(json.dumps({"global_step": step}))
    (made / "code" / "modeling.py").write_text("print('carried')\n")
    return made


class Adapter(FirstRankSaver):
    def __init__(self, path):
        self._archive_to(path, EXACT)

    def save(self, step):
        files = {"model.pt": {"w": torch.full((8, 8), float(step))}}
        self._attempt(step, lambda saver: saver.save_files(files, step))


def spoil(monkeypatch, *steps, error=StorageError):
    """Make the archiving of some steps fail, by default of all."""
    append = ChainWriter.append

    def spoilt(chain, checkpoint, **options):
        if not steps or checkpoint.step in steps:
            raise error("cannot be encoded")
        return append(chain, checkpoint, **options)

    monkeypatch.setattr(ChainWriter, "append", spoilt)


def leave_in_the_spool(saver, monkeypatch, *steps):
    """Save steps that cannot be archived yet, and close."""
    with monkeypatch.context() as patch:
        spoil(patch)
        patch.setattr(Archiver, "wait_for_room", lambda _: None)
        for step in steps:
            saver.save(step)
        with pytest.raises(StorageError):
            saver.close()
