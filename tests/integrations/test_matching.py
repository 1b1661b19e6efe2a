"""Whose optimizer state it is, with the real libraries: right for every parameter, or nobody's."""

import pytest
import torch

pytest.importorskip("transformers", reason="needs the extra 'hf': make test-integrations")

from inshrink_core.chain import Archive
from inshrink_core.integrations.accelerate import AcceleratorSaver
from inshrink_core.integrations.huggingface import InshrinkCallback
from tests.formats.matching_runs import measure, names_of
from tests.integrations.test_huggingface import model, trainer

pytestmark = [pytest.mark.integration, pytest.mark.filterwarnings("ignore")]

NEEDS = {"lora": "peft", "two-optimizers": "lightning"}
COMPLETE = {"gpt2", "gpt2-frozen", "lora", "two-optimizers"}
"""Kinds of which every parameter is attributed; of the others none is attributed wrong."""


@pytest.mark.parametrize("kind", [*sorted(COMPLETE), "gpt2-reversed"])
def test_state_is_matched_right_or_not_at_all(tmp_path, kind):
    if kind in NEEDS:
        pytest.importorskip(NEEDS[kind], reason=f"needs {NEEDS[kind]}: make test-integrations")
    _, matched = measure(kind, tmp_path)
    assert matched.wrong == 0
    least = 1.0 if kind in COMPLETE else 0.5
    assert matched.right >= least * matched.tensors


def check(archive, optimizer, names):
    """Compare the moments of an archive's last frame with those in memory, by name."""
    last = archive[archive.steps[-1]]
    present = [p for group in optimizer.param_groups for p in group["params"]]
    for name, parameter in zip(names, present, strict=True):
        assert torch.equal(last[f"{name}@exp_avg"], optimizer.state[parameter]["exp_avg"])


def test_a_callback_archives_by_truth(tmp_path):
    net = model()
    training = trainer(
        tmp_path / "out",
        [InshrinkCallback(tmp_path / "a.inshrink", codec="lossless", optimizer_state="exact")],
        net=net,
    )
    training.train()
    archive = Archive.open(tmp_path / "a.inshrink")
    check(archive, training.optimizer.optimizer, names_of(training.optimizer, net))
    assert [spec.name for spec in archive[6].specs][:2] == [n for n, _ in net.named_parameters()][:2]
    assert not any("parameters.json" in file.path for file in archive[6].files)


def test_accelerate_archives_by_truth(tmp_path):
    accelerate = pytest.importorskip("accelerate", reason="needs accelerate: make test-integrations")
    accelerator = accelerate.Accelerator(cpu=True)
    net = model()
    optimizer = torch.optim.AdamW(list(net.parameters())[::-1])
    names = names_of(optimizer, net)
    net, prepared = accelerator.prepare(net, optimizer)
    tokens = torch.randint(0, 64, (4, 8))
    accelerator.backward(net(input_ids=tokens, labels=tokens).loss)
    prepared.step()
    options = {"codec": "lossless", "optimizer_state": "exact"}
    with AcceleratorSaver(accelerator, tmp_path / "a.inshrink", **options) as saver:
        saver.save_state(1)
    check(Archive.open(tmp_path / "a.inshrink"), optimizer, names)
