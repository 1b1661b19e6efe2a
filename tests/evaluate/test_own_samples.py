"""``--evaluator auto``: what it is made of, and what is refused before anything runs."""

import importlib.util
import json

import numpy as np
import pytest
import torch

import inshrink_core
from inshrink_core.errors import EvaluatorError, InputError, MissingExtraError
from inshrink_core.evaluate import Evaluator, EvaluatorRequest
from inshrink_core.evaluate.evaluator import Prepared
from tests.builders import evaluation

AUTO = EvaluatorRequest(evaluator="auto")


@pytest.fixture
def run_with(tmp_path):
    """Return a run of one checkpoint whose config.json says what is given."""

    def make(config):
        folder = tmp_path / "run" / "checkpoint-1"
        folder.mkdir(parents=True)
        torch.save({"weight": torch.ones(2, 2)}, folder / "pytorch_model.bin")
        if config is not None:
            (folder / "config.json").write_text(config if isinstance(config, str) else json.dumps(config))
        return inshrink_core.open(tmp_path / "run")

    return make


def test_without_a_configuration_another_evaluator_is_asked_for(run_with):
    with pytest.raises(InputError, match=r"no config\.json.*--evaluator FILE"):
        AUTO.resolve(run_with(None))


@pytest.mark.parametrize("config", [{}, [], {"architectures": []}, {"architectures": ["os.system"]}])
def test_a_configuration_that_names_no_model_is_refused(run_with, config):
    with pytest.raises(InputError, match="names no model of transformers"):
        AUTO.resolve(run_with(config))


@pytest.mark.parametrize("text", ["{", "[" * 100_000, "[" + " " * (1 << 20) + "]"])
def test_a_configuration_that_is_no_json_or_too_large_is_refused(run_with, text):
    with pytest.raises(InputError, match="cannot be read"):
        AUTO.resolve(run_with(text))


def test_without_transformers_the_extra_is_named(run_with, monkeypatch):
    run = run_with({"architectures": ["GPT2LMHeadModel"]})
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match=r"inshrink\[hf\]"):
        AUTO.resolve(run)


def test_it_is_made_from_a_run_alone():
    with pytest.raises(InputError, match="made from a run"):
        AUTO.resolve(None)


def test_what_was_prepared_reaches_the_child_and_goes_with_it(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))

    def write(folder):
        raise InputError("nothing to prepare")

    with pytest.raises(InputError, match="nothing to prepare"):
        Evaluator("auto", prepared=Prepared("", write)).evaluate({"weight": torch.ones(1)})
    assert list(tmp_path.iterdir()) == []


def test_what_cannot_be_made_of_it_is_one_line(tmp_path):
    with pytest.raises(EvaluatorError, match="the evaluator failed") as failure:
        Evaluator("auto", prepared=Prepared("", lambda folder: None)).evaluate({"weight": torch.ones(1)})
    assert "\n" not in str(failure.value)


def test_a_correction_is_a_factor_of_what_a_restore_costs():
    def of(correction, shift):
        rows = torch.log_softmax(torch.tensor([[0.0, shift], [1.0, 0.0]]), -1).numpy().astype(np.float64)
        return evaluation(0.5, log_probs=rows, correction=correction)

    plain, corrected = (of(factor, 0.0).restore_cost(of(factor, 0.2)) for factor in (1.0, 2.0))
    assert corrected == pytest.approx(2 * plain)
    assert plain > 0
