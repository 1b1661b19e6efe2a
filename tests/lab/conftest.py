"""Tasks that fine-tune are tested on a model that is hardly pre-trained."""

import pytest

from inshrink_lab.tasks.char_finetune import CharFinetuneTask


@pytest.fixture(autouse=True)
def _hardly_pretrained(monkeypatch):
    monkeypatch.setattr(CharFinetuneTask, "pretraining_steps", 3)
