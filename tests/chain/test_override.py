"""Overrides: settings for some of the tensors, recorded, kept, and refused where they fit nothing."""

import pytest
import torch

import inshrink_core
from inshrink_core.chain import Archive
from inshrink_core.chain.config import Override, overridden, parse_overrides
from inshrink_core.checkpoint import TensorRole, TensorSpec
from inshrink_core.codecs.lattice.codec import LatticeCodec
from inshrink_core.errors import ConfigError

SAMPLE = inshrink_core.sample("digits-cnn")
STEPS = inshrink_core.open(SAMPLE).steps[:3]


def spec(name, *shape):
    return TensorSpec(name=name, role=TensorRole.WEIGHT, dtype="float32", shape=shape)


def test_later_overrides_win_and_others_stay():
    overrides = (
        Override(match="head.*", settings={"coarseness": 2.0, "gamma": 1.0}),
        Override(layer_type="linear", settings={"coarseness": 1.0}),
    )
    config = overridden(LatticeCodec(), overrides, spec("head.weight", 8, 8))
    assert (config.coarseness, config.gamma) == (1.0, 1.0)
    assert overridden(LatticeCodec(), overrides, spec("head.bias", 8)).coarseness == 2.0
    assert overridden(LatticeCodec(), overrides, spec("conv.weight", 8, 8, 3, 3)) == LatticeCodec()


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ("head.*", "list of tables"),
        (["head.*"], "is a table"),
        ([{"match": "", "coarseness": 1}], "pattern of parameter names"),
        ([{"match": 3, "coarseness": 1}], "pattern of parameter names"),
        ([{"layer_type": "dense", "coarseness": 1}], "no known layer type"),
        ([{"match": "head.*"}], "sets nothing"),
        ([{"match": "head.*", "bins": 3}], "'bins', which the codec does not have"),
        ([{"match": "head.*", "coarseness": -1}], "out of range"),
    ],
)
def test_an_override_that_says_nothing_sensible_is_refused(entries, message):
    with pytest.raises(ConfigError, match=message):
        parse_overrides(entries, LatticeCodec())


def written(tmp_path, codec, overrides, **settings):
    target = tmp_path / "a.inshrink"
    config = {**settings, "overrides": overrides}
    inshrink_core.compress(SAMPLE, target, codec=codec, config=config, steps=STEPS)
    return Archive.open(target)


def errors(archive):
    """Root of the mean squared error of each weight at the last step."""
    run = inshrink_core.open(SAMPLE)
    restored = archive.checkpoint(archive.reader.head)
    return {
        s.name: float((restored[s.key] - run[STEPS[-1]][s.key]).float().square().mean().sqrt())
        for s in restored.specs
        if s.role is TensorRole.WEIGHT and len(s.shape) > 1
    }


def test_only_the_tensors_that_match_are_coded_otherwise(tmp_path):
    fine = [{"layer_type": "linear", "coarseness": 0.1}]
    plain = errors(written(tmp_path / "plain", "lattice", [], coarseness=4))
    mixed = errors(written(tmp_path / "mixed", "lattice", fine, coarseness=4))
    for name in plain:
        if "conv" in name:
            assert mixed[name] == plain[name]
        else:
            assert mixed[name] < plain[name] / 10


def test_a_weight_can_be_exact_among_others_that_are_not(tmp_path):
    name = "conv2.weight"
    archive = written(tmp_path, "lattice", [{"match": name, "exact": True}])
    assert {key for key, error in errors(archive).items() if error == 0} == {name}


def test_overrides_hold_for_codecs_that_pool_tensors(tmp_path):
    archive = written(tmp_path, "inshrinkerator", [{"layer_type": "convolution", "prune": 0.5}], prune=0.0)
    restored = archive.checkpoint(archive.reader.head)
    convolutions = torch.cat([restored[f"conv{i}.weight"].flatten() for i in (1, 2, 3)])
    assert 0.4 < (convolutions == 0).float().mean() < 0.6
    assert (restored["fc1.weight"] == 0).float().mean() < 0.1


def test_an_archive_goes_on_with_the_overrides_it_was_made_with(tmp_path):
    entries = [{"match": "conv1.*", "coarseness": 0.5}]
    archive = written(tmp_path, "lattice", entries)
    run = inshrink_core.open(SAMPLE)
    inshrink_core.compress(run, tmp_path / "a.inshrink", steps=run.steps[:4])
    meta = [Archive.open(tmp_path / "a.inshrink").frame(frame).meta for frame in archive.reader.frames]
    assert all(record["overrides"] == entries for record in meta)


def test_an_override_that_matches_nothing_is_refused_and_nothing_written(tmp_path):
    with pytest.raises(ConfigError, match=r"no tensor matches the override 'haed\.\*'"):
        written(tmp_path, "lattice", [{"match": "haed.*", "coarseness": 1}])
    assert Archive.open(tmp_path / "a.inshrink").reader.frames == ()
