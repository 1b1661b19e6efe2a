"""A run of the Trainer is judged without data: its model is built by transformers and writes its own text."""

import json

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


def test_a_language_model_is_judged_on_what_it_writes(run):
    with AUTO.resolve(run) as judge:
        first, again, other = (judge.evaluate(run[step].state_dict()) for step in (3, 3, 2))
    assert first.log_probs.shape == (128 * 63, 64)
    assert (first.log_probs == again.log_probs).all()
    assert first.restore_cost(again) == 0 < first.restore_cost(other)


def test_two_evaluators_of_a_run_say_the_same(run):
    with AUTO.resolve(run) as one, AUTO.resolve(run) as two:
        assert one.evaluate(run[1].state_dict()).value == two.evaluate(run[1].state_dict()).value
        assert one.setting == two.setting


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
    broken = tmp_path / "run" / "checkpoint-1"
    broken.mkdir(parents=True)
    for path in run.path_of(1).iterdir():
        (broken / path.name).write_bytes(path.read_bytes())
    config = json.loads((broken / "config.json").read_text())
    (broken / "config.json").write_text(json.dumps(config | change))
    with (
        AUTO.resolve(inshrink_core.open(tmp_path / "run")) as judge,
        pytest.raises(EvaluatorError, match=told),
    ):
        judge.evaluate(run[1].state_dict())


def test_code_beside_the_checkpoint_is_never_run(run, tmp_path):
    folder = tmp_path / "run" / "checkpoint-1"
    folder.mkdir(parents=True)
    for path in run.path_of(1).iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    mark = tmp_path / "executed"
    (folder / "modeling_own.py").write_text(f"open({str(mark)!r}, 'w').close()\n")
    config = json.loads((folder / "config.json").read_text())
    config["auto_map"] = {"AutoModelForCausalLM": "modeling_own.Own", "AutoConfig": "modeling_own.Config"}
    (folder / "config.json").write_text(json.dumps(config))
    with AUTO.resolve(inshrink_core.open(tmp_path / "run")) as judge:
        judge.evaluate(run[1].state_dict())
    assert not mark.exists()
