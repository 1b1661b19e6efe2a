"""Trials in memory against archives on disk: same states, same sizes, nothing changed on the way."""

import dataclasses

import pytest
import torch

from inshrink_core.chain import Archive, ChainConfig, ChainState, look_ahead
from inshrink_core.chain.config import Override
from inshrink_core.chain.defaults import make_chain_config
from inshrink_core.chain.sizes import archive_size
from inshrink_core.checkpoint import MODEL_ROLES, LayerType
from inshrink_core.codec import get_codec
from inshrink_core.errors import ConfigError, EvaluatorError
from inshrink_core.formats import open_run
from inshrink_core.search.bounds import Bounds
from inshrink_core.search.measure import encode_chain, encode_step, following, sample_keys
from inshrink_core.search.search import ChainTrials
from inshrink_core.search.space import space_of, with_settings
from inshrink_core.search.trials import BoundEvaluator, TrialLog, evaluator_digest
from inshrink_core.verbs.compress import compress
from inshrink_core.verbs.estimate import estimate
from tests.builders import memory_checkpoint
from tests.runs import write_run
from tests.search.evaluators import InProcess
from tests.strategies import bits

CODECS = ("lattice", "inshrinkerator", "qd", "lossless", "excp")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return open_run(write_run(tmp_path_factory.mktemp("measure") / "run"))


def base(codec="lattice", **options):
    return ChainConfig(config=get_codec(codec)(), **options)


@pytest.mark.parametrize("codec", CODECS)
def test_a_chain_in_memory_is_bit_for_bit_what_an_archive_decodes_to_and_as_large(run, tmp_path, codec):
    target = tmp_path / "a.inshrink"
    compress(run, target, codec=codec, keyframe_every=3)
    archive = Archive.open(target).sequential()
    chain = base(codec, keyframe_every=3)
    initial = look_ahead(chain, run.steps, run.__getitem__)
    steps = encode_chain(chain, map(run.__getitem__, run.steps), initial=initial)
    frames = archive_size(Archive.open(target)).frames
    for step, encoded, frame in zip(run.steps, steps, frames, strict=True):
        restored, written = encoded.restored(), archive[step]
        assert encoded.weights_nbytes == pytest.approx(frame.weights_nbytes, abs=60)
        assert encoded.raw_weights == frame.raw_weights
        for spec in run[step].specs:
            if spec.role in MODEL_ROLES:
                assert bits(restored[spec.key]) == bits(written[spec.key]), (step, spec.key)


@pytest.mark.parametrize("codec", ["lattice", "inshrinkerator"])
def test_steps_in_order_are_decoded_once_also_where_values_are_not_kept(run, tmp_path, codec, monkeypatch):
    compress(run, tmp_path / "a.inshrink", codec=codec)
    plain = Archive.open(tmp_path / "a.inshrink")
    key = next(spec.key for spec in run[run.steps[0]].specs if spec.role in MODEL_ROLES)
    decoded = []
    decode_entry = Archive._decode_entry

    def counted(self, frame, *rest, **options):
        decoded.append(frame.reader.info.step)
        return decode_entry(self, frame, *rest, **options)

    monkeypatch.setattr(Archive, "_decode_entry", counted)
    for values in (True, False):
        view = plain.sequential(values=values)
        for step in run.steps:
            decoded.clear()
            first = view[step][key]
            assert decoded == [step]
            assert bits(view[step][key]) == bits(first)
            assert bits(first) == bits(plain[step][key])


def test_a_trial_changes_nothing_that_the_next_one_sees(run):
    first = encode_step(base(), run[5], ChainState())
    state, index = following(first, keyframe=False)
    once = encode_step(base(), run[10], state, index)
    encode_step(with_settings(base(), {"coarseness": 9.0}), run[10], state)
    again = encode_step(base(), run[10], state, index)
    assert once.nbytes == again.nbytes
    for key, state in once.references.items():
        assert bits(state.decoded()) == bits(again.references[key].decoded())


LINE = space_of("lattice")


class Asked:
    """Trials of chains of the small run, and the evaluator that is asked."""

    def __init__(self, run, tmp_path, log=None, **options):
        self.evaluator = InProcess(tmp_path, **options)
        self.judge = BoundEvaluator(self.evaluator, run.__getitem__, Bounds(max_drop=0.01))
        self.seen = []
        self.chains = ChainTrials(
            checkpoints=run.__getitem__,
            steps=run.steps,
            base=base(),
            evaluator=self.judge,
            log=log if log is not None else TrialLog(None, "run"),
            initial=look_ahead(base(), run.steps, run.__getitem__),
            progress=self.seen.append,
        )

    def trials(self, coarseness=2.5):
        return self.chains.chain(LINE.settings(coarseness), to_the_end=True).trials


@pytest.fixture
def ask(run, tmp_path):
    """Return a function that makes trials of chains, whose files go with the test."""
    made = []

    def make(*options, **more):
        made.append(Asked(run, tmp_path, *options, **more))
        return made[-1]

    yield make
    for item in made:
        item.judge.close()


def test_trials_of_a_chain_are_those_of_compress_and_compare(run, tmp_path, ask):
    asked = ask()
    target = tmp_path / "a.inshrink"
    compress(run, target, config={"coarseness": 2.5})
    archive = Archive.open(target)
    for trial in asked.trials():
        expected = asked.judge.figures(trial.step, archive[trial.step])
        assert (trial.drop, trial.divergence) == (expected.drop, expected.divergence)
        assert trial.damage is not None


def test_what_is_missing_of_a_chain_is_measured_in_the_same_chain(run, tmp_path, ask):
    full = ask(TrialLog(tmp_path / "whole.jsonl", "run")).trials()
    lines = (tmp_path / "whole.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "part.jsonl").write_text("".join(lines[:1]))
    rest = ask(TrialLog(tmp_path / "part.jsonl", "run"))
    assert [dataclasses.replace(t, seconds=0) for t in rest.trials()] == [
        dataclasses.replace(t, seconds=0) for t in full
    ]
    assert [now.step for now in rest.seen] == list(run.steps[1:])


def test_another_configuration_or_another_start_is_another_trial(run, ask):
    asked = ask()
    fine, coarse = asked.trials(1.0), asked.trials(6.0)
    assert all(item.weights_nbytes > other.weights_nbytes for item, other in zip(fine, coarse, strict=True))
    log = asked.chains.log
    assert len(log.values()) == 2 * len(run.steps)
    later = ask(log)
    later.chains.steps = run.steps[1:]
    later.trials(1.0)
    assert len(log.values()) == 3 * len(run.steps) - 1


def test_another_evaluator_is_another_trial(tmp_path):
    item = InProcess(tmp_path)
    before = evaluator_digest(item)
    item.metric = "accuracy"
    assert evaluator_digest(item) != before
    item.metric = "loss"
    assert evaluator_digest(item) == before
    (tmp_path / "in_process.py").write_text("# another source\n")
    assert evaluator_digest(item) != before


@pytest.fixture
def judging(run, tmp_path):
    evaluator = InProcess(tmp_path)
    with BoundEvaluator(evaluator, run.__getitem__, Bounds(max_drop=0.01)) as judge:
        yield evaluator, judge


def test_an_evaluator_that_changes_its_mind_is_refused_before_anything_is_measured(judging):
    evaluator, judge = judging
    evaluator.judged = lambda loss: loss * (1 + evaluator.asked / 1000)
    with pytest.raises(EvaluatorError, match="is not deterministic"):
        judge.bounds(5)


def test_a_state_whose_metric_is_not_finite_is_a_failure_and_the_original_an_error(run, judging):
    evaluator, judge = judging
    judge.original(5)
    evaluator.judged = lambda loss: float("nan")
    assert "nan" in judge.figures(5, run[5]).failure
    with pytest.raises(EvaluatorError, match="nan"):
        judge.original(10)


def test_a_sample_has_every_layer_type_and_about_its_share():
    tensors = {f"h.{i}.fc.weight": torch.zeros(128, 128) for i in range(20)}
    tensors |= {f"h.{i}.attn.weight": torch.zeros(64, 128) for i in range(20)}
    tensors |= {"wte.weight": torch.zeros(256, 128), "ln.bias": torch.zeros(128)}
    checkpoint = memory_checkpoint(1, tensors)
    keys = sample_keys(checkpoint, 100_000)
    taken = [spec for spec in checkpoint.specs if spec.key in keys]
    assert {spec.layer for spec in taken} == {
        LayerType.LINEAR,
        LayerType.ATTENTION,
        LayerType.EMBEDDING,
        LayerType.VECTOR,
    }
    assert 60_000 < sum(spec.numel for spec in taken) < 180_000
    assert sample_keys(checkpoint, 100_000) == keys
    assert sample_keys(checkpoint, 1 << 30) == {spec.key for spec in checkpoint.specs}


def test_a_sample_without_the_tensors_of_an_override_is_encoded_all_the_same(run):
    config = {"overrides": [{"match": "4.bias", "coarseness": 1.0}]}
    chain = make_chain_config("", "lattice", config, None, 32, "cpu", 1)
    encoded = encode_step(chain, run[5], ChainState(), keys=frozenset({"4.weight"}))
    assert set(encoded.nbytes) == {"4.weight"}
    elsewhere = dataclasses.replace(
        chain, overrides=(Override(match="nowhere", settings={"coarseness": 1.0}),)
    )
    with pytest.raises(ConfigError, match=r"no tensor matches the override 'nowhere'"):
        encode_step(elsewhere, run[5], ChainState())


def test_overrides_of_weights_do_not_stand_in_the_way(run):
    config = {"overrides": [{"layer_type": "linear", "coarseness": 2.0}]}
    assert estimate(run, config=config).ratio_total > 1
