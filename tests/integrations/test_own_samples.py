"""A run of the Trainer is judged without data: its model is built by transformers and writes its own text."""

import json
import shutil

import pytest
import torch

import inshrink_core
from inshrink_core.errors import EvaluatorError
from inshrink_core.evaluate import EvaluatorRequest

pytestmark = pytest.mark.integration
transformers = pytest.importorskip("transformers", reason="needs the extra 'hf': make test-integrations")

AUTO = EvaluatorRequest(evaluator="auto")


def make_run(folder, model, n_steps=3):
    """Save a model as a Trainer does, a little further each time."""
    for step in range(1, n_steps + 1):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.02 * torch.randn_like(parameter))
        model.save_pretrained(folder / f"checkpoint-{step}")
    return inshrink_core.open(folder)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    torch.manual_seed(0)
    config = transformers.GPT2Config(vocab_size=64, n_positions=96, n_embd=32, n_layer=2, n_head=2)
    return make_run(tmp_path_factory.mktemp("gpt2") / "run", transformers.GPT2LMHeadModel(config))


def test_a_language_model_is_judged_on_what_it_writes_by_any_evaluator_alike(run):
    with AUTO.resolve(run) as judge, AUTO.resolve(run) as another:
        first, again = (one.evaluate(run[3].state_dict()) for one in (judge, another))
        other = judge.evaluate(run[2].state_dict())
        assert judge.setting == another.setting
    assert first.log_probs.shape == (128 * 63, 64)
    assert (first.log_probs == again.log_probs).all()
    assert first.restore_cost(again) == 0 < first.restore_cost(other)


def test_compress_promises_a_restore_cost_without_an_evaluator_of_ones_own(run, tmp_path):
    report = inshrink_core.compress(run, tmp_path / "a.inshrink", evaluator="auto", max_restore_cost=0.003)
    assert report.failure is None
    compared = inshrink_core.compare(tmp_path / "a.inshrink", run, evaluator="auto")
    assert 0 < compared.max_restore_cost <= 0.003


def test_an_image_model_is_judged_on_smooth_noise_and_old_names_are_known(tmp_path):
    torch.manual_seed(0)
    small = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    config = transformers.ViTConfig(image_size=8, patch_size=4, num_channels=1, num_labels=3, **small)
    run = make_run(tmp_path / "run", transformers.ViTForImageClassification(config), 1)
    with AUTO.resolve(run) as judge:
        found = judge.evaluate(run[1].state_dict())
    assert found.log_probs.shape == (128, 3)
    assert found.correction > 1


def changed(run, folder, change):
    """Return the first checkpoint of a run in a folder of its own, with another configuration."""
    shutil.copytree(run.path_of(1), folder / "checkpoint-1")
    path = folder / "checkpoint-1" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    return inshrink_core.open(folder)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"architectures": ["NoSuchModel"]}, "has no model NoSuchModel"),
        ({"architectures": ["AutoConfig"]}, "has no model AutoConfig"),
        ({"n_layer": 10**6}, "n_layer = 1000000"),
        ({"n_embd": 4096}, "describes"),
        ({"architectures": ["GPT2Model"]}, "predicts no classes"),
    ],
)
def test_a_configuration_of_another_model_is_refused(run, tmp_path, change, told):
    broken = changed(run, tmp_path / "run", change)
    with AUTO.resolve(broken) as judge, pytest.raises(EvaluatorError, match=told):
        judge.evaluate(run[1].state_dict())


def test_code_beside_the_checkpoint_is_never_run(run, tmp_path):
    mark = tmp_path / "executed"
    auto = {"AutoModelForCausalLM": "modeling_own.Own", "AutoConfig": "modeling_own.Config"}
    own = changed(run, tmp_path / "run", {"auto_map": auto})
    (own.path_of(1) / "modeling_own.py").write_text(f"open({str(mark)!r}, 'w').close()\n")
    with AUTO.resolve(own) as judge:
        judge.evaluate(run[1].state_dict())
    assert not mark.exists()
